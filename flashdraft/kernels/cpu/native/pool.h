/* A few threads that share out the units of one job at a time.
 *
 * Not OpenMP, whose teams wait for every thread at every join: on a machine with anything else to
 * do, one thread that is not running then stalls each of the hundreds of short jobs of a decode
 * step. Here the caller works too, takes whatever nobody has taken, and waits only for units that
 * another thread has really begun.
 */
#ifndef FLASHDRAFT_POOL_H
#define FLASHDRAFT_POOL_H

#include <stddef.h>

/* Does the units from .. to - 1 of a job. */
typedef void (*Work)(const void *job, size_t from, size_t to);

/* Does the units 0 .. units - 1 on at most `threads` threads, the caller's included; returns when
 * all are done. Which thread does which unit is left to chance. */
void run_parallel(Work work, const void *job, size_t units, int threads);

#endif

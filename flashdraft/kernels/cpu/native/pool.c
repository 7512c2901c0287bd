#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MOST_WORKERS 255
#define SPINS 4000 /* about 50 microseconds: longer than the gap between two kernels of a step */

static struct {
    pthread_mutex_t owner; /* held by the caller whose job it is */

    /* The job. Written by the owner while `open` and `inside` are 0. */
    Work work;
    const void *job;
    size_t units;
    int helpers;
    atomic_size_t next;  /* the first unit that nobody has taken */
    atomic_int entered;  /* workers that came for this job */

    atomic_int open;     /* whether workers may enter */
    atomic_int inside;   /* workers that may be reading the job */
    atomic_size_t number; /* of jobs so far: what the workers watch */

    pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
    atomic_int sleeping;
    int workers; /* threads that exist; guarded by `owner` */
} pool = {
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .sleep_lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

static inline void pause_briefly(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb");
#elif defined(__x86_64__)
    __asm__ volatile("pause");
#endif
}

/* Takes units until none are left, in pieces that shrink towards the end. */
static void take_units(void) {
    const size_t units = pool.units, threads = (size_t)pool.helpers + 1;
    size_t from = atomic_load(&pool.next);
    while (from < units) {
        const size_t share = (units - from) / (8 * threads), size = share ? share : 1;
        if (atomic_compare_exchange_weak(&pool.next, &from, from + size)) {
            pool.work(pool.job, from, from + size);
            from = atomic_load(&pool.next);
        }
    }
}

static void wait_for_job(size_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&pool.number) != seen) return;
        pause_briefly();
    }
    pthread_mutex_lock(&pool.sleep_lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.number) == seen) pthread_cond_wait(&pool.wake, &pool.sleep_lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.sleep_lock);
}

static void *worker(void *unused) {
    (void)unused;
    size_t seen = atomic_load(&pool.number);
    for (;;) {
        wait_for_job(seen);
        seen = atomic_load(&pool.number);
        /* NOTE: `inside` goes up before `open` is read, and the owner closes before it reads
         * `inside`: either this worker finds the job closed, or the owner waits for it. */
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open) && atomic_fetch_add(&pool.entered, 1) < pool.helpers)
            take_units();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

/* A child of fork has none of its parent's threads, and perhaps a job that was never finished. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.sleep_lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.open, 0);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.sleeping, 0);
    pool.workers = 0;
}

static void hire(int workers) {
    if (pool.workers == 0) {
        static int registered = 0;
        if (!registered) registered = pthread_atfork(NULL, NULL, forget_workers) == 0;
        if (!registered) return;
    }
    while (pool.workers < workers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0) return; /* the others do its work */
        pthread_detach(thread);
        pool.workers++;
    }
}

void run_parallel(Work work, const void *job, size_t units, int threads) {
    if (threads > MOST_WORKERS + 1) threads = MOST_WORKERS + 1;
    /* While another caller has the pool, this one works alone. */
    if (threads < 2 || units < 2 || pthread_mutex_trylock(&pool.owner) != 0) {
        work(job, 0, units);
        return;
    }
    hire(threads - 1);
    pool.work = work;
    pool.job = job;
    pool.units = units;
    pool.helpers = threads - 1;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.entered, 0);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.number, 1);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.sleep_lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep_lock);
    }
    take_units();
    atomic_store(&pool.open, 0);
    for (int spins = 0; atomic_load(&pool.inside) > 0; spins++)
        spins < SPINS ? pause_briefly() : (void)sched_yield();
    pthread_mutex_unlock(&pool.owner);
}

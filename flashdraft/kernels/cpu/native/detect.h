/* Which levels of the kernels a processor runs; what each may use stands in setup.py. */
#ifndef FLASHDRAFT_DETECT_H
#define FLASHDRAFT_DETECT_H

#include <stddef.h>

#define MOST_LEVELS 8

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

typedef struct {
    const char *name;
    int runs;
} Level;

/* Fills in all levels of the architecture, the slowest first, and returns their number. */
static size_t find_levels(Level *levels);

#if defined(__x86_64__)

static int has_avx_vnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

/* __builtin_cpu_supports asks the operating system too, which must save the wide registers. */
static size_t find_levels(Level *levels) {
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl");
    const int vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    levels[0] = (Level){"sse2", 1};
    levels[1] = (Level){"avx2", avx2};
    levels[2] = (Level){"avxvnni", avx2 && has_avx_vnni()};
    levels[3] = (Level){"avx512", avx512};
    levels[4] = (Level){"avx512vnni", vnni};
    return 5;
}

#elif defined(__aarch64__)

#if defined(__linux__)
static int has_dot_product(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
static int has_int8_matrices(void) { return getauxval(AT_HWCAP2) >> 13 & 1; }
#elif defined(__APPLE__)
static int has(const char *feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, NULL, 0) == 0 && value;
}
static int has_dot_product(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static int has_int8_matrices(void) { return has("hw.optional.arm.FEAT_I8MM"); }
#else
static int has_dot_product(void) { return 0; }
static int has_int8_matrices(void) { return 0; }
#endif

static size_t find_levels(Level *levels) {
    const int dot_product = has_dot_product();
    levels[0] = (Level){"neon", 1};
    levels[1] = (Level){"dotprod", dot_product};
    levels[2] = (Level){"i8mm", dot_product && has_int8_matrices()};
    return 3;
}

#else

static size_t find_levels(Level *levels) {
    levels[0] = (Level){"generic", 1};
    return 1;
}

#endif

#endif

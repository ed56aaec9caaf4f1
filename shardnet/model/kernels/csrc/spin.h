/* Waiting without sleeping. To be included first: sched.h is asked for all that it has. */

#ifndef SHARDNET_SPIN_H
#define SHARDNET_SPIN_H

#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdint.h>
#include <time.h>

#define LOOKS 64 /* about a microsecond of them between two looks at the clock */

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif

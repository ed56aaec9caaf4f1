/* Waiting without sleeping, or hardly. To be included first: sched.h is asked for all that it has. */

#ifndef SHARDNET_SPIN_H
#define SHARDNET_SPIN_H

#if defined(__linux__)
#define _GNU_SOURCE
#endif
#if defined(_WIN32)
#include <windows.h>
#else
#include <sched.h>
#include <time.h>
#endif
#include <stddef.h>
#include <stdint.h>

#define LOOKS 64 /* about a microsecond of them between two looks at the clock */

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(_WIN32)
static inline int64_t now_ns(void) {
    LARGE_INTEGER now, second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&second);
    const int64_t whole = now.QuadPart / second.QuadPart, rest = now.QuadPart % second.QuadPart;
    return whole * 1000000000 + rest * 1000000000 / second.QuadPart;
}

static inline void let_others_run(void) { SwitchToThread(); }

/* Sleeps until the system's next tick, a millisecond or more. */
static inline void nap(int64_t ns) { Sleep((DWORD)((ns + 999999) / 1000000)); }
#else
static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whoever else wants this core gets it. */
static inline void let_others_run(void) { sched_yield(); }

/* Sleeps for less than a second. */
static inline void nap(int64_t ns) {
    const struct timespec time = {0, (long)ns};
    nanosleep(&time, NULL);
}
#endif

#endif

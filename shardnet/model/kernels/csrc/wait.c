/* Waiting for another thread or process without sleeping: see runtime/stage/executor.py.

   A thread that sleeps takes 50 us and more to be back, often longer than a step's whole way through
   Python. */

#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdint.h>
#include <time.h>

#define LOOKS 64 /* about a microsecond of them between two looks at the clock */

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wait until *word is not `seen`, for at most `at_most_ns`. Whoever else wants this core gets it. */
void shardnet_wait(const int64_t *word, int64_t seen, int64_t at_most_ns)
{
    int64_t end = now_ns() + at_most_ns;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen)
                return;
            relax();
        }
        sched_yield();
    } while (now_ns() < end);
}

/* Set a word that another waits for, after all that was written before. */
void shardnet_set(int64_t *word, int64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

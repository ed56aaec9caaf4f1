/* Waiting for another thread or process without sleeping: see runtime/stage/executor.py.

   A thread that sleeps takes 50 us and more to be back, often longer than a step's whole way through
   Python. */

#include "spin.h"

/* Wait until *word is not `seen`, for at most `at_most_ns`. Whoever else wants this core gets it. */
void shardnet_wait(const int64_t *word, int64_t seen, int64_t at_most_ns) {
    const int64_t end = now_ns() + at_most_ns;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return;
            relax();
        }
        let_others_run();
    } while (now_ns() < end);
}

/* Set a word that another waits for, after all that was written before. */
void shardnet_set(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

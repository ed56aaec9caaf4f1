/* Joining rows that shards of one machine have computed, through memory that their processes share.
 *
 * Each shard writes its columns into its own buffer, says so, and copies the others' from theirs. There are two buffers
 * for each shard, used in turns: who writes one for the second time has seen that all shards had written the other,
 * which each does only after it has read the first. So nobody waits for readers.
 *
 * A shard that waits spins at first, as the others are about as far as it is, then sleeps between looks. The memory
 * says who has failed: then nobody waits any longer, and all that is computed is worthless.
 */

#include "spin.h"

#include <stdatomic.h>
#include <string.h>

#include "gather.h"

#define LINE 64       /* bytes of a cache line */
#define ALONE_NS 20000 /* before others are let on to this core: the others are nearly there */
#define NAP_NS 50000  /* between two looks of who sleeps */

/* The beginning of the shared memory. Behind it come two buffers for each shard, of `buffer_bytes` each. */
struct shared {
    _Alignas(LINE) _Atomic int32_t failed; /* 0, or the number from 1 on of the shard that is at fault */
    int32_t size;
    int64_t buffer_bytes; /* a multiple of LINE */
    struct {
        _Alignas(LINE) _Atomic uint32_t n_joined; /* parts that this shard has written */
    } shards[];
};

static char *buffer_of(struct shared *shared, int32_t shard, uint32_t turn) {
    char *first = (char *)&shared->shards[shared->size];
    return first + (shard * 2 + turn % 2) * shared->buffer_bytes;
}

/* Says that `shard` is at fault, unless another one was before. */
void shardnet_fail(void *memory, int32_t shard) {
    struct shared *shared = memory;
    int32_t none = 0;
    atomic_compare_exchange_strong(&shared->failed, &none, shard + 1);
}

/* Whether `shard` has written part number `turn`, once it has. */
static int wait_for(const struct gather *self, struct shared *shared, int32_t shard, uint32_t turn) {
    _Atomic uint32_t *n_joined = &shared->shards[shard].n_joined;
    int64_t start = 0;
    for (;;) {
        for (int look = 0; look < LOOKS; look++) {
            if ((int32_t)(atomic_load_explicit(n_joined, memory_order_acquire) - turn) >= 0) return 1;
            relax();
        }
        if (atomic_load_explicit(&shared->failed, memory_order_relaxed)) return 0;
        const int64_t now = now_ns();
        if (!start) start = now;
        if (now - start > self->deadline_ns) {
            shardnet_fail(shared, shard);
            return 0;
        }
        if (now - start < ALONE_NS) continue;
        if (now - start < self->spin_ns) {
            let_others_run(); /* maybe the one that is waited for */
        } else {
            nap(NAP_NS);
        }
    }
}

static void copy_columns(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t n_rows,
                         int64_t n_bytes) {
    if (to_stride == n_bytes && from_stride == n_bytes) {
        memcpy(to, from, (size_t)(n_rows * n_bytes));
        return;
    }
    for (int64_t row = 0; row < n_rows; row++)
        memcpy(to + row * to_stride, from + row * from_stride, (size_t)n_bytes);
}

/* Joins as many rows as the buffers hold. */
static void join_some(const struct gather *self, const char *part, char *whole, int64_t n_rows, const int64_t *ends,
                      int64_t item) {
    struct shared *shared = self->memory;
    _Atomic uint32_t *n_joined = &shared->shards[self->index].n_joined;
    const uint32_t turn = atomic_load_explicit(n_joined, memory_order_relaxed) + 1;
    const int64_t stride = ends[self->size] * item, own = (ends[self->index + 1] - ends[self->index]) * item;
    memcpy(buffer_of(shared, self->index, turn), part, (size_t)(n_rows * own));
    atomic_store_explicit(n_joined, turn, memory_order_release);
    copy_columns(whole + ends[self->index] * item, stride, part, own, n_rows, own);
    for (int32_t i = 1; i < self->size; i++) { /* the next one first: not all read from the same one */
        const int32_t other = (self->index + i) % self->size;
        const int64_t n_bytes = (ends[other + 1] - ends[other]) * item;
        if (!wait_for(self, shared, other, turn)) return;
        copy_columns(whole + ends[other] * item, stride, buffer_of(shared, other, turn), n_bytes, n_rows, n_bytes);
    }
}

/* The `join` of shards on one machine. Its caller has checked that a row fits into a buffer. */
void shardnet_join(const struct gather *self, const void *part, void *whole, int64_t n_rows, const int64_t *ends,
                   int64_t item) {
    const struct shared *shared = self->memory;
    int64_t widest = 1;
    for (int32_t i = 0; i < self->size; i++)
        if (ends[i + 1] - ends[i] > widest) widest = ends[i + 1] - ends[i];
    const int64_t at_once = shared->buffer_bytes / (widest * item);
    const int64_t own = (ends[self->index + 1] - ends[self->index]) * item, stride = ends[self->size] * item;
    for (int64_t row = 0; row < n_rows; row += at_once) {
        const int64_t n = n_rows - row < at_once ? n_rows - row : at_once;
        join_some(self, (const char *)part + row * own, (char *)whole + row * stride, n, ends, item);
        if (atomic_load_explicit(&((struct shared *)self->memory)->failed, memory_order_relaxed)) return;
    }
}

/* The bytes of shared memory that `size` shards need. It must be zeroed, then prepared by one of them. */
int64_t shardnet_shared_bytes(int32_t size, int64_t buffer_bytes) {
    return (int64_t)sizeof(struct shared) + size * (int64_t)sizeof(((struct shared *)0)->shards[0]) +
           2 * size * buffer_bytes;
}

void shardnet_prepare_shared(void *memory, int32_t size, int64_t buffer_bytes) {
    struct shared *shared = memory;
    shared->size = size;
    shared->buffer_bytes = buffer_bytes;
}

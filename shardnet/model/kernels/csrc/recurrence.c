/* The recurrence of a gated DeltaNet (arXiv 2412.06464) between its linear layers, for the rows of one sequence.
 *
 * That of Mamba-2 (arXiv 2405.21060) is the same with its C for queries, B for keys and x for values, except that the
 * state is not read before it is written, values are weighted by the step, queries and keys keep their lengths, and a
 * part of the values goes past the state.
 *
 * That of KDA (arXiv 2510.26692) is the first with a decay for each column of a key.
 *
 * kernels/recurrence.py makes the struct. Rows are computed one after the other, each in the same order of operations:
 * a row's bits depend on the rows before it, and neither on how many are computed in a call nor on the threads, which
 * have heads of their own. Sums add each column by itself or in PARTS parts, whatever the instruction set.
 *
 * A column of values in a state depends on no other: some of them at a time go through several rows, with one pass
 * over the state for each, which also reads what it holds for the next row's key.
 */

#include "recurrence.h"
#include "vectors.h"

#define UNIT_EPS 1e-6f /* added to the squared length of a query or key */
#define ROWS_AT_ONCE 8 /* pieces are large enough to be worth waking a thread for */
#define WORK_AT_ONCE 65536
#define ROWS_IN_TURN 32 /* that some columns of a state are in the nearest cache for */
#define TILE 8192       /* numbers of these columns */
#define ROWS_AHEAD 32   /* of a state, which are fetched before they are needed */

struct recurrence_steps {
    work_function convolve, recur;
};

INLINE int64_t columns_of(const struct recurrence *call) {
    return 2 * call->n_key_heads * call->key_size + call->n_heads * call->value_size;
}

/* Floats of a row's scratch: its columns, what each head keeps and writes, what each column of a key keeps. */
INLINE int64_t mixed_width(const struct recurrence *call) {
    return columns_of(call) + call->n_heads * (call->by_column ? 2 + call->key_size : 2);
}

enum kind { BY_HEAD, BY_COLUMN, SCAN }; /* what decays by itself, or Mamba-2 */

/* Some columns of a head's state. */
struct columns {
    float *first;
    int64_t stride;
};

/* What a head has of a row. */
struct position {
    const float *query, *key;
    float *values, *kept;
    float decay, write;
};

INLINE struct position position_of(const struct recurrence *call, int64_t head, int64_t row) {
    const int64_t n_shared = call->n_heads / call->n_key_heads, keys = call->n_key_heads * call->key_size;
    const int64_t of_key = (call->takes_turns ? head % call->n_key_heads : head / n_shared) * call->key_size;
    float *mixed = call->mixed + row * mixed_width(call), *decays = mixed + columns_of(call);
    return (struct position){.query = mixed + of_key,
                             .key = mixed + keys + of_key,
                             .values = mixed + 2 * keys + head * call->value_size,
                             .kept = decays + 2 * call->n_heads + head * call->key_size,
                             .decay = decays[head],
                             .write = decays[call->n_heads + head]};
}

/* The number of a row's key that a state is read by before it is decayed. */
INLINE float key_of(const struct position *row, int64_t i, const enum kind kind) {
    return kind == BY_COLUMN ? row->key[i] * row->kept[i] : row->key[i];
}

/* The sum of squares of `n` values, in a fixed order. */
INLINE float squares(const float *values, int64_t n) {
    float sums[PARTS] = {0};
    int64_t i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (int part = 0; part < PARTS; part++) sums[part] += values[i + part] * values[i + part];
    for (int part = 0; i + part < n; part++) sums[part] += values[i + part] * values[i + part];
    for (int step = PARTS / 2; step; step /= 2)
        for (int part = 0; part < step; part++) sums[part] += sums[part + step];
    return sums[0];
}

#define BODY "recurrence_body.h"
#include "each_isa.h"

static const struct recurrence_steps *steps_for(const struct team *team) {
#if defined(__x86_64__)
    if (team->isa == AVX512) return &recurrence_avx512;
    if (team->isa == AVX2) return &recurrence_avx2;
#else
    (void)team;
#endif
    return &recurrence_portable;
}

/* --- called from Python, which has checked everything in the struct. */

void shardnet_recurrence(const struct recurrence *call) {
    const struct recurrence_steps *steps = steps_for(&call->team);
    shardnet_parallel_for(&call->team, steps->convolve, call, call->n_rows, ROWS_AT_ONCE);
    const int64_t piece = WORK_AT_ONCE / (call->n_rows * call->key_size * call->value_size);
    shardnet_parallel_for(&call->team, steps->recur, call, call->n_heads, piece > 0 ? piece : 1);
}

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
 */

#include "doubles.h"
#include "recurrence.h"
#include "vectors.h"

#define UNIT_EPS 1e-6f /* added to the squared length of a query or key */
#define ROWS_AT_ONCE 8 /* pieces are large enough to be worth waking a thread for */
#define WORK_AT_ONCE 65536

struct recurrence_steps {
    work_function convolve, recur;
};

INLINE int64_t columns_of(const struct recurrence *call) {
    return 2 * call->n_key_heads * call->key_size + call->n_heads * call->value_size;
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

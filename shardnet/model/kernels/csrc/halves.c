/* The halves of a decoder layer in one call each, attention and MLP with what stands around them, and whole layers.
 *
 * fused/structs.py makes the structs, fused/sublayers.py says which halves can be computed here. Products are those of products.c; the
 * rest is written once, in halves_body.h, with vectors that the compiler has, and compiled for each instruction set.
 * Numbers are float32 between a row's being read and its being written, and rounded where torch rounds: behind each
 * product, norm, rotation, activation and sum. A row's bits do not depend on the rows beside it nor on the threads.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "products.h"

#if defined(__clang__)
#pragma clang fp contract(fast)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#pragma GCC optimize("fp-contract=fast")
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#define PICK(a, b, ...) __builtin_shuffle(a, b, (quad){__VA_ARGS__})
#endif

#define APART __attribute__((noinline)) /* compiled once, rather than wherever it is called */
#define MAX_HEAD 256                    /* columns of a head */
#define MAX_QUERIES 8                   /* heads of a group that look at keys together */
#define KEYS 128                        /* that are scored before their values are weighed */
#define AHEAD 32                        /* keys that are asked for before they are scored */

typedef uint32_t quad __attribute__((vector_size(16)));

enum activation { SILU = 0, GELU_TANH = 1, RELU = 2 };
enum kind { FLOAT32, BFLOAT16, INT8 }; /* what keys and values are kept as */
enum parts { BEFORE = 1, STORE = 2, ATTEND = 4, AFTER = 8 };

/* RMSNorm. */
struct norm {
    const void *weight; /* NULL: there is none */
    float eps;
    int32_t is_bf16; /* the weight */
};

/* What stands around a half: out = hidden + multiplier * after(half(before(hidden))). */
struct residual {
    struct norm before, after;
    const void *hidden; /* [n_rows, width] */
    void *out;          /* [n_rows, width] */
    void *inner;        /* room for [n_rows, width] */
    int64_t n_rows, width;
    float multiplier;
    int32_t is_bf16; /* all rows, keys and values: else they are float32 */
    struct team team;
};

/* Keys and values [KV heads, capacity, kept_bytes] that a slot keeps in one layer, from position `first` on. As they
 * come, or rounded to int8 as layers/kv_quantization.py does it: a head's columns, then a bfloat16 scale for each group of them. */
struct kept {
    void *keys, *values;
    int64_t first, capacity;
};

/* The rows [start, end) of one slot, `position` the first one's. */
struct span {
    const struct kept *layers;
    int64_t start, end, position;
    int64_t is_chunk; /* somebody else attends over it */
};

struct attention_half {
    struct residual residual;
    struct norm heads; /* [n_heads + n_kv_heads, head_size] */
    struct product *qkv, *output;
    int8_t *room;          /* of the products */
    const void *cos, *sin; /* [n_rows, n_rotated] */
    void *looking;         /* room for [n_rows, n_heads + 2 * n_kv_heads, head_size] */
    void *attended;        /* [n_rows, n_heads, head_size] */
    const struct span *spans;
    int64_t n_spans, layer, n_heads, n_kv_heads, head_size, n_rotated, window;
    int64_t kept_bytes; /* of a key or value in a slot */
    int64_t group;      /* columns that share a scale: a multiple of LANES; 0 where nothing is rounded */
    float scale;
};

struct mlp_half {
    struct residual residual;
    struct product *gate_up, *down;
    int8_t *room;
    void *gated;  /* room for [n_rows, 2 * n_inner] */
    void *active; /* room for [n_rows, n_inner] */
    int64_t n_inner;
    int32_t activation;
};

struct layer {
    struct attention_half *attention;
    struct mlp_half *mlp;
};

INLINE const struct span *span_of(const struct attention_half *half, int64_t row) {
    const struct span *span = half->spans;
    while (row >= span->end) span++;
    return span;
}

/* Where in a row or slot a value is, and the value. */
INLINE char *at(const void *values, int64_t index, int is_bf16) {
    return (char *)(uintptr_t)values + index * (is_bf16 ? 2 : 4);
}

INLINE float number(const void *values, int64_t index, int is_bf16) {
    if (is_bf16) {
        uint16_t bits;
        memcpy(&bits, at(values, index, 1), 2);
        return from_bf16(bits);
    }
    float value;
    memcpy(&value, at(values, index, 0), 4);
    return value;
}

/* Asks memory for the rows [begin, end) of a head's keys or values. */
INLINE void ask_for(const char *rows, int64_t stride, int64_t begin, int64_t end) {
    for (int64_t i = begin * stride; i < end * stride; i += 64) __builtin_prefetch(rows + i);
}

struct steps {
    work_function enter, leave, turn, attend, activate;
};

/* (e^x - 1 - x) / x^2 on half of ln 2 to both sides, by Chebyshev points: two units in the last place for e^x. */
#define C0 0.5f
#define C1 0.16666667f
#define C2 0.041666463f
#define C3 0.008333298f
#define C4 0.0013933688f
#define C5 0.00019899334f

#define TARGET
#define LANES 4
#define NAME(x) x##_portable
#include "halves_body.h"

#if defined(__x86_64__)
#undef TARGET
#undef LANES
#undef NAME
#define LANES 8
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NAME(x) x##_avx2
#include "halves_body.h"

#undef TARGET
#undef LANES
#undef NAME
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define NAME(x) x##_avx512
#include "halves_body.h"
#endif

static const struct steps *steps_for(const struct team *team) {
#if defined(__x86_64__)
    if (team->isa == AVX512) return &steps_avx512;
    if (team->isa == AVX2) return &steps_avx2;
#else
    (void)team;
#endif
    return &steps_portable;
}

static void multiply(struct product *p, const struct residual *residual, int8_t *room, const void *rows, void *out) {
    p->rows = rows;
    p->out = out;
    p->rounded = room;
    p->n_rows = residual->n_rows;
    p->is_bf16 = residual->is_bf16;
    p->team.n_threads = residual->team.n_threads;
    shardnet_multiply(p);
}

/* Rows are shared out in pieces that are worth waking a thread for. */
#define ROWS_AT_ONCE 8
#define WORK_AT_ONCE 65536

static const void *enter(const struct steps *steps, const struct residual *residual) {
    if (!residual->before.weight) return residual->hidden;
    shardnet_share_out(&residual->team, steps->enter, residual, residual->n_rows, ROWS_AT_ONCE);
    return residual->inner;
}

static void leave(const struct steps *steps, const struct residual *residual) {
    shardnet_share_out(&residual->team, steps->leave, residual, residual->n_rows, ROWS_AT_ONCE);
}

static int64_t most_seen(const struct attention_half *half) {
    int64_t most = 1;
    for (int64_t i = 0; i < half->n_spans; i++) {
        const struct span *span = &half->spans[i];
        int64_t seen = span->position + span->end - span->start;
        if (half->window && seen > half->window) seen = half->window;
        if (!span->is_chunk && seen > most) most = seen;
    }
    return most;
}

/* --- what Python calls. Everything in the structs has been checked by the caller. */

void shardnet_attention_half(struct attention_half *half, int32_t parts) {
    const struct residual *residual = &half->residual;
    const struct steps *steps = steps_for(&residual->team);
    if (parts & BEFORE) {
        multiply(half->qkv, residual, half->room, enter(steps, residual), half->looking);
        if (!(parts & STORE)) half->n_spans = 0;
        shardnet_share_out(&residual->team, steps->turn, half, residual->n_rows, ROWS_AT_ONCE);
    }
    if (parts & ATTEND) {
        const int64_t work = most_seen(half) * half->head_size * half->n_heads / half->n_kv_heads;
        const int64_t piece = WORK_AT_ONCE / work;
        shardnet_share_out(&residual->team, steps->attend, half, residual->n_rows * half->n_kv_heads,
                           piece > 0 ? piece : 1);
    }
    if (parts & AFTER) {
        multiply(half->output, residual, half->room, half->attended, residual->inner);
        leave(steps, residual);
    }
}

void shardnet_mlp_half(struct mlp_half *half) {
    const struct residual *residual = &half->residual;
    const struct steps *steps = steps_for(&residual->team);
    multiply(half->gate_up, residual, half->room, enter(steps, residual), half->gated);
    shardnet_share_out(&residual->team, steps->activate, half, residual->n_rows, ROWS_AT_ONCE);
    multiply(half->down, residual, half->room, half->active, residual->inner);
    leave(steps, residual);
}

void shardnet_layers(const struct layer *layers, int64_t n_layers) {
    for (int64_t i = 0; i < n_layers; i++) {
        shardnet_attention_half(layers[i].attention, BEFORE | STORE | ATTEND | AFTER);
        shardnet_mlp_half(layers[i].mlp);
    }
}

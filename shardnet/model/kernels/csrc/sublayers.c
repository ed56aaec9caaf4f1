/* The sub-layers of a decoder layer in one call each, attention and MLP with norms and residual, and whole layers.
 *
 * fused/structs.py makes the structs, fused/sublayers.py decides which sub-layers are computed here. Linear layers are
 * those of linear.c; the rest is written once, in sublayers_body.h, with the compiler's vectors, and compiled for each
 * instruction set. Values are float32 from load to store, and rounded where torch rounds: after each matmul, norm,
 * rotation, activation and sum. A row's bits depend neither on the other rows of the batch nor on the threads.
 */

#include <stddef.h>

#include "gather.h"
#include "vectors.h"

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (quad){__VA_ARGS__})
#endif

#define NOINLINE __attribute__((noinline)) /* compiled once, rather than wherever it is called */
#define MAX_HEAD 576  /* columns of a head */
#define TILE 48       /* queries that are attended together: of consecutive rows and the heads of a group */
#define KEYS 128      /* scored before their values are weighted and summed: a block of positions */
#define GROUP 32      /* keys that are transposed and scored at a time: their columns stay in the first cache */
#define LINE 64       /* bytes of a cache line */

typedef uint32_t quad __attribute__((vector_size(16)));

enum activation { SILU = 0, GELU_TANH = 1, RELU = 2, CLAMPED = 3 };
enum kind { FLOAT32, BFLOAT16, INT8 }; /* how keys and values are stored */
enum function { ACTIVATED = 0, SIGMOID = 1, CAPPED = 2, SOFTMAX = 3, RMS_NORM = 4, LAYER_NORM = 5, ROTATED = 6 };
enum parts { BEFORE = 1, STORE = 2, ATTEND = 4, AFTER = 8 };

/* RMSNorm. */
struct norm {
    const void *weight; /* NULL: there is none */
    float eps;
    int32_t is_bf16; /* the weight */
};

/* Norms and residual of a sub-layer: out = hidden + multiplier * after(sublayer(before(hidden))). */
struct residual {
    struct norm before, after;
    const void *hidden; /* [n_rows, width] */
    void *out;          /* [n_rows, width] */
    void *inner;        /* scratch [n_rows, width] */
    int64_t n_rows, width;
    float multiplier;
    int32_t is_bf16; /* all rows, keys and values: else they are float32 */
    int32_t rounds;  /* float32 that go out to numbers of bfloat16 */
    struct team team;
};

/* Keys and values [KV heads, capacity, row_bytes] of a slot in one layer, from position `first` on: unchanged, or
 * quantised to int8 as in cache/kv_quantization.py: a head's columns, zeros up to whole groups, then a bfloat16 scale
 * for each group. */
struct slot_layer {
    void *keys, *values;
    int64_t first, capacity;
};

/* The rows [start, end) of one slot, `position` the first one's. */
struct span {
    const struct slot_layer *layers;
    int64_t start, end, position;
};

/* Attention of rows over the keys and values in their slots. */
struct attend {
    const void *queries; /* [n_rows, n_heads, head_size], `row_stride` values from row to row */
    void *attended;      /* [n_rows, n_heads, value_size] */
    const float *sinks;  /* [n_heads]: scores without a value, or NULL */
    const struct span *spans;
    int64_t n_spans, layer, row_stride, n_heads, n_kv_heads, head_size;
    int64_t value_size;              /* columns of a value */
    int64_t row_bytes, value_bytes;  /* of one key, one value in a slot */
    int64_t key_columns, value_columns; /* what they have in a slot: with `group`, whole groups */
    int64_t window;                  /* positions that a row attends to, itself among them; 0 is all */
    int64_t group; /* columns that share a scale: a multiple of PARTS; 0 where nothing is quantised */
    struct team team;
    float scale;
    float soft_cap; /* c: a score x becomes c * tanh(x / c); 0 is none */
    int32_t is_bf16;
    int32_t values_are_keys; /* the slots hold no values: they are the keys' columns */
};

/* The columns of a query in a tile: its own, and zeros up to a whole word of any kind. */
static inline int64_t query_columns(const struct attend *call) { return (call->head_size + 3) / 4 * 4; }

struct attention_call {
    struct residual residual;
    struct norm head_norm; /* [n_heads + n_kv_heads, head_size] */
    struct linear *qkv, *output;
    int8_t *scratch;       /* for the linear layers */
    const void *cos, *sin; /* [n_rows, n_rotated] */
    void *projected;       /* queries, keys and values, scratch [n_rows, n_heads + 2 * n_kv_heads, head_size] */
    int64_t n_rotated;
    struct attend attend; /* its queries are those in `projected` */
    struct joined joined; /* around the output */
};

struct mlp_call {
    struct residual residual;
    struct linear *gate_up, *down;
    int8_t *scratch;
    void *projected; /* gate and up, scratch [n_rows, 2 * n_inner] */
    void *activated; /* scratch [n_rows, n_inner] */
    int64_t n_inner;
    struct joined joined; /* around `down` */
    int32_t activation;
    float limit, alpha; /* of CLAMPED: gates are at most `limit`, the others within it; `alpha` is within the sigmoid */
};

#include "experts.h"

struct layer {
    struct attention_call *attention;
    struct mlp_call *mlp;         /* or NULL */
    struct experts_call *experts; /* in its place */
};

INLINE const struct span *span_of(const struct attend *call, int64_t row) {
    const struct span *span = call->spans;
    while (row >= span->end) span++;
    return span;
}

/* The address of a value in a row or slot, and the value. */
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

/* Rows of a span that are attended together. */
INLINE int64_t tile_rows(const struct attend *call) {
    const int64_t rows = TILE * call->n_kv_heads / call->n_heads;
    return rows > 0 ? rows : 1;
}

/* A function of rows that no sub-layer fuses: what `other` and `another` are depends on it. */
struct row_call {
    const void *rows;    /* [n_rows, width], `stride` values from row to row */
    const void *other;   /* a factor, like `rows`, or NULL; LAYER_NORM: bias [width]; ROTATED: cosines [n, n_rotated] */
    const void *another; /* ROTATED: sines */
    void *out;           /* [n_rows, width] */
    struct norm norm;    /* its weight [n_others, width], in turns; its eps also is what CAPPED caps by */
    struct team team;
    int64_t n_rows, width, stride;
    int64_t n_others, n_rotated; /* ROTATED: rows of one position, and their first columns that are rotated */
    int32_t function, activation;
    int32_t is_bf16; /* rows and out: else they are float32 */
};

struct steps {
    work_function normalize, add, rotate, attend, activate, compute, widen, route, gather, combine;
};

#define BODY "sublayers_body.h"
#include "each_isa.h"

static const struct steps *steps_for(const struct team *team) {
#if defined(__x86_64__)
    if (team->isa == AVX512) return &steps_avx512;
    if (team->isa == AVX2) return &steps_avx2;
#else
    (void)team;
#endif
    return &steps_portable;
}

/* Readies a linear layer for `n_rows` rows. */
static void ready(struct linear *p, const struct residual *residual, int64_t n_rows, int8_t *scratch, const void *rows,
                  void *out) {
    p->rows = rows;
    p->out = out;
    p->quantized = scratch;
    p->n_rows = n_rows;
    p->is_bf16 = residual->is_bf16;
    p->team.n_threads = residual->team.n_threads;
}

static void multiply(struct linear *p, const struct residual *residual, int8_t *scratch, const void *rows, void *out) {
    ready(p, residual, residual->n_rows, scratch, rows, out);
    shardnet_linear(p);
}

/* Multiplies rows to `inner`, where they are cut over shards with the others'. */
static void multiply_joined(struct linear *p, const struct residual *residual, int8_t *scratch,
                            const struct joined *joined, const void *rows) {
    const struct gather *gather = joined->gather;
    if (!gather) {
        multiply(p, residual, scratch, rows, residual->inner);
        return;
    }
    const int64_t item = residual->is_bf16 ? 2 : 4;
    gather->join(gather, rows, joined->rows, residual->n_rows, joined->in_ends, item);
    multiply(p, residual, scratch, joined->rows, joined->part);
    gather->join(gather, joined->part, residual->inner, residual->n_rows, joined->out_ends, item);
}

/* Pieces are large enough to be worth waking a thread for. */
#define ROWS_AT_ONCE 8
#define WORK_AT_ONCE 65536
#define ELEMENTS_AT_ONCE 16384

static const void *normalize(const struct steps *steps, const struct residual *residual) {
    if (!residual->before.weight) return residual->hidden;
    shardnet_parallel_for(&residual->team, steps->normalize, residual, residual->n_rows, ROWS_AT_ONCE);
    return residual->inner;
}

static void add_residual(const struct steps *steps, const struct residual *residual) {
    shardnet_parallel_for(&residual->team, steps->add, residual, residual->n_rows, ROWS_AT_ONCE);
}

/* Attends in tiles, each of some rows of a span and one KV head. */
static void attend(const struct attend *call) {
    const int64_t rows = tile_rows(call);
    int64_t n_tiles = 0, work = 1;
    for (int64_t i = 0; i < call->n_spans; i++) {
        const struct span *span = &call->spans[i];
        int64_t seen = span->position + span->end - span->start;
        if (call->window && seen > call->window) seen = call->window;
        const int64_t n_rows = span->end - span->start < rows ? span->end - span->start : rows;
        const int64_t own = seen * n_rows * call->head_size * call->n_heads / call->n_kv_heads;
        if (own > work) work = own;
        n_tiles += (span->end - span->start + rows - 1) / rows;
    }
    const int64_t piece = WORK_AT_ONCE / work;
    shardnet_parallel_for(&call->team, steps_for(&call->team)->attend, call, n_tiles * call->n_kv_heads,
                          piece > 0 ? piece : 1);
}

/* --- experts */

static void route(const struct steps *steps, const struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    struct residual own = *residual;
    const void *rows = call->rows;
    if (call->router.is_wide && residual->is_bf16) {
        shardnet_parallel_for(&residual->team, steps->widen, call, residual->n_rows, ROWS_AT_ONCE);
        own.is_bf16 = 0;
        rows = call->wide;
    }
    multiply(call->router.gate, &own, call->mlp.scratch, rows, call->narrow);
    shardnet_parallel_for(&residual->team, steps->route, call, residual->n_rows, ROWS_AT_ONCE);
}

/* Sorts visits by expert, those of one by row. */
static void sort_visits(const struct experts_call *call) {
    const int64_t n = call->mlp.residual.n_rows * call->router.top_k, n_experts = call->router.n_experts;
    int64_t *starts = call->starts;
    memset(starts, 0, (size_t)(n_experts + 1) * sizeof *starts);
    for (int64_t visit = 0; visit < n; visit++) starts[call->chosen[visit] + 1]++;
    for (int64_t e = 0; e < n_experts; e++) starts[e + 1] += starts[e];
    for (int64_t visit = 0; visit < n; visit++) {
        const int64_t place = starts[call->chosen[visit]]++;
        call->visits[place] = visit;
        call->places[visit] = place;
    }
    memmove(starts + 1, starts, (size_t)n_experts * sizeof *starts);
    starts[0] = 0;
}

/* Multiplies rows of the visits of the experts [begin, end), all at once: by gate and up, or by down. */
static void multiply_visits(const struct experts_call *call, int64_t begin, int64_t end, int is_down) {
    const struct residual *residual = &call->mlp.residual;
    const int64_t first = call->starts[begin], width = residual->width, n_inner = call->mlp.n_inner;
    int64_t n = 0;
    for (int64_t e = begin; e < end; e++) {
        const int64_t place = call->starts[e], own = place - first, n_rows = call->starts[e + 1] - place;
        if (!n_rows) continue;
        struct linear *p = is_down ? call->experts[e].down : call->experts[e].gate_up;
        const void *rows = is_down ? at(call->mlp.activated, own * n_inner, residual->is_bf16)
                                   : at(call->gathered, own * width, residual->is_bf16);
        void *out = is_down ? at(call->outputs, place * width, residual->is_bf16)
                            : at(call->mlp.projected, 2 * own * n_inner, residual->is_bf16);
        ready(p, residual, n_rows, call->mlp.scratch + own * call->row_bytes, rows, out);
        call->products[n++] = p;
    }
    if (n) shardnet_linears(call->products, n);
}

/* Runs the experts, as many together as have at most `n_at_once` visits. */
static void visit_experts(const struct steps *steps, const struct experts_call *call) {
    const struct team *team = &call->mlp.residual.team;
    const int64_t n_experts = call->router.n_experts, *starts = call->starts;
    for (int64_t begin = 0, end; begin < n_experts; begin = end) {
        for (end = begin + 1; end < n_experts && starts[end + 1] - starts[begin] <= call->n_at_once;) end++;
        const struct visits some = {.call = call, .begin = starts[begin]};
        const int64_t n = starts[end] - starts[begin];
        shardnet_parallel_for(team, steps->gather, &some, n, ROWS_AT_ONCE);
        multiply_visits(call, begin, end, 0);
        shardnet_parallel_for(team, steps->activate, &call->mlp, n, ROWS_AT_ONCE);
        multiply_visits(call, begin, end, 1);
    }
}

/* Runs the expert that all rows visit, an MLP with the activation of the others. */
static void visit_shared(const struct steps *steps, const struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    struct mlp_call own = call->mlp;
    own.n_inner = call->n_shared_inner;
    multiply(call->shared.gate_up, residual, own.scratch, call->rows, own.projected);
    shardnet_parallel_for(&residual->team, steps->activate, &own, residual->n_rows, ROWS_AT_ONCE);
    multiply(call->shared.down, residual, own.scratch, own.activated, call->shared_out);
    if (call->shared_gate) multiply(call->shared_gate, residual, own.scratch, call->rows, call->shared_gates);
}

/* --- called from Python, which has checked everything in the structs. */

void shardnet_attention(struct attention_call *call, int32_t parts) {
    const struct residual *residual = &call->residual;
    const struct steps *steps = steps_for(&residual->team);
    if (parts & BEFORE) {
        multiply(call->qkv, residual, call->scratch, normalize(steps, residual), call->projected);
        if (!(parts & STORE)) call->attend.n_spans = 0;
        shardnet_parallel_for(&residual->team, steps->rotate, call, residual->n_rows, ROWS_AT_ONCE);
    }
    if (parts & ATTEND) {
        call->attend.is_bf16 = residual->is_bf16;
        call->attend.team = residual->team;
        attend(&call->attend);
    }
    if (parts & AFTER) {
        multiply_joined(call->output, residual, call->scratch, &call->joined, call->attend.attended);
        add_residual(steps, residual);
    }
}

void shardnet_attend(const struct attend *call) { attend(call); }

void shardnet_mlp(struct mlp_call *call) {
    const struct residual *residual = &call->residual;
    const struct steps *steps = steps_for(&residual->team);
    multiply(call->gate_up, residual, call->scratch, normalize(steps, residual), call->projected);
    shardnet_parallel_for(&residual->team, steps->activate, call, residual->n_rows, ROWS_AT_ONCE);
    multiply_joined(call->down, residual, call->scratch, &call->joined, call->activated);
    add_residual(steps, residual);
}

void shardnet_experts(struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    const struct steps *steps = steps_for(&residual->team);
    call->rows = normalize(steps, residual);
    route(steps, call);
    sort_visits(call);
    visit_experts(steps, call);
    if (call->shared.down) visit_shared(steps, call);
    shardnet_parallel_for(&residual->team, steps->combine, call, residual->n_rows, ROWS_AT_ONCE);
    add_residual(steps, residual);
}

void shardnet_rows(const struct row_call *call) {
    const int64_t piece = ELEMENTS_AT_ONCE / (call->width ? call->width : 1);
    shardnet_parallel_for(&call->team, steps_for(&call->team)->compute, call, call->n_rows, piece > 0 ? piece : 1);
}

void shardnet_layers(const struct layer *layers, int64_t n_layers) {
    for (int64_t i = 0; i < n_layers; i++) {
        shardnet_attention(layers[i].attention, BEFORE | STORE | ATTEND | AFTER);
        if (layers[i].mlp)
            shardnet_mlp(layers[i].mlp);
        else
            shardnet_experts(layers[i].experts);
    }
}

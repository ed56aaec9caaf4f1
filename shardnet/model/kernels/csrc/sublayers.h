/* The structs of sub-layers and what their files share. fused/structs.py and others mirror the structs. */

#ifndef SHARDNET_SUBLAYERS_H
#define SHARDNET_SUBLAYERS_H

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
#define BLOCK 256      /* positions of a block of the KV cache */
#define CHUNKS (1LL << 31) /* see the window of struct attend */
#define GROUP 32      /* keys that are transposed and scored at a time: their columns stay in the first cache */
#define LINE 64       /* bytes of a cache line */

typedef uint32_t quad __attribute__((vector_size(16)));

enum activation { SILU = 0, GELU_TANH = 1, RELU = 2, CLAMPED = 3 };
enum kind { FLOAT32, BFLOAT16, INT8 }; /* how keys and values are stored */
enum function { ACTIVATED = 0, SIGMOID = 1, CAPPED = 2, SOFTMAX = 3, RMS_NORM = 4, LAYER_NORM = 5, ROTATED = 6, SOFTPLUS = 7 };
enum parts { BEFORE = 1, STORE = 2, ATTEND = 4, AFTER = 8 };

/* RMSNorm. */
struct norm {
    const void *weight; /* NULL: there is none */
    float eps;
    int32_t is_bf16; /* the weight */
};

enum stream_kind { BALANCED = 0, APART = 1, GATED = 2 };

/* Several residual streams around a sub-layer: see layers/streams.py. */
struct streams {
    struct linear *project; /* float32 rows to factors; GATED: to a low rank, from which `up` makes gates */
    struct linear *up, *inject;
    const float *base, *scale; /* [n_inner], one for each kind of factor */
    struct norm norm;          /* GATED: its weight [count, width] */
    int8_t *scratch;           /* for the linear layers */
    void *normed;              /* scratch [n_rows, count, width]: float32; GATED: as rows */
    void *inner;               /* scratch [n_rows, n_inner]: what `project` gives, of the same type */
    void *gates, *shares;      /* GATED: scratch [n_rows, count, width], and what `inject` gives [n_rows, count] */
    float *mixes;              /* [n_rows, count * (count + 2)]: before, behind and across, from the join on */
    const float *given;        /* [n_rows, count]: in the place of those before, which are another sub-layer's; or NULL */
    int64_t count, n_inner;    /* 0: there is one stream */
    int64_t row_bytes;         /* of `scratch`, for each row */
    float eps, magnitude;
    int32_t kind, n_rounds;
};

/* Norms and residual of a sub-layer: out = hidden + multiplier * after(sublayer(before(hidden))). */
struct residual {
    struct norm before, after;
    struct streams streams;
    const void *hidden; /* [n_rows, width], of each stream */
    void *out;          /* as `hidden` */
    void *inner;        /* scratch [n_rows, width] */
    int64_t n_rows, width;
    float multiplier;
    int32_t is_bf16; /* all rows: else they are float32 */
    int32_t rounds;  /* float32 that go out to numbers of bfloat16 */
    struct team team;
};

/* Keys and values [KV heads, BLOCK, row_bytes] of a block that several slots share. */
struct kv_block {
    void *keys, *values;
};

/* Keys and values [KV heads, capacity, row_bytes] of a slot in one layer, from position `first` on: unchanged, or
 * quantised to int8 as in cache/kv_quantization.py: a head's columns, zeros up to whole groups, then a bfloat16 scale
 * for each group. Positions before are in blocks that it shares. */
struct slot_layer {
    void *keys, *values;
    int64_t first, capacity;
    const struct kv_block *shared;
};

/* The rows [start, end) of one slot, `position` the first one's. Rows that see each other attend up to the last one. */
struct span {
    const struct slot_layer *layers;
    int64_t start, end, position, see_each_other;
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
    int64_t window;                  /* positions that a row attends to, itself among them; 0 is all; or CHUNKS + a chunk's */
    int64_t group; /* columns that share a scale: a multiple of PARTS; 0 where nothing is quantised */
    struct team team;
    float scale;
    float soft_cap; /* c: a score x becomes c * tanh(x / c); 0 is none */
    int32_t is_bf16;         /* queries and outputs */
    int32_t kv_is_bf16;      /* keys and values in their slots, where nothing is quantised */
    int32_t values_are_keys; /* the slots hold no values: they are the keys' columns */
    int32_t is_causal;       /* rows that see each other do not in this layer */
};

/* The first position that a row attends to. */
INLINE int64_t first_seen(int64_t window, int64_t position) {
    if (window > CHUNKS) return position - position % (window - CHUNKS);
    return window && position >= window ? position - window + 1 : 0;
}

/* Rows of a slot's layer: keys and values from a block's or the slot's first one on, and the number of one of them. */
struct place {
    const char *keys, *values;
    int64_t row;
};

INLINE struct place place_of(const struct slot_layer *stored, int64_t kv_head, int64_t position) {
    if (stored->shared && position < stored->first) {
        const struct kv_block *held = &stored->shared[position / BLOCK];
        return (struct place){held->keys, held->values, kv_head * BLOCK + position % BLOCK};
    }
    return (struct place){stored->keys, stored->values, kv_head * stored->capacity + position - stored->first};
}

#define CHUNK 1024     /* positions that are scored by one thread: whole blocks of KEYS */
#define CHOSEN_ROWS 16 /* whose chosen keys are together in one place at a time */

/* The positions that rows attend to, where they choose some: those with the `n_chosen` largest scores, of equal ones
 * the first, and all where there are no more. What is scored may be entries of `n_pooled` positions each: a row sees
 * those of which it sees all positions. Where there are `blocks` of `block_size` entries each, a row has chosen among
 * these, unless its first is -1; or with `makes_blocks` it also chooses them: the `n_blocks` with the best entries, and
 * always the last one that it sees. */
struct choice {
    struct attend index; /* scores positions by the slots' values, with one KV head; attends to nothing */
    struct attend attend;
    const float *weights; /* [n_rows, heads of the index] */
    int32_t *chosen;      /* [n_rows, n_chosen]: ascending, -1 behind the last */
    float *scores;        /* scratch [CHOSEN_ROWS, stride] */
    char *keys, *values;  /* scratch [CHOSEN_ROWS, n_kv_heads, n_chosen], rows of the slots */
    int64_t n_rows, n_chosen, n_pooled;
    int64_t stride; /* as many positions, or entries, as any row sees, in whole chunks */
    int64_t first_row, end_row; /* of those that are scored or gathered together */
    int32_t *blocks;            /* [n_rows, n_blocks]: ascending, -1 behind the last; all -1 where a row sees no more */
    int64_t n_blocks, block_size, makes_blocks;
};

/* Outputs of some queries: of a block so far, and of all blocks before, with the factors by which they are joined.
 * What is added may be the first of the block, and the last. */
struct outputs {
    float (*added)[MAX_HEAD], (*totals)[MAX_HEAD];
    const float *less, *own;
    int32_t is_first, is_last;
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
    void *with_gates;      /* the same and gates, scratch; NULL: there are no gates */
    void *gates;           /* scratch [n_rows, n_heads, gate_columns], of what attention gives */
    int64_t n_rotated;
    int64_t gate_columns; /* head_size, or 1 for a whole head */
    int64_t gates_behind; /* gates follow all values, else each query is followed by its own */
    int64_t gates_soft;   /* outputs are multiplied by the softpluses of gates, else by their sigmoids */
    struct attend attend; /* its queries are those in `projected` */
    struct joined qkv_joined;
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
    float limit, alpha, added; /* of CLAMPED: gates are at most `limit`, the others within it; `alpha` is within the
                                * sigmoid, and `added` to the others */
};

struct layer {
    struct attention_call *attention; /* or NULL */
    struct mlp_call *mlp;         /* or NULL */
    struct experts_call *experts; /* in its place */
    struct delta_call *delta;     /* in place of attention */
};

INLINE const struct span *span_of(const struct attend *call, int64_t row) {
    const struct span *span = call->spans;
    while (row >= span->end) span++;
    return span;
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
    work_function normalize, add, rotate, attend, activate, compute;
    work_function widen, route, gather, combine; /* of experts */
    work_function part_gates, open_gates, score_positions; /* of attention */
    work_function norm_streams, soften, join_streams, share_streams;       /* of residual streams */
};

const struct steps *shardnet_steps_for(const struct team *team);

/* Pieces are large enough to be worth waking a thread for. */
#define ROWS_AT_ONCE 8
#define WORK_AT_ONCE 65536
#define ELEMENTS_AT_ONCE 16384
#define PIECE_ROWS 64 /* of rows whose parts travel while others are multiplied, at the least */
#define MOST_PIECES 4

/* Readies a linear layer for `n_rows` rows. */
INLINE void ready(struct linear *p, const struct residual *residual, int64_t n_rows, int8_t *scratch, const void *rows,
                  void *out) {
    p->rows = rows;
    p->out = out;
    p->quantized = scratch;
    p->n_rows = n_rows;
    p->is_bf16 = residual->is_bf16;
    p->team.n_threads = residual->team.n_threads;
}

INLINE void multiply(struct linear *p, const struct residual *residual, int8_t *scratch, const void *rows, void *out) {
    ready(p, residual, residual->n_rows, scratch, rows, out);
    shardnet_linear(p);
}

/* Joins the columns of `n_rows` rows with those of the other shards. Returns where all are: `part` itself where `ends`
 * is NULL, and nothing is cut. */
INLINE const void *join(const struct joined *joined, const int64_t *ends, const void *part, void *whole,
                        int64_t n_rows, int is_bf16) {
    if (!ends) return part;
    joined->gather->join(joined->gather, part, whole, n_rows, ends, is_bf16 ? 2 : 4);
    return whole;
}

/* Rows in pieces, whose parts travel between shards while other pieces are multiplied: all at once where nothing
 * travels, or they are few. */
struct pieces {
    const struct joined *joined;
    const struct residual *residual;
    int64_t n, n_begun;         /* pieces; joins that have begun */
    int64_t begun[MOST_PIECES]; /* for each piece: how many had when its inputs had */
};

INLINE struct pieces pieces_of(const struct joined *joined, const struct residual *residual) {
    int64_t n = joined->gather && joined->gather->post ? residual->n_rows / PIECE_ROWS : 1;
    n = n > MOST_PIECES ? MOST_PIECES : n > 1 ? n : 1;
    return (struct pieces){.joined = joined, .residual = residual, .n = n};
}

INLINE int64_t first_row(const struct pieces *pieces, int64_t i) { return pieces->residual->n_rows * i / pieces->n; }

INLINE void begin_join(struct pieces *pieces, const int64_t *ends, const void *part, void *whole, int64_t n_rows) {
    const struct gather *gather = pieces->joined->gather;
    const int64_t item = pieces->residual->is_bf16 ? 2 : 4;
    if (pieces->n == 1) {
        gather->join(gather, part, whole, n_rows, ends, item);
        return;
    }
    gather->post(gather, part, whole, n_rows, ends, item);
    pieces->n_begun++;
}

/* Lets the inputs of piece `i` of `rows` [n_rows, own inputs] travel. */
INLINE void begin_piece(struct pieces *pieces, int64_t i, const void *rows) {
    const struct joined *joined = pieces->joined;
    const int64_t *ends = joined->in_ends, first = first_row(pieces, i), n = first_row(pieces, i + 1) - first;
    const int is_bf16 = pieces->residual->is_bf16;
    if (ends) {
        const int32_t index = joined->gather->index;
        begin_join(pieces, ends, at(rows, first * (ends[index + 1] - ends[index]), is_bf16),
                   at(joined->rows, first * ends[joined->gather->size], is_bf16), n);
    }
    pieces->begun[i] = pieces->n_begun;
}

/* Multiplies piece `i` of rows once its inputs are there, and lets its outputs travel to `out`. */
INLINE void multiply_piece(struct pieces *pieces, int64_t i, struct linear *p, int8_t *scratch, const void *rows,
                           void *out) {
    const struct joined *joined = pieces->joined;
    const int64_t first = first_row(pieces, i), n = first_row(pieces, i + 1) - first;
    const int is_bf16 = pieces->residual->is_bf16;
    if (pieces->n > 1) joined->gather->await(joined->gather, pieces->n_begun - pieces->begun[i]);
    const void *inputs = at(joined->in_ends ? joined->rows : rows, first * p->n_in, is_bf16);
    void *part = at(joined->out_ends ? joined->part : out, first * p->width, is_bf16);
    ready(p, pieces->residual, n, scratch, inputs, part);
    shardnet_linear(p);
    if (!joined->out_ends) return;
    const int64_t all = joined->out_ends[joined->gather->size];
    begin_join(pieces, joined->out_ends, part, at(out, first * all, is_bf16), n);
}

INLINE void end_pieces(const struct pieces *pieces) {
    if (pieces->n > 1) pieces->joined->gather->await(pieces->joined->gather, 0);
}

/* Multiplies rows, where they or the outputs are cut over shards with the others'. */
INLINE void multiply_joined(struct linear *p, const struct residual *residual, int8_t *scratch,
                            const struct joined *joined, const void *rows, void *out) {
    struct pieces pieces = pieces_of(joined, residual);
    for (int64_t i = 0; i < pieces.n; i++) begin_piece(&pieces, i, rows);
    for (int64_t i = 0; i < pieces.n; i++) multiply_piece(&pieces, i, p, scratch, rows, out);
    end_pieces(&pieces);
}

/* Joins the streams of rows, in `inner`. */
void shardnet_join_streams(const struct residual *residual);

/* Joins streams and applies the norm before a sub-layer, if there are any. Returns where its rows are. */
INLINE const void *normalize(const struct steps *steps, const struct residual *residual) {
    if (residual->streams.count) shardnet_join_streams(residual);
    if (!residual->before.weight) return residual->streams.count ? residual->inner : residual->hidden;
    shardnet_parallel_for(&residual->team, steps->normalize, residual, residual->n_rows, ROWS_AT_ONCE);
    return residual->inner;
}

INLINE void add_residual(const struct steps *steps, const struct residual *residual) {
    const work_function add = residual->streams.count ? steps->share_streams : steps->add;
    shardnet_parallel_for(&residual->team, add, residual, residual->n_rows, ROWS_AT_ONCE);
}

void shardnet_experts(struct experts_call *call);
void shardnet_delta_net(struct delta_call *call);

#endif

/* A tile: a few rows times one panel of weights, or two consecutive panels. config/panel_form.py describes panels. */

#ifndef SHARDNET_TILES_H
#define SHARDNET_TILES_H

#include "linear.h"

#define MAX_TILE 8 /* rows of a tile */
#define AHEAD 4096 /* bytes that weights are prefetched ahead: a page */

/* sums[panel][row][output] of the rows from `row` on; `w` is where the first panel begins. */
typedef void (*tile_function)(const struct linear *p, const uint8_t *w, int64_t row, int n_rows,
                              float sums[2][MAX_TILE][PANEL]);

/* The tile functions of an instruction set for one kind of weights. */
struct tiles {
    tile_function one, two; /* `two` may be NULL */
};

#define MANY_ROWS 16  /* from which on a panel's codes are unpacked for them */
#define MOST_ROWS 256 /* that they are unpacked for at a time */
#define TILE_ROWS 32  /* that AMX multiplies by pairs of bfloat16 at once */

/* sums[row][output] of one panel and up to MOST_ROWS rows from `row` on, which begin a tile: adds to what is there, and
 * may add to the three rows behind them. */
typedef void (*many_function)(const struct linear *p, const uint8_t *w, int64_t row, int n_rows, float (*sums)[PANEL]);

/* For Windows by Clang alone: in GCC's header strides are long, of 32 bits there. */
#if defined(__x86_64__) && (defined(__linux__) || (defined(_WIN32) && defined(__clang__))) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define SHARDNET_HAS_AMX /* in the compiler */
#endif

#if defined(__x86_64__)
many_function shardnet_avx2_many(const struct linear *p); /* NULL where tiles are as fast */
many_function shardnet_amx_many(const struct linear *p);
void shardnet_amx_pairs(const struct linear *p, const uint8_t *w, int n_panels, int64_t row, int n_rows,
                        float sums[2][TILE_ROWS][PANEL]);
int32_t shardnet_may_use_tiles(void);
struct tiles shardnet_avx2_tiles(const struct linear *p); /* in files of their own, to be compiled side by side */
struct tiles shardnet_avx512_tiles(const struct linear *p);
#endif

INLINE int64_t blocks_of_panel(const struct linear *p) { return (p->n_in + p->form.block - 1) / p->form.block; }

/* Inputs of a row as it is laid out in scratch memory: padded with zeros. */
INLINE int64_t padded_inputs(const struct linear *p) {
    return p->form.bits == 16 ? (p->n_in + 1) / 2 * 2 : blocks_of_panel(p) * p->form.block;
}

INLINE int64_t bytes_of_panel(const struct linear *p) {
    if (p->form.bits == 16) return padded_inputs(p) / 2 * QUAD_BYTES;
    return blocks_of_panel(p) * p->form.block_bytes;
}

/* Where a tile's rows lie: float32 [inputs][rows of the tile], or bfloat16 [pairs of inputs][rows of the tile][2]. */
INLINE const float *floats_of(const struct linear *p, int64_t row) {
    return (const float *)p->quantized + row * padded_inputs(p);
}

INLINE const uint16_t *pairs_of(const struct linear *p, int64_t row) {
    return (const uint16_t *)p->quantized + row * padded_inputs(p);
}

/* Where a tile's quantised rows lie: [quads of inputs][rows of the tile][4]. */
INLINE const int8_t *quads_of(const struct linear *p, int64_t row) { return p->quantized + row * padded_inputs(p); }

/* The input of a row that input `i` of the weights belongs to. */
INLINE int64_t input_of(const struct linear *p, int64_t i) { return p->order ? p->order[i] : i; }

INLINE float number_of(const struct linear *p, int64_t row, int64_t i) {
    const int64_t at = row * p->n_in + input_of(p, i);
    return p->is_bf16 ? from_bf16(((const uint16_t *)p->rows)[at]) : ((const float *)p->rows)[at];
}

/* Quantises a row to int8 by token group, to where its part's scratch memory has room for it. */
typedef void (*quantize_function)(const struct linear *p, int64_t row);
quantize_function shardnet_quantize_for(int32_t isa);

/* Whether rows of bfloat16 are multiplied by tiles of AMX: laid out in [lines of 32 inputs][rows][32], zeros last. */
INLINE int uses_amx_pairs(const struct linear *p) { return p->pairs && p->has_tiles; }

/* Whether quantised rows are. */
INLINE int uses_amx(const struct linear *p) {
    return p->has_tiles && p->n_rows >= MANY_ROWS && !is_float(&p->form);
}

/* Where the quantised inputs of a row lie for AMX, from `input` on up to the next multiple of a line, and the bytes to
 * the next row: [lines of 64 inputs][rows][64], of which the last line may be shorter. */
INLINE int8_t *lined_up(const struct linear *p, int64_t row, int64_t input, int64_t *stride) {
    const int64_t before = input & -QUAD_BYTES, left = p->n_groups * p->form.token_group - before;
    *stride = left < QUAD_BYTES ? left : QUAD_BYTES;
    return p->quantized + before * p->n_rows + row * *stride + (input - before);
}

/* Where scales, offsets and sums of a row's token group are: for AMX those of all rows lie side by side. */
INLINE int64_t token_at(const struct linear *p, int64_t row, int64_t token) {
    return uses_amx(p) ? token * p->n_rows + row : row * p->n_groups + token;
}

/* Books of a narrow range are made unsigned by this; offsets correct for it. */
#define NARROW_BOOK 25

INLINE int32_t book_bias(const struct form *f) {
    float low = f->book[0], high = f->book[0];
    for (int i = 1; i < 16; i++) {
        low = f->book[i] < low ? f->book[i] : low;
        high = f->book[i] > high ? f->book[i] : high;
    }
    return high - low < NARROW_BOOK ? (int32_t)-low : 128;
}

/* What a tile's codes are too large by: offsets correct for it. Where bytes are signed, 128 was subtracted. */
INLINE int32_t code_bias(const struct linear *p) {
    const int isa = p->team.isa;
    if (uses_amx(p)) return p->form.bits == 8 ? p->form.offset - 128 : 0;
    if (p->form.code == BOOK) {
        const int32_t bias = book_bias(&p->form);
        return isa == AVX512 || (isa == AVX2 && bias < 128) ? bias : 0;
    }
    return p->form.bits == 8 && isa != AVX512 ? p->form.offset - 128 : p->form.offset;
}

/* Units of a block that lie one after the other: of `n_blocks` consecutive blocks, `n_inputs` inputs from `from` on. */
struct stretch {
    const uint8_t *blocks;
    int64_t from, n_inputs, n_blocks;
    int64_t left, most; /* blocks from here to the panel's end, and at most in a stretch */
};

INLINE struct stretch before_panel(const struct linear *p, const uint8_t *panel) {
    const int64_t most = p->form.block < STRETCH ? STRETCH / p->form.block : 1;
    return (struct stretch){panel, 0, 0, 0, blocks_of_panel(p), most};
}

/* Goes on to the next stretch of at most STRETCH inputs; returns 0 at the panel's end. */
INLINE int next_stretch(const struct form *f, struct stretch *s) {
    s->from += s->n_inputs;
    if (s->from == f->block || !s->n_inputs) {
        s->blocks += s->n_blocks * f->block_bytes;
        s->left -= s->n_blocks;
        s->from = 0;
        if (!s->left) return 0;
        s->n_blocks = s->left < s->most ? s->left : s->most;
    }
    s->n_inputs = f->block - s->from < STRETCH ? f->block - s->from : STRETCH;
    return 1;
}

/* A book's numbers plus `bias`, again and again. */
INLINE void fill_book(const struct form *f, int32_t bias, uint8_t *numbers, int n) {
    for (int i = 0; i < n; i++) numbers[i] = (uint8_t)(int32_t)(f->book[i % 16] + (float)bias);
}

/* Scales of two levels of the stretch of a block: integers by group, and the block's float16. What codes are too large
 * by is corrected by scales, and minimums are added, as an integer times the sum of the group's inputs: `others`. */
struct levels {
    int16_t scale[STRETCH / 16][PANEL], other[STRETCH / 16][PANEL];
    float outer[PANEL], below[PANEL];
};

INLINE int has_minimum(const struct form *f) { return f->minimum != NO_MINIMUM || f->scale == SCALE_NIBBLES; }

INLINE const int16_t *group_sums_of(const struct linear *p, int64_t row) {
    return p->group_sums + row * (padded_inputs(p) / p->form.group);
}

/* The scales and minimums of a stretch, by token group: at least 16 inputs each. */
struct scales {
    float scale[STRETCH / 16][PANEL], minimum[STRETCH / 16][PANEL];
};

INLINE int32_t quad_at(const void *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return quad;
}

#define OF_ROWS(n, OF, ...)                  \
    case n:                                  \
        OF(n, __VA_ARGS__, p, w, row, sums); \
        return;

/* A tile function that calls OF(rows, ..., p, w, row, sums) with each number of rows as a constant, so that the
 * compiler unrolls its loops. */
#define TILE(NAME, TARGET, OF, ...)                                                            \
    static TARGET void NAME(const struct linear *p, const uint8_t *w, int64_t row, int n_rows, \
                            float sums[2][MAX_TILE][PANEL]) {                                  \
        switch (n_rows) {                                                                      \
            OF_ROWS(1, OF, __VA_ARGS__)                                                        \
            OF_ROWS(2, OF, __VA_ARGS__)                                                        \
            OF_ROWS(3, OF, __VA_ARGS__)                                                        \
            OF_ROWS(4, OF, __VA_ARGS__)                                                        \
            OF_ROWS(5, OF, __VA_ARGS__)                                                        \
            OF_ROWS(6, OF, __VA_ARGS__)                                                        \
            OF_ROWS(7, OF, __VA_ARGS__)                                                        \
            default:                                                                           \
                OF(8, __VA_ARGS__, p, w, row, sums);                                           \
        }                                                                                      \
    }

#endif

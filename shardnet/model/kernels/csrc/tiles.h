/* A tile: a few rows times one panel of weights, or two consecutive panels. */

#ifndef SHARDNET_TILES_H
#define SHARDNET_TILES_H

#include "linear.h"

#define MAX_TILE 8 /* rows of a tile */

/* sums[panel][row][output] of the rows from `row` on; `w` is where the first panel begins. */
typedef void (*tile_function)(const struct linear *p, const uint8_t *w, int64_t row, int n_rows,
                              float sums[2][MAX_TILE][PANEL]);

/* The tile functions of an instruction set for one kind of weights. */
struct tiles {
    tile_function one, two; /* `two` may be NULL */
};

INLINE int64_t even_inputs(const struct linear *p) { return (p->n_in + 1) / 2 * 2; }

INLINE int64_t bytes_of_group(const struct linear *p) { return SCALE_BYTES + (int64_t)p->group * PANEL * p->bits / 8; }

INLINE int64_t bytes_of_panel(const struct linear *p) {
    return p->bits == 16 ? even_inputs(p) / 2 * QUAD_BYTES : p->n_groups * bytes_of_group(p);
}

/* Where a tile's rows lie: float32 [inputs][rows of the tile], or bfloat16 [pairs of inputs][rows of the tile][2]. */
INLINE const float *floats_of(const struct linear *p, int64_t row) {
    return (const float *)p->quantized + row * even_inputs(p);
}

INLINE const uint16_t *pairs_of(const struct linear *p, int64_t row) {
    return (const uint16_t *)p->quantized + row * even_inputs(p);
}

/* Where a tile's quantised rows lie: [quads of inputs][rows of the tile][4]. */
INLINE const int8_t *quads_of(const struct linear *p, int64_t row) {
    return p->quantized + row * p->n_groups * p->group;
}

INLINE int32_t quad_at(const void *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return quad;
}

/* A function for each number of rows, so that the compiler unrolls its loops. */
#define BY_ROWS(CALL) \
    switch (n_rows) { \
        case 1:       \
            CALL(1);  \
            return;   \
        case 2:       \
            CALL(2);  \
            return;   \
        case 3:       \
            CALL(3);  \
            return;   \
        case 4:       \
            CALL(4);  \
            return;   \
        case 5:       \
            CALL(5);  \
            return;   \
        case 6:       \
            CALL(6);  \
            return;   \
        case 7:       \
            CALL(7);  \
            return;   \
        default:      \
            CALL(8);  \
            return;   \
    }

#define TILE(NAME, TARGET, CALL)                                                               \
    static TARGET void NAME(const struct linear *p, const uint8_t *w, int64_t row, int n_rows, \
                            float sums[2][MAX_TILE][PANEL]) {                                  \
        BY_ROWS(CALL)                                                                          \
    }

#endif

/* Included by floats.c once for each instruction set, given by TARGET, NAME and LANES. */

#include "vectors_body.h"

#define MOST_TOGETHER (LANES == 16 ? 12 : LANES == 8 ? 6 : 4) /* rows whose sums the registers hold */
#define LINES_AHEAD 64                                        /* inputs whose weights are prefetched: a page */
#define UNROLLED_ROWS _Pragma("GCC unroll 12")

INLINE TARGET void NAME(add_rows)(const void *weights, const int narrow, const float *x, int64_t stride, int64_t depth,
                                  const int n_rows, float (*sums)[PANEL]) {
    lanes total[MOST_TOGETHER][REGISTERS];
    UNROLLED_ROWS for (int row = 0; row < n_rows; row++)
        UNROLLED for (int r = 0; r < REGISTERS; r++) total[row][r] = NAME(load_floats)(sums[row] + r * LANES, LANES);
    for (int64_t k = 0; k < depth; k++) {
        lanes own[REGISTERS];
        UNROLLED for (int r = 0; r < REGISTERS; r++) own[r] = NAME(load)(weights, k * PANEL + r * LANES, LANES, narrow);
        if (n_rows <= 2) __builtin_prefetch(at(weights, (k + LINES_AHEAD) * PANEL, narrow));
        UNROLLED_ROWS for (int row = 0; row < n_rows; row++) {
            const lanes input = NAME(broadcast)(x[row * stride + k]);
            UNROLLED for (int r = 0; r < REGISTERS; r++) total[row][r] = NAME(fused)(own[r], input, total[row][r]);
        }
    }
    UNROLLED_ROWS for (int row = 0; row < n_rows; row++)
        UNROLLED for (int r = 0; r < REGISTERS; r++) NAME(save_floats)(sums[row] + r * LANES, LANES, total[row][r]);
}

/* Rows are shared out evenly, so that no pass has few sums to wait for. */
INLINE TARGET void NAME(add_some)(const void *weights, const int narrow, const float *x, int64_t stride, int64_t depth,
                                  int n_rows, float (*sums)[PANEL]) {
    int n_passes = (n_rows + MOST_TOGETHER - 1) / MOST_TOGETHER;
    for (int row = 0, n; row < n_rows; row += n, n_passes--) {
        n = (n_rows - row + n_passes - 1) / n_passes;
#define ROWS(count)                                                                                     \
    case count:                                                                                         \
        if (count <= MOST_TOGETHER)                                                                     \
            NAME(add_rows)(weights, narrow, x + row * stride, stride, depth,                            \
                           count <= MOST_TOGETHER ? count : 1, sums + row);                             \
        break;
        switch (n) {
            ROWS(1)
            ROWS(2)
            ROWS(3)
            ROWS(4)
            ROWS(5)
            ROWS(6)
            ROWS(7)
            ROWS(8)
            ROWS(9)
            ROWS(10)
            ROWS(11)
            ROWS(12)
        }
#undef ROWS
    }
}

static TARGET void NAME(add_depth)(const void *weights, int narrow, const float *x, int64_t stride, int64_t depth,
                                   int n_rows, float (*sums)[PANEL]) {
    if (narrow)
        NAME(add_some)(weights, 1, x, stride, depth, n_rows, sums);
    else
        NAME(add_some)(weights, 0, x, stride, depth, n_rows, sums);
}

#undef MOST_TOGETHER
#undef LINES_AHEAD
#undef UNROLLED_ROWS
#include "vectors_end.h"

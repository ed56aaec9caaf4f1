/* Rows quantised to int8 by token group, as tiles read them. */

#include <math.h>
#include <string.h>

#include "tiles.h"

/* Finds where a row's group `g` begins in its tile, and the stride in bytes between its quads. */
INLINE int8_t *tile_of(const struct linear *p, int64_t row, int64_t g, int32_t *stride) {
    int64_t first = row / MAX_TILE * MAX_TILE;
    int64_t n_rows = p->n_rows - first < MAX_TILE ? p->n_rows - first : MAX_TILE;
    *stride = (int32_t)n_rows * 4;
    const int64_t group = p->form.token_group;
    return p->quantized + first * p->n_groups * group + g * group * n_rows + (row - first) * 4;
}

INLINE void put_quantized(const struct linear *p, int64_t row, int64_t g, const int8_t *quantized) {
    const int32_t group = p->form.token_group;
    if (uses_amx(p)) {
        const int32_t line = group < QUAD_BYTES ? group : QUAD_BYTES;
        int64_t stride;
        for (int32_t i = 0; i < group; i += line)
            memcpy(lined_up(p, row, g * group + i, &stride), quantized + i, (size_t)line);
        return;
    }
    int32_t stride;
    int8_t *out = tile_of(p, row, g, &stride);
    for (int32_t i = 0; i < group; i += 4) memcpy(out + i / 4 * stride, quantized + i, 4);
}

#define BODY "quantize_body.h"
#include "each_isa.h"

quantize_function shardnet_quantize_for(int32_t isa) {
#if defined(__x86_64__)
    if (isa == AVX512) return quantize_row_avx512;
    if (isa == AVX2) return quantize_row_avx2;
#else
    (void)isa;
#endif
    return quantize_row_portable;
}

/* Linear layers with weights of float32. An output is added up input by input, each multiplication fused with its
 * addition: it has the same bits in any batch, with any number of threads and on any instruction set.
 */

#include "vectors.h"

#include "floats.h"

/* What an instruction set adds to sums[row][output] of one panel: `depth` inputs of `n_rows` rows, which are `stride`
 * apart. */
typedef void (*depth_function)(const float *weights, const float *x, int64_t stride, int64_t depth, int n_rows,
                               float (*sums)[PANEL]);

#define BODY "floats_body.h"
#include "each_isa.h"

static depth_function depth_for(int32_t isa) {
#if defined(__x86_64__)
    if (isa == AVX512) return add_depth_avx512;
    if (isa == AVX2) return add_depth_avx2;
#else
    (void)isa;
#endif
    return add_depth_portable;
}

/* A single row of float32 is read where it is. */
INLINE int is_in_place(const struct linear *p) { return p->n_rows == 1 && !p->is_bf16; }

INLINE int64_t depth_at(const struct linear *p, int64_t begin) {
    return p->n_in - begin < DEPTH ? p->n_in - begin : DEPTH;
}

void shardnet_lay_out_floats(const struct linear *p, int64_t row) {
    if (is_in_place(p)) return;
    for (int64_t k = 0; k < p->n_in; k += DEPTH) {
        const int64_t depth = depth_at(p, k), from = row * p->n_in + k;
        float *out = (float *)p->quantized + k * p->n_rows + row * depth;
        if (p->is_bf16)
            for (int64_t i = 0; i < depth; i++) out[i] = from_bf16(((const uint16_t *)p->rows)[from + i]);
        else
            memcpy(out, (const float *)p->rows + from, (size_t)depth * sizeof(float));
    }
}

void shardnet_sum_floats(const struct linear *p, int64_t panel, int n_panels, int64_t row, int n_rows,
                         float sums[FLOAT_PANELS][FLOAT_ROWS][PANEL]) {
    const depth_function add_depth = depth_for(p->team.isa);
    const float *weights = (const float *)p->weights + panel * p->n_in * PANEL;
    const float *rows = is_in_place(p) ? p->rows : (const float *)p->quantized;
    for (int i = 0; i < n_panels; i++) memset(sums[i], 0, (size_t)n_rows * sizeof sums[i][0]);
    for (int64_t k = 0; k < p->n_in; k += DEPTH) {
        const int64_t depth = depth_at(p, k);
        for (int i = 0; i < n_panels; i++)
            add_depth(weights + (i * p->n_in + k) * PANEL, rows + k * p->n_rows + row * depth, depth, depth, n_rows,
                      sums[i]);
    }
}

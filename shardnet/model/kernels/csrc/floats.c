/* Linear layers with weights of float32. An output is added up input by input, each multiplication fused with its
 * addition: it has the same bits in any batch, with any number of threads and on any instruction set.
 */

#include "vectors.h"

#include "floats.h"

/* What an instruction set adds to sums[row][output] of one panel: `depth` inputs of `n_rows` rows, which are `stride`
 * apart. Weights are float32, or bfloat16 where they are `narrow`. */
typedef void (*depth_function)(const void *weights, int narrow, const float *x, int64_t stride, int64_t depth,
                               int n_rows, float (*sums)[PANEL]);

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
            add_depth(weights + (i * p->n_in + k) * PANEL, 0, rows + k * p->n_rows + row * depth, depth, depth, n_rows,
                      sums[i]);
    }
}

/* --- a matmul for each head */

struct head_matmuls {
    const void *weights; /* [n_heads, panels, n_in, PANEL] */
    const float *rows;   /* [n_rows, n_heads, n_in], `row_stride` from row to row, `head_stride` from head to head */
    float *out;          /* [n_rows, n_heads, n_out] */
    struct team team;
    int64_t n_rows, n_heads, n_in, n_out, row_stride, head_stride;
    int32_t is_bf16; /* the weights: else they are float32 */
};

/* An item is a panel of a head. */
static void multiply_heads(const void *argument, int64_t begin, int64_t end) {
    const struct head_matmuls *call = argument;
    const depth_function add_depth = depth_for(call->team.isa);
    const int64_t n_panels = (call->n_out + PANEL - 1) / PANEL, panel_bytes = call->n_in * PANEL * (call->is_bf16 ? 2 : 4);
    float sums[FLOAT_ROWS][PANEL];
    for (int64_t item = begin; item < end; item++) {
        const int64_t head = item / n_panels, first = item % n_panels * PANEL;
        const int64_t n = call->n_out - first < PANEL ? call->n_out - first : PANEL;
        for (int64_t row = 0; row < call->n_rows; row += FLOAT_ROWS) {
            const int n_rows = (int)(call->n_rows - row < FLOAT_ROWS ? call->n_rows - row : FLOAT_ROWS);
            const float *x = call->rows + row * call->row_stride + head * call->head_stride;
            memset(sums, 0, (size_t)n_rows * sizeof sums[0]);
            add_depth((const char *)call->weights + item * panel_bytes, call->is_bf16, x, call->row_stride, call->n_in,
                      n_rows, sums);
            for (int r = 0; r < n_rows; r++)
                memcpy(call->out + ((row + r) * call->n_heads + head) * call->n_out + first, sums[r],
                       (size_t)n * sizeof(float));
        }
    }
}

/* Multiplies each head of the rows by its own weights. Python has checked everything in the struct. */
void shardnet_head_matmuls(const struct head_matmuls *call) {
    const int64_t n_items = call->n_heads * ((call->n_out + PANEL - 1) / PANEL);
    const int64_t piece = 65536 / (call->n_in * PANEL * (call->n_rows < 4 ? 1 : call->n_rows / 4) + 1);
    shardnet_parallel_for(&call->team, multiply_heads, call, n_items, piece > 0 ? piece : 1);
}

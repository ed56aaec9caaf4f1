/* Included by sublayers_body.h: functions of rows that no sub-layer fuses. Each row is computed by itself. */

/* LayerNorm: less their mean, divided by their deviation. */
INLINE TARGET void NAME(layer_norm_row)(const struct norm *norm, const void *bias, const void *in, void *out,
                                        int64_t width, const int is_bf16) {
    lanes sums[REGISTERS] = {{0}}, squares[REGISTERS] = {{0}};
    for (int64_t i = 0; i < width; i += PARTS)
        for (int r = 0; r < REGISTERS && i + r * LANES < width; r++)
            sums[r] += NAME(load)(in, i + r * LANES, of_last(width, i + r * LANES), is_bf16);
    const float mean = NAME(sum)(sums) / (float)width;
    for (int64_t i = 0; i < width; i += PARTS)
        for (int r = 0; r < REGISTERS && i + r * LANES < width; r++) {
            const int n = of_last(width, i + r * LANES);
            lanes x = NAME(load)(in, i + r * LANES, n, is_bf16) - mean;
            for (int beyond = n; beyond < LANES; beyond++) x[beyond] = 0;
            squares[r] = NAME(fused)(x, x, squares[r]);
        }
    const float scale = 1.0f / sqrtf(NAME(sum)(squares) / (float)width + norm->eps);
    for (int64_t i = 0; i < width; i += LANES) {
        const int n = of_last(width, i);
        const lanes x = (NAME(load)(in, i, n, is_bf16) - mean) * scale;
        const lanes weight = NAME(load_either)(norm->weight, i, n, norm->is_bf16);
        NAME(save)(out, i, n, NAME(fused)(x, weight, NAME(load_either)(bias, i, n, norm->is_bf16)), is_bf16);
    }
}

/* A norm without a weight multiplies by 1. */
INLINE TARGET void NAME(unit_norm_row)(float eps, const void *in, void *out, int64_t width, const int is_bf16,
                                       const int out_is_bf16) {
    lanes squares[REGISTERS] = {{0}};
    for (int64_t i = 0; i < width; i += PARTS)
        for (int r = 0; r < REGISTERS && i + r * LANES < width; r++) {
            const lanes x = NAME(load)(in, i + r * LANES, of_last(width, i + r * LANES), is_bf16);
            squares[r] = NAME(fused)(x, x, squares[r]);
        }
    const float scale = 1.0f / sqrtf(NAME(sum)(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        const int n = of_last(width, i);
        NAME(save)(out, i, n, NAME(load)(in, i, n, is_bf16) * scale, out_is_bf16);
    }
}

INLINE TARGET void NAME(softmax_row)(const void *in, void *out, int64_t width, const int is_bf16) {
    lanes sums[REGISTERS] = {{0}};
    float best = -INFINITY;
    for (int64_t i = 0; i < width; i++) {
        const float x = number(in, i, is_bf16);
        best = x > best || x != x ? x : best;
    }
    for (int64_t i = 0; i < width; i += PARTS)
        for (int r = 0; r < REGISTERS && i + r * LANES < width; r++) {
            const int n = of_last(width, i + r * LANES);
            lanes x = NAME(exponential)(NAME(load)(in, i + r * LANES, n, is_bf16) - best);
            for (int beyond = n; beyond < LANES; beyond++) x[beyond] = 0;
            sums[r] += x;
        }
    const float sum = NAME(sum)(sums);
    for (int64_t i = 0; i < width; i += LANES) {
        const int n = of_last(width, i);
        NAME(save)(out, i, n, NAME(exponential)(NAME(load)(in, i, n, is_bf16) - best) / sum, is_bf16);
    }
}

INLINE TARGET lanes NAME(function_of)(const struct row_call *call, lanes x) {
    switch (call->function) {
        case SIGMOID:
            return 1.0f / (1.0f + NAME(exponential)(-x));
        case SOFTPLUS:
            return NAME(softplus)(x);
        case CAPPED:
            return NAME(hyperbolic_tangent)(x / call->norm.eps) * call->norm.eps;
        default:
            return NAME(activated)(x, call->activation);
    }
}

INLINE TARGET void NAME(compute_row)(const struct row_call *call, int64_t row, const int is_bf16) {
    const int64_t width = call->width;
    const void *in = at(call->rows, row * call->stride, is_bf16);
    void *out = at(call->out, row * width, is_bf16);
    struct norm norm = call->norm;
    switch (call->function) {
        case RMS_NORM:
            if (!norm.weight) {
                NAME(unit_norm_row)(norm.eps, in, out, width, is_bf16, is_bf16);
                return;
            }
            norm.weight = at(norm.weight, row % call->n_others * width, norm.is_bf16);
            NAME(norm_row)(&norm, norm.weight, in, out, width, is_bf16);
            return;
        case LAYER_NORM:
            NAME(layer_norm_row)(&norm, call->other, in, out, width, is_bf16);
            return;
        case SOFTMAX:
            NAME(softmax_row)(in, out, width, is_bf16);
            return;
        case ROTATED: {
            const int64_t from = row / call->n_others * call->n_rotated;
            memcpy(out, in, (size_t)(width * (is_bf16 ? 2 : 4)));
            NAME(rotate_head)(out, at(call->other, from, is_bf16), at(call->another, from, is_bf16), call->n_rotated,
                              is_bf16);
            return;
        }
        default:
            for (int64_t i = 0; i < width; i += LANES) {
                const int n = of_last(width, i);
                lanes x = NAME(function_of)(call, NAME(load)(in, i, n, is_bf16));
                if (call->other) x *= NAME(load)(at(call->other, row * call->stride, is_bf16), i, n, is_bf16);
                NAME(save)(out, i, n, x, is_bf16);
            }
    }
}

static TARGET void NAME(compute_rows)(const void *argument, int64_t begin, int64_t end) {
    const struct row_call *call = argument;
    for (int64_t row = begin; row < end; row++)
        if (call->is_bf16)
            NAME(compute_row)(call, row, 1);
        else
            NAME(compute_row)(call, row, 0);
}

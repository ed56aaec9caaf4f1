/* Included by sublayers.c once for each instruction set, given by TARGET and NAME; its vectors have LANES lanes. */

#include "vectors_body.h"

#include "doubles_body.h"

typedef int8_t NAME(bytes) __attribute__((vector_size(LANES)));
#define bytes NAME(bytes)

/* The number as it is kept, in the rows' type. */
INLINE TARGET lanes NAME(kept)(lanes wide, const int is_bf16) { return is_bf16 ? (lanes)NAME(rounded)(wide) : wide; }

INLINE TARGET lanes NAME(load_either)(const void *values, int64_t begin, int n, int is_bf16) {
    return is_bf16 ? NAME(load)(values, begin, n, 1) : NAME(load)(values, begin, n, 0);
}

INLINE TARGET void NAME(save_either)(void *values, int64_t begin, int n, lanes wide, int is_bf16) {
    if (is_bf16)
        NAME(save)(values, begin, n, wide, 1);
    else
        NAME(save)(values, begin, n, wide, 0);
}

INLINE TARGET void NAME(norm_row)(const struct norm *norm, const void *weight, const void *in, void *out, int64_t width,
                                  const int is_bf16) {
    lanes squares[REGISTERS] = {{0}};
    for (int64_t i = 0; i < width; i += PARTS)
        for (int r = 0; r < REGISTERS; r++) {
            const int64_t begin = i + r * LANES;
            if (begin >= width) break;
            const lanes x = NAME(load)(in, begin, of_last(width, begin), is_bf16);
            squares[r] = NAME(fused)(x, x, squares[r]);
        }
    const float scale = 1.0f / sqrtf(NAME(sum)(squares) / (float)width + norm->eps);
    for (int64_t i = 0; i < width; i += LANES) {
        const int n = of_last(width, i);
        const lanes w = NAME(load_either)(weight, i, n, norm->is_bf16);
        NAME(save)(out, i, n, NAME(load)(in, i, n, is_bf16) * scale * w, is_bf16);
    }
}

INLINE TARGET void NAME(normalize_some)(const struct residual *r, int64_t begin, int64_t end, const int is_bf16) {
    const void *rows = r->streams.count ? r->inner : r->hidden;
    for (int64_t row = begin; row < end; row++) {
        const int64_t place = row * r->width;
        NAME(norm_row)
        (&r->before, r->before.weight, at(rows, place, is_bf16), at(r->inner, place, is_bf16), r->width, is_bf16);
    }
}

static TARGET void NAME(normalize)(const void *argument, int64_t begin, int64_t end) {
    const struct residual *r = argument;
    if (r->is_bf16)
        NAME(normalize_some)(r, begin, end, 1);
    else
        NAME(normalize_some)(r, begin, end, 0);
}

INLINE TARGET void NAME(add_some)(const struct residual *r, int64_t begin, int64_t end, const int is_bf16) {
    for (int64_t row = begin; row < end; row++) {
        const int64_t place = row * r->width;
        void *inner = at(r->inner, place, is_bf16), *out = at(r->out, place, is_bf16);
        const void *hidden = at(r->hidden, place, is_bf16);
        if (r->after.weight) NAME(norm_row)(&r->after, r->after.weight, inner, inner, r->width, is_bf16);
        for (int64_t i = 0; i < r->width; i += LANES) {
            const int n = of_last(r->width, i);
            const lanes more = NAME(load)(inner, i, n, is_bf16), own = NAME(load)(hidden, i, n, is_bf16);
            lanes sum = NAME(fused)(more, NAME(broadcast)(r->multiplier), own);
            if (r->rounds) sum = (lanes)NAME(rounded)(sum);
            NAME(save)(out, i, n, sum, is_bf16);
        }
    }
}

static TARGET void NAME(add)(const void *argument, int64_t begin, int64_t end) {
    const struct residual *r = argument;
    if (r->is_bf16)
        NAME(add_some)(r, begin, end, 1);
    else
        NAME(add_some)(r, begin, end, 0);
}

/* Rotates the first columns of a head by its row's position; `sin` carries the sign. */
INLINE TARGET void NAME(rotate_head)(void *head, const void *cos, const void *sin, int64_t n_rotated,
                                     const int is_bf16) {
    const int64_t half = n_rotated / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int n = of_last(half, i);
        const lanes a = NAME(load)(head, i, n, is_bf16), b = NAME(load)(head, half + i, n, is_bf16);
        const lanes cos_a = NAME(load)(cos, i, n, is_bf16), cos_b = NAME(load)(cos, half + i, n, is_bf16);
        const lanes sin_a = NAME(load)(sin, i, n, is_bf16), sin_b = NAME(load)(sin, half + i, n, is_bf16);
        NAME(save)(head, i, n, NAME(fused)(b, sin_a, a * cos_a), is_bf16);
        NAME(save)(head, half + i, n, NAME(fused)(a, sin_b, b * cos_b), is_bf16);
    }
}

/* Columns of a head from `i` on, and zeros behind the last one. */
INLINE TARGET lanes NAME(columns_from)(const void *head, int64_t i, int64_t size, const int is_bf16) {
    return i < size ? NAME(load)(head, i, of_last(size, i), is_bf16) : (lanes){0};
}

/* Quantises a key or value as in cache/kv_quantization.py, to the same bits. */
INLINE TARGET void NAME(quantize_head)(const struct attend *call, const void *head, int8_t *to,
                                       const int is_bf16) {
    const lanes none = {0}, magic = none + 12582912.0f; /* 1.5 * 2^23: adding it rounds to even */
    for (int64_t begin = 0; begin < call->head_size; begin += call->group) {
        lanes most = none;
        ints is_none = {0};
        for (int64_t i = begin; i < begin + call->group; i += LANES) {
            const lanes size = (lanes)((ints)NAME(columns_from)(head, i, call->head_size, is_bf16) & 0x7fffffff);
            const ints is_more = size > most;
            is_none |= size != size;
            most = (lanes)((is_more & (ints)size) | (~is_more & (ints)most));
        }
        float largest = NAME(largest)(most) / 127.0f;
        for (int i = 0; i < LANES; i++) largest = is_none[i] ? NAN : largest;
        const uint16_t narrow = largest < 1.17549435e-38f ? 0 : to_bf16(largest);
        memcpy(to + call->key_columns + begin / call->group * 2, &narrow, 2);
        const float scale = from_bf16(narrow);
        for (int64_t i = begin; i < begin + call->group; i += LANES) {
            const lanes ratio = NAME(columns_from)(head, i, call->head_size, is_bf16) / scale;
            const ints is_number = ratio - ratio == 0;
            const ints whole = is_number & ((ints)(ratio + magic) - 0x4b400000);
            const bytes quantized = __builtin_convertvector(whole, bytes);
            memcpy(to + i, &quantized, sizeof quantized);
        }
    }
}

/* Stores a key or value as it is, or rounded to bfloat16. */
INLINE TARGET void NAME(store_head)(const struct attend *call, const void *head, void *to, const int is_bf16) {
    if (is_bf16 == call->kv_is_bf16) {
        memcpy(to, head, (size_t)call->row_bytes);
        return;
    }
    for (int64_t i = 0; i < call->head_size; i += LANES) {
        const int n = of_last(call->head_size, i);
        NAME(save)(to, i, n, NAME(load)(head, i, n, 0), 1);
    }
}

/* Normalises and rotates each head of a row; stores its keys and values in its slot. */
INLINE TARGET void NAME(rotate_row)(const struct attention_call *call, int64_t row, const int is_bf16) {
    const struct attend *attend = &call->attend;
    const int64_t size = attend->head_size, n_rotated_heads = attend->n_heads + attend->n_kv_heads;
    char *heads = at(call->projected, row * attend->row_stride, is_bf16);
    const char *cos = at(call->cos, row * call->n_rotated, is_bf16);
    const char *sin = at(call->sin, row * call->n_rotated, is_bf16);
    for (int64_t head = 0; head < n_rotated_heads; head++) {
        char *own = at(heads, head * size, is_bf16);
        if (call->head_norm.weight)
            NAME(norm_row)
            (&call->head_norm, at(call->head_norm.weight, head * size, call->head_norm.is_bf16), own, own, size,
             is_bf16);
        NAME(rotate_head)(own, cos, sin, call->n_rotated, is_bf16);
    }
    if (!attend->n_spans) return;
    const struct span *span = span_of(attend, row);
    const struct slot_layer *stored = &span->layers[attend->layer];
    const int64_t place = span->position + row - span->start - stored->first;
    for (int64_t head = 0; head < attend->n_kv_heads; head++) {
        const int64_t to = (head * stored->capacity + place) * attend->row_bytes;
        const char *key = at(heads, (attend->n_heads + head) * size, is_bf16);
        const char *value = at(heads, (n_rotated_heads + head) * size, is_bf16);
        if (attend->group) {
            NAME(quantize_head)(attend, key, (int8_t *)stored->keys + to, is_bf16);
            NAME(quantize_head)(attend, value, (int8_t *)stored->values + to, is_bf16);
        } else {
            NAME(store_head)(attend, key, (char *)stored->keys + to, is_bf16);
            NAME(store_head)(attend, value, (char *)stored->values + to, is_bf16);
        }
    }
}

static TARGET void NAME(rotate_rows)(const void *argument, int64_t begin, int64_t end) {
    const struct attention_call *call = argument;
    for (int64_t row = begin; row < end; row++)
        if (call->residual.is_bf16)
            NAME(rotate_row)(call, row, 1);
        else
            NAME(rotate_row)(call, row, 0);
}

/* Takes the gates from among the queries, or from behind the values. */
static TARGET void NAME(part_gates)(const void *argument, int64_t begin, int64_t end) {
    const struct attention_call *call = argument;
    const struct attend *attend = &call->attend;
    const int is_bf16 = call->residual.is_bf16;
    const int64_t size = attend->head_size, n_heads = attend->n_heads, n_others = 2 * attend->n_kv_heads;
    const size_t bytes = (size_t)(size * (is_bf16 ? 2 : 4));
    const int64_t n_gates = n_heads * call->gate_columns, width = (n_heads + n_others) * size + n_gates;
    for (int64_t row = begin; row < end; row++) {
        const char *from = at(call->with_gates, row * width, is_bf16);
        char *to = at(call->projected, row * attend->row_stride, is_bf16);
        if (call->gates_behind) {
            const size_t n_looking = (size_t)(n_heads + n_others) * bytes;
            memcpy(to, from, n_looking);
            memcpy(at(call->gates, row * n_gates, is_bf16), from + n_looking, (size_t)n_gates * (is_bf16 ? 2 : 4));
            continue;
        }
        for (int64_t head = 0; head < n_heads; head++) {
            const char *query = from + 2 * (size_t)head * bytes;
            memcpy(to + (size_t)head * bytes, query, bytes);
            memcpy(at(call->gates, (row * n_heads + head) * size, is_bf16), query + bytes, bytes);
        }
        memcpy(to + (size_t)n_heads * bytes, from + 2 * (size_t)n_heads * bytes, (size_t)n_others * bytes);
    }
}

/* ln(1 + e^x). */
INLINE TARGET lanes NAME(softplus)(lanes x) {
    float values[LANES];
    memcpy(values, &x, sizeof values);
    doubles wide[2] = {NAME(load_wide)(values, HALF), NAME(load_wide)(values + HALF, HALF)};
    NAME(softpluses)(wide, 2);
    for (int at = 0; at < 2; at++) NAME(save_wide)(values + at * HALF, HALF, wide[at]);
    return NAME(load_floats)(values, LANES);
}

/* What heads or their columns are multiplied by: the sigmoids or softpluses of gates. */
INLINE TARGET lanes NAME(opened)(const struct attention_call *call, lanes gate, const int is_bf16) {
    return NAME(kept)(call->gates_soft ? NAME(softplus)(gate) : 1.0f / (1.0f + NAME(exponential)(-gate)), is_bf16);
}

/* Multiplies what attention gives where a head has one gate. */
INLINE TARGET void NAME(open_heads)(const struct attention_call *call, int64_t begin, int64_t end, const int is_bf16) {
    const int64_t size = call->attend.head_size;
    for (int64_t head = begin; head < end; head++) {
        const lanes opened = NAME(opened)(call, NAME(broadcast)(number(call->gates, head, is_bf16)), is_bf16);
        for (int64_t i = 0; i < size; i += LANES) {
            const int n = of_last(size, i);
            const lanes own = NAME(load_either)(call->attend.attended, head * size + i, n, is_bf16);
            NAME(save_either)(call->attend.attended, head * size + i, n, own * opened, is_bf16);
        }
    }
}

/* Multiplies what attention gives by what its gates are opened to. */
static TARGET void NAME(open_gates)(const void *argument, int64_t begin, int64_t end) {
    const struct attention_call *call = argument;
    const int64_t width = call->attend.n_heads * call->attend.head_size;
    const int is_bf16 = call->residual.is_bf16;
    if (call->gate_columns == 1) {
        NAME(open_heads)(call, begin * call->attend.n_heads, end * call->attend.n_heads, is_bf16);
        return;
    }
    for (int64_t i = begin * width; i < end * width; i += LANES) {
        const int n = of_last(end * width, i);
        const lanes opened = NAME(opened)(call, NAME(load_either)(call->gates, i, n, is_bf16), is_bf16);
        const lanes own = NAME(load_either)(call->attend.attended, i, n, is_bf16);
        NAME(save_either)(call->attend.attended, i, n, own * opened, is_bf16);
    }
}

#include "attention_body.h"

INLINE TARGET lanes NAME(activated)(lanes x, int activation) {
    if (activation == SILU) return NAME(silu)(x);
    if (activation == GELU_TANH) {
        const lanes inner = NAME(fused)(NAME(broadcast)(0.044715f), x * x * x, x) * 0.797884561f; /* sqrt(2 / pi) */
        return x - x / (1.0f + NAME(exponential)(2.0f * inner));          /* tanh by e^2x */
    }
    return (lanes)((ints)x & ~(x < 0));
}

/* A gate times its own sigmoid, times the other and 1 or nothing: gpt-oss. Rounded as torch does, whose clamps keep NaN. */
INLINE TARGET lanes NAME(clamped)(const struct mlp_call *call, lanes gate, lanes up, const int is_bf16) {
    const lanes limit = NAME(kept)(NAME(broadcast)(call->limit), is_bf16);
    gate = NAME(select)(gate > limit, limit, gate);
    up = NAME(select)(up > limit, limit, NAME(select)(up < -limit, -limit, up));
    const lanes sharp = NAME(kept)(gate * call->alpha, is_bf16);
    const lanes opened = NAME(kept)(1.0f / (1.0f + NAME(exponential)(-sharp)), is_bf16);
    return NAME(kept)(opened * gate, is_bf16) * NAME(kept)(up + call->added, is_bf16);
}

INLINE TARGET void NAME(activate_rows)(const struct mlp_call *call, int64_t begin, int64_t end, const int is_bf16) {
    const int64_t width = call->n_inner;
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const int n = of_last(width, i);
            const lanes gate = NAME(load)(call->projected, 2 * row * width + i, n, is_bf16);
            const lanes up = NAME(load)(call->projected, (2 * row + 1) * width + i, n, is_bf16);
            const lanes inner = call->activation == CLAMPED ? NAME(clamped)(call, gate, up, is_bf16)
                                                            : NAME(activated)(gate, call->activation) * up;
            NAME(save)(call->activated, row * width + i, n, inner, is_bf16);
        }
}

static TARGET void NAME(activate)(const void *argument, int64_t begin, int64_t end) {
    const struct mlp_call *call = argument;
    if (call->residual.is_bf16)
        NAME(activate_rows)(call, begin, end, 1);
    else
        NAME(activate_rows)(call, begin, end, 0);
}

#include "rows_body.h"

#include "experts_body.h"

#include "streams_body.h"

static const struct steps NAME(steps) = {NAME(normalize), NAME(add),          NAME(rotate_rows), NAME(attend),
                                         NAME(activate),  NAME(compute_rows), NAME(widen),       NAME(route),
                                         NAME(gather),    NAME(combine),      NAME(part_gates),  NAME(open_gates),
                                         NAME(score_positions),
                                         NAME(norm_streams), NAME(soften), NAME(join_streams), NAME(share_streams)};

#undef bytes
#include "vectors_end.h"

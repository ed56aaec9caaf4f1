/* Included by sublayers.c once for each instruction set, given by TARGET and NAME; its vectors have LANES lanes. */

typedef float NAME(lanes) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(uints) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(shorts) __attribute__((vector_size(2 * LANES)));
typedef int8_t NAME(bytes) __attribute__((vector_size(LANES)));
#define lanes NAME(lanes)
#define ints NAME(ints)
#define uints NAME(uints)
#define shorts NAME(shorts)
#define bytes NAME(bytes)
#define of_last(width, begin) ((width) - (begin) < LANES ? (int)((width) - (begin)) : LANES)

INLINE TARGET ints NAME(numbers)(void) {
    static const int32_t counted[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints numbers;
    memcpy(&numbers, counted, sizeof numbers);
    return numbers;
}

INLINE TARGET lanes NAME(load)(const void *values, int64_t begin, int n, const int is_bf16) {
    const char *from = at(values, begin, is_bf16);
    if (is_bf16) {
        shorts narrow = {0};
        if (n == LANES)
            memcpy(&narrow, from, sizeof narrow);
        else
            memcpy(&narrow, from, (size_t)n * 2);
        return (lanes)(__builtin_convertvector(narrow, uints) << 16);
    }
    lanes wide = {0};
    if (n == LANES)
        memcpy(&wide, from, sizeof wide);
    else
        memcpy(&wide, from, (size_t)n * 4);
    return wide;
}

INLINE TARGET void NAME(save)(void *values, int64_t begin, int n, lanes wide, const int is_bf16) {
    char *to = at(values, begin, is_bf16);
    if (is_bf16) {
        const uints bits = (uints)wide;
        const uints is_nan = (uints)(wide != wide);
        const uints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const uints kept = (is_nan & (bits >> 16 | 0x40)) | (~is_nan & rounded);
        const shorts narrow = __builtin_convertvector(kept, shorts);
        if (n == LANES)
            memcpy(to, &narrow, sizeof narrow);
        else
            memcpy(to, &narrow, (size_t)n * 2);
    } else if (n == LANES) {
        memcpy(to, &wide, sizeof wide);
    } else {
        memcpy(to, &wide, (size_t)n * 4);
    }
}

INLINE TARGET lanes NAME(load_either)(const void *values, int64_t begin, int n, int is_bf16) {
    return is_bf16 ? NAME(load)(values, begin, n, 1) : NAME(load)(values, begin, n, 0);
}

INLINE TARGET void NAME(save_either)(void *values, int64_t begin, int n, lanes wide, int is_bf16) {
    if (is_bf16)
        NAME(save)(values, begin, n, wide, 1);
    else
        NAME(save)(values, begin, n, wide, 0);
}

/* Sum and maximum over a vector's lanes, in a fixed order. */
INLINE TARGET float NAME(sum)(lanes wide) {
    float values[LANES];
    memcpy(values, &wide, sizeof values);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) values[i] += values[i + step];
    return values[0];
}

INLINE TARGET float NAME(largest)(lanes wide) {
    float values[LANES];
    memcpy(values, &wide, sizeof values);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) values[i] = values[i + step] > values[i] ? values[i + step] : values[i];
    return values[0];
}

/* e^x to two units in the last place; x is clamped to [-87.3, 88]. */
INLINE TARGET lanes NAME(exponential)(lanes x) {
    const lanes low = (lanes){0} - 87.3f, high = (lanes){0} + 88.0f;
    const ints is_low = x<low, is_high = x> high;
    x = (lanes)((is_low & (ints)low) | (is_high & (ints)high) | (~(is_low | is_high) & (ints)x));
    const lanes shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    const ints power = (ints)shifted - 0x4b400000;
    const lanes whole = shifted - 12582912.0f;
    const lanes rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f; /* ln 2 in two parts */
    lanes y = (lanes){0} + C5;
    y = y * rest + C4;
    y = y * rest + C3;
    y = y * rest + C2;
    y = y * rest + C1;
    y = y * rest + C0;
    y = y * (rest * rest) + rest + 1.0f;
    return y * (lanes)((uints)(power + 127) << 23);
}

INLINE TARGET void NAME(norm_row)(const struct norm *norm, const void *weight, const void *in, void *out, int64_t width,
                                  const int is_bf16) {
    lanes squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        const lanes x = NAME(load)(in, i, of_last(width, i), is_bf16);
        squares += x * x;
    }
    const float scale = 1.0f / sqrtf(NAME(sum)(squares) / (float)width + norm->eps);
    for (int64_t i = 0; i < width; i += LANES) {
        const int n = of_last(width, i);
        const lanes w = NAME(load_either)(weight, i, n, norm->is_bf16);
        NAME(save)(out, i, n, NAME(load)(in, i, n, is_bf16) * scale * w, is_bf16);
    }
}

INLINE TARGET void NAME(normalize_some)(const struct residual *r, int64_t begin, int64_t end, const int is_bf16) {
    for (int64_t row = begin; row < end; row++) {
        const int64_t place = row * r->width;
        NAME(norm_row)
        (&r->before, r->before.weight, at(r->hidden, place, is_bf16), at(r->inner, place, is_bf16), r->width, is_bf16);
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
            const lanes more = NAME(load)(inner, i, n, is_bf16) * r->multiplier;
            NAME(save)(out, i, n, NAME(load)(hidden, i, n, is_bf16) + more, is_bf16);
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
        NAME(save)(head, i, n, a * cos_a + b * sin_a, is_bf16);
        NAME(save)(head, half + i, n, b * cos_b + a * sin_b, is_bf16);
    }
}

/* Quantises a key or value as in cache/kv_quantization.py, to the same bits. */
INLINE TARGET void NAME(quantize_head)(const struct attention_call *call, const void *head, int8_t *to,
                                       const int is_bf16) {
    const lanes none = {0}, magic = none + 12582912.0f; /* 1.5 * 2^23: adding it rounds to even */
    for (int64_t begin = 0; begin < call->head_size; begin += call->group) {
        lanes most = none;
        ints is_none = {0};
        for (int64_t i = begin; i < begin + call->group; i += LANES) {
            const lanes size = (lanes)((ints)NAME(load)(head, i, LANES, is_bf16) & 0x7fffffff);
            const ints is_more = size > most;
            is_none |= size != size;
            most = (lanes)((is_more & (ints)size) | (~is_more & (ints)most));
        }
        float largest = NAME(largest)(most) / 127.0f;
        for (int i = 0; i < LANES; i++) largest = is_none[i] ? NAN : largest;
        const uint16_t narrow = largest < 1.17549435e-38f ? 0 : to_bf16(largest);
        memcpy(to + call->head_size + begin / call->group * 2, &narrow, 2);
        const float scale = from_bf16(narrow);
        for (int64_t i = begin; i < begin + call->group; i += LANES) {
            const lanes ratio = NAME(load)(head, i, LANES, is_bf16) / scale;
            const ints is_number = ratio - ratio == 0;
            const ints whole = is_number & ((ints)(ratio + magic) - 0x4b400000);
            const bytes quantized = __builtin_convertvector(whole, bytes);
            memcpy(to + i, &quantized, sizeof quantized);
        }
    }
}

/* Normalises and rotates each head of a row; stores its keys and values in its slot. */
INLINE TARGET void NAME(rotate_row)(const struct attention_call *call, int64_t row, const int is_bf16) {
    const int64_t size = call->head_size, n_rotated_heads = call->n_heads + call->n_kv_heads;
    char *heads = at(call->projected, row * (n_rotated_heads + call->n_kv_heads) * size, is_bf16);
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
    if (!call->n_spans) return;
    const struct span *span = span_of(call, row);
    const struct slot_layer *stored = &span->layers[call->layer];
    const int64_t place = span->position + row - span->start - stored->first;
    for (int64_t head = 0; head < call->n_kv_heads; head++) {
        const int64_t to = (head * stored->capacity + place) * call->row_bytes;
        const char *key = at(heads, (call->n_heads + head) * size, is_bf16);
        const char *value = at(heads, (n_rotated_heads + head) * size, is_bf16);
        if (call->group) {
            NAME(quantize_head)(call, key, (int8_t *)stored->keys + to, is_bf16);
            NAME(quantize_head)(call, value, (int8_t *)stored->values + to, is_bf16);
        } else {
            memcpy((char *)stored->keys + to, key, (size_t)call->row_bytes);
            memcpy((char *)stored->values + to, value, (size_t)call->row_bytes);
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

#include "attention_body.h"

INLINE TARGET lanes NAME(activated)(lanes x, int activation) {
    if (activation == SILU) return x / (1.0f + NAME(exponential)(-x));
    if (activation == GELU_TANH) {
        const lanes inner = (x + 0.044715f * (x * x * x)) * 0.797884561f; /* sqrt(2 / pi) */
        return x - x / (1.0f + NAME(exponential)(2.0f * inner));          /* tanh by e^2x */
    }
    return (lanes)((ints)x & ~(x < 0));
}

INLINE TARGET void NAME(activate_rows)(const struct mlp_call *call, int64_t begin, int64_t end, const int is_bf16) {
    const int64_t width = call->n_inner;
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const int n = of_last(width, i);
            const lanes gate = NAME(load)(call->projected, 2 * row * width + i, n, is_bf16);
            const lanes up = NAME(load)(call->projected, (2 * row + 1) * width + i, n, is_bf16);
            NAME(save)(call->activated, row * width + i, n, NAME(activated)(gate, call->activation) * up, is_bf16);
        }
}

static TARGET void NAME(activate)(const void *argument, int64_t begin, int64_t end) {
    const struct mlp_call *call = argument;
    if (call->residual.is_bf16)
        NAME(activate_rows)(call, begin, end, 1);
    else
        NAME(activate_rows)(call, begin, end, 0);
}

static const struct steps NAME(steps) = {NAME(normalize), NAME(add), NAME(rotate_rows), NAME(attend), NAME(activate)};

#undef lanes
#undef ints
#undef uints
#undef shorts
#undef bytes
#undef of_last

/* Included once for each instruction set, given by TARGET, NAME and LANES: vectors of floats, and what is computed with
 * them the same way on all: every multiplication that is added to something is fused, and sums over a row are added in
 * PARTS parts, so that bits do not depend on the instruction set. */

typedef float NAME(lanes) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(uints) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(shorts) __attribute__((vector_size(2 * LANES)));
#define lanes NAME(lanes)
#define ints NAME(ints)
#define uints NAME(uints)
#define shorts NAME(shorts)
#define of_last(width, begin) ((width) - (begin) < LANES ? (int)((width) - (begin)) : LANES)
#define REGISTERS (PARTS / LANES) /* that hold the parts of a sum */

/* a * b + c, rounded once. */
INLINE TARGET lanes NAME(fused)(lanes a, lanes b, lanes c) {
#if LANES == 16
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    lanes sum;
    for (int i = 0; i < LANES; i++) sum[i] = fused_alone(a[i], b[i], c[i]);
    return sum;
#endif
}

INLINE TARGET lanes NAME(broadcast)(float value) { return value - (lanes){0}; } /* x - 0 is x, x + 0 is not */

INLINE TARGET lanes NAME(select)(ints where, lanes yes, lanes no) {
    return (lanes)((where & (ints)yes) | (~where & (ints)no));
}

/* The larger and the smaller numbers of two vectors: those of b where one is NaN or both are equal. */
INLINE TARGET lanes NAME(more)(lanes a, lanes b) {
#if LANES == 16
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return NAME(select)(a > b, a, b);
#endif
}

INLINE TARGET lanes NAME(less)(lanes a, lanes b) {
#if LANES == 16
    return (lanes)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (lanes)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return NAME(select)(a < b, a, b);
#endif
}

INLINE TARGET ints NAME(numbers)(void) {
    static const int32_t counted[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints numbers;
    memcpy(&numbers, counted, sizeof numbers);
    return numbers;
}

INLINE TARGET lanes NAME(load_floats)(const float *from, int n) {
    lanes wide = {0};
    if (n == LANES)
        memcpy(&wide, from, sizeof wide);
    else
        memcpy(&wide, from, (size_t)n * 4);
    return wide;
}

INLINE TARGET void NAME(save_floats)(float *to, int n, lanes wide) {
    if (n == LANES)
        memcpy(to, &wide, sizeof wide);
    else
        memcpy(to, &wide, (size_t)n * 4);
}

/* LANES values, or the first `n` and zeros, and back. */
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
    return NAME(load_floats)((const float *)from, n);
}

/* The nearest bfloat16, as the upper half of 32 bits. */
INLINE TARGET uints NAME(rounded)(lanes wide) {
    const uints bits = (uints)wide;
    const uints is_nan = (uints)(wide != wide);
    const uints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    return (is_nan & (bits | 0x400000) & 0xffff0000) | (~is_nan & rounded);
}

INLINE TARGET void NAME(save)(void *values, int64_t begin, int n, lanes wide, const int is_bf16) {
    char *to = at(values, begin, is_bf16);
    if (is_bf16) {
        const shorts narrow = __builtin_convertvector(NAME(rounded)(wide) >> 16, shorts);
        if (n == LANES)
            memcpy(to, &narrow, sizeof narrow);
        else
            memcpy(to, &narrow, (size_t)n * 2);
    } else {
        NAME(save_floats)((float *)to, n, wide);
    }
}

/* The sum of PARTS parts, in a fixed order. */
INLINE TARGET float NAME(sum)(const lanes *parts) {
    float values[PARTS];
    memcpy(values, parts, sizeof values);
    for (int step = PARTS / 2; step; step /= 2)
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

/* e^x to two units in the last place, by (e^x - 1 - x) / x^2 on half of ln 2 to both sides (Chebyshev points); x is
 * clamped to [-87.3, 88]. */
INLINE TARGET lanes NAME(exponential)(lanes x) {
    const lanes low = NAME(broadcast)(-87.3f), high = NAME(broadcast)(88.0f);
    const lanes magic = NAME(broadcast)(12582912.0f); /* 1.5 * 2^23 */
    x = NAME(more)(low, NAME(less)(high, x));
    const lanes shifted = NAME(fused)(x, NAME(broadcast)(1.44269504f), magic); /* rounds to a whole number */
    const ints power = (ints)shifted - 0x4b400000;
    const lanes whole = shifted - magic;
    lanes rest = NAME(fused)(whole, NAME(broadcast)(-0.693359375f), x); /* ln 2 in two parts */
    rest = NAME(fused)(whole, NAME(broadcast)(2.12194440e-4f), rest);
    lanes y = NAME(broadcast)(0.00019899334f);
    y = NAME(fused)(y, rest, NAME(broadcast)(0.0013933688f));
    y = NAME(fused)(y, rest, NAME(broadcast)(0.008333298f));
    y = NAME(fused)(y, rest, NAME(broadcast)(0.041666463f));
    y = NAME(fused)(y, rest, NAME(broadcast)(0.16666667f));
    y = NAME(fused)(y, rest, NAME(broadcast)(0.5f));
    y = NAME(fused)(y, rest * rest, rest) + 1.0f;
    return y * (lanes)((uints)(power + 127) << 23);
}

/* x times its sigmoid. */
INLINE TARGET lanes NAME(silu)(lanes x) { return x / (1.0f + NAME(exponential)(-x)); }

/* tanh, to about two units in the last place: by its series near 0, where e^2x would lose digits. */
INLINE TARGET lanes NAME(hyperbolic_tangent)(lanes x) {
    const lanes square = x * x;
    lanes y = NAME(broadcast)(0.0035921280f);
    y = NAME(fused)(y, square, NAME(broadcast)(-0.0088632355f));
    y = NAME(fused)(y, square, NAME(broadcast)(0.021869488f));
    y = NAME(fused)(y, square, NAME(broadcast)(-0.053968254f));
    y = NAME(fused)(y, square, NAME(broadcast)(0.13333333f));
    y = NAME(fused)(y, square, NAME(broadcast)(-0.33333333f));
    const lanes near = NAME(fused)(y * square, x, x);
    const lanes far = 1.0f - 2.0f / (1.0f + NAME(exponential)(2.0f * x));
    return NAME(select)(square < 0.25f, near, far);
}

/* Included by files that are included once for each instruction set, behind vectors_body.h: exponentials and
 * logarithms of vectors of float64, of sums and products alone, for no two C libraries have the same. */

typedef double NAME(doubles) __attribute__((vector_size(4 * LANES)));
typedef uint64_t NAME(longs) __attribute__((vector_size(4 * LANES)));
typedef float NAME(half) __attribute__((vector_size(2 * LANES)));
#define doubles NAME(doubles)
#define longs NAME(longs)
#define half NAME(half)
#define HALF (LANES / 2)
#define of_half(width, begin) ((width) - (begin) < HALF ? (width) > (begin) ? (int)((width) - (begin)) : 0 : HALF)

/* The first `n` of HALF floats, and zeros. */
INLINE TARGET doubles NAME(load_wide)(const float *from, int n) {
    half narrow = {0};
    if (n == HALF)
        memcpy(&narrow, from, sizeof narrow);
    else
        memcpy(&narrow, from, (size_t)n * 4);
    return __builtin_convertvector(narrow, doubles);
}

INLINE TARGET void NAME(save_wide)(float *to, int n, doubles wide) {
    const half narrow = __builtin_convertvector(wide, half);
    if (n == HALF)
        memcpy(to, &narrow, sizeof narrow);
    else
        memcpy(to, &narrow, (size_t)n * 4);
}

INLINE TARGET doubles NAME(select_wide)(longs where, doubles yes, doubles no) {
    return (doubles)((where & (longs)yes) | (~where & (longs)no));
}

#define HALF_TO_WHOLE 6755399441055744.0 /* 1.5 * 2^52: adding it rounds to a whole number */

/* Makes e^x of each x of up to 4 vectors, off by about 1e-16 of it. Several at once do not wait for each other. */
INLINE TARGET void NAME(exponentials)(doubles *x, const int n) {
    static const double inverses[] = {
        1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
        1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    const doubles zero = {0}, whole = zero + HALF_TO_WHOLE;
    doubles shifted[4], series[4];
    for (int at = 0; at < n; at++) {
        x[at] = NAME(select_wide)((longs)(x[at] < -700.0), zero - 700.0, x[at]);
        x[at] = NAME(select_wide)((longs)(x[at] > 700.0), zero + 700.0, x[at]);
        shifted[at] = x[at] * 1.4426950408889634 + whole;
        const doubles power = shifted[at] - whole;
        x[at] = (x[at] - power * 6.93147180369123816490e-01) - power * 1.90821492927058770002e-10;
        series[at] = zero;
    }
    for (int term = 13; term >= 0; term--)
        for (int at = 0; at < n; at++) series[at] = series[at] * x[at] + inverses[term];
    for (int at = 0; at < n; at++) x[at] = series[at] * (doubles)(((longs)shifted[at] - (longs)whole + 1023) << 52);
}

/* Makes ln(1 + x) of each x, none below 0, likewise. */
INLINE TARGET void NAME(logarithms_after_one)(doubles *x, const int n) {
    static const double inverses[] = {1.0,      1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                                      1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
    const doubles zero = {0}, whole = zero + HALF_TO_WHOLE;
    doubles power[4], square[4], series[4];
    for (int at = 0; at < n; at++) { /* above 0.4: 1 + x = m * 2^power, m within sqrt(1/2) and sqrt(2) */
        const longs bits = (longs)(1.0 + x[at]), fraction = bits << 12 >> 12, is_large = (longs)(x[at] > 0.4);
        const longs is_small = (longs)((doubles)(fraction | (uint64_t)1022 << 52) < 0.7071067811865476);
        const doubles m = (doubles)(fraction | (1022 - is_small) << 52);
        power[at] = (doubles)((longs)whole + (((bits >> 52) - 1022 + is_small) & is_large)) - whole;
        x[at] = NAME(select_wide)(is_large, m - 1.0, x[at]);
        x[at] = x[at] / (2.0 + x[at]);
        square[at] = x[at] * x[at];
        series[at] = zero;
    }
    for (int term = 11; term >= 0; term--)
        for (int at = 0; at < n; at++) series[at] = series[at] * square[at] + inverses[term];
    for (int at = 0; at < n; at++)
        x[at] = power[at] * 6.93147180369123816490e-01 +
                (2.0 * x[at] * series[at] + power[at] * 1.90821492927058770002e-10);
}

/* Makes ln(1 + e^x) of each x. */
INLINE TARGET void NAME(softpluses)(doubles *x, const int n) {
    doubles given[4];
    for (int at = 0; at < n; at++) given[at] = x[at];
    NAME(exponentials)(x, n);
    NAME(logarithms_after_one)(x, n);
    for (int at = 0; at < n; at++) x[at] = NAME(select_wide)((longs)(given[at] > 40.0), given[at], x[at]);
}

#undef HALF_TO_WHOLE

/* Words for numbers of 64 bits: a device's own, or by whole numbers where a dialect has none (Metal, some OpenCL). These
 * round to the nearest, ties to even; what would be subnormal is 0, and an infinite float is 2^128. */

#ifdef REAL
#define REAL_ADD(a, b) ((a) + (b))
#define REAL_MUL(a, b) ((a) * (b))
#define REAL_DIV(a, b) ((a) / (b))
#define WIDE(x) ((REAL)(x))
#define NARROW(real) ((float)(real))
#else
#define REAL uint64_t
#define REAL_OF_BITS(bits) ((uint64_t)(bits))
#define BITS_OF_REAL(real) (real)
#define SIGN_BIT ((uint64_t)1 << 63)
#define MANTISSA(real) (((real) & (((uint64_t)1 << 52) - 1)) | (uint64_t)1 << 52)
#define EXPONENT(real) ((int)((real) >> 52 & 2047))
#define IS_ODD(real) (EXPONENT(real) == 2047) /* no number */

/* m * 2^exponent. */
INLINE uint64_t real_of(uint64_t sign, int exponent, uint64_t m) {
    if (m == 0) return sign;
    for (int step = 32; step; step /= 2)
        if (!(m >> (64 - step))) m <<= step, exponent -= step;
    const uint64_t low = m & 2047, kept = m >> 11;
    m = kept + (low > 1024 || (low == 1024 && (kept & 1)));
    return exponent < -1085 ? sign : sign | (((uint64_t)(exponent + 1085) << 52) + m);
}

INLINE uint64_t REAL_ADD(uint64_t a, uint64_t b) {
    const uint64_t large = a << 1 < b << 1 ? b : a, small = large ^ a ^ b;
    if (IS_ODD(large) || small << 1 == 0) return large;
    const int shift = EXPONENT(large) - EXPONENT(small);
    uint64_t m = MANTISSA(large) << 10, n = MANTISSA(small) << 10;
    n = shift > 62 ? 1 : n >> shift | ((n & (((uint64_t)1 << shift) - 1)) != 0);
    m = (a ^ b) & SIGN_BIT ? m - n : m + n;
    return real_of(m ? large & SIGN_BIT : 0, EXPONENT(large) - 1085, m);
}

INLINE uint64_t REAL_MUL(uint64_t a, uint64_t b) {
    const uint64_t sign = (a ^ b) & SIGN_BIT, m = MANTISSA(a) << 11, n = MANTISSA(b) << 11;
    if (IS_ODD(a) || IS_ODD(b)) return IS_ODD(a) ? a : b;
    if (a << 1 == 0 || b << 1 == 0) return sign;
    const uint64_t low = (m & 0xffffffff) * (n & 0xffffffff), one = (m >> 32) * (n & 0xffffffff) + (low >> 32);
    const uint64_t other = (m & 0xffffffff) * (n >> 32) + (one & 0xffffffff);
    const uint64_t high = (m >> 32) * (n >> 32) + (one >> 32) + (other >> 32);
    return real_of(sign, EXPONENT(a) + EXPONENT(b) - 2108, high | (((other | low) & 0xffffffff) != 0));
}

INLINE uint64_t REAL_DIV(uint64_t a, uint64_t b) {
    uint64_t rest = MANTISSA(a), found = 0;
    if (IS_ODD(b) || a << 1 == 0) return IS_ODD(b) ? b : a;
    for (int i = 0; i < 56; i++, rest <<= 1) {
        const int fits = rest >= MANTISSA(b);
        found = found << 1 | fits;
        if (fits) rest -= MANTISSA(b);
    }
    return real_of((a ^ b) & SIGN_BIT, EXPONENT(a) - EXPONENT(b) - 56, found << 1 | (rest != 0));
}

INLINE uint64_t WIDE(float x) {
    const uint32_t bits = (uint32_t)AS_INT(x), size = bits & 0x7fffffffu;
    const uint64_t sign = (uint64_t)(bits >> 31) << 63;
    return size < 0x800000u ? sign : sign | (((uint64_t)size << 29) + ((uint64_t)(size > 0x7f800000u ? 1792 : 896) << 52));
}

/* The nearest float of a number that is not negative. */
INLINE float NARROW(uint64_t real) {
    const int exponent = EXPONENT(real) - 896, shift = exponent < 1 ? 30 - exponent : 29;
    if (shift > 54 || exponent > 254) return exponent < 1 ? 0.0f : AS_FLOAT(exponent > 1150 ? 0x7fc00000u : 0x7f800000u);
    const uint64_t m = MANTISSA(real), kept = m >> shift, low = m << (64 - shift), half_way = SIGN_BIT;
    const uint32_t bits = (uint32_t)kept + (low > half_way || (low == half_way && (kept & 1)));
    return AS_FLOAT(exponent < 1 ? bits : ((uint32_t)(exponent - 1) << 23) + bits);
}
#endif

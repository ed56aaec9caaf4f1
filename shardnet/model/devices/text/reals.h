/* Words for numbers of 64 bits: a device's own, or by whole numbers where a dialect has none (Metal, some OpenCL). These
 * round to the nearest, ties to even; what would be subnormal is 0, and an infinite float is 2^128. Exponentials and
 * logarithms of such numbers, step by step as csrc/doubles_body.h has them. */

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

/* Of factorials from that of 13 on, and of odd numbers from 23 on, one by each. */
TABLE uint64_t INVERSES[26] = {
    0x3de6124613a86d09, 0x3e21eed8eff8d898, 0x3e5ae64567f544e4, 0x3e927e4fb7789f5c, 0x3ec71de3a556c734,
    0x3efa01a01a01a01a, 0x3f2a01a01a01a01a, 0x3f56c16c16c16c17, 0x3f81111111111111, 0x3fa5555555555555,
    0x3fc5555555555555, 0x3fe0000000000000, 0x3ff0000000000000, 0x3ff0000000000000, 0x3fa642c8590b2164,
    0x3fa8618618618618, 0x3faaf286bca1af28, 0x3fae1e1e1e1e1e1e, 0x3fb1111111111111, 0x3fb3b13b13b13b14,
    0x3fb745d1745d1746, 0x3fbc71c71c71c71c, 0x3fc2492492492492, 0x3fc999999999999a, 0x3fd5555555555555,
    0x3ff0000000000000};
#define REAL_ONE REAL_OF_BITS(0x3ff0000000000000)
#define NEGATIVE(real) REAL_OF_BITS(BITS_OF_REAL(real) ^ (uint64_t)1 << 63)

/* The sum of x^n by INVERSES, the last of them first. */
INLINE REAL series(REAL x, uint32_t begin, uint32_t end) {
    REAL sum = REAL_OF_BITS(0);
    for (uint32_t i = begin; i < end; i++) sum = REAL_ADD(REAL_MUL(sum, x), REAL_OF_BITS(INVERSES[i]));
    return sum;
}

INLINE REAL real_exponential(REAL x) {
    const uint64_t bits = BITS_OF_REAL(x), sign = bits >> 63 << 63, most = 0x4085e00000000000; /* 700 */
    const REAL whole = REAL_OF_BITS(0x4338000000000000);                                        /* 1.5 * 2^52 */
    if ((bits ^ sign) > 0x7ff0000000000000) return x;
    if ((bits ^ sign) > most) x = REAL_OF_BITS(sign | most);
    const REAL shifted = REAL_ADD(REAL_MUL(x, REAL_OF_BITS(0x3ff71547652b82fe)), whole);
    const REAL power = REAL_ADD(shifted, NEGATIVE(whole));
    REAL rest = REAL_ADD(x, REAL_MUL(power, REAL_OF_BITS(0xbfe62e42fee00000)));
    rest = REAL_ADD(rest, REAL_MUL(power, REAL_OF_BITS(0xbdea39ef35793c76)));
    const uint32_t exponent = (uint32_t)(BITS_OF_REAL(shifted) - BITS_OF_REAL(whole)) + 1023;
    return REAL_MUL(series(rest, 0, 14), REAL_OF_BITS((uint64_t)exponent << 52));
}

/* ln(1 + x) of x >= 0. */
INLINE REAL real_logarithm(REAL x) {
    REAL power = REAL_OF_BITS(0);
    if (BITS_OF_REAL(x) > 0x7ff0000000000000) return x;
    if (BITS_OF_REAL(x) > 0x3fd999999999999a) { /* 0.4: 1 + x = m * 2^power, m within sqrt(1/2) and sqrt(2) */
        const uint64_t bits = BITS_OF_REAL(REAL_ADD(REAL_ONE, x)), m = bits << 12 >> 12;
        const int is_small = (m | (uint64_t)1022 << 52) < 0x3fe6a09e667f3bcd;
        power = WIDE((float)((int)(bits >> 52) - 1022 - is_small));
        x = REAL_ADD(REAL_OF_BITS(m | (uint64_t)(1022 + is_small) << 52), NEGATIVE(REAL_ONE));
    }
    const REAL two = REAL_OF_BITS(0x4000000000000000), ratio = REAL_DIV(x, REAL_ADD(two, x));
    const REAL sum = REAL_MUL(REAL_MUL(two, ratio), series(REAL_MUL(ratio, ratio), 14, 26));
    const REAL low = REAL_ADD(sum, REAL_MUL(power, REAL_OF_BITS(0x3dea39ef35793c76)));
    return REAL_ADD(REAL_MUL(power, REAL_OF_BITS(0x3fe62e42fee00000)), low);
}

/* ln(1 + e^x), which is how long a step is. */
INLINE REAL softplus(REAL x) {
    const uint64_t bits = BITS_OF_REAL(x);
    return !(bits >> 63) && bits > 0x4044000000000000 ? x : real_logarithm(real_exponential(x)); /* 40 */
}

/* Exponentials and logarithms of float64, of sums and products alone. */

#ifndef SHARDNET_DOUBLES_H
#define SHARDNET_DOUBLES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "linear.h"

/* e^x, off by about 1e-16 of it: of sums and products alone, for no two C libraries have the same. */
INLINE double exponential_of(double x) {
    static const double half_to_whole = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number */
    if (x != x) return x;
    x = x < -700 ? -700 : x > 700 ? 700 : x;
    const double power = (x * 1.4426950408889634 + half_to_whole) - half_to_whole;
    const double rest = (x - power * 6.93147180369123816490e-01) - power * 1.90821492927058770002e-10;
    double series = 0, factor;
    static const double inverses[] = {1.0,         1.0,          1.0 / 2,         1.0 / 6,          1.0 / 24,
                                      1.0 / 120,   1.0 / 720,    1.0 / 5040,      1.0 / 40320,      1.0 / 362880,
                                      1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    for (int term = 13; term >= 0; term--) series = series * rest + inverses[term];
    const uint64_t bits = (uint64_t)((int64_t)power + 1023) << 52;
    memcpy(&factor, &bits, sizeof factor);
    return series * factor;
}

/* ln(1 + x) of x >= 0, likewise. */
INLINE double logarithm_after_one(double x) {
    double power = 0;
    if (x != x) return x;
    if (x > 0.4) { /* 1 + x = m * 2^power, m within sqrt(1/2) and sqrt(2): frexp is exact */
        int exponent;
        double m = frexp(1 + x, &exponent);
        if (m < 0.7071067811865476) m *= 2, exponent--;
        power = exponent, x = m - 1;
    }
    const double ratio = x / (2 + x), square = ratio * ratio;
    double series = 0;
    for (int term = 23; term > 0; term -= 2) series = series * square + 1.0 / term;
    return power * 6.93147180369123816490e-01 + (2 * ratio * series + power * 1.90821492927058770002e-10);
}

/* ln(1 + e^x). */
INLINE double steps_of(double x) { return x > 40 ? x : logarithm_after_one(exponential_of(x)); }

#endif

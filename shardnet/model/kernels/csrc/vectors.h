/* What vectors_body.h needs besides the names of an instruction set. */

#ifndef SHARDNET_VECTORS_H
#define SHARDNET_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "linear.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#endif

#define PARTS 16 /* of a sum over a row: the lanes of the widest vectors */

/* a * b + c, rounded once, where no instruction does it. The product is exact in float64. Its sum with c is rounded to
 * odd there: to float32 that rounds as the exact sum would. */
INLINE float fused_alone(float a, float b, float c) {
    const double product = (double)a * b, sum = product + c;
    const double other = sum - product, missing = (product - (sum - other)) + (c - other);
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    if ((missing > 0 || missing < 0) && !(bits & 1)) { /* it is NaN of sums that are not finite */
        bits += (missing > 0) == (sum > 0) ? 1 : (uint64_t)-1;
        double odd;
        memcpy(&odd, &bits, 8);
        return (float)odd;
    }
    return (float)sum;
}

/* The address of a value in a row or slot, and the value. */
INLINE char *at(const void *values, int64_t index, int is_bf16) {
    return (char *)(uintptr_t)values + index * (is_bf16 ? 2 : 4);
}

INLINE float number(const void *values, int64_t index, int is_bf16) {
    if (is_bf16) {
        uint16_t bits;
        memcpy(&bits, at(values, index, 1), 2);
        return from_bf16(bits);
    }
    float value;
    memcpy(&value, at(values, index, 0), 4);
    return value;
}

#endif

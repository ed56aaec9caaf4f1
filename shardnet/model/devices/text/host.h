/* The words of the kernel text in C, for tests: a phase is a loop over all threads of a group, in an order of choice. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#define KERNEL void
#define INLINE static inline
#define GLOBAL
#define TABLE static const
#define SHARED static
static uint32_t GROUP_X, GROUP_Y;
#ifndef ORDER
#define ORDER(i) (i)
#endif
#define THREAD ORDER(turn)
#define WHERE /* a kernel is told where it runs */
#define PHASE for (uint32_t turn = 0; turn < THREADS; turn++)
#define OWN(type, name, n) static type name[THREADS][n]
#define MY(name) name[THREAD]
typedef struct { uint32_t of[4]; } FOUR;
#define UNROLLED
#define AHEAD
#define AHEAD_8
#define FMA fmaf
#define MUL(a, b) ((a) * (b))
#define ADD(a, b) ((a) + (b))
#define DIV(a, b) ((a) / (b))
#define SQRT sqrtf
#define NOT_A_NUMBER NAN
INLINE float AS_FLOAT(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE int AS_INT(float value) {
    int bits;
    memcpy(&bits, &value, 4);
    return bits;
}
#ifndef WITHOUT_REALS
#define REAL double
INLINE double REAL_OF_BITS(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}
INLINE uint64_t BITS_OF_REAL(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}
#endif
INLINE int DOT4(uint32_t a, uint32_t b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    return c;
}
INLINE float HALF(uint32_t bits) {
    const uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return AS_FLOAT(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return AS_FLOAT(sign | (exponent + 112) << 23 | mantissa << 13);
    return AS_FLOAT(sign | (uint32_t)AS_INT((float)mantissa * 0x1p-24f));
}

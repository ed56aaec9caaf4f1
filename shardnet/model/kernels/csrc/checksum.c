/* CRC-32 by products without carries: 64 bytes at a time are folded onto the 64 that follow.
 *
 * What stands for the bytes in front of others may be anything that leaves the same remainder: 16 bytes do, times what
 * x to the power of their distance leaves. pack_cache.py lets zlib sum up the 16 bytes that stand for all in the end.
 */

#include <stdint.h>

#include "linear.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define WITH_PRODUCTS __attribute__((target("pclmul,sse4.1")))
#define PCLMUL_SSE41 (1u << 1 | 1u << 19) /* leaf 1, ecx */

/* What x^(8 * distance + 32) and x^(8 * distance - 32) leave, bits turned round, as all of this CRC is. */
#define OVER_64_BYTES _mm_set_epi64x(0x1c6e41596, 0x154442bd4)
#define OVER_16_BYTES _mm_set_epi64x(0x0ccaa009e, 0x1751997d0)

INLINE WITH_PRODUCTS __m128i load(const uint8_t *bytes) { return _mm_loadu_si128((const __m128i *)bytes); }

INLINE WITH_PRODUCTS __m128i fold(__m128i bytes, __m128i distance, __m128i onto) {
    const __m128i low = _mm_clmulepi64_si128(bytes, distance, 0x00);
    const __m128i high = _mm_clmulepi64_si128(bytes, distance, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

WITH_PRODUCTS static void fold_all(const uint8_t *bytes, int64_t n, uint8_t *folded) {
    const __m128i far = OVER_64_BYTES, near = OVER_16_BYTES;
    __m128i a = _mm_xor_si128(load(bytes), _mm_cvtsi32_si128(-1)); /* where a CRC begins */
    __m128i b = load(bytes + 16), c = load(bytes + 32), d = load(bytes + 48);
    for (bytes += 64, n -= 64; n >= 64; bytes += 64, n -= 64) {
        a = fold(a, far, load(bytes));
        b = fold(b, far, load(bytes + 16));
        c = fold(c, far, load(bytes + 32));
        d = fold(d, far, load(bytes + 48));
    }
    a = fold(fold(fold(a, near, b), near, c), near, d);
    for (; n >= 16; bytes += 16, n -= 16) a = fold(a, near, load(bytes));
    _mm_storeu_si128((__m128i *)folded, a);
}

int32_t shardnet_can_fold(void) {
    uint32_t a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & PCLMUL_SSE41) == PCLMUL_SSE41;
}
#else
static void fold_all(const uint8_t *bytes, int64_t n, uint8_t *folded) { (void)bytes, (void)n, (void)folded; }

int32_t shardnet_can_fold(void) { return 0; }
#endif

/* Makes 16 bytes that, before those behind the last whole 16 of `n`, 64 or more, and summed up from 0 on, have the CRC
 * of all. */
void shardnet_fold(const uint8_t *bytes, int64_t n, uint8_t *folded) { fold_all(bytes, n, folded); }

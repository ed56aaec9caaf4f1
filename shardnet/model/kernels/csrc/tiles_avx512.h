/* What tiles for AVX-512 and AMX share: how scales and codes of a panel are read. */

#ifndef SHARDNET_TILES_AVX512_H
#define SHARDNET_TILES_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "tiles.h"

#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))

INLINE WITH_AVX512 __m512 avx512_float16(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE WITH_AVX512 void avx512_halves(const uint8_t *from, float out[PANEL]) {
    _mm512_storeu_ps(out, avx512_float16(from));
}

#define TARGET WITH_AVX512 __attribute__((unused)) /* by some files that include this */
#define NAME(x) avx512_##x
#define LANES 16
#define HALVES avx512_halves
#define BYTES(from) (avx512_panel_words) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#include "panel_body.h"
#undef TARGET
#undef NAME
#undef LANES
#undef HALVES
#undef BYTES

INLINE WITH_AVX512 __m512i avx512_line(const uint8_t *unit, const int line) {
    return _mm512_loadu_si512(unit + line * QUAD_BYTES);
}

INLINE WITH_AVX512 __m512i avx512_moved(__m512i bits, const int from, const int to) {
    return from < to ? _mm512_slli_epi16(bits, to - from) : from > to ? _mm512_srli_epi16(bits, from - to) : bits;
}

/* The bits of quad `quad` in a plane of `bits` bits that begins at line `first`, moved to bit `to`. */
INLINE WITH_AVX512 __m512i avx512_plane(const int bits, const uint8_t *unit, const int first, const int quad,
                                        const int to) {
    const int each = 8 / bits;
    const __m512i line = avx512_line(unit, first + quad / each);
    return _mm512_and_si512(avx512_moved(line, quad % each * bits, to),
                            _mm512_set1_epi8((char)(((1 << bits) - 1) << to)));
}

/* The codes of four inputs of all outputs, unsigned bytes. */
INLINE WITH_AVX512 __m512i avx512_codes(const int bits, const uint8_t *unit, const int quad) {
    switch (bits) {
        case 2:
            return avx512_plane(2, unit, 0, quad, 0);
        case 3:
            return _mm512_or_si512(avx512_plane(2, unit, 0, quad, 0), avx512_plane(1, unit, 2, quad, 2));
        case 4:
            return avx512_plane(4, unit, 0, quad, 0);
        case 5:
            return _mm512_or_si512(avx512_plane(4, unit, 0, quad, 0), avx512_plane(1, unit, 4, quad, 4));
        case 6:
            return _mm512_or_si512(avx512_plane(4, unit, 0, quad, 0), avx512_plane(2, unit, 4, quad, 4));
        default:
            return avx512_line(unit, quad);
    }
}

#endif

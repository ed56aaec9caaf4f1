/* What all tiles for AVX2 share: how scales and codes of a panel are read. */

#ifndef SHARDNET_TILES_AVX2_H
#define SHARDNET_TILES_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "tiles.h"

#define WITH_AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX2_MOST_ROWS 4 /* quantised rows that are multiplied by both halves of a panel at once */
/* Has a sum made here: compilers would compute all that is added first, and keep it in memory. */
#define IN_ORDER(vector) __asm__ volatile("" : "+x"(vector))

#define AVX2_AHEAD \
    1024 /* bytes that weights are prefetched ahead; AHEAD by tiles that stop at each stretch for scales */

/* For the first tile of rows: the machine's own prefetching ends at each page. */
INLINE WITH_AVX2 void avx2_prefetch(const uint8_t *w, const int ahead) {
    _mm_prefetch((const char *)w + ahead, _MM_HINT_T0);
}

INLINE WITH_AVX2 void avx2_halves(const uint8_t *from, float out[PANEL]) {
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
    _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + 1)));
}

#define TARGET WITH_AVX2 __attribute__((unused)) /* by some files that include this */
#define NAME(x) avx2_##x
#define LANES 8
#define HALVES avx2_halves
#define BYTES(from) (avx2_panel_words) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#include "panel_body.h"
#undef TARGET
#undef NAME
#undef LANES
#undef HALVES
#undef BYTES

INLINE WITH_AVX2 __m256i avx2_line(const uint8_t *unit, const int line, int half) {
    return _mm256_loadu_si256((const __m256i *)(unit + line * QUAD_BYTES + 32 * half));
}

/* Moves the bits from `from` on to `to`; the others are of no use. */
INLINE WITH_AVX2 __m256i avx2_moved(__m256i bits, const int from, const int to) {
    return from < to ? _mm256_slli_epi16(bits, to - from) : from > to ? _mm256_srli_epi16(bits, from - to) : bits;
}

/* The bits of quad `quad` in a plane of `bits` bits that begins at line `first`, moved to bit `to`. */
INLINE WITH_AVX2 __m256i avx2_plane(const int bits, const uint8_t *unit, const int first, const int quad, const int to,
                                    int half) {
    const int each = 8 / bits;
    const __m256i line = avx2_line(unit, first + quad / each, half);
    return _mm256_and_si256(avx2_moved(line, quad % each * bits, to),
                            _mm256_set1_epi8((char)(((1 << bits) - 1) << to)));
}

/* The codes of four inputs of eight outputs, unsigned bytes. */
INLINE WITH_AVX2 __m256i avx2_codes(const int bits, const uint8_t *unit, const int quad, int half) {
    switch (bits) {
        case 2:
            return avx2_plane(2, unit, 0, quad, 0, half);
        case 3:
            return _mm256_or_si256(avx2_plane(2, unit, 0, quad, 0, half), avx2_plane(1, unit, 2, quad, 2, half));
        case 4:
            return avx2_plane(4, unit, 0, quad, 0, half);
        case 5:
            return _mm256_or_si256(avx2_plane(4, unit, 0, quad, 0, half), avx2_plane(1, unit, 4, quad, 4, half));
        case 6:
            return _mm256_or_si256(avx2_plane(4, unit, 0, quad, 0, half), avx2_plane(2, unit, 4, quad, 4, half));
        default:
            return avx2_line(unit, quad, half);
    }
}

/* How codes are multiplied: as unsigned bytes; looked up in a book of such; or as signed bytes. */
enum avx2_kind { AVX2_UNSIGNED, AVX2_BOOK, AVX2_SIGNED, AVX2_SIGNED_BOOK };

/* Quads whose products of 16 bits may be added: a code's largest value times 2 * 127 each. */
INLINE int avx2_depth(const int bits, const int kind) {
    if (kind == AVX2_BOOK) return 4;
    return bits <= 4 ? 8 : bits == 5 ? 4 : 2;
}

/* Numbers of eight outputs in turns. */
INLINE WITH_AVX2 void avx2_interleave(const int16_t *even, const int16_t *odd, int16_t out[16]) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)even));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)odd));
    _mm256_storeu_si256((__m256i *)out, _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
}

/* Whether a block is a token group with float16 scales, of a size and kind that have tiles of their own. */
INLINE int is_plain(const struct form *f) {
    if (f->code != LINEAR || f->scale != SCALE_FLOAT16 || f->factor != 1) return 0;
    if (f->block != f->group || f->token_group != f->group) return 0;
    if (f->minimum == STORED) return f->bits == 4 && f->group == UNIT;
    if (f->minimum != NO_MINIMUM) return 0;
    return f->group == UNIT ? f->bits == 4 || f->bits == 5 || f->bits == 8 : f->bits == 8 && f->group == 2 * UNIT;
}

struct tiles shardnet_avx2_plain_tiles(const struct linear *p); /* where the form is plain */

#endif

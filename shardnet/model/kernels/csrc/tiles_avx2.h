/* Tiles for AVX2: a panel's outputs are two registers, both at once where enough registers are free. */

#include <immintrin.h>

#define WITH_AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX2_ROWS_OF_BOTH 3 /* of quantised rows */
#define AVX2_WIDE_ROWS 4    /* of float32 that are multiplied together */

/* The rows [begin, begin + n_rows) of a tile of float32, both halves of a panel: as many sums as registers hold. */
INLINE WITH_AVX2 void avx2_wide_part(const int n_tile, const int begin, const int n_rows, const struct linear *p,
                                     const uint8_t *w, int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    const float *x = floats_of(p, row) + begin;
    __m256 total[2][MAX_TILE];
    for (int h = 0; h < 2; h++)
        for (int r = 0; r < n_rows; r++) total[h][r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES, x += 2 * n_tile) {
        __m256 first[2], second[2];
        for (int h = 0; h < 2; h++) {
            const __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * h));
            first[h] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            second[h] = _mm256_castsi256_ps(_mm256_and_si256(both, high));
        }
        for (int r = 0; r < n_rows; r++) {
            const __m256 own = _mm256_broadcast_ss(x + r);
            for (int h = 0; h < 2; h++) total[h][r] = _mm256_fmadd_ps(first[h], own, total[h][r]);
        }
        for (int r = 0; r < n_rows; r++) {
            const __m256 own = _mm256_broadcast_ss(x + n_tile + r);
            for (int h = 0; h < 2; h++) total[h][r] = _mm256_fmadd_ps(second[h], own, total[h][r]);
        }
    }
    for (int h = 0; h < 2; h++)
        for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[0][begin + r] + 8 * h, total[h][r]);
}

INLINE WITH_AVX2 void avx2_wide_of(const int n_rows, const struct linear *p, const uint8_t *w, int64_t row,
                                   float sums[2][MAX_TILE][PANEL]) {
    const int most = n_rows <= AVX2_WIDE_ROWS ? n_rows : (n_rows + 1) / 2;
    avx2_wide_part(n_rows, 0, most, p, w, row, sums);
    if (most < n_rows) avx2_wide_part(n_rows, most, n_rows - most, p, w, row, sums);
}

/* Quantised rows and weights. */
INLINE WITH_AVX2 void avx2_quantized_of(const int n_rows, const int n_halves, int half, const int bits,
                                        const struct linear *p, const uint8_t *w, int64_t row,
                                        float sums[2][MAX_TILE][PANEL]) {
    const int32_t group = p->group;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    const int8_t *x = quads_of(p, row);
    __m256 total[2][MAX_TILE];
    for (int h = 0; h < n_halves; h++)
        for (int r = 0; r < n_rows; r++) total[h][r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < p->n_groups; g++) {
        __m256 scale[2];
        __m256i sum[2][MAX_TILE];
        for (int h = 0; h < n_halves; h++)
            scale[h] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w + 16 * (half + h))));
        for (int r = 0; r < n_rows; r++)
            sum[0][r] = sum[1][r] = _mm256_set1_epi32(bits == 8 ? 0 : p->offsets[(row + r) * p->n_groups + g]);
        w += SCALE_BYTES;
        for (int32_t k = 0; k < group; k += bits == 8 ? 4 : 8, w += QUAD_BYTES) {
            for (int h = 0; h < n_halves; h++) {
                const __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * (half + h)));
                if (bits == 8) {
                    const __m256i own = _mm256_xor_si256(both, flip), size = _mm256_abs_epi8(own);
                    for (int r = 0; r < n_rows; r++) {
                        const __m256i quad = _mm256_set1_epi32(quad_at(x + 4 * r));
                        /* At most 2 * 127 * 127, which 16 bits hold. */
                        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(quad, own));
                        sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(pairs, ones));
                    }
                } else {
                    const __m256i first = _mm256_and_si256(both, low);
                    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                    for (int r = 0; r < n_rows; r++) {
                        const __m256i quad = _mm256_set1_epi32(quad_at(x + 4 * r));
                        const __m256i next = _mm256_set1_epi32(quad_at(x + 4 * (n_rows + r)));
                        /* Each at most 2 * 15 * 127. */
                        const __m256i pairs =
                            _mm256_add_epi16(_mm256_maddubs_epi16(first, quad), _mm256_maddubs_epi16(second, next));
                        sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            x += bits == 8 ? 4 * n_rows : 8 * n_rows;
        }
        for (int r = 0; r < n_rows; r++) {
            const __m256 own = _mm256_set1_ps(p->scales[(row + r) * p->n_groups + g]);
            for (int h = 0; h < n_halves; h++)
                total[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[h][r]), _mm256_mul_ps(scale[h], own), total[h][r]);
        }
    }
    for (int h = 0; h < n_halves; h++)
        for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[0][r] + 8 * (half + h), total[h][r]);
}

#define AVX2_HALVES(n, OF, ...)   \
    if (n <= AVX2_ROWS_OF_BOTH)   \
        OF(n, 2, 0, __VA_ARGS__); \
    else                          \
        for (int half = 0; half < 2; half++) OF(n, 1, half, __VA_ARGS__)
#define AVX2_WIDE(n) avx2_wide_of(n, p, w, row, sums)
#define AVX2_EIGHT(n) AVX2_HALVES(n, avx2_quantized_of, 8, p, w, row, sums)
#define AVX2_FOUR(n) AVX2_HALVES(n, avx2_quantized_of, 4, p, w, row, sums)
TILE(avx2_wide, WITH_AVX2, AVX2_WIDE)
TILE(avx2_eight, WITH_AVX2, AVX2_EIGHT)
TILE(avx2_four, WITH_AVX2, AVX2_FOUR)

static const struct tiles avx2_wide_tiles = {avx2_wide, NULL};
static const struct tiles avx2_eight_tiles = {avx2_eight, NULL};
static const struct tiles avx2_four_tiles = {avx2_four, NULL};

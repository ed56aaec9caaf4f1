/* Tiles for AVX-512: with bfloat16 two panels at once, so that each broadcast of a row serves 32 outputs. */

#include <immintrin.h>

#define WITH_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))

/* With many rows, computing a page takes longer than hardware prefetching covers, which ends at each page: the first
 * tile of rows prefetches one page ahead. Few rows are bound by memory anyway, and prefetching slows them down. */
#define AHEAD 4096
#define PREFETCHING_ROWS 6
#define PREFETCHING_ROWS_OF_INT4 4

INLINE WITH_AVX512 void avx512_prefetch(const uint8_t *w) { _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T1); }

/* Rows of float32. */
INLINE WITH_AVX512 void avx512_wide_of(const int n_rows, const int n_panels, const struct linear *p, const uint8_t *w,
                                       int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const int64_t panel = bytes_of_panel(p);
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const float *x = floats_of(p, row);
    const int prefetches = n_rows >= PREFETCHING_ROWS / 2 && row == 0;
    __m512 total[2][MAX_TILE];
    for (int q = 0; q < n_panels; q++)
        for (int r = 0; r < n_rows; r++) total[q][r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES, x += 2 * n_rows) {
        __m512 first[2], second[2];
        for (int q = 0; q < n_panels; q++) {
            const __m512i both = _mm512_loadu_si512(w + q * panel);
            if (prefetches) avx512_prefetch(w + q * panel);
            first[q] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            second[q] = _mm512_castsi512_ps(_mm512_and_si512(both, high));
        }
        for (int r = 0; r < n_rows; r++) {
            const __m512 own = _mm512_set1_ps(x[r]);
            for (int q = 0; q < n_panels; q++) total[q][r] = _mm512_fmadd_ps(first[q], own, total[q][r]);
        }
        for (int r = 0; r < n_rows; r++) {
            const __m512 own = _mm512_set1_ps(x[n_rows + r]);
            for (int q = 0; q < n_panels; q++) total[q][r] = _mm512_fmadd_ps(second[q], own, total[q][r]);
        }
    }
    for (int q = 0; q < n_panels; q++)
        for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[q][r], total[q][r]);
}

/* A pair of a row for all outputs. Hidden from clang how it is made: clang 16 and 17 crash when they see it. */
INLINE WITH_AVX512_BF16 __m512bh avx512_spread(const uint16_t *pair) {
    __m512i spread = _mm512_set1_epi32(quad_at(pair));
#if defined(__clang__)
    __asm__("" : "+v"(spread));
#endif
    return (__m512bh)spread;
}

/* Rows of bfloat16, multiplied in pairs. */
INLINE WITH_AVX512_BF16 void avx512_pairs_of(const int n_rows, const int n_panels, const struct linear *p,
                                             const uint8_t *w, int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const int64_t panel = bytes_of_panel(p);
    const uint16_t *x = pairs_of(p, row);
    const int prefetches = n_rows >= PREFETCHING_ROWS && row == 0;
    __m512 total[2][MAX_TILE];
    for (int q = 0; q < n_panels; q++)
        for (int r = 0; r < n_rows; r++) total[q][r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES, x += 2 * n_rows) {
        __m512bh pairs[2];
        for (int q = 0; q < n_panels; q++) {
            pairs[q] = (__m512bh)_mm512_loadu_si512(w + q * panel);
            if (prefetches) _mm_prefetch((const char *)w + q * panel + AHEAD, _MM_HINT_T1);
        }
        for (int r = 0; r < n_rows; r++) {
            const __m512bh own = avx512_spread(x + 2 * r);
            for (int q = 0; q < n_panels; q++) total[q][r] = _mm512_dpbf16_ps(total[q][r], pairs[q], own);
        }
    }
    for (int q = 0; q < n_panels; q++)
        for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[q][r], total[q][r]);
}

/* Quantised rows and weights, one panel at a time: with two, registers run out. The sums of groups stay in memory. */
INLINE WITH_AVX512 void avx512_quantized_of(const int n_rows, const int bits, const struct linear *p, const uint8_t *w,
                                            int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const int group = bits == 8 ? INT8_GROUP : INT4_GROUP, group_bytes = SCALE_BYTES + group * PANEL * bits / 8;
    const __m512i low = _mm512_set1_epi8(15);
    const int8_t *x = quads_of(p, row);
    const int prefetches = n_rows >= (bits == 8 ? PREFETCHING_ROWS : PREFETCHING_ROWS_OF_INT4) && row == 0;
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[0][r], _mm512_setzero_ps());
    for (int64_t g = 0; g < p->n_groups; g++, w += group_bytes) {
        __m512i sum[MAX_TILE];
        if (prefetches)
            for (int byte = 0; byte < group_bytes; byte += 64) avx512_prefetch(w + byte);
        for (int r = 0; r < n_rows; r++) sum[r] = _mm512_set1_epi32(p->offsets[(row + r) * p->n_groups + g]);
        for (int quad = 0; quad < group / 4; quad += 2, x += 8 * n_rows) {
            const uint8_t *quads = w + SCALE_BYTES + quad * QUAD_BYTES * bits / 8;
            const __m512i both = _mm512_loadu_si512(quads);
            const __m512i first = bits == 8 ? both : _mm512_and_si512(both, low);
            const __m512i second =
                bits == 8 ? _mm512_loadu_si512(quads + QUAD_BYTES) : _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            for (int r = 0; r < n_rows; r++)
                sum[r] = _mm512_dpbusd_epi32(sum[r], first, _mm512_set1_epi32(quad_at(x + 4 * r)));
            for (int r = 0; r < n_rows; r++)
                sum[r] = _mm512_dpbusd_epi32(sum[r], second, _mm512_set1_epi32(quad_at(x + 4 * (n_rows + r))));
        }
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
        for (int r = 0; r < n_rows; r++) {
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(p->scales[(row + r) * p->n_groups + g]));
            const __m512 before = _mm512_loadu_ps(sums[0][r]);
            _mm512_storeu_ps(sums[0][r], _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), both, before));
        }
    }
}

#define ONE_WIDE(n) avx512_wide_of(n, 1, p, w, row, sums)
#define TWO_WIDE(n) avx512_wide_of(n, 2, p, w, row, sums)
#define ONE_PAIRS(n) avx512_pairs_of(n, 1, p, w, row, sums)
#define TWO_PAIRS(n) avx512_pairs_of(n, 2, p, w, row, sums)
#define ONE_EIGHT(n) avx512_quantized_of(n, 8, p, w, row, sums)
#define ONE_FOUR(n) avx512_quantized_of(n, 4, p, w, row, sums)
TILE(avx512_one_wide, WITH_AVX512, ONE_WIDE)
TILE(avx512_two_wide, WITH_AVX512, TWO_WIDE)
TILE(avx512_one_pairs, WITH_AVX512_BF16, ONE_PAIRS)
TILE(avx512_two_pairs, WITH_AVX512_BF16, TWO_PAIRS)
TILE(avx512_one_eight, WITH_AVX512, ONE_EIGHT)
TILE(avx512_one_four, WITH_AVX512, ONE_FOUR)

static const struct tiles avx512_wide_tiles = {avx512_one_wide, avx512_two_wide};
static const struct tiles avx512_pairs_tiles = {avx512_one_pairs, avx512_two_pairs};
static const struct tiles avx512_eight_tiles = {avx512_one_eight, NULL};
static const struct tiles avx512_four_tiles = {avx512_one_four, NULL};

/* Tiles for AVX2 of plain forms: a block is a token group with a float16 scale, and perhaps a minimum. What most files
 * have, without the steps that other forms need. */

#if defined(__x86_64__)
#include "tiles_avx2.h"

/* The rows [begin, begin + n_rows) of a tile, both halves of `n_panels` panels; a block is `units` units. */
INLINE WITH_AVX2 void avx2_plain_of(const int n_rows, const int n_panels, const int64_t n_tile, const int begin,
                                    const int bits, const int kind, const int units, const int adds_minimum,
                                    const struct linear *p, const uint8_t *w, int64_t row,
                                    float sums[2][MAX_TILE][PANEL]) {
    const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8((char)0x80);
    const int is_signed = kind == AVX2_SIGNED, depth = avx2_depth(bits, kind), n_halves = 2 * n_panels;
    const int header = 2 * PANEL * (1 + adds_minimum), bytes = header + units * bits * QUAD_BYTES;
    const int lines_of_unit = (bytes + units * QUAD_BYTES - 1) / (units * QUAD_BYTES);
    const int64_t n_groups = p->n_groups, at = (row + begin) * n_groups, panel = n_groups * bytes;
    const int8_t *x = quads_of(p, row) + 4 * begin;
    const float *x_scales = p->scales + at, *x_sums = p->sums + at;
    const int32_t *offsets = p->offsets + at;
    const int prefetches = !row && !begin;
    __m256 total[4][MAX_TILE];
    for (int h = 0; h < n_halves; h++)
        for (int r = 0; r < n_rows; r++) total[h][r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < n_groups; g++, w += bytes) {
        __m256i sum[4][MAX_TILE], pairs[4][MAX_TILE];
        for (int h = 0; h < n_halves; h++)
            for (int r = 0; r < n_rows; r++) sum[h][r] = _mm256_set1_epi32(offsets[r * n_groups + g]);
        for (int u = 0; u < units; u++, x += UNIT * n_tile) {
            const uint8_t *unit = w + header + u * bits * QUAD_BYTES;
            if (prefetches) /* each unit its part of the next block: more at a time than can be under way would wait */
                for (int q = 0; q < n_panels; q++)
                    UNROLLED for (int line = 0; line < lines_of_unit; line++)
                        avx2_prefetch(w + q * panel + (u * lines_of_unit + line) * QUAD_BYTES, AVX2_AHEAD);
            UNROLLED for (int q = 0; q < UNIT / 4; q++) {
                __m256i codes[4];
                for (int h = 0; h < n_halves; h++) {
                    codes[h] = avx2_codes(bits, unit + h / 2 * panel, q, h % 2);
                    if (is_signed) codes[h] = _mm256_xor_si256(codes[h], flip);
                }
                for (int r = 0; r < n_rows; r++) {
                    const __m256i quad = _mm256_set1_epi32(quad_at(x + 4 * (q * n_tile + r)));
                    for (int h = 0; h < n_halves; h++) {
                        if (is_signed) {
                            const __m256i some =
                                _mm256_maddubs_epi16(_mm256_abs_epi8(codes[h]), _mm256_sign_epi8(quad, codes[h]));
                            sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(some, ones));
                            IN_ORDER(sum[h][r]);
                            continue;
                        }
                        const __m256i some = _mm256_maddubs_epi16(codes[h], quad);
                        pairs[h][r] = q % depth ? _mm256_add_epi16(pairs[h][r], some) : some;
                        IN_ORDER(pairs[h][r]);
                        if (q % depth == depth - 1)
                            sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(pairs[h][r], ones));
                    }
                }
            }
        }
        for (int h = 0; h < n_halves; h++) {
            const __m128i *own = (const __m128i *)(w + h / 2 * panel) + h % 2;
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(own));
            for (int r = 0; r < n_rows; r++) {
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x_scales[r * n_groups + g]));
                total[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[h][r]), both, total[h][r]);
                if (adds_minimum)
                    total[h][r] = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128(own + 2)),
                                                  _mm256_set1_ps(x_sums[r * n_groups + g]), total[h][r]);
            }
        }
    }
    for (int h = 0; h < n_halves; h++)
        for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[h / 2][begin + r] + h % 2 * 8, total[h][r]);
}

#define AVX2_PLAIN_ROWS(n_rows, n_panels, ...) \
    avx2_plain_of(n_rows, n_panels, n_tile, begin, __VA_ARGS__, p, w, row, sums)
/* Also of one row and two panels: more of the weights are under way at a time. */
#define AVX2_PLAIN(NAME, ...)                                                                                   \
    static WITH_AVX2 void NAME(const struct linear *p, const uint8_t *w, int64_t row, const int n_tile,         \
                               float sums[2][MAX_TILE][PANEL]) {                                                \
        int begin = 0;                                                                                          \
        for (; begin + AVX2_MOST_ROWS <= n_tile; begin += AVX2_MOST_ROWS)                                       \
            AVX2_PLAIN_ROWS(AVX2_MOST_ROWS, 1, __VA_ARGS__);                                                    \
        if (n_tile - begin >= 2) {                                                                              \
            AVX2_PLAIN_ROWS(2, 1, __VA_ARGS__);                                                                 \
            begin += 2;                                                                                         \
        }                                                                                                       \
        if (begin < n_tile) AVX2_PLAIN_ROWS(1, 1, __VA_ARGS__);                                                 \
    }                                                                                                           \
    static WITH_AVX2 void NAME##_twice(const struct linear *p, const uint8_t *w, int64_t row, const int n_tile, \
                                       float sums[2][MAX_TILE][PANEL]) {                                        \
        (void)n_tile;                                                                                           \
        avx2_plain_of(1, 2, 1, 0, __VA_ARGS__, p, w, row, sums);                                                \
    }

AVX2_PLAIN(avx2_plain_4, 4, AVX2_UNSIGNED, 1, 0)
AVX2_PLAIN(avx2_plain_4_minimum, 4, AVX2_UNSIGNED, 1, 1)
AVX2_PLAIN(avx2_plain_5, 5, AVX2_UNSIGNED, 1, 0)
AVX2_PLAIN(avx2_plain_8, 8, AVX2_SIGNED, 1, 0)
AVX2_PLAIN(avx2_plain_8_wide, 8, AVX2_SIGNED, 2, 0)

static struct tiles plain_tiles(const struct form *f) {
    switch (f->bits) {
        case 4:
            if (f->minimum == STORED) return (struct tiles){avx2_plain_4_minimum, avx2_plain_4_minimum_twice};
            return (struct tiles){avx2_plain_4, avx2_plain_4_twice};
        case 5:
            return (struct tiles){avx2_plain_5, avx2_plain_5_twice};
        default:
            if (f->group == UNIT) return (struct tiles){avx2_plain_8, avx2_plain_8_twice};
            return (struct tiles){avx2_plain_8_wide, avx2_plain_8_wide_twice};
    }
}

struct tiles shardnet_avx2_plain_tiles(const struct linear *p) {
    struct tiles tiles = plain_tiles(&p->form);
    if (p->n_rows > 1) tiles.two = NULL;
    return tiles;
}

#endif

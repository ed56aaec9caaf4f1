/* Tiles for AVX2: a panel's outputs are two registers, both at once where enough registers are free. */

#if defined(__x86_64__)
#include "tiles_avx2.h"

#define AVX2_WIDE_ROWS 4   /* of float32 that are multiplied together */
#define AVX2_PAIRED_ROWS 2 /* of float32 that are multiplied with two panels at once */

/* The rows [begin, begin + n_rows) of a tile of float32, both halves of `n_panels` panels: as many sums as registers
 * hold. Few rows take two panels, or each sum would wait for the one before it. */
INLINE WITH_AVX2 void avx2_wide_part(const int is_f16, const int n_tile, const int begin, const int n_rows,
                                     const int n_panels, const struct linear *p, const uint8_t *w, int64_t row,
                                     float sums[2][MAX_TILE][PANEL]) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    const int64_t panel = bytes_of_panel(p);
    const float *x = floats_of(p, row) + begin;
    const int prefetches = !row && !begin, n_halves = 2 * n_panels;
    __m256 total[4][MAX_TILE];
    for (int h = 0; h < n_halves; h++)
        for (int r = 0; r < n_rows; r++) total[h][r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES, x += 2 * n_tile) {
        __m256 first[4], second[4];
        for (int h = 0; h < n_halves; h++) {
            const uint8_t *at = w + h / 2 * panel + h % 2 * 32;
            const __m256i both = _mm256_loadu_si256((const __m256i *)at);
            if (prefetches && h % 2 == 0) avx2_prefetch(at, AVX2_AHEAD);
            if (is_f16) {
                const __m256i mixed = _mm256_packus_epi32(_mm256_andnot_si256(high, both), _mm256_srli_epi32(both, 16));
                const __m256i apart = _mm256_permute4x64_epi64(mixed, 0xd8);
                first[h] = _mm256_cvtph_ps(_mm256_castsi256_si128(apart));
                second[h] = _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
            } else {
                first[h] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
                second[h] = _mm256_castsi256_ps(_mm256_and_si256(both, high));
            }
        }
        for (int r = 0; r < n_rows; r++) {
            const __m256 own = _mm256_broadcast_ss(x + r);
            for (int h = 0; h < n_halves; h++) total[h][r] = _mm256_fmadd_ps(first[h], own, total[h][r]);
        }
        for (int r = 0; r < n_rows; r++) {
            const __m256 own = _mm256_broadcast_ss(x + n_tile + r);
            for (int h = 0; h < n_halves; h++) total[h][r] = _mm256_fmadd_ps(second[h], own, total[h][r]);
        }
    }
    for (int h = 0; h < n_halves; h++)
        for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[h / 2][begin + r] + h % 2 * 8, total[h][r]);
}

INLINE WITH_AVX2 void avx2_wide_of(const int n_rows, const int is_f16, const struct linear *p, const uint8_t *w,
                                   int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const int most = n_rows <= AVX2_WIDE_ROWS ? n_rows : (n_rows + 1) / 2;
    avx2_wide_part(is_f16, n_rows, 0, most, 1, p, w, row, sums);
    if (most < n_rows) avx2_wide_part(is_f16, n_rows, most, n_rows - most, 1, p, w, row, sums);
}

/* The rows [begin, begin + n_rows) of a tile of quantised rows, `n_halves`
 * halves of a panel from `half` on. With `apart` a token group is 16 inputs. */
INLINE WITH_AVX2 void avx2_quantized_of(const int n_rows, const int n_halves, int half, int begin, int64_t n_tile,
                                        const int bits, const int kind,
                                        const int apart, const struct linear *p, const uint8_t *w, int64_t row,
                                        float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8((char)0x80);
    const int is_signed = kind == AVX2_SIGNED || kind == AVX2_SIGNED_BOOK;
    const int is_book = kind == AVX2_BOOK || kind == AVX2_SIGNED_BOOK, depth = avx2_depth(bits, kind);
    const int n_groups = (int)p->n_groups;
    const int units = f->token_group > UNIT ? f->token_group / UNIT : 1; /* of a token group */
    const int adds_minimum = has_minimum(f);
    const int64_t unit_bytes = f->bits * QUAD_BYTES;
    const int prefetches = !row && !begin && !half;
    const int8_t *x = quads_of(p, row) + 4 * begin;
    const int64_t at = (row + begin) * n_groups;
    __m256i book = flip;
    if (is_book) {
        uint8_t numbers[32];
        fill_book(f, is_signed ? 0 : book_bias(f), numbers, 32);
        book = _mm256_loadu_si256((const __m256i *)numbers);
    }
    __m256 total[2][MAX_TILE];
    __m256i sum[2][MAX_TILE];
    struct scales scales;
    struct stretch s = before_panel(p, w);
    int group = 0, unit_of_group = 0;
    UNROLLED for (int h = 0; h < n_halves; h++)
        UNROLLED for (int r = 0; r < n_rows; r++) total[h][r] = _mm256_setzero_ps(), sum[h][r] = _mm256_setzero_si256();
    while (next_stretch(f, &s)) {
        avx2_read_scales(f, &s, &scales);
        int own = 0;
        for (int64_t b = 0; b < s.n_blocks; b++) {
            const uint8_t *unit = s.blocks + b * f->block_bytes + f->header_bytes + s.from / UNIT * unit_bytes;
            for (int64_t k = 0; k < s.n_inputs; k += UNIT, unit += unit_bytes, x += UNIT * n_tile) {
                __m256i pairs[2][MAX_TILE];
                if (prefetches)
                    UNROLLED for (int line = 0; line < bits; line++)
                        avx2_prefetch(unit + line * QUAD_BYTES, AHEAD);
                UNROLLED for (int q = 0; q < UNIT / 4; q++) {
                    const int place = apart ? q % 4 : q, last = apart ? 3 : 7; /* in the token group */
                    __m256i codes[2];
                    UNROLLED for (int h = 0; h < n_halves; h++) {
                        codes[h] = avx2_codes(bits, unit, q, half + h);
                        if (kind == AVX2_SIGNED) codes[h] = _mm256_xor_si256(codes[h], flip);
                        if (is_book) codes[h] = _mm256_shuffle_epi8(book, codes[h]);
                    }
                    UNROLLED for (int r = 0; r < n_rows; r++) {
                        const __m256i quad = _mm256_set1_epi32(quad_at(x + 4 * (q * n_tile + r)));
                        UNROLLED for (int h = 0; h < n_halves; h++) {
                            if (is_signed) {
                                /* At most 2 * 127 * 127, which 16 bits hold. */
                                const __m256i some =
                                    _mm256_maddubs_epi16(_mm256_abs_epi8(codes[h]), _mm256_sign_epi8(quad, codes[h]));
                                sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(some, ones));
                                IN_ORDER(sum[h][r]);
                                continue;
                            }
                            const __m256i some = _mm256_maddubs_epi16(codes[h], quad);
                            pairs[h][r] = place % depth == 0 ? some : _mm256_add_epi16(pairs[h][r], some);
                            IN_ORDER(pairs[h][r]);
                            if (place % depth == depth - 1 || place == last)
                                sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(pairs[h][r], ones));
                        }
                    }
                    if (place < last || (!apart && ++unit_of_group < units)) continue;
                    unit_of_group = 0;
                    UNROLLED for (int r = 0; r < n_rows; r++) {
                        const int64_t token = at + (int64_t)r * n_groups + group;
                        const __m256 x_scale = _mm256_set1_ps(p->scales[token]), x_sum = _mm256_set1_ps(p->sums[token]);
                        const __m256i offset = _mm256_set1_epi32(p->offsets[token]);
                        UNROLLED for (int h = 0; h < n_halves; h++) {
                            const __m256 scale = _mm256_loadu_ps(scales.scale[own] + 8 * (half + h));
                            const __m256 minimum = _mm256_loadu_ps(scales.minimum[own] + 8 * (half + h));
                            const __m256 whole = _mm256_cvtepi32_ps(_mm256_add_epi32(sum[h][r], offset));
                            total[h][r] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scale, x_scale), total[h][r]);
                            if (adds_minimum) total[h][r] = _mm256_fmadd_ps(minimum, x_sum, total[h][r]);
                            sum[h][r] = _mm256_setzero_si256();
                        }
                    }
                    group++, own++;
                }
            }
        }
    }
    UNROLLED for (int h = 0; h < n_halves; h++)
        UNROLLED for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[0][begin + r] + 8 * (half + h), total[h][r]);
}

/* The same where scales have two levels: a group's sums are multiplied by its scale where pairs of 16 bits are added, and rounded to floats only once in a token group. With `apart` a group is 16 inputs, else 32. */
INLINE WITH_AVX2 void avx2_levels_of(const int n_rows, const int n_halves, int half, int begin, int64_t n_tile,
                                     const int bits, const int kind,
                                     const int apart, const struct linear *p, const uint8_t *w, int64_t row,
                                     float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int is_signed = kind == AVX2_SIGNED_BOOK, is_book = kind == AVX2_BOOK || is_signed;
    const int depth = is_signed ? 1 : avx2_depth(bits, kind), group_units = f->token_group / UNIT;
    const int32_t bias = code_bias(p);
    const int64_t unit_bytes = f->bits * QUAD_BYTES, n_sums = padded_inputs(p) / f->group;
    const int prefetches = !row && !begin && !half;
    const int8_t *x = quads_of(p, row) + 4 * begin;
    const int16_t *group_sums = group_sums_of(p, row + begin);
    const float *x_scales = p->scales + (row + begin) * p->n_groups;
    uint8_t numbers[32];
    fill_book(f, is_book ? bias : 0, numbers, 32);
    const __m256i book = _mm256_loadu_si256((const __m256i *)numbers), biases = _mm256_set1_epi32(bias);
    __m256 total[2][MAX_TILE];
    __m256i sum[2][MAX_TILE], others[2][MAX_TILE];
    struct levels levels;
    int16_t pairs_of_scales[STRETCH / 16][2][16]; /* each twice */
    int16_t pairs_of_others[STRETCH / 32][2][16]; /* of two groups in turns */
    struct stretch s = before_panel(p, w);
    UNROLLED for (int h = 0; h < n_halves; h++)
        UNROLLED for (int r = 0; r < n_rows; r++) {
            total[h][r] = _mm256_setzero_ps();
            sum[h][r] = others[h][r] = _mm256_setzero_si256();
        }
    while (next_stretch(f, &s)) {
        avx2_read_levels(f, &s, &levels);
        const int n = (int)(s.n_inputs / f->group);
        UNROLLED for (int h = 0; h < n_halves; h++) {
            const int first = 8 * (half + h);
            for (int g = 0; g < n; g++)
                avx2_interleave(levels.scale[g] + first, levels.scale[g] + first, pairs_of_scales[g][h]);
            for (int g = 0; g < n; g += 2)
                avx2_interleave(levels.other[g] + first, levels.other[g + 1] + first, pairs_of_others[g / 2][h]);
        }
        const uint8_t *unit = s.blocks + f->header_bytes + s.from / UNIT * unit_bytes;
        for (int u = 0; u < (int)(s.n_inputs / UNIT); u++, unit += unit_bytes, x += UNIT * n_tile) {
            __m256i pairs[2][MAX_TILE];
            if (prefetches)
                UNROLLED for (int line = 0; line < bits; line++)
                    avx2_prefetch(unit + line * QUAD_BYTES, AHEAD);
            UNROLLED for (int q = 0; q < UNIT / 4; q++) {
                const int place = apart ? q % 4 : q, last = apart ? 3 : 7; /* in the group */
                const int group = apart ? 2 * u + q / 4 : u;
                __m256i codes[2];
                UNROLLED for (int h = 0; h < n_halves; h++) {
                    codes[h] = avx2_codes(bits, unit, q, half + h);
                    if (is_book) codes[h] = _mm256_shuffle_epi8(book, codes[h]);
                }
                UNROLLED for (int r = 0; r < n_rows; r++) {
                    const __m256i quad = _mm256_set1_epi32(quad_at(x + 4 * (q * n_tile + r)));
                    UNROLLED for (int h = 0; h < n_halves; h++) {
                        const __m256i some =
                            is_signed
                                ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes[h]), _mm256_sign_epi8(quad, codes[h]))
                                : _mm256_maddubs_epi16(codes[h], quad);
                        pairs[h][r] = place % depth == 0 ? some : _mm256_add_epi16(pairs[h][r], some);
                        IN_ORDER(pairs[h][r]);
                        if (place % depth == depth - 1 || place == last) {
                            const __m256i scale = _mm256_loadu_si256((const __m256i *)pairs_of_scales[group][h]);
                            sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(pairs[h][r], scale));
                        }
                    }
                }
            }
            if (apart || u % 2) {
                const int pair = apart ? u : u / 2;
                UNROLLED for (int r = 0; r < n_rows; r++) {
                    int32_t two;
                    memcpy(&two, group_sums + r * n_sums, 4);
                    UNROLLED for (int h = 0; h < n_halves; h++) {
                        const __m256i own = _mm256_loadu_si256((const __m256i *)pairs_of_others[pair][h]);
                        others[h][r] = _mm256_add_epi32(others[h][r], _mm256_madd_epi16(own, _mm256_set1_epi32(two)));
                    }
                }
                group_sums += 2;
            }
            if ((u + 1) % group_units) continue;
            UNROLLED for (int r = 0; r < n_rows; r++) {
                const __m256 x_scale = _mm256_set1_ps(x_scales[r * p->n_groups]);
                UNROLLED for (int h = 0; h < n_halves; h++) {
                    const __m256 outer = _mm256_loadu_ps(levels.outer + 8 * (half + h));
                    const __m256 below = _mm256_loadu_ps(levels.below + 8 * (half + h));
                    __m256i whole = sum[h][r];
                    if (bias) whole = _mm256_sub_epi32(whole, _mm256_mullo_epi32(others[h][r], biases));
                    total[h][r] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), _mm256_mul_ps(outer, x_scale), total[h][r]);
                    if (has_minimum(f))
                        total[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(others[h][r]), _mm256_mul_ps(below, x_scale),
                                                      total[h][r]);
                    sum[h][r] = others[h][r] = _mm256_setzero_si256();
                }
            }
            x_scales++;
        }
    }
    UNROLLED for (int h = 0; h < n_halves; h++)
        UNROLLED for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[0][begin + r] + 8 * (half + h), total[h][r]);
}

/* Eight weights of one input as float32, from codes that are floats. */
INLINE WITH_AVX2 __m256 avx2_floats(const int code, const uint8_t *unit, int input, int half, const __m256 book[2]) {
    if (code == FLOAT_BOOK) {
        const __m128i both = _mm_loadl_epi64((const __m128i *)(unit + input / 2 * PANEL + 8 * half));
        const __m256i index = _mm256_cvtepu8_epi32(input % 2 ? _mm_srli_epi16(both, 4) : both);
        const __m256 low = _mm256_permutevar8x32_ps(book[0], index), high = _mm256_permutevar8x32_ps(book[1], index);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    }
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(unit + input * PANEL + 8 * half));
    if (code == E5M2) return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes));
    /* By float16, whose subnormal numbers cost nothing, unlike those of float32. */
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    const __m128i halves = _mm_and_si128(wide, _mm_set1_epi16((short)0xbf80));
    return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(0x1p8f));
}

/* Rows of float32, one half of a panel of narrow floats. */
INLINE WITH_AVX2 void avx2_floats_of(const int n_rows, int half, const int code, const struct linear *p,
                                     const uint8_t *w, int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int units = f->token_group > UNIT ? f->token_group / UNIT : 1;
    const int64_t unit_bytes = f->bits * QUAD_BYTES;
    const float *x = floats_of(p, row);
    const __m256 book[2] = {_mm256_loadu_ps(f->book), _mm256_loadu_ps(f->book + 8)};
    __m256 total[MAX_TILE], sum[MAX_TILE];
    struct scales scales;
    struct stretch s = before_panel(p, w);
    int unit_of_group = 0;
    for (int r = 0; r < n_rows; r++) total[r] = sum[r] = _mm256_setzero_ps();
    while (next_stretch(f, &s)) {
        avx2_read_scales(f, &s, &scales);
        int own = 0;
        for (int64_t b = 0; b < s.n_blocks; b++) {
            const uint8_t *unit = s.blocks + b * f->block_bytes + f->header_bytes + s.from / UNIT * unit_bytes;
            for (int64_t k = 0; k < s.n_inputs; k += UNIT, unit += unit_bytes) {
                for (int i = 0; i < UNIT; i++, x += n_rows) {
                    const __m256 weights = avx2_floats(code, unit, i, half, book);
                    for (int r = 0; r < n_rows; r++)
                        sum[r] = _mm256_fmadd_ps(weights, _mm256_broadcast_ss(x + r), sum[r]);
                }
                if (++unit_of_group < units) continue;
                unit_of_group = 0;
                const __m256 scale = _mm256_loadu_ps(scales.scale[own++] + 8 * half);
                for (int r = 0; r < n_rows; r++) {
                    total[r] = _mm256_fmadd_ps(sum[r], scale, total[r]);
                    sum[r] = _mm256_setzero_ps();
                }
            }
        }
    }
    for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[0][r] + 8 * half, total[r]);
}

#define AVX2_HALVES(n_rows, n_halves, half, ...) \
    avx2_quantized_of(n_rows, n_halves, half, begin, n_tile, __VA_ARGS__, p, w, row, sums)
#define AVX2_LEVELS(n_rows, n_halves, half, ...) \
    avx2_levels_of(n_rows, n_halves, half, begin, n_tile, __VA_ARGS__, p, w, row, sums)
/* Whole tiles half by half, and parts of others: a function for each number of rows would take long to compile. */
#define AVX2_QUANTIZED(NAME, ...)                                                                       \
    static WITH_AVX2 void NAME(const struct linear *p, const uint8_t *w, int64_t row, const int n_tile, \
                               float sums[2][MAX_TILE][PANEL]) {                                        \
        int begin = 0;                                                                                  \
        if (n_tile == MAX_TILE) {                                                                       \
            for (int half = 0; half < 2; half++) AVX2_ROWS(MAX_TILE, 1, half, __VA_ARGS__);             \
            return;                                                                                     \
        }                                                                                               \
        if (n_tile >= AVX2_MOST_ROWS) {                                                                 \
            AVX2_ROWS(AVX2_MOST_ROWS, 2, 0, __VA_ARGS__);                                               \
            begin += AVX2_MOST_ROWS;                                                                    \
        }                                                                                               \
        if (n_tile - begin >= 2) {                                                                      \
            AVX2_ROWS(2, 2, 0, __VA_ARGS__);                                                            \
            begin += 2;                                                                                 \
        }                                                                                               \
        if (begin < n_tile) AVX2_ROWS(1, 2, 0, __VA_ARGS__);                                            \
    }

#define AVX2_FLOATS(n, code, ...) \
    for (int half = 0; half < 2; half++) avx2_floats_of(n, half, code, __VA_ARGS__)

TILE(avx2_bf16, WITH_AVX2, avx2_wide_of, 0)
TILE(avx2_f16, WITH_AVX2, avx2_wide_of, 1)
#define AVX2_PAIR(NAME, is_f16)                                                                         \
    static WITH_AVX2 void NAME(const struct linear *p, const uint8_t *w, int64_t row, const int n_rows, \
                               float sums[2][MAX_TILE][PANEL]) {                                        \
        if (n_rows == 1)                                                                                \
            avx2_wide_part(is_f16, 1, 0, 1, 2, p, w, row, sums);                                        \
        else                                                                                            \
            avx2_wide_part(is_f16, 2, 0, 2, 2, p, w, row, sums);                                        \
    }
AVX2_PAIR(avx2_two_bf16, 0)
AVX2_PAIR(avx2_two_f16, 1)
#define AVX2_ROWS AVX2_HALVES
AVX2_QUANTIZED(avx2_2, 2, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_3, 3, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_4, 4, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_5, 5, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_6, 6, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_8, 8, AVX2_SIGNED, 0)
AVX2_QUANTIZED(avx2_2_apart, 2, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_3_apart, 3, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_6_apart, 6, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_narrow, 4, AVX2_BOOK, 0)
AVX2_QUANTIZED(avx2_narrow_apart, 4, AVX2_BOOK, 1)
AVX2_QUANTIZED(avx2_wide_book, 4, AVX2_SIGNED_BOOK, 0)
AVX2_QUANTIZED(avx2_wide_book_apart, 4, AVX2_SIGNED_BOOK, 1)
TILE(avx2_e4m3, WITH_AVX2, AVX2_FLOATS, E4M3)
TILE(avx2_e5m2, WITH_AVX2, AVX2_FLOATS, E5M2)
TILE(avx2_float_book, WITH_AVX2, AVX2_FLOATS, FLOAT_BOOK)

#undef AVX2_ROWS
#define AVX2_ROWS AVX2_LEVELS
AVX2_QUANTIZED(avx2_levels_2, 2, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_levels_2_apart, 2, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_levels_3, 3, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_levels_3_apart, 3, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_levels_4, 4, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_levels_4_apart, 4, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_levels_5, 5, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_levels_5_apart, 5, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_levels_6, 6, AVX2_UNSIGNED, 0)
AVX2_QUANTIZED(avx2_levels_6_apart, 6, AVX2_UNSIGNED, 1)
AVX2_QUANTIZED(avx2_levels_narrow, 4, AVX2_BOOK, 0)
AVX2_QUANTIZED(avx2_levels_narrow_apart, 4, AVX2_BOOK, 1)
AVX2_QUANTIZED(avx2_levels_wide_book, 4, AVX2_SIGNED_BOOK, 0)
AVX2_QUANTIZED(avx2_levels_wide_book_apart, 4, AVX2_SIGNED_BOOK, 1)

/* By bits, then books of a narrow and of a wide range; by whether a group is 32 inputs or 16. */
static tile_function avx2_level_tiles[][2] = {
    {avx2_levels_2, avx2_levels_2_apart},
    {avx2_levels_3, avx2_levels_3_apart},
    {avx2_levels_4, avx2_levels_4_apart},
    {avx2_levels_5, avx2_levels_5_apart},
    {avx2_levels_6, avx2_levels_6_apart},
    {avx2_levels_narrow, avx2_levels_narrow_apart},
    {avx2_levels_wide_book, avx2_levels_wide_book_apart},
};

struct tiles shardnet_avx2_tiles(const struct linear *p) {
    const struct form *f = &p->form;
    const int apart = f->group < UNIT;
    if (is_plain(f)) return shardnet_avx2_plain_tiles(p);
    if (has_levels(f)) {
        const int kind = f->code == BOOK ? book_bias(f) == 128 ? 6 : 5 : f->bits - 2;
        return (struct tiles){avx2_level_tiles[kind][apart], NULL};
    }
    switch (f->code) {
        case BF16:
            return (struct tiles){avx2_bf16, p->n_rows <= AVX2_PAIRED_ROWS ? avx2_two_bf16 : NULL};
        case F16:
            return (struct tiles){avx2_f16, p->n_rows <= AVX2_PAIRED_ROWS ? avx2_two_f16 : NULL};
        case E4M3:
            return (struct tiles){avx2_e4m3, NULL};
        case E5M2:
            return (struct tiles){avx2_e5m2, NULL};
        case FLOAT_BOOK:
            return (struct tiles){avx2_float_book, NULL};
        case BOOK:
            if (book_bias(f) == 128) return (struct tiles){apart ? avx2_wide_book_apart : avx2_wide_book, NULL};
            return (struct tiles){apart ? avx2_narrow_apart : avx2_narrow, NULL};
    }
    switch (f->bits) {
        case 2:
            return (struct tiles){apart ? avx2_2_apart : avx2_2, NULL};
        case 3:
            return (struct tiles){apart ? avx2_3_apart : avx2_3, NULL};
        case 4:
            return (struct tiles){avx2_4, NULL};
        case 5:
            return (struct tiles){avx2_5, NULL};
        case 6:
            return (struct tiles){apart ? avx2_6_apart : avx2_6, NULL};
        default:
            return (struct tiles){avx2_8, NULL};
    }
}

#endif

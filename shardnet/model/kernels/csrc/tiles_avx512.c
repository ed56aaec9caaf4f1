/* Tiles for AVX-512: with bfloat16 two panels at once, so that each broadcast of a row serves 32 outputs. */

#if defined(__x86_64__)
#include "tiles_avx512.h"

#define WITH_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

#define PREFETCHING_ROWS 6

/* Hardware prefetching ends at each page: the first tile of rows prefetches one page ahead. Quantised rows always do,
 * since unpacking them leaves it behind: of memory, Zen 5 reads Q4_K 2.2 times and Q6_K 1.5 times as fast with it, one
 * row, and forms without scales apart as fast. Of floats many rows do, as they take as long; few are bound by memory:
 * Intel's CPUs read them half as fast again with it, Zen 4 slower than without. */
INLINE int avx512_prefetches(int n_rows, int least, int64_t row) {
    return row == 0 && (n_rows >= least || __builtin_cpu_is("intel"));
}

INLINE WITH_AVX512 void avx512_prefetch(const uint8_t *w) { _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T1); }

/* Rows of float32. */
INLINE WITH_AVX512 void avx512_wide_of(const int n_rows, const int is_f16, const int n_panels, const struct linear *p,
                                       const uint8_t *w, int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const int64_t panel = bytes_of_panel(p);
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const float *x = floats_of(p, row);
    const int prefetches = avx512_prefetches(n_rows, PREFETCHING_ROWS / 2, row);
    __m512 total[2][MAX_TILE];
    for (int q = 0; q < n_panels; q++)
        for (int r = 0; r < n_rows; r++) total[q][r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES, x += 2 * n_rows) {
        __m512 first[2], second[2];
        for (int q = 0; q < n_panels; q++) {
            const __m512i both = _mm512_loadu_si512(w + q * panel);
            if (prefetches) avx512_prefetch(w + q * panel);
            if (is_f16) {
                first[q] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
                second[q] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
            } else {
                first[q] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                second[q] = _mm512_castsi512_ps(_mm512_and_si512(both, high));
            }
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
    const int prefetches = avx512_prefetches(n_rows, PREFETCHING_ROWS, row);
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

/* Has lines read in their order, which is what hardware prefetching follows: codes of two planes are read crosswise. */
INLINE WITH_AVX512 void avx512_touch(const uint8_t *from, const int n_lines) {
    for (int line = 0; line < n_lines; line++) _mm_prefetch((const char *)from + line * QUAD_BYTES, _MM_HINT_T0);
}

INLINE WITH_AVX512 void avx512_begin_unit(const int n_rows, const int bits, const int prefetches, const uint8_t *unit) {
    const int has_planes = bits == 3 || bits == 5 || bits == 6;
    if (prefetches)
        for (int line = 0; line < bits; line++) avx512_prefetch(unit + line * QUAD_BYTES);
    else if (has_planes)
        avx512_touch(unit, bits);
}

/* Quantised rows, one panel at a time: with two, registers run out. With `apart` a token group is 16 inputs. */
INLINE WITH_AVX512 void avx512_quantized_of(const int n_rows, const int bits, const int is_book, const int apart,
                                            const struct linear *p, const uint8_t *w, int64_t row,
                                            float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int n_groups = (int)p->n_groups, units = f->token_group > UNIT ? f->token_group / UNIT : 1;
    const int adds_minimum = has_minimum(f);
    const int64_t unit_bytes = f->bits * QUAD_BYTES, at = row * n_groups;
    const int8_t *x = quads_of(p, row);
    const int prefetches = row == 0;
    __m512i book = _mm512_setzero_si512();
    if (is_book) {
        uint8_t numbers[64];
        fill_book(f, book_bias(f), numbers, 64);
        book = _mm512_loadu_si512(numbers);
    }
    __m512 total[MAX_TILE];
    __m512i sum[MAX_TILE];
    struct scales scales;
    struct stretch s = before_panel(p, w);
    int group = 0, unit_of_group = 0;
    for (int r = 0; r < n_rows; r++) total[r] = _mm512_setzero_ps();
    while (next_stretch(f, &s)) {
        avx512_read_scales(f, &s, &scales);
        int own = 0;
        for (int64_t b = 0; b < s.n_blocks; b++) {
            const uint8_t *unit = s.blocks + b * f->block_bytes + f->header_bytes + s.from / UNIT * unit_bytes;
            for (int64_t k = 0; k < s.n_inputs; k += UNIT, unit += unit_bytes, x += UNIT * n_rows) {
                if (prefetches)
                    for (int line = 0; line < bits; line++) avx512_prefetch(unit + line * QUAD_BYTES);
                UNROLLED for (int q = 0; q < UNIT / 4; q++) {
                    const int place = apart ? q % 4 : q, last = apart ? 3 : 7; /* in the token group */
                    if (place == 0 && unit_of_group == 0)
                        for (int r = 0; r < n_rows; r++)
                            sum[r] = _mm512_set1_epi32(p->offsets[at + (int64_t)r * n_groups + group]);
                    __m512i own_codes = avx512_codes(bits, unit, q);
                    if (is_book) own_codes = _mm512_shuffle_epi8(book, own_codes);
                    for (int r = 0; r < n_rows; r++) {
                        const __m512i quad = _mm512_set1_epi32(quad_at(x + 4 * (q * n_rows + r)));
                        sum[r] = _mm512_dpbusd_epi32(sum[r], own_codes, quad);
                    }
                    if (place < last || (!apart && ++unit_of_group < units)) continue;
                    unit_of_group = 0;
                    const __m512 scale = _mm512_loadu_ps(scales.scale[own]);
                    const __m512 minimum = _mm512_loadu_ps(scales.minimum[own]);
                    for (int r = 0; r < n_rows; r++) {
                        const int64_t token = at + (int64_t)r * n_groups + group;
                        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(p->scales[token]));
                        total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), both, total[r]);
                        if (adds_minimum)
                            total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(p->sums[token]), total[r]);
                    }
                    group++, own++;
                }
            }
        }
    }
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[0][r], total[r]);
}

/* Sixteen scales as they are stored, float16 or exponents, times a form's factor. */
INLINE WITH_AVX512 __m512 avx512_scales(const struct form *f, const uint8_t *from) {
    const __m512 scale =
        f->scale == SCALE_FLOAT16 ? avx512_float16(from) : (__m512)avx512_some_scales(SCALE_EXPONENT, from);
    return _mm512_mul_ps(scale, _mm512_set1_ps(f->factor));
}

/* Quantised rows with blocks of one unit that begin with its scales, which are read where they lie. */
INLINE WITH_AVX512 void avx512_unit_blocks_of(const int n_rows, const int bits, const int is_book,
                                              const struct linear *p, const uint8_t *w, int64_t row,
                                              float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int64_t n_groups = p->n_groups, at = row * n_groups;
    const int adds_minimum = has_minimum(f);
    const int8_t *x = quads_of(p, row);
    const int prefetches = row == 0;
    uint8_t numbers[64];
    fill_book(f, is_book ? book_bias(f) : 0, numbers, 64);
    const __m512i book = _mm512_loadu_si512(numbers);
    __m512 total[MAX_TILE];
    for (int r = 0; r < n_rows; r++) total[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < n_groups; group++, w += f->block_bytes, x += UNIT * n_rows) {
        const uint8_t *unit = w + f->header_bytes;
        __m512i sum[MAX_TILE];
        for (int r = 0; r < n_rows; r++) sum[r] = _mm512_set1_epi32(p->offsets[at + r * n_groups + group]);
        avx512_begin_unit(n_rows, bits, prefetches, unit);
        UNROLLED for (int q = 0; q < UNIT / 4; q++) {
            __m512i codes = avx512_codes(bits, unit, q);
            if (is_book) codes = _mm512_shuffle_epi8(book, codes);
            for (int r = 0; r < n_rows; r++) {
                const __m512i quad = _mm512_set1_epi32(quad_at(x + 4 * (q * n_rows + r)));
                sum[r] = _mm512_dpbusd_epi32(sum[r], codes, quad);
            }
        }
        const __m512 scale = avx512_scales(f, w);
        for (int r = 0; r < n_rows; r++) {
            const int64_t token = at + r * n_groups + group;
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(p->scales[token]));
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), both, total[r]);
            if (adds_minimum) {
                const __m512 minimum = avx512_scales(f, w + 2 * PANEL);
                total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(p->sums[token]), total[r]);
            }
        }
    }
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[0][r], total[r]);
}

/* The integers of a group's scales and minimums; where codes are only corrected, both are the scales. */
INLINE WITH_AVX512 void avx512_level(const struct form *f, const uint8_t *from, __m512i *scale, __m512i *other) {
    const __m128i own = _mm_loadu_si128((const __m128i *)from);
    if (f->scale == SCALE_INT8) {
        *scale = *other = _mm512_cvtepi8_epi32(own);
        return;
    }
    *scale = *other = _mm512_cvtepu8_epi32(own);
    if (f->scale == SCALE_NIBBLES) {
        *scale = _mm512_and_si512(*scale, _mm512_set1_epi32(15));
        *other = _mm512_srli_epi32(*other, 4);
    } else if (f->minimum == STORED) {
        *other = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + f->block / f->group * PANEL)));
    }
}

/* Quantised rows where scales have two levels: a group's sums are multiplied by its scale as integers, and rounded to
 * floats only once in a token group. With `apart` a group is 16 inputs, else 32. */
INLINE WITH_AVX512 void avx512_levels_of(const int n_rows, const int bits, const int is_book, const int apart,
                                         const struct linear *p, const uint8_t *w, int64_t row,
                                         float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int group_units = f->token_group / UNIT;
    const int32_t bias = code_bias(p);
    const int64_t n_sums = padded_inputs(p) / f->group;
    const int8_t *x = quads_of(p, row);
    const int16_t *group_sums = group_sums_of(p, row);
    const float *x_scales = p->scales + row * p->n_groups;
    const int prefetches = row == 0;
    uint8_t numbers[64];
    fill_book(f, is_book ? bias : 0, numbers, 64);
    const __m512i book = _mm512_loadu_si512(numbers);
    __m512 total[MAX_TILE];
    for (int r = 0; r < n_rows; r++) total[r] = _mm512_setzero_ps();
    for (int64_t b = blocks_of_panel(p); b; b--, w += f->block_bytes) {
        const uint8_t *unit = w + f->header_bytes, *level = w + 2 * PANEL * f->block_scales;
        const int n_lines = (f->header_bytes + QUAD_BYTES - 1) / QUAD_BYTES;
        avx512_touch(w, n_lines);
        if (prefetches)
            for (int line = 0; line < n_lines; line++) avx512_prefetch(w + line * QUAD_BYTES);
        for (int token = 0; token < f->block / f->token_group; token++, x_scales++) {
            __m512i sum[MAX_TILE], others[MAX_TILE];
            for (int r = 0; r < n_rows; r++) sum[r] = others[r] = _mm512_setzero_si512();
            for (int u = 0; u < group_units; u++, unit += bits * QUAD_BYTES, x += UNIT * n_rows) {
                __m512i own[MAX_TILE];
                avx512_begin_unit(n_rows, bits, prefetches, unit);
                UNROLLED for (int q = 0; q < UNIT / 4; q++) {
                    const int place = apart ? q % 4 : q, last = apart ? 3 : 7; /* in the group */
                    __m512i codes = avx512_codes(bits, unit, q);
                    if (is_book) codes = _mm512_shuffle_epi8(book, codes);
                    for (int r = 0; r < n_rows; r++) {
                        const __m512i quad = _mm512_set1_epi32(quad_at(x + 4 * (q * n_rows + r)));
                        own[r] = _mm512_dpbusd_epi32(place ? own[r] : _mm512_setzero_si512(), codes, quad);
                    }
                    if (place < last) continue;
                    __m512i scale, other;
                    avx512_level(f, level, &scale, &other);
                    for (int r = 0; r < n_rows; r++) {
                        const __m512i inputs = _mm512_set1_epi32(group_sums[r * n_sums]);
                        sum[r] = _mm512_add_epi32(sum[r], _mm512_mullo_epi32(own[r], scale));
                        others[r] = _mm512_add_epi32(others[r], _mm512_mullo_epi32(other, inputs));
                    }
                    group_sums++, level += PANEL;
                }
            }
            const __m512 outer = _mm512_mul_ps(avx512_float16(w), _mm512_set1_ps(f->factor));
            for (int r = 0; r < n_rows; r++) {
                const __m512 x_scale = _mm512_set1_ps(x_scales[r * p->n_groups]);
                const __m512i excess = _mm512_mullo_epi32(others[r], _mm512_set1_epi32(bias));
                const __m512i whole = bias ? _mm512_sub_epi32(sum[r], excess) : sum[r];
                total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(outer, x_scale), total[r]);
                if (has_minimum(f)) {
                    const __m512 below = _mm512_mul_ps(avx512_float16(w + 2 * PANEL), x_scale);
                    total[r] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(others[r]), below, total[r]);
                }
            }
        }
    }
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[0][r], total[r]);
}

/* Sixteen weights of one input as float32, from codes that are floats. */
INLINE WITH_AVX512 __m512 avx512_floats(const int code, const uint8_t *unit, int input, __m512 book) {
    if (code == FLOAT_BOOK) {
        const __m128i both = _mm_loadu_si128((const __m128i *)(unit + input / 2 * PANEL));
        const __m512i index = _mm512_cvtepu8_epi32(input % 2 ? _mm_srli_epi16(both, 4) : both);
        return _mm512_permutexvar_ps(index, book);
    }
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(unit + input * PANEL));
    if (code == E5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
    /* By float16, whose subnormal numbers cost nothing, unlike those of float32. */
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80));
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(0x1p8f));
}

/* Rows of float32, a panel of narrow floats. */
INLINE WITH_AVX512 void avx512_floats_of(const int n_rows, const int code, const struct linear *p, const uint8_t *w,
                                         int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int units = f->token_group > UNIT ? f->token_group / UNIT : 1;
    const int64_t unit_bytes = f->bits * QUAD_BYTES;
    const float *x = floats_of(p, row);
    const __m512 book = _mm512_loadu_ps(f->book);
    __m512 total[MAX_TILE], sum[MAX_TILE];
    struct scales scales;
    struct stretch s = before_panel(p, w);
    int unit_of_group = 0;
    for (int r = 0; r < n_rows; r++) total[r] = sum[r] = _mm512_setzero_ps();
    while (next_stretch(f, &s)) {
        avx512_read_scales(f, &s, &scales);
        int own = 0;
        for (int64_t b = 0; b < s.n_blocks; b++) {
            const uint8_t *unit = s.blocks + b * f->block_bytes + f->header_bytes + s.from / UNIT * unit_bytes;
            for (int64_t k = 0; k < s.n_inputs; k += UNIT, unit += unit_bytes) {
                for (int i = 0; i < UNIT; i++, x += n_rows) {
                    const __m512 weights = avx512_floats(code, unit, i, book);
                    for (int r = 0; r < n_rows; r++)
                        sum[r] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[r]), sum[r]);
                }
                if (++unit_of_group < units) continue;
                unit_of_group = 0;
                const __m512 scale = _mm512_loadu_ps(scales.scale[own++]);
                for (int r = 0; r < n_rows; r++) {
                    total[r] = _mm512_fmadd_ps(sum[r], scale, total[r]);
                    sum[r] = _mm512_setzero_ps();
                }
            }
        }
    }
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[0][r], total[r]);
}

TILE(avx512_one_wide, WITH_AVX512, avx512_wide_of, 0, 1)
TILE(avx512_two_wide, WITH_AVX512, avx512_wide_of, 0, 2)
TILE(avx512_one_f16, WITH_AVX512, avx512_wide_of, 1, 1)
TILE(avx512_two_f16, WITH_AVX512, avx512_wide_of, 1, 2)
TILE(avx512_one_pairs, WITH_AVX512_BF16, avx512_pairs_of, 1)
TILE(avx512_two_pairs, WITH_AVX512_BF16, avx512_pairs_of, 2)
TILE(avx512_2, WITH_AVX512, avx512_quantized_of, 2, 0, 0)
TILE(avx512_3, WITH_AVX512, avx512_quantized_of, 3, 0, 0)
TILE(avx512_4, WITH_AVX512, avx512_quantized_of, 4, 0, 0)
TILE(avx512_5, WITH_AVX512, avx512_quantized_of, 5, 0, 0)
TILE(avx512_6, WITH_AVX512, avx512_quantized_of, 6, 0, 0)
TILE(avx512_8, WITH_AVX512, avx512_quantized_of, 8, 0, 0)
TILE(avx512_2_apart, WITH_AVX512, avx512_quantized_of, 2, 0, 1)
TILE(avx512_3_apart, WITH_AVX512, avx512_quantized_of, 3, 0, 1)
TILE(avx512_6_apart, WITH_AVX512, avx512_quantized_of, 6, 0, 1)
TILE(avx512_book, WITH_AVX512, avx512_quantized_of, 4, 1, 0)
TILE(avx512_book_apart, WITH_AVX512, avx512_quantized_of, 4, 1, 1)
TILE(avx512_e4m3, WITH_AVX512, avx512_floats_of, E4M3)
TILE(avx512_e5m2, WITH_AVX512, avx512_floats_of, E5M2)
TILE(avx512_float_book, WITH_AVX512, avx512_floats_of, FLOAT_BOOK)

TILE(avx512_unit_4, WITH_AVX512, avx512_unit_blocks_of, 4, 0)
TILE(avx512_unit_5, WITH_AVX512, avx512_unit_blocks_of, 5, 0)
TILE(avx512_unit_8, WITH_AVX512, avx512_unit_blocks_of, 8, 0)
TILE(avx512_unit_book, WITH_AVX512, avx512_unit_blocks_of, 4, 1)

TILE(avx512_levels_2, WITH_AVX512, avx512_levels_of, 2, 0, 0)
TILE(avx512_levels_2_apart, WITH_AVX512, avx512_levels_of, 2, 0, 1)
TILE(avx512_levels_3, WITH_AVX512, avx512_levels_of, 3, 0, 0)
TILE(avx512_levels_3_apart, WITH_AVX512, avx512_levels_of, 3, 0, 1)
TILE(avx512_levels_4, WITH_AVX512, avx512_levels_of, 4, 0, 0)
TILE(avx512_levels_4_apart, WITH_AVX512, avx512_levels_of, 4, 0, 1)
TILE(avx512_levels_5, WITH_AVX512, avx512_levels_of, 5, 0, 0)
TILE(avx512_levels_5_apart, WITH_AVX512, avx512_levels_of, 5, 0, 1)
TILE(avx512_levels_6, WITH_AVX512, avx512_levels_of, 6, 0, 0)
TILE(avx512_levels_6_apart, WITH_AVX512, avx512_levels_of, 6, 0, 1)
TILE(avx512_levels_book, WITH_AVX512, avx512_levels_of, 4, 1, 0)
TILE(avx512_levels_book_apart, WITH_AVX512, avx512_levels_of, 4, 1, 1)

/* By bits, then books; by whether a group is 32 inputs or 16. */
static tile_function avx512_level_tiles[][2] = {
    {avx512_levels_2, avx512_levels_2_apart},
    {avx512_levels_3, avx512_levels_3_apart},
    {avx512_levels_4, avx512_levels_4_apart},
    {avx512_levels_5, avx512_levels_5_apart},
    {avx512_levels_6, avx512_levels_6_apart},
    {avx512_levels_book, avx512_levels_book_apart},
};

/* Whether a block is one unit of quantised weights behind its scales, which are stored as they are used. */
static int is_unit_blocks(const struct form *f) {
    if (f->block != UNIT || f->group != UNIT || is_float(f)) return 0;
    if (f->scale != SCALE_FLOAT16 && f->scale != SCALE_EXPONENT) return 0;
    if (f->minimum && (f->minimum != STORED || f->scale != SCALE_FLOAT16 || f->factor != 1)) return 0;
    return f->code == BOOK || f->bits == 8 || f->bits == 4 || f->bits == 5;
}

struct tiles shardnet_avx512_tiles(const struct linear *p) {
    const struct form *f = &p->form;
    const int apart = f->group < UNIT;
    if (has_levels(f)) return (struct tiles){avx512_level_tiles[f->code == BOOK ? 5 : f->bits - 2][apart], NULL};
    if (is_unit_blocks(f))
        return (struct tiles){f->code == BOOK   ? avx512_unit_book
                              : f->bits == 8 ? avx512_unit_8
                              : f->bits == 5 ? avx512_unit_5
                                             : avx512_unit_4,
                              NULL};
    switch (f->code) {
        case BF16:
            if (p->pairs) return (struct tiles){avx512_one_pairs, avx512_two_pairs};
            return (struct tiles){avx512_one_wide, avx512_two_wide};
        case F16:
            return (struct tiles){avx512_one_f16, avx512_two_f16};
        case E4M3:
            return (struct tiles){avx512_e4m3, NULL};
        case E5M2:
            return (struct tiles){avx512_e5m2, NULL};
        case FLOAT_BOOK:
            return (struct tiles){avx512_float_book, NULL};
        case BOOK:
            return (struct tiles){apart ? avx512_book_apart : avx512_book, NULL};
    }
    switch (f->bits) {
        case 2:
            return (struct tiles){apart ? avx512_2_apart : avx512_2, NULL};
        case 3:
            return (struct tiles){apart ? avx512_3_apart : avx512_3, NULL};
        case 4:
            return (struct tiles){avx512_4, NULL};
        case 5:
            return (struct tiles){avx512_5, NULL};
        case 6:
            return (struct tiles){apart ? avx512_6_apart : avx512_6, NULL};
        default:
            return (struct tiles){avx512_8, NULL};
    }
}

#endif

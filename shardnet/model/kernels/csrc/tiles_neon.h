/* Tiles for NEON: a panel's outputs are four registers. */

#include <arm_neon.h>

#define WITH_NEON __attribute__((target("arch=armv8.2-a+dotprod")))

/* Rows of float32. */
INLINE void neon_wide_of(const int is_f16, const int n_rows, const struct linear *p, const uint8_t *w, int64_t row,
                         float sums[2][MAX_TILE][PANEL]) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    for (int part = 0; part < 4; part++) {
        const uint8_t *at = w + 16 * part;
        const float *x = floats_of(p, row);
        float32x4_t total[MAX_TILE];
        for (int r = 0; r < n_rows; r++) total[r] = vdupq_n_f32(0);
        for (int64_t k = 0; k < p->n_in; k += 2, at += QUAD_BYTES, x += 2 * n_rows) {
            const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(at));
            float32x4_t first = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
            float32x4_t second = vreinterpretq_f32_u32(vandq_u32(both, high));
            if (is_f16) {
                first = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(both)));
                second = vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(both, 16)));
            }
            for (int r = 0; r < n_rows; r++) total[r] = vfmaq_n_f32(total[r], first, x[r]);
            for (int r = 0; r < n_rows; r++) total[r] = vfmaq_n_f32(total[r], second, x[n_rows + r]);
        }
        for (int r = 0; r < n_rows; r++) vst1q_f32(sums[0][r] + 4 * part, total[r]);
    }
}

INLINE int8x16_t neon_spread(const int8_t *x) { return vreinterpretq_s8_s32(vdupq_n_s32(quad_at(x))); }

INLINE void neon_halves(const uint8_t *from, float out[PANEL]) {
    for (int o = 0; o < PANEL; o += 4)
        vst1q_f32(out + o, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * o))));
}

#define TARGET WITH_NEON
#define NAME(x) neon_##x
#define HALVES neon_halves
#include "panel_body.h"
#undef TARGET
#undef NAME
#undef HALVES

/* The bits of quad `quad` in a plane of `bits` bits that begins at line `first`, moved to bit `to`. */
INLINE uint8x16_t neon_plane(const int bits, const uint8_t *unit, const int first, const int quad, const int to) {
    const int each = 8 / bits, from = quad % each * bits;
    const uint8x16_t line = vld1q_u8(unit + (first + quad / each) * QUAD_BYTES);
    const uint8x16_t moved = vshlq_u8(line, vdupq_n_s8((int8_t)(to - from)));
    return vandq_u8(moved, vdupq_n_u8((uint8_t)(((1 << bits) - 1) << to)));
}

/* The codes of four inputs of four outputs, unsigned bytes; `unit` begins at the outputs' first line. */
INLINE uint8x16_t neon_codes(const int bits, const uint8_t *unit, const int quad) {
    switch (bits) {
        case 2:
            return neon_plane(2, unit, 0, quad, 0);
        case 3:
            return vorrq_u8(neon_plane(2, unit, 0, quad, 0), neon_plane(1, unit, 2, quad, 2));
        case 4:
            return neon_plane(4, unit, 0, quad, 0);
        case 5:
            return vorrq_u8(neon_plane(4, unit, 0, quad, 0), neon_plane(1, unit, 4, quad, 4));
        case 6:
            return vorrq_u8(neon_plane(4, unit, 0, quad, 0), neon_plane(2, unit, 4, quad, 4));
        default:
            return vld1q_u8(unit + quad * QUAD_BYTES);
    }
}

/* Quantised rows. With `apart` a token group is 16 inputs. */
INLINE WITH_NEON void neon_quantized_of(const int n_rows, const int bits, const int is_book, const int apart,
                                        const struct linear *p, const uint8_t *w, int64_t row,
                                        float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int n_groups = (int)p->n_groups, units = f->token_group > UNIT ? f->token_group / UNIT : 1;
    const int adds_minimum = has_minimum(f);
    const int64_t unit_bytes = f->bits * QUAD_BYTES, at = row * n_groups;
    const uint8x16_t flip = vdupq_n_u8(0x80);
    int8_t numbers[16];
    for (int i = 0; i < 16; i++) numbers[i] = (int8_t)f->book[i];
    const int8x16_t book = vld1q_s8(numbers);
    for (int part = 0; part < 4; part++) {
        const int8_t *x = quads_of(p, row);
        float32x4_t total[MAX_TILE];
        int32x4_t sum[MAX_TILE];
        struct scales scales;
        struct stretch s = before_panel(p, w);
        int group = 0, unit_of_group = 0;
        for (int r = 0; r < n_rows; r++) total[r] = vdupq_n_f32(0);
        while (next_stretch(f, &s)) {
            neon_read_scales(f, &s, &scales);
            int own = 0;
            for (int64_t b = 0; b < s.n_blocks; b++) {
                const uint8_t *unit = s.blocks + b * f->block_bytes + f->header_bytes + s.from / UNIT * unit_bytes;
                for (int64_t k = 0; k < s.n_inputs; k += UNIT, unit += unit_bytes, x += UNIT * n_rows)
                    UNROLLED for (int q = 0; q < UNIT / 4; q++) {
                        const int place = apart ? q % 4 : q, last = apart ? 3 : 7; /* in the token group */
                        if (place == 0 && unit_of_group == 0)
                            for (int r = 0; r < n_rows; r++)
                                sum[r] = vdupq_n_s32(p->offsets[at + (int64_t)r * n_groups + group]);
                        const uint8x16_t codes = neon_codes(bits, unit + 16 * part, q);
                        const int8x16_t own_codes = is_book     ? vqtbl1q_s8(book, codes)
                                                    : bits == 8 ? vreinterpretq_s8_u8(veorq_u8(codes, flip))
                                                                : vreinterpretq_s8_u8(codes);
                        for (int r = 0; r < n_rows; r++)
                            sum[r] = vdotq_s32(sum[r], own_codes, neon_spread(x + 4 * (q * n_rows + r)));
                        if (place < last || (!apart && ++unit_of_group < units)) continue;
                        unit_of_group = 0;
                        const float32x4_t scale = vld1q_f32(scales.scale[own] + 4 * part);
                        const float32x4_t minimum = vld1q_f32(scales.minimum[own] + 4 * part);
                        for (int r = 0; r < n_rows; r++) {
                            const int64_t token = at + (int64_t)r * n_groups + group;
                            const float32x4_t both = vmulq_n_f32(scale, p->scales[token]);
                            total[r] = vfmaq_f32(total[r], vcvtq_f32_s32(sum[r]), both);
                            if (adds_minimum) total[r] = vfmaq_n_f32(total[r], minimum, p->sums[token]);
                        }
                        group++, own++;
                    }
            }
        }
        for (int r = 0; r < n_rows; r++) vst1q_f32(sums[0][r] + 4 * part, total[r]);
    }
}

/* Quantised rows where scales have two levels: a group's sums are multiplied by its scale as integers, and rounded to
 * floats only once in a token group. With `apart` a group is 16 inputs, else 32. */
INLINE WITH_NEON void neon_levels_of(const int n_rows, const int bits, const int is_book, const int apart,
                                     const struct linear *p, const uint8_t *w, int64_t row,
                                     float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int group_units = f->token_group / UNIT;
    const int32_t bias = code_bias(p);
    const int64_t unit_bytes = f->bits * QUAD_BYTES, n_sums = padded_inputs(p) / f->group;
    int8_t numbers[16];
    for (int i = 0; i < 16; i++) numbers[i] = (int8_t)f->book[i];
    const int8x16_t book = vld1q_s8(numbers);
    for (int part = 0; part < 4; part++) {
        const int8_t *x = quads_of(p, row);
        const int16_t *group_sums = group_sums_of(p, row);
        const float *x_scales = p->scales + row * p->n_groups;
        float32x4_t total[MAX_TILE];
        int32x4_t sum[MAX_TILE], others[MAX_TILE], own[MAX_TILE];
        struct levels levels;
        struct stretch s = before_panel(p, w);
        for (int r = 0; r < n_rows; r++) total[r] = vdupq_n_f32(0), sum[r] = others[r] = vdupq_n_s32(0);
        while (next_stretch(f, &s)) {
            neon_read_levels(f, &s, &levels);
            const uint8_t *unit = s.blocks + f->header_bytes + s.from / UNIT * unit_bytes;
            for (int u = 0; u < (int)(s.n_inputs / UNIT); u++, unit += unit_bytes, x += UNIT * n_rows) {
                UNROLLED for (int q = 0; q < UNIT / 4; q++) {
                    const int place = apart ? q % 4 : q, last = apart ? 3 : 7; /* in the group */
                    const uint8x16_t codes = neon_codes(bits, unit + 16 * part, q);
                    const int8x16_t own_codes = is_book ? vqtbl1q_s8(book, codes) : vreinterpretq_s8_u8(codes);
                    for (int r = 0; r < n_rows; r++)
                        own[r] = vdotq_s32(place ? own[r] : vdupq_n_s32(0), own_codes,
                                           neon_spread(x + 4 * (q * n_rows + r)));
                    if (place < last) continue;
                    const int group = apart ? 2 * u + q / 4 : u;
                    const int32x4_t scale = vmovl_s16(vld1_s16(levels.scale[group] + 4 * part));
                    const int32x4_t other = vmovl_s16(vld1_s16(levels.other[group] + 4 * part));
                    for (int r = 0; r < n_rows; r++) {
                        sum[r] = vmlaq_s32(sum[r], own[r], scale);
                        others[r] = vmlaq_n_s32(others[r], other, group_sums[r * n_sums]);
                    }
                    group_sums++;
                }
                if ((u + 1) % group_units) continue;
                const float32x4_t outer = vld1q_f32(levels.outer + 4 * part), below = vld1q_f32(levels.below + 4 * part);
                for (int r = 0; r < n_rows; r++) {
                    const float x_scale = x_scales[r * p->n_groups];
                    const int32x4_t whole = vmlsq_n_s32(sum[r], others[r], bias);
                    total[r] = vfmaq_f32(total[r], vcvtq_f32_s32(whole), vmulq_n_f32(outer, x_scale));
                    if (has_minimum(f))
                        total[r] = vfmaq_f32(total[r], vcvtq_f32_s32(others[r]), vmulq_n_f32(below, x_scale));
                    sum[r] = others[r] = vdupq_n_s32(0);
                }
                x_scales++;
            }
        }
        for (int r = 0; r < n_rows; r++) vst1q_f32(sums[0][r] + 4 * part, total[r]);
    }
}

#define NEON_BF16(n) neon_wide_of(0, n, p, w, row, sums)
#define NEON_F16(n) neon_wide_of(1, n, p, w, row, sums)
TILE(neon_bf16, , NEON_BF16)
TILE(neon_f16, , NEON_F16)
#define NEON_2(n) neon_quantized_of(n, 2, 0, 0, p, w, row, sums)
#define NEON_3(n) neon_quantized_of(n, 3, 0, 0, p, w, row, sums)
#define NEON_4(n) neon_quantized_of(n, 4, 0, 0, p, w, row, sums)
#define NEON_5(n) neon_quantized_of(n, 5, 0, 0, p, w, row, sums)
#define NEON_6(n) neon_quantized_of(n, 6, 0, 0, p, w, row, sums)
#define NEON_8(n) neon_quantized_of(n, 8, 0, 0, p, w, row, sums)
#define NEON_2_APART(n) neon_quantized_of(n, 2, 0, 1, p, w, row, sums)
#define NEON_3_APART(n) neon_quantized_of(n, 3, 0, 1, p, w, row, sums)
#define NEON_6_APART(n) neon_quantized_of(n, 6, 0, 1, p, w, row, sums)
#define NEON_BOOK(n) neon_quantized_of(n, 4, 1, 0, p, w, row, sums)
#define NEON_BOOK_APART(n) neon_quantized_of(n, 4, 1, 1, p, w, row, sums)
TILE(neon_2, WITH_NEON, NEON_2)
TILE(neon_3, WITH_NEON, NEON_3)
TILE(neon_4, WITH_NEON, NEON_4)
TILE(neon_5, WITH_NEON, NEON_5)
TILE(neon_6, WITH_NEON, NEON_6)
TILE(neon_8, WITH_NEON, NEON_8)
TILE(neon_2_apart, WITH_NEON, NEON_2_APART)
TILE(neon_3_apart, WITH_NEON, NEON_3_APART)
TILE(neon_6_apart, WITH_NEON, NEON_6_APART)
TILE(neon_book, WITH_NEON, NEON_BOOK)
TILE(neon_book_apart, WITH_NEON, NEON_BOOK_APART)

#define NEON_LEVELS_2(n) neon_levels_of(n, 2, 0, 0, p, w, row, sums)
#define NEON_LEVELS_2_APART(n) neon_levels_of(n, 2, 0, 1, p, w, row, sums)
#define NEON_LEVELS_3(n) neon_levels_of(n, 3, 0, 0, p, w, row, sums)
#define NEON_LEVELS_3_APART(n) neon_levels_of(n, 3, 0, 1, p, w, row, sums)
#define NEON_LEVELS_4(n) neon_levels_of(n, 4, 0, 0, p, w, row, sums)
#define NEON_LEVELS_4_APART(n) neon_levels_of(n, 4, 0, 1, p, w, row, sums)
#define NEON_LEVELS_5(n) neon_levels_of(n, 5, 0, 0, p, w, row, sums)
#define NEON_LEVELS_5_APART(n) neon_levels_of(n, 5, 0, 1, p, w, row, sums)
#define NEON_LEVELS_6(n) neon_levels_of(n, 6, 0, 0, p, w, row, sums)
#define NEON_LEVELS_6_APART(n) neon_levels_of(n, 6, 0, 1, p, w, row, sums)
#define NEON_LEVELS_BOOK(n) neon_levels_of(n, 4, 1, 0, p, w, row, sums)
#define NEON_LEVELS_BOOK_APART(n) neon_levels_of(n, 4, 1, 1, p, w, row, sums)
TILE(neon_levels_2, WITH_NEON, NEON_LEVELS_2)
TILE(neon_levels_2_apart, WITH_NEON, NEON_LEVELS_2_APART)
TILE(neon_levels_3, WITH_NEON, NEON_LEVELS_3)
TILE(neon_levels_3_apart, WITH_NEON, NEON_LEVELS_3_APART)
TILE(neon_levels_4, WITH_NEON, NEON_LEVELS_4)
TILE(neon_levels_4_apart, WITH_NEON, NEON_LEVELS_4_APART)
TILE(neon_levels_5, WITH_NEON, NEON_LEVELS_5)
TILE(neon_levels_5_apart, WITH_NEON, NEON_LEVELS_5_APART)
TILE(neon_levels_6, WITH_NEON, NEON_LEVELS_6)
TILE(neon_levels_6_apart, WITH_NEON, NEON_LEVELS_6_APART)
TILE(neon_levels_book, WITH_NEON, NEON_LEVELS_BOOK)
TILE(neon_levels_book_apart, WITH_NEON, NEON_LEVELS_BOOK_APART)

/* By bits, then books; by whether a group is 32 inputs or 16. */
static tile_function neon_level_tiles[][2] = {
    {neon_levels_2, neon_levels_2_apart},
    {neon_levels_3, neon_levels_3_apart},
    {neon_levels_4, neon_levels_4_apart},
    {neon_levels_5, neon_levels_5_apart},
    {neon_levels_6, neon_levels_6_apart},
    {neon_levels_book, neon_levels_book_apart},
};

/* Narrow floats are left to plain C. */
static struct tiles neon_tiles(const struct linear *p) {
    const struct form *f = &p->form;
    const int apart = f->group < UNIT;
    if (has_levels(f)) return (struct tiles){neon_level_tiles[f->code == BOOK ? 5 : f->bits - 2][apart], NULL};
    if (f->code == BF16) return (struct tiles){neon_bf16, NULL};
    if (f->code == F16) return (struct tiles){neon_f16, NULL};
    if (is_float(f)) return (struct tiles){portable_panel, NULL};
    if (f->code == BOOK) return (struct tiles){apart ? neon_book_apart : neon_book, NULL};
    switch (f->bits) {
        case 2:
            return (struct tiles){apart ? neon_2_apart : neon_2, NULL};
        case 3:
            return (struct tiles){apart ? neon_3_apart : neon_3, NULL};
        case 4:
            return (struct tiles){neon_4, NULL};
        case 5:
            return (struct tiles){neon_5, NULL};
        case 6:
            return (struct tiles){apart ? neon_6_apart : neon_6, NULL};
        default:
            return (struct tiles){neon_8, NULL};
    }
}

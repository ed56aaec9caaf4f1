/* Included twice by tiles_neon.h, for machines with and without dot products, given by TARGET, NAME and DOT: quantised
 * rows.
 *
 * DOT(sum, a, b) adds to each of 4 int32 the products of 4 int8.
 */

/* Quantised rows. With `apart` a token group is 16 inputs. */
INLINE TARGET void NAME(quantized_of)(const int n_rows, const int bits, const int is_book, const int apart,
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
                            sum[r] = DOT(sum[r], own_codes, neon_spread(x + 4 * (q * n_rows + r)));
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
INLINE TARGET void NAME(levels_of)(const int n_rows, const int bits, const int is_book, const int apart,
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
                        own[r] = DOT(place ? own[r] : vdupq_n_s32(0), own_codes,
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

TILE(NAME(2), TARGET, NAME(quantized_of), 2, 0, 0)
TILE(NAME(3), TARGET, NAME(quantized_of), 3, 0, 0)
TILE(NAME(4), TARGET, NAME(quantized_of), 4, 0, 0)
TILE(NAME(5), TARGET, NAME(quantized_of), 5, 0, 0)
TILE(NAME(6), TARGET, NAME(quantized_of), 6, 0, 0)
TILE(NAME(8), TARGET, NAME(quantized_of), 8, 0, 0)
TILE(NAME(2_apart), TARGET, NAME(quantized_of), 2, 0, 1)
TILE(NAME(3_apart), TARGET, NAME(quantized_of), 3, 0, 1)
TILE(NAME(6_apart), TARGET, NAME(quantized_of), 6, 0, 1)
TILE(NAME(book), TARGET, NAME(quantized_of), 4, 1, 0)
TILE(NAME(book_apart), TARGET, NAME(quantized_of), 4, 1, 1)

TILE(NAME(levels_2), TARGET, NAME(levels_of), 2, 0, 0)
TILE(NAME(levels_2_apart), TARGET, NAME(levels_of), 2, 0, 1)
TILE(NAME(levels_3), TARGET, NAME(levels_of), 3, 0, 0)
TILE(NAME(levels_3_apart), TARGET, NAME(levels_of), 3, 0, 1)
TILE(NAME(levels_4), TARGET, NAME(levels_of), 4, 0, 0)
TILE(NAME(levels_4_apart), TARGET, NAME(levels_of), 4, 0, 1)
TILE(NAME(levels_5), TARGET, NAME(levels_of), 5, 0, 0)
TILE(NAME(levels_5_apart), TARGET, NAME(levels_of), 5, 0, 1)
TILE(NAME(levels_6), TARGET, NAME(levels_of), 6, 0, 0)
TILE(NAME(levels_6_apart), TARGET, NAME(levels_of), 6, 0, 1)
TILE(NAME(levels_book), TARGET, NAME(levels_of), 4, 1, 0)
TILE(NAME(levels_book_apart), TARGET, NAME(levels_of), 4, 1, 1)

/* By bits, then books; by whether a group is 32 inputs or 16. */
static const tile_function NAME(level_tiles)[][2] = {
    {NAME(levels_2), NAME(levels_2_apart)},
    {NAME(levels_3), NAME(levels_3_apart)},
    {NAME(levels_4), NAME(levels_4_apart)},
    {NAME(levels_5), NAME(levels_5_apart)},
    {NAME(levels_6), NAME(levels_6_apart)},
    {NAME(levels_book), NAME(levels_book_apart)},
};

/* The tiles of weights that are integers. */
static struct tiles NAME(tiles)(const struct form *f) {
    const int apart = f->group < UNIT;
    if (has_levels(f)) return (struct tiles){NAME(level_tiles)[f->code == BOOK ? 5 : f->bits - 2][apart], NULL};
    if (f->code == BOOK) return (struct tiles){apart ? NAME(book_apart) : NAME(book), NULL};
    switch (f->bits) {
        case 2:
            return (struct tiles){apart ? NAME(2_apart) : NAME(2), NULL};
        case 3:
            return (struct tiles){apart ? NAME(3_apart) : NAME(3), NULL};
        case 4:
            return (struct tiles){NAME(4), NULL};
        case 5:
            return (struct tiles){NAME(5), NULL};
        case 6:
            return (struct tiles){apart ? NAME(6_apart) : NAME(6), NULL};
        default:
            return (struct tiles){NAME(8), NULL};
    }
}

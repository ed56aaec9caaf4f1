/* Tiles in plain C: the reference for the other instruction sets. */

#include "vectors.h"

INLINE void portable_halves(const uint8_t *from, float out[PANEL]) {
    for (int o = 0; o < PANEL; o++) {
        uint16_t half;
        memcpy(&half, from + 2 * o, 2);
        out[o] = from_f16(half);
    }
}

#define TARGET
#define NAME(x) portable_##x
#define LANES 4
#define HALVES portable_halves
#define BYTES(from) (portable_panel_words){(from)[0], (from)[1], (from)[2], (from)[3]}
#include "panel_body.h"
#undef TARGET
#undef NAME
#undef LANES
#undef HALVES
#undef BYTES

/* The lower four bits of a code of four or more. */
INLINE uint8_t nibble_at(const uint8_t *unit, int quad, int at) {
    return unit[quad / 2 * QUAD_BYTES + at] >> (quad % 2 * 4) & 15;
}

/* The code of an input (0 to 31) of an output in a unit. */
INLINE uint8_t code_at(const struct form *f, const uint8_t *unit, int input, int output) {
    if (is_float(f)) {
        if (f->bits == 8) return unit[input * PANEL + output];
        return unit[input / 2 * PANEL + output] >> (input % 2 * 4) & 15;
    }
    const int quad = input / 4, at = output * 4 + input % 4;
    switch (f->bits) {
        case 2:
            return unit[quad / 4 * QUAD_BYTES + at] >> (quad % 4 * 2) & 3;
        case 3:
            return (uint8_t)((unit[quad / 4 * QUAD_BYTES + at] >> (quad % 4 * 2) & 3) |
                             (unit[2 * QUAD_BYTES + at] >> quad & 1) << 2);
        case 4:
            return nibble_at(unit, quad, at);
        case 5:
            return (uint8_t)(nibble_at(unit, quad, at) | (unit[4 * QUAD_BYTES + at] >> quad & 1) << 4);
        case 6:
            return (uint8_t)(nibble_at(unit, quad, at) |
                             (unit[(4 + quad / 4) * QUAD_BYTES + at] >> (quad % 4 * 2) & 3) << 4);
        default:
            return unit[quad * QUAD_BYTES + at];
    }
}

/* What a code stands for, before scale and minimum. */
INLINE float value_of(const struct form *f, uint8_t code) {
    switch (f->code) {
        case LINEAR:
            return (float)((int32_t)code - f->offset);
        case E4M3:
            return from_e4m3(code);
        case E5M2:
            return from_f16((uint16_t)(code << 8));
        default:
            return f->book[code & 15];
    }
}

static void portable_panel(const struct linear *p, const uint8_t *w, int64_t row, int n_rows,
                           float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    const int token_group = f->token_group;
    struct scales scales;
    struct stretch s = before_panel(p, w);
    int64_t group = 0;
    memset(sums[0], 0, sizeof sums[0]);
    while (next_stretch(f, &s)) {
        portable_read_scales(f, &s, &scales);
        int own = 0;
        for (int64_t b = 0; b < s.n_blocks; b++) {
            const uint8_t *units = s.blocks + b * f->block_bytes + f->header_bytes;
            for (int64_t k = s.from; k < s.from + s.n_inputs; k += token_group, group++, own++)
                for (int r = 0; r < n_rows; r++)
                    for (int o = 0; o < PANEL; o++) {
                        const int8_t *x = quads_of(p, row) + group * token_group * n_rows + 4 * r;
                        const float *wide = floats_of(p, row) + group * token_group * n_rows + r;
                        const int64_t at = (row + r) * p->n_groups + group;
                        int32_t whole = 0;
                        float sum = 0;
                        for (int i = 0; i < token_group; i++) {
                            const int input = (int)(k + i);
                            const uint8_t *unit = units + input / UNIT * f->bits * QUAD_BYTES;
                            const float value = value_of(f, code_at(f, unit, input % UNIT, o));
                            if (is_float(f))
                                sum = fused_alone(value, wide[i * n_rows], sum);
                            else
                                whole += (int32_t)value * x[i / 4 * 4 * n_rows + i % 4];
                        }
                        float *total = &sums[0][r][o];
                        if (is_float(f))
                            *total = fused_alone(sum, scales.scale[own][o], *total);
                        else
                            *total = fused_alone((float)whole, scales.scale[own][o] * p->scales[at], *total);
                        if (has_minimum(f)) *total = fused_alone(scales.minimum[own][o], p->sums[at], *total);
                    }
        }
    }
}

/* Panels whose scales have two levels: integers are added up over a token group. */
static void portable_levels(const struct linear *p, const uint8_t *w, int64_t row, int n_rows,
                            float sums[2][MAX_TILE][PANEL]) {
    const struct form *f = &p->form;
    struct levels levels;
    struct stretch s = before_panel(p, w);
    int64_t begin = 0; /* of the token group */
    memset(sums[0], 0, sizeof sums[0]);
    while (next_stretch(f, &s)) {
        portable_read_levels(f, &s, &levels);
        const uint8_t *units = s.blocks + f->header_bytes;
        for (int64_t k = s.from; k < s.from + s.n_inputs; k += f->token_group, begin += f->token_group)
            for (int r = 0; r < n_rows; r++)
                for (int o = 0; o < PANEL; o++) {
                    const int8_t *x = quads_of(p, row) + begin * n_rows + 4 * r;
                    const int16_t *group_sums = group_sums_of(p, row + r) + begin / f->group;
                    const float scale = p->scales[(row + r) * p->n_groups + begin / f->token_group];
                    int32_t whole = 0, others = 0;
                    for (int i = 0; i < f->token_group; i++) {
                        const int input = (int)(k + i), group = (int)(k - s.from + i) / f->group;
                        const uint8_t *unit = units + input / UNIT * f->bits * QUAD_BYTES;
                        const int32_t value = (int32_t)value_of(f, code_at(f, unit, input % UNIT, o));
                        whole += value * x[i / 4 * 4 * n_rows + i % 4] * levels.scale[group][o];
                        if (i % f->group == 0) others += levels.other[group][o] * group_sums[i / f->group];
                    }
                    float *total = &sums[0][r][o];
                    *total = fused_alone((float)whole, levels.outer[o] * scale, *total);
                    if (has_minimum(f)) *total = fused_alone((float)others, levels.below[o] * scale, *total);
                }
    }
}

static void portable_wide(const struct linear *p, const uint8_t *w, int64_t row, int n_rows,
                          float sums[2][MAX_TILE][PANEL]) {
    const float *x = floats_of(p, row);
    memset(sums[0], 0, sizeof sums[0]);
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES)
        for (int i = 0; i < 2; i++, x += n_rows)
            for (int o = 0; o < PANEL; o++) {
                uint16_t bits;
                memcpy(&bits, w + 4 * o + 2 * i, 2);
                const float weight = p->form.code == F16 ? from_f16(bits) : from_bf16(bits);
                for (int r = 0; r < n_rows; r++) sums[0][r][o] = fused_alone(weight, x[r], sums[0][r][o]);
            }
}

static struct tiles portable_tiles(const struct linear *p) {
    if (p->form.bits == 16) return (struct tiles){portable_wide, NULL};
    return (struct tiles){has_levels(&p->form) ? portable_levels : portable_panel, NULL};
}

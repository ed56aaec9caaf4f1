/* Included once for each instruction set, given by TARGET, NAME, LANES, HALVES and BYTES: reads the scales of panels.
 *
 * HALVES(from, out) converts 16 float16, BYTES(from) makes a vector of LANES words of as many bytes. */

typedef float NAME(panel_floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(panel_ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(panel_words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(panel_shorts) __attribute__((vector_size(2 * LANES)));

INLINE TARGET NAME(panel_floats) NAME(load_panel)(const void *from) {
    NAME(panel_floats) floats;
    memcpy(&floats, from, sizeof floats);
    return floats;
}

INLINE TARGET void NAME(save_panel)(float *to, NAME(panel_floats) floats) { memcpy(to, &floats, sizeof floats); }

INLINE TARGET NAME(panel_floats) NAME(panel_numbers)(NAME(panel_words) words) {
    return __builtin_convertvector((NAME(panel_ints))words, NAME(panel_floats));
}

/* Some scales of one kind, as they are stored; not float16. */
INLINE TARGET NAME(panel_floats) NAME(some_scales)(const int kind, const uint8_t *from) {
    if (kind == SCALE_FLOAT32) return NAME(load_panel)(from);
    if (kind == SCALE_BFLOAT16) {
        NAME(panel_shorts) shorts;
        memcpy(&shorts, from, sizeof shorts);
        return (NAME(panel_floats))(__builtin_convertvector(shorts, NAME(panel_words)) << 16);
    }
    const NAME(panel_words) words = BYTES(from);
    if (kind == SCALE_EXPONENT) /* 2^-127 is subnormal */
        return (NAME(panel_floats))(words << 23 | ((NAME(panel_words))(words == 0) & 0x400000));
    if (kind == SCALE_FLOAT8) {
        const NAME(panel_words) size = words & 0x7f, is_nan = (NAME(panel_words))(size == 0x7f);
        const NAME(panel_words) bits = (words & 0x80) << 24 | size << 20;
        return (NAME(panel_floats))(bits | (is_nan & 0x7fc00000)) * 0x1p120f;
    }
    if (kind == SCALE_INT8) return __builtin_convertvector((NAME(panel_ints))(words << 24) >> 24, NAME(panel_floats));
    return NAME(panel_numbers)(words);
}

/* Reads 16 stored scales, times `factor`. */
INLINE TARGET void NAME(read_sixteen)(const int kind, const uint8_t *from, float factor, float out[PANEL]) {
    const int bytes = bytes_of_scale(kind);
    if (kind == SCALE_FLOAT16) HALVES(from, out);
    for (int o = 0; o < PANEL; o += LANES) {
        const NAME(panel_floats) own =
            kind == SCALE_FLOAT16 ? NAME(load_panel)(out + o) : NAME(some_scales)(kind, from + o * bytes);
        NAME(save_panel)(out + o, own * factor);
    }
}

INLINE TARGET void NAME(multiply)(float out[PANEL], const float by[PANEL], float sign) {
    for (int o = 0; o < PANEL; o += LANES)
        NAME(save_panel)(out + o, NAME(load_panel)(out + o) * (NAME(load_panel)(by + o) * sign));
}

INLINE TARGET void NAME(read_nibbles)(const uint8_t *from, float factor, const float outer[2][PANEL],
                                      float scale[PANEL], float minimum[PANEL]) {
    for (int o = 0; o < PANEL; o += LANES) {
        const NAME(panel_words) both = BYTES(from + o);
        NAME(save_panel)(scale + o, NAME(panel_numbers)(both & 15) * factor * NAME(load_panel)(outer[0] + o));
        NAME(save_panel)(minimum + o, NAME(panel_numbers)(both >> 4) * -NAME(load_panel)(outer[1] + o));
    }
}

/* Reads the scale and minimum of group `g` of a block whose float16 are `outer`. */
INLINE TARGET void NAME(read_group)(const int kind, const struct form *f, const uint8_t *block, int64_t g,
                                    const float outer[2][PANEL], float scale[PANEL], float minimum[PANEL]) {
    const int64_t bytes = PANEL * bytes_of_scale(kind);
    const uint8_t *scales = block + 2 * PANEL * f->block_scales;
    const uint8_t *minimums = scales + f->block / f->group * bytes;
    if (kind == SCALE_NIBBLES) {
        NAME(read_nibbles)(scales + g * bytes, f->factor, outer, scale, minimum);
        return;
    }
    NAME(read_sixteen)(kind, scales + g * bytes, f->factor, scale);
    if (f->block_scales) NAME(multiply)(scale, outer[0], 1);
    if (f->minimum == ZERO_POINT) {
        NAME(read_sixteen)(SCALE_UINT8, minimums + g * PANEL, -1, minimum);
        NAME(multiply)(minimum, scale, 1);
    } else if (f->minimum == STORED) {
        NAME(read_sixteen)(kind, minimums + g * bytes, 1, minimum);
        if (f->block_scales) NAME(multiply)(minimum, outer[1], -1);
    }
}

/* Reads the scales of all token groups of a stretch. */
INLINE TARGET void NAME(read_scales_of)(const int kind, const struct form *f, const struct stretch *s,
                                        struct scales *out) {
    float outer[2][PANEL];
    const int64_t n = s->n_inputs / f->token_group, repeats = f->group / f->token_group;
    const int64_t first = s->from / f->group, inside = s->from % f->group / f->token_group;
    float(*scale)[PANEL] = out->scale, (*minimum)[PANEL] = out->minimum;
    for (int64_t b = 0; b < s->n_blocks; b++) {
        const uint8_t *block = s->blocks + b * f->block_bytes;
        int64_t group = first, left = repeats - inside;
        for (int i = 0; i < f->block_scales; i++) HALVES(block + 2 * PANEL * i, outer[i]);
        for (int64_t t = 0; t < n; t++, scale++, minimum++, left--) {
            if (!left) group++, left = repeats;
            if (t && left < repeats) {
                memcpy(scale, scale - 1, sizeof *scale);
                memcpy(minimum, minimum - 1, sizeof *minimum);
            } else {
                NAME(read_group)(kind, f, block, group, outer, *scale, *minimum);
            }
        }
    }
}

/* The same where groups are token groups, whose scales and minimums are as they are stored. */
INLINE TARGET void NAME(read_plain_scales)(const int kind, const struct form *f, const struct stretch *s,
                                           struct scales *out) {
    const int64_t bytes = PANEL * bytes_of_scale(kind), n = f->block / f->group;
    float(*scale)[PANEL] = out->scale, (*minimum)[PANEL] = out->minimum;
    for (int64_t b = 0; b < s->n_blocks; b++) {
        const uint8_t *block = s->blocks + b * f->block_bytes;
        for (int64_t g = 0; g < n; g++) {
            NAME(read_sixteen)(kind, block + g * bytes, f->factor, *scale++);
            if (f->minimum == STORED) NAME(read_sixteen)(kind, block + (n + g) * bytes, 1, *minimum++);
        }
    }
}

/* Reads the scales of a stretch. Most files have one float16 for each block. */
static TARGET void NAME(read_scales)(const struct form *f, const struct stretch *s, struct scales *out) {
    if (f->scale == SCALE_FLOAT16 && f->block == f->token_group && f->factor == 1 && f->minimum != ZERO_POINT) {
        for (int64_t b = 0; b < s->n_blocks; b++) {
            const uint8_t *block = s->blocks + b * f->block_bytes;
            HALVES(block, out->scale[b]);
            if (f->minimum == STORED) HALVES(block + 2 * PANEL, out->minimum[b]);
        }
        return;
    }
    const int as_stored = f->group == f->token_group && !f->block_scales && f->minimum != ZERO_POINT;
    switch (f->scale) {
#define KIND(kind)                                    \
    case kind:                                        \
        if (as_stored)                                \
            NAME(read_plain_scales)(kind, f, s, out); \
        else                                          \
            NAME(read_scales_of)(kind, f, s, out);    \
        return;
        KIND(SCALE_FLOAT16)
        KIND(SCALE_BFLOAT16)
        KIND(SCALE_FLOAT32)
        KIND(SCALE_EXPONENT)
        KIND(SCALE_FLOAT8)
        KIND(SCALE_UINT8)
        KIND(SCALE_INT8)
        KIND(SCALE_NIBBLES)
#undef KIND
    }
}

INLINE TARGET void NAME(read_numbers)(int is_signed, int64_t n, const uint8_t *restrict from, int16_t *restrict out) {
    if (is_signed)
        for (int64_t i = 0; i < n; i++) out[i] = (int8_t)from[i];
    else
        for (int64_t i = 0; i < n; i++) out[i] = from[i];
}

/* Reads the scales of two levels of a stretch, which is of one block. */
static TARGET void NAME(read_levels)(const struct form *f, const struct stretch *s, struct levels *restrict out) {
    const int64_t n = s->n_inputs / f->group * PANEL, bytes_of_all = f->block / f->group * PANEL;
    const uint8_t *restrict bytes = s->blocks + 2 * PANEL * f->block_scales + s->from / f->group * PANEL;
    int16_t *restrict scale = out->scale[0], *restrict other = out->other[0];
    HALVES(s->blocks, out->outer);
    for (int o = 0; o < PANEL; o++) out->outer[o] *= f->factor;
    if (f->block_scales > 1) {
        HALVES(s->blocks + 2 * PANEL, out->below);
        for (int o = 0; o < PANEL; o++) out->below[o] = -out->below[o];
    }
    if (f->scale == SCALE_NIBBLES) {
        for (int64_t i = 0; i < n; i++) scale[i] = bytes[i] & 15, other[i] = bytes[i] >> 4;
        return;
    }
    NAME(read_numbers)(f->scale == SCALE_INT8, n, bytes, scale);
    if (f->minimum == STORED)
        NAME(read_numbers)(f->scale == SCALE_INT8, n, bytes + bytes_of_all, other);
    else
        memcpy(other, scale, (size_t)n * sizeof *other);
}

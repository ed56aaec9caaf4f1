/* Included once for each instruction set, given by TARGET, NAME and HALVES: reads the scales of panels.
 *
 * HALVES(from, out) converts 16 float16.
 */

/* Reads 16 stored scales as they are. */
INLINE TARGET void NAME(read_sixteen)(int scale, const uint8_t *from, float out[PANEL]) {
    switch (scale) {
        case SCALE_FLOAT16:
            HALVES(from, out);
            return;
        case SCALE_BFLOAT16:
            for (int o = 0; o < PANEL; o++) {
                uint16_t bits;
                memcpy(&bits, from + 2 * o, 2);
                out[o] = from_bf16(bits);
            }
            return;
        case SCALE_FLOAT32:
            memcpy(out, from, PANEL * sizeof(float));
            return;
        case SCALE_EXPONENT:
            for (int o = 0; o < PANEL; o++) {
                const uint32_t bits = from[o] ? (uint32_t)from[o] << 23 : 0x400000u; /* 2^-127 is subnormal */
                memcpy(out + o, &bits, 4);
            }
            return;
        case SCALE_FLOAT8:
            for (int o = 0; o < PANEL; o++) out[o] = from_e4m3(from[o]);
            return;
        case SCALE_INT8:
            for (int o = 0; o < PANEL; o++) out[o] = (float)(int8_t)from[o];
            return;
        default:
            for (int o = 0; o < PANEL; o++) out[o] = (float)from[o];
    }
}

/* Reads the scale and minimum of group `g` of a block whose float16 are `outer`. */
INLINE TARGET void NAME(read_group)(const struct form *f, const uint8_t *block, int64_t g, const float outer[2][PANEL],
                                    float scale[PANEL], float minimum[PANEL]) {
    static const uint8_t bytes[] = {2, 2, 4, 1, 1, 1, 1, 1};
    const uint8_t *scales = block + 2 * PANEL * f->block_scales, *stored = scales + g * PANEL * bytes[f->scale];
    const uint8_t *minimums = scales + f->block / f->group * PANEL * bytes[f->scale];
    const float factor = f->factor;
    if (f->scale == SCALE_NIBBLES)
        for (int o = 0; o < PANEL; o++) {
            scale[o] = (float)(stored[o] & 15) * factor * outer[0][o];
            minimum[o] = (float)(stored[o] >> 4) * -outer[1][o];
        }
    else {
        NAME(read_sixteen)(f->scale, stored, scale);
        for (int o = 0; o < PANEL; o++) scale[o] *= factor;
        if (f->block_scales)
            for (int o = 0; o < PANEL; o++) scale[o] *= outer[0][o];
        if (f->minimum == ZERO_POINT)
            for (int o = 0; o < PANEL; o++) minimum[o] = -(float)minimums[g * PANEL + o] * scale[o];
        else if (f->minimum == STORED) {
            NAME(read_sixteen)(f->scale, minimums + g * PANEL * bytes[f->scale], minimum);
            if (f->block_scales)
                for (int o = 0; o < PANEL; o++) minimum[o] *= -outer[1][o];
        }
    }
}

/* Reads the scales of all token groups of a stretch. */
static TARGET void NAME(read_scales)(const struct form *f, const struct stretch *s, struct scales *out) {
    if (f->scale == SCALE_FLOAT16 && f->block == f->token_group && f->factor == 1 && f->minimum != ZERO_POINT) {
        for (int64_t b = 0; b < s->n_blocks; b++) {
            const uint8_t *block = s->blocks + b * f->block_bytes;
            HALVES(block, out->scale[b]);
            if (f->minimum == STORED) HALVES(block + 2 * PANEL, out->minimum[b]);
        }
        return;
    }
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
                NAME(read_group)(f, block, group, outer, *scale, *minimum);
            }
        }
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

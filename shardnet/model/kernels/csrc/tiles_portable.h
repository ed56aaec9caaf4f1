/* Tiles in plain C: the reference for the other instruction sets. */

INLINE float from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31;
    uint32_t mantissa = half & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24 */
        memcpy(&bits, &value, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    }
    memcpy(&value, &bits, 4);
    return value;
}

static void portable_quantized(const struct linear *p, const uint8_t *w, int64_t row, int n_rows,
                               float sums[2][MAX_TILE][PANEL]) {
    const int n_quads = p->group / 4, stride = 4 * n_rows;
    for (int64_t g = 0; g < p->n_groups; g++) {
        const uint8_t *scales = w + g * bytes_of_group(p), *quads = scales + SCALE_BYTES;
        for (int r = 0; r < n_rows; r++) {
            const int64_t at = (row + r) * p->n_groups + g;
            const int8_t *x = quads_of(p, row) + g * p->group * n_rows + 4 * r;
            for (int o = 0; o < PANEL; o++) {
                int32_t sum = p->offsets[at];
                for (int q = 0; q < n_quads; q++)
                    for (int i = 0; i < 4; i++) {
                        const uint8_t byte = p->bits == 8 ? quads[q * QUAD_BYTES + o * 4 + i]
                                                          : quads[q / 2 * QUAD_BYTES + o * 4 + i] >> (q % 2 * 4);
                        sum += (int32_t)(p->bits == 8 ? byte : byte & 15) * x[q * stride + i];
                    }
                uint16_t half;
                memcpy(&half, scales + 2 * o, 2);
                const float before = g ? sums[0][r][o] : 0;
                sums[0][r][o] = fmaf((float)sum, from_f16(half) * p->scales[at], before);
            }
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
                for (int r = 0; r < n_rows; r++) sums[0][r][o] = fmaf(from_bf16(bits), x[r], sums[0][r][o]);
            }
}

static const struct tiles portable_wide_tiles = {portable_wide, NULL};
static const struct tiles portable_quantized_tiles = {portable_quantized, NULL};

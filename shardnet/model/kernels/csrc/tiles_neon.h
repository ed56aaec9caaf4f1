/* Tiles for NEON: a panel's outputs are four registers. */

#include <arm_neon.h>

#define WITH_NEON __attribute__((target("arch=armv8.2-a+dotprod")))

/* Rows of float32. */
INLINE void neon_wide_of(const int n_rows, const struct linear *p, const uint8_t *w, int64_t row,
                         float sums[2][MAX_TILE][PANEL]) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    for (int part = 0; part < 4; part++) {
        const uint8_t *at = w + 16 * part;
        const float *x = floats_of(p, row);
        float32x4_t total[MAX_TILE];
        for (int r = 0; r < n_rows; r++) total[r] = vdupq_n_f32(0);
        for (int64_t k = 0; k < p->n_in; k += 2, at += QUAD_BYTES, x += 2 * n_rows) {
            const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(at));
            const float32x4_t first = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
            const float32x4_t second = vreinterpretq_f32_u32(vandq_u32(both, high));
            for (int r = 0; r < n_rows; r++) total[r] = vfmaq_n_f32(total[r], first, x[r]);
            for (int r = 0; r < n_rows; r++) total[r] = vfmaq_n_f32(total[r], second, x[n_rows + r]);
        }
        for (int r = 0; r < n_rows; r++) vst1q_f32(sums[0][r] + 4 * part, total[r]);
    }
}

INLINE int8x16_t neon_spread(const int8_t *x) { return vreinterpretq_s8_s32(vdupq_n_s32(quad_at(x))); }

/* Quantised rows and weights. */
INLINE WITH_NEON void neon_quantized_of(const int n_rows, const int bits, const struct linear *p, const uint8_t *w,
                                        int64_t row, float sums[2][MAX_TILE][PANEL]) {
    const int32_t group = p->group;
    const uint8x16_t low = vdupq_n_u8(15), flip = vdupq_n_u8(0x80);
    for (int part = 0; part < 4; part++) {
        const uint8_t *at = w;
        const int8_t *x = quads_of(p, row);
        float32x4_t total[MAX_TILE];
        for (int r = 0; r < n_rows; r++) total[r] = vdupq_n_f32(0);
        for (int64_t g = 0; g < p->n_groups; g++, at += bytes_of_group(p)) {
            const float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(at + 8 * part))));
            const uint8_t *quads = at + SCALE_BYTES + 16 * part;
            int32x4_t sum[MAX_TILE];
            for (int r = 0; r < n_rows; r++)
                sum[r] = vdupq_n_s32(bits == 8 ? 0 : p->offsets[(row + r) * p->n_groups + g]);
            for (int32_t k = 0; k < group; k += 8, x += 8 * n_rows) {
                uint8x16_t first, second;
                if (bits == 8) {
                    first = veorq_u8(vld1q_u8(quads), flip);
                    second = veorq_u8(vld1q_u8(quads + QUAD_BYTES), flip);
                    quads += 2 * QUAD_BYTES;
                } else {
                    const uint8x16_t both = vld1q_u8(quads);
                    first = vandq_u8(both, low);
                    second = vshrq_n_u8(both, 4);
                    quads += QUAD_BYTES;
                }
                for (int r = 0; r < n_rows; r++) {
                    sum[r] = vdotq_s32(sum[r], vreinterpretq_s8_u8(first), neon_spread(x + 4 * r));
                    sum[r] = vdotq_s32(sum[r], vreinterpretq_s8_u8(second), neon_spread(x + 4 * (n_rows + r)));
                }
            }
            for (int r = 0; r < n_rows; r++) {
                const float32x4_t own = vmulq_n_f32(scale, p->scales[(row + r) * p->n_groups + g]);
                total[r] = vfmaq_f32(total[r], vcvtq_f32_s32(sum[r]), own);
            }
        }
        for (int r = 0; r < n_rows; r++) vst1q_f32(sums[0][r] + 4 * part, total[r]);
    }
}

#define NEON_WIDE(n) neon_wide_of(n, p, w, row, sums)
#define NEON_EIGHT(n) neon_quantized_of(n, 8, p, w, row, sums)
#define NEON_FOUR(n) neon_quantized_of(n, 4, p, w, row, sums)
TILE(neon_wide, , NEON_WIDE)
TILE(neon_eight, WITH_NEON, NEON_EIGHT)
TILE(neon_four, WITH_NEON, NEON_FOUR)

static const struct tiles neon_wide_tiles = {neon_wide, NULL};
static const struct tiles neon_eight_tiles = {neon_eight, NULL};
static const struct tiles neon_four_tiles = {neon_four, NULL};

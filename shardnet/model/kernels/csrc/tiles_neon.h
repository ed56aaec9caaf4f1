/* Tiles for NEON: a panel's outputs are four registers. Only quantised rows need dot products of bytes; where the
 * machine has no instruction for these (Cortex-A53, A72) others give the same sums. */

#include <arm_neon.h>

/* Rows of float32. */
INLINE void neon_wide_of(const int n_rows, const int is_f16, const struct linear *p, const uint8_t *w, int64_t row,
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

INLINE uint32x4_t neon_bytes(const uint8_t *from) {
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32((uint32_t)quad_at(from))))));
}

#define TARGET
#define NAME(x) neon_##x
#define LANES 4
#define HALVES neon_halves
#define BYTES(from) (neon_panel_words) neon_bytes(from)
#include "panel_body.h"
#undef TARGET
#undef NAME
#undef LANES
#undef HALVES
#undef BYTES

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

TILE(neon_bf16, , neon_wide_of, 0)
TILE(neon_f16, , neon_wide_of, 1)

/* What vdotq_s32 does, by instructions that every arm64 has: a product fits 16 bits, and sums are of 32. */
INLINE int32x4_t neon_dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
    return vaddq_s32(sum, vpaddq_s32(low, high));
}

#define TARGET
#define NAME(x) neon_plain_##x
#define DOT neon_dot
#include "tiles_neon_body.h"
#undef TARGET
#undef NAME
#undef DOT

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define NAME(x) neon_dots_##x
#define DOT vdotq_s32
#include "tiles_neon_body.h"
#undef TARGET
#undef NAME
#undef DOT

/* Narrow floats are left to plain C. */
static struct tiles neon_tiles(const struct linear *p) {
    const struct form *f = &p->form;
    if (f->code == BF16) return (struct tiles){neon_bf16, NULL};
    if (f->code == F16) return (struct tiles){neon_f16, NULL};
    if (is_float(f)) return (struct tiles){portable_panel, NULL};
    return p->team.isa == NEON ? neon_dots_tiles(f) : neon_plain_tiles(f);
}

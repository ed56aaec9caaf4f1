/* Products with int8, int4 and bfloat16 weights, for AVX-512, AVX2, NEON and plain C.
 *
 * quantized.py and native_linear.py define the layouts and pack weights; native.py finds this
 * library and calls it. It is optional: built where a C compiler is at hand, and torch does its work elsewhere.
 *
 * Packed weights: panels of 16 outputs; in a panel the groups of inputs, one behind the other; of a
 * group first 16 float16 scales, one per output, then the weights, four inputs of each output at a
 * time: 64 bytes hold [16 outputs][4 inputs] of int8 + 128, or of two such quads int4 + 8, the first
 * in the low halves.
 *
 * Of bfloat16 there are no groups: 64 bytes hold [16 outputs][2 inputs].
 *
 * With int8 and int4 rows are rounded to int8 per row and group. A group's products are summed exactly, in int32, then
 * scaled and added to a float32 sum, group by group: so a row has the same bits in any company, with
 * any number of threads and on any of these instruction sets. With bfloat16 a row is multiplied in
 * float32, input by input, with fused multiply-adds: the same bits in any company, too. Where rows
 * are bfloat16 and the machine has instructions for that, pairs of inputs are added first.
 */

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "products.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#define PANEL 16       /* outputs of a panel */
#define QUAD_BYTES 64  /* [16 outputs][4 inputs] of bytes */
#define SCALE_BYTES 32 /* 16 float16 */
#define MAX_TILE 8     /* rows that are multiplied with one reading of the weights */

/* --- float16 */

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

/* --- rows to int8 */

/* Where a row's group `g` begins in its tile, and how many bytes its quads lie apart. */
INLINE int8_t *tile_of(const struct product *p, int64_t row, int64_t g, int32_t *stride) {
    int64_t first = row / MAX_TILE * MAX_TILE;
    int64_t n_rows = p->n_rows - first < MAX_TILE ? p->n_rows - first : MAX_TILE;
    *stride = (int32_t)n_rows * 4;
    return p->rounded + first * p->n_groups * p->group + g * p->group * n_rows + (row - first) * 4;
}

INLINE void round_row(const struct product *p, int64_t row) {
    const int32_t group = p->group;
    const float *wide = (const float *)p->rows + row * p->n_in;
    const uint16_t *narrow = (const uint16_t *)p->rows + row * p->n_in;
    float values[256];
    for (int64_t g = 0; g < p->n_groups; g++) {
        int64_t begin = g * group;
        int32_t n = (int32_t)(p->n_in - begin < group ? p->n_in - begin : group);
        float largest = 0;
        for (int32_t i = 0; i < n; i++)
            values[i] = p->is_bf16 ? from_bf16(narrow[begin + i]) : wide[begin + i];
        for (int32_t i = n; i < group; i++) values[i] = 0;
        int is_finite = 1;
        for (int32_t i = 0; i < group; i++) {
            float size = fabsf(values[i]);
            largest = size > largest ? size : largest;
            is_finite &= size <= 3.402823466e38f;
        }
        /* What is not finite makes every output so: the caller sees it and names it. */
        float scale = is_finite ? largest / 127.0f : NAN;
        float inverse = is_finite && largest > 1e-36f ? 127.0f / largest : 0.0f;
        int32_t stride;
        int8_t *out = tile_of(p, row, g, &stride);
        int32_t sum = 0;
        for (int32_t i = 0; i < group; i++) {
            /* Adding 1.5 * 2^23 rounds to even and leaves the number in the low bits. */
            float shifted = (is_finite ? values[i] * inverse : 0.0f) + 12582912.0f;
            int32_t bits;
            memcpy(&bits, &shifted, 4);
            int32_t rounded = bits - 0x4b400000;
            out[i / 4 * stride + i % 4] = (int8_t)rounded;
            sum += rounded;
        }
        p->scales[row * p->n_groups + g] = scale;
        p->sums[row * p->n_groups + g] = sum;
    }
}

/* --- rows for bfloat16 weights: [tile][inputs][rows of the tile], float32 or pairs of bfloat16 */

INLINE int64_t even_inputs(const struct product *p) { return (p->n_in + 1) / 2 * 2; }

INLINE void lay_out_row(const struct product *p, int64_t row) {
    const int64_t first = row / MAX_TILE * MAX_TILE, n_in = p->n_in;
    const int64_t n_rows = p->n_rows - first < MAX_TILE ? p->n_rows - first : MAX_TILE;
    const float *wide = (const float *)p->rows + row * n_in;
    const uint16_t *narrow = (const uint16_t *)p->rows + row * n_in;
    if (p->pairs) {
        uint16_t *out = (uint16_t *)p->rounded + first * even_inputs(p) + (row - first) * 2;
        for (int64_t i = 0; i < n_in; i++) out[i / 2 * 2 * n_rows + i % 2] = narrow[i];
        if (n_in % 2) out[n_in / 2 * 2 * n_rows + 1] = 0;
        return;
    }
    float *out = (float *)p->rounded + first * even_inputs(p) + (row - first);
    for (int64_t i = 0; i < n_in; i++)
        out[i * n_rows] = p->is_bf16 ? from_bf16(narrow[i]) : wide[i];
    if (n_in % 2) out[n_in * n_rows] = 0;
}

/* --- one panel times a tile of rows: sums[row][output] */

INLINE void portable_tile(const struct product *p, const uint8_t *w, int64_t row, int n_rows,
                          float sums[MAX_TILE][PANEL]) {
    const int32_t group = p->group, n_quads = group / 4;
    for (int r = 0; r < n_rows; r++)
        for (int o = 0; o < PANEL; o++) sums[r][o] = 0;
    for (int64_t g = 0; g < p->n_groups; g++) {
        const uint8_t *quads = w + SCALE_BYTES;
        for (int r = 0; r < n_rows; r++) {
            int64_t at = (row + r) * p->n_groups + g;
            int32_t stride;
            const int8_t *x = tile_of(p, row + r, g, &stride);
            for (int o = 0; o < PANEL; o++) {
                int32_t sum = (p->bits == 8 ? -128 : -8) * p->sums[at];
                for (int q = 0; q < n_quads; q++)
                    for (int i = 0; i < 4; i++) {
                        uint8_t byte = p->bits == 8
                                           ? quads[q * QUAD_BYTES + o * 4 + i]
                                           : quads[q / 2 * QUAD_BYTES + o * 4 + i] >> (q % 2 * 4);
                        sum += (int32_t)(p->bits == 8 ? byte : byte & 15) * x[q * stride + i];
                    }
                uint16_t half;
                memcpy(&half, w + 2 * o, 2);
                sums[r][o] = fmaf((float)sum, from_f16(half) * p->scales[at], sums[r][o]);
            }
        }
        w = quads + n_quads * QUAD_BYTES * p->bits / 8;
    }
}

INLINE void portable_wide_tile(const struct product *p, const uint8_t *w, int64_t row, int n_rows,
                               float sums[MAX_TILE][PANEL]) {
    const float *x = (const float *)p->rounded + row * even_inputs(p);
    for (int r = 0; r < n_rows; r++)
        for (int o = 0; o < PANEL; o++) sums[r][o] = 0;
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES)
        for (int i = 0; i < 2; i++, x += n_rows)
            for (int o = 0; o < PANEL; o++) {
                uint16_t bits;
                memcpy(&bits, w + 4 * o + 2 * i, 2);
                for (int r = 0; r < n_rows; r++)
                    sums[r][o] = fmaf(from_bf16(bits), x[r], sums[r][o]);
            }
}

#if defined(__x86_64__)

#define WITH_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define WITH_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define WITH_AVX2 __attribute__((target("avx2,fma,f16c")))

INLINE int32_t quad_of(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return quad;
}

INLINE WITH_AVX512 void avx512_tile_of(const int n_rows, const int bits, const struct product *p,
                                       const uint8_t *w, int64_t row,
                                       float sums[MAX_TILE][PANEL]) {
    const int32_t group = p->group;
    const __m512i low = _mm512_set1_epi8(15);
    const int8_t *x = p->rounded + row * p->n_groups * group;
    __m512 total[MAX_TILE];
    for (int r = 0; r < n_rows; r++) total[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < p->n_groups; g++) {
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
        __m512i even[MAX_TILE], odd[MAX_TILE];
        w += SCALE_BYTES;
        for (int r = 0; r < n_rows; r++) {
            int64_t at = (row + r) * p->n_groups + g;
            even[r] = _mm512_set1_epi32((bits == 8 ? -128 : -8) * p->sums[at]);
            odd[r] = _mm512_setzero_si512();
        }
        for (int32_t k = 0; k < group; k += 8) {
            __m512i first, second;
            if (bits == 8) {
                first = _mm512_loadu_si512(w);
                second = _mm512_loadu_si512(w + QUAD_BYTES);
                w += 2 * QUAD_BYTES;
            } else {
                __m512i both = _mm512_loadu_si512(w);
                first = _mm512_and_si512(both, low);
                second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                w += QUAD_BYTES;
            }
            for (int r = 0; r < n_rows; r++)
                even[r] = _mm512_dpbusd_epi32(even[r], first, _mm512_set1_epi32(quad_of(x + 4 * r)));
            x += 4 * n_rows;
            for (int r = 0; r < n_rows; r++)
                odd[r] = _mm512_dpbusd_epi32(odd[r], second, _mm512_set1_epi32(quad_of(x + 4 * r)));
            x += 4 * n_rows;
        }
        for (int r = 0; r < n_rows; r++) {
            __m512 both = _mm512_mul_ps(
                scale, _mm512_set1_ps(p->scales[(row + r) * p->n_groups + g]));
            __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(even[r], odd[r]));
            total[r] = _mm512_fmadd_ps(sum, both, total[r]);
        }
    }
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[r], total[r]);
}

INLINE WITH_AVX512 void avx512_wide_tile_of(const int n_rows, const struct product *p,
                                            const uint8_t *w, int64_t row,
                                            float sums[MAX_TILE][PANEL]) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const float *x = (const float *)p->rounded + row * even_inputs(p);
    __m512 total[MAX_TILE];
    for (int r = 0; r < n_rows; r++) total[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES, x += 2 * n_rows) {
        const __m512i both = _mm512_loadu_si512(w);
        const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, high));
        for (int r = 0; r < n_rows; r++)
            total[r] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[r]), total[r]);
        for (int r = 0; r < n_rows; r++)
            total[r] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[n_rows + r]), total[r]);
    }
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[r], total[r]);
}

INLINE WITH_AVX512_BF16 void avx512bf16_wide_tile_of(const int n_rows, const struct product *p,
                                                     const uint8_t *w, int64_t row,
                                                     float sums[MAX_TILE][PANEL]) {
    const uint16_t *x = (const uint16_t *)p->rounded + row * even_inputs(p);
    __m512 total[MAX_TILE];
    for (int r = 0; r < n_rows; r++) total[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->n_in; k += 2, w += QUAD_BYTES, x += 2 * n_rows) {
        const __m512bh pairs = (__m512bh)_mm512_loadu_si512(w);
        for (int r = 0; r < n_rows; r++) {
            int32_t pair;
            memcpy(&pair, x + 2 * r, 4);
            total[r] = _mm512_dpbf16_ps(total[r], pairs, (__m512bh)_mm512_set1_epi32(pair));
        }
    }
    for (int r = 0; r < n_rows; r++) _mm512_storeu_ps(sums[r], total[r]);
}

INLINE WITH_AVX2 void avx2_wide_tile_of(const int n_rows, const struct product *p,
                                        const uint8_t *w, int64_t row,
                                        float sums[MAX_TILE][PANEL]) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    for (int half = 0; half < 2; half++) {
        const uint8_t *at_w = w + 32 * half;
        const float *x = (const float *)p->rounded + row * even_inputs(p);
        __m256 total[MAX_TILE];
        for (int r = 0; r < n_rows; r++) total[r] = _mm256_setzero_ps();
        for (int64_t k = 0; k < p->n_in; k += 2, at_w += QUAD_BYTES, x += 2 * n_rows) {
            const __m256i both = _mm256_loadu_si256((const __m256i *)at_w);
            const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            const __m256 second = _mm256_castsi256_ps(_mm256_and_si256(both, high));
            for (int r = 0; r < n_rows; r++)
                total[r] = _mm256_fmadd_ps(first, _mm256_broadcast_ss(x + r), total[r]);
            for (int r = 0; r < n_rows; r++)
                total[r] = _mm256_fmadd_ps(second, _mm256_broadcast_ss(x + n_rows + r), total[r]);
        }
        for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[r] + 8 * half, total[r]);
    }
}

/* A panel's 16 outputs are two registers of 8 here. */
INLINE WITH_AVX2 void avx2_tile_of(const int n_rows, const int bits, const struct product *p,
                                   const uint8_t *w, int64_t row, float sums[MAX_TILE][PANEL]) {
    const int32_t group = p->group;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    for (int half = 0; half < 2; half++) {
        const uint8_t *at_w = w;
        const int8_t *x = p->rounded + row * p->n_groups * group;
        __m256 total[MAX_TILE];
        for (int r = 0; r < n_rows; r++) total[r] = _mm256_setzero_ps();
        for (int64_t g = 0; g < p->n_groups; g++) {
            const __m256 scale =
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at_w + 16 * half)));
            const uint8_t *quads = at_w + SCALE_BYTES + 32 * half;
            __m256i sum[MAX_TILE];
            for (int r = 0; r < n_rows; r++) {
                int64_t at = (row + r) * p->n_groups + g;
                sum[r] = _mm256_set1_epi32(bits == 8 ? 0 : -8 * p->sums[at]);
            }
            if (bits == 8) {
                for (int32_t k = 0; k < group; k += 4, quads += QUAD_BYTES, x += 4 * n_rows) {
                    __m256i signed_w =
                        _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)quads), flip);
                    __m256i size = _mm256_abs_epi8(signed_w);
                    for (int r = 0; r < n_rows; r++) {
                        __m256i quad = _mm256_set1_epi32(quad_of(x + 4 * r));
                        /* At most 2 * 127 * 127, which 16 bits hold. */
                        __m256i pairs =
                            _mm256_maddubs_epi16(size, _mm256_sign_epi8(quad, signed_w));
                        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs, ones));
                    }
                }
            } else {
                for (int32_t k = 0; k < group; k += 8, quads += QUAD_BYTES, x += 8 * n_rows) {
                    __m256i both = _mm256_loadu_si256((const __m256i *)quads);
                    __m256i first = _mm256_and_si256(both, low);
                    __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                    for (int r = 0; r < n_rows; r++) {
                        /* Each at most 2 * 15 * 127. */
                        __m256i pairs = _mm256_add_epi16(
                            _mm256_maddubs_epi16(first, _mm256_set1_epi32(quad_of(x + 4 * r))),
                            _mm256_maddubs_epi16(
                                second, _mm256_set1_epi32(quad_of(x + 4 * (n_rows + r)))));
                        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            for (int r = 0; r < n_rows; r++) {
                __m256 both = _mm256_mul_ps(
                    scale, _mm256_set1_ps(p->scales[(row + r) * p->n_groups + g]));
                total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), both, total[r]);
            }
            at_w += SCALE_BYTES + (int64_t)group * PANEL * bits / 8;
        }
        for (int r = 0; r < n_rows; r++) _mm256_storeu_ps(sums[r] + 8 * half, total[r]);
    }
}

#elif defined(__aarch64__)

#define WITH_NEON __attribute__((target("arch=armv8.2-a+dotprod")))

INLINE int8x16_t quad_of(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}

/* A panel's 16 outputs are four registers of 4 here. */
INLINE WITH_NEON void neon_tile_of(const int n_rows, const int bits, const struct product *p,
                                   const uint8_t *w, int64_t row, float sums[MAX_TILE][PANEL]) {
    const int32_t group = p->group;
    const uint8x16_t low = vdupq_n_u8(15), flip = vdupq_n_u8(0x80);
    for (int part = 0; part < 4; part++) {
        const uint8_t *at_w = w;
        const int8_t *x = p->rounded + row * p->n_groups * group;
        float32x4_t total[MAX_TILE];
        for (int r = 0; r < n_rows; r++) total[r] = vdupq_n_f32(0);
        for (int64_t g = 0; g < p->n_groups; g++) {
            const float32x4_t scale = vcvt_f32_f16(
                vreinterpret_f16_u16(vld1_u16((const uint16_t *)(at_w + 8 * part))));
            const uint8_t *quads = at_w + SCALE_BYTES + 16 * part;
            int32x4_t sum[MAX_TILE];
            for (int r = 0; r < n_rows; r++) {
                int64_t at = (row + r) * p->n_groups + g;
                sum[r] = vdupq_n_s32(bits == 8 ? 0 : -8 * p->sums[at]);
            }
            for (int32_t k = 0; k < group; k += 8) {
                uint8x16_t first, second;
                if (bits == 8) {
                    first = veorq_u8(vld1q_u8(quads), flip);
                    second = veorq_u8(vld1q_u8(quads + QUAD_BYTES), flip);
                    quads += 2 * QUAD_BYTES;
                } else {
                    uint8x16_t both = vld1q_u8(quads);
                    first = vandq_u8(both, low);
                    second = vshrq_n_u8(both, 4);
                    quads += QUAD_BYTES;
                }
                for (int r = 0; r < n_rows; r++) {
                    sum[r] = vdotq_s32(sum[r], vreinterpretq_s8_u8(first), quad_of(x + 4 * r));
                    sum[r] = vdotq_s32(sum[r], vreinterpretq_s8_u8(second),
                                       quad_of(x + 4 * (n_rows + r)));
                }
                x += 8 * n_rows;
            }
            for (int r = 0; r < n_rows; r++) {
                float32x4_t both =
                    vmulq_n_f32(scale, p->scales[(row + r) * p->n_groups + g]);
                total[r] = vfmaq_f32(total[r], vcvtq_f32_s32(sum[r]), both);
            }
            at_w += SCALE_BYTES + (int64_t)group * PANEL * bits / 8;
        }
        for (int r = 0; r < n_rows; r++) vst1q_f32(sums[r] + 4 * part, total[r]);
    }
}

INLINE void neon_wide_tile_of(const int n_rows, const struct product *p, const uint8_t *w,
                              int64_t row, float sums[MAX_TILE][PANEL]) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    for (int part = 0; part < 4; part++) {
        const uint8_t *at_w = w + 16 * part;
        const float *x = (const float *)p->rounded + row * even_inputs(p);
        float32x4_t total[MAX_TILE];
        for (int r = 0; r < n_rows; r++) total[r] = vdupq_n_f32(0);
        for (int64_t k = 0; k < p->n_in; k += 2, at_w += QUAD_BYTES, x += 2 * n_rows) {
            const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(at_w));
            const float32x4_t first = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
            const float32x4_t second = vreinterpretq_f32_u32(vandq_u32(both, high));
            for (int r = 0; r < n_rows; r++) total[r] = vfmaq_n_f32(total[r], first, x[r]);
            for (int r = 0; r < n_rows; r++)
                total[r] = vfmaq_n_f32(total[r], second, x[n_rows + r]);
        }
        for (int r = 0; r < n_rows; r++) vst1q_f32(sums[r] + 4 * part, total[r]);
    }
}

#endif

/* A function for each number of rows and bits, so that the compiler unrolls its loops. */
#define BY_ROWS(CALL)                \
    switch (n_rows) {                \
        case 1: CALL(1); return;     \
        case 2: CALL(2); return;     \
        case 3: CALL(3); return;     \
        case 4: CALL(4); return;     \
        case 5: CALL(5); return;     \
        case 6: CALL(6); return;     \
        case 7: CALL(7); return;     \
        default: CALL(8); return;    \
    }

#define TILES(NAME, TARGET)                                                                \
    static TARGET void NAME##_tile8(const struct product *p, const uint8_t *w, int64_t row, \
                                    int n_rows, float sums[MAX_TILE][PANEL]) {              \
        BY_ROWS(NAME##_EIGHT)                                                               \
    }                                                                                       \
    static TARGET void NAME##_tile4(const struct product *p, const uint8_t *w, int64_t row, \
                                    int n_rows, float sums[MAX_TILE][PANEL]) {              \
        BY_ROWS(NAME##_FOUR)                                                                \
    }

#define WIDE_TILES(NAME, TARGET)                                                               \
    static TARGET void NAME##_wide_tile(const struct product *p, const uint8_t *w, int64_t row, \
                                        int n_rows, float sums[MAX_TILE][PANEL]) {              \
        BY_ROWS(NAME##_WIDE)                                                                    \
    }

#if defined(__x86_64__)
#define avx512_EIGHT(n) avx512_tile_of(n, 8, p, w, row, sums)
#define avx512_FOUR(n) avx512_tile_of(n, 4, p, w, row, sums)
#define avx512_WIDE(n) avx512_wide_tile_of(n, p, w, row, sums)
#define avx512bf16_WIDE(n) avx512bf16_wide_tile_of(n, p, w, row, sums)
#define avx2_EIGHT(n) avx2_tile_of(n, 8, p, w, row, sums)
#define avx2_FOUR(n) avx2_tile_of(n, 4, p, w, row, sums)
#define avx2_WIDE(n) avx2_wide_tile_of(n, p, w, row, sums)
TILES(avx512, WITH_AVX512)
TILES(avx2, WITH_AVX2)
WIDE_TILES(avx512, WITH_AVX512)
WIDE_TILES(avx512bf16, WITH_AVX512_BF16)
WIDE_TILES(avx2, WITH_AVX2)
#elif defined(__aarch64__)
#define neon_EIGHT(n) neon_tile_of(n, 8, p, w, row, sums)
#define neon_FOUR(n) neon_tile_of(n, 4, p, w, row, sums)
#define neon_WIDE(n) neon_wide_tile_of(n, p, w, row, sums)
TILES(neon, WITH_NEON)
WIDE_TILES(neon, )
#endif

typedef void (*tile_function)(const struct product *, const uint8_t *, int64_t, int,
                              float[MAX_TILE][PANEL]);

static void portable(const struct product *p, const uint8_t *w, int64_t row, int n_rows,
                     float sums[MAX_TILE][PANEL]) {
    if (p->bits == 16)
        portable_wide_tile(p, w, row, n_rows, sums);
    else
        portable_tile(p, w, row, n_rows, sums);
}

static tile_function tile_for(const struct product *p) {
#if defined(__x86_64__)
    if (p->team.isa == AVX512 && p->bits == 16) return p->pairs ? avx512bf16_wide_tile : avx512_wide_tile;
    if (p->team.isa == AVX512) return p->bits == 8 ? avx512_tile8 : avx512_tile4;
    if (p->team.isa == AVX2 && p->bits == 16) return avx2_wide_tile;
    if (p->team.isa == AVX2) return p->bits == 8 ? avx2_tile8 : avx2_tile4;
#elif defined(__aarch64__)
    if (p->team.isa == NEON && p->bits == 16) return neon_wide_tile;
    if (p->team.isa == NEON) return p->bits == 8 ? neon_tile8 : neon_tile4;
#endif
    return portable;
}

static void store(const struct product *p, int64_t row, int64_t panel, const float *sums) {
    int64_t begin = panel * PANEL;
    int n = (int)(p->n_out - begin < PANEL ? p->n_out - begin : PANEL);
    float values[PANEL];
    for (int o = 0; o < PANEL; o++) values[o] = sums[o];
    if (p->bias)
        for (int o = 0; o < n; o++) values[o] += p->bias[begin + o];
    if (p->is_bf16) {
        uint16_t *out = (uint16_t *)p->out + row * p->n_out + begin;
        for (int o = 0; o < n; o++) out[o] = to_bf16(values[o]);
    } else {
        memcpy((float *)p->out + row * p->n_out + begin, values, sizeof(float) * (size_t)n);
    }
}

/* --- the work */

static int64_t bytes_of_panel(const struct product *p) {
    if (p->bits == 16) return even_inputs(p) / 2 * QUAD_BYTES;
    return p->n_groups * (SCALE_BYTES + (int64_t)p->group * PANEL * p->bits / 8);
}

static void round_rows(const void *argument, int64_t begin, int64_t end) {
    const struct product *p = argument;
    for (int64_t row = begin; row < end; row++)
        if (p->bits == 16)
            lay_out_row(p, row);
        else
            round_row(p, row);
}

static void multiply_panels(const void *argument, int64_t begin, int64_t end) {
    const struct product *p = argument;
    const int64_t panel_bytes = bytes_of_panel(p);
    const tile_function tile = tile_for(p);
    float sums[MAX_TILE][PANEL];
    for (int64_t panel = begin; panel < end; panel++) {
        const uint8_t *w = p->weights + panel * panel_bytes;
        for (int64_t row = 0; row < p->n_rows; row += MAX_TILE) {
            int n_rows = (int)(p->n_rows - row < MAX_TILE ? p->n_rows - row : MAX_TILE);
            tile(p, w, row, n_rows, sums);
            for (int r = 0; r < n_rows; r++) store(p, row + r, panel, sums[r]);
        }
    }
}

/* --- threads */

struct job {
    work_function work;
    const void *argument;
    atomic_long next;
    int64_t n_items, piece;
};

static void take_pieces(void *argument) {
    struct job *job = argument;
    int64_t begin;
    while ((begin = atomic_fetch_add(&job->next, 1) * job->piece) < job->n_items) {
        int64_t end = begin + job->piece;
        job->work(job->argument, begin, end < job->n_items ? end : job->n_items);
    }
}

void shardnet_share_out(const struct team *team, work_function work, const void *argument,
                        int64_t n_items, int64_t piece) {
    struct job job = {.work = work, .argument = argument, .n_items = n_items, .piece = piece};
    if (!team->parallel || team->n_threads < 2 || n_items <= piece) {
        work(argument, 0, n_items);
        return;
    }
    atomic_init(&job.next, 0);
    team->parallel(take_pieces, &job, (unsigned)team->n_threads, 0);
}

/* --- what native.py calls */

/* The best instruction set of this machine. */
int32_t shardnet_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return AVX2;
#elif defined(__aarch64__) && defined(__APPLE__)
    return NEON;
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & (1 << 20)) return NEON; /* HWCAP_ASIMDDP */
#endif
    return PORTABLE;
}

/* Whether pairs of bfloat16 are multiplied at once, and whether whole tiles are (AMX). */
int32_t shardnet_has_bf16_pairs(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}

int32_t shardnet_has_bf16_tiles(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
#else
    return 0;
#endif
}

/* Says by its name what the structs are: native.py looks for its own version. */
void shardnet_version_3(void) {}

void shardnet_multiply(struct product *p) {
    const int64_t n_panels = (p->n_out + PANEL - 1) / PANEL;
    /* Pieces of about 64 KiB of weights: small enough to share out evenly, large enough to pay. */
    const int64_t bytes = bytes_of_panel(p), piece = 65536 / (bytes ? bytes : 1);
    p->pairs = p->has_pairs && p->is_bf16;
    p->scales = (float *)(p->rounded + p->n_rows * p->n_groups * p->group);
    p->sums = (int32_t *)(p->scales + p->n_rows * p->n_groups);
    shardnet_share_out(&p->team, round_rows, p, p->n_rows, 16);
    shardnet_share_out(&p->team, multiply_panels, p, n_panels, piece > 0 ? piece : 1);
}

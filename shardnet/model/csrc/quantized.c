/* Products with int8 and int4 weights, for AVX-512 (VNNI), AVX2, NEON (dot product) and plain C.
 *
 * shardnet/model/quantized.py defines the layout and packs weights; native.py finds this library and
 * calls it. It is optional: built where a C compiler is at hand, and torch does its work elsewhere.
 *
 * Packed weights: panels of 16 outputs; in a panel the groups of inputs, one behind the other; of a
 * group first 16 float16 scales, one per output, then the weights, four inputs of each output at a
 * time: 64 bytes hold [16 outputs][4 inputs] of int8 + 128, or of two such quads int4 + 8, the first
 * in the low halves.
 *
 * Rows are rounded to int8 per row and group. A group's products are summed exactly, in int32, then
 * scaled and added to a float32 sum, group by group: so a row has the same bits in any company, with
 * any number of threads and on any of these instruction sets.
 */

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

#define PANEL 16        /* outputs of a panel */
#define QUAD_BYTES 64   /* [16 outputs][4 inputs] of bytes */
#define SCALE_BYTES 32  /* 16 float16 */
#define MAX_TILE 8      /* rows that are multiplied with one reading of the weights */

#define INLINE static inline __attribute__((always_inline))

enum isa { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NEON = 3 };

/* Runs a function on several threads, as GOMP_parallel does. */
typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);

struct product {
    const uint8_t *weights; /* packed */
    const void *rows;       /* [n_rows, n_in] float32 or bfloat16 */
    void *out;              /* [n_rows, n_out], of the same type */
    const float *bias;      /* [n_out], or NULL */
    int8_t *rounded;        /* room for [tiles][quads][rows of the tile][4 inputs] */
    float *scales;          /* room for [n_rows, n_groups] */
    int32_t *sums;          /* room for [n_rows, n_groups] */
    parallel_function parallel;
    int64_t n_rows, n_in, n_out, n_groups;
    int32_t group;    /* inputs of a group: a multiple of 8 */
    int32_t bits;     /* 8 or 4 */
    int32_t is_bf16;  /* the type of rows and out */
    int32_t isa;
    int32_t n_threads;
};

struct job {
    const struct product *product;
    atomic_long next;
    int64_t n_pieces, piece;
};

/* --- bfloat16 and float16 */

INLINE float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

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

#if defined(__x86_64__)

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

#endif

/* A function for each number of rows and bits, so that the compiler unrolls its loops. */
#define TILES(NAME, TARGET)                                                                       \
    static TARGET void NAME##_tile(const struct product *p, const uint8_t *w, int64_t row,        \
                                   int n_rows, float sums[MAX_TILE][PANEL]) {                     \
        if (p->bits == 8) {                                                                       \
            switch (n_rows) {                                                                     \
                case 1: NAME##_tile_of(1, 8, p, w, row, sums); return;                            \
                case 2: NAME##_tile_of(2, 8, p, w, row, sums); return;                            \
                case 3: NAME##_tile_of(3, 8, p, w, row, sums); return;                            \
                case 4: NAME##_tile_of(4, 8, p, w, row, sums); return;                            \
                case 5: NAME##_tile_of(5, 8, p, w, row, sums); return;                            \
                case 6: NAME##_tile_of(6, 8, p, w, row, sums); return;                            \
                case 7: NAME##_tile_of(7, 8, p, w, row, sums); return;                            \
                default: NAME##_tile_of(8, 8, p, w, row, sums); return;                           \
            }                                                                                     \
        }                                                                                         \
        switch (n_rows) {                                                                         \
            case 1: NAME##_tile_of(1, 4, p, w, row, sums); return;                                \
            case 2: NAME##_tile_of(2, 4, p, w, row, sums); return;                                \
            case 3: NAME##_tile_of(3, 4, p, w, row, sums); return;                                \
            case 4: NAME##_tile_of(4, 4, p, w, row, sums); return;                                \
            case 5: NAME##_tile_of(5, 4, p, w, row, sums); return;                                \
            case 6: NAME##_tile_of(6, 4, p, w, row, sums); return;                                \
            case 7: NAME##_tile_of(7, 4, p, w, row, sums); return;                                \
            default: NAME##_tile_of(8, 4, p, w, row, sums); return;                               \
        }                                                                                         \
    }

#if defined(__x86_64__)
TILES(avx512, WITH_AVX512)
TILES(avx2, WITH_AVX2)
#elif defined(__aarch64__)
TILES(neon, WITH_NEON)
#endif

static void tile(const struct product *p, const uint8_t *w, int64_t row, int n_rows,
                 float sums[MAX_TILE][PANEL]) {
#if defined(__x86_64__)
    if (p->isa == AVX512) {
        avx512_tile(p, w, row, n_rows, sums);
        return;
    }
    if (p->isa == AVX2) {
        avx2_tile(p, w, row, n_rows, sums);
        return;
    }
#elif defined(__aarch64__)
    if (p->isa == NEON) {
        neon_tile(p, w, row, n_rows, sums);
        return;
    }
#endif
    portable_tile(p, w, row, n_rows, sums);
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

/* --- the work of all threads: whoever is free takes the next piece */

static void round_rows(void *argument) {
    struct job *job = argument;
    long piece;
    while ((piece = atomic_fetch_add(&job->next, 1)) < job->n_pieces) {
        int64_t end = (piece + 1) * job->piece;
        if (end > job->product->n_rows) end = job->product->n_rows;
        for (int64_t row = piece * job->piece; row < end; row++) round_row(job->product, row);
    }
}

static void multiply_panels(void *argument) {
    struct job *job = argument;
    const struct product *p = job->product;
    const int64_t n_panels = (p->n_out + PANEL - 1) / PANEL;
    const int64_t panel_bytes =
        p->n_groups * (SCALE_BYTES + (int64_t)p->group * PANEL * p->bits / 8);
    float sums[MAX_TILE][PANEL];
    long piece;
    while ((piece = atomic_fetch_add(&job->next, 1)) < job->n_pieces) {
        int64_t end = (piece + 1) * job->piece;
        if (end > n_panels) end = n_panels;
        for (int64_t panel = piece * job->piece; panel < end; panel++) {
            const uint8_t *w = p->weights + panel * panel_bytes;
            for (int64_t row = 0; row < p->n_rows; row += MAX_TILE) {
                int n_rows = (int)(p->n_rows - row < MAX_TILE ? p->n_rows - row : MAX_TILE);
                tile(p, w, row, n_rows, sums);
                for (int r = 0; r < n_rows; r++) store(p, row + r, panel, sums[r]);
            }
        }
    }
}

static void on_threads(const struct product *p, void (*work)(void *), int64_t n_items,
                       int64_t piece) {
    struct job job = {.product = p, .n_pieces = (n_items + piece - 1) / piece, .piece = piece};
    atomic_init(&job.next, 0);
    if (p->parallel && p->n_threads > 1 && job.n_pieces > 1)
        p->parallel(work, &job, (unsigned)p->n_threads, 0);
    else
        work(&job);
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

/* The size of struct product, so that both sides can tell that they mean the same. */
int64_t shardnet_product_bytes(void) { return (int64_t)sizeof(struct product); }

/* out = rows * weights^T + bias. Everything in `p` has been checked by the caller. */
void shardnet_multiply(const struct product *p) {
    const int64_t n_panels = (p->n_out + PANEL - 1) / PANEL;
    const int64_t bytes = n_panels * p->n_groups * (SCALE_BYTES + (int64_t)p->group * 2 * p->bits);
    /* Pieces of about 64 KiB of weights: small enough to share out evenly, large enough to pay. */
    int64_t piece = n_panels * 65536 / (bytes ? bytes : 1);
    on_threads(p, round_rows, p->n_rows, 16);
    on_threads(p, multiply_panels, n_panels, piece > 0 ? piece : 1);
}

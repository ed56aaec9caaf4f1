/* Packs weights for linear.c: quantised to int8 or int4, or bfloat16 unchanged.
 *
 * config/panel_form.py describes the layouts; kernels/quantized_linear.py and kernels/bf16_linear.py do the same with
 * torch, to the same bits: every sum, multiplication and comparison here is one of theirs, in the same order.
 *
 * The lanes of a vector are outputs of a panel; compilers map them to the machine's registers.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "linear.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SCALE_BYTES 32 /* 16 float16 */
#define INT8_GROUP 64  /* inputs that share a scale */
#define INT4_GROUP 32
#define MAX_GROUP INT8_GROUP
#define SQUARE_BYTES (PANEL * QUAD_BYTES)
#if defined(__x86_64__)
#define LANES 8 /* outputs that are quantised at once, of the 16 of a panel */
#else
#define LANES 4
#endif

enum type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct packing {
    const void *weights; /* [n_out, n_in], rows `stride` elements apart */
    uint8_t *packed;
    struct team team;
    int64_t n_out, n_in, stride;
    int32_t type; /* of the weights */
    int32_t bits; /* 8, 4, or 16 for unchanged bfloat16 */
};

/* Weights are put into lanes one by one, as bits. */
typedef float lanes __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t bit_lanes __attribute__((vector_size(4 * LANES)));

/* --- numbers */

INLINE lanes all(float value) { return (lanes){0} + value; }

INLINE bit_lanes choose_bits(whole_lanes which, bit_lanes one, bit_lanes other) {
    return (one & (bit_lanes)which) | (other & ~(bit_lanes)which);
}

INLINE lanes choose(whole_lanes which, lanes one, lanes other) {
    return (lanes)choose_bits(which, (bit_lanes)one, (bit_lanes)other);
}

INLINE lanes lanes_from_f16(bit_lanes half) {
    const bit_lanes size = half & 0x7fff, sign = (half & 0x8000) << 16;
    const lanes small = __builtin_convertvector((whole_lanes)size, lanes) * 0x1p-24f;
    const bit_lanes endless = (bit_lanes)(size >= 0x7c00) & 0x38000000u;
    const bit_lanes normal = (size << 13) + 0x38000000u + endless;
    return (lanes)(sign | choose_bits(size < 0x400, (bit_lanes)small, normal));
}

/* To the nearest, ties to even. */
INLINE bit_lanes lanes_to_f16(lanes value) {
    const bit_lanes sign = (bit_lanes)value & 0x80000000u, size = (bit_lanes)value ^ sign;
    const bit_lanes normal = (size - 0x38000000u + 0xfff + (size >> 13 & 1)) >> 13;
    const bit_lanes small = (bit_lanes)((lanes)size + 0.5f) - 0x3f000000u;
    const bit_lanes finite = choose_bits(size < 0x38800000u, small, normal);
    const bit_lanes endless = ((bit_lanes)(size > 0x7f800000u) & 0x200u) + 0x7c00u;
    return sign >> 16 | choose_bits(size >= 0x47800000u, endless, finite);
}

INLINE lanes size_of(lanes value) { return (lanes)((bit_lanes)value & 0x7fffffffu); }

/* The whole numbers nearest to `value` between `low` and `high`, ties to even. */
INLINE lanes whole(lanes value, float low, float high) {
    value = choose(value < low, all(low), value);
    value = choose(value > high, all(high), value);
    return (value + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: nothing is left behind the point */
}

INLINE lanes inverse_of(lanes scale) { return choose(scale == 0.0f, all(0), 1.0f / scale); }

/* --- a group of a panel */

INLINE void widen(lanes values[MAX_GROUP], int type, int group) {
    for (int i = 0; i < group; i++)
        if (type == BFLOAT16)
            values[i] = (lanes)((bit_lanes)values[i] << 16);
        else if (type == FLOAT16)
            values[i] = lanes_from_f16((bit_lanes)values[i]);
}

/* Reads the inputs from `begin` on of the outputs from `first` on, padded with zeros. */
INLINE void read_group(const struct packing *p, int64_t first, int64_t begin, int group, lanes values[MAX_GROUP]) {
    const int n = (int)(p->n_in - begin < group ? p->n_in - begin : group);
    const int n_outputs = (int)(p->n_out - first < LANES ? p->n_out - first : LANES);
    uint32_t *lane = (uint32_t *)values;
    if (n < group || n_outputs < LANES) memset(values, 0, (size_t)group * sizeof(lanes));
    for (int o = 0; o < n_outputs; o++, lane++) {
        const int64_t at = (first + o) * p->stride + begin;
        const uint32_t *wide = (const uint32_t *)p->weights + at;
        const uint16_t *narrow = (const uint16_t *)p->weights + at;
        if (p->type == FLOAT32)
            for (int i = 0; i < n; i++) lane[i * LANES] = wide[i];
        else
            for (int i = 0; i < n; i++) lane[i * LANES] = narrow[i];
    }
    if (p->type != FLOAT32) widen(values, p->type, group);
}

INLINE void put_scales(bit_lanes scale, uint8_t *out) {
    uint16_t narrow[LANES];
    for (int o = 0; o < LANES; o++) narrow[o] = (uint16_t)scale[o];
    memcpy(out, narrow, sizeof narrow);
}

/* Four numbers as bytes, after `offset` was added; NaN becomes zero. */
INLINE bit_lanes quad(const lanes values[4], lanes inverse, float low, float high, int offset) {
    bit_lanes together = {0};
    for (int i = 0; i < 4; i++) {
        const lanes value = whole(values[i] * inverse, low, high);
        const whole_lanes number = __builtin_convertvector(value, whole_lanes) + offset;
        together |= (bit_lanes)(number & (value == value)) << 8 * i;
    }
    return together;
}

INLINE void pack_int8(const lanes values[MAX_GROUP], uint8_t *scales, uint8_t *out) {
    lanes largest = all(0);
    whole_lanes is_broken = {0};
    for (int i = 0; i < 64; i++) {
        const lanes size = size_of(values[i]);
        largest = choose(size > largest, size, largest);
        is_broken |= size != size;
    }
    largest = choose(is_broken, all(NAN), largest);
    const bit_lanes scale = lanes_to_f16(largest / 127.0f);
    const lanes inverse = inverse_of(lanes_from_f16(scale));
    put_scales(scale, scales);
    for (int i = 0; i < 64; i += 4, out += QUAD_BYTES) {
        const bit_lanes bytes = quad(values + i, inverse, -127, 127, 128);
        memcpy(out, &bytes, sizeof bytes);
    }
}

/* The sum of squares, added pairwise by halves as in kernels/quantized_linear.py. */
INLINE lanes error_of(const lanes values[MAX_GROUP], lanes scale) {
    const lanes inverse = inverse_of(scale);
    lanes squares[32];
    for (int i = 0; i < 32; i++) {
        const lanes error = whole(values[i] * inverse, -8, 7) * scale - values[i];
        squares[i] = error * error;
    }
    for (int half = 16; half; half /= 2)
        for (int i = 0; i < half; i++) squares[i] += squares[i + half];
    return squares[0];
}

/* int4 reaches -8 on one side: the scale maps the weight of largest magnitude there, whatever its sign. */
INLINE void pack_int4(const lanes values[MAX_GROUP], uint8_t *scales, uint8_t *out) {
    static const float shrinks[] = {0.92f, 0.85f, 0.78f};
    lanes extreme = values[0];
    for (int i = 1; i < 32; i++) {
        const whole_lanes is_broken = (values[i] != values[i]) & (extreme == extreme);
        extreme = choose((size_of(values[i]) > size_of(extreme)) | is_broken, values[i], extreme);
    }
    const lanes whole_scale = extreme / -8.0f;
    bit_lanes best = lanes_to_f16(whole_scale);
    lanes best_error = error_of(values, lanes_from_f16(best));
    for (int k = 0; k < 3; k++) {
        const bit_lanes scale = lanes_to_f16(whole_scale * shrinks[k]);
        const lanes error = error_of(values, lanes_from_f16(scale));
        best = choose_bits(error < best_error, scale, best);
        best_error = choose(error < best_error, error, best_error);
    }
    const lanes inverse = inverse_of(lanes_from_f16(best));
    put_scales(best, scales);
    for (int i = 0; i < 32; i += 8, out += QUAD_BYTES) {
        const bit_lanes both = quad(values + i, inverse, -8, 7, 8) | quad(values + i + 4, inverse, -8, 7, 8) << 4;
        memcpy(out, &both, sizeof both);
    }
}

/* --- a panel */

INLINE void quantize_panel(const struct packing *p, int64_t panel) {
    const int group = p->bits == 8 ? INT8_GROUP : INT4_GROUP;
    const int64_t n_groups = (p->n_in + group - 1) / group;
    const int64_t group_bytes = SCALE_BYTES + (int64_t)group * PANEL * p->bits / 8;
    uint8_t *out = p->packed + panel * n_groups * group_bytes;
    lanes values[MAX_GROUP];
    for (int64_t g = 0; g < n_groups; g++, out += group_bytes)
        for (int o = 0; o < PANEL; o += LANES) {
            read_group(p, panel * PANEL + o, g * group, group, values);
            if (p->bits == 8)
                pack_int8(values, out + 2 * o, out + SCALE_BYTES + 4 * o);
            else
                pack_int4(values, out + 2 * o, out + SCALE_BYTES + 4 * o);
        }
}

/* Pairs of bfloat16 of one output: what is missing is zero. */
INLINE uint32_t pair_at(const uint16_t *weights, int64_t left) {
    uint32_t pair = 0;
    memcpy(&pair, weights, left >= 2 ? 4 : left == 1 ? 2 : 0);
    return pair;
}

/* Turns a square that has nothing missing: 16 pairs of inputs of 16 outputs, rows `stride` weights apart. */
typedef void (*square_function)(const uint16_t *from, int64_t stride, uint8_t *out);

/* bfloat16: outputs and pairs of inputs change places, a square of them at a time. */
INLINE void transpose_panel(const struct packing *p, int64_t panel, square_function turn) {
    const int64_t n_in = p->n_in, n_pairs = (n_in + 1) / 2, first = panel * PANEL;
    const int n_outputs = (int)(p->n_out - first < PANEL ? p->n_out - first : PANEL);
    const uint16_t *weights = (const uint16_t *)p->weights + first * p->stride;
    uint8_t *out = p->packed + panel * n_pairs * QUAD_BYTES;
    for (int64_t begin = 0; begin < n_pairs; begin += PANEL, out += SQUARE_BYTES) {
        const uint16_t *from = weights + 2 * begin;
        if (n_outputs == PANEL && n_in - 2 * begin >= 2 * PANEL) {
            turn(from, p->stride, out);
            continue;
        }
        const int n = (int)(n_pairs - begin < PANEL ? n_pairs - begin : PANEL);
        uint32_t square[PANEL][PANEL] = {{0}};
        for (int o = 0; o < n_outputs; o++)
            for (int k = 0; k < n; k++) square[k][o] = pair_at(from + o * p->stride + 2 * k, n_in - 2 * (begin + k));
        memcpy(out, square, (size_t)n * QUAD_BYTES);
    }
}

INLINE void transpose_square(const uint16_t *from, int64_t stride, uint8_t *out) {
    uint32_t square[PANEL][PANEL];
    for (int o = 0; o < PANEL; o++)
        for (int k = 0; k < PANEL; k++) square[k][o] = pair_at(from + o * stride + 2 * k, 2);
    memcpy(out, square, SQUARE_BYTES);
}

#if defined(__x86_64__)
#define AVX2_TARGET __attribute__((target("avx2")))
#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define AHEAD \
    512 /* bytes of each row to prefetch before it is transposed: 16 streams are too many for hardware prefetching */

/* Squares of 2, 4 and 8 change places one after the other: first within the quarters of a register, then these. */
AVX512_TARGET INLINE void avx512_square(const uint16_t *from, int64_t stride, uint8_t *out) {
    __m512i a[PANEL], b[PANEL];
    for (int o = 0; o < PANEL; o++) {
        a[o] = _mm512_loadu_si512(from + o * stride);
        _mm_prefetch((const char *)(from + o * stride) + AHEAD, _MM_HINT_T0);
    }
    for (int o = 0; o < PANEL; o += 2) {
        b[o] = _mm512_unpacklo_epi32(a[o], a[o + 1]);
        b[o + 1] = _mm512_unpackhi_epi32(a[o], a[o + 1]);
    }
    for (int o = 0; o < PANEL; o += 4) {
        a[o] = _mm512_unpacklo_epi64(b[o], b[o + 2]);
        a[o + 1] = _mm512_unpackhi_epi64(b[o], b[o + 2]);
        a[o + 2] = _mm512_unpacklo_epi64(b[o + 1], b[o + 3]);
        a[o + 3] = _mm512_unpackhi_epi64(b[o + 1], b[o + 3]);
    }
    for (int o = 0; o < PANEL; o += 8)
        for (int k = o; k < o + 4; k++) {
            b[k] = _mm512_shuffle_i32x4(a[k], a[k + 4], 0x88);
            b[k + 4] = _mm512_shuffle_i32x4(a[k], a[k + 4], 0xdd);
        }
    /* b[k] has pairs k and k + 8 of 8 outputs, b[k + 4] pairs k + 4 and k + 12. */
    for (int k = 0; k < 8; k++) {
        a[k] = _mm512_shuffle_i32x4(b[k], b[k + 8], 0x88);
        a[k + 8] = _mm512_shuffle_i32x4(b[k], b[k + 8], 0xdd);
    }
    if ((uintptr_t)out % QUAD_BYTES == 0) /* bypass the caches: weights are read only once all are packed */
        for (int k = 0; k < PANEL; k++) _mm512_stream_si512((__m512i *)(out + k * QUAD_BYTES), a[k]);
    else
        for (int k = 0; k < PANEL; k++) _mm512_storeu_si512(out + k * QUAD_BYTES, a[k]);
}

AVX2_TARGET INLINE void avx2_eight(const uint16_t *from, int64_t stride, uint8_t *out) {
    __m256i a[8], b[8];
    for (int o = 0; o < 8; o++) a[o] = _mm256_loadu_si256((const __m256i *)(from + o * stride));
    for (int o = 0; o < 8; o += 2) {
        b[o] = _mm256_unpacklo_epi32(a[o], a[o + 1]);
        b[o + 1] = _mm256_unpackhi_epi32(a[o], a[o + 1]);
    }
    for (int o = 0; o < 8; o += 4) {
        a[o] = _mm256_unpacklo_epi64(b[o], b[o + 2]);
        a[o + 1] = _mm256_unpackhi_epi64(b[o], b[o + 2]);
        a[o + 2] = _mm256_unpacklo_epi64(b[o + 1], b[o + 3]);
        a[o + 3] = _mm256_unpackhi_epi64(b[o + 1], b[o + 3]);
    }
    for (int k = 0; k < 4; k++) {
        b[k] = _mm256_permute2x128_si256(a[k], a[k + 4], 0x20);
        b[k + 4] = _mm256_permute2x128_si256(a[k], a[k + 4], 0x31);
    }
    for (int k = 0; k < 8; k++) _mm256_storeu_si256((__m256i *)(out + k * QUAD_BYTES), b[k]);
}

AVX2_TARGET INLINE void avx2_square(const uint16_t *from, int64_t stride, uint8_t *out) {
    for (int o = 0; o < PANEL; o += 8)
        for (int k = 0; k < PANEL; k += 8) avx2_eight(from + o * stride + 2 * k, stride, out + k * QUAD_BYTES + 4 * o);
}
#endif

typedef void (*panel_function)(const struct packing *, int64_t);

static void portable_panel(const struct packing *p, int64_t panel) { quantize_panel(p, panel); }

static void portable_transposed(const struct packing *p, int64_t panel) { transpose_panel(p, panel, transpose_square); }

#if defined(__x86_64__)
AVX2_TARGET static void avx2_panel(const struct packing *p, int64_t panel) { quantize_panel(p, panel); }

AVX2_TARGET static void avx2_transposed(const struct packing *p, int64_t panel) {
    transpose_panel(p, panel, avx2_square);
}

AVX512_TARGET static void avx512_panel(const struct packing *p, int64_t panel) { quantize_panel(p, panel); }

AVX512_TARGET static void avx512_transposed(const struct packing *p, int64_t panel) {
    transpose_panel(p, panel, avx512_square);
    _mm_sfence(); /* makes the streamed panel visible to other threads */
}
#endif

static panel_function panel_for(const struct packing *p) {
#if defined(__x86_64__)
    if (p->team.isa == AVX512) return p->bits == 16 ? avx512_transposed : avx512_panel;
    if (p->team.isa == AVX2) return p->bits == 16 ? avx2_transposed : avx2_panel;
#endif
    return p->bits == 16 ? portable_transposed : portable_panel;
}

static void pack_panels(const void *argument, int64_t begin, int64_t end) {
    const struct packing *p = argument;
    const panel_function pack = panel_for(p);
    for (int64_t panel = begin; panel < end; panel++) pack(p, panel);
}

/* Packs weights. Everything in `p` has been checked by the caller. */
void shardnet_pack(const struct packing *p) {
    shardnet_parallel_for(&p->team, pack_panels, p, (p->n_out + PANEL - 1) / PANEL, 1);
}

/* Packs rows that a file stores quantised into panels, losing nothing: the blocks of GGUF types, or codes.
 *
 * config/panel_form.py describes panels; kernels/gguf_blocks.py reads the same blocks with torch. ggml-common.h in
 * github.com/ggml-org/llama.cpp defines them.
 */

#include <stdint.h>
#include <string.h>

#include "linear.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOST_INPUTS 256 /* of a block that is packed at once */
#define MOST_GROUPS 16

/* A row's block, taken apart: what a block of a panel holds of one output. */
struct apart {
    uint8_t codes[MOST_INPUTS];
    uint8_t scales[4 * MOST_GROUPS], minimums[4 * MOST_GROUPS], outer[4];
};

struct block_packing {
    const uint8_t *rows; /* [n_out, stride bytes] */
    uint8_t *packed;
    struct team team;
    int64_t n_out, n_in, stride;
    int32_t type;        /* as numbered in the file format */
    int32_t block_bytes; /* of a block in a row */
    struct form form;
};

struct code_packing {
    const uint8_t *codes;    /* [n_out, n_in] */
    const uint8_t *scales;   /* [n_out, n_groups] entries */
    const uint8_t *minimums; /* likewise, or NULL */
    const uint8_t *outer;    /* [n_out, n_blocks, block_scales] float16, or NULL */
    uint8_t *packed;
    struct team team;
    int64_t n_out, n_in;
    struct form form;
};

INLINE int minimum_bytes(const struct form *f) {
    return f->minimum == NO_MINIMUM ? 0 : f->minimum == ZERO_POINT ? 1 : bytes_of_scale(f->scale);
}

/* --- blocks of GGUF types */

/* 16 bytes, which a register of every machine holds. */
typedef uint32_t sixteen __attribute__((vector_size(16), may_alias));

INLINE sixteen read_sixteen(const uint8_t *from) {
    sixteen value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void put_sixteen(sixteen value, uint8_t *out) { memcpy(out, &value, sizeof value); }

/* Of each byte `bits` bits from `low` on. */
INLINE sixteen bits_of(sixteen value, const int bits, const int low) {
    return value >> low & ((1u << bits) - 1) * 0x01010101u;
}

/* Of `n` bytes, 16 or a multiple: `bits` bits of each from `low` on, put as bits from `to` on of codes that have none
 * there, or into new ones with `to` 0. */
INLINE void take_bits(const uint8_t *from, const int n, const int bits, const int low, const int to, uint8_t *codes) {
    for (int i = 0; i < n; i += 16) {
        sixteen some = bits_of(read_sixteen(from + i), bits, low) << to;
        if (to) some |= read_sixteen(codes + i);
        put_sixteen(some, codes + i);
    }
}

/* The low halves of `n` bytes, then the high ones. */
INLINE void split_halves(const uint8_t *from, const int n, uint8_t *codes) {
    take_bits(from, n, 4, 0, 0, codes);
    take_bits(from, n, 4, 4, 0, codes + n);
}

/* Adds the bits of 4 bytes, one for each of 32 codes, as bit 4: a byte's bits become eight bytes. */
INLINE void add_fifth_bits(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 4; i++) {
        const uint64_t apart = from[i] * 0x0101010101010101u & 0x8040201008040201u;
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, 8);
        eight |= (apart + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
        memcpy(codes + 8 * i, &eight, 8);
    }
}

INLINE void read_fours(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block, 2);
    split_halves(block + 2, 16, a->codes);
}

INLINE void read_fours_with_minimum(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block, 2);
    memcpy(a->minimums, block + 2, 2);
    split_halves(block + 4, 16, a->codes);
}

INLINE void read_fives(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block, 2);
    split_halves(block + 6, 16, a->codes);
    add_fifth_bits(block + 2, a->codes);
}

INLINE void read_fives_with_minimum(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block, 2);
    memcpy(a->minimums, block + 2, 2);
    split_halves(block + 8, 16, a->codes);
    add_fifth_bits(block + 4, a->codes);
}

INLINE void read_eights(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block, 2);
    for (int i = 0; i < 32; i += 16) put_sixteen(read_sixteen(block + 2 + i) ^ 0x80808080u, a->codes + i);
}

INLINE void read_mxfp4(const uint8_t *block, struct apart *a) {
    a->scales[0] = block[0];
    split_halves(block + 1, 16, a->codes);
}

INLINE void read_q2_k(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block, 16);
    memcpy(a->outer, block + 80, 4);
    for (int half = 0; half < 2; half++)
        for (int at = 0; at < 4; at++)
            take_bits(block + 16 + 32 * half, 32, 2, 2 * at, 0, a->codes + 128 * half + 32 * at);
}

INLINE void read_q3_k(const uint8_t *block, struct apart *a) {
    const uint8_t *packed = block + 96;
    memcpy(a->outer, block + 108, 2);
    for (int g = 0; g < 16; g++) a->scales[g] = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
    for (int g = 0; g < 16; g++) a->scales[g] |= (uint8_t)((packed[8 + g % 4] >> g / 4 * 2 & 3) << 4);
    for (int g = 0; g < 16; g++) a->scales[g] -= 32;
    for (int half = 0; half < 2; half++)
        for (int at = 0; at < 4; at++) {
            uint8_t *codes = a->codes + 128 * half + 32 * at;
            take_bits(block + 32 + 32 * half, 32, 2, 2 * at, 0, codes);
            take_bits(block, 32, 1, 4 * half + at, 2, codes);
        }
}

/* Eight scales and eight minimums of 6 bits, in 12 bytes: four at a time. */
INLINE void read_six_bits(const uint8_t *packed, struct apart *a) {
    uint32_t first, second, third;
    memcpy(&first, packed, 4);
    memcpy(&second, packed + 4, 4);
    memcpy(&third, packed + 8, 4);
    const uint32_t scales[2] = {first & 0x3f3f3f3f, (third & 0x0f0f0f0f) | (first >> 2 & 0x30303030)};
    const uint32_t minimums[2] = {second & 0x3f3f3f3f, (third >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030)};
    memcpy(a->scales, scales, 8);
    memcpy(a->minimums, minimums, 8);
}

INLINE void read_q4_k(const uint8_t *block, struct apart *a) {
    memcpy(a->outer, block, 4);
    read_six_bits(block + 4, a);
    for (int at = 0; at < 4; at++) split_halves(block + 16 + 32 * at, 32, a->codes + 64 * at);
}

INLINE void read_q5_k(const uint8_t *block, struct apart *a) {
    memcpy(a->outer, block, 4);
    read_six_bits(block + 4, a);
    for (int at = 0; at < 4; at++) split_halves(block + 48 + 32 * at, 32, a->codes + 64 * at);
    for (int at = 0; at < 8; at++) take_bits(block + 16, 32, 1, at, 4, a->codes + 32 * at);
}

INLINE void read_q6_k(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block + 192, 16);
    memcpy(a->outer, block + 208, 2);
    for (int half = 0; half < 2; half++) {
        split_halves(block + 64 * half, 64, a->codes + 128 * half);
        for (int at = 0; at < 4; at++)
            take_bits(block + 128 + 32 * half, 32, 2, 2 * at, 4, a->codes + 128 * half + 32 * at);
    }
}

INLINE void read_iq4_xs(const uint8_t *block, struct apart *a) {
    const uint32_t high = block[2] | (uint32_t)block[3] << 8;
    memcpy(a->outer, block, 2);
    for (int g = 0; g < 8; g++) {
        a->scales[g] = (uint8_t)(((block[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4) - 32);
        split_halves(block + 8 + 16 * g, 16, a->codes + 32 * g);
    }
}

/* Takes a block of each of `n` rows apart; rows are `stride` bytes apart. */
static void read_blocks(int type, const uint8_t *block, int64_t stride, int n, struct apart *a) {
#define EACH(read)                                                   \
    for (int o = 0; o < n; o++) read(block + o * stride, a + o); \
    return
    switch (type) {
        case 2:  /* Q4_0 */
        case 20: /* IQ4_NL */
            EACH(read_fours);
        case 3:
            EACH(read_fours_with_minimum);
        case 6:
            EACH(read_fives);
        case 7:
            EACH(read_fives_with_minimum);
        case 8:
            EACH(read_eights);
        case 10:
            EACH(read_q2_k);
        case 11:
            EACH(read_q3_k);
        case 12:
            EACH(read_q4_k);
        case 13:
            EACH(read_q5_k);
        case 14:
            EACH(read_q6_k);
        case 23:
            EACH(read_iq4_xs);
        default: /* 39 */
            EACH(read_mxfp4);
    }
#undef EACH
}

/* --- panels */

/* Codes of a unit, four inputs at a time: of four outputs each, 16 bytes. */
struct turned {
    sixteen quads[UNIT / 4][PANEL / 4];
};

/* Outputs and inputs of a unit change places, four inputs at a time. */
INLINE void turn_unit(const struct apart rows[PANEL], int64_t begin, struct turned *t) {
#if defined(__x86_64__)
    for (int o = 0; o < PANEL; o += 4)
        for (int k = 0; k < UNIT; k += 16) {
            __m128i a[4], b[4];
            for (int i = 0; i < 4; i++) a[i] = _mm_loadu_si128((const __m128i *)(rows[o + i].codes + begin + k));
            b[0] = _mm_unpacklo_epi32(a[0], a[1]), b[1] = _mm_unpackhi_epi32(a[0], a[1]);
            b[2] = _mm_unpacklo_epi32(a[2], a[3]), b[3] = _mm_unpackhi_epi32(a[2], a[3]);
            t->quads[k / 4][o / 4] = (sixteen)_mm_unpacklo_epi64(b[0], b[2]);
            t->quads[k / 4 + 1][o / 4] = (sixteen)_mm_unpackhi_epi64(b[0], b[2]);
            t->quads[k / 4 + 2][o / 4] = (sixteen)_mm_unpacklo_epi64(b[1], b[3]);
            t->quads[k / 4 + 3][o / 4] = (sixteen)_mm_unpackhi_epi64(b[1], b[3]);
        }
#else
    for (int k = 0; k < UNIT; k += 4)
        for (int o = 0; o < PANEL; o++) memcpy((uint8_t *)t->quads[k / 4] + 4 * o, rows[o].codes + begin + k, 4);
#endif
}

/* 16 bytes of each row change places with the rows: [16 bytes][16 outputs]. */
INLINE void turn_bytes(const uint8_t *first, uint8_t out[16 * PANEL]) {
#if defined(__x86_64__)
    __m128i a[PANEL], b[PANEL];
    for (int o = 0; o < PANEL; o++) a[o] = _mm_loadu_si128((const __m128i *)(first + o * sizeof(struct apart)));
    for (int round = 0; round < 4; round++) { /* each turns an element's place in all 256 by one bit */
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        memcpy(a, b, sizeof a);
    }
    memcpy(out, a, sizeof a);
#else
    for (int i = 0; i < 16; i++)
        for (int o = 0; o < PANEL; o++) out[i * PANEL + o] = first[o * sizeof(struct apart) + i];
#endif
}

/* Packs one plane of a unit: of each code the `bits` bits from `low` on. */
INLINE void write_plane(const struct turned *t, const int bits, const int low, uint8_t *lines) {
    const int each = 8 / bits;
    for (int line = 0; line < bits; line++)
        for (int o = 0; o < PANEL / 4; o++) {
            sixteen packed = {0};
            UNROLLED
            for (int j = 0; j < each; j++) packed |= bits_of(t->quads[line * each + j][o], bits, low) << bits * j;
            put_sixteen(packed, lines + line * QUAD_BYTES + 16 * o);
        }
}

INLINE void write_floats(const struct form *f, const struct apart rows[PANEL], int64_t begin, uint8_t *unit) {
    uint8_t bytes[UNIT * PANEL];
    for (int i = 0; i < UNIT; i += 16) turn_bytes(rows->codes + begin + i, bytes + i * PANEL);
    if (f->bits == 8) {
        memcpy(unit, bytes, sizeof bytes);
        return;
    }
    for (int i = 0; i < UNIT / 2; i++)
        for (int o = 0; o < PANEL; o++)
            unit[i * PANEL + o] = (uint8_t)(bytes[2 * i * PANEL + o] | bytes[(2 * i + 1) * PANEL + o] << 4);
}

static void write_unit(const struct form *f, const struct apart rows[PANEL], int64_t begin, uint8_t *unit) {
    if (is_float(f)) {
        write_floats(f, rows, begin, unit);
        return;
    }
    struct turned t;
    turn_unit(rows, begin, &t);
    switch (f->bits) {
        case 2:
            write_plane(&t, 2, 0, unit);
            return;
        case 3:
            write_plane(&t, 2, 0, unit);
            write_plane(&t, 1, 2, unit + 2 * QUAD_BYTES);
            return;
        case 8:
            write_plane(&t, 8, 0, unit);
            return;
        default:
            write_plane(&t, 4, 0, unit);
            if (f->bits == 5) write_plane(&t, 1, 4, unit + 4 * QUAD_BYTES);
            if (f->bits == 6) write_plane(&t, 2, 4, unit + 4 * QUAD_BYTES);
    }
}

/* Interleaves `n` entries of `size` bytes of each row. */
INLINE uint8_t *write_entries(const uint8_t *first, const int size, int64_t n, uint8_t *out) {
    if (size == 1 && n >= 8) {
        uint8_t bytes[MOST_GROUPS * PANEL];
        turn_bytes(first, bytes);
        memcpy(out, bytes, (size_t)n * PANEL);
        return out + n * PANEL;
    }
    for (int64_t g = 0; g < n; g++)
        for (int o = 0; o < PANEL; o++, out += size)
            memcpy(out, first + o * sizeof(struct apart) + g * size, (size_t)size);
    return out;
}

INLINE uint8_t *write_sized(const uint8_t *first, int size, int64_t n, uint8_t *out) {
    return size == 1 ? write_entries(first, 1, n, out)
                     : size == 2 ? write_entries(first, 2, n, out) : write_entries(first, 4, n, out);
}

/* Writes what stands before a block's codes. */
static void write_header(const struct form *f, const struct apart rows[PANEL], uint8_t *out) {
    const int64_t n = f->block / f->group;
    out = write_sized(rows->outer, 2, f->block_scales, out);
    out = write_sized(rows->scales, bytes_of_scale(f->scale), n, out);
    if (minimum_bytes(f)) write_sized(rows->minimums, minimum_bytes(f), n, out);
}

static void pack_block_panels(const void *argument, int64_t begin, int64_t end) {
    const struct block_packing *p = argument;
    const struct form *f = &p->form;
    const int64_t n_blocks = p->n_in / f->block;
    struct apart rows[PANEL];
    memset(rows, 0, sizeof rows);
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t first = panel * PANEL;
        const int n = (int)(p->n_out - first < PANEL ? p->n_out - first : PANEL);
        uint8_t *out = p->packed + panel * n_blocks * f->block_bytes;
        if (n < PANEL) memset(rows, 0, sizeof rows);
        for (int64_t b = 0; b < n_blocks; b++, out += f->block_bytes) {
            read_blocks(p->type, p->rows + first * p->stride + b * p->block_bytes, p->stride, n, rows);
            write_header(f, rows, out);
            for (int64_t k = 0; k < f->block; k += UNIT)
                write_unit(f, rows, k, out + f->header_bytes + k / UNIT * f->bits * QUAD_BYTES);
        }
    }
}

/* Of a block wider than MOST_INPUTS, codes come in pieces, and the one group's entries with the first. */
static void pack_code_panels(const void *argument, int64_t begin, int64_t end) {
    const struct code_packing *p = argument;
    const struct form *f = &p->form;
    const int64_t n_blocks = (p->n_in + f->block - 1) / f->block, n_groups = (p->n_in + f->group - 1) / f->group;
    const int64_t of_block = f->block / f->group;
    const int scale = bytes_of_scale(f->scale), minimum = minimum_bytes(f);
    struct apart rows[PANEL];
    for (int64_t panel = begin; panel < end; panel++) {
        const int64_t first = panel * PANEL;
        const int n = (int)(p->n_out - first < PANEL ? p->n_out - first : PANEL);
        uint8_t *out = p->packed + panel * n_blocks * f->block_bytes;
        for (int64_t b = 0; b < n_blocks; b++, out += f->block_bytes)
            for (int64_t from = 0; from < f->block; from += MOST_INPUTS) {
                const int64_t at = b * f->block + from, most = f->block - from < MOST_INPUTS ? f->block - from : MOST_INPUTS;
                const int64_t n_codes = p->n_in - at < 0 ? 0 : p->n_in - at < most ? p->n_in - at : most;
                const int64_t left = n_groups - b * of_block, n_own = left < of_block ? left : of_block;
                if (n < PANEL || n_codes < most || n_own < of_block) memset(rows, 0, sizeof rows);
                for (int o = 0; o < n; o++) {
                    const int64_t row = first + o, group = row * n_groups + b * of_block;
                    memcpy(rows[o].codes, p->codes + row * p->n_in + at, (size_t)n_codes);
                    if (from) continue;
                    memcpy(rows[o].scales, p->scales + group * scale, (size_t)(n_own * scale));
                    if (minimum) memcpy(rows[o].minimums, p->minimums + group * minimum, (size_t)(n_own * minimum));
                    if (f->block_scales)
                        memcpy(rows[o].outer, p->outer + (row * n_blocks + b) * 2 * f->block_scales,
                               2 * (size_t)f->block_scales);
                }
                if (!from) write_header(f, rows, out);
                for (int64_t k = 0; k < most; k += UNIT)
                    write_unit(f, rows, k, out + f->header_bytes + (from + k) / UNIT * f->bits * QUAD_BYTES);
            }
    }
}

/* --- called from Python, which has checked everything in the structs */

void shardnet_pack_blocks(const struct block_packing *p) {
    shardnet_parallel_for(&p->team, pack_block_panels, p, (p->n_out + PANEL - 1) / PANEL, 1);
}

void shardnet_pack_codes(const struct code_packing *p) {
    shardnet_parallel_for(&p->team, pack_code_panels, p, (p->n_out + PANEL - 1) / PANEL, 1);
}

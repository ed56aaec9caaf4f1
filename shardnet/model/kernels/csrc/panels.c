/* Packs rows that a file stores quantised into panels, losing nothing: the blocks of GGUF types, or codes.
 *
 * config/panel_form.py describes panels; kernels/gguf_blocks.py reads the same blocks with torch. ggml-common.h in
 * github.com/ggml-org/llama.cpp defines them.
 */

#include <stdint.h>
#include <string.h>

#include "linear.h"

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

INLINE int scale_bytes(const struct form *f) {
    return f->scale == SCALE_FLOAT32 ? 4 : f->scale <= SCALE_BFLOAT16 ? 2 : 1;
}

INLINE int minimum_bytes(const struct form *f) {
    return f->minimum == NO_MINIMUM ? 0 : f->minimum == ZERO_POINT ? 1 : scale_bytes(f);
}

/* --- blocks of GGUF types */

/* The low halves of `n` bytes, then the high ones. */
INLINE void split_halves(const uint8_t *from, int n, uint8_t *codes) {
    for (int i = 0; i < n; i++) codes[i] = from[i] & 15, codes[n + i] = from[i] >> 4;
}

/* Adds the bits of 4 bytes, one for each of 32 codes, as bit 4. */
INLINE void add_fifth_bits(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i / 8] >> i % 8 & 1) << 4);
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
    for (int i = 0; i < 32; i++) a->codes[i] = block[2 + i] ^ 0x80;
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
            for (int i = 0; i < 32; i++)
                a->codes[128 * half + 32 * at + i] = block[16 + 32 * half + i] >> 2 * at & 3;
}

INLINE void read_q3_k(const uint8_t *block, struct apart *a) {
    const uint8_t *packed = block + 96;
    memcpy(a->outer, block + 108, 2);
    for (int g = 0; g < 16; g++) {
        const uint8_t low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4, high = packed[8 + g % 4] >> g / 4 * 2 & 3;
        a->scales[g] = (uint8_t)((low | high << 4) - 32);
    }
    for (int half = 0; half < 2; half++)
        for (int at = 0; at < 4; at++)
            for (int i = 0; i < 32; i++)
                a->codes[128 * half + 32 * at + i] = (uint8_t)((block[32 + 32 * half + i] >> 2 * at & 3) |
                                                               (block[i] >> (4 * half + at) & 1) << 2);
}

/* Eight scales and eight minimums of 6 bits, in 12 bytes. */
INLINE void read_six_bits(const uint8_t *packed, struct apart *a) {
    for (int g = 0; g < 4; g++) {
        a->scales[g] = packed[g] & 63;
        a->minimums[g] = packed[g + 4] & 63;
        a->scales[g + 4] = (uint8_t)((packed[g + 8] & 15) | packed[g] >> 6 << 4);
        a->minimums[g + 4] = (uint8_t)(packed[g + 8] >> 4 | packed[g + 4] >> 6 << 4);
    }
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
    for (int at = 0; at < 8; at++)
        for (int i = 0; i < 32; i++) a->codes[32 * at + i] |= (uint8_t)((block[16 + i] >> at & 1) << 4);
}

INLINE void read_q6_k(const uint8_t *block, struct apart *a) {
    memcpy(a->scales, block + 192, 16);
    memcpy(a->outer, block + 208, 2);
    for (int half = 0; half < 2; half++) {
        split_halves(block + 64 * half, 64, a->codes + 128 * half);
        for (int at = 0; at < 4; at++)
            for (int i = 0; i < 32; i++)
                a->codes[128 * half + 32 * at + i] |= (uint8_t)((block[128 + 32 * half + i] >> 2 * at & 3) << 4);
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

INLINE void read_block(int type, const uint8_t *block, struct apart *a) {
    switch (type) {
        case 2:  /* Q4_0 */
        case 20: /* IQ4_NL */
            read_fours(block, a);
            return;
        case 3:
            read_fours_with_minimum(block, a);
            return;
        case 6:
            read_fives(block, a);
            return;
        case 7:
            read_fives_with_minimum(block, a);
            return;
        case 8:
            read_eights(block, a);
            return;
        case 10:
            read_q2_k(block, a);
            return;
        case 11:
            read_q3_k(block, a);
            return;
        case 12:
            read_q4_k(block, a);
            return;
        case 13:
            read_q5_k(block, a);
            return;
        case 14:
            read_q6_k(block, a);
            return;
        case 23:
            read_iq4_xs(block, a);
            return;
        default: /* 39 */
            read_mxfp4(block, a);
    }
}

/* --- panels */

/* Packs one plane of a unit: of each code the `bits` bits from `low` on. */
INLINE void write_plane(const struct apart rows[PANEL], int64_t begin, const int bits, const int low, uint8_t *lines) {
    const int each = 8 / bits;
    const uint32_t mask = ((1u << bits) - 1) * 0x01010101u;
    for (int line = 0; line < bits; line++)
        for (int o = 0; o < PANEL; o++) {
            const uint8_t *codes = rows[o].codes + begin + 4 * line * each;
            uint32_t packed = 0;
            for (int j = 0; j < each; j++) {
                uint32_t quad;
                memcpy(&quad, codes + 4 * j, 4);
                packed |= (quad >> low & mask) << bits * j;
            }
            memcpy(lines + line * QUAD_BYTES + 4 * o, &packed, 4);
        }
}

INLINE void write_unit(const struct form *f, const struct apart rows[PANEL], int64_t begin, uint8_t *unit) {
    if (is_float(f)) {
        for (int i = 0; i < UNIT; i++)
            for (int o = 0; o < PANEL; o++) {
                const uint8_t code = rows[o].codes[begin + i];
                if (f->bits == 8)
                    unit[i * PANEL + o] = code;
                else
                    unit[i / 2 * PANEL + o] = i % 2 ? (uint8_t)(unit[i / 2 * PANEL + o] | code << 4) : code;
            }
        return;
    }
    switch (f->bits) {
        case 2:
            write_plane(rows, begin, 2, 0, unit);
            return;
        case 3:
            write_plane(rows, begin, 2, 0, unit);
            write_plane(rows, begin, 1, 2, unit + 2 * QUAD_BYTES);
            return;
        case 8:
            write_plane(rows, begin, 8, 0, unit);
            return;
        default:
            write_plane(rows, begin, 4, 0, unit);
            if (f->bits == 5) write_plane(rows, begin, 1, 4, unit + 4 * QUAD_BYTES);
            if (f->bits == 6) write_plane(rows, begin, 2, 4, unit + 4 * QUAD_BYTES);
    }
}

/* Interleaves `n` entries of `size` bytes of each row. */
INLINE uint8_t *write_entries(const uint8_t *first, const int size, int64_t n, uint8_t *out) {
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
INLINE void write_header(const struct form *f, const struct apart rows[PANEL], uint8_t *out) {
    const int64_t n = f->block / f->group;
    out = write_sized(rows->outer, 2, f->block_scales, out);
    out = write_sized(rows->scales, scale_bytes(f), n, out);
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
            for (int o = 0; o < n; o++) read_block(p->type, p->rows + (first + o) * p->stride + b * p->block_bytes, rows + o);
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
    const int scale = scale_bytes(f), minimum = minimum_bytes(f);
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

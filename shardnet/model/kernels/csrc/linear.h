/* Shared by all files of the library: linear layers, threads, bfloat16. kernels/library.py mirrors the structs. */

#ifndef SHARDNET_LINEAR_H
#define SHARDNET_LINEAR_H

#include <stdint.h>
#include <string.h>

#define PANEL 16       /* outputs of a panel */
#define QUAD_BYTES 64  /* [16 outputs][4 inputs] of bytes */
#define UNIT 32        /* inputs whose codes are packed together */
#define MAX_TOKEN_GROUP 128 /* inputs of a row that share a scale */
#define STRETCH 256    /* inputs whose scales are read at a time */

#define UNROLLED _Pragma("GCC unroll 8") /* so that numbers of quads are constants */
#define INLINE static inline __attribute__((always_inline))

enum isa { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NEON = 3, NEON_PLAIN = 4 }; /* the last without dot products */

/* Runs a function on several threads, as GOMP_parallel does. */
typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);

/* The threads of a call, the caller's own among them. */
struct team {
    parallel_function parallel; /* NULL: the caller is alone */
    int32_t n_threads;
    int32_t isa; /* what all of them compute with */
};

/* Computes the items [begin, end) of a job. */
typedef void (*work_function)(const void *argument, int64_t begin, int64_t end);

/* threads.c: computes `n_items` on the team's threads in pieces of `piece` items: a thread that is free takes the next piece. */
void shardnet_parallel_for(const struct team *team, work_function work, const void *argument, int64_t n_items,
                           int64_t piece);

/* What weights are: config/panel_form.py says what the fields and numbers mean. */
enum code { LINEAR = 0, BOOK = 1, E4M3 = 2, E5M2 = 3, FLOAT_BOOK = 4, BF16 = 5, F16 = 6, F32 = 7 };
enum scale {
    SCALE_FLOAT16 = 0,
    SCALE_BFLOAT16 = 1,
    SCALE_FLOAT32 = 2,
    SCALE_EXPONENT = 3,
    SCALE_FLOAT8 = 4,
    SCALE_UINT8 = 5,
    SCALE_INT8 = 6,
    SCALE_NIBBLES = 7
};
enum minimum { NO_MINIMUM = 0, STORED = 1, ZERO_POINT = 2 };

struct form {
    int32_t bits;  /* 16: bfloat16 or float16, 32: float32; both without groups */
    int32_t code, scale, minimum;
    int32_t offset;
    int32_t group, block; /* inputs */
    int32_t block_scales; /* float16 of each output of a block: d, dmin */
    int32_t header_bytes, block_bytes;
    int32_t token_group; /* inputs of a row that share a scale, where rows are quantised */
    float factor;
    float book[16];
};

struct linear {
    const uint8_t *weights; /* packed */
    const void *rows;       /* [n_rows, n_in] float32 or bfloat16 */
    void *out;              /* [n_rows, width], of the same type: this part's first output */
    const float *bias;      /* [n_out], or NULL */
    const int32_t *order;   /* [n_in]: the row's input for each of the weights', or NULL for the same */
    struct linear *next;    /* the part that has the next outputs of the same rows, or NULL */
    int8_t *quantized;      /* scratch: [tiles][quads][rows of the tile][4 inputs], scales, offsets, sums */
    float *scales;          /* [n_rows, n_groups], in that scratch memory */
    int32_t *offsets;       /* [n_rows, n_groups], in that scratch memory: corrects for unsigned weights */
    float *sums;            /* [n_rows, n_groups], in that scratch memory: of the quantised inputs */
    int16_t *group_sums;    /* [n_rows, groups of inputs], in that scratch memory, where scales have two levels */
    struct team team;
    int64_t n_rows, n_in, n_out, width;
    int64_t n_groups; /* of token_group inputs */
    struct form form;
    int32_t is_bf16;   /* the type of rows and out */
    int32_t has_pairs; /* the machine multiplies pairs of bfloat16 */
    int32_t pairs;     /* and this call does so: bfloat16 weights and rows */
    int32_t has_tiles; /* the process may use AMX */
};

/* out = rows * weights^T + bias, by all parts. Everything in `p` has been checked by the caller. */
void shardnet_linear(struct linear *p);

/* The same for several linear layers of one team, each with rows of its own: threads share all their weights. */
void shardnet_linears(struct linear *const *firsts, int64_t n);

/* Whether a group's scale is an integer times the float16 of its block, which several groups of a token group have. */
INLINE int has_levels(const struct form *f) { return f->block_scales && f->token_group > f->group; }

/* Whether codes are floats, which rows are multiplied with as they are. */
INLINE int is_float(const struct form *f) { return f->code > BOOK; }

INLINE int bytes_of_scale(const int kind) {
    return kind == SCALE_FLOAT32 ? 4 : kind == SCALE_FLOAT16 || kind == SCALE_BFLOAT16 ? 2 : 1;
}

INLINE float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
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

/* E4M3: no infinities, one NaN of each sign. */
INLINE float from_e4m3(uint8_t byte) {
    uint32_t bits = (uint32_t)(byte & 0x80) << 24 | (uint32_t)(byte & 0x7f) << 20;
    float value;
    if ((byte & 0x7f) == 0x7f) bits = 0x7fc00000u;
    memcpy(&value, &bits, 4);
    return value * 0x1p120f;
}

INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#endif

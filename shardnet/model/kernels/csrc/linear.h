/* Shared by all files of the library: linear layers, threads, bfloat16. kernels/library.py mirrors the structs. */

#ifndef SHARDNET_LINEAR_H
#define SHARDNET_LINEAR_H

#include <stdint.h>
#include <string.h>

#define PANEL 16       /* outputs of a panel */
#define QUAD_BYTES 64  /* [16 outputs][4 inputs] of bytes */
#define SCALE_BYTES 32 /* 16 float16 */
#define INT8_GROUP 64  /* inputs that share a scale */
#define INT4_GROUP 32

#define INLINE static inline __attribute__((always_inline))

enum isa { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NEON = 3 };

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

/* Computes `n_items` on the team's threads in pieces of `piece` items: a thread that is free takes the next piece. */
void shardnet_parallel_for(const struct team *team, work_function work, const void *argument, int64_t n_items,
                           int64_t piece);

struct linear {
    const uint8_t *weights; /* packed */
    const void *rows;       /* [n_rows, n_in] float32 or bfloat16 */
    void *out;              /* [n_rows, n_out], of the same type */
    const float *bias;      /* [n_out], or NULL */
    int8_t *quantized;      /* scratch: [tiles][quads][rows of the tile][4 inputs], scales and offsets */
    float *scales;          /* [n_rows, n_groups], in that scratch memory */
    int32_t *offsets;       /* [n_rows, n_groups], in that scratch memory: corrects for unsigned weights */
    struct team team;
    int64_t n_rows, n_in, n_out, n_groups;
    int32_t group;     /* inputs of a group: INT8_GROUP or INT4_GROUP */
    int32_t bits;      /* 8, 4, or 16 for bfloat16 */
    int32_t is_bf16;   /* the type of rows and out */
    int32_t has_pairs; /* the machine multiplies pairs of bfloat16 */
    int32_t pairs;     /* and this call does so: 16 bits, rows of bfloat16 */
};

/* out = rows * weights^T + bias. Everything in `p` has been checked by the caller. */
void shardnet_linear(struct linear *p);

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

#endif

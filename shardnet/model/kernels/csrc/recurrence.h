/* The recurrence of a gated DeltaNet, KDA or Mamba-2: see recurrence.c. kernels/recurrence.py mirrors the struct. */

#ifndef SHARDNET_RECURRENCE_H
#define SHARDNET_RECURRENCE_H

#include "linear.h"

struct recurrence {
    const void *rows;           /* [n_taps - 1 + n_rows, columns]: queries, keys, values, those before them first */
    const void *gate;           /* [n_rows, n_heads, value_size], of the output */
    const float *write, *decay; /* [n_rows, n_heads], before sigmoid and softplus */
                                /* decay and bias have key_size numbers for a head if `by_column` */
    const float *taps;          /* [n_taps, columns] of the convolution */
    const float *rate, *bias;   /* [n_heads], of the decay */
    const float *weight;        /* [value_size], of the output's norm; NULL for none */
    const float *taps_bias;     /* [columns] of the convolution, or NULL */
    const float *skip;          /* [n_heads], of the values in the output: Mamba-2; NULL for a DeltaNet */
    float *state;               /* [n_heads, key_size, value_size], written */
    float *mixed;               /* scratch [n_rows, columns + 2 * n_heads], + n_heads * key_size if `by_column` */
    void *out;                  /* [n_rows, n_heads, value_size] */
    struct team team;
    int64_t n_rows, n_taps, n_key_heads, n_heads, key_size, value_size;
    float eps;           /* of the output's norm */
    int32_t is_bf16;     /* rows, gate and out: else they are float32 */
    int32_t takes_turns; /* every n_key_heads-th head shares a key, else consecutive ones do */
    float write_scale;   /* of the sigmoid of writes */
    int32_t gates_alone; /* outputs are multiplied by the sigmoids of gates, else by the gates too */
    int32_t by_column;   /* each column of a key decays by itself */
    float decay_floor;   /* below 0 logarithms of decays by column are this times a sigmoid; 0: a rate times a softplus */
    const float *before; /* like `state`: what it is before the rows; may be `state` itself */
};

void shardnet_recurrence(const struct recurrence *call);

#endif

/* Rows whose columns several shards computed, joined: see gather.c. model/shards/ mirrors the structs. */

#ifndef SHARDNET_GATHER_H
#define SHARDNET_GATHER_H

#include <stdint.h>

struct gather;

/* Joins the parts of all shards. Shard i has the columns [ends[i], ends[i + 1]) of each row, of `item` bytes each:
 * `part` is [n_rows, own columns], `whole` [n_rows, ends[size]]. A group that has failed leaves `whole` as it is. */
typedef void (*join_function)(const struct gather *self, const void *part, void *whole, int64_t n_rows,
                              const int64_t *ends, int64_t item);

/* Waits until all but the last `n_left` joins that have begun are over. */
typedef void (*await_function)(const struct gather *self, int64_t n_left);

struct gather {
    join_function join;
    void *memory;        /* of the shards of one machine, else whatever `join` needs */
    int64_t deadline_ns; /* how long it waits for another shard */
    int64_t spin_ns;     /* and how much of that without sleeping */
    int32_t index, size;
    join_function post; /* begins a join: `part` stays as it is until it is over. NULL: `join` is all there is */
    await_function await;
};

/* A linear whose inputs, outputs or both are cut over shards: they are joined around it. */
struct joined {
    const struct gather *gather;
    const int64_t *in_ends;  /* NULL: inputs are not cut */
    const int64_t *out_ends; /* NULL: outputs are not cut */
    void *rows; /* scratch [n_rows, all inputs] */
    void *part; /* scratch [n_rows, own outputs] */
};

#endif

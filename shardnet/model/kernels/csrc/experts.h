/* A router and its experts, in place of an MLP. fused/structs.py mirrors the structs. */

#ifndef SHARDNET_EXPERTS_H
#define SHARDNET_EXPERTS_H

#include "sublayers.h"

/* What a row's experts are chosen by, and what their outputs are weighted by: layers/experts.py and
 * layers/group_routers.py. */
enum routing {
    BEST_BY_SOFTMAX = 0, /* the best scores; the softmax of them */
    BEST_OF_SOFTMAX = 1, /* the best scores; their softmax among all */
    BEST_BY_SIGMOID = 2, /* the best scores; their sigmoids */
    GROUPS_BY_SOFTMAX = 3, /* softmax; in the groups with the best one */
    GROUPS_BY_TWO_SIGMOIDS = 4, /* sigmoids; in the groups with the best two */
    GROUPS_BY_TWO_SOFTMAX = 5,
    BEST_BY_ROOTS = 6 /* roots of softpluses, in one group */
};

struct router {
    struct linear *gate;
    const float *bias; /* [n_experts]: added for the choice alone; or NULL */
    const int32_t *of_tokens; /* [tokens, top_k]: who is chosen by token; or NULL */
    const int64_t *token_ids; /* [T] */
    int64_t n_experts, top_k, n_groups, top_groups;
    float scale;        /* of the weights, where there are groups */
    int32_t routing;
    int32_t normalizes; /* weights to a sum of 1, where there are groups */
    int32_t is_wide;    /* the gate computes in float32 */
};

struct expert {
    struct linear *gate_up, *down;
};

/* T = n_rows; visits are the T * top_k pairs of a row and an expert of it. */
struct experts_call {
    struct mlp_call mlp; /* without linears: its buffers have room for `n_at_once` visits and the shared expert's T */
    struct router router;
    const struct expert *experts;
    struct expert shared; /* that all rows visit, or NULL */
    struct linear *shared_gate; /* or NULL */
    struct linear **products;   /* scratch [n_experts + 1] */
    void *wide;         /* scratch [T, width]: float32 rows for a gate that is wide */
    void *narrow;       /* scratch [T, n_experts]: what the gate gives */
    float *scores;      /* scratch [T, 3, n_experts]: of experts, those to choose by, and of groups */
    float *weights;     /* [T, top_k] */
    int64_t *chosen;    /* [T, top_k] */
    int64_t *visits;    /* scratch [T * top_k]: visits by expert, then by row */
    int64_t *places;    /* scratch [T * top_k]: where a visit stands among those */
    int64_t *starts;    /* scratch [n_experts + 1]: the first visit of each expert */
    void *gathered;     /* scratch [n_at_once, width]: what goes into experts */
    void *outputs;      /* scratch [T * top_k + T, n_columns]: what comes out in the order of `visits`, then of `shared` */
    void *shared_gates; /* scratch [T] */
    const void *rows;   /* [T, width] behind the norm */
    int64_t n_at_once;  /* T or more */
    int64_t row_bytes;
    int64_t n_shared_inner;
    int64_t activated_bytes, joined_bytes; /* of half of `activated` and of `joined.rows`, where batches overlap */
    int64_t n_columns; /* of what comes out of experts: all, or this shard's */
    const int64_t *shared_in_ends; /* as `in_ends` of `mlp.joined`; NULL: those */
    int32_t shared_activation; /* of the shared expert, with the same limits */
    int32_t weighs_inputs; /* weights multiply what goes into an expert, else what comes out */
};

/* Some visits, in the order of `visits`. */
struct visits {
    const struct experts_call *call;
    int64_t begin;
};

#endif

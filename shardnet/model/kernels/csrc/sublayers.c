/* The sub-layers of a decoder layer in one call each, attention and MLP with norms and residual, and whole layers.
 *
 * fused/structs.py makes the structs, fused/layers.py decides which sub-layers are computed here. Linear layers are
 * those of linear.c; the rest is written once, in sublayers_body.h, with the compiler's vectors, and compiled for each
 * instruction set. Values are float32 from load to store, and rounded where torch rounds: after each matmul, norm,
 * rotation, activation and sum. A row's bits depend neither on the other rows of the batch nor on the threads.
 */

#include "experts.h"
#include "sublayers.h"

#define BODY "sublayers_body.h"
#include "each_isa.h"

const struct steps *shardnet_steps_for(const struct team *team) {
#if defined(__x86_64__)
    if (team->isa == AVX512) return &steps_avx512;
    if (team->isa == AVX2) return &steps_avx2;
#else
    (void)team;
#endif
    return &steps_portable;
}

/* Attends in tiles, each of some rows of a span and one KV head. */
static void attend(const struct attend *call) {
    const int64_t rows = tile_rows(call);
    int64_t n_tiles = 0, work = 1;
    for (int64_t i = 0; i < call->n_spans; i++) {
        const struct span *span = &call->spans[i];
        int64_t seen = span->position + span->end - span->start;
        if (call->window && seen > call->window) seen = call->window;
        const int64_t n_rows = span->end - span->start < rows ? span->end - span->start : rows;
        const int64_t own = seen * n_rows * call->head_size * call->n_heads / call->n_kv_heads;
        if (own > work) work = own;
        n_tiles += (span->end - span->start + rows - 1) / rows;
    }
    const int64_t piece = WORK_AT_ONCE / work;
    shardnet_parallel_for(&call->team, shardnet_steps_for(&call->team)->attend, call, n_tiles * call->n_kv_heads,
                          piece > 0 ? piece : 1);
}

/* --- called from Python, which has checked everything in the structs. */

void shardnet_attention(struct attention_call *call, int32_t parts) {
    const struct residual *residual = &call->residual;
    const struct steps *steps = shardnet_steps_for(&residual->team);
    if (parts & BEFORE) {
        void *projected = call->with_gates ? call->with_gates : call->projected;
        const void *rows = normalize(steps, residual);
        multiply_joined(call->qkv, residual, call->scratch, &call->qkv_joined, rows, projected);
        if (call->with_gates)
            shardnet_parallel_for(&residual->team, steps->part_gates, call, residual->n_rows, ROWS_AT_ONCE);
        if (!(parts & STORE)) call->attend.n_spans = 0;
        shardnet_parallel_for(&residual->team, steps->rotate, call, residual->n_rows, ROWS_AT_ONCE);
    }
    if (parts & ATTEND) {
        call->attend.is_bf16 = residual->is_bf16;
        call->attend.team = residual->team;
        attend(&call->attend);
    }
    if (parts & AFTER) {
        if (call->with_gates)
            shardnet_parallel_for(&residual->team, steps->open_gates, call, residual->n_rows, ROWS_AT_ONCE);
        multiply_joined(call->output, residual, call->scratch, &call->joined, call->attend.attended, residual->inner);
        add_residual(steps, residual);
    }
}

void shardnet_attend(const struct attend *call) { attend(call); }

/* Multiplies a piece of normalized rows by gate and up, and activates it. */
static void open_piece(const struct mlp_call *call, const struct pieces *pieces, int64_t i, const void *rows) {
    const struct residual *residual = &call->residual;
    const int64_t first = first_row(pieces, i), n = first_row(pieces, i + 1) - first;
    struct mlp_call piece = *call;
    piece.projected = at(call->projected, 2 * first * call->n_inner, residual->is_bf16);
    piece.activated = at(call->activated, first * call->n_inner, residual->is_bf16);
    ready(call->gate_up, residual, n, call->scratch, at(rows, first * residual->width, residual->is_bf16),
          piece.projected);
    shardnet_linear(call->gate_up);
    shardnet_parallel_for(&residual->team, shardnet_steps_for(&residual->team)->activate, &piece, n, ROWS_AT_ONCE);
}

void shardnet_mlp(struct mlp_call *call) {
    const struct residual *residual = &call->residual;
    const struct steps *steps = shardnet_steps_for(&residual->team);
    const void *rows = normalize(steps, residual);
    struct pieces pieces = pieces_of(&call->joined, residual);
    for (int64_t i = 0; i <= pieces.n; i++) {
        if (i < pieces.n) {
            open_piece(call, &pieces, i, rows);
            begin_piece(&pieces, i, call->activated);
        }
        if (i) multiply_piece(&pieces, i - 1, call->down, call->scratch, call->activated, residual->inner);
    }
    end_pieces(&pieces);
    add_residual(steps, residual);
}

void shardnet_rows(const struct row_call *call) {
    const int64_t piece = ELEMENTS_AT_ONCE / (call->width ? call->width : 1);
    const struct steps *steps = shardnet_steps_for(&call->team);
    shardnet_parallel_for(&call->team, steps->compute, call, call->n_rows, piece > 0 ? piece : 1);
}

void shardnet_layers(const struct layer *layers, int64_t n_layers) {
    for (int64_t i = 0; i < n_layers; i++) {
        if (layers[i].attention)
            shardnet_attention(layers[i].attention, BEFORE | STORE | ATTEND | AFTER);
        else
            shardnet_delta_net(layers[i].delta);
        if (layers[i].mlp)
            shardnet_mlp(layers[i].mlp);
        else
            shardnet_experts(layers[i].experts);
    }
}

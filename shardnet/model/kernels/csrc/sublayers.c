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
        seen -= first_seen(call->window, seen - 1);
        const int64_t n_rows = span->end - span->start < rows ? span->end - span->start : rows;
        const int64_t own = seen * n_rows * call->head_size * call->n_heads / call->n_kv_heads;
        if (own > work) work = own;
        n_tiles += (span->end - span->start + rows - 1) / rows;
    }
    const int64_t piece = WORK_AT_ONCE / work;
    shardnet_parallel_for(&call->team, shardnet_steps_for(&call->team)->attend, call, n_tiles * call->n_kv_heads,
                          piece > 0 ? piece : 1);
}

/* A number that is larger where a score is: of 0 there is one. */
static uint32_t ordered(float score) {
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Takes the positions of the `n_taken` largest of `n` scores, of equal ones the first, in ascending order. */
static void take_largest(const float *scores, int64_t n, int64_t n_taken, int32_t *taken) {
    uint32_t least = 0, known = 0; /* the smallest score that is taken, as far as its bits are known */
    int64_t n_equal = n_taken;     /* that are taken of those equal to it */
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift == 10 ? 0 : -1) {
        const uint32_t mask = shift ? 2047 : 1023;
        int64_t counts[2048] = {0};
        for (int64_t i = 0; i < n; i++) {
            const uint32_t own = ordered(scores[i]);
            counts[own >> shift & mask] += (own & known) == least;
        }
        uint32_t digit = mask;
        for (; counts[digit] < n_equal; digit--) n_equal -= counts[digit];
        least |= digit << shift;
        known |= mask << shift;
    }
    for (int64_t i = 0; i < n && n_taken; i++) {
        const uint32_t own = ordered(scores[i]);
        if (own < least || (own == least && !n_equal)) continue;
        n_equal -= own == least;
        *taken++ = (int32_t)i;
        n_taken--;
    }
}

/* The positions that a row sees. */
static int64_t seen_by(const struct attend *call, int64_t row) {
    const struct span *span = span_of(call, row);
    return span->position + row - span->start + 1;
}

/* The positions that a row has chosen: those before the first -1. */
static int64_t n_chosen_by(const struct choice *choice, int64_t row) {
    const int32_t *chosen = choice->chosen + row * choice->n_chosen;
    int64_t n = 0;
    while (n < choice->n_chosen && chosen[n] >= 0) n++;
    return n;
}

/* Takes the entries of blocks that score highest: of scores that are moved to where they stand together. */
static void take_in_blocks(const struct choice *choice, float *scores, int64_t seen, const int32_t *blocks,
                           int32_t *chosen) {
    const int64_t size = choice->block_size;
    int64_t n = 0;
    for (int64_t i = 0; i < choice->n_blocks && blocks[i] >= 0; i++)
        for (int64_t at = blocks[i] * size; at < (blocks[i] + 1) * size && at < seen; at++) scores[n++] = scores[at];
    const int64_t n_taken = n < choice->n_chosen ? n : choice->n_chosen;
    take_largest(scores, n, n_taken, chosen);
    for (int64_t i = 0; i < choice->n_chosen; i++)
        chosen[i] = i < n_taken ? (int32_t)(blocks[chosen[i] / size] * size + chosen[i] % size) : -1;
}

/* Takes the blocks whose best entries score highest, and the last one; writes over the scores. */
static void take_blocks(const struct choice *choice, float *scores, int64_t seen, int32_t *blocks) {
    const int64_t size = choice->block_size, n = (seen + size - 1) / size;
    if (n <= choice->n_blocks) {
        for (int64_t i = 0; i < choice->n_blocks; i++) blocks[i] = -1;
        return;
    }
    for (int64_t block = 0; block < n; block++) {
        float best = scores[block * size];
        for (int64_t at = block * size + 1; at < (block + 1) * size && at < seen; at++)
            best = scores[at] > best ? scores[at] : best;
        scores[block] = best;
    }
    scores[n - 1] = INFINITY;
    take_largest(scores, n, choice->n_blocks, blocks);
}

/* An item is a row whose positions have been scored. */
static void choose_rows(const void *argument, int64_t begin, int64_t end) {
    const struct choice *choice = argument;
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = choice->first_row + item, seen = seen_by(&choice->index, row) / choice->n_pooled;
        int32_t *chosen = choice->chosen + row * choice->n_chosen;
        int32_t *blocks = choice->blocks ? choice->blocks + row * choice->n_blocks : NULL;
        float *scores = choice->scores + item * choice->stride;
        if (seen <= choice->n_chosen)
            for (int64_t i = 0; i < choice->n_chosen; i++) chosen[i] = i < seen ? (int32_t)i : -1;
        else if (blocks && !choice->makes_blocks && blocks[0] >= 0)
            take_in_blocks(choice, scores, seen, blocks, chosen);
        else
            take_largest(scores, seen, choice->n_chosen, chosen);
        if (blocks && choice->makes_blocks) take_blocks(choice, scores, seen, blocks);
    }
}

/* An item is a row and a KV head. */
static void gather_chosen(const void *argument, int64_t begin, int64_t end) {
    const struct choice *choice = argument;
    const struct attend *call = &choice->attend;
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = choice->first_row + item / call->n_kv_heads, kv_head = item % call->n_kv_heads;
        const struct slot_layer *stored = &span_of(call, row)->layers[call->layer];
        const int32_t *chosen = choice->chosen + row * choice->n_chosen;
        for (int64_t i = 0, n = n_chosen_by(choice, row); i < n; i++) {
            const struct place held = place_of(stored, kv_head, chosen[i]);
            const int64_t to = item * choice->n_chosen + i;
            memcpy(choice->keys + to * call->row_bytes, held.keys + held.row * call->row_bytes, call->row_bytes);
            if (!call->values_are_keys)
                memcpy(choice->values + to * call->value_bytes, held.values + held.row * call->value_bytes,
                       call->value_bytes);
        }
    }
}

/* --- called from Python, which has checked everything in the structs. */

void shardnet_join_streams(const struct residual *residual) {
    const struct steps *steps = shardnet_steps_for(&residual->team);
    const struct streams *own = &residual->streams;
    struct residual wide = *residual; /* rows of float32 */
    if (own->kind != GATED) wide.is_bf16 = 0;
    shardnet_parallel_for(&residual->team, steps->norm_streams, residual, residual->n_rows, ROWS_AT_ONCE);
    multiply(own->project, &wide, own->scratch, own->normed, own->inner);
    if (own->kind == GATED) {
        shardnet_parallel_for(&residual->team, steps->soften, residual, residual->n_rows, ROWS_AT_ONCE);
        multiply(own->up, residual, own->scratch, own->inner, own->gates);
        multiply(own->inject, residual, own->scratch, own->normed, own->shares);
    }
    shardnet_parallel_for(&residual->team, steps->join_streams, residual, residual->n_rows, ROWS_AT_ONCE);
}

/* Shares out `inner` over the streams of `hidden`, as their join said. */
void shardnet_share_streams(const struct residual *residual) {
    add_residual(shardnet_steps_for(&residual->team), residual);
}

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

/* Chooses positions for every row. */
void shardnet_choose(struct choice *choice) {
    const struct team *team = &choice->index.team;
    const int64_t rows = tile_rows(&choice->index), n_chunks = choice->stride / CHUNK;
    for (int64_t row = 0; row < choice->n_rows; row = choice->end_row) {
        choice->first_row = row;
        choice->end_row = row + CHOSEN_ROWS < choice->n_rows ? row + CHOSEN_ROWS : choice->n_rows;
        const int64_t n = choice->end_row - row;
        shardnet_parallel_for(team, shardnet_steps_for(team)->score_positions, choice, (n + rows - 1) / rows * n_chunks, 1);
        shardnet_parallel_for(team, choose_rows, choice, n, 1);
    }
}

/* Attends to the chosen positions, whose keys and values are copied to where they are a slot of their own. */
void shardnet_attend_chosen(struct choice *choice) {
    struct slot_layer layers[CHOSEN_ROWS];
    struct span spans[CHOSEN_ROWS];
    struct attend part = choice->attend;
    const int64_t n_kv = part.n_kv_heads, size = n_kv * choice->n_chosen;
    part.spans = spans;
    part.layer = 0;
    for (int64_t row = 0; row < choice->n_rows; row = choice->end_row) {
        choice->first_row = row;
        choice->end_row = row + CHOSEN_ROWS < choice->n_rows ? row + CHOSEN_ROWS : choice->n_rows;
        part.n_spans = choice->end_row - row;
        shardnet_parallel_for(&part.team, gather_chosen, choice, part.n_spans * n_kv, 1);
        for (int64_t i = 0; i < part.n_spans; i++) {
            layers[i] = (struct slot_layer){choice->keys + i * size * part.row_bytes,
                                            choice->values + i * size * part.value_bytes, 0, choice->n_chosen, NULL};
            spans[i] = (struct span){&layers[i], i, i + 1, n_chosen_by(choice, row + i) - 1, 0};
        }
        part.queries = at(choice->attend.queries, row * part.row_stride, part.is_bf16);
        part.attended = at(choice->attend.attended, row * part.n_heads * part.value_size, part.is_bf16);
        attend(&part);
    }
}

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

/* A router and its experts in one call, with norms and residual: see experts.h.
 *
 * Visits, the pairs of a row and an expert of it, are sorted by expert, and the weights of all experts visited are
 * shared out together: threads share work, not experts. What they give is added up row by row in the order of the
 * routing.
 */

#include "experts.h"

static void route(const struct steps *steps, const struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    struct residual own = *residual;
    const void *rows = call->rows;
    if (call->router.is_wide && residual->is_bf16) {
        shardnet_parallel_for(&residual->team, steps->widen, call, residual->n_rows, ROWS_AT_ONCE);
        own.is_bf16 = 0;
        rows = call->wide;
    }
    multiply(call->router.gate, &own, call->mlp.scratch, rows, call->narrow);
    shardnet_parallel_for(&residual->team, steps->route, call, residual->n_rows, ROWS_AT_ONCE);
}

/* Sorts visits by expert, those of one by row. */
static void sort_visits(const struct experts_call *call) {
    const int64_t n = call->mlp.residual.n_rows * call->router.top_k, n_experts = call->router.n_experts;
    int64_t *starts = call->starts;
    memset(starts, 0, (size_t)(n_experts + 1) * sizeof *starts);
    for (int64_t visit = 0; visit < n; visit++) starts[call->chosen[visit] + 1]++;
    for (int64_t e = 0; e < n_experts; e++) starts[e + 1] += starts[e];
    for (int64_t visit = 0; visit < n; visit++) {
        const int64_t place = starts[call->chosen[visit]]++;
        call->visits[place] = visit;
        call->places[visit] = place;
    }
    memmove(starts + 1, starts, (size_t)n_experts * sizeof *starts);
    starts[0] = 0;
}

/* Some visits, those of the experts [begin, end), and with `n_shared` all rows of the shared expert behind them. */
struct batch {
    int64_t begin, end, n, n_shared;
    void *activated, *rows; /* its columns behind gate and up: this shard's, all shards' */
    int64_t n_begun;        /* joins of them that are under way */
};

/* Multiplies rows of visits, then those of the shared expert, all at once: by gate and up, or by down. */
static void multiply_visits(const struct experts_call *call, const struct batch *batch, int is_down, const void *rows,
                            const void *shared_rows, void *out) {
    const struct residual *residual = &call->mlp.residual;
    const int64_t *starts = call->starts;
    const int is_bf16 = residual->is_bf16;
    int64_t n = 0, n_out = 0;
    for (int64_t e = batch->begin; e < batch->end; e++) {
        const int64_t own = starts[e] - starts[batch->begin], n_rows = starts[e + 1] - starts[e];
        if (!n_rows) continue;
        struct linear *p = is_down ? call->experts[e].down : call->experts[e].gate_up;
        n_out = p->width;
        ready(p, residual, n_rows, call->mlp.scratch + own * call->row_bytes, at(rows, own * p->n_in, is_bf16),
              at(out, own * n_out, is_bf16));
        call->products[n++] = p;
    }
    if (batch->n_shared) {
        struct linear *p = is_down ? call->shared.down : call->shared.gate_up;
        ready(p, residual, batch->n_shared, call->mlp.scratch + batch->n * call->row_bytes, shared_rows,
              at(out, batch->n * n_out, is_bf16));
        call->products[n++] = p;
    }
    shardnet_linears(call->products, n);
}

/* Activates what gate and up gave: the columns of visits, behind them those of the shared expert. */
static void activate(const struct steps *steps, const struct experts_call *call, const struct batch *batch) {
    const int64_t place = batch->n * call->mlp.n_inner;
    struct mlp_call own = call->mlp;
    own.activated = batch->activated;
    shardnet_parallel_for(&own.residual.team, steps->activate, &own, batch->n, ROWS_AT_ONCE);
    own.n_inner = call->n_shared_inner;
    own.activation = call->shared_activation;
    own.projected = at(own.projected, 2 * place, own.residual.is_bf16);
    own.activated = at(own.activated, place, own.residual.is_bf16);
    shardnet_parallel_for(&own.residual.team, steps->activate, &own, batch->n_shared, ROWS_AT_ONCE);
}

/* Where the shared expert's columns of all shards begin in a batch. */
static void *behind(const struct experts_call *call, const struct batch *batch) {
    const struct joined *joined = &call->mlp.joined;
    if (!joined->in_ends) return at(batch->activated, batch->n * call->mlp.n_inner, call->mlp.residual.is_bf16);
    return at(batch->rows, batch->n * joined->in_ends[joined->gather->size], call->mlp.residual.is_bf16);
}

/* Joins the activated columns of a batch: begins to, where another one is multiplied meanwhile. */
static void join_activated(const struct experts_call *call, struct batch *batch, join_function join) {
    const struct gather *gather = call->mlp.joined.gather;
    const int64_t *ends = call->mlp.joined.in_ends, *shared_ends = call->shared_in_ends;
    const int64_t item = call->mlp.residual.is_bf16 ? 2 : 4;
    join(gather, batch->activated, batch->rows, batch->n + (shared_ends ? 0 : batch->n_shared), ends, item);
    batch->n_begun = 1;
    if (!shared_ends || !batch->n_shared) return;
    const void *own = at(batch->activated, batch->n * call->mlp.n_inner, item == 2);
    join(gather, own, behind(call, batch), batch->n_shared, shared_ends, item);
    batch->n_begun = 2;
}

/* Multiplies a batch by gate and up, and activates it. */
static void open_batch(const struct steps *steps, const struct experts_call *call, const struct batch *batch) {
    const struct visits some = {.call = call, .begin = call->starts[batch->begin]};
    shardnet_parallel_for(&call->mlp.residual.team, steps->gather, &some, batch->n, ROWS_AT_ONCE);
    multiply_visits(call, batch, 0, call->gathered, call->rows, call->mlp.projected);
    activate(steps, call, batch);
}

/* Multiplies the activated columns of a batch by down: all shards' columns, to this shard's outputs. */
static void close_batch(const struct experts_call *call, const struct batch *batch) {
    const void *rows = call->mlp.joined.in_ends ? batch->rows : batch->activated;
    void *outputs = at(call->outputs, call->starts[batch->begin] * call->n_columns, call->mlp.residual.is_bf16);
    multiply_visits(call, batch, 1, rows, behind(call, batch), outputs);
}

/* Runs the experts, as many together as have at most `n_at_once` visits, and with the last ones the shared expert.
 * Where shards join parts of a batch, the next one is multiplied meanwhile: it has the other half of the buffers. */
static void visit_experts(const struct steps *steps, const struct experts_call *call) {
    const struct joined *joined = &call->mlp.joined;
    const int64_t n_experts = call->router.n_experts, *starts = call->starts, n_rows = call->mlp.residual.n_rows;
    const int overlaps = joined->in_ends && joined->gather->post && starts[n_experts] > call->n_at_once;
    struct batch before = {0};
    for (int64_t begin = 0, end, turn = 0; begin < n_experts; begin = end, turn ^= overlaps) {
        for (end = begin + 1; end < n_experts && starts[end + 1] - starts[begin] <= call->n_at_once;) end++;
        struct batch batch = {.begin = begin, .end = end, .n = starts[end] - starts[begin]};
        batch.n_shared = end == n_experts && call->shared.down ? n_rows : 0;
        batch.activated = (char *)call->mlp.activated + turn * call->activated_bytes;
        batch.rows = (char *)joined->rows + turn * call->joined_bytes;
        open_batch(steps, call, &batch);
        if (joined->in_ends) join_activated(call, &batch, overlaps ? joined->gather->post : joined->gather->join);
        if (!overlaps) {
            close_batch(call, &batch);
            continue;
        }
        if (before.end) {
            joined->gather->await(joined->gather, batch.n_begun);
            close_batch(call, &before);
        }
        before = batch;
    }
    if (!overlaps) return;
    joined->gather->await(joined->gather, 0);
    close_batch(call, &before);
}

/* Called from Python, which has checked everything in the struct. */
void shardnet_experts(struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    const struct steps *steps = shardnet_steps_for(&residual->team);
    call->rows = normalize(steps, residual);
    route(steps, call);
    sort_visits(call);
    visit_experts(steps, call);
    if (call->shared_gate) multiply(call->shared_gate, residual, call->mlp.scratch, call->rows, call->shared_gates);
    shardnet_parallel_for(&residual->team, steps->combine, call, residual->n_rows, ROWS_AT_ONCE);
    const struct joined *joined = &call->mlp.joined;
    join(joined, joined->out_ends, joined->part, residual->inner, residual->n_rows, residual->is_bf16);
    add_residual(steps, residual);
}

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
    struct mlp_call shared = call->mlp;
    shardnet_parallel_for(&shared.residual.team, steps->activate, &call->mlp, batch->n, ROWS_AT_ONCE);
    shared.n_inner = call->n_shared_inner;
    shared.projected = at(shared.projected, 2 * place, shared.residual.is_bf16);
    shared.activated = at(shared.activated, place, shared.residual.is_bf16);
    shardnet_parallel_for(&shared.residual.team, steps->activate, &shared, batch->n_shared, ROWS_AT_ONCE);
}

/* Multiplies activated columns by down: all shards' columns, to this shard's outputs. */
static void multiply_down(const struct experts_call *call, const struct batch *batch) {
    const struct joined *joined = &call->mlp.joined;
    const int is_bf16 = call->mlp.residual.is_bf16;
    const int64_t place = batch->n * call->mlp.n_inner, first = call->starts[batch->begin] * call->n_columns;
    const int64_t *ends = joined->in_ends, *shared_ends = call->shared_in_ends;
    const void *rows = call->mlp.activated, *shared_rows = at(rows, place, is_bf16);
    if (ends) {
        void *behind = at(joined->rows, batch->n * ends[joined->gather->size], is_bf16);
        rows = join(joined, ends, rows, joined->rows, batch->n + (shared_ends ? 0 : batch->n_shared), is_bf16);
        if (shared_ends && batch->n_shared)
            join(joined, shared_ends, shared_rows, behind, batch->n_shared, is_bf16);
        shared_rows = behind;
    }
    multiply_visits(call, batch, 1, rows, shared_rows, at(call->outputs, first, is_bf16));
}

/* Runs the experts, as many together as have at most `n_at_once` visits, and with the last ones the shared expert. */
static void visit_experts(const struct steps *steps, const struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    const int64_t n_experts = call->router.n_experts, *starts = call->starts;
    for (int64_t begin = 0, end; begin < n_experts; begin = end) {
        for (end = begin + 1; end < n_experts && starts[end + 1] - starts[begin] <= call->n_at_once;) end++;
        const struct visits some = {.call = call, .begin = starts[begin]};
        const int64_t n_shared = end == n_experts && call->shared.down ? residual->n_rows : 0;
        const struct batch batch = {.begin = begin, .end = end, .n = starts[end] - starts[begin], .n_shared = n_shared};
        shardnet_parallel_for(&residual->team, steps->gather, &some, batch.n, ROWS_AT_ONCE);
        multiply_visits(call, &batch, 0, call->gathered, call->rows, call->mlp.projected);
        activate(steps, call, &batch);
        multiply_down(call, &batch);
    }
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

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

/* Multiplies rows of the visits of the experts [begin, end), all at once: by gate and up, or by down. */
static void multiply_visits(const struct experts_call *call, int64_t begin, int64_t end, int is_down) {
    const struct residual *residual = &call->mlp.residual;
    const int64_t first = call->starts[begin], width = residual->width, n_inner = call->mlp.n_inner;
    int64_t n = 0;
    for (int64_t e = begin; e < end; e++) {
        const int64_t place = call->starts[e], own = place - first, n_rows = call->starts[e + 1] - place;
        if (!n_rows) continue;
        struct linear *p = is_down ? call->experts[e].down : call->experts[e].gate_up;
        const void *rows = is_down ? at(call->mlp.activated, own * n_inner, residual->is_bf16)
                                   : at(call->gathered, own * width, residual->is_bf16);
        void *out = is_down ? at(call->outputs, place * width, residual->is_bf16)
                            : at(call->mlp.projected, 2 * own * n_inner, residual->is_bf16);
        ready(p, residual, n_rows, call->mlp.scratch + own * call->row_bytes, rows, out);
        call->products[n++] = p;
    }
    if (n) shardnet_linears(call->products, n);
}

/* Runs the experts, as many together as have at most `n_at_once` visits. */
static void visit_experts(const struct steps *steps, const struct experts_call *call) {
    const struct team *team = &call->mlp.residual.team;
    const int64_t n_experts = call->router.n_experts, *starts = call->starts;
    for (int64_t begin = 0, end; begin < n_experts; begin = end) {
        for (end = begin + 1; end < n_experts && starts[end + 1] - starts[begin] <= call->n_at_once;) end++;
        const struct visits some = {.call = call, .begin = starts[begin]};
        const int64_t n = starts[end] - starts[begin];
        shardnet_parallel_for(team, steps->gather, &some, n, ROWS_AT_ONCE);
        multiply_visits(call, begin, end, 0);
        shardnet_parallel_for(team, steps->activate, &call->mlp, n, ROWS_AT_ONCE);
        multiply_visits(call, begin, end, 1);
    }
}

/* Runs the expert that all rows visit, an MLP with the activation of the others. */
static void visit_shared(const struct steps *steps, const struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    struct mlp_call own = call->mlp;
    own.n_inner = call->n_shared_inner;
    multiply(call->shared.gate_up, residual, own.scratch, call->rows, own.projected);
    shardnet_parallel_for(&residual->team, steps->activate, &own, residual->n_rows, ROWS_AT_ONCE);
    multiply(call->shared.down, residual, own.scratch, own.activated, call->shared_out);
    if (call->shared_gate) multiply(call->shared_gate, residual, own.scratch, call->rows, call->shared_gates);
}

/* Called from Python, which has checked everything in the struct. */
void shardnet_experts(struct experts_call *call) {
    const struct residual *residual = &call->mlp.residual;
    const struct steps *steps = shardnet_steps_for(&residual->team);
    call->rows = normalize(steps, residual);
    route(steps, call);
    sort_visits(call);
    visit_experts(steps, call);
    if (call->shared.down) visit_shared(steps, call);
    shardnet_parallel_for(&residual->team, steps->combine, call, residual->n_rows, ROWS_AT_ONCE);
    add_residual(steps, residual);
}

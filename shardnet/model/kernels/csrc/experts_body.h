/* Included by sublayers_body.h: the choice of a row's experts, and what is done to rows before and behind these. */

/* Whether a score stands before another: NaN before all, as torch sorts. */
INLINE int NAME(is_more)(float a, float b) { return a > b || (a != a && b == b); }

/* Finds the best of `n` scores behind `last` (-1: of all), of equal ones the first. */
INLINE int64_t NAME(next_best)(const float *scores, int64_t n, int64_t last) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++) {
        if (last >= 0) {
            if (NAME(is_more)(scores[i], scores[last])) continue;
            if (i <= last && !NAME(is_more)(scores[last], scores[i])) continue;
        }
        if (best < 0 || NAME(is_more)(scores[i], scores[best])) best = i;
    }
    return best;
}

/* What a group is chosen by: its best score, or the sum of its best two. */
INLINE float NAME(group_score)(const float *scores, int64_t n, int takes_two) {
    const int64_t best = NAME(next_best)(scores, n, -1);
    return takes_two ? scores[best] + scores[NAME(next_best)(scores, n, best)] : scores[best];
}

/* Sets the scores of all but the best groups to `out`; `of_groups` is scratch [n_groups]. */
INLINE void NAME(leave_groups)(const struct router *router, float *scores, float *of_groups, int takes_two, float out) {
    const int64_t n = router->n_experts / router->n_groups;
    if (router->top_groups == router->n_groups) return;
    for (int64_t g = 0; g < router->n_groups; g++)
        of_groups[g] = NAME(group_score)(scores + g * n, n, takes_two);
    int64_t last = -1;
    for (int64_t i = 0; i < router->n_groups; i++) {
        last = NAME(next_best)(of_groups, router->n_groups, last);
        if (i < router->top_groups) continue;
        for (int64_t e = last * n; e < (last + 1) * n; e++) scores[e] = out;
    }
}

INLINE TARGET void NAME(sigmoids)(float *values, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const int left = of_last(n, i);
        const lanes x = NAME(load)(values, i, left, 0);
        NAME(save)(values, i, left, 1.0f / (1.0f + NAME(exponential)(-x)), 0);
    }
}

INLINE TARGET void NAME(roots)(float *values, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const int left = of_last(n, i);
        NAME(save)(values, i, left, NAME(softplus)(NAME(load)(values, i, left, 0)), 0);
    }
    for (int64_t i = 0; i < n; i++) values[i] = sqrtf(values[i]);
}

/* Chooses by `by`, and weights by `scores`. */
INLINE TARGET void NAME(choose)(const struct router *router, const float *by, const float *scores, int64_t *chosen,
                                float *weights) {
    int64_t last = -1;
    for (int64_t k = 0; k < router->top_k; k++) {
        last = NAME(next_best)(by, router->n_experts, last);
        chosen[k] = last;
        weights[k] = scores[last];
    }
}

/* Chooses by scores in groups; `by` and `of_groups` are scratch. */
INLINE TARGET void NAME(choose_in_groups)(const struct router *router, float *scores, float *by, float *of_groups,
                                          int64_t *chosen, float *weights, const int32_t *said) {
    const int64_t n = router->n_experts, top_k = router->top_k;
    const int takes_two = router->routing != GROUPS_BY_SOFTMAX;
    if (router->routing == GROUPS_BY_TWO_SIGMOIDS)
        NAME(sigmoids)(scores, n);
    else if (router->routing == BEST_BY_ROOTS)
        NAME(roots)(scores, n);
    else
        NAME(softmax_row)(scores, scores, n, 0);
    for (int64_t e = 0; e < n; e++) by[e] = router->bias ? scores[e] + router->bias[e] : scores[e];
    NAME(leave_groups)(router, by, of_groups, takes_two, takes_two ? -INFINITY : 0);
    NAME(choose)(router, by, takes_two ? scores : by, chosen, weights);
    for (int64_t k = 0; said && k < top_k; k++) weights[k] = scores[chosen[k] = said[k]];
    float sum = weights[0];
    for (int64_t k = 1; k < top_k; k++) sum += weights[k];
    for (int64_t k = 0; k < top_k; k++) {
        if (router->normalizes) weights[k] /= sum + 1e-20f;
        weights[k] *= router->scale;
    }
}

static TARGET void NAME(route)(const void *argument, int64_t begin, int64_t end) {
    const struct experts_call *call = argument;
    const struct router *router = &call->router;
    const int64_t n = router->n_experts, top_k = router->top_k;
    const int is_bf16 = call->mlp.residual.is_bf16 && !router->is_wide;
    for (int64_t row = begin; row < end; row++) {
        float *scores = call->scores + 3 * row * n, *by = scores + n, *weights = call->weights + row * top_k;
        int64_t *chosen = call->chosen + row * top_k;
        for (int64_t e = 0; e < n; e++) scores[e] = number(call->narrow, row * n + e, is_bf16);
        switch (router->routing) {
            case BEST_BY_SOFTMAX:
                NAME(choose)(router, scores, scores, chosen, weights);
                NAME(softmax_row)(weights, weights, top_k, 0);
                break;
            case BEST_OF_SOFTMAX:
                NAME(softmax_row)(scores, by, n, 0);
                NAME(choose)(router, scores, by, chosen, weights);
                break;
            case BEST_BY_SIGMOID:
                NAME(choose)(router, scores, scores, chosen, weights);
                NAME(sigmoids)(weights, top_k);
                break;
            default: {
                const int32_t *said = router->of_tokens ? router->of_tokens + router->token_ids[row] * top_k : NULL;
                NAME(choose_in_groups)(router, scores, by, by + n, chosen, weights, said);
            }
        }
    }
}

/* Rows as float32, for a gate that computes so. */
static TARGET void NAME(widen)(const void *argument, int64_t begin, int64_t end) {
    const struct experts_call *call = argument;
    const int64_t width = call->mlp.residual.width;
    for (int64_t i = begin * width; i < end * width; i += LANES) {
        const int n = of_last(end * width, i);
        NAME(save)(call->wide, i, n, NAME(load)(call->rows, i, n, 1), 0);
    }
}

/* Gathers what goes into experts: a row for each visit. */
static TARGET void NAME(gather)(const void *argument, int64_t begin, int64_t end) {
    const struct visits *some = argument;
    const struct experts_call *call = some->call;
    const int64_t width = call->mlp.residual.width;
    const int is_bf16 = call->mlp.residual.is_bf16;
    for (int64_t i = begin; i < end; i++) {
        const int64_t visit = call->visits[some->begin + i];
        const char *from = at(call->rows, visit / call->router.top_k * width, is_bf16);
        char *to = at(call->gathered, i * width, is_bf16);
        if (!call->weighs_inputs) {
            memcpy(to, from, (size_t)(width * (is_bf16 ? 2 : 4)));
            continue;
        }
        const float weight = is_bf16 ? from_bf16(to_bf16(call->weights[visit])) : call->weights[visit];
        for (int64_t j = 0; j < width; j += LANES) {
            const int n = of_last(width, j);
            NAME(save_either)(to, j, n, NAME(load_either)(from, j, n, is_bf16) * weight, is_bf16);
        }
    }
}

/* Adds up what a row's experts give, by their weights and in the order of its routing, and what the shared one does:
 * this shard's columns. */
INLINE TARGET void NAME(combine_row)(const struct experts_call *call, int64_t row, const int is_bf16) {
    const int64_t width = call->n_columns, top_k = call->router.top_k;
    void *combined = call->mlp.joined.out_ends ? call->mlp.joined.part : call->mlp.residual.inner;
    const int64_t n_visits = call->mlp.residual.n_rows * top_k;
    const int64_t *places = call->places + row * top_k;
    const float *weights = call->weights + row * top_k;
    const lanes none = {0};
    float gate = 1;
    if (call->shared_gate) {
        const lanes own = NAME(broadcast)(number(call->shared_gates, row, is_bf16));
        gate = NAME(kept)(1.0f / (1.0f + NAME(exponential)(-own)), is_bf16)[0];
    }
    for (int64_t i = 0; i < width; i += LANES) {
        const int n = of_last(width, i);
        lanes total = none;
        for (int64_t k = 0; k < top_k; k++) {
            const lanes own = NAME(load)(call->outputs, places[k] * width + i, n, is_bf16);
            total += call->weighs_inputs ? own : own * weights[k];
        }
        if (call->shared.down) {
            const lanes own = NAME(load)(call->outputs, (n_visits + row) * width + i, n, is_bf16);
            total = NAME(kept)(total, is_bf16) + (call->shared_gate ? NAME(kept)(own * gate, is_bf16) : own);
        }
        NAME(save)(combined, row * width + i, n, total, is_bf16);
    }
}

static TARGET void NAME(combine)(const void *argument, int64_t begin, int64_t end) {
    const struct experts_call *call = argument;
    for (int64_t row = begin; row < end; row++)
        if (call->mlp.residual.is_bf16)
            NAME(combine_row)(call, row, 1);
        else
            NAME(combine_row)(call, row, 0);
}

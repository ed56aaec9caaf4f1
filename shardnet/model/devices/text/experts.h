/* A router's choice, and the sum of what a row's experts give: as csrc/experts_body.h has them. */

/* Whether a score stands before another: NaN before all. */
INLINE int is_more(float a, float b) { return a > b || (a != a && b == b); }

/* The softmax of one of `n` numbers among them: its exponential, by their sum in 16 parts. */
INLINE float share_of(float x, GLOBAL const float *numbers, uint32_t n) {
    float parts[PARTS], best = -INFINITY;
    for (uint32_t i = 0; i < n; i++) best = numbers[i] > best || numbers[i] != numbers[i] ? numbers[i] : best;
    for (int i = 0; i < PARTS; i++) parts[i] = 0;
    for (uint32_t i = 0; i < n; i++) parts[i % PARTS] = ADD(parts[i % PARTS], exponential(ADD(numbers[i], -best)));
    for (int step = PARTS / 2; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] = ADD(parts[i], parts[i + step]);
    return DIV(exponential(ADD(x, -best)), parts[0]);
}

/* A thread chooses a row's `top_k` best experts, of equal ones the first, and weighs them: 0 by the softmax of the
 * chosen, 1 by their softmax among all, 2 by their sigmoids. `best` is scratch [rows, top_k]. */
KERNEL route(GLOBAL const float *scores, GLOBAL uint32_t *chosen, GLOBAL float *weights, GLOBAL float *best,
             uint32_t n_rows, uint32_t n_experts, uint32_t top_k, uint32_t routing WHERE) {
    PHASE {
        const uint32_t row = GROUP_X * THREADS + THREAD;
        if (row < n_rows) {
            GLOBAL const float *own = scores + (uint64_t)row * n_experts;
            GLOBAL float *of_best = best + (uint64_t)row * top_k;
            uint32_t last = 0;
            for (uint32_t k = 0; k < top_k; k++) {
                uint32_t found = n_experts;
                for (uint32_t i = 0; i < n_experts; i++) {
                    if (k && (is_more(own[i], own[last]) || (i <= last && !is_more(own[last], own[i])))) continue;
                    if (found == n_experts || is_more(own[i], own[found])) found = i;
                }
                last = found;
                chosen[(uint64_t)row * top_k + k] = last;
                of_best[k] = own[last];
            }
            for (uint32_t k = 0; k < top_k; k++)
                weights[(uint64_t)row * top_k + k] = routing == 2   ? sigmoid(of_best[k])
                                                     : routing == 1 ? share_of(of_best[k], own, n_experts)
                                                                    : share_of(of_best[k], of_best, top_k);
        }
    }
}

/* inner = the outputs of a row's experts by their weights, in the order of its choice; with `shared` 1 what the shared
 * expert gives is added, with 2 times the sigmoid of its gate. */
KERNEL combine(GLOBAL const float *outputs, GLOBAL const float *weights, GLOBAL const float *of_shared,
               GLOBAL const float *gates, GLOBAL float *inner, uint32_t n_rows, uint32_t width, uint32_t top_k,
               uint32_t shared WHERE) {
    PHASE {
        const uint32_t at = GROUP_X * THREADS + THREAD, row = at / width, i = at % width;
        if (row < n_rows) {
            float total = 0;
            for (uint32_t k = 0; k < top_k; k++) {
                const uint64_t visit = (uint64_t)row * top_k + k;
                total = ADD(total, MUL(outputs[visit * width + i], weights[visit]));
            }
            if (shared == 1) total = ADD(total, of_shared[at]);
            if (shared == 2) total = ADD(total, MUL(of_shared[at], sigmoid(gates[row])));
            inner[at] = total;
        }
    }
}

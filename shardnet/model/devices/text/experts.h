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

/* The best of `n` scores behind `last` (n: of all), of equal ones the first. */
INLINE uint32_t next_best(GLOBAL const float *scores, uint32_t n, uint32_t last) {
    uint32_t best = n;
    for (uint32_t i = 0; i < n; i++) {
        if (last < n && (is_more(scores[i], scores[last]) || (i <= last && !is_more(scores[last], scores[i])))) continue;
        if (best == n || is_more(scores[i], scores[best])) best = i;
    }
    return best;
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
            uint32_t last = n_experts;
            for (uint32_t k = 0; k < top_k; k++) {
                last = next_best(own, n_experts, last);
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

/* The same in the groups that are best: 3 by softmax and a group's best, 4 by sigmoids and its best two, 5 by softmax
 * and its best two. A bias is added for the choice alone. `by` is scratch [rows, experts + groups]. */
KERNEL route_in_groups(GLOBAL float *scores, GLOBAL const float *bias, GLOBAL float *by, GLOBAL uint32_t *chosen,
                       GLOBAL float *weights, uint32_t n_rows, uint32_t n_experts, uint32_t top_k, uint32_t n_groups,
                       uint32_t top_groups, uint32_t routing, uint32_t normalises, uint32_t has_bias,
                       float scale WHERE) {
    PHASE {
        const uint32_t row = GROUP_X * THREADS + THREAD, size = n_experts / n_groups;
        if (row < n_rows) {
            GLOBAL float *own = scores + (uint64_t)row * n_experts, *of_row = weights + (uint64_t)row * top_k;
            GLOBAL float *biased = by + (uint64_t)row * (n_experts + n_groups), *of_groups = biased + n_experts;
            for (uint32_t e = 0; e < n_experts; e++)
                biased[e] = routing == 4 ? sigmoid(own[e]) : share_of(own[e], own, n_experts);
            for (uint32_t e = 0; e < n_experts; e++) {
                own[e] = biased[e];
                if (has_bias) biased[e] = ADD(own[e], bias[e]);
            }
            for (uint32_t g = 0; g < n_groups; g++) {
                GLOBAL const float *some = biased + g * size;
                const uint32_t best = next_best(some, size, size);
                of_groups[g] = routing == 3 ? some[best] : ADD(some[best], some[next_best(some, size, best)]);
            }
            uint32_t last = n_groups;
            for (uint32_t i = 0; i < n_groups && top_groups < n_groups; i++) {
                last = next_best(of_groups, n_groups, last);
                for (uint32_t e = last * size; e < (last + 1) * size && i >= top_groups; e++)
                    biased[e] = routing == 3 ? 0.0f : -INFINITY;
            }
            float sum = 0;
            last = n_experts;
            for (uint32_t k = 0; k < top_k; k++) {
                last = next_best(biased, n_experts, last);
                chosen[(uint64_t)row * top_k + k] = last;
                of_row[k] = routing == 3 ? biased[last] : own[last];
                sum = k ? ADD(sum, of_row[k]) : of_row[k];
            }
            for (uint32_t k = 0; k < top_k; k++) {
                const float weight = normalises ? DIV(of_row[k], ADD(sum, 1e-20f)) : of_row[k];
                of_row[k] = MUL(weight, scale);
            }
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

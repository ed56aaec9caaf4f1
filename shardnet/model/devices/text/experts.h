/* A router's choice, and the sum of what a row's experts give: as csrc/experts_body.h has them. */

/* How many of `n` scores stand before that of `e`: better ones, and equal ones that come first. */
INLINE uint32_t place_of(GLOBAL const float *scores, uint32_t n, uint32_t e) {
    uint32_t place = 0;
    AHEAD for (uint32_t i = 0; i < n; i++)
        place += is_more(scores[i], scores[e]) || (i < e && !is_more(scores[e], scores[i]));
    return place;
}

/* All threads of a group: parts[0] becomes the sum of exponentials of `n` numbers less the best, in 16 parts. */
#define SUM_OF_SHARES(numbers, n, best)                                                           \
    PHASE {                                                                                       \
        if (THREAD < PARTS) {                                                                     \
            float sum = 0;                                                                        \
            for (uint32_t i = THREAD; i < (n); i += PARTS)                                        \
                sum = ADD(sum, exponential(ADD(numbers[i], -(best))));                            \
            parts[THREAD] = sum;                                                                  \
        }                                                                                         \
    }                                                                                             \
    PHASE {                                                                                       \
        if (THREAD == 0) ADD_UP(parts)                                                            \
    }

/* All threads of a group choose the `top_k` best of `n` experts by `scores`; `of_row` gets what `kept` has of each. */
#define CHOOSE(scores, n, kept, of_row)                                     \
    PHASE {                                                                 \
        for (uint32_t e = THREAD; e < (n); e += THREADS) {                  \
            const uint32_t place = place_of(scores, n, e);                  \
            if (place < top_k) {                                            \
                chosen[(uint64_t)GROUP_X * top_k + place] = e;              \
                of_row[place] = (kept)[e];                                  \
            }                                                               \
        }                                                                   \
    }

/* A group chooses the `top_k` best experts of row GROUP_X, of equal ones the first, and weighs them: 0 by the softmax of
 * the chosen, 1 by their softmax among all, 2 by their sigmoids. `best` is scratch [rows, top_k]. */
KERNEL route(GLOBAL const float *scores, GLOBAL uint32_t *chosen, GLOBAL float *weights, GLOBAL float *best,
             uint32_t n_experts, uint32_t top_k, uint32_t routing WHERE) {
    AWAIT
    SHARED float parts[PARTS];
    GLOBAL const float *own = scores + (uint64_t)GROUP_X * n_experts;
    GLOBAL float *of_best = best + (uint64_t)GROUP_X * top_k;
    CHOOSE(own, n_experts, own, of_best)
    GLOBAL const float *among = routing ? own : of_best;
    const uint32_t n_among = routing ? n_experts : top_k;
    SUM_OF_SHARES(among, n_among, of_best[0])
    PHASE {
        if (THREAD < top_k)
            weights[(uint64_t)GROUP_X * top_k + THREAD] =
                routing == 2 ? sigmoid(of_best[THREAD]) : DIV(exponential(ADD(of_best[THREAD], -of_best[0])), parts[0]);
    }
}

/* The same in the groups that are best: 3 by softmax and a group's best, 4 by sigmoids and its best two, 5 by softmax
 * and its best two, 6 by the roots of softpluses and its best two. A bias is added for the choice alone; with `by_token`
 * a row's token chooses, of which `of_tokens` has [tokens, top_k]. `by` is scratch [rows, experts + 3 groups]. */
KERNEL route_in_groups(GLOBAL float *scores, GLOBAL const float *bias, GLOBAL float *by, GLOBAL uint32_t *chosen,
                       GLOBAL float *weights, GLOBAL const uint32_t *tokens, GLOBAL const uint32_t *of_tokens,
                       uint32_t n_experts, uint32_t top_k, uint32_t n_groups, uint32_t top_groups, uint32_t routing,
                       uint32_t normalises, uint32_t has_bias, uint32_t by_token, float scale WHERE) {
    AWAIT
    SHARED float parts[PARTS], most[1];
    const uint32_t size = n_experts / n_groups;
    GLOBAL float *own = scores + (uint64_t)GROUP_X * n_experts, *of_row = weights + (uint64_t)GROUP_X * top_k;
    GLOBAL float *biased = by + (uint64_t)GROUP_X * (n_experts + 3 * n_groups);
    GLOBAL float *of_groups = biased + n_experts, *best_two = of_groups + n_groups;
    if (routing != 4 && routing != 6) {
        PHASE {
            for (uint32_t e = THREAD; e < n_experts; e += THREADS)
                if (place_of(own, n_experts, e) == 0) most[0] = own[e];
        }
        SUM_OF_SHARES(own, n_experts, most[0])
    }
    PHASE {
        for (uint32_t e = THREAD; e < n_experts; e += THREADS) {
            const float share = routing == 6   ? SQRT(NARROW(softplus(WIDE(own[e]))))
                                : routing == 4 ? sigmoid(own[e])
                                               : DIV(exponential(ADD(own[e], -most[0])), parts[0]);
            own[e] = share;
            biased[e] = has_bias ? ADD(share, bias[e]) : share;
        }
    }
    PHASE {
        for (uint32_t e = THREAD; e < n_experts; e += THREADS) {
            const uint32_t place = place_of(biased + e / size * size, size, e % size);
            if (place < 2) best_two[e / size * 2 + place] = biased[e];
        }
    }
    PHASE {
        for (uint32_t g = THREAD; g < n_groups; g += THREADS)
            of_groups[g] = routing == 3 ? best_two[2 * g] : ADD(best_two[2 * g], best_two[2 * g + 1]);
    }
    PHASE {
        for (uint32_t e = THREAD; e < n_experts && top_groups < n_groups; e += THREADS)
            if (place_of(of_groups, n_groups, e / size) >= top_groups) biased[e] = routing == 3 ? 0.0f : -INFINITY;
    }
    CHOOSE(biased, n_experts, routing == 3 ? biased : own, of_row)
    PHASE {
        for (uint32_t k = THREAD; k < top_k && by_token; k += THREADS) {
            const uint32_t expert = of_tokens[(uint64_t)tokens[GROUP_X] * top_k + k];
            chosen[(uint64_t)GROUP_X * top_k + k] = expert;
            of_row[k] = own[expert];
        }
    }
    PHASE {
        if (THREAD == 0) {
            float sum = of_row[0];
            for (uint32_t k = 1; k < top_k; k++) sum = ADD(sum, of_row[k]);
            for (uint32_t k = 0; k < top_k; k++) {
                const float weight = normalises ? DIV(of_row[k], ADD(sum, 1e-20f)) : of_row[k];
                of_row[k] = MUL(weight, scale);
            }
        }
    }
}

/* Orders the visits of rows to experts by expert, and divides them into tiles of at most 64 of one: [n_tiles] of expert,
 * where its visits begin in `order`, how many; 0 for tiles that are not needed. A group of threads has the visits to expert
 * GROUP_X: how many are to experts before says where they and their tiles begin. */
KERNEL group_visits(GLOBAL const uint32_t *ids, GLOBAL uint32_t *order, GLOBAL uint32_t *tiles, uint32_t n_visits,
                    uint32_t n_experts, uint32_t n_tiles WHERE) {
    AWAIT
    SHARED uint32_t before[THREADS], own[THREADS];
    const uint32_t expert = GROUP_X, each = (n_visits + THREADS - 1) / THREADS;
    PHASE {
        uint32_t n_before = 0, n_own = 0;
        for (uint32_t v = THREAD * each; v < (THREAD + 1) * each && v < n_visits; v++)
            n_before += ids[v] < expert, n_own += ids[v] == expert;
        before[THREAD] = n_before, own[THREAD] = n_own;
    }
    PHASE {
        uint32_t start = 0, count = 0, at = 0;
        AHEAD for (uint32_t i = 0; i < THREADS; i++) {
            start += before[i], count += own[i];
            at += i < THREAD ? own[i] : 0;
        }
        for (uint32_t v = THREAD * each; v < (THREAD + 1) * each && v < n_visits; v++)
            if (ids[v] == expert) order[start + at++] = v;
        const uint32_t first = start / 64 + expert, end = (start + count) / 64 + expert + 1;
        for (uint32_t i = THREAD; first + i < (expert + 1 < n_experts ? end : n_tiles); i += THREADS) {
            const uint32_t left = i * 64 < count ? count - i * 64 : 0;
            GLOBAL uint32_t *tile = tiles + 3 * (first + i);
            tile[0] = expert, tile[1] = start + i * 64, tile[2] = left < 64 ? left : 64;
        }
    }
}

/* inner = the outputs of a row's experts by their weights, in the order of its choice; with `shared` 1 what the shared
 * expert gives is added, with 2 times the sigmoid of its gate. */
KERNEL combine(GLOBAL const float *outputs, GLOBAL const float *weights, GLOBAL const float *of_shared,
               GLOBAL const float *gates, GLOBAL float *inner, uint32_t n_rows, uint32_t width, uint32_t top_k,
               uint32_t shared WHERE) {
    AWAIT
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

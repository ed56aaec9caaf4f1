/* Attention in the order of docs/exactness.md: blocks of 128 positions, counted from the first, computed apart and
 * joined in their order. A group of threads has one query head, GROUP_X, of row GROUP_Y. */

#define KEYS 128
#define MAX_HEAD 576

KERNEL attend(GLOBAL const float *heads, GLOBAL const uint32_t *places, GLOBAL const uint32_t *pages,
              GLOBAL const float *keys, GLOBAL const float *values, GLOBAL const float *sinks, GLOBAL float *attended,
              uint32_t n_heads, uint32_t n_kv_heads, uint32_t size, uint32_t row_stride, uint32_t page_size,
              uint32_t window, uint32_t has_sinks, float factor, float soft_cap WHERE) {
    SHARED float query[MAX_HEAD], total[MAX_HEAD], score[KEYS], part[PARTS], most[PARTS], best[2];
    const uint32_t head = GROUP_X, row = GROUP_Y, position = places[2 * row];
    const uint32_t first = window && position >= window ? position - window + 1 : 0;
    const uint32_t kv_head = head / (n_heads / n_kv_heads);
    PHASE {
        for (uint32_t c = THREAD; c < size; c += THREADS) {
            query[c] = MUL(heads[(uint64_t)row * row_stride + head * size + c], factor);
            total[c] = 0;
        }
        if (THREAD < PARTS) part[THREAD] = has_sinks && THREAD == 0 ? 1.0f : 0.0f;
        if (THREAD == 0) best[0] = has_sinks ? sinks[head] : -INFINITY;
    }
    for (uint32_t begin = first / KEYS * KEYS; begin <= position; begin += KEYS) {
        const uint32_t low = first > begin ? first - begin : 0;
        const uint32_t high = position - begin < KEYS - 1 ? position - begin + 1 : KEYS;
        const uint32_t page = pages[places[2 * row + 1] + begin / page_size];
        const uint64_t slot = ((uint64_t)(page * n_kv_heads + kv_head) * page_size + begin % page_size) * size;
        PHASE {
            for (uint32_t i = low + THREAD; i < high; i += THREADS) {
                float sum = 0;
                for (uint32_t c = 0; c < size; c++) sum = FMA(keys[slot + (uint64_t)i * size + c], query[c], sum);
                score[i] = soft_cap > 0 ? MUL(soft_cap, hyperbolic_tangent(sum)) : sum;
            }
        }
        PHASE {
            if (THREAD < PARTS) {
                float largest = -INFINITY;
                for (uint32_t i = THREAD; i < high; i += PARTS)
                    if (i >= low) largest = score[i] > largest ? score[i] : largest;
                most[THREAD] = largest;
            }
        }
        PHASE {
            if (THREAD == 0) {
                for (int i = 1; i < PARTS; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
                best[1] = !(most[0] <= best[0]) ? most[0] : best[0];
            }
        }
        PHASE { for (uint32_t i = low + THREAD; i < high; i += THREADS) score[i] = exponential(ADD(score[i], -most[0])); }
        PHASE {
            const float before = exponential(ADD(best[0], -best[1])), now = exponential(ADD(most[0], -best[1]));
            for (uint32_t c = THREAD; c < size + PARTS; c += THREADS) {
                float sum = 0;
                if (c < size) {
                    for (uint32_t i = low; i < high; i++) sum = FMA(score[i], values[slot + (uint64_t)i * size + c], sum);
                    total[c] = FMA(sum, now, MUL(total[c], before));
                } else {
                    for (uint32_t i = c - size; i < high; i += PARTS)
                        if (i >= low) sum = ADD(sum, score[i]);
                    part[c - size] = FMA(sum, now, MUL(part[c - size], before));
                }
            }
        }
        PHASE { if (THREAD == 0) best[0] = best[1]; }
    }
    PHASE {
        if (THREAD == 0) {
            for (int step = PARTS / 2; step; step /= 2)
                for (int i = 0; i < step; i++) part[i] = ADD(part[i], part[i + step]);
            part[0] = DIV(1.0f, part[0]);
        }
    }
    PHASE {
        for (uint32_t c = THREAD; c < size; c += THREADS)
            attended[((uint64_t)row * n_heads + head) * size + c] = MUL(total[c], part[0]);
    }
}

/* Attention in the order of docs/exactness.md: blocks of 128 positions, counted from the first, computed apart and
 * joined in their order. A group of threads has HEADS query heads of one KV head and one row; it joins its blocks itself,
 * or, where a row's blocks are spread over several groups, writes them down for `join_blocks`. Keys have SIZE columns,
 * and values the first OF_VALUE of as many. */

#define KEYS 128
#define COLUMNS 32
#define OF_THREAD (KEYS * COLUMNS / THREADS)
#define PAIR (HEADS < 2 ? 1 : 2)
#define SUMS (OF_VALUE + PARTS)
#define OF_BLOCK (SUMS + 1) /* sums of values, parts of the sum of exponentials, the largest score */
#define FIRST_KEY(position) (window && (position) >= window ? (position) - window + 1 : 0)

/* Has a thread read its part of the keys' columns from `begin_column` on. */
#define BRING(begin_column)                                                                        \
    TIMES (k, OF_THREAD) {                                                                         \
        const uint32_t key_at = (k * THREADS + THREAD) / COLUMNS, c = (begin_column) + THREAD % COLUMNS; \
        if (key_at < high && c < SIZE) MY(coming)[k] = keys[slot + (uint64_t)key_at * SIZE + c];   \
    }

/* A column of a query, which may grow with its position. */
#define GROWN(value) (grows ? MUL(value, AS_FLOAT(places[3 * row + 2])) : (value))

/* Where the query of a row begins, and behind it the gate of what it attends to. */
#define QUERY(head) ((uint64_t)row * row_stride + (head) * (has_gates + 1) * SIZE)
#define OPENED(value, at) (has_gates ? MUL(value, sigmoid(heads[(at) + SIZE])) : (value))

/* Keeps what a block gives: written down, or joined with those before. */
#define KEEP(h, c, sum)                                                                                         \
    if (n_splits > 1) {                                                                                         \
        const uint64_t own = (uint64_t)row * n_heads + head + (h);                                              \
        blocks[(own * n_blocks + begin / KEYS - first / KEYS) * OF_BLOCK + (c)] = sum;                          \
    } else {                                                                                                    \
        const float other = best[h], own = most[h], larger = !(own <= other) ? own : other;                     \
        const float before = exponential(ADD(other, -larger)), now = exponential(ADD(own, -larger));            \
        total[(h) * SUMS + (c)] = FMA(sum, now, MUL(total[(h) * SUMS + (c)], before));                          \
    }

KERNEL attend(GLOBAL const float *heads, GLOBAL const uint32_t *places, GLOBAL const uint32_t *pages,
              GLOBAL const float *keys, GLOBAL const float *values, GLOBAL const float *sinks, GLOBAL float *attended,
              GLOBAL float *blocks, uint32_t n_heads, uint32_t n_kv_heads, uint32_t row_stride, uint32_t page_size,
              uint32_t window, uint32_t has_sinks, uint32_t has_gates, uint32_t n_splits, uint32_t n_blocks,
              uint32_t grows, float factor, float soft_cap WHERE) {
    SHARED float query[HEADS * SIZE], total[HEADS * SUMS], score[HEADS * KEYS], key[KEYS * (COLUMNS + 1)];
    SHARED float parts[HEADS * PARTS], most[HEADS], best[HEADS];
    OWN(float, coming, OF_THREAD);
    const uint32_t head = GROUP_X / n_splits * HEADS, row = GROUP_Y, position = places[3 * row];
    const uint32_t first = FIRST_KEY(position), kv_head = head / (n_heads / n_kv_heads);
    PHASE {
        for (uint32_t i = THREAD; i < HEADS * SIZE; i += THREADS)
            query[i] = MUL(GROWN(heads[QUERY(head + i / SIZE) + i % SIZE]), factor);
        for (uint32_t i = THREAD; i < HEADS * SUMS; i += THREADS) total[i] = has_sinks && i % SUMS == OF_VALUE ? 1.0f : 0.0f;
        if (THREAD < HEADS) best[THREAD] = has_sinks ? sinks[head + THREAD] : -INFINITY;
    }
    for (uint32_t begin = (first / KEYS + GROUP_X % n_splits) * KEYS; begin <= position; begin += n_splits * KEYS) {
        const uint32_t low = first > begin ? first - begin : 0;
        const uint32_t high = position - begin < KEYS - 1 ? position - begin + 1 : KEYS;
        const uint32_t page = pages[places[3 * row + 1] + begin / page_size];
        const uint64_t slot = ((uint64_t)(page * n_kv_heads + kv_head) * page_size + begin % page_size) * SIZE;
        PHASE { BRING(0) }
        for (uint32_t column = 0; column < SIZE; column += COLUMNS) {
            PHASE {
                TIMES (k, OF_THREAD) {
                    const uint32_t at = k * THREADS + THREAD;
                    key[at / COLUMNS * (COLUMNS + 1) + at % COLUMNS] = MY(coming)[k];
                }
            }
            PHASE {
                const uint32_t i = THREAD % KEYS, left = SIZE - column;
                const uint32_t n = SIZE % COLUMNS && left < COLUMNS ? left : COLUMNS;
                BRING(column + COLUMNS)
                for (uint32_t h = THREAD / KEYS; h < HEADS && i >= low && i < high; h += THREADS / KEYS) {
                    float sum = column ? score[h * KEYS + i] : 0.0f;
                    AHEAD for (uint32_t c = 0; c < n; c++)
                        sum = FMA(key[i * (COLUMNS + 1) + c], query[h * SIZE + column + c], sum);
                    score[h * KEYS + i] =
                        column + COLUMNS >= SIZE && soft_cap > 0 ? MUL(soft_cap, hyperbolic_tangent(sum)) : sum;
                }
            }
        }
        PHASE {
            if (THREAD < HEADS * PARTS) {
                float largest = -INFINITY;
                for (uint32_t i = THREAD % PARTS; i < high; i += PARTS) {
                    const float own = i < low ? -INFINITY : score[THREAD / PARTS * KEYS + i];
                    largest = own > largest ? own : largest;
                }
                parts[THREAD] = largest;
            }
        }
        PHASE {
            if (THREAD < HEADS) {
                float largest = parts[THREAD * PARTS];
                for (int i = 1; i < PARTS; i++)
                    largest = parts[THREAD * PARTS + i] > largest ? parts[THREAD * PARTS + i] : largest;
                most[THREAD] = largest;
            }
        }
        PHASE {
            for (uint32_t at = THREAD; at < HEADS * KEYS; at += THREADS)
                if (at % KEYS >= low && at % KEYS < high) score[at] = exponential(ADD(score[at], -most[at / KEYS]));
        }
        PHASE {
            for (uint32_t at = THREAD; at < HEADS / PAIR * OF_VALUE; at += THREADS) {
                const uint32_t h = at / OF_VALUE * PAIR, c = at % OF_VALUE;
                float sum[PAIR];
                TIMES (p, PAIR) sum[p] = 0;
                AHEAD for (uint32_t i = low; i < high; i++) {
                    const float value = values[slot + (uint64_t)i * SIZE + c];
                    TIMES (p, PAIR) sum[p] = FMA(score[(h + p) * KEYS + i], value, sum[p]);
                }
                TIMES (p, PAIR) KEEP(h + p, c, sum[p])
            }
            if (THREAD < HEADS * PARTS) {
                float sum = 0;
                for (uint32_t i = THREAD % PARTS; i < high; i += PARTS)
                    sum = i < low ? sum : ADD(sum, score[THREAD / PARTS * KEYS + i]);
                KEEP(THREAD / PARTS, OF_VALUE + THREAD % PARTS, sum)
            }
        }
        PHASE {
            if (THREAD < HEADS && n_splits > 1) {
                const uint64_t own = (uint64_t)row * n_heads + head + THREAD;
                blocks[(own * n_blocks + begin / KEYS - first / KEYS) * OF_BLOCK + SUMS] = most[THREAD];
            } else if (THREAD < HEADS) {
                best[THREAD] = !(most[THREAD] <= best[THREAD]) ? most[THREAD] : best[THREAD];
            }
        }
    }
    if (n_splits == 1) {
        PHASE {
            if (THREAD < HEADS) {
                const uint32_t own = THREAD * SUMS + OF_VALUE;
                ADD_UP(total + own)
                total[own] = DIV(1.0f, total[own]);
            }
        }
        PHASE {
            for (uint32_t i = THREAD; i < HEADS * OF_VALUE; i += THREADS) {
                const uint32_t h = i / OF_VALUE, c = i % OF_VALUE;
                attended[((uint64_t)row * n_heads + head) * OF_VALUE + i] =
                    OPENED(MUL(total[h * SUMS + c], total[h * SUMS + OF_VALUE]), QUERY(head + h) + c);
            }
        }
    }
}

/* Joins the blocks of head GROUP_X of row GROUP_Y. */
KERNEL join_blocks(GLOBAL const float *heads, GLOBAL const uint32_t *places, GLOBAL const float *sinks,
                   GLOBAL const float *blocks, GLOBAL float *attended, uint32_t n_heads, uint32_t row_stride,
                   uint32_t window, uint32_t has_sinks, uint32_t has_gates, uint32_t n_blocks WHERE) {
    SHARED float parts[PARTS];
    OWN(float, total, SUMS / THREADS + 1);
    const uint32_t row = GROUP_Y, position = places[3 * row], count = position / KEYS - FIRST_KEY(position) / KEYS + 1;
    const uint64_t own = (uint64_t)GROUP_Y * n_heads + GROUP_X;
    PHASE {
        GLOBAL const float *block = blocks + own * n_blocks * OF_BLOCK;
        float best = has_sinks ? sinks[GROUP_X] : -INFINITY;
        TIMES (k, SUMS / THREADS + 1) MY(total)[k] = has_sinks && THREAD + k * THREADS == OF_VALUE ? 1.0f : 0.0f;
        for (uint32_t b = 0; b < count; b++, block += OF_BLOCK) {
            const float most = block[SUMS], larger = !(most <= best) ? most : best;
            const float before = exponential(ADD(best, -larger)), now = exponential(ADD(most, -larger));
            TIMES (k, SUMS / THREADS + 1) {
                const uint32_t c = THREAD + k * THREADS;
                if (c < SUMS) MY(total)[k] = FMA(block[c], now, MUL(MY(total)[k], before));
            }
            best = larger;
        }
        TIMES (k, SUMS / THREADS + 1) {
            const uint32_t c = THREAD + k * THREADS;
            if (c >= OF_VALUE && c < SUMS) parts[c - OF_VALUE] = MY(total)[k];
        }
    }
    PHASE {
        if (THREAD == 0) {
            ADD_UP(parts)
            parts[0] = DIV(1.0f, parts[0]);
        }
    }
    PHASE {
        TIMES (k, SUMS / THREADS + 1) {
            const uint32_t c = THREAD + k * THREADS;
            if (c < OF_VALUE) attended[own * OF_VALUE + c] = OPENED(MUL(MY(total)[k], parts[0]), QUERY(GROUP_X) + c);
        }
    }
}

/* Attention in the order of docs/exactness.md: blocks of 128 positions, counted from the first, computed apart and
 * joined in their order. A group of threads has HEADS query heads of one KV head for TOGETHER rows, which read keys and
 * values together where they are of one slot; it joins its blocks itself, or, where a row's blocks are spread over several
 * groups, writes them down for `join_blocks`. Keys have SIZE columns, and values the first OF_VALUE of STRIDE. With CHOSEN
 * a row attends to positions that were chosen, as if they stood one behind the other (choice.h); if that is ENTRIES, to its
 * window's rows and then to entries of `rate` positions each, all or those chosen, which stand for their values (entries.h). */

#define KEYS 128
#define COLUMNS 32
#define OF_THREAD (KEYS * COLUMNS / THREADS)
#define SUMS (OF_VALUE + PARTS)
#define OF_BLOCK (SUMS + 1) /* sums of values, parts of the sum of exponentials, the largest score */
#define CHUNKS 0x80000000u /* as in csrc/sublayers.h */
#define ENTRIES 2
#define FIRST_KEY(position)                                              \
    (CHOSEN == ENTRIES ? 0 : window > CHUNKS ? (position) & (CHUNKS - window) /* chunks of 2^n */ \
     : window && (position) >= window ? (position) - window + 1 : 0)

/* Where the key of the block's position i begins, and the value, and in what: rows of a window are behind the queries of this
 * step, or in the state before it, which is in the place of `values`. */
#define IN_STATE ((uint64_t)1 << 62)
#define IN_STEP ((uint64_t)1 << 63)
#define AT(i, columns, begins)                              \
    (CHOSEN == ENTRIES ? row_of[i] & ~(IN_STATE | IN_STEP)  \
     : CHOSEN ? row_of[i] * (columns) : (begins) + (uint64_t)(i) * (columns))
#define KEY_AT(i) AT(i, SIZE, slot)
#define VALUE_AT(i) AT(i, STRIDE, value_slot)
#define FROM(i, own) (CHOSEN != ENTRIES ? (own) : row_of[i] & IN_STEP ? heads : row_of[i] & IN_STATE ? values : keys)

/* How many rows of its window and entries a row at a position sees, and the last place that it attends to. */
#define OF_WINDOW(position) ((position) + 1 < window ? (position) + 1 : window)
#define WHOLE(position) (rate ? ((position) + 1) / rate : 0)
#define CHOOSES(position) (n_chosen && WHOLE(position) > n_chosen)
#define LAST_OF(position) \
    (CHOSEN == ENTRIES ? OF_WINDOW(position) + (CHOOSES(position) ? n_chosen : WHOLE(position)) - 1 : (position))

/* Queries are numbered by rows, then heads; those of a key or of a column lie together, four by four. */
#define QUERIES (TOGETHER * HEADS)
#define QUADS ((QUERIES + 3) / 4)
#define EACH (QUERIES * KEYS < THREADS ? 1 : QUERIES * KEYS / THREADS) /* queries of a thread, whose scores for a key it has */
#define SPREAD (QUERIES * OF_VALUE / THREADS) /* of a column of values */
#define MAY_BE(n) (SPREAD >= (n) && QUERIES % (n) == 0)
#define PAIR (MAY_BE(8) ? 8 : MAY_BE(4) ? 4 : MAY_BE(2) ? 2 : 1) /* queries of a thread, whose values it adds up */
#define OF(four, q) four[(q) / 4].of[(q) % 4]
#define SCORE(i, q) AS_FLOAT(OF((score + (i) * QUADS), q))
/* x[n] = the numbers from `q` on, read by fours where there are so many. */
#define TAKE(x, n, four, q)                                                                       \
    float x[n];                                                                                   \
    TIMES (k, (n) % 4 ? 0 : (n) / 4) {                                                            \
        const FOUR some = (four)[(q) / 4 + k];                                                    \
        TIMES (j, 4) x[k * 4 + j] = AS_FLOAT(some.of[j]);                                         \
    }                                                                                             \
    TIMES (k, (n) % 4 ? (n) : 0) x[k] = AS_FLOAT(OF((four), (q) + k));

/* The keys of a block that a query sees: none, where LOW is not below HIGH. */
#define POSITION(q) (position + (q) / HEADS)
#define LOW(q) (FIRST_KEY(POSITION(q)) > begin ? FIRST_KEY(POSITION(q)) - begin : 0)
#define HIGH(q) (POSITION(q) < begin ? 0 : POSITION(q) - begin < KEYS - 1 ? POSITION(q) - begin + 1 : KEYS)

/* Has a thread read its part of the keys' columns from `begin_column` on. */
#define BRING(begin_column)                                                                        \
    TIMES (k, OF_THREAD) {                                                                         \
        const uint32_t key_at = (k * THREADS + THREAD) / COLUMNS, c = (begin_column) + THREAD % COLUMNS; \
        if (key_at < high && c < SIZE) MY(coming)[k] = FROM(key_at, keys)[KEY_AT(key_at) + c];                  \
    }

#if TOGETHER == 1 && !CHOSEN
#define VALUES_AHEAD AHEAD
#else
#define VALUES_AHEAD AHEAD_8 /* of more queries or places a thread has no more registers */
#endif
/* Adds up the values at `i` for the queries of a thread from `q` on that see it. */
#define ADD_VALUES(sees)                                                                           \
    {                                                                                              \
        const float value = FROM(i, values)[VALUE_AT(i) + c];                                      \
        TAKE(weight, PAIR, score + i * QUADS, q)                                                   \
        TIMES (p, PAIR) if (sees) sum[p] = FMA(weight[p], value, sum[p]);                          \
    }

/* Where the query of a row begins, and behind it the gate of what it attends to. */
#define QUERY(row, head) ((uint64_t)(row) * row_stride + (head) * (has_gates + 1) * SIZE)
#define OPENED(value, at) (has_gates ? MUL(value, sigmoid(heads[(at) + SIZE])) : (value))

/* Keeps what a block gives: written down, or joined with those before. */
#define KEEP(q, c, sum)                                                                                         \
    if (LOW(q) >= HIGH(q)) {                                                                                    \
    } else if (n_splits > 1) {                                                                                  \
        blocks[BLOCK_OF(q) + (c)] = sum;                                                                        \
    } else {                                                                                                    \
        const float other = best[q], own = most[q], larger = !(own <= other) ? own : other;                     \
        const float before = exponential(ADD(other, -larger)), now = exponential(ADD(own, -larger));            \
        total[(q) * SUMS + (c)] = FMA(sum, now, MUL(total[(q) * SUMS + (c)], before));                          \
    }
#define OWN_HEAD(q) ((uint64_t)(row + (q) / HEADS) * n_heads + head + (q) % HEADS)
#define BLOCK_OF(q) ((OWN_HEAD(q) * n_blocks + begin / KEYS - FIRST_KEY(POSITION(q)) / KEYS) * OF_BLOCK)

KERNEL attend(GLOBAL const float *heads, GLOBAL const uint32_t *places, GLOBAL const uint32_t *pages,
              GLOBAL const float *keys, GLOBAL const float *values, GLOBAL const float *sinks, GLOBAL float *attended,
              GLOBAL float *blocks, GLOBAL const uint32_t *chosen, GLOBAL const uint32_t *runs, uint32_t n_rows, uint32_t n_heads, uint32_t n_kv_heads,
              uint32_t row_stride, uint32_t page_size, uint32_t window, uint32_t has_sinks, uint32_t has_gates, uint32_t n_splits,
              uint32_t n_blocks, uint32_t grows, uint32_t n_chosen, uint32_t rate, uint32_t stride, uint32_t cell,
              float factor, float soft_cap WHERE) {
    AWAIT
    SHARED FOUR query[SIZE * QUADS], score[KEYS * QUADS];
    SHARED float total[QUERIES * SUMS], key[KEYS * (COLUMNS + 1)], parts[QUERIES * PARTS], most[QUERIES], best[QUERIES];
    SHARED uint64_t row_of[CHOSEN ? KEYS : 1];
    OWN(float, coming, OF_THREAD);
    OWN(float, product, EACH);
    const uint32_t head = GROUP_X / n_splits * HEADS, kv_head = head / (n_heads / n_kv_heads);
    const uint32_t end = (GROUP_Y + 1) * TOGETHER < n_rows ? (GROUP_Y + 1) * TOGETHER : n_rows;
    uint32_t n = 1; /* rows of one slot, at positions one behind the other */
    for (uint32_t row = GROUP_Y * TOGETHER; row < end; row += n) {
        for (n = 1; row + n < end && places[3 * (row + n) + 1] == places[3 * row + 1];) n++;
        const uint32_t n_queries = n * HEADS, position = LAST_OF(places[3 * row]), last = n_queries - 1;
        PHASE {
            for (uint32_t i = THREAD; i < n_queries * SIZE; i += THREADS) {
                const uint32_t q = i / SIZE, its = row + q / HEADS;
                const float value = heads[QUERY(its, head + q % HEADS) + i % SIZE];
                const float grown = grows ? MUL(value, AS_FLOAT(places[3 * its + 2])) : value;
                OF((query + i % SIZE * QUADS), q) = BITS_OF(MUL(grown, factor));
            }
            for (uint32_t i = THREAD; i < n_queries * SUMS; i += THREADS)
                total[i] = has_sinks && i % SUMS == OF_VALUE ? 1.0f : 0.0f;
            if (THREAD < n_queries) best[THREAD] = has_sinks ? sinks[head + THREAD % HEADS] : -INFINITY;
        }
        for (uint32_t begin = (FIRST_KEY(position) / KEYS + GROUP_X % n_splits) * KEYS; begin < position + n;
             begin += n_splits * KEYS) {
            const uint32_t low = LOW(0), high = HIGH(last), first_page = places[3 * row + 1];
            const uint32_t page = CHOSEN ? 0 : pages[first_page + begin / page_size];
            const uint64_t place = (uint64_t)(page * n_kv_heads + kv_head) * page_size + begin % page_size;
            const uint64_t slot = place * SIZE, value_slot = place * STRIDE;
            if (CHOSEN == ENTRIES) {
                PHASE {
                    const uint32_t its = places[3 * row], n_window = OF_WINDOW(its), i = begin + THREAD;
                    const uint32_t back = n_window - 1 - i, before = row - FIRST_OF(row);
                    if (THREAD < high && i < n_window) {
                        row_of[THREAD] = back > before ? IN_STATE | (CELL_BEFORE(row) * (uint64_t)cell + (window + before - back) * SIZE)
                                                       : IN_STEP | ((uint64_t)(row - back) * row_stride + n_heads * SIZE);
                    } else if (THREAD < high) {
                        const uint32_t e = CHOOSES(its) ? chosen[(uint64_t)row * n_chosen + i - n_window] : i - n_window;
                        const uint64_t its_page = pages[first_page + e * rate / page_size];
                        row_of[THREAD] = (its_page * (page_size / rate) + e % (page_size / rate)) * stride;
                    }
                }
            } else if (CHOSEN) {
                PHASE {
                    if (THREAD < high) {
                        const uint32_t at = chosen[(uint64_t)row * n_chosen + begin + THREAD];
                        const uint32_t its_page = pages[first_page + at / page_size];
                        row_of[THREAD] = (its_page * n_kv_heads + kv_head) * page_size + at % page_size;
                    }
                }
            }
            PHASE {
                BRING(0)
                TIMES (k, EACH) MY(product)[k] = 0;
            }
            for (uint32_t column = 0; column < SIZE; column += COLUMNS) {
                PHASE {
                    TIMES (k, OF_THREAD) {
                        const uint32_t at = k * THREADS + THREAD;
                        key[at / COLUMNS * (COLUMNS + 1) + at % COLUMNS] = MY(coming)[k];
                    }
                }
                PHASE {
                    const uint32_t i = THREAD % KEYS, q = THREAD / KEYS * EACH, left = SIZE - column;
                    BRING(column + COLUMNS)
                    if (i >= low && i < high && q < n_queries)
                        AHEAD for (uint32_t c = 0; c < (SIZE % COLUMNS && left < COLUMNS ? left : COLUMNS); c++) {
                            const float its = key[i * (COLUMNS + 1) + c];
                            TAKE(other, EACH, query + (column + c) * QUADS, q)
                            TIMES (k, EACH) MY(product)[k] = FMA(its, other[k], MY(product)[k]);
                        }
                    if (column + COLUMNS >= SIZE && q < QUERIES)
                        TIMES (k, EACH) {
                            const float sum = MY(product)[k];
                            OF((score + i * QUADS), q + k) =
                                BITS_OF(soft_cap > 0 ? MUL(soft_cap, hyperbolic_tangent(sum)) : sum);
                        }
                }
            }
            PHASE {
                const uint32_t q = THREAD / PARTS;
                if (q < n_queries) {
                    float largest = -INFINITY;
                    for (uint32_t i = THREAD % PARTS; i < HIGH(q); i += PARTS) {
                        const float own = i < LOW(q) ? -INFINITY : SCORE(i, q);
                        largest = own > largest ? own : largest;
                    }
                    parts[THREAD] = largest;
                }
            }
            PHASE {
                if (THREAD < n_queries) {
                    float largest = parts[THREAD * PARTS];
                    for (int i = 1; i < PARTS; i++)
                        largest = parts[THREAD * PARTS + i] > largest ? parts[THREAD * PARTS + i] : largest;
                    most[THREAD] = largest;
                }
            }
            PHASE {
                for (uint32_t at = THREAD; at < n_queries * KEYS; at += THREADS) {
                    const uint32_t i = at / n_queries, q = at % n_queries;
                    if (i >= LOW(q) && i < HIGH(q))
                        OF((score + i * QUADS), q) = BITS_OF(exponential(ADD(SCORE(i, q), -most[q])));
                }
            }
            PHASE {
                for (uint32_t at = THREAD; at < QUERIES / PAIR * OF_VALUE; at += THREADS) {
                    const uint32_t q = at / OF_VALUE * PAIR, c = at % OF_VALUE;
                    const uint32_t from = LOW(last) < high ? LOW(last) : high, to = HIGH(0) > from ? HIGH(0) : from;
                    float sum[PAIR];
                    uint32_t i = low;
                    TIMES (p, PAIR) sum[p] = 0;
                    if (q >= n_queries) continue;
                    for (; i < from; i++) ADD_VALUES(q + p < n_queries && i >= LOW(q + p) && i < HIGH(q + p))
                    VALUES_AHEAD for (; i < to; i++) ADD_VALUES(1) /* which all queries see */
                    for (; i < high; i++) ADD_VALUES(q + p < n_queries && i >= LOW(q + p) && i < HIGH(q + p))
                    TIMES (p, PAIR) if (q + p < n_queries) KEEP(q + p, c, sum[p])
                }
                const uint32_t q = THREAD / PARTS;
                if (q < n_queries) {
                    float sum = 0;
                    for (uint32_t i = THREAD % PARTS; i < HIGH(q); i += PARTS) sum = i < LOW(q) ? sum : ADD(sum, SCORE(i, q));
                    KEEP(q, OF_VALUE + THREAD % PARTS, sum)
                }
            }
            PHASE {
                if (THREAD < n_queries && LOW(THREAD) < HIGH(THREAD)) {
                    if (n_splits > 1) blocks[BLOCK_OF(THREAD) + SUMS] = most[THREAD];
                    else best[THREAD] = !(most[THREAD] <= best[THREAD]) ? most[THREAD] : best[THREAD];
                }
            }
        }
        if (n_splits == 1) {
            PHASE {
                if (THREAD < n_queries) {
                    const uint32_t own = THREAD * SUMS + OF_VALUE;
                    ADD_UP(total + own)
                    total[own] = DIV(1.0f, total[own]);
                }
            }
            PHASE {
                for (uint32_t i = THREAD; i < n_queries * OF_VALUE; i += THREADS) {
                    const uint32_t q = i / OF_VALUE, c = i % OF_VALUE;
                    const float sum = MUL(total[q * SUMS + c], total[q * SUMS + OF_VALUE]);
                    attended[OWN_HEAD(q) * OF_VALUE + c] = OPENED(sum, QUERY(row + q / HEADS, head + q % HEADS) + c);
                }
            }
        }
    }
}

/* Joins the blocks of head GROUP_X of row GROUP_Y. */
KERNEL join_blocks(GLOBAL const float *heads, GLOBAL const uint32_t *places, GLOBAL const float *sinks,
                   GLOBAL const float *blocks, GLOBAL float *attended, uint32_t n_heads, uint32_t row_stride,
                   uint32_t window, uint32_t has_sinks, uint32_t has_gates, uint32_t n_blocks, uint32_t n_chosen,
                   uint32_t rate WHERE) {
    AWAIT
    SHARED float parts[PARTS];
    OWN(float, total, SUMS / THREADS + 1);
    const uint32_t row = GROUP_Y, position = LAST_OF(places[3 * row]), count = position / KEYS - FIRST_KEY(position) / KEYS + 1;
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
            if (c < OF_VALUE) attended[own * OF_VALUE + c] = OPENED(MUL(MY(total)[k], parts[0]), QUERY(row, GROUP_X) + c);
        }
    }
}

/* Which positions rows attend to, where an index chooses them: as csrc/attention_body.h scores positions, and
 * csrc/sublayers.c takes those that score highest, of equal ones the first. */

#define COLUMNS 16 /* of keys that a group has in its memory at a time */
#define HEADS 32   /* of queries that a thread has scores of */
#define DIGITS 15  /* that are no 0 */
#define UNUSED 0xffffffffu
/* Where the page of position `at` of a row's slot has it. */
#define ROW_OF(row, at) (pages[places[3 * (row) + 1] + (at) / page_size] * page_size + (at) % page_size)

/* Head GROUP_Y of the index of row GROUP_X. The first is the key, which is normed, less its mean, by `norm`, weights and
 * biases, and goes to its slot, [stride], with the columns of `beside` behind it; queries are rotated where they are. What
 * is rotated of a head begins at column `first`. */
KERNEL index_heads(GLOBAL float *queries, GLOBAL const float *keys, GLOBAL const float *beside, GLOBAL const float *norm,
                   GLOBAL const float *cosines, GLOBAL const float *sines, GLOBAL const uint32_t *places,
                   GLOBAL const uint32_t *pages, GLOBAL float *stored, uint32_t n_heads, uint32_t first,
                   uint32_t n_rotated, uint32_t stride, uint32_t page_size, uint32_t has_pairs, float eps WHERE) {
    AWAIT
    SHARED float line[SIZE], parts[PARTS], mean[1], scale[1];
    const uint32_t row = GROUP_X, is_key = GROUP_Y == 0, half_size = n_rotated / 2;
    const uint64_t own = ((uint64_t)row * n_heads + GROUP_Y - 1) * SIZE;
    GLOBAL float *to = is_key ? stored + (uint64_t)ROW_OF(row, places[3 * row]) * stride : queries + own;
    PHASE {
        for (uint32_t i = THREAD; i < SIZE; i += THREADS) line[i] = is_key ? keys[(uint64_t)row * SIZE + i] : queries[own + i];
    }
    if (is_key) {
        for (uint32_t squares = 0; squares < 2; squares++) {
            PHASE {
                float sum = 0;
                for (uint32_t i = THREAD; i < SIZE && THREAD < PARTS; i += PARTS) {
                    const float less = squares ? ADD(line[i], -mean[0]) : 1.0f;
                    sum = squares ? FMA(less, less, sum) : ADD(sum, line[i]);
                }
                if (THREAD < PARTS) parts[THREAD] = sum;
            }
            PHASE {
                if (THREAD == 0) {
                    ADD_UP(parts)
                    const float part = DIV(parts[0], (float)SIZE);
                    if (squares) scale[0] = DIV(1.0f, SQRT(ADD(part, eps)));
                    else mean[0] = part;
                }
            }
        }
        PHASE {
            for (uint32_t i = THREAD; i < SIZE; i += THREADS)
                line[i] = FMA(MUL(ADD(line[i], -mean[0]), scale[0]), norm[i], norm[SIZE + i]);
            for (uint32_t i = SIZE + THREAD; i < stride; i += THREADS)
                to[i] = beside[(uint64_t)row * (stride - SIZE) + i - SIZE];
        }
    }
    PHASE {
        for (uint32_t i = THREAD; i < SIZE; i += THREADS) {
            const uint32_t k = i - first; /* beyond n_rotated before it, too */
            if (k < n_rotated) {
                const uint32_t j = (k + half_size) % n_rotated;
                const float one = line[first + (has_pairs ? PAIRED(k) : k)];
                const float other = line[first + (has_pairs ? PAIRED(j) : j)];
                const uint64_t at = (uint64_t)row * n_rotated + k;
                to[i] = FMA(other, sines[at], MUL(one, cosines[at]));
            } else {
                to[i] = line[i];
            }
        }
    }
}

/* Makes the entry of the `n_pooled` positions up to that of row GROUP_X, if they are whole: of their keys, column by column,
 * by the softmax of their scores, [SIZE] each behind a key, and what `within` adds to them by place. */
KERNEL pool_entries(GLOBAL const uint32_t *places, GLOBAL const uint32_t *pages, GLOBAL const float *stored,
                    GLOBAL const float *within, GLOBAL float *entries, uint32_t page_size, uint32_t n_pooled WHERE) {
    AWAIT
    const uint32_t row = GROUP_X, end = places[3 * row] + 1, first_position = end - n_pooled;
    if (end % n_pooled) return;
    PHASE {
        const uint64_t first = ROW_OF(row, first_position), entry = first / n_pooled;
        for (uint32_t c = THREAD; c < SIZE; c += THREADS) {
            GLOBAL const float *keys = stored + first * 2 * SIZE + c, *scores = keys + SIZE;
            SUM_BY_SOFTMAX(sum, n_pooled, ADD(scores[i * 2 * SIZE], within[i * SIZE + c]), keys[i * 2 * SIZE])
            entries[entry * SIZE + c] = sum;
        }
    }
}

/* Head `first` + GROUP_Y of the index of row GROUP_X over blocks of `n_pooled` positions. Of queries, [n_heads, SIZE], each
 * is normed by `norm`, and gets the weight 1. Behind them stands a key, which goes behind the values of its position,
 * [n_kv_heads, stride], from column `begin` of each on, with the `digits` of where the row is on each axis. The one behind
 * that is the block up to this row, if it is whole: the mean of its keys, normed by the second `norm`, and rotated by where
 * it begins. Of each place `tables` has cosines and sines, and `axes` by which axis each column is rotated. */
#define BESIDE(at, j) values[((uint64_t)(page * n_kv_heads + (j) / beside) * page_size + (at)) * stride + begin + (j) % beside]
KERNEL index_blocks(GLOBAL const float *projected, GLOBAL const float *norm, GLOBAL const float *tables,
                    GLOBAL const uint32_t *axes, GLOBAL const float *digits, GLOBAL const uint32_t *places,
                    GLOBAL const uint32_t *pages, GLOBAL float *values, GLOBAL float *queries, GLOBAL float *weights,
                    GLOBAL float *entries, uint32_t first, uint32_t n_heads, uint32_t n_rotated, uint32_t n_digits,
                    uint32_t n_kv_heads, uint32_t begin, uint32_t stride, uint32_t page_size, uint32_t n_pooled,
                    float eps WHERE) {
    AWAIT
    SHARED float line[SIZE], parts[PARTS], scale[1];
    const uint32_t row = GROUP_X, head = first + GROUP_Y, half_size = n_rotated / 2, beside = stride - begin;
    const uint32_t page = pages[places[3 * row + 1] + places[3 * row] / page_size], own = places[3 * row] % page_size;
    const uint32_t is_block = head > n_heads, from = own + 1 - n_pooled;
    GLOBAL const float *given = projected + ((uint64_t)row * (n_heads + 1) + head) * SIZE;
    if (head == n_heads) {
        PHASE {
            for (uint32_t i = THREAD; i < n_kv_heads * beside; i += THREADS)
                BESIDE(own, i) = i < SIZE ? given[i] : i < SIZE + n_digits ? digits[row * n_digits + i - SIZE] : 0.0f;
        }
        return;
    }
    if (is_block && (own + 1) % n_pooled) return;
    PHASE {
        for (uint32_t i = THREAD; i < SIZE; i += THREADS) {
            float sum = is_block ? BESIDE(from, i) : given[i];
            for (uint32_t at = from + 1; is_block && at <= own; at++) sum = ADD(sum, BESIDE(at, i));
            line[i] = is_block ? DIV(sum, (float)n_pooled) : sum;
        }
    }
    PHASE {
        float sum = 0;
        for (uint32_t i = THREAD; i < SIZE && THREAD < PARTS; i += PARTS) sum = FMA(line[i], line[i], sum);
        if (THREAD < PARTS) parts[THREAD] = sum;
    }
    PHASE {
        if (THREAD == 0) {
            ADD_UP(parts)
            scale[0] = DIV(1.0f, SQRT(ADD(DIV(parts[0], (float)SIZE), eps)));
            if (!is_block) weights[row * n_heads + head] = 1.0f;
        }
    }
    PHASE {
        for (uint32_t i = THREAD; i < SIZE; i += THREADS) line[i] = MUL(MUL(line[i], scale[0]), norm[is_block * SIZE + i]);
    }
    PHASE {
        GLOBAL float *to = is_block ? entries + ((uint64_t)page * page_size + own) / n_pooled * SIZE
                                    : queries + ((uint64_t)row * n_heads + head) * SIZE;
        for (uint32_t i = THREAD; i < SIZE; i += THREADS) {
            float turned = line[i];
            if (i < n_rotated) {
                uint32_t place = 0;
                TIMES (n, 3) {
                    const uint32_t digit = 3 * axes[i] + n;
                    place |= (uint32_t)(is_block ? BESIDE(from, SIZE + digit) : digits[row * n_digits + digit]) << 8 * n;
                }
                const uint64_t at = (uint64_t)place * 2 * n_rotated + i;
                const float other = line[i < half_size ? i + half_size : i - half_size];
                turned = FMA(other, tables[at + n_rotated], MUL(line[i], tables[at]));
            }
            to[i] = turned;
        }
    }
}

/* Scores the entries that row `first_row` + GROUP_Y sees, each of `n_pooled` positions and `page_size` a page, from
 * THREADS * GROUP_X on: the sum over heads of a weight times what is above 0 of a query times the entry's key, which begins
 * at column `begin_key` of `stride`. A thread has an entry. Rows that see no more than `n_chosen` are left out. */
KERNEL score_entries(GLOBAL const float *queries, GLOBAL const float *weights, GLOBAL const uint32_t *places,
                     GLOBAL const uint32_t *pages, GLOBAL const float *stored, GLOBAL float *scores, uint32_t first_row,
                     uint32_t n_heads, uint32_t page_size, uint32_t n_pooled, uint32_t n_chosen, uint32_t n_columns,
                     uint32_t stride, uint32_t begin_key, float factor WHERE) {
    AWAIT
    SHARED float key[THREADS * (COLUMNS + 1)];
    SHARED uint32_t row_of[THREADS];
    SHARED FOUR query[COLUMNS * HEADS / 4];
    OWN(float, product, HEADS);
    OWN(float, score, 1);
    const uint32_t row = first_row + GROUP_Y, seen = (places[3 * row] + 1) / n_pooled, begin = GROUP_X * THREADS;
    if (seen <= n_chosen || begin >= seen) return;
    PHASE {
        if (begin + THREAD < seen) row_of[THREAD] = ROW_OF(row, begin + THREAD);
        MY(score)[0] = 0;
    }
    for (uint32_t head = 0; head < n_heads; head += HEADS) {
        PHASE { TIMES (h, HEADS) MY(product)[h] = 0; }
        for (uint32_t column = 0; column < SIZE; column += COLUMNS) {
            PHASE {
                TIMES (k, COLUMNS) {
                    const uint32_t i = (k * THREADS + THREAD) / COLUMNS, c = THREAD % COLUMNS;
                    if (begin + i < seen && column + c < SIZE)
                        key[i * (COLUMNS + 1) + c] = stored[(uint64_t)row_of[i] * stride + begin_key + column + c];
                }
                for (uint32_t i = THREAD; i < COLUMNS * HEADS; i += THREADS) {
                    const uint32_t c = i / HEADS, h = i % HEADS;
                    const uint64_t at = ((uint64_t)row * n_heads + head + h) * SIZE + column + c;
                    query[i / 4].of[i % 4] = head + h < n_heads && column + c < SIZE ? BITS_OF(queries[at]) : 0;
                }
            }
            PHASE {
                for (uint32_t c = 0; c < COLUMNS && column + c < SIZE; c++) {
                    const float own = key[THREAD * (COLUMNS + 1) + c];
                    TIMES (k, HEADS / 4) {
                        const FOUR some = query[c * (HEADS / 4) + k];
                        TIMES (j, 4) MY(product)[k * 4 + j] = FMA(own, AS_FLOAT(some.of[j]), MY(product)[k * 4 + j]);
                    }
                }
            }
        }
        PHASE {
            TIMES (h, HEADS)
                if (head + h < n_heads) {
                    const float weight = MUL(weights[(uint64_t)row * n_heads + head + h], factor);
                    MY(score)[0] = FMA(weight, more_of(MY(product)[h], 0.0f), MY(score)[0]);
                }
        }
    }
    PHASE {
        if (begin + THREAD < seen) scores[(uint64_t)GROUP_Y * n_columns + begin + THREAD] = MY(score)[0];
    }
}

/* A number that is larger where a score is: of 0 there is one. */
INLINE uint32_t ordered(float score) {
    const uint32_t bits = BITS_OF(ADD(score, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Writes down the positions of the `n_chosen` entries that score highest for row `first_row` + GROUP_X, of equal ones the
 * first, in ascending order, and those behind the last whole entry; UNUSED behind them. What `places` says of a row `looked`
 * says of these. The smallest score that is taken is found digit by digit. Of entries of `n_positions` each `n_pooled` are
 * written down: all, or one alone, the entry's own number. */
KERNEL choose_entries(GLOBAL const float *scores, GLOBAL const uint32_t *places, GLOBAL uint32_t *chosen,
                      GLOBAL uint32_t *looked, uint32_t first_row, uint32_t n_positions, uint32_t n_pooled,
                      uint32_t n_chosen, uint32_t n_columns WHERE) {
    AWAIT
    SHARED uint32_t counts[DIGITS * THREADS], total[DIGITS], least[1];
    OWN(uint32_t, n_more, DIGITS);
    const uint32_t row = first_row + GROUP_X, seen = (places[3 * row] + 1) / n_positions;
    const uint32_t end = n_pooled == n_positions ? places[3 * row] + 1 : seen;
    const uint32_t n = seen > n_chosen ? seen : 0, each = (n + THREADS - 1) / THREADS;
    const uint32_t width = (n_chosen + 1) * n_pooled - 1, left_out = n ? (seen - n_chosen) * n_pooled : 0;
    GLOBAL const float *own = scores + (uint64_t)GROUP_X * n_columns;
    GLOBAL uint32_t *taken = chosen + (uint64_t)row * width;
    PHASE {
        if (THREAD == 0) least[0] = 0, looked[3 * row] = end - left_out - 1;
        if (THREAD == 1) looked[3 * row + 1] = places[3 * row + 1], looked[3 * row + 2] = places[3 * row + 2];
        for (uint32_t i = (n ? n_chosen * n_pooled : 0) + THREAD; i < width; i += THREADS)
            taken[i] = i + left_out < end ? i + left_out : UNUSED;
    }
    for (uint32_t shift = 32; n && shift;) {
        shift -= 4;
        PHASE {
            TIMES (d, DIGITS) MY(n_more)[d] = 0;
            for (uint32_t i = THREAD; i < n; i += THREADS) {
                const uint32_t number = ordered(own[i]);
                TIMES (d, DIGITS) MY(n_more)[d] += number >= (least[0] | (d + 1) << shift);
            }
            TIMES (d, DIGITS) counts[d * THREADS + THREAD] = MY(n_more)[d];
        }
        PHASE {
            if (THREAD < DIGITS) {
                uint32_t sum = 0;
                AHEAD for (uint32_t i = 0; i < THREADS; i++) sum += counts[THREAD * THREADS + i];
                total[THREAD] = sum;
            }
        }
        PHASE {
            if (THREAD == 0) {
                uint32_t digit = 0;
                TIMES (d, DIGITS) digit += total[d] >= n_chosen;
                least[0] |= digit << shift;
            }
        }
    }
    PHASE { /* a thread has scores side by side: how many are more, and as many */
        counts[THREAD] = counts[THREADS + THREAD] = 0;
        for (uint32_t i = THREAD * each; i < (THREAD + 1) * each && i < n; i++) {
            const uint32_t number = ordered(own[i]);
            counts[THREAD] += number > least[0], counts[THREADS + THREAD] += number == least[0];
        }
    }
    PHASE {
        uint32_t more = 0, before = 0, equal = 0;
        AHEAD for (uint32_t i = 0; i < THREADS; i++) {
            more += counts[i], before += i < THREAD ? counts[i] : 0;
            equal += i < THREAD ? counts[THREADS + i] : 0;
        }
        const uint32_t n_equal = n_chosen - more; /* that are taken */
        for (uint32_t i = THREAD * each; i < (THREAD + 1) * each && i < n; i++) {
            const uint32_t number = ordered(own[i]);
            if (number > least[0] || (number == least[0] && equal < n_equal))
                for (uint32_t k = 0; k < n_pooled; k++)
                    taken[(before + (equal < n_equal ? equal : n_equal)) * n_pooled + k] = i * n_pooled + k;
            before += number > least[0], equal += number == least[0];
        }
    }
}

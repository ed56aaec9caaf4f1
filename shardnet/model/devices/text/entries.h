/* Entries that stand for several positions, as mixers/compressed_attention.py makes them, and the rows that wait for them.
 * A layer keeps the keys of a slot's last `window` rows, then what its last `n_pending` give to entries, `n_waiting` columns
 * each, then zeros: a cell of a state has so many numbers. */

#define MOST_COLUMNS 576 /* of an entry */

/* Where the numbers of a row are that is `back` before `row`: in this step, or behind `begin` in the cell before. */
#define WAITING(back, column)                                                              \
    ((back) <= own ? waiting[(uint64_t)(row - (back)) * n_waiting + (column)]              \
     : source == NO_CELL                                                                   \
         ? 0.0f                                                                            \
         : states[source * cell + begin + (uint64_t)(n_pending + own - (back)) * n_waiting + (column)])

/* Makes the entry of the `rate` positions up to that of row GROUP_X, if they are whole, and with `twice` of as many before
 * them; of two, GROUP_Y, it is the one that attention reads, or the key behind it by which entries are chosen. Of each the
 * row has values and gates, `numbers` what is added to gates by place, then the weights of the norm. */
KERNEL make_entries(GLOBAL const float *waiting, GLOBAL const float *states, GLOBAL const uint32_t *runs,
                    GLOBAL const float *numbers, GLOBAL const float *cosines, GLOBAL const float *sines,
                    GLOBAL const uint32_t *places, GLOBAL const uint32_t *pages, GLOBAL float *entries, uint32_t rate,
                    uint32_t twice, uint32_t key_size, uint32_t index_size, uint32_t n_rotated, uint32_t stride,
                    uint32_t page_size, uint32_t n_waiting, uint32_t begin, uint32_t cell_size, float eps WHERE) {
    AWAIT
    SHARED float line[MOST_COLUMNS], parts[PARTS], scale[1];
    const uint32_t row = GROUP_X, end = places[3 * row] + 1, size = GROUP_Y ? index_size : key_size, half_size = n_rotated / 2;
    const uint32_t width = (1 + twice) * size, n = (1 + twice) * rate, n_pending = n, own = row - FIRST_OF(row);
    const uint32_t source = CELL_BEFORE(row), from = GROUP_Y ? 2 * (1 + twice) * key_size : 0, first = end - rate;
    const uint64_t cell = cell_size;
    GLOBAL const float *added = numbers + (GROUP_Y ? (rate * (1 + twice) + 1) * key_size : 0), *weight = added + rate * width;
    if (end % rate) return;
    PHASE {
        if (THREAD < PARTS) parts[THREAD] = 0;
        for (uint32_t c = THREAD; c < size; c += THREADS) {
#define COLUMN (i < n - rate ? c : width - size + c) /* of the positions before, then of its own */
            SUM_BY_SOFTMAX(sum, n,
                           end == rate && i < n - rate
                               ? -INFINITY
                               : ADD(WAITING(n - 1 - i, from + width + COLUMN), added[i % rate * width + COLUMN]),
                           WAITING(n - 1 - i, from + COLUMN))
            line[c] = sum;
        }
    }
    PHASE { ADD_SQUARES(size) }
    PHASE { NORM_SCALE(size, eps) }
    PHASE {
        for (uint32_t c = THREAD; c < size; c += THREADS) line[c] = MUL(MUL(line[c], scale[0]), weight[c]);
    }
    PHASE {
        const uint64_t place = (uint64_t)pages[places[3 * row + 1] + first / page_size] * page_size + first % page_size;
        GLOBAL float *to = entries + place / rate * stride + (GROUP_Y ? key_size : 0);
        for (uint32_t c = THREAD; c < size; c += THREADS) {
            const uint32_t k = c - (size - n_rotated); /* beyond n_rotated before it, too */
            if (k < n_rotated) {
                const uint32_t j = (k + half_size) % n_rotated;
                const float one = line[c - k + PAIRED(k)], other = line[c - k + PAIRED(j)];
                const uint64_t at = (uint64_t)row * n_rotated + k;
                to[c] = FMA(other, sines[at], MUL(one, cosines[at]));
            } else {
                to[c] = line[c];
            }
        }
        for (uint32_t c = key_size + index_size + THREAD; c < stride && GROUP_Y == 0; c += THREADS) to[c] = 0;
    }
}

/* Writes the state behind row GROUP_Y, if it leaves one: keys lie in rows of `width` columns from `first_key` on, what waits
 * likewise. The threads of `n_groups` have one number after the other. */
KERNEL slide_rows(GLOBAL const float *keys, GLOBAL const float *waiting, GLOBAL const uint32_t *runs, GLOBAL float *states,
                  uint32_t width, uint32_t first_key, uint32_t waiting_stride, uint32_t first_waiting, uint32_t size,
                  uint32_t window, uint32_t n_waiting, uint32_t n_pending, uint32_t cell_size, uint32_t n_groups WHERE) {
    AWAIT
    const uint32_t row = GROUP_Y, own = row - FIRST_OF(row), source = CELL_BEFORE(row), begin = window * size;
    const uint64_t cell = cell_size;
    if (!LEAVES_STATE(row)) return;
    PHASE {
        GLOBAL float *to = states + CELL_AFTER(row) * cell;
        for (uint32_t i = GROUP_X * THREADS + THREAD; i < cell_size; i += n_groups * THREADS) {
            const uint32_t waits = i >= begin, n_columns = waits ? n_waiting : size, place = waits ? i - begin : i;
            float number = 0;
            if (!waits || place < n_pending * n_waiting) {
                const uint32_t back = (waits ? n_pending : window) - 1 - place / n_columns, column = place % n_columns;
                if (back > own) number = source == NO_CELL ? 0.0f : states[source * cell + i + (uint64_t)(own + 1) * n_columns];
                else if (waits) number = waiting[(uint64_t)(row - back) * waiting_stride + first_waiting + column];
                else number = keys[(uint64_t)(row - back) * width + first_key + column];
            }
            to[i] = number;
        }
    }
}

/* Layers that keep a state of a slot, between their linears: step by step as csrc/recurrence_body.h and
 * mixers/short_conv.py have them. What a layer keeps is in a cell: [heads, key size, value size], then the inputs of a
 * convolution before the next row, [taps - 1, columns]. */

#define MOST 256 /* columns of a head's keys, and of its values */
#define UNIT_EPS 1e-6f
#define AT_A_TIME 8 /* columns of a key whose state is read before they are needed */

/* The input of a convolution `back` rows behind the first that the cell before has of a column: `own` in this step. */
#define INPUT(back, own) \
    ((back) >= before ? (own) : source == NO_CELL ? 0.0f : states[source * cell + n_matrix + (back) * columns + column])

/* A group has value head GROUP_X of the slot whose first row is GROUP_Y. `numbers` has of each head the rate, bias and
 * skip, then the weights of the norm and [taps, columns] and biases of the convolution. `places` has the columns of
 * `projected` where queries, keys, values and gates begin, how far those of a key head and those of its value heads are
 * from the next one's, and the columns of `small` where writes and decays begin: they stand by `small_share` heads. Each
 * column of a key may decay by itself, `by_column`: logarithms of decays are then a rate times a softplus, or, with
 * `decay_floor` below 0, that times a sigmoid. A cell has `n_beside` numbers more. */
KERNEL recur(GLOBAL const float *projected, GLOBAL const float *small, GLOBAL const float *numbers,
             GLOBAL const uint32_t *places, GLOBAL const uint32_t *runs, GLOBAL float *states, GLOBAL float *out,
             uint32_t width, uint32_t small_width, uint32_t small_share, uint32_t n_taps, uint32_t n_key_heads,
             uint32_t n_heads, uint32_t key_size, uint32_t size, uint32_t takes_turns, uint32_t is_mamba,
             uint32_t has_norm, uint32_t gates_alone, uint32_t by_column, uint32_t n_beside, float eps, float write_scale,
             float decay_floor WHERE) {
    AWAIT
    SHARED float mixed[3 * MOST], parts[2 * PARTS], factor[2], decays[THREADS], writes[THREADS], kept[MOST];
    const uint32_t head = GROUP_X, first = GROUP_Y, n_shared = n_heads / n_key_heads, before = n_taps - 1;
    const uint32_t key_head = takes_turns ? head % n_key_heads : head / n_shared, n_keys = n_key_heads * key_size;
    const uint32_t columns = 2 * n_keys + n_heads * size, n_read = 2 * key_size;
    const uint32_t of_value = head / n_shared * places[5] + head % n_shared * size;
    const uint64_t n_matrix = (uint64_t)n_heads * key_size * size, cell = n_matrix + (uint64_t)before * columns + n_beside;
    const uint32_t end = FIRST_OF(first) == first ? END_OF(first) : first, source = CELL_BEFORE(first);
    GLOBAL const float *skip = numbers + n_heads + n_heads * (by_column ? key_size : 1), *weight = skip + n_heads;
    GLOBAL const float *taps = weight + size, *taps_bias = taps + n_taps * columns;
    uint32_t last = source;
    for (uint32_t row = first; row < end; row++) {
        const uint32_t target = CELL_AFTER(row), turn_of = (row - first) % THREADS;
        PHASE { /* how much is kept and written, of this row and those that follow */
            const uint32_t own = row + THREAD;
            if (turn_of == 0 && own < end) {
                const uint32_t of_head = head / small_share * 2 * small_share + head % small_share;
                const uint64_t at = (uint64_t)own * small_width + of_head;
                const REAL steps = softplus(REAL_ADD(WIDE(small[at + places[7]]), WIDE(numbers[n_heads + head])));
                const REAL opened = real_exponential(NEGATIVE(WIDE(small[at + places[6]])));
                decays[THREAD] = NARROW(real_exponential(REAL_MUL(WIDE(numbers[head]), steps)));
                writes[THREAD] = NARROW(is_mamba ? steps : REAL_DIV(WIDE(write_scale), REAL_ADD(REAL_ONE, opened)));
            }
        }
        PHASE {
            for (uint32_t c = THREAD; c < n_read + size; c += THREADS) {
                const uint32_t kind = c < n_read ? c / key_size : 2, i = c - kind * key_size;
                const uint32_t column = kind * n_keys + (kind < 2 ? key_head * key_size : head * size) + i;
                const uint64_t from = places[kind] + (kind < 2 ? key_head * places[4] : of_value) + i;
                float total = taps_bias[column];
                for (uint32_t tap = 0; tap < n_taps; tap++) {
                    const uint32_t back = row - first + tap;
                    const float input = INPUT(back, projected[(uint64_t)(row + tap - before) * width + from]);
                    total = ADD(total, MUL(taps[tap * columns + column], input));
                    if (tap && LEAVES_STATE(row))
                        states[target * cell + n_matrix + (tap - 1) * columns + column] = input;
                }
                mixed[c] = activated(total, 0);
            }
            for (uint32_t i = THREAD; i < key_size && by_column; i += THREADS) {
                const uint32_t column = head * key_size + i;
                const REAL rate = WIDE(numbers[head]), given = WIDE(small[(uint64_t)row * small_width + places[7] + column]);
                const REAL sum = REAL_ADD(given, WIDE(numbers[n_heads + column]));
                if (decay_floor < 0)
                    kept[i] = NARROW(real_exponential(REAL_DIV(
                        WIDE(decay_floor), REAL_ADD(REAL_ONE, real_exponential(REAL_MUL(sum, rate))))));
                else
                    kept[i] = NARROW(real_exponential(REAL_MUL(rate, softplus(sum))));
            }
        }
        if (!is_mamba) {
            PHASE {
                if (THREAD < 2 * PARTS) {
                    float sum = 0;
                    for (uint32_t i = THREAD % PARTS; i < key_size; i += PARTS) {
                        const float own = mixed[THREAD / PARTS * key_size + i];
                        sum = ADD(sum, MUL(own, own));
                    }
                    parts[THREAD] = sum;
                }
            }
            PHASE {
                if (THREAD < 2) {
                    ADD_UP(parts + THREAD * PARTS)
                    const float length = SQRT(ADD(parts[THREAD * PARTS], UNIT_EPS));
                    factor[THREAD] = DIV(THREAD ? 1.0f : DIV(1.0f, SQRT((float)key_size)), length);
                }
            }
            PHASE {
                for (uint32_t c = THREAD; c < n_read; c += THREADS) mixed[c] = MUL(mixed[c], factor[c / key_size]);
            }
        }
        PHASE { /* a thread has a column of the values */
            for (uint32_t c = THREAD; c < size; c += THREADS) {
                const uint64_t own = (uint64_t)head * key_size * size + c;
                GLOBAL const float *old = states + (last == NO_CELL ? 0 : last * cell) + own;
                GLOBAL float *updated = states + target * cell + own;
                const float decay = by_column ? 1.0f : decays[turn_of], write = writes[turn_of], value = mixed[n_read + c];
                float held = 0, read = is_mamba ? MUL(value, skip[head]) : 0.0f;
                AHEAD for (uint32_t i = 0; i < (is_mamba ? 0 : key_size); i++)
                    held = FMA(last == NO_CELL ? 0.0f : old[i * size],
                               by_column ? MUL(mixed[key_size + i], kept[i]) : mixed[key_size + i], held);
                const float added = MUL(is_mamba ? value : FMA(held, -decay, value), write);
                for (uint32_t i = 0; i < key_size; i += AT_A_TIME) {
                    float state[AT_A_TIME];
                    TIMES (j, AT_A_TIME) state[j] = last == NO_CELL || i + j >= key_size ? 0.0f : old[(i + j) * size];
                    TIMES (j, AT_A_TIME) {
                        if (i + j < key_size) {
                            state[j] = FMA(state[j], by_column ? kept[i + j] : decay, MUL(added, mixed[key_size + i + j]));
                            updated[(i + j) * size] = state[j];
                            read = FMA(state[j], mixed[i + j], read);
                        }
                    }
                }
                mixed[n_read + c] = read;
            }
        }
        last = target;
        PHASE {
            if (THREAD < PARTS && has_norm) {
                float sum = 0;
                for (uint32_t i = n_read + THREAD; i < n_read + size; i += PARTS) sum = ADD(sum, MUL(mixed[i], mixed[i]));
                parts[THREAD] = sum;
            }
        }
        PHASE {
            if (THREAD == 0 && has_norm) {
                ADD_UP(parts)
                factor[0] = DIV(1.0f, SQRT(ADD(DIV(parts[0], (float)size), eps)));
            }
        }
        PHASE {
            for (uint32_t c = THREAD; c < size; c += THREADS) {
                const float read = has_norm ? MUL(MUL(mixed[n_read + c], factor[0]), weight[c]) : mixed[n_read + c];
                const float gate = projected[(uint64_t)row * width + places[3] + of_value + c];
                out[((uint64_t)row * n_heads + head) * size + c] = MUL(read, gates_alone ? sigmoid(gate) : activated(gate, 0));
            }
        }
    }
}

/* Inputs times their gate, convolved, times another gate: columns of a row are gate, other gate, inputs. A thread has a
 * column of row GROUP_Y. */
KERNEL convolve(GLOBAL const float *projected, GLOBAL const float *taps, GLOBAL const float *bias,
                GLOBAL const uint32_t *runs, GLOBAL float *states, GLOBAL float *out, uint32_t columns, uint32_t n_taps,
                uint32_t has_bias WHERE) {
    AWAIT
    PHASE {
        const uint32_t column = GROUP_X * THREADS + THREAD, row = GROUP_Y, before = n_taps - 1;
        const uint32_t source = CELL_BEFORE(row), target = CELL_AFTER(row);
        const uint64_t n_matrix = 0, cell = (uint64_t)before * columns;
        if (column < columns) {
            float total = 0;
            for (uint32_t tap = 0; tap < n_taps; tap++) {
                const uint32_t back = row - FIRST_OF(row) + tap;
                const uint64_t from = back < before ? row : row + tap - before;
                GLOBAL const float *own = projected + from * 3 * columns + column;
                const float input = INPUT(back, MUL(own[0], own[2 * columns]));
                const float part = MUL(input, taps[tap * columns + column]);
                total = tap ? ADD(total, part) : part;
                if (tap && LEAVES_STATE(row)) states[target * cell + (tap - 1) * columns + column] = input;
            }
            if (has_bias) total = ADD(total, bias[column]);
            out[(uint64_t)row * columns + column] = MUL(projected[((uint64_t)row * 3 + 1) * columns + column], total);
        }
    }
}

/* Convolves what rows made of n-grams, `columns` of `stride` from `first` on, over positions that are `apart`, and adds that
 * and what is `gated` to the streams of row GROUP_Y, [width], if it `adds`. What stands behind `n_matrix` numbers of a cell
 * are the columns of the last `before` rows, those behind `width` too. A thread has a column. */
#define MADE(back) INPUT(back, made[(uint64_t)(FIRST_OF(row) + (back) - before) * stride + first + column])
KERNEL convolve_ngrams(GLOBAL const float *made, GLOBAL const float *gated, GLOBAL const float *taps,
                       GLOBAL const uint32_t *runs, GLOBAL float *states, GLOBAL float *streams, uint32_t stride,
                       uint32_t first, uint32_t columns, uint32_t width, uint32_t n_taps, uint32_t apart, uint32_t before,
                       uint32_t n_matrix, uint32_t adds WHERE) {
    AWAIT
    PHASE {
        const uint32_t column = GROUP_X * THREADS + THREAD, row = GROUP_Y, own = row - FIRST_OF(row);
        const uint32_t source = CELL_BEFORE(row), target = CELL_AFTER(row);
        const uint64_t cell = n_matrix + (uint64_t)before * columns, at = (uint64_t)row * width + column;
        if (column < width && adds) {
            float total = 0;
            for (uint32_t tap = 0; tap < n_taps; tap++) {
                const uint32_t back = own + before - (n_taps - 1 - tap) * apart;
                const float part = MUL(MADE(back), taps[tap * width + column]);
                total = tap ? ADD(total, part) : part;
            }
            streams[at] = ADD(streams[at], ADD(gated[at], activated(total, 0)));
        }
        for (uint32_t i = 0; column < columns && LEAVES_STATE(row) && i < before; i++)
            states[target * cell + n_matrix + i * columns + column] = MADE(own + 1 + i);
    }
}

/* to[row GROUP_Y] = `n` columns of a row of `width`, from `first` on. */
KERNEL take_columns(GLOBAL const float *from, GLOBAL float *to, uint32_t width, uint32_t first, uint32_t n WHERE) {
    AWAIT
    PHASE {
        const uint32_t column = GROUP_X * THREADS + THREAD;
        if (column < n) to[(uint64_t)GROUP_Y * n + column] = from[(uint64_t)GROUP_Y * width + first + column];
    }
}

/* Keeps `width` columns of row GROUP_Y where `places` says, behind `first` others: NO_CELL is nowhere. */
KERNEL keep_rows(GLOBAL const float *from, GLOBAL const uint32_t *places, GLOBAL float *kept, uint32_t width,
                 uint32_t kept_width, uint32_t first WHERE) {
    AWAIT
    PHASE {
        const uint32_t column = GROUP_X * THREADS + THREAD, place = places[GROUP_Y];
        if (column < width && place != NO_CELL)
            kept[(uint64_t)place * kept_width + first + column] = from[(uint64_t)GROUP_Y * width + column];
    }
}

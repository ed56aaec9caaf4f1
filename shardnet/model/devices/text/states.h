/* Layers that keep a state of a slot, between their linears: step by step as csrc/recurrence_body.h and
 * mixers/short_conv.py have them. What a layer keeps is in a cell: [heads, key size, value size], then the inputs of a
 * convolution before the next row, [taps - 1, columns]. Of a row, `runs` has the first of its slot's rows, the end of
 * them, the cell with the state before them (NO_CELL: zeros) and the cell that is to have the state after it; of rows
 * with one cell that is the last's. No cell is both. */

/* Of factorials from that of 13 on, and of odd numbers from 23 on, one by each. */
TABLE uint64_t INVERSES[26] = {
    0x3de6124613a86d09, 0x3e21eed8eff8d898, 0x3e5ae64567f544e4, 0x3e927e4fb7789f5c, 0x3ec71de3a556c734,
    0x3efa01a01a01a01a, 0x3f2a01a01a01a01a, 0x3f56c16c16c16c17, 0x3f81111111111111, 0x3fa5555555555555,
    0x3fc5555555555555, 0x3fe0000000000000, 0x3ff0000000000000, 0x3ff0000000000000, 0x3fa642c8590b2164,
    0x3fa8618618618618, 0x3faaf286bca1af28, 0x3fae1e1e1e1e1e1e, 0x3fb1111111111111, 0x3fb3b13b13b13b14,
    0x3fb745d1745d1746, 0x3fbc71c71c71c71c, 0x3fc2492492492492, 0x3fc999999999999a, 0x3fd5555555555555,
    0x3ff0000000000000};
#define REAL_ONE REAL_OF_BITS(0x3ff0000000000000)
#define NEGATIVE(real) REAL_OF_BITS(BITS_OF_REAL(real) ^ (uint64_t)1 << 63)

/* The sum of x^n by INVERSES, the last of them first. */
INLINE REAL series(REAL x, uint32_t begin, uint32_t end) {
    REAL sum = REAL_OF_BITS(0);
    for (uint32_t i = begin; i < end; i++) sum = REAL_ADD(REAL_MUL(sum, x), REAL_OF_BITS(INVERSES[i]));
    return sum;
}

INLINE REAL real_exponential(REAL x) {
    const uint64_t bits = BITS_OF_REAL(x), sign = bits >> 63 << 63, most = 0x4085e00000000000; /* 700 */
    const REAL whole = REAL_OF_BITS(0x4338000000000000);                                        /* 1.5 * 2^52 */
    if ((bits ^ sign) > 0x7ff0000000000000) return x;
    if ((bits ^ sign) > most) x = REAL_OF_BITS(sign | most);
    const REAL shifted = REAL_ADD(REAL_MUL(x, REAL_OF_BITS(0x3ff71547652b82fe)), whole);
    const REAL power = REAL_ADD(shifted, NEGATIVE(whole));
    REAL rest = REAL_ADD(x, REAL_MUL(power, REAL_OF_BITS(0xbfe62e42fee00000)));
    rest = REAL_ADD(rest, REAL_MUL(power, REAL_OF_BITS(0xbdea39ef35793c76)));
    const uint32_t exponent = (uint32_t)(BITS_OF_REAL(shifted) - BITS_OF_REAL(whole)) + 1023;
    return REAL_MUL(series(rest, 0, 14), REAL_OF_BITS((uint64_t)exponent << 52));
}

/* ln(1 + x) of x >= 0. */
INLINE REAL real_logarithm(REAL x) {
    REAL power = REAL_OF_BITS(0);
    if (BITS_OF_REAL(x) > 0x7ff0000000000000) return x;
    if (BITS_OF_REAL(x) > 0x3fd999999999999a) { /* 0.4: 1 + x = m * 2^power, m within sqrt(1/2) and sqrt(2) */
        const uint64_t bits = BITS_OF_REAL(REAL_ADD(REAL_ONE, x)), m = bits << 12 >> 12;
        const int is_small = (m | (uint64_t)1022 << 52) < 0x3fe6a09e667f3bcd;
        power = WIDE((float)((int)(bits >> 52) - 1022 - is_small));
        x = REAL_ADD(REAL_OF_BITS(m | (uint64_t)(1022 + is_small) << 52), NEGATIVE(REAL_ONE));
    }
    const REAL two = REAL_OF_BITS(0x4000000000000000), ratio = REAL_DIV(x, REAL_ADD(two, x));
    const REAL sum = REAL_MUL(REAL_MUL(two, ratio), series(REAL_MUL(ratio, ratio), 14, 26));
    const REAL low = REAL_ADD(sum, REAL_MUL(power, REAL_OF_BITS(0x3dea39ef35793c76)));
    return REAL_ADD(REAL_MUL(power, REAL_OF_BITS(0x3fe62e42fee00000)), low);
}

/* ln(1 + e^x), which is how long a step is. */
INLINE REAL softplus(REAL x) {
    const uint64_t bits = BITS_OF_REAL(x);
    return !(bits >> 63) && bits > 0x4044000000000000 ? x : real_logarithm(real_exponential(x)); /* 40 */
}

#define MOST 256 /* columns of a head's keys, and of its values */
#define NO_CELL 0xffffffffu
#define UNIT_EPS 1e-6f
#define AT_A_TIME 8 /* columns of a key whose state is read before they are needed */
#define FIRST_OF(row) runs[4 * (row)]
#define END_OF(row) runs[4 * (row) + 1]
#define CELL_BEFORE(row) runs[4 * (row) + 2]
#define CELL_AFTER(row) runs[4 * (row) + 3]
#define LEAVES_STATE(row) ((row) + 1 == END_OF(row) || CELL_AFTER((row) + 1) != CELL_AFTER(row))

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

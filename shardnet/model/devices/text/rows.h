/* What is done to rows between products: norms, residuals, rotations. A group of threads has one row. */

#define LINE 4096 /* columns of a row that a group holds at a time */
#define OF_LINE (LINE / THREADS / 4) /* fours of a thread */

#define ADDS 1   /* hidden += multiplier * inner */
#define AFTER 2  /* inner is normed before that */
#define ROUNDS 4 /* what hidden states become is rounded to bfloat16 */
#define BEFORE 8 /* normed = RMSNorm(hidden), for the sub-layer that follows */

/* What stands between two sub-layers: the residual of one, the norm before the other. `width` is a multiple of 4. Rows
 * have `n_turns` weights before in turns. */
KERNEL add_and_norm(GLOBAL float *hidden, GLOBAL const float *inner, GLOBAL const float *after,
                    GLOBAL const float *before, GLOBAL float *normed, uint32_t width, uint32_t what, uint32_t n_turns,
                    float multiplier, float eps_after, float eps_before WHERE) {
    AWAIT
    SHARED float line[LINE], parts[PARTS], scale[1];
    const uint64_t row = (uint64_t)GROUP_X * width;
    const uint32_t n_after = what & AFTER ? width : 0, n_before = what & BEFORE ? width : 0;
    PHASE { if (THREAD < PARTS) parts[THREAD] = 0; }
    for (uint32_t begin = 0; begin < n_after; begin += LINE) {
        PHASE {
            TIMES (k, OF_LINE) {
                const uint32_t i = 4 * (k * THREADS + THREAD);
                if (begin + i < width) {
                    const FOUR state = LOAD4(inner + row + begin + i);
                    TIMES (j, 4) line[i + j] = AS_FLOAT(state.of[j]);
                }
            }
        }
        PHASE { ADD_SQUARES(width - begin < LINE ? width - begin : LINE) }
    }
    PHASE {
        if (n_after) NORM_SCALE(width, eps_after)
    }
    for (uint32_t begin = 0; begin < width; begin += LINE) {
        PHASE {
            FOUR state[OF_LINE], more[OF_LINE];
            if (begin == 0 && THREAD < PARTS) parts[THREAD] = 0;
            TIMES (k, OF_LINE) {
                const uint32_t i = begin + 4 * (k * THREADS + THREAD);
                if (i < width) state[k] = LOAD4(hidden + row + i);
                if (i < width && what & ADDS) more[k] = LOAD4(inner + row + i);
            }
            TIMES (k, OF_LINE) {
                const uint32_t i = begin + 4 * (k * THREADS + THREAD);
                if (i >= width) continue;
                TIMES (j, 4) {
                    float sum = AS_FLOAT(state[k].of[j]);
                    if (what & ADDS) {
                        float own = AS_FLOAT(more[k].of[j]);
                        if (what & AFTER) own = MUL(MUL(own, scale[0]), after[i + j]);
                        sum = FMA(own, multiplier, sum);
                        if (what & ROUNDS) sum = rounded(sum);
                        state[k].of[j] = BITS_OF(sum);
                    }
                    line[i - begin + j] = sum;
                }
                if (what & ADDS) STORE4(hidden + row + i) = state[k];
            }
        }
        PHASE {
            if (n_before) ADD_SQUARES(width - begin < LINE ? width - begin : LINE)
        }
    }
    PHASE {
        if (n_before) NORM_SCALE(width, eps_before)
    }
    for (uint32_t begin = 0; begin < n_before; begin += LINE) {
        PHASE {
            TIMES (k, OF_LINE) {
                const uint32_t i = begin + 4 * (k * THREADS + THREAD);
                if (i < width) {
                    FOUR weight = LOAD4(before + GROUP_X % n_turns * width + i);
                    TIMES (j, 4) {
                        const float state = width > LINE ? hidden[row + i + j] : line[i + j];
                        weight.of[j] = BITS_OF(MUL(MUL(state, scale[0]), AS_FLOAT(weight.of[j])));
                    }
                    STORE4(normed + row + i) = weight;
                }
            }
        }
    }
}

#define BACK 2 /* of `has_pairs`: what was turned so is turned back */

/* A group has head GROUP_Y of row GROUP_X, which has `n_heads` queries, behind each its gate if it `has_gates`, then
 * `n_kv_heads` keys and as many values. Queries and keys are normed with `has_norm`, and rotated from column `first` on,
 * with `has_pairs` columns that are neighbours; keys and values go to their slot: of a row, `places` has position, where
 * the numbers of its slot's pages begin and by how much its queries grow, and a page is `page_size` positions of all KV
 * heads. Values there are `stride` columns apart. */
KERNEL rotate_heads(GLOBAL float *heads, GLOBAL const float *weight, GLOBAL const float *cosines, GLOBAL const float *sines,
              GLOBAL const uint32_t *places, GLOBAL const uint32_t *pages, GLOBAL float *keys, GLOBAL float *values,
              uint32_t n_heads, uint32_t n_kv_heads, uint32_t size, uint32_t stride, uint32_t first, uint32_t n_rotated,
              uint32_t page_size, uint32_t has_norm, uint32_t has_pairs, uint32_t has_gates, float eps WHERE) {
    AWAIT
    SHARED float line[LINE], parts[PARTS], scale[1];
    const uint32_t row = GROUP_X, head = GROUP_Y, half_size = n_rotated / 2, position = places[3 * row];
    const uint32_t n_gates = has_gates ? n_heads : 0, n_before = has_gates && head < n_heads ? head : n_gates;
    const uint64_t own = ((uint64_t)row * (n_heads + n_gates + 2 * n_kv_heads) + head + n_before) * size;
    const uint32_t page = pages[places[3 * row + 1] + position / page_size];
    const uint32_t kv_head = head < n_heads ? 0 : (head - n_heads) % n_kv_heads;
    const uint64_t slot = (uint64_t)(page * n_kv_heads + kv_head) * page_size + position % page_size;
    const int is_value = head >= n_heads + n_kv_heads;
    PHASE {
        if (THREAD < PARTS) parts[THREAD] = 0;
        for (uint32_t i = THREAD; i < size; i += THREADS) line[i] = heads[own + i];
    }
    if (has_norm && !is_value) {
        PHASE { ADD_SQUARES(size) }
        PHASE { NORM_SCALE(size, eps) }
        PHASE {
            for (uint32_t i = THREAD; i < size; i += THREADS)
                line[i] = MUL(MUL(line[i], scale[0]), weight[head * size + i]);
        }
    }
    PHASE {
        for (uint32_t i = THREAD; i < size; i += THREADS) {
            const uint32_t k = i - first; /* beyond n_rotated before it, too */
            const int turns = !is_value && k < n_rotated;
            const uint32_t to = turns && has_pairs == BACK ? first + PAIRED(k) : i;
            float turned = line[i];
            if (turns) {
                const uint32_t j = (k + half_size) % n_rotated, in_pairs = has_pairs == 1;
                const float one = in_pairs ? line[first + PAIRED(k)] : turned, other = line[first + (in_pairs ? PAIRED(j) : j)];
                const uint64_t at = (uint64_t)row * n_rotated + k;
                turned = FMA(other, has_pairs == BACK ? -sines[at] : sines[at], MUL(one, cosines[at]));
            }
            if (head < n_heads) heads[own + to] = turned;
            else if (is_value) values[slot * stride + i] = turned;
            else keys[slot * size + i] = turned;
        }
    }
}

/* Gates what n-grams give by the streams of a row: stream GROUP_Y of row GROUP_X, [n_streams, width]. Its key and its state
 * are normed, by the first two of three `norms`, [n_streams, width] each; the values times the sigmoid of the signed root of
 * their product, divided by `root`, are `gated`. Normed by the third they go to `made`, where a row has the `digits` of its
 * token id behind all streams. */
KERNEL gate_ngrams(GLOBAL const float *streams, GLOBAL const float *keys, GLOBAL const float *values,
                   GLOBAL const float *norms, GLOBAL const float *digits, GLOBAL float *gated, GLOBAL float *made,
                   uint32_t width, uint32_t n_streams, uint32_t n_digits, float root, float eps WHERE) {
    AWAIT
    SHARED float line[LINE], parts[PARTS], scale[1];
    const uint32_t row = GROUP_X, stream = GROUP_Y;
    const uint64_t own = ((uint64_t)row * n_streams + stream) * width, to = own + (uint64_t)row * n_digits;
    for (uint32_t pass = 0; pass < 3; pass++) {
        GLOBAL const float *norm = norms + ((uint64_t)pass * n_streams + stream) * width;
        PHASE {
            if (THREAD < PARTS) parts[THREAD] = 0;
            for (uint32_t i = THREAD; i < width; i += THREADS)
                line[i] = pass == 0 ? keys[own + i] : pass == 1 ? streams[own + i] : gated[own + i];
        }
        PHASE { ADD_SQUARES(width) }
        PHASE { NORM_SCALE(width, eps) }
        PHASE {
            for (uint32_t i = THREAD; i < width; i += THREADS) {
                const float normed = MUL(MUL(line[i], scale[0]), norm[i]);
                if (pass == 0) gated[own + i] = normed;
                else if (pass == 1) line[i] = MUL(gated[own + i], normed);
                else made[to + i] = normed;
            }
            if (pass == 2 && stream == 0 && THREAD < n_digits)
                made[to + (uint64_t)n_streams * width + THREAD] = digits[row * n_digits + THREAD];
        }
        if (pass != 1) continue;
        for (uint32_t n = width; n > 1; n = n / 2 + n % 2) {
            PHASE {
                for (uint32_t i = THREAD; i < n / 2; i += THREADS) line[i] = ADD(line[i], line[n / 2 + i]);
                if (THREAD == 0 && n % 2) line[n / 2] = line[n - 1];
            }
        }
        PHASE {
            if (THREAD == 0) {
                const float score = DIV(line[0], root), size = SQRT(more_of(score < 0 ? -score : score, 1e-6f));
                scale[0] = sigmoid(MUL(size, score > 0 ? 1.0f : score < 0 ? -1.0f : 0.0f));
            }
        }
        PHASE {
            for (uint32_t i = THREAD; i < width; i += THREADS) gated[own + i] = MUL(scale[0], values[(uint64_t)row * width + i]);
        }
    }
}

/* Heads of latents: of a row with queries [n_heads, n_own + n_rotated] a group has one of head GROUP_Y, the last what is
 * cached, [rank + n_rotated]. Columns of its own go to `own`; the rotated ones stand behind those of the latent in `heads`,
 * [n_heads, rank + n_rotated]. The latent is normed and goes to its slot with its rotated columns, as keys do above. */
KERNEL split_latents(GLOBAL const float *queries, GLOBAL const float *cached, GLOBAL const float *weight,
                     GLOBAL const float *cosines, GLOBAL const float *sines, GLOBAL const uint32_t *places,
                     GLOBAL const uint32_t *pages, GLOBAL float *keys, GLOBAL float *own, GLOBAL float *heads,
                     uint32_t n_heads, uint32_t n_own, uint32_t rank, uint32_t n_rotated, uint32_t page_size,
                     uint32_t has_pairs, uint32_t grows, float eps WHERE) {
    AWAIT
    SHARED float line[LINE], parts[PARTS], scale[1];
    const uint32_t row = GROUP_X, is_key = GROUP_Y == n_heads, position = places[3 * row], half_size = n_rotated / 2;
    const uint32_t width = is_key ? rank : n_own;
    const float growth = grows && !is_key ? AS_FLOAT(places[3 * row + 2]) : 1.0f;
    const uint64_t head = (uint64_t)row * n_heads + GROUP_Y, place = (uint64_t)row * (rank + n_rotated);
    const uint64_t slot = (uint64_t)pages[places[3 * row + 1] + position / page_size] * page_size + position % page_size;
    GLOBAL const float *from = is_key ? cached + place : queries + head * (n_own + n_rotated);
    GLOBAL float *to = is_key ? keys + slot * (rank + n_rotated) : heads + head * (rank + n_rotated);
    PHASE {
        if (THREAD < PARTS) parts[THREAD] = 0;
        for (uint32_t i = THREAD; i < width; i += THREADS) line[i] = MUL(from[i], growth);
    }
    PHASE { if (is_key) ADD_SQUARES(width) }
    PHASE { if (is_key) NORM_SCALE(width, eps) }
    PHASE {
        for (uint32_t i = THREAD; i < width; i += THREADS) {
            if (is_key) to[i] = MUL(MUL(line[i], scale[0]), weight[i]);
            else own[head * n_own + i] = line[i];
        }
        for (uint32_t i = THREAD; i < n_rotated; i += THREADS) {
            const uint32_t j = (i + half_size) % n_rotated, at = row * n_rotated + i;
            const float one = MUL(from[width + (has_pairs ? PAIRED(i) : i)], growth);
            const float other = MUL(from[width + (has_pairs ? PAIRED(j) : j)], growth);
            to[rank + i] = FMA(other, sines[at], MUL(one, cosines[at]));
        }
    }
}

/* Of row GROUP_X's `n` numbers the place of the largest, and its bits; of equal ones the first, NaN before all. */
KERNEL find_best(GLOBAL const float *numbers, GLOBAL uint32_t *best, uint32_t n WHERE) {
    AWAIT
    SHARED float most[THREADS];
    SHARED uint32_t places[THREADS];
    GLOBAL const float *own = numbers + (uint64_t)GROUP_X * n;
    const uint32_t each = n % 4 ? 1 : 4;
    PHASE {
        uint32_t place = each * THREAD < n ? each * THREAD : 0;
        float found = own[place];
        AHEAD_8 for (uint32_t i = each * THREAD; i < n; i += each * THREADS) {
            FOUR four;
            if (each == 4) four = LOAD4(own + i);
            else four.of[0] = BITS_OF(own[i]);
            TIMES (j, 4) {
                const int is_better = j < each && is_more(AS_FLOAT(four.of[j]), found);
                found = is_better ? AS_FLOAT(four.of[j]) : found;
                place = is_better ? i + j : place;
            }
        }
        most[THREAD] = found;
        places[THREAD] = place;
    }
    for (uint32_t reach = THREADS / 2; reach; reach /= 2) {
        PHASE {
            const uint32_t one = THREAD, other = THREAD + reach;
            if (one < reach && (is_more(most[other], most[one]) ||
                                (!is_more(most[one], most[other]) && places[other] < places[one]))) {
                most[one] = most[other];
                places[one] = places[other];
            }
        }
    }
    PHASE { if (THREAD < 2) best[2 * GROUP_X + THREAD] = THREAD ? BITS_OF(most[0]) : places[0]; }
}

/* Multiplies `n` numbers by the sigmoids of gates, one for so many of them each. */
KERNEL open_rows(GLOBAL float *rows, GLOBAL const float *gates, uint32_t n, uint32_t n_each WHERE) {
    AWAIT
    PHASE {
        const uint32_t at = GROUP_X * THREADS + THREAD;
        if (at < n) rows[at] = MUL(rows[at], sigmoid(gates[at / n_each]));
    }
}

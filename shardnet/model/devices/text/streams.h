/* Residual streams around a sub-layer, as layers/streams.py has them: STREAMS of `width` columns, one behind the other in
 * a row. Of a row `mixes` has how much each stream is of the sub-layer's input, and gets of its output; where streams go
 * over into each other, how much of each each then is, [from][to]. */

#define N_MIXES (STREAMS * (is_balanced ? STREAMS + 2 : 2))
#define ACROSS(from, to) (2 * STREAMS + (from) * STREAMS + (to))
#define STREAM(row, n, column) (((uint64_t)(row) * STREAMS + (n)) * width + (column))

/* Makes the mixes of row GROUP_X of what a linear gives, `raw` [rows, mixes], and `joined`, what goes into the sub-layer.
 * `numbers` has a factor for each of three kinds, and what is added to each. Balanced ones are normed by rows and columns. */
KERNEL join_streams(GLOBAL const float *streams, GLOBAL const float *raw, GLOBAL const float *numbers, GLOBAL float *mixes,
                    GLOBAL float *joined, uint32_t width, uint32_t is_balanced, uint32_t n_rounds, float magnitude,
                    float eps WHERE) {
    AWAIT
    SHARED float mix[STREAMS * (STREAMS + 2)], parts[STREAMS * PARTS], most[STREAMS];
    OWN(float, made, 1);
    const uint32_t row = GROUP_X;
    PHASE {
        if (THREAD < N_MIXES) {
            const uint32_t kind = THREAD < STREAMS ? 0 : THREAD < 2 * STREAMS ? 1 : 2;
            const float own = ADD(MUL(raw[row * N_MIXES + THREAD], numbers[kind]), numbers[3 + THREAD]);
            const float share = kind ? MUL(magnitude, sigmoid(own)) : sigmoid(own);
            mix[THREAD] = kind == 2 ? own : kind && is_balanced ? share : ADD(share, eps);
        }
    }
    if (is_balanced) {
        PHASE {
            if (THREAD < STREAMS) {
                float best = -INFINITY;
                TIMES (n, STREAMS) best = is_more(mix[ACROSS(THREAD, n)], best) ? mix[ACROSS(THREAD, n)] : best;
                most[THREAD] = best;
            }
        }
        PHASE {
            const uint32_t from = THREAD / PARTS, to = THREAD % PARTS;
            if (from < STREAMS) parts[THREAD] = to < STREAMS ? exponential(ADD(mix[ACROSS(from, to)], -most[from])) : 0.0f;
        }
        PHASE {
            if (THREAD < STREAMS) ADD_UP(parts + THREAD * PARTS)
        }
        PHASE {
            const uint32_t from = THREAD / STREAMS, at = 2 * STREAMS + THREAD;
            if (from < STREAMS)
                mix[at] = ADD(DIV(exponential(ADD(mix[at], -most[from])), parts[from * PARTS]), eps);
        }
        for (uint32_t pass = 0; pass + 1 < 2 * n_rounds; pass++) {
            PHASE { /* columns, rows, columns ... */
                const uint32_t from = THREAD / STREAMS, to = THREAD % STREAMS;
                if (from < STREAMS) {
                    float sum = mix[pass % 2 ? ACROSS(from, 0) : ACROSS(0, to)];
                    for (uint32_t n = 1; n < STREAMS; n++)
                        sum = ADD(sum, mix[pass % 2 ? ACROSS(from, n) : ACROSS(n, to)]);
                    MY(made)[0] = DIV(mix[ACROSS(from, to)], ADD(sum, eps));
                }
            }
            PHASE {
                if (THREAD < STREAMS * STREAMS) mix[2 * STREAMS + THREAD] = MY(made)[0];
            }
        }
    }
    PHASE {
        if (THREAD < N_MIXES) mixes[row * N_MIXES + THREAD] = mix[THREAD];
        for (uint32_t c = THREAD; c < width; c += THREADS) {
            float sum = MUL(streams[STREAM(row, 0, c)], mix[0]);
            for (uint32_t n = 1; n < STREAMS; n++) sum = ADD(sum, MUL(streams[STREAM(row, n, c)], mix[n]));
            joined[(uint64_t)row * width + c] = sum;
        }
    }
}

/* The mean of the normed streams of row GROUP_Y, each column opened by its gate; how much streams get of the output comes
 * of `raw` [rows, STREAMS]. A thread has a column. */
KERNEL join_gated(GLOBAL const float *normed, GLOBAL const float *gates, GLOBAL const float *raw, GLOBAL float *mixes,
                  GLOBAL float *joined, uint32_t width WHERE) {
    AWAIT
    PHASE {
        const uint32_t column = GROUP_X * THREADS + THREAD, row = GROUP_Y;
        if (GROUP_X == 0 && THREAD < STREAMS)
            mixes[(row * 2 + 1) * STREAMS + THREAD] = MUL(2.0f, sigmoid(raw[row * STREAMS + THREAD]));
        if (column < width) {
            float sum = MUL(sigmoid(gates[STREAM(row, 0, column)]), normed[STREAM(row, 0, column)]);
            for (uint32_t n = 1; n < STREAMS; n++)
                sum = ADD(sum, MUL(sigmoid(gates[STREAM(row, n, column)]), normed[STREAM(row, n, column)]));
            joined[(uint64_t)row * width + column] = DIV(sum, (float)STREAMS);
        }
    }
}

/* Adds what a sub-layer gives to all streams of row GROUP_Y. A thread has a column. */
KERNEL share_streams(GLOBAL float *streams, GLOBAL const float *inner, GLOBAL const float *mixes, uint32_t width,
                     uint32_t is_balanced, uint32_t rounds WHERE) {
    AWAIT
    PHASE {
        const uint32_t column = GROUP_X * THREADS + THREAD, row = GROUP_Y;
        GLOBAL const float *mix = mixes + row * N_MIXES;
        if (column < width) {
            float own[STREAMS];
            TIMES (n, STREAMS) own[n] = streams[STREAM(row, n, column)];
            TIMES (n, STREAMS) {
                float kept = is_balanced ? MUL(own[0], mix[ACROSS(0, n)]) : own[n];
                TIMES (from, STREAMS)
                    if (from && is_balanced) kept = ADD(kept, MUL(own[from], mix[ACROSS(from, n)]));
                const float sum = ADD(MUL(inner[(uint64_t)row * width + column], mix[STREAMS + n]), kept);
                streams[STREAM(row, n, column)] = rounds ? rounded(sum) : sum;
            }
        }
    }
}

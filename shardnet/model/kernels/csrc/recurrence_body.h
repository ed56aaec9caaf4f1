/* Included by recurrence.c once for each instruction set, given by TARGET and NAME; its vectors have LANES lanes. */

#include "vectors_body.h"

#include "doubles_body.h"

#define BLOCK (4 * LANES)

/* Convolves some columns of row `row` with those of the rows before, and applies the activation. */
INLINE TARGET void NAME(convolve_columns)(const struct recurrence *call, int64_t row, int64_t first, float *mixed,
                                          const int is_bf16, const int n_vectors, const int n) {
    const int64_t width = columns_of(call);
    lanes sums[4];
    for (int at = 0; at < n_vectors; at++)
        sums[at] = call->taps_bias ? NAME(load_floats)(call->taps_bias + first + at * LANES, n) : (lanes){0};
    for (int64_t tap = 0; tap < call->n_taps; tap++)
        for (int at = 0; at < n_vectors; at++)
            sums[at] += NAME(load_floats)(call->taps + tap * width + first + at * LANES, n) *
                        NAME(load)(call->rows, (row + tap) * width + first + at * LANES, n, is_bf16);
    for (int at = 0; at < n_vectors; at++) sums[at] = NAME(silu)(sums[at]);
    for (int at = 0; at < n_vectors; at++) NAME(save_floats)(mixed + first + at * LANES, n, sums[at]);
}

INLINE TARGET void NAME(convolve_row)(const struct recurrence *call, int64_t row, float *mixed, const int is_bf16) {
    const int64_t width = columns_of(call);
    int64_t i = 0;
    for (; i + BLOCK <= width; i += BLOCK) NAME(convolve_columns)(call, row, i, mixed, is_bf16, 4, LANES);
    for (; i < width; i += LANES) NAME(convolve_columns)(call, row, i, mixed, is_bf16, 1, of_last(width, i));
}

/* Divides the vectors of all heads by their lengths. */
INLINE TARGET void NAME(unit)(float *heads, int64_t n_heads, int64_t size, float scale) {
    for (int64_t head = 0; head < n_heads; head++) {
        float *values = heads + head * size;
        const float factor = scale / sqrtf(squares(values, size) + UNIT_EPS);
        for (int64_t i = 0; i < size; i++) values[i] *= factor;
    }
}

/* Computes how much of each head's state a row keeps, and how much of its values it writes. */
INLINE TARGET void NAME(steer_row)(const struct recurrence *call, int64_t row, float *decays, float *writes) {
    const float *write = call->write + row * call->n_heads, *decay = call->decay + row * call->n_heads;
    for (int64_t i = 0; i < call->n_heads; i += HALF) {
        const int n = of_half(call->n_heads, i);
        if (!call->by_column) {
            doubles steps = NAME(load_wide)(decay + i, n) + NAME(load_wide)(call->bias + i, n);
            NAME(softpluses)(&steps, 1);
            if (call->skip) NAME(save_wide)(writes + i, n, steps);
            steps *= NAME(load_wide)(call->rate + i, n);
            NAME(exponentials)(&steps, 1);
            NAME(save_wide)(decays + i, n, steps);
        }
        if (!call->skip) {
            doubles written = -NAME(load_wide)(write + i, n);
            NAME(exponentials)(&written, 1);
            NAME(save_wide)(writes + i, n, call->write_scale / (1.0 + written));
        }
    }
}

static TARGET void NAME(convolve)(const void *argument, int64_t begin, int64_t end) {
    const struct recurrence *call = argument;
    const float scale = 1.0f / sqrtf((float)call->key_size);
    for (int64_t row = begin; row < end; row++) {
        float *mixed = call->mixed + row * mixed_width(call), *decays = mixed + columns_of(call);
        if (call->is_bf16)
            NAME(convolve_row)(call, row, mixed, 1);
        else
            NAME(convolve_row)(call, row, mixed, 0);
        NAME(steer_row)(call, row, decays, decays + call->n_heads);
        if (call->skip) continue;
        NAME(unit)(mixed, call->n_key_heads, call->key_size, scale);
        NAME(unit)(mixed + call->n_key_heads * call->key_size, call->n_key_heads, call->key_size, 1.0f);
    }
}

/* Computes how much each column of a row's key keeps of a head's state. */
INLINE TARGET void NAME(keep_columns)(const struct recurrence *call, int64_t row, int64_t head, float *kept) {
    const int64_t size = call->key_size;
    const float *decays = call->decay + (row * call->n_heads + head) * size, *biases = call->bias + head * size;
    const double rate = call->rate[head], floor = call->decay_floor;
    for (int64_t i = 0; i < size; i += 4 * HALF) {
        doubles x[4] = {0};
        for (int at = 0; at < 4; at++) {
            const int n = of_half(size, i + at * HALF);
            x[at] = NAME(load_wide)(decays + i + at * HALF, n) + NAME(load_wide)(biases + i + at * HALF, n);
            if (floor < 0) x[at] *= rate;
        }
        if (floor < 0)
            NAME(exponentials)(x, 4);
        else
            NAME(softpluses)(x, 4);
        for (int at = 0; at < 4; at++) x[at] = floor < 0 ? floor / (1.0 + x[at]) : rate * x[at];
        NAME(exponentials)(x, 4);
        for (int at = 0; at < 4; at++) NAME(save_wide)(kept + i + at * HALF, of_half(size, i + at * HALF), x[at]);
    }
}

/* Reads what some columns of a head's state hold for the key of a row, decayed but for what all columns share. */
INLINE TARGET void NAME(hold)(struct columns state, int64_t key_size, const struct position *row, lanes *held,
                              const enum kind kind, const int n_vectors, const int n) {
    for (int at = 0; at < n_vectors; at++) held[at] = (lanes){0};
    for (int64_t i = 0; i < key_size; i++) {
        for (int c = 0; c < n_vectors * LANES; c += PARTS)
            __builtin_prefetch(state.first + (i + ROWS_AHEAD) * state.stride + c);
        for (int at = 0; at < n_vectors; at++)
            held[at] = NAME(fused)(NAME(load_floats)(state.first + i * state.stride + at * LANES, n),
                                   NAME(broadcast)(key_of(row, i, kind)), held[at]);
    }
}

/* Decays some columns of a head's state, adds what a row writes, and puts what they then hold for its query in the
 * place of its values. `held` is what they hold for its key, and becomes that for the key of the row after it. */
INLINE TARGET void NAME(update)(struct columns from, struct columns to, int64_t key_size, const struct position *row,
                                const struct position *next, float *values, float skip, lanes *held,
                                const enum kind kind, const int n_vectors, const int n) {
    lanes read[4] = {0}, written[4], holds[4] = {0};
    const float decay = kind == BY_COLUMN ? 1 : row->decay;
    for (int at = 0; at < n_vectors; at++) {
        const lanes value = NAME(load_floats)(values + at * LANES, n);
        written[at] = (kind == SCAN ? value : NAME(fused)(held[at], NAME(broadcast)(-decay), value)) * row->write;
        if (kind == SCAN) read[at] = value * skip;
    }
    for (int64_t i = 0; i < key_size; i++) {
        const lanes kept = NAME(broadcast)(kind == BY_COLUMN ? row->kept[i] : decay);
        const lanes key = NAME(broadcast)(row->key[i]), query = NAME(broadcast)(row->query[i]);
        const lanes other = NAME(broadcast)(next ? key_of(next, i, kind) : 0);
        for (int at = 0; at < n_vectors; at++) {
            const lanes before = NAME(load_floats)(from.first + i * from.stride + at * LANES, n);
            const lanes updated = NAME(fused)(before, kept, written[at] * key);
            NAME(save_floats)(to.first + i * to.stride + at * LANES, n, updated);
            read[at] = NAME(fused)(updated, query, read[at]);
            if (next) holds[at] = NAME(fused)(updated, other, holds[at]);
        }
    }
    for (int at = 0; at < n_vectors; at++) {
        NAME(save_floats)(values + at * LANES, n, read[at]);
        held[at] = holds[at];
    }
}

/* Runs rows through the columns of a head's state from `first` on. Between rows these lie together in `near`, if they
 * fit. */
INLINE TARGET void NAME(run_columns)(const struct recurrence *call, float *state, int64_t first,
                                     const struct position *rows, int64_t n_rows, float skip, float *near,
                                     const enum kind kind, const int n_vectors, const int n) {
    const int64_t key_size = call->key_size;
    const struct columns own = {state + first, call->value_size}, tile = {near, n_vectors * LANES};
    const struct columns between = key_size * tile.stride > TILE ? own : tile;
    struct columns from = own;
    lanes held[4];
    if (kind != SCAN) NAME(hold)(own, key_size, rows, held, kind, n_vectors, n);
    for (; n_rows > 1; n_rows--, rows++, from = between)
        NAME(update)(from, between, key_size, rows, kind == SCAN ? NULL : rows + 1, rows->values + first, skip, held,
                     kind, n_vectors, n);
    NAME(update)(from, own, key_size, rows, NULL, rows->values + first, skip, held, kind, n_vectors, n);
}

/* Normalizes a head's outputs, unless that is left to others, and multiplies them by their gate. */
INLINE TARGET void NAME(finish)(const struct recurrence *call, const float *read, int64_t first, const int is_bf16) {
    const int64_t size = call->value_size;
    const float factor = call->weight ? 1.0f / sqrtf(squares(read, size) / (float)size + call->eps) : 1.0f;
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = of_last(size, i);
        const lanes gate = NAME(load)(call->gate, first + i, n, is_bf16);
        const lanes opened = call->gates_alone ? 1.0f / (1.0f + NAME(exponential)(-gate)) : NAME(silu)(gate);
        lanes output = NAME(load_floats)(read + i, n) * factor;
        if (call->weight) output *= NAME(load_floats)(call->weight + i, n);
        NAME(save)(call->out, first + i, n, output * opened, is_bf16);
    }
}

INLINE TARGET void NAME(recur_head)(const struct recurrence *call, int64_t head, const enum kind kind) {
    const int64_t size = call->value_size, key_size = call->key_size;
    const float skip = kind == SCAN ? call->skip[head] : 0;
    float *state = call->state + head * key_size * size;
    _Alignas(64) float near[TILE];
    if (call->before != call->state) /* a head at a time: what is copied is still in the cache when it is read */
        memcpy(state, call->before + head * key_size * size, (size_t)(key_size * size) * sizeof *state);
    for (int64_t first = 0; first < call->n_rows; first += ROWS_IN_TURN) {
        const int64_t n_rows = call->n_rows - first < ROWS_IN_TURN ? call->n_rows - first : ROWS_IN_TURN;
        struct position rows[ROWS_IN_TURN];
        for (int64_t row = 0; row < n_rows; row++) {
            rows[row] = position_of(call, head, first + row);
            if (kind == BY_COLUMN) NAME(keep_columns)(call, first + row, head, rows[row].kept);
        }
        int64_t i = 0;
        for (; i + BLOCK <= size; i += BLOCK)
            NAME(run_columns)(call, state, i, rows, n_rows, skip, near, kind, BLOCK / LANES, LANES);
        for (; i + LANES <= size; i += LANES)
            NAME(run_columns)(call, state, i, rows, n_rows, skip, near, kind, 1, LANES);
        if (i < size) NAME(run_columns)(call, state, i, rows, n_rows, skip, near, kind, 1, (int)(size - i));
        for (int64_t row = 0; row < n_rows; row++) {
            const int64_t place = ((first + row) * call->n_heads + head) * size;
            if (call->is_bf16)
                NAME(finish)(call, rows[row].values, place, 1);
            else
                NAME(finish)(call, rows[row].values, place, 0);
        }
    }
}

static TARGET void NAME(recur)(const void *argument, int64_t begin, int64_t end) {
    const struct recurrence *call = argument;
    for (int64_t head = begin; head < end; head++) {
        if (call->skip)
            NAME(recur_head)(call, head, SCAN);
        else if (call->by_column)
            NAME(recur_head)(call, head, BY_COLUMN);
        else
            NAME(recur_head)(call, head, BY_HEAD);
    }
}

static const struct recurrence_steps NAME(recurrence) = {.convolve = NAME(convolve), .recur = NAME(recur)};

#undef BLOCK
#include "vectors_end.h"

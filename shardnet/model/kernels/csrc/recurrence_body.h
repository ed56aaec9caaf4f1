/* Included by recurrence.c once for each instruction set, given by TARGET and NAME; its vectors have LANES lanes. */

#include "vectors_body.h"

#define BLOCK (4 * LANES)

/* Takes the sigmoids of `n` values, in place. */
INLINE TARGET void NAME(open)(float *values, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const int width = of_last(n, i);
        NAME(save_floats)(values + i, width, 1.0f / (1.0f + NAME(exponential)(-NAME(load_floats)(values + i, width))));
    }
}

/* Multiplies `n` values by their sigmoids, in place. */
INLINE TARGET void NAME(activate)(float *values, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const int width = of_last(n, i);
        NAME(save_floats)(values + i, width, NAME(silu)(NAME(load_floats)(values + i, width)));
    }
}

/* Convolves the columns of row `row` with those of the rows before, and applies the activation. */
INLINE TARGET void NAME(convolve_row)(const struct recurrence *call, int64_t row, float *restrict mixed,
                                      const int is_bf16) {
    const int64_t width = columns_of(call);
    if (call->taps_bias)
        memcpy(mixed, call->taps_bias, (size_t)width * sizeof *mixed);
    else
        memset(mixed, 0, (size_t)width * sizeof *mixed);
    for (int64_t tap = 0; tap < call->n_taps; tap++) {
        const float *taps = call->taps + tap * width;
        const int64_t first = (row + tap) * width;
        for (int64_t i = 0; i < width; i++) mixed[i] += taps[i] * number(call->rows, first + i, is_bf16);
    }
    NAME(activate)(mixed, width);
}

/* Divides the vectors of all heads by their lengths. */
INLINE TARGET void NAME(unit)(float *heads, int64_t n_heads, int64_t size, float scale) {
    for (int64_t head = 0; head < n_heads; head++) {
        float *values = heads + head * size;
        const float factor = scale / sqrtf(squares(values, size) + UNIT_EPS);
        for (int64_t i = 0; i < size; i++) values[i] *= factor;
    }
}

static TARGET void NAME(convolve)(const void *argument, int64_t begin, int64_t end) {
    const struct recurrence *call = argument;
    const float scale = 1.0f / sqrtf((float)call->key_size);
    for (int64_t row = begin; row < end; row++) {
        float *mixed = call->mixed + row * columns_of(call);
        if (call->is_bf16)
            NAME(convolve_row)(call, row, mixed, 1);
        else
            NAME(convolve_row)(call, row, mixed, 0);
        if (call->skip) continue;
        NAME(unit)(mixed, call->n_key_heads, call->key_size, scale);
        NAME(unit)(mixed + call->n_key_heads * call->key_size, call->n_key_heads, call->key_size, 1.0f);
    }
}

/* Decays some columns of a head's state, reads what it holds for the key, writes the difference to the values, and
 * puts what it holds for the query in their place. With `kept` each column of a key decays by itself, and `decay` is
 * 1. */
INLINE TARGET void NAME(update)(float *state, int64_t stride, int64_t key_size, const float *key, const float *query,
                                float *values, float decay, float write, const float *kept, const int n_vectors,
                                int n) {
    lanes held[4] = {0}, read[4] = {0}, difference[4];
    for (int64_t i = 0; i < key_size; i++) {
        const float of_key = kept ? key[i] * kept[i] : key[i];
        for (int at = 0; at < n_vectors; at++)
            held[at] =
                NAME(fused)(NAME(load_floats)(state + i * stride + at * LANES, n), NAME(broadcast)(of_key), held[at]);
    }
    for (int at = 0; at < n_vectors; at++)
        difference[at] =
            NAME(fused)(held[at], NAME(broadcast)(-decay), NAME(load_floats)(values + at * LANES, n)) * write;
    for (int64_t i = 0; i < key_size; i++)
        for (int at = 0; at < n_vectors; at++) {
            float *place = state + i * stride + at * LANES;
            const lanes added = difference[at] * key[i];
            const float own = kept ? kept[i] : decay;
            const lanes updated = NAME(fused)(NAME(load_floats)(place, n), NAME(broadcast)(own), added);
            NAME(save_floats)(place, n, updated);
            read[at] = NAME(fused)(updated, NAME(broadcast)(query[i]), read[at]);
        }
    for (int at = 0; at < n_vectors; at++) NAME(save_floats)(values + at * LANES, n, read[at]);
}

/* All columns. */
INLINE TARGET void NAME(update_all)(float *state, int64_t size, int64_t key_size, const float *key, const float *query,
                                    float *values, float decay, float write, const float *kept) {
    int64_t i = 0;
    for (; i + BLOCK <= size; i += BLOCK)
        NAME(update)(state + i, size, key_size, key, query, values + i, decay, write, kept, 4, LANES);
    for (; i + LANES <= size; i += LANES)
        NAME(update)(state + i, size, key_size, key, query, values + i, decay, write, kept, 1, LANES);
    if (i < size)
        NAME(update)(state + i, size, key_size, key, query, values + i, decay, write, kept, 1, (int)(size - i));
}

/* The same of Mamba-2: decays, adds the values weighted by the step, and reads with what goes past the state. */
INLINE TARGET void NAME(scan)(float *state, int64_t stride, int64_t key_size, const float *key, const float *query,
                              float *values, float decay, float step, float skip, int n) {
    const lanes value = NAME(load_floats)(values, n), written = value * step;
    lanes read = value * skip;
    for (int64_t i = 0; i < key_size; i++) {
        float *place = state + i * stride;
        const lanes updated = NAME(fused)(NAME(load_floats)(place, n), NAME(broadcast)(decay), written * key[i]);
        NAME(save_floats)(place, n, updated);
        read = NAME(fused)(updated, NAME(broadcast)(query[i]), read);
    }
    NAME(save_floats)(values, n, read);
}

/* Normalizes a head's outputs, unless that is left to others, and multiplies them by their gate. */
INLINE TARGET void NAME(finish)(const struct recurrence *call, const float *read, int64_t first, const int is_bf16) {
    const int64_t size = call->value_size;
    const float factor = call->weight ? 1.0f / sqrtf(squares(read, size) / (float)size + call->eps) : 1.0f;
    for (int64_t begin = 0; begin < size; begin += PARTS) {
        const int64_t n = size - begin < PARTS ? size - begin : PARTS;
        float gate[PARTS] = {0};
        for (int64_t i = 0; i < n; i++) gate[i] = number(call->gate, first + begin + i, is_bf16);
        if (call->gates_alone)
            NAME(open)(gate, PARTS);
        else
            NAME(activate)(gate, PARTS);
        for (int64_t i = 0; i < n; i++) {
            const float weight = call->weight ? call->weight[begin + i] : 1.0f;
            const float output = read[begin + i] * factor * weight * gate[i];
            if (is_bf16)
                ((uint16_t *)call->out)[first + begin + i] = to_bf16(output);
            else
                ((float *)call->out)[first + begin + i] = output;
        }
    }
}

INLINE TARGET void NAME(recur_head)(const struct recurrence *call, int64_t head) {
    const int64_t size = call->value_size, key_size = call->key_size, keys = call->n_key_heads * key_size;
    const int64_t n_shared = call->n_heads / call->n_key_heads;
    const int64_t of_key = (call->takes_turns ? head % call->n_key_heads : head / n_shared) * key_size;
    float *state = call->state + head * key_size * size;
    if (call->before != call->state) /* a head at a time: what is copied is still in the cache when it is read */
        memcpy(state, call->before + head * key_size * size, (size_t)(key_size * size) * sizeof *state);
    for (int64_t row = 0; row < call->n_rows; row++) {
        float *mixed = call->mixed + row * columns_of(call), *values = mixed + 2 * keys + head * size;
        const float *query = mixed + of_key, *key = query + keys;
        const int64_t place = row * call->n_heads + head;
        if (call->kept) {
            float *kept = call->kept + head * key_size;
            const float *decays = call->decay + place * key_size, *biases = call->bias + head * key_size;
            for (int64_t i = 0; i < key_size; i++) {
                const double rate = call->rate[head], step = (double)decays[i] + biases[i];
                kept[i] = (float)exponential_of(call->decay_floor < 0
                                                    ? call->decay_floor / (1 + exponential_of(rate * step))
                                                    : rate * steps_of(step));
            }
            const float write = (float)(call->write_scale / (1 + exponential_of(-(double)call->write[place])));
            NAME(update_all)(state, size, key_size, key, query, values, 1, write, kept);
            NAME(finish)(call, values, place * size, call->is_bf16);
            continue;
        }
        const double steps = steps_of((double)call->decay[place] + call->bias[head]);
        const float decay = (float)exponential_of(call->rate[head] * steps);
        if (call->skip) {
            for (int64_t i = 0; i < size; i += LANES)
                NAME(scan)(state + i, size, key_size, key, query, values + i, decay, (float)steps, call->skip[head],
                           of_last(size, i));
            NAME(finish)(call, values, place * size, call->is_bf16);
            continue;
        }
        const float write = (float)(call->write_scale / (1 + exponential_of(-(double)call->write[place])));
        NAME(update_all)(state, size, key_size, key, query, values, decay, write, NULL);
        if (call->is_bf16)
            NAME(finish)(call, values, place * size, 1);
        else
            NAME(finish)(call, values, place * size, 0);
    }
}

static TARGET void NAME(recur)(const void *argument, int64_t begin, int64_t end) {
    const struct recurrence *call = argument;
    for (int64_t head = begin; head < end; head++) NAME(recur_head)(call, head);
}

static const struct recurrence_steps NAME(recurrence) = {.convolve = NAME(convolve), .recur = NAME(recur)};

#undef BLOCK
#include "vectors_end.h"

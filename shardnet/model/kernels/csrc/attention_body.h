/* Included by sublayers_body.h: how decode rows attend over the keys and values in their slots.
 *
 * One row and some query heads of one KV head at a time. For KEYS keys at a time: scores, running softmax, and the
 * weighted sum of values. Keys are transposed into columns, so that a vector holds one column of many keys: scores need
 * no horizontal sums, and each transposed column serves all queries.
 */

/* A part of a value's 32 bits: the first or second of two bfloat16, or one of four int8, which `scales` are for. */
INLINE TARGET lanes NAME(part)(uints bits, int part, const enum kind kind, lanes scales) {
    if (kind == FLOAT32) return (lanes)bits;
    if (kind == BFLOAT16) return (lanes)(part ? bits & 0xffff0000 : bits << 16);
    return __builtin_convertvector((ints)(bits << (24 - 8 * part)) >> 24, lanes) * scales;
}

/* Transposes up to LANES keys of `n_words` 32-bit words: the keys' first words, then their second ones. Lanes beyond
 * `n` repeat the last key. */
INLINE TARGET void NAME(transpose)(uints *columns, const char *rows, int64_t stride, int n, int64_t n_words) {
    for (int lane = 0; lane < LANES; lane += 4) {
        const char *from[4];
        for (int i = 0; i < 4; i++) from[i] = rows + (lane + i < n ? lane + i : n - 1) * stride;
        char *to = (char *)columns + 4 * lane;
        int64_t word = 0;
        for (; word + 4 <= n_words; word += 4) {
            quad rows4[4], pairs[4];
            for (int i = 0; i < 4; i++) memcpy(&rows4[i], from[i] + 4 * word, sizeof(quad));
            for (int i = 0; i < 4; i += 2) {
                pairs[i] = PICK(rows4[i], rows4[i + 1], 0, 4, 1, 5);
                pairs[i + 1] = PICK(rows4[i], rows4[i + 1], 2, 6, 3, 7);
            }
            for (int i = 0; i < 2; i++) {
                const quad even = PICK(pairs[i], pairs[i + 2], 0, 1, 4, 5);
                const quad odd = PICK(pairs[i], pairs[i + 2], 2, 3, 6, 7);
                memcpy(to + (word + 2 * i) * (int64_t)sizeof(uints), &even, sizeof even);
                memcpy(to + (word + 2 * i + 1) * (int64_t)sizeof(uints), &odd, sizeof odd);
            }
        }
        for (; word < n_words; word++)
            for (int i = 0; i < 4; i++) memcpy(to + word * (int64_t)sizeof(uints) + 4 * i, from[i] + 4 * word, 4);
    }
}

/* Scores [n_queries][KEYS] of up to LANES keys for queries [head_size][n_queries]. */
INLINE TARGET void NAME(score)(const struct attention_call *call, const char *keys, int n, const float *queries,
                               float *scores, const int n_queries, const enum kind kind) {
    const int per_word = kind == INT8 ? 4 : kind == BFLOAT16 ? 2 : 1;
    const int64_t n_words = call->head_size / per_word;
    uints columns[MAX_HEAD];
    const int n_apart = n_queries > 2 ? 1 : per_word;
    lanes sums[MAX_QUERIES][4] = {{{0}}}, scales = {0};
    NAME(transpose)(columns, keys, call->row_bytes, n, n_words);
    for (int64_t word = 0; word < n_words; word++) {
        if (kind == INT8 && word * 4 % call->group == 0) {
            const char *from = keys + call->head_size + word * 4 / call->group * 2;
            float apart[LANES];
            for (int i = 0; i < LANES; i++) {
                uint16_t scale;
                memcpy(&scale, from + (i < n ? i : n - 1) * call->row_bytes, 2);
                apart[i] = from_bf16(scale);
            }
            memcpy(&scales, apart, sizeof scales);
        }
        for (int part = 0; part < per_word; part++) {
            const lanes column = NAME(part)(columns[word], part, kind, scales);
            const float *query = queries + (word * per_word + part) * n_queries;
            for (int q = 0; q < n_queries; q++) sums[q][part % n_apart] += column * query[q];
        }
    }
    for (int q = 0; q < n_queries; q++) {
        for (int i = 1; i < n_apart; i++) sums[q][0] += sums[q][i];
        memcpy(scores + q * KEYS, &sums[q][0], sizeof(lanes));
    }
}

/* Loads and dequantises columns of a value in its slot. */
INLINE TARGET lanes NAME(value)(const struct attention_call *call, const char *row, int64_t begin, int n,
                                const enum kind kind) {
    if (kind != INT8) return NAME(load)(row, begin, n, kind == BFLOAT16);
    uint16_t scale;
    bytes narrow;
    memcpy(&narrow, row + begin, sizeof narrow);
    memcpy(&scale, row + call->head_size + begin / call->group * 2, 2);
    return __builtin_convertvector(__builtin_convertvector(narrow, ints), lanes) * from_bf16(scale);
}

/* totals = totals * less + weights * values, for `n` values and some of their columns; weights: [n_queries][KEYS]. */
INLINE TARGET void NAME(weigh_columns)(const struct attention_call *call, const char *row, int n, const float *weights,
                                       const float *less, float (*totals)[MAX_HEAD], int64_t begin, int width,
                                       const int n_vectors, const int n_queries, const enum kind kind) {
    lanes sums[MAX_QUERIES][4];
    for (int q = 0; q < n_queries; q++)
        for (int c = 0; c < n_vectors; c++) {
            memcpy(&sums[q][c], &totals[q][begin + c * LANES], sizeof(lanes));
            sums[q][c] *= less[q];
        }
    for (int i = 0; i < n; i++, row += call->row_bytes, weights++)
        for (int c = 0; c < n_vectors; c++) {
            const lanes value = NAME(value)(call, row, begin + c * LANES, width, kind);
            for (int q = 0; q < n_queries; q++) sums[q][c] += weights[q * KEYS] * value;
        }
    for (int q = 0; q < n_queries; q++)
        for (int c = 0; c < n_vectors; c++) memcpy(&totals[q][begin + c * LANES], &sums[q][c], sizeof(lanes));
}

INLINE TARGET void NAME(weigh)(const struct attention_call *call, const char *values, int n, const float *weights,
                               const float *less, float (*totals)[MAX_HEAD], const int n_queries,
                               const enum kind kind) {
    const int n_vectors = n_queries > 4 ? 1 : n_queries > 2 ? 2 : 4; /* enough independent sums to hide latency */
    const int64_t size = call->head_size;
    int64_t c = 0;
    for (; c + n_vectors * LANES <= size; c += n_vectors * LANES)
        NAME(weigh_columns)(call, values, n, weights, less, totals, c, LANES, n_vectors, n_queries, kind);
    for (; c < size; c += LANES)
        NAME(weigh_columns)(call, values, n, weights, less, totals, c, of_last(size, c), 1, n_queries, kind);
}

/* Turns scores of `n` keys into softmax weights relative to the largest score so far. Returns the factor by which
 * earlier weights shrink. */
INLINE TARGET float NAME(softmax)(float *scores, int n, float *best, lanes *sum) {
    const lanes none = (lanes){0} - INFINITY;
    lanes most = none;
    for (int i = 0; i < n; i += LANES) {
        lanes some;
        memcpy(&some, scores + i, sizeof some);
        const ints is_there = NAME(numbers)() < n - i;
        some = (lanes)((is_there & (ints)some) | (~is_there & (ints)none));
        memcpy(scores + i, &some, sizeof some);
        const ints is_more = ~(some <= most); /* true for NaN, too */
        most = (lanes)((is_more & (ints)some) | (~is_more & (ints)most));
    }
    const float largest = NAME(largest)(most);
    float less = 1.0f;
    if (!(largest <= *best)) {
        const lanes shrunk = NAME(exponential)((lanes){0} + (*best - largest));
        less = shrunk[0];
        *best = largest;
    }
    *sum *= less;
    for (int i = 0; i < n; i += LANES) {
        lanes some;
        memcpy(&some, scores + i, sizeof some);
        const ints is_there = NAME(numbers)() < n - i;
        some = (lanes)(is_there & (ints)NAME(exponential)(some - *best));
        *sum += some;
        memcpy(scores + i, &some, sizeof some);
    }
    return less;
}

/* Attends one row with `n` query heads of a group, padded to `n_queries`. */
INLINE TARGET void NAME(attend_group)(const struct attention_call *call, const struct span *span, int64_t row,
                                      int64_t kv_head, int64_t first_query, int n, const int n_queries,
                                      const enum kind kind) {
    const int is_bf16 = call->residual.is_bf16;
    const int64_t size = call->head_size, stride = call->row_bytes;
    const struct slot_layer *stored = &span->layers[call->layer];
    const int64_t position = span->position + row - span->start;
    const int64_t first = call->window && position >= call->window ? position - call->window + 1 : 0;
    const int64_t begin = (kv_head * stored->capacity + first - stored->first) * stride;
    const int64_t n_seen = position - first + 1;
    const int64_t head = kv_head * (call->n_heads / call->n_kv_heads) + first_query;
    const int64_t row_heads = call->n_heads + 2 * call->n_kv_heads;
    const char *keys = (char *)stored->keys + begin, *values = (char *)stored->values + begin;
    float queries[MAX_HEAD * MAX_QUERIES], scores[MAX_QUERIES * KEYS], totals[MAX_QUERIES][MAX_HEAD];
    float best[MAX_QUERIES], less[MAX_QUERIES] = {0};
    lanes sums[MAX_QUERIES];
    for (int q = 0; q < n_queries; q++) {
        const char *query = at(call->projected, (row * row_heads + head + q) * size, is_bf16);
        best[q] = -INFINITY;
        sums[q] = (lanes){0};
        for (int64_t i = 0; i < size; i++)
            queries[i * n_queries + q] = q < n ? number(query, i, is_bf16) * call->scale : 0;
        for (int64_t i = 0; i < size; i += LANES) memset(&totals[q][i], 0, sizeof(lanes));
    }
    for (int64_t seen = 0; seen < n_seen; seen += KEYS, keys += KEYS * stride, values += KEYS * stride) {
        const int n_keys = n_seen - seen < KEYS ? (int)(n_seen - seen) : KEYS;
        for (int i = 0; i < n_keys; i += LANES) {
            const int n_lanes = of_last(n_keys, i);
            if (seen + i + AHEAD + LANES <= n_seen) prefetch(keys, stride, i + AHEAD, i + AHEAD + LANES);
            prefetch(values, stride, i, i + n_lanes);
            NAME(score)(call, keys + i * stride, n_lanes, queries, scores + i, n_queries, kind);
        }
        for (int q = 0; q < n; q++) less[q] = NAME(softmax)(scores + q * KEYS, n_keys, &best[q], &sums[q]);
        NAME(weigh)(call, values, n_keys, scores, less, totals, n_queries, kind);
    }
    for (int q = 0; q < n; q++) {
        const float scale = 1.0f / NAME(sum)(sums[q]);
        for (int64_t i = 0; i < size; i += LANES) {
            lanes total;
            memcpy(&total, &totals[q][i], sizeof total);
            NAME(save_either)
            (call->attended, (row * call->n_heads + head + q) * size + i, of_last(size, i), total * scale, is_bf16);
        }
    }
}

/* One function per number of query heads, so that the compiler unrolls. */
#define ATTEND(name, kind)                                                                                          \
    static NOINLINE TARGET void NAME(name)(const struct attention_call *call, const struct span *span, int64_t row, \
                                           int64_t kv_head, int64_t query, int n) {                                 \
        if (n == 1)                                                                                                 \
            NAME(attend_group)(call, span, row, kv_head, query, n, 1, kind);                                        \
        else if (n == 2)                                                                                            \
            NAME(attend_group)(call, span, row, kv_head, query, n, 2, kind);                                        \
        else if (n <= 4)                                                                                            \
            NAME(attend_group)(call, span, row, kv_head, query, n, 4, kind);                                        \
        else                                                                                                        \
            NAME(attend_group)(call, span, row, kv_head, query, n, 8, kind);                                        \
    }
ATTEND(attend_float32, FLOAT32)
ATTEND(attend_bfloat16, BFLOAT16)
ATTEND(attend_int8, INT8)
#undef ATTEND

/* An item is one row and one KV head. */
static TARGET void NAME(attend)(const void *argument, int64_t begin, int64_t end) {
    const struct attention_call *call = argument;
    const int64_t n_group = call->n_heads / call->n_kv_heads;
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / call->n_kv_heads, kv_head = item % call->n_kv_heads;
        const struct span *span = span_of(call, row);
        if (span->is_chunk) continue;
        for (int64_t query = 0; query < n_group; query += MAX_QUERIES) {
            const int n = n_group - query < MAX_QUERIES ? (int)(n_group - query) : MAX_QUERIES;
            if (call->group)
                NAME(attend_int8)(call, span, row, kv_head, query, n);
            else if (call->residual.is_bf16)
                NAME(attend_bfloat16)(call, span, row, kv_head, query, n);
            else
                NAME(attend_float32)(call, span, row, kv_head, query, n);
        }
    }
}

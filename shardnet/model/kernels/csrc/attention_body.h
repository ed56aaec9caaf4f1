/* Included by sublayers_body.h: how rows attend over the keys and values in their slots.
 *
 * A tile is some consecutive rows of a slot with the query heads that share one KV head. Keys come in blocks of KEYS
 * positions, counted from position 0 whatever a row sees of them. A block is computed by itself: scores, softmax weights
 * relative to its own largest score, weighted sum of its values from zero. Then it is joined to the blocks before it,
 * in the order of docs/exactness.md, so that another device may compute blocks apart. A block's keys are transposed
 * into columns, so that a vector holds one column of many keys: scores need no horizontal sums, and each column serves
 * all queries of the tile. A row's bits are the same in any tile, that of a decode step too: each score is added column
 * by column, each output position by position, and what a row does not see is neither added nor counted.
 */

/* Queries that share each load of keys or values, and the vectors of keys or values that `n_queries` take at a time: as
 * many sums as there are registers for. */
#define QUERIES (LANES == 16 ? 8 : LANES == 8 ? 6 : 4)
#define VECTORS(n_queries) (n_queries == 1 ? 8 : n_queries == 2 ? 4 : 2)

/* A part of a value's 32 bits: the first or second of two bfloat16, or one of four int8, which `scales` are for. */
INLINE TARGET lanes NAME(part)(uints bits, int part, const enum kind kind, lanes scales) {
    if (kind == FLOAT32) return (lanes)bits;
    if (kind == BFLOAT16) return (lanes)(part ? bits & 0xffff0000 : bits << 16);
    return __builtin_convertvector((ints)(bits << (24 - 8 * part)) >> 24, lanes) * scales;
}

/* Transposes LANES keys of `n_words` 32-bit words from row `begin` on: columns [n_words][GROUP]. Rows outside
 * [low, high) are not read: the nearest one takes their place. */
INLINE TARGET void NAME(transpose)(uint32_t *columns, const char *rows, int64_t stride, int begin, int low, int high,
                                   int64_t n_words) {
    const char *from[LANES];
    int64_t word = 0;
    for (int i = 0; i < LANES; i++) {
        const int row = begin + i < low ? low : begin + i < high ? begin + i : high - 1;
        from[i] = rows + row * stride;
    }
    for (; word + 4 <= n_words; word += 4) {
        uint32_t *to = columns + word * GROUP;
#if LANES == 8
        __m256i rows4[4], pairs[4]; /* four words of keys i and i + 4 */
        for (int i = 0; i < 4; i++)
            rows4[i] = _mm256_loadu2_m128i((const __m128i *)(from[i + 4] + 4 * word),
                                           (const __m128i *)(from[i] + 4 * word));
        for (int i = 0; i < 4; i += 2) {
            pairs[i] = _mm256_unpacklo_epi32(rows4[i], rows4[i + 1]);
            pairs[i + 1] = _mm256_unpackhi_epi32(rows4[i], rows4[i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            _mm256_storeu_si256((__m256i *)(to + 2 * i * GROUP), _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]));
            _mm256_storeu_si256((__m256i *)(to + (2 * i + 1) * GROUP), _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]));
        }
#else
        for (int lane = 0; lane < LANES; lane += 4) {
            quad rows4[4], pairs[4];
            for (int i = 0; i < 4; i++) memcpy(&rows4[i], from[lane + i] + 4 * word, sizeof(quad));
            for (int i = 0; i < 4; i += 2) {
                pairs[i] = PICK(rows4[i], rows4[i + 1], 0, 4, 1, 5);
                pairs[i + 1] = PICK(rows4[i], rows4[i + 1], 2, 6, 3, 7);
            }
            for (int i = 0; i < 2; i++) {
                const quad even = PICK(pairs[i], pairs[i + 2], 0, 1, 4, 5);
                const quad odd = PICK(pairs[i], pairs[i + 2], 2, 3, 6, 7);
                memcpy(to + 2 * i * GROUP + lane, &even, sizeof even);
                memcpy(to + (2 * i + 1) * GROUP + lane, &odd, sizeof odd);
            }
        }
#endif
    }
    for (; word < n_words; word++)
        for (int i = 0; i < LANES; i++) memcpy(columns + word * GROUP + i, from[i] + 4 * word, 4);
}

/* The scales [groups][KEYS] of the keys [low, high). */
INLINE TARGET void NAME(read_scales)(const struct attend *call, const char *keys, int low, int high,
                                     float (*scales)[KEYS]) {
    for (int64_t group = 0; group < call->key_columns / call->group; group++)
        for (int i = low; i < high; i++) {
            uint16_t scale;
            memcpy(&scale, keys + i * call->row_bytes + call->key_columns + group * 2, 2);
            scales[group][i] = from_bf16(scale);
        }
}

/* Scores [n_queries][KEYS] of some vectors of keys for queries [query_columns][n_queries]; prefetches as many keys from
 * `next` on, which need not be there, a part for each word so that nothing waits for them. */
INLINE TARGET void NAME(score_some)(const struct attend *call, const uint32_t *columns, const float (*scales)[KEYS],
                                    const float *queries, float *scores, const char *next, const int n_vectors,
                                    const int n_queries, const enum kind kind) {
    const int n_lines = n_vectors * LANES * 4 / LINE; /* to prefetch for each word */
    const int per_word = kind == INT8 ? 4 : kind == BFLOAT16 ? 2 : 1;
    const int64_t n_words = (call->head_size + per_word - 1) / per_word;
    lanes sums[8][8], own_scales[8];
    int64_t of_group = 0, group = 0;
    for (int q = 0; q < n_queries; q++)
        for (int v = 0; v < n_vectors; v++) sums[q][v] = (lanes){0};
    for (int v = 0; v < n_vectors; v++) own_scales[v] = (lanes){0};
    for (int64_t word = 0; word < n_words; word++) {
        if (kind == INT8 && of_group == 0) {
            for (int v = 0; v < n_vectors; v++) memcpy(&own_scales[v], &scales[group][v * LANES], sizeof(lanes));
            of_group = call->group;
            group++;
        }
        of_group -= per_word;
        for (int i = 0; i < n_lines; i++, next += LINE) __builtin_prefetch(next);
        for (int part = 0; part < per_word; part++) {
            const float *query = queries + (word * per_word + part) * n_queries;
            lanes column[8];
            for (int v = 0; v < n_vectors; v++) {
                uints bits;
                memcpy(&bits, columns + word * GROUP + v * LANES, sizeof bits);
                column[v] = NAME(part)(bits, part, kind, own_scales[v]);
            }
            for (int q = 0; q < n_queries; q++)
                for (int v = 0; v < n_vectors; v++)
                    sums[q][v] = NAME(fused)(column[v], NAME(broadcast)(query[q]), sums[q][v]);
        }
    }
    for (int q = 0; q < n_queries; q++)
        for (int v = 0; v < n_vectors; v++) {
            const lanes sum = sums[q][v];
            memcpy(scores + q * KEYS + v * LANES, &sum, sizeof sum);
        }
}

/* Scores of `n` keys, a multiple of LANES. */
INLINE TARGET void NAME(score)(const struct attend *call, const uint32_t *columns, const float (*scales)[KEYS], int n,
                               const float *queries, float *scores, const char *next, const int n_queries,
                               const enum kind kind) {
    const int n_vectors = VECTORS(n_queries) * LANES < GROUP ? VECTORS(n_queries) : GROUP / LANES;
    int i = 0;
    for (; i + n_vectors * LANES <= n; i += n_vectors * LANES)
        NAME(score_some)
        (call, columns + i, (const float(*)[KEYS])(&scales[0][i]), queries, scores + i, next + i * call->row_bytes,
         n_vectors, n_queries, kind);
    for (; i < n; i += LANES)
        NAME(score_some)
        (call, columns + i, (const float(*)[KEYS])(&scales[0][i]), queries, scores + i, next + i * call->row_bytes, 1,
         n_queries, kind);
}

/* Caps the scores of the keys [begin, end). */
INLINE TARGET void NAME(cap)(float *scores, int begin, int end, float soft_cap) {
    for (int i = begin; i < end; i += LANES) {
        lanes some;
        memcpy(&some, scores + i, sizeof some);
        some = soft_cap * NAME(hyperbolic_tangent)(some);
        memcpy(scores + i, &some, sizeof some);
    }
}

/* Some scores from `i` on, and `instead` of those outside [begin, end); `is_whole`: there are none outside. */
INLINE TARGET lanes NAME(scores_within)(lanes some, int i, int begin, int end, const int is_whole, lanes instead) {
    const ints place = NAME(numbers)() + i;
    return is_whole ? some : NAME(select)((place >= begin) & (place < end), some, instead);
}

/* Turns the scores of a block into softmax weights relative to its largest score, and what is not in [begin, end)
 * into 0. Adds them up in `sums`, from zero. Returns the largest score. */
INLINE TARGET float NAME(softmax)(float *scores, int begin, int end, lanes *sums, const int is_whole) {
    const lanes none = (lanes){0} - INFINITY;
    const int first = begin / PARTS * PARTS;
    lanes most = none, parts[REGISTERS];
    for (int i = first; i < end; i += LANES) {
        lanes some;
        memcpy(&some, scores + i, sizeof some);
        most = NAME(more)(most, NAME(scores_within)(some, i, begin, end, is_whole, none));
    }
    const float largest = NAME(largest)(most);
    const lanes from = NAME(broadcast)(largest);
    for (int r = 0; r < REGISTERS; r++) parts[r] = (lanes){0};
    for (int i = first; i < end; i += PARTS)
        for (int r = 0; r < REGISTERS; r++) {
            const int place = i + r * LANES;
            lanes some;
            memcpy(&some, scores + place, sizeof some);
            some = NAME(exponential)(some - from);
            some = NAME(scores_within)(some, place, begin, end, is_whole, (lanes){0});
            parts[r] += some;
            memcpy(scores + place, &some, sizeof some);
        }
    memcpy(sums, parts, sizeof parts);
    return largest;
}

/* Loads and dequantises columns of a value in its slot. */
INLINE TARGET lanes NAME(value)(const struct attend *call, const char *row, int64_t begin, int n,
                                const enum kind kind) {
    if (kind != INT8) return NAME(load)(row, begin, n, kind == BFLOAT16);
    uint16_t scale;
    bytes narrow;
    memcpy(&narrow, row + begin, sizeof narrow);
    memcpy(&scale, row + call->value_columns + begin / call->group * 2, 2);
    return __builtin_convertvector(__builtin_convertvector(narrow, ints), lanes) * from_bf16(scale);
}

/* Joins some outputs of a block to those of the blocks before. */
INLINE TARGET void NAME(join)(float *totals, lanes added, float less, float own) {
    lanes total;
    memcpy(&total, totals, sizeof total);
    total = NAME(fused)(added, NAME(broadcast)(own), total * NAME(broadcast)(less));
    memcpy(totals, &total, sizeof total);
}

/* added += weights * values, for `n_keys` values, some of their columns, and the first `n` queries of `n_queries`;
 * weights: [n_queries][KEYS]. Prefetches the same columns of the values GROUP positions on. */
INLINE TARGET void NAME(weigh_columns)(const struct attend *call, const char *row, int n_keys, const float *weights,
                                       const struct outputs *to, int n, int64_t begin, int width,
                                       const int n_vectors, const int n_queries, const enum kind kind) {
    const int bytes = LANES * (kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1); /* of a vector */
    const struct outputs own = *to; /* what is stored does not change it */
    lanes sums[8][8];
    for (int q = 0; q < n_queries; q++)
        for (int v = 0; v < n_vectors; v++) sums[q][v] = (lanes){0};
    for (int q = 0; q < n_queries && !own.is_first; q++)
        for (int v = 0; v < n_vectors; v++)
            if (q < n) memcpy(&sums[q][v], &own.added[q][begin + v * LANES], sizeof(lanes));
    for (int i = 0; i < n_keys; i++, row += call->value_bytes, weights++) {
        const char *next = row + GROUP * call->value_bytes + begin * bytes / LANES;
        lanes value[8];
        for (int v = 0; v < n_vectors; v += LINE / bytes) __builtin_prefetch(next + v * bytes);
        for (int v = 0; v < n_vectors; v++) value[v] = NAME(value)(call, row, begin + v * LANES, width, kind);
        for (int q = 0; q < n_queries; q++)
            for (int v = 0; v < n_vectors; v++)
                sums[q][v] = NAME(fused)(NAME(broadcast)(weights[q * KEYS]), value[v], sums[q][v]);
    }
    for (int q = 0; q < n_queries && !own.is_last; q++)
        for (int v = 0; v < n_vectors; v++)
            if (q < n) memcpy(&own.added[q][begin + v * LANES], &sums[q][v], sizeof(lanes));
    for (int q = 0; q < n_queries && own.is_last; q++)
        for (int v = 0; v < n_vectors; v++)
            if (q < n) NAME(join)(&own.totals[q][begin + v * LANES], sums[q][v], own.less[q], own.own[q]);
}

/* All columns. */
INLINE TARGET void NAME(weigh)(const struct attend *call, const char *values, int n_keys, const float *weights,
                               const struct outputs *to, int n, const int n_queries, const enum kind kind) {
    const int n_vectors = VECTORS(n_queries);
    const int64_t size = call->value_size;
    int64_t c = 0;
    for (; c + n_vectors * LANES <= size; c += n_vectors * LANES)
        NAME(weigh_columns)(call, values, n_keys, weights, to, n, c, LANES, n_vectors, n_queries, kind);
    if (n_vectors == 8 && c + 4 * LANES <= size) {
        NAME(weigh_columns)(call, values, n_keys, weights, to, n, c, LANES, 4, n_queries, kind);
        c += 4 * LANES;
    }
    for (; c < size; c += LANES)
        NAME(weigh_columns)(call, values, n_keys, weights, to, n, c, of_last(size, c), 1, n_queries, kind);
}

/* The number of queries that `n` are padded to. */
INLINE TARGET int NAME(padded)(int n) { return n <= 2 ? n : n <= 4 ? 4 : QUERIES; }

#define KIND(name, kind)                                                                                             \
    static NOINLINE TARGET void NAME(score_##name)(const struct attend *call, const uint32_t *columns,               \
                                                   const float(*scales)[KEYS], int n_keys,                           \
                                                   const float *queries, float *scores, const char *next, int n) {   \
        for (int q = 0; q < n; q += QUERIES) {                                                                       \
            const int some = n - q < QUERIES ? n - q : QUERIES;                                                      \
            SCORE(1, kind) SCORE(2, kind) SCORE(4, kind) SCORE(6, kind) SCORE(8, kind)                               \
        }                                                                                                            \
    }                                                                                                                \
    static NOINLINE TARGET void NAME(weigh_##name)(const struct attend *call, const char *values, int n_keys,        \
                                                   const float *weights, const struct outputs *to, int n) {          \
        WEIGH(1, kind) WEIGH(2, kind) WEIGH(4, kind) WEIGH(6, kind) WEIGH(8, kind)                                   \
    }
#define SCORE(number, kind)                                                                                          \
    if (number <= QUERIES && NAME(padded)(some) == number)                                                           \
        NAME(score)                                                                                                  \
        (call, columns, scales, n_keys, queries + q * query_columns(call), scores + q * KEYS, next, number, kind);
#define WEIGH(number, kind)                                                                                          \
    if (number <= QUERIES && NAME(padded)(n) == number)                                                              \
        NAME(weigh)(call, values, n_keys, weights, to, n, number, kind);
KIND(float32, FLOAT32)
KIND(bfloat16, BFLOAT16)
KIND(int8, INT8)
#undef KIND
#undef SCORE
#undef WEIGH

/* Some rows of a span with `n_heads` query heads of one KV head: a query for each row and head, in this order. */
struct NAME(tile) {
    const struct attend *call;
    int64_t first_position; /* of the first row */
    int64_t all_see;        /* the last position that all rows see */
    int n_rows, n_heads, n;
    float best[TILE], largest[TILE]; /* scores of all blocks so far, of this one */
    float less[TILE], own[TILE];     /* factors of what those before have added up to, and of this one's */
    lanes sums[TILE][REGISTERS], parts[TILE][REGISTERS];
    float scores[TILE + 8][KEYS]; /* as many queries as are padded to */
    float totals[TILE][MAX_HEAD];
    float added[TILE][MAX_HEAD]; /* of the block so far */
    float queries[TILE * MAX_HEAD];
    float scales[MAX_HEAD / PARTS][KEYS];
    uint32_t columns[MAX_HEAD * GROUP];
};

/* The positions that a tile's row sees of those from `block` on: [begin, end). */
INLINE void NAME(seen)(const struct NAME(tile) *tile, int row, int64_t block, int *begin, int *end) {
    const int64_t position = tile->first_position + row, first = first_seen(tile->call->window, position);
    const int64_t last = position > tile->all_see ? position : tile->all_see;
    *begin = first <= block ? 0 : first - block < KEYS ? (int)(first - block) : KEYS;
    *end = last < block ? 0 : last + 1 - block < KEYS ? (int)(last + 1 - block) : KEYS;
}

/* Adds the values [begin, end) of a block, weighted, for `n` queries. */
INLINE TARGET void NAME(weigh_queries)(struct NAME(tile) *tile, const char *values, int query, int n, int begin,
                                       int end, int is_first, int is_last) {
    const struct attend *call = tile->call;
    const float *weights = &tile->scores[query][begin];
    const struct outputs to = {tile->added + query, tile->totals + query, tile->less + query, tile->own + query,
                               is_first, is_last};
    if (begin >= end) return;
    values += begin * call->value_bytes;
    if (call->group)
        NAME(weigh_int8)(call, values, end - begin, weights, &to, n);
    else if (call->kv_is_bf16)
        NAME(weigh_bfloat16)(call, values, end - begin, weights, &to, n);
    else
        NAME(weigh_float32)(call, values, end - begin, weights, &to, n);
}

/* The same for what each of the queries' rows sees of these values. */
static NOINLINE TARGET void NAME(weigh_each)(struct NAME(tile) *tile, const char *values, int64_t block, int query,
                                             int n, int begin, int end) {
    for (int own; begin < end && n > 0; query += own, n -= own) {
        int first, last;
        own = tile->n_heads - query % tile->n_heads;
        if (own > n) own = n;
        NAME(seen)(tile, query / tile->n_heads, block, &first, &last);
        NAME(weigh_queries)
        (tile, values, query, own, first > begin ? first : begin, last < end ? last : end, 0, 0);
    }
}

/* The same where the rows of `n` queries see unlike parts of a block, [low, high) together: what all see is weighted
 * for all at once, the positions before and behind for each row. */
static NOINLINE TARGET void NAME(weigh_unlike)(struct NAME(tile) *tile, const char *values, int64_t block, int query,
                                               int n, int begin, int end, int low, int high) {
    const int64_t size = tile->call->value_size;
    int from, to, ignored;
    NAME(seen)(tile, (query + n - 1) / tile->n_heads, block, &from, &ignored);
    NAME(seen)(tile, query / tile->n_heads, block, &ignored, &to);
    from = from < begin ? begin : from < end ? from : end;
    to = to < from ? from : to < end ? to : end;
    for (int q = query; begin == low && q < query + n; q++)
        for (int64_t c = 0; c < size; c += LANES) memset(&tile->added[q][c], 0, sizeof(lanes));
    NAME(weigh_each)(tile, values, block, query, n, begin, from);
    NAME(weigh_queries)(tile, values, query, n, from, to, 0, 0);
    NAME(weigh_each)(tile, values, block, query, n, to, end);
    for (int q = query; end == high && q < query + n; q++) {
        int first, last;
        NAME(seen)(tile, q / tile->n_heads, block, &first, &last);
        for (int64_t c = 0; first < last && c < size; c += LANES) {
            lanes added;
            memcpy(&added, &tile->added[q][c], sizeof added);
            NAME(join)(&tile->totals[q][c], added, tile->less[q], tile->own[q]);
        }
    }
}

/* Adds the values [low, high) of a block, GROUP at a time, which stay in the first cache for all queries, and joins
 * them to those of the blocks before. */
static NOINLINE TARGET void NAME(weigh_block)(struct NAME(tile) *tile, const char *values, int64_t block, int low,
                                              int high) {
    for (int begin = low, end; begin < high; begin = end) {
        end = begin / GROUP * GROUP + GROUP < high ? begin / GROUP * GROUP + GROUP : high;
        for (int query = 0; query < tile->n; query += QUERIES) {
            const int n = tile->n - query < QUERIES ? tile->n - query : QUERIES;
            int first, last, first_of_last, last_of_last;
            NAME(seen)(tile, query / tile->n_heads, block, &first, &last);
            NAME(seen)(tile, (query + n - 1) / tile->n_heads, block, &first_of_last, &last_of_last);
            if (first == first_of_last && last == last_of_last)
                NAME(weigh_queries)
                (tile, values, query, n, first > begin ? first : begin, last < end ? last : end, begin <= first,
                 last <= end);
            else
                NAME(weigh_unlike)(tile, values, block, query, n, begin, end, low, high);
        }
    }
}

/* Scores the keys [low, high) of a block, GROUP at a time. */
static NOINLINE TARGET void NAME(score_block)(struct NAME(tile) *tile, const char *keys, int64_t block, int low,
                                              int high) {
    const struct attend *call = tile->call;
    const int per_word = call->group ? 4 : call->kv_is_bf16 ? 2 : 1;
    if (call->group) NAME(read_scales)(call, keys, low, high, tile->scales);
    for (int begin = low / LANES * LANES; begin < high; begin += GROUP) {
        const int end = begin + GROUP < high ? begin + GROUP : (high + LANES - 1) / LANES * LANES;
        for (int i = begin; i < end; i += LANES)
            NAME(transpose)
            (tile->columns + i - begin, keys, call->row_bytes, i, low, high, (call->head_size + per_word - 1) / per_word);
        const int64_t first = block + begin;
        const int64_t before = first <= tile->all_see ? 0 : first - tile->first_position; /* rows that do not see it */
        const int query = before > 0 ? (int)before * tile->n_heads / QUERIES * QUERIES : 0;
        const float(*scales)[KEYS] = (const float(*)[KEYS])(&tile->scales[0][begin]);
        const float *queries = tile->queries + query * query_columns(call);
        float *scores = &tile->scores[query][begin];
        const char *next = keys + (begin + GROUP) * call->row_bytes;
        if (call->group)
            NAME(score_int8)(call, tile->columns, scales, end - begin, queries, scores, next, tile->n - query);
        else if (call->kv_is_bf16)
            NAME(score_bfloat16)(call, tile->columns, scales, end - begin, queries, scores, next, tile->n - query);
        else
            NAME(score_float32)(call, tile->columns, scales, end - begin, queries, scores, next, tile->n - query);
    }
}

/* Turns the scores of a block into weights, and joins their sums and largest scores to those before. */
static NOINLINE TARGET void NAME(weights)(struct NAME(tile) *tile, int64_t block) {
    const float soft_cap = tile->call->soft_cap;
    for (int query = 0; query < TILE; query++) tile->largest[query] = -INFINITY;
    for (int query = 0; query < tile->n; query++) {
        float *scores = tile->scores[query];
        int begin, end;
        NAME(seen)(tile, query / tile->n_heads, block, &begin, &end);
        if (begin >= end) continue;
        if (soft_cap > 0) NAME(cap)(scores, begin / LANES * LANES, end, soft_cap);
        tile->largest[query] = begin == 0 && end == KEYS ? NAME(softmax)(scores, 0, KEYS, tile->parts[query], 1)
                                                         : NAME(softmax)(scores, begin, end, tile->parts[query], 0);
    }
    for (int query = 0; query < tile->n; query += LANES) {
        lanes best, largest;
        memcpy(&best, tile->best + query, sizeof best);
        memcpy(&largest, tile->largest + query, sizeof largest);
        const lanes most = NAME(select)(largest <= best, best, largest);
        const lanes less = NAME(exponential)(best - most), own = NAME(exponential)(largest - most);
        memcpy(tile->best + query, &most, sizeof most);
        memcpy(tile->less + query, &less, sizeof less);
        memcpy(tile->own + query, &own, sizeof own);
    }
    for (int query = 0; query < tile->n; query++) {
        const lanes less = NAME(broadcast)(tile->less[query]), own = NAME(broadcast)(tile->own[query]);
        for (int r = 0; tile->largest[query] != -INFINITY && r < REGISTERS; r++)
            tile->sums[query][r] = NAME(fused)(tile->parts[query][r], own, tile->sums[query][r] * less);
    }
}

/* Attends over the KEYS positions from `block` on; `keys` and `values` are where position `block` is, or would be. */
static NOINLINE TARGET void NAME(attend_block)(struct NAME(tile) *tile, const char *keys, const char *values,
                                               int64_t block) {
    int low, high, ignored;
    NAME(seen)(tile, 0, block, &low, &ignored);
    NAME(seen)(tile, tile->n_rows - 1, block, &ignored, &high);
    NAME(score_block)(tile, keys, block, low, high);
    NAME(weights)(tile, block);
    NAME(weigh_block)(tile, values, block, low, high);
}

/* Takes the queries of `n_rows` rows of a span from `row` on, `n_heads` from `head` on, times the scale. */
static NOINLINE TARGET void NAME(take_queries)(struct NAME(tile) *tile, const struct attend *call,
                                               const struct span *span, int64_t row, int n_rows, int64_t head,
                                               int n_heads) {
    const int is_bf16 = call->is_bf16;
    const int64_t size = call->head_size, n_columns = query_columns(call);
    const float scale = call->soft_cap > 0 ? call->scale / call->soft_cap : call->scale;
    tile->call = call;
    tile->first_position = span->position + row - span->start;
    tile->all_see = tile->first_position;
    if (span->see_each_other && !call->is_causal) tile->all_see = span->position + span->end - span->start - 1;
    tile->n_rows = n_rows;
    tile->n_heads = n_heads;
    tile->n = n_rows * n_heads;
    for (int i = 0; i < tile->n; i++) {
        const int of_chunk = tile->n - i / QUERIES * QUERIES;
        const int n_queries = NAME(padded)(of_chunk < QUERIES ? of_chunk : QUERIES);
        const int64_t own = head + i % n_heads;
        const char *query = at(call->queries, (row + i / n_heads) * call->row_stride + own * size, is_bf16);
        float *to = tile->queries + i / QUERIES * QUERIES * n_columns + i % QUERIES;
        for (int64_t c = 0; c < n_columns; c++) {
            to[c * n_queries] = c < size ? number(query, c, is_bf16) * scale : 0;
            if (i == tile->n - 1)
                for (int pad = i % QUERIES + 1; pad < n_queries; pad++) to[c * n_queries + pad - i % QUERIES] = 0;
        }
    }
}

/* Attends `n_rows` rows of a span from `row` on, with `n_heads` query heads from `head` on. */
static NOINLINE TARGET void NAME(attend_tile)(const struct attend *call, const struct span *span, int64_t row,
                                              int n_rows, int64_t kv_head, int64_t head, int n_heads) {
    const int is_bf16 = call->is_bf16;
    const struct slot_layer *stored = &span->layers[call->layer];
    struct NAME(tile) tile;
    for (int i = 0; i < TILE; i++) tile.best[i] = -INFINITY;
    NAME(take_queries)(&tile, call, span, row, n_rows, head, n_heads);
    for (int i = 0; i < tile.n; i++) {
        if (call->sinks) tile.best[i] = call->sinks[head + i % n_heads];
        for (int r = 0; r < REGISTERS; r++) tile.sums[i][r] = (lanes){0};
        if (call->sinks) tile.sums[i][0][0] = 1;
        for (int64_t c = 0; c < call->value_size; c += LANES) memset(&tile.totals[i][c], 0, sizeof(lanes));
    }
    const int64_t own_last = tile.first_position + n_rows - 1;
    const int64_t last = own_last > tile.all_see ? own_last : tile.all_see;
    const int64_t first = first_seen(call->window, tile.first_position);
    for (int64_t block = first / KEYS * KEYS; block <= last; block += KEYS) {
        const struct place held = place_of(stored, kv_head, block);
        const char *values = call->values_are_keys ? held.keys : held.values;
        NAME(attend_block)
        (&tile, held.keys + held.row * call->row_bytes, values + held.row * call->value_bytes, block);
    }
    for (int i = 0; i < tile.n; i++) {
        const float part = 1.0f / NAME(sum)(tile.sums[i]);
        const int64_t to = ((row + i / n_heads) * call->n_heads + head + i % n_heads) * call->value_size;
        for (int64_t c = 0; c < call->value_size; c += LANES) {
            lanes total;
            memcpy(&total, &tile.totals[i][c], sizeof total);
            NAME(save_either)(call->attended, to + c, of_last(call->value_size, c), total * part, is_bf16);
        }
    }
}

/* An item is a tile's rows and a KV head. */
static TARGET void NAME(attend)(const void *argument, int64_t begin, int64_t end) {
    const struct attend *call = argument;
    const int64_t n_group = call->n_heads / call->n_kv_heads, rows = tile_rows(call);
    const struct span *span = call->spans;
    int64_t before = 0; /* tiles of the spans before */
    for (int64_t item = begin; item < end; item++) {
        const int64_t tile = item / call->n_kv_heads, kv_head = item % call->n_kv_heads;
        for (;; span++) {
            const int64_t own = (span->end - span->start + rows - 1) / rows;
            if (tile < before + own) break;
            before += own;
        }
        const int64_t row = span->start + (tile - before) * rows;
        const int n_rows = (int)(span->end - row < rows ? span->end - row : rows);
        for (int64_t query = 0; query < n_group; query += TILE) {
            const int n = n_group - query < TILE ? (int)(n_group - query) : TILE;
            NAME(attend_tile)(call, span, row, n_rows, kv_head, kv_head * n_group + query, n);
        }
    }
}

/* Scores the positions of a chunk for some rows of a span that see so many: the sum over heads of a weight times what
 * is above 0 of a query times the position's key for the index. */
static NOINLINE TARGET void NAME(score_rows)(const struct choice *choice, const struct span *span, int64_t row,
                                             int n_rows, int64_t chunk) {
    const struct attend *call = &choice->index;
    const struct slot_layer *stored = &span->layers[call->layer];
    const int64_t seen = (span->position + row + n_rows - span->start) / choice->n_pooled; /* by the last row */
    const int64_t end = chunk + CHUNK < seen ? chunk + CHUNK : seen;
    if (seen <= choice->n_chosen) return;
    struct NAME(tile) tile;
    for (int64_t head = 0; head < call->n_heads; head += TILE / n_rows) {
        const int n = call->n_heads - head < TILE / n_rows ? (int)(call->n_heads - head) : TILE / n_rows;
        NAME(take_queries)(&tile, call, span, row, n_rows, head, n);
        tile.all_see = seen;
        for (int64_t block = chunk; block < end; block += KEYS) {
            const struct place held = place_of(stored, 0, block);
            const int high = end - block < KEYS ? (int)(end - block) : KEYS;
            NAME(score_block)(&tile, held.values + held.row * call->row_bytes, block, 0, high);
            for (int query = 0; query < tile.n; query += n) {
                const int64_t own = row + query / n;
                const float *weights = choice->weights + own * call->n_heads + head;
                float *to = choice->scores + (own - choice->first_row) * choice->stride + block;
                for (int i = 0; i < high; i += LANES) {
                    lanes sum = {0}, score;
                    if (head) memcpy(&sum, to + i, sizeof sum);
                    for (int h = 0; h < n; h++) {
                        memcpy(&score, &tile.scores[query + h][i], sizeof score);
                        sum = NAME(fused)(NAME(broadcast)(weights[h]), NAME(more)(score, (lanes){0}), sum);
                    }
                    memcpy(to + i, &sum, sizeof sum);
                }
            }
        }
    }
}

/* An item is some rows, of one span or several, and a chunk of positions. */
static TARGET void NAME(score_positions)(const void *argument, int64_t begin, int64_t end) {
    const struct choice *choice = argument;
    const int64_t n_chunks = choice->stride / CHUNK, rows = tile_rows(&choice->index);
    for (int64_t item = begin; item < end; item++) {
        int64_t row = choice->first_row + item / n_chunks * rows;
        const int64_t last = row + rows < choice->end_row ? row + rows : choice->end_row;
        while (row < last) {
            const struct span *span = span_of(&choice->index, row);
            const int64_t own = span->end < last ? span->end : last;
            NAME(score_rows)(choice, span, row, (int)(own - row), item % n_chunks * CHUNK);
            row = own;
        }
    }
}

#undef QUERIES
#undef VECTORS

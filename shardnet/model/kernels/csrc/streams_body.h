/* Included by sublayers_body.h: what mixes several residual streams around a sub-layer, to the bits of
 * layers/streams.py. */

/* A row of all streams, normalised together, as float32; or GATED: each stream by its own weights. */
INLINE TARGET void NAME(norm_streams_of)(const struct residual *r, int64_t row, const int is_bf16) {
    const struct streams *s = &r->streams;
    const int64_t all = s->count * r->width;
    const void *from = at(r->hidden, row * all, is_bf16);
    if (s->kind != GATED) {
        NAME(unit_norm_row)(s->norm.eps, from, (float *)s->normed + row * all, all, is_bf16, 0);
        return;
    }
    for (int64_t i = 0; i < all; i += r->width)
        NAME(norm_row)
        (&s->norm, at(s->norm.weight, i, s->norm.is_bf16), at(from, i, is_bf16), at(s->normed, row * all + i, is_bf16),
         r->width, is_bf16);
}

INLINE TARGET void NAME(soften_some)(const struct streams *s, int64_t begin, int64_t end, const int is_bf16) {
    const float count = (float)s->count;
    for (int64_t i = begin * s->n_inner; i < end * s->n_inner; i += LANES) {
        const int n = of_last(end * s->n_inner, i);
        const lanes x = NAME(kept)(NAME(load)(s->inner, i, n, is_bf16) / count, is_bf16);
        NAME(save)(s->inner, i, n, NAME(silu)(x), is_bf16);
    }
}

/* Makes rows and columns of factors [N, N] add up to 1, by Sinkhorn. */
INLINE TARGET void NAME(balance)(const struct streams *s, float *square) {
    const int64_t n = s->count;
    for (int64_t i = 0; i < n; i++) NAME(softmax_row)(square + i * n, square + i * n, n, 0);
    for (int64_t i = 0; i < n * n; i++) square[i] += s->eps;
    for (int64_t turn = 1; turn < 2 * s->n_rounds; turn++) { /* columns, then rows and columns */
        const int64_t step = turn % 2 ? n : 1, next = turn % 2 ? 1 : n;
        for (int64_t i = 0; i < n; i++) {
            float *own = square + i * next, sum = own[0];
            for (int64_t j = 1; j < n; j++) sum += own[j * step];
            for (int64_t j = 0; j < n; j++) own[j * step] /= sum + s->eps;
        }
    }
}

/* The factors of a row, from what `project` gives: before, behind and across the sub-layer. */
INLINE TARGET void NAME(mix_row)(const struct streams *s, int64_t row) {
    const int64_t n = s->count, n_all = s->n_inner;
    const float *from = (const float *)s->inner + row * n_all;
    float *mixes = s->mixes + row * n * (n + 2);
    for (int64_t i = 0; i < n_all; i++) mixes[i] = from[i] * s->scale[i < n ? 0 : i < 2 * n ? 1 : 2] + s->base[i];
    NAME(sigmoids)(mixes, 2 * n);
    for (int64_t i = 0; i < n; i++) {
        mixes[i] += s->eps;
        mixes[n + i] = s->magnitude * mixes[n + i] + (s->kind == BALANCED ? 0 : s->eps);
    }
    if (s->kind == BALANCED) NAME(balance)(s, mixes + 2 * n);
}

/* Adds up the streams of a row, times their factors. */
INLINE TARGET lanes NAME(weighted)(const struct residual *r, int64_t place, const float *factors, int64_t step, int n,
                                   const int is_bf16) {
    lanes total = NAME(load)(r->hidden, place, n, is_bf16) * factors[0];
    for (int64_t i = 1; i < r->streams.count; i++)
        total += NAME(load)(r->hidden, place + i * r->width, n, is_bf16) * factors[i * step];
    return total;
}

/* GATED: the mean of normed streams, each column times the sigmoid of its gate. */
INLINE TARGET lanes NAME(gated)(const struct residual *r, int64_t place, int n, const int is_bf16) {
    lanes total = {0};
    for (int64_t i = 0; i < r->streams.count; i++) {
        const int64_t own_place = place + i * r->width;
        const lanes gate = 1.0f / (1.0f + NAME(exponential)(-NAME(load)(r->streams.gates, own_place, n, is_bf16)));
        const lanes own = NAME(kept)(gate, is_bf16) * NAME(load)(r->streams.normed, own_place, n, is_bf16);
        total = i ? total + own : own;
    }
    return total / (float)r->streams.count;
}

/* Joins the streams of rows to what a sub-layer sees, in `inner`. */
INLINE TARGET void NAME(join_streams_some)(const struct residual *r, int64_t begin, int64_t end, const int is_bf16) {
    const struct streams *s = &r->streams;
    const int64_t n = s->count;
    for (int64_t row = begin; row < end; row++) {
        float *mixes = s->mixes + row * n * (n + 2);
        const float *before = s->given ? s->given + row * n : mixes;
        if (s->kind != GATED) NAME(mix_row)(s, row);
        for (int64_t i = 0; i < r->width; i += LANES) {
            const int m = of_last(r->width, i);
            const int64_t place = row * n * r->width + i;
            const lanes joined = s->kind == GATED ? NAME(gated)(r, place, m, is_bf16)
                                                  : NAME(weighted)(r, place, before, 1, m, is_bf16);
            NAME(save)(r->inner, row * r->width + i, m, joined, is_bf16);
        }
        if (s->kind != GATED) continue;
        for (int64_t i = 0; i < n; i++) {
            const float share = number(s->shares, row * n + i, is_bf16) / (float)n;
            const lanes opened = 1.0f / (1.0f + NAME(exponential)(-NAME(kept)(NAME(broadcast)(share), is_bf16)));
            mixes[n + i] = 2.0f * NAME(kept)(opened, is_bf16)[0];
        }
    }
}

/* Shares out what a sub-layer gives over the streams, and mixes these. */
INLINE TARGET void NAME(share_streams_some)(const struct residual *r, int64_t begin, int64_t end, const int is_bf16) {
    const int64_t n = r->streams.count, width = r->width;
    for (int64_t row = begin; row < end; row++) {
        const float *mixes = r->streams.mixes + row * n * (n + 2);
        for (int64_t i = 0; i < width; i += LANES) {
            const int m = of_last(width, i);
            const int64_t place = row * n * width + i;
            const lanes inner = NAME(load)(r->inner, row * width + i, m, is_bf16);
            for (int64_t stream = 0; stream < n; stream++) {
                const lanes kept = r->streams.kind == BALANCED
                                       ? NAME(weighted)(r, place, mixes + 2 * n + stream, n, m, is_bf16)
                                       : NAME(load)(r->hidden, place + stream * width, m, is_bf16);
                lanes sum = inner * mixes[n + stream] + kept;
                if (r->rounds) sum = (lanes)NAME(rounded)(sum);
                NAME(save)(r->out, place + stream * width, m, sum, is_bf16);
            }
        }
    }
}

#define OF_EITHER_TYPE(name, of)                                                         \
    static TARGET void NAME(name)(const void *argument, int64_t begin, int64_t end) {    \
        const struct residual *r = argument;                                             \
        if (r->is_bf16)                                                                  \
            NAME(name##_some)(of, begin, end, 1);                                        \
        else                                                                             \
            NAME(name##_some)(of, begin, end, 0);                                        \
    }

INLINE TARGET void NAME(norm_streams_some)(const struct residual *r, int64_t begin, int64_t end, const int is_bf16) {
    for (int64_t row = begin; row < end; row++) NAME(norm_streams_of)(r, row, is_bf16);
}

OF_EITHER_TYPE(norm_streams, r)
OF_EITHER_TYPE(soften, &r->streams)
OF_EITHER_TYPE(join_streams, r)
OF_EITHER_TYPE(share_streams, r)
#undef OF_EITHER_TYPE

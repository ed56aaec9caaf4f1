/* A gated DeltaNet in one call, with norms and residual: its projections, the recurrence of each slot, its output.
 *
 * fused/delta_net.py makes the structs. Values are rounded where mixers/gated_delta.py rounds them.
 */

#include "recurrence.h"
#include "sublayers.h"

/* The rows [start, end) of one slot, and its state in this layer: that before them, and where that after them goes. */
struct delta_span {
    void *recent;     /* [n_taps - 1, columns]: the rows before */
    float *recurrent; /* [n_heads, key_size, value_size] */
    const void *recent_before;
    const float *recurrent_before;
    void *rows;           /* as in delta_call, where they are to be kept, else NULL: then these too */
    float *write, *decay; /* [end - start, n_heads] */
    int64_t start, end;
};

struct delta_call {
    struct residual residual;
    struct linear *qkvz, *ba, *output;
    struct joined qkvz_joined, joined; /* around `qkvz`, around `output` */
    int8_t *scratch;              /* for the linear layers */
    struct recurrence recurrence; /* but for what differs by slot */
    const struct delta_span *spans;
    int64_t n_spans;
    void *projected;      /* scratch [n_rows, columns + n_heads * value_size] */
    void *small;          /* scratch [n_rows, 2 * n_heads] */
    void *rows;           /* scratch [n_taps - 1 + n_rows, columns] */
    void *gate;           /* scratch [n_rows, n_heads * value_size] */
    float *write, *decay; /* scratch [n_rows, n_heads] */
    void *outputs;        /* scratch [n_rows, n_heads * value_size] */
    int32_t groups_qkvz;  /* what `qkvz` gives is grouped by key head, else each kind stands for all heads in turn */
    int32_t groups_ba;
};

/* Copies one kind of columns, `width` of each key head, from groups of `stride` bytes to where they lie together. */
static char *copy_kind(char *to, const char *from, int64_t n_groups, int64_t stride, int64_t width) {
    for (int64_t group = 0; group < n_groups; group++, to += width) memcpy(to, from + group * stride, (size_t)width);
    return to;
}

/* Puts a row's queries, keys and values to `mixed`, and its gate to `gate`. */
static void arrange_row(const struct delta_call *call, int64_t row, char *mixed, char *gate) {
    const struct recurrence *own = &call->recurrence;
    const int64_t item = call->residual.is_bf16 ? 2 : 4, n_keys = own->n_key_heads, key = own->key_size * item;
    const int64_t values = own->n_heads * own->value_size * item, columns = 2 * n_keys * key + values;
    const char *from = (const char *)call->projected + row * (columns + values);
    if (!call->groups_qkvz) {
        memcpy(mixed, from, (size_t)columns);
        memcpy(gate, from + columns, (size_t)values);
        return;
    }
    const int64_t value = values / n_keys, stride = 2 * key + 2 * value;
    mixed = copy_kind(mixed, from, n_keys, stride, key);
    mixed = copy_kind(mixed, from + key, n_keys, stride, key);
    copy_kind(mixed, from + 2 * key, n_keys, stride, value);
    copy_kind(gate, from + 2 * key + value, n_keys, stride, value);
}

/* Takes how much each head of each row writes and keeps, as float32. */
static void widen_small(const struct delta_call *call) {
    const int64_t n = call->recurrence.n_heads, width = call->groups_ba ? n / call->recurrence.n_key_heads : n;
    for (int64_t row = 0; row < call->residual.n_rows; row++)
        for (int64_t head = 0; head < n; head++) {
            const int64_t at = 2 * row * n + head / width * 2 * width + head % width;
            call->write[row * n + head] = number(call->small, at, call->residual.is_bf16);
            call->decay[row * n + head] = number(call->small, at + width, call->residual.is_bf16);
        }
}

/* Runs the rows of a slot through the recurrence, and leaves the last ones for those that follow. */
static void run_span(const struct delta_call *call, const struct delta_span *span) {
    struct recurrence own = call->recurrence;
    const int64_t item = call->residual.is_bf16 ? 2 : 4, values = own.n_heads * own.value_size;
    const int64_t bytes = (2 * own.n_key_heads * own.key_size + values) * item, before = (own.n_taps - 1) * bytes;
    char *rows = span->rows ? span->rows : call->rows, *gate = (char *)call->gate + span->start * values * item;
    own.n_rows = span->end - span->start;
    memcpy(rows, span->recent_before, (size_t)before);
    for (int64_t row = 0; row < own.n_rows; row++)
        arrange_row(call, span->start + row, rows + before + row * bytes, gate + row * values * item);
    own.rows = rows;
    own.gate = gate;
    own.write += span->start * own.n_heads;
    own.decay += span->start * own.n_heads;
    own.out = (char *)call->outputs + span->start * values * item;
    own.state = span->recurrent;
    own.before = span->recurrent_before;
    if (span->rows) {
        const size_t small = (size_t)(own.n_rows * own.n_heads) * sizeof *own.write;
        memcpy(span->write, own.write, small);
        memcpy(span->decay, own.decay, small);
    }
    shardnet_recurrence(&own);
    memcpy(span->recent, rows + own.n_rows * bytes, (size_t)before);
}

/* Called from Python, which has checked everything in the struct. */
void shardnet_delta_net(struct delta_call *call) {
    const struct residual *residual = &call->residual;
    const struct steps *steps = shardnet_steps_for(&residual->team);
    const void *rows = normalize(steps, residual);
    multiply_joined(call->qkvz, residual, call->scratch, &call->qkvz_joined, rows, call->projected);
    multiply(call->ba, residual, call->scratch, rows, call->small);
    widen_small(call);
    call->recurrence.write = call->write;
    call->recurrence.decay = call->decay;
    call->recurrence.is_bf16 = residual->is_bf16;
    call->recurrence.team = residual->team;
    for (int64_t i = 0; i < call->n_spans; i++) run_span(call, &call->spans[i]);
    multiply_joined(call->output, residual, call->scratch, &call->joined, call->outputs, residual->inner);
    add_residual(steps, residual);
}

/* Linear layers with packed weights, for AVX-512, AVX2, NEON and plain C.
 *
 * config/panel_form.py and kernels/bf16_linear.py define the layouts, pack.c and panels.c pack weights;
 * kernels/library.py finds this library and calls it. It is optional: built where a C compiler is available, and torch
 * does its work elsewhere.
 *
 * Where weights are integers, rows are quantised to int8 per row and token group. The dot product of a group is exact,
 * in int32, then scaled and added to a float32 sum, group by group: a row's bits are independent of the batch, of the
 * number of threads and of the instruction set. With weights that are floats a row is multiplied in float32, input by
 * input, with fused multiply-adds: also independent of the batch. Where bfloat16 rows meet bfloat16 weights and the
 * machine has instructions for it, pairs of inputs are added first.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "floats.h"
#include "linear.h"
#include "tiles.h"
#include "tiles_portable.h"
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include "tiles_neon.h"
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

/* --- rows for weights that are floats: [tile][inputs][rows of the tile], float32 or pairs of bfloat16 */

INLINE void lay_out_row(const struct linear *p, int64_t row) {
    const int64_t first = row / MAX_TILE * MAX_TILE, n_in = p->n_in, padded = padded_inputs(p);
    const int64_t n_rows = p->n_rows - first < MAX_TILE ? p->n_rows - first : MAX_TILE;
    const float *wide = (const float *)p->rows + row * n_in;
    const uint16_t *narrow = (const uint16_t *)p->rows + row * n_in;
    if (uses_amx_pairs(p)) {
        for (int64_t i = 0; i < n_in; i += QUAD_BYTES / 2) {
            const int64_t left = n_in - i < QUAD_BYTES / 2 ? n_in - i : QUAD_BYTES / 2;
            int8_t *out = p->quantized + 2 * i * p->n_rows + row * QUAD_BYTES;
            memcpy(out, narrow + i, 2 * (size_t)left);
            memset(out + 2 * left, 0, (size_t)(QUAD_BYTES - 2 * left));
        }
        return;
    }
    if (p->pairs) {
        uint16_t *out = (uint16_t *)p->quantized + first * padded + (row - first) * 2;
        for (int64_t i = 0; i + 1 < n_in; i += 2) memcpy(out + i * n_rows, narrow + i, 4);
        if (n_in % 2) {
            out[(n_in - 1) * n_rows] = narrow[n_in - 1];
            out[(n_in - 1) * n_rows + 1] = 0;
        }
        return;
    }
    float *out = (float *)p->quantized + first * padded + (row - first);
    if (p->order)
        for (int64_t i = 0; i < n_in; i++) out[i * n_rows] = number_of(p, row, i);
    else
        for (int64_t i = 0; i < n_in; i++) out[i * n_rows] = p->is_bf16 ? from_bf16(narrow[i]) : wide[i];
    for (int64_t i = n_in; i < padded; i++) out[i * n_rows] = 0;
}

static struct tiles tiles_for(const struct linear *p) {
#if defined(__x86_64__)
    if (p->team.isa == AVX512) return shardnet_avx512_tiles(p);
    if (p->team.isa == AVX2) return shardnet_avx2_tiles(p);
#elif defined(__aarch64__)
    if (p->team.isa == NEON || p->team.isa == NEON_PLAIN) return neon_tiles(p);
#endif
    return portable_tiles(p);
}

static void store(const struct linear *p, int64_t row, int64_t panel, const float *sums) {
    int64_t begin = panel * PANEL;
    int n = (int)(p->n_out - begin < PANEL ? p->n_out - begin : PANEL);
    float values[PANEL];
    for (int o = 0; o < PANEL; o++) values[o] = sums[o];
    if (p->bias)
        for (int o = 0; o < n; o++) values[o] += p->bias[begin + o];
    if (p->is_bf16) {
        uint16_t *out = (uint16_t *)p->out + row * p->width + begin;
        for (int o = 0; o < n; o++) out[o] = to_bf16(values[o]);
    } else {
        memcpy((float *)p->out + row * p->width + begin, values, sizeof(float) * (size_t)n);
    }
}

/* --- the work */

/* Whether a part uses the rows as they were prepared for the part before it. */
INLINE int shares_rows(const struct linear *before, const struct linear *p) {
    if (!before || before->order != p->order || is_float(&before->form) != is_float(&p->form)) return 0;
    if ((before->form.bits == 32) != (p->form.bits == 32)) return 0;
    if (before->pairs != p->pairs || padded_inputs(before) != padded_inputs(p)) return 0;
    if (is_float(&p->form)) return 1;
    if (before->form.token_group != p->form.token_group || has_levels(&before->form) != has_levels(&p->form)) return 0;
    return has_levels(&p->form) ? before->form.group == p->form.group : code_bias(before) == code_bias(p);
}

static void prepare_rows(const struct linear *first, int64_t begin, int64_t end) {
    const quantize_function quantize = shardnet_quantize_for(first->team.isa);
    const struct linear *before = NULL;
    for (const struct linear *p = first; p; before = p, p = p->next) {
        if (shares_rows(before, p)) continue;
        for (int64_t row = begin; row < end; row++)
            if (p->form.bits == 32)
                shardnet_lay_out_floats(p, row);
            else if (is_float(&p->form))
                lay_out_row(p, row);
            else
                quantize(p, row);
    }
}

INLINE int64_t panels_of(const struct linear *p) { return (p->n_out + PANEL - 1) / PANEL; }

static void multiply_floats(const struct linear *p, int64_t begin, int64_t end) {
    float sums[FLOAT_PANELS][FLOAT_ROWS][PANEL];
    const int most = p->n_rows <= MAX_TILE ? 1 : FLOAT_PANELS; /* few rows: weights are read in the order they lie in */
    for (int64_t panel = begin; panel < end; panel += most)
        for (int64_t row = 0; row < p->n_rows; row += FLOAT_ROWS) {
            const int n_panels = (int)(end - panel < most ? end - panel : most);
            const int n_rows = (int)(p->n_rows - row < FLOAT_ROWS ? p->n_rows - row : FLOAT_ROWS);
            shardnet_sum_floats(p, panel, n_panels, row, n_rows, sums);
            for (int i = 0; i < n_panels; i++)
                for (int r = 0; r < n_rows; r++) store(p, row + r, panel + i, sums[i][r]);
        }
}

static many_function many_for(const struct linear *p) {
#if defined(SHARDNET_HAS_AMX)
    if (uses_amx(p)) return shardnet_amx_many(p);
#endif
#if defined(__x86_64__)
    if (p->team.isa == AVX2 && p->n_rows >= MANY_ROWS) return shardnet_avx2_many(p);
#endif
    (void)p;
    return NULL;
}

static void multiply_many(const struct linear *p, many_function many, int64_t begin, int64_t end) {
    float sums[MOST_ROWS + 3][PANEL] __attribute__((aligned(64)));
    const int most = uses_amx(p) ? MOST_ROWS : MOST_ROWS / 2;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t row = 0; row < p->n_rows; row += most) {
            const int n_rows = (int)(p->n_rows - row < most ? p->n_rows - row : most);
            memset(sums, 0, sizeof sums);
            many(p, p->weights + panel * bytes_of_panel(p), row, n_rows, sums);
            for (int r = 0; r < n_rows; r++) store(p, row + r, panel, sums[r]);
        }
}

#if defined(SHARDNET_HAS_AMX)
static void multiply_pairs(const struct linear *p, int64_t begin, int64_t end) {
    float sums[2][TILE_ROWS][PANEL] __attribute__((aligned(64)));
    for (int64_t panel = begin; panel < end; panel += 2)
        for (int64_t row = 0; row < p->n_rows; row += TILE_ROWS) {
            const int n_panels = panel + 1 < end ? 2 : 1;
            const int n_rows = (int)(p->n_rows - row < TILE_ROWS ? p->n_rows - row : TILE_ROWS);
            shardnet_amx_pairs(p, p->weights + panel * bytes_of_panel(p), n_panels, row, n_rows, sums);
            for (int i = 0; i < n_panels; i++)
                for (int r = 0; r < n_rows; r++) store(p, row + r, panel + i, sums[i][r]);
        }
}
#endif

/* Computes the panels [begin, end) of one part. */
static void multiply_part(const struct linear *p, int64_t begin, int64_t end) {
    if (p->form.bits == 32) {
        multiply_floats(p, begin, end);
        return;
    }
#if defined(SHARDNET_HAS_AMX)
    if (uses_amx_pairs(p)) {
        multiply_pairs(p, begin, end);
        return;
    }
#endif
    const many_function many = many_for(p);
    if (many) {
        multiply_many(p, many, begin, end);
        return;
    }
    const struct tiles tiles = tiles_for(p);
    const int64_t panel_bytes = bytes_of_panel(p);
    float sums[2][MAX_TILE][PANEL];
    int n_panels;
    for (int64_t panel = begin; panel < end; panel += n_panels) {
        n_panels = tiles.two && panel + 1 < end ? 2 : 1;
        const tile_function tile = n_panels == 2 ? tiles.two : tiles.one;
        for (int64_t row = 0; row < p->n_rows; row += MAX_TILE) {
            const int n_rows = (int)(p->n_rows - row < MAX_TILE ? p->n_rows - row : MAX_TILE);
            tile(p, p->weights + panel * panel_bytes, row, n_rows, sums);
            for (int q = 0; q < n_panels; q++)
                for (int r = 0; r < n_rows; r++) store(p, row + r, panel + q, sums[q][r]);
        }
    }
}

/* Computes the panels [begin, end) of all parts, counted through. */
static void multiply_panels(const struct linear *first, int64_t begin, int64_t end) {
    for (const struct linear *p = first; p && end > 0; p = p->next) {
        const int64_t n = panels_of(p);
        if (begin < n) multiply_part(p, begin, end < n ? end : n);
        begin = begin > n ? begin - n : 0;
        end -= n;
    }
}

INLINE int64_t panels_of_all(const struct linear *first) {
    int64_t n = 0;
    for (const struct linear *p = first; p; p = p->next) n += panels_of(p);
    return n;
}

/* Several linear layers: their rows, and their panels, are counted through. */
struct linears {
    struct linear *const *firsts;
    int64_t n;
};

static void prepare_all(const void *argument, int64_t begin, int64_t end) {
    const struct linears *all = argument;
    for (int64_t i = 0; i < all->n && end > 0; i++) {
        const int64_t n = all->firsts[i]->n_rows;
        if (begin < n) prepare_rows(all->firsts[i], begin, end < n ? end : n);
        begin = begin > n ? begin - n : 0;
        end -= n;
    }
}

static void multiply_all(const void *argument, int64_t begin, int64_t end) {
    const struct linears *all = argument;
    for (int64_t i = 0; i < all->n && end > 0; i++) {
        const int64_t n = panels_of_all(all->firsts[i]);
        if (begin < n) multiply_panels(all->firsts[i], begin, end < n ? end : n);
        begin = begin > n ? begin - n : 0;
        end -= n;
    }
}

/* --- what kernels/library.py calls */

#if defined(__x86_64__)
/* Features by CPUID, and which registers the system saves. Queried here, since compilers' own helpers differ in the
 * names they know. */
struct machine {
    uint32_t leaf1_c, leaf7_b, leaf7_c, leaf7_d, leaf71_a, saved;
};

static struct machine query_machine(void) {
    struct machine m = {0};
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) m.leaf1_c = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        m.leaf7_b = b, m.leaf7_c = c, m.leaf7_d = d;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) m.leaf71_a = a;
    }
    if (m.leaf1_c >> 27 & 1) __asm__ volatile("xgetbv" : "=a"(m.saved), "=d"(d) : "c"(0)); /* OSXSAVE */
    return m;
}

INLINE int has_all(uint32_t found, uint32_t wanted) { return (found & wanted) == wanted; }

#define FMA_AVX_F16C (1u << 12 | 1u << 28 | 1u << 29)                 /* leaf 1, ecx */
#define HAS_AVX2 (1u << 5)                                            /* leaf 7, ebx */
#define AVX512_F_DQ_BW_VL (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) /* leaf 7, ebx */
#define AVX512_VNNI (1u << 11)                                        /* leaf 7, ecx */
#define YMM_SAVED 0x06u
#define ZMM_SAVED 0xe6u
#define TILES_SAVED 0x60000u
#define AMX (1u << 22 | 1u << 24 | 1u << 25) /* leaf 7, edx: bfloat16, tiles, bytes */
#endif

/* The best instruction set of this machine. */
int32_t shardnet_isa(void) {
#if defined(__x86_64__)
    const struct machine m = query_machine();
    if (!has_all(m.saved, YMM_SAVED) || !has_all(m.leaf1_c, FMA_AVX_F16C) || !has_all(m.leaf7_b, HAS_AVX2))
        return PORTABLE;
    if (has_all(m.saved, ZMM_SAVED) && has_all(m.leaf7_b, AVX512_F_DQ_BW_VL) && has_all(m.leaf7_c, AVX512_VNNI))
        return AVX512;
    return AVX2;
#elif defined(__aarch64__) && defined(__APPLE__)
    return NEON;
#elif defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) & (1 << 20) ? NEON : NEON_PLAIN; /* HWCAP_ASIMDDP */
#endif
    return PORTABLE;
}

/* Whether pairs of bfloat16 are multiplied at once. */
int32_t shardnet_has_bf16_pairs(void) {
#if defined(__x86_64__)
    return query_machine().leaf71_a >> 5 & 1;
#else
    return 0;
#endif
}

/* Whether this process may multiply tiles of bytes and of bfloat16 (AMX), for which the system is asked. */
int32_t shardnet_has_tiles(void) {
#if defined(SHARDNET_HAS_AMX)
    const struct machine m = query_machine();
    return has_all(m.saved, TILES_SAVED) && has_all(m.leaf7_d, AMX) && shardnet_may_use_tiles();
#else
    return 0;
#endif
}

/* Its name is the version of the structs: kernels/library.py looks for its own. */
void shardnet_version_28(void) {}

/* Gives a part its share of the scratch memory at `from`, and returns what is left. */
static int8_t *place(struct linear *p, const struct linear *before, int8_t *from) {
    if (shares_rows(before, p)) {
        p->quantized = before->quantized;
        p->scales = before->scales, p->offsets = before->offsets, p->sums = before->sums;
        p->group_sums = before->group_sums;
        return from;
    }
    p->quantized = from;
    if (is_float(&p->form)) {
        const int64_t bytes = padded_inputs(p) * (int64_t)sizeof(float);
        return from + p->n_rows * (bytes > QUAD_BYTES ? bytes : QUAD_BYTES);
    }
    const int64_t n = p->n_rows * p->n_groups;
    p->scales = (float *)(from + n * p->form.token_group);
    p->offsets = (int32_t *)(p->scales + n);
    p->sums = (float *)(p->offsets + n);
    p->group_sums = (int16_t *)(p->sums + n);
    if (!has_levels(&p->form)) return (int8_t *)p->group_sums;
    return (int8_t *)(p->group_sums + n * (p->form.token_group / p->form.group));
}

/* Hands a linear layer's rows and memory on to its parts. */
static void hand_on(struct linear *first) {
    const struct linear *before = NULL;
    char *out = first->out;
    int8_t *scratch = first->quantized;
    for (struct linear *p = first; p; before = p, p = p->next) {
        p->rows = first->rows;
        p->out = out;
        p->n_rows = first->n_rows;
        p->is_bf16 = first->is_bf16;
        p->team = first->team;
        p->pairs = p->has_pairs && p->is_bf16 && p->form.code == BF16;
        scratch = place(p, before, scratch);
        out += p->n_out * (p->is_bf16 ? 2 : 4);
    }
}

void shardnet_linear(struct linear *first) { shardnet_linears(&first, 1); }

void shardnet_linears(struct linear *const *firsts, int64_t n) {
    const struct linears all = {.firsts = firsts, .n = n};
    int64_t n_rows = 0, n_panels = 0, bytes = 0;
    int has_many_floats = 0;
    for (int64_t i = 0; i < n; i++) {
        hand_on(firsts[i]);
        n_rows += firsts[i]->n_rows;
        n_panels += panels_of_all(firsts[i]);
        for (const struct linear *p = firsts[i]; p; p = p->next)
            bytes = bytes_of_panel(p) > bytes ? bytes_of_panel(p) : bytes;
        has_many_floats |= firsts[i]->form.bits == 32 && firsts[i]->n_rows > MAX_TILE;
    }
    /* Pieces of about 128 KiB of weights, and of whole pairs of panels: small enough to share out evenly, large enough
     * to pay. */
    int64_t pairs = 65536 / (bytes ? bytes : 1);
    if (has_many_floats && 2 * pairs < FLOAT_PANELS) pairs = FLOAT_PANELS / 2;
    shardnet_parallel_for(&firsts[0]->team, prepare_all, &all, n_rows, 16);
    shardnet_parallel_for(&firsts[0]->team, multiply_all, &all, n_panels, 2 * (pairs > 0 ? pairs : 1));
}

/* --- rows of a table */

struct look_up {
    const uint8_t *weights; /* packed */
    const int64_t *ids;     /* [n_ids], each within the table */
    float *out;             /* [n_ids, n_in] */
    int64_t n_ids, n_in;
    struct form form;
    struct team team;
};

INLINE void look_up_half(const struct look_up *call, const uint8_t *panel, int o, float *out) {
    for (int64_t i = 0; i < call->n_in; i++) {
        uint16_t bits;
        memcpy(&bits, panel + i / 2 * QUAD_BYTES + 4 * o + i % 2 * 2, 2);
        out[i] = call->form.code == F16 ? from_f16(bits) : from_bf16(bits);
    }
}

static void look_up_some(const void *argument, int64_t begin, int64_t end) {
    const struct look_up *call = argument;
    struct linear p = {.n_in = call->n_in, .form = call->form};
    const struct form *f = &p.form;
    if (has_levels(f)) p.form.token_group = f->group; /* scales by group, as floats */
    const int adds_minimum = has_minimum(f);
    struct scales scales;
    for (int64_t n = begin; n < end; n++) {
        const uint8_t *panel = call->weights + call->ids[n] / PANEL * bytes_of_panel(&p);
        const int o = (int)(call->ids[n] % PANEL);
        float *out = call->out + n * call->n_in;
        if (f->bits == 16) {
            look_up_half(call, panel, o, out);
            continue;
        }
        struct stretch s = before_panel(&p, panel);
        int64_t at = 0;
        while (next_stretch(f, &s)) {
            portable_read_scales(f, &s, &scales);
            int own = 0;
            for (int64_t b = 0; b < s.n_blocks; b++) {
                const uint8_t *units = s.blocks + b * f->block_bytes + f->header_bytes;
                for (int64_t k = s.from; k < s.from + s.n_inputs; k++, at++) {
                    if (at >= call->n_in) break;
                    const uint8_t *unit = units + k / UNIT * f->bits * QUAD_BYTES;
                    const float value = value_of(f, code_at(f, unit, (int)(k % UNIT), o)) * scales.scale[own][o];
                    out[at] = adds_minimum ? value + scales.minimum[own][o] : value;
                    if ((k + 1) % f->token_group == 0) own++;
                }
            }
        }
    }
}

/* Computes the weights of some outputs. Python has checked everything in the struct. */
void shardnet_look_up(const struct look_up *call) {
    shardnet_parallel_for(&call->team, look_up_some, call, call->n_ids, 8);
}

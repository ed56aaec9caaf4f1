/* Rows times panels, for AMX: sixteen rows by sixteen outputs and a line of 64 bytes of their inputs are one
 * instruction.
 *
 * Of many quantised rows sums inside a group are integers, so that bits are those of all other instruction sets. Where
 * scales have two levels, codes are multiplied by their groups' scales first: the products of 16 bits are two planes of
 * bytes, and a token group is summed without a stop. Elsewhere each token group is summed from zero.
 *
 * Rows of bfloat16, few ones too, are multiplied by pairs of bfloat16. An instruction adds the first of each pair and
 * the second by themselves, then both to what is there: other bits than by AVX-512, the same in any batch. */

#define _GNU_SOURCE /* for syscall */
#include "tiles.h"

#if defined(SHARDNET_HAS_AMX)
#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "tiles_avx512.h"

#define WITH_AMX \
    __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))

#define ROWS 16 /* of a tile */

/* The numbers of the eight tiles: the first four are sums. */
#define SUMS 4
#define INPUTS_0 4
#define INPUTS_1 5
#define CODES_0 6
#define CODES_1 7

/* How a thread's tiles are shaped, as the processor reads it. */
struct shapes {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Shapes tiles for `bytes` of each row's inputs at a time. Tiles of an odd number are of `second` rows. */
INLINE WITH_AMX void amx_begin(int bytes, int first, int second) {
    struct shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = (uint16_t)(tile == INPUTS_0 || tile == INPUTS_1 ? bytes : QUAD_BYTES);
        shapes.rows[tile] = (uint8_t)(tile >= CODES_0 ? bytes / 4 : tile % 2 ? second : first);
    }
    _tile_loadconfig(&shapes);
}

/* Has memory written before tiles are read: to compilers these are instructions that read none. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

#define LINED __attribute__((aligned(64))) /* a line of the caches, which no register's load may cross */

/* --- codes: [quads][16 outputs][4] bytes of a stretch */

struct planes {
    uint8_t low[STRETCH / 4][QUAD_BYTES], high[STRETCH / 4][QUAD_BYTES];
} LINED;

/* A quad's codes as signed bytes: of 8 bits less 128. */
INLINE WITH_AMX __m512i amx_codes(const int bits, const int is_book, const uint8_t *unit, int quad, __m512i book,
                                  __m512i offset) {
    const __m512i codes = avx512_codes(bits, unit, quad);
    if (is_book) return _mm512_shuffle_epi8(book, codes);
    return _mm512_sub_epi8(codes, offset);
}

/* Codes times 16-bit `scales`, which an output has twice, in two planes. */
INLINE WITH_AMX void amx_scale(__m512i codes, __m512i scales, uint8_t *low, uint8_t *high) {
    const __m512i bytes = _mm512_set1_epi16(255);
    const __m512i even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8), scales);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(codes, 8), scales);
    _mm512_storeu_si512(low, _mm512_or_si512(_mm512_and_si512(even, bytes), _mm512_slli_epi16(odd, 8)));
    _mm512_storeu_si512(high, _mm512_or_si512(_mm512_srli_epi16(even, 8), _mm512_andnot_si512(bytes, odd)));
}

/* The codes of a stretch, multiplied by `levels` if there are any. */
INLINE WITH_AMX void amx_unpack_of(const int bits, const int is_book, const struct linear *p, const struct stretch *s,
                                   const struct levels *levels, struct planes *out) {
    const struct form *f = &p->form;
    const __m512i offset = _mm512_set1_epi8((char)(bits == 8 ? 128 : f->offset));
    const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5,
                                           4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    uint8_t numbers[64];
    fill_book(f, 0, numbers, 64);
    const __m512i book = _mm512_loadu_si512(numbers);
    __m512i scales = twice;
    int at = 0;
    for (int64_t b = 0; b < s->n_blocks; b++) {
        const uint8_t *unit = s->blocks + b * f->block_bytes + f->header_bytes + s->from / UNIT * bits * QUAD_BYTES;
        for (int64_t k = 0; k < s->n_inputs; k += UNIT, unit += bits * QUAD_BYTES) {
            for (int line = 0; line < bits; line++)
                _mm_prefetch((const char *)unit + line * QUAD_BYTES + AHEAD, _MM_HINT_T1);
            UNROLLED for (int q = 0; q < UNIT / 4; q++, at++) {
                const __m512i codes = amx_codes(bits, is_book, unit, q, book, offset);
                if (!levels) {
                    _mm512_storeu_si512(out->low[at], codes);
                    continue;
                }
                if (q % 4 == 0) {
                    const int16_t *own = levels->scale[4 * at / f->group];
                    scales =
                        _mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(_mm256_loadu_si256((const void *)own)));
                }
                amx_scale(codes, scales, out->low[at], out->high[at]);
            }
        }
    }
}

static WITH_AMX void amx_unpack(const struct linear *p, const struct stretch *s, const struct levels *levels,
                                struct planes *out) {
    if (p->form.code == BOOK) {
        amx_unpack_of(4, 1, p, s, levels, out);
        return;
    }
    switch (p->form.bits) {
#define BITS(bits)                                 \
    case bits:                                     \
        amx_unpack_of(bits, 0, p, s, levels, out); \
        return;
        BITS(2)
        BITS(3)
        BITS(4)
        BITS(5)
        BITS(6)
        BITS(8)
#undef BITS
    }
}

/* --- sixteen rows */

typedef int32_t products[SUMS][ROWS][PANEL] LINED;

/* The sixteen rows of `n_rows` that begin at the `r`th, or end with the last one: rows before `r` are done already. */
INLINE int sixteen_at(int r, int n_rows) { return r + ROWS <= n_rows ? r : n_rows - ROWS; }

/* Multiplies sixteen rows from `row` on by `n` token groups from `token` on. */
INLINE WITH_AMX void amx_multiply(const struct linear *p, const uint8_t (*codes)[QUAD_BYTES], int64_t row,
                                  int64_t token, const int n, products out) {
    const int inputs = p->form.token_group;
    int64_t stride;
#define GROUP(i, INPUTS, CODES)                                            \
    if (i < n) {                                                           \
        const int8_t *x = lined_up(p, row, (token + i) * inputs, &stride); \
        _tile_zero(i);                                                     \
        _tile_loadd(INPUTS, x, stride);                                    \
        _tile_loadd(CODES, codes + i * inputs / 4, QUAD_BYTES);            \
        _tile_dpbssd(i, INPUTS, CODES);                                    \
        _tile_stored(i, out[i], QUAD_BYTES);                               \
    }
    GROUP(0, INPUTS_0, CODES_0)
    GROUP(1, INPUTS_1, CODES_1)
    GROUP(2, INPUTS_0, CODES_0)
    GROUP(3, INPUTS_1, CODES_1)
#undef GROUP
}

/* Adds the products of `n` token groups, the first of which is the stretch's `g`th, to rows from `skipped` on. */
INLINE WITH_AMX void amx_add(const int n, const int adds_minimum, const struct linear *p, const struct scales *scales,
                             int g, int64_t at, int skipped, products found, float (*sums)[PANEL]) {
    const int64_t n_rows = p->n_rows;
    const int32_t bias = code_bias(p), *offsets = p->offsets + at;
    const float *x_scales = p->scales + at, *x_sums = p->sums + at;
    __m512 scale[SUMS], minimum[SUMS];
    for (int i = 0; i < n; i++) {
        scale[i] = _mm512_loadu_ps(scales->scale[g + i]);
        minimum[i] = adds_minimum ? _mm512_loadu_ps(scales->minimum[g + i]) : _mm512_setzero_ps();
    }
    for (int r = skipped; r < ROWS; r++) {
        __m512 total = _mm512_load_ps(sums[r]);
        for (int i = 0; i < n; i++) {
            __m512i whole = _mm512_load_si512(found[i][r]);
            if (bias) whole = _mm512_add_epi32(whole, _mm512_set1_epi32(offsets[r + i * n_rows]));
            const __m512 both = _mm512_mul_ps(scale[i], _mm512_set1_ps(x_scales[r + i * n_rows]));
            total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), both, total);
            if (adds_minimum) total = _mm512_fmadd_ps(minimum[i], _mm512_set1_ps(x_sums[r + i * n_rows]), total);
        }
        _mm512_store_ps(sums[r], total);
    }
}

/* Multiplies sixteen rows by one token group of two lines, whose codes were multiplied by their scales; with `second`
 * another sixteen. */
INLINE WITH_AMX void amx_multiply_levels(const uint8_t (*low)[QUAD_BYTES], const uint8_t (*high)[QUAD_BYTES],
                                         const int8_t *first, const int8_t *second, int64_t line, products out) {
    _tile_zero(0);
    _tile_zero(1);
    if (second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    UNROLLED for (int i = 0; i < MAX_TOKEN_GROUP / QUAD_BYTES; i++, low += ROWS, high += ROWS, first += line) {
        _tile_loadd(CODES_0, low, QUAD_BYTES);
        _tile_loadd(CODES_1, high, QUAD_BYTES);
        _tile_loadd(INPUTS_0, first, QUAD_BYTES);
        if (second) _tile_loadd(INPUTS_1, second + i * line, QUAD_BYTES);
        _tile_dpbsud(0, INPUTS_0, CODES_0);
        _tile_dpbssd(1, INPUTS_0, CODES_1);
        if (!second) continue;
        _tile_dpbsud(2, INPUTS_1, CODES_0);
        _tile_dpbssd(3, INPUTS_1, CODES_1);
    }
    _tile_stored(0, out[0], QUAD_BYTES);
    _tile_stored(1, out[1], QUAD_BYTES);
    if (!second) return;
    _tile_stored(2, out[2], QUAD_BYTES);
    _tile_stored(3, out[3], QUAD_BYTES);
}

/* Scales of two levels of a stretch, and its minimums by two groups in turns, as products of pairs are made of them. */
struct paired_levels {
    struct levels levels;
    int16_t minimums[STRETCH / 32][PANEL][2];
};

/* Adds both planes of a token group, the stretch's `t`th, whose minimums are of `groups` groups, to rows from `skipped`
 * on. */
INLINE WITH_AMX void amx_add_levels(const int groups, const struct linear *p, const struct paired_levels *paired, int t,
                                    int64_t at, int skipped, int32_t (*found)[ROWS][PANEL], float (*sums)[PANEL]) {
    const __m512 outer = _mm512_loadu_ps(paired->levels.outer), below = _mm512_loadu_ps(paired->levels.below);
    const int16_t(*minimums)[PANEL][2] = paired->minimums + t * groups / 2;
    const int16_t *group_sums = p->group_sums + at * groups;
    const float *x_scales = p->scales + at;
    for (int r = skipped; r < ROWS; r++) {
        const __m512 x_scale = _mm512_set1_ps(x_scales[r]);
        const __m512i upper = _mm512_slli_epi32(_mm512_load_si512(found[1][r]), 8);
        const __m512i whole = _mm512_add_epi32(_mm512_load_si512(found[0][r]), upper);
        __m512 total = _mm512_load_ps(sums[r]);
        total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(outer, x_scale), total);
        if (groups) {
            __m512i others = _mm512_setzero_si512();
            for (int g = 0; g < groups; g += 2) {
                const __m512i two = _mm512_set1_epi32(quad_at(group_sums + r * groups + g));
                others = _mm512_dpwssd_epi32(others, _mm512_loadu_si512(minimums[g / 2]), two);
            }
            total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(others), _mm512_mul_ps(below, x_scale), total);
        }
        _mm512_store_ps(sums[r], total);
    }
}

/* --- a panel */

INLINE WITH_AMX void amx_many_of(const int adds_minimum, const struct linear *p, const uint8_t *w, int64_t row,
                                 int n_rows, float (*sums)[PANEL]) {
    const struct form *f = &p->form;
    struct stretch s = before_panel(p, w);
    struct scales scales;
    struct planes planes;
    products found;
    int64_t token = 0;
    amx_begin(f->token_group, ROWS, ROWS);
    for (; next_stretch(f, &s); token += s.n_blocks * s.n_inputs / f->token_group) {
        const int n = (int)(s.n_blocks * s.n_inputs / f->token_group);
        avx512_read_scales(f, &s, &scales);
        amx_unpack(p, &s, NULL, &planes);
        WRITTEN();
        for (int r = 0; r < n_rows; r += ROWS)
            for (int g = 0; g < n; g += SUMS) {
                const uint8_t(*codes)[QUAD_BYTES] = planes.low + g * f->token_group / 4;
                const int begin = sixteen_at(r, n_rows), some = n - g < SUMS ? n - g : SUMS;
                const int64_t at = token_at(p, row + begin, token + g);
                amx_multiply(p, codes, row + begin, token + g, some, found);
                if (some == SUMS)
                    amx_add(SUMS, adds_minimum, p, &scales, g, at, r - begin, found, sums + begin);
                else
                    amx_add(some, adds_minimum, p, &scales, g, at, r - begin, found, sums + begin);
            }
    }
    _tile_release();
}

INLINE WITH_AMX void amx_many_levels_of(const int groups, const struct linear *p, const uint8_t *w, int64_t row,
                                        int n_rows, float (*sums)[PANEL]) {
    const struct form *f = &p->form;
    const int64_t line = p->n_rows * QUAD_BYTES;
    struct stretch s = before_panel(p, w);
    struct paired_levels paired;
    struct planes planes;
    products found;
    int64_t token = 0, stride;
    amx_begin(QUAD_BYTES, ROWS, ROWS);
    for (; next_stretch(f, &s); token += s.n_inputs / MAX_TOKEN_GROUP) {
        avx512_read_levels(f, &s, &paired.levels);
        for (int g = 0; groups && g < s.n_inputs / f->group; g++)
            for (int o = 0; o < PANEL; o++) paired.minimums[g / 2][o][g % 2] = paired.levels.other[g][o];
        amx_unpack(p, &s, &paired.levels, &planes);
        WRITTEN();
        for (int t = 0; t < s.n_inputs / MAX_TOKEN_GROUP; t++) {
            const int quad = t * MAX_TOKEN_GROUP / 4;
            const int8_t *x = lined_up(p, row, (token + t) * MAX_TOKEN_GROUP, &stride);
            const int64_t at = token_at(p, row, token + t);
            for (int r = 0; r < n_rows; r += 2 * ROWS) {
                const int first = sixteen_at(r, n_rows), second = sixteen_at(r + ROWS, n_rows);
                const int has_second = r + ROWS < n_rows;
                amx_multiply_levels(planes.low + quad, planes.high + quad, x + first * QUAD_BYTES,
                                    has_second ? x + second * QUAD_BYTES : NULL, line, found);
                amx_add_levels(groups, p, &paired, t, at + first, r - first, found, sums + first);
                if (has_second)
                    amx_add_levels(groups, p, &paired, t, at + second, r + ROWS - second, found + 2, sums + second);
            }
        }
    }
    _tile_release();
}

#define AMX_MANY(NAME, WORK, with)                                                               \
    static WITH_AMX void NAME(const struct linear *p, const uint8_t *w, int64_t row, int n_rows, \
                              float(*sums)[PANEL]) {                                             \
        WORK(with, p, w, row, n_rows, sums);                                                     \
    }
AMX_MANY(amx_many, amx_many_of, 0)
AMX_MANY(amx_many_with_minimum, amx_many_of, 1)
AMX_MANY(amx_many_levels, amx_many_levels_of, 0)
AMX_MANY(amx_many_levels_with_4, amx_many_levels_of, 4)
AMX_MANY(amx_many_levels_with_8, amx_many_levels_of, 8)

many_function shardnet_amx_many(const struct linear *p) {
    if (!has_levels(&p->form)) return has_minimum(&p->form) ? amx_many_with_minimum : amx_many;
    if (!has_minimum(&p->form)) return amx_many_levels;
    return p->form.group == UNIT ? amx_many_levels_with_4 : amx_many_levels_with_8;
}

/* --- bfloat16 */

/* A panel's pairs from line `k` on: copied, with zeros behind them, where the panel has less than a whole tile. */
INLINE const uint8_t *amx_pairs(const uint8_t *w, int64_t k, int64_t n_lines, uint8_t copy[ROWS][QUAD_BYTES]) {
    if (k + ROWS <= n_lines) return w + k * QUAD_BYTES;
    memset(copy, 0, ROWS * QUAD_BYTES);
    memcpy(copy, w + k * QUAD_BYTES, (size_t)(n_lines - k) * QUAD_BYTES);
    WRITTEN();
    return copy[0];
}

INLINE WITH_AMX void amx_pairs_of(const int has_second, const int n_panels, const struct linear *p, const uint8_t *w,
                                  int64_t row, float sums[2][TILE_ROWS][PANEL]) {
    const int64_t n_lines = padded_inputs(p) / 2, panel = bytes_of_panel(p);
    const uint8_t *x = (const uint8_t *)p->quantized + row * QUAD_BYTES;
    uint8_t copies[2][ROWS][QUAD_BYTES] LINED;
    _tile_zero(0);
    if (has_second) _tile_zero(1);
    if (n_panels > 1) _tile_zero(2);
    if (n_panels > 1 && has_second) _tile_zero(3);
    for (int64_t k = 0; k < n_lines; k += ROWS, x += p->n_rows * QUAD_BYTES) {
        _tile_loadd(INPUTS_0, x, QUAD_BYTES);
        if (has_second) _tile_loadd(INPUTS_1, x + ROWS * QUAD_BYTES, QUAD_BYTES);
        _tile_loadd(CODES_0, amx_pairs(w, k, n_lines, copies[0]), QUAD_BYTES);
        if (n_panels > 1) _tile_loadd(CODES_1, amx_pairs(w + panel, k, n_lines, copies[1]), QUAD_BYTES);
        _tile_dpbf16ps(0, INPUTS_0, CODES_0);
        if (has_second) _tile_dpbf16ps(1, INPUTS_1, CODES_0);
        if (n_panels > 1) _tile_dpbf16ps(2, INPUTS_0, CODES_1);
        if (n_panels > 1 && has_second) _tile_dpbf16ps(3, INPUTS_1, CODES_1);
    }
    _tile_stored(0, sums[0][0], QUAD_BYTES);
    if (has_second) _tile_stored(1, sums[0][ROWS], QUAD_BYTES);
    if (n_panels > 1) _tile_stored(2, sums[1][0], QUAD_BYTES);
    if (n_panels > 1 && has_second) _tile_stored(3, sums[1][ROWS], QUAD_BYTES);
    WRITTEN();
}

/* sums[panel][row][output] of one panel or two and at most TILE_ROWS rows from `row` on. */
WITH_AMX void shardnet_amx_pairs(const struct linear *p, const uint8_t *w, int n_panels, int64_t row, int n_rows,
                                 float sums[2][TILE_ROWS][PANEL]) {
    const int first = n_rows < ROWS ? n_rows : ROWS, second = n_rows - first;
    amx_begin(QUAD_BYTES, first, second ? second : first);
    if (second && n_panels > 1)
        amx_pairs_of(1, 2, p, w, row, sums);
    else if (second)
        amx_pairs_of(1, 1, p, w, row, sums);
    else if (n_panels > 1)
        amx_pairs_of(0, 2, p, w, row, sums);
    else
        amx_pairs_of(0, 1, p, w, row, sums);
    _tile_release();
}

#define XTILEDATA 18 /* the state's number, in XCR0 too */

/* Asks the system for the tiles' registers, which a process has only then. */
#if defined(_WIN32)
int32_t shardnet_may_use_tiles(void) {
    const HMODULE kernel = GetModuleHandleA("kernel32.dll");
    void *found = (void *)GetProcAddress(kernel, "EnableProcessOptionalXStateFeatures"); /* since Windows 11 */
    return found && ((BOOL(WINAPI *)(DWORD64))found)(1ull << XTILEDATA);
}
#else
#define ARCH_REQ_XCOMP_PERM 0x1023

int32_t shardnet_may_use_tiles(void) { return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA); }
#endif
#endif

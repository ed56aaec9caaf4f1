/* Many quantised rows times one panel, for AVX2: its codes become bytes a stretch at a time, in the first cache, and
 * four rows after four are multiplied with these. All codes are multiplied by the same few functions. Not for plain
 * forms: their codes are taken apart by so few instructions that it pays to do so again for every four rows. */

#if defined(__x86_64__)
#include "tiles_avx2.h"

#define FOUR 4 /* rows that are multiplied with both halves of a panel at once */

/* Codes of a stretch. */
struct bytes {
    uint8_t quads[STRETCH / 4][QUAD_BYTES];
};

/* Integer scales of a stretch, as products of pairs are multiplied by them. */
struct level_pairs {
    int16_t scales[STRETCH / 16][2][16]; /* each twice */
    int16_t others[STRETCH / 32][2][16]; /* of two groups in turns */
};

#define QUADS_OF_EIGHT (4 * MAX_TILE) /* bytes from a row's quad to its next one */

/* Four rows of a tile at a stretch: what is beyond the last row has its scales. */
struct four {
    const int8_t *quads;
    int64_t tokens[FOUR], groups[FOUR]; /* where scales of token groups and sums of groups are */
};

/* --- codes */

INLINE WITH_AVX2 void avx2_unpack_of(const int bits, const int kind, const struct linear *p, const struct stretch *s,
                                     struct bytes *out) {
    const struct form *f = &p->form;
    const int is_book = kind == AVX2_BOOK || kind == AVX2_SIGNED_BOOK;
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    __m256i book = flip;
    uint8_t (*quads)[QUAD_BYTES] = out->quads;
    if (is_book) {
        uint8_t numbers[32];
        fill_book(f, kind == AVX2_BOOK ? book_bias(f) : 0, numbers, 32);
        book = _mm256_loadu_si256((const __m256i *)numbers);
    }
    for (int64_t b = 0; b < s->n_blocks; b++) {
        const uint8_t *unit = s->blocks + b * f->block_bytes + f->header_bytes + s->from / UNIT * bits * QUAD_BYTES;
        for (int64_t k = 0; k < s->n_inputs; k += UNIT, unit += bits * QUAD_BYTES, quads += UNIT / 4) {
            UNROLLED for (int line = 0; line < bits; line++) avx2_prefetch(unit + line * QUAD_BYTES, AHEAD);
            UNROLLED for (int q = 0; q < UNIT / 4; q++) for (int h = 0; h < 2; h++) {
                __m256i codes = avx2_codes(bits, unit, q, h);
                if (kind == AVX2_SIGNED) codes = _mm256_xor_si256(codes, flip);
                if (is_book) codes = _mm256_shuffle_epi8(book, codes);
                _mm256_storeu_si256((__m256i *)(quads[q] + 32 * h), codes);
            }
        }
    }
}

typedef void (*unpack_function)(const struct linear *p, const struct stretch *s, struct bytes *out);

#define AVX2_UNPACK(NAME, bits, kind)                                                                \
    static WITH_AVX2 void NAME(const struct linear *p, const struct stretch *s, struct bytes *out) { \
        avx2_unpack_of(bits, kind, p, s, out);                                                       \
    }
AVX2_UNPACK(avx2_unpack_2, 2, AVX2_UNSIGNED)
AVX2_UNPACK(avx2_unpack_3, 3, AVX2_UNSIGNED)
AVX2_UNPACK(avx2_unpack_4, 4, AVX2_UNSIGNED)
AVX2_UNPACK(avx2_unpack_5, 5, AVX2_UNSIGNED)
AVX2_UNPACK(avx2_unpack_6, 6, AVX2_UNSIGNED)
AVX2_UNPACK(avx2_unpack_8, 8, AVX2_SIGNED)
AVX2_UNPACK(avx2_unpack_narrow, 4, AVX2_BOOK)
AVX2_UNPACK(avx2_unpack_wide, 4, AVX2_SIGNED_BOOK)

static unpack_function avx2_unpack_for(const struct form *f) {
    static const unpack_function by_bits[] = {avx2_unpack_2, avx2_unpack_3, avx2_unpack_4, avx2_unpack_5,
                                              avx2_unpack_6};
    if (f->code == BOOK) return book_bias(f) == 128 ? avx2_unpack_wide : avx2_unpack_narrow;
    return f->bits == 8 ? avx2_unpack_8 : by_bits[f->bits - 2];
}

/* --- four rows */

INLINE WITH_AVX2 __m256i avx2_spread(const int8_t *quad) { return _mm256_set1_epi32(quad_at(quad)); }

/* Adds the products of `n` quads to `sum`, multiplied by `scale` in pairs of 16 bits: `depth` quads are added in 16
 * bits; with `depth` 0 bytes are signed. */
INLINE WITH_AVX2 void avx2_four_quads(const int depth, const int n, const uint8_t (*quads)[QUAD_BYTES], const int8_t *x,
                                      const __m256i scale[2], __m256i sum[2][FOUR]) {
    if (!depth) {
        for (int q = 0; q < n; q++) {
            __m256i codes[2], sizes[2];
            for (int h = 0; h < 2; h++) {
                codes[h] = _mm256_loadu_si256((const __m256i *)(quads[q] + 32 * h));
                sizes[h] = _mm256_abs_epi8(codes[h]);
            }
            UNROLLED for (int r = 0; r < FOUR; r++) {
                const __m256i quad = avx2_spread(x + q * QUADS_OF_EIGHT + 4 * r);
                for (int h = 0; h < 2; h++) { /* at most 2 * 127 * 127, which 16 bits hold */
                    const __m256i some = _mm256_maddubs_epi16(sizes[h], _mm256_sign_epi8(quad, codes[h]));
                    sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(some, scale[h]));
                    IN_ORDER(sum[h][r]);
                }
            }
        }
        return;
    }
    for (int begin = 0; begin < n; begin += depth) {
        __m256i pairs[2][FOUR];
        UNROLLED for (int q = 0; q < depth; q++) {
            __m256i codes[2];
            for (int h = 0; h < 2; h++) codes[h] = _mm256_loadu_si256((const __m256i *)(quads[begin + q] + 32 * h));
            UNROLLED for (int r = 0; r < FOUR; r++) {
                const __m256i quad = avx2_spread(x + (begin + q) * QUADS_OF_EIGHT + 4 * r);
                for (int h = 0; h < 2; h++) {
                    const __m256i some = _mm256_maddubs_epi16(codes[h], quad);
                    pairs[h][r] = q ? _mm256_add_epi16(pairs[h][r], some) : some;
                    IN_ORDER(pairs[h][r]);
                }
            }
        }
        UNROLLED for (int r = 0; r < FOUR; r++) for (int h = 0; h < 2; h++) sum[h][r] =
            _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(pairs[h][r], scale[h]));
    }
}

/* A stretch of `n` token groups of `quads` quads each. */
INLINE WITH_AVX2 void avx2_four_of(const int depth, const int quads, const struct linear *p, const struct bytes *bytes,
                                   const struct scales *scales, int n, int adds_minimum, const struct four *rows,
                                   float totals[FOUR][PANEL]) {
    const __m256i ones[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    const uint8_t (*at)[QUAD_BYTES] = bytes->quads;
    const int8_t *x = rows->quads;
    for (int g = 0; g < n; g++, at += quads, x += quads * QUADS_OF_EIGHT) {
        __m256i sum[2][FOUR];
        UNROLLED for (int r = 0; r < FOUR; r++) sum[0][r] = sum[1][r] =
            _mm256_set1_epi32(p->offsets[rows->tokens[r] + g]);
        avx2_four_quads(depth, quads, at, x, ones, sum);
        UNROLLED for (int r = 0; r < FOUR; r++) {
            const __m256 x_scale = _mm256_set1_ps(p->scales[rows->tokens[r] + g]);
            for (int h = 0; h < 2; h++) {
                const __m256 both = _mm256_mul_ps(_mm256_loadu_ps(scales->scale[g] + 8 * h), x_scale);
                __m256 total = _mm256_loadu_ps(totals[r] + 8 * h);
                total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[h][r]), both, total);
                if (adds_minimum)
                    total = _mm256_fmadd_ps(_mm256_loadu_ps(scales->minimum[g] + 8 * h),
                                            _mm256_set1_ps(p->sums[rows->tokens[r] + g]), total);
                _mm256_storeu_ps(totals[r] + 8 * h, total);
            }
        }
    }
}

/* The same where scales have two levels: `n` token groups of 128 inputs, in groups of `quads` quads. */
INLINE WITH_AVX2 void avx2_four_levels(const int depth, const int quads, const struct linear *p,
                                       const struct bytes *bytes, const struct levels *levels,
                                       const struct level_pairs *pairs, int n, int32_t bias, int adds_minimum,
                                       const struct four *rows, float totals[FOUR][PANEL]) {
    const int groups = MAX_TOKEN_GROUP / 4 / quads;
    const int8_t *x = rows->quads;
    const uint8_t (*at)[QUAD_BYTES] = bytes->quads;
    for (int t = 0; t < n; t++) {
        __m256i sum[2][FOUR];
        UNROLLED for (int r = 0; r < FOUR; r++) sum[0][r] = sum[1][r] = _mm256_setzero_si256();
        for (int g = 0; g < groups; g++, at += quads, x += quads * QUADS_OF_EIGHT) {
            __m256i scale[2];
            for (int h = 0; h < 2; h++)
                scale[h] = _mm256_loadu_si256((const __m256i *)pairs->scales[t * groups + g][h]);
            avx2_four_quads(depth, quads, at, x, scale, sum);
        }
        UNROLLED for (int r = 0; r < FOUR; r++) {
            const __m256 x_scale = _mm256_set1_ps(p->scales[rows->tokens[r] + t]);
            __m256i others[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int g = 0; g < groups && (bias || adds_minimum); g += 2) {
                int32_t two;
                memcpy(&two, p->group_sums + rows->groups[r] + t * groups + g, 4);
                for (int h = 0; h < 2; h++) {
                    const int16_t *own = pairs->others[(t * groups + g) / 2][h];
                    const __m256i products =
                        _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *)own), _mm256_set1_epi32(two));
                    others[h] = _mm256_add_epi32(others[h], products);
                }
            }
            for (int h = 0; h < 2; h++) {
                const __m256 outer = _mm256_loadu_ps(levels->outer + 8 * h);
                __m256 total = _mm256_loadu_ps(totals[r] + 8 * h);
                __m256i whole = sum[h][r];
                if (bias) whole = _mm256_sub_epi32(whole, _mm256_mullo_epi32(others[h], _mm256_set1_epi32(bias)));
                total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), _mm256_mul_ps(outer, x_scale), total);
                if (adds_minimum)
                    total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(others[h]),
                                            _mm256_mul_ps(_mm256_loadu_ps(levels->below + 8 * h), x_scale), total);
                _mm256_storeu_ps(totals[r] + 8 * h, total);
            }
        }
    }
}

/* Finds the quads of a tile. */
INLINE const int8_t *tile_at(const struct linear *p, int64_t tile, int64_t k, int64_t n_inputs,
                             int8_t last[][4 * MAX_TILE]) {
    const int64_t n_tile = p->n_rows - tile;
    const int8_t *quads = quads_of(p, tile) + k * (n_tile < MAX_TILE ? n_tile : MAX_TILE);
    if (n_tile >= MAX_TILE) return quads;
    for (int64_t q = 0; q < n_inputs / 4; q++) memcpy(last[q], quads + 4 * n_tile * q, (size_t)(4 * n_tile));
    return last[0];
}

INLINE struct four four_at(const struct linear *p, const int8_t *quads, int64_t row, int64_t token_group,
                           int64_t group) {
    const int64_t groups = p->form.token_group / p->form.group;
    struct four rows = {.quads = quads};
    UNROLLED for (int r = 0; r < FOUR; r++) {
        const int64_t own = row + r < p->n_rows ? row + r : p->n_rows - 1;
        rows.tokens[r] = own * p->n_groups + token_group;
        rows.groups[r] = own * p->n_groups * groups + group;
    }
    return rows;
}

INLINE WITH_AVX2 void avx2_many_of(const int depth, const int quads, const struct linear *p, const uint8_t *w,
                                   int64_t row, int n_rows, float (*sums)[PANEL]) {
    const struct form *f = &p->form;
    const unpack_function unpack = avx2_unpack_for(f);
    const int adds_minimum = has_minimum(f);
    int8_t last[STRETCH / 4][QUADS_OF_EIGHT] = {{0}};
    struct stretch s = before_panel(p, w);
    struct scales scales;
    struct bytes bytes;
    for (int64_t k = 0; next_stretch(f, &s); k += s.n_blocks * s.n_inputs) {
        const int64_t n_inputs = s.n_blocks * s.n_inputs;
        avx2_read_scales(f, &s, &scales);
        unpack(p, &s, &bytes);
        const int8_t *x = NULL;
        for (int r = 0; r < n_rows; r += FOUR) {
            x = r % MAX_TILE ? x + 4 * FOUR : tile_at(p, row + r, k, n_inputs, last);
            const struct four rows = four_at(p, x, row + r, k / (4 * quads), 0);
            avx2_four_of(depth, quads, p, &bytes, &scales, (int)(n_inputs / (4 * quads)), adds_minimum, &rows,
                         sums + r);
        }
    }
}

INLINE WITH_AVX2 void avx2_many_levels_of(const int depth, const int quads, const struct linear *p, const uint8_t *w,
                                          int64_t row, int n_rows, float (*sums)[PANEL]) {
    const struct form *f = &p->form;
    const unpack_function unpack = avx2_unpack_for(f);
    const int adds_minimum = has_minimum(f);
    const int32_t bias = code_bias(p);
    int8_t last[STRETCH / 4][QUADS_OF_EIGHT] = {{0}};
    struct stretch s = before_panel(p, w);
    struct levels levels;
    struct level_pairs pairs;
    struct bytes bytes;
    for (int64_t k = 0; next_stretch(f, &s); k += s.n_inputs) {
        avx2_read_levels(f, &s, &levels);
        const int n = (int)(s.n_inputs / (4 * quads));
        for (int h = 0; h < 2; h++) {
            for (int g = 0; g < n; g++)
                avx2_interleave(levels.scale[g] + 8 * h, levels.scale[g] + 8 * h, pairs.scales[g][h]);
            for (int g = 0; g < n; g += 2)
                avx2_interleave(levels.other[g] + 8 * h, levels.other[g + 1] + 8 * h, pairs.others[g / 2][h]);
        }
        unpack(p, &s, &bytes);
        const int8_t *x = NULL;
        for (int r = 0; r < n_rows; r += FOUR) {
            x = r % MAX_TILE ? x + 4 * FOUR : tile_at(p, row + r, k, s.n_inputs, last);
            const struct four rows = four_at(p, x, row + r, k / MAX_TOKEN_GROUP, k / (4 * quads));
            avx2_four_levels(depth, quads, p, &bytes, &levels, &pairs, (int)(s.n_inputs / MAX_TOKEN_GROUP), bias,
                             adds_minimum, &rows, sums + r);
        }
    }
}

#define AVX2_MANY(NAME, WORK, depth, quads)                                                       \
    static WITH_AVX2 void NAME(const struct linear *p, const uint8_t *w, int64_t row, int n_rows, \
                               float (*sums)[PANEL]) {                                            \
        WORK(depth, quads, p, w, row, n_rows, sums);                                              \
    }
#define AVX2_MANY_SIZES(NAME, depth)              \
    AVX2_MANY(NAME##_16, avx2_many_of, depth, 16) \
    AVX2_MANY(NAME##_8, avx2_many_of, depth, 8)   \
    AVX2_MANY(NAME##_levels_8, avx2_many_levels_of, depth, 8)
#define AVX2_MANY_HALVES(NAME, depth)           \
    AVX2_MANY(NAME##_4, avx2_many_of, depth, 4) \
    AVX2_MANY(NAME##_levels_4, avx2_many_levels_of, depth, 4)
AVX2_MANY_SIZES(avx2_many_eight, 8)
AVX2_MANY_SIZES(avx2_many_four, 4)
AVX2_MANY_SIZES(avx2_many_two, 2)
AVX2_MANY_SIZES(avx2_many_signed, 0)
AVX2_MANY_HALVES(avx2_many_four, 4)
AVX2_MANY_HALVES(avx2_many_two, 2)
AVX2_MANY_HALVES(avx2_many_signed, 0)

/* By how many quads are added in 16 bits (8, 4, 2, or signed bytes); by the inputs that share a scale (64, 32, 16),
 * then by those in a group where scales have two levels (32, 16). */
static const many_function avx2_many[][5] = {
    {avx2_many_eight_16, avx2_many_eight_8, avx2_many_four_4, avx2_many_eight_levels_8, avx2_many_four_levels_4},
    {avx2_many_four_16, avx2_many_four_8, avx2_many_four_4, avx2_many_four_levels_8, avx2_many_four_levels_4},
    {avx2_many_two_16, avx2_many_two_8, avx2_many_two_4, avx2_many_two_levels_8, avx2_many_two_levels_4},
    {avx2_many_signed_16, avx2_many_signed_8, avx2_many_signed_4, avx2_many_signed_levels_8, avx2_many_signed_levels_4},
};

many_function shardnet_avx2_many(const struct linear *p) {
    const struct form *f = &p->form;
    const int is_book = f->code == BOOK, is_signed = is_book ? book_bias(f) == 128 : f->bits == 8;
    const int depth = is_signed ? 3 : is_book || f->bits == 5 ? 1 : f->bits == 6 ? 2 : 0;
    if (is_float(f) || is_plain(f)) return NULL;
    if (has_levels(f)) return avx2_many[depth][f->group == UNIT ? 3 : 4];
    return avx2_many[depth][f->token_group == 64 ? 0 : f->token_group == 32 ? 1 : 2];
}

#endif

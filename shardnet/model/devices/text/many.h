/* Products of many rows: a group of threads has four panels, 64 outputs, of 64 rows; a thread has a fourth of a panel's
 * outputs of four rows, 4 x 4 sums. What is multiplied next is read while the inputs before are. */
#if ROWS == 0

#if defined(TENSORS) && !IS_FLOAT
/* A warp multiplies 32 outputs of 16 rows together: a thread's sums are where tensor cores leave them. */
#define FIRST_ROW (THREAD / 64 * 16)
#define OWN_ROW (FIRST_ROW + THREAD % 4 * 4)
#define OWN_FOURTH (THREAD / 32 % 2 * 8 + THREAD % 32 / 4)
#define PLACE_OF(fourth, j) ((fourth) / 8 * 32 + (j) * 8 + (fourth) % 8)
#define PLACE_OF_ROW(row) ((row) / 16 * 16 + (row) % 4 / 2 * 8 + (row) % 16 / 4 * 2 + (row) % 2)
#else
#define FIRST_ROW OWN_ROW
#define OWN_ROW (THREAD / 16 * 4)
#define OWN_FOURTH (THREAD % 16)
#define PLACE_OF(fourth, j) ((j) * 16 + (fourth)) /* so that threads write to unlike banks */
#define PLACE_OF_ROW(row) (row)
#endif
#define PLACE(j) PLACE_OF(OWN_FOURTH, j)
#define PANEL(n) ((uint64_t)(GROUP_Y * 4 + (n) < n_panels ? GROUP_Y * 4 + (n) : n_panels - 1))

#if IS_FLOAT
#define DEEP 32 /* inputs at a time */
#define OF_THREAD (DEEP * 64 / THREADS)
#define BLOCK_OF(panel, input) (matrix + ((panel) * n_blocks + (input) / BLOCK) * BLOCK_WORDS)
#if BITS < 16
#define WEIGHT(block, input, o) VALUE(block + HEADER / 4 + (input) % BLOCK / 32 * BITS * 16, (input) % 32, o)
#else
#define WEIGHT(block, input, o) plain_at(block[o], (input) % OF_WORD)
#define OPEN_BOOK
#endif
/* Has a thread read its part of the inputs from `next` on, of weights and rows. */
#define BRING(next)                                                                                                   \
    TIMES (k, OF_THREAD) {                                                                                            \
        const uint32_t input = (next) + k * (THREADS / 64) + THREAD / 64;                                             \
        if (input < n_inputs) {                                                                                       \
            MY(weight)[k] = WEIGHT(BLOCK_OF(PANEL(THREAD % 64 / 16), input), input, THREAD % 16);                     \
            MY(value)[k] = wide[(uint64_t)source[THREAD % 64] * n_inputs + input];                                    \
        }                                                                                                             \
    }
#else
#define DEEP 64
#define PLANE 66 /* fours of 16 inputs: two more than are used, so that threads write to unlike banks */
#define SUBS (DEEP / SUB)
#define LESS_OF_MANY (BITS == 8 ? LESS : 0) /* smaller codes become signed bytes */
#define NEEDS_SUMS ((LESS_OF_MANY != 0) + LEVELS * HAS_MINIMUM) /* of groups */

/* A turn is of whole blocks, and of steps of DEEP inputs: where things are in it is known beforehand. So is in which half
 * of two a step has them, but where turns are of one step. */
#define TURN (BLOCK < DEEP ? DEEP : BLOCK)
#define SIDE(step) (((TURN / DEEP % 2 ? begin : 0) + (step)) / DEEP % 2)
#define BLOCK_AT(input) ((input) / BLOCK * BLOCK_WORDS)
#define UNIT_AT(input) (BLOCK_AT(input) + (input) % BLOCK / 32 * BITS * 16)
#define IS_THERE(at, more) ((BLOCK == TURN && (at) < TURN) || begin + (at) + (BLOCK == TURN ? 0 : (more)) < n_inputs)
#ifdef MULTIPLY_TILES
#define UNROLLED_STEPS _Pragma("unroll (TURN <= 256 ? 4 : 1)")
#else
#define UNROLLED_STEPS
#endif

/* Of the inputs from `at` of a turn on a thread brings four outputs of a quad, and 16 inputs of a row; and of a PART of them
 * what output or row MEMBER has: factors, minimums, scales, sums. */
#define QUAD (THREAD / 8 % 16)
#define FOURTH (THREAD % 8 + THREAD / 128 * 8)
#define PART (THREAD / 64)
#define MEMBER (THREAD % 64)
#define BRING(at)                                                                                                     \
    {                                                                                                                 \
        if (IS_THERE(at, QUAD / 8 * 32)) {                                                                            \
            MY(low)[0] = LOAD4(MY(low_at)[0] + UNIT_AT(at));                                                          \
            MY(high)[0] = LOAD4(MY(high_at)[0] + UNIT_AT(at));                                                        \
        }                                                                                                             \
        if (IS_THERE(at, THREAD % 4 * 16)) MY(four)[0] = LOAD4(MY(four_at)[0] + (at) / 4);                            \
        BRING_FACTORS(at)                                                                                             \
    }
#define PUT(side)                                                                                                     \
    {                                                                                                                 \
        const FOUR codes = codes_of(MY(low)[0], MY(high)[0], QUAD % 8);                                               \
        TIMES (j, 4)                                                                                                  \
            of_weights[((side) * (DEEP / 16) + QUAD / 4) * PLANE + PLACE_OF(FOURTH, j)].of[QUAD % 4] = SIGNED(codes.of[j]); \
        of_rows[((side) * (DEEP / 16) + THREAD % 4) * PLANE + PLACE_OF_ROW(THREAD / 4)] = MY(four)[0];                \
    }
#define PAIR_OF_SUMS(at) ((GLOBAL const uint32_t *)group_sums)[(MY(row_at)[0] + begin + (at)) / (2 * SUB)]

/* Ends a token group: adds its whole sums, times what outputs and rows have in w and x, to the totals. */
#define ADD_SUMS(w, x)                                                                                                \
    TIMES (i, 16) {                                                                                                   \
        const float both = MUL(AS_FLOAT((w).of[i % 4]), AS_FLOAT((x).of[i / 4]));                                     \
        MY(total)[i] = FMA((float)MY(sum)[i], both, MY(total)[i]);                                                    \
        MY(sum)[i] = 0;                                                                                               \
    }

#if LEVELS
/* Those of a whole turn at a time: levels, pairs of minimums and of sums; of PART's own a factor, what is below, two scales. */
#define EACH (TURN / SUB / 4)
#define PAIRS (4 * EACH)
#define BRING_FACTORS(at)                                                                                             \
    if ((at) == TURN && IS_THERE(at, 0)) BRING_TURN(at)
#define BRING_TURN(at)                                                                                                \
    {                                                                                                                 \
        GLOBAL const uint32_t *block = matrix + MY(panel_at)[0] + BLOCK_AT(begin) + BLOCK_AT(at);                     \
        TIMES (k, EACH) MY(its_level)[k] = level_at(block, k * 4 + PART, MEMBER % 16);                                \
        TIMES (k, HAS_MINIMUM ? EACH / 2 : 0) {                                                                       \
            const uint32_t g = (k * 4 + PART) * 2;                                                                    \
            MY(its_lowest)[k] = minimum_at(block, g, MEMBER % 16) | minimum_at(block, g + 1, MEMBER % 16) << 8;       \
            MY(its_sums)[k] = PAIR_OF_SUMS((at) + g * SUB);                                                           \
        }                                                                                                             \
        if (PART == 0) MY(its_own)[0] = OWN_FACTOR(block, 0, MEMBER % 16);                                            \
        if (PART == 1 && HAS_MINIMUM) MY(its_own)[0] = BELOW(block, MEMBER % 16);                                     \
        if (PART >= 2) MY(its_own)[0] = scales[(MY(row_at)[0] + begin + (at)) / TOKEN_GROUP + PART - 2];              \
    }
#define PUT_TURN(odd)                                                                                                 \
    {                                                                                                                 \
        TIMES (k, EACH) level[(odd) * 4 * EACH * 16 + (k * 4 + PART) * 16 + MEMBER / 4].of[MEMBER % 4] = MY(its_level)[k]; \
        TIMES (k, HAS_MINIMUM ? EACH / 2 : 0) {                                                                       \
            const uint32_t pair = ((odd) * 2 * EACH + k * 4 + PART) * 16 + MEMBER / 4;                                \
            lowest[pair].of[MEMBER % 4] = MY(its_lowest)[k], sums_of[pair].of[MEMBER % 4] = MY(its_sums)[k];          \
        }                                                                                                             \
        of_turn[((odd) * 4 + PART) * 16 + MEMBER / 4].of[MEMBER % 4] = AS_INT(MY(its_own)[0]);                        \
    }
#else
/* Those of the token groups of a step, and pairs of sums. */
#define BRING_FACTORS(at)                                                                                             \
    const uint32_t its = PART * TOKEN_GROUP;                                                                          \
    if (NEEDS_SUMS && PART < SUBS / 2 && IS_THERE(at, 0)) MY(its_sums)[0] = PAIR_OF_SUMS((at) + PART * 2 * SUB);      \
    if (PART < DEEP / TOKEN_GROUP && IS_THERE(at, its)) {                                                             \
        GLOBAL const uint32_t *block = matrix + MY(panel_at)[0] + BLOCK_AT(begin) + BLOCK_AT((at) + its);             \
        const uint64_t group = (MY(row_at)[0] + begin + (at) + its) / TOKEN_GROUP;                                    \
        MY(its_own)[0] = OWN_FACTOR(block, ((at) + its) % BLOCK, MEMBER % 16);                                        \
        MY(its_scale)[0] = scales[group];                                                                             \
        BRING_LOWEST                                                                                                  \
    }
#if HAS_MINIMUM
#define BRING_LOWEST                                                                                                  \
    MY(its_lowest)[0] = AS_INT(lowest_at(block, group * TOKEN_GROUP % BLOCK / SIZE_OF_GROUP, MEMBER % 16, MY(its_own)[0])); \
    MY(its_sum)[0] = sums[group];
#else
#define BRING_LOWEST
#endif
#define PUT_FACTORS(side)                                                                                             \
    if (PART < SUBS) {                                                                                                \
        const uint32_t place = ((side) * SUBS + PART) * 16 + MEMBER / 4;                                              \
        level[place].of[MEMBER % 4] = AS_INT(MY(its_own)[0]), of_turn[place].of[MEMBER % 4] = AS_INT(MY(its_scale)[0]); \
        if (HAS_MINIMUM) lowest[place].of[MEMBER % 4] = MY(its_lowest)[0], sum_of[place].of[MEMBER % 4] = AS_INT(MY(its_sum)[0]); \
        if (NEEDS_SUMS) sums_of[place].of[MEMBER % 4] = MY(its_sums)[0];                                              \
    }
#define EACH 1
#define PAIRS 8
#endif
#endif

/* out[row][first + o] for the four panels from GROUP_Y * 4 on and the 64 rows from GROUP_X * 64 on: groups with the same
 * panels run together, and find them in the cache. With `expert_words` they are the rows of tile GROUP_X, whose numbers are
 * in `order`, by the matrix of the tile's expert; `repeats` rows have the same inputs. */
KERNEL multiply_many(GLOBAL const uint32_t *weights, GLOBAL const uint32_t *quantised, GLOBAL const float *wide,
                     GLOBAL const float *scales, GLOBAL const float *sums, GLOBAL const int16_t *group_sums,
                     GLOBAL const float *bias, GLOBAL const uint32_t *order, GLOBAL const uint32_t *tiles,
                     GLOBAL float *out, uint32_t n_blocks, uint32_t n_out, uint32_t n_rows, uint32_t width,
                     uint32_t first, uint32_t has_bias, uint32_t expert_words, uint32_t repeats WHERE) {
    AWAIT
    SHARED uint32_t source[64], target[64]; /* of rows: where their inputs are, and their outputs */
    OWN(float, total, 16);
#if IS_FLOAT
    SHARED FOUR of_weights[DEEP * 16], of_rows[DEEP * 16]; /* [inputs][64] */
    OWN(float, weight, OF_THREAD);
    OWN(float, value, OF_THREAD);
    OWN(float, sum, 16);
#else
    SHARED FOUR of_weights[2 * DEEP / 16 * PLANE], of_rows[2 * DEEP / 16 * PLANE]; /* twice [16 inputs][64] */
    /* Twice [parts][64]: levels or factors, minimums, sums by pairs or not, and what of a turn or row is one. */
    SHARED FOUR level[8 * 16 * EACH], lowest[PAIRS * 16], sums_of[PAIRS * 16], sum_of[8 * 16], of_turn[8 * 16];
    OWN(GLOBAL const uint32_t *, low_at, 1);
    OWN(GLOBAL const uint32_t *, high_at, 1);
    OWN(GLOBAL const uint32_t *, four_at, 1);
    OWN(uint64_t, panel_at, 1);
    OWN(uint64_t, row_at, 1);
    OWN(FOUR, low, 1);
    OWN(FOUR, high, 1);
    OWN(FOUR, four, 1);
    OWN(uint32_t, its_level, EACH);
    OWN(uint32_t, its_lowest, EACH);
    OWN(uint32_t, its_sums, EACH);
    OWN(float, its_own, 1);
    OWN(float, its_scale, 1);
    OWN(float, its_sum, 1);
    OWN(int, sum, 16);
#endif
    const uint32_t n_inputs = n_blocks * BLOCK, n_panels = (n_out + 15) / 16, expert = expert_words ? tiles[3 * GROUP_X] : 0;
    const uint32_t begin_row = expert_words ? tiles[3 * GROUP_X + 1] : GROUP_X * 64, left = n_rows - begin_row;
    const uint32_t count = expert_words ? tiles[3 * GROUP_X + 2] : left < 64 ? left : 64;
    GLOBAL const uint32_t *matrix = weights + (uint64_t)expert * expert_words;
    if (count == 0) return;
    PHASE {
        if (THREAD < 64) {
            const uint32_t own = begin_row + (THREAD < count ? THREAD : count - 1);
            target[THREAD] = expert_words ? order[own] : own;
            source[THREAD] = target[THREAD] / repeats;
        }
        TIMES (i, 16) MY(total)[i] = 0, MY(sum)[i] = 0;
    }
#if IS_FLOAT
    OPEN_BOOK
    PHASE { BRING(0) }
    for (uint32_t begin = 0; begin < n_inputs; begin += DEEP) {
        PHASE {
            TIMES (k, OF_THREAD) {
                const uint32_t at = (k * (THREADS / 64) + THREAD / 64) * 16 + THREAD % 64 / 4;
                of_weights[at].of[THREAD % 4] = (uint32_t)AS_INT(MY(weight)[k]);
                of_rows[at].of[THREAD % 4] = (uint32_t)AS_INT(MY(value)[k]);
            }
        }
        PHASE {
            BRING(begin + DEEP)
            TIMES (i, DEEP) {
                const FOUR w = of_weights[i * 16 + OWN_FOURTH], x = of_rows[i * 16 + OWN_ROW / 4];
                if (begin + i < n_inputs)
                    TIMES (r, 4)
                        TIMES (j, 4)
                            MY(sum)[r * 4 + j] = FMA(AS_FLOAT(w.of[j]), AS_FLOAT(x.of[r]), MY(sum)[r * 4 + j]);
            }
#if BITS < 16
            if ((begin + DEEP) % TOKEN_GROUP == 0) {
                GLOBAL const uint32_t *block = BLOCK_OF(PANEL(OWN_FOURTH / 4), begin);
                TIMES (j, 4) {
                    const float factor = OWN_FACTOR(block, begin % BLOCK / TOKEN_GROUP * TOKEN_GROUP, OWN_FOURTH % 4 * 4 + j);
                    TIMES (r, 4) {
                        MY(total)[r * 4 + j] = FMA(MY(sum)[r * 4 + j], factor, MY(total)[r * 4 + j]);
                        MY(sum)[r * 4 + j] = 0;
                    }
                }
            }
#endif
        }
    }
#else
    PHASE {
        const uint32_t begin = 0;
        GLOBAL const uint32_t *unit = matrix + PANEL(FOURTH / 4) * n_blocks * BLOCK_WORDS + HEADER / 4 + FOURTH % 4 * 4 +
                                      UNIT_AT(QUAD / 8 * 32);
        MY(low_at)[0] = unit + LOW(QUAD % 8) * 16, MY(high_at)[0] = unit + HIGH(QUAD % 8) * 16;
        MY(panel_at)[0] = PANEL(MEMBER / 16) * n_blocks * BLOCK_WORDS, MY(row_at)[0] = (uint64_t)source[MEMBER] * n_inputs;
        MY(four_at)[0] = quantised + (uint64_t)source[THREAD / 4] * n_inputs / 4 + THREAD % 4 * 4;
        BRING(0)
        PUT(0)
#if LEVELS
        BRING_TURN(0)
        PUT_TURN(0)
#else
        PUT_FACTORS(0)
#endif
    }
    for (uint32_t begin = 0; begin < n_inputs; begin += TURN) {
        UNROLLED_STEPS for (uint32_t step = 0; step < TURN; step += DEEP) {
            PHASE {
                const uint32_t side = SIDE(step);
                BRING(step + DEEP)
                UNROLLED_STEPS for (uint32_t s = 0; s < SUBS; s++) {
                    const uint32_t first_four = (side * DEEP + s * SUB) / 16 * PLANE;
                    int dots[16];
                    if (FIRST_ROW >= count || !IS_THERE(step, s * SUB)) break;
#ifdef MULTIPLY_TILES
                    MULTIPLY_TILES(of_weights + first_four, of_rows + first_four, dots);
#else
                    TIMES (i, 16) dots[i] = 0;
                    UNROLLED for (uint32_t four = first_four; four < first_four + SUB / 16 * PLANE; four += PLANE) {
                        FOUR w[4];
                        TIMES (j, 4) w[j] = of_weights[four + PLACE(j)];
                        TIMES (r, 4) {
                            const FOUR x = of_rows[four + PLACE_OF_ROW(OWN_ROW + r)];
                            TIMES (quad, 4)
                                TIMES (j, 4) dots[r * 4 + j] = DOT4(w[j].of[quad], x.of[quad], dots[r * 4 + j]);
                        }
                    }
#endif
#if LEVELS
                    const uint32_t odd = begin / TURN % 2, sub = step / SUB + s;
                    const FOUR its = level[(odd * 4 * EACH + sub) * 16 + OWN_FOURTH];
                    TIMES (i, 16) MY(sum)[i] += dots[i] * (int)its.of[i % 4];
                    if ((sub + 1) * SUB % TOKEN_GROUP == 0) {
                        const uint32_t group = sub * SUB / TOKEN_GROUP, of_group = TOKEN_GROUP / SUB / 2;
                        const FOUR factor = of_turn[odd * 64 + OWN_FOURTH], below = of_turn[odd * 64 + 16 + OWN_FOURTH];
                        const FOUR scale = of_turn[odd * 64 + 32 + group * 16 + OWN_ROW / 4];
                        ADD_SUMS(factor, scale)
                        TIMES (k, HAS_MINIMUM ? of_group : 0) {
                            const uint32_t pair = (odd * 2 * EACH + group * of_group + k) * 16;
                            const FOUR w = lowest[pair + OWN_FOURTH], x = sums_of[pair + OWN_ROW / 4];
                            TIMES (i, 16) MY(sum)[i] = DOT2(x.of[i / 4], w.of[i % 4], MY(sum)[i]);
                        }
                        if (HAS_MINIMUM) ADD_SUMS(below, scale)
                    }
#else
                    const uint32_t part = (side * SUBS + s * SUB / TOKEN_GROUP) * 16, pair = (side * SUBS + s / 2) * 16;
                    TIMES (i, 16) MY(sum)[i] += dots[i];
                    if (NEEDS_SUMS && s % 2) {
                        const FOUR x = sums_of[pair + OWN_ROW / 4];
                        const uint32_t less = (uint32_t)(LESS < 0 ? -LESS : LESS) * 0x101u;
                        TIMES (i, 16) MY(sum)[i] = LESS < 0 ? DOT2(x.of[i / 4], less, MY(sum)[i])
                                                            : MY(sum)[i] - DOT2(x.of[i / 4], less, 0);
                    }
                    if ((step + (s + 1) * SUB) % TOKEN_GROUP == 0) {
                        const FOUR w = level[part + OWN_FOURTH], x = of_turn[part + OWN_ROW / 4];
                        const FOUR least = lowest[part + OWN_FOURTH], y = sum_of[part + OWN_ROW / 4];
                        ADD_SUMS(w, x)
                        TIMES (i, HAS_MINIMUM ? 16 : 0)
                            MY(total)[i] = FMA(AS_FLOAT(least.of[i % 4]), AS_FLOAT(y.of[i / 4]), MY(total)[i]);
                    }
#endif
                }
                PUT(1 - side)
#if LEVELS
                if (step + DEEP == TURN) PUT_TURN(1 - begin / TURN % 2)
#else
                PUT_FACTORS(1 - side)
#endif
                if (step + DEEP == TURN)
                    MY(low_at)[0] += BLOCK_AT(TURN), MY(high_at)[0] += BLOCK_AT(TURN), MY(four_at)[0] += TURN / 4;
            }
        }
    }
#endif
    PHASE {
        TIMES (i, 16) {
            const uint32_t o = GROUP_Y * 64 + OWN_FOURTH * 4 + i % 4, row = OWN_ROW + i / 4;
            const float all = BITS < 16 ? MY(total)[i] : (float)MY(sum)[i];
            if (row < count && o < n_out)
                out[(uint64_t)target[row] * width + first + o] = finished(all, bias, o + expert * n_out, n_out, has_bias);
        }
    }
}

#endif

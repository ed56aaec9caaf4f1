/* Rows quantised as csrc/linear.c does, and their products with panels of any form, to the same bits.
 *
 * What a form is, is given by macros, so that a compiler sees constants: config/panel_form.py says what they mean. A
 * group of threads makes a panel of 16 outputs for ROWS rows; many.h has products of many. Sums of whole numbers may be
 * taken in any order; what is added in floats is added up in the order of its token groups, by one thread. */

#define SUB (SIZE_OF_GROUP < 32 ? SIZE_OF_GROUP : 32) /* inputs of a unit that share a scale */
#define BLOCK_WORDS (BLOCK_BYTES / 4)
#define GROUPS_OF_BLOCK (BLOCK / SIZE_OF_GROUP)

INLINE uint32_t byte_at(GLOBAL const uint32_t *words, uint32_t at) { return words[at / 4] >> at % 4 * 8 & 255u; }

INLINE uint32_t short_at(GLOBAL const uint32_t *words, uint32_t at) { return words[at / 2] >> at % 2 * 16 & 65535u; }

#if IS_FLOAT || SCALE == 4
INLINE float from_e4m3(uint32_t code) {
    const uint32_t bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
    return MUL(AS_FLOAT((code & 0x7fu) == 0x7fu ? 0x7fc00000u : bits), 0x1p120f);
}
#endif

/* --- rows */

#define NO_ACTIVATION 5
#define HAS_BIAS 1
#define HAS_FACTORS 2 /* behind the biases, of outputs that are multiplied */

INLINE float finished(float sum, GLOBAL const float *bias, uint32_t at, uint32_t n_out, uint32_t has) {
    if (has & HAS_BIAS) sum = ADD(sum, bias[at]);
    return has & HAS_FACTORS ? MUL(sum, bias[n_out + at]) : sum;
}

/* An input of a row; with an activation it is a gate of [gates, others] times the other, with one from 6 on it is alone. */
INLINE float input_at(GLOBAL const float *row, uint32_t i, uint32_t n_in, uint32_t activation, float limit,
                      float alpha) {
    if (activation > NO_ACTIVATION) return activated(row[i], activation - NO_ACTIVATION - 1);
    return activation == NO_ACTIVATION ? row[i] : gated(row[i], row[n_in + i], activation, limit, alpha);
}

#if ROWS == 0
/* A thread for four inputs: [rows][padded inputs] of int8, and what goes with each token group. Where codes are floats,
 * rows are laid out as they are, padded with zeros. */
KERNEL quantise(GLOBAL const float *rows, GLOBAL const uint32_t *order, GLOBAL uint32_t *quantised, GLOBAL float *wide,
                GLOBAL float *scales, GLOBAL float *sums, GLOBAL int16_t *group_sums, uint32_t n_rows, uint32_t n_in,
                uint32_t n_groups, uint32_t has_order, uint32_t activation, float limit, float alpha WHERE) {
    AWAIT
    const uint32_t n_inputs = n_groups * TOKEN_GROUP, all = n_rows * n_inputs, from = GROUP_X * THREADS * 4;
#define INPUT(at)                                                                                                 \
    ((at) < all && (at) % n_inputs < n_in                                                                         \
         ? input_at(rows + (uint64_t)((at) / n_inputs) * (activation < NO_ACTIVATION ? 2 * n_in : n_in),          \
                    has_order ? order[(at) % n_inputs] : (at) % n_inputs, n_in, activation, limit, alpha) : 0.0f)
#if IS_FLOAT
    PHASE {
        TIMES (j, 4)
            if (from + j * THREADS + THREAD < all) wide[from + j * THREADS + THREAD] = INPUT(from + j * THREADS + THREAD);
    }
#else
#define OF_GROUP (TOKEN_GROUP / 4) /* threads */
    SHARED float size[THREADS];
    SHARED int sum[THREADS];
    OWN(float, value, 4);
    PHASE {
        float largest = 0;
        TIMES (j, 4) {
            MY(value)[j] = INPUT(from + THREAD * 4 + j);
            const float own = AS_FLOAT((uint32_t)AS_INT(MY(value)[j]) & 0x7fffffffu);
            if (is_more(own, largest)) largest = own; /* what is no number stays */
        }
        size[THREAD] = largest;
    }
    for (uint32_t step = 1; step < OF_GROUP; step *= 2)
        PHASE {
            if (THREAD % (2 * step) == 0 && is_more(size[THREAD + step], size[THREAD])) size[THREAD] = size[THREAD + step];
        }
    PHASE {
        const float largest = size[THREAD / OF_GROUP * OF_GROUP];
        const int is_finite = largest <= 3.402823466e38f;
        const float inverse = is_finite && largest > 1e-36f ? DIV(127.0f, largest) : 0.0f;
        uint32_t four = 0;
        sum[THREAD] = 0;
        TIMES (j, 4) {
            const float shifted = ADD(is_finite ? MUL(MY(value)[j], inverse) : 0.0f, 12582912.0f); /* 1.5 * 2^23 */
            const int whole = AS_INT(shifted) - 0x4b400000;
            four |= ((uint32_t)whole & 255u) << 8 * j;
            sum[THREAD] += whole;
        }
        if (from + THREAD * 4 < all) quantised[from / 4 + THREAD] = four;
    }
    for (uint32_t step = 1; step < OF_GROUP; step *= 2) {
        PHASE {
            if (THREAD % (2 * step) == 0) sum[THREAD] += sum[THREAD + step];
            if (8 * step == SUB && THREAD % (SUB / 4) == 0 && from + THREAD * 4 < all)
                group_sums[(from + THREAD * 4) / SUB] = (int16_t)sum[THREAD];
        }
    }
    PHASE {
        if (THREAD % OF_GROUP == 0 && from + THREAD * 4 < all) {
            const float largest = size[THREAD];
            const float scale = largest <= 3.402823466e38f ? DIV(largest, 127.0f) : NOT_A_NUMBER;
            scales[(from + THREAD * 4) / TOKEN_GROUP] = scale;
            sums[(from + THREAD * 4) / TOKEN_GROUP] = MUL((float)sum[THREAD], scale);
        }
    }
#endif
}

#endif

#if BITS < 16

/* --- what stands before a block's codes */

INLINE int whole_at(GLOBAL const uint32_t *block, uint32_t at) {
    return SCALE == 6 ? (int)(int8_t)byte_at(block, at) : (int)byte_at(block, at);
}

/* Scale number `at` of those that begin at byte `begin` of a block. */
INLINE float scale_at(GLOBAL const uint32_t *block, uint32_t begin, uint32_t at) {
#if SCALE == 0
    return HALF(short_at(block, begin / 2 + at));
#elif SCALE == 1
    return AS_FLOAT(short_at(block, begin / 2 + at) << 16);
#elif SCALE == 2
    return AS_FLOAT(block[begin / 4 + at]);
#elif SCALE == 3
    const uint32_t power = byte_at(block, begin + at);
    return AS_FLOAT(power ? power << 23 : 0x400000u); /* 2^-127 is subnormal */
#elif SCALE == 4
    return from_e4m3(byte_at(block, begin + at));
#else
    return (float)whole_at(block, begin + at);
#endif
}

#define SCALE_BYTES (SCALE == 2 ? 4 : SCALE <= 1 ? 2 : 1)
#define SCALES_AT (32 * BLOCK_SCALES)
#define MINIMUMS_AT (SCALES_AT + GROUPS_OF_BLOCK * 16 * SCALE_BYTES)
#define OUTER(block, o) HALF(short_at(block, o))
#define BELOW(block, o) (-HALF(short_at(block, 16 + (o))))

#if LEVELS
/* The whole numbers that scale group `g` of an output, and that its minimum is. */
INLINE int level_at(GLOBAL const uint32_t *block, uint32_t g, uint32_t o) {
    const uint32_t at = SCALES_AT + g * 16 + o;
    return SCALE == 7 ? (int)(byte_at(block, at) & 15u) : whole_at(block, at);
}

INLINE int minimum_at(GLOBAL const uint32_t *block, uint32_t g, uint32_t o) {
    const uint32_t at = g * 16 + o;
    return SCALE == 7 ? (int)(byte_at(block, SCALES_AT + at) >> 4) : whole_at(block, MINIMUMS_AT + at);
}
#else
/* The number that scales group `g` of an output. */
INLINE float factor_at(GLOBAL const uint32_t *block, uint32_t g, uint32_t o) {
#if SCALE == 7
    return MUL(MUL((float)(byte_at(block, SCALES_AT + g * 16 + o) & 15u), FACTOR), OUTER(block, o));
#else
    const float own = MUL(scale_at(block, SCALES_AT, g * 16 + o), FACTOR);
    return BLOCK_SCALES ? MUL(own, OUTER(block, o)) : own;
#endif
}

INLINE float lowest_at(GLOBAL const uint32_t *block, uint32_t g, uint32_t o, float factor) {
#if SCALE == 7
    return MUL((float)(byte_at(block, SCALES_AT + g * 16 + o) >> 4), BELOW(block, o));
#elif MINIMUM == 2
    return MUL(-(float)byte_at(block, MINIMUMS_AT + g * 16 + o), factor);
#else
    const float own = scale_at(block, MINIMUMS_AT, g * 16 + o);
    return BLOCK_SCALES ? MUL(own, BELOW(block, o)) : own;
#endif
}
#endif

/* --- codes */

#if IS_FLOAT
#if BITS == 8
#define VALUE(unit, input, o) value_of(byte_at(unit, (input) * 16 + (o)))
INLINE float value_of(uint32_t code) { return CODE == 2 ? from_e4m3(code) : HALF(code << 8); }
#define OPEN_BOOK
#else
/* A book of 16 floats lies in memory that a group shares: threads may look up different places of that at once. */
TABLE float BOOK[16] = BOOK_VALUES;
#define VALUE(unit, input, o) book[byte_at(unit, (input) / 2 * 16 + (o)) >> (input) % 2 * 4 & 15u]
#define OPEN_BOOK                                                    \
    SHARED float book[16];                                           \
    PHASE { if (THREAD < 16) book[THREAD] = BOOK[THREAD]; }
#endif
#else

/* A unit has 32 inputs of 16 outputs in BITS lines of 16 words. What four of its inputs, `quad`, have is in line LOW, and
 * what BITS are more than 2 or 4 in line HIGH. */
#define LOW(quad) (BITS == 8 ? (quad) : BITS < 4 ? (quad) / 4 : (quad) / 2)
#define HIGH(quad) (BITS == 3 ? 2 : BITS == 5 ? 4 : BITS == 6 ? 4 + (quad) / 4 : LOW(quad))

/* The codes of a quad, a byte each, signed: of four outputs, from what they have in its lines. */
INLINE FOUR codes_of(FOUR low, FOUR high, uint32_t quad) {
    FOUR codes;
    TIMES (j, 4) {
#if BITS == 8
        codes.of[j] = low.of[j] ^ 0x80808080u;
#elif BITS < 4
        codes.of[j] = low.of[j] >> quad % 4 * 2 & 0x03030303u;
#if BITS == 3
        codes.of[j] |= (high.of[j] >> quad & 0x01010101u) << 2;
#endif
#else
        codes.of[j] = low.of[j] >> quad % 2 * 4 & 0x0f0f0f0fu;
#if BITS == 5
        codes.of[j] |= (high.of[j] >> quad & 0x01010101u) << 4;
#elif BITS == 6
        codes.of[j] |= (high.of[j] >> quad % 4 * 2 & 0x03030303u) << 4;
#elif CODE == 1
        /* of two times eight bytes of the book: by the lowest three bits of a code, then by the fourth */
        const uint32_t digits = codes.of[j] & 0x07070707u, pairs = digits | digits >> 4;
        const uint32_t which = (pairs & 255u) | (pairs >> 8 & 0xff00u);
        const uint32_t is_second = (codes.of[j] >> 3 & 0x01010101u) * 255u;
        codes.of[j] = (BYTES_OF(BOOK_0, BOOK_4, which) & ~is_second) | (BYTES_OF(BOOK_8, BOOK_12, which) & is_second);
#endif
#endif
    }
    return codes;
}

#define LESS (CODE == 1 ? 0 : BITS == 8 ? OFFSET - 128 : OFFSET) /* what signed codes are too large by */
/* Codes less that, but of 8 bits: bytes that do not borrow from each other. */
#define SIGNED(codes) \
    (BITS < 8 && LESS ? (((codes) | 0x80808080u) - LESS * 0x01010101u) ^ 0x80808080u : (codes))
#endif

/* What the sum of a token group is multiplied by before it is added, and what its minimums are. */
#if LEVELS
#define OWN_FACTOR(block, from, o) MUL(OUTER(block, o), FACTOR)
#else
#define OWN_FACTOR(block, from, o) factor_at(block, (from) / SIZE_OF_GROUP, o)
#endif

#else /* plain floats of 16 or 32 bits */

#define OF_WORD (32 / BITS) /* inputs */

INLINE float plain_at(uint32_t word, uint32_t i) {
    const uint32_t half_bits = word >> 16 * i & 65535u;
    return BITS == 32 ? AS_FLOAT(word) : CODE == 6 ? HALF(half_bits) : AS_FLOAT(half_bits << 16);
}

#endif

#if ROWS != 0

/* out[row][first + o] for the panel GROUP_X and ROWS rows from GROUP_Y * ROWS on. With `ids` each row has the matrix of
 * its own number there, `expert_words` from one to the next, and `repeats` rows have the same inputs. */
#define MULTIPLY                                                                                                          \
    KERNEL multiply(GLOBAL const uint32_t *weights, GLOBAL const uint32_t *quantised, GLOBAL const float *wide,           \
        GLOBAL const float *scales, GLOBAL const float *sums, GLOBAL const int16_t *group_sums, GLOBAL const float *bias, \
        GLOBAL const uint32_t *ids, GLOBAL float *out, uint32_t n_blocks, uint32_t n_out, uint32_t n_rows,                \
        uint32_t width, uint32_t first, uint32_t has_bias, uint32_t expert_words, uint32_t repeats WHERE)
#define FIRST_PANEL (weights + (uint64_t)GROUP_X * n_blocks * BLOCK_WORDS)
#define OWN_PANEL(own) (FIRST_PANEL + (expert_words ? (uint64_t)ids[own] * expert_words : 0))
#define OWN_BIAS(own) (expert_words ? ids[own] * n_out : 0) /* experts have a bias each */
#define FINISH                                                                               \
    PHASE {                                                                                  \
        const uint32_t o = GROUP_X * 16 + THREAD % 16, own = row + THREAD / 16;              \
        if (THREAD < ROWS * 16 && o < n_out && own < n_rows)                                 \
            out[(uint64_t)own * width + first + o] =                                         \
                finished(total[THREAD], bias, o + OWN_BIAS(own), n_out, has_bias);           \
    }

#if BITS < 16

/* --- a panel for few rows */

#if IS_FLOAT
#define SLICE TOKEN_GROUP
#define SUM float
#else
#define SLICE (TOKEN_GROUP < 32 ? TOKEN_GROUP : 32) /* inputs that a thread adds up, of four outputs */
#define SUM int
#endif
#define LINES (SLICE * BITS / 32)
#define SLICES (TOKEN_GROUP / SLICE) /* of a token group */
#define EACH (ROWS < 2 ? ROWS : 2)   /* rows of a thread */
#define AT_ONCE (THREADS / 4 / (ROWS / EACH))
#define CHUNK (AT_ONCE / SLICES) /* token groups at a time */
#define OF_CHUNK (ROWS * CHUNK * 16)
#define OF_THREAD (OF_CHUNK / THREADS)
#define HAS_ONE(i) (begin + (i) / 16 % CHUNK < n_groups && row + (i) / (CHUNK * 16) < n_rows)

/* Has a thread read its slices of the chunk that begins at token group `next`. */
#define BRING_LINES(next)                                                                                                \
    {                                                                                                                    \
        const uint32_t input = (next) * TOKEN_GROUP + THREAD / 4 % AT_ONCE * SLICE;                                      \
        GLOBAL const uint32_t *lines = panel + input / BLOCK * BLOCK_WORDS + HEADER / 4 + input % BLOCK * BITS / 32 * 16; \
        if (input < n_groups * TOKEN_GROUP)                                                                              \
            TIMES (k, LINES) MY(line)[k] = LOAD4(lines + k * 16 + THREAD % 4 * 4);                                       \
    }

MULTIPLY {
    SHARED float total[ROWS * 16], part[OF_CHUNK], factor[OF_CHUNK];
    SHARED SUM slices[OF_CHUNK * SLICES];
#if HAS_MINIMUM
    SHARED float other[OF_CHUNK], below[OF_CHUNK];
#endif
    OWN(float, its_factor, OF_THREAD); /* of token groups, read with their codes */
#if HAS_MINIMUM
    OWN(float, its_other, OF_THREAD);
    OWN(float, its_below, OF_THREAD);
#endif
    const uint32_t n_groups = n_blocks * (BLOCK / TOKEN_GROUP), row = GROUP_Y * ROWS;
#if !IS_FLOAT
    OWN(FOUR, line, LINES);
    if (!expert_words) { /* weights do not depend on what runs before */
        GLOBAL const uint32_t *panel = FIRST_PANEL;
        PHASE { BRING_LINES(0) }
    }
#endif
    AWAIT
    GLOBAL const uint32_t *panel = OWN_PANEL(row);
#if IS_FLOAT
    OPEN_BOOK
#else
    if (expert_words) PHASE { BRING_LINES(0) }
#endif
    PHASE { if (THREAD < ROWS * 16) total[THREAD] = 0; }
    for (uint32_t begin = 0; begin < n_groups + CHUNK; begin += CHUNK) {
        PHASE { /* sums of whole numbers, while those of the chunk before are added up */
            const uint32_t o = THREAD % 4 * 4, own = THREAD / 4 / AT_ONCE * EACH;
            TIMES (k, OF_THREAD) {
                const uint32_t i = k * THREADS + THREAD, o_of = i % 16;
                if (HAS_ONE(i)) {
                    const uint32_t t = begin + i / 16 % CHUNK, from = t % (BLOCK / TOKEN_GROUP) * TOKEN_GROUP;
                    GLOBAL const uint32_t *block = panel + t / (BLOCK / TOKEN_GROUP) * BLOCK_WORDS;
                    const uint64_t at = (uint64_t)((row + i / (CHUNK * 16)) / repeats) * n_groups + t;
                    const float own_factor = OWN_FACTOR(block, from, o_of);
                    MY(its_factor)[k] = IS_FLOAT ? own_factor : MUL(own_factor, scales[at]);
#if HAS_MINIMUM && LEVELS
                    int more = 0;
                    UNROLLED for (uint32_t sub = 0; sub < TOKEN_GROUP; sub += SUB)
                        more += minimum_at(block, (from + sub) / SIZE_OF_GROUP, o_of) *
                                group_sums[at * (TOKEN_GROUP / SUB) + sub / SUB];
                    MY(its_other)[k] = (float)more;
                    MY(its_below)[k] = MUL(BELOW(block, o_of), scales[at]);
#elif HAS_MINIMUM
                    MY(its_other)[k] = lowest_at(block, from / SIZE_OF_GROUP, o_of, own_factor);
                    MY(its_below)[k] = sums[at];
#endif
                }
            }
            const uint32_t slice = THREAD / 4 % AT_ONCE, input = begin * TOKEN_GROUP + slice * SLICE;
            if (input < n_groups * TOKEN_GROUP) {
                GLOBAL const uint32_t *block = panel + input / BLOCK * BLOCK_WORDS;
                const uint32_t from = input % BLOCK;
#if IS_FLOAT
                GLOBAL const uint32_t *unit = block + HEADER / 4 + from / 32 * BITS * 16;
#endif
                SUM sum[EACH * 4];
                TIMES (j, EACH * 4) sum[j] = 0;
                UNROLLED for (uint32_t sub = 0; sub < SLICE; sub += SUB) {
#if IS_FLOAT
                    for (uint32_t i = 0; i < SUB; i++)
                        TIMES (j, 4) {
                            const float value = VALUE(unit + sub / 32 * BITS * 16, i, o + j);
                            TIMES (r, EACH)
                                if (row + own + r < n_rows)
                                    sum[r * 4 + j] = FMA(
                                        value, wide[(uint64_t)((row + own + r) / repeats) * n_groups * TOKEN_GROUP +
                                                    input + sub + i], sum[r * 4 + j]);
                        }
#else
                    int dots[EACH * 4];
                    TIMES (j, EACH * 4) dots[j] = 0;
                    TIMES (quad, SUB / 4) {
                        const uint32_t of_slice = sub / 4 + quad;
                        const FOUR codes = codes_of(MY(line)[LOW(of_slice)], MY(line)[HIGH(of_slice)], of_slice);
                        TIMES (r, EACH)
                            if (row + own + r < n_rows) {
                                const uint64_t at = (uint64_t)((row + own + r) / repeats) * n_groups * TOKEN_GROUP;
                                const uint32_t four = quantised[(at + input + sub) / 4 + quad];
                                TIMES (j, 4) dots[r * 4 + j] = DOT4(codes.of[j], four, dots[r * 4 + j]);
                            }
                    }
                    TIMES (r, EACH)
                        if (row + own + r < n_rows) {
                            const uint64_t at = (uint64_t)((row + own + r) / repeats) * n_groups * TOKEN_GROUP;
                            const int less = LESS ? LESS * group_sums[(at + input + sub) / SUB] : 0;
                            TIMES (j, 4) {
                                const int dot = dots[r * 4 + j] - less;
#if LEVELS
                                sum[r * 4 + j] += dot * level_at(block, (from + sub) / SIZE_OF_GROUP, o + j);
#else
                                sum[r * 4 + j] += dot;
#endif
                            }
                        }
#endif
                }
                TIMES (r, EACH)
                    TIMES (j, 4)
                        slices[((own + r) * CHUNK * SLICES + slice) * 16 + o + j] = sum[r * 4 + j];
            }
#if !IS_FLOAT
            BRING_LINES(begin + CHUNK)
#endif
            if (begin && THREAD < ROWS * 16) {
                const uint32_t before = begin - CHUNK, n = n_groups - before < CHUNK ? n_groups - before : CHUNK;
                const uint32_t at = THREAD / 16 * CHUNK * 16 + THREAD % 16;
                float sum = total[THREAD];
                AHEAD for (uint32_t g = 0; g < n; g++) {
                    sum = FMA(part[at + g * 16], factor[at + g * 16], sum);
#if HAS_MINIMUM
                    sum = FMA(other[at + g * 16], below[at + g * 16], sum);
#endif
                }
                total[THREAD] = sum;
            }
        }
        PHASE {
            TIMES (k, OF_THREAD) {
                const uint32_t i = k * THREADS + THREAD, o = i % 16;
                if (HAS_ONE(i)) {
                    SUM sum = slices[i / 16 * SLICES * 16 + o];
                    for (uint32_t s = 1; s < SLICES; s++) sum += slices[(i / 16 * SLICES + s) * 16 + o];
                    part[i] = (float)sum;
                    factor[i] = MY(its_factor)[k];
#if HAS_MINIMUM
                    other[i] = MY(its_other)[k];
                    below[i] = MY(its_below)[k];
#endif
                }
            }
        }
    }
    FINISH
}

#else

/* The same for weights that are plain floats of 16 or 32 bits: one chain over all inputs. A line of a panel is a word of
 * each output: all threads bring LINES of them, while 16 add up those before, which takes as long as to read. */
#define BROUGHT (ROWS > 2 ? 1 : 2) /* fours of a thread */
#define LINES (BROUGHT * THREADS / 4)
#define IS_LINE(k) (begin + ((k) * THREADS + THREAD) / 4 < n_blocks)
#define AT_A_TIME (LINES * OF_WORD)

MULTIPLY {
    SHARED float total[ROWS * 16], inputs[2 * ROWS * AT_A_TIME];
    SHARED uint32_t words[2 * LINES * 16];
    AWAIT
    const uint32_t row = GROUP_Y * ROWS, n_in = n_blocks * OF_WORD;
    GLOBAL const uint32_t *panel = OWN_PANEL(row);
    PHASE { if (THREAD < ROWS * 16) total[THREAD] = 0; }
    for (uint32_t begin = 0; begin < n_blocks + LINES; begin += LINES) {
        const uint32_t turn_of = begin / LINES % 2, last = 1 - turn_of;
        PHASE {
            FOUR brought[BROUGHT];
            float more[(ROWS * AT_A_TIME + THREADS - 1) / THREADS];
            TIMES (k, BROUGHT)
                if (IS_LINE(k)) brought[k] = LOAD4(panel + (uint64_t)begin * 16 + (k * THREADS + THREAD) * 4);
            TIMES (k, (ROWS * AT_A_TIME + THREADS - 1) / THREADS) {
                const uint32_t i = k * THREADS + THREAD, r = i / AT_A_TIME, input = begin * OF_WORD + i % AT_A_TIME;
                if (r < ROWS && row + r < n_rows && input < n_in)
                    more[k] = wide[(uint64_t)((row + r) / repeats) * n_in + input];
            }
            if (begin && THREAD < ROWS * 16) {
                const uint32_t before = begin - LINES, n = n_blocks - before < LINES ? n_blocks - before : LINES;
                float sum = total[THREAD];
                AHEAD for (uint32_t line = 0; line < n; line++)
                    TIMES (i, OF_WORD)
                        sum = FMA(plain_at(words[(last * LINES + line) * 16 + THREAD % 16], i),
                                  inputs[(last * ROWS + THREAD / 16) * AT_A_TIME + line * OF_WORD + i], sum);
                total[THREAD] = sum;
            }
            TIMES (k, BROUGHT)
                TIMES (j, IS_LINE(k) ? 4 : 0)
                    words[turn_of * LINES * 16 + (k * THREADS + THREAD) * 4 + j] = brought[k].of[j];
            TIMES (k, (ROWS * AT_A_TIME + THREADS - 1) / THREADS)
                if (k * THREADS + THREAD < ROWS * AT_A_TIME) inputs[turn_of * ROWS * AT_A_TIME + k * THREADS + THREAD] = more[k];
        }
    }
    FINISH
}

#endif
#endif

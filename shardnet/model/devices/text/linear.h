/* Rows quantised as csrc/linear.c does, and their products with panels of any form, to the same bits.
 *
 * What a form is, is given by macros, so that a compiler sees constants: config/panel_form.py says what they mean. A
 * group of threads makes a panel of 16 outputs for ROWS rows. Of 16 token groups at a time each thread makes the sum of
 * one, for one output; then one thread of each output and row adds them up in their order. */

#define CHUNK (THREADS / 16)                /* token groups at a time */
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

#define NO_ACTIVATION 4
#define OWN_BIAS(row) (expert_words ? ids[row] * n_out : 0) /* experts have a bias each */

/* An input of a row; with an activation it is a gate of [gates, others] times the other. */
INLINE float input_at(GLOBAL const float *row, uint32_t i, uint32_t n_in, uint32_t activation, float limit,
                      float alpha) {
    return activation == NO_ACTIVATION ? row[i] : gated(row[i], row[n_in + i], activation, limit, alpha);
}

/* A thread for each token group of each row: [rows][padded inputs] of int8, and what goes with each group. Where codes
 * are floats, rows are laid out as they are, padded with zeros. */
KERNEL quantise(GLOBAL const float *rows, GLOBAL const uint32_t *order, GLOBAL int8_t *quantised, GLOBAL float *wide,
                GLOBAL float *scales, GLOBAL float *sums, GLOBAL int16_t *group_sums, uint32_t n_rows, uint32_t n_in,
                uint32_t n_groups, uint32_t has_order, uint32_t activation, float limit, float alpha WHERE) {
    PHASE {
        const uint32_t at = GROUP_X * THREADS + THREAD;
        if (at < n_rows * n_groups) {
            const uint32_t begin = at % n_groups * TOKEN_GROUP;
            const uint32_t n = begin >= n_in ? 0 : n_in - begin < TOKEN_GROUP ? n_in - begin : TOKEN_GROUP;
            GLOBAL const float *row =
                rows + (uint64_t)(at / n_groups) * (activation == NO_ACTIVATION ? n_in : 2 * n_in);
#define INPUT(i) input_at(row, has_order ? order[begin + (i)] : begin + (i), n_in, activation, limit, alpha)
#if IS_FLOAT
            for (uint32_t i = 0; i < TOKEN_GROUP; i++)
                wide[(uint64_t)at * TOKEN_GROUP + i] = i < n ? INPUT(i) : 0.0f;
#else
            float largest = 0;
            int is_finite = 1;
            for (uint32_t i = 0; i < n; i++) {
                const float value = INPUT(i);
                const float size = AS_FLOAT((uint32_t)AS_INT(value) & 0x7fffffffu);
                largest = size > largest ? size : largest;
                is_finite &= size <= 3.402823466e38f;
            }
            const float scale = is_finite ? DIV(largest, 127.0f) : NOT_A_NUMBER;
            const float inverse = is_finite && largest > 1e-36f ? DIV(127.0f, largest) : 0.0f;
            int sum = 0, own = 0;
            for (uint32_t i = 0; i < TOKEN_GROUP; i++) {
                const float value = i < n ? INPUT(i) : 0.0f;
                const float shifted = ADD(is_finite ? MUL(value, inverse) : 0.0f, 12582912.0f); /* 1.5 * 2^23 */
                const int whole = AS_INT(shifted) - 0x4b400000;
                quantised[(uint64_t)at * TOKEN_GROUP + i] = (int8_t)whole;
                sum += whole, own += whole;
                if (i % SUB == SUB - 1) {
                    group_sums[(uint64_t)at * (TOKEN_GROUP / SUB) + i / SUB] = (int16_t)own;
                    own = 0;
                }
            }
            scales[at] = scale;
            sums[at] = MUL((float)sum, scale);
#endif
        }
    }
}

#if BITS < 16

/* --- what stands before a block's codes */

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
#elif SCALE == 6
    return (float)(int8_t)byte_at(block, begin + at);
#else
    return (float)byte_at(block, begin + at);
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
#if SCALE == 7
    return (int)(byte_at(block, SCALES_AT + g * 16 + o) & 15u);
#elif SCALE == 6
    return (int8_t)byte_at(block, SCALES_AT + g * 16 + o);
#else
    return (int)byte_at(block, SCALES_AT + g * 16 + o);
#endif
}

INLINE int minimum_at(GLOBAL const uint32_t *block, uint32_t g, uint32_t o) {
#if SCALE == 7
    return (int)(byte_at(block, SCALES_AT + g * 16 + o) >> 4);
#elif SCALE == 6
    return (int8_t)byte_at(block, MINIMUMS_AT + g * 16 + o);
#else
    return (int)byte_at(block, MINIMUMS_AT + g * 16 + o);
#endif
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
TABLE float BOOK[16] = BOOK_VALUES;

INLINE float value_at(GLOBAL const uint32_t *unit, uint32_t input, uint32_t o) {
#if BITS == 8
    const uint32_t code = byte_at(unit, input * 16 + o);
#else
    const uint32_t code = byte_at(unit, input / 2 * 16 + o) >> input % 2 * 4 & 15u;
#endif
    return CODE == 2 ? from_e4m3(code) : CODE == 3 ? HALF(code << 8) : BOOK[code & 15u];
}
#else
/* The codes of four inputs of an output in a unit, a byte each, signed. */
INLINE uint32_t codes_at(GLOBAL const uint32_t *unit, uint32_t quad, uint32_t o) {
#if BITS == 8
    return unit[quad * 16 + o] ^ 0x80808080u;
#elif BITS < 4
    uint32_t codes = unit[quad / 4 * 16 + o] >> quad % 4 * 2 & 0x03030303u;
#if BITS == 3
    codes |= (unit[32 + o] >> quad & 0x01010101u) << 2;
#endif
    return codes;
#else
    uint32_t codes = unit[quad / 2 * 16 + o] >> quad % 2 * 4 & 0x0f0f0f0fu;
#if BITS == 5
    codes |= (unit[64 + o] >> quad & 0x01010101u) << 4;
#elif BITS == 6
    codes |= (unit[64 + quad / 4 * 16 + o] >> quad % 4 * 2 & 0x03030303u) << 4;
#endif
    return codes;
#endif
}

#if CODE == 1
TABLE int BOOK[16] = BOOK_VALUES;

INLINE uint32_t signed_at(GLOBAL const uint32_t *unit, uint32_t quad, uint32_t o) {
    const uint32_t codes = codes_at(unit, quad, o);
    uint32_t values = 0;
    for (int i = 0; i < 4; i++) values |= ((uint32_t)BOOK[codes >> 8 * i & 15u] & 255u) << 8 * i;
    return values;
}
#define LESS 0
#else
#define signed_at codes_at
#define LESS (BITS == 8 ? OFFSET - 128 : OFFSET) /* what signed codes are too large by */
#endif
#endif

/* out[row][first + o] for the panel GROUP_X and ROWS rows from GROUP_Y * ROWS on. With `ids` each row has the matrix of
 * its own number there, `expert_words` from one to the next, and `repeats` rows have the same inputs. */
KERNEL multiply(GLOBAL const uint32_t *weights, GLOBAL const uint32_t *quantised, GLOBAL const float *wide,
                GLOBAL const float *scales, GLOBAL const float *sums, GLOBAL const int16_t *group_sums,
                GLOBAL const float *bias, GLOBAL const uint32_t *ids, GLOBAL float *out, uint32_t n_blocks,
                uint32_t n_out, uint32_t n_rows, uint32_t width, uint32_t first, uint32_t has_bias,
                uint32_t expert_words, uint32_t repeats WHERE) {
    SHARED float total[ROWS * 16], part[ROWS * THREADS], factor[ROWS * THREADS];
#if HAS_MINIMUM
    SHARED float other[ROWS * THREADS], below[ROWS * THREADS];
#endif
    const uint32_t n_groups = n_blocks * (BLOCK / TOKEN_GROUP), row = GROUP_Y * ROWS;
    GLOBAL const uint32_t *panel = weights + (expert_words ? (uint64_t)ids[row] * expert_words : 0) +
                                   (uint64_t)GROUP_X * n_blocks * BLOCK_WORDS;
    PHASE { if (THREAD < ROWS * 16) total[THREAD] = 0; }
    for (uint32_t begin = 0; begin < n_groups; begin += CHUNK) {
        PHASE {
            const uint32_t o = THREAD % 16, t = begin + THREAD / 16;
            if (t < n_groups) {
                GLOBAL const uint32_t *block = panel + t / (BLOCK / TOKEN_GROUP) * BLOCK_WORDS;
                const uint32_t from = t % (BLOCK / TOKEN_GROUP) * TOKEN_GROUP;
#if IS_FLOAT
                float sum[ROWS];
#else
                int sum[ROWS], more[ROWS];
                for (int r = 0; r < ROWS; r++) more[r] = 0;
#endif
                for (int r = 0; r < ROWS; r++) sum[r] = 0;
#if !IS_FLOAT
                for (uint32_t sub = 0; sub < TOKEN_GROUP; sub += SUB) {
                    const uint32_t input = from + sub;
                    GLOBAL const uint32_t *unit = block + HEADER / 4 + input / 32 * BITS * 16;
                    int dots[ROWS];
                    for (int r = 0; r < ROWS; r++) dots[r] = 0;
                    for (uint32_t quad = 0; quad < SUB / 4; quad++) {
                        const uint32_t codes = signed_at(unit, input % 32 / 4 + quad, o);
                        for (uint32_t r = 0; r < ROWS; r++)
                            if (row + r < n_rows) {
                                const uint64_t at = (uint64_t)((row + r) / repeats) * n_groups + t;
                                dots[r] = DOT4(codes, quantised[at * (TOKEN_GROUP / 4) + sub / 4 + quad], dots[r]);
                            }
                    }
                    for (uint32_t r = 0; r < ROWS; r++)
                        if (row + r < n_rows) {
                            const uint64_t at = (uint64_t)((row + r) / repeats) * n_groups + t;
                            const int of_group = group_sums[at * (TOKEN_GROUP / SUB) + sub / SUB];
                            const int dot = dots[r] - LESS * of_group;
#if LEVELS
                            sum[r] += dot * level_at(block, input / SIZE_OF_GROUP, o);
                            if (HAS_MINIMUM) more[r] += minimum_at(block, input / SIZE_OF_GROUP, o) * of_group;
#else
                            sum[r] += dot;
#endif
                        }
                }
#else
                for (uint32_t i = 0; i < TOKEN_GROUP; i++) {
                    const uint32_t input = from + i;
                    const float value = value_at(block + HEADER / 4 + input / 32 * BITS * 16, input % 32, o);
                    for (uint32_t r = 0; r < ROWS; r++)
                        if (row + r < n_rows)
                            sum[r] = FMA(
                                value, wide[((uint64_t)((row + r) / repeats) * n_groups + t) * TOKEN_GROUP + i], sum[r]);
                }
#endif
#if LEVELS
                const float own = MUL(OUTER(block, o), FACTOR);
#else
                const float own = factor_at(block, from / SIZE_OF_GROUP, o);
#endif
                for (uint32_t r = 0; r < ROWS; r++)
                    if (row + r < n_rows) {
                        const uint64_t at = (uint64_t)((row + r) / repeats) * n_groups + t;
                        part[r * THREADS + THREAD] = (float)sum[r];
                        factor[r * THREADS + THREAD] = IS_FLOAT ? own : MUL(own, scales[at]);
#if HAS_MINIMUM && LEVELS
                        other[r * THREADS + THREAD] = (float)more[r];
                        below[r * THREADS + THREAD] = MUL(BELOW(block, o), scales[at]);
#elif HAS_MINIMUM
                        other[r * THREADS + THREAD] = lowest_at(block, from / SIZE_OF_GROUP, o, own);
                        below[r * THREADS + THREAD] = sums[at];
#endif
                    }
            }
        }
        PHASE {
            if (THREAD < ROWS * 16) {
                const uint32_t n = n_groups - begin < CHUNK ? n_groups - begin : CHUNK;
                const uint32_t at = THREAD / 16 * THREADS + THREAD % 16;
                float sum = total[THREAD];
                for (uint32_t g = 0; g < n; g++) {
                    sum = FMA(part[at + g * 16], factor[at + g * 16], sum);
#if HAS_MINIMUM
                    sum = FMA(other[at + g * 16], below[at + g * 16], sum);
#endif
                }
                total[THREAD] = sum;
            }
        }
    }
    PHASE {
        const uint32_t o = GROUP_X * 16 + THREAD % 16, own = row + THREAD / 16;
        if (THREAD < ROWS * 16 && o < n_out && own < n_rows) {
            const float sum = total[THREAD];
            out[(uint64_t)own * width + first + o] = has_bias ? ADD(sum, bias[o + OWN_BIAS(own)]) : sum;
        }
    }
}

#else

/* The same for weights that are plain floats of 16 or 32 bits: one chain over all inputs, and CHUNK panels a group. */
KERNEL multiply(GLOBAL const uint32_t *weights, GLOBAL const uint32_t *quantised, GLOBAL const float *wide,
                GLOBAL const float *scales, GLOBAL const float *sums, GLOBAL const int16_t *group_sums,
                GLOBAL const float *bias, GLOBAL const uint32_t *ids, GLOBAL float *out, uint32_t n_blocks,
                uint32_t n_out, uint32_t n_rows, uint32_t width, uint32_t first, uint32_t has_bias,
                uint32_t expert_words, uint32_t repeats WHERE) {
    PHASE {
        const uint32_t panel = GROUP_X * CHUNK + THREAD / 16, o = panel * 16 + THREAD % 16, row = GROUP_Y * ROWS;
        const uint32_t n_in = n_blocks * (32 / BITS);
        if (o < n_out) {
            GLOBAL const uint32_t *own = weights + (expert_words ? (uint64_t)ids[row] * expert_words : 0) +
                                         (uint64_t)panel * n_blocks * 16 + THREAD % 16;
            float sum[ROWS];
            for (int r = 0; r < ROWS; r++) sum[r] = 0;
            for (uint32_t block = 0; block < n_blocks; block++) {
                const uint32_t bits = own[(uint64_t)block * 16];
                for (uint32_t i = 0; i < 32 / BITS; i++) {
                    const uint32_t half_bits = bits >> 16 * i & 65535u;
                    const float weight = BITS == 32  ? AS_FLOAT(bits)
                                         : CODE == 6 ? HALF(half_bits)
                                                     : AS_FLOAT(half_bits << 16);
                    for (uint32_t r = 0; r < ROWS; r++)
                        if (row + r < n_rows)
                            sum[r] = FMA(
                                weight, wide[(uint64_t)((row + r) / repeats) * n_in + block * (32 / BITS) + i], sum[r]);
                }
            }
            for (uint32_t r = 0; r < ROWS; r++)
                if (row + r < n_rows)
                    out[(uint64_t)(row + r) * width + first + o] = has_bias ? ADD(sum[r], bias[o + OWN_BIAS(row)]) : sum[r];
        }
    }
}

#endif

/* Functions of single numbers, step by step as csrc/vectors_body.h has them, sums over a row in 16 parts, and what a step
 * says of its rows. */
#define PARTS 16
/* parts[0] becomes their sum. */
#define ADD_UP(parts)                              \
    for (int step = PARTS / 2; step; step /= 2)    \
        for (int i = 0; i < step; i++) (parts)[i] = ADD((parts)[i], (parts)[i + step]);
#define LOAD4(place) (*(GLOBAL const FOUR *)(place)) /* of a multiple of 16 bytes */
#define STORE4(place) (*(GLOBAL FOUR *)(place))
#define BITS_OF(value) ((uint32_t)AS_INT(value))
#define TIMES(i, n) UNROLLED for (uint32_t i = 0; i < (n); i++)

#ifndef AWAIT
#define AWAIT /* what was launched before is done */
#endif

#ifndef BYTES_OF
/* Of eight bytes, those of `low` first, the four that four digits of `which` number. */
INLINE uint32_t BYTES_OF(uint32_t low, uint32_t high, uint32_t which) {
    uint32_t found = 0;
    TIMES (i, 4) found |= ((which >> 4 * i & 4u ? high : low) >> 8 * (which >> 4 * i & 3u) & 255u) << 8 * i;
    return found;
}
#endif

#ifndef DOT2
/* The sums of two words of 16 bits, signed, each times a byte, without a sign. */
INLINE int DOT2(uint32_t words, uint32_t bytes, int c) {
    return c + (int)(int16_t)words * (int)(bytes & 255u) + (int)(int16_t)(words >> 16) * (int)(bytes >> 8 & 255u);
}
#endif

/* Whether a number stands before another: NaN before all. */
INLINE int is_more(float a, float b) { return a > b || (a != a && b == b); }

INLINE float more_of(float a, float b) { return a > b ? a : b; }
INLINE float less_of(float a, float b) { return a < b ? a : b; }

/* e^x; x is clamped to [-87.3, 88]. */
INLINE float exponential(float x) {
    x = more_of(-87.3f, less_of(88.0f, x));
    const float shifted = FMA(x, 1.44269504f, 12582912.0f);
    const int power = AS_INT(shifted) - 0x4b400000;
    const float whole = ADD(shifted, -12582912.0f);
    float rest = FMA(whole, -0.693359375f, x);
    rest = FMA(whole, 2.12194440e-4f, rest);
    float y = 0.00019899334f;
    y = FMA(y, rest, 0.0013933688f);
    y = FMA(y, rest, 0.008333298f);
    y = FMA(y, rest, 0.041666463f);
    y = FMA(y, rest, 0.16666667f);
    y = FMA(y, rest, 0.5f);
    y = ADD(FMA(y, MUL(rest, rest), rest), 1.0f);
    return MUL(y, AS_FLOAT((uint32_t)(power + 127) << 23));
}

INLINE float sigmoid(float x) { return DIV(1.0f, ADD(1.0f, exponential(-x))); }

INLINE float hyperbolic_tangent(float x) {
    const float square = MUL(x, x);
    float y = 0.0035921280f;
    y = FMA(y, square, -0.0088632355f);
    y = FMA(y, square, 0.021869488f);
    y = FMA(y, square, -0.053968254f);
    y = FMA(y, square, 0.13333333f);
    y = FMA(y, square, -0.33333333f);
    const float near = FMA(MUL(y, square), x, x);
    const float far = ADD(1.0f, -DIV(2.0f, ADD(1.0f, exponential(MUL(2.0f, x)))));
    return square < 0.25f ? near : far;
}

/* The nearest bfloat16, as a float. */
INLINE float rounded(float x) {
    const uint32_t bits = (uint32_t)AS_INT(x);
    if (x != x) return AS_FLOAT((bits | 0x400000u) & 0xffff0000u);
    return AS_FLOAT((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

/* 0: SiLU, 1: GELU by tanh, 2: ReLU, 3: its square. */
INLINE float activated(float x, uint32_t activation) {
    if (activation == 0) return DIV(x, ADD(1.0f, exponential(-x)));
    if (activation == 1) {
        const float inner = MUL(FMA(0.044715f, MUL(MUL(x, x), x), x), 0.797884561f); /* sqrt(2 / pi) */
        return ADD(x, -DIV(x, ADD(1.0f, exponential(MUL(2.0f, inner)))));
    }
    return x < 0 ? 0.0f : activation == 3 ? MUL(x, x) : x;
}

/* A gate, activated, times the other; 3: gpt-oss's activation, which clamps both to `limit`; 4: without the 1. */
INLINE float gated(float gate, float up, uint32_t activation, float limit, float alpha) {
    if (activation < 3) return MUL(activated(gate, activation), up);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return MUL(MUL(sigmoid(MUL(gate, alpha)), gate), ADD(up, activation == 3 ? 1.0f : 0.0f));
}

/* Adds what is in `line` to the 16 parts of a sum of squares. */
#define ADD_SQUARES(n)                                                                                \
    if (THREAD < PARTS) {                                                                             \
        float sum = parts[THREAD];                                                                    \
        AHEAD for (uint32_t i = THREAD; i < (n); i += PARTS) sum = FMA(line[i], line[i], sum);        \
        parts[THREAD] = sum;                                                                          \
    }

/* From the parts of a sum of squares to what a row is multiplied by. */
#define NORM_SCALE(width, eps)                                                                 \
    if (THREAD == 0) {                                                                         \
        ADD_UP(parts)                                                                          \
        scale[0] = DIV(1.0f, SQRT(ADD(DIV(parts[0], (float)(width)), eps)));                   \
    }

/* Where a column stands if those that turn together are neighbours. */
#define PAIRED(k) ((k) % half_size * 2 + (k) / half_size)

/* The sum of `n` values by the softmax of their logits, both expressions in `i`; sums of exponentials are in 16 parts. */
#define SUM_BY_SOFTMAX(sum, n, logit, value)                                                                     \
    float sum = 0;                                                                                               \
    {                                                                                                            \
        float best = -INFINITY, parts[PARTS];                                                                    \
        for (uint32_t i = 0; i < (n); i++) {                                                                     \
            const float number = logit;                                                                          \
            best = is_more(number, best) ? number : best;                                                        \
        }                                                                                                        \
        TIMES (part, PARTS) {                                                                                    \
            parts[part] = 0;                                                                                     \
            for (uint32_t i = part; i < (n); i += PARTS) parts[part] = ADD(parts[part], exponential(ADD(logit, -best))); \
        }                                                                                                        \
        ADD_UP(parts)                                                                                            \
        for (uint32_t i = 0; i < (n); i++) {                                                                     \
            const float part = MUL(value, DIV(exponential(ADD(logit, -best)), parts[0]));                        \
            sum = i ? ADD(sum, part) : part;                                                                     \
        }                                                                                                        \
    }

/* Of a row, `runs` has the first of its slot's rows, the end of them, the cell with the state before them (NO_CELL: zeros)
 * and the cell that is to have the state after it; of rows with one cell that is the last's. No cell is both. */
#define NO_CELL 0xffffffffu
#define FIRST_OF(row) runs[4 * (row)]
#define END_OF(row) runs[4 * (row) + 1]
#define CELL_BEFORE(row) runs[4 * (row) + 2]
#define CELL_AFTER(row) runs[4 * (row) + 3]
#define LEAVES_STATE(row) ((row) + 1 == END_OF(row) || CELL_AFTER((row) + 1) != CELL_AFTER(row))

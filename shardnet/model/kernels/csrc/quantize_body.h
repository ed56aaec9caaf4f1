/* Included by quantize.c once for each instruction set, given by TARGET and NAME: loops that compilers vectorise. */

/* Reads `n` numbers of a row, from `begin` on in the order of the weights, and zeros up to a whole group. */
INLINE TARGET void NAME(read_group)(const struct linear *p, int64_t row, int64_t begin, int32_t n, float *values) {
    const int64_t at = row * p->n_in + begin;
    if (p->order)
        for (int32_t i = 0; i < n; i++) values[i] = number_of(p, row, begin + i);
    else if (p->is_bf16)
        for (int32_t i = 0; i < n; i++) values[i] = from_bf16(((const uint16_t *)p->rows)[at + i]);
    else
        memcpy(values, (const float *)p->rows + at, sizeof(float) * (size_t)n);
    for (int32_t i = n; i < p->form.token_group; i++) values[i] = 0;
}

/* Rounds a group to int8, and returns its scale. A value that is not finite makes every output NaN: the caller detects
 * and reports it. */
INLINE TARGET float NAME(quantize_group)(const int32_t group, float *values, int32_t *numbers) {
    int32_t bits[MAX_TOKEN_GROUP], most = 0;
    memcpy(bits, values, sizeof(float) * (size_t)group);
    for (int32_t i = 0; i < group; i++) { /* bits of sizes are in the order of the sizes */
        const int32_t size = bits[i] & 0x7fffffff;
        most = size > most ? size : most;
    }
    const int is_finite = most < 0x7f800000;
    float largest;
    memcpy(&largest, &most, 4);
    if (!is_finite) memset(values, 0, sizeof(float) * (size_t)group);
    const float inverse = is_finite && largest > 1e-36f ? 127.0f / largest : 0.0f;
    /* Adding 1.5 * 2^23 rounds to even and leaves the number in the low bits. */
    for (int32_t i = 0; i < group; i++) values[i] = values[i] * inverse + 12582912.0f;
    memcpy(bits, values, sizeof(float) * (size_t)group);
    for (int32_t i = 0; i < group; i++) numbers[i] = bits[i] - 0x4b400000;
    return is_finite ? largest / 127.0f : NAN;
}

INLINE TARGET void NAME(quantize_groups)(const int32_t group, const struct linear *p, int64_t row) {
    const int32_t bias = code_bias(p), inputs = has_levels(&p->form) ? p->form.group : 0;
    float values[MAX_TOKEN_GROUP];
    int32_t numbers[MAX_TOKEN_GROUP];
    int8_t quantized[MAX_TOKEN_GROUP];
    for (int64_t g = 0; g < p->n_groups; g++) {
        const int64_t begin = g * group, left = p->n_in - begin, own = token_at(p, row, g);
        NAME(read_group)(p, row, begin, (int32_t)(left < 0 ? 0 : left < group ? left : group), values);
        const float scale = NAME(quantize_group)(group, values, numbers);
        int32_t sum = 0;
        for (int32_t i = 0; i < group; i++) sum += numbers[i];
        for (int32_t i = 0; i < group; i++) quantized[i] = (int8_t)numbers[i];
        put_quantized(p, row, g, quantized);
        p->scales[own] = scale;
        p->offsets[own] = -bias * sum;
        p->sums[own] = (float)sum * scale;
        for (int32_t i = 0; inputs && i < group / inputs; i++) {
            int32_t some = 0;
            for (int32_t j = 0; j < inputs; j++) some += numbers[i * inputs + j];
            p->group_sums[own * (group / inputs) + i] = (int16_t)some;
        }
    }
}

static TARGET void NAME(quantize_row)(const struct linear *p, int64_t row) {
    switch (p->form.token_group) { /* loops of a constant length */
        case 32:
            NAME(quantize_groups)(32, p, row);
            return;
        case 64:
            NAME(quantize_groups)(64, p, row);
            return;
        case 128:
            NAME(quantize_groups)(128, p, row);
            return;
        default:
            NAME(quantize_groups)(p->form.token_group, p, row);
    }
}

// Members of Consumer (step.cu): products of codes on the tensor cores. The A operand is 16 rows of a
// weight, the columns of B are the rows of x. Codes are decoded to fp16, which takes the fewest
// instructions: int4 in the mantissa of 1024.0 is 1024 + code; where the code lies four
// bits higher it is 1024 + 16 * code, and x is divided by 16. The excess, 1024 and the zero point 8 times
// the sum of x, is the same for all rows and subtracted after 128 inputs. x is scaled by a power of two
// so that it fits fp16 (`arrange` in inputs.h). The warps of a block split the inputs of an item (16 rows),
// and one of them adds up their partial sums.

// Decodes eight inputs of a row to four pairs
FN_MEMBER static void decode(const u8* from, u32 (&pair)[4]) {
    if (CODES == 1) {
        const u32 word = *(const u32*)from;
        UNROLL for (int n = 0; n < 4; ++n) pair[n] = masked_or(word >> n / 2 * 8, n % 2 ? 0x00F000F0u : 0x000F000Fu, 0x64006400u);
        return;
    }
    const u64 words = *(const u64*)from;
    UNROLL for (int n = 0; n < 4; ++n) pair[n] = fp8_pair(u32(words >> 16 * n));
}

// Multiplies 128 inputs: acc += rows g and g + 8 of a tile times columns 2t and 2t + 1 of x; `at`: the
// offsets of a lane's inputs in the runs of a row
template <int BOX> FN_MEMBER static void multiply_block(const u8* codes, const int* at, const u16* x, float (&acc)[2][4]) {
    UNROLL for (int j = 0; j < 4; ++j) {
        u32 upper[4], lower[4];
        decode(codes + at[j], upper);
        decode(codes + BOX + at[j], lower);
        const Four u = load4(x + j * 32);
        const u32 first[4] = {upper[0], lower[0], upper[1], lower[1]}, second[4] = {upper[2], lower[2], upper[3], lower[3]};
        const u32 left[2] = {u.x, u.y}, right[2] = {u.z, u.w};
        mma<false>(acc[j % 2], first, left);
        mma<false>(acc[j % 2], second, right);
    }
}

// Adds the product of a tile and x to `sum`, in the fragment layout of the tensor cores
template <int BLOCKS, int STRIDE> FN_MEMBER void multiply_codes(int number, int blocks, const u16* x, const float* offsets,
                                                                 float (&sum)[4]) const {
    constexpr int TOGETHER = BLOCKS % 2 || STRIDE / 128 % 2 ? 1 : 2;    // the last slice may be shorter
    constexpr int BOX = box_bytes(BLOCKS), PLACES = max_int(4, RUN / 32);
    static_assert(CODES != 1 || TOGETHER == 2, "runs of int4 codes are of two blocks");
    const int g = lane() / 4, t = lane() % 4;
    int at[PLACES];
    UNROLL for (int n = 0; n < PLACES; ++n)
        at[n] = CODES == 1 ? swizzled(g, n) + t * 4 : swizzled(g, 2 * n + t / 2) + t % 2 * 8;
    const u8* tile_at = tile(number);
    const u8* codes = tile_at + g * 128;
    const u8* scales = tile_at + 2 * BOX + g * 4;
    const u16* from = x + min_int(g, BATCH - 1) * STRIDE + t * 8;
    float acc[TOGETHER][2][4];
    UNROLL for (int n = 0; n < TOGETHER; ++n)
        UNROLL for (int j = 0; j < 2; ++j) UNROLL for (int e = 0; e < 4; ++e) acc[n][j][e] = 0;
    ROLLED for (int block = 0; block < blocks; block += TOGETHER) {
        UNROLL for (int n = 0; n < TOGETHER; ++n)
            multiply_block<BOX>(codes + n * 128 / RUN * 1024, RUN > 128 ? at + n * 128 % RUN / 32 : at, from + n * 128, acc[n]);
        if (CODES == 1)
            UNROLL for (int n = 0; n < TOGETHER; ++n) {
                const u32 by = *(const u32*)(scales + n * 32);
                UNROLL for (int e = 0; e < 4; ++e) {
                    const float much = offsets[min_int(2 * t + e % 2, BATCH - 1) * (STRIDE / 128) + n];
                    sum[e] += (acc[n][0][e] + acc[n][1][e] - much) * (e < 2 ? low(by) : high(by));
                    acc[n][0][e] = acc[n][1][e] = 0;
                }
            }
        offsets += TOGETHER;
        codes += TOGETHER * 128 * 1024 / RUN, from += TOGETHER * 128, scales += TOGETHER * 32;
    }
    release(number);
    if (CODES != 1)
        UNROLL for (int n = 0; n < TOGETHER; ++n)
            UNROLL for (int e = 0; e < 4; ++e) sum[e] += acc[n][0][e] + acc[n][1][e];
}

// Partial sums of 16 rows by one of the warps that share an item, for all rows of x. A warp is less than
// ROUNDS rounds ahead of any other, so ROUNDS buffers suffice: tiles are copied in order, and its next tile
// is copied only after the other warps have released theirs of STAGES / WARPS rounds before.
FN_MEMBER static float* part_sums(int round, int part) { return code_sums() + (round % ROUNDS * WARPS + part) * (16 * BATCH); }

template <int PARTS> FN_MEMBER static float total(int round, int item, int row, int b) {
    float sum = 0;
    UNROLL for (int n = 0; n < PARTS; ++n) sum += part_sums(round, item * PARTS + n)[row * BATCH + b];
    return sum;
}

// The factor that undoes the scaling of x
FN_MEMBER static float of_x(const Target& to, int b) { return x_scale(to.peaks, b).inverse; }

// In a round every warp multiplies one slice of an item, or every WARPS-th slice of the same item; then one
// warp adds up the partial sums of an item.
template <int K, int SLICES> FN_MEMBER void coded(const u16* x, const Target& to) {
    constexpr int BLOCKS = code_blocks(K, SLICES), PARTS = SLICES < WARPS ? SLICES : WARPS, ITEMS = WARPS / PARTS;
    const bool is_gated = to.kind == TO_GATE;
    const Share share = take(first, is_gated ? INNER / 8 : ceil_div(to.rows, 16));
    const int own = (warp() + WARPS - next % WARPS) % WARPS, g = lane() / 4, t = lane() % 4;
    ROLLED for (int n = 0; n < share.count; n += ITEMS) {
        const int round = n / ITEMS, last = (warp() + WARPS - n % WARPS) % WARPS;    // of the round, which this warp adds up
        const bool is_last = last < ITEMS && n + last < share.count;
        const int item = share.item(n + last);
        float scale[2] = {1, 1}, bias = 0;         // asked for before anything is waited for
        if (is_last && CODES == 2)
            UNROLL for (int e = 0; e < 2; ++e) {
                const int row = is_gated ? item * 8 + lane() % 8 + e * INNER : min_int(item * 16 + lane() % 16, to.rows - 1);
                scale[e] = to.scales[row];
            }
        if (BIAS && is_last && to.kind == TO_QKV) bias = to_float<true>(to.bias[min_int(item * 16 + lane() % 16, to.rows - 1)]);
        float sum[4] = {0, 0, 0, 0};
        const int mine = n + own / PARTS;
        if (mine < share.count)
            ROLLED for (int s = own % PARTS; s < SLICES; s += PARTS)
                multiply_codes<BLOCKS, K>(next + mine * SLICES + s, max_int(0, min_int(BLOCKS, K / 128 - s * BLOCKS)),
                                          x + s * (BLOCKS * 128), to.offsets + s * BLOCKS, sum);
        UNROLL for (int e = 0; e < 4; ++e)
            if (2 * t + e % 2 < BATCH) part_sums(round, own)[(g + e / 2 * 8) * BATCH + 2 * t + e % 2] = sum[e];
        if (!is_last) {
            arrive_some(2 + round % ROUNDS, THREADS);
            continue;
        }
        sync_some(2 + round % ROUNDS, THREADS);
        if (is_gated) {
            ROLLED for (int b = 0; b < BATCH; ++b) {
                const int v = lane() % 8;
                const float by = of_x(to, b);
                const float value = activated(total<PARTS>(round, last, v, b) * scale[0] * by,
                                              total<PARTS>(round, last, v + 8, b) * scale[1] * by);
                const float other = shuffle_xor(value, 1);
                if (lane() < 8 && v % 2 == 0)
                    post(to.words + b * (INNER / 2) + item * 4 + v / 2, word(pack2<true>(value, other), to.tag));
            }
        } else
            ROLLED for (int b = 0; b < BATCH; ++b) {
                const int row = item * 16 + lane();
                if (lane() < 16 && row < to.rows)
                    emit(to, row, b, total<PARTS>(round, last, lane(), b) * scale[0] * of_x(to, b), bias);
            }
    }
    next += share.count * SLICES;
    ++phase;
}

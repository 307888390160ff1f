// Members of Consumer (step.cu): products of codes on the tensor cores. The A operand is 16 rows of a
// weight; two columns of B belong to each row of x, which is scaled for each 128 inputs (`quantize` in
// inputs.h). A code of int4 becomes a signed byte, 16 * (code - 8), in one instruction for four or one
// more; x is two such bytes, 256 * first + second, one in each column, and sums of integers are exact.
// fp8 becomes fp16, as x is, in both columns. Two warps share a tile: of each run of 128 bytes
// one has the first half, the other the second. The warps of a block split the inputs of an item (16 rows),
// and one of them adds up their partial sums.
constexpr static int COLUMNS = (BATCH + 3) / 4;    // tiles of eight
constexpr static u32 MAGIC = 0x4B400000u;          // an integer added to these bits is added to the float, 1.5 * 2^23

FN_MEMBER static int member() { return warp() / TEAMS; }
// Which row of eight a lane has: so chosen that the eight lanes of an access to shared memory do not meet in a bank
FN_MEMBER static int code_row() { return lane() / 8 + lane() / 4 % 2 * 4; }

// Decodes four codes of fp8, or eight of int4, first those with even numbers
FN_MEMBER static void decode(u32 word, u32& first, u32& second) {
    if (CODES == 1) {
        first = masked_xor(word << 4, 0xF0F0F0F0u, 0x80808080u), second = masked_xor(word, 0xF0F0F0F0u, 0x80808080u);
        return;
    }
    first = fp8_pair(word), second = fp8_pair(word >> 16);
}

// A lane's 16 bytes of two rows as operands
FN_MEMBER static void decode(Four upper, Four lower, u32 (&a)[4][4]) {
    const u32 words[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
    UNROLL for (int n = 0; n < 4; ++n)
        UNROLL for (int r = 0; r < 2; ++r) decode(words[r][n], a[n][r], a[n][2 + r]);
}

// The products of two rows with x, in two chains, since each waits for the one before it in its chain
FN_MEMBER static void multiply_half(const u32 (&a)[4][4], Four left, Four right, float (&product)[2]) {
    if (CODES == 1) {
        const u32 zero[4] = {0, 0, 0, 0}, magic[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
        u32 one[4], other[4];
        mma_s8(one, a[0], left.x, left.y, magic);
        mma_s8(other, a[2], right.x, right.y, zero);
        mma_s8(one, a[1], left.z, left.w, one);
        mma_s8(other, a[3], right.z, right.w, other);
        float v[4];
        UNROLL for (int e = 0; e < 4; ++e) v[e] = bits_float(one[e] + other[e]) - bits_float(MAGIC);
        UNROLL for (int e = 0; e < 2; ++e) product[e] = v[2 * e] * 256 + v[2 * e + 1];
        return;
    }
    float one[4] = {0, 0, 0, 0}, other[4] = {0, 0, 0, 0};
    mma<false>(one, a[0], {left.x, left.y});
    mma<false>(other, a[2], {right.x, right.y});
    mma<false>(one, a[1], {left.z, left.w});
    mma<false>(other, a[3], {right.z, right.w});
    UNROLL for (int e = 0; e < 2; ++e) product[e] = one[2 * e] + other[2 * e];
}

// Adds the product of this warp's half of a tile and x to `sum`, of two rows and one row of x. The operands
// of the next run are asked for as soon as there is room for them.
template <int BLOCKS, int K> FN_MEMBER void multiply_codes(int number, int runs, const u8* x, const float* scales_of_x,
                                                           float (&sum)[COLUMNS][2]) const {
    constexpr int BOX = box_bytes(BLOCKS), SECOND = CODES == 1 ? 128 : 16;     // where the second half of x lies
    const int column = lane() / 4, t = lane() % 4;
    const u8* codes = tile(number) + code_row() * 128 + swizzled(code_row(), 4 * member() + t);
    const u8* scales = shared() + number % STAGES * STAGE + 2 * BOX + member() * 32 + code_row() * 4;
    x += member() * RUN + (CODES == 1 ? column % 2 * 64 + t * 16 : t * 32);
    const u8* from[COLUMNS];
    const float* by[COLUMNS];
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
        from[c] = x + min_int(4 * c + column / 2, BATCH - 1) * (2 * K);
        by[c] = scales_of_x + min_int(4 * c + t, BATCH - 1) * (K / 128) + (CODES == 1 ? member() : 0);
    }
    Four upper = load4(codes), lower = load4(codes + BOX), left[COLUMNS], right[COLUMNS];
    UNROLL for (int c = 0; c < COLUMNS; ++c) left[c] = load4(from[c]), right[c] = load4(from[c] + SECOND);
    ROLLED for (int run = 1; run <= runs; ++run) {
        const int following = run < runs ? run : 0;
        u32 a[4][4];
        decode(upper, lower, a);
        upper = load4(codes + following * 1024), lower = load4(codes + BOX + following * 1024);
        const u32 row_scales = CODES == 1 ? *(const u32*)scales : 0;
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            const float x_scale = *by[c];
            float product[2];
            multiply_half(a, left[c], right[c], product);
            left[c] = load4(from[c] + following * (2 * RUN)), right[c] = load4(from[c] + following * (2 * RUN) + SECOND);
            sum[c][0] += product[0] * (CODES == 1 ? x_scale * low(row_scales) : x_scale);
            sum[c][1] += product[1] * (CODES == 1 ? x_scale * high(row_scales) : x_scale);
            by[c] += RUN / 128;
        }
        scales += 64;
    }
    sync_warp();
    if (lane() == 0 && !*lost()) mbarrier_arrive(empty(number % STAGES));
}

// Partial sums of 16 rows by one of the warps that share an item, for all rows of x. A warp is less than
// ROUNDS rounds ahead of any other, so ROUNDS buffers suffice: tiles are copied in order, and its next tile
// is copied only after the other warps have released theirs of STAGES / TEAMS rounds before.
FN_MEMBER static float* part_sums(int round, int part) { return code_sums() + (round % ROUNDS * WARPS + part) * (16 * BATCH); }

template <int PARTS> FN_MEMBER static float total(int round, int item, int row, int b) {
    float sum = 0;
    UNROLL for (int n = 0; n < PARTS; ++n) sum += part_sums(round, item * PARTS + n)[row * BATCH + b];
    return sum;
}

// The factor of row b of x
FN_MEMBER static float of_x(const Target& to, int b) { return BATCH == 1 ? to.norm : shuffle(to.norm, b); }

// In a round every team multiplies one slice of an item, or every TEAMS-th slice of the same item; then one
// warp adds up the partial sums of an item.
template <int K, int SLICES> FN_MEMBER void coded(const u8* x, const Target& to) {
    constexpr int BLOCKS = code_blocks(K, SLICES), RUNS = BLOCKS * 128 / RUN, PARTS = SLICES < TEAMS ? SLICES : TEAMS;
    constexpr int ITEMS = TEAMS / PARTS;
    const bool is_gated = to.kind == TO_GATE;
    const Share share = take(first, is_gated ? INNER / 8 : ceil_div(to.rows, 16));
    const int own = (warp() + TEAMS - next % TEAMS) % TEAMS, t = lane() % 4;
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
        float sum[COLUMNS][2];
        UNROLL for (int c = 0; c < COLUMNS; ++c) sum[c][0] = sum[c][1] = 0;
        const int mine = n + own / PARTS;
        if (mine < share.count)
            ROLLED for (int s = own % PARTS; s < SLICES; s += PARTS)
                multiply_codes<BLOCKS, K>(next + mine * SLICES + s, max_int(0, min_int(RUNS, K / RUN - s * RUNS)),
                                          x + s * (BLOCKS * 256), to.x_scales + s * BLOCKS, sum);
        UNROLL for (int c = 0; c < COLUMNS; ++c)
            UNROLL for (int e = 0; e < 2; ++e)
                if (4 * c + t < BATCH)
                    part_sums(round, own * TEAM + member())[(code_row() + e * 8) * BATCH + 4 * c + t] = sum[c][e];
        if (!is_last) {
            arrive_some(2 + round % ROUNDS, THREADS);
            continue;
        }
        sync_some(2 + round % ROUNDS, THREADS);
        if (is_gated) {
            ROLLED for (int b = 0; b < BATCH; ++b) {
                const int v = lane() % 8;
                const float by = of_x(to, b);
                const float value = activated(total<TEAM * PARTS>(round, last, v, b) * scale[0] * by,
                                              total<TEAM * PARTS>(round, last, v + 8, b) * scale[1] * by);
                const float other = shuffle_xor(value, 1);
                if (lane() < 8 && v % 2 == 0)
                    post(to.words + b * (INNER / 2) + item * 4 + v / 2, word(pack2<true>(value, other), to.tag));
            }
        } else
            ROLLED for (int b = 0; b < BATCH; ++b) {
                const int row = item * 16 + lane();
                const float by = scale[0] * of_x(to, b);
                if (lane() < 16 && row < to.rows)
                    emit(to, row, b, total<TEAM * PARTS>(round, last, lane(), b) * by, bias);
            }
    }
    next += share.count * SLICES;
    ++phase;
}

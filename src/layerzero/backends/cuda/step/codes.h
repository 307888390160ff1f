// Members of Consumer (step.cu): products of codes on the tensor cores. The A operand is 16 rows of a
// weight; two columns of B belong to each row of x, which is scaled for each 128 inputs (`Group` in
// inputs.h). A code of int4 becomes a signed byte, 16 * (code - 8), by one instruction for four codes, or two;
// x is two signed bytes, 256 * first + second, one in each column, and sums of integers are exact. fp8
// becomes fp16, as x is, in both columns. Two warps share a tile: of each run of 128 bytes one has
// the first half, the other the second. The teams of a block split the inputs of an item (16 rows), and one
// warp adds up their partial sums.
constexpr static int COLUMNS = (BATCH + 3) / 4;    // tiles of eight

FN_MEMBER static int member() { return warp() / TEAMS; }
// Which row of eight a lane has: so chosen that the eight lanes of an access to shared memory do not meet in a bank
FN_MEMBER static int code_row() { return lane() / 8 + lane() / 4 % 2 * 4; }

// Decodes four codes of fp8, or eight of int4, first those with even numbers
FN_MEMBER static void decode(u32 word, u32& first, u32& second) {
    if (CODES == 1)
        first = masked_xor(word << 4, 0xF0F0F0F0u, 0x80808080u), second = masked_xor(word, 0xF0F0F0F0u, 0x80808080u);
    else fp8_pairs(word, first, second);
}

// What a lane has of half a run: 16 bytes of two rows, and of the columns of x
struct Operands {
    Four rows[2], x[COLUMNS][2];

    // As operands of four products of the tensor cores
    FN_MEMBER void decoded(u32 (&a)[4][4]) const {
        UNROLL for (int r = 0; r < 2; ++r) {
            decode(rows[r].x, a[0][r], a[0][2 + r]);
            decode(rows[r].y, a[1][r], a[1][2 + r]);
            decode(rows[r].z, a[2][r], a[2][2 + r]);
            decode(rows[r].w, a[3][r], a[3][2 + r]);
        }
    }
};

// The products of two rows with x
FN_MEMBER static void multiply_half(const u32 (&a)[4][4], const Four (&x)[2], float (&product)[2]) {
    const u32 b[4][2] = {{x[0].x, x[0].y}, {x[0].z, x[0].w}, {x[1].x, x[1].y}, {x[1].z, x[1].w}};
    if (CODES == 1) {
        u32 acc[2][4] = {};                        // chains of their own: each product waits for the one before it
        UNROLL for (int n = 0; n < 4; ++n) mma_s8(acc[n % 2], a[n], b[n]);
        UNROLL for (int e = 0; e < 2; ++e)
            product[e] = float(int((acc[0][2 * e] + acc[1][2 * e]) * 256 + acc[0][2 * e + 1] + acc[1][2 * e + 1]));
    } else {
        float acc[2][4] = {};
        UNROLL for (int n = 0; n < 4; ++n) mma<false>(acc[n % 2], a[n], b[n]);
        UNROLL for (int e = 0; e < 2; ++e) product[e] = acc[0][2 * e] + acc[1][2 * e];
    }
}

// Adds the product of this warp's half of a tile and x to `sum`, of two rows and one row of x. Two runs at a
// time if all slices have an even number; their successors are asked for as soon as there is room for them, also
// where there are none.
template <int BLOCKS, int K> FN_MEMBER void multiply_codes(int number, int runs, const u8* x, const float* scales_of_x,
                                                           float (&sum)[COLUMNS][2]) const {
    constexpr int BOX = box_bytes(BLOCKS), SECOND = CODES == 1 ? 128 : 16;     // where the second half of x lies
    constexpr int RUNS = BLOCKS * 128 / RUN;
    constexpr int BESIDE = RUNS % 2 == 0 && K / RUN % RUNS == 0 ? 2 : 1;
    const int column = lane() / 4, t = lane() % 4;
    const u8* codes = tile(number) + code_row() * 128 + swizzled(code_row(), 4 * member() + t);
    const u8* scales = shared() + number % STAGES * STAGE + 2 * BOX + member() * 32 + code_row() * 4;
    const float* by = scales_of_x + (CODES == 1 ? member() : 0);
    x += member() * RUN + (CODES == 1 ? column % 2 * 64 + t * 16 : t * 32);
    Operands half[BESIDE];
    const auto load_rows = [&](Operands& to, int run) {
        UNROLL for (int r = 0; r < 2; ++r) to.rows[r] = load4(codes + r * BOX + run * 1024);
    };
    const auto load_x = [&](Operands& to, int c, int run) {
        if (8 * c + column >= 2 * BATCH) return;   // fewer accesses; what these columns give is not used
        UNROLL for (int r = 0; r < 2; ++r)
            to.x[c][r] = load4(x + (4 * c + column / 2) * (2 * K) + run * (2 * RUN) + r * SECOND);
    };
    UNROLL for (int u = 0; u < BESIDE; ++u) {
        load_rows(half[u], u);
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            half[u].x[c][0] = half[u].x[c][1] = {0, 0, 0, 0};
            load_x(half[u], c, u);
        }
    }
    ROLLED for (int run = 0; run < runs; run += BESIDE) {
        u32 a[BESIDE][4][4];
        UNROLL for (int u = 0; u < BESIDE; ++u) {
            half[u].decoded(a[u]);
            load_rows(half[u], u + BESIDE);
        }
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            const float* scales_at = by + min_int(4 * c + t, BATCH - 1) * (K / 128);
            float product[BESIDE][2];
            UNROLL for (int u = 0; u < BESIDE; ++u) {
                multiply_half(a[u], half[u].x[c], product[u]);
                load_x(half[u], c, u + BESIDE);
            }
            UNROLL for (int u = 0; u < BESIDE; ++u) {
                const u32 row_scales = CODES == 1 ? *(const u32*)(scales + u * 64) : 0x3F803F80u;
                const float x_scale = scales_at[u * (RUN / 128)];
                sum[c][0] += product[u][0] * (x_scale * low(row_scales));
                sum[c][1] += product[u][1] * (x_scale * high(row_scales));
            }
        }
        codes += BESIDE * 1024, x += BESIDE * 2 * RUN, scales += BESIDE * 64, by += BESIDE * RUN / 128;
    }
    sync_warp();
    if (lane() == 0 && !*lost()) mbarrier_arrive(empty(number % STAGES));
}

// Partial sums of 16 rows by one of the warps that share an item, for all rows of x. A warp is less than
// ROUNDS rounds ahead of any other, so ROUNDS buffers suffice: tiles are copied in order, and its next tile
// is copied only after the other warps have released theirs of STAGES / TEAMS rounds before.
FN_MEMBER static float* part_sums(int round, int part) {
    return code_sums() + (round % ROUNDS * WARPS + part) * (16 * BATCH);
}

template <int PARTS> FN_MEMBER static float total(int round, int item, int row, int b) {
    float sum = 0;
    UNROLL for (int n = 0; n < PARTS; ++n) sum += part_sums(round, item * PARTS + n)[row * BATCH + b];
    return sum;
}

// The factor of row b of x
FN_MEMBER static float of_x(const Target& to, int b) { return BATCH == 1 ? to.norm : shuffle(to.norm, b); }

// Of four lanes one posts the sums with the residual, rounded to 24 bits
FN_MEMBER static void post_stream(const Target& to, int b, int row, float sum) {
    const u32 bits = float_bits((sum + residual()[b * HIDDEN + row]) * (1 + 0x1p-17f));
    const u32 others[3] = {shuffle_xor(bits, 1), shuffle_xor(bits, 2), shuffle_xor(bits, 3)};
    if (lane() < 16 && lane() % 4 == 0)
        post_whole(to.words + (b * HIDDEN + row) / 2, packed(bits, others[0], others[1], others[2], to.tag));
}

// An item whose partial sums this warp has to add up
struct Owed {
    int round, last, item;                         // `last`: of the items of the round
    float scale[2], bias;
};

FN_MEMBER static Owed owed_item(int round, int last, int item, const Target& to) {
    Owed owed = {round, last, item, {1, 1}, 0};
    const bool is_gated = to.kind == TO_GATE;
    const int row = is_gated ? item * 8 + lane() % 8 : min_int(item * 16 + lane() % 16, to.rows - 1);
    if (CODES == 2) owed.scale[0] = to.scales[row], owed.scale[1] = is_gated ? to.scales[row + INNER] : 1;
    if (BIAS && to.kind == TO_QKV) owed.bias = to_float<true>(to.bias[row]);
    return owed;
}

template <int PARTS> FN_MEMBER static void add_up(const Owed& owed, const Target& to) {
    sync_some(2 + owed.round % ROUNDS, THREADS);
    ROLLED for (int b = 0; b < BATCH; ++b) {
        const float by = of_x(to, b);
        if (to.kind == TO_GATE) {
            const int v = lane() % 8;
            const float value = activated(total<PARTS>(owed.round, owed.last, v, b) * owed.scale[0] * by,
                                          total<PARTS>(owed.round, owed.last, v + 8, b) * owed.scale[1] * by);
            post_ones(to.words + (b * (INNER / 8) + owed.item) * 2, value, to.tag);
            continue;
        }
        const int row = owed.item * 16 + lane() % 16;
        const float sum = total<PARTS>(owed.round, owed.last, lane() % 16, b) * owed.scale[0] * by;
        if (to.kind == TO_STREAM) post_stream(to, b, row, sum);
        else if (lane() < 16 && row < to.rows) emit(to, row, b, sum, owed.bias);
    }
}

// In a round every team multiplies one slice of an item, or every TEAMS-th slice of the same item; then one
// warp adds up the partial sums of an item.
template <int K, int SLICES> FN_MEMBER void coded(const u8* x, const Target& to) {
    constexpr int BLOCKS = code_blocks(K, SLICES), RUNS = BLOCKS * 128 / RUN, PARTS = SLICES < TEAMS ? SLICES : TEAMS;
    constexpr int ITEMS = TEAMS / PARTS;
    const Share share = take(first, to.kind == TO_GATE ? INNER / 8 : ceil_div(to.rows, 16));
    const int own = (warp() + TEAMS - next % TEAMS) % TEAMS, t = lane() % 4;
    ROLLED for (int n = 0; n < share.count; n += ITEMS) {
        const int round = n / ITEMS, last = (warp() + WARPS - n % WARPS) % WARPS;    // of the round, which this warp adds up
        const bool is_last = last < ITEMS && n + last < share.count;
        Owed owed;                                 // asked for before anything is waited for
        if (is_last) owed = owed_item(round, last, share.item(n + last), to);
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
        if (is_last) add_up<TEAM * PARTS>(owed, to);
        else arrive_some(2 + round % ROUNDS, THREADS);
    }
    next += share.count * SLICES;
    ++phase;
}

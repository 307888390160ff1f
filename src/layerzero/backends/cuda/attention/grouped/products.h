// Attention of up to MAX_COLUMNS rows by Hopper's products of four warps, for grouped_wgmma.cu.
// A block holds WARPS / 4 groups of COLS / 2 times 64 rows. Queries stay in shared
// memory, scores and outputs are in registers. Where fewer groups see a key of the block, warps are also
// sets of keys. Macros: BF16, DIM (64 or 128), WARPS, COLS (2 or 4), STAGES, STEP (a multiple of 64), SOFTCAP.
// Include wgmma.h, items.h and what declares Params and Column first.
#pragma once

constexpr int ROWS = 64, TILE = 64;                // of a product: rows of queries, and keys
constexpr int PRODUCTS = COLS / 2, GROUP_ROWS = PRODUCTS * ROWS;               // of four warps
constexpr int HALF = STEP * 128, QUERY_HALF = MAX_COLUMNS * 128;               // bytes of 64 columns of a stage or the queries
constexpr int QUERIES = MAX_COLUMNS * DIM * 2;     // bytes
constexpr int COPIED = THREADS / UNITS;            // rows that are copied together
static_assert(COLS % 2 == 0 && WARPS % 4 == 0 && STEP % TILE == 0, "whole products");
static_assert(STEP % COPIED == 0 && COPIED % 8 == 0 && TILE % COPIED == 0, "a tile is copied in whole");
static_assert(WARPS * Part::PART <= RING + QUERIES, "parts fit");

// The place of 16 bytes of a row in shared memory: 64 columns after each other, swizzled.
FN int place_of(int row, int unit, int half) { return unit / 8 * half + row * 128 + ((unit ^ row) & 7) * 16; }



struct Products {
    int used, row_groups, key_sets, row_group, key_set;
    int first_row;                                 // of this thread; others are 8 and ROWS further
    int all_begin, all_end[PRODUCTS];              // what all rows of this warp see
    int any_begin, any_end[PRODUCTS];              // what any row of this group sees
    u32 query_operand, key_operand, value_operand;
    float best[PRODUCTS][2], total[PRODUCTS][2], acc[PRODUCTS][DIM / 2];
};

// `query_of(column)`: where a column's query is, or null for zeros. Columns are listed; all threads call it.
template <typename QueryOf> FN Products load_queries(u8* ring, const Column* columns, int used, QueryOf query_of) {
    Products a;
    u8* const queries = ring + RING;
    a.used = used, a.row_groups = 1;
    while (a.row_groups * GROUP_ROWS < used) a.row_groups *= 2;
    a.key_sets = WARPS / 4 / a.row_groups, a.row_group = warp() / 4 % a.row_groups;
    a.key_set = warp() / 4 / a.row_groups;
    ROLLED for (int n = thread(); n < a.row_groups * GROUP_ROWS * UNITS; n += THREADS) {
        const u16* const from = n / UNITS < used ? query_of(n / UNITS) : nullptr;
        store4(queries + place_of(n / UNITS, n % UNITS, QUERY_HALF), from ? load4(from + n % UNITS * 8) : Four{0, 0, 0, 0});
    }
    show_to_wgmma();
    a.all_begin = 0, a.any_begin = PAST_KEYS;
    UNROLL for (int m = 0; m < PRODUCTS; ++m) {
        a.all_end[m] = PAST_KEYS, a.any_end[m] = 0;
        UNROLL for (int n = 0; n < ROWS; n += 32) {
            const int row = n + lane(), at = a.row_group * GROUP_ROWS + m * ROWS + row;
            if (at >= used) continue;
            const Column seen = columns[at];
            if (row / 16 == warp() % 4) a.all_begin = max_int(a.all_begin, seen.low), a.all_end[m] = min_int(a.all_end[m], seen.high);
            if (seen.low < seen.high) a.any_begin = min_int(a.any_begin, seen.low), a.any_end[m] = max_int(a.any_end[m], seen.high);
        }
        a.all_end[m] = -warp_max(-a.all_end[m]), a.any_end[m] = warp_max(a.any_end[m]);
    }
    a.all_begin = warp_max(a.all_begin), a.any_begin = -warp_max(-a.any_begin);
    a.first_row = a.row_group * GROUP_ROWS + warp() % 4 * 16 + lane() / 4;
    UNROLL for (int m = 0; m < PRODUCTS; ++m) {
        UNROLL for (int r = 0; r < 2; ++r) {
            a.best[m][r] = a.first_row + m * ROWS + r * 8 < used ? NONE : 0.0f;
            a.total[m][r] = 0;
        }
        UNROLL for (int n = 0; n < DIM / 2; ++n) a.acc[m][n] = 0;
    }
    a.query_operand = operand(queries + a.row_group * GROUP_ROWS * 128);
    a.key_operand = operand(ring), a.value_operand = operand(ring + HALF_STAGE, HALF);
    return a;
}

// Makes the weights of a product's scores, and scales what was summed where a maximum has grown much.
template <typename Params>
FN void soften(const Params& p, Products& a, float (&scores)[TILE / 2], int m, const Column* columns, int first, int end) {
    if (a.first_row - lane() / 4 + m * ROWS >= a.used) return;                 // zeros, of no query
    const float scale = SOFTCAP ? 1.0f : p.scale;
    if (SOFTCAP)                                   // tanh by an exponential
        UNROLL for (int n = 0; n < TILE / 2; ++n)
            scores[n] = p.cap - 2 * p.cap * reciprocal(1.0f + fast_exp2(scores[n] * p.scale));
    const int past = min_int(a.all_end[m], end);
    if (first < a.all_begin || first + TILE > past) {
        int begin[2], stop[2];                     // of this thread's rows, from its first key on
        UNROLL for (int r = 0; r < 2; ++r) {
            const int row = a.first_row + m * ROWS + r * 8, own = first + 2 * (lane() % 4);
            begin[r] = row < a.used ? columns[row].low - own : 0;
            stop[r] = row < a.used ? min_int(columns[row].high, end) - own : 0;
        }
        if (first < a.all_begin)
            UNROLL for (int n = 0; n < TILE / 2; ++n)
                if (n / 4 * 8 + n % 2 < begin[n % 4 / 2]) scores[n] = -bits_float(0x7F800000);
        if (first + TILE > past)
            UNROLL for (int n = 0; n < TILE / 2; ++n)
                if (n / 4 * 8 + n % 2 >= stop[n % 4 / 2]) scores[n] = -bits_float(0x7F800000);
    }
    float top[2] = {scores[0], scores[2]};
    UNROLL for (int n = 1; n < TILE / 2; ++n) top[n % 4 / 2] = fmaxf(top[n % 4 / 2], scores[n]);
    if (ballot(top[0] * scale - a.best[m][0] > ENOUGH || top[1] * scale - a.best[m][1] > ENOUGH)) {
        UNROLL for (int r = 0; r < 2; ++r) {       // at the first keys, and rarely after
            UNROLL for (int mask = 1; mask < 4; mask *= 2) top[r] = fmaxf(top[r], shuffle_xor(top[r], mask));
            top[r] = fmaxf(top[r] * scale, a.best[m][r]);
            const float rescale = fast_exp2(a.best[m][r] - top[r]);
            a.best[m][r] = top[r];
            a.total[m][r] *= rescale;
            UNROLL for (int n = 2 * r; n < DIM / 2; n += 4) {
                a.acc[m][n] *= rescale;
                a.acc[m][n + 1] *= rescale;
            }
        }
    }
    UNROLL for (int n = 0; n < TILE / 2; ++n) {
        scores[n] = fast_exp2(scores[n] * scale - a.best[m][n % 4 / 2]);
        a.total[m][n % 4 / 2] += scores[n];
    }
}

// A tile of keys at byte `at` of the ring, the first of them `first`, for COUNT products. Registers of a product may be
// written only while none is under way, but for sums that are not its own.
template <int COUNT, typename Params>
FN void attend_tile(const Params& p, Products& a, const Column* columns, int at, int first, int end) {
    float scores[COUNT][TILE / 2];                 // keys 8 * (n / 4) + 2 * (lane % 4) + n % 2 of row n % 4 / 2
    const u32 keys = shuffle(a.key_operand + (at >> 4), 0), values = shuffle(a.value_operand + (at >> 4), 0);
    wgmma_fence();
    UNROLL for (int m = 0; m < COUNT; ++m) {
        UNROLL for (int s = 0; s < DIM / 16; ++s)
            wgmma_rows<BF16>(scores[m], a.query_operand + ((s / 4 * QUERY_HALF + m * ROWS * 128 + s % 4 * 32) >> 4),
                             keys + ((s / 4 * HALF + s % 4 * 32) >> 4), s > 0);
        wgmma_commit();
    }
    UNROLL for (int m = 0; m < COUNT; ++m) {
        if (m == 0) wgmma_wait<COUNT - 1>();       // meanwhile the second product is under way, then the first one's values
        pin(scores[m]);
        soften(p, a, scores[m], m, columns, first, end);
        if (COUNT > 1) wgmma_wait<0>();
        u32 weights[TILE / 16][4];
        UNROLL for (int n = 0; n < TILE / 2; n += 2)
            weights[n / 8][n % 8 / 2] = pack2<BF16>(scores[m][n], scores[m][n + 1]);
        wgmma_fence();
        UNROLL for (int n = 0; n < TILE / 16; ++n)
            wgmma_columns<BF16>(a.acc[m], weights[n], values + (n * 16 * 128 >> 4));
        wgmma_commit();
    }
    wgmma_wait<0>();
    UNROLL for (int m = 0; m < COUNT; ++m) pin(a.acc[m]);
}

// The keys of `step`, which are in this stage of the ring.
template <typename Params>
FN void attend_step(const Params& p, Products& a, const Column* columns, int stage, Range step) {
    ROLLED for (int n = a.key_set; n < STEP / TILE; n += a.key_sets) {
        const int first = step.begin + n * TILE, at = stage * STAGE + n * TILE * 128;
        if (first >= min_int(step.end, a.any_end[0])) break;                   // no other product's rows see more keys
        if (first + TILE <= a.any_begin) continue;
        if (PRODUCTS == 1 || first >= a.any_end[PRODUCTS - 1]) attend_tile<1>(p, a, columns, at, first, step.end);
        else attend_tile<PRODUCTS>(p, a, columns, at, first, step.end);
    }
}

// Each warp stores its part over the ring and the queries.
FN void store_part(const Products& a, u8* ring) {
    u8* const part = ring + warp() * Part::PART;
    UNROLL for (int m = 0; m < PRODUCTS; ++m)
        UNROLL for (int r = 0; r < 2; ++r) {
            const int row = m * 16 + r * 8 + lane() / 4;
            float* const to = row_of(part, row, Part::PITCH) + 2 * (lane() % 4);
            UNROLL for (int n = 0; n < DIM / 8; ++n)
                *(Float2*)(to + n * 8) = Float2{a.acc[m][n * 4 + 2 * r], a.acc[m][n * 4 + 2 * r + 1]};
            float sum = a.total[m][r];
            UNROLL for (int mask = 1; mask < 4; mask *= 2) sum += shuffle_xor(sum, mask);
            if (lane() % 4 == 0) *max_sum_of(part, row, COLS * 8, Part::PITCH) = Float2{a.best[m][r], sum};
        }
}

FN WarpRow warp_row(int column) {
    return WarpRow{column / GROUP_ROWS * 4 + column % ROWS / 16, column % GROUP_ROWS / ROWS * 16 + column % 16};
}

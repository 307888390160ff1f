// A weight of halves times one to sixteen rows of x. The time is that of reading the weight.
//
// Tensor cores multiply 16 rows of the weight, a tile, by eight rows of x. The order of the inputs in a
// sum is free, if it is the same on both sides: so each lane reads 16 bytes of a row of the weight, and
// of a row of x. A unit is 64 inputs of a tile. The units of a tile go to the warps of a block, and of
// the SPLIT blocks of a cluster, in turn: each warp has the same columns of every tile, and keeps x for
// them in registers. It has STAGES units in flight to its own shared memory, where each lane reads back
// what it copied, so that warps wait for each other only to add up their sums: once in SLOTS tiles,
// and the blocks of a cluster once in KEPT, always in the same order.
//
// In a graph the weight is on its way before the kernels in front of this one have ended: nobody writes
// it. Blocks that take most of the shared memory begin as those of the product before them end, and
// fill their rings while a norm or an attention runs in between.
//
// Macros: BF16, WIDE (the result is float32), COLUMNS (tiles of eight rows of x: 1 or 2), COUNT (most
// units of a warp), GATED (the result is silu(gate) * up, and the weight has n rows of each), WARPS,
// SPLIT, STAGES, SLOTS, BLOCKS (minimum thread blocks per multiprocessor).
#include "device.h"

struct Params {
    const u16* x;
    const u16* weight;
    const u16* bias;
    void* out;
    i64 x_row, weight_row;                     // strides
    i32 rows, n, k;
};

constexpr int THREADS = WARPS * 32, HEIGHT = 16, UNIT = 64, UNIT_BYTES = HEIGHT * UNIT * 2;
constexpr int ROWS = COLUMNS * 8;
constexpr int PITCH = 20;                      // in floats, of 16 sums, without bank conflicts
constexpr int PART = ROWS * PITCH, ROUND = SLOTS * WARPS * PART;
constexpr int TOTAL = ROWS * HEIGHT;           // sums of a tile
constexpr int KEPT = (SLOTS < 8 ? 8 / SLOTS : 1) * SLOTS;      // tiles between sums over a cluster
// Rows of the result in a tile: where gated, a tile has eight rows of gate, and then the same of up.
constexpr int RESULTS = GATED ? 8 : HEIGHT;

// Where a piece of a row of a unit is, so that eight lanes, of two rows or of one, use all banks
FN int swizzle(int row, int piece) { return row * 128 + (piece ^ (row & 1) * 4) * 16; }
FN int minimum(int a, int b) { return a < b ? a : b; }

// The row of the weight that is `down` in a tile; the last one again past the end
FN int row_of(int tile, int down, int n) {
    return minimum(tile * RESULTS + down % RESULTS, n - 1) + (GATED && down >= RESULTS ? n : 0);
}

// Half of the registers, if x leaves as many, are for an attention beside it (attention/token.cu).
#define BOUNDS THREADS, (COLUMNS * COUNT <= 8 && BLOCKS * THREADS < 512 ? 512 / THREADS : BLOCKS)
KERNEL(rows, Params, BOUNDS)
{
    launch_next();
    const int g = lane() >> 2, t = lane() & 3;
    const int tiles = (p.n + RESULTS - 1) / RESULTS;
    const int rank = SPLIT > 1 ? cluster_rank() : 0, cluster = block_x() / SPLIT, clusters = grid_x() / SPLIT;
    // This lane's first column of the weight; the next unit's is STRIDE later.
    constexpr int STRIDE = SPLIT * WARPS * UNIT;
    const int column = (rank * WARPS + warp()) * UNIT;

    u8* const ring = shared() + warp() * STAGES * UNIT_BYTES;
    const int row_of_lane = lane() >> 3, column_of_lane = (lane() & 7) * 8;      // that it copies
    float* const parts = reinterpret_cast<float*>(shared() + WARPS * STAGES * UNIT_BYTES);
    float* const totals = parts + 2 * ROUND;

    constexpr int COPIED = 4;                  // rows of a tile that this lane copies
    const u16* from[COPIED];
    int next_tile = cluster, next_column = column, next_unit = 0, fill_at = 0;
    auto fetch = [&] {
        if (next_tile < tiles) {
            if (next_unit == 0) UNROLL for (int r = 0; r < COPIED; ++r)
                from[r] = p.weight + row_of(next_tile, r * (HEIGHT / COPIED) + row_of_lane, p.n) * p.weight_row;
            const int at = next_column + column_of_lane;
            UNROLL for (int r = 0; r < COPIED; ++r)
                copy_async(ring + fill_at + swizzle(r * (HEIGHT / COPIED) + row_of_lane, lane() & 7),
                           from[r] + minimum(at, p.k - 8), at < p.k);
            next_column += STRIDE;
            if (++next_unit == COUNT) {
                next_unit = 0, next_column = column;
                next_tile += clusters;
            }
        }
        copy_commit();                         // empty at the end
        fill_at = fill_at + UNIT_BYTES == STAGES * UNIT_BYTES ? 0 : fill_at + UNIT_BYTES;
    };
    ROLLED for (int s = 0; s < STAGES; ++s) fetch();

    wait_for_previous();
    Four x[COLUMNS][COUNT][2];
    UNROLL for (int c = 0; c < COLUMNS; ++c) UNROLL for (int u = 0; u < COUNT; ++u) UNROLL for (int h = 0; h < 2; ++h) {
        const int row = c * 8 + g, at = column + u * STRIDE + h * 32 + t * 8;
        x[c][u][h] = {0, 0, 0, 0};
        if (row < p.rows && at < p.k) x[c][u][h] = load4(p.x + row * p.x_row + at);
    }

    // Writes so many tiles; of(slot, m, down) is the sum for a row of x and one of the tile's.
    auto write = [&](int first, int many, auto of) {
        ROLLED for (int e = rank * THREADS + thread(); e < many * ROWS * RESULTS; e += SPLIT * THREADS) {
            const int slot = e / (ROWS * RESULTS), m = e / RESULTS % ROWS, down = e % RESULTS;
            const int row = (first + slot * clusters) * RESULTS + down;
            if (m >= p.rows || row >= p.n) continue;
            auto sum = [&](int of_up) {
                const float total = of(slot, m, down + of_up * RESULTS);
                return p.bias ? total + to_float<BF16>(p.bias[row + of_up * p.n]) : total;
            };
            float total = sum(0);
            if (GATED) total = total / (1.0f + exact_exp(-total)) * sum(1);
            const i64 at = i64(m) * p.n + row;
            if (WIDE) static_cast<float*>(p.out)[at] = total;
            else static_cast<u16*>(p.out)[at] = from_float<BF16>(total);
        }
    };

    int read_at = 0, left = (tiles - cluster + clusters - 1) / clusters, buffer = 0, kept = 0;
    ROLLED for (int first = cluster; left > 0; first += SLOTS * clusters, left -= SLOTS) {
        const int many = minimum(left, SLOTS);
        float* const mine = parts + buffer * ROUND;
        ROLLED for (int slot = 0; slot < many; ++slot) {
            float d[COLUMNS][2][4];            // two chains each
            UNROLL for (int c = 0; c < COLUMNS; ++c) UNROLL for (int e = 0; e < 8; ++e) d[c][e / 4][e % 4] = 0;
            UNROLL for (int u = 0; u < COUNT; ++u) {
                copy_wait<STAGES - 1>();
                sync_warp();
                Four w[2][2];
                UNROLL for (int h = 0; h < 2; ++h) UNROLL for (int r = 0; r < 2; ++r)
                    w[h][r] = load4(ring + read_at + swizzle(r * 8 + g, h * 4 + t));
                sync_warp();
                UNROLL for (int h = 0; h < 2; ++h) {
                    const u32 low[4] = {w[h][0].x, w[h][1].x, w[h][0].y, w[h][1].y};
                    const u32 high[4] = {w[h][0].z, w[h][1].z, w[h][0].w, w[h][1].w};
                    UNROLL for (int c = 0; c < COLUMNS; ++c) {
                        const u32 first_two[2] = {x[c][u][h].x, x[c][u][h].y}, last_two[2] = {x[c][u][h].z, x[c][u][h].w};
                        mma<BF16>(d[c][0], low, first_two);
                        mma<BF16>(d[c][1], high, last_two);
                    }
                }
                fetch();
                read_at = read_at + UNIT_BYTES == STAGES * UNIT_BYTES ? 0 : read_at + UNIT_BYTES;
            }
            float* const to = mine + (slot * WARPS + warp()) * PART;
            UNROLL for (int c = 0; c < COLUMNS; ++c) UNROLL for (int e = 0; e < 4; ++e)
                to[(c * 8 + 2 * t + (e & 1)) * PITCH + e / 2 * 8 + g] = d[c][0][e] + d[c][1][e];
        }
        // The other buffer is free again when all have come here: who reads it comes here after that.
        sync_block();
        auto of_warps = [&](int slot, int m, int down) {
            float total = 0;
            UNROLL for (int w = 0; w < WARPS; ++w) total += mine[(slot * WARPS + w) * PART + m * PITCH + down];
            return total;
        };
        if (SPLIT == 1) write(first, many, of_warps);
        else {
            ROLLED for (int e = thread(); e < many * TOTAL; e += THREADS)
                totals[kept * TOTAL + e] = of_warps(e / TOTAL, e / HEIGHT % ROWS, e % HEIGHT);
            kept += many;
            if (kept + SLOTS > KEPT || left <= SLOTS) {
                sync_cluster();
                write(first - (kept - many) * clusters, kept, [&](int slot, int m, int down) {
                    float total = 0;
                    UNROLL for (int other = 0; other < SPLIT; ++other)
                        total += cluster_read(totals + slot * TOTAL + m * HEIGHT + down, other);
                    return total;
                });
                kept = 0;
                if (left > SLOTS) sync_cluster();          // before they are overwritten
            }
        }
        buffer ^= 1;
    }
    if (SPLIT > 1) leave_cluster();            // others may still read this block's sums
}

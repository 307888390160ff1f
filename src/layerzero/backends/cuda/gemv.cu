// A weight of int4 or int8 codes times one to sixteen rows of x: reading the codes is nearly all the time it takes.
//
// Tensor cores multiply 16 rows of the weight by eight columns. Which inputs they sum over is the same for both sides,
// but otherwise free: so each lane reads 16 bytes of one row of the weight, and x is put in the order of these codes.
// Codes are never converted. Put into the mantissa of a half whose exponent is fixed, an int4 code n reads 16 + n;
// what is too much is the same for all rows of the weight, and the sum begins with its negative. The low seven bits
// of an int8 code read 128 + n that way, and its sign, put into the last bit of an exponent, -128 or -256: both are
// multiplied by x. All of this is exact.
//
// A block is what four lanes read at once of a row: 128 int4 codes or 64 int8. Its inputs may belong to several groups
// of the scales. Then a row of x takes several columns, each with zeros for all groups but one.
//
// The warps share the inputs, and so do the thread blocks of a cluster; each warp has its own part of x in shared
// memory, and STAGES blocks of the weight on their way. Sixteen rows of the weight are a tile: the warps' sums of it
// wait in shared memory until there are SLOTS of them, and are then added up, always in the same order.
//
// Macros: BF16, BITS (4, 8), ROWS (of x at most; 1, 2, 4, 8, 16), GROUP (0: a row of the weight has one scale), ZEROS,
// SCALES (0: float32, 1: bfloat16, 2: float16), WARPS, STAGES, SLOTS, SPLIT (thread blocks of a cluster).
#include "device.h"

struct Params {
    const u16* x;
    const u8* weight;
    const void* scales;
    const u8* zeros;
    const u16* bias;
    u16* out;
    i64 x_row;
    i32 rows, n, k, groups;
    // The bits of exponents. From here the compiler does not know them and keeps them in registers: with two
    // constants `and` and `or` would be two instructions.
    u32 exponent, sign_exponent;
};

constexpr int THREADS = WARPS * 32;
constexpr int CODES = 128 / BITS;                          // in the 16 bytes of a lane
constexpr int BLOCK = 4 * CODES;
constexpr int PER_BLOCK = GROUP != 0 && GROUP < BLOCK ? BLOCK / GROUP : 1;      // groups
constexpr int TILES = (ROWS * PER_BLOCK + 7) / 8;          // of eight columns
constexpr int PIECES = CODES / 8;                          // 16 bytes of x each, for a lane in a block
constexpr int X_ROW = BLOCK * 2, X_BLOCK = ROWS * X_ROW;   // bytes
constexpr bool OFFSET = BITS == 4 || ZEROS;
constexpr int CHAINS = TILES == 1 ? 2 : 1;                 // sums that do not wait for each other
constexpr int SCALES_OF_LANE = PER_BLOCK == 1 ? 1 : 2;
constexpr int COLUMN = 20;                                 // floats of 16 sums: no two lanes meet in a bank
constexpr int SLOT = WARPS * ROWS * COLUMN + 16;
constexpr int PLACES = SLOTS * 16;                         // sums of one row of x
static_assert(GROUP == 0 || BLOCK % GROUP == 0 ? PER_BLOCK <= 4 : GROUP % BLOCK == 0, "a group that lanes share");
static_assert(SLOTS % STAGES == 0, "each round begins with the first stage");
static_assert(THREADS % PLACES == 0, "each thread adds up sums of one row of the weight");

#if SCALES == 0
typedef float Scale;
FN float wide(Scale v) { return v; }
#else
typedef u16 Scale;
FN float wide(Scale v) { return to_float<SCALES == 1>(v); }
#endif
#if BITS == 4
typedef u8 Zero;
#else
typedef signed char Zero;
#endif

FN int least(int a, int b) { return a < b ? a : b; }
FN u32 moved(u32 v, int right) { return right >= 0 ? v >> right : v << -right; }

// Where piece h of lane t of a row of x is kept: the lanes that read at once, and those that write, use all banks.
FN int place(int row, int t, int h) { return (t * PIECES + (h ^ ((PIECES == 4 ? t & 2 : 0) | (row & 1)))) * 16; }

// Eight inputs in the order of the codes in a word: two nibbles are 16 bits apart, and so are two bytes.
FN Four ordered(Four v) {
    const u32 high = 0xFFFF0000;
    if (BITS == 4) return {(v.x & 0xFFFF) | v.z << 16, v.x >> 16 | (v.z & high),
                           (v.y & 0xFFFF) | v.w << 16, v.y >> 16 | (v.w & high)};
    return {(v.x & 0xFFFF) | v.y << 16, v.x >> 16 | (v.y & high), (v.z & 0xFFFF) | v.w << 16, v.z >> 16 | (v.w & high)};
}

struct Stage {
    Four low, high;                                        // of rows g and g + 8 of the tile
    Scale scale[2][SCALES_OF_LANE];
    Zero zero[2][SCALES_OF_LANE];
};

// d += the codes of a word of each of two rows times the inputs in b; pairs of codes from `pair` on.
FN void multiply(float (&d)[4], u32 low, u32 high, const u32 (&b)[2], int pair, const Params& p) {
    u32 a[4];
    if (BITS == 4) {
        const u32 mask = BF16 ? 0x00780078 : 0x03C003C0;
        UNROLL for (int j = 0; j < 2; ++j) {
            const int right = (pair + j) * 4 - (BF16 ? 3 : 6);
            a[2 * j] = (moved(low, right) & mask) | p.exponent;
            a[2 * j + 1] = (moved(high, right) & mask) | p.exponent;
        }
        mma<BF16>(d, a, b);
    } else {
        const u32 mask = BF16 ? 0x007F007F : 0x03F803F8, sign = BF16 ? 0x00800080 : 0x04000400;
        u32 signs[4];
        UNROLL for (int j = 0; j < 2; ++j) {
            const int right = j * 8 - (BF16 ? 0 : 3);
            a[2 * j] = (moved(low, right) & mask) | p.exponent;
            a[2 * j + 1] = (moved(high, right) & mask) | p.exponent;
            signs[2 * j] = (moved(low, right) & sign) | p.sign_exponent;
            signs[2 * j + 1] = (moved(high, right) & sign) | p.sign_exponent;
        }
        mma<BF16>(d, a, b);
        mma<BF16>(d, signs, b);
    }
}

KERNEL(gemv, Params, THREADS)
{
    const int g = lane() >> 2, t = lane() & 3;
    const int blocks = (p.k + BLOCK - 1) / BLOCK, pieces = p.k / CODES, tiles = (p.n + 15) >> 4;
    const int rank = SPLIT > 1 ? cluster_rank() : 0, team = block_x() / SPLIT, teams = grid_x() / SPLIT;
    const int start = blocks * rank / SPLIT, span = blocks * (rank + 1) / SPLIT - start;
    const int skipped = span * warp() / WARPS, count = span * (warp() + 1) / WARPS - skipped;    // blocks of this warp
    const int from = start + skipped, most = (blocks + SPLIT - 1) / SPLIT;

    u8* const none = shared() + most * X_BLOCK;            // 64 bytes of zeros
    float* const sums_x = reinterpret_cast<float*>(none + 64) + skipped * TILES * 8;
    float* const parts = reinterpret_cast<float*>(none + 64) + most * TILES * 8;
    float* const totals = parts + SLOTS * SLOT;

    // x goes first, since nothing can begin without it; 16 bytes by 16, each waited for and ordered by who asked for it.
    const int along = count * (BLOCK / 8);
    u8* const mine = shared() + skipped * X_BLOCK;
    ROLLED for (int row = 0; row < p.rows; ++row)
        ROLLED for (int at = lane(); at < along; at += 32) {
            const int column = from * BLOCK + at * 8, inside = at % (BLOCK / 8);
            copy_async(mine + at / (BLOCK / 8) * X_BLOCK + row * X_ROW + place(row, inside / PIECES, inside % PIECES),
                       p.x + row * p.x_row + column, column < p.k);
        }
    copy_commit();

    Stage stage[STAGES];
    int next_tile = team, next_block = from;
    u32 low_row = least(next_tile * 16 + g, p.n - 1), high_row = least(next_tile * 16 + g + 8, p.n - 1);
    auto fetch = [&](Stage& to) {
        if (next_tile >= tiles) return;
        const u32 piece = least(next_block * 4 + t, pieces - 1);           // past the end x is zero
        to.low = load4_once(p.weight + (u64(low_row * u32(pieces) + piece) << 4));
        to.high = load4_once(p.weight + (u64(high_row * u32(pieces) + piece) << 4));
        UNROLL for (int s = 0; s < SCALES_OF_LANE; ++s) {
            int group = 0;
            if (GROUP != 0 && PER_BLOCK == 1) group = next_block / (GROUP > BLOCK ? GROUP / BLOCK : 1);
            if (PER_BLOCK == 2) group = least(next_block * 2 + s, p.groups - 1);
            if (PER_BLOCK == 4) group = least(next_block * 4 + (t & 1) * 2 + s, p.groups - 1);
            const u32 low = low_row * p.groups + group, high = high_row * p.groups + group;
            if (GROUP != 0) {
                to.scale[0][s] = static_cast<const Scale*>(p.scales)[low];
                to.scale[1][s] = static_cast<const Scale*>(p.scales)[high];
            }
            if (ZEROS) {
                to.zero[0][s] = static_cast<Zero>(p.zeros[low]);
                to.zero[1][s] = static_cast<Zero>(p.zeros[high]);
            }
        }
        if (++next_block == from + count) {
            next_block = from;
            next_tile += teams;
            low_row = least(next_tile * 16 + g, p.n - 1);
            high_row = least(next_tile * 16 + g + 8, p.n - 1);
        }
    };
    UNROLL for (int s = 0; s < STAGES; ++s) fetch(stage[s]);

    if (PER_BLOCK > 1 && thread() < 4) store4(none + thread() * 16, {0, 0, 0, 0});
    copy_wait<0>();
    ROLLED for (int row = 0; row < p.rows; ++row)
        ROLLED for (int at = lane(); at < along; at += 32) {
            const int inside = at % (BLOCK / 8);
            u8* const piece = mine + at / (BLOCK / 8) * X_BLOCK + row * X_ROW
                + place(row, inside / PIECES, inside % PIECES);
            store4(piece, ordered(load4(piece)));
        }
    if (PER_BLOCK > 1) sync_block(); else sync_warp();

    // The columns of this lane: where they begin, and how far it is to the next block.
    u32 column[TILES], step[TILES];
    UNROLL for (int c = 0; c < TILES; ++c) {
        const int row = least((c * 8 + g) / PER_BLOCK, p.rows - 1);        // a column too many repeats the last row
        const bool own = (c * 8 + g) % PER_BLOCK == t * PER_BLOCK / 4;
        column[c] = u32((own ? mine + row * X_ROW : none) - shared()) + (own ? place(row, t, 0) : 0);
        step[c] = own ? X_BLOCK : 0;
    }
    if (OFFSET) {
        // Minus the sum of each column, times 16 + 8 where that is the zero of all.
        const u32 one = ZEROS ? (BF16 ? 0xBF80BF80 : 0xBC00BC00) : (BF16 ? 0xC1C0C1C0 : 0xCE00CE00);
        const u32 all[4] = {one, one, one, one};
        ROLLED for (int block = 0; block < count; ++block)
            UNROLL for (int c = 0; c < TILES; ++c) {
                float d[4] = {0, 0, 0, 0};
                UNROLL for (int h = 0; h < PIECES; ++h) {
                    const Four b = load4(shared() + ((column[c] + block * step[c]) ^ (h * 16)));
                    const u32 first[2] = {b.x, b.y}, second[2] = {b.z, b.w};
                    mma<BF16>(d, all, first);
                    mma<BF16>(d, all, second);
                }
                if (g == 0) {
                    sums_x[((block * TILES + c) * 4 + t) * 2] = d[0];
                    sums_x[((block * TILES + c) * 4 + t) * 2 + 1] = d[1];
                }
            }
        sync_warp();
    }

    constexpr int KEPT = PER_BLOCK == 1 ? 4 : 2;           // sums of a lane for each tile of columns
    float sum[TILES][KEPT];
    UNROLL for (int c = 0; c < TILES; ++c) UNROLL for (int e = 0; e < KEPT; ++e) sum[c][e] = 0;

    auto compute = [&](const Stage& of, int block) {
        float d[TILES * CHAINS][4];
        UNROLL for (int c = 0; c < TILES * CHAINS; ++c) {
            UNROLL for (int e = 0; e < 4; ++e) d[c][e] = 0;
            if (OFFSET && c < TILES) UNROLL for (int e = 0; e < 4; ++e) {
                const float all = sums_x[((block * TILES + c) * 4 + t) * 2 + (e & 1)];
                d[c][e] = ZEROS ? all * (float(of.zero[e / 2][SCALES_OF_LANE == 1 ? 0 : e & 1]) + (BITS == 4 ? 16 : 0))
                                : all;
            }
        }
        const u32 low[4] = {of.low.x, of.low.y, of.low.z, of.low.w};
        const u32 high[4] = {of.high.x, of.high.y, of.high.z, of.high.w};
        UNROLL for (int h = 0; h < PIECES; ++h) UNROLL for (int c = 0; c < TILES; ++c) {
            const Four b = load4(shared() + (column[c] ^ (h * 16)));
            const u32 first[2] = {b.x, b.y}, second[2] = {b.z, b.w};
            const int word = BITS == 4 ? h : 2 * h, then = BITS == 4 ? h : 2 * h + 1;
            multiply(d[c], low[word], high[word], first, 0, p);
            multiply(d[c + TILES * (CHAINS - 1)], low[then], high[then], second, 2, p);
        }
        UNROLL for (int c = 0; c < TILES; ++c) {
            column[c] += step[c];
            UNROLL for (int e = 0; e < 4; ++e) {
                const float v = CHAINS == 1 ? d[c][e] : d[c][e] + d[c + TILES * (CHAINS - 1)][e];
                const float scale = GROUP == 0 ? 1.0f : wide(of.scale[e / 2][SCALES_OF_LANE == 1 ? 0 : e & 1]);
                sum[c][KEPT == 4 ? e : e / 2] += v * scale;
            }
        }
    };
    auto keep = [&](float* to) {                           // the sums of a tile
        UNROLL for (int c = 0; c < TILES; ++c) {
            column[c] -= count * step[c];
            UNROLL for (int e = 0; e < KEPT; ++e) {
                float v = sum[c][e];
                sum[c][e] = 0;
                if (PER_BLOCK == 4) v += shuffle_xor(v, 1);
                const int row = PER_BLOCK == 1 ? c * 8 + 2 * t + (e & 1) : PER_BLOCK == 2 ? c * 4 + t : c * 2 + t / 2;
                if (row < ROWS) to[row * COLUMN + g + (e >= KEPT / 2 ? 8 : 0)] = v;
            }
        }
    };

    const int at = thread() % PLACES, slot_here = at / 16;
    int left = (tiles - team + teams - 1) / teams;
    ROLLED for (int first_tile = team; left > 0; first_tile += SLOTS * teams, left -= SLOTS) {
        const int row = (first_tile + slot_here * teams) * 16 + at % 16;
        const bool wanted = slot_here < left && row < p.n;
        float scale = 1, bias = 0;                         // asked for long before they are needed
        if (wanted && GROUP == 0) scale = wide(static_cast<const Scale*>(p.scales)[row]);
        if (wanted && p.bias) bias = to_float<BF16>(p.bias[row]);

        const int units = least(left, SLOTS) * count;
        int block = 0;
        float* kept = parts + warp() * ROWS * COLUMN;
        ROLLED for (int unit = 0; unit < units; unit += STAGES)
            UNROLL for (int s = 0; s < STAGES; ++s)
                if (unit + s < units) {
                    compute(stage[s], block);
                    fetch(stage[s]);
                    if (++block == count) {
                        keep(kept);
                        kept += SLOT;
                        block = 0;
                    }
                }
        sync_block();
        ROLLED for (int m = thread() / PLACES; m < p.rows; m += THREADS / PLACES) {
            float total = 0;
            UNROLL for (int w = 0; w < WARPS; ++w)
                total += parts[slot_here * SLOT + (w * ROWS + m) * COLUMN + at % 16];
            if (SPLIT > 1) totals[m * PLACES + at] = total;
            else if (wanted) p.out[i64(m) * p.n + row] = from_float<BF16>(total * scale + bias);
        }
        if (SPLIT > 1) {
            sync_cluster();
            if (wanted && slot_here % SPLIT == rank)
                ROLLED for (int m = thread() / PLACES; m < p.rows; m += THREADS / PLACES) {
                    float total = 0;
                    UNROLL for (int other = 0; other < SPLIT; ++other)
                        total += cluster_read(&totals[m * PLACES + at], other);
                    p.out[i64(m) * p.n + row] = from_float<BF16>(total * scale + bias);
                }
            sync_cluster();
        } else if (left > SLOTS) sync_block();
    }
}

// A quantized weight times one to sixteen rows of x. The time is that of reading the codes.
//
// Tensor cores multiply 16 rows of the weight by eight columns. The order of the inputs in a sum is
// free, if it is the same on both sides: so each lane reads 16 bytes of one row of the weight, and
// x is reordered to match the codes. Codes are never converted. In the mantissa of a half with a
// fixed exponent, an int4 code n reads as 16 + n; the excess is the same for all rows of the
// weight, and its negative initialises the sum. The low seven bits of an int8 code read as 128 + n
// that way, and its sign, in the last bit of an exponent, as -128 or -256: both are multiplied by
// x. Sign, exponent and mantissa of an fp8 code are moved to those of a half, up to a power of two.
// All of this is exact.
//
// A block is what four lanes read at once of a row: 128 four-bit or 64 eight-bit codes. Its inputs
// may belong to several groups of the scales. Then a row of x takes several columns, each with
// zeros for all groups but one.
//
// PARTS warps split the inputs of a tile of the weight's rows, and so do the SPLIT thread blocks of
// a cluster. A warp has STAGES blocks of the weight in flight to its own shared memory, where each
// lane reads back what it copied (in registers loads would wait for each other: a warp has few
// scoreboards). The scales of a tile come with its first block. The warps' sums of a tile are kept
// until there are SLOTS tiles, and then added up, always in the same order.
//
// Macros: BF16, FORMAT (0: int4, 1: int8, 2: fp8_e4m3), ROWS (maximum of x; 1, 2, 4, 8, 16), GROUP
// (0: a row of the weight has one scale), ZEROS, SCALES (0: float32, 1: bfloat16, 2: float16),
// WARPS, PARTS, TALL (16 rows of a tile, or twice that), STAGES, SLOTS, SPLIT, BLOCKS (minimum
// thread blocks per multiprocessor).
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
    i32 scale_pieces, zero_pieces;             // 16-byte pieces of a row of scales or zeros that a part needs
    i32 scales_end, zeros_end;                 // total pieces
    i32 tiles_ahead;                           // tiles whose scales fit into a warp's shared memory
    // Bits that are combined with those of the codes. Not constants: with two constants `and` and
    // `or` would be two instructions instead of one lop3.
    u32 exponent, sign;
};

constexpr bool INT4 = FORMAT == 0, FP8 = FORMAT == 2;
constexpr int BITS = INT4 ? 4 : 8;
constexpr int THREADS = WARPS * 32;
constexpr int CODES = 128 / BITS;                          // per lane's 16 bytes
constexpr int BLOCK = 4 * CODES;
constexpr int PER_BLOCK = GROUP != 0 && GROUP < BLOCK ? BLOCK / GROUP : 1;      // groups
constexpr int TILES = (ROWS * PER_BLOCK + 7) / 8;          // of eight columns
constexpr int PIECES = CODES / 8;                          // of 16 bytes of x, per lane and block
constexpr int X_ROW = BLOCK * 2, X_BLOCK = ROWS * X_ROW;   // bytes
constexpr bool OFFSET = INT4 || ZEROS;
constexpr int CHAINS = TILES == 1 ? 2 : 1;                 // independent accumulators
constexpr int SCALES_OF_LANE = PER_BLOCK == 1 ? 1 : 2;
constexpr int COLUMN = 20;                                 // pitch in floats of 16 sums, without bank conflicts
constexpr int HEIGHT = 16 * TALL, LINES = 2 * TALL;        // rows per tile, and per lane
constexpr int UNIT = TALL * 1024;                          // bytes per block of a tile
constexpr int TEAMS = WARPS / PARTS;                       // tiles processed concurrently
constexpr int PART = TALL * ROWS * COLUMN, SLOT = PARTS * PART + 16;
constexpr int PLACES = SLOTS * HEIGHT;                     // sums per row of x
static_assert(GROUP == 0 || BLOCK % GROUP == 0 ? PER_BLOCK <= 4 : GROUP % BLOCK == 0, "a group that lanes share");
static_assert(WARPS % PARTS == 0 && SLOTS % TEAMS == 0, "each round begins with the first team");
static_assert(THREADS >= PLACES, "each thread adds up sums of one row of the weight");

#if SCALES == 0
typedef float Scale;
FN float scale_to_float(Scale v) { return v; }
#else
typedef u16 Scale;
FN float scale_to_float(Scale v) { return to_float<SCALES == 1>(v); }
#endif
#if FORMAT == 0
typedef u8 Zero;
#else
typedef signed char Zero;
#endif

FN int minimum(int a, int b) { return a < b ? a : b; }
FN u32 shift_right(u32 v, int right) { return right >= 0 ? v >> right : v << -right; }

// Offset of piece h of lane t in a row of x, so that concurrent reads, and writes, use all banks.
FN int swizzle(int row, int t, int h) { return (t * PIECES + (h ^ ((PIECES == 4 ? t & 2 : 0) | (row & 1)))) * 16; }

// Reorders eight inputs like the codes in a word: pairs of nibbles, or of bytes, are 16 bits apart.
FN Four reorder_inputs(Four v) {
    const u32 high = 0xFFFF0000;
    if (INT4) return {(v.x & 0xFFFF) | v.z << 16, v.x >> 16 | (v.z & high),
                           (v.y & 0xFFFF) | v.w << 16, v.y >> 16 | (v.w & high)};
    return {(v.x & 0xFFFF) | v.y << 16, v.x >> 16 | (v.y & high), (v.z & 0xFFFF) | v.w << 16, v.z >> 16 | (v.w & high)};
}

// Both halves of v times 2^120.
FN u32 scale_by_2_120(u32 v) {
#ifdef __CUDACC__
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(0x7B807B80));
    return v;
#else
    return pack2<true>(to_float<true>(u16(v)) * 0x1p120f, to_float<true>(u16(v >> 16)) * 0x1p120f);
#endif
}

// Returns the fp8 codes in bytes 0 and 2 (odd = 0), or 1 and 3, as halves; as float16 they are 2^8
// times too small.
FN u32 fp8_to_halves(u32 word, int odd, u32 sign) {
    const u32 rest = BF16 ? shift_right(word, odd * 8 - 4) & 0x07F007F0 : shift_right(word, odd * 8 - 7) & 0x3F803F80;
    const u32 v = (shift_right(word, odd * 8 - 8) & sign) | rest;
    return BF16 ? scale_by_2_120(v) : v;
}

// d += codes of a word of each of two rows times the inputs in b. Of int4 codes the pairs from
// `pair` on.
FN void multiply(float (&d)[4], u32 low, u32 high, const u32 (&b)[2], int pair, u32 exponent, u32 sign) {
    u32 a[4], signs[4];
    UNROLL for (int j = 0; j < 2; ++j) {
        const u32 mask = INT4 ? (BF16 ? 0x00780078 : 0x03C003C0) : (BF16 ? 0x007F007F : 0x03F803F8);
        const int right = INT4 ? (pair + j) * 4 - (BF16 ? 3 : 6) : j * 8 - (BF16 ? 0 : 3);
        a[2 * j] = FP8 ? fp8_to_halves(low, j, sign) : (shift_right(low, right) & mask) | exponent;
        a[2 * j + 1] = FP8 ? fp8_to_halves(high, j, sign) : (shift_right(high, right) & mask) | exponent;
        signs[2 * j] = (shift_right(low, right) & (BF16 ? 0x00800080 : 0x04000400)) | sign;
        signs[2 * j + 1] = (shift_right(high, right) & (BF16 ? 0x00800080 : 0x04000400)) | sign;
    }
    mma<BF16>(d, a, b);
    if (FORMAT == 1) mma<BF16>(d, signs, b);
}

#define BOUNDS THREADS, BLOCKS
KERNEL(gemv, Params, BOUNDS)
{
    const int g = lane() >> 2, t = lane() & 3;
    const int blocks = (p.k + BLOCK - 1) / BLOCK, pieces = p.k / CODES, tiles = (p.n + HEIGHT - 1) / HEIGHT;
    const int rank = SPLIT > 1 ? cluster_rank() : 0, cluster = block_x() / SPLIT, clusters = grid_x() / SPLIT;
    const int start = blocks * rank / SPLIT, span = blocks * (rank + 1) / SPLIT - start;
    const int part = warp() % PARTS, team = warp() / PARTS;
    const int first_block = span * part / PARTS, count = span * (part + 1) / PARTS - first_block;        // of this warp
    const int from = start + first_block, most = (blocks + SPLIT - 1) / SPLIT;

    u8* const none = shared() + most * X_BLOCK;            // 64 bytes of zeros
    float* const sums_x = reinterpret_cast<float*>(none + 64);
    float* const parts = sums_x + most * TILES * 8;
    float* const totals = parts + SLOTS * SLOT;
    u8* const rings = reinterpret_cast<u8*>(totals + (SPLIT > 1 ? ROWS * PLACES : 0));
    // A row of scales takes an odd number of pieces, so that concurrent reads use all banks.
    const int scale_line = GROUP != 0 ? (p.scale_pieces | 1) * 16 : 0, zero_line = ZEROS ? (p.zero_pieces | 1) * 16 : 0;
    const int line = scale_line + zero_line;
    u8* const ring = rings + warp() * STAGES * UNIT + lane() * 16;
    u8* const lines = rings + WARPS * STAGES * UNIT + warp() * p.tiles_ahead * HEIGHT * line;

    // x is copied first, as everything depends on it. The thread that copies 16 bytes also reorders
    // them.
    constexpr int LANES = BLOCK / 8, AT_ONCE = THREADS / LANES, ABREAST = ROWS < AT_ONCE ? ROWS : AT_ONCE;
    const int lane_in_block = thread() % LANES, block_and_row = thread() / LANES;
    auto each_piece = [&](auto visit) {
        ROLLED for (int block = block_and_row / ABREAST; block < span; block += AT_ONCE / ABREAST)
            ROLLED for (int row = block_and_row % ABREAST; row < p.rows; row += ABREAST)
                visit(shared() + block * X_BLOCK + row * X_ROW + swizzle(row, lane_in_block / PIECES, lane_in_block % PIECES), row,
                      (start + block) * BLOCK + lane_in_block * 8);
    };
    each_piece([&](u8* to, int row, int column) {
        copy_async(to, p.x + row * p.x_row + column, column < p.k);
    });
    copy_commit();

    int next_tile = cluster + team * clusters, next_block = from, fill_at = 0, fill_line = 0;
    constexpr int LONG = GROUP > BLOCK ? GROUP / BLOCK : 1;                // blocks per group
    const int first_group = GROUP == 0 ? 0 : PER_BLOCK > 1 ? from * PER_BLOCK : from / LONG;
    u32 row_at[LINES];                                     // where the rows of the weight begin, in pieces
    auto copy_line = [&](u8* to, int size, const void* of, int many, int end, int row) {
        const int piece = (row * p.groups + first_group) / (16 / size);
        ROLLED for (int c = lane() >> 4; c < many; c += 2)
            copy_async(to + c * 16, static_cast<const u8*>(of) + i64(piece + c) * 16, piece + c < end);
    };
    auto fetch = [&] {
        if (next_tile < tiles) {
            if (next_block == from) {
                UNROLL for (int r = 0; r < LINES; ++r)
                    row_at[r] = u32(minimum(next_tile * HEIGHT + r * 8 + g, p.n - 1)) * pieces;
                if (GROUP != 0 || ZEROS) UNROLL for (int r = 0; r < TALL; ++r) {
                    const int down = r * 16 + (lane() & 15), row = minimum(next_tile * HEIGHT + down, p.n - 1);
                    u8* const to = lines + (fill_line * HEIGHT + down) * line;
                    if (GROUP != 0) copy_line(to, sizeof(Scale), p.scales, p.scale_pieces, p.scales_end, row);
                    if (ZEROS) copy_line(to + scale_line, 1, p.zeros, p.zero_pieces, p.zeros_end, row);
                }
                fill_line = fill_line + 1 == p.tiles_ahead ? 0 : fill_line + 1;
            }
            const u32 piece = minimum(next_block * 4 + t, pieces - 1);     // past the end x is zero
            UNROLL for (int r = 0; r < LINES; ++r)
                copy_async(ring + fill_at + r * 512, p.weight + (u64(row_at[r] + piece) << 4), true);
            if (++next_block == from + count) {
                next_block = from;
                next_tile += TEAMS * clusters;
            }
        }
        copy_commit();                                     // empty at the end
        fill_at = fill_at + UNIT == STAGES * UNIT ? 0 : fill_at + UNIT;
    };
    ROLLED for (int s = 0; s < STAGES; ++s) fetch();

    if (PER_BLOCK > 1 && thread() < 4) store4(none + thread() * 16, {0, 0, 0, 0});
    copy_wait<STAGES>();
    each_piece([](u8* piece, int, int) { store4(piece, reorder_inputs(load4(piece))); });
    sync_block();

    // The columns of this lane: where they begin in a block, and the distance to the next block.
    const u8* column[TILES];
    int step[TILES], piece_offset[PIECES];                 // its rows have equal parity
    UNROLL for (int h = 0; h < PIECES; ++h) piece_offset[h] = swizzle(ROWS == 1 ? 0 : g / PER_BLOCK, t, h) - t * PIECES * 16;
    UNROLL for (int c = 0; c < TILES; ++c) {
        const int row = (c * 8 + g) / PER_BLOCK;
        const bool own = (c * 8 + g) % PER_BLOCK == t * PER_BLOCK / 4;
        column[c] = own ? shared() + (row < p.rows ? row * X_ROW : 0) + t * PIECES * 16 : none;   // clamped past the last row
        step[c] = own ? X_BLOCK : 0;
    }
    if (OFFSET) {
        // Minus the sum of each column, times 16 + 8 if all zeros are 8.
        const u32 one = ZEROS ? (BF16 ? 0xBF80BF80 : 0xBC00BC00) : (BF16 ? 0xC1C0C1C0 : 0xCE00CE00);
        const u32 all[4] = {one, one, one, one};
        ROLLED for (int block = warp(); block < span; block += WARPS)
            UNROLL for (int c = 0; c < TILES; ++c) {
                float d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
                UNROLL for (int h = 0; h < PIECES; ++h) {
                    const Four b = load4(column[c] + block * step[c] + piece_offset[h]);
                    const u32 first[2] = {b.x, b.y}, second[2] = {b.z, b.w};
                    mma<BF16>(d[0], all, first);
                    mma<BF16>(d[1], all, second);
                }
                if (g == 0) UNROLL for (int e = 0; e < 2; ++e)
                    sums_x[((block * TILES + c) * 4 + t) * 2 + e] = d[0][e] + d[1][e];
            }
        sync_block();
    }

    constexpr int LANE_SUMS = PER_BLOCK == 1 ? 4 : 2;      // sums per lane, tile of columns and 16 rows
    float sum[TILES][TALL][LANE_SUMS];
    UNROLL for (int c = 0; c < TILES; ++c) UNROLL for (int v = 0; v < TALL; ++v)
        UNROLL for (int e = 0; e < LANE_SUMS; ++e) sum[c][v][e] = 0;
    UNROLL for (int c = 0; c < TILES; ++c) column[c] += first_block * step[c];
    u32 nan[LINES];                                        // fp8: a byte's highest bit is set if a code was NaN
    UNROLL for (int r = 0; r < LINES; ++r) nan[r] = 0;
    const u8* scale_at[LINES];
    const u8* zero_at[LINES];
    int read_at = 0, read_line = 0;

    auto begin = [&](int tile) {                           // finds the scales of a tile
        sync_warp();                                       // make other lanes' copies visible
        UNROLL for (int r = 0; r < LINES; ++r) {
            const u32 at = u32(minimum(tile * HEIGHT + r * 8 + g, p.n - 1)) * p.groups + first_group;
            const u8* const here = lines + (read_line * HEIGHT + r * 8 + g) * line;
            scale_at[r] = here + at % (16 / sizeof(Scale)) * sizeof(Scale);
            zero_at[r] = here + scale_line + at % 16;
        }
        read_line = read_line + 1 == p.tiles_ahead ? 0 : read_line + 1;
    };
    auto compute = [&](int block) {                        // also starts the next copy
        int group[2];                                      // index into the tile's scales
        UNROLL for (int s = 0; s < SCALES_OF_LANE; ++s) {
            if (GROUP == 0) group[s] = 0;
            else if (PER_BLOCK == 1) group[s] = (from + block) / LONG - first_group;
            else group[s] = minimum(block * PER_BLOCK + (PER_BLOCK == 4 ? (t & 1) * 2 : 0) + s,
                                  p.groups - 1 - first_group);
        }
        float d[TILES * CHAINS][TALL][4];
        UNROLL for (int c = 0; c < TILES * CHAINS; ++c) UNROLL for (int v = 0; v < TALL; ++v)
            UNROLL for (int e = 0; e < 4; ++e) {
                d[c][v][e] = 0;
                if (OFFSET && c < TILES) {
                    d[c][v][e] = sums_x[(((first_block + block) * TILES + c) * 4 + t) * 2 + (e & 1)];
                    if (ZEROS) d[c][v][e] *= (INT4 ? 16 : 0) + float(*reinterpret_cast<const Zero*>(
                        zero_at[v * 2 + e / 2] + group[SCALES_OF_LANE == 1 ? 0 : e & 1]));
                }
            }
        u32 codes[LINES][4];
        UNROLL for (int r = 0; r < LINES; ++r) {
            const Four here = load4(ring + read_at + r * 512);
            codes[r][0] = here.x, codes[r][1] = here.y, codes[r][2] = here.z, codes[r][3] = here.w;
            if (FP8) UNROLL for (int w = 0; w < 4; ++w) nan[r] |= (codes[r][w] & 0x7F7F7F7F) + 0x01010101;
        }
        UNROLL for (int h = 0; h < PIECES; ++h) UNROLL for (int c = 0; c < TILES; ++c) {
            const Four b = load4(column[c] + piece_offset[h]);
            const u32 first[2] = {b.x, b.y}, second[2] = {b.z, b.w};
            const int word = INT4 ? h : 2 * h, then = INT4 ? h : 2 * h + 1;
            UNROLL for (int v = 0; v < TALL; ++v) {
                const auto &low = codes[2 * v], &high = codes[2 * v + 1];
                multiply(d[c][v], low[word], high[word], first, 0, p.exponent, p.sign);
                multiply(d[c + TILES * (CHAINS - 1)][v], low[then], high[then], second, 2, p.exponent, p.sign);
            }
        }
        float scale[LINES][2];
        UNROLL for (int r = 0; r < LINES; ++r) UNROLL for (int s = 0; s < SCALES_OF_LANE; ++s)
            scale[r][s] = GROUP == 0 ? 1.0f : scale_to_float(reinterpret_cast<const Scale*>(scale_at[r])[group[s]]);
        fetch();                                           // before the MMAs are waited for
        read_at = read_at + UNIT == STAGES * UNIT ? 0 : read_at + UNIT;
        UNROLL for (int c = 0; c < TILES; ++c) {
            column[c] += step[c];
            UNROLL for (int v = 0; v < TALL; ++v) UNROLL for (int e = 0; e < 4; ++e)
                sum[c][v][LANE_SUMS == 4 ? e : e / 2] += scale[v * 2 + e / 2][SCALES_OF_LANE == 1 ? 0 : e & 1]
                    * (CHAINS == 1 ? d[c][v][e] : d[c][v][e] + d[c + TILES * (CHAINS - 1)][v][e]);
        }
    };
    auto keep = [&](float* to) {                           // stores the sums of a tile
        UNROLL for (int r = 0; r < LINES && FP8; ++r) {
            nan[r] |= shuffle_xor(nan[r], 1);
            nan[r] |= shuffle_xor(nan[r], 2);
        }
        UNROLL for (int c = 0; c < TILES; ++c) {
            column[c] -= count * step[c];
            UNROLL for (int v = 0; v < TALL; ++v) UNROLL for (int e = 0; e < LANE_SUMS; ++e) {
                const int r = v * 2 + e / (LANE_SUMS / 2);
                float value = sum[c][v][e];
                sum[c][v][e] = 0;
                if (FP8 && nan[r] & 0x80808080) value = bits_float(0x7FC00000);
                if (PER_BLOCK == 4) value += shuffle_xor(value, 1);
                const int m = PER_BLOCK == 1 ? c * 8 + 2 * t + (e & 1) : PER_BLOCK == 2 ? c * 4 + t : c * 2 + t / 2;
                if (m < ROWS) to[(v * ROWS + m) * COLUMN + r % 2 * 8 + g] = value;
            }
        }
        UNROLL for (int r = 0; r < LINES; ++r) nan[r] = 0;
    };

    constexpr int TOGETHER = THREADS / PLACES;             // rows of x at a time
    const int at = thread() % PLACES, slot_here = at / HEIGHT, down = at % HEIGHT, first_m = thread() / PLACES;
    int left = (tiles - cluster + clusters - 1) / clusters;
    ROLLED for (int first_tile = cluster; left > 0; first_tile += SLOTS * clusters, left -= SLOTS) {
        const int row = (first_tile + slot_here * clusters) * HEIGHT + down;
        const bool wanted = slot_here < left && row < p.n && first_m < TOGETHER;
        Scale scale = 0;                                   // loaded long before it is needed, as is the bias
        u16 bias = 0;
        if (wanted && GROUP == 0) scale = static_cast<const Scale*>(p.scales)[row];
        if (wanted && p.bias) bias = p.bias[row];
        auto finish = [&](int m, float total) {
            if (FP8 && !BF16) total *= 256;
            if (GROUP == 0) total *= scale_to_float(scale);
            p.out[i64(m) * p.n + row] = from_float<BF16>(total + to_float<BF16>(bias));
        };

        ROLLED for (int slot = team; slot < minimum(left, SLOTS); slot += TEAMS) {
            ROLLED for (int block = 0; block < count; ++block) {
                copy_wait<STAGES - 1>();
                if (block == 0 && (GROUP != 0 || ZEROS)) begin(first_tile + slot * clusters);
                compute(block);
            }
            keep(parts + slot * SLOT + part * PART);
        }
        sync_block();
        if (wanted) ROLLED for (int m = first_m; m < p.rows; m += TOGETHER) {
            float total = 0;
            UNROLL for (int w = 0; w < PARTS; ++w)
                total += parts[slot_here * SLOT + w * PART + (down / 16 * ROWS + m) * COLUMN + down % 16];
            if (SPLIT > 1) totals[m * PLACES + at] = total; else finish(m, total);
        }
        if (SPLIT > 1) {
            sync_cluster();
            if (wanted && slot_here % SPLIT == rank) ROLLED for (int m = first_m; m < p.rows; m += TOGETHER) {
                float total = 0;
                UNROLL for (int other = 0; other < SPLIT; ++other)
                    total += cluster_read(&totals[m * PLACES + at], other);
                finish(m, total);
            }
            if (left > SLOTS) sync_cluster(); else leave_cluster();
        } else if (left > SLOTS) sync_block();
    }
}

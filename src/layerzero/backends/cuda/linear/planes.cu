// int4 codes times one row of x on the integer tensor cores: codes are masked, not converted to
// floats.
//
// x is converted to integers first: a warp scales its inputs by a power of two so that the largest
// has 30 bits, rounds them, and splits each into four signed bytes, the planes. A plane is a column
// of the MMA. Sums of codes times a plane are exact; the rounding error of x is less than 2^-30 of
// the warp's largest input.
//
// In a word of eight codes the low nibbles are one operand and the high ones, times 16, another.
// Their sums are combined as 16 low + high in the mantissa of a float (1.5 x 2^23 + sum), which
// needs no conversion. The offset of the codes, 8 (or the zero) times the sum of a plane, is
// subtracted there, exactly.
//
// A warp has COUNT pairs of blocks of 128 inputs, whose planes stay in its registers, and loops
// over tiles of 16 rows of the weight. Four planes do not fill eight columns: the second block of a
// pair has its own columns, and both blocks' sums come out of one chain of MMAs. Two pairs of
// blocks are being loaded at any time. The warps' sums of a tile are kept until there are SLOTS
// tiles, and then added up, always in the same order.
//
// Macros: BF16, GROUP (0: a row of the weight has one scale; or a multiple of 128), ZEROS, SCALES
// (0: float32, 1: bfloat16, 2: float16), WARPS, COUNT (1 or 2), SPLIT (thread blocks of a cluster
// that split the inputs), WHOLE (the warps' pairs cover the row exactly), SLOTS, BLOCKS (minimum
// thread blocks per multiprocessor).
#include "device.h"

struct Params {
    const u16* x;
    const u8* weight;
    const void* scales;
    const u8* zeros;
    const u16* bias;
    u16* out;
    i32 n, k, groups;
};

constexpr int DEPTH = 2, TURNS = DEPTH / COUNT;            // pairs in flight, and the tiles they belong to
constexpr int LONG = GROUP > 128 ? GROUP / 128 : 1;        // blocks per group
constexpr int PITCH = WARPS > 8 ? 20 : WARPS > 4 ? 12 : 4; // floats per row of the weight, chosen for few bank conflicts
constexpr int PLACES = SLOTS * 16;
constexpr u32 MAGIC = 0x4B400000;                          // 1.5 x 2^23
static_assert(GROUP % 128 == 0 && WARPS <= PITCH, "a block has one scale, and each warp a slot");
static_assert(DEPTH % COUNT == 0 && SLOTS % TURNS == 0, "rounds are complete");

struct Stage {
    u32 code[2][2][4];                                     // block, row, word
    u32 scale[2], zero[2];
};

#if SCALES == 0
typedef u32 Scale;
FN u32 load_scale(const Scale* from) { return load_once(from); }
FN float scale_to_float(u32 v) { return bits_float(v); }
#else
typedef u16 Scale;
FN u32 load_scale(const Scale* from) { return *from; }
FN float scale_to_float(u32 v) { return to_float<SCALES == 1>(u16(v)); }
#endif

FN int minimum(int a, int b) { return a < b ? a : b; }

// Transposes the bytes of four integers: plane[0] has their lowest bytes, and so on.
FN void transpose_bytes(u32 (&plane)[4], u32 a, u32 b, u32 c, u32 d) {
    const u32 first = permute_bytes(a, b, 0x5140), second = permute_bytes(c, d, 0x5140);
    const u32 third = permute_bytes(a, b, 0x7362), fourth = permute_bytes(c, d, 0x7362);
    plane[0] = permute_bytes(first, second, 0x5410);
    plane[1] = permute_bytes(first, second, 0x7632);
    plane[2] = permute_bytes(third, fourth, 0x5410);
    plane[3] = permute_bytes(third, fourth, 0x7632);
}

#define BOUNDS WARPS * 32, BLOCKS
KERNEL(planes, Params, BOUNDS)
{
    const int g = lane() >> 2, t = lane() & 3;
    const int rank = SPLIT > 1 ? cluster_rank() : 0, cluster = block_x() / SPLIT, clusters = grid_x() / SPLIT;
    const int tiles = (p.n + 15) >> 4, first_pair = (rank * WARPS + warp()) * COUNT;
    const u32 row_bytes = u32(p.k) >> 1;
    const Scale* const scales = static_cast<const Scale*>(p.scales);
    u8* const x_stage = shared() + warp() * COUNT * 1024;
    float* const parts = reinterpret_cast<float*>(shared() + WARPS * COUNT * 1024);
    float* const totals = parts + PLACES * PITCH;

    // x is copied first, as everything depends on it; not to registers, whose loads would be waited
    // for before the weights.
    UNROLL for (int c = 0; c < COUNT; ++c) {
        const int column = (first_pair + c) * 256 + lane() * 8;
        const bool wanted = WHOLE || column < p.k;
        copy_async(x_stage + c * 1024 + lane() * 16, p.x + (wanted ? column : 0), wanted);
    }
    copy_commit();

    Stage stage[DEPTH];
    int next = cluster;                                    // the next tile to load
    const u8* const codes = p.weight + first_pair * 128 + t * 16;
    auto fetch = [&](Stage& to, int c) {
        if (next < tiles) UNROLL for (int r = 0; r < 2; ++r) {
            const u32 row = minimum(next * 16 + r * 8 + g, p.n - 1);
            const u8* const current = codes + u64(row) * row_bytes;
            UNROLL for (int h = 0; h < 2; ++h) {
                int byte_offset = c * 128 + h * 64;        // clamped: past the end x is zero
                if (!WHOLE) byte_offset = minimum(byte_offset, int(row_bytes) - first_pair * 128 - t * 16 - 16);
                const Four v = load4_once(current + byte_offset);
                to.code[h][r][0] = v.x, to.code[h][r][1] = v.y, to.code[h][r][2] = v.z, to.code[h][r][3] = v.w;
            }
            int group = GROUP == 0 ? 0 : ((first_pair + c) * 2 + (t >> 1)) / LONG; // the group of this lane's block
            if (!WHOLE) group = minimum(group, p.groups - 1);
            if (GROUP != 0) to.scale[r] = load_scale(scales + group + u64(row) * u32(p.groups));
            if (ZEROS) to.zero[r] = p.zeros[group + u64(row) * u32(p.groups)];
        }
        if (c == COUNT - 1) next += clusters;
    };
    UNROLL for (int s = 0; s < DEPTH; ++s) fetch(stage[s], s % COUNT);
    copy_wait<0>();

    // Split x into planes. A lane's eight inputs belong to one word of codes.
    u32 top = 0;
    u32 raw_x[COUNT][4];
    UNROLL for (int c = 0; c < COUNT; ++c) {
        const Four v = load4(x_stage + c * 1024 + lane() * 16);
        raw_x[c][0] = v.x, raw_x[c][1] = v.y, raw_x[c][2] = v.z, raw_x[c][3] = v.w;
        UNROLL for (int i = 0; i < 4; ++i) {
            const u32 low = raw_x[c][i] << 16 & 0x7FFF0000, high = raw_x[c][i] & 0x7FFF0000;
            top = top > low ? top : low;
            top = top > high ? top : high;
        }
    }
    top = warp_max_bits(top);                              // all lanes have read theirs
    if (!BF16) top = top >= 0x7C000000 ? 0x7F800000 : float_bits(to_float<false>(u16(top >> 16)));
    const int exponent = top >> 23 ? top >> 23 : 1;
    const float unit = bits_float(exponent == 255 ? 0x7FC00000 : u32(exponent) << 23);         // exponent of the largest input
    const bool is_tiny = exponent < 64;                    // else the power of two would overflow
    const float to_integer = bits_float(u32(283 - exponent - (is_tiny ? 100 : 0)) << 23);
    UNROLL for (int c = 0; c < COUNT; ++c) {
        u32 q[8], even[4], odd[4];
        UNROLL for (int i = 0; i < 8; ++i) {
            float v = to_float<BF16>(u16(raw_x[c][i / 2] >> (i & 1) * 16));
            if (is_tiny) v *= 0x1p100f;
            q[i] = (u32(round_to_int(v * to_integer)) + 0x00808080) ^ 0x00808080;        // signed bytes
        }
        transpose_bytes(even, q[0], q[2], q[4], q[6]);
        transpose_bytes(odd, q[1], q[3], q[5], q[7]);
        u8* const to = x_stage + c * 1024 + (lane() >> 4) * 512 + (lane() & 15) * 8;
        UNROLL for (int j = 0; j < 4; ++j) *reinterpret_cast<u64*>(to + j * 128) = u64(odd[j]) << 32 | even[j];
    }
    sync_warp();
    const u32 magic[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, nothing[4] = {0, 0, 0, 0};
    u32 input[COUNT][2][8];                                // per block: inputs of words 0 to 3, low and high nibbles
    float offset[COUNT][2];                                // per column of this lane
    UNROLL for (int c = 0; c < COUNT; ++c) {
        const u32 one = ZEROS ? 0x10101010 : 0x80808080, all[4] = {one, one, one, one};
        u32 sums[4];
        UNROLL for (int h = 0; h < 2; ++h) UNROLL for (int i = 0; i < 4; i += 2) {
            Four b = load4(x_stage + c * 1024 + h * 512 + (g & 3) * 128 + t * 32 + i * 8);
            if (g >> 2 != h) b = {0, 0, 0, 0};
            u32* const to = input[c][h] + i * 2;
            to[0] = b.x, to[1] = b.y, to[2] = b.z, to[3] = b.w;
            if (h + i == 0) mma_u8_s8(sums, all, b.x, b.y, magic); else mma_u8_s8(sums, all, b.x, b.y, sums);
            mma_u8_s8(sums, all, b.z, b.w, sums);
        }
        UNROLL for (int e = 0; e < 2; ++e) offset[c][e] = bits_float(sums[e]) - (ZEROS ? bits_float(MAGIC) : 0.0f);
    }

    float sum[4] = {0, 0, 0, 0};
    auto compute = [&](Stage& current, int c) {               // also starts the next load before the MMAs are waited for
        u32 low[4], high[4];
        const u32 scale[2] = {current.scale[0], current.scale[1]}, zero[2] = {current.zero[0], current.zero[1]};
        UNROLL for (int h = 0; h < 2; ++h) UNROLL for (int i = 0; i < 2; ++i) {
            u32 a[4], b[4];
            UNROLL for (int j = 0; j < 4; ++j) {
                const u32 word = current.code[h][j & 1][i * 2 + (j >> 1)];
                a[j] = word & 0x0F0F0F0F;
                b[j] = word & 0xF0F0F0F0;
            }
            const u32* const x = input[c][h] + i * 4;
            if (h + i == 0) mma_u8_s8(low, a, x[0], x[2], nothing); else mma_u8_s8(low, a, x[0], x[2], low);
            if (h + i == 0) mma_u8_s8(high, b, x[1], x[3], magic); else mma_u8_s8(high, b, x[1], x[3], high);
        }
        fetch(current, c);
        UNROLL for (int e = 0; e < 4; ++e) {
            const float plane_offset = offset[c][e & 1];
            float value = bits_float(low[e] * 16 + high[e]) - (ZEROS ? bits_float(MAGIC) : plane_offset);
            if (ZEROS) value -= float(zero[e >> 1]) * plane_offset;
            sum[e] += GROUP == 0 ? value : scale_to_float(scale[e >> 1]) * value;
        }
    };
    const float factor = unit * (t & 1 ? 0x1p-9f : 0x1p-25f);                  // for plane 1 or 3
    auto keep = [&](int slot) {                            // stores the sums of a tile of 16 rows of the weight
        const float upper = (sum[0] * 0x1p-8f + sum[1]) * factor, lower = (sum[2] * 0x1p-8f + sum[3]) * factor;
        UNROLL for (int e = 0; e < 4; ++e) sum[e] = 0;
        float total = t & 1 ? lower : upper;
        total += shuffle_xor(t & 1 ? upper : lower, 1);
        total += shuffle_xor(total, 2);
        if (t < 2) parts[(slot * 16 + t * 8 + g) * PITCH + warp()] = total;
    };

    int tile = cluster;
    ROLLED for (int first_tile = tile; first_tile < tiles; first_tile = tile) {
        int tile_count = 0;                                // tiles in this round
        ROLLED while (tile_count < SLOTS && tile < tiles)
            UNROLL for (int s = 0; s < DEPTH; ++s) if (s < COUNT || tile < tiles) {
                compute(stage[s], s % COUNT);
                if (s % COUNT == COUNT - 1) {
                    keep(tile_count++);
                    tile += clusters;
                }
            }
        sync_block();
        auto finish = [&](int at, float total) {
            const int row = (first_tile + (at >> 4) * clusters) * 16 + (at & 15);
            if (row >= p.n) return;
            if (GROUP == 0) total *= scale_to_float(scales[row]);
            p.out[row] = from_float<BF16>(total + (p.bias ? to_float<BF16>(p.bias[row]) : 0.0f));
        };
        ROLLED for (int at = thread() >> 2; at < tile_count * 16; at += WARPS * 8) { // four lanes per row of the weight
            float total = 0;
            UNROLL for (int w = 0; w < WARPS; w += 4)
                if (w + 4 <= WARPS || w + t < WARPS) total += parts[at * PITCH + w + t];
            total += shuffle_xor(total, 1);
            total += shuffle_xor(total, 2);
            if (t == 0) { if (SPLIT > 1) totals[at] = total; else finish(at, total); }
        }
        if (SPLIT > 1) {
            sync_cluster();
            ROLLED for (int at = thread(); at < tile_count * 16; at += WARPS * 32) if ((at >> 4) % SPLIT == rank) {
                float total = 0;
                UNROLL for (int other = 0; other < SPLIT; ++other) total += cluster_read(&totals[at], other);
                finish(at, total);
            }
            if (tile < tiles) sync_cluster(); else leave_cluster();
        } else if (tile < tiles) sync_block();
    }
}

// int4 codes times one row of x, on the integer tensor cores: a code is not made a float, it is masked.
//
// x becomes integers first: a warp scales its inputs by a power of two so that the largest has 30 bits, rounds them,
// and takes each apart into four signed bytes, the planes. A plane is a column of the product. Sums of codes times a
// plane are exact; what is lost of x is less than 2^-30 of the largest input beside it.
//
// Of a word of eight codes the low nibbles are one operand and the high ones, times 16, another. Their sums are put
// together as 16 low + high in the mantissa of a float (1.5 x 2^23 + sum), which takes no conversion. What codes read
// too much, 8 (or the zero) times the sum of a plane, is subtracted there: exactly.
//
// A warp takes COUNT pairs of blocks of 128 inputs, whose planes stay in its registers, of one tile of 16 rows of the
// weight after the other. Four planes do not fill eight columns: the second block of a pair has columns of its own, and
// both blocks' sums come out of one chain of products. Two pairs of blocks are on their way to registers at any time.
// The warps' sums of a tile are kept until there are SLOTS tiles, and then added up, always in the same order.
//
// Macros: BF16, GROUP (0: a row of the weight has one scale; or a multiple of 128), ZEROS, SCALES (0: float32,
// 1: bfloat16, 2: float16), WARPS, COUNT (1 or 2), SPLIT (thread blocks of a cluster that share the inputs), WHOLE (the
// warps' pairs are all there is of a row), SLOTS, BLOCKS (thread blocks for each multiprocessor, at least).
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

constexpr int DEPTH = 2, TURNS = DEPTH / COUNT;            // pairs on their way, and tiles these are of
constexpr int LONG = GROUP > 128 ? GROUP / 128 : 1;        // blocks of a group
constexpr int PITCH = WARPS > 8 ? 20 : WARPS > 4 ? 12 : 4; // floats of a row of the weight: few lanes meet in a bank
constexpr int PLACES = SLOTS * 16;
constexpr u32 MAGIC = 0x4B400000;                          // 1.5 x 2^23
static_assert(GROUP % 128 == 0 && WARPS <= PITCH, "a block has one scale, and each warp a place");
static_assert(DEPTH % COUNT == 0 && SLOTS % TURNS == 0, "a round is whole");

struct Stage {
    u32 code[2][2][4];                                     // block, row, word
    u32 scale[2], zero[2];
};

#if SCALES == 0
typedef u32 Scale;
FN u32 loaded(const Scale* from) { return load_once(from); }
FN float wide(u32 v) { return bits_float(v); }
#else
typedef u16 Scale;
FN u32 loaded(const Scale* from) { return *from; }
FN float wide(u32 v) { return to_float<SCALES == 1>(u16(v)); }
#endif

FN int least(int a, int b) { return a < b ? a : b; }

// Of four integers: their lowest bytes, the next, and so on.
FN void turned(u32 (&plane)[4], u32 a, u32 b, u32 c, u32 d) {
    const u32 first = bytes_of(a, b, 0x5140), second = bytes_of(c, d, 0x5140);
    const u32 third = bytes_of(a, b, 0x7362), fourth = bytes_of(c, d, 0x7362);
    plane[0] = bytes_of(first, second, 0x5410);
    plane[1] = bytes_of(first, second, 0x7632);
    plane[2] = bytes_of(third, fourth, 0x5410);
    plane[3] = bytes_of(third, fourth, 0x7632);
}

#define BOUNDS WARPS * 32, BLOCKS
KERNEL(planes, Params, BOUNDS)
{
    const int g = lane() >> 2, t = lane() & 3;
    const int rank = SPLIT > 1 ? cluster_rank() : 0, cluster = block_x() / SPLIT, clusters = grid_x() / SPLIT;
    const int tiles = (p.n + 15) >> 4, first_pair = (rank * WARPS + warp()) * COUNT;
    const u32 row_bytes = u32(p.k) >> 1;
    const Scale* const scales = static_cast<const Scale*>(p.scales);
    u8* const staged = shared() + warp() * COUNT * 1024;
    float* const parts = reinterpret_cast<float*>(shared() + WARPS * COUNT * 1024);
    float* const totals = parts + PLACES * PITCH;

    // x goes first: nothing can begin without it. Not to registers: what waits for them must come after the weights.
    UNROLL for (int c = 0; c < COUNT; ++c) {
        const int column = (first_pair + c) * 256 + lane() * 8;
        const bool wanted = WHOLE || column < p.k;
        copy_async(staged + c * 1024 + lane() * 16, p.x + (wanted ? column : 0), wanted);
    }
    copy_commit();

    Stage stage[DEPTH];
    int next = cluster;                                    // the tile to ask for
    const u8* const codes = p.weight + first_pair * 128 + t * 16;
    auto fetch = [&](Stage& to, int c) {
        if (next < tiles) UNROLL for (int r = 0; r < 2; ++r) {
            const u32 row = least(next * 16 + r * 8 + g, p.n - 1);
            const u8* const here = codes + u64(row) * row_bytes;
            UNROLL for (int h = 0; h < 2; ++h) {
                int ahead = c * 128 + h * 64;              // past the end x is zero
                if (!WHOLE) ahead = least(ahead, int(row_bytes) - first_pair * 128 - t * 16 - 16);
                const Four v = load4_once(here + ahead);
                to.code[h][r][0] = v.x, to.code[h][r][1] = v.y, to.code[h][r][2] = v.z, to.code[h][r][3] = v.w;
            }
            int group = GROUP == 0 ? 0 : ((first_pair + c) * 2 + (t >> 1)) / LONG; // of the block its columns are of
            if (!WHOLE) group = least(group, p.groups - 1);
            if (GROUP != 0) to.scale[r] = loaded(scales + group + u64(row) * u32(p.groups));
            if (ZEROS) to.zero[r] = p.zeros[group + u64(row) * u32(p.groups)];
        }
        if (c == COUNT - 1) next += clusters;
    };
    UNROLL for (int s = 0; s < DEPTH; ++s) fetch(stage[s], s % COUNT);
    copy_wait<0>();

    // x in planes. The lane that read eight inputs has those of one word of codes.
    u32 top = 0;
    u32 given[COUNT][4];
    UNROLL for (int c = 0; c < COUNT; ++c) {
        const Four v = load4(staged + c * 1024 + lane() * 16);
        given[c][0] = v.x, given[c][1] = v.y, given[c][2] = v.z, given[c][3] = v.w;
        UNROLL for (int i = 0; i < 4; ++i) {
            const u32 low = given[c][i] << 16 & 0x7FFF0000, high = given[c][i] & 0x7FFF0000;
            top = top > low ? top : low;
            top = top > high ? top : high;
        }
    }
    top = warp_max_bits(top);                              // now all have read theirs
    if (!BF16) top = top >= 0x7C000000 ? 0x7F800000 : float_bits(to_float<false>(u16(top >> 16)));
    const int exponent = top >> 23 ? top >> 23 : 1;
    const float unit = bits_float(exponent == 255 ? 0x7FC00000 : u32(exponent) << 23);         // what the largest has
    const bool small = exponent < 64;                      // or the power of two is none
    const float raise = bits_float(u32(283 - exponent - (small ? 100 : 0)) << 23);
    UNROLL for (int c = 0; c < COUNT; ++c) {
        u32 q[8], even[4], odd[4];
        UNROLL for (int i = 0; i < 8; ++i) {
            float v = to_float<BF16>(u16(given[c][i / 2] >> (i & 1) * 16));
            if (small) v *= 0x1p100f;
            q[i] = (u32(nearest(v * raise)) + 0x00808080) ^ 0x00808080;        // bytes with signs
        }
        turned(even, q[0], q[2], q[4], q[6]);
        turned(odd, q[1], q[3], q[5], q[7]);
        u8* const to = staged + c * 1024 + (lane() >> 4) * 512 + (lane() & 15) * 8;
        UNROLL for (int j = 0; j < 4; ++j) *reinterpret_cast<u64*>(to + j * 128) = u64(odd[j]) << 32 | even[j];
    }
    sync_warp();
    const u32 magic[4] = {MAGIC, MAGIC, MAGIC, MAGIC}, nothing[4] = {0, 0, 0, 0};
    u32 input[COUNT][2][8];                                // of a block: those of words 0 to 3, low and high nibbles
    float offset[COUNT][2];                                // of this lane's two columns
    UNROLL for (int c = 0; c < COUNT; ++c) {
        const u32 one = ZEROS ? 0x10101010 : 0x80808080, all[4] = {one, one, one, one};
        u32 sums[4];
        UNROLL for (int h = 0; h < 2; ++h) UNROLL for (int i = 0; i < 4; i += 2) {
            Four b = load4(staged + c * 1024 + h * 512 + (g & 3) * 128 + t * 32 + i * 8);
            if (g >> 2 != h) b = {0, 0, 0, 0};
            u32* const to = input[c][h] + i * 2;
            to[0] = b.x, to[1] = b.y, to[2] = b.z, to[3] = b.w;
            if (h + i == 0) mma_codes(sums, all, b.x, b.y, magic); else mma_codes(sums, all, b.x, b.y, sums);
            mma_codes(sums, all, b.z, b.w, sums);
        }
        UNROLL for (int e = 0; e < 2; ++e) offset[c][e] = bits_float(sums[e]) - (ZEROS ? bits_float(MAGIC) : 0.0f);
    }

    float sum[4] = {0, 0, 0, 0};
    auto compute = [&](Stage& here, int c) {               // and asks for what comes next, before it waits for products
        u32 low[4], high[4];
        const u32 scale[2] = {here.scale[0], here.scale[1]}, zero[2] = {here.zero[0], here.zero[1]};
        UNROLL for (int h = 0; h < 2; ++h) UNROLL for (int i = 0; i < 2; ++i) {
            u32 a[4], b[4];
            UNROLL for (int j = 0; j < 4; ++j) {
                const u32 word = here.code[h][j & 1][i * 2 + (j >> 1)];
                a[j] = word & 0x0F0F0F0F;
                b[j] = word & 0xF0F0F0F0;
            }
            const u32* const x = input[c][h] + i * 4;
            if (h + i == 0) mma_codes(low, a, x[0], x[2], nothing); else mma_codes(low, a, x[0], x[2], low);
            if (h + i == 0) mma_codes(high, b, x[1], x[3], magic); else mma_codes(high, b, x[1], x[3], high);
        }
        fetch(here, c);
        UNROLL for (int e = 0; e < 4; ++e) {
            const float less = offset[c][e & 1];
            float value = bits_float(low[e] * 16 + high[e]) - (ZEROS ? bits_float(MAGIC) : less);
            if (ZEROS) value -= float(zero[e >> 1]) * less;
            sum[e] += GROUP == 0 ? value : wide(scale[e >> 1]) * value;
        }
    };
    const float factor = unit * (t & 1 ? 0x1p-9f : 0x1p-25f);                  // of plane 1 or 3
    auto keep = [&](int slot) {                            // the sums of a tile: of 16 rows of the weight
        const float upper = (sum[0] * 0x1p-8f + sum[1]) * factor, lower = (sum[2] * 0x1p-8f + sum[3]) * factor;
        UNROLL for (int e = 0; e < 4; ++e) sum[e] = 0;
        float total = t & 1 ? lower : upper;
        total += shuffle_xor(t & 1 ? upper : lower, 1);
        total += shuffle_xor(total, 2);
        if (t < 2) parts[(slot * 16 + t * 8 + g) * PITCH + warp()] = total;
    };

    int tile = cluster;
    ROLLED for (int first_tile = tile; first_tile < tiles; first_tile = tile) {
        int many = 0;                                      // tiles of this round
        ROLLED while (many < SLOTS && tile < tiles)
            UNROLL for (int s = 0; s < DEPTH; ++s) if (s < COUNT || tile < tiles) {
                compute(stage[s], s % COUNT);
                if (s % COUNT == COUNT - 1) {
                    keep(many++);
                    tile += clusters;
                }
            }
        sync_block();
        auto finish = [&](int at, float total) {
            const int row = (first_tile + (at >> 4) * clusters) * 16 + (at & 15);
            if (row >= p.n) return;
            if (GROUP == 0) total *= wide(scales[row]);
            p.out[row] = from_float<BF16>(total + (p.bias ? to_float<BF16>(p.bias[row]) : 0.0f));
        };
        ROLLED for (int at = thread() >> 2; at < many * 16; at += WARPS * 8) { // four lanes for a row of the weight
            float total = 0;
            UNROLL for (int w = 0; w < WARPS; w += 4)
                if (w + 4 <= WARPS || w + t < WARPS) total += parts[at * PITCH + w + t];
            total += shuffle_xor(total, 1);
            total += shuffle_xor(total, 2);
            if (t == 0) { if (SPLIT > 1) totals[at] = total; else finish(at, total); }
        }
        if (SPLIT > 1) {
            sync_cluster();
            ROLLED for (int at = thread(); at < many * 16; at += WARPS * 32) if ((at >> 4) % SPLIT == rank) {
                float total = 0;
                UNROLL for (int other = 0; other < SPLIT; ++other) total += cluster_read(&totals[at], other);
                finish(at, total);
            }
            if (tile < tiles) sync_cluster(); else leave_cluster();
        } else if (tile < tiles) sync_block();
    }
}

// What grouped.cu and cascade.cu share: items and the keys that their queries see, how the partial
// results of a block's warps are combined, and how a row of the result is stored. Macros: BF16, DIM,
// WARPS, COLS. Include device.h, combine.h and tiles.h first.
#pragma once

struct Item {                          // queries [first, first + n) see keys of [start, end)
    i32 first, n, start, end;
    i32 diagonal;                                  // the key that is aligned with the first query
};

struct Range { i32 begin, end; };

constexpr int KEYS = 16;                           // of an MMA tile
constexpr int THREADS = WARPS * 32;
constexpr int UNITS = DIM / 8;                     // of 16 bytes per row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies together
constexpr int MOST = WARPS * COLS * 8;             // columns of a block
typedef Combine<COLS * 8, DIM> Part;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(MOST <= THREADS, "a thread for each column");
constexpr float ENOUGH = 8.0f;                     // rescale only if a weight would exceed 2^8
constexpr int FAR = 1 << 30;                       // past all keys

template <int N> struct Tiles { static constexpr int value = N; };

FN int least(int a, int b) { return a < b ? a : b; }
FN int most(int a, int b) { return a > b ? a : b; }

// The keys that query i sees.
template <typename Params> FN Range keys_of(const Params& p, const Item& item, int i) {
    return Range{most(item.start, item.diagonal + i - p.left), least(item.end, item.diagonal + i + p.right + 1)};
}

// This warp's part, over the ring of keys, which all warps have read.
FN void store_part(const float (&best)[COLS][2], const float (&total)[COLS][2], const float (&acc)[COLS][DIM / 16][4],
                   int warp_tiles) {
    const int g = lane() / 4, t = lane() % 4;
    u8* const part = shared() + warp() * Part::PART;
    UNROLL for (int c = 0; c < COLS; ++c)
        UNROLL for (int e = 0; e < 2; ++e) {
            const int row = c * 8 + 2 * t + e;
            float sum = total[c][e];
            UNROLL for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
            if (c < warp_tiles) {
                float* to = row_of(part, row, Part::PITCH) + g;
                UNROLL for (int n = 0; n < DIM / 16; ++n) {
                    to[n * 16] = acc[c][n][e];
                    to[n * 16 + 8] = acc[c][n][e + 2];
                }
                if (g == 0) *max_sum_of(part, row, COLS * 8, Part::PITCH) = Float2{best[c][e], sum};
            }
        }
}

// Adds up what the warps with one group of columns made of their keys, and stores the parts of the
// block's `used` columns; part_of(column) is where one goes. Warps are key_sets times row_groups.
template <typename PartOf>
FN void combine_parts(int used, int warp_tiles, int row_groups, int key_sets, float* parts, Float2* stats_of_parts,
                      PartOf part_of) {
    ROLLED for (int n = thread(); n < used * Part::QUADS; n += THREADS) {
        const int at = n / Part::QUADS, quad = n % Part::QUADS, group = at / (warp_tiles * 8);
        const int row = at - group * warp_tiles * 8;
        float top = NONE, sum = 0, out[4] = {0, 0, 0, 0};
        ROLLED for (int set = 0; set < key_sets; ++set) {
            u8* const from = shared() + (set * row_groups + group) * Part::PART;
            const Float2 stats = *max_sum_of(from, row, COLS * 8, Part::PITCH);
            const Four values = load4(row_of(from, row, Part::PITCH) + quad * 4);
            const float higher = fmaxf(top, stats.x), old = fast_exp2(top - higher), share = fast_exp2(stats.x - higher);
            top = higher;
            sum = sum * old + stats.y * share;
            out[0] = out[0] * old + bits_float(values.x) * share;
            out[1] = out[1] * old + bits_float(values.y) * share;
            out[2] = out[2] * old + bits_float(values.z) * share;
            out[3] = out[3] * old + bits_float(values.w) * share;
        }
        const i64 to = part_of(at);
        store4(parts + to * DIM + quad * 4, to_four(out));
        if (quad == 0) stats_of_parts[to] = Float2{top, sum};
    }
}

constexpr int QUADS = DIM / 4, PER_LANE = (QUADS + 31) / 32;                   // of a row that a warp merges

// A row of the result, divided by its sum, and its log-sum-exp unless `lse` is null.
FN void store_row(const float (&out)[PER_LANE][4], float top, float sum, u16* to_row, float* lse) {
    const float by = sum > 0 ? reciprocal(sum) : 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; ++i)
        if (i * 32 + lane() < QUADS) {
            u32* to = (u32*)(to_row + (i * 32 + lane()) * 4);
            to[0] = pack2<BF16>(out[i][0] * by, out[i][1] * by);
            to[1] = pack2<BF16>(out[i][2] * by, out[i][3] * by);
        }
    if (lse && lane() == 0) *lse = sum > 0 ? (top + fast_log2(sum)) * 0.6931471805599453f : -bits_float(0x7F800000);
}

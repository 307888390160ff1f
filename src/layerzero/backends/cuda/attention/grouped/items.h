// What grouped.cu and cascade.cu share: items, the keys that their queries see, the sizes of
// tiles, and what a block stores of its rows. Macros: DIM, WARPS, COLS. Include device.h, combine.h and tiles.h first.
#pragma once

struct Item {                          // queries [first, first + n) see keys of [start, end)
    i32 first, n, start, end;
    i32 diagonal;                                  // the key that is aligned with the first query
};

struct Range { i32 begin, end; };
struct WarpRow { int warp, row; };                 // of a column: which warp has its part, and in which row of that

constexpr int KEYS = 16;                           // of an MMA tile
constexpr int THREADS = WARPS * 32;
constexpr int UNITS = DIM / 8;                     // of 16 bytes per row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies together
constexpr int MAX_COLUMNS = WARPS * COLS * 8;      // columns of a block
typedef Combine<COLS * 8, DIM> Part;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(MAX_COLUMNS <= THREADS, "a thread for each column");
constexpr float ENOUGH = 8.0f;                     // rescale only if a weight would exceed 2^8
constexpr int PAST_KEYS = 1 << 30;                 // past all keys

template <int N> struct Tiles { static constexpr int value = N; };

FN int min_int(int a, int b) { return a < b ? a : b; }
FN int max_int(int a, int b) { return a > b ? a : b; }

// The keys that query i sees.
template <typename Params> FN Range keys_of(const Params& p, const Item& item, int i) {
    return Range{max_int(item.start, item.diagonal + i - p.left), min_int(item.end, item.diagonal + i + p.right + 1)};
}

// All warps have stored their parts. `warp_row` says for a column which warp has it, and in which row of its
// part; each `next_set` warps further another set of keys follows. These are added up here and stored for `merge`.
// `index` says where.
template <typename Workspace, typename WarpRowOf, typename IndexOf>
FN void store_parts(const Workspace& workspace, u8* parts, int used, int next_set, WarpRowOf warp_row, IndexOf index) {
    sync_block();
    ROLLED for (int n = thread(); n < used * Part::QUADS; n += THREADS) {
        const int at = n / Part::QUADS, quad = n % Part::QUADS;
        const WarpRow place = warp_row(at);
        float top = NONE, sum = 0, out[4] = {0, 0, 0, 0};
        ROLLED for (int from_warp = place.warp; from_warp < WARPS; from_warp += next_set) {
            u8* const from = parts + from_warp * Part::PART;
            const Float2 stats = *max_sum_of(from, place.row, COLS * 8, Part::PITCH);
            const Four values = load4(row_of(from, place.row, Part::PITCH) + quad * 4);
            const float higher = fmaxf(top, stats.x), old = fast_exp2(top - higher), share = fast_exp2(stats.x - higher);
            top = higher;
            sum = sum * old + stats.y * share;
            out[0] = out[0] * old + bits_float(values.x) * share;
            out[1] = out[1] * old + bits_float(values.y) * share;
            out[2] = out[2] * old + bits_float(values.z) * share;
            out[3] = out[3] * old + bits_float(values.w) * share;
        }
        const i64 to = index(at);
        store4(workspace.parts + to * DIM + quad * 4, to_four(out));
        if (quad == 0) workspace.stats[to] = Float2{top, sum};
    }
}

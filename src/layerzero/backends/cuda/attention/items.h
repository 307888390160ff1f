// What grouped.cu and cascade.cu share: items, the keys that their queries see, and the sizes of
// tiles. Macros: DIM, WARPS, COLS. Include device.h, combine.h and tiles.h first.
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

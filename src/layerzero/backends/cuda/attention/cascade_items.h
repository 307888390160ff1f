// What cascade.cu keeps of items, units and its workspace. Macros: those of cascade.cu. Include
// device.h and combine.h first.
#pragma once

struct Params {
    const u16 *q, *k, *v;
    const i32* items;                              // (count, 4); without PAGE
    const i32 *table, *lengths, *starts;           // with PAGE
    u16* out;
    float* lse;                                    // or null
    float* workspace;                              // see Workspace
    i32 k_head, v_head, k_page, v_page, table_row, q_token, q_head;            // strides in elements
    // count: of items or sequences; blocks: about as many are wanted; weight: what reading a key
    // costs, in rows that it is multiplied with
    i32 kv_heads, count, max_queries, tokens, max_units, blocks, left, right, weight, max_pages;
    float scale, cap;                              // times log2(e), as exponentials are in base 2
};

struct Item {                                      // queries [first, first + n) see keys of [start, end)
    i32 first, n, start, end;
    i32 diagonal;                                  // the key that is aligned with the first query
};

struct alignas(16) Unit {                          // work of a block: `members` items over keys [begin, end)
    i32 begin, end;
    i32 row;                                       // with PAGE: the table row where the keys are
    i32 first, members;                            // in the order of items
    i32 part;                                      // of the first row, in the parts
    i32 unused[2];
};

struct alignas(16) Entry {                         // items that see much the same keys; it is cut into units
    i32 begin, end, row, first, members;           // as those of Unit
    i32 place;                                     // which of the members' places it is
    i64 cost;
};

struct Place { i32 unit, units, slot; };           // where parts of an item are: units, and which member of them it is

struct Range { i32 begin, end; };

struct Column {
    i32 low, high;                                 // keys that it sees here
    i32 token, unused;
};

constexpr int KEYS = 16;                           // of an MMA tile; a warp copies so many per stage
constexpr int THREADS = WARPS * 32, SPAN = WARPS * KEYS;
constexpr int UNITS = DIM / 8;                     // of 16 bytes per row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies together
constexpr int STEP = KEYS * DIM * 2;               // bytes of K, or of V, of a tile
constexpr int STAGE = WARPS * 2 * STEP, RING = STAGES * STAGE;
constexpr int MOST = WARPS * COLS * 8;             // rows of a unit
constexpr int PLACES = PAGE ? 2 : 1;               // of an item: the pages that it shares, and its own
typedef Combine<COLS * 8, DIM> Part;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(MOST * DIM * 2 <= STAGE, "the last stage holds the queries at first");
static_assert(WARPS * Part::PART <= RING, "parts fit into the ring");
static_assert(MOST <= THREADS, "a row for each thread");
constexpr float ENOUGH = 8.0f;                     // rescale only if a weight would exceed 2^8
constexpr int FAR = 1 << 30;                       // past all keys

template <int N> struct Tiles { static constexpr int value = N; };

FN int least(int a, int b) { return a < b ? a : b; }
FN int most(int a, int b) { return a > b ? a : b; }
FN int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Global memory between the launches.
struct Workspace {
    Unit* units;                                   // max_units
    Entry* entries;                                // PLACES of each item at most
    Place* places;                                 // PLACES of each item
    i32* order;                                    // of the items; with PAGE as they are
    i32* item_of_token;                            // or -1
    i32* unit_count;
    Float2* stats;                                 // maximum and sum of each row of the parts, for each KV head
    float* parts;                                  // DIM each
};

FN Workspace workspace_of(const Params& p) {
    Unit* const units = (Unit*)p.workspace;
    Entry* const entries = (Entry*)(units + p.max_units);
    i32* const unit_count = (i32*)(entries + PLACES * p.count);
    Place* const places = (Place*)(unit_count + 4);
    i32* const order = (i32*)(places + PLACES * p.count);
    i32* const tokens = order + p.count;
    const i64 before = (i64)p.max_units * 8 + 4 + (11 * PLACES + 1) * p.count + p.tokens;
    float* const parts = p.workspace + (before + 3) / 4 * 4;
    const i64 rows = (i64)(p.blocks / p.kv_heads + 1) * MOST + (i64)PLACES * p.count * p.max_queries * GROUP;
    return Workspace{units, entries, places, order, tokens, unit_count, (Float2*)(parts + rows * p.kv_heads * DIM), parts};
}

FN Item item_of(const Params& p, int index) {
#if PAGE
    const int first = p.starts ? p.starts[index] : index, n = p.starts ? p.starts[index + 1] - first : 1;
    const int length = p.lengths[index];
    return Item{first, least(n, p.max_queries), 0, length, length - n};
#else
    const i32* v = p.items + index * 4;            // q_start, n, k_start, m
    return Item{v[0], least(v[1], p.max_queries), v[2], v[2] + v[3], v[2] + v[3] - v[1]};
#endif
}

// The keys that query i sees.
FN Range keys_of(const Params& p, const Item& item, int i) {
    return Range{most(item.start, item.diagonal + i - p.left), least(item.end, item.diagonal + i + p.right + 1)};
}

FN Range keys_of(const Params& p, const Item& item) {
    if (item.n <= 0) return Range{0, 0};
    Range keys = {keys_of(p, item, 0).begin, keys_of(p, item, item.n - 1).end};
    if (PAGE) keys.begin = keys.begin / KEYS * KEYS;                           // a tile lies in one page
    return keys.begin < keys.end ? keys : Range{0, 0};
}

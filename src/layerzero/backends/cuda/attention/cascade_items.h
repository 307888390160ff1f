// What cascade.cu keeps of items, units and its workspace. Macros: those of cascade.cu. Include
// items.h first.
#pragma once

struct Params {
    const u16 *q, *k, *v;
    const i32 *table, *lengths, *starts;
    u16* out;
    float* lse;                                    // or null
    float* workspace;                              // see Workspace
    i32 k_head, v_head, k_page, v_page, table_row, q_token, q_head;            // strides in elements
    // count: of sequences; blocks: about as many are wanted; weight: what reading a key
    // costs, in rows that it is multiplied with
    i32 kv_heads, count, max_queries, tokens, max_units, blocks, left, right, weight, max_pages;
    float scale, cap;                              // times log2(e), as exponentials are in base 2
};

struct alignas(16) Unit {                          // work of a block: `members` items over keys [begin, end)
    i32 begin, end;
    i32 row;                                       // the table row where the keys are
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

struct Column {
    i32 low, high;                                 // keys that it sees here
    i32 token, unused;
};

constexpr int SPAN = WARPS * KEYS;                 // of a stage: a warp copies a tile
constexpr int STEP = KEYS * DIM * 2;               // bytes of K, or of V, of a tile
constexpr int STAGE = WARPS * 2 * STEP, RING = STAGES * STAGE;
constexpr int PLACES = 2;                          // of an item: the pages that it shares, and its own
static_assert(MAX_COLUMNS * DIM * 2 <= STAGE, "the last stage holds the queries at first");
static_assert(WARPS * Part::PART <= RING, "parts fit into the ring");
FN int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Global memory between the launches.
struct Workspace {
    Unit* units;                                   // max_units
    Entry* entries;                                // PLACES of each item at most
    Place* places;                                 // PLACES of each item
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
    i32* const tokens = (i32*)(places + PLACES * p.count);
    const i64 before = (i64)p.max_units * 8 + 4 + 11 * PLACES * p.count + p.tokens;
    float* const parts = p.workspace + (before + 3) / 4 * 4;
    const i64 rows = (i64)(p.blocks / p.kv_heads + 1) * MAX_COLUMNS + (i64)PLACES * p.count * p.max_queries * GROUP;
    return Workspace{units, entries, places, tokens, unit_count, (Float2*)(parts + rows * p.kv_heads * DIM), parts};
}

FN Item item_of(const Params& p, int index) {
    const int first = p.starts ? p.starts[index] : index, n = p.starts ? p.starts[index + 1] - first : 1;
    const int length = p.lengths[index];
    return Item{first, min_int(n, p.max_queries), 0, length, length - n};
}

FN Range keys_of(const Params& p, const Item& item) {
    if (item.n <= 0) return Range{0, 0};
    Range keys = {keys_of(p, item, 0).begin, keys_of(p, item, item.n - 1).end};
    keys.begin = keys.begin / KEYS * KEYS;                           // a tile lies in one page
    return keys.begin < keys.end ? keys : Range{0, 0};
}

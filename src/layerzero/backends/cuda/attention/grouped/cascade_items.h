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

struct Place { i32 unit, units, slot; };           // where parts of an item are: units, and which member of them it is

struct Column {
    i32 low, high;                                 // keys that it sees here
    i32 token, unused;
};

constexpr int HALF_STAGE = STEP * DIM * 2;         // bytes of K, or of V
constexpr int STAGE = 2 * HALF_STAGE, RING = STAGES * STAGE;
constexpr int PLACES = 2;                          // of an item: the pages that it shares, and its own
FN int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Global memory between the launches.
struct Workspace {
    Unit* units;                                   // max_units
    Place* places;                                 // PLACES of each item
    i32* item_of_token;                            // or -1
    i32* unit_count;
    Float2* stats;                                 // maximum and sum of each row of the parts, for each KV head
    float* parts;                                  // DIM each
};

FN Workspace workspace_of(const Params& p) {
    Unit* const units = (Unit*)p.workspace;
    i32* const unit_count = (i32*)(units + p.max_units);
    Place* const places = (Place*)(unit_count + 4);
    i32* const tokens = (i32*)(places + PLACES * p.count);
    const i64 before = (i64)p.max_units * 8 + 4 + 3 * PLACES * p.count + p.tokens;
    float* const parts = p.workspace + (before + 3) / 4 * 4;
    const i64 rows = (i64)(p.blocks / p.kv_heads + 1) * MAX_COLUMNS + (i64)PLACES * p.count * p.max_queries * GROUP;
    return Workspace{units, places, tokens, unit_count, (Float2*)(parts + rows * p.kv_heads * DIM), parts};
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

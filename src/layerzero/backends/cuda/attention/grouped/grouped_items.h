// What grouped.cu keeps of items and its workspace. Macros: those of grouped.cu. Include
// items.h first.
#pragma once

struct Params {
    const u16 *q, *k, *v;
    const i32* items;                              // (count, 4)
    u16* out;
    float* lse;                                    // or null
    float* workspace;                              // see Workspace
    i32 k_head, v_head, q_token, q_head;           // strides in elements
    // weight: what reading a key costs, in rows that it is multiplied with
    i32 heads, splits, count, passes, max_queries, left, right, weight;
    float scale, cap;                              // times log2(e), as exponentials are in base 2
};

struct alignas(16) Span {                          // of an item
    i32 low, high;                                 // keys that its queries see
    i32 fresh;                                     // those from here on are in no Span before it
    i32 rows;
};

struct alignas(16) Column {
    i32 low, high;                                 // keys that it sees here
    i32 token, row;                                // item * max_queries * GROUP + query * GROUP + head of the group
};

constexpr int HALF_STAGE = STEP * DIM * 2;         // bytes of K, or of V
constexpr int STAGE = 2 * HALF_STAGE, RING = STAGES * STAGE;

// Global memory between the launches: for each split the outputs and the maxima and sums of all rows
// of items, and for each pass where its splits begin.
struct Workspace {
    float* parts;
    Float2* stats;
    i32* cuts;
    int rows;                                      // of all items, for all heads
};

FN Workspace workspace_of(const Params& p) {
    const int rows = p.count * p.max_queries * p.heads;
    float* const stats = p.workspace + (i64)p.splits * rows * DIM;
    return Workspace{p.workspace, (Float2*)stats, (i32*)(stats + (i64)p.splits * rows * 2), rows};
}

// A row's index in the parts.
FN i64 part_of(const Params& p, int rows, int split, int row, int kv_head) {
    return (i64)split * rows + (row / GROUP) * p.heads + kv_head * GROUP + row % GROUP;
}

// Items of a pass: every so many, so that passes over prefixes of one sequence cost the same.
FN int index_of(const Params& p, int pass, int n) { return n * p.passes + pass; }
FN int pass_of(const Params& p, int index) { return index % p.passes; }

FN Item item_of(const Params& p, int index) {
    const i32* v = p.items + index * 4;            // q_start, n, k_start, m
    return Item{v[0], min_int(v[1], p.max_queries), v[2], v[2] + v[3], v[2] + v[3] - v[1]};
}

FN Range keys_of(const Params& p, const Item& item) {
    if (item.n <= 0) return Range{0, 0};
    const Range keys = {keys_of(p, item, 0).begin, keys_of(p, item, item.n - 1).end};
    return keys.begin < keys.end ? keys : Range{0, 0};
}

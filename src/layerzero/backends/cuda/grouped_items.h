// What grouped.cu keeps of items, pages and its workspace. Macros: those of grouped.cu. Include
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
    // weight: what reading a key costs, in rows that it is multiplied with
    i32 heads, splits, count, passes, pass_items, max_queries, batch, max_pages, left, right, weight;
    float scale, cap;                              // times log2(e), as exponentials are in base 2
};

struct alignas(16) Item {                          // queries [first, first + n) see keys of [start, end)
    i32 first, n, start, end;
    i32 diagonal;                                  // the key that is aligned with the first query
    i32 row, shift;                                // with PAGE: key x is at position x + shift of this table row
    i32 unused;
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

struct Range { i32 begin, end; };

constexpr int KEYS = 16, PAIR = 2 * KEYS;          // of an MMA tile; of the two that a warp processes together
constexpr int THREADS = WARPS * 32;
constexpr int UNITS = DIM / 8;                     // of 16 bytes per row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies together
constexpr int COPIED = STEP / WARPS;               // rows that a warp copies per stage
constexpr int HALF_STAGE = STEP * DIM * 2;         // bytes of K, or of V
constexpr int STAGE = 2 * HALF_STAGE, RING = STAGES * STAGE;
constexpr int MOST = WARPS * COLS * 8;             // columns of a block, and items of a pass
constexpr int QUERY_STAGES = (MOST * DIM * 2 + STAGE - 1) / STAGE;             // the last ones hold the queries at first
typedef Combine<COLS * 8, DIM> Part;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(COPIED >= AT_ONCE && COPIED <= KEYS && STEP % PAIR == 0, "a warp copies rows of one tile");
static_assert(WARPS * Part::PART <= RING, "parts fit into the ring");
static_assert(QUERY_STAGES < STAGES, "a stage for the first keys");
static_assert(MOST <= THREADS, "an item for each thread");
constexpr float ENOUGH = 8.0f;                     // rescale only if a weight would exceed 2^8
constexpr int FAR = 1 << 30;                       // past all keys

template <int N> struct Tiles { static constexpr int value = N; };

FN int least(int a, int b) { return a < b ? a : b; }
FN int most(int a, int b) { return a > b ? a : b; }

// Global memory between the launches: with PAGE the items, then for each split the outputs and the
// maxima and sums of all rows of items, for each pass where its splits begin, and for each sequence
// how many leading pages are those of the one before.
struct Workspace {
    Item* items;
    float* parts;
    Float2* stats;
    i32 *cuts, *common;
    int rows;                                      // of all items, for all heads
};

FN Workspace workspace_of(const Params& p) {
    const int rows = p.count * p.max_queries * p.heads;
    float* const parts = p.workspace + (PAGE ? p.count * 8 : 0);
    float* const stats = parts + (i64)p.splits * rows * DIM;
    i32* const cuts = (i32*)(stats + (i64)p.splits * rows * 2);
    return Workspace{(Item*)p.workspace, parts, (Float2*)stats, cuts, cuts + p.passes * (p.splits + 1), rows};
}

// A row's index in the parts.
FN i64 part_of(const Params& p, int rows, int split, int row, int kv_head) {
    return (i64)split * rows + (row / GROUP) * p.heads + kv_head * GROUP + row % GROUP;
}

// Items of a pass: with PAGE neighbours, which may share pages; else every so many, so that passes
// over prefixes of one sequence cost the same.
FN int index_of(const Params& p, int pass, int n) { return PAGE ? pass * p.pass_items + n : n * p.passes + pass; }
FN int pass_of(const Params& p, int index) { return PAGE ? index / p.pass_items : index % p.passes; }

FN Item item_of(const Params& p, int index) {
#if PAGE
    return ((const Item*)p.workspace)[index];
#else
    const i32* v = p.items + index * 4;            // q_start, n, k_start, m
    return Item{v[0], least(v[1], p.max_queries), v[2], v[2] + v[3], v[2] + v[3] - v[1], 0, 0, 0};
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

#if PAGE
// Two items for each sequence of a pass: the leading pages that it shares with its neighbours, and
// the rest. Runs of sequences that share pages are extended while that saves more reads.
FN Item plan(const Params& p, const Workspace& workspace, u8* room, int pass) {
    struct Sequence { i32 first, n, length, common, leader, shared, prefix, rest; };
    Sequence* const sequences = (Sequence*)room;
    constexpr int FEWEST = 64;                     // shared keys that are worth an item
    const int most_sequences = p.pass_items / 2, base = pass * most_sequences;
    const int count = least(most_sequences, p.batch - base);
    if (thread() < count) {
        const int index = base + thread(), first = p.starts ? p.starts[index] : index;
        sequences[thread()] = Sequence{first, p.starts ? p.starts[index + 1] - first : 1, p.lengths[index],
                                       workspace.common[index], 0, 0, 0, 0};
    }
    sync_block();
    if (thread() == 0) {
        int x = 0;
        ROLLED for (int leader = 0, next; leader < count; leader = next) {
            int pages = 0;
            for (next = leader + 1; next < count; ++next) {
                const int common = sequences[next].common, others = next - leader;
                const int fewer = others == 1 ? common : least(pages, common);
                if (fewer * PAGE < FEWEST || (i64)fewer * others < (i64)pages * (others - 1)) break;
                pages = fewer;
            }
            const int prefix = x;
            x += pages * PAGE;
            for (int i = leader; i < next; ++i) {
                const int rest = x;
                x += (sequences[i].length - pages * PAGE + KEYS - 1) / KEYS * KEYS;
                sequences[i].leader = base + leader, sequences[i].shared = pages * PAGE;
                sequences[i].prefix = prefix, sequences[i].rest = rest;
            }
        }
    }
    sync_block();
    if (thread() / 2 >= count) return Item{};
    const Sequence s = sequences[thread() / 2];
    const int beyond = s.length - s.n - s.shared;  // keys between the shared pages and the diagonal
    if (thread() % 2)
        return Item{s.first, s.n, s.rest, s.rest + s.length - s.shared, s.rest + beyond, base + thread() / 2,
                    s.shared - s.rest, 0};
    return Item{s.first, s.shared ? s.n : 0, s.prefix, s.prefix + s.shared, s.prefix + s.shared + beyond, s.leader,
                -s.prefix, 0};
}
#endif

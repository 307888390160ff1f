// Attention of few queries each of many items over keys that the items share, in two launches:
// each byte of K and V that several items see is read once.
//
// Keys have one coordinate: the row of the buffer, or a virtual row that `plan` gives to each page,
// the same for sequences that share it. An item's queries see ranges of it, which may overlap in
// any way. A block takes one KV head and one of `splits` ranges of about equal cost; the rows of
// all items that see a key of the range (queries times GROUP heads) are columns of MMA tiles whose
// rows are 16 keys. Warps are row groups times key subsets, by the number of columns: all warps
// copy a step of 16 keys per warp to a ring in shared memory, and each processes its keys for its
// columns. A block stores the maximum, sum and output of its columns in fp32; `merge` adds them up.
//
// Macros: BF16, DIM (of keys and values: 64, 128 or 256), GROUP (query heads per KV head), WARPS,
// STAGES, K_TOKEN and V_TOKEN (token strides), PAGE (0: K and V are buffers; else the page size, a
// multiple of 16), SOFTCAP.
#define SPLITS 1                                   // of combine.h: blocks are no clusters
#include "device.h"
#include "combine.h"
#include "tiles.h"

struct Params {
    const u16 *q, *k, *v;
    const i32* items;                              // (count, 4); without PAGE
    const i32 *table, *lengths, *starts;           // with PAGE
    u16* out;
    float* lse;                                    // or null
    float* workspace;                              // see Workspace
    i32 k_head, v_head, k_page, v_page, table_row, q_token, q_head;            // strides in elements
    // weight: what reading a key costs, in rows that it is multiplied with
    i32 heads, splits, count, pass_items, max_queries, batch, left, right, weight;
    float scale, unscale, cap;                     // times log2(e), as exponentials are in base 2
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

constexpr int KEYS = 16;                           // of a warp's MMA tile
constexpr int STEP = KEYS * WARPS;                 // keys of a stage
constexpr int THREADS = WARPS * 32;
constexpr int UNITS = DIM / 8;                     // of 16 bytes per row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies together
constexpr int HALF_STAGE = STEP * DIM * 2;         // bytes of K, or of V
constexpr int STAGE = 2 * HALF_STAGE, RING = STAGES * STAGE;
constexpr int COLS = DIM <= 128 ? 4 : 2;           // tiles of 8 columns of a warp
constexpr int MOST = WARPS * COLS * 8;             // columns of a block, and items of a pass
typedef Combine<COLS * 8, DIM> Part;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(WARPS * Part::PART <= RING, "parts fit into the ring");
static_assert(MOST * DIM * 2 <= STAGE, "queries fit into the last stage");
static_assert(MOST <= THREADS, "an item for each thread");
constexpr float ENOUGH = 8.0f;                     // rescale only if a weight would exceed 2^8
constexpr int FAR = 1 << 30;                       // past all keys

template <int N> struct Tiles { static constexpr int value = N; };

FN int least(int a, int b) { return a < b ? a : b; }
FN int most(int a, int b) { return a > b ? a : b; }

// Global memory between the launches: the items of a plan, then for each split the outputs and the
// maxima and sums of all rows of items, and for each pass where its splits begin.
struct Workspace {
    Item* items;
    float* parts;
    Float2* stats;
    i32* cuts;
    int rows;                                      // of all items, for all heads
};

FN Workspace workspace_of(const Params& p) {
    const int rows = p.count * p.max_queries * p.heads;
    float* const parts = p.workspace + (PAGE ? p.count * 8 : 0);
    float* const stats = parts + (i64)p.splits * rows * DIM;
    return Workspace{(Item*)p.workspace, parts, (Float2*)stats, (i32*)(stats + (i64)p.splits * rows * 2), rows};
}

// A row's index in the parts.
FN i64 part_of(const Params& p, int rows, int split, int row, int kv_head) {
    return (i64)split * rows + (row / GROUP) * p.heads + kv_head * GROUP + row % GROUP;
}

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

KERNEL(grouped, Params, WARPS * 32)
{
    u8* const room = shared() + RING;
    Span* const spans = (Span*)room;               // MOST
    Column* const columns = (Column*)(spans + MOST);                           // MOST
    Range* const steps = (Range*)(columns + MOST); // STAGES
    i32* const cut = (i32*)(steps + STAGES);       // begin and end of this split
    const int split = block_x(), kv_head = block_y(), pass = block_z();
    const int g = lane() / 4, t = lane() % 4, unit = lane() % UNITS, row_in_copy = lane() / UNITS;

    // The items of this pass.
    const int count = least(p.pass_items, p.count - pass * p.pass_items);
    Item item = {};
    Range keys = {0, 0};
    if (thread() < count) {
        item = item_of(p, pass * p.pass_items + thread());
        keys = keys_of(p, item);
        spans[thread()] = Span{keys.begin, keys.end, 0, keys.begin < keys.end ? item.n * GROUP : 0};
    }
    sync_block();
    if (thread() < count) {
        int fresh = keys.begin;
        ROLLED for (int n = 0; n < count; ++n) {
            const Span other = spans[n];
            if (other.low < keys.begin || (other.low == keys.begin && n < thread())) fresh = most(fresh, other.high);
        }
        spans[thread()].fresh = least(fresh, keys.end);
    }
    sync_block();

    // Cut the keys where the cost reaches split / splits of the total.
    int lowest = FAR, highest = 0;
    ROLLED for (int n = 0; n < count; ++n) {
        const Span span = spans[n];
        if (span.low < span.high) lowest = least(lowest, span.low), highest = most(highest, span.high);
    }
    lowest = highest ? lowest / KEYS * KEYS : 0;
    const int grain = (highest - lowest + THREADS * KEYS - 1) / (THREADS * KEYS) * KEYS;
    auto cost_before = [&](int x) {
        i64 cost = 0;
        ROLLED for (int n = 0; n < count; ++n) {
            const Span span = spans[n];
            const int end = least(x, span.high);
            cost += (i64)span.rows * most(end - span.low, 0) + (i64)p.weight * most(end - span.fresh, 0);
        }
        return cost;
    };
    i64* const costs = (i64*)shared();             // of the keys before each thread's grain, and of all
    const int mine = lowest + thread() * grain;
    costs[thread()] = cost_before(mine);
    if (thread() == 0) costs[THREADS] = cost_before(FAR);
    if (thread() < 2) cut[thread()] = split + thread() == p.splits ? highest : lowest;
    sync_block();
    UNROLL for (int n = 0; n < 2; ++n) {
        const i64 target = costs[THREADS] * (split + n) / p.splits, before = costs[thread()];
        const i64 after = costs[thread() + 1];
        if (before < target && target <= after && split + n < p.splits)
            cut[n] = mine + ((int)((target - before) * grain / (after - before)) + KEYS - 1) / KEYS * KEYS;
    }
    sync_block();
    const int begin = cut[0], stop = cut[1];
    const Workspace workspace = workspace_of(p);
    if (kv_head == 0 && thread() < 2 && (thread() == 0 || split + 1 == p.splits))
        workspace.cuts[pass * (p.splits + 1) + split + thread()] = cut[thread()];
    if (begin >= stop) return;

    // Steps of keys, none of which is seen by no item, are copied a few ahead.
    int x = begin, until = begin;                  // the next key; one item covers [x, until)
    int source = 0;                                // that item
    i64 page = 0;                                  // of this warp's keys in the next step
    auto seek = [&]() {
        if (x >= until) {
            int next = FAR;
            ROLLED for (int n = lane(); n < count; n += 32)
                if (spans[n].high > x) next = least(next, most(spans[n].low, x));
            x = -warp_max(-next);
            u64 furthest = 0;
            ROLLED for (int n = lane(); n < count; n += 32)
                if (spans[n].low <= x && spans[n].high > x) {
                    const u64 end = (u64)(u32)spans[n].high << 32 | (u32)n;
                    furthest = end > furthest ? end : furthest;
                }
            furthest = warp_max(furthest);
            until = (int)(furthest >> 32), source = (int)(u32)furthest;
        }
#if PAGE
        const int key = x + warp() * KEYS;
        if (key < least(until, stop)) {
            const Item from = item_of(p, pass * p.pass_items + source);
            const int position = key + from.shift;
            page = offset64(position % PAGE, 1) | (i64)p.table[offset64(from.row, p.table_row) + position / PAGE] << 32;
        }
#endif
    };
    const u16* const k = p.k + offset64(kv_head, p.k_head) + offset64(row_in_copy, K_TOKEN) + unit * 8;
    const u16* const v = p.v + offset64(kv_head, p.v_head) + offset64(row_in_copy, V_TOKEN) + unit * 8;
    const int copy_at = swizzle(warp() * KEYS + row_in_copy, unit);
    int filled = 0;
    auto fetch = [&]() {
        const int end = x < stop ? least(least(x + STEP, until), stop) : x, first = x + warp() * KEYS;
        if (thread() == 0) steps[filled] = Range{x, end};
        if (first < end) {
#if PAGE
            const i64 from = page >> 32;
            const u16* k_from = k + from * p.k_page + offset64((int)page, K_TOKEN);
            const u16* v_from = v + from * p.v_page + offset64((int)page, V_TOKEN);
#else
            const u16 *k_from = k + offset64(first, K_TOKEN), *v_from = v + offset64(first, V_TOKEN);
#endif
            const int real = end - first - row_in_copy;
            UNROLL for (int n = 0; n < KEYS; n += AT_ONCE) {
                u8* to = shared() + filled * STAGE + (copy_at ^ (n % 8 * 16)) + n * (DIM * 2);
                copy_async(to, k_from + n * K_TOKEN, n < real);
                copy_async(to + HALF_STAGE, v_from + n * V_TOKEN, n < real);
            }
        }
        filled = filled == STAGES - 1 ? 0 : filled + 1;
        if (x < stop) {
            x = end;
            seek();
        }
    };
    seek();
    ROLLED for (int n = 0; n < STAGES - 1; ++n) {
        fetch();
        copy_commit();
    }

    // Columns: rows of the items that see a key here, by descending end.
    int used = 0, column = 0;
    ROLLED for (int n = 0; n < count; ++n) {
        const Span span = spans[n];
        if (most(span.low, begin) >= least(span.high, stop)) continue;
        used += span.rows;
        if (span.high > keys.end || (span.high == keys.end && n < thread())) column += span.rows;
    }
    if (most(keys.begin, begin) < least(keys.end, stop)) {
        const int row = (pass * p.pass_items + thread()) * p.max_queries * GROUP;
        ROLLED for (int n = 0; n < item.n * GROUP; ++n) {
            const Range seen = keys_of(p, item, n / GROUP);
            columns[column + n] = Column{most(seen.begin, begin), least(seen.end, stop), item.first + n / GROUP, row + n};
        }
    }
    const int tiles = (used + 7) / 8;
    int row_groups = 1;
    while (row_groups * COLS < tiles) row_groups *= 2;
    const int warp_tiles = (tiles + row_groups - 1) / row_groups, key_sets = WARPS / row_groups;
    const int row_group = warp() % row_groups, key_set = warp() / row_groups;
    const int first_column = row_group * warp_tiles * 8;
    sync_block();
    u8* const queries = shared() + (STAGES - 1) * STAGE;                       // the stage that is filled last
    ROLLED for (int n = thread(); n < row_groups * warp_tiles * 8 * UNITS; n += THREADS) {
        const int at = n / UNITS;
        Four halves = {0, 0, 0, 0};
        if (at < used)
            halves = load4(p.q + offset64(columns[at].token, p.q_token)
                           + offset64(kv_head * GROUP + columns[at].row % GROUP, p.q_head) + n % UNITS * 8);
        store4(queries + swizzle(at, n % UNITS), halves);
    }
    // What all of this warp's columns see, and what any of them sees.
    int all_begin = 0, all_end = FAR, any_begin = FAR, any_end = 0;
    if (lane() < warp_tiles * 8 && first_column + lane() < used) {
        const Column mine = columns[first_column + lane()];
        all_begin = any_begin = mine.low, all_end = any_end = mine.high;
    }
    all_begin = warp_max(all_begin), all_end = -warp_max(-all_end);
    any_begin = -warp_max(-any_begin), any_end = warp_max(any_end);
    sync_block();
    u32 q[COLS][DIM / 16][2];
    const int query_at = swizzle(first_column + lane() % 8, lane() / 8);
    float best[COLS][2], threshold[COLS][2], total[COLS][2], acc[COLS][DIM / 16][4];
    UNROLL for (int c = 0; c < COLS; ++c) {
        UNROLL for (int n = 0; n < DIM / 16; n += 2) {
            u32 both[4] = {0, 0, 0, 0};
            if (c < warp_tiles) ldmatrix4(both, queries + c * 8 * (DIM * 2) + advance_units(query_at, 2 * n));
            q[c][n][0] = both[0];
            q[c][n][1] = both[1];
            q[c][n + 1][0] = both[2];
            q[c][n + 1][1] = both[3];
        }
        UNROLL for (int e = 0; e < 2; ++e) {
            const bool real = first_column + c * 8 + 2 * t + e < used;
            best[c][e] = real ? NONE : 0.0f;
            threshold[c][e] = real ? NONE : bits_float(0x7F800000);            // the score up to which `best` need not change
            total[c][e] = 0;
        }
        UNROLL for (int n = 0; n < DIM / 16; ++n) acc[c][n][0] = acc[c][n][1] = acc[c][n][2] = acc[c][n][3] = 0;
    }

    const int key_at = swizzle(lane() % 16, lane() / 16);
    const int value_at = swizzle(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2) + HALF_STAGE;
    const float scale = SOFTCAP ? 1.0f : p.scale, unscale = SOFTCAP ? 1.0f : p.unscale;
    auto attend = [&](auto chosen, int at, int first, int end) {
        constexpr int TILES = decltype(chosen)::value, CHAINS = TILES == 1 ? 2 : 1;
        float sums[CHAINS][TILES][4];
        UNROLL for (int i = 0; i < CHAINS; ++i)
            UNROLL for (int c = 0; c < TILES; ++c) sums[i][c][0] = sums[i][c][1] = sums[i][c][2] = sums[i][c][3] = 0;
        UNROLL for (int s = 0; s < DIM / 16; ++s) {
            u32 keys[4];
            ldmatrix4(keys, shared() + at + advance_units(key_at, 2 * s));
            UNROLL for (int c = 0; c < TILES; ++c) mma<BF16>(sums[s % CHAINS][c], keys, q[c][s]);
        }
        float scores[TILES][4];                    // keys g and g + 8, two columns each
        UNROLL for (int c = 0; c < TILES; ++c)
            UNROLL for (int n = 0; n < 4; ++n) {
                scores[c][n] = CHAINS == 2 ? sums[0][c][n] + sums[CHAINS - 1][c][n] : sums[0][c][n];
                if (SOFTCAP)                       // tanh by an exponential
                    scores[c][n] = p.cap - 2 * p.cap * reciprocal(1.0f + fast_exp2(scores[c][n] * p.scale));
            }
        if (first < all_begin || first + KEYS > least(all_end, end)) {
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int e = 0; e < 2; ++e) {
                    const int at = first_column + c * 8 + 2 * t + e;
                    const Column seen = at < used ? columns[at] : Column{0, 0, 0, 0};
                    UNROLL for (int n = e; n < 4; n += 2) {
                        const int key = first + n / 2 * 8 + g;
                        if (key < seen.low || key >= least(seen.high, end)) scores[c][n] = -bits_float(0x7F800000);
                    }
                }
        }
        bool higher = false;
        UNROLL for (int c = 0; c < TILES; ++c)
            UNROLL for (int n = 0; n < 4; ++n) higher |= scores[c][n] > threshold[c][n % 2];
        if (ballot(higher)) {                      // at the first keys, and rarely after
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int e = 0; e < 2; ++e) {
                    float top = fmaxf(scores[c][e], scores[c][e + 2]);
                    UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
                    top = fmaxf(top * scale, best[c][e]);
                    const float rescale = fast_exp2(best[c][e] - top);
                    best[c][e] = top;
                    if (first_column + c * 8 + 2 * t + e < used) threshold[c][e] = (top + ENOUGH) * unscale;
                    total[c][e] *= rescale;
                    UNROLL for (int n = 0; n < DIM / 16; ++n) {
                        acc[c][n][e] *= rescale;
                        acc[c][n][e + 2] *= rescale;
                    }
                }
        }
        u32 weights[TILES][2];
        UNROLL for (int c = 0; c < TILES; ++c) {
            float w[4];
            UNROLL for (int n = 0; n < 4; ++n) w[n] = fast_exp2(scores[c][n] * scale - best[c][n % 2]);
            total[c][0] += w[0] + w[2];
            total[c][1] += w[1] + w[3];
            weights[c][0] = transpose_8x8(pack2<BF16>(w[0], w[1]));
            weights[c][1] = transpose_8x8(pack2<BF16>(w[2], w[3]));
        }
        UNROLL for (int n = 0; n < DIM / 16; ++n) {
            u32 values[4];
            ldmatrix4_transposed(values, shared() + at + advance_units(value_at, 2 * n));
            UNROLL for (int c = 0; c < TILES; ++c) mma<BF16>(acc[c][n], values, weights[c]);
        }
    };
    ROLLED for (int stage = 0;; stage = stage == STAGES - 1 ? 0 : stage + 1) {
        copy_wait<STAGES - 2>();
        sync_block();                              // this stage has arrived, and the one before it is read
        const Range step = steps[stage];
        if (step.begin >= step.end) break;
        fetch();
        copy_commit();
        ROLLED for (int n = key_set; n < WARPS; n += key_sets) {
            const int first = step.begin + n * KEYS;
            if (first >= least(step.end, any_end)) break;
            if (first + KEYS <= any_begin) continue;
            const int at = stage * STAGE + n * KEYS * DIM * 2;
            if (warp_tiles == 1) attend(Tiles<1>(), at, first, step.end);
            else if (warp_tiles == 2) attend(Tiles<2>(), at, first, step.end);
            else attend(Tiles<COLS>(), at, first, step.end);
        }
    }

    // Each warp stores its part over the ring; then the key sets of each column are added up.
    copy_wait<0>();
    sync_block();
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
    sync_block();
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
        const i64 to = part_of(p, workspace.rows, split, columns[at].row, kv_head);
        store4(workspace.parts + to * DIM + quad * 4, to_four(out));
        if (quad == 0) workspace.stats[to] = Float2{top, sum};
    }
}

// Adds up the parts of a row: a warp for each token and head.
KERNEL(merge, Params, WARPS * 32)
{
    const int head = block_x() * WARPS + warp(), token = block_y();
    if (head >= p.heads) return;
    constexpr int QUADS = DIM / 4, PER_LANE = (QUADS + 31) / 32, AHEAD = 8;
    const Workspace workspace = workspace_of(p);
    float top = NONE, sum = 0, out[PER_LANE][4] = {};
    ROLLED for (int base = 0; base < p.count; base += 32) {
        bool here = false;
        if (base + lane() < p.count) {
            const Item item = item_of(p, base + lane());
            here = item.first <= token && token < item.first + item.n;
        }
        ROLLED for (u32 found = ballot(here); found; found &= found - 1) {
            int index = base;
            while (!(found >> (index - base) & 1)) ++index;
            const Item item = item_of(p, index);
            const Range keys = keys_of(p, item);
            const i32* cuts = workspace.cuts + index / p.pass_items * (p.splits + 1);
            const i64 row = (i64)(index * p.max_queries + token - item.first) * p.heads + head;
            ROLLED for (int first = 0; first < p.splits; first += 32) {
                const int split = first + lane();
                const bool seen = split < p.splits && most(keys.begin, cuts[split]) < least(keys.end, cuts[split + 1]);
                const Float2 stats = seen ? workspace.stats[(i64)split * workspace.rows + row] : Float2{NONE, 0};
                const u32 splits = ballot(seen);
                const float higher = fmaxf(top, warp_max(stats.x)), old = fast_exp2(top - higher);
                const float share = fast_exp2(stats.x - higher) * (seen ? 1.0f : 0.0f);
                top = higher;
                sum = sum * old + warp_sum(share * stats.y);
                UNROLL for (int n = 0; n < PER_LANE; ++n)
                    UNROLL for (int i = 0; i < 4; ++i) out[n][i] *= old;
                const int low = -warp_max(seen ? -split : -FAR), high = warp_max(seen ? split + 1 : 0);
                ROLLED for (int n = low; n < high; n += AHEAD)
                    UNROLL for (int m = 0; m < AHEAD; ++m) {
                        // where there is no part, another is read in its place and counts nothing
                        const bool real = n + m < high && splits >> (n + m - first) & 1;
                        const float weight = shuffle(share, n + m - first) * (real ? 1.0f : 0.0f);
                        const float* from = workspace.parts + ((i64)(real ? n + m : low) * workspace.rows + row) * DIM;
                        UNROLL for (int i = 0; i < PER_LANE; ++i) {
                            const Four values = load4(from + (i * 32 + lane() % QUADS) * 4);
                            out[i][0] += weight * bits_float(values.x);
                            out[i][1] += weight * bits_float(values.y);
                            out[i][2] += weight * bits_float(values.z);
                            out[i][3] += weight * bits_float(values.w);
                        }
                    }
            }
        }
    }
    const float by = sum > 0 ? reciprocal(sum) : 0.0f;
    const i64 row = (i64)token * p.heads + head;
    UNROLL for (int i = 0; i < PER_LANE; ++i)
        if (i * 32 + lane() < QUADS) {
            u32* to = (u32*)(p.out + row * DIM + (i * 32 + lane()) * 4);
            to[0] = pack2<BF16>(out[i][0] * by, out[i][1] * by);
            to[1] = pack2<BF16>(out[i][2] * by, out[i][3] * by);
        }
    if (p.lse && lane() == 0)
        p.lse[row] = sum > 0 ? (top + fast_log2(sum)) * 0.6931471805599453f : -bits_float(0x7F800000);
}

#if PAGE
// Finds the leading pages that neighbouring rows of the block table have in common, and writes two
// items for each sequence: the pages that it shares with its neighbours, and the rest. A block
// plans one pass; `pass_items` is twice the sequences of a pass.
KERNEL(plan, Params, WARPS * 32)
{
    struct Sequence { i32 begin, n, length, common, leader, shared, prefix, tail; };
    Sequence* const sequences = (Sequence*)shared();
    constexpr int FEWEST = 64;                     // shared keys that are worth a second item
    const int per = p.pass_items / 2, base = block_x() * per, count = least(per, p.batch - base);
    ROLLED for (int i = warp(); i < count; i += WARPS) {
        const int index = base + i, length = p.lengths[index];
        const int begin = p.starts ? p.starts[index] : index, n = p.starts ? p.starts[index + 1] - begin : 1;
        int common = 0;                            // leading pages that are those of the sequence before
        if (i > 0) {
            const int limit = least(length, p.lengths[index - 1]) / PAGE;
            const i32* row = p.table + offset64(index, p.table_row);
            common = limit;
            ROLLED for (int first = 0; first < limit; first += 128) {
                int differs = FAR;
                UNROLL for (int m = 96; m >= 0; m -= 32) {
                    const int at = first + m + lane();
                    if (at < limit && row[at] != row[at - p.table_row]) differs = at;
                }
                differs = -warp_max(-differs);
                if (differs < limit) {
                    common = differs;
                    break;
                }
            }
        }
        if (lane() == 0) sequences[i] = Sequence{begin, n, length, common, 0, 0, 0, 0};
    }
    sync_block();
    if (thread() == 0) {                           // runs of sequences, extended while that saves more reads
        int x = 0;
        ROLLED for (int leader = 0, next; leader < count; leader = next) {
            int shared = 0;
            ROLLED for (next = leader + 1; next < count; ++next) {
                const int others = next - leader, fewer = others == 1 ? sequences[next].common
                                                                     : least(shared, sequences[next].common);
                if (fewer * PAGE < FEWEST || (i64)fewer * others < (i64)shared * (others - 1)) break;
                shared = fewer;
            }
            const int prefix = x;
            x += shared * PAGE;
            ROLLED for (int i = leader; i < next; ++i) {
                sequences[i].leader = base + leader, sequences[i].shared = shared * PAGE;
                sequences[i].prefix = prefix, sequences[i].tail = x;
                x += (sequences[i].length - shared * PAGE + KEYS - 1) / KEYS * KEYS;
            }
        }
    }
    sync_block();
    Item* const items = workspace_of(p).items + block_x() * p.pass_items;
    ROLLED for (int i = thread(); i < per; i += THREADS) {
        const Sequence s = i < count ? sequences[i] : Sequence{};
        const int beyond = s.length - s.n - s.shared;                          // of the diagonal
        items[2 * i] = Item{s.begin, s.shared ? s.n : 0, s.prefix, s.prefix + s.shared,
                            s.prefix + s.shared + beyond, s.leader, -s.prefix, 0};
        items[2 * i + 1] = Item{s.begin, s.n, s.tail, s.tail + s.length - s.shared, s.tail + beyond, base + i,
                                s.shared - s.tail, 0};
    }
}
#endif

// Attention of few queries each of many items over keys that the items share: each byte of K and V
// that several items see is read once.
//
// An item's queries see ranges of the buffer, which may overlap in any way. A block takes one KV
// head and one of `splits` ranges of about equal cost; the rows of all items that see a key of the range
// (queries times GROUP heads) are columns of MMA tiles whose rows are 16 keys. Warps are row groups
// times key sets, by the number of columns: all warps copy STEP keys at a time to a ring in shared
// memory, and each processes its keys for its columns. A block stores the maximum, sum and output
// of its columns in fp32, and `merge` adds them up.
//
// Macros: BF16, DIM (of keys and values: 64, 128 or 256), GROUP (query heads per KV head), WARPS,
// COLS (tiles of 8 columns of a warp), STAGES, STEP (keys of a stage), K_TOKEN and V_TOKEN (token
// strides), SOFTCAP.
#define SPLITS 1                                   // of combine.h: blocks are no clusters
#include "device.h"
#include "combine.h"
#include "tiles.h"
#include "items.h"
#include "grouped_items.h"

KERNEL(grouped, Params, WARPS * 32)
{
    u8* const room = shared() + RING;
    Span* const spans = (Span*)room;               // MAX_COLUMNS
    Column* const columns = (Column*)(spans + MAX_COLUMNS);                    // MAX_COLUMNS
    Range* const steps = (Range*)(columns + MAX_COLUMNS);  // STAGES
    i32* const cut = (i32*)(steps + STAGES);       // begin and end of this split
    const int split = block_x(), kv_head = block_y(), pass = block_z();
    const int g = lane() / 4, t = lane() % 4, unit = lane() % UNITS, row_in_copy = lane() / UNITS;
    const Workspace workspace = workspace_of(p);

    // The items of this pass, one for each thread.
    const int count = (p.count - pass + p.passes - 1) / p.passes;
    const Item item = thread() < count ? item_of(p, index_of(p, pass, thread())) : Item{};
    const Range keys = keys_of(p, item);
    if (thread() < count) spans[thread()] = Span{keys.begin, keys.end, 0, keys.begin < keys.end ? item.n * GROUP : 0};
    sync_block();
    int fresh = keys.begin, lowest = PAST_KEYS, highest = 0;
    for (int n = 0; n < count; ++n) {
        const Span other = spans[n];
        if (other.low < keys.begin || (other.low == keys.begin && n < thread())) fresh = max_int(fresh, other.high);
        if (other.low < other.high) lowest = min_int(lowest, other.low), highest = max_int(highest, other.high);
    }
    sync_block();
    if (thread() < count) spans[thread()].fresh = min_int(fresh, keys.end);
    sync_block();

    // Cut the keys where the cost reaches split / splits of the total.
    lowest = highest ? lowest / KEYS * KEYS : 0;
    const int grain = (highest - lowest + THREADS * KEYS - 1) / (THREADS * KEYS) * KEYS;
    const int mine = lowest + thread() * grain;
    i64 cost = 0, all = 0;                         // of the keys before this thread's grain, and of all
    for (int n = 0; n < count; ++n) {
        const Span span = spans[n];
        const int end = min_int(mine, span.high);
        cost += (i64)span.rows * max_int(end - span.low, 0) + (i64)p.weight * max_int(end - span.fresh, 0);
        all += (i64)span.rows * (span.high - span.low) + (i64)p.weight * (span.high - span.fresh);
    }
    i64* const costs = (i64*)shared();
    costs[thread()] = cost;
    if (thread() == 0) costs[THREADS] = all;
    if (thread() < 2) cut[thread()] = split + thread() == p.splits ? highest : lowest;
    sync_block();
    UNROLL for (int n = 0; n < 2; ++n) {
        const i64 target = all * (split + n) / p.splits, after = costs[thread() + 1];
        if (cost < target && target <= after && split + n < p.splits)
            cut[n] = mine + ((int)((target - cost) * grain / (after - cost)) + KEYS - 1) / KEYS * KEYS;
    }
    sync_block();
    const int begin = cut[0], stop = cut[1];
    if (kv_head == 0 && thread() < 2 && (thread() == 0 || split + 1 == p.splits))
        workspace.cuts[pass * (p.splits + 1) + split + thread()] = cut[thread()];
    if (begin >= stop) return;

    // Steps of keys, each of which some item sees, are copied a few ahead.
    int x = begin, until = begin;                  // the next key; one item covers [x, until)
    const int copied = warp() * COPIED;
    auto seek = [&]() {
        if (x >= until) {
            int next = PAST_KEYS;
            ROLLED for (int n = lane(); n < count; n += 32)
                if (spans[n].high > x) next = min_int(next, max_int(spans[n].low, x));
            x = -warp_max(-next);
            int furthest = 0;
            ROLLED for (int n = lane(); n < count; n += 32)
                if (spans[n].low <= x && spans[n].high > x) furthest = max_int(furthest, spans[n].high);
            until = warp_max(furthest);
        }
    };
    const u16* const k = p.k + offset64(kv_head, p.k_head) + offset64(row_in_copy, K_TOKEN) + unit * 8;
    const u16* const v = p.v + offset64(kv_head, p.v_head) + offset64(row_in_copy, V_TOKEN) + unit * 8;
    const int copy_at = swizzle(copied + row_in_copy, unit);
    int filled = 0;                                // the stage that is filled next
    auto fetch = [&]() {                           // zeros past the last key of a pair of tiles
        const int end = x < stop ? min_int(min_int(x + STEP, until), stop) : x;
        if (thread() == 0) steps[filled] = Range{x, end};
        if (x + copied / PAIR * PAIR < end) {
            const u16 *k_from = k + offset64(x + copied, K_TOKEN), *v_from = v + offset64(x + copied, V_TOKEN);
            const int real = end - x - copied - row_in_copy;
            UNROLL for (int n = 0; n < COPIED; n += AT_ONCE) {
                u8* to = shared() + filled * STAGE + (copy_at ^ (n % 8 * 16)) + n * (DIM * 2);
                copy_async(to, k_from + n * K_TOKEN, n < real);
                copy_async(to + HALF_STAGE, v_from + n * V_TOKEN, n < real);
            }
        }
        copy_commit();
        filled = filled == STAGES - 1 ? 0 : filled + 1;
        if (x < stop) {
            x = end;
            seek();
        }
    };
    seek();
    ROLLED for (int n = 0; n < STAGES - QUERY_STAGES; ++n) fetch();

    // Columns: rows of the items that see a key here, by descending end.
    int used = 0, column = 0;
    for (int n = 0; n < count; ++n) {
        const Span span = spans[n];
        const int rows = max_int(span.low, begin) < min_int(span.high, stop) ? span.rows : 0;
        used += rows;
        if (span.high > keys.end || (span.high == keys.end && n < thread())) column += rows;
    }
    if (max_int(keys.begin, begin) < min_int(keys.end, stop)) {
        const int row = index_of(p, pass, thread()) * p.max_queries * GROUP;
        ROLLED for (int n = 0; n < item.n * GROUP; ++n) {
            const Range seen = keys_of(p, item, n / GROUP);
            columns[column + n] = Column{max_int(seen.begin, begin), min_int(seen.end, stop), item.first + n / GROUP, row + n};
        }
    }
    const int tiles = (used + 7) / 8;
    int row_groups = WARPS * PAIR / STEP > 1 ? WARPS * PAIR / STEP : 1;        // no more key sets than pairs
    while (row_groups * COLS < tiles) row_groups *= 2;
    const int warp_tiles = (tiles + row_groups - 1) / row_groups, key_sets = WARPS / row_groups;
    const int row_group = warp() % row_groups, key_set = warp() / row_groups;
    const int first_column = row_group * warp_tiles * 8;
    sync_block();
    u8* const queries = shared() + (STAGES - QUERY_STAGES) * STAGE;
    ROLLED for (int n = thread(); n < row_groups * warp_tiles * 8 * UNITS; n += THREADS) {
        const int at = n / UNITS;
        Four halves = {0, 0, 0, 0};
        if (at < used)
            halves = load4(p.q + offset64(columns[at].token, p.q_token)
                           + offset64(kv_head * GROUP + columns[at].row % GROUP, p.q_head) + n % UNITS * 8);
        store4(queries + swizzle(at, n % UNITS), halves);
    }
    // What all of this warp's columns see, and what any of them sees.
    int all_begin = 0, all_end = PAST_KEYS, any_begin = PAST_KEYS, any_end = 0;
    if (lane() < warp_tiles * 8 && first_column + lane() < used) {
        const Column seen = columns[first_column + lane()];
        all_begin = any_begin = seen.low, all_end = any_end = seen.high;
    }
    all_begin = warp_max(all_begin), all_end = -warp_max(-all_end);
    any_begin = -warp_max(-any_begin), any_end = warp_max(any_end);
    sync_block();
    u32 q[COLS][DIM / 16][2];
    const int query_at = swizzle(first_column + lane() % 8, lane() / 8);
    float best[COLS][2], total[COLS][2], acc[COLS][DIM / 16][4];
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
            best[c][e] = first_column + c * 8 + 2 * t + e < used ? NONE : 0.0f;
            total[c][e] = 0;
        }
        UNROLL for (int n = 0; n < DIM / 16; ++n) acc[c][n][0] = acc[c][n][1] = acc[c][n][2] = acc[c][n][3] = 0;
    }
    if (QUERY_STAGES > 1) sync_block();            // the queries are read
    ROLLED for (int n = 1; n < QUERY_STAGES; ++n) fetch();

    const int key_at = swizzle(lane() % 16, lane() / 16);
    const int value_at = swizzle(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2) + HALF_STAGE;
    const float scale = SOFTCAP ? 1.0f : p.scale;
    auto attend = [&](auto chosen, int at, int first, int end) {
        constexpr int TILES = decltype(chosen)::value, CHAINS = TILES == 1 ? 2 : 1, DEPTH = DIM / 16, AHEAD = 2;
        float sums[CHAINS][2][TILES][4];           // of both tiles of keys: keys g and g + 8, two columns each
        UNROLL for (int i = 0; i < CHAINS; ++i)
            UNROLL for (int h = 0; h < 2; ++h)
                UNROLL for (int c = 0; c < TILES; ++c)
                    sums[i][h][c][0] = sums[i][h][c][1] = sums[i][h][c][2] = sums[i][h][c][3] = 0;
        u32 keys[DEPTH][2][4], values[DEPTH][2][4];                                // loaded AHEAD of their use
        UNROLL for (int s = -AHEAD; s < DEPTH; ++s) {
            if (s + AHEAD < DEPTH)
                UNROLL for (int h = 0; h < 2; ++h)
                    ldmatrix4(keys[s + AHEAD][h], shared() + at + h * KEYS * DIM * 2 + advance_units(key_at, 2 * (s + AHEAD)));
            if (s >= 0)
                UNROLL for (int h = 0; h < 2; ++h)
                    UNROLL for (int c = 0; c < TILES; ++c) mma<BF16>(sums[s % CHAINS][h][c], keys[s][h], q[c][s]);
        }
        auto load_values = [&](int n) {
            UNROLL for (int h = 0; h < 2; ++h)
                ldmatrix4_transposed(values[n][h], shared() + at + h * KEYS * DIM * 2 + advance_units(value_at, 2 * n));
        };
        UNROLL for (int n = 0; n < AHEAD; ++n) load_values(n);
        float (&scores)[2][TILES][4] = sums[0];
        UNROLL for (int h = 0; h < 2; ++h)
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int n = 0; n < 4; ++n) {
                    if (CHAINS == 2) scores[h][c][n] += sums[CHAINS - 1][h][c][n];
                    if (SOFTCAP)                   // tanh by an exponential
                        scores[h][c][n] = p.cap - 2 * p.cap * reciprocal(1.0f + fast_exp2(scores[h][c][n] * p.scale));
                }
        if (first < all_begin || first + PAIR > min_int(all_end, end)) {
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int e = 0; e < 2; ++e) {
                    const int column = first_column + c * 8 + 2 * t + e;
                    const Column seen = column < used ? columns[column] : Column{0, 0, 0, 0};
                    UNROLL for (int n = 0; n < 4; ++n) {
                        const int key = first + n * 8 + g;
                        if (key < seen.low || key >= min_int(seen.high, end))
                            scores[n / 2][c][n % 2 * 2 + e] = -bits_float(0x7F800000);
                    }
                }
        }
        bool higher = false;
        UNROLL for (int h = 0; h < 2; ++h)
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int n = 0; n < 4; ++n) higher |= scores[h][c][n] * scale - best[c][n % 2] > ENOUGH;
        if (ballot(higher)) {                      // at the first keys, and rarely after
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int e = 0; e < 2; ++e) {
                    float top = fmaxf(fmaxf(scores[0][c][e], scores[0][c][e + 2]), fmaxf(scores[1][c][e], scores[1][c][e + 2]));
                    UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
                    top = fmaxf(top * scale, best[c][e]);
                    const float rescale = fast_exp2(best[c][e] - top);
                    best[c][e] = top;
                    total[c][e] *= rescale;
                    UNROLL for (int n = 0; n < DEPTH; ++n) {
                        acc[c][n][e] *= rescale;
                        acc[c][n][e + 2] *= rescale;
                    }
                }
        }
        u32 weights[2][TILES][2];
        UNROLL for (int h = 0; h < 2; ++h)
            UNROLL for (int c = 0; c < TILES; ++c) {
                float w[4];
                UNROLL for (int n = 0; n < 4; ++n) w[n] = fast_exp2(scores[h][c][n] * scale - best[c][n % 2]);
                total[c][0] += w[0] + w[2];
                total[c][1] += w[1] + w[3];
                weights[h][c][0] = transpose_8x8(pack2<BF16>(w[0], w[1]));
                weights[h][c][1] = transpose_8x8(pack2<BF16>(w[2], w[3]));
            }
        UNROLL for (int n = 0; n < DEPTH; ++n) {
            if (n + AHEAD < DEPTH) load_values(n + AHEAD);
            UNROLL for (int h = 0; h < 2; ++h)
                UNROLL for (int c = 0; c < TILES; ++c) mma<BF16>(acc[c][n], values[n][h], weights[h][c]);
        }
    };
    ROLLED for (int stage = 0;; stage = stage == STAGES - 1 ? 0 : stage + 1) {
        copy_wait<STAGES - 2>();
        sync_block();                              // this stage has arrived, and the one before it is read
        const Range step = steps[stage];
        if (step.begin >= step.end) break;
        fetch();
        ROLLED for (int n = key_set; n < STEP / PAIR; n += key_sets) {
            const int first = step.begin + n * PAIR;
            if (first >= min_int(step.end, any_end)) break;
            if (first + PAIR <= any_begin) continue;
            const int at = stage * STAGE + n * PAIR * DIM * 2;
            if (COLS == 1 || warp_tiles == 1) attend(Tiles<1>(), at, first, step.end);
            else if (COLS == 2 || warp_tiles == 2) attend(Tiles<COLS == 1 ? 1 : 2>(), at, first, step.end);
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
            const i32* cuts = workspace.cuts + pass_of(p, index) * (p.splits + 1);
            const i64 row = (i64)(index * p.max_queries + token - item.first) * p.heads + head;
            ROLLED for (int first = 0; first < p.splits; first += 32) {
                const int split = first + lane();
                const bool seen = split < p.splits && max_int(keys.begin, cuts[split]) < min_int(keys.end, cuts[split + 1]);
                const Float2 stats = seen ? workspace.stats[(i64)split * workspace.rows + row] : Float2{NONE, 0};
                const u32 splits = ballot(seen);
                const float higher = fmaxf(top, warp_max(stats.x)), old = fast_exp2(top - higher);
                const float share = fast_exp2(stats.x - higher) * (seen ? 1.0f : 0.0f);
                top = higher;
                sum = sum * old + warp_sum(share * stats.y);
                UNROLL for (int n = 0; n < PER_LANE; ++n)
                    UNROLL for (int i = 0; i < 4; ++i) out[n][i] *= old;
                const int low = -warp_max(seen ? -split : -PAST_KEYS), high = warp_max(seen ? split + 1 : 0);
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

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
#include "grouped_split.h"
#include "grouped_parts.h"

constexpr int PAIR = 2 * KEYS;                     // of the two tiles that a warp processes together
constexpr int COPIED = STEP / WARPS;               // rows that a warp copies per stage
constexpr int QUERY_STAGES = (MAX_COLUMNS * DIM * 2 + STAGE - 1) / STAGE;      // the last ones hold the queries at first
static_assert(COPIED >= AT_ONCE && COPIED <= KEYS && STEP % PAIR == 0, "a warp copies rows of one tile");
static_assert(WARPS * Part::PART <= RING, "parts fit into the ring");
static_assert(QUERY_STAGES < STAGES, "a stage for the first keys");

KERNEL(grouped, Params, WARPS * 32)
{
    u8* const after_ring = shared() + RING;
    Span* const spans = (Span*)after_ring;         // MAX_COLUMNS
    Column* const columns = (Column*)(spans + MAX_COLUMNS);                    // MAX_COLUMNS
    Range* const steps = (Range*)(columns + MAX_COLUMNS);  // STAGES
    Shared* const shared_facts = (Shared*)(steps + STAGES);
    const int split = block_x(), kv_head = block_y(), pass = block_z();
    const int g = lane() / 4, t = lane() % 4, unit = lane() % UNITS, row_in_copy = lane() / UNITS;
    const Workspace workspace = workspace_of(p);

    const Split work = split_keys(p, workspace, spans, (float*)shared(), shared_facts, split, kv_head, pass);
    const int count = work.count, begin = work.begin, stop = work.stop;
    if (begin >= stop) return;

    // Steps of keys, each of which some item sees, are copied a few ahead.
    int x = begin, until = begin;                  // the next key; one item covers [x, until)
    const int copied = warp() * COPIED;
    const u16* const k = p.k + offset64(kv_head, p.k_head) + offset64(row_in_copy, K_TOKEN) + unit * 8;
    const u16* const v = p.v + offset64(kv_head, p.v_head) + offset64(row_in_copy, V_TOKEN) + unit * 8;
    const int copy_at = swizzle(copied + row_in_copy, unit);
    int filled = 0;                                // the stage that is filled next
    auto fetch = [&]() {                           // zeros past the last key of a pair of tiles
        if (x < stop) seek(spans, count, x, until);
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
        x = end;
    };
    ROLLED for (int n = 0; n < STAGES - QUERY_STAGES; ++n) fetch();

    const int used = list_columns(p, work, spans, columns, shared_facts, pass);
    const int tiles = (used + 7) / 8;
    int row_groups = WARPS * PAIR / STEP > 1 ? WARPS * PAIR / STEP : 1;        // no more key sets than pairs
    while (row_groups * COLS < tiles) row_groups *= 2;
    const int warp_tiles = (tiles + row_groups - 1) / row_groups, key_sets = WARPS / row_groups;
    const int row_group = warp() % row_groups, key_set = warp() / row_groups;
    const int first_column = row_group * warp_tiles * 8;
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
    store_parts(workspace, shared(), used, row_groups, [&](int at) {
        const int group = at / (warp_tiles * 8);
        return WarpRow{group, at - group * warp_tiles * 8};
    }, [&](int at) { return part_of(p, workspace.rows, split, columns[at].row, kv_head); });
}

// Attention of few queries each of many items over keys that the items share: a key that several
// items see is read once for as many rows (queries times GROUP heads) as a block holds.
//
// `plan` (cascade_plan.h) makes units of work: some items, and a range of the keys that they see. A
// block of `attend` takes a unit for one KV head. The rows of its items are columns of MMA tiles
// whose rows are 16 keys. Each warp copies its own tiles of keys to a ring in shared memory, a few
// ahead. Where the columns fit one warp, warps are independent, and each processes what it copied;
// else they are teams: each warp of a team holds other columns, and processes what all of the team
// copied. A block stores the maximum, sum and output of its columns in fp32, and `merge` adds them
// up.
//
// Macros: BF16, DIM (of keys and values: 64, 128 or 256), GROUP (query heads per KV head), WARPS,
// COLS (tiles of 8 columns of a warp, 1 or 2), STAGES, PLANNERS (threads of the plan), K_TOKEN and V_TOKEN
// (token strides), PAGE (the page size, a multiple of 16), SOFTCAP.
#define SPLITS 1                                   // of combine.h: blocks are no clusters
#include "device.h"
#include "combine.h"
#include "tiles.h"
#include "items.h"
#include "cascade_items.h"
#include "cascade_plan.h"
#include "cascade_parts.h"

constexpr int TILE_BYTES = KEYS * DIM * 2;         // of K, or of V
static_assert(STEP == WARPS * KEYS, "a warp copies a tile");
static_assert(MAX_COLUMNS * DIM * 2 <= STAGE, "the last stage holds the queries at first");
static_assert(WARPS * Part::PART <= RING, "parts fit into the ring");

KERNEL(attend, Params, WARPS * 32)
{
    Column* const columns = (Column*)(shared() + RING);                        // MAX_COLUMNS
    i32* const last = (i32*)(columns + MAX_COLUMNS);  // one past the last column that sees a key, of each warp
    const Workspace workspace = workspace_of(p);
    const int kv_head = block_x();
    const int g = lane() / 4, t = lane() % 4, unit_in_row = lane() % UNITS, row_in_copy = lane() / UNITS;
    const Unit unit = workspace.units[block_y()];
    if (block_y() >= *workspace.unit_count || unit.begin >= unit.end) return;

    // Start copying the first keys and values.
    const int begin = unit.begin, stop = unit.end, start = begin + warp() * KEYS;
    const u16* k = p.k + offset64(kv_head, p.k_head) + offset64(row_in_copy, K_TOKEN)
                   + unit_in_row * 8;
    const u16* v = p.v + offset64(kv_head, p.v_head) + offset64(row_in_copy, V_TOKEN)
                   + unit_in_row * 8;
    const i32* const pages = p.table + offset64(unit.row, p.table_row);
    int page = start < stop ? pages[start / PAGE] : 0;
    int ahead = start, filled = 0;
    const int copy_at = warp() * 2 * TILE_BYTES + swizzle(row_in_copy, unit_in_row);
    auto fetch = [&]() {                           // 16 keys and values; zeros past the last of a pair of tiles
        if (ahead - warp() % 2 * KEYS < stop) {
            const int real = stop - ahead - row_in_copy;
            const int next = ahead + STEP < stop ? pages[(ahead + STEP) / PAGE] : 0;
            const u16* k_from = k + offset64(page, p.k_page) + ahead % PAGE * K_TOKEN;
            const u16* v_from = v + offset64(page, p.v_page) + ahead % PAGE * V_TOKEN;
            page = next;
            UNROLL for (int n = 0; n < KEYS; n += AT_ONCE) {
                u8* to = shared() + filled + (copy_at ^ (n % 8 * 16)) + n * (DIM * 2);
                copy_async(to, k_from + n * K_TOKEN, n < real);
                copy_async(to + TILE_BYTES, v_from + n * V_TOKEN, n < real);
            }
        }
        copy_commit();
        ahead += STEP;
        filled = filled == RING - STAGE ? 0 : filled + STAGE;
    };
    ROLLED for (int n = 0; n < STAGES - 1; ++n) fetch();

    const int used = list_columns(p, unit, columns, last);
    int team = 1;
    const int tiles = (used + 7) / 8;
    while (team * COLS < tiles) team *= 2;
    const int warp_tiles = (tiles + team - 1) / team, row_group = warp() % team, first_column = row_group * warp_tiles * 8;
    u8* const queries = shared() + RING - STAGE;
    ROLLED for (int n = thread(); n < team * warp_tiles * 8 * UNITS; n += THREADS) {
        const int at = n / UNITS;
        Four halves = {0, 0, 0, 0};
        if (columns[at].high > 0)
            halves = load4(p.q + offset64(columns[at].token, p.q_token)
                           + offset64(kv_head * GROUP + at % GROUP, p.q_head) + n % UNITS * 8);
        store4(queries + swizzle(at, n % UNITS), halves);
    }
    // What all of this warp's columns see, and what any of them sees.
    int all_begin = 0, all_end = PAST_KEYS, any_begin = PAST_KEYS, any_end = 0;
    if (lane() < warp_tiles * 8 && first_column + lane() < used) {
        const Column seen = columns[first_column + lane()];
        all_begin = seen.low, all_end = seen.high;
        if (seen.high > 0) any_begin = seen.low, any_end = seen.high;
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
    sync_block();                                  // the queries are read

    const int key_at = swizzle(lane() % 16, lane() / 16);
    const int value_at = swizzle(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2) + TILE_BYTES;
    const float scale = SOFTCAP ? 1.0f : p.scale;
    // HALVES tiles of 16 keys, as many warps copied them, for TILES tiles of columns.
    auto multiply = [&](auto chosen, auto halves, const u8* tile, int first) {
        constexpr int TILES = decltype(chosen)::value, HALVES = decltype(halves)::value;
        constexpr int CHAINS = TILES * HALVES == 1 ? 2 : 1, DEPTH = DIM / 16, AHEAD = HALVES == 1 ? 4 : 2;
        float sums[CHAINS][HALVES][TILES][4];      // keys g and g + 8, two columns each
        UNROLL for (int i = 0; i < CHAINS; ++i)
            UNROLL for (int h = 0; h < HALVES; ++h)
                UNROLL for (int c = 0; c < TILES; ++c)
                    sums[i][h][c][0] = sums[i][h][c][1] = sums[i][h][c][2] = sums[i][h][c][3] = 0;
        u32 keys[DEPTH][HALVES][4], values[DEPTH][HALVES][4];                  // loaded AHEAD of their use
        UNROLL for (int s = -AHEAD; s < DEPTH; ++s) {
            if (s + AHEAD < DEPTH)
                UNROLL for (int h = 0; h < HALVES; ++h)
                    ldmatrix4(keys[s + AHEAD][h], tile + h * 2 * TILE_BYTES + advance_units(key_at, 2 * (s + AHEAD)));
            if (s >= 0)
                UNROLL for (int h = 0; h < HALVES; ++h)
                    UNROLL for (int c = 0; c < TILES; ++c) mma<BF16>(sums[s % CHAINS][h][c], keys[s][h], q[c][s]);
        }
        auto load_values = [&](int n) {
            UNROLL for (int h = 0; h < HALVES; ++h)
                ldmatrix4_transposed(values[n][h], tile + h * 2 * TILE_BYTES + advance_units(value_at, 2 * n));
        };
        UNROLL for (int n = 0; n < AHEAD; ++n) load_values(n);
        float (&scores)[HALVES][TILES][4] = sums[0];
        UNROLL for (int h = 0; h < HALVES; ++h)
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int n = 0; n < 4; ++n) {
                    if (CHAINS == 2) scores[h][c][n] += sums[CHAINS - 1][h][c][n];
                    if (SOFTCAP)                   // tanh by an exponential
                        scores[h][c][n] = p.cap - 2 * p.cap * reciprocal(1.0f + fast_exp2(scores[h][c][n] * p.scale));
                }
        if (first < all_begin || first + HALVES * KEYS > all_end) {
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int e = 0; e < 2; ++e) {
                    const int column = first_column + c * 8 + 2 * t + e;
                    const Column seen = column < used ? columns[column] : Column{0, 0, 0, 0};
                    UNROLL for (int n = 0; n < 2 * HALVES; ++n) {
                        const int key = first + n * 8 + g;
                        if (key < seen.low || key >= seen.high) scores[n / 2][c][n % 2 * 2 + e] = -bits_float(0x7F800000);
                    }
                }
        }
        bool higher = false;
        UNROLL for (int h = 0; h < HALVES; ++h)
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int n = 0; n < 4; ++n) higher |= scores[h][c][n] * scale - best[c][n % 2] > ENOUGH;
        if (ballot(higher)) {                      // at the first keys, and rarely after
            UNROLL for (int c = 0; c < TILES; ++c)
                UNROLL for (int e = 0; e < 2; ++e) {
                    float top = NONE;
                    UNROLL for (int h = 0; h < HALVES; ++h) top = fmaxf(top, fmaxf(scores[h][c][e], scores[h][c][e + 2]));
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
        u32 weights[HALVES][TILES][2];
        UNROLL for (int h = 0; h < HALVES; ++h)
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
            UNROLL for (int h = 0; h < HALVES; ++h)
                UNROLL for (int c = 0; c < TILES; ++c) mma<BF16>(acc[c][n], values[n][h], weights[h][c]);
        }
    };
    auto attend_to = [&](auto chosen, auto halves) {                           // halves: 1 for a warp alone, else 2
        constexpr int HALVES = decltype(halves)::value;
        int stage = 0;
        ROLLED for (int base = begin; base < stop; base += STEP) {
            copy_wait<STAGES - 2>();
            if (HALVES > 1) sync_block();          // this stage has arrived, and the one before it is read
            else sync_warp();
            fetch();
            ROLLED for (int n = 0; n < team; n += HALVES) {
                const int from = warp() / team * team + n, first = base + from * KEYS;
                if (first < min_int(any_end, stop) && first + HALVES * KEYS > any_begin)
                    multiply(chosen, halves, shared() + stage + from * 2 * TILE_BYTES, first);
            }
            stage = stage == RING - STAGE ? 0 : stage + STAGE;
        }
    };
    if (team == 1 && warp_tiles <= 1) attend_to(Tiles<1>(), Tiles<1>());
    else if (team == 1) attend_to(Tiles<COLS>(), Tiles<1>());
    else if (warp_tiles <= 1) attend_to(Tiles<1>(), Tiles<2>());
    else attend_to(Tiles<COLS>(), Tiles<2>());

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
    store_parts(workspace, shared(), used, team, [&](int at) {
        const int group = at / (warp_tiles * 8);
        return WarpRow{group, at - group * warp_tiles * 8};
    }, [&](int at) { return (i64)(unit.part + at) * p.kv_heads + kv_head; });
}

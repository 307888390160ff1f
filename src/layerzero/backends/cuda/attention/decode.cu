// Attention of few queries over many keys, in one launch: each byte of K and V is read once.
//
// The query heads that share a KV head, and their few tokens, are the columns of an MMA tile whose
// rows are 16 keys: at most 7 columns are unused. Warps are independent: each processes its own
// steps of 16 keys, copies them asynchronously to its own ring in shared memory a few steps ahead,
// and keeps its own maximum, sum and output. At the end combine.h combines them: the warps of a
// block in shared memory, the blocks of a KV head, which form one cluster, by remote stores into
// shared memory. So there is no second launch, and no traffic through global memory.
//
// Macros: BF16, DIM (of keys and values: 64, 128 or 256), GROUP (query heads per KV head), ROWS
// (maximum queries of a KV head), SPLITS (blocks of a cluster), WARPS, STAGES (steps in flight),
// K_TOKEN and V_TOKEN (token strides), PAGE (0: K and V are dense; else the page size, a multiple
// of 16), STARTS (queries are packed), CAUSAL, WINDOW (a query sees `left` keys before its own).
#include "device.h"
#include "combine.h"
#include "tiles.h"

struct Params {                                    // what the first copies need is in one cache line of constants
    const u16 *q, *k, *v;
    i32 k_batch, k_head, v_batch, v_head, keys, max_queries;                   // strides in elements
    u16* out;
    float* lse;                                    // or null
    const i32 *table, *lengths, *starts;           // with PAGE: the pages and the number of keys of each batch entry,
                                                   // and with STARTS where its queries begin
    i32 q_batch, q_head, q_token, out_batch, out_head, out_token, lse_batch, lse_head, lse_token, table_batch, left;
    float scale, unscale;                          // positive; times log2(e), as exponentials are in base 2
};

constexpr int KEYS = 16;                           // per step of a warp
constexpr int UNITS = DIM / 8;                     // of 16 bytes per row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies together
constexpr int STEP = KEYS * DIM * 2;               // bytes of K, or of V, per step
constexpr int RING = STAGES * 2 * STEP;            // per warp
constexpr int COLS = (ROWS + 7) / 8;               // tiles of 8 queries
constexpr int CHAINS = COLS == 1 ? 2 : 1;          // independent accumulators per tile
typedef Combine<ROWS, DIM> Combiner;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(Combiner::PART <= RING, "a warp's part fits into its ring of keys");
constexpr float ENOUGH = 8.0f;                     // rescale only if a weight would exceed 2^8

KERNEL(decode, Params, WARPS * 32)
{
    const int kv_head = block_y(), batch = block_z(), split = SPLITS > 1 ? cluster_rank() : 0;
    const int g = lane() / 4, t = lane() % 4, unit = lane() % UNITS, row_in_copy = lane() / UNITS;
    int tokens = p.max_queries;
    int begin = 0;                                 // where this entry's queries begin in a packed tensor
#if STARTS
    begin = p.starts[batch];
    tokens = p.starts[batch + 1] - begin;
#endif
#if PAGE
    const int length = p.lengths[batch];
    const i32* pages = p.table + offset64(batch, p.table_batch);
#else
    const int length = p.keys;
#endif
    const int offset = length - tokens;            // the last query is aligned with the last key
    const int used = tokens * GROUP;               // valid rows
    const int lowest = WINDOW ? (offset - p.left > 0 ? (offset - p.left) / KEYS * KEYS : 0) : 0;
    const int start = lowest + (split * WARPS + warp()) * KEYS, stride = SPLITS * WARPS * KEYS;

    // Start copying the queries and the first keys and values before waiting for anything.
    u8* queries = shared() + WARPS * RING;
    const int ring = warp() * RING, at = ring + swizzle(row_in_copy, unit);
    const u16* k = p.k + offset64(kv_head, p.k_head) + offset64(PAGE ? row_in_copy : start + row_in_copy, K_TOKEN) + unit * 8;
    const u16* v = p.v + offset64(kv_head, p.v_head) + offset64(PAGE ? row_in_copy : start + row_in_copy, V_TOKEN) + unit * 8;
#if PAGE
    i64 page = start < length ? pages[start / PAGE] : 0;
#else
    k += offset64(batch, p.k_batch);
    v += offset64(batch, p.v_batch);
#endif
    int ahead = start, filled = 0;
    auto fetch = [&]() {                           // 16 keys and values; zeros past the last
        const int real = length - ahead - row_in_copy;
        if (ahead < length) {
#if PAGE
            const i64 next = ahead + stride < length ? pages[(ahead + stride) / PAGE] : 0;
            const u16* k_from = k + page * p.k_batch + ahead % PAGE * K_TOKEN;
            const u16* v_from = v + page * p.v_batch + ahead % PAGE * V_TOKEN;
            page = next;
#else
            const u16 *k_from = k, *v_from = v;
            k += (i64)stride * K_TOKEN;
            v += (i64)stride * V_TOKEN;
#endif
            UNROLL for (int n = 0; n < KEYS; n += AT_ONCE) {
                u8* to = shared() + ((at + filled) ^ (n % 8 * 16)) + n * (DIM * 2);
                copy_async(to, k_from + n * K_TOKEN, n < real);
                copy_async(to + STEP, v_from + n * V_TOKEN, n < real);
            }
        }
        ahead += stride;
        filled = filled == RING - 2 * STEP ? 0 : filled + 2 * STEP;
    };
    ROLLED for (int n = 0; n < STAGES; ++n) {
        fetch();
        if (n == 0) {
            ROLLED for (int row = warp() * AT_ONCE + row_in_copy; row < used; row += WARPS * AT_ONCE)
                copy_async(queries + swizzle(row, unit),
                           p.q + offset64(batch, p.q_batch) + offset64(kv_head * GROUP + row % GROUP, p.q_head)
                               + offset64(begin + row / GROUP, p.q_token) + unit * 8, true);
        }
        copy_commit();
    }
    const Combiner combine = make_combine<ROWS, DIM>(queries + COLS * 8 * DIM * 2, split);
    open_inbox(combine, used);

    // Offsets of this lane's rows for ldmatrix.
    const int query_at = swizzle(lane() % 8, lane() / 8), key_at = ring + swizzle(lane() % 16, lane() / 16);
    const int value_at = ring + swizzle(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
    const int first_masked = CAUSAL ? offset + 1 : length;                          // keys before this one are visible to all
    const int first_unwindowed = WINDOW ? offset + tokens - 1 - p.left : 0;    // as are keys from this one on

    float best[COLS][2], threshold[COLS][2], total[COLS][2], acc[COLS][DIM / 16][4];
    UNROLL for (int c = 0; c < COLS; ++c) {
        UNROLL for (int e = 0; e < 2; ++e) {
            best[c][e] = NONE;
            // The score up to which `best` need not change. Unused columns hold stale memory and
            // must not trigger a new maximum: the rounding of all columns would depend on it.
            threshold[c][e] = c * 8 + 2 * t + e < used ? NONE : bits_float(0x7F800000);
            total[c][e] = 0;
        }
        UNROLL for (int n = 0; n < DIM / 16; ++n) acc[c][n][0] = acc[c][n][1] = acc[c][n][2] = acc[c][n][3] = 0;
    }
    copy_wait<STAGES - 1>();
    sync_block();                                  // every warp has copied its share of the queries
    u32 q[COLS][DIM / 16][2];
    UNROLL for (int c = 0; c < COLS; ++c)
        UNROLL for (int n = 0; n < DIM / 16; n += 2) {
            u32 both[4];
            ldmatrix4(both, queries + c * 8 * (DIM * 2) + advance_units(query_at, 2 * n));
            q[c][n][0] = both[0];
            q[c][n][1] = both[1];
            q[c][n + 1][0] = both[2];
            q[c][n + 1][1] = both[3];
        }

    int read = 0;
    ROLLED for (int first = start; first < length; first += stride) {
        copy_wait<STAGES - 1>();
        sync_warp();                           // make what each lane copied visible to all
        float parts[CHAINS][COLS][4];
        UNROLL for (int i = 0; i < CHAINS; ++i)
            UNROLL for (int c = 0; c < COLS; ++c)
                parts[i][c][0] = parts[i][c][1] = parts[i][c][2] = parts[i][c][3] = 0;
        UNROLL for (int s = 0; s < DIM / 16; ++s) {
            u32 keys[4];
            ldmatrix4(keys, shared() + advance_units(key_at + read, 2 * s));
            UNROLL for (int c = 0; c < COLS; ++c) mma<BF16>(parts[s % CHAINS][c], keys, q[c][s]);
        }
        float scores[COLS][4];                 // keys g and g + 8, two queries each
        UNROLL for (int c = 0; c < COLS; ++c)
            UNROLL for (int n = 0; n < 4; ++n)
                scores[c][n] = CHAINS == 2 ? parts[0][c][n] + parts[CHAINS - 1][c][n] : parts[0][c][n];

        if (first + KEYS > first_masked || (WINDOW && first < first_unwindowed)) {
            UNROLL for (int c = 0; c < COLS; ++c)
                UNROLL for (int n = 0; n < 4; ++n) {
                    const int key = first + n / 2 * 8 + g, position = offset + (c * 8 + 2 * t + n % 2) / GROUP;
                    if ((CAUSAL && key > position) || key >= length || (WINDOW && key < position - p.left))
                        scores[c][n] = -bits_float(0x7F800000);
                }
        }
        bool higher = false;
        UNROLL for (int c = 0; c < COLS; ++c)
            UNROLL for (int n = 0; n < 4; ++n) higher |= scores[c][n] > threshold[c][n % 2];
        if (ballot(higher)) {                  // at the first keys, and rarely after
            UNROLL for (int c = 0; c < COLS; ++c) {
                UNROLL for (int e = 0; e < 2; ++e) {
                    float top = fmaxf(scores[c][e], scores[c][e + 2]);
                    UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
                    top = fmaxf(top * p.scale, best[c][e]);
                    const float rescale = fast_exp2(best[c][e] - top);
                    best[c][e] = top;
                    if (c * 8 + 2 * t + e < used) threshold[c][e] = (top + ENOUGH) * p.unscale;
                    total[c][e] *= rescale;
                    UNROLL for (int n = 0; n < DIM / 16; ++n) {
                        acc[c][n][e] *= rescale;
                        acc[c][n][e + 2] *= rescale;
                    }
                }
            }
        }
        u32 weights[COLS][2];
        UNROLL for (int c = 0; c < COLS; ++c) {
            float w[4];
            UNROLL for (int n = 0; n < 4; ++n) w[n] = fast_exp2(scores[c][n] * p.scale - best[c][n % 2]);
            total[c][0] += w[0] + w[2];
            total[c][1] += w[1] + w[3];
            weights[c][0] = transpose_8x8(pack2<BF16>(w[0], w[1]));
            weights[c][1] = transpose_8x8(pack2<BF16>(w[2], w[3]));
        }
        UNROLL for (int n = 0; n < DIM / 16; ++n) {
            u32 values[4];
            ldmatrix4_transposed(values, shared() + advance_units(value_at + read, 2 * n) + STEP);
            UNROLL for (int c = 0; c < COLS; ++c) mma<BF16>(acc[c][n], values, weights[c]);
        }
        read = read == RING - 2 * STEP ? 0 : read + 2 * STEP;
        sync_warp();                               // all lanes have read the slot that is refilled now
        fetch();
        copy_commit();
    }

    // Each warp stores its part over its ring; sums are still per lane.
    copy_wait<0>();
    sync_warp();
    u8* part = shared() + ring;
    UNROLL for (int c = 0; c < COLS; ++c) {
        UNROLL for (int e = 0; e < 2; ++e) {
            const int row = c * 8 + 2 * t + e;
            float sum = total[c][e];
            UNROLL for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
            if (row < used) {
                float* to = row_of(part, row, Combiner::PITCH) + g;
                UNROLL for (int n = 0; n < DIM / 16; ++n) {
                    to[n * 16] = acc[c][n][e];
                    to[n * 16 + 8] = acc[c][n][e + 2];
                }
                if (g == 0) *max_sum_of(part, row, ROWS, Combiner::PITCH) = Float2{best[c][e], sum};
            }
        }
    }
    send(combine, shared(), RING, used);
    receive(combine, used, [&](int row, int column, Float2 out, float top, float sum) {
        const int head = kv_head * GROUP + row % GROUP, token = begin + row / GROUP;
        const float by = sum > 0 ? reciprocal(sum) : 0.0f;
        *(u32*)(p.out + offset64(batch, p.out_batch) + offset64(head, p.out_head) + offset64(token, p.out_token)
                + column) =
            pack2<BF16>(out.x * by, out.y * by);
        if (p.lse && column == 0)
            p.lse[offset64(batch, p.lse_batch) + offset64(head, p.lse_head) + offset64(token, p.lse_token)] =
                sum > 0 ? (top + fast_log2(sum)) * 0.6931471805599453f : -bits_float(0x7F800000);
    });
}

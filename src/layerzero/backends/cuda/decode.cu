// Attention of few queries over many keys, in one launch: each byte of K and V is read once.
//
// The query heads that share a KV head, and their few tokens, are the columns of a product of the tensor cores, of
// which 16 keys are the rows: no more than 7 columns are for nobody. Every warp is on its own: it takes other 16 keys
// than all other warps, has them copied to its own shared memory a few steps ahead, and keeps its own maximum, sum and
// output. Only at the end do warps meet, as combine.h says: those of a block in shared memory, the blocks of a KV head,
// which are one cluster, by remote stores into shared memory. So there is no second launch, and nothing goes through
// global memory.
//
// BF16, DIM (of keys and values: 64, 128 or 256), GROUP (query heads to a KV head), ROWS (queries of a KV head, at
// most), SPLITS (blocks of a cluster), WARPS, STAGES (steps that are on their way), K_TOKEN and V_TOKEN (from one key
// to the next), PAGE (0: K and V are tensors; else pages of so many keys, a multiple of 16), STARTS (queries are
// packed), CAUSAL (a query sees no key after its own), WINDOW (nor those more than `left` before).
#include "device.h"
#include "combine.h"

struct Params {                                    // what the first copies need is in one line of constants
    const u16 *q, *k, *v;
    i32 k_batch, k_head, v_batch, v_head, keys, room;                          // from one to the next, in elements
    u16* out;
    float* lse;                                    // or null
    const i32 *table, *lengths, *starts;           // with PAGE: of each row of the batch its pages, its number of keys,
                                                   // and with STARTS where its queries begin
    i32 q_batch, q_head, q_token, out_batch, out_head, out_token, lse_batch, lse_head, lse_token, table_batch, left;
    float scale, unscale;                          // positive; times log2(e): exponentials are powers of two here
};

constexpr int KEYS = 16;                           // of one step of one warp
constexpr int UNITS = DIM / 8;                     // of 16 bytes in a row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies at once
constexpr int STEP = KEYS * DIM * 2;               // bytes of K, or of V, of one step
constexpr int RING = STAGES * 2 * STEP;            // of a warp
constexpr int COLS = (ROWS + 7) / 8;               // tiles of 8 queries
constexpr int CHAINS = COLS == 1 ? 2 : 1;          // of products that do not wait for each other, for each tile
typedef Combine<ROWS, DIM> Combiner;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(Combiner::PART <= RING, "what a warp found fits where its keys were");
constexpr float ENOUGH = 8.0f;                     // weights up to 2^8 need no new maximum

// Row and unit of 16 bytes -> place. Units are exchanged within a row, so that eight rows of one unit are in eight
// different places of a line.
FN int swizzle(int row, int unit) { return row * (DIM * 2) + ((unit ^ (row & 7)) * 16); }

// A place, so many units further; `units` has no bit below or at one that differs between lanes.
FN int further(int at, int units) { return (at ^ (units % 8 * 16)) + units / 8 * 128; }

FN i64 offset64(int index, int stride) { return (i64)((u64)(u32)index * (u32)stride); }        // neither is negative

KERNEL(decode, Params, WARPS * 32)
{
    const int kv_head = block_y(), batch = block_z(), split = SPLITS > 1 ? cluster_rank() : 0;
    const int g = lane() / 4, t = lane() % 4, unit = lane() % UNITS, near = lane() / UNITS;
    int tokens = p.room;
    int begin = 0;                                 // of this row's queries in a packed tensor of them
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
    const int offset = length - tokens;            // the last query sits at the last key
    const int used = tokens * GROUP;               // rows that are real
    const int lowest = WINDOW ? (offset - p.left > 0 ? (offset - p.left) / KEYS * KEYS : 0) : 0;
    const int start = lowest + (split * WARPS + warp()) * KEYS, stride = SPLITS * WARPS * KEYS;

    // The queries and the first keys and values are on their way before anything is waited for.
    u8* queries = shared() + WARPS * RING;
    const int mine = warp() * RING, at = mine + swizzle(near, unit);
    const u16* k = p.k + offset64(kv_head, p.k_head) + offset64(PAGE ? near : start + near, K_TOKEN) + unit * 8;
    const u16* v = p.v + offset64(kv_head, p.v_head) + offset64(PAGE ? near : start + near, V_TOKEN) + unit * 8;
#if PAGE
    i64 page = start < length ? pages[start / PAGE] : 0;
#else
    k += offset64(batch, p.k_batch);
    v += offset64(batch, p.v_batch);
#endif
    int ahead = start, filled = 0;
    auto fetch = [&]() {                           // 16 keys and values; behind the last they are zeros
        const int real = length - ahead - near;
        if (ahead < length) {
#if PAGE
            const i64 next = ahead + stride < length ? pages[(ahead + stride) / PAGE] : 0;
            const u16* its_k = k + page * p.k_batch + ahead % PAGE * K_TOKEN;
            const u16* its_v = v + page * p.v_batch + ahead % PAGE * V_TOKEN;
            page = next;
#else
            const u16 *its_k = k, *its_v = v;
            k += (i64)stride * K_TOKEN;
            v += (i64)stride * V_TOKEN;
#endif
            UNROLL for (int n = 0; n < KEYS; n += AT_ONCE) {
                u8* to = shared() + ((at + filled) ^ (n % 8 * 16)) + n * (DIM * 2);
                copy_async(to, its_k + n * K_TOKEN, n < real);
                copy_async(to + STEP, its_v + n * V_TOKEN, n < real);
            }
        }
        ahead += stride;
        filled = filled == RING - 2 * STEP ? 0 : filled + 2 * STEP;
    };
    ROLLED for (int n = 0; n < STAGES; ++n) {
        fetch();
        if (n == 0) {
            ROLLED for (int row = warp() * AT_ONCE + near; row < used; row += WARPS * AT_ONCE)
                copy_async(queries + swizzle(row, unit),
                           p.q + offset64(batch, p.q_batch) + offset64(kv_head * GROUP + row % GROUP, p.q_head)
                               + offset64(begin + row / GROUP, p.q_token) + unit * 8, true);
        }
        copy_commit();
    }
    const Combiner combine = combine_in<ROWS, DIM>(queries + COLS * 8 * DIM * 2, split);
    open(combine, used);

    // Where a lane's rows for the tensor cores are.
    const int query_at = swizzle(lane() % 8, lane() / 8), key_at = mine + swizzle(lane() % 16, lane() / 16);
    const int value_at = mine + swizzle(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
    const int all_see = CAUSAL ? offset + 1 : length;                          // before this key nothing is masked
    const int none_before = WINDOW ? offset + tokens - 1 - p.left : 0;        // and from this one on

    float best[COLS][2], most[COLS][2], total[COLS][2], acc[COLS][DIM / 16][4];
    UNROLL for (int c = 0; c < COLS; ++c) {
        UNROLL for (int e = 0; e < 2; ++e) {
            best[c][e] = NONE;
            // Up to which product of a query and a key `best` will do. Columns that are no queries hold what was
            // left in memory, and must not call for a new maximum: the rounding of all would depend on it.
            most[c][e] = c * 8 + 2 * t + e < used ? NONE : bits_float(0x7F800000);
            total[c][e] = 0;
        }
        UNROLL for (int n = 0; n < DIM / 16; ++n) acc[c][n][0] = acc[c][n][1] = acc[c][n][2] = acc[c][n][3] = 0;
    }
    copy_wait<STAGES - 1>();
    sync_block();                                  // each warp has copied other queries
    u32 q[COLS][DIM / 16][2];
    UNROLL for (int c = 0; c < COLS; ++c)
        UNROLL for (int n = 0; n < DIM / 16; n += 2) {
            u32 both[4];
            matrices4(both, queries + c * 8 * (DIM * 2) + further(query_at, 2 * n));
            q[c][n][0] = both[0];
            q[c][n][1] = both[1];
            q[c][n + 1][0] = both[2];
            q[c][n + 1][1] = both[3];
        }

    int read = 0;
    ROLLED for (int first = start; first < length; first += stride) {
        copy_wait<STAGES - 1>();
        sync_warp();                           // what each lane fetched is there for all
        float parts[CHAINS][COLS][4];
        UNROLL for (int i = 0; i < CHAINS; ++i)
            UNROLL for (int c = 0; c < COLS; ++c)
                parts[i][c][0] = parts[i][c][1] = parts[i][c][2] = parts[i][c][3] = 0;
        UNROLL for (int s = 0; s < DIM / 16; ++s) {
            u32 keys[4];
            matrices4(keys, shared() + further(key_at + read, 2 * s));
            UNROLL for (int c = 0; c < COLS; ++c) mma<BF16>(parts[s % CHAINS][c], keys, q[c][s]);
        }
        float scores[COLS][4];                 // of keys g (two queries) and g + 8
        UNROLL for (int c = 0; c < COLS; ++c)
            UNROLL for (int n = 0; n < 4; ++n)
                scores[c][n] = CHAINS == 2 ? parts[0][c][n] + parts[CHAINS - 1][c][n] : parts[0][c][n];

        if (first + KEYS > all_see || (WINDOW && first < none_before)) {
            UNROLL for (int c = 0; c < COLS; ++c)
                UNROLL for (int n = 0; n < 4; ++n) {
                    const int key = first + n / 2 * 8 + g, sees = offset + (c * 8 + 2 * t + n % 2) / GROUP;
                    if ((CAUSAL && key > sees) || key >= length || (WINDOW && key < sees - p.left))
                        scores[c][n] = -bits_float(0x7F800000);
                }
        }
        bool higher = false;
        UNROLL for (int c = 0; c < COLS; ++c)
            UNROLL for (int n = 0; n < 4; ++n) higher |= scores[c][n] > most[c][n % 2];
        if (votes(higher)) {                   // at the first keys, and seldom after
            UNROLL for (int c = 0; c < COLS; ++c) {
                UNROLL for (int e = 0; e < 2; ++e) {
                    float top = fmaxf(scores[c][e], scores[c][e + 2]);
                    UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
                    top = fmaxf(top * p.scale, best[c][e]);
                    const float fade = fast_exp2(best[c][e] - top);
                    best[c][e] = top;
                    if (c * 8 + 2 * t + e < used) most[c][e] = (top + ENOUGH) * p.unscale;
                    total[c][e] *= fade;
                    UNROLL for (int n = 0; n < DIM / 16; ++n) {
                        acc[c][n][e] *= fade;
                        acc[c][n][e + 2] *= fade;
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
            weights[c][0] = turned(pack2<BF16>(w[0], w[1]));
            weights[c][1] = turned(pack2<BF16>(w[2], w[3]));
        }
        UNROLL for (int n = 0; n < DIM / 16; ++n) {
            u32 values[4];
            matrices4_turned(values, shared() + further(value_at + read, 2 * n) + STEP);
            UNROLL for (int c = 0; c < COLS; ++c) mma<BF16>(acc[c][n], values, weights[c]);
        }
        read = read == RING - 2 * STEP ? 0 : read + 2 * STEP;
        sync_warp();                               // all lanes have read what is filled again now
        fetch();
        copy_commit();
    }

    // Each warp leaves its part where its keys were; sums are still of each lane's own keys.
    copy_wait<0>();
    sync_warp();
    u8* part = shared() + mine;
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
                if (g == 0) *fact_of(part, row, ROWS, Combiner::PITCH) = Two{best[c][e], sum};
            }
        }
    }
    send(combine, shared(), RING, used);
    receive(combine, used, [&](int row, int column, Two out, float top, float sum) {
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

// Attention of few queries over many keys, in one launch: each byte of K and V is read once.
//
// The query heads that share a KV head, and their few tokens, are the rows of one tile of the tensor cores. Every warp
// is on its own: it takes other 16 keys than all other warps, has them copied to its own shared memory a few steps
// ahead, and keeps its own maximum, sum and output. Only at the end do warps meet: those of a block in shared memory,
// the blocks of a KV head, which are one cluster, in each other's shared memory. So there is no second launch, nothing
// goes through global memory, and the first keys travel while the queries do.
//
// BF16, DIM (of keys and values: 64, 128 or 256), GROUP (query heads to a KV head), TILES (of 16 query rows), HALVES
// (1: no more than 8 rows), SPLITS (blocks of a cluster), WARPS, STAGES (steps ahead, and the one at work), K_TOKEN and
// V_TOKEN (from one key to the next), PAGE (0: K and V are tensors; else pages of so many keys, a multiple of 16), STARTS
// (queries are packed), CAUSAL (a query sees no key after its own), WINDOW (nor those more than `left` before).
#include "device.h"

struct Params {
    const u16 *q, *k, *v;
    u16* out;
    float* lse;                                    // or null
    const i32 *table, *lengths, *starts;           // with PAGE: of each row of the batch its pages, its number of keys,
                                                   // and with STARTS where its queries begin
    i32 q_batch, q_head, q_token, k_batch, k_head, v_batch, v_head;            // from one to the next, in elements
    i32 out_batch, out_head, out_token, lse_batch, lse_head, lse_token, table_batch;
    i32 keys, room, left;
    float scale, unscale;                          // positive; times log2(e): exponentials are powers of two here
};

constexpr int KEYS = 16;                           // of one step of one warp
constexpr int UNITS = DIM / 8;                     // of 16 bytes in a row
constexpr int AT_ONCE = 32 / UNITS;                // rows that a warp copies at once
constexpr int STEP = KEYS * DIM * 2;               // bytes of K, or of V, of one step
constexpr int ROWS = TILES * 16;
constexpr int PITCH = DIM + 8;                     // of rows of floats: the rows of a tile are in different banks
constexpr int PART = ROWS * PITCH + 2 * ROWS;      // what a warp, or a block, found: outputs, then maxima, then sums
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
static_assert(PART * 4 <= STAGES * 2 * STEP, "what a warp found fits where its keys were");
constexpr float NONE = -1e30f;                     // a maximum of nothing; finite, so that a difference is no NaN
constexpr float ENOUGH = 8.0f;                     // weights up to 2^8 need no new maximum

struct Two { float x, y; };

// Row and unit of 16 bytes -> place. Units are exchanged within a row, so that eight rows of one unit are in eight
// different places of a line.
FN int place(int row, int unit) { return row * (DIM * 2) + ((unit ^ (row & 7)) * 16); }

FN i64 far(int index, int stride) { return (i64)index * stride; }

FN i64 page_of(const Params& p, int batch, int key) {
#if PAGE
    return p.table[far(batch, p.table_batch) + key / PAGE];
#else
    return 0;
#endif
}

// 16 keys and values; from the `real`th on they become zeros. `k` and `v` are where this lane's first row is, `at` its
// places for the first eight rows.
FN void fetch(u8* to, const int (&at)[8 / AT_ONCE], const u16* k, const u16* v, int real) {
    UNROLL for (int n = 0; n < KEYS / AT_ONCE; ++n) {
        u8* there = to + at[n % (8 / AT_ONCE)] + n * AT_ONCE / 8 * 8 * (DIM * 2);
        const bool wanted = n * AT_ONCE + lane() / UNITS < real;
        copy_async(there, k + n * AT_ONCE * K_TOKEN, wanted);
        copy_async(there + STEP, v + n * AT_ONCE * V_TOKEN, wanted);
    }
}

KERNEL(decode, Params, WARPS * 32)
{
    const int kv_head = block_y(), batch = block_z(), split = cluster_rank();
    const int g = lane() / 4, t = lane() % 4;
    int tokens = p.room;
    int begin = 0;                                 // of this row's queries in a packed tensor of them
#if STARTS
    begin = p.starts[batch];
    tokens = p.starts[batch + 1] - begin;
#endif
#if PAGE
    const int length = p.lengths[batch];
#else
    const int length = p.keys;
#endif
    const int offset = length - tokens;            // the last query sits at the last key
    const int used = tokens * GROUP;               // rows that are real
    const int lowest = WINDOW ? (offset - p.left > 0 ? (offset - p.left) / KEYS * KEYS : 0) : 0;
    const int start = lowest + (split * WARPS + warp()) * KEYS, stride = SPLITS * WARPS * KEYS;

    // The queries and the first keys and values are on their way before anything is waited for. Every warp copies all
    // queries, to the same place.
    u8* queries = shared() + WARPS * STAGES * 2 * STEP;
    u8* mine = shared() + warp() * (STAGES * 2 * STEP);
    if (start < length) {
        ROLLED for (int row = lane() / UNITS; row < used; row += AT_ONCE) {
            copy_async(queries + place(row, lane() % UNITS),
                       p.q + far(batch, p.q_batch) + far(kv_head * GROUP + row % GROUP, p.q_head)
                           + far(begin + row / GROUP, p.q_token) + lane() % UNITS * 8, true);
        }
    }
    const int near = PAGE ? lane() / UNITS : start + lane() / UNITS;
    const u16* k = p.k + far(kv_head, p.k_head) + far(near, K_TOKEN) + lane() % UNITS * 8;
    const u16* v = p.v + far(kv_head, p.v_head) + far(near, V_TOKEN) + lane() % UNITS * 8;
#if !PAGE
    k += far(batch, p.k_batch);
    v += far(batch, p.v_batch);
#endif
    int at[8 / AT_ONCE];
    UNROLL for (int n = 0; n < 8 / AT_ONCE; ++n) at[n] = place(n * AT_ONCE + lane() / UNITS, lane() % UNITS);
    int ahead = start, filled = 0, read = 0;
    i64 page = ahead < length ? page_of(p, batch, ahead) : 0;
    auto fetch_ahead = [&]() {
        const i64 next = ahead + stride < length ? page_of(p, batch, ahead + stride) : 0;
        if (ahead < length) {
#if PAGE
            fetch(mine + filled, at, k + page * p.k_batch + ahead % PAGE * K_TOKEN,
                  v + page * p.v_batch + ahead % PAGE * V_TOKEN, length - ahead);
#else
            fetch(mine + filled, at, k, v, length - ahead);
            k += (i64)stride * K_TOKEN;
            v += (i64)stride * V_TOKEN;
#endif
        }
        copy_commit();
        ahead += stride;
        page = next;
        filled = filled + 2 * STEP == STAGES * 2 * STEP ? 0 : filled + 2 * STEP;
    };
    ROLLED for (int n = 0; n < STAGES - 1; ++n) fetch_ahead();

    // Places of what a lane loads for the tensor cores; they repeat every 64 of a row.
    int key_at[4], value_at[4];
    UNROLL for (int n = 0; n < 4; ++n) {
        key_at[n] = place(lane() / 16 * 8 + lane() % 8, 2 * n + lane() / 8 % 2);
        value_at[n] = place(lane() / 8 % 2 * 8 + lane() % 8, 2 * n + lane() / 16);
    }
    int sees[TILES][HALVES];                       // up to which key a row sees; for rows g and g + 8
    float best[TILES][HALVES], most[TILES][HALVES], total[TILES][HALVES], acc[TILES][UNITS][4];
    UNROLL for (int m = 0; m < TILES; ++m) {
        UNROLL for (int half = 0; half < HALVES; ++half) {
            sees[m][half] = offset + (m * 16 + half * 8 + g) / GROUP;
            best[m][half] = NONE;
            // Up to which product of a query and a key `best` will do. Rows of a tile that are no queries hold what was
            // left in memory, and must not call for a new maximum: the rounding of all rows would depend on it.
            most[m][half] = m * 16 + half * 8 + g < used ? NONE : bits_float(0x7F800000);
            total[m][half] = 0;
        }
        UNROLL for (int n = 0; n < UNITS; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0;
    }
    const int all_see = CAUSAL ? offset + 1 : length;                          // before this key nothing is masked
    const int none_before = WINDOW ? offset + tokens - 1 - p.left : 0;        // and from this one on

    u32 q[TILES][DIM / 16][4];
    copy_wait<STAGES - 2>();
    sync_warp();
    UNROLL for (int m = 0; m < TILES; ++m)
        UNROLL for (int s = 0; s < DIM / 16; ++s)
            matrices4(q[m][s], queries + place(m * 16 + lane() % 16, 2 * s + lane() / 16));

    ROLLED for (int first = start; first < length; first += stride) {
        sync_warp();                               // all lanes have read what is filled again now
        fetch_ahead();
        copy_wait<STAGES - 1>();
        sync_warp();                               // what each lane fetched is there for all
        const u8* keys = mine + read;
        read = read + 2 * STEP == STAGES * 2 * STEP ? 0 : read + 2 * STEP;

        float scores[TILES][2][4];                 // of keys 0 to 7, and 8 to 15
        UNROLL for (int m = 0; m < TILES; ++m)
            UNROLL for (int j = 0; j < 2; ++j) scores[m][j][0] = scores[m][j][1] = scores[m][j][2] = scores[m][j][3] = 0;
        UNROLL for (int s = 0; s < DIM / 16; ++s) {
            u32 part[4];
            matrices4(part, keys + key_at[s % 4] + s / 4 * 128);
            const u32 low[2] = {part[0], part[1]}, high[2] = {part[2], part[3]};
            UNROLL for (int m = 0; m < TILES; ++m) {
                mma<BF16>(scores[m][0], q[m][s], low);
                mma<BF16>(scores[m][1], q[m][s], high);
            }
        }

        if (first + KEYS > all_see || (WINDOW && first < none_before)) {
            UNROLL for (int m = 0; m < TILES; ++m)
                UNROLL for (int half = 0; half < HALVES; ++half)
                    UNROLL for (int n = 0; n < 4; ++n) {
                        const int key = first + n / 2 * 8 + 2 * t + n % 2;
                        if ((CAUSAL && key > sees[m][half]) || key >= length
                                || (WINDOW && key < sees[m][half] - p.left))
                            scores[m][n / 2][2 * half + n % 2] = -bits_float(0x7F800000);
                    }
        }
        bool higher = false;
        UNROLL for (int m = 0; m < TILES; ++m)
            UNROLL for (int half = 0; half < HALVES; ++half)
                UNROLL for (int n = 0; n < 4; ++n) higher |= scores[m][n / 2][2 * half + n % 2] > most[m][half];
        if (votes(higher)) {                       // at the first keys, and seldom after
            UNROLL for (int m = 0; m < TILES; ++m) {
                UNROLL for (int half = 0; half < HALVES; ++half) {
                    float top = scores[m][0][2 * half];
                    UNROLL for (int n = 1; n < 4; ++n) top = fmaxf(top, scores[m][n / 2][2 * half + n % 2]);
                    top = fmaxf(top, shuffle_xor(top, 1));
                    top = fmaxf(top, shuffle_xor(top, 2));
                    top = fmaxf(top * p.scale, best[m][half]);
                    const float fade = fast_exp2(best[m][half] - top);
                    best[m][half] = top;
                    if (m * 16 + half * 8 + g < used) most[m][half] = (top + ENOUGH) * p.unscale;
                    total[m][half] *= fade;
                    UNROLL for (int n = 0; n < UNITS; ++n) {
                        acc[m][n][2 * half] *= fade;
                        acc[m][n][2 * half + 1] *= fade;
                    }
                }
            }
        }
        u32 weights[TILES][4];
        UNROLL for (int m = 0; m < TILES; ++m) {
            weights[m][1] = weights[m][3] = 0;
            UNROLL for (int half = 0; half < HALVES; ++half) {
                float w[4];
                UNROLL for (int n = 0; n < 4; ++n)
                    w[n] = fast_exp2(scores[m][n / 2][2 * half + n % 2] * p.scale - best[m][half]);
                total[m][half] += (w[0] + w[1]) + (w[2] + w[3]);
                weights[m][half] = pack2<BF16>(w[0], w[1]);
                weights[m][half + 2] = pack2<BF16>(w[2], w[3]);
            }
        }
        UNROLL for (int n = 0; n < UNITS; n += 2) {
            u32 part[4];
            matrices4_turned(part, keys + STEP + value_at[n / 2 % 4] + n / 8 * 128);
            const u32 left[2] = {part[0], part[1]}, right[2] = {part[2], part[3]};
            UNROLL for (int m = 0; m < TILES; ++m) {
                mma<BF16>(acc[m][n], weights[m], left);
                mma<BF16>(acc[m][n + 1], weights[m], right);
            }
        }
    }

    // The warps of a block. Each leaves its part where its keys were; sums are still of each lane's own keys.
    copy_wait<0>();
    sync_warp();
    float* part = (float*)mine;
    UNROLL for (int m = 0; m < TILES; ++m) {
        UNROLL for (int half = 0; half < HALVES; ++half) {
            const int row = m * 16 + half * 8 + g;
            float sum = total[m][half];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (row < used) {
                UNROLL for (int n = 0; n < UNITS; ++n)
                    *(Two*)(part + row * PITCH + n * 8 + 2 * t) = Two{acc[m][n][2 * half], acc[m][n][2 * half + 1]};
                if (t == 0) {
                    part[ROWS * PITCH + row] = best[m][half];
                    part[ROWS * PITCH + ROWS + row] = sum;
                }
            }
        }
    }
    sync_block();
    // What the block found takes the place of what its first warp did, but for maxima and sums, which all threads read.
    float* parts = (float*)shared();
    float* tops = (float*)(queries + ROWS * DIM * 2);
    float* sums = tops + ROWS;
    constexpr int APART = STAGES * STEP / 2;       // floats from one warp's part to the next
    ROLLED for (int pair = thread(); pair < used * DIM / 2; pair += WARPS * 32) {
        const int row = pair / (DIM / 2), here = row * PITCH + pair % (DIM / 2) * 2;
        float its_top[WARPS], top = NONE, sum = 0;
        Two out = {0, 0};
        UNROLL for (int w = 0; w < WARPS; ++w) {
            its_top[w] = parts[w * APART + ROWS * PITCH + row];
            top = fmaxf(top, its_top[w]);
        }
        UNROLL for (int w = 0; w < WARPS; ++w) {
            const float share = fast_exp2(its_top[w] - top);
            const Two its = *(const Two*)(parts + w * APART + here);
            sum += share * parts[w * APART + ROWS * PITCH + ROWS + row];
            out.x += share * its.x;
            out.y += share * its.y;
        }
        *(Two*)(parts + here) = out;
        if (pair % (DIM / 2) == 0) {
            tops[row] = top;
            sums[row] = sum;
        }
    }
    sync_cluster();

    // The blocks of a KV head: neighbouring lanes read the parts of all blocks, and add them up.
    const int index = split * WARPS * 32 + thread(), rank = index % SPLITS;
    ROLLED for (int pair = index / SPLITS; pair < used * DIM / 2; pair += WARPS * 32) {
        const int row = pair / (DIM / 2), column = pair % (DIM / 2) * 2;
        const float top = cluster_read(tops + row, rank);
        float sum = cluster_read(sums + row, rank);
        Two out = cluster_read((const Two*)(parts + row * PITCH + column), rank);
        float highest = top;
        UNROLL for (int mask = 1; mask < SPLITS; mask *= 2) highest = fmaxf(highest, shuffle_xor(highest, mask));
        const float share = fast_exp2(top - highest);
        sum *= share;
        out.x *= share;
        out.y *= share;
        UNROLL for (int mask = 1; mask < SPLITS; mask *= 2) {
            sum += shuffle_xor(sum, mask);
            out.x += shuffle_xor(out.x, mask);
            out.y += shuffle_xor(out.y, mask);
        }
        if (rank == 0) {
            const int head = kv_head * GROUP + row % GROUP, token = begin + row / GROUP;
            const float by = sum > 0 ? 1.0f / sum : 0.0f;
            *(u32*)(p.out + far(batch, p.out_batch) + far(head, p.out_head) + far(token, p.out_token) + column) =
                pack2<BF16>(out.x * by, out.y * by);
            if (p.lse && column == 0)
                p.lse[far(batch, p.lse_batch) + far(head, p.lse_head) + far(token, p.lse_token)] =
                    sum > 0 ? (highest + fast_log2(sum)) * 0.6931471805599453f : -bits_float(0x7F800000);
        }
    }
    leave_cluster();                               // until all have read it, this block's memory stays
}

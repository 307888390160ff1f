// Attention of few queries over many keys, in one launch: each byte of K and V is read once.
//
// The query heads that share a KV head, and their few tokens, are the rows of one tile of the tensor cores. Every warp
// is on its own: it takes other 16 keys than all other warps, has them copied to its own shared memory a few steps
// ahead, and keeps its own running maximum, sum and output. Only at the end do warps meet: those of a block in shared
// memory, the blocks of a KV head, which are one cluster, in each other's shared memory. So there is no second launch,
// nothing goes through global memory, and the first keys travel while the queries do.
//
// BF16, DIM (of keys and values, a multiple of 64), TILES (of 16 query rows), WARPS, STAGES (steps ahead, and the one
// at work), PAGE (0: K and V are tensors; else pages of so many keys, a multiple of 16), CAUSAL (a query sees no key
// after its own), WINDOW (nor those more than `left` before), GROUP (query heads to a KV head), STARTS (queries are packed).
#include "device.h"

struct Params {
    const u16 *q, *k, *v;
    u16* out;
    float* lse;                                    // or null
    const i32 *table, *lengths, *starts;           // with PAGE: of each row of the batch its pages, its number of keys,
                                                   // and with STARTS where its queries begin
    i64 q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token;
    i64 out_batch, out_head, out_token, lse_batch, lse_head, lse_token, table_batch;
    i32 keys, room, left;
    float scale;                                   // times log2(e): exponentials are powers of two here
};

constexpr int KEYS = 16;                           // of one step of one warp
constexpr int UNITS = DIM / 8;                     // of 16 bytes in a row
constexpr int STEP = KEYS * DIM;                   // halves of K, or of V, of one step
constexpr int STEPS_OF_DIM = DIM / 16;
constexpr int ROWS = TILES * 16;
static_assert(32 % UNITS == 0, "a row of 64, 128 or 256");
constexpr float NONE = -1e30f;                     // a maximum of nothing; finite, so that a difference is no NaN

struct Two { float x, y; };

// Row and unit of 16 bytes -> place: units are exchanged within a row so that eight rows of one unit are in eight
// different places of a line.
FN int place(int row, int unit) { return row * DIM + ((unit ^ (row & 7)) * 8); }

FN i64 page_of(const Params& p, int batch, int key) {
#if PAGE
    return p.table[batch * p.table_batch + key / PAGE];
#else
    return 0;
#endif
}

// 16 keys and values from `first` on, those before `end`; others become zeros. `k` and `v` are where this lane's first
// row would be were `first` 0.
FN void fetch(const Params& p, u16* to, const u16* k, const u16* v, i64 page, int first, int end) {
#if PAGE
    k += page * p.k_batch + (first % PAGE) * p.k_token;
    v += page * p.v_batch + (first % PAGE) * p.v_token;
#else
    k += first * p.k_token;
    v += first * p.v_token;
#endif
    UNROLL for (int n = 0; n < KEYS; n += 32 / UNITS) {
        const int row = n + lane() / UNITS, unit = lane() % UNITS;
        copy_async(to + place(row, unit), k, first + row < end);
        copy_async(to + STEP + place(row, unit), v, first + row < end);
        k += 32 / UNITS * p.k_token;
        v += 32 / UNITS * p.v_token;
    }
}

KERNEL(decode, Params, WARPS * 32)
{
    const int kv_head = block_y(), batch = block_z(), splits = cluster_size(), split = cluster_rank();
    const int g = lane() / 4, t = lane() % 4;
    int tokens = p.room;
    i64 begin = 0;                                 // of this row's queries in a packed tensor of them
#if STARTS
    begin = p.starts[batch];
    tokens = p.starts[batch + 1] - (i32)begin;
#endif
#if PAGE
    const int length = p.lengths[batch];
#else
    const int length = p.keys;
#endif
    const int offset = length - tokens;            // the last query sits at the last key

    const int lowest = WINDOW ? (offset - p.left > 0 ? (offset - p.left) / KEYS * KEYS : 0) : 0;
    const int all_see = CAUSAL ? offset + 1 : length;                          // before this key nothing is masked
    const int none_before = WINDOW ? offset + tokens - 1 - p.left : 0;        // and from this one on
    u16* mine = (u16*)shared() + warp() * (STAGES * 2 * STEP);
    const u16* k = p.k + kv_head * p.k_head + lane() / UNITS * p.k_token + lane() % UNITS * 8;
    const u16* v = p.v + kv_head * p.v_head + lane() / UNITS * p.v_token + lane() % UNITS * 8;
#if !PAGE
    k += batch * p.k_batch;
    v += batch * p.v_batch;
#endif
    const int stride = splits * WARPS * KEYS;

    // The first keys and values are on their way before anything else is asked for.
    const int start = lowest + (split * WARPS + warp()) * KEYS;
    int ahead = start, filled = 0, read = 0;
    i64 page = ahead < length ? page_of(p, batch, ahead) : 0;
    auto fetch_ahead = [&]() {
        const i64 next = ahead + stride < length ? page_of(p, batch, ahead + stride) : 0;
        if (ahead < length) fetch(p, mine + filled * 2 * STEP, k, v, page, ahead, length);
        copy_commit();
        ahead += stride;
        page = next;
        filled = filled + 1 == STAGES ? 0 : filled + 1;
    };
    ROLLED for (int n = 0; n < STAGES - 1; ++n) fetch_ahead();

    // The queries, as the left operand of the tensor cores. They are not waited for until the first scores.
    u32 q[TILES][STEPS_OF_DIM][4];
    int sees[TILES][2];                            // up to which key a row sees; for rows g and g + 8
    UNROLL for (int m = 0; m < TILES; ++m) {
        UNROLL for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + g, token = row / GROUP, head = kv_head * GROUP + row % GROUP;
            const bool real = token < tokens;
            const u16* from = p.q + batch * p.q_batch + head * p.q_head + (begin + token) * p.q_token + 2 * t;
            UNROLL for (int s = 0; s < STEPS_OF_DIM; ++s) {
                q[m][s][half] = real ? *(const u32*)(from + s * 16) : 0;
                q[m][s][half + 2] = real ? *(const u32*)(from + s * 16 + 8) : 0;
            }
            sees[m][half] = CAUSAL ? offset + token : length - 1;
        }
    }

    float best[TILES][2], total[TILES][2], acc[TILES][UNITS][4];
    UNROLL for (int m = 0; m < TILES; ++m) {
        best[m][0] = best[m][1] = NONE;
        total[m][0] = total[m][1] = 0;
        UNROLL for (int n = 0; n < UNITS; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0;
    }

    ROLLED for (int first = start; first < length; first += stride) {
        sync_warp();                               // all lanes have read what is filled again now
        fetch_ahead();
        copy_wait<STAGES - 1>();
        sync_warp();                               // what each lane fetched is there for all
        const u16* keys = mine + read * 2 * STEP;
        const u16* values = keys + STEP;
        read = read + 1 == STAGES ? 0 : read + 1;

        float scores[TILES][2][4];                 // of keys 0 to 7, and 8 to 15
        UNROLL for (int m = 0; m < TILES; ++m)
            UNROLL for (int j = 0; j < 2; ++j) scores[m][j][0] = scores[m][j][1] = scores[m][j][2] = scores[m][j][3] = 0;
        UNROLL for (int s = 0; s < STEPS_OF_DIM; ++s) {
            u32 part[4];
            matrices4(part, keys + place(lane() / 16 * 8 + lane() % 8, 2 * s + lane() / 8 % 2));
            const u32 low[2] = {part[0], part[1]}, high[2] = {part[2], part[3]};
            UNROLL for (int m = 0; m < TILES; ++m) {
                mma<BF16>(scores[m][0], q[m][s], low);
                mma<BF16>(scores[m][1], q[m][s], high);
            }
        }

        const bool masked = first + KEYS > all_see || (WINDOW && first < none_before) || first + KEYS > length;
        u32 weights[TILES][4];
        UNROLL for (int m = 0; m < TILES; ++m) {
            UNROLL for (int half = 0; half < 2; ++half) {                      // rows g and g + 8
                float s[4] = {scores[m][0][2 * half] * p.scale, scores[m][0][2 * half + 1] * p.scale,
                              scores[m][1][2 * half] * p.scale, scores[m][1][2 * half + 1] * p.scale};
                bool seen[4] = {true, true, true, true};
                if (masked) {
                    UNROLL for (int n = 0; n < 4; ++n) {
                        const int key = first + n / 2 * 8 + 2 * t + n % 2;
                        seen[n] = key <= sees[m][half] && key < length
                            && (!WINDOW || key >= (CAUSAL ? sees[m][half] : offset + (m * 16 + half * 8 + g) / GROUP)
                                                  - p.left);
                        if (!seen[n]) s[n] = NONE;
                    }
                }
                float higher = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
                higher = fmaxf(higher, shuffle_xor(higher, 1));
                higher = fmaxf(higher, shuffle_xor(higher, 2));
                higher = fmaxf(higher, best[m][half]);
                float w[4];
                UNROLL for (int n = 0; n < 4; ++n) w[n] = seen[n] ? fast_exp2(s[n] - higher) : 0.0f;
                const float fade = fast_exp2(best[m][half] - higher);
                if (votes(higher > best[m][half])) {
                    UNROLL for (int n = 0; n < UNITS; ++n) {
                        acc[m][n][2 * half] *= fade;
                        acc[m][n][2 * half + 1] *= fade;
                    }
                }
                total[m][half] = total[m][half] * fade + ((w[0] + w[1]) + (w[2] + w[3]));
                best[m][half] = higher;
                weights[m][half] = pack2<BF16>(w[0], w[1]);
                weights[m][half + 2] = pack2<BF16>(w[2], w[3]);
            }
        }
        UNROLL for (int n = 0; n < UNITS; n += 2) {
            u32 part[4];
            matrices4_turned(part, values + place(lane() / 8 % 2 * 8 + lane() % 8, n + lane() / 16));
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
    const int used = tokens * GROUP;             // rows that are real
    float* part = (float*)mine;                    // ROWS x DIM, then the maxima, then the sums
    constexpr int PART = ROWS * (DIM + 2);
    UNROLL for (int m = 0; m < TILES; ++m) {
        UNROLL for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + g;
            float sum = total[m][half];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (row < used) {
                UNROLL for (int n = 0; n < UNITS; ++n)
                    *(Two*)(part + row * DIM + n * 8 + 2 * t) = Two{acc[m][n][2 * half], acc[m][n][2 * half + 1]};
                if (t == 0) {
                    part[ROWS * DIM + row] = best[m][half];
                    part[ROWS * DIM + ROWS + row] = sum;
                }
            }
        }
    }
    sync_block();
    float* whole = (float*)(shared() + WARPS * STAGES * 2 * STEP * 2);         // of this block, laid out like a part
    const float* parts = (const float*)shared();
    constexpr int APART = STAGES * STEP;           // floats from one warp's part to the next
    static_assert(PART <= APART, "a part fits where the keys were");
    ROLLED for (int at = thread() * 2; at < used * DIM; at += WARPS * 64) {
        const int row = at / DIM;
        float top = NONE, sum = 0;
        Two out = {0, 0};
        UNROLL for (int w = 0; w < WARPS; ++w) top = fmaxf(top, parts[w * APART + ROWS * DIM + row]);
        UNROLL for (int w = 0; w < WARPS; ++w) {
            const float share = fast_exp2(parts[w * APART + ROWS * DIM + row] - top);
            const Two its = *(const Two*)(parts + w * APART + at);
            sum += share * parts[w * APART + ROWS * DIM + ROWS + row];
            out.x += share * its.x;
            out.y += share * its.y;
        }
        *(Two*)(whole + at) = out;
        if (at % DIM == 0) {
            whole[ROWS * DIM + row] = top;
            whole[ROWS * DIM + ROWS + row] = sum;
        }
    }
    sync_cluster();

    // The blocks of a KV head: each writes its share of the output.
    ROLLED for (int at = (split * WARPS * 32 + thread()) * 2; at < used * DIM; at += splits * WARPS * 64) {
        const int row = at / DIM, token = row / GROUP, head = kv_head * GROUP + row % GROUP;
        float top = NONE, sum = 0;
        Two out = {0, 0};
        for (int rank = 0; rank < splits; ++rank) {
            const float its_top = cluster_read(whole + ROWS * DIM + row, rank);
            const float its_sum = cluster_read(whole + ROWS * DIM + ROWS + row, rank);
            const Two its = cluster_read((const Two*)(whole + at), rank);
            const float higher = fmaxf(top, its_top);
            const float old = fast_exp2(top - higher), share = fast_exp2(its_top - higher);
            sum = sum * old + its_sum * share;
            out.x = out.x * old + its.x * share;
            out.y = out.y * old + its.y * share;
            top = higher;
        }
        const float by = sum > 0 ? 1.0f / sum : 0.0f;
        *(u32*)(p.out + batch * p.out_batch + head * p.out_head + (begin + token) * p.out_token + at % DIM) =
            pack2<BF16>(out.x * by, out.y * by);
        if (p.lse && at % DIM == 0)
            p.lse[batch * p.lse_batch + head * p.lse_head + (begin + token) * p.lse_token] =
                sum > 0 ? (top + fast_log2(sum)) * 0.6931471805599453f : -bits_float(0x7F800000);
    }
    sync_cluster();                                // until all have read it, this block's memory stays
}

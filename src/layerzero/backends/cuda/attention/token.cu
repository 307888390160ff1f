// Attention of the new token of each sequence over its cache, in one launch: rotates queries and key,
// writes key and value into the cache, and attends.
//
// Keys are the rows of an MMA tile, and the query heads of a KV head its columns. The order of the
// inputs in a sum is free, if it is the same on both sides: so each lane reads 16 bytes of a row of the
// cache into registers, and nothing of the cache goes through shared memory. A warp has the next 16
// keys and values on their way while it multiplies these. With little shared memory and half of the
// registers the kernel runs beside the blocks of the product that follows (linear/rows.cu), which fill
// their rings meanwhile. combine.h combines the warps of a block and the blocks of a KV head, a cluster.
//
// In a graph the first keys and values are on their way before the kernels in front of this one have
// ended. Those may write neither the position nor the tokens in front of it: a graph has one step.
//
// Macros: BF16, WIDE_ANGLES (float32), DIM (64 or 128), GROUP (query heads per KV head, at most 8),
// SPLITS (blocks of a cluster), WARPS, WINDOW (a query sees `left` keys before its own), BLOCKS (minimum
// per multiprocessor).
#include "device.h"
#include "combine.h"

struct Params {
    const i64* position;                           // of the new token
    const u16 *qk, *value;
    const void* angles;                            // by position: cosine of each column, then sine
    u16 *keys, *values, *out;
    i64 room_row;                                  // strides
    i32 room_token, qk_row, qk_head, value_row, value_head, heads, left;
    float scale, unscale;                          // positive; times log2(e), as exponentials are in base 2
};

constexpr int KEYS = 16;                           // per step of a warp
constexpr int STRIDE = SPLITS * WARPS * KEYS;
constexpr int K_PIECES = DIM / 32, V_PIECES = DIM / 64;        // of 16 bytes that a lane has of a row
constexpr int TILES = DIM / 16;                    // of the result
constexpr int PAIRS = DIM / 4;                     // two columns, and the two that rotate with them
constexpr int PITCH = DIM * 2 + 64;                // of a query, without bank conflicts
constexpr float ENOUGH = 8.0f;                     // rescale only if a weight would exceed 2^8
typedef Combine<GROUP, DIM> Combiner;
static_assert(GROUP <= 8 && (DIM == 64 || DIM == 128) && WARPS * 32 % PAIRS == 0, "as documented");

FN u32 word(const Four& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
FN float low(u32 pair) { return to_float<BF16>(u16(pair)); }
FN float high(u32 pair) { return to_float<BF16>(u16(pair >> 16)); }
FN Float2 angles_at(const void* table, i64 at) {
    if (WIDE_ANGLES) return *((const Float2*)((const float*)table + at));
    const u32 both = *(const u32*)((const u16*)table + at);
    return Float2{low(both), high(both)};
}

#define BOUNDS WARPS * 32, BLOCKS
KERNEL(token, Params, BOUNDS)
{
    launch_next();
    const int kv_head = block_y(), batch = block_z(), split = SPLITS > 1 ? cluster_rank() : 0;
    const int g = lane() / 4, t = lane() % 4;
    const int position = int(*p.position);
    const int lowest = WINDOW && position > p.left ? (position - p.left) / KEYS * KEYS : 0;
    const int start = lowest + (split * WARPS + warp()) * KEYS;

    const i64 entry = batch * p.room_row + kv_head * DIM, fresh = entry + i64(position) * p.room_token;
    const u16* const keys = p.keys + entry + t * 8;
    const u16* const values = p.values + entry + g * 8;
    Four k[2][K_PIECES], v[4][V_PIECES];           // zeros from the new token on
    auto fetch_keys = [&](int first) {
        UNROLL for (int r = 0; r < 2; ++r) {
            const int key = first + r * 8 + g;
            UNROLL for (int i = 0; i < K_PIECES; ++i)
                k[r][i] = load4_if(keys + i64(key) * p.room_token + i * 32, key < position);
        }
    };
    auto fetch_values = [&](int first) {
        UNROLL for (int r = 0; r < 4; ++r) {
            const int key = first + r / 2 * 8 + 2 * t + r % 2;
            UNROLL for (int i = 0; i < V_PIECES; ++i)
                v[r][i] = load4_if(values + i64(key) * p.room_token + i * 64, key < position);
        }
    };
    fetch_keys(start);
    fetch_values(start);

    u8* const queries = shared() + WARPS * Combiner::PART;
    u8* const fresh_key = queries + GROUP * PITCH;
    u8* const fresh_value = fresh_key + DIM * 2;
    const Combiner combine = make_combine<GROUP, DIM>(fresh_value + DIM * 2, split);
    open_inbox(combine, GROUP);
    const int pair = thread() % PAIRS;
    const i64 angle = i64(position) * (2 * DIM) + 2 * pair;
    const Float2 cosine = angles_at(p.angles, angle), sine = angles_at(p.angles, angle + DIM);

    wait_for_previous();
    ROLLED for (int head = thread() / PAIRS; head <= GROUP; head += WARPS * 32 / PAIRS) {
        const u16* from = p.qk + i64(batch) * p.qk_row + 2 * pair
            + (head < GROUP ? kv_head * GROUP + head : p.heads + kv_head) * p.qk_head;
        const u32 a = *(const u32*)from, b = *(const u32*)(from + DIM / 2);
        const u32 first = pack2<BF16>(low(a) * cosine.x - low(b) * sine.x, high(a) * cosine.y - high(b) * sine.y);
        const u32 second = pack2<BF16>(low(b) * cosine.x + low(a) * sine.x, high(b) * cosine.y + high(a) * sine.y);
        u8* const to = head < GROUP ? queries + head * PITCH : fresh_key;
        ((u32*)to)[pair] = first;
        ((u32*)to)[PAIRS + pair] = second;
        if (head == GROUP && split == 0) {
            ((u32*)(p.keys + fresh))[pair] = first;
            ((u32*)(p.keys + fresh))[PAIRS + pair] = second;
        }
    }
    const int piece = WARPS * 32 - 1 - thread();
    if (piece < DIM / 8) {
        const Four v = load4(p.value + i64(batch) * p.value_row + kv_head * p.value_head + piece * 8);
        store4(fresh_value + piece * 16, v);
        if (split == 0) store4(p.values + fresh + piece * 8, v);
    }
    sync_block();

    const u8* const query = queries + (g < GROUP ? g : 0) * PITCH + t * 16;    // columns that are none repeat one
    float best[2] = {NONE, NONE}, threshold[2] = {NONE, NONE}, total[2] = {0, 0}, acc[TILES][4];
    UNROLL for (int n = 0; n < TILES; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
    ROLLED for (int first = start; first <= position; first += STRIDE) {
        if (position < first + KEYS) {             // the new token is one of these
            UNROLL for (int r = 0; r < 2; ++r) if (first + r * 8 + g == position)
                UNROLL for (int i = 0; i < K_PIECES; ++i) k[r][i] = load4(fresh_key + (i * 4 + t) * 16);
            UNROLL for (int r = 0; r < 4; ++r) if (first + r / 2 * 8 + 2 * t + r % 2 == position)
                UNROLL for (int i = 0; i < V_PIECES; ++i) v[r][i] = load4(fresh_value + (i * 8 + g) * 16);
        }
        float parts[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};      // two chains
        UNROLL for (int i = 0; i < K_PIECES; ++i) {
            const Four q = load4(query + i * 64);
            const u32 k_low[4] = {k[0][i].x, k[1][i].x, k[0][i].y, k[1][i].y};
            const u32 k_high[4] = {k[0][i].z, k[1][i].z, k[0][i].w, k[1][i].w};
            const u32 q_low[2] = {q.x, q.y}, q_high[2] = {q.z, q.w};
            mma<BF16>(parts[0], k_low, q_low);
            mma<BF16>(parts[1], k_high, q_high);
        }
        fetch_keys(first + STRIDE);
        float scores[4];                           // keys g and g + 8, two queries each
        UNROLL for (int n = 0; n < 4; ++n) scores[n] = parts[0][n] + parts[1][n];
        if (first + KEYS > position + 1 || (WINDOW && first < position - p.left)) {
            UNROLL for (int n = 0; n < 4; ++n) {
                const int key = first + n / 2 * 8 + g;
                if (key > position || (WINDOW && key < position - p.left)) scores[n] = -bits_float(0x7F800000);
            }
        }
        bool higher = false;
        UNROLL for (int n = 0; n < 4; ++n) higher |= scores[n] > threshold[n % 2];
        if (ballot(higher)) {                      // at the first keys, and rarely after
            UNROLL for (int e = 0; e < 2; ++e) {
                float top = fmaxf(scores[e], scores[e + 2]);
                UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
                top = fmaxf(top * p.scale, best[e]);
                const float rescale = fast_exp2(best[e] - top);
                best[e] = top;
                threshold[e] = (top + ENOUGH) * p.unscale;
                total[e] *= rescale;
                UNROLL for (int n = 0; n < TILES; ++n) {
                    acc[n][e] *= rescale;
                    acc[n][e + 2] *= rescale;
                }
            }
        }
        float w[4];
        UNROLL for (int n = 0; n < 4; ++n) w[n] = fast_exp2(scores[n] * p.scale - best[n % 2]);
        total[0] += w[0] + w[2];
        total[1] += w[1] + w[3];
        const u32 weights[2] = {transpose_8x8(pack2<BF16>(w[0], w[1])), transpose_8x8(pack2<BF16>(w[2], w[3]))};
        // Two columns of a lane are the rows g and g + 8 of a tile.
        UNROLL for (int n = 0; n < TILES; ++n) {
            const int i = n / 4;
            const u32 a = word(v[0][i], n % 4), b = word(v[1][i], n % 4), c = word(v[2][i], n % 4), d = word(v[3][i], n % 4);
            const u32 tile[4] = {permute_bytes(a, b, 0x5410), permute_bytes(a, b, 0x7632),
                                 permute_bytes(c, d, 0x5410), permute_bytes(c, d, 0x7632)};
            mma<BF16>(acc[n], tile, weights);
        }
        fetch_values(first + STRIDE);
    }

    u8* const part = shared() + warp() * Combiner::PART;
    UNROLL for (int e = 0; e < 2; ++e) {
        const int row = 2 * t + e;
        float sum = total[e];                      // still per lane
        UNROLL for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
        if (row < GROUP) {
            UNROLL for (int n = 0; n < TILES; ++n)
                *(Float2*)(row_of(part, row, Combiner::PITCH) + n / 4 * 64 + g * 8 + n % 4 * 2) =
                    Float2{acc[n][e], acc[n][e + 2]};
            if (g == 0) *max_sum_of(part, row, GROUP, Combiner::PITCH) = Float2{best[e], sum};
        }
    }
    send(combine, shared(), Combiner::PART, GROUP);
    receive(combine, GROUP, [&](int row, int column, Float2 out, float, float sum) {
        const float by = reciprocal(sum);          // a token sees itself: it is not 0
        *(u32*)(p.out + (i64(batch) * p.heads + kv_head * GROUP + row) * DIM + column) =
            pack2<BF16>(out.x * by, out.y * by);
    });
}

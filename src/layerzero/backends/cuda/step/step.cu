// One token through a whole decoder in one launch. A block is persistent: its last warps stream tiles
// of the weights, and of the keys and values that are cached, through a ring in shared memory, and
// run ahead over the ends of phases since none of them depends on this token; the other warps
// multiply. There is no grid barrier: a result is a word of 8 bytes, {value, tag of this token and
// layer}, or of 16 bytes with several values (inputs.h, eights.h), and a block that needs it polls that word.
// Few tiles are in flight while the copies run ahead: further requests would queue in the memory system,
// and the polls behind them.
//
// A layer: norm and qkv; attention, split over blocks by KV head and by tokens; where it was split,
// its merge; out; norm, gate and up; down. Every block takes the norms for itself.
//
// Every wait is bounded by the time limit of the launch: one that expires sets the problem word and
// lets all further waits of all blocks pass, so that the launch ends by itself, with no logits.
//
// Macros (plan.py): HIDDEN, HEADS, KV_HEADS, DIM, HALF (pairs that are rotated), INNER, BATCH, BIAS,
// HEAD_NORMS, ACTIVATION, WARPS, COPIERS, STAGES, STAGE (bytes), FLIGHT, AHEAD, FIRST_POLLS and
// LATER_POLLS (inputs.h), and of each product the rows (or pairs of gate and up) of a tile and the
// slices of a row; TOKENS of a tile of the cache, CHUNK tokens at least of a split, SPLITS at most;
// offsets of the parts of the shared memory and of the words. ONE_LOOP: the producer has one code for all plain
// weights, in place of one for each. CODES: the layers' weights are bf16 (0), int4
// in groups of 128 (1), or fp8_e4m3 with a scale for each row (2); and the slices of their rows (codes.h).
#include "stream.h"

struct alignas(16) Layer {
    const u16 *norm, *qkv, *bias, *q_norm, *k_norm, *out, *mlp_norm, *gate_up, *down, *angles;
    u16 *keys, *values;
#if CODES
    const u8 *qkv_scales, *out_scales, *gate_up_scales, *down_scales;    // none of bf16
#endif
    i64 window;                                    // tokens that are seen, the new one too
};

struct Params {
    const Layer* layers;
    const i64* tokens;                             // none: `embed` is what was embedded already
    const u16 *embed, *norm, *head;
    float* logits;
    i64* state;                                    // the position of the token, then BATCH lengths
    u64* words;
    u32 *control, *problem;                        // launches so far, blocks done, problem; and for the host
    u64* stamps;
    const TensorMap* maps;                         // MAPS of each layer: codes of qkv, out, gate_up, down; keys, values
    i64 capacity;                                  // tokens that the cache has room for
    u64 limit;                                     // nanoseconds
    i32 layer_count, vocab;
    float eps, head_eps, head_norm_eps, scale;     // of the layers, the last norm, the heads; the scale is times log2(e)
};

constexpr int THREADS = 32 * WARPS, GROUP = HEADS / KV_HEADS, QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int PITCH = 2 * DIM + 16, COLS = (GROUP + 7) / 8;
constexpr float NONE = -1e30f;
constexpr bool CODED = CODES != 0;
constexpr int TEAM = CODED ? 2 : 1, TEAMS = WARPS / TEAM;  // warps that share a tile of codes

// Keys of a tile of the cache, and their values CACHED bytes later: heads of whole runs of 128 bytes are
// copied as boxes and lie as those do (stream.h), others have rows that are PITCH apart.
constexpr bool BOXES = DIM % 64 == 0;
constexpr int CACHED = TOKENS * (BOXES ? 2 * DIM : PITCH), MAPS = (CODES ? 4 : 0) + (BOXES ? 2 : 0);
constexpr int PIECE = 4, PIECES = DIM / 4 / PIECE, MERGES = BATCH * HEADS * PIECES;    // words of a head that a warp merges

FN float low(u32 pair) { return bits_float(pair << 16); }
FN float high(u32 pair) { return bits_float(pair & 0xFFFF0000u); }
FN u64 word(u32 value, u32 tag) { return u64(tag) << 32 | value; }
FN int ceil_div(int a, int b) { return (a + b - 1) / b; }
FN constexpr int min_int(int a, int b) { return a < b ? a : b; }
FN constexpr int max_int(int a, int b) { return a > b ? a : b; }
FN int cached_at(int row, int unit) {              // of 16 bytes
    return BOXES ? unit / 8 * (TOKENS * 128) + row * 128 + swizzled(row % 8, unit % 8) : row * PITCH + unit * 16;
}

// Shared memory

FN u16* even_x() { return (u16*)(shared() + EVEN_AT); }     // BATCH x HIDDEN
FN u16* odd_x() { return (u16*)(shared() + ODD_AT); }       // BATCH x of out and of down; what attention needs
FN float* residual() { return (float*)(shared() + RESIDUAL_AT); }
FN u64* full(int stage) { return (u64*)(shared() + BARRIERS_AT) + stage; }
FN u64* empty(int stage) { return (u64*)(shared() + BARRIERS_AT) + STAGES + stage; }
FN volatile int* phase_now() { return (volatile int*)(shared() + BARRIERS_AT + 16 * STAGES); }
constexpr int ALL_DONE = 0x7FFFFFFF;               // as a phase
FN volatile int* lost() { return phase_now() + 1; }
// Of this layer and the next one: in registers they would have 68
FN Layer* layer(int number) { return (Layer*)(shared() + BARRIERS_AT + 16 * STAGES + 16) + number % 2; }
FN float* sums() { return (float*)(layer(0) + 2); }  // BATCH x WARPS
// For products with codes (codes.h)
constexpr int ROUNDS = (STAGES + TEAMS - 1) / TEAMS + 2, LONGEST = max_int(max_int(HIDDEN, HEADS * DIM), INNER);
FN float* code_sums() { return sums() + (BATCH * WARPS + 3) / 4 * 4; }
FN float* x_scales(bool of_odd_x) {
    return code_sums() + ROUNDS * WARPS * 16 * BATCH + of_odd_x * (BATCH * LONGEST / 128);
}

// Waiting

struct Watch {
    u32 *control, *problem;
    u64 start, limit;
};

// Has the launch given up, or to give up now?
OUTLINE bool is_over(u32* control, u32* problem, u64 start, u64 limit) {
    if (*lost()) return true;
    const bool others_gave_up = peek_flag(control + 2) != 0;
    if (!others_gave_up && clock_ns() - start < limit) return false;
    *lost() = 1;
    if (!others_gave_up) {
        post_flag(control + 2, 1);
        post_flag(problem, 1);
    }
    return true;
}

// The first warp that copies watches the time, in all of its waits and until the others are done. Those
// only look whether it has given up: that is little code, which all of their waits have.
FN bool given_up() {
    yield();
    return *lost();
}

FN void wait(u64* mbarrier, u32 parity) {
    while (!mbarrier_passed(mbarrier, parity) && !given_up());
}

FN bool in_vain(const Watch& watch, int& spins) {
    yield();
    return ++spins % 64 == 0 && is_over(watch.control, watch.problem, watch.start, watch.limit);
}

// Not inlined: every tile is waited for, and the code of all phases has to stay in its cache
OUTLINE void wait_longer(u64* mbarrier, u32 parity, u32* control, u32* problem, u64 start, u64 limit) {
    const Watch watch = {control, problem, start, limit};
    int spins = 0;
    while (!mbarrier_passed(mbarrier, parity) && !in_vain(watch, spins));
}

FN void wait_watching(u64* mbarrier, u32 parity, const Watch& watch) {
    if (!mbarrier_passed(mbarrier, parity))
        wait_longer(mbarrier, parity, watch.control, watch.problem, watch.start, watch.limit);
}

// Which items of a phase are this block's: every grid-th, from where the phase before ended.
struct Share {
    int begin, count;
    FN_MEMBER int item(int n) const { return begin + n * GRID; }
};

FN Share take(int& first, int items) {
    const int begin = block_x() >= first ? block_x() - first : block_x() - first + GRID;
    first = (first + items) % GRID;
    return {begin, begin < items ? (items - begin + GRID - 1) / GRID : 0};
}

// How the attention of one layer is split. A worker has one KV head of one row of the batch.
struct Spread {
    int start, chunk, splits, position;
    FN_MEMBER int workers() const { return BATCH * KV_HEADS * splits; }
    FN_MEMBER int begin(int split) const { return start + split * chunk; }
    FN_MEMBER int end(int split) const { return min_int(position, start + (split + 1) * chunk); }
    FN_MEMBER int tiles(int split) const { return max_int(0, ceil_div(end(split) - begin(split), TOKENS)); }
};

FN Spread spread(i64 window, int position) {
    const int start = window <= position ? position + 1 - int(window) : 0, past = position - start;
    const int wanted = max_int(1, min_int(SPLITS, ceil_div(past, CHUNK)));
    const int chunk = max_int(1, ceil_div(ceil_div(past, wanted), TOKENS)) * TOKENS;
    return {start, chunk, max_int(1, ceil_div(past, chunk)), position};
}

// Where a tile of an item of several lies among all tiles of `count` items: WARPS items at a time, or
// those that are left, have their first tiles, then their second ones, so that one warp gets all of an
// item and others work beside it. But for those that are left, a stage of the ring is always one warp's.
FN int together(int n, int count) { return min_int(WARPS, count - n / WARPS * WARPS); }
FN int sequence(int n, int tile, int tiles, int count) {
    return tiles == 1 ? n : n / WARPS * WARPS * tiles + tile * together(n, count) + n % WARPS;
}

#include "producer.h"

#include "inputs.h"

// The other warps

FN float dot(Four w, const float (&x)[8], float acc) {
    acc += low(w.x) * x[0];
    acc += high(w.x) * x[1];
    acc += low(w.y) * x[2];
    acc += high(w.y) * x[3];
    acc += low(w.z) * x[4];
    acc += high(w.z) * x[5];
    acc += low(w.w) * x[6];
    return acc + high(w.w) * x[7];
}

// What becomes of a product
enum Kind { TO_QKV, TO_STREAM, TO_GATE, TO_LOGITS };

struct Target {
    int kind, rows;
    const u16* bias;
    u64* words;
    u32 tag;
    float* logits;
#if CODES
    const float* scales;                           // of rows with fp8 codes
    const float* x_scales;
    float norm;                                    // of x, of the row of the batch that is this lane's
#endif
};

struct Consumer {
    int next, phase, first;

    FN_MEMBER const u8* tile(int number) const {
        if (STAGES % WARPS) wait_for_stage(number);
        wait(full(number % STAGES), (number / STAGES) & 1);
        return shared() + number % STAGES * STAGE;
    }

    // Of a stage that another warp had before: until that has released it the parity of `full` says nothing.
    FN_MEMBER void wait_for_stage(int number) const {
        if (number >= STAGES) wait(empty(number % STAGES), (number / STAGES - 1) & 1);
    }

    FN_MEMBER void release(int number) const {
        sync_warp();
        if (lane() == 0 && !*lost())
            UNROLL for (int n = 0; n < TEAM; ++n) mbarrier_arrive(empty(number % STAGES));
    }

    FN_MEMBER void entered() { if (thread() == 0) *phase_now() = phase; }

    // acc += rows of the tile times x, where both are 8 * UNITS long; the rows of x are STRIDE apart
    template <int ROWS, int UNITS, int STRIDE>
    FN_MEMBER void multiply(int number, const u16* x, float (&acc)[BATCH][ROWS]) const {
        constexpr int CHAINS = ROWS * BATCH >= 4 ? 1 : 4 / (ROWS * BATCH), TURNS = (UNITS + 31) / 32;
        // No more than 8 together: the code of all phases has to stay in its cache. As many in each round, so
        // that few have lanes past the end, which cost much where loads wait for a branch.
        constexpr int GROUPS = (TURNS + 7) / 8, TOGETHER = (TURNS + GROUPS - 1) / GROUPS;
        constexpr bool WHOLE = UNITS == 32 * TOGETHER * GROUPS;
        const Four zero = {0, 0, 0, 0};
        float part[CHAINS][BATCH][ROWS];
        UNROLL for (int c = 0; c < CHAINS; ++c)
            UNROLL for (int b = 0; b < BATCH; ++b) UNROLL for (int r = 0; r < ROWS; ++r) part[c][b][r] = 0;
        const u8* at = tile(number) + lane() * 16;
        const u16* from = x + lane() * 8;
        ROLLED for (int turn = 0; turn < TURNS; turn += TOGETHER, at += TOGETHER * 512, from += TOGETHER * 256)
            UNROLL for (int n = 0; n < TOGETHER; ++n) {
                const bool inside = WHOLE || (turn + n) * 32 + lane() < UNITS;
                UNROLL for (int b = 0; b < BATCH; ++b) {
                    const Four u = inside ? load4(from + b * STRIDE + n * 256) : zero;
                    const float v[8] = {low(u.x), high(u.x), low(u.y), high(u.y), low(u.z), high(u.z), low(u.w), high(u.w)};
                    UNROLL for (int r = 0; r < ROWS; ++r)
                        part[n % CHAINS][b][r] = dot(inside ? load4(at + r * (UNITS * 16) + n * 512) : zero, v,
                                                     part[n % CHAINS][b][r]);
                }
            }
        release(number);
        UNROLL for (int c = 0; c < CHAINS; ++c)
            UNROLL for (int b = 0; b < BATCH; ++b) UNROLL for (int r = 0; r < ROWS; ++r) acc[b][r] += part[c][b][r];
    }

    FN_MEMBER static float activated(float gate, float up) {
        if (ACTIVATION == 1) {                     // GELU by tanh
            const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
            return gate * up * reciprocal(1.0f + fast_exp2(-2.8853900817779268f * inner));
        }
        return gate * up * reciprocal(1.0f + fast_exp2(-1.4426950408889634f * gate));
    }

    FN_MEMBER static void emit(const Target& to, int row, int b, float sum, float bias) {
        if (to.kind == TO_LOGITS) to.logits[i64(b) * to.rows + row] = *lost() ? bits_float(0x7FC00000u) : sum;
        else
            post(to.words + b * to.rows + row,
                 word(float_bits(sum + (to.kind == TO_QKV ? bias : residual()[b * HIDDEN + row])), to.tag));
    }

    // One code for all products that are cut alike: gate and up have half of the rows of a tile each,
    // and two values to a word, for which a warp takes two tiles if it must.
    template <int K, int ROWS, int SLICES> FN_MEMBER void products(const u16* x, const Target& to) {
        const bool gated = ROWS % 2 == 0 && to.kind == TO_GATE;
        const int groups = gated && ROWS == 2 ? 2 : 1, tiles = groups * SLICES, values = groups * ROWS / 2;
        const Share share = take(first, gated ? INNER / values : ceil_div(to.rows, ROWS));
        ROLLED for (int n = (warp() + WARPS - next % WARPS) % WARPS; n < share.count; n += WARPS) {
            const int row = share.item(n) * ROWS + min_int(lane(), ROWS - 1);
            const bool wanted = lane() < ROWS && row < to.rows;
            const float bias = BIAS && wanted && to.kind == TO_QKV ? to_float<true>(to.bias[row]) : 0.0f;
            float before[BATCH];
            ROLLED for (int g = 0; g < groups; ++g) {
                float acc[BATCH][ROWS];
                UNROLL for (int b = 0; b < BATCH; ++b) UNROLL for (int r = 0; r < ROWS; ++r) acc[b][r] = 0;
                ROLLED for (int s = 0; s < SLICES; ++s) {
                    const int number = next + sequence(n, g * SLICES + s, tiles, share.count);
                    if (tiles > 1 && together(n, share.count) < WARPS) wait_for_stage(number);
                    multiply<ROWS, K / SLICES / 8, K>(number, x + s * (K / SLICES), acc);
                }
                UNROLL for (int b = 0; b < BATCH; ++b) {
                    UNROLL for (int r = 0; r < ROWS; ++r) acc[b][r] = warp_sum(acc[b][r]);
                    if (!gated) {
                        float sum = acc[b][0];
                        UNROLL for (int r = 1; r < ROWS; ++r) sum = lane() == r ? acc[b][r] : sum;
                        if (wanted) emit(to, row, b, sum, bias);
                        continue;
                    }
                    u64* at = to.words + b * (INNER / 2) + share.item(n) * (values / 2);
                    if (ROWS == 2) {
                        const float value = activated(acc[b][0], acc[b][1 % ROWS]);
                        if (g && lane() == 0) post(at, word(pack2<true>(before[b], value), to.tag));
                        before[b] = value;
                    } else {
                        UNROLL for (int v = 0; v < ROWS / 4; ++v)
                            if (lane() == v)
                                post(at + v, word(pack2<true>(activated(acc[b][2 * v], acc[b][ROWS / 2 + 2 * v]),
                                                              activated(acc[b][2 * v + 1], acc[b][ROWS / 2 + 2 * v + 1])),
                                                  to.tag));
                    }
                }
            }
        }
        next += share.count * tiles;
        ++phase;
    }
#if CODES
#include "codes.h"
#endif
};

#if STAMPS
#define STAMP(phase, kind) if (thread() == 0) p.stamps[(i64(phase) * 2 + kind) * GRID + block_x()] = clock_ns()
#else
#define STAMP(phase, kind)
#endif

#include "attention.h"

constexpr bool OUT_ALIKE = HEADS * DIM == HIDDEN, GATE_ALIKE = IN_ROWS == 2 * GATE_PAIRS && IN_SLICES == GATE_SLICES;

KERNEL_ALONE(decode_step, Params, THREADS + 32 * COPIERS)
{
    const Watch watch = {p.control, p.problem, clock_ns(), p.limit};
#if STAMPS
    u64* whole = p.stamps + i64(5 * p.layer_count + 1) * 2 * GRID + block_x();
    if (thread() == 0) {
        whole[2 * GRID] = whole[GRID];     // when the launch before ended
        whole[0] = clock_ns();
    }
#endif
    const u32 launch = p.control[0] + 1;
    const int position = int(p.state[0]);
    if (thread() == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full(stage), COPIERS);
            mbarrier_init(empty(stage), TEAM);
        }
        *phase_now() = -1;
        *lost() = 0;
        mbarriers_ready();
    }
    sync_block();
    if (warp() >= WARPS) {
        Producer work = {watch, 0, 0, 0, 0};
#if ONE_LOOP
        Layer at = p.layers[0], following = at;    // asked for a layer before it is needed
        ROLLED for (int n = 0; n <= 4 * p.layer_count && !*lost(); ++n) {
            const int part = n & 3, l = n / 4;
            const bool is_last = l == p.layer_count;
            const TensorMap* maps = p.maps + MAPS * l;
            if (part == 0 && !is_last) {
                at = following;
                following = p.layers[min_int(l + 1, p.layer_count - 1)];
                if (lane() < MAPS && copier() == 0) {
                    map_ready(maps + lane());
                    prefetch_map(p.maps + MAPS * min_int(l + 1, p.layer_count - 1) + lane());
                }
            }
            if (part == 2) work.gated<HIDDEN, GATE_PAIRS, GATE_SLICES>(at.gate_up);
            else
                work.plain(is_last ? p.head : part == 0 ? at.qkv : part == 1 ? at.out : at.down,
                           is_last ? p.vocab : part == 0 ? QKV : HIDDEN, part == 0 ? HIDDEN : part == 1 ? HEADS * DIM : INNER,
                           part == 0 ? IN_ROWS : part == 1 ? OUT_ROWS : DOWN_ROWS,
                           part == 0 ? IN_SLICES : part == 1 ? OUT_SLICES : DOWN_SLICES);
            if (part == 0 && !is_last) {
                const Spread over = spread(at.window, position);
                work.cached(at, maps, over, p.capacity);
                if (over.splits > 1) take(work.first, MERGES);
            }
        }
#else
        Layer following = p.layers[0];             // asked for a layer before it is needed
        ROLLED for (int l = 0; l < p.layer_count; ++l) {
            const Layer at = following;
            following = p.layers[min_int(l + 1, p.layer_count - 1)];
            const Spread over = spread(at.window, position);
            const TensorMap* maps = p.maps + MAPS * l;
            if (lane() < MAPS && copier() == 0) {
                map_ready(maps + lane());
                prefetch_map(p.maps + MAPS * min_int(l + 1, p.layer_count - 1) + lane());
            }
#if CODES
            work.coded<HIDDEN, IN_CODE_SLICES>(maps + 0, at.qkv_scales, QKV, false);
            work.cached(at, maps + 4, over, p.capacity);
            if (over.splits > 1) take(work.first, MERGES);
            work.coded<HEADS * DIM, OUT_CODE_SLICES>(maps + 1, at.out_scales, HIDDEN, false);
            work.coded<HIDDEN, IN_CODE_SLICES>(maps + 2, at.gate_up_scales, INNER, true);
            work.coded<INNER, DOWN_CODE_SLICES>(maps + 3, at.down_scales, HIDDEN, false);
#else
            work.plain<HIDDEN, IN_ROWS, IN_SLICES>(at.qkv, QKV);
            work.cached(at, maps, over, p.capacity);
            if (over.splits > 1) take(work.first, MERGES);
            work.plain<HEADS * DIM, OUT_ROWS, OUT_SLICES>(at.out, HIDDEN);
            work.gated<HIDDEN, GATE_PAIRS, GATE_SLICES>(at.gate_up);
            work.plain<INNER, DOWN_ROWS, DOWN_SLICES>(at.down, HIDDEN);
#endif
            if (*lost()) break;
        }
        if (!*lost()) work.plain<HIDDEN, IN_ROWS, IN_SLICES>(p.head, p.vocab);
#endif
        int spins = 0;
        while (*phase_now() != ALL_DONE && !in_vain(watch, spins));
        if (*lost()) {                             // nothing may land after the block has ended
            const u64 begin = clock_ns();
            for (int n = max_int(0, work.issued - STAGES); n < work.issued; ++n)
                while (!mbarrier_passed(full(n % STAGES), (n / STAGES) & 1) && clock_ns() - begin < 100000000) yield();
        }
    } else {
        Consumer work = {0, 0, 0};
        u64* stream = nullptr;                     // where the residual comes from
        u32 tag = 0;
        constexpr int UNITS = sizeof(Layer) / 16;  // of which one is a thread's
        static_assert(UNITS <= 32, "one warp keeps the layers' pointers");
        if (thread() < UNITS) store4((Four*)layer(0) + thread(), load4((const Four*)p.layers + thread()));
        sync_first(THREADS);
        ROLLED for (int n = 0; n <= 4 * p.layer_count; ++n) {
            const int part = n & 3, l = n / 4;
            const bool is_last = l == p.layer_count;
            u64* words = p.words + (l & 1) * SET_WORDS;    // written again two layers later, when all have read them
            const Layer& at = *layer(min_int(l, p.layer_count - 1));
#if ONE_LOOP
            if (part == 1 && thread() < UNITS) {   // asked for early
                copy_small((Four*)layer(l + 1) + thread(), (const Four*)(p.layers + min_int(l + 1, p.layer_count - 1)) + thread());
                copy_commit();
            }
            if (part == 2) copy_wait<0>();
#else
            const bool keeps_next = part == 1 && thread() < UNITS;     // asked for early
            Four following;
            if (keeps_next) following = load4((const Four*)(p.layers + min_int(l + 1, p.layer_count - 1)) + thread());
#endif
            float norm = 1;
            if (part % 2 == 0)
                norm = load_normed(stream, tag, is_last ? p.norm : part ? at.mlp_norm : at.norm, is_last ? p.head_eps : p.eps,
                                   even_x(), is_last, p);
            else if (part == 1) load_values<HEADS * DIM>(words + ATTENTION_AT, tag, odd_x());
            else load_values<INNER>(words + INNER_AT, tag, odd_x());
#if !ONE_LOOP
            if (keeps_next) store4((Four*)layer(l + 1) + thread(), following);
#endif
            work.entered();
            STAMP(work.phase, 0);
            if (part == 0) tag = launch * u32(p.layer_count) + l;
            if (part == 1) stream = words + MIDDLE_AT;
            if (part == 3) stream = words + END_AT;
            Target to = {is_last ? TO_LOGITS : part == 0 ? TO_QKV : part == 2 ? TO_GATE : TO_STREAM,
                               is_last ? p.vocab : part == 0 ? QKV : part == 2 ? INNER : HIDDEN, at.bias,
                               part == 0 ? words + QKV_AT : part == 2 ? words + INNER_AT : stream, tag, p.logits};
#if CODES
            to.scales = (const float*)(part == 0 ? at.qkv_scales : part == 1 ? at.out_scales : part == 2 ? at.gate_up_scales
                                                                                            : at.down_scales);
            to.x_scales = x_scales(part % 2), to.norm = norm;
            if (is_last) work.products<HIDDEN, IN_ROWS, IN_SLICES>(even_x(), to);
            else if (part == 3) work.coded<INNER, DOWN_CODE_SLICES>((const u8*)odd_x(), to);
            else if (part == 1 && !OUT_ALIKE) work.coded<HEADS * DIM, OUT_CODE_SLICES>((const u8*)odd_x(), to);
            else work.coded<HIDDEN, IN_CODE_SLICES>((const u8*)(part == 1 ? odd_x() : even_x()), to);
#else
            if (part == 3) work.products<INNER, DOWN_ROWS, DOWN_SLICES>(odd_x(), to);
            else if (part == 1 && !OUT_ALIKE) work.products<HEADS * DIM, OUT_ROWS, OUT_SLICES>(odd_x(), to);
            else if (part == 2 && !GATE_ALIKE) work.products<HIDDEN, 2 * GATE_PAIRS, GATE_SLICES>(even_x(), to);
            else work.products<HIDDEN, IN_ROWS, IN_SLICES>(part == 1 ? odd_x() : even_x(), to);
#endif
            STAMP(work.phase - 1, 1);
            if (part == 0 && !is_last) {
                const Spread over = spread(at.window, position);
                attend(work, at, over, words, tag, p);
                if (over.splits > 1) merge(work, over, words, tag);
            }
        }
        sync_first(THREADS);
        if (thread() == 0) *phase_now() = ALL_DONE;
    }
    sync_block();
#if STAMPS
    if (thread() == 0) whole[GRID] = clock_ns();
#endif
    if (thread() == 0) {                           // who is last has nobody left who reads what is raised
        publish();
        if (atomic_add(p.control + 1, 1u) == u32(GRID) - 1) {
            p.control[1] = 0;
            p.control[0] = launch;
            for (int n = 0; n <= BATCH; ++n) p.state[n] += 1;
        }
    }
}

// Part of sample.cu: storage of the tokens, reductions over a row, and the search for the cut of a
// filter.
//
// A token's rank is one integer, its place: a key that rises as the score falls (the bits of floats
// of one sign are ordered like the floats), followed by the position in the row, which breaks ties.
// The cut of a filter is found by a search: the mass, or the number, of tokens before seven keys
// brackets it; when few tokens are left in the bracket, they are listed and the exact cut is found
// among them. Thousands of equal scores are counted. Everything that decides is summed in double,
// as the contract says; sums in float are used only where their error does not matter.
#pragma once

constexpr int WARPS = THREADS / 32;
constexpr int CLUSTER = 16;                        // maximum blocks
constexpr int AT_ONCE = 8;                         // pieces that a thread loads together
constexpr int PLACE_BITS = 21;
constexpr u32 NEVER = PROBS ? 0x7FFFFFFFu : 0x7F800000u;   // the key of impossible tokens
constexpr u64 ALL = (u64(NEVER) << PLACE_BITS) - 1;        // the last place of a possible token
constexpr float LARGEST = 3.4028234663852886e38f;

struct alignas(16) Shared {
    double part[WARPS][8], by_warp[WARPS];
    double sums[2][CLUSTER][8], result[8];         // double-buffered: other blocks write while one is read
    double by_block[2][CLUSTER];
    u64 cluster_max[2][CLUSTER], warp_maxima[WARPS];
    u32 many[2][CLUSTER];
    double own[6];                                 // parameters of the row, as in Own, with a random number for SEED
    u32 listed, found;
    u64 list[LIST];
};
static_assert(sizeof(Shared) == 80 * WARPS + 2816 + 8 * LIST, "sampling.py counts on it");

struct Row {
    const u8* memory;                              // piece 0; the row begins `shift` tokens later
    Four* keys;                                    // this thread's keys in shared memory
    u32 shift, vocab, first;                       // `first`: this warp's first piece
    int steps, over, every, scaling;
    float peak, scale;
    u64 limit;                                     // the last place that top-k kept
};

#if HALF
typedef u64 Raw;
#else
typedef Four Raw;
#endif
constexpr u32 RAW = sizeof(Raw);

// Tokens

// Loads a piece, or the last one past the row. The value is not used here, so that many loads can
// be in flight.
FN Raw fetch(const Row& r, u32 piece) {
    const u32 last = (r.shift + r.vocab - 1) / 4;
    const u8* at = r.memory + u64(piece < last ? piece : last) * RAW;
#if HALF
    return *reinterpret_cast<const u64*>(at);
#else
    return load4_once(at);
#endif
}

// Sets tokens outside of the row to NaN: all bits set, in each type.
FN Raw mask_outside(const Row& r, Raw raw, u32 piece) {
    bool off[4];
    UNROLL for (int e = 0; e < 4; ++e) off[e] = piece * 4 + e - r.shift >= r.vocab;
#if HALF
    UNROLL for (int e = 0; e < 4; ++e) if (off[e]) raw |= u64(0xFFFF) << (16 * e);
    return raw;
#else
    return Four{off[0] ? ~0u : raw.x, off[1] ? ~0u : raw.y, off[2] ? ~0u : raw.z, off[3] ? ~0u : raw.w};
#endif
}

// Converts to float. Invalid probabilities become zero, infinite logits the largest number; NaN
// stays for now.
FN void values_of(Raw raw, float (&v)[4]) {
#if HALF
    UNROLL for (int e = 0; e < 4; ++e) v[e] = to_float<HALF == 2>(u16(raw >> (16 * e)));
#else
    v[0] = bits_float(raw.x); v[1] = bits_float(raw.y); v[2] = bits_float(raw.z); v[3] = bits_float(raw.w);
#endif
    UNROLL for (int e = 0; e < 4; ++e) {
        if (PROBS) v[e] = v[e] > 0.0f && v[e] <= LARGEST ? v[e] : 0.0f;
        else v[e] = v[e] > LARGEST ? LARGEST : v[e];
    }
}

FN void keys_of_values(const Row& r, const float (&value)[4], u32 (&k)[4]) {
    float score[4];
    UNROLL for (int e = 0; e < 4; ++e) score[e] = value[e] - r.peak;
    if (r.scaling == 1) UNROLL for (int e = 0; e < 4; ++e) score[e] *= r.scale;
    if (r.scaling == 2) ROLLED for (int turns = 0; turns < 4; ++turns) {       // a division is long: once in the code
        const float last = score[0] / r.scale;
        score[0] = score[1]; score[1] = score[2]; score[2] = score[3]; score[3] = last;
    }
    UNROLL for (int e = 0; e < 4; ++e) {
        k[e] = PROBS ? NEVER - float_bits(value[e]) : float_bits(score[e]) & 0x7FFFFFFFu;
        k[e] = k[e] < NEVER ? k[e] : NEVER;        // NaN is beyond NEVER
    }
}

FN float weight_of(u32 key) { return PROBS ? bits_float(NEVER - key) : exact_exp(-bits_float(key)); }

FN u64 place_of(u32 key, u32 at) { return u64(key) << PLACE_BITS | at; }

FN void keys_of(const Row& r, Raw raw, u32 piece, u32 (&k)[4]) {
    float v[4];
    values_of(raw, v);
    keys_of_values(r, v, k);
    if (!piece || piece * 4 + 4 > r.shift + r.vocab || r.limit < ALL)
        UNROLL for (int e = 0; e < 4; ++e)
            if (piece * 4 + e - r.shift >= r.vocab || place_of(k[e], piece * 4 + e) > r.limit) k[e] = NEVER;
}

// The position of a warp's next step: a slot of shared memory, or outside of it, to be read again.
struct StepPosition { int slot, until, left; };

FN StepPosition first_step(const Row& r) { return StepPosition{0, r.every - 1, r.over}; }
FN bool is_outside(const StepPosition& at) { return !at.until; }

FN void advance(StepPosition& at, const Row& r) {
    if (is_outside(at)) at.until = --at.left ? r.every : 1 << 30;
    else ++at.slot;
    --at.until;
}

// Calls f(four keys, the position of the first) for each of this thread's pieces; with CHANGE only
// for those in shared memory, which f may change.
template <bool CHANGE, typename F> FN void for_each_piece(const Row& r, F f) {
    u32 piece = r.first + lane();
    const u32 end = piece + r.steps * 32;
    StepPosition at = first_step(r);
    Raw next{};
    if (!CHANGE && r.over) next = fetch(r, piece + at.until * 32);
    ROLLED for (; piece != end; piece += 32, advance(at, r)) {
        u32 k[4];
        if (is_outside(at)) {
            if (CHANGE) continue;
            const Raw raw = next;
            if (at.left > 1) next = fetch(r, piece + r.every * 32);
            keys_of(r, raw, piece, k);
        } else {
            const Four held = r.keys[at.slot * THREADS];
            k[0] = held.x; k[1] = held.y; k[2] = held.z; k[3] = held.w;
        }
        f(k, piece * 4);
        if (CHANGE) r.keys[at.slot * THREADS] = Four{k[0], k[1], k[2], k[3]};
    }
}

// Reductions

// Sums eight numbers per thread over the block or the cluster, with the same bits in every block.
template <bool OF_CLUSTER> FN void sum(Shared& s, double (&v)[8], int& buffer) {
    UNROLL for (int half = 4; half; half >>= 1)    // lanes that differ in a bit each reduce half of the numbers
        UNROLL for (int i = 0; i < half; ++i) {
            const bool upper = lane() & (4 * half);
            const double kept = upper ? v[i + half] : v[i], given = upper ? v[i] : v[i + half];
            v[i] = kept + shuffle_xor(given, 4 * half);
        }
    v[0] += shuffle_xor(v[0], 2);
    v[0] += shuffle_xor(v[0], 1);
    if (!(lane() & 3)) s.part[warp()][lane() >> 2] = v[0];
    sync_block();
    ROLLED for (int j = warp(); j < 8; j += WARPS) {
        const double whole = warp_sum(lane() < WARPS ? s.part[lane()][j] : 0.0);
        if (OF_CLUSTER) {
            if (lane() < cluster_size()) cluster_write(&s.sums[buffer][cluster_rank()][j], lane(), whole);
        } else if (!lane()) s.result[j] = whole;
    }
    if (OF_CLUSTER) {
        sync_cluster();
        ROLLED for (int j = warp(); j < 8; j += WARPS) {
            const double whole = warp_sum(lane() < cluster_size() ? s.sums[buffer][lane()][j] : 0.0);
            if (!lane()) s.result[j] = whole;
        }
        buffer ^= 1;
    }
    sync_block();
    UNROLL for (int j = 0; j < 8; ++j) v[j] = s.result[j];
}

FN u64 cluster_max(Shared& s, u64 v, int& buffer) {
    v = warp_max(v);
    if (!lane()) s.warp_maxima[warp()] = v;
    sync_block();
    if (!warp()) {
        v = warp_max(lane() < WARPS ? s.warp_maxima[lane()] : u64(0));
        if (lane() < cluster_size()) cluster_write(&s.cluster_max[buffer][cluster_rank()], lane(), v);
    }
    sync_cluster();
    v = warp_max(lane() < cluster_size() ? s.cluster_max[buffer][lane()] : u64(0));
    buffer ^= 1;
    return v;
}

// The search

// The cut is at a key in [lo, hi): less than the target lies before lo, but not before hi.
struct Range { u32 lo, hi; double above, reach; };

FN void narrow(Range& g, const u32 (&edge)[8], const double (&v)[8], double target) {
    bool open = true;
    UNROLL for (int j = 0; j < 7; ++j) {
        if (v[j] < target) { g.lo = edge[j]; g.above = v[j]; }
        else if (open) { g.hi = edge[j]; g.reach = v[j]; open = false; }
    }
}

// Seven edges, and one after all possible tokens. First at typical cuts: 0.75, 2, 3.75, 6, 8.75,
// 12, 15.75 below the maximum.
FN void first_edges(const Row& r, u32 (&edge)[8]) {
    UNROLL for (int j = 0; j < 7; ++j) {
        const float depth = 0.25f * (j + 1) * (j + 3);
        edge[j] = PROBS ? NEVER - float_bits(r.peak * fast_exp2(depth * -1.4426950408889634f)) : float_bits(depth);
    }
    edge[7] = NEVER;
}

// Then evenly spaced in scores, or alternately in keys, which are logarithmic in the score and
// converge faster.
FN void edges_within(const Range& g, int round, u32 (&edge)[8]) {
    const bool by_score = !PROBS && (round & 1) && g.hi < NEVER;
    const float near = bits_float(g.lo), far = bits_float(g.hi);
    UNROLL for (int j = 0; j < 7; ++j) {
        u32 at = g.lo + u32(u64(g.hi - g.lo) * (j + 1) / 8);
        if (by_score) at = float_bits(near + (far - near) * ((j + 1) * 0.125f));
        edge[j] = at < g.lo ? g.lo : at > g.hi ? g.hi : at;
    }
    edge[7] = NEVER;
}

// The mass of this thread's tokens before each edge, in float except for the total; the same in
// double; their number.
FN void mass_before(const Row& r, const u32 (&edge)[8], double (&v)[8]) {
    float mass[7] = {};
    double all = 0.0;
    for_each_piece<false>(r, [&](const u32 (&k)[4], u32) {
        UNROLL for (int e = 0; e < 4; ++e) {
            const float weight = weight_of(k[e]), score = bits_float(k[e]);
            all += double(weight);
            UNROLL for (int j = 0; j < 7; ++j) {
                const bool before = PROBS ? weight > bits_float(NEVER - edge[j]) : score < bits_float(edge[j]);
                mass[j] += (before ? 1.0f : 0.0f) * weight;                    // two instructions
            }
        }
    });
    UNROLL for (int j = 0; j < 7; ++j) v[j] = mass[j];
    v[7] = all;
}

FN void exact_mass_before(const Row& r, const u32 (&edge)[8], double (&v)[8]) {
    UNROLL for (int j = 0; j < 8; ++j) v[j] = 0.0;
    for_each_piece<false>(r, [&](u32 (&k)[4], u32) {
        ROLLED for (int e = 0; e < 4; ++e) {
            const double weight = weight_of(k[0]);
            UNROLL for (int j = 0; j < 8; ++j) v[j] += k[0] < edge[j] ? weight : 0.0;
            k[0] = k[1]; k[1] = k[2]; k[2] = k[3];
        }
    });
}

FN void count_before(const Row& r, const u32 (&edge)[8], double (&v)[8]) {
    u32 many[8] = {};
    for_each_piece<false>(r, [&](const u32 (&k)[4], u32) {
        UNROLL for (int e = 0; e < 4; ++e) UNROLL for (int j = 0; j < 8; ++j) many[j] += (k[e] - edge[j]) >> 31;
    });
    UNROLL for (int j = 0; j < 8; ++j) v[j] = many[j];
}

// Returns whether a mass of `tokens` weights, summed in float, is too close to the target to
// decide.
FN bool too_close(const double (&v)[8], double target, int tokens) {
    bool near = false;
    UNROLL for (int j = 0; j < 7; ++j) {
        const double apart = v[j] < target ? target - v[j] : v[j] - target;
        near = near || apart <= v[j] * (tokens * 6e-8);
    }
    return near;
}

// Lists the places in [lo, hi) of the block's tokens and returns their number in the cluster. With
// `weigh`, `own_mass` becomes the mass of this thread's tokens before lo that min-p keeps; `above`,
// unless counting, the exact mass of all before lo.
FN u32 list_places(Shared& s, const Row& r, Range& g, bool count, bool weigh, float least, double& own_mass, int& buffer) {
    if (!thread()) s.listed = 0;
    sync_block();
    double mass = 0.0, enough = 0.0;
    const u32 lo = g.lo, width = g.hi - g.lo;
    const bool drops = !(least <= 0.0f);
    for_each_piece<false>(r, [&](const u32 (&k)[4], u32 at) {
        if (weigh) UNROLL for (int e = 0; e < 4; ++e) {
            const float weight = weight_of(k[e]);
            mass += double(k[e] < lo ? weight : 0.0f);
            if (drops) enough += double(k[e] < lo && weight >= least ? weight : 0.0f);
        }
        u32 many = 0;
        UNROLL for (int e = 0; e < 4; ++e) many += k[e] - lo < width;
        if (many) {
            u32 slot = atomic_add(&s.listed, many);
            UNROLL for (int e = 0; e < 4; ++e)
                if (k[e] - lo < width && slot < LIST) s.list[slot++] = place_of(k[e], at + e);
        }
    });
    own_mass = drops ? enough : mass;
    mass = warp_sum(mass);
    if (!lane()) s.by_warp[warp()] = mass;
    sync_block();
    if (!warp()) {
        mass = warp_sum(lane() < WARPS ? s.by_warp[lane()] : 0.0);
        if (lane() < cluster_size()) {
            cluster_write(&s.by_block[buffer][cluster_rank()], lane(), mass);
            cluster_write(&s.many[buffer][cluster_rank()], lane(), s.listed);
        }
    }
    sync_cluster();
    u32 many = 0;
    double above = 0.0;
    ROLLED for (int b = 0; b < cluster_size(); ++b) {
        many += s.many[buffer][b];
        above += s.by_block[buffer][b];
    }
    if (!count) g.above = above;
    return many;
}

// Returns the last listed place before which less than `target` lies, or one between it and the
// next.
FN u64 cut_among_listed(Shared& s, const Range& g, bool count, u32 listed, double target, int& buffer) {
    constexpr int EACH = (LIST + THREADS - 1) / THREADS;
    u64 place[EACH];
    double weight[EACH];
    UNROLL for (int i = 0; i < EACH; ++i) {
        u32 at = thread() + i * THREADS;
        place[i] = ~u64(0);
        weight[i] = 0.0;
        if (at < listed) {
            int b = 0;
            while (at >= s.many[buffer][b]) at -= s.many[buffer][b++];
            place[i] = cluster_read(&s.list[at], b);
            weight[i] = count ? 1.0 : double(weight_of(u32(place[i] >> PLACE_BITS)));
        }
    }
    buffer ^= 1;
    u64 lo = u64(g.lo) << PLACE_BITS, hi = u64(g.hi) << PLACE_BITS;
    double before = 0.0, within = listed;          // number of listed places before lo, and before hi
    while (within - before > 1.0 && hi - lo > 1) {
        double v[8] = {};                          // four masses, four counts
        UNROLL for (int j = 0; j < 4; ++j) {
            const u64 edge = lo + (hi - lo) * (j + 1) / 5;
            UNROLL for (int i = 0; i < EACH; ++i)
                if (place[i] < edge) { v[j] += weight[i]; v[4 + j] += 1.0; }
        }
        sum<false>(s, v, buffer);
        const u64 from = lo, width = hi - lo;
        bool open = true;
        UNROLL for (int j = 0; j < 4; ++j) {
            const u64 edge = from + width * (j + 1) / 5;
            if (g.above + v[j] < target) { lo = edge; before = v[4 + j]; }
            else if (open) { hi = edge; within = v[4 + j]; open = false; }
        }
    }
    return hi - 1;
}

// The result of a search: the last kept place, from the lists or not; or, with `ties`, that this
// many of the tokens with one key are kept.
struct Cut { u64 place; bool listed; u32 key; double ties; };

// Finds the place before which less than `share` of the total mass lies; with `count`, less than
// `share` tokens. If it came from the lists, and with `weigh`, `own_mass` is the mass of this thread's
// tokens before them.
FN Cut search(Shared& s, const Row& r, bool count, double share, bool weigh, float least, double& own_mass, int& buffer) {
    Range g = {PROBS ? NEVER - float_bits(r.peak) : 0, NEVER, 0.0, 0.0};
    double target = share;
    bool full = true;                              // too many tokens between lo and hi to list
    bool exact = count, exactly = false;           // whether `above` is exact, and whether the next sums must be
    u32 edge[8];
    for (int round = 0;;) {
        const bool one = round && g.hi - g.lo == 1;        // one key is left
        if (!full) {
            const u32 many = list_places(s, r, g, count, weigh, least, own_mass, buffer);
            if (many <= LIST) return Cut{cut_among_listed(s, g, count, many, target, buffer), true, 0, 0.0};
            buffer ^= 1;
            full = true;
        } else if (one && exact) {
            const double ties = (target - g.above) / (count ? 1.0f : weight_of(g.lo)), whole = double(i64(ties));
            return Cut{ALL, false, g.lo, whole < ties ? whole + 1.0 : whole};
        } else {
            double v[8];
            exactly = exactly || one;
            if (one) UNROLL for (int j = 0; j < 8; ++j) edge[j] = g.lo;
            else if (!exactly && round) edges_within(g, round, edge);
            else if (!exactly) first_edges(r, edge);
            if (count) count_before(r, edge, v);
            else if (exactly) exact_mass_before(r, edge, v);
            else mass_before(r, edge, v);
            sum<true>(s, v, buffer);
            if (!round && !count) target = share * v[7];
            exact = count || exactly;
            exactly = !exact && too_close(v, target, r.steps * 4);
            if (exactly) continue;
            if (!round && !(v[7] >= target)) return Cut{ALL, false, 0, 0.0};
            if (!round) g.reach = v[7];
            narrow(g, edge, v, target);
            if (!count && !(weight_of(g.lo) > 0.0f)) return Cut{ALL, false, 0, 0.0};   // later tokens have no weight
            const double inside = g.reach - g.above;
            ++round;
            full = !((count ? inside : inside / weight_of(g.lo + (g.hi - g.lo) / 2)) <= LIST);
        }
    }
}

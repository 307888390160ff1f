// Samples one token per row of logits in one launch; ops/sample.py defines the result.
//
// A row is a cluster of blocks. Each block reads its part of the row once and keeps it in shared
// memory; what does not fit is read again each time. Tokens are in pieces of four: a warp has
// consecutive pieces, so that the masses of warps are in the order of token ids. search.h
// searches for the cut of the filters.
//
// Macros: THREADS; HALF (0: float32, 1: float16, 2: bfloat16); PROBS; LIST (how many tokens can be
// listed).
#include "device.h"
#include "search.h"

struct Params {
    const u8* logits;
    const void* rows[6];                           // parameters per row, in the order of Own; or null
    i64* token;
    double *chosen, *total;                        // may be null, like the next
    float* logprob;
    i64 stride;                                    // between rows, in bytes
    u64 word;                                      // of the seed; of the offset if each row has a seed
    double top_p, min_p;
    int vocab, top_k;
    int steps, over, every;                        // of a warp, 32 pieces each; `over` of them, one of `every`, do not fit
    int kinds, scaling;                            // four bits per entry of `rows`; scores are 0: unchanged,
    float scale;                                   // 1: multiplied, 2: divided by `scale`
};

enum Own { UNIFORM, SEED, TEMPERATURE, TOP_K, TOP_P, MIN_P };
enum Kind { ABSENT, FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, INT64 };

// The draw

// Returns which of n consecutive masses contains the goal; the goal becomes relative to it.
FN int pick_mass(const double* mass, int n, double& target) {
    double reached = 0.0, before = 0.0;
    int last = 0;
    ROLLED for (int i = 0; i < n; ++i) {
        if (!(mass[i] > 0.0)) continue;
        before = reached;
        last = i;
        reached += mass[i];
        if (reached > target) break;               // else by rounding: the last with any mass
    }
    target -= before;
    return last;
}

struct Found { bool here; u32 at; double weight, whole; };                     // `here`: this thread found it

// Finds the first token, in the order of ids, at which the cumulative weight exceeds the goal.
// `own_mass`: the mass of this thread's tokens, or of others of its warp.
template <typename Weight, typename Goal>
FN Found find_token(Shared& s, const Row& r, double own_mass, int& buffer, Weight weight, Goal target_of) {
    own_mass = warp_sum(own_mass);
    if (!lane()) s.by_warp[warp()] = own_mass;
    sync_block();
    if (!warp()) {
        const double here = warp_sum(lane() < WARPS ? s.by_warp[lane()] : 0.0);
        if (lane() < cluster_size()) cluster_write(&s.by_block[buffer][cluster_rank()], lane(), here);
    }
    sync_cluster();
    Found found = {false, 0, 0.0, 0.0};
    ROLLED for (int b = 0; b < cluster_size(); ++b) found.whole += s.by_block[buffer][b];
    double target = target_of(found.whole);
    const int block = pick_mass(s.by_block[buffer], cluster_size(), target);
    buffer ^= 1;
    if (block != cluster_rank()) return found;
    const int home = pick_mass(s.by_warp, WARPS, target);

    // The whole block scans the pieces of warp `home`: each thread some consecutive ones.
    const Four* keys = r.keys - thread() + home * 32;
    const u32 first = r.first + (home - warp()) * r.steps * 32, pieces = r.steps * 32;
    const u32 share = (pieces + THREADS - 1) / THREADS, begin = thread() * share;
    const u32 end = begin + share < pieces ? begin + share : pieces;
    const auto read = [&](u32 piece, u32 (&k)[4]) {
        const int step = piece / 32, past = step / r.every < r.over ? step / r.every : r.over;
        if (step % r.every == r.every - 1 && past < r.over) {
            keys_of(r, fetch(r, first + piece), first + piece, k);
        } else {
            const Four held = keys[(step - past) * THREADS + piece % 32];
            k[0] = held.x; k[1] = held.y; k[2] = held.z; k[3] = held.w;
        }
    };
    double mass = 0.0;
    ROLLED for (u32 piece = begin; piece < end; ++piece) {
        u32 k[4];
        read(piece, k);
        UNROLL for (int e = 0; e < 4; ++e) mass += weight(k[e], (first + piece) * 4 + e);
    }
    double reached = mass;                         // inclusive sum within the warp
    UNROLL for (int step = 1; step < 32; step *= 2) {
        const double below = shuffle(reached, lane() - step);
        if (lane() >= step) reached += below;
    }
    if (lane() == 31) s.part[warp()][0] = reached;
    double before = shuffle(reached, lane() - 1);
    if (!lane()) before = 0.0;
    sync_block();
    double lower = 0.0;
    ROLLED for (int w = 0; w < warp(); ++w) lower += s.part[w][0];
    // The first thread that exceeds the goal, else by rounding the last with any mass.
    u32 claim = mass > 0.0 ? thread() + 1 : 0;
    if (claim && lower + reached > target) claim = 2 * THREADS - thread();
    const u32 warp_claim = warp_max(claim);
    if (!lane()) s.warp_maxima[warp()] = warp_claim;
    sync_block();
    const u64 winner = warp_max(lane() < WARPS ? s.warp_maxima[lane()] : u64(0));
    if (!claim || claim != winner) return found;
    found.here = true;
    double up_to = lower + before;
    bool open = true;
    ROLLED for (u32 piece = begin; piece < end && open; ++piece) {
        u32 k[4];
        read(piece, k);
        UNROLL for (int e = 0; e < 4; ++e) {
            const double w = weight(k[e], (first + piece) * 4 + e);
            if (open && w > 0.0) {
                found.at = (first + piece) * 4 + e;
                found.weight = w;
                up_to += w;
                open = !(up_to > target);
            }
        }
    }
    return found;
}

// Parameters of the row

FN u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

FN double row_parameter(const Params& p, int which, int row) {
    const void* of_rows = p.rows[which];
    const int kind = p.kinds >> 4 * which & 15;
    double number = which == TOP_K ? p.top_k : which == TOP_P ? p.top_p : which == MIN_P ? p.min_p : 1.0;
    i64 integer = 0;
    switch (kind) {
        case FLOAT32: number = static_cast<const float*>(of_rows)[row]; break;
        case FLOAT64: number = static_cast<const double*>(of_rows)[row]; break;
        case FLOAT16: number = to_float<false>(static_cast<const u16*>(of_rows)[row]); break;
        case BFLOAT16: number = to_float<true>(static_cast<const u16*>(of_rows)[row]); break;
        case INT32: integer = static_cast<const i32*>(of_rows)[row]; break;
        case INT64: integer = static_cast<const i64*>(of_rows)[row]; break;
    }
    if (which == SEED) {                           // draw 0 of SplitMix64, see ops/formulas/sampling.py
        const u64 golden = 0x9E3779B97F4A7C15ull;
        const u64 word = kind ? mix(mix(u64(integer)) + p.word) + golden : p.word + row * golden;
        return double(mix(word) >> 11) * 1.1102230246251565e-16;
    }
    return kind >= INT32 ? double(integer) : number;
}

// The logarithm of a positive number, by the series of atanh, which converges fast near one.
FN double logarithm(double x) {
    union { double number; u64 bits; } v;
    int power = 0;
    v.number = x;
    if (v.bits < u64(1) << 52) { v.number = x * 18014398509481984.0; power = -54; }
    power += int(v.bits >> 52) - 1023;
    v.bits = (v.bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
    if (v.number > 1.4142135623730951) { v.number *= 0.5; ++power; }
    const double t = (v.number - 1.0) / (v.number + 1.0), square = t * t;
    double series = 0.0;
    UNROLL for (int n = 19; n > 0; n -= 2) series = series * square + 1.0 / n;
    return power * 0.6931471805599453 + 2.0 * t * series;
}

FN void store_result(const Params& p, int row, i64 token, double weight, double whole) {
    p.token[row] = token;
    if (p.chosen) p.chosen[row] = weight;
    if (p.total) p.total[row] = whole;
    if (p.logprob) p.logprob[row] = token < 0 ? -bits_float(0x7F800000u) : float(logarithm(weight / whole));
}

KERNEL(sample, Params, THREADS) {
    Shared& s = *reinterpret_cast<Shared*>(shared());
    const int row = block_x() / cluster_size();
    int buffer = 0;
    cluster_arrive();                              // nobody may write into a block that has not started
    if (thread() >= THREADS - 32 && lane() < 6) s.own[lane()] = row_parameter(p, lane(), row);

    Row r;
    const u8* begin = p.logits + row * p.stride;
    const u32 off = u32(reinterpret_cast<u64>(begin) & (RAW - 1));
    r.memory = begin - off;
    r.shift = off * 4 / RAW;
    r.vocab = p.vocab;
    r.steps = p.steps;
    r.over = p.over;
    r.every = p.every;
    r.first = (cluster_rank() * WARPS + warp()) * p.steps * 32;
    r.keys = reinterpret_cast<Four*>(shared() + sizeof(Shared)) + thread();
    r.limit = ALL;

    // Read the row; find the maximum and its first position.
    const float lowest = PROBS ? 0.0f : -bits_float(0x7F800000u);
    float best = lowest;
    u32 at = 0;                                    // the piece
    StepPosition where = first_step(r);
    const auto take = [&](Raw raw, u32 piece) {
        float v[4];
        values_of(raw, v);
        const float here = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
        if (here > best) { best = here; at = piece; }
        if (!is_outside(where))
            r.keys[where.slot * THREADS] = Four{float_bits(v[0]), float_bits(v[1]), float_bits(v[2]), float_bits(v[3])};
        advance(where, r);
    };
    // Steps with complete pieces several at once; those at the ends of the row one by one.
    const int whole = (r.shift + r.vocab) / 4 > r.first ? ((r.shift + r.vocab) / 4 - r.first) / 32 : 0;
    ROLLED for (int step = 0; step < r.steps;) {
        const u32 piece = r.first + step * 32 + lane();
        if (step >= whole || (!step && !r.first && r.shift)) {
            take(mask_outside(r, fetch(r, piece), piece), piece);
            ++step;
            continue;
        }
        Raw raw[AT_ONCE];
        const int many = (whole < r.steps ? whole : r.steps) - step;
        UNROLL for (int i = 0; i < AT_ONCE; ++i) raw[i] = fetch(r, piece + i * 32);
        UNROLL for (int i = 0; i < AT_ONCE; ++i) if (i < many) take(raw[i], piece + i * 32);
        step += many < AT_ONCE ? many : AT_ONCE;
    }
    const u32 bits = float_bits(best + 0.0f), ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    cluster_wait();
    const u64 top = cluster_max(s, u64(ordered) << 32 | (0xFFFFFFFFu - at), buffer);
    const u32 top_bits = u32(top >> 32);
    r.peak = bits_float(top_bits >> 31 ? top_bits & 0x7FFFFFFFu : ~top_bits);
    const bool is_writer = !cluster_rank() && !thread();
    if (!(r.peak > lowest)) {
        if (is_writer) store_result(p, row, -1, 0.0, 0.0);
        return;
    }
    const double top_p = s.own[TOP_P], largest = PROBS ? double(r.peak) : 1.0, bound = s.own[MIN_P] * largest;
    u32 top_k = s.own[TOP_K] > 0.0 && s.own[TOP_K] < r.vocab ? u32(s.own[TOP_K]) : r.vocab;
    r.scaling = p.scaling;
    r.scale = p.scale;
    if (p.kinds >> 4 * TEMPERATURE & 15) {
        const float temperature = float(s.own[TEMPERATURE]);
        r.scale = temperature > 0.0f ? temperature : 1.0f;
        if (!(temperature > 0.0f)) top_k = 1;
    }
    float least = bound <= 0.0 ? 0.0f : float(bound);
    if (double(least) < bound) least = bits_float(float_bits(least) + 1);      // the first float >= bound
    if (top_k == 1 || !(top_p > 0.0)) {
        if (!is_writer) return;
        float v[4];
        const u32 piece = 0xFFFFFFFFu - u32(top);
        values_of(mask_outside(r, fetch(r, piece), piece), v);
        const int e = v[0] == r.peak ? 0 : v[1] == r.peak ? 1 : v[2] == r.peak ? 2 : 3;
        if (largest >= bound) store_result(p, row, i64(piece * 4 + e) - r.shift, largest, largest);
        else store_result(p, row, -1, 0.0, 0.0);
        return;
    }
    for_each_piece<true>(r, [&](u32 (&k)[4], u32) {
        const float v[4] = {bits_float(k[0]), bits_float(k[1]), bits_float(k[2]), bits_float(k[3])};
        keys_of_values(r, v, k);
    });

    // First top-k, then top-p of what it kept, then the draw. If many tokens have the score of the
    // cut, the last kept one is found like a drawn token: by the number of those before it.
    const bool by_mass = top_p < 1.0;
    bool count = top_k < r.vocab, draws = !count && !by_mass;
    Cut cut = {ALL, false, 0, 0.0};
    Found found;
    double uniform = s.own[p.kinds & 15 ? UNIFORM : SEED];
    uniform = uniform < 0.0 ? 0.0 : uniform > 1.0 ? 1.0 : uniform;
    for (;;) {
        double own_mass = 0.0;
        if (!draws)
            cut = search(s, r, count, count ? double(top_k) : top_p, !(count && by_mass), least, own_mass, buffer);
        if (cut.ties > 0.0 || !(count && by_mass)) {
            const auto weight = [&](u32 key, u32 place) {
                if (cut.ties > 0.0) return key == cut.key ? 1.0 : 0.0;
                const float w = weight_of(key);
                return double(place_of(key, place) <= cut.place && w >= least ? w : 0.0f);
            };
            if (cut.listed) {
                ROLLED for (u32 i = lane(); i < s.listed; i += 32) {
                    const u32 key = u32(s.list[i] >> PLACE_BITS), place = u32(s.list[i]) & ((1u << PLACE_BITS) - 1);
                    if (place / 4 - r.first < u32(r.steps) * 32) own_mass += weight(key, place);
                }
            } else {
                for_each_piece<false>(r, [&](const u32 (&k)[4], u32 first) {
                    UNROLL for (int e = 0; e < 4; ++e) own_mass += weight(k[e], first + e);
                });
            }
            found = find_token(s, r, own_mass, buffer, weight, [&](double whole) {
                const double target = cut.ties > 0.0 ? cut.ties - 0.5 : uniform * whole;
                const double below = whole * 0.99999999999999988897769753748;  // times the largest number below one
                return target < below ? target : below;
            });
            if (!(cut.ties > 0.0)) break;
            if (found.here) ROLLED for (int b = 0; b < cluster_size(); ++b) cluster_write(&s.found, b, found.at);
            sync_cluster();
            cut = Cut{place_of(cut.key, s.found), false, 0, 0.0};
            sync_block();
        }
        draws = !(count && by_mass);
        if (!draws) {
            r.limit = cut.place;
            for_each_piece<true>(r, [&](u32 (&k)[4], u32 first) {
                UNROLL for (int e = 0; e < 4; ++e) if (place_of(k[e], first + e) > r.limit) k[e] = NEVER;
            });
        }
        count = false;
    }
    if (found.here) store_result(p, row, i64(found.at) - r.shift, found.weight, found.whole);
    else if (is_writer && !(found.whole > 0.0)) store_result(p, row, -1, 0.0, 0.0);
}

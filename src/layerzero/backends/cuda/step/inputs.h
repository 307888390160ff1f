// Part of step.cu: how a block receives the inputs of a phase, to which all blocks have contributed. A
// thread polls FIRST_POLLS pairs of words until they have arrived, then LATER_POLLS at a time, since most
// have arrived by then: every poll of a word that has not arrived delays the stores of other blocks.

// Polls COUNT of the pairs of words that belong to this thread, from its n-th on; or, if WHOLE, words of 16 bytes
template <int UNITS, int COUNT, bool WHOLE, typename Place, typename Arrived, typename Take, typename Then>
FN void receive_some(int n, const Place& place, const Arrived& arrived, const Take& take, const Then& then) {
    Words v[COUNT];
    bool all;
    do {
        all = true;
        UNROLL for (int u = 0; u < COUNT; ++u) {
            const int unit = (n + u) * THREADS + thread();
            if (unit >= UNITS) continue;
            v[u] = WHOLE ? peek_whole(place(unit)) : peek2(place(unit));
            all &= arrived(v[u]);
        }
    } while (!all && !polled_in_vain());
    UNROLL for (int u = 0; u < COUNT; ++u)
        if ((n + u) * THREADS + thread() < UNITS) take((n + u) * THREADS + thread(), v[u], u);
    UNROLL for (int u = 0; u < COUNT; ++u)
        if ((n + u) * THREADS + thread() < UNITS) then((n + u) * THREADS + thread(), u);
}

struct HaveTag {                                   // of pairs of words
    u32 tag;
    FN_MEMBER bool operator()(Words v) const { return u32(v.x >> 32) == tag && u32(v.y >> 32) == tag; }
};

struct Nothing { FN_MEMBER void operator()(int, int) const {} };

constexpr int POLLS = max_int(FIRST_POLLS, LATER_POLLS);   // of a thread at a time, at most

// Polls UNITS pairs of words, at place(unit). Of those that are polled together it calls take(unit, words, number)
// for each, then then(unit, number) for each, numbers from 0 on.
template <int UNITS, bool WHOLE = false, typename Place, typename Arrived, typename Take, typename Then = Nothing>
FN void receive_at(const Place& place, const Arrived& arrived, const Take& take, const Then& then = {}) {
    constexpr int EACH = (UNITS + THREADS - 1) / THREADS, FIRST = min_int(EACH, FIRST_POLLS);
    if constexpr (LATER_POLLS > FIRST_POLLS) {
        constexpr int REST = EACH - FIRST, TURNS = (REST + LATER_POLLS - 1) / LATER_POLLS;
        constexpr int LATER = TURNS ? (REST + TURNS - 1) / TURNS : 1;
        receive_some<UNITS, FIRST, WHOLE>(0, place, arrived, take, then);
        ROLLED for (int n = FIRST; n < EACH; n += LATER) receive_some<UNITS, LATER, WHOLE>(n, place, arrived, take, then);
    } else                                         // less code: one loop for all of them
        ROLLED for (int n = 0; n < EACH; n += FIRST) receive_some<UNITS, FIRST, WHOLE>(n, place, arrived, take, then);
}

FN const u16* embedded(const Params& p, int b) { return p.embed + (p.tokens ? p.tokens[b] : b) * HIDDEN; }

// The factor of a row of the residual, of which the block's warps have the sums of squares
FN float norm_of(int b, float eps) {
    float square = 0;
    UNROLL for (int w = 0; w < WARPS; ++w) square += sums()[b * WARPS + w];
    return rsqrtf(square / HIDDEN + eps);
}

#if CODES
#include "eights.h"
#endif

// Receives K values of each row of the batch, two to a word, or eight
template <int K> FN void load_values(const u64* from, u32 tag, u16* x) {
    UNROLL for (int b = 0; b < BATCH; ++b) {
#if CODES
        constexpr int UNITS = K / 8;               // whole warps: the last lanes may have the last word again
        const auto within = [](int unit) { return UNITS % 32 ? min_int(unit, UNITS - 1) : unit; };
        Eight eights[POLLS];
        receive_at<(UNITS + 31) / 32 * 32, true>(
            [=](int unit) { return from + (b * UNITS + within(unit)) * 2; }, [=](Words v) { return has_tag(v, tag); },
            [&](int, Words v, int u) { eights[u].set(v); },
            [&](int unit, int u) {
                const int own = within(unit) - unit + thread(), before = unit - thread();    // constant if unrolled
                eights[u].store((u8*)(x + b * K) + before * 16 + operand_place(own),
                                x_scales(true) + b * (K / 128) + before / 16 + own / 16);
            });
#else
        if constexpr (K == INNER && GATE_PAIRS == 3) {     // three to a word, with 16 bits of the tag
            constexpr int WORDS = (K + 2) / 3 + 1 & ~1;
            receive_at<WORDS / 2>([=](int unit) { return from + b * WORDS + 2 * unit; },
                                  [=](Words v) { return u16(v.x >> 48) == u16(tag) && u16(v.y >> 48) == u16(tag); },
                                  [=](int unit, Words v, int) {
                u32* to = (u32*)(x + b * K) + 3 * unit;
                if (6 * unit < K) to[0] = u32(v.x);
                if (6 * unit + 2 < K) to[1] = u32(v.x >> 32) & 0xFFFF | u32(v.y) << 16;
                if (6 * unit + 4 < K) to[2] = u32(v.y >> 16);
            });
        } else
        receive_at<K / 4>([=](int unit) { return from + b * (K / 2) + 2 * unit; }, HaveTag{tag}, [=](int unit, Words v, int) {
            ((u64*)(x + b * K))[unit] = u64(u32(v.y)) << 32 | u32(v.x);
        });
#endif
    }
    sync_first(THREADS);
}

#if !CODES
// Receives the residual and normalises it; `from` is null for the first layer, which reads the embedding
FN float load_normed(const u64* from, u32 tag, const u16* weight, float eps, u16* x, bool, const Params& p) {
    constexpr int UNITS = HIDDEN / 2, EACH = (UNITS + THREADS - 1) / THREADS;
    u32 by[EACH];                                  // the weight, loaded before the first wait
    UNROLL for (int n = 0; n < EACH; ++n)
        if (n * THREADS + thread() < UNITS) by[n] = load_once((const u32*)weight + n * THREADS + thread());
    UNROLL for (int b = 0; b < BATCH; ++b) {
        float* to = residual() + b * HIDDEN;
        float square = 0;
        const auto keep = [&](int unit, float left, float right) {
            to[2 * unit] = left, to[2 * unit + 1] = right;
            square += left * left + right * right;
        };
        if (from)
            receive_at<UNITS>([=](int unit) { return from + b * HIDDEN + 2 * unit; }, HaveTag{tag}, [&](int unit, Words v, int) {
                keep(unit, bits_float(u32(v.x)), bits_float(u32(v.y)));
            });
        else {
            const u32* row = (const u32*)embedded(p, b);
            UNROLL for (int n = 0; n < EACH; ++n) {
                const int unit = n * THREADS + thread();
                if (unit >= UNITS) continue;
                const u32 pair = load_once(row + unit);
                keep(unit, low(pair), high(pair));
            }
        }
        square = warp_sum(square);
        if (lane() == 0) sums()[b * WARPS + warp()] = square;
    }
    sync_first(THREADS);
    UNROLL for (int b = 0; b < BATCH; ++b) {
        const float inverse = norm_of(b, eps);
        const float* row = residual() + b * HIDDEN;
        UNROLL for (int n = 0; n < EACH; ++n) {
            const int unit = n * THREADS + thread();
            if (unit >= UNITS) continue;
            ((u32*)(x + b * HIDDEN))[unit] =
                pack2<true>(row[2 * unit] * inverse * low(by[n]), row[2 * unit + 1] * inverse * high(by[n]));
        }
    }
    sync_first(THREADS);
    return 1;
}
#endif

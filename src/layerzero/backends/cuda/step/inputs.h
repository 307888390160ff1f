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
    } while (!all && !given_up());
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

#if CODES
// 128 inputs for the products with codes (codes.h), four of each lane of a warp
struct Group {
    float v[4];
    u32 largest;

    FN_MEMBER void set(float v0, float v1, float v2, float v3) {
        v[0] = v0, v[1] = v1, v[2] = v2, v[3] = v3;
        const float left = max_or_nan(fabsf(v0), fabsf(v1)), right = max_or_nan(fabsf(v2), fabsf(v3));
        largest = warp_max_bits(float_bits(max_or_nan(left, right)));
    }

    // Stores them and their scale. For int4: two signed bytes of each, 256 * first + second, in the order in which
    // codes are decoded. Two lanes have the inputs of a word of eight codes: one stores the first bytes, the
    // other the second.
    FN_MEMBER void store(u8* x, float* scales, int group) const {
        u64* to = (u64*)(x + group * 256);
        if (CODES == 2) {                          // a power of two, with which the largest one is at least 2^13
            const int exponent = max_int(14, largest >> 23);
            const float by = bits_float(u32(267 - exponent) << 23);
            to[lane()] = u64(pack2<false>(v[2] * by, v[3] * by)) << 32 | pack2<false>(v[0] * by, v[1] * by);
            if (lane() == 0) scales[group] = bits_float(u32(exponent - 13) << 23);
            return;
        }
        constexpr float MOST = 127 * 256;          // and codes are 16 times as large
        const float by = MOST * reciprocal(fmaxf(bits_float(largest), 1e-30f));
        u32 bits[4];                               // rounded to an integer, in the low bits of 1.5 * 2^23, plus 128:
        UNROLL for (int n = 0; n < 4; ++n) bits[n] = float_bits(v[n] * by + 12583040.0f);     // byte 0 is second + 128
        const u32 even = permute_bytes(bits[0], bits[2], 0x5410), odd = permute_bytes(bits[1], bits[3], 0x5410);
        const u32 first = permute_bytes(even, odd, 0x7531), second = permute_bytes(even, odd, 0x6420) ^ 0x80808080u;
        const bool is_odd = lane() % 2;
        const u32 own = is_odd ? second : first, other = shuffle_xor(is_odd ? first : second, 1);
        const int word = lane() / 2 % 4;           // of the 16 bytes of codes that a lane multiplies
        const u32 low_bytes = permute_bytes(own, other, is_odd ? 0x1054 : 0x5410);
        const u32 high_bytes = permute_bytes(own, other, is_odd ? 0x3276 : 0x7632);
        to[word / 2 * 16 + is_odd * 8 + lane() / 8 * 2 + word % 2] = u64(high_bytes) << 32 | low_bytes;
        if (lane() == 0) scales[group] = bits_float(largest) * (1 / (16 * MOST));
    }
};
#endif

#if CODES
#include "eights.h"
#endif

// Receives K values of each row of the batch, two to a word, or eight
template <int K> FN void load_values(const u64* from, u32 tag, u16* x) {
    UNROLL for (int b = 0; b < BATCH; ++b) {
#if CODES
        constexpr int UNITS = K / 8;               // whole warps: the last lanes may have the last word again
        Eight eights[POLLS];
        receive_at<(UNITS + 31) / 32 * 32, true>(
            [=](int unit) { return from + (b * UNITS + min_int(unit, UNITS - 1)) * 2; }, [=](Words v) { return has_tag(v, tag); },
            [&](int, Words v, int u) { eights[u].set(v); },
            [&](int unit, int u) {
                eights[u].store((u8*)(x + b * K), x_scales(true) + b * (K / 128), min_int(unit, UNITS - 1));
            });
#else
        receive_at<K / 4>([=](int unit) { return from + b * (K / 2) + 2 * unit; }, HaveTag{tag}, [=](int unit, Words v, int) {
            ((u64*)(x + b * K))[unit] = u64(u32(v.y)) << 32 | u32(v.x);
        });
#endif
    }
    sync_first(THREADS);
}

// Four values of the residual in a word of 16 bytes, 24 bits of each
FN Words packed(u32 a, u32 b, u32 c, u32 d, u32 tag) {
    return {u64(b >> 16 | c >> 8 << 16) << 32 | (a >> 8 | b >> 8 << 24), u64(tag) << 32 | (c >> 24 | d >> 8 << 8)};
}

FN void unpack(Words v, float (&values)[4]) {
    const u32 x = u32(v.x), y = u32(v.x >> 32), z = u32(v.y);
    values[0] = bits_float(x << 8), values[1] = bits_float(permute_bytes(x, y, 0x5430) & ~0xFFu);
    values[2] = bits_float(permute_bytes(y, z, 0x4320) & ~0xFFu), values[3] = bits_float(z & ~0xFFu);
}
FN void unpack(Words v, float (&values)[2]) { values[0] = bits_float(u32(v.x)), values[1] = bits_float(u32(v.y)); }

#if CODES
// Quantizes a row of the residual times the weight of the norm, as the threads received it
template <int EACH> FN void quantize_normed(const float* residual, const u32 (&weight)[EACH][2], u8* x, float* scales) {
    Group groups[EACH];
    UNROLL for (int n = 0; n < EACH; ++n) {
        const int unit = n * THREADS + thread();
        if (unit >= HIDDEN / 4) continue;
        const float* at = residual + 4 * unit;
        const u32 left = weight[n][0], right = weight[n][1];
        groups[n].set(at[0] * low(left), at[1] * high(left), at[2] * low(right), at[3] * high(right));
    }
    UNROLL for (int n = 0; n < EACH; ++n)
        if (n * THREADS + thread() < HIDDEN / 4) groups[n].store(x, scales, (n * THREADS + thread()) / 32);
}
#endif

// Receives the residual and normalises it; `from` is null for the first layer, which reads the embedding.
// Unless `in_order`, x is for codes: then it is not yet multiplied by the norm, which is returned for the row of
// the batch that is this lane's, and all can be done before the block has come together to know it.
FN float load_normed(const u64* from, u32 tag, const u16* weight, float eps, u16* x, bool in_order, const Params& p) {
    constexpr int WIDE = CODED ? 2 : 1, MANY = 2 * WIDE, UNITS = HIDDEN / MANY, EACH = (UNITS + THREADS - 1) / THREADS;
    u32 by[EACH][WIDE];                            // the weight, loaded before the first wait
    UNROLL for (int n = 0; n < EACH; ++n)
        UNROLL for (int w = 0; w < WIDE; ++w)
            if (n * THREADS + thread() < UNITS)
                by[n][w] = load_once((const u32*)weight + (n * THREADS + thread()) * WIDE + w);
    UNROLL for (int b = 0; b < BATCH; ++b) {
        float* to = residual() + b * HIDDEN;
        float square = 0;
        if (from) {
            receive_at<UNITS, CODED>([=](int unit) { return from + b * (HIDDEN / WIDE) + 2 * unit; },
                                     [=](Words v) { return (CODED || u32(v.x >> 32) == tag) && u32(v.y >> 32) == tag; },
                                     [&](int unit, Words v, int) {
                float values[MANY];
                unpack(v, values);
                UNROLL for (int m = 0; m < MANY; ++m) {
                    to[MANY * unit + m] = values[m];
                    square += values[m] * values[m];
                }
            });
        } else {
            const u32* row = (const u32*)(p.embed + (p.tokens ? p.tokens[b] : b) * HIDDEN);
            UNROLL for (int n = 0; n < EACH * WIDE; ++n) {
                const int unit = (n / WIDE * THREADS + thread()) * WIDE + n % WIDE;
                if (unit >= UNITS * WIDE) continue;
                const u32 pair = load_once(row + unit);
                to[2 * unit] = low(pair), to[2 * unit + 1] = high(pair);
                square += low(pair) * low(pair) + high(pair) * high(pair);
            }
        }
#if CODES
        if (!in_order) quantize_normed(to, by, (u8*)(x + b * HIDDEN), x_scales(false) + b * (HIDDEN / 128));
#endif
        square = warp_sum(square);
        if (lane() == 0) sums()[b * WARPS + warp()] = square;
    }
    sync_first(THREADS);
    const auto norm = [=](int b) {
        float square = 0;
        UNROLL for (int w = 0; w < WARPS; ++w) square += sums()[b * WARPS + w];
        return rsqrtf(square / HIDDEN + eps);
    };
    if (CODED && !in_order) return norm(min_int(lane(), BATCH - 1));
    UNROLL for (int b = 0; b < BATCH; ++b) {
        const float inverse = norm(b);
        const float* row = residual() + b * HIDDEN;
        UNROLL for (int n = 0; n < EACH * WIDE; ++n) {
            const int unit = (n / WIDE * THREADS + thread()) * WIDE + n % WIDE;
            if (unit >= UNITS * WIDE) continue;
            const u32 weights = by[n / WIDE][n % WIDE];
            ((u32*)(x + b * HIDDEN))[unit] =
                pack2<true>(row[2 * unit] * inverse * low(weights), row[2 * unit + 1] * inverse * high(weights));
        }
    }
    sync_first(THREADS);
    return 1;
}

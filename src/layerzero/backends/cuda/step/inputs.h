// Part of step.cu: how a block receives the inputs of a phase, to which all blocks have contributed. A
// thread polls FIRST_POLLS pairs of words until they have arrived, then LATER_POLLS at a time, since most
// have arrived by then: every poll of a word that has not arrived delays the stores of other blocks.

// Polls COUNT of the pairs of words that belong to this thread, from its n-th on
template <int UNITS, int COUNT, typename Place, typename Take>
FN void receive_some(int n, const Place& place, u32 tag, const Take& take) {
    Words v[COUNT];
    bool all;
    do {
        all = true;
        UNROLL for (int u = 0; u < COUNT; ++u) {
            const int unit = (n + u) * THREADS + thread();
            if (unit >= UNITS) continue;
            v[u] = peek2(place(unit));
            all &= u32(v[u].x >> 32) == tag && u32(v[u].y >> 32) == tag;
        }
    } while (!all && !given_up());
    UNROLL for (int u = 0; u < COUNT; ++u) {
        const int unit = (n + u) * THREADS + thread();
        if (unit < UNITS) take(unit, u32(v[u].x), u32(v[u].y));
    }
}

// Polls UNITS pairs of words, at place(unit), and calls take(unit, first value, second value) for each
template <int UNITS, typename Place, typename Take>
FN void receive_at(const Place& place, u32 tag, const Take& take) {
    constexpr int EACH = (UNITS + THREADS - 1) / THREADS, FIRST = min_int(EACH, FIRST_POLLS);
    if constexpr (LATER_POLLS > FIRST_POLLS) {
        constexpr int REST = EACH - FIRST, TURNS = (REST + LATER_POLLS - 1) / LATER_POLLS;
        constexpr int LATER = TURNS ? (REST + TURNS - 1) / TURNS : 1;
        receive_some<UNITS, FIRST>(0, place, tag, take);
        ROLLED for (int n = FIRST; n < EACH; n += LATER) receive_some<UNITS, LATER>(n, place, tag, take);
    } else                                         // less code: one loop for all of them
        ROLLED for (int n = 0; n < EACH; n += FIRST) receive_some<UNITS, FIRST>(n, place, tag, take);
}

template <int UNITS, typename Take> FN void receive(const u64* from, u32 tag, const Take& take) {
    receive_at<UNITS>([=](int unit) { return from + 2 * unit; }, tag, take);
}

struct Scale { float by, inverse; };

FN float half_sum(u32 pair) { return to_float<false>(u16(pair)) + to_float<false>(u16(pair >> 16)); }

// The power of two that scales the largest value of a row of x to at least 2^13, which fits fp16
FN Scale x_scale(const float* peaks, int b) {
    float peak = peaks[b * WARPS];
    UNROLL for (int w = 1; w < WARPS; ++w) peak = fmaxf(peak, peaks[b * WARPS + w]);
    const int exponent = max_int(14, float_bits(peak) >> 23);
    return {bits_float(u32(267 - exponent) << 23), bits_float(u32(exponent - 13) << 23)};
}

// Converts x for the products with codes (codes.h): to scaled fp16, for int4 in the order in which codes
// are decoded from a word; and computes the excess of such a product for each 128 inputs
template <int K> FN void arrange(u16* x, bool is_odd, const float (&peak)[BATCH]) {
    float *peaks = ::peaks(is_odd), *offsets = code_offsets(is_odd);
    UNROLL for (int b = 0; b < BATCH; ++b) {
        const float largest = warp_max(peak[b]);
        if (lane() == 0) peaks[b * WARPS + warp()] = largest;
    }
    sync_first(THREADS);
    ROLLED for (int b = 0; b < BATCH; ++b) {
        const float by = x_scale(peaks, b).by, odd = CODES == 1 ? by / 16 : by;
        ROLLED for (int unit = thread(); unit < K / 8; unit += THREADS) {
            u16* at = x + b * K + unit * 8;
            const Four v = load4(at);
            const float y[8] = {low(v.x) * by, high(v.x) * odd, low(v.y) * by, high(v.y) * odd,
                                low(v.z) * by, high(v.z) * odd, low(v.w) * by, high(v.w) * odd};
            constexpr int PAIR = CODES == 1 ? 1 : 2, APART = CODES == 1 ? 4 : 1;
            const Four to = {pack2<false>(y[0], y[APART]), pack2<false>(y[PAIR], y[PAIR + APART]),
                             pack2<false>(y[2 * PAIR], y[2 * PAIR + APART]), pack2<false>(y[3 * PAIR], y[3 * PAIR + APART])};
            store4(at, to);
            if (CODES != 1) continue;
            // 16 threads have a block: 1024 + 8, and 16 times (64 + 8)
            float much = 1032 * (half_sum(to.x) + half_sum(to.z)) + 1152 * (half_sum(to.y) + half_sum(to.w));
            UNROLL for (int mask = 1; mask < 16; mask *= 2) much += shuffle_xor(much, mask);
            if (lane() % 16 == 0) offsets[b * (K / 128) + unit / 16] = much;
        }
    }
    sync_first(THREADS);
}

// Receives K values of each row of the batch, two to a word
template <int K> FN void load_pairs(const u64* from, u32 tag, u16* x) {
    float peak[BATCH];
    UNROLL for (int b = 0; b < BATCH; ++b) {
        peak[b] = 0;
        receive<K / 4>(from + b * (K / 2), tag, [&](int unit, u32 left, u32 right) {
            ((u64*)(x + b * K))[unit] = u64(right) << 32 | left;
            if (CODED)
                peak[b] = fmaxf(fmaxf(peak[b], fmaxf(fabsf(low(left)), fabsf(high(left)))),
                                fmaxf(fabsf(low(right)), fabsf(high(right))));
        });
    }
    if (CODED) arrange<K>(x, true, peak);
    else sync_first(THREADS);
}

// Receives the residual and normalises it; `from` is null for the first layer, which reads the embedding
FN void load_normed(const u64* from, u32 tag, const u16* weight, float eps, u16* x, bool in_order, const Params& p) {
    constexpr int UNITS = HIDDEN / 2, EACH = (UNITS + THREADS - 1) / THREADS;
    u32 by[EACH];                                  // the weight, loaded before the first wait
    UNROLL for (int n = 0; n < EACH; ++n)
        if (n * THREADS + thread() < UNITS) by[n] = load_once((const u32*)weight + n * THREADS + thread());
    UNROLL for (int b = 0; b < BATCH; ++b) {
        float* to = residual() + b * HIDDEN;
        float square = 0;
        if (from) {
            receive<UNITS>(from + b * HIDDEN, tag, [&](int unit, u32 left, u32 right) {
                const float l = bits_float(left), r = bits_float(right);
                to[2 * unit] = l, to[2 * unit + 1] = r;
                square += l * l + r * r;
            });
        } else {
            const u32* row = (const u32*)(p.embed + (p.tokens ? p.tokens[b] : b) * HIDDEN);
            UNROLL for (int n = 0; n < EACH; ++n) {
                const int unit = n * THREADS + thread();
                if (unit >= UNITS) continue;
                const u32 pair = load_once(row + unit);
                to[2 * unit] = low(pair), to[2 * unit + 1] = high(pair);
                square += low(pair) * low(pair) + high(pair) * high(pair);
            }
        }
        square = warp_sum(square);
        if (lane() == 0) sums()[b * WARPS + warp()] = square;
    }
    sync_first(THREADS);
    float peak[BATCH];
    UNROLL for (int b = 0; b < BATCH; ++b) {
        float square = 0;
        UNROLL for (int w = 0; w < WARPS; ++w) square += sums()[b * WARPS + w];
        const float inverse = rsqrtf(square / HIDDEN + eps);
        peak[b] = 0;
        const float* row = residual() + b * HIDDEN;
        UNROLL for (int n = 0; n < EACH; ++n) {
            const int unit = n * THREADS + thread();
            if (unit >= UNITS) continue;
            const u32 pair = pack2<true>(row[2 * unit] * inverse * low(by[n]), row[2 * unit + 1] * inverse * high(by[n]));
            ((u32*)(x + b * HIDDEN))[unit] = pair;
            if (CODED) peak[b] = fmaxf(peak[b], fmaxf(fabsf(low(pair)), fabsf(high(pair))));
        }
    }
    if (CODED && !in_order) arrange<HIDDEN>(x, false, peak);
    else sync_first(THREADS);
}


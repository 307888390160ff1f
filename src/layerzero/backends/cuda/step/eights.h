// Part of step.cu: eight values of gate and up, or of attention, in a word of 16 bytes. They are integers of 13
// bits with one exponent, that of the largest. Each has 16 bits; in the lowest three of them are, of two
// values at a time, the exponent's bits 0 to 2 and 6 to 7, its bits 3 to 5, and twelve bits of the tag: what
// a word held before is at most a few layers old.
constexpr u32 SPARE = 0x00070007u;
constexpr u32 LEAST = 18;                          // exponent: scales stay normal numbers

FN u32 shared_exponent(float largest) { return max_int(LEAST, float_bits(largest) >> 23); }     // 255: not a number

FN u32 fixed(float v, u32 exponent) {
    return float_bits(fminf(v * bits_float((265 - exponent) << 23), 4095.0f) + 12582912.0f) << 3 & 0xFFF8u;
}

FN Words eight(u32 a, u32 b, u32 c, u32 d, u32 exponent, u32 tag) {    // two fixed values each
    a |= (exponent & 7) | (exponent >> 6) << 16;
    b |= exponent >> 3 & 7;
    c |= (tag & 7) | (tag >> 3 & 7) << 16;
    d |= (tag >> 6 & 7) | (tag >> 9 & 7) << 16;
    return {u64(b) << 32 | a, u64(d) << 32 | c};
}

// One value of each lane, eight of which are the same in all quarters of the warp
FN void post_ones(u64* to, float v, u32 tag) {
    const u32 exponent = shared_exponent(bits_float(warp_max_bits(float_bits(fabsf(v))))), own = fixed(v, exponent);
    const u32 pair = own | shuffle_xor(own, 1) << 16;
    const u32 others[3] = {shuffle_xor(pair, 2), shuffle_xor(pair, 4), shuffle_xor(pair, 6)};
    if (lane() == 0) post_whole(to, eight(pair, others[0], others[1], others[2], exponent, tag));
}

// Four values of each lane; those of an odd lane follow those of the one before
FN void post_fours(u64* to, const float (&v)[4], u32 tag, bool wanted) {
    float most = max_or_nan(max_or_nan(fabsf(v[0]), fabsf(v[1])), max_or_nan(fabsf(v[2]), fabsf(v[3])));
    most = max_or_nan(most, shuffle_xor(most, 1));
    const u32 exponent = shared_exponent(most);
    const u32 left = fixed(v[0], exponent) | fixed(v[1], exponent) << 16;
    const u32 right = fixed(v[2], exponent) | fixed(v[3], exponent) << 16;
    const u32 others[2] = {shuffle_xor(left, 1), shuffle_xor(right, 1)};
    if (wanted && lane() % 2 == 0) post_whole(to, eight(left, right, others[0], others[1], exponent, tag));
}

FN bool has_tag(Words v, u32 tag) {
    const Words wanted = eight(0, 0, 0, 0, 0, tag);
    return (((u32(v.y) ^ u32(wanted.y)) | (u32(v.y >> 32) ^ u32(wanted.y >> 32))) & SPARE) == 0;
}

// Eight inputs as operands of the products with codes (codes.h). Of int4: two signed bytes of each, 256 * first +
// second, in the order in which codes are decoded; they are integers in the low bits of 1.5 * 2^23, plus 128, so
// that byte 0 is second + 128. Inputs of fp8 are fp16.
constexpr float RAISE = CODES == 1 ? 12583040.0f : 0.0f;

// Where a unit of eight begins; one that is 16 * n units later begins 256 * n bytes later
FN int operand_place(u32 unit) {
    return CODES == 1 ? unit / 16 * 256 + unit / 2 % 2 * 128 + unit / 4 % 4 * 16 + unit % 2 * 8 : unit * 16;
}

FN void store_operands(u8* to, const float (&f)[8]) {
    if (CODES == 2) {
        store4(to, {pack2<false>(f[0], f[1]), pack2<false>(f[2], f[3]), pack2<false>(f[4], f[5]), pack2<false>(f[6], f[7])});
        return;
    }
    u32 first[2], second[2];                       // bytes of those with even numbers, and with odd ones
    UNROLL for (int n = 0; n < 2; ++n) {
        const u32 left = permute_bytes(float_bits(f[n]), float_bits(f[2 + n]), 0x5410);
        const u32 right = permute_bytes(float_bits(f[4 + n]), float_bits(f[6 + n]), 0x5410);
        first[n] = permute_bytes(left, right, 0x7531);
        second[n] = permute_bytes(left, right, 0x6420) ^ 0x80808080u;
    }
    *(u64*)to = u64(first[1]) << 32 | first[0];
    *(u64*)(to + 64) = u64(second[1]) << 32 | second[0];
}

// A word that a lane has received, and the largest exponent of those of its warp
struct Eight {
    Words v;
    u32 exponent, largest;

    FN_MEMBER void set(Words word) {
        const u32 a = u32(word.x), b = u32(word.x >> 32);
        v = word, exponent = (a & 7) | (b & 7) << 3 | (a >> 16 & 7) << 6;
        largest = warp_max_bits(exponent);
    }

    // Stores them as operands
    FN_MEMBER void store(u8* to, float* scale) const {
        const u32 words[4] = {u32(v.x), u32(v.x >> 32), u32(v.y), u32(v.y >> 32)};
        const float by = bits_float(u32(max_int(1, 126 - int(largest - exponent))) << 23), base = RAISE - 8421376.0f * by;
        float f[8];                                // as if the exponent were the largest
        UNROLL for (int n = 0; n < 4; ++n) {
            const u32 pair = masked_xor(words[n], ~SPARE, 0x80008000u);        // + 2^15
            f[2 * n] = bits_float(permute_bytes(pair, 0x4B000000u, 0x7410)) * by + base;
            f[2 * n + 1] = bits_float(permute_bytes(pair, 0x4B000000u, 0x7432)) * by + base;
        }
        if (lane() % 16 == 0)
            *scale = bits_float(largest == 255 ? 0x7FC00000u : (largest - 13) << 23) * (CODES == 1 ? 0.0625f : 1.0f);
        store_operands(to, f);
    }
};

// Four values of the residual in a word of 16 bytes, 24 bits of each
FN Words packed(u32 a, u32 b, u32 c, u32 d, u32 tag) {
    return {u64(b >> 16 | c >> 8 << 16) << 32 | (a >> 8 | b >> 8 << 24), u64(tag) << 32 | (c >> 24 | d >> 8 << 8)};
}

FN void unpack(Words v, float* values) {
    const u32 x = u32(v.x), y = u32(v.x >> 32), z = u32(v.y);
    values[0] = bits_float(x << 8), values[1] = bits_float(permute_bytes(x, y, 0x5430) & ~0xFFu);
    values[2] = bits_float(permute_bytes(y, z, 0x4320) & ~0xFFu), values[3] = bits_float(z & ~0xFFu);
}
// Stores eight inputs with the scale of those of the warp
FN void quantize(const float (&y)[8], u8* to, float* scale) {
    float most = fabsf(y[0]), f[8];
    UNROLL for (int n = 1; n < 8; ++n) most = max_or_nan(most, fabsf(y[n]));
    const u32 largest = warp_max_bits(float_bits(most));
    constexpr float MOST = 127 * 256;              // of int4, whose codes are 16 times as large
    const u32 exponent = max_int(14, largest >> 23);   // of fp8: a power of two, with which the largest one is at least 2^13
    const float by = CODES == 1 ? MOST * reciprocal(fmaxf(bits_float(largest), 1e-30f)) : bits_float((267 - exponent) << 23);
    UNROLL for (int n = 0; n < 8; ++n) f[n] = y[n] * by + RAISE;
    if (lane() % 16 == 0) *scale = CODES == 1 ? bits_float(largest) * (1 / (16 * MOST)) : bits_float((exponent - 13) << 23);
    store_operands(to, f);
}

// Receives the residual; `from` is null for the first layer, which reads the embedding. Unless `in_order`, x is for
// codes: then it is not yet multiplied by the norm, which is returned for the row of the batch that is this
// lane's, and all is done before the block has come together to know it. Else x is the normalised row in bf16.
FN float load_normed(const u64* from, u32 tag, const u16* weight, float eps, u16* x, bool in_order, const Params& p) {
    constexpr int UNITS = HIDDEN / 8, PADDED = (UNITS + 31) / 32 * 32, EACH = (PADDED + THREADS - 1) / THREADS;
    const auto is_active = [](int n) { return n * THREADS + thread() < PADDED; };
    const auto own = [](int n) { return UNITS % 32 ? min_int(thread(), UNITS - 1 - n * THREADS) : thread(); };
    const int place = operand_place(thread());
    u32 by[EACH][4];                               // the weight, loaded before the first wait
    UNROLL for (int n = 0; n < EACH; ++n)
        UNROLL for (int e = 0; e < 4; ++e)
            if (is_active(n)) by[n][e] = load_once((const u32*)weight + (n * THREADS + own(n)) * 4 + e);
    float kept[BATCH][EACH][8];                    // only if in order
    UNROLL for (int b = 0; b < BATCH; ++b) {
        Words v[EACH][2];
        const u64* words = from + b * (HIDDEN / 2);
        bool all = !from;
#if CANARY
        if (from && is_active(0)) while (u32(peek_whole(words + own(0) * 4).y >> 32) != tag && !polled_in_vain());
#endif
        while (!all) {
            all = true;
            UNROLL for (int n = 0; n < EACH; ++n)
                UNROLL for (int e = 0; e < 2; ++e) {
                    if (!is_active(n)) continue;
                    v[n][e] = peek_whole(words + (n * THREADS + own(n)) * 4 + 2 * e);
                    all &= u32(v[n][e].y >> 32) == tag;
                }
            if (!all && polled_in_vain()) break;
        }
        float square = 0;
        UNROLL for (int n = 0; n < EACH; ++n) {
            if (!is_active(n)) continue;
            float values[8];
            unpack(v[n][0], values), unpack(v[n][1], values + 4);
            if (!from)
                UNROLL for (int e = 0; e < 4; ++e) {
                    const u32 pair = load_once((const u32*)embedded(p, b) + (n * THREADS + own(n)) * 4 + e);
                    values[2 * e] = low(pair), values[2 * e + 1] = high(pair);
                }
            if (in_order) UNROLL for (int e = 0; e < 8; ++e) kept[b][n][e] = values[e];
            if (UNITS % 32 == 0 || own(n) == thread())
                UNROLL for (int e = 0; e < 8; ++e) square += values[e] * values[e];
            if (in_order) continue;
            UNROLL for (int e = 0; e < 4; ++e) values[2 * e] *= low(by[n][e]), values[2 * e + 1] *= high(by[n][e]);
            quantize(values, (u8*)(x + b * HIDDEN) + n * THREADS * 16 + (UNITS % 32 ? operand_place(own(n)) : place),
                     x_scales(false) + b * (HIDDEN / 128) + n * THREADS / 16 + own(n) / 16);
        }
        square = warp_sum(square);
        if (lane() == 0) sums()[b * WARPS + warp()] = square;
    }
    sync_first(THREADS);
    if (!in_order) return norm_of(min_int(lane(), BATCH - 1), eps);
    UNROLL for (int b = 0; b < BATCH; ++b) {
        const float inverse = norm_of(b, eps);
        UNROLL for (int n = 0; n < EACH; ++n)
            UNROLL for (int e = 0; e < 4; ++e) {
                if (!is_active(n)) continue;
                const int pair = b * (HIDDEN / 2) + (n * THREADS + own(n)) * 4 + e;
                ((u32*)x)[pair] = pack2<true>(kept[b][n][2 * e] * inverse * low(by[n][e]),
                                              kept[b][n][2 * e + 1] * inverse * high(by[n][e]));
            }
    }
    sync_first(THREADS);
    return 1;
}

// Part of step.cu, for codes: eight values of gate and up, or of attention, in a word of 16 bytes. They are integers
// of 13 bits with a common exponent, that of the largest, which loses less than bf16 does. A value has 16 bits, of
// which the lowest three are spare: they hold, in the order of the pairs of values, bits 0 to 2 and 6 to 7 of the
// exponent, its bits 3 to 5, and twelve bits of the tag. Those suffice: what a word held before is a few layers old.
constexpr u32 SPARE = 0x00070007u;
constexpr u32 LEAST = 18;                          // exponent: scales stay normal numbers

FN u32 shared_exponent(float largest) { return max_int(LEAST, float_bits(largest) >> 23); }     // 255: not finite

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

// A word that a lane has received, and the largest exponent of those of its warp
struct Eight {
    Words v;
    u32 exponent, largest;

    FN_MEMBER void set(Words word) {
        const u32 a = u32(word.x), b = u32(word.x >> 32);
        v = word, exponent = (a & 7) | (b & 7) << 3 | (a >> 16 & 7) << 6;
        largest = warp_max_bits(exponent);
    }

    // Stores them as operands of the products with codes (codes.h), as `Group` (inputs.h) does
    FN_MEMBER void store(u8* x, float* scales, int unit) const {
        const u32 words[4] = {u32(v.x), u32(v.x >> 32), u32(v.y), u32(v.y >> 32)};
        const float by = bits_float(u32(max_int(1, 126 - int(largest - exponent))) << 23);
        const float base = (CODES == 1 ? 12583040.0f : 0.0f) - 8421376.0f * by;
        float f[8];                                // as if the exponent were the largest
        UNROLL for (int n = 0; n < 4; ++n) {
            const u32 pair = masked_xor(words[n], ~SPARE, 0x80008000u);        // + 2^15
            f[2 * n] = bits_float(permute_bytes(pair, 0x4B000000u, 0x7410)) * by + base;
            f[2 * n + 1] = bits_float(permute_bytes(pair, 0x4B000000u, 0x7432)) * by + base;
        }
        if (lane() % 16 == 0)
            scales[unit / 16] = bits_float(largest == 255 ? 0x7FC00000u : (largest - 13) << 23) * (CODES == 1 ? 0.0625f : 1.0f);
        if (CODES == 2) {
            store4(x + unit * 16, {pack2<false>(f[0], f[1]), pack2<false>(f[2], f[3]), pack2<false>(f[4], f[5]),
                                   pack2<false>(f[6], f[7])});
            return;
        }
        u32 first[2], second[2];                   // bytes of those with even numbers, and with odd ones
        UNROLL for (int n = 0; n < 2; ++n) {
            const u32 left = permute_bytes(float_bits(f[n]), float_bits(f[2 + n]), 0x5410);
            const u32 right = permute_bytes(float_bits(f[4 + n]), float_bits(f[6 + n]), 0x5410);
            first[n] = permute_bytes(left, right, 0x7531);
            second[n] = permute_bytes(left, right, 0x6420) ^ 0x80808080u;
        }
        u64* to = (u64*)(x + unit / 16 * 256) + unit % 4 / 2 * 16 + unit % 16 / 4 * 2 + unit % 2;
        to[0] = u64(first[1]) << 32 | first[0];
        to[8] = u64(second[1]) << 32 | second[0];
    }
};

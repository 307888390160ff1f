// ggml's weight blocks, and the same weights with R rows interleaved: one "lane vector" holds 4
// consecutive codes of each of R rows, which is what one dot-product instruction multiplies with 4
// broadcast activations. Low nibbles hold codes 0..15 of 32, high nibbles codes 16..31.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../vectors.h"

namespace lz::quant {

// Numbered as GGML_KERNELS in ggml.py.
enum Format { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

constexpr bool super_blocks(Format f) { return f >= Q4_K; }
constexpr int block_size(Format f) { return super_blocks(f) ? 256 : 32; }
constexpr int block_bytes(Format f) {
  constexpr int bytes[] = {18, 20, 22, 24, 34, 144, 176, 210};
  return bytes[f];
}
constexpr bool has_min(Format f) { return f == Q4_1 || f == Q5_1 || f == Q4_K || f == Q5_K; }
constexpr bool has_fifth_bit(Format f) { return f == Q5_0 || f == Q5_1 || f == Q5_K; }
// What a stored code stands for is code - zero_point (formats with a minimum have none).
constexpr int zero_point(Format f) { return f == Q4_0 ? 8 : f == Q5_0 ? 16 : f == Q6_K ? 32 : 0; }

// Codes of four bits may be stored in pairs of rows: a byte's low nibble is the code of one of the
// first R rows, the high one, minus 8, that of one of the R rows after them. Both are multiplied
// with the same x, so one half of the products needs no decoding: the signed bytes times x, less the
// low nibbles times x, are 16 times the high ones times x. A group is of HALVES * R rows.
template <class S, Format F> constexpr int HALVES = S::PAIRED && (F == Q4_0 || F == Q4_1 || F == Q4_K) ? 2 : 1;

struct Nothing {};
template <bool C, class T> using If = typename std::conditional<C, T, Nothing>::type;

// R rows of 32 weights. `high` has bit i for lane vector i of: low nibbles 0, high nibbles 0, ...;
// inverted for signed bytes.
template <Format F, int R> struct Packed {
  uint16_t d[R];
  [[no_unique_address]] If<has_min(F), uint16_t[R]> m;
  [[no_unique_address]] If<has_fifth_bit(F), uint8_t[4 * R]> high;
  uint8_t codes[F == Q8_0 ? 8 : 4][4 * R];
};

// R rows of 256 weights in 8 sub-blocks of 32. `scales` and `mins` are lane vectors of 4 sub-blocks.
template <int R> struct Packed<Q4_K, R> {
  uint16_t d[R], m[R];
  uint8_t scales[2][4 * R], mins[2][4 * R], codes[8][4][4 * R];
};
template <int R> struct Packed<Q5_K, R> {
  uint16_t d[R], m[R];
  uint8_t scales[2][4 * R], mins[2][4 * R], high[8][4 * R], codes[8][4][4 * R];
};
// Sub-blocks of 16, two per 32 codes: low nibbles and high nibbles. A byte of `high` has the upper
// bits of 4 codes: bits 4-5 and 6-7 for the even lane vector's nibbles, 0-1 and 2-3 for the odd one's.
template <int R> struct Packed<Q6_K, R> {
  uint16_t d[R];
  uint8_t scales[4][4 * R], high[8][2][4 * R], codes[8][4][4 * R];
};

template <class S, Format F> using Weight = Packed<F, HALVES<S, F> * S::R>;

// A row's block as plain numbers.
struct Block {
  uint16_t d, m;
  uint8_t codes[256], scales[16], mins[8];
};

inline uint16_t half_at(const uint8_t *p) { return uint16_t(p[0] | p[1] << 8); }

inline void read_scales(const uint8_t *s, Block &b) {
  for (int i = 0; i < 8; i++) {
    b.scales[i] = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
    b.mins[i] = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 6) << 4;
  }
}

template <Format F> Block read_block(const uint8_t *p) {
  Block b = {};
  if constexpr (F == Q6_K) {
    const uint8_t *high = p + 128;
    for (int i = 0; i < 256; i++) {
      const int half = i / 128, at = i % 128, nibble = half * 64 + at % 64;
      const int low = at < 64 ? p[nibble] & 15 : p[nibble] >> 4;
      b.codes[i] = uint8_t(low | (high[half * 32 + at % 32] >> 2 * (at / 32) & 3) << 4);
    }
    std::memcpy(b.scales, p + 192, 16), b.d = half_at(p + 208);
    return b;
  }
  b.d = half_at(p), p += 2;
  if (has_min(F)) b.m = half_at(p), p += 2;
  if constexpr (super_blocks(F)) {
    read_scales(p, b), p += 12;
    const uint8_t *high = p;
    if (F == Q5_K) p += 32;
    for (int i = 0; i < 256; i++) {
      const int pair = i / 64, at = i % 32;
      b.codes[i] = i % 64 < 32 ? p[32 * pair + at] & 15 : p[32 * pair + at] >> 4;
      if (F == Q5_K) b.codes[i] |= (high[at] >> i / 32 & 1) << 4;
    }
  } else if (F == Q8_0) {
    std::memcpy(b.codes, p, 32);
  } else {
    const uint8_t *high = p;
    if (has_fifth_bit(F)) p += 4;
    for (int i = 0; i < 32; i++) {
      b.codes[i] = i < 16 ? p[i] & 15 : p[i - 16] >> 4;
      if (has_fifth_bit(F)) b.codes[i] |= (high[i / 8] >> i % 8 & 1) << 4;
    }
  }
  return b;
}

// Values of whole blocks, as ggml computes them: of the products only Q6_K's is rounded, and it is not added to.
template <Format F> void dequantize(const uint8_t *from, int64_t count, float *to) {
  constexpr int SIZE = block_size(F), PART = F == Q6_K ? 16 : 32;
  for (int64_t at = 0; at < count; at += SIZE, from += block_bytes(F)) {
    const Block b = read_block<F>(from);
    const float d = to_float(fp16{b.d}), m = has_min(F) ? to_float(fp16{b.m}) : 0.0f;
    for (int i = 0; i < SIZE; i++) {
      const int part = i / PART, scale = F == Q6_K ? int8_t(b.scales[part]) : super_blocks(F) ? b.scales[part] : 1;
      const int code = F == Q8_0 ? int8_t(b.codes[i]) : b.codes[i] - zero_point(F);
      to[at + i] = d * float(scale) * float(code);
      if (has_min(F)) to[at + i] += super_blocks(F) ? -m * float(b.mins[part % 8]) : m;
    }
  }
}

// Writes row r of 32 codes as nibbles, and their fifth bits.
template <int R> void write_nibbles(const uint8_t *codes, int r, int invert, uint8_t (*to)[4 * R], uint8_t *fifth) {
  for (int v = 0; v < 4; v++)
    for (int t = 0; t < 4; t++) {
      const int low = codes[4 * v + t], high = codes[16 + 4 * v + t];
      to[v][4 * r + t] = uint8_t((low & 15) | high << 4);
      if (fifth) fifth[4 * r + t] |= (low >> 4 & 1 ^ invert) << 2 * v | (high >> 4 & 1 ^ invert) << (2 * v + 1);
    }
}

// Writes row r of 32 codes into bytes of two rows; R: of both halves together.
template <int R> void write_pairs(const uint8_t *codes, int r, uint8_t *to) {
  for (int i = 0; i < 32; i++)
    to[i / 4 * 2 * R + r % (R / 2) * 4 + i % 4] |= r < R / 2 ? codes[i] : (codes[i] ^ 8) << 4;
}

template <Format F, int R> void write_row(const Block &b, int r, bool signed_bytes, bool paired, Packed<F, R> &to) {
  const int flip = signed_bytes ? 0 : 128, invert = signed_bytes;
  to.d[r] = b.d;
  if constexpr (has_min(F)) to.m[r] = b.m;
  if constexpr (F == Q8_0) {
    for (int i = 0; i < 32; i++) to.codes[i / 4][4 * r + i % 4] = uint8_t(b.codes[i] ^ flip);
  } else if constexpr (!super_blocks(F)) {
    if constexpr (has_fifth_bit(F)) write_nibbles<R>(b.codes, r, invert, to.codes, to.high);
    else if (paired) write_pairs<R>(b.codes, r, to.codes[0]);
    else write_nibbles<R>(b.codes, r, invert, to.codes, nullptr);
  } else {
    const int scales = F == Q6_K ? 16 : 8;
    for (int i = 0; i < scales; i++) to.scales[i / 4][4 * r + i % 4] = uint8_t(b.scales[i] ^ (F == Q6_K ? flip : 0));
    if constexpr (F != Q6_K)
      for (int i = 0; i < 8; i++) to.mins[i / 4][4 * r + i % 4] = b.mins[i];
    for (int u = 0; u < 8; u++) {
      uint8_t *fifth = nullptr;
      if constexpr (F == Q5_K) fifth = to.high[u];
      if (paired) write_pairs<R>(b.codes + 32 * u, r, to.codes[u][0]);
      else write_nibbles<R>(b.codes + 32 * u, r, invert, to.codes[u], fifth);
      if constexpr (F == Q6_K)
        for (int i = 0; i < 32; i++) {
          const int v = i % 16 / 4, shift = (v % 2 ? 0 : 4) + (i < 16 ? 0 : 2);
          to.high[u][v / 2][4 * r + i % 4] |= (b.codes[32 * u + i] >> 4) << shift;
        }
    }
  }
}

// Packs a group of R of the `rows` rows; missing rows of the last group are zero. Where bytes are
// unsigned, signed ones are stored plus 128.
template <Format F, int R>
void pack(const uint8_t *from, int64_t rows, int64_t blocks, bool signed_bytes, bool paired, int64_t group, Packed<F, R> *to) {
  for (int64_t b = 0; b < blocks; b++) {
    Packed<F, R> &p = to[group * blocks + b];
    std::memset((void *)&p, 0, sizeof p);
    for (int r = 0; r < R; r++) {
      const int64_t row = group * R + r;
      const uint8_t *at = from + (row * blocks + b) * block_bytes(F);
      write_row<F, R>(row < rows ? read_block<F>(at) : Block{}, r, signed_bytes, paired, p);
    }
  }
}

}  // namespace lz::quant

// Rows of activations rounded as ggml rounds them beside a weight: to q8_0, q8_1 or q8_K.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "../vectors.h"
#include "blocks.h"

namespace lz::quant {

// For each row: its codes, a scale per block, and sums of codes in the form that the kernels of the
// format use. Rows are padded so that equal places of different rows do not share a cache set.
struct Activations {
  int8_t *codes;                                // row_codes bytes per row
  float *d, *s;                                 // row_blocks per row; s: d * sum of the codes, for q8_1
  int32_t *sums;                                // row_sums per row: of 32 codes (Q6_K: 256) times OFFSET, COPIES of each
  int8_t *split;                                // row_split bytes per row, for super-blocks
  int64_t row_codes, row_blocks, row_sums, row_split;

  const int8_t *codes_at(int64_t row, int64_t k) const { return codes + row * row_codes + k; }
};

// What is added to a sum of products of stored codes, times the sum of x, so that it is that of the
// values: stored codes have an offset where bytes are unsigned, and low5 and high5 add one. Without a
// zero point it is that of whole bytes of two rows, whose high nibbles are stored minus 8.
template <class S, Format F>
constexpr int OFFSET = F == Q8_0 || F == Q6_K ? S::SIGNED ? 0 : -128
    : HALVES<S, F> == 2 && !zero_point(F) ? 128 : -zero_point(F) - (has_fifth_bit(F) ? S::FIFTH : 0);

// Sums of 16 or 32 codes as two signed bytes each, low + 128 * high, so that dot products of bytes
// multiply them: 8 or 16 low ones, then as many high ones.
template <Format F> constexpr int SPLIT = F == Q6_K ? 32 : 16;

template <class S, Format F> int64_t activation_bytes(int64_t rows, int64_t k, Activations &a, char *memory) {
  const int64_t blocks = k / block_size(F);
  a.row_codes = (k + 63) / 64 * 64 + 64, a.row_blocks = blocks;
  a.row_sums = (F == Q6_K ? blocks : k / 32) * S::COPIES, a.row_split = super_blocks(F) ? blocks * SPLIT<F> : 0;
  char *at = memory;
  auto take = [&](auto *&to, int64_t per_row) {
    to = (std::remove_reference_t<decltype(to)>)at;
    at += (rows * per_row * int64_t(sizeof *to) + 63) / 64 * 64;
  };
  take(a.codes, a.row_codes), take(a.d, a.row_blocks), take(a.s, a.row_blocks);
  take(a.sums, a.row_sums), take(a.split, a.row_split);
  return at - memory;
}

inline float finite_inverse(float one, float d) {
  const float ratio = one / d;
  return std::isfinite(ratio) ? ratio : 0.0f;
}

inline float rounded_to_half(float x) {
  fp16 h;
  from_float(&h, x);
  return to_float(h);
}

INLINE inline int sum_codes(const int8_t *codes, int count) {
  int sum = 0;
  for (int i = 0; i < count; i++) sum += codes[i];
  return sum;
}

// Of the values that are numbers. By integers, whose maximum compilers compute in vectors on every processor; on x86
// std::fmax is a call for each.
INLINE inline float largest_magnitude(const float *x, int count) {
  int32_t peak = 0;
  for (int i = 0; i < count; i++) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    peak = std::max(peak, bits > 0x7f800000 ? 0 : bits);
  }
  float magnitude;
  std::memcpy(&magnitude, &peak, sizeof magnitude);
  return magnitude;
}

// 32 values: halves away from zero.
template <class S, Format F> void round_block(const float *x, int8_t *codes, float *d, float *s, int32_t *sums) {
  const float step = largest_magnitude(x, 32) / 127.0f, inverse = finite_inverse(1.0f, step);
  for (int i = 0; i < 32; i++) codes[i] = int8_t(std::round(x[i] * inverse));
  const int sum = sum_codes(codes, 32);
  std::fill_n(sums, S::COPIES, S::SMALL + OFFSET<S, F> * sum), *d = rounded_to_half(step);
  if (has_min(F)) *s = rounded_to_half(float(sum) * step);
}

// 256 values: halves to even, and the largest magnitude, the first of equal ones, becomes -127.
template <class S, Format F> void round_super_block(const float *x, int8_t *codes, float *d, int32_t *sums, int8_t *split) {
  const float peak = largest_magnitude(x, 256);
  int above = 0, below = 0;
  for (int i = 0; i < 256; i++) above |= x[i] == peak, below |= x[i] == -peak;
  float largest = above ? peak : below ? -peak : 0.0f;
  if (above & below)
    for (int i = 255; i >= 0; i--) largest = std::fabs(x[i]) == peak ? x[i] : largest;
  const float step = finite_inverse(-127.0f, largest);
  for (int i = 0; i < 256; i++) {
    const float code = std::rint(step * x[i]);
    codes[i] = int8_t(code < 127.0f ? code : 127.0f);                  // NaN too becomes 127
  }
  *d = finite_inverse(1.0f, step);
  constexpr int COUNT = SPLIT<F> / 2;
  int total = 0;
  for (int i = 0; i < COUNT; i++) {
    const int sum = sum_codes(codes + 256 / COUNT * i, 256 / COUNT), low = ((sum + 64) & 127) - 64;
    split[i] = int8_t(low), split[COUNT + i] = int8_t((sum - low) / 128);
    if (F != Q6_K) std::fill_n(sums + i * S::COPIES, S::COPIES, OFFSET<S, F> * sum);
    total += sum;
  }
  if (F == Q6_K) std::fill_n(sums, S::COPIES, OFFSET<S, F> * total);
}

// Rounds x as block b of a row.
template <class S, Format F> void round_block_at(const float *x, const Activations &a, int64_t row, int64_t b) {
  int8_t *codes = a.codes + row * a.row_codes + b * block_size(F);
  const int64_t at = row * a.row_blocks + b;
  if constexpr (super_blocks(F))
    round_super_block<S, F>(x, codes, a.d + at, a.sums + row * a.row_sums + b * (F == Q6_K ? 1 : 8) * S::COPIES,
                            a.split + row * a.row_split + b * SPLIT<F>);
  else
    round_block<S, F>(x, codes, a.d + at, a.s + at, a.sums + row * a.row_sums + b * S::COPIES);
}

}  // namespace lz::quant

// Work on one row of numbers at a time: the highest of a row, the k highest, quantizing and
// dequantizing. Torch runs several kernels for each, and most of their time is overhead.
#pragma once

#include <algorithm>
#include <cfloat>
#include <limits>

#include "vectors.h"

namespace lz {

constexpr int64_t SMALL = 32768;                // elements: less is not worth a second thread

// The highest number of each row, the first of equal ones; NaN counts as -inf, +inf as the largest
// number. A row of -inf gives -1.
struct Argmax {
  const void *x;
  int64_t *out;
  int64_t rows, width, x_row;
  int threads;
};

template <class T> int64_t argmax_row(const T *x, int64_t width) {
  constexpr int64_t BLOCK = 512;
  float best = -INFINITY;
  int64_t at = -1;
  auto limited = [](float v) { return v == v ? std::min(v, FLT_MAX) : -INFINITY; };
  for (int64_t begin = 0; begin < width; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, width);
    vf tops[4];
    each<4>([&](auto i) { tops[i] = all(-INFINITY); });
    int64_t d = begin;
    for (; d + 4 * W <= end; d += 4 * W) each<4>([&](auto i) {
      vf v = load(x + d + i * W);
      tops[i] = v > tops[i] ? v : tops[i];      // false for NaN
    });
    float top = limited(largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]))));
    for (; d < end; d++) top = std::max(top, limited(to_float(x[d])));
    if (!(top > best)) continue;
    best = top;
    for (at = begin; !(limited(to_float(x[at])) >= best); at++) {}
  }
  return at;
}

template <class T> bool run_argmax(const Argmax &a) {
  const int threads = a.rows * a.width < SMALL ? 1 : a.threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a.rows; row++)
    a.out[row] = argmax_row((const T *)a.x + row * a.x_row, a.width);
  return true;
}

// The experts of each token: the k highest of `choice`, equal ones by index, weighed by `scores`.
struct Gate {
  const float *scores, *choice;                 // (rows, experts), without gaps
  int64_t *ids;
  float *weights;
  int64_t rows, experts, k;
  bool normalize;
  float scale;
  int threads;
};

inline void gate_row(const Gate &a, int64_t row) {
  const float *choice = a.choice + row * a.experts, *scores = a.scores + row * a.experts;
  int64_t *ids = a.ids + row * a.k, kept = 0;
  float *weights = a.weights + row * a.k;       // holds the keys until the ids are known
  for (int64_t e = 0; e < a.experts; e++) {
    const float key = choice[e] == choice[e] ? choice[e] : INFINITY;     // NaN is the highest
    if (kept == a.k && !(key > weights[kept - 1])) continue;
    int64_t i = kept < a.k ? kept++ : kept - 1;
    for (; i > 0 && key > weights[i - 1]; i--) weights[i] = weights[i - 1], ids[i] = ids[i - 1];
    weights[i] = key, ids[i] = e;
  }
  float total = 0;
  for (int64_t i = 0; i < a.k; i++) total += weights[i] = scores[ids[i]];
  total = total < 1e-20f ? 1e-20f : total;
  for (int64_t i = 0; i < a.k; i++) weights[i] = (a.normalize ? weights[i] / total : weights[i]) * a.scale;
}

inline bool run_gate(const Gate &a) {
  const int threads = a.rows * a.experts < SMALL ? 1 : a.threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a.rows; row++) gate_row(a, row);
  return true;
}

// Symmetric codes of blocks of `block` numbers with one scale each: the largest finite magnitude
// over `top`, at least the smallest normal number.
struct Quantize {
  const void *x;
  void *codes;
  float *scales;
  int64_t rows, width, block, x_row;
  bool fp8;                                     // e4m3, else int8
  int threads;
};

// Rounds to nearest, ties to even; |x| <= 448 or NaN.
inline uint8_t to_e4m3(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  const uint8_t sign = uint8_t(u >> 24) & 0x80;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7f;
  if (u < 0x3c800000) {                         // below 2^-6, the smallest normal number
    float shifted, magnitude;
    std::memcpy(&magnitude, &u, sizeof magnitude);
    shifted = magnitude + 16384.0f;             // 2^14: its last bit is 2^-9
    std::memcpy(&u, &shifted, sizeof u);
    return sign | uint8_t(u - 0x46800000);
  }
  u += 0x7ffff + ((u >> 20) & 1);
  return sign | uint8_t((u >> 20) - (120u << 3));
}

template <class T> void quantize_block(const T *x, int64_t n, bool fp8, float *scale, void *codes) {
  vf tops = {};
  int64_t d = 0;
  for (; d + W <= n; d += W) {
    vf v = load(x + d);
    v = v < 0.0f ? -v : v;
    tops = (v > tops) & (v <= FLT_MAX) ? v : tops;
  }
  float top = largest(tops);
  for (int64_t i = d; i < n; i++) {
    const float v = std::fabs(to_float(x[i]));
    if (v > top && v <= FLT_MAX) top = v;
  }
  const float s = *scale = std::max(top / (fp8 ? 448.0f : 127.0f), FLT_MIN);
  if (fp8) {
    for (int64_t i = 0; i < n; i++) {
      const float v = to_float(x[i]) / s;
      ((uint8_t *)codes)[i] = to_e4m3(v != v ? v : std::min(std::max(v, -448.0f), 448.0f));
    }
    return;
  }
  int8_t *to = (int8_t *)codes;
  d = 0;
  for (; d + W <= n; d += W) {
    vf v = load(x + d) / s;
    v = v < -127.0f ? all(-127.0f) : v;
    v = v > 127.0f ? all(127.0f) : v;
    v = v == v ? v : vf{};
    vi whole = (vi)float_to_bits(v + 12582912.0f) - 0x4b400000;   // 1.5 * 2^23: rounds
    typedef int8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));
    vb bytes = __builtin_convertvector(whole, vb);
    std::memcpy(to + d, &bytes, sizeof bytes);
  }
  for (; d < n; d++) {
    float v = to_float(x[d]) / s;
    v = v != v ? 0.0f : std::min(std::max(v, -127.0f), 127.0f);
    to[d] = int8_t(std::nearbyintf(v));
  }
}

template <class T> bool run_quantize(const Quantize &a) {
  const int64_t blocks = (a.width + a.block - 1) / a.block;
  const int threads = a.rows * a.width < SMALL ? 1 : a.threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a.rows; row++)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t begin = b * a.block, n = std::min(a.block, a.width - begin);
      quantize_block((const T *)a.x + row * a.x_row + begin, n, a.fp8, a.scales + row * blocks + b,
                     (char *)a.codes + row * a.width + begin);
    }
  return true;
}

// (code - zero) * scale of int8 codes, one scale for each `block` numbers of a row.
struct Dequantize {
  const int8_t *codes;
  const float *scales;
  void *out;
  int64_t rows, width, block;
  int threads;
};

template <class T> bool run_dequantize(const Dequantize &a) {
  const int64_t blocks = (a.width + a.block - 1) / a.block;
  const int threads = a.rows * a.width < SMALL ? 1 : a.threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a.rows; row++)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t begin = b * a.block, n = std::min(a.block, a.width - begin);
      const float scale = a.scales[row * blocks + b];
      const int8_t *codes = a.codes + row * a.width + begin;
      T *out = (T *)a.out + row * a.width + begin;
      int64_t d = 0;
      typedef int8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));
      for (; d + W <= n; d += W) {
        vb bytes;
        std::memcpy(&bytes, codes + d, sizeof bytes);
        store(out + d, __builtin_convertvector(__builtin_convertvector(bytes, vi), vf) * scale);
      }
      for (; d < n; d++) from_float(out + d, float(codes[d]) * scale);
    }
  return true;
}

}  // namespace lz

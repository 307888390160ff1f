// Work on one row of numbers at a time: the highest of a row, the k highest, its cross entropy,
// quantizing and dequantizing. Torch runs several kernels for each, and most of their time is overhead.
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
  share(threads, a.rows, [&](int64_t row, int) { a.out[row] = argmax_row((const T *)a.x + row * a.x_row, a.width); });
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
  share(threads, a.rows, [&](int64_t row, int) { gate_row(a, row); });
  return true;
}

// -log softmax(x)[target] of each row, with label smoothing; 0 where the target is `ignored`.
struct CrossEntropy {
  const void *x;
  const int64_t *targets;
  float *out;
  int64_t rows, width, x_row, ignored;
  float smoothing;
  int threads;
};

// The sum of e^(x - top) in blocks that stay in the first cache, so that the logits are read once
// from memory; the sum of x, if asked for.
template <class T> double log_sum_exp(const T *x, int64_t width, double *plain) {
  constexpr int64_t BLOCK = 2048;
  float top = -INFINITY;
  double total = 0;
  for (int64_t begin = 0; begin < width; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, width), whole = begin + (end - begin) / (4 * W) * (4 * W);
    vf tops[4], sums[4];
    each<4>([&](auto i) { tops[i] = all(-INFINITY), sums[i] = vf{}; });
    for (int64_t d = begin; d < whole; d += 4 * W)
      each<4>([&](auto i) INLINE { tops[i] = larger(load(x + d + i * W), tops[i]); });
    float high = std::max(top, largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]))));
    for (int64_t d = whole; d < end; d++) high = to_float(x[d]) > high ? to_float(x[d]) : high;
    if (high > top) total *= std::exp(double(top) - high), top = high;
    const float from = top == -INFINITY ? 0.0f : top;   // nothing but -inf so far, or NaN
    for (int64_t d = whole; d < end; d += W) {
      const int n = int(std::min<int64_t>(W, end - d));
      float rest[W];
      store(rest, exponential((n == W ? load(x + d) : load_some(x + d, n)) - from));
      for (int i = 0; i < n; i++) total += rest[i];
    }
    for (int64_t d = begin; d < whole; d += 4 * W)
      each<4>([&](auto i) INLINE { sums[i] += exponential(load(x + d + i * W) - from); });
    total += sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (int64_t d = begin; plain && d < end; d++) *plain += to_float(x[d]);
  }
  return top + std::log(total);
}

template <class T> bool run_cross_entropy(const CrossEntropy &a) {
  const int threads = a.rows * a.width < SMALL ? 1 : a.threads;
  share(threads, a.rows, [&](int64_t row, int) {
    const T *x = (const T *)a.x + row * a.x_row;
    const int64_t target = a.targets[row];
    double plain = 0, loss = 0;
    if (target != a.ignored) {
      const double all_of = log_sum_exp(x, a.width, a.smoothing > 0 ? &plain : nullptr);
      loss = all_of - to_float(x[target]);
      if (a.smoothing > 0) loss += a.smoothing * (all_of - plain / a.width - loss);
    }
    a.out[row] = float(loss);
  });
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

// Numbers at a time between floats and bytes: narrowing and widening them in a loop of its own is
// what compilers make vector instructions of.
constexpr int CHUNK = 64;

// The e4m3 codes, rounded to nearest, ties to even, of |v| <= 448 or NaN.
INLINE inline vi to_e4m3(vf v) {
  vu u = float_to_bits(v), sign = (u >> 24) & 0x80, size = u & 0x7fffffff;
  // below 2^-6, the smallest normal number: the last bit of 2^14 + x is 2^-9
  vu small = float_to_bits(bits_to_float(size) + 16384.0f) - 0x46800000;
  vu normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120u << 3);
  vu code = size < 0x3c800000 ? small : normal;
  code = size > 0x7f800000 ? vu{} + 0x7f : code;
  return (vi)(code | sign);
}

INLINE inline vi to_int8(vf v) {
  v = v == v ? v : vf{};
  return (vi)float_to_bits(v + 12582912.0f) - 0x4b400000;         // 1.5 * 2^23: rounds
}

template <bool FP8> INLINE inline vi to_code(vf v) { return FP8 ? to_e4m3(v) : to_int8(v); }

template <class T> float largest_magnitude(const T *x, int64_t n) {
  vf tops[4] = {};
  auto take = [](vf &top, vf v) INLINE {
    v = v < 0.0f ? -v : v;
    top = (v > top) & (v <= FLT_MAX) ? v : top;
  };
  int64_t d = 0;
  for (; d + 4 * W <= n; d += 4 * W) each<4>([&](auto i) INLINE { take(tops[i], load(x + d + i * W)); });
  for (; d < n; d += W) take(tops[0], d + W <= n ? load(x + d) : load_some(x + d, int(n - d)));
  return largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
}

template <bool FP8, class T> void quantize_block(const T *x, int64_t n, float *scale, uint8_t *to) {
  const float most = FP8 ? 448.0f : 127.0f, s = *scale = std::max(largest_magnitude(x, n) / most, FLT_MIN);
  int32_t codes[CHUNK];
  auto encode = [&](int at, vf v) INLINE {
    v = v / s;
    v = v < -most ? all(-most) : v;
    v = v > most ? all(most) : v;
    vi code = to_code<FP8>(v);
    std::memcpy(codes + at, &code, sizeof code);
  };
  int64_t d = 0;
  for (; d + CHUNK <= n; d += CHUNK) {
    for (int i = 0; i < CHUNK; i += W) encode(i, load(x + d + i));
    for (int i = 0; i < CHUNK; i++) to[d + i] = uint8_t(codes[i]);
  }
  for (int left; (left = int(std::min<int64_t>(W, n - d))) > 0; d += left) {
    encode(0, left == W ? load(x + d) : load_some(x + d, left));
    for (int i = 0; i < left; i++) to[d + i] = uint8_t(codes[i]);
  }
}

template <class T> bool run_quantize(const Quantize &a) {
  const int64_t blocks = (a.width + a.block - 1) / a.block;
  const int threads = a.rows * a.width < SMALL ? 1 : a.threads;
  share(threads, a.rows, [&](int64_t row, int) {
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t begin = b * a.block, n = std::min(a.block, a.width - begin);
      const T *x = (const T *)a.x + row * a.x_row + begin;
      float *scale = a.scales + row * blocks + b;
      uint8_t *codes = (uint8_t *)a.codes + row * a.width + begin;
      a.fp8 ? quantize_block<true>(x, n, scale, codes) : quantize_block<false>(x, n, scale, codes);
    }
  });
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
  share(threads, a.rows, [&](int64_t row, int) {
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t begin = b * a.block, n = std::min(a.block, a.width - begin);
      const float scale = a.scales[row * blocks + b];
      const int8_t *codes = a.codes + row * a.width + begin;
      T *out = (T *)a.out + row * a.width + begin;
      int64_t d = 0;
      float numbers[CHUNK];
      for (; d + CHUNK <= n; d += CHUNK) {
        for (int i = 0; i < CHUNK; i++) numbers[i] = float(codes[d + i]) * scale;
        for (int i = 0; i < CHUNK; i += W) store(out + d + i, load(numbers + i));
      }
      for (; d < n; d++) from_float(out + d, float(codes[d]) * scale);
    }
  });
  return true;
}

}  // namespace lz

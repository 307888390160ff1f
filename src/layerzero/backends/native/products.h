// A matrix times one row of x, for bfloat16: the weight is read once and nothing is set up for it, which is what a
// decode step of a small model spends a third of its time on. Several rows of the weight at a time, in float32.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "vectors.h"

namespace lz {

struct Product {
  const bf16 *x, *weight, *bias;
  bf16 *out;
  int64_t rows, inputs, row;                    // of the weight; the step from row to row, in elements
  bool has_bias;
  bool gated;                                   // out has half the rows: silu(first half) * second half
  int threads;
};

constexpr int TOGETHER = 8;                     // rows of the weight: as many streams as keep memory busy
constexpr int AHEAD = 4;                        // times as many rows: asked for before they are read. Rows of a small model
                                                // are too short for the processor to see that they are read in order

// The products of R rows with x, which lies as Unit<bf16> splits it, filled up with zeros.
template <int R> INLINE inline void dots(const Product &a, int64_t first, const float *x, float *to) {
  using U = Unit<bf16>;
  const bf16 *w = a.weight + first * a.row;
  vf sums[R][2];
  each<R>([&](auto r) { sums[r][0] = sums[r][1] = vf{}; });
  int64_t d = 0;
  for (; d + U::SIZE <= a.inputs; d += U::SIZE) {
    vf low = load(x + d), high = load(x + d + W);
    each<R>([&](auto r) {
      vf some[2];
      __builtin_prefetch(w + (AHEAD * R + r) * a.row + d);
      U::get(w + r * a.row + d, some);
      sums[r][0] += some[0] * low;
      sums[r][1] += some[1] * high;
    });
  }
  if (d < a.inputs) {
    vf low = load(x + d), high = load(x + d + W);
    each<R>([&](auto r) {
      vf some[2];
      U::get_some(w + r * a.row + d, int(a.inputs - d), some);
      sums[r][0] += some[0] * low;
      sums[r][1] += some[1] * high;
    });
  }
  each<R>([&](auto r) {
    to[r] = sum(sums[r][0] + sums[r][1]);
    if (a.has_bias) to[r] += to_float(a.bias[first + r]);
  });
}

inline void some_dots(const Product &a, int64_t first, int64_t count, const float *x, float *to) {
  if (count == TOGETHER) return dots<TOGETHER>(a, first, x, to);
  for (int64_t r = 0; r < count; r++) dots<1>(a, first + r, x, to + r);
}

inline bool run_product(const Product &a) {
  using U = Unit<bf16>;
  const int64_t filled = (a.inputs + U::SIZE - 1) / U::SIZE * U::SIZE;
  float *x = (float *)std::aligned_alloc(64, filled * sizeof(float));
  if (!x) return false;
  for (int64_t d = 0; d < filled; d += U::SIZE) {
    vf some[2];
    if (d + U::SIZE <= a.inputs) U::get(a.x + d, some);
    else U::get_some(a.x + d, int(a.inputs - d), some);
    store(x + d, some[0]), store(x + d + W, some[1]);
  }
  const int64_t results = a.gated ? a.rows / 2 : a.rows, blocks = (results + TOGETHER - 1) / TOGETHER;
  const int threads = a.rows * a.inputs < 32768 ? 1 : a.threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t first = block * TOGETHER, count = std::min<int64_t>(TOGETHER, results - first);
    float one[TOGETHER], other[TOGETHER];
    some_dots(a, first, count, x, one);
    if (a.gated) {
      some_dots(a, results + first, count, x, other);
      for (int64_t r = 0; r < count; r++) one[r] = one[r] / (1.0f + std::exp(-one[r])) * other[r];
    }
    for (int64_t r = 0; r < count; r++) from_float(a.out + first + r, one[r]);
  }
  std::free(x);
  return true;
}

}  // namespace lz

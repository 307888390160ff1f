// RMS norm over rows, with or without a residual added first: one pass over memory, the row stays in the cache.
#pragma once

#include "vectors.h"

namespace lz {

struct Norm {
  const void *x, *residual, *weight;
  bool has_residual, has_weight;
  void *out, *total;                            // without gaps; total: x + residual
  int64_t rows, hidden, x_row, residual_row;    // steps from row to row, in elements
  float eps, offset;                            // offset is added to the weight
  int threads;
};

// f(d, n) for every vector of a row; n < W only for the last.
template <class F> INLINE inline void along(int64_t size, F f) {
  int64_t d = 0;
  for (; d + W <= size; d += W) f(d, W);
  if (d < size) f(d, int(size - d));
}
template <class T> INLINE inline vf take(const T *p, int n) { return n == W ? load(p) : load_some(p, n); }
template <class T> INLINE inline void give(T *p, vf v, int n) { n == W ? store(p, v) : store_some(p, v, n); }

template <class T, class P> void norm_row(const Norm &a, int64_t row) {
  const T *x = (const T *)a.x + row * a.x_row;
  T *out = (T *)a.out + row * a.hidden;
  if (a.has_residual) {
    const T *residual = (const T *)a.residual + row * a.residual_row;
    T *total = (T *)a.total + row * a.hidden;
    along(a.hidden, [&](int64_t d, int n) { give(total + d, take(x + d, n) + take(residual + d, n), n); });
    x = total;                                  // rounded, as the caller sees it
  }
  vf sums[4] = {};
  int64_t d = 0;
  for (; d + 4 * W <= a.hidden; d += 4 * W)
    each<4>([&](auto i) { vf v = load(x + d + i * W); sums[i] += v * v; });
  along(a.hidden - d, [&](int64_t at, int n) { vf v = take(x + d + at, n); sums[0] += v * v; });
  float mean = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(a.hidden);
  float inverse = 1.0f / std::sqrt(mean + a.eps);
  const P *weight = (const P *)a.weight;
  if (a.has_weight)
    along(a.hidden, [&](int64_t d, int n) {
      give(out + d, take(x + d, n) * inverse * (take(weight + d, n) + a.offset), n);
    });
  else
    along(a.hidden, [&](int64_t d, int n) { give(out + d, take(x + d, n) * inverse, n); });
}

template <class T, class P> bool run_norm(const Norm &a) {
  const int threads = a.rows * a.hidden < 32768 ? 1 : a.threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < a.rows; row++) norm_row<T, P>(a, row);
  return true;
}

}  // namespace lz

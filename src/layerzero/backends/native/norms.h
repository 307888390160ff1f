// RMS norm over rows, optionally fused with a residual add: one pass over memory, with the row in
// the cache in float32.
#pragma once

#include <cstdlib>

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

// Calls f(d, n) for every vector of a row; n < W only for the last.
template <class F> INLINE inline void for_each_vector(int64_t size, F f) {
  int64_t d = 0;
  for (; d + W <= size; d += W) f(d, W);
  if (d < size) f(d, int(size - d));
}
template <class T> INLINE inline vf load_n(const T *p, int n) { return n == W ? load(p) : load_some(p, n); }
template <class T> INLINE inline void store_n(T *p, vf v, int n) { n == W ? store(p, v) : store_some(p, v, n); }

// Calls f(d, Pair) for every two vectors of a row, and f(d, Tail) for the rest, which is padded
// with zeros.
struct Pair {
  template <class T> INLINE void load_n(const T *p, vf *to) const { load_two(p, to); }
  template <class T> INLINE void store_n(T *p, const vf *from) const { store_short(p, from); }
  template <class T> INLINE void store_rounded(T *p, vf *both) const { lz::store_rounded(p, both); }
};
struct Tail {
  int n;
  template <class T> void load_n(const T *p, vf *to) const {
    T some[2 * W] = {};
    std::memcpy(some, p, n * sizeof(T));
    load_two(some, to);
  }
  template <class T> void store_n(T *p, const vf *from) const {
    T some[2 * W];
    store_two(some, from);
    std::memcpy(p, some, n * sizeof(T));
  }
  template <class T> void store_rounded(T *p, vf *both) const {
    T some[2 * W];
    lz::store_rounded(some, both);
    std::memcpy(p, some, n * sizeof(T));
  }
};
template <class F> INLINE inline void for_each_pair(int64_t size, F f) {
  int64_t d = 0;
  for (; d + 2 * W <= size; d += 2 * W) f(d, Pair{});
  if (d < size) f(d, Tail{int(size - d)});
}

// `wide` is a float32 buffer for the row, so that it is converted once; `weight` includes the
// offset, or is null.
template <class T> void norm_row(const Norm &a, int64_t row, const float *weight, float *wide) {
  const T *x = (const T *)a.x + row * a.x_row, *residual = (const T *)a.residual + row * a.residual_row;
  T *out = (T *)a.out + row * a.hidden, *total = (T *)a.total + row * a.hidden;
  vf sums[2] = {};
  auto keep = [&](int64_t d, const vf *v) INLINE {
    each<2>([&](auto i) { sums[i] += v[i] * v[i]; });
    store_two(wide + d, v);
  };
  if (a.has_residual) for_each_pair(a.hidden, [&](int64_t d, auto part) {
    vf v[2], r[2];
    part.load_n(x + d, v), part.load_n(residual + d, r);
    each<2>([&](auto i) { v[i] += r[i]; });
    part.store_rounded(total + d, v);
    keep(d, v);
  });
  else for_each_pair(a.hidden, [&](int64_t d, auto part) {
    vf v[2];
    part.load_n(x + d, v);
    keep(d, v);
  });
  float mean = sum(sums[0] + sums[1]) / float(a.hidden);
  float inverse = 1.0f / std::sqrt(mean + a.eps);
  if (inverse != inverse) inverse = NAN;        // as store_short wants it, like the weight below
  for_each_pair(a.hidden, [&](int64_t d, auto part) {
    vf v[2], w[2];
    load_two(wide + d, v), load_two(weight ? weight + d : wide + d, w);
    each<2>([&](auto i) { v[i] = weight ? v[i] * inverse * w[i] : v[i] * inverse; });
    part.store_n(out + d, v);
  });
}

// Converts the weight to float32 and adds the offset.
template <class P> void widen_weight(const Norm &a, float *to) {
  for_each_pair(a.hidden, [&](int64_t d, auto part) {
    vf w[2];
    part.load_n((const P *)a.weight + d, w);
    each<2>([&](auto i) { w[i] += a.offset, w[i] = w[i] == w[i] ? w[i] : all(NAN); });
    store_two(to + d, w);
  });
}

template <class T> bool norm_rows(const Norm &a, void (*widen_weight)(const Norm &, float *)) {
  const int threads = a.rows * a.hidden < 32768 ? 1 : a.threads;
  const int64_t room = (a.hidden + 2 * W - 1) / (2 * W) * (2 * W);
  float *memory = (float *)std::aligned_alloc(64, ((threads + 1) * room * sizeof(float) + 63) / 64 * 64);
  if (!memory) return false;
  float *weight = a.has_weight ? memory : nullptr;
  if (weight) widen_weight(a, weight);
  share(threads, a.rows, [&](int64_t row, int thread) { norm_row<T>(a, row, weight, memory + (1 + thread) * room); });
  std::free(memory);
  return true;
}

template <class T, class P> bool run_norm(const Norm &a) { return norm_rows<T>(a, widen_weight<P>); }

}  // namespace lz

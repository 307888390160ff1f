// Rotary positions of queries and keys in one pass over the tokens: a token's angles are read once for all its heads.
#pragma once

#include <vector>

#include "norms.h"

namespace lz {

struct Heads {
  const void *from;
  void *to;
  int64_t count;
  int64_t from_batch, from_head, from_token, to_batch, to_head, to_token;      // steps, in elements
};

struct Rope {
  Heads query, key;
  const void *cos, *sin, *ids;
  int64_t batch, seq, dim, half;
  int64_t cos_batch, cos_row, sin_batch, sin_row;
  int64_t ids_batch, ids_token, positions;
  bool has_ids, wide_ids, interleaved;
  int threads;

  int64_t position(int64_t b, int64_t s) const {
    int64_t at = b * ids_batch + s * ids_token;
    return !has_ids ? s : wide_ids ? ((const int64_t *)ids)[at] : ((const int32_t *)ids)[at];
  }
  // The first token whose id is not in the table, or -1.
  int64_t first_out_of_range() const {
    if (has_ids)
      for (int64_t i = 0; i < batch * seq; i++) {
        int64_t id = position(i / seq, i % seq);
        if (id < 0 || id >= positions) return i;
      }
    return -1;
  }
};

template <class T> inline void rotate_halves(const T *x, T *out, const float *cos, const float *sin, int64_t half) {
  for_each_vector(half, [&](int64_t d, int n) {
    vf a = load_n(x + d, n), b = load_n(x + half + d, n), c = load_n(cos + d, n), s = load_n(sin + d, n);
    store_n(out + d, a * c - b * s, n);
    store_n(out + half + d, b * c + a * s, n);
  });
}

template <class T>
inline void rotate_interleaved(const T *__restrict x, T *__restrict out, const float *cos, const float *sin,
                            int64_t half) {
  int64_t d = 0;
  if (Unit<T>::VECTORS == 2)                    // loads split even and odd elements
    for (; d + W <= half; d += W) {
      vf pair[2], c = load(cos + d), s = load(sin + d);
      Unit<T>::get(x + 2 * d, pair);
      vf rotated[2] = {pair[0] * c - pair[1] * s, pair[1] * c + pair[0] * s};
      Unit<T>::put(out + 2 * d, rotated);
    }
  for (; d < half; d++) {
    float a = to_float(x[2 * d]), b = to_float(x[2 * d + 1]);
    from_float(out + 2 * d, a * cos[d] - b * sin[d]);
    from_float(out + 2 * d + 1, b * cos[d] + a * sin[d]);
  }
}

template <class T> void rotate_heads(const Rope &a, const Heads &h, int64_t b, int64_t s, const float *cos,
                                   const float *sin) {
  for (int64_t i = 0; i < h.count; i++) {
    const T *x = (const T *)h.from + b * h.from_batch + i * h.from_head + s * h.from_token;
    T *out = (T *)h.to + b * h.to_batch + i * h.to_head + s * h.to_token;
    if (a.interleaved) rotate_interleaved(x, out, cos, sin, a.half);
    else rotate_halves(x, out, cos, sin, a.half);
    if (2 * a.half < a.dim) std::memcpy(out + 2 * a.half, x + 2 * a.half, (a.dim - 2 * a.half) * sizeof(T));
  }
}

template <class P> void widen_angles(const void *from, int64_t at, int64_t count, float *to) {
  for_each_vector(count, [&](int64_t d, int n) { store_n(to + d, load_n((const P *)from + at + d, n), n); });
}

template <class T> bool rotate(const Rope &a, void (*widen)(const void *from, int64_t at, int64_t count, float *to)) {
  const int64_t tokens = a.batch * a.seq, work = tokens * (a.query.count + a.key.count) * a.dim;
  const int threads = work < 32768 ? 1 : a.threads;
  std::vector<float> angles(2 * a.half * threads);
  share(threads, tokens, [&](int64_t i, int thread) {
    float *cos = angles.data() + 2 * a.half * thread, *sin = cos + a.half;
    int64_t b = i / a.seq, s = i % a.seq, row = a.position(b, s);
    widen(a.cos, b * a.cos_batch + row * a.cos_row, a.half, cos);
    widen(a.sin, b * a.sin_batch + row * a.sin_row, a.half, sin);
    rotate_heads<T>(a, a.query, b, s, cos, sin);
    rotate_heads<T>(a, a.key, b, s, cos, sin);
  });
  return true;
}

template <class T, class P> bool run_rope(const Rope &a) { return rotate<T>(a, widen_angles<P>); }

}  // namespace lz

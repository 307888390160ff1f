// Matmuls with bfloat16 or float16 weights in float32: weights are converted in registers, or for
// more rows once into a panel that stays in the cache. So a CPU without half-precision arithmetic
// reads half the bytes of float32 and does no more work; and for one row there is no setup, on
// which small models would spend a third of a step.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "vectors.h"

namespace lz {

enum Activation { NONE, RELU, SILU, GELU, GELU_TANH };

// out = act(x W^T + bias), or with a second weight act(x W^T + bias) * (x second^T + second_bias).
struct Product {
  const void *x, *weight, *second, *bias, *second_bias;
  bool has_second, has_bias, has_second_bias;
  void *out;
  int64_t tokens, inputs, outputs;
  int64_t x_row, weight_row, second_row, out_row;         // steps from row to row, in elements
  bool wide_x, wide_out;                                  // float32 although the weights have a half type
  Activation activation;
  int threads;
  // One order of additions for every number of tokens and outputs: a result has the same bits
  // whatever is computed beside it.
  bool invariant = false;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int REGISTERS = 16;
#else
constexpr int REGISTERS = 32;
#endif
constexpr int TOKENS = 4;                       // rows of x that share a weight in registers
constexpr int MAX_ROWS = 64;                    // rows of the weight per panel
constexpr int64_t PANEL = 65536;                // floats per panel: 256 KiB, for the L2 cache
constexpr int64_t SPAN = 1024;                  // inputs per partial sum: the error grows with that length, not the row's
constexpr int AHEAD = 4;                        // prefetch distance in groups of rows: rows of a small model are too
                                                // short for the hardware prefetcher

// Rows of the weight that are read together: as many sums as fit into registers. For one token x86
// is fastest with several memory streams, a Neoverse with one.
#if defined(__aarch64__)
constexpr int STREAMS = 1;
#else
constexpr int STREAMS = REGISTERS / 4;
#endif
template <int M> constexpr int rows_together() { return M == 1 ? STREAMS : M == 2 ? REGISTERS / 4 : REGISTERS / 8; }

// Stores products of R rows of the weight with M rows of x to to[m * MAX_ROWS + r]; x is split
// like Unit<T> and padded.
template <class T, int R, int M>
INLINE inline void tile(const T *w, int64_t row, const float *x, int64_t x_row, int64_t inputs, float *to) {
  using U = Unit<T>;
  constexpr int V = U::VECTORS, LINE = 64 / int(sizeof(T));   // elements per cache line, which is several units
  constexpr int CHAINS = M == 1 ? std::max(1, 8 / R) : 1;     // independent accumulators
  static_assert(SPAN % LINE == 0 && SPAN % U::SIZE == 0 && SPAN % Unit<float>::SIZE == 0,
                "a span ends at the same input however the weight is read");
  vf totals[R][M] = {};
  for (int64_t d = 0; d < inputs;) {
    const int64_t end = std::min(inputs, d + SPAN);
    vf sums[R][M][CHAINS] = {};
    auto prefetch_rows = [&](int64_t d) { each<R>([&](auto r) { __builtin_prefetch(w + (AHEAD * R + r) * row + d); }); };
    auto add = [&](int64_t d, auto get) {
      vf xs[M][V];
      each<M>([&](auto m) { each<V>([&](auto v) { xs[m][v] = load(x + m * x_row + d + v * W); }); });
      each<R>([&](auto r) {
        vf some[V];
        get(w + r * row + d, some);
        each<M>([&](auto m) { each<V>([&](auto v) { sums[r][m][v % CHAINS] += some[v] * xs[m][v]; }); });
      });
    };
    auto whole = [](const T *p, vf *v) { U::get(p, v); };
    if constexpr (M == 1 && LINE % U::SIZE == 0)  // a whole cache line per row: rows far apart map to the same
      for (; d + LINE <= end; d += LINE) {        // cache set and would evict each other
        constexpr int UNITS = LINE / U::SIZE;
        if (R > 1) prefetch_rows(d);
        vf xs[UNITS * V];
        each<UNITS * V>([&](auto i) { xs[i] = load(x + d + i * W); });
        each<R>([&](auto r) {
          vf some[UNITS * V];
          each<UNITS>([&](auto i) { U::get(w + r * row + d + i * U::SIZE, some + i * V); });
          each<UNITS * V>([&](auto i) { sums[r][0][i % CHAINS] += some[i] * xs[i]; });
        });
      }
    for (; d + U::SIZE <= end; d += U::SIZE) {
      if (M == 2 && d % LINE == 0) prefetch_rows(d);
      add(d, whole);
    }
    if (d < end) {
      add(d, [&](const T *p, vf *v) { U::get_some(p, int(end - d), v); });
      d = end;
    }
    each<R>([&](auto r) {
      each<M>([&](auto m) {
        each<CHAINS - 1>([&](auto c) { sums[r][m][0] += sums[r][m][c + 1]; });
        totals[r][m] += sums[r][m][0];
      });
    });
  }
  each<R>([&](auto r) { each<M>([&](auto m) { to[m * MAX_ROWS + r] = sum(totals[r][m]); }); });
}

// Multiplies `count` rows of the weight with M rows of x.
template <class T, int M>
void tiles(const T *w, int64_t row, int64_t count, const float *x, int64_t x_row, int64_t inputs, float *to) {
  constexpr int R = rows_together<M>();
  int64_t r = 0;
  for (; r + R <= count; r += R) tile<T, R, M>(w + r * row, row, x, x_row, inputs, to + r);
  for (; r < count; r++) tile<T, 1, M>(w + r * row, row, x, x_row, inputs, to + r);
}

template <class T>
void few_tokens(int64_t tokens, const T *w, int64_t row, int64_t count, const float *x, int64_t x_row, int64_t inputs,
                float *to) {
  switch (tokens) {
    case 4: return tiles<T, 4>(w, row, count, x, x_row, inputs, to);
    case 3: return tiles<T, 3>(w, row, count, x, x_row, inputs, to);
    case 2: return tiles<T, 2>(w, row, count, x, x_row, inputs, to);
    default: return tiles<T, 1>(w, row, count, x, x_row, inputs, to);
  }
}

// Converts a row to float32, split like Unit<T>, padded with zeros.
template <class T> void widen(const T *from, int64_t size, float *to) {
  using U = Unit<T>;
  for (int64_t d = 0; d < size; d += U::SIZE) {
    vf some[U::VECTORS];
    if (d + U::SIZE <= size) U::get(from + d, some);
    else U::get_some(from + d, int(size - d), some);
    for (int v = 0; v < U::VECTORS; v++) store(to + d + v * W, some[v]);
  }
}

// The same for a row that is in float32 already.
template <class T> void split(const float *from, int64_t size, int64_t filled, float *to) {
  using U = Unit<T>;
  for (int64_t d = 0; d < filled; d++) {
    const int64_t unit = d / U::SIZE * U::SIZE, at = d % U::SIZE;
    to[unit + at % U::VECTORS * W + at / U::VECTORS] = d < size ? from[d] : 0.0f;
  }
}

inline vf activate(vf x, Activation activation) {
  if (activation == RELU) return x < 0.0f ? vf{} : x;     // NaN stays NaN
  if (activation == SILU) {
    vf negative = -x > 88.0f ? all(88.0f) : -x;
    return x / (1.0f + exponential(negative));
  }
  if (activation == GELU_TANH)
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  if (activation == GELU)
    for (int i = 0; i < W; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.7071067811865476f));
  return x;
}

// Applies bias, activation and gate to `count` results of one token, in place.
template <class T>
void finish_products(const Product &a, int64_t first, int64_t count, float *one, float *other) {
  auto add_bias = [&](float *to, const void *bias) {
    for (int64_t r = 0; r < count; r++) to[r] += to_float(((const T *)bias)[first + r]);
  };
  if (a.has_bias) add_bias(one, a.bias);
  if (a.has_second_bias) add_bias(other, a.second_bias);
  if (a.activation == NONE && !a.has_second) return;
  for (int64_t r = 0; r < count; r += W) {      // may run past the end: rows of MAX_ROWS are whole vectors
    vf v = activate(load(one + r), a.activation);
    store(one + r, a.has_second ? v * load(other + r) : v);
  }
}

template <class T> bool run_product(const Product &a) {
  using U = Unit<T>;
  const int64_t filled = (a.inputs + U::SIZE - 1) / U::SIZE * U::SIZE, matrices = a.has_second ? 2 : 1;
  const int64_t wide_row = (filled + 15) / 16 * 16 + 16;  // avoids rows a power of two apart, which share a cache set
  const bool panels = a.tokens > TOKENS;        // fewer tokens read every weight only once anyway
  const int threads = a.tokens * a.outputs * a.inputs < 32768 ? 1 : a.threads;
  // Rows per block: a share for each thread, small enough that a panel fits into the cache.
  int64_t rows = panels ? std::clamp<int64_t>(PANEL / wide_row / matrices, 8, MAX_ROWS) : 32;
  rows = std::clamp<int64_t>((a.outputs / (2 * threads) + 7) / 8 * 8, 8, rows / 8 * 8);
  const int64_t blocks = (a.outputs + rows - 1) / rows, panel = panels ? matrices * rows * wide_row : 0;
  // Only a tile of TOKENS rows adds in one chain, so the last ones are filled up with rows of zeros.
  const int64_t tokens = a.invariant ? (a.tokens + TOKENS - 1) / TOKENS * TOKENS : a.tokens;
  float *memory = (float *)std::aligned_alloc(64, (tokens * wide_row + threads * panel + 15) / 16 * 64);
  if (!memory) return false;
  std::fill(memory + a.tokens * wide_row, memory + tokens * wide_row, 0.0f);
  float *x = memory;
  share(threads, a.tokens, [&](int64_t t, int) {
    if (a.wide_x) split<T>((const float *)a.x + t * a.x_row, a.inputs, filled, x + t * wide_row);
    else widen<T>((const T *)a.x + t * a.x_row, a.inputs, x + t * wide_row);
  });
  share(threads, blocks, [&](int64_t block, int thread) {
    float *own = memory + tokens * wide_row + thread * panel;
    const int64_t first = block * rows, count = std::min(rows, a.outputs - first);
    const T *weights[2] = {(const T *)a.weight + first * a.weight_row,
                           a.has_second ? (const T *)a.second + first * a.second_row : nullptr};
    const int64_t steps[2] = {a.weight_row, a.second_row};
    if (panels)
      for (int64_t i = 0; i < matrices; i++)
        for (int64_t r = 0; r < count; r++)
          widen<T>(weights[i] + r * steps[i], a.inputs, own + (i * rows + r) * wide_row);
    for (int64_t t = 0; t < a.tokens; t += TOKENS) {
      const int64_t some = std::min<int64_t>(TOKENS, a.tokens - t), rows_of_x = a.invariant ? TOKENS : some;
      alignas(64) float results[2][TOKENS * MAX_ROWS];
      for (int64_t i = 0; i < matrices; i++) {
        if (panels) few_tokens<float>(rows_of_x, own + i * rows * wide_row, wide_row, count, x + t * wide_row, wide_row, filled,
                                      results[i]);
        else few_tokens<T>(rows_of_x, weights[i], steps[i], count, x + t * wide_row, wide_row, a.inputs, results[i]);
      }
      for (int64_t m = 0; m < some; m++) {
        float *one = results[0] + m * MAX_ROWS;
        finish_products<T>(a, first, count, one, results[1] + m * MAX_ROWS);
        const int64_t at = (t + m) * a.out_row + first;
        if (a.wide_out) std::memcpy((float *)a.out + at, one, count * sizeof(float));
        else for (int64_t r = 0; r < count; r++) from_float((T *)a.out + at + r, one[r]);
      }
    }
  });
  std::free(memory);
  return true;
}

// The feed-forward layer; the intermediate result stays in float32.
struct FeedForward {
  Product in, down;                             // run_feed_forward sets in.out and down.x
};

template <class T> bool run_feed_forward(FeedForward &a) {
  float *inner = (float *)std::malloc(a.in.tokens * a.in.outputs * sizeof(float) + 1);
  if (!inner) return false;
  a.in.out = inner, a.in.out_row = a.in.outputs, a.in.wide_x = false, a.in.wide_out = true;
  a.down.x = inner, a.down.x_row = a.down.inputs, a.down.wide_x = true, a.down.wide_out = false;
  bool done = run_product<T>(a.in) && run_product<T>(a.down);
  std::free(inner);
  return done;
}

}  // namespace lz

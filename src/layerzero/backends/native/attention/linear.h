// One token of linear attention: the causal convolution, Mamba-2's state space, the gated delta
// rule. The state is most of the work: it is read from memory once and written once.
//
// All else is short, and is widened to float32 where it is needed, whatever its dtype and strides.
#pragma once

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "../norms.h"
#include "../products.h"

namespace lz {

// A tensor of any float dtype; a step of 0: expanded.
struct View {
  void *at = nullptr;
  bool given = false;
  int64_t dtype = 0, step[4] = {};

  void widen(int64_t offset, int64_t stride, int64_t count, float *to) const;
  void narrow(const float *from, int64_t count, int64_t offset) const;
  float number(int64_t offset) const {
    float one;
    widen(offset, 0, 1, &one);
    return one;
  }
};

__attribute__((noinline)) inline void View::widen(int64_t offset, int64_t stride, int64_t count, float *to) const {
  for_dtype(dtype, [&](auto t) {
    const auto *p = (const decltype(t) *)at + offset;
    if (stride == 0) return std::fill(to, to + count, to_float(*p)), true;
    int64_t i = 0;
    if (stride == 1) for (; i + 2 * W <= count; i += 2 * W) {
      vf two[2];
      load_two(p + i, two), store_two(to + i, two);
    }
    for (; i < count; i++) to[i] = to_float(p[i * stride]);
    return true;
  });
}

__attribute__((noinline)) inline void View::narrow(const float *from, int64_t count, int64_t offset) const {
  for_dtype(dtype, [&](auto t) {
    auto *p = (decltype(t) *)at + offset;
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) {
      vf two[2];
      load_two(from + i, two), store_two(p + i, two);
    }
    for (; i < count; i++) from_float(p + i, from[i]);
    return true;
  });
}

// NaN as store_short wants it.
inline float quiet(float x) { return x == x ? x : NAN; }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline int64_t whole_vectors(int64_t count) { return (count + 2 * W - 1) / (2 * W) * (2 * W); }

// Calls work(i, floats) for 0 <= i < count, with `room` floats for each thread; false: no memory.
template <class F> bool share_with_room(int threads, int64_t count, int64_t room, const F &work) {
  std::vector<float> memory;
  try {
    memory.resize(threads * room);
  } catch (const std::bad_alloc &) {
    return false;
  }
  share(threads, count, [&](int64_t i, int thread) { work(i, memory.data() + thread * room); });
  return true;
}

struct StateUpdate {
  View state, x, dt, A, B, C, D, z, dt_bias, out, to;      // to: the new state, without gaps, as out
  int64_t batch, heads, dim, size, groups;
  bool softplus;
  int threads;
};

// Returns the output of one row of the state, new = old * decay + key * input; `decays` is one
// factor for each element, or null.
template <class T> float update_row(const T *old, T *to, float decay, const float *decays, float input,
                                    const float *key, const float *query, int64_t size) {
  vf sums[2] = {};
  int64_t i = 0;
  auto rows = [&](auto each_own) INLINE {
    for (; i + 2 * W <= size; i += 2 * W) {
      vf s[2];
      load_two(old + i, s);
      each<2>([&](auto j) {
        const int64_t at = i + j * W;
        s[j] = s[j] * (each_own ? load(decays + at) : all(decay)) + load(key + at) * input;
        sums[j] += s[j] * load(query + at);
      });
      store_short(to + i, s);
    }
  };
  decays ? rows(std::true_type{}) : rows(std::false_type{});
  float total = sum(sums[0] + sums[1]);
  for (; i < size; i++) {
    const float s = to_float(old[i]) * (decays ? decays[i] : decay) + key[i] * input;
    from_float(to + i, s), total += s * query[i];
  }
  return total;
}

template <class T> void update_head(const StateUpdate &a, int64_t item, float *room) {
  const int64_t b = item / a.heads, h = item % a.heads, group = h / (a.heads / a.groups);
  const int64_t wide = whole_vectors(a.dim), long_ = whole_vectors(a.size);
  float *x = room, *step = x + wide, *bias = step + wide, *skip = bias + wide, *z = skip + wide, *out = z + wide;
  float *key = out + wide, *query = key + long_, *decays = query + long_;
  auto row = [&](const View &v, float *to) { v.widen(b * v.step[0] + h * v.step[1], v.step[2], a.dim, to); };
  auto parameter = [&](const View &v, float *to) { if (v.given) v.widen(h * v.step[0], v.step[1], a.dim, to); };
  row(a.x, x), row(a.dt, step), parameter(a.D, skip), parameter(a.dt_bias, bias);
  a.B.widen(b * a.B.step[0] + group * a.B.step[1], a.B.step[2], a.size, key);
  a.C.widen(b * a.C.step[0] + group * a.C.step[1], a.C.step[2], a.size, query);
  for (int64_t i = 0; i < a.size; i++) key[i] = quiet(key[i]);
  const bool one_step = a.dt.step[2] == 0 && (!a.dt_bias.given || a.dt_bias.step[1] == 0);
  const bool one_decay = a.A.step[2] == 0;      // of all elements of a row
  const T *old = (const T *)a.state.at + b * a.state.step[0] + h * a.state.step[1];
  T *to = (T *)a.to.at + item * a.dim * a.size;
  float dt = 0, decay = 0;
  for (int64_t d = 0; d < a.dim; d++) {
    const bool another = d == 0 || !one_step;
    if (another) {
      dt = a.dt_bias.given ? step[d] + bias[d] : step[d];
      dt = a.softplus ? softplus(dt) : dt;
    }
    const int64_t at = h * a.A.step[0] + d * a.A.step[1];
    if (another || a.A.step[1] != 0) {
      if (one_decay) decay = quiet(std::exp(dt * a.A.number(at)));
      else {
        a.A.widen(at, a.A.step[2], a.size, decays);
        for (int64_t i = 0; i < a.size; i += W) {
          const vf power = load(decays + i) * dt;
          store(decays + i, power > 88.0f ? all(INFINITY) : power == power ? exponential(power) : all(NAN));
        }
      }
    }
    out[d] = update_row(old + d * a.state.step[2], to + d * a.size, decay, one_decay ? nullptr : decays, quiet(dt * x[d]),
                        key, query, a.size);
    if (a.D.given) out[d] += skip[d] * x[d];
  }
  if (a.z.given) {
    row(a.z, z);
    for (int64_t d = 0; d < a.dim; d += W) store(out + d, load(out + d) * activate(load(z + d), SILU));
  }
  a.out.narrow(out, a.dim, item * a.dim);
}

inline bool run_state_update(const StateUpdate &a) {
  const int threads = a.batch * a.heads * a.dim * a.size < 32768 ? 1 : a.threads;
  const int64_t room = 6 * whole_vectors(a.dim) + 3 * whole_vectors(a.size);
  return for_dtype(a.state.dtype, [&](auto t) {
    return share_with_room(threads, a.batch * a.heads, room,
                           [&](int64_t item, float *floats) { update_head<decltype(t)>(a, item, floats); });
  });
}

struct DeltaRule {
  View q, k, v, g, beta, state, out, to;        // of float32: state, and to, the new one, if wanted
  int64_t batch, heads, value_heads, dim, value_dim;
  float scale;
  bool normalize;
  float eps;                                    // of the norm
  int threads;
};

// held += k S and read += q S for N rows of S, from memory once.
template <int N> void read_rows(const float *s, int64_t row, const float *k, const float *q, int64_t columns, float *held,
                                float *read) {
  for_each_vector(columns, [&](int64_t j, int n) INLINE {
    vf h = load(held + j), r = load(read + j);
    each<N>([&](auto i) {
      const vf v = load_n(s + i * row + j, n);
      h += v * k[i], r += v * q[i];
    });
    store(held + j, h), store(read + j, r);
  });
}

inline void delta_head(const DeltaRule &a, int64_t item, float *room) {
  const int64_t b = item / a.value_heads, h = item % a.value_heads, from = h / (a.value_heads / a.heads);
  const int64_t wide = whole_vectors(a.dim), columns = a.value_dim;
  float *q = room, *k = q + wide, *value = k + wide, *held = value + whole_vectors(columns), *out = held + whole_vectors(columns);
  a.q.widen(b * a.q.step[0] + from * a.q.step[2], a.q.step[3], a.dim, q);
  a.k.widen(b * a.k.step[0] + from * a.k.step[2], a.k.step[3], a.dim, k);
  a.v.widen(b * a.v.step[0] + h * a.v.step[2], a.v.step[3], columns, value);
  const float decay = std::exp(a.g.number(b * a.g.step[0] + h * a.g.step[2]));
  const float beta = a.beta.number(b * a.beta.step[0] + h * a.beta.step[2]);
  float qq = 0, kk = 0, qk = 0;
  for (int64_t i = 0; i < a.dim; i++) qq += q[i] * q[i], kk += k[i] * k[i];
  const float of_q = a.scale * (a.normalize ? 1.0f / std::sqrt(qq + a.eps) : 1.0f);
  const float of_k = a.normalize ? 1.0f / std::sqrt(kk + a.eps) : 1.0f;
  for (int64_t i = 0; i < a.dim; i++) q[i] *= of_q, k[i] *= of_k, qk += q[i] * k[i];
  const float *old = a.state.given ? (const float *)a.state.at + b * a.state.step[0] + h * a.state.step[1] : nullptr;
  float *to = a.to.given ? (float *)a.to.at + item * a.dim * columns : nullptr;
  const int64_t old_row = a.state.step[2];
  std::fill(held, held + columns, 0.0f), std::fill(out, out + columns, 0.0f);
  int64_t i = 0;
  if (old) {
    for (; i + 4 <= a.dim; i += 4) read_rows<4>(old + i * old_row, old_row, k + i, q + i, columns, held, out);
    for (; i < a.dim; i++) read_rows<1>(old + i * old_row, old_row, k + i, q + i, columns, held, out);
  }
  // q S' = decay * q S + (q k) * change, so the new S need not be read
  float *change = held;
  for (int64_t j = 0; j < columns; j++) {
    change[j] = (value[j] - held[j] * decay) * beta;
    out[j] = out[j] * decay + change[j] * qk;
  }
  if (to) for (i = 0; i < a.dim; i++) for_each_vector(columns, [&](int64_t j, int n) INLINE {
    const vf s = old ? load_n(old + i * old_row + j, n) * decay : vf{};
    store_n(to + i * columns + j, s + load(change + j) * k[i], n);
  });
  a.out.narrow(out, columns, item * columns);
}

inline bool run_delta_rule(const DeltaRule &a) {
  const int threads = a.batch * a.value_heads * a.dim * a.value_dim < 32768 ? 1 : a.threads;
  const int64_t room = 2 * whole_vectors(a.dim) + 3 * whole_vectors(a.value_dim);
  return share_with_room(threads, a.batch * a.value_heads, room,
                         [&](int64_t item, float *floats) { delta_head(a, item, floats); });
}

struct Convolution {
  View x, weight, bias, state, out, to;         // to: the new state, if wanted; without gaps, as out
  int64_t batch, channels, width, length;       // length: tokens of the state, at least width - 1
  bool silu;
  int threads;
};

constexpr int64_t CHANNELS = 64;                // in the cache at a time

inline void convolve_channels(const Convolution &a, int64_t item, float *room) {
  const int64_t blocks = (a.channels + CHANNELS - 1) / CHANNELS, b = item / blocks, first = item % blocks * CHANNELS;
  const int64_t count = std::min(CHANNELS, a.channels - first);
  float *x = room, *out = x + CHANNELS, *weight = out + CHANNELS, *tokens = weight + CHANNELS * a.width;
  a.x.widen(b * a.x.step[0] + first * a.x.step[1], a.x.step[1], count, x);
  auto rows = [&](const View &v, int64_t offset, const int64_t *steps, int64_t width, float *to) {
    if (steps[0] == width && steps[1] == 1) return v.widen(offset, 1, count * width, to);
    for (int64_t c = 0; c < count; c++) v.widen(offset + c * steps[0], steps[1], width, to + c * width);
  };
  rows(a.weight, first * a.weight.step[0], a.weight.step, a.width, weight);
  rows(a.state, b * a.state.step[0] + first * a.state.step[1], a.state.step + 1, a.length, tokens);
  if (a.bias.given) a.bias.widen(first * a.bias.step[0], a.bias.step[0], count, out);
  else std::fill(out, out + count, 0.0f);
  const int64_t skipped = a.length - a.width + 1;
  auto outputs = [&](auto width) INLINE {       // a filter of constant width is computed in vectors
    for (int64_t c = 0; c < count; c++) {
      const float *w = weight + c * width, *seen = tokens + c * a.length + skipped;
      float total = x[c] * w[width - 1];
      for (int64_t i = 0; i < width - 1; i++) total += seen[i] * w[i];
      out[c] += total;
    }
  };
  a.width == 4 ? outputs(std::integral_constant<int64_t, 4>{}) : outputs(a.width);
  if (a.silu) for (int64_t c = 0; c < count; c += W) store(out + c, activate(load(out + c), SILU));
  a.out.narrow(out, count, b * a.channels + first);
  if (!a.to.given || !a.length) return;
  // each row one token on: what comes is written where the first of the next row was
  for (int64_t c = 0; c < count; c++) tokens[(c + 1) * a.length] = x[c];
  a.to.narrow(tokens + 1, count * a.length, (b * a.channels + first) * a.length);
}

inline bool run_convolution(const Convolution &a) {
  const int threads = a.batch * a.channels * a.width < 32768 ? 1 : a.threads;
  return share_with_room(threads, a.batch * ((a.channels + CHANNELS - 1) / CHANNELS), CHANNELS * (3 + a.width + a.length),
                         [&](int64_t item, float *floats) { convolve_channels(a, item, floats); });
}

}  // namespace lz

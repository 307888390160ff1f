// Our CPU kernels against plain loops in double precision: a program of its own, so that it can be compiled for another
// processor and run under an emulator. Prints what it checked; the exit status is the number of failures, at most 1.
#include <cstdio>
#include <random>
#include <vector>

#include "attention/decode.h"
#include "attention/grouped.h"
#include "attention/linear.h"
#include "norms.h"
#include "products.h"

using namespace lz;

static int failures = 0, checks = 0;
static std::mt19937 chance(1);

static double uniform() { return std::uniform_real_distribution<double>(-1, 1)(chance); }

template <class T> const char *name() { return sizeof(T) == 4 ? "float32" : std::is_same<T, bf16>::value ? "bf16" : "fp16"; }
template <class T> double step() { return sizeof(T) == 4 ? 1e-6 : std::is_same<T, bf16>::value ? 1.0 / 256 : 1.0 / 2048; }

template <class T> std::vector<T> random(int64_t count, double by = 1.0) {
  std::vector<T> made(count);
  for (T &x : made) from_float(&x, float(uniform() * by));
  return made;
}

static void expect(bool holds, const char *what, const char *of, long a, long b, long c, double got, double want) {
  checks++;
  if (holds) return;
  if (failures++ < 20) std::printf("FAILED %s %s (%ld, %ld, %ld): got %.9g, want %.9g\n", what, of, a, b, c, got, want);
}

// `size` is what the terms of the sum add up to without their signs: the error of float32 grows with it.
template <class T> bool near(double got, double want, double size) {
  return std::abs(got - want) <= step<T>() * std::abs(want) + 2e-6 * size + 1e-6;
}

// Every bit pattern to float32 and back, and rounding: to the nearest, ties to even.
static double from_bits(int sign, int exponent, int mantissa, int mantissa_bits, int bias) {
  double m = exponent ? 1.0 + double(mantissa) / (1 << mantissa_bits) : double(mantissa) / (1 << mantissa_bits);
  return (sign ? -1 : 1) * std::ldexp(m, (exponent ? exponent : 1) - bias);
}

template <class T> void conversions(int mantissa_bits, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  for (int bits = 0; bits < 65536; bits++) {
    const int sign = bits >> 15, exponent = (bits >> mantissa_bits) & top, mantissa = bits & ((1 << mantissa_bits) - 1);
    T x[W * 2], back[W * 2];
    for (T &y : x) y.bits = uint16_t(bits);
    const float one = to_float(x[0]);
    const vf many = load(x);
    store(back, many);
    T alone;
    from_float(&alone, one);
    if (exponent == top && mantissa) {
      expect(one != one && many[W - 1] != many[W - 1], "NaN", name<T>(), bits, 0, 0, one, 0);
      expect(to_float(alone) != to_float(alone) && to_float(back[0]) != to_float(back[0]), "NaN back", name<T>(), bits, 0, 0,
             to_float(alone), 0);
      continue;
    }
    const double want = exponent == top ? (sign ? -INFINITY : INFINITY)
                                        : from_bits(sign, exponent, mantissa, mantissa_bits, bias);
    expect(one == want && many[0] == want && many[W - 1] == want, "to float32", name<T>(), bits, 0, 0, one, want);
    expect(alone.bits == bits && back[0].bits == bits && back[W - 1].bits == bits, "back", name<T>(), bits, 0, 0,
           alone.bits, bits);
    if (exponent == top || bits == 0x7fff) continue;
    T next = x[0];
    next.bits++;
    const double after = to_float(next);
    if (!(std::abs(after) < INFINITY) || want == 0 || std::abs(want) < 1e-37) continue;
    for (double part : {0.25, 0.5, 0.75}) {     // between this number and the next
      const float between = float(want + (after - want) * part);
      const int to = part < 0.5 || (part == 0.5 && bits % 2 == 0) ? bits : bits + 1;
      from_float(&alone, between);
      store(back, all(between));
      expect(alone.bits == to && back[W - 1].bits == to, "rounding", name<T>(), bits, long(part * 100), 0, alone.bits, to);
    }
  }
}

static double act(double x, Activation a) {
  switch (a) {
    case RELU: return x > 0 ? x : 0;
    case SILU: return x / (1 + std::exp(-x));
    case GELU: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case GELU_TANH: return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    default: return x;
  }
}

template <class T> struct Matrix {
  int64_t rows, columns, row;
  std::vector<T> data, bias;
  Matrix(int64_t r, int64_t c, int64_t pad, double by) : rows(r), columns(c), row(c + pad), data(random<T>(r * row, by)),
                                                         bias(random<T>(r)) {}
  double dot(const double *x, int64_t r, bool with_bias, double *size) const {
    double sum = with_bias ? to_float(bias[r]) : 0;
    *size = std::abs(sum);
    for (int64_t c = 0; c < columns; c++) {
      const double term = double(to_float(data[r * row + c])) * x[c];
      sum += term, *size += std::abs(term);
    }
    return sum;
  }
};

template <class T> void product(int64_t tokens, int64_t inputs, int64_t outputs, bool bias, bool gated, Activation a,
                                int64_t pad) {
  const double by = 1 / std::sqrt(double(inputs));
  Matrix<T> w(outputs, inputs, pad, by), second(outputs, inputs, pad, by);
  const int64_t x_row = inputs + pad;
  std::vector<T> x = random<T>(tokens * x_row, 3), out(tokens * outputs);
  Product p{};
  p.x = x.data(), p.weight = w.data.data(), p.second = second.data.data(), p.out = out.data();
  p.bias = w.bias.data(), p.second_bias = second.bias.data();
  p.has_second = gated, p.has_bias = bias, p.has_second_bias = bias && gated;
  p.tokens = tokens, p.inputs = inputs, p.outputs = outputs;
  p.x_row = x_row, p.weight_row = p.second_row = w.row, p.out_row = outputs, p.activation = a, p.threads = 2;
  expect(run_product<T>(p), "memory", name<T>(), tokens, inputs, outputs, 0, 1);
  std::vector<double> row(inputs);
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t c = 0; c < inputs; c++) row[c] = to_float(x[t * x_row + c]);
    for (int64_t r = 0; r < outputs; r++) {
      double size, other_size = 1;
      double want = act(w.dot(row.data(), r, bias, &size), a);
      if (gated) {
        const double other = second.dot(row.data(), r, bias, &other_size);
        size = size * (1 + std::abs(other)) + other_size * std::abs(want), want *= other;
      }
      const double got = to_float(out[t * outputs + r]);
      expect(near<T>(got, want, size), gated ? "gated product" : "product", name<T>(), tokens, inputs, outputs, got, want);
    }
  }
}

template <class T> void feed_forward(int64_t tokens, int64_t hidden, int64_t inner, int64_t outputs) {
  Matrix<T> gate(inner, hidden, 0, 1 / std::sqrt(double(hidden))), up(inner, hidden, 0, 1 / std::sqrt(double(hidden)));
  Matrix<T> down(outputs, inner, 3, 1 / std::sqrt(double(inner)));
  std::vector<T> x = random<T>(tokens * hidden, 3), out(tokens * outputs);
  FeedForward f{};
  Product &a = f.in, &b = f.down;
  a.x = x.data(), a.weight = gate.data.data(), a.second = up.data.data(), a.has_second = true;
  a.tokens = b.tokens = tokens, a.inputs = hidden, a.outputs = b.inputs = inner, b.outputs = b.out_row = outputs;
  a.x_row = a.weight_row = a.second_row = hidden, b.weight_row = down.row, a.activation = SILU;
  b.weight = down.data.data(), b.bias = down.bias.data(), b.has_bias = true, b.out = out.data(), a.threads = b.threads = 2;
  expect(run_feed_forward<T>(f), "memory", name<T>(), tokens, hidden, inner, 0, 1);
  std::vector<double> row(hidden), between(inner);
  for (int64_t t = 0; t < tokens; t++) {
    double size;
    for (int64_t c = 0; c < hidden; c++) row[c] = to_float(x[t * hidden + c]);
    for (int64_t i = 0; i < inner; i++)
      between[i] = act(gate.dot(row.data(), i, false, &size), SILU) * up.dot(row.data(), i, false, &size);
    for (int64_t r = 0; r < outputs; r++) {
      const double want = down.dot(between.data(), r, true, &size), got = to_float(out[t * outputs + r]);
      expect(near<T>(got, want, 4 * size), "feed-forward", name<T>(), tokens, hidden, inner, got, want);
    }
  }
}

template <class T, class P> void norm(int64_t rows, int64_t hidden, bool residual) {
  std::vector<T> x = random<T>(rows * hidden, 2), r = random<T>(rows * hidden), out(rows * hidden), total(rows * hidden);
  std::vector<P> weight = random<P>(hidden);
  Norm a{};
  a.x = x.data(), a.residual = r.data(), a.has_residual = residual, a.weight = weight.data(), a.has_weight = true;
  a.out = out.data(), a.total = total.data(), a.rows = rows, a.hidden = hidden, a.x_row = a.residual_row = hidden;
  a.eps = 1e-5f, a.offset = 0.5f, a.threads = 2;
  run_norm<T, P>(a);
  for (int64_t i = 0; i < rows; i++) {
    std::vector<double> v(hidden);
    double squares = 0;
    for (int64_t d = 0; d < hidden; d++) {
      T rounded = x[i * hidden + d];
      if (residual) from_float(&rounded, to_float(x[i * hidden + d]) + to_float(r[i * hidden + d]));
      v[d] = to_float(rounded), squares += v[d] * v[d];
    }
    const double inverse = 1 / std::sqrt(squares / hidden + 1e-5);
    for (int64_t d = 0; d < hidden; d++) {
      const double want = v[d] * inverse * (to_float(weight[d]) + 0.5), got = to_float(out[i * hidden + d]);
      expect(near<T>(got, want, std::abs(want)), "norm", name<T>(), rows, hidden, d, got, want);
    }
  }
}

template <class T> void attend(int64_t heads, int64_t kv_heads, int64_t seq_q, int64_t seq_k, int64_t dim, int64_t dim_v,
                               bool causal) {
  const int64_t batch = 2;
  std::vector<T> q = random<T>(batch * heads * seq_q * dim, 2), k = random<T>(batch * kv_heads * seq_k * dim, 2);
  std::vector<T> v = random<T>(batch * kv_heads * seq_k * dim_v), out(batch * heads * seq_q * dim_v);
  Attention a{};
  a.query = q.data(), a.key = k.data(), a.value = v.data(), a.out = out.data(), a.has_lse = false;
  a.batch = batch, a.heads = heads, a.kv_heads = kv_heads, a.seq_q = seq_q, a.seq_k = seq_k;
  a.head_dim = dim, a.head_dim_v = dim_v, a.q = {heads * seq_q * dim, seq_q * dim, dim};
  a.k = {kv_heads * seq_k * dim, seq_k * dim, dim}, a.v = {kv_heads * seq_k * dim_v, seq_k * dim_v, dim_v};
  a.offset = seq_k - seq_q, a.left = -1, a.right = causal ? 0 : -1, a.scale = 0.3f, a.softcap = 0, a.threads = 2;
  expect(Decoder<T>(a).run(), "memory", name<T>(), heads, seq_q, seq_k, 0, 1);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t s = 0; s < seq_q; s++) {
        const int64_t kv = b * kv_heads + h / (heads / kv_heads), row = (b * heads + h) * seq_q + s;
        const int64_t seen = causal ? seq_k - seq_q + s + 1 : seq_k;
        std::vector<double> weight(seen);
        double top = -1e300, total = 0;
        for (int64_t j = 0; j < seen; j++) {
          for (int64_t d = 0; d < dim; d++)
            weight[j] += 0.3f * double(to_float(q[row * dim + d])) * to_float(k[(kv * seq_k + j) * dim + d]);
          top = std::max(top, weight[j]);
        }
        for (double &w : weight) total += w = std::exp(w - top);
        for (int64_t d = 0; d < dim_v; d++) {
          double want = 0;
          for (int64_t j = 0; j < seen; j++) want += weight[j] / total * to_float(v[(kv * seq_k + j) * dim_v + d]);
          const double got = to_float(out[row * dim_v + d]);
          expect(near<T>(got, want, 4), "attention", name<T>(), heads, seq_k, dim, got, want);
        }
      }
}

// Items over one buffer of keys: nested prefixes, a range, chunks of 16 out of order, a long one.
template <class T> void items(int64_t heads, int64_t kv_heads, int64_t dim, int64_t dim_v, int64_t left, int64_t right,
                              bool chunks) {
  const std::vector<int32_t> rows{0, 1, 0, 150, 1, 1, 0, 90, 2, 2, 0, 130, 5, 1, 40, 60, 6, 0, 0, 9, 6, 70, 0, 140, 76, 9, 3, 4};
  const int64_t tokens = 86, tokens_k = 160, count = int64_t(rows.size()) / 4, group = heads / kv_heads;
  std::vector<int32_t> starts, lengths(count, 16);
  for (int64_t i = 0; i < count; i++)
    for (int32_t c = 0; c < 10; c++) starts.push_back((c * 7 + (i > 4)) % 10 * 16);
  std::vector<T> q = random<T>(tokens * heads * dim, 2), k = random<T>(tokens_k * kv_heads * dim, 2);
  std::vector<T> v = random<T>(tokens_k * kv_heads * dim_v), out(tokens * heads * dim_v);
  Grouped a{};
  a.query = q.data(), a.key = k.data(), a.value = v.data(), a.out = out.data(), a.has_lse = false, a.tokens = tokens;
  a.heads = heads, a.kv_heads = kv_heads, a.head_dim = dim, a.head_dim_v = dim_v, a.q_token = heads * dim, a.q_head = dim;
  a.k_token = kv_heads * dim, a.k_head = dim, a.v_token = kv_heads * dim_v, a.v_head = dim_v;
  a.left = left, a.right = right, a.scale = 0.3f, a.softcap = 0, a.threads = 2;
  ItemTable table{rows.data(), starts.data(), lengths.data(), chunks, count, 10, tokens, tokens_k};
  expect(table.first_invalid() == -1, "items", name<T>(), heads, dim, dim_v, 0, 1);
  Plan plan(a);
  table.plan(plan);
  expect(GroupedAttention<T>::run(a, plan), "memory", name<T>(), heads, dim, dim_v, 0, 1);
  std::vector<double> want(out.size(), 0);
  for (int64_t i = 0; i < count; i++) {
    const int64_t n = rows[4 * i + 1], m = rows[4 * i + 3];
    for (int64_t r = 0; r < n * heads; r++) {
      const int64_t token = rows[4 * i] + r / heads, head = r % heads, diagonal = r / heads + m - n;
      const int64_t from = left < 0 ? 0 : std::max<int64_t>(diagonal - left, 0);
      const int64_t to = right < 0 ? m : std::min(m, diagonal + right + 1);
      std::vector<double> weight(std::max<int64_t>(to - from, 0));
      auto place = [&](int64_t j) {
        const int64_t p = rows[4 * i + 2] + from + j;
        return (chunks ? starts[i * 10 + p / 16] + p % 16 : p) * kv_heads + head / group;
      };
      double top = -1e300, total = 0;
      for (size_t j = 0; j < weight.size(); j++) {
        for (int64_t d = 0; d < dim; d++)
          weight[j] += 0.3f * double(to_float(q[(token * heads + head) * dim + d])) * to_float(k[place(j) * dim + d]);
        top = std::max(top, weight[j]);
      }
      for (double &w : weight) total += w = std::exp(w - top);
      for (size_t j = 0; j < weight.size(); j++)
        for (int64_t d = 0; d < dim_v; d++)
          want[(token * heads + head) * dim_v + d] += weight[j] / total * to_float(v[place(j) * dim_v + d]);
    }
  }
  for (size_t i = 0; i < want.size(); i++)
    expect(near<T>(to_float(out[i]), want[i], 4), "items", name<T>(), heads, dim, i, to_float(out[i]), want[i]);
}

template <class T> void products() {
  for (int64_t tokens : {1, 2, 3, 4, 5, 9})
    for (int64_t inputs : {1, 7, 8, 31, 33, 96, 300})
      for (int64_t outputs : {1, 7, 8, 33, 70}) product<T>(tokens, inputs, outputs, inputs % 2, false, NONE, outputs % 3);
  for (Activation a : {NONE, RELU, SILU, GELU, GELU_TANH})
    for (int64_t tokens : {1, 6}) product<T>(tokens, 40, 19, true, false, a, 0), product<T>(tokens, 72, 25, true, true, a, 1);
  product<T>(17, 1030, 150, true, true, SILU, 5);
  for (int64_t tokens : {1, 3, 6}) feed_forward<T>(tokens, 50, 77, 30);
}

template <class T> void attention() {
  attend<T>(4, 1, 1, 1, 16, 16, false), attend<T>(6, 2, 3, 77, 33, 20, true), attend<T>(3, 3, 1, 65, 8, 8, false);
  attend<T>(8, 2, 2, 130, 64, 64, true), attend<T>(7, 1, 1, 600, 40, 40, false);
}

template <class T> void grouped() {
  items<T>(4, 2, 64, 64, -1, 0, false), items<T>(3, 1, 40, 24, -1, -1, false), items<T>(9, 3, 7, 33, 20, 0, false);
  items<T>(4, 2, 32, 32, -1, 0, true), items<T>(8, 1, 64, 72, 30, 5, true);
}

template <class T> View view(std::vector<T> &of, std::vector<int64_t> steps = {}) {
  View v;
  v.at = of.data(), v.given = true, v.dtype = sizeof(T) == 4 ? 0 : std::is_same<T, bf16>::value ? 1 : 2;
  std::copy(steps.begin(), steps.end(), v.step);
  return v;
}

// A token of two heads of one group; `tied`: one decay of the whole head.
template <class T> void state_update(int64_t dim, int64_t size, bool tied) {
  auto state = random<T>(2 * dim * size), x = random<T>(2 * dim), B = random<T>(size), C = random<T>(size);
  auto z = random<T>(2 * dim), out = random<T>(2 * dim), to = state;
  auto dt = random<float>(2 * dim), A = random<float>(2 * dim * size);
  StateUpdate a;
  a.state = view(state, {0, dim * size, size, 1}), a.x = view(x, {0, dim, 1}), a.dt = view(dt, {0, dim, tied ? 0 : 1});
  a.A = view(A, {dim * size, tied ? 0 : size, tied ? 0 : 1}), a.B = view(B, {0, 0, 1}), a.C = view(C, {0, 0, 1});
  a.z = view(z, {0, dim, 1}), a.D = view(dt, {dim, 1}), a.dt_bias = view(dt, {dim, 0}), a.out = view(out), a.to = view(to);
  a.batch = a.groups = 1, a.heads = 2, a.dim = dim, a.size = size, a.softplus = true, a.threads = 2;
  run_state_update(a);
  for (int64_t i = 0; i < 2 * dim; i++) {
    const int64_t head = i / dim * dim;
    const double step = std::log1p(std::exp(double(dt[tied ? head : i]) + dt[head])), in = to_float(x[i]), gate = to_float(z[i]);
    double want = dt[i] * in;
    for (int64_t n = 0; n < size; n++) {
      const double decay = std::exp(step * A[tied ? head * size : i * size + n]);
      const double s = to_float(state[i * size + n]) * decay + step * in * to_float(B[n]), got = to_float(to[i * size + n]);
      want += s * to_float(C[n]);
      expect(near<T>(got, s, 8), "new state", name<T>(), dim, size, n, got, s);
    }
    want *= gate / (1 + std::exp(-gate));
    expect(near<T>(to_float(out[i]), want, 8 + size), "state read", name<T>(), dim, size, i, to_float(out[i]), want);
  }
}

template <class T> void delta_rule(int64_t dim, int64_t columns) {
  auto q = random<T>(dim), k = random<T>(dim), v = random<T>(2 * columns), out = v;
  auto gates = random<float>(2), state = random<float>(2 * dim * columns), to = state;
  DeltaRule a;
  a.q = view(q, {0, 0, dim, 1}), a.k = view(k, {0, 0, dim, 1}), a.v = view(v, {0, 0, columns, 1}), a.out = view(out);
  a.g = a.beta = view(gates, {0, 0, 1}), a.state = view(state, {0, dim * columns, columns, 1}), a.to = view(to);
  a.batch = a.heads = 1, a.value_heads = 2, a.dim = dim, a.value_dim = columns, a.threads = 2;
  a.scale = 0.5f, a.eps = 1e-6f, a.normalize = true;
  run_delta_rule(a);
  double qq = 1e-6, kk = 1e-6;
  for (int64_t i = 0; i < dim; i++) qq += std::pow(to_float(q[i]), 2), kk += std::pow(to_float(k[i]), 2);
  for (int64_t head = 0; head < 2; head++) for (int64_t j = 0; j < columns; j++) {
    const double decay = std::exp(double(gates[head])), value = to_float(v[head * columns + j]);
    auto old = [&](int64_t i) { return decay * state[(head * dim + i) * columns + j]; };
    double held = 0, want = 0;
    for (int64_t i = 0; i < dim; i++) held += to_float(k[i]) / std::sqrt(kk) * old(i);
    for (int64_t i = 0; i < dim; i++) {
      const double s = old(i) + to_float(k[i]) / std::sqrt(kk) * (value - held) * gates[head], got = to[(head * dim + i) * columns + j];
      want += 0.5 * to_float(q[i]) / std::sqrt(qq) * s;
      expect(near<float>(got, s, 8), "delta state", name<T>(), dim, columns, i, got, s);
    }
    const double got = to_float(out[head * columns + j]);
    expect(near<T>(got, want, 8), "delta", name<T>(), dim, columns, j, got, want);
  }
}

template <class T> void convolution(int64_t channels, int64_t width, int64_t length) {
  auto x = random<T>(channels), weight = random<T>(channels * width), bias = random<T>(channels), out = x;
  auto state = random<T>(channels * length + 1), to = state;
  Convolution a;
  a.x = view(x, {0, 1, 1}), a.weight = view(weight, {width, 1}), a.bias = view(bias, {1}), a.out = view(out), a.to = view(to);
  a.state = view(state, {0, length, 1});
  a.batch = 1, a.channels = channels, a.width = width, a.length = length, a.silu = true, a.threads = 2;
  run_convolution(a);
  for (int64_t c = 0; c < channels; c++) {
    auto token = [&](int64_t i) { return double(to_float(i == length ? x[c] : state[c * length + i])); };
    double want = to_float(bias[c]);
    for (int64_t i = 0; i < width; i++) want += token(length - width + 1 + i) * to_float(weight[c * width + i]);
    want /= 1 + std::exp(-want);
    expect(near<T>(to_float(out[c]), want, 4), "convolution", name<T>(), channels, width, c, to_float(out[c]), want);
    for (int64_t i = 0; i < length; i++) {
      const double got = to_float(to[c * length + i]);
      expect(got == token(i + 1), "tokens kept", name<T>(), channels, width, c, got, token(i + 1));
    }
  }
}

template <class T> void linear_attention() {
  for (bool tied : {false, true}) state_update<T>(5, 19, tied), state_update<T>(16, 64, tied);
  delta_rule<T>(7, 13), delta_rule<T>(32, 64);
  convolution<T>(150, 4, 4), convolution<T>(9, 3, 2), convolution<T>(70, 1, 0), convolution<T>(70, 4, 6);
}

int main() {
#if defined(__AVX512F__)
  const char *built = "AVX-512";
#elif defined(__AVX2__)
  const char *built = "AVX2";
#elif defined(__aarch64__)
  const char *built = "NEON";
#else
  const char *built = "no wide vectors";
#endif
  conversions<bf16>(7, 8), conversions<fp16>(10, 5);
  products<bf16>(), products<fp16>();
  attention<float>(), attention<bf16>(), attention<fp16>();
  grouped<float>(), grouped<bf16>(), grouped<fp16>();
  linear_attention<float>(), linear_attention<bf16>(), linear_attention<fp16>();
  for (int64_t hidden : {1, 15, 16, 64, 101})
    for (bool residual : {false, true}) {
      norm<float, float>(3, hidden, residual), norm<bf16, bf16>(3, hidden, residual);
      norm<bf16, float>(3, hidden, residual), norm<fp16, fp16>(3, hidden, residual);
    }
  std::printf("%s, vectors of %d bytes: %d checks, %d failed\n", built, VECTOR_BYTES, checks, failures);
  return failures != 0;
}

// One token of one sequence through all layers of a decoder with ggml's weights, packed. A token of
// a small model takes some milliseconds: each of its hundreds of steps would cost as much to call
// as to run.
#pragma once

#include "../attention/token.h"
#include "../norms.h"
#include "../products.h"
#include "linear.h"

namespace lz::quant {

// Addresses and sizes, as Python writes them: 8 bytes each. An address of 0: there is none.
struct Product {
  int64_t weight, bias, format, inputs, outputs;
};
struct DecoderLayer {
  int64_t ln1, ln2, q_norm, k_norm, post_attention, post_mlp;   // float32
  // One weight, or queries, keys and values, gate and up apart where their formats differ.
  Product qkv[3], out[1], in[2], down[1];
  int64_t keys, values;                         // (tokens, kv_heads, dim)
  int64_t cos, sin;                             // float32, (positions, half)
  int64_t window;                               // keys that a token sees; 0 for all
};

struct DecoderStep {
  const DecoderLayer *layers;
  int64_t count, hidden, heads, kv_heads, dim, half, inner, token, position;
  Product embed, head[1];                       // embed: ggml's blocks as they are, or of format -1 floats
  const float *norm;
  Activation activation;
  float eps, scale, softcap, embed_scale;
  float *logits;
  int threads;
};

// Products of one x, whose results follow one another; after the last come those without a weight.
// Those of one format are shared out together.
template <int N> bool multiply(const Product (&parts)[N], const float *x, float *out, int threads) {
  for (int i = 0; i < N && parts[i].weight;) {
    Linear q[N];
    int count = 0;
    const Product &first = parts[i];
    for (; i < N && parts[i].weight && parts[i].format == first.format; out += parts[i++].outputs) {
      const Product &p = parts[i];
      q[count++] = {x, (const void *)p.weight, (const void *)p.bias, out, p.bias != 0, 1, p.inputs, p.outputs, p.inputs, threads,
                    read_elements<float>, write_results<float>};
    }
    if (!for_format(first.format, [&](auto format) { return run_few<Isa, decltype(format)::value>(q, count); })) return false;
  }
  return true;
}

// Sizes are multiples of 32: rows have no tail.
inline void norm(const float *x, int64_t weight, float *out, int64_t size, float eps, float *wide, float *residual = nullptr) {
  Norm a{};
  a.x = x, a.out = out, a.hidden = size, a.eps = eps;
  a.has_residual = residual != nullptr, a.residual = a.total = residual;
  norm_row<float>(a, 0, (const float *)weight, wide);
}

inline void embed(const DecoderStep &s, float *x) {
  const Product &rows = s.embed;
  if (rows.format < 0) std::copy_n((const float *)rows.weight + s.token * s.hidden, s.hidden, x);
  else for_format(rows.format, [&](auto f) {
    const int64_t bytes = s.hidden / block_size(f) * block_bytes(f);
    dequantize<decltype(f)::value>((const uint8_t *)rows.weight + s.token * bytes, s.hidden, x);
  });
  for (int64_t i = 0; s.embed_scale != 1 && i < s.hidden; i++) x[i] *= s.embed_scale;
}

inline void rotate(float *heads, int64_t count, int64_t dim, int64_t half, const float *cos, const float *sin) {
  for (int64_t h = 0; h < count; h++, heads += dim)
    for (int64_t i = 0; i < half; i++) {
      const float x = heads[i], y = heads[half + i];
      heads[i] = x * cos[i] - y * sin[i], heads[half + i] = y * cos[i] + x * sin[i];
    }
}

// T: how keys and values are kept. `qkv` and `out` are rows of floats, `narrow` room for both in T.
template <class T> bool attend(const DecoderStep &s, const DecoderLayer &at, float *qkv, float *out, T *narrow) {
  const int64_t q = s.heads * s.dim, kept = s.kv_heads * s.dim;
  const float *cos = (const float *)at.cos + s.position * s.half, *sin = (const float *)at.sin + s.position * s.half;
  rotate(qkv, s.heads + s.kv_heads, s.dim, s.half, cos, sin);
  for (int64_t i = 0; i < q + 2 * kept; i++) from_float(narrow + i, qkv[i]);
  T *keys = (T *)at.keys, *values = (T *)at.values;
  std::memcpy(keys + s.position * kept, narrow + q, kept * sizeof(T));
  std::memcpy(values + s.position * kept, narrow + q + kept, kept * sizeof(T));
  const int64_t first = at.window ? std::max<int64_t>(0, s.position + 1 - at.window) : 0;
  Attention a{};
  a.query = narrow, a.key = keys + first * kept, a.value = values + first * kept, a.out = narrow + q + 2 * kept;
  a.batch = 1, a.heads = s.heads, a.kv_heads = s.kv_heads, a.seq_q = 1, a.seq_k = s.position + 1 - first;
  a.head_dim = a.head_dim_v = s.dim;
  a.q = {q, s.dim, 0}, a.k = a.v = {0, s.dim, kept};
  a.left = a.right = -1, a.scale = s.scale, a.softcap = s.softcap, a.threads = s.threads;
  if (!lz::attend<T>(a)) return false;
  for (int64_t i = 0; i < q; i++) out[i] = to_float(((const T *)a.out)[i]);
  return true;
}

inline void gate(float *wide, int64_t inner, Activation activation) {
  for (int64_t i = 0; i < inner; i += W) store(wide + i, activate(load(wide + i), activation) * load(wide + inner + i));
}

template <class T> bool run_layers(const DecoderStep &s, float *memory) {
  const int64_t q = s.heads * s.dim, heads = q + 2 * s.kv_heads * s.dim;
  float *normed = memory, *branch = normed + s.hidden, *row = branch + s.hidden;
  float *qkv = row + std::max(s.hidden, s.dim), *attended = qkv + heads, *wide = attended + q;
  float *x = wide + 2 * s.inner;
  T *narrow = (T *)(x + s.hidden);
  embed(s, x);
  norm(x, s.layers[0].ln1, normed, s.hidden, s.eps, row);
  for (int64_t i = 0; i < s.count; i++) {
    const DecoderLayer &at = s.layers[i];
    if (!multiply(at.qkv, normed, qkv, s.threads)) return false;
    for (int64_t h = 0; at.q_norm && h < s.heads + s.kv_heads; h++)
      norm(qkv + h * s.dim, h < s.heads ? at.q_norm : at.k_norm, qkv + h * s.dim, s.dim, s.eps, row);
    if (!attend(s, at, qkv, attended, narrow) || !multiply(at.out, attended, branch, s.threads)) return false;
    if (at.post_attention) norm(branch, at.post_attention, branch, s.hidden, s.eps, row);
    norm(branch, at.ln2, normed, s.hidden, s.eps, row, x);
    if (!multiply(at.in, normed, wide, s.threads)) return false;
    gate(wide, s.inner, s.activation);
    if (!multiply(at.down, wide, branch, s.threads)) return false;
    if (at.post_mlp) norm(branch, at.post_mlp, branch, s.hidden, s.eps, row);
    norm(branch, i + 1 < s.count ? s.layers[i + 1].ln1 : (int64_t)s.norm, normed, s.hidden, s.eps, row, x);
  }
  return multiply(s.head, normed, s.logits, s.threads);
}

inline int64_t likeliest(const float *logits, int64_t count) {
  int64_t best = 0;
  for (int64_t first = 0; first < count; first += 64) {        // the largest of 64 is one pass of vectors
    const int64_t end = std::min(count, first + 64);
    float most = logits[first];
    for (int64_t i = first; i < end; i++) most = logits[i] > most ? logits[i] : most;
    if (!(most > logits[best])) continue;
    for (best = first; best < end && logits[best] != most;) best++;
  }
  return best;
}

template <class T> bool run_decoder(const DecoderStep &s) {
  const int64_t heads = (2 * s.heads + 2 * s.kv_heads) * s.dim;
  const int64_t size = 3 * s.hidden + std::max(s.hidden, s.dim) + 2 * heads + 2 * s.inner;
  float *memory = (float *)std::aligned_alloc(64, (size * int64_t(sizeof(float)) + 63) / 64 * 64);
  if (!memory) return false;
  const bool done = run_layers<T>(s, memory);
  std::free(memory);
  return done;
}

}  // namespace lz::quant

// Attention of a few query rows over a long context: what decoding does.
//
// All query rows that share a KV head are processed together, so that each key and value is read
// once. The keys are split into parts that depend on the sizes only, not on the number of threads,
// and so does the result. Each part has its maximum score, its sum and its weighted values; the
// parts are merged at the end.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "../vectors.h"

namespace lz {

struct Strides { int64_t batch, head, row; };   // in elements; the last dimension has no gaps

struct Attention {
  const void *query, *key, *value;
  void *out;                                    // (batch, heads, seq_q, head_dim_v), without gaps
  float *lse;                                   // (batch, heads, seq_q)
  bool has_lse;
  int64_t batch, heads, kv_heads, seq_q, seq_k, head_dim, head_dim_v;
  Strides q, k, v;
  int64_t offset, left, right;                  // the diagonal of row i is key i + offset; -1: no limit on that side
  float scale, softcap;
  int threads;
  bool invariant = false;                       // keys are split alike, however many heads and sequences there are
};

constexpr int BLOCK = 64;                       // keys per block of scores
constexpr int TILE = 4;                         // query rows, and keys, per register tile
constexpr int64_t PART = 512;                   // minimum keys per part
constexpr int64_t PARTS = 256;                  // enough work items for any number of threads

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows to prefetch while others are processed, as the hardware prefetcher does not predict them.
template <class T> struct Prefetch {
  const T *at;                                  // null: nothing
  int64_t row, dim;
  void row_ahead(int j) const {
    if (!at) return;
    const char *p = (const char *)(at + j * row);
    for (int64_t b = 0; b < int64_t(dim * sizeof(T)); b += 64) __builtin_prefetch(p + b, 0, 2);
  }
};

// Stores the horizontal sums of ROWS x TILE vectors to scores[r * BLOCK + i].
template <int ROWS> INLINE inline void store_sums(const vf (&sums)[ROWS][TILE], float *scores) {
#if defined(__AVX512F__)
  __m512 rows[4];
  each<4>([&](auto r) {
    const vf *s = sums[r < ROWS ? r : 0];
    __m512 a = (__m512)s[0], b = (__m512)s[1], c = (__m512)s[2], d = (__m512)s[3];
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    rows[r] = _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd),
                            (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
  });
  __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(rows[0], rows[1], 0x44), _mm512_shuffle_f32x4(rows[0], rows[1], 0xee));
  __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(rows[2], rows[3], 0x44), _mm512_shuffle_f32x4(rows[2], rows[3], 0xee));
  __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  _mm_storeu_ps(scores, _mm512_castps512_ps128(all));
  if (ROWS > 1) _mm_storeu_ps(scores + BLOCK, _mm512_extractf32x4_ps(all, 1));
  if (ROWS > 2) _mm_storeu_ps(scores + 2 * BLOCK, _mm512_extractf32x4_ps(all, 2));
  if (ROWS > 3) _mm_storeu_ps(scores + 3 * BLOCK, _mm512_extractf32x4_ps(all, 3));
#elif defined(__aarch64__)
  each<ROWS>([&](auto r) {
    float32x4_t ab = vpaddq_f32((float32x4_t)sums[r][0], (float32x4_t)sums[r][1]);
    float32x4_t cd = vpaddq_f32((float32x4_t)sums[r][2], (float32x4_t)sums[r][3]);
    vst1q_f32(scores + r * BLOCK, vpaddq_f32(ab, cd));
  });
#else
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < TILE; i++) scores[r * BLOCK + i] = sum(sums[r][i]);
#endif
}

template <class T, int ROWS>
void dot_products(const float *query, int64_t query_row, const T *key, int64_t key_row, int keys, int64_t dim,
                  float *scores, Prefetch<T> prefetch) {
  using U = Unit<T>;
  for (int j = 0; j < keys; j += TILE) {
    const T *at[TILE];
    for (int i = 0; i < TILE; i++) at[i] = key + std::min(j + i, keys - 1) * key_row;   // past the end: any key
    for (int i = 0; i < TILE; i++) prefetch.row_ahead(j + i);
    vf sums[ROWS][TILE] = {};
    for (int64_t d = 0; d < dim; d += U::SIZE) {
      vf k[TILE][U::VECTORS];
      if (d + U::SIZE <= dim) each<TILE>([&](auto i) { U::get(at[i] + d, k[i]); });
      else each<TILE>([&](auto i) { U::get_some(at[i] + d, int(dim - d), k[i]); });
      each<ROWS>([&](auto r) {
        each<U::VECTORS>([&](auto u) {
          vf q = load(query + r * query_row + d + u * W);
          each<TILE>([&](auto i) { sums[r][i] += q * k[i][u]; });
        });
      });
    }
    store_sums<ROWS>(sums, scores + j);
  }
}

// mixed[r] = mixed[r] * shrink[r] + sum over j of weights[r][j] * value[j], for `some` columns in N
// units, the last of which may be partial.
template <class T, int ROWS, int N>
void add_columns(const T *value, int64_t row, int keys, const float *weights, const float *rescale, float *weighted,
                 int64_t weighted_row, int some, Prefetch<T> prefetch) {
  using U = Unit<T>;
  constexpr int V = N * U::VECTORS, LAST = (N - 1) * U::SIZE;
  const bool cut = some < N * U::SIZE;
  vf sums[ROWS][V];
  each<ROWS>([&](auto r) {
    each<V>([&](auto n) { sums[r][n] = load(weighted + r * weighted_row + n * W) * rescale[r]; });
  });
  for (int j = 0; j < keys; j++) {
    prefetch.row_ahead(j);
    vf v[V];
    each<N - 1>([&](auto n) { U::get(value + j * row + n * U::SIZE, v + n * U::VECTORS); });
    if (cut) U::get_some(value + j * row + LAST, some - LAST, v + V - U::VECTORS);
    else U::get(value + j * row + LAST, v + V - U::VECTORS);
    each<ROWS>([&](auto r) { each<V>([&](auto n) { sums[r][n] += weights[r * BLOCK + j] * v[n]; }); });
  }
  each<ROWS>([&](auto r) { each<V>([&](auto n) { store(weighted + r * weighted_row + n * W, sums[r][n]); }); });
}

template <class T, int ROWS>
void add_values(const T *value, int64_t row, int keys, int64_t dim, const float *weights, const float *rescale,
                float *weighted, int64_t weighted_row, Prefetch<T> prefetch) {
  constexpr int MAX_COLUMNS = 4 / Unit<T>::VECTORS, WIDE = 4 * W;
  for (int64_t d = 0; d < dim; d += WIDE) {
    int some = int(std::min<int64_t>(dim - d, WIDE)), units = (some + Unit<T>::SIZE - 1) / Unit<T>::SIZE;
    auto add = add_columns<T, ROWS, MAX_COLUMNS>;
    if (units == 1) add = add_columns<T, ROWS, 1>;
    if constexpr (MAX_COLUMNS == 4)
      if (units == 2 || units == 3) add = units == 2 ? add_columns<T, ROWS, 2> : add_columns<T, ROWS, 3>;
    add(value + d, row, keys, weights, rescale, weighted + d, weighted_row, some, prefetch);
    prefetch.at = nullptr;                      // prefetch once
  }
}

// One step of the online softmax: turns the scores of a row into weights; it sees the keys `first`
// to `end`. Updates its maximum and sum, and returns the factor for earlier weights.
inline float softmax_step(float *scores, int first, int end, int keys, float scale, float softcap, float *largest_score,
                    float *total) {
  const vf nothing = all(-INFINITY);
  for (int j = keys; j < rounded_up(keys, W); j++) scores[j] = 0.0f;
  vf top = nothing;
  for (int j = 0; j < keys; j += W) {
    vf s = load(scores + j) * scale;
    if (softcap > 0.0f) s = softcap * hyperbolic_tangent(s / softcap);
    if (j < first || j + W > end) {
      for (int i = 0; i < W; i++) s[i] = j + i >= first && j + i < end ? s[i] : -INFINITY;
    }
    top = larger(s, top);
    store(scores + j, s);
  }
  float was = *largest_score, now = std::max(was, largest(top));
  float base = now == -INFINITY ? 0.0f : now;
  vf sums = {};
  for (int j = 0; j < keys; j += W) {
    vf w = exponential(load(scores + j) - base);
    sums += w;
    store(scores + j, w);
  }
  float rescale = was == -INFINITY ? 0.0f : std::exp(was - base);
  *largest_score = now;
  *total = *total * rescale + sum(sums);
  return rescale;
}

template <class T> struct Decoder {
  using U = Unit<T>;
  const Attention &a;
  int64_t group = a.heads / a.kv_heads, rows = group * a.seq_q;
  int64_t query_row = rounded_up(a.head_dim, U::SIZE), out_row = rounded_up(a.head_dim_v, U::SIZE);
  int64_t state_row = out_row + W;              // weighted values, maximum score, sum
  int64_t begin, end, parts, part;              // the visible keys, and how they are split

  explicit Decoder(const Attention &call) : a(call) {
    begin = a.left < 0 ? 0 : std::max<int64_t>(a.offset - a.left, 0);
    end = a.right < 0 ? a.seq_k : std::min(a.seq_k, a.seq_q - 1 + a.offset + a.right + 1);
    end = std::max(end, begin);
    int64_t most = std::max<int64_t>((end - begin) / PART, 1);
    parts = a.invariant ? most : std::min(most, (PARTS + a.batch * a.kv_heads - 1) / (a.batch * a.kv_heads));
    part = rounded_up((end - begin + parts - 1) / parts, BLOCK);
  }

  template <int ROWS> void block(const float *query, int64_t first_row, const T *key, const T *value, int64_t at,
                                 int keys, float *state) const {
    Prefetch<T> values{first_row ? nullptr : value, a.v.row, a.head_dim_v};
    Prefetch<T> next{first_row ? nullptr : key + keys * a.k.row, a.k.row, a.head_dim};
    alignas(64) float scores[ROWS * BLOCK];
    float rescale[ROWS];
    dot_products<T, ROWS>(query + first_row * query_row, query_row, key, a.k.row, keys, a.head_dim, scores,
                          values);
    for (int r = 0; r < ROWS; r++) {
      int64_t diagonal = (first_row + r) % a.seq_q + a.offset;
      int64_t from = a.left < 0 ? 0 : diagonal - a.left - at, to = a.right < 0 ? keys : diagonal + a.right + 1 - at;
      from = std::clamp<int64_t>(from, 0, keys);
      to = std::clamp<int64_t>(to, from, keys);
      float *own = state + (first_row + r) * state_row + out_row;
      rescale[r] = softmax_step(scores + r * BLOCK, int(from), int(to), keys, a.scale, a.softcap, own, own + 1);
    }
    add_values<T, ROWS>(value, a.v.row, keys, a.head_dim_v, scores, rescale, state + first_row * state_row, state_row,
                        next);
  }

  void run_part(int64_t batch, int64_t head, int64_t index, float *state, float *query) const {
    for (int64_t r = 0; r < rows; r++) {
      const T *from = (const T *)a.query + batch * a.q.batch + (head * group + r / a.seq_q) * a.q.head
                      + (r % a.seq_q) * a.q.row;
      for (int64_t d = 0; d < query_row; d += U::SIZE) {
        vf parts[U::VECTORS];
        if (d + U::SIZE <= a.head_dim) U::get(from + d, parts);
        else U::get_some(from + d, int(a.head_dim - d), parts);
        for (int u = 0; u < U::VECTORS; u++) store(query + r * query_row + d + u * W, parts[u]);
      }
      float *own = state + r * state_row;
      std::memset(own, 0, state_row * sizeof(float));
      own[out_row] = -INFINITY;
    }
    const T *keys = (const T *)a.key + batch * a.k.batch + head * a.k.head;
    const T *values = (const T *)a.value + batch * a.v.batch + head * a.v.head;
    int64_t stop = std::min(end, begin + (index + 1) * part);
    for (int64_t at = begin + index * part; at < stop; at += BLOCK) {
      const T *k = keys + at * a.k.row, *v = values + at * a.v.row;
      int n = int(std::min<int64_t>(BLOCK, stop - at));
      for (int64_t r = 0; r < rows; r += TILE) switch (std::min<int64_t>(rows - r, TILE)) {
        case 4: block<4>(query, r, k, v, at, n, state); break;
        case 3: block<3>(query, r, k, v, at, n, state); break;
        case 2: block<2>(query, r, k, v, at, n, state); break;
        default: block<1>(query, r, k, v, at, n, state);
      }
    }
  }

  // Merges the parts of one KV head into the first and stores the result.
  void finish(int64_t batch, int64_t head, float *states) const {
    for (int64_t r = 0; r < rows; r++) {
      float *own = states + r * state_row, top = -INFINITY, total = 0.0f;
      for (int64_t p = 0; p < parts; p++) top = std::max(top, own[p * rows * state_row + out_row]);
      float base = top == -INFINITY ? 0.0f : top;
      for (int64_t p = 0; p < parts; p++) {
        float *other = own + p * rows * state_row;
        float share = std::exp(other[out_row] - base);
        total += other[out_row + 1] * share;
        for (int64_t d = 0; d < out_row; d += W)
          store(own + d, p ? load(own + d) + load(other + d) * share : load(own + d) * share);
      }
      // A sum of 0 is a row that sees no key; NaN is not.
      float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      int64_t row = (batch * a.heads + head * group + r / a.seq_q) * a.seq_q + r % a.seq_q;
      T *out = (T *)a.out + row * a.head_dim_v;
      for (int64_t d = 0; d < a.head_dim_v; d += U::SIZE) {
        vf parts[U::VECTORS];
        for (int u = 0; u < U::VECTORS; u++) parts[u] = load(own + d + u * W) * inverse;
        T some[U::SIZE];
        U::put(some, parts);
        std::memcpy(out + d, some, std::min<int64_t>(U::SIZE, a.head_dim_v - d) * sizeof(T));
      }
      if (a.has_lse) a.lse[row] = total == 0.0f ? -INFINITY : top + std::log(total);
    }
  }

  bool run() const {
    const int64_t homes = a.batch * a.kv_heads, state = rows * state_row;
    if (!homes || !rows || !a.head_dim_v) return true;
    const size_t query_bytes = rounded_up(rows * query_row * sizeof(float), 64);
    const size_t state_bytes = size_t(homes) * parts * state * sizeof(float);
    const int64_t work = homes * (end - begin) * (a.head_dim + a.head_dim_v) * sizeof(T);
    const int threads = work < 65536 ? 1 : a.threads;
    char *memory = (char *)std::aligned_alloc(64, rounded_up(state_bytes, 64) + threads * query_bytes);
    if (!memory) return false;
    float *states = (float *)memory;
    share(threads, homes * parts, [&](int64_t i, int thread) {
      float *query = (float *)(memory + rounded_up(state_bytes, 64) + thread * query_bytes);
      run_part(i / parts / a.kv_heads, i / parts % a.kv_heads, i % parts, states + i * state, query);
    });
    share(threads, homes, [&](int64_t i, int) { finish(i / a.kv_heads, i % a.kv_heads, states + i * parts * state); });
    std::free(memory);
    return true;
  }
};

// Decoder<T>(a).run(), which kernels.cpp compiles for every dtype.
template <class T> bool attend(const Attention &a);

}  // namespace lz

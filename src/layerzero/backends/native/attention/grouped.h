// Runs the stretches of grouped_plan.h and merges their partial results.
#pragma once

#include "../products.h"
#include "grouped_plan.h"

namespace lz {

// Scores of ROWS rows and up to BLOCK keys; `dim` is a multiple of W.
template <int ROWS>
void grouped_scores(const float *query, int64_t query_row, const float *const *keys, int count, int64_t dim,
                    float *scores) {
  for (int j = 0; j < count; j += TILE) {
    const float *at[TILE];
    for (int i = 0; i < TILE; i++) at[i] = keys[std::min(j + i, count - 1)];    // past the end: any key
    vf sums[ROWS][TILE] = {};
    for (int64_t d = 0; d < dim; d += W) {
      vf k[TILE];
      each<TILE>([&](auto i) { k[i] = load(at[i] + d); });
      each<ROWS>([&](auto r) {
        vf q = load(query + r * query_row + d);
        each<TILE>([&](auto i) { sums[r][i] += q * k[i]; });
      });
    }
    store_sums<ROWS>(sums, scores + j);
  }
}

inline vf larger_or_nan(vf a, vf b) {
#if defined(__aarch64__)
  return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a < b ? b : a;
#endif
}

inline float largest_or_nan(vf v) {
#if defined(__aarch64__)
  return vmaxvq_f32((float32x4_t)v);
#else
  return largest(v);
#endif
}

// 2^x for x <= 127, to about one ulp; 0 where the true value is subnormal; NaN stays NaN. N vectors
// side by side, so that none waits for itself.
template <int N> INLINE inline void powers_of_two(vf (&x)[N]) {
  const float magic = 12582912.0f;              // 1.5 * 2^23: adding it rounds to an integer
  vf shifted[N], p[N];
  vi small[N];
  each<N>([&](auto i) { small[i] = x[i] < -126.0f, shifted[i] = x[i] + magic; });
  each<N>([&](auto i) { x[i] -= shifted[i] - magic; });
  each<N>([&](auto i) { p[i] = 1.535336188319500e-4f * x[i] + 1.339887440266574e-3f; });
  each<N>([&](auto i) { p[i] = p[i] * x[i] + 9.618437357674640e-3f; });
  each<N>([&](auto i) { p[i] = p[i] * x[i] + 5.550332471162809e-2f; });
  each<N>([&](auto i) { p[i] = p[i] * x[i] + 2.402264791363012e-1f; });
  each<N>([&](auto i) { p[i] = p[i] * x[i] + 6.931472028550421e-1f; });
  each<N>([&](auto i) { p[i] = p[i] * x[i] + 1.0f; });
  each<N>([&](auto i) {
    x[i] = bits_to_float((float_to_bits(p[i]) + (float_to_bits(shifted[i]) << 23)) & ~(vu)small[i]);
  });
}

// softmax_step for ROWS rows that see all of BLOCK keys, with a positive scale: no mask, and one
// pass less. The maxima are of scaled scores, as there.
template <int ROWS> void softmax_all(float *scores, float scale, float *const *stats, float *rescale) {
  constexpr float LOG2E = 1.44269504088896341f;
  constexpr int N = std::min(4, BLOCK / W);
  static_assert(ROWS <= W);
  vf bases[ROWS], totals[ROWS];
  alignas(64) float steps[W] = {};
  for (int r = 0; r < ROWS; r++) {
    const float *own = scores + r * BLOCK;
    vf top[N];
    each<N>([&](auto i) { top[i] = load(own + i * W); });
    for (int j = N * W; j < BLOCK; j += N * W)
      each<N>([&](auto i) { top[i] = larger_or_nan(top[i], load(own + j + i * W)); });
    each<N - 1>([&](auto i) { top[0] = larger_or_nan(top[0], top[i + 1]); });
    const float was = stats[r][0], now = std::max(was, largest_or_nan(top[0]) * scale);
    const float base = now == -INFINITY ? 0.0f : now * LOG2E;
    bases[r] = all(base), stats[r][0] = now, steps[r] = was * LOG2E - base;
  }
  vf step[1] = {load(steps)};
  powers_of_two(step);
  for (int r = 0; r < ROWS; r++) rescale[r] = step[0][r];
  for (int r = 0; r < ROWS; r++) {
    vf sums[N] = {};
    for (int j = 0; j < BLOCK; j += N * W) {
      vf x[N];
      each<N>([&](auto i) { x[i] = load(scores + r * BLOCK + j + i * W) * (scale * LOG2E) - bases[r]; });
      powers_of_two(x);
      each<N>([&](auto i) { sums[i] += x[i], store(scores + r * BLOCK + j + i * W, x[i]); });
    }
    each<N - 1>([&](auto i) { sums[0] += sums[i + 1]; });
    totals[r] = sums[0];
  }
  for (int r = 0; r < ROWS; r++) stats[r][1] = stats[r][1] * rescale[r] + sum(totals[r]);
}

// weighted[r] = weighted[r] * rescale[r] + sum over j of weights[r][j] * values[j], for N vectors
// from column d on; the weights past `count` are zero.
template <int ROWS, int N>
void grouped_columns(const float *const *values, int count, int64_t d, const float *weights, const float *rescale,
                     float *weighted, int64_t weighted_row) {
  vf sums[ROWS][N];
  each<ROWS>([&](auto r) {
    each<N>([&](auto n) { sums[r][n] = load(weighted + r * weighted_row + d + n * W) * rescale[r]; });
  });
#if defined(__aarch64__)
  for (int j = 0; j < count; j += 4) {
    float32x4_t w[ROWS];
    each<ROWS>([&](auto r) { w[r] = vld1q_f32(weights + r * BLOCK + j); });
    each<4>([&](auto i) {
      const float *at = values[std::min(j + int(i), count - 1)] + d;
      vf v[N];
      each<N>([&](auto n) { v[n] = load(at + n * W); });
      each<ROWS>([&](auto r) {
        each<N>([&](auto n) {
          sums[r][n] = (vf)vfmaq_laneq_f32((float32x4_t)sums[r][n], (float32x4_t)v[n], w[r],
                                             decltype(i)::value);
        });
      });
    });
  }
#else
  for (int j = 0; j < count; j++) {
    vf v[N];
    each<N>([&](auto n) { v[n] = load(values[j] + d + n * W); });
    each<ROWS>([&](auto r) { each<N>([&](auto n) { sums[r][n] += weights[r * BLOCK + j] * v[n]; }); });
  }
#endif
  each<ROWS>([&](auto r) { each<N>([&](auto n) { store(weighted + r * weighted_row + d + n * W, sums[r][n]); }); });
}

template <class T> struct GroupedAttention {
  using U = Unit<T>;
  const Grouped &a;
  const Plan &plan;
  int64_t group = a.heads / a.kv_heads;
  int64_t query_row = rounded_up(a.head_dim, U::SIZE), out_row = rounded_up(a.head_dim_v, U::SIZE);
  int64_t state_row = out_row + W;              // weighted values, maximum score, sum
  bool in_place = std::is_same<T, float>::value && a.head_dim % W == 0 && a.head_dim_v % W == 0;

  struct Row { int64_t from, to; };             // the keys of the stretch that it sees

  template <int ROWS>
  void block(const float *query, const Row *rows, int64_t at, int count, const float *const *keys,
             const float *const *values, float *state) const {
    alignas(64) float scores[ROWS * BLOCK];
    float rescale[ROWS];
    int from[ROWS], to[ROWS], seen = 0;
    for (int r = 0; r < ROWS; r++) {
      from[r] = int(std::clamp<int64_t>(rows[r].from - at, 0, count));
      to[r] = int(std::clamp<int64_t>(rows[r].to - at, from[r], count));
      seen += to[r] - from[r];
    }
    if (!seen) return;
    grouped_scores<ROWS>(query, query_row, keys, count, query_row, scores);
    float *stats[ROWS];
    for (int r = 0; r < ROWS; r++) stats[r] = state + r * state_row + out_row;
    if (seen == ROWS * BLOCK && a.softcap == 0.0f && a.scale > 0.0f)
      softmax_all<ROWS>(scores, a.scale, stats, rescale);
    else
      for (int r = 0; r < ROWS; r++)
        rescale[r] = softmax_step(scores + r * BLOCK, from[r], to[r], count, a.scale, a.softcap, stats[r],
                                  stats[r] + 1);
    int64_t d = 0;
    for (; d + 4 * W <= out_row; d += 4 * W)
      grouped_columns<ROWS, 4>(values, count, d, scores, rescale, state, state_row);
    for (; d < out_row; d += W) grouped_columns<ROWS, 1>(values, count, d, scores, rescale, state, state_row);
  }

  // `query`, `rows`: for the rows of a stretch. `panel`: for a block of keys and values.
  void run_stretch(const Stretch &s, int64_t head, float *state, float *query, Row *rows, float *panel) const {
    int64_t r = 0;
    for (int64_t m = 0; m < s.members; m++) {
      const Member &member = plan.members[s.first_member + m];
      const Item &item = plan.items[member.item];
      for (int64_t i = 0; i < item.count * group; i++, r++) {
        const int64_t diagonal = item.diagonal + i / group;
        widen((const T *)a.query + (item.first + i / group) * a.q_token + (head * group + i % group) * a.q_head,
              a.head_dim, query + r * query_row);
        rows[r] = {a.left < 0 ? 0 : diagonal - a.left - member.key,
                   std::min(item.keys, a.right < 0 ? item.keys : diagonal + a.right + 1) - member.key};
        float *own = state + r * state_row;
        std::memset(own, 0, state_row * sizeof(float));
        own[out_row] = -INFINITY;
      }
    }
    const T *key = (const T *)a.key + head * a.k_head, *value = (const T *)a.value + head * a.v_head;
    const Piece *piece = plan.pieces.data() + s.first_piece;
    int64_t used = 0;                           // keys of the piece
    struct Places { const T *keys[BLOCK], *values[BLOCK]; int count = 0; } places[2];
    auto find = [&](Places &p, int64_t at) {
      p.count = int(std::clamp<int64_t>(s.keys - at, 0, BLOCK));
      for (int j = 0; j < p.count; j++, used++) {
        if (used == piece->count) piece++, used = 0;
        p.keys[j] = key + piece->key + used * a.k_token, p.values[j] = value + piece->value + used * a.v_token;
      }
    };
    find(places[0], 0);
    for (int64_t at = 0; at < s.keys; at += BLOCK) {
      const Places &now = places[at / BLOCK % 2];
      Places &next = places[(at / BLOCK + 1) % 2];
      find(next, at + BLOCK);
      const float *keys[BLOCK], *values[BLOCK];
      for (int j = 0; j < now.count; j++) {
        float *to = panel + j * (query_row + out_row);
        keys[j] = in_place ? (const float *)now.keys[j] : to;
        values[j] = in_place ? (const float *)now.values[j] : to + query_row;
        if (!in_place) widen(now.keys[j], a.head_dim, to), widen(now.values[j], a.head_dim_v, to + query_row);
      }
      int fetched = 0;                          // keys of the next block: some with each few rows
      for (int64_t row = 0; row < s.rows; row += TILE) {
        const int to = int(next.count * std::min(row + TILE, s.rows) / s.rows);
        for (; fetched < to; fetched++)
          prefetch(next.keys[fetched], a.head_dim), prefetch(next.values[fetched], a.head_dim_v);
        const float *q = query + row * query_row;
        float *own = state + row * state_row;
        switch (std::min<int64_t>(s.rows - row, TILE)) {
          case 4: block<4>(q, rows + row, at, now.count, keys, values, own); break;
          case 3: block<3>(q, rows + row, at, now.count, keys, values, own); break;
          case 2: block<2>(q, rows + row, at, now.count, keys, values, own); break;
          default: block<1>(q, rows + row, at, now.count, keys, values, own);
        }
      }
    }
  }

  static void prefetch(const T *row, int64_t dim) {
    for (int64_t b = 0; b < int64_t(dim * sizeof(T)); b += 64) __builtin_prefetch((const char *)row + b, 0, 3);
  }

  // Merges partial results of one row and stores it; without any it sees no key.
  void finish(int64_t token, int64_t head, float *const *parts, int64_t count, float *merged) const {
    float top = -INFINITY, total = 0.0f;
    for (int64_t p = 0; p < count; p++) top = std::max(top, parts[p][out_row]);
    const float base = top == -INFINITY ? 0.0f : top;
    std::memset(merged, 0, out_row * sizeof(float));
    for (int64_t p = 0; p < count; p++) {
      const float share = std::exp(parts[p][out_row] - base);
      total += parts[p][out_row + 1] * share;
      for (int64_t d = 0; d < out_row; d += W) store(merged + d, load(merged + d) + load(parts[p] + d) * share);
    }
    // A sum of 0 is a row that sees no key; NaN is not.
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    T *out = (T *)a.out + (token * a.heads + head) * a.head_dim_v;
    for (int64_t d = 0; d < a.head_dim_v; d += U::SIZE) {
      vf some[U::VECTORS];
      for (int u = 0; u < U::VECTORS; u++) some[u] = load(merged + d + u * W) * inverse;
      T unit[U::SIZE];
      U::put(unit, some);
      std::memcpy(out + d, unit, std::min<int64_t>(U::SIZE, a.head_dim_v - d) * sizeof(T));
    }
    if (a.has_lse) a.lse[token * a.heads + head] = total == 0.0f ? -INFINITY : top + std::log(total);
  }

  void finish_item(const Item &item, int64_t head, float *const *parts, int64_t count, float *merged) const {
    std::vector<float *> rows(parts, parts + count);
    for (int64_t i = 0; i < item.count * group; i++) {
      finish(item.first + i / group, head * group + i % group, rows.data(), count, merged);
      for (float *&row : rows) row += state_row;
    }
  }

  // `stretches` get the place of their partial results, most work first.
  static bool run(const Grouped &a, Plan &plan) {
    GroupedAttention g{a, plan};
    std::vector<Stretch> &stretches = plan.stretches;
    std::stable_sort(stretches.begin(), stretches.end(),
                     [](auto &x, auto &y) { return x.keys * x.rows > y.keys * y.rows; });
    // The parts of each item: `first[i]` to `first[i + 1]` of `parts`, as rows of all partial results.
    std::vector<int64_t> first(plan.items.size() + 2, 0);
    int64_t states = 0, most_rows = 1, work = 0;
    for (Stretch &s : stretches) {
      s.state = states;
      if (!s.alone) states += s.rows * a.kv_heads;
      most_rows = std::max(most_rows, s.rows), work += s.rows * s.keys;
      for (int64_t m = 0; m < s.members; m++) first[plan.members[s.first_member + m].item + 2]++;
    }
    std::partial_sum(first.begin(), first.end(), first.begin());
    struct Part { int64_t stretch, row; };
    std::vector<Part> parts(first.back());
    for (size_t i = 0; i < stretches.size(); i++)
      for (int64_t m = 0, row = 0; m < stretches[i].members; m++) {
        const int64_t item = plan.members[stretches[i].first_member + m].item;
        parts[first[item + 1]++] = {int64_t(i), row};
        row += plan.items[item].count * g.group;
      }
    int64_t most_parts = 1;                     // an item may be in a stretch twice: chunks may overlap
    for (size_t i = 0; i < plan.items.size(); i++) most_parts = std::max(most_parts, first[i + 1] - first[i]);
    std::vector<char> covered(a.tokens, 0);
    for (const Item &i : plan.items) std::fill_n(covered.begin() + i.first, i.count, 1);

    const int threads = work * a.kv_heads * (a.head_dim + a.head_dim_v) < 65536 ? 1 : a.threads;
    const int64_t state = states * g.state_row;
    // of a thread: queries and, for a stretch alone, partial results; a panel of keys and values; a merged row
    const int64_t own = rounded_up(most_rows * (g.query_row + g.state_row) + BLOCK * (g.query_row + g.out_row)
                                   + g.out_row, 16);
    float *memory = (float *)std::aligned_alloc(64, (rounded_up(state, 16) + threads * own) * sizeof(float));
    if (!memory) return false;
    std::vector<Row> all_rows(threads * most_rows);
    std::vector<float *> all_found(threads * most_parts);
    // What a thread has of its own.
    struct Own {
      float *query, *local, *panel, *merged;
      Row *rows;
      float **found;
    };
    auto own_of = [&](int thread) {
      float *query = memory + rounded_up(state, 16) + thread * own, *local = query + most_rows * g.query_row;
      float *panel = local + most_rows * g.state_row, *merged = panel + BLOCK * (g.query_row + g.out_row);
      return Own{query, local, panel, merged, all_rows.data() + thread * most_rows, all_found.data() + thread * most_parts};
    };
    share(threads, int64_t(stretches.size()) * a.kv_heads, [&](int64_t i, int thread) {
      const Own own = own_of(thread);
      const Stretch &s = stretches[i / a.kv_heads];
      const int64_t head = i % a.kv_heads;
      float *to = s.alone ? own.local : memory + (s.state + head * s.rows) * g.state_row;
      g.run_stretch(s, head, to, own.query, own.rows, own.panel);
      if (s.alone) g.finish_item(plan.items[plan.members[s.first_member].item], head, &to, 1, own.merged);
    });
    share(threads, int64_t(plan.items.size()) * a.kv_heads, [&](int64_t i, int thread) {
      const Own own = own_of(thread);
      const int64_t item = i / a.kv_heads, head = i % a.kv_heads, count = first[item + 1] - first[item];
      if (count && stretches[parts[first[item]].stretch].alone) return;
      for (int64_t p = 0; p < count; p++) {
        const Part &part = parts[first[item] + p];
        const Stretch &s = stretches[part.stretch];
        own.found[p] = memory + (s.state + head * s.rows + part.row) * g.state_row;
      }
      g.finish_item(plan.items[item], head, own.found, count, own.merged);
    });
    share(threads, a.tokens, [&](int64_t token, int thread) {
      if (covered[token]) return;
      for (int64_t head = 0; head < a.heads; head++) g.finish(token, head, nullptr, 0, own_of(thread).merged);
    });
    std::free(memory);
    return true;
  }
};

}  // namespace lz

// Products for more rows: codes are decoded once into a panel that stays in the cache, one byte
// each, and multiplied in tiles of TILE rows of x by GROUPS groups of R rows of the weight.
#pragma once

#include "gemv.h"

namespace lz::quant {

// A block of R rows, decoded. The sums are those of gemv.h to the bit: of integers, so that their
// order does not matter, then of floats in the same order.
template <class S, Format F> struct alignas(16) Decoded {
  static constexpr int PARTS = F == Q6_K ? 16 : super_blocks(F) ? 8 : 0;
  uint8_t codes[block_size(F) / 4][4 * S::R];
  float d[S::R];
  [[no_unique_address]] If<has_min(F), float[S::R]> m;
  [[no_unique_address]] If<PARTS != 0, int32_t[PARTS ? PARTS : 1][S::R]> scales;
  // Lane vectors whose products with sums of x are needed.
  [[no_unique_address]] If<F == Q4_K || F == Q5_K, uint8_t[2][4 * S::R]> mins;
  [[no_unique_address]] If<F == Q6_K && !S::SIGNED, uint8_t[4][4 * S::R]> scale_bytes;
};

// What decoding adds to codes, where products of signed bytes are to be had: then sums need no correction.
template <class S, Format F>
constexpr int SHIFT = S::SIGNED ? -zero_point(F) - (has_fifth_bit(F) ? S::FIFTH : 0)
    : !S::TILES ? 0 : F == Q8_0 ? -128 : -zero_point(F);
template <class S, Format F> constexpr bool CORRECTED = !S::SIGNED && OFFSET<S, F> != 0;

// Decodes a block of a group into to[0], and the second half of the group into to[step].
template <class S, Format F> FLATTEN void decode(const Weight<S, F> &w, Decoded<S, F> *to, int64_t step) {
  using B = typename S::B;
  constexpr int R = S::R, H = HALVES<S, F>;
  auto put = [&](int k, B b, int half = 0) {
    S::store(to[half * step].codes[k / 4], SHIFT<S, F> ? S::add_bytes(b, SHIFT<S, F>) : b);
  };
  for (int h = 0; h < H; h++) {
    S::store_f(to[h * step].d, S::halves(w.d + h * R));
    if constexpr (has_min(F)) S::store_f(to[h * step].m, S::halves(w.m + h * R));
  }
  if constexpr (H == 2) {
    const uint8_t *codes = (const uint8_t *)w.codes;
    for (int k = 0; k < block_size(F); k += 4) {
      const B both = S::add_bytes(S::load(codes + k * R), 128);
      put(k, S::low4(both)), put(k, S::high4(both), 1);
    }
  } else if constexpr (F == Q8_0) {
    each<8>([&](auto v) { put(4 * v, S::load(w.codes[v])); });
  } else if constexpr (!super_blocks(F)) {
    B fifth = {};
    if constexpr (has_fifth_bit(F)) fifth = S::load(w.high);
    each<4>([&](auto v) {
      B low, high;
      nibbles<S, F, v>(w.codes[0], fifth, low, high);
      put(4 * v, low), put(16 + 4 * v, high);
    });
  } else {
    for (int u = 0; u < 8; u++) {
      if constexpr (F == Q6_K) {
        each<2>([&](auto h) {
          B codes[4];
          S::six(S::load(w.codes[u][2 * h]), S::load(w.codes[u][2 * h + 1]), S::load(w.high[u][h]), codes);
          each<4>([&](auto i) { put(32 * u + 8 * h + i / 2 * 4 + i % 2 * 16, codes[i]); });
        });
      } else {
        B fifth = {};
        if constexpr (F == Q5_K) fifth = S::load(w.high[u]);
        each<4>([&](auto v) {
          B low, high;
          nibbles<S, F, v>(w.codes[u][0], fifth, low, high);
          put(32 * u + 4 * v, low), put(32 * u + 16 + 4 * v, high);
        });
      }
    }
  }
  if constexpr (super_blocks(F)) {
    each<Decoded<S, F>::PARTS>([&](auto i) {
      for (int h = 0; h < H; h++) {
        const B bytes = S::load(w.scales[i / 4] + 4 * R * h);
        if constexpr (F == Q6_K) S::store_i(to[h * step].scales[i], S::template scale_byte<i % 4>(bytes));
        else S::store_i(to[h * step].scales[i], S::template unsigned_byte<i % 4>(bytes));
      }
    });
    if constexpr (F != Q6_K)
      for (int i = 0; i < 2 * H; i++) std::memcpy(to[i % H * step].mins[i / H], w.mins[i / H] + i % H * 4 * R, 4 * R);
    else if constexpr (!S::SIGNED) std::memcpy(to->scale_bytes, w.scales, sizeof to->scale_bytes);
  }
  if constexpr (S::MATRIX)
    for (int h = 0; h < H; h++)
      for (int i = 0; i < block_size(F) / 4; i += 2) S::pair_rows(to[h * step].codes[i]);
}

// Adds the products of PART codes from k on of M rows of x, x_step apart, with G groups: those of two rows of each
// at a time, the last row of x twice if it has no other.
template <class S, Format F, int M, int G, int PART>
INLINE inline void add_pairs_of_rows(const Decoded<S, F> *const *w, const int8_t *x, int64_t x_step, int k,
                                     typename S::I (&sums)[M][G]) {
  constexpr int P = (M + 1) / 2;
  typename S::I tiles[P][G][2];
  each<P * G * 2>([&](auto i) { tiles[i / (2 * G)][i / 2 % G][i % 2] = S::nothing(); });
  each<PART / 16>([&](auto h) {
    typename S::X xs[P][2];
    each<P>([&](auto p) {
      const int8_t *at = x + 2 * p * x_step + k + 16 * h;
      const typename S::X a = S::load_x(at), b = S::load_x(at + (2 * p + 1 < M ? x_step : 0));
      xs[p][0] = S::template pair_x<0>(a, b), xs[p][1] = S::template pair_x<1>(a, b);
    });
    each<G * 4>([&](auto i) {
      constexpr int g = i / 4, v = i / 2 % 2, r = i % 2;
      const typename S::B codes = S::load(w[g]->codes[k / 4 + 4 * h + 2 * v + r]);
      each<P>([&](auto p) { tiles[p][g][r] = S::multiply_pairs(tiles[p][g][r], xs[p][v], codes); });
    });
  });
  each<M * G>([&](auto i) {
    constexpr int m = i / G, g = i % G;
    sums[m][g] = S::add(sums[m][g], S::template row_sums<m % 2>(tiles[m / 2][g][0], tiles[m / 2][g][1]));
  });
}

// The same with dot products.
template <class S, Format F, int M, int G, int PART>
INLINE inline void add_products(const Decoded<S, F> *const *w, const int8_t *x, int64_t x_step, int k, typename S::I (&sums)[M][G]) {
  if constexpr (S::MATRIX) return add_pairs_of_rows<S, F, M, G, PART>(w, x, x_step, k, sums);
  each<PART / 16>([&](auto h) {
    typename S::X xs[M];
    each<M>([&](auto m) { xs[m] = S::load_x(x + m * x_step + k + 16 * h); });
    each<4>([&](auto v) {
      each<G>([&](auto g) {
        const typename S::B codes = S::load(w[g]->codes[k / 4 + 4 * h + v]);
        each<M>([&](auto m) {
          if constexpr (F == Q8_0) sums[m][g] = S::template dot_wide<v>(sums[m][g], codes, xs[m]);
          else sums[m][g] = S::template dot<v>(sums[m][g], codes, xs[m]);
        });
      });
    });
  });
}

// Scheduled before registers are allocated, sums are copied on the pipes of the dot products (GCC 12).
#if defined(__aarch64__)
#define UNSCHEDULED __attribute__((optimize("no-schedule-insns")))
#else
#define UNSCHEDULED
#endif

// Adds the products of `blocks` blocks of G groups, `step` blocks apart, beginning with block `first`
// of rows row .. row + M - 1 of x, to `results`, which stay in memory unless the ISA keeps sums.
template <class S, Format F, int M, int G>
FLATTEN UNSCHEDULED void add_blocks(const Decoded<S, F> *w, int64_t step, const Activations &a, int64_t row, int64_t first,
                                    int64_t blocks, float *__restrict results) {
  const int64_t d_step = a.row_blocks;
  const int8_t *x = a.codes_at(row, first * 32);
  const float *d = a.d + row * d_step + first, *s = a.s + row * d_step + first;
  const int32_t *x_sums = a.sums + row * a.row_sums + first * S::COPIES;
  const Decoded<S, F> *ws[G];
  each<G>([&](auto g) { ws[g] = w + g * step; });
  typename S::F f[M][G];
  if constexpr (S::KEEPS_SUMS) each<M * G>([&](auto i) { f[i / G][i % G] = S::load_f(results + i * S::R); });
  for (int64_t b = 0; b < blocks; b++) {
    typename S::I sums[M][G];
    each<M * G>([&](auto i) {
      sums[i / G][i % G] = CORRECTED<S, F> ? S::copies(x_sums + i / G * a.row_sums) : S::small();
    });
    add_products<S, F, M, G, 32>(ws, x, a.row_codes, 0, sums);
    each<G>([&](auto g) {
      const typename S::F scale = S::load_f(ws[g]->d);
      typename S::F min;
      if constexpr (has_min(F)) min = S::load_f(ws[g]->m);
      each<M>([&](auto m) {
        float *to = results + (m * G + g) * S::R;
        if constexpr (!S::KEEPS_SUMS) f[m][g] = S::load_f(to);
        f[m][g] = S::fma(f[m][g], S::small_to_float(sums[m][g]), S::times(scale, d[m * d_step]));
        if constexpr (has_min(F)) f[m][g] = S::fma(f[m][g], min, S::splat_f(s[m * d_step]));
        if constexpr (!S::KEEPS_SUMS) S::store_f(to, f[m][g]);
      });
    });
    x += 32, d++, s++, x_sums += S::COPIES;
    each<G>([&](auto g) { ws[g]++; });
  }
  if constexpr (S::KEEPS_SUMS) each<M * G>([&](auto i) { S::store_f(results + i * S::R, f[i / G][i % G]); });
}

// The same for super-blocks, of whose integer sums one is kept, or in memory, too.
template <class S, Format F, int M, int G>
FLATTEN void add_super_blocks(const Decoded<S, F> *w, int64_t step, const Activations &a, int64_t row, int64_t first,
                              int64_t blocks, float *__restrict results) {
  using I = typename S::I;
  constexpr int PART = F == Q6_K ? 16 : 32, SUMS = (F == Q6_K ? 1 : 8) * S::COPIES;
  const int64_t d_step = a.row_blocks;
  const int8_t *x = a.codes_at(row, first * 256), *split = a.split + row * a.row_split + first * SPLIT<F>;
  const float *d = a.d + row * d_step + first;
  const int32_t *x_sums = a.sums + row * a.row_sums + first * SUMS;
  const Decoded<S, F> *ws[G];
  each<G>([&](auto g) { ws[g] = w + g * step; });
  for (int64_t b = 0; b < blocks; b++) {
    alignas(64) int32_t total[M][G][S::R];
    I kept[M][G];
    if constexpr (S::KEEPS_SUMS) each<M * G>([&](auto i) { kept[i / G][i % G] = S::nothing(); });
    for (int i = 0; i < 256 / PART; i++) {
      I sums[M][G];
      each<M * G>([&](auto j) {
        constexpr bool corrected = CORRECTED<S, F> && F == Q5_K;
        sums[j / G][j % G] = corrected ? S::copies(x_sums + j / G * a.row_sums + i * S::COPIES) : S::nothing();
      });
      add_products<S, F, M, G, PART>(ws, x, a.row_codes, PART * i, sums);
      each<G>([&](auto g) {
        const I scale = S::load_i(ws[g]->scales[i]);
        each<M>([&](auto m) {
          if constexpr (S::KEEPS_SUMS) kept[m][g] = S::mla(kept[m][g], sums[m][g], scale);
          else S::store_i(total[m][g], S::mla(i ? S::load_i(total[m][g]) : S::nothing(), sums[m][g], scale));
        });
      });
    }
    each<G>([&](auto g) {
      const typename S::F scale = S::load_f(ws[g]->d);
      each<M>([&](auto m) {
        I all = S::KEEPS_SUMS ? kept[m][g] : S::load_i(total[m][g]);
        const int8_t *own = split + m * a.row_split;
        if constexpr (F == Q6_K && !S::SIGNED) {
          const I zeros = S::add(times_sums<S, 16>(S::nothing(), ws[g]->scale_bytes[0], own), S::copies(x_sums + m * a.row_sums));
          all = S::sub(all, S::template shl<5>(zeros));
        }
        float *to = results + (m * G + g) * S::R;
        typename S::F f = S::fma(S::load_f(to), S::to_float(all), S::times(scale, d[m * d_step]));
        if constexpr (has_min(F))
          f = S::fms(f, S::small_to_float(times_sums<S, 8>(S::small(), ws[g]->mins[0], own)),
                     S::times(S::load_f(ws[g]->m), d[m * d_step]));
        S::store_f(to, f);
      });
    });
    x += 256, d++, x_sums += SUMS, split += SPLIT<F>;
    each<G>([&](auto g) { ws[g]++; });
  }
}

// The same for any number of rows; sums: (rows, GROUPS, R).
template <class S, Format F>
void add_rows(const Decoded<S, F> *w, int64_t step, const Activations &a, int64_t row, int64_t rows, int64_t first,
              int64_t blocks, float *sums) {
  constexpr int G = S::GROUPS;
  auto tile = [&](auto m) {
    for (; rows >= m; rows -= m, row += m, sums += m * G * S::R) {
      if constexpr (super_blocks(F)) add_super_blocks<S, F, m, G>(w, step, a, row, first, blocks, sums);
      else add_blocks<S, F, m, G>(w, step, a, row, first, blocks, sums);
    }
  };
  if constexpr (S::TILE > 1) tile(std::integral_constant<int, S::TILE>{}), tile(std::integral_constant<int, 2>{});
  tile(std::integral_constant<int, 1>{});
}

}  // namespace lz::quant

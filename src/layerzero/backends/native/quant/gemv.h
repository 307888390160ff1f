// Products of R rows of packed weights with M rows of activations, decoded in registers.
#pragma once

#include "activations.h"

// Inlines every lambda, so that arrays of vectors stay in registers.
#define FLATTEN __attribute__((flatten))

namespace lz::quant {

// The codes of lane vector `v` of 32: `low` of k = 4 v, `high` of k = 16 + 4 v.
template <class S, Format F, int v, class B = typename S::B>
INLINE inline void nibbles(const uint8_t *codes, B fifth, B &low, B &high) {
  const typename S::B q = S::load(codes + 4 * S::R * v);
  if constexpr (has_fifth_bit(F)) low = S::template low5<v>(q, fifth), high = S::template high5<v>(q, fifth);
  else low = S::low4(q), high = S::high4(q);
}

// Adds 32 products: of `codes` with x[m].
template <class S, Format F, int M>
INLINE inline void add_32(const uint8_t *codes, const uint8_t *fifth, const int8_t *const *x, int64_t k, typename S::I *sums) {
  typename S::X first[M], second[M];
  each<M>([&](auto m) { first[m] = S::load_x(x[m] + k), second[m] = S::load_x(x[m] + k + 16); });
  if constexpr (F == Q8_0) {
    each<4>([&](auto v) {
      const typename S::B low = S::load(codes + 4 * S::R * v), high = S::load(codes + 4 * S::R * (4 + v));
      each<M>([&](auto m) { sums[m] = S::template dot_wide<v>(sums[m], low, first[m]); });
      each<M>([&](auto m) { sums[m] = S::template dot_wide<v>(sums[m], high, second[m]); });
    });
  } else {
    typename S::B bits = {};
    if constexpr (has_fifth_bit(F)) bits = S::load(fifth);
    each<4>([&](auto v) {
      typename S::B low, high;
      nibbles<S, F, v>(codes, bits, low, high);
      each<M>([&](auto m) { sums[m] = S::template dot<v>(sums[m], low, first[m]); });
      each<M>([&](auto m) { sums[m] = S::template dot<v>(sums[m], high, second[m]); });
    });
  }
}

template <class S, Format F, int M>
FLATTEN void multiply_blocks(const Packed<F, S::R> *w, int64_t blocks, const Activations &a, int64_t row, typename S::F *f) {
  const int8_t *x[M];
  each<M>([&](auto m) { x[m] = a.codes_at(row + m, 0); });
  const int32_t *sums = a.sums + row * a.row_sums;
  const float *d = a.d + row * a.row_blocks, *s = a.s + row * a.row_blocks;
  for (int64_t b = 0; b < blocks; b++, w++) {
    typename S::I total[M];
    each<M>([&](auto m) { total[m] = OFFSET<S, F> ? S::splat(sums[m * a.row_sums + b]) : S::small(); });
    const uint8_t *fifth = nullptr;
    if constexpr (has_fifth_bit(F)) fifth = w->high;
    add_32<S, F, M>(w->codes[0], fifth, x, 32 * b, total);
    const typename S::F scale = S::halves(w->d);
    each<M>([&](auto m) {
      f[m] = S::fma(f[m], S::small_to_float(total[m]), S::times(scale, d[m * a.row_blocks + b]));
    });
    if constexpr (has_min(F)) {
      const typename S::F min = S::halves(w->m);
      each<M>([&](auto m) { f[m] = S::fma(f[m], min, S::splat_f(s[m * a.row_blocks + b])); });
    }
  }
}

// Sums of COUNT sub-blocks' scales (lane vectors) times their sums of x.
template <class S, int COUNT>
INLINE inline typename S::I times_sums(const uint8_t (*scales)[4 * S::R], const int8_t *split) {
  typename S::I low = S::nothing(), high = S::nothing();
  each<COUNT / 4>([&](auto i) {
    const typename S::B one = S::load(scales[i]);
    low = S::template dot_wide<i % 4>(low, one, S::load_x(split));
    const typename S::X second = S::load_x(split + (COUNT == 16 ? 16 : 0));
    high = S::template dot_wide<(COUNT == 16 ? i : 2 + i)>(high, one, second);
  });
  return S::add(low, S::template shl<7>(high));
}

template <class S, Format F, int M>
FLATTEN void multiply_super_blocks(const Packed<F, S::R> *w, int64_t blocks, const Activations &a, int64_t row,
                                   typename S::F *f) {
  const int8_t *x[M];
  each<M>([&](auto m) { x[m] = a.codes_at(row + m, 0); });
  const float *d = a.d + row * a.row_blocks;
  for (int64_t b = 0; b < blocks; b++, w++) {
    typename S::I total[M];
    each<M>([&](auto m) { total[m] = S::nothing(); });
    if constexpr (F == Q6_K) {
      each<4>([&](auto j) {
        const typename S::B scales = S::load(w->scales[j]);
        each<2>([&](auto i) {
          constexpr int u = 2 * j + i;
          typename S::I sums[2][M];
          typename S::X xs[2][M];
          each<M>([&](auto m) {
            sums[0][m] = sums[1][m] = S::nothing();
            xs[0][m] = S::load_x(x[m] + 256 * b + 32 * u), xs[1][m] = S::load_x(x[m] + 256 * b + 32 * u + 16);
          });
          each<2>([&](auto h) {
            typename S::B codes[4];
            S::six(S::load(w->codes[u][2 * h]), S::load(w->codes[u][2 * h + 1]), S::load(w->high[u][h]), codes);
            each<2>([&](auto v) {
              each<M>([&](auto m) { sums[0][m] = S::template dot<2 * h + v>(sums[0][m], codes[2 * v], xs[0][m]); });
              each<M>([&](auto m) { sums[1][m] = S::template dot<2 * h + v>(sums[1][m], codes[2 * v + 1], xs[1][m]); });
            });
          });
          each<2>([&](auto half) {
            const typename S::I scale = S::template scale_byte<2 * i + half>(scales);
            each<M>([&](auto m) { total[m] = S::mla(total[m], sums[half][m], scale); });
          });
        });
      });
      const typename S::F scale = S::halves(w->d);
      each<M>([&](auto m) {
        const int64_t at = (row + m) * a.row_split + b * SPLIT<F>;
        typename S::I zeros = times_sums<S, 16>(w->scales, a.split + at);
        if (!S::SIGNED) zeros = S::add(zeros, S::splat(a.sums[(row + m) * a.row_sums + b]));
        total[m] = S::sub(total[m], S::template shl<5>(zeros));
        f[m] = S::fma(f[m], S::to_float(total[m]), S::times(scale, d[m * a.row_blocks + b]));
      });
    } else {
      each<2>([&](auto j) {
        const typename S::B scales = S::load(w->scales[j]);
        each<4>([&](auto i) {
          constexpr int u = 4 * j + i;
          typename S::I sums[M];
          each<M>([&](auto m) {
            sums[m] = OFFSET<S, F> ? S::splat(a.sums[(row + m) * a.row_sums + 8 * b + u]) : S::nothing();
          });
          const uint8_t *fifth = nullptr;
          if constexpr (F == Q5_K) fifth = w->high[u];
          add_32<S, F, M>(w->codes[u][0], fifth, x, 256 * b + 32 * u, sums);
          const typename S::I scale = S::template unsigned_byte<i>(scales);
          each<M>([&](auto m) { total[m] = S::mla(total[m], sums[m], scale); });
        });
      });
      const typename S::F scale = S::halves(w->d), min = S::halves(w->m);
      each<M>([&](auto m) {
        const int64_t at = (row + m) * a.row_split + b * SPLIT<F>;
        const float dx = d[m * a.row_blocks + b];
        f[m] = S::fma(f[m], S::to_float(total[m]), S::times(scale, dx));
        f[m] = S::fms(f[m], S::to_float(times_sums<S, 8>(w->mins, a.split + at)), S::times(min, dx));
      });
    }
  }
}

template <class S, Format F, int M>
void multiply(const Packed<F, S::R> *w, int64_t blocks, const Activations &a, int64_t row, typename S::F *f) {
  if constexpr (super_blocks(F)) multiply_super_blocks<S, F, M>(w, blocks, a, row, f);
  else multiply_blocks<S, F, M>(w, blocks, a, row, f);
}

}  // namespace lz::quant

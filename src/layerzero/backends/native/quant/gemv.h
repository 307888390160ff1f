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

// Adds 32 products with bytes of two rows: of the low nibbles to sums[0], of the bytes to sums[1].
template <class S, int M, class B = typename S::B>
INLINE inline void add_pairs(const B (&codes)[8], const int8_t *const *x, int64_t k, typename S::I (&sums)[2][M]) {
  each<2>([&](auto half) {
    typename S::X xs[M];
    each<M>([&](auto m) { xs[m] = S::load_x(x[m] + k + 16 * half); });
    each<4>([&](auto v) {
      const B both = codes[4 * half + v], low = S::low4(both);
      each<M>([&](auto m) { sums[0][m] = S::template dot<v>(sums[0][m], low, xs[m]); });
      each<M>([&](auto m) { sums[1][m] = S::template dot<v>(sums[1][m], both, xs[m]); });
    });
  });
}

// How far ahead of block b what comes next is fetched, in bytes: AHEAD of them are on their way, shared out among G groups
// that are read side by side. After the last block of a group comes the first of the same one of the next G.
template <class S, class W, int G> INLINE inline int64_t bytes_ahead(int64_t b, int64_t blocks) {
  constexpr int64_t AHEAD = S::AHEAD / G < int(sizeof(W)) ? 1 : S::AHEAD / G / int(sizeof(W));
  return (b + AHEAD < blocks ? AHEAD : AHEAD + (G - 1) * blocks) * int64_t(sizeof(W));
}

// Fetches BYTES from `p` on: what the processor fetches ahead by itself comes too late.
template <class S, int BYTES> INLINE inline void fetch_ahead(const void *p) {
  if constexpr (S::AHEAD > 0)
    each<(BYTES + 63) / 64>([&](auto i) { S::fetch((const char *)p + 64 * i); });
}

// Results of G groups, one after the other in memory, for row + m: for each group results[m], and results[M + m] for its
// second half.
template <class S, Format F, int M, int G>
FLATTEN void multiply_blocks(const Weight<S, F> *w, int64_t blocks, const Activations &a, int64_t row,
                             typename S::F *results) {
  constexpr int H = HALVES<S, F>;
  typename S::F f[G][H * M];                    // not in memory, where every block would store them
  each<G * H * M>([&](auto i) { f[i / (H * M)][i % (H * M)] = S::splat_f(0); });
  const int8_t *x[M];
  each<M>([&](auto m) { x[m] = a.codes_at(row + m, 0); });
  const int32_t *sums = a.sums + row * a.row_sums;
  const float *d = a.d + row * a.row_blocks, *s = a.s + row * a.row_blocks;
  for (int64_t b = 0; b < blocks; b++, w++) {
    const int64_t ahead = bytes_ahead<S, Weight<S, F>, G>(b, blocks);
    each<G>([&](auto g) {
      const Weight<S, F> *own = w + g * blocks;
      fetch_ahead<S, sizeof *own>((const char *)own + ahead);
      typename S::I total[H][M];
      each<M>([&](auto m) {
        total[H - 1][m] = OFFSET<S, F> ? S::copies(sums + m * a.row_sums + b * S::COPIES) : S::small();
        if constexpr (H == 2) total[0][m] = zero_point(F) ? S::copies(sums + m * a.row_sums + b * S::COPIES) : S::small();
      });
      const uint8_t *fifth = nullptr;
      if constexpr (has_fifth_bit(F)) fifth = own->high;
      if constexpr (H == 2) {
        typename S::B codes[8];
        each<8>([&](auto v) { codes[v] = S::load(own->codes[0] + 4 * S::R * v); });
        add_pairs<S, M>(codes, x, 32 * b, total);
      } else add_32<S, F, M>(own->codes[0], fifth, x, 32 * b, total[0]);
      each<H>([&](auto h) {                     // of the second half 16 times the sums
        const typename S::F scale = S::halves(own->d + h * S::R);
        each<M>([&](auto m) {
          typename S::F sum;
          if constexpr (h == 1) sum = S::small_difference(total[1][m], total[0][m]);
          else sum = S::small_to_float(total[0][m]);
          typename S::F &to = f[g][h * M + m];
          to = S::fma(to, sum, S::times(scale, d[m * a.row_blocks + b]));
        });
        if constexpr (has_min(F)) {
          const typename S::F min = S::halves(own->m + h * S::R);
          each<M>([&](auto m) {
            typename S::F &to = f[g][h * M + m];
            to = S::fma(to, min, S::splat_f((h ? 16 : 1) * s[m * a.row_blocks + b]));
          });
        }
      });
    });
  }
  // Exact: products of halves are never as small as float32's subnormal numbers.
  each<G * H * M>([&](auto i) {
    const typename S::F &one = f[i / (H * M)][i % (H * M)];
    results[i] = i % (H * M) < M ? one : S::times(one, 1 / 16.0f);
  });
}

// `low`, and sums of COUNT sub-blocks' scales (lane vectors, STEP bytes apart) times their sums of x.
template <class S, int COUNT, int STEP = 4 * S::R>
INLINE inline typename S::I times_sums(typename S::I low, const uint8_t *scales, const int8_t *split) {
  typename S::I high = S::nothing();
  each<COUNT / 4>([&](auto i) {
    const typename S::B one = S::load(scales + STEP * i);
    low = S::template dot_wide<i % 4>(low, one, S::load_x(split));
    const typename S::X second = S::load_x(split + (COUNT == 16 ? 16 : 0));
    high = S::template dot_wide<(COUNT == 16 ? i : 2 + i)>(high, one, second);
  });
  return S::add(low, S::template shl<7>(high));
}

template <class S, Format F, int M>
FLATTEN void multiply_super_blocks(const Weight<S, F> *w, int64_t blocks, const Activations &a, int64_t row,
                                   typename S::F *results) {
  constexpr int H = HALVES<S, F>, LANES = 4 * S::R, EIGHTH = sizeof(Weight<S, F>) / 8;
  typename S::F f[H * M];
  each<H * M>([&](auto i) { f[i] = S::splat_f(0); });
  const int8_t *x[M];
  each<M>([&](auto m) { x[m] = a.codes_at(row + m, 0); });
  const float *d = a.d + row * a.row_blocks;
  // For one row of x the codes of the next sub-block are loaded before those of this one are
  // multiplied: behind a full queue of dot products no load begins.
  constexpr bool EARLY = H == 2 && M == 1;
  typename S::B codes[2][8];
  if constexpr (EARLY) each<8>([&](auto v) { codes[0][v] = S::load_now(w->codes[0][0] + LANES * v); });
  for (int64_t b = 0; b < blocks; b++, w++) {
    typename S::I total[H][M];
    each<H * M>([&](auto i) { total[i / M][i % M] = S::nothing(); });
    if constexpr (F == Q6_K) {
      each<4>([&](auto j) {
        const typename S::B scales = S::load(w->scales[j]);
        each<2>([&](auto i) {
          constexpr int u = 2 * j + i;
          fetch_ahead<S, EIGHTH>((const char *)w + S::AHEAD + u * EIGHTH);
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
            each<M>([&](auto m) { total[0][m] = S::mla(total[0][m], sums[half][m], scale); });
          });
        });
      });
      const typename S::F scale = S::halves(w->d);
      each<M>([&](auto m) {
        const int64_t at = (row + m) * a.row_split + b * SPLIT<F>;
        typename S::I zeros = times_sums<S, 16>(S::nothing(), w->scales[0], a.split + at);
        if (!S::SIGNED) zeros = S::add(zeros, S::copies(a.sums + (row + m) * a.row_sums + b));
        total[0][m] = S::sub(total[0][m], S::template shl<5>(zeros));
        f[m] = S::fma(f[m], S::to_float(total[0][m]), S::times(scale, d[m * a.row_blocks + b]));
      });
    } else {
      each<2>([&](auto j) {
        typename S::B scales[H];
        each<H>([&](auto h) { scales[h] = S::load(w->scales[j] + LANES * h); });
        each<4>([&](auto i) {
          constexpr int u = 4 * j + i;
          fetch_ahead<S, EIGHTH>((const char *)w + S::AHEAD + u * EIGHTH);
          if constexpr (EARLY) {
            const uint8_t *next = u < 7 ? w->codes[(u + 1) % 8][0] : w[b + 1 < blocks].codes[0][0];
            each<8>([&](auto v) { codes[(u + 1) % 2][v] = S::load_now(next + LANES * v); });
          } else if constexpr (H == 2) {
            each<8>([&](auto v) { codes[u % 2][v] = S::load(w->codes[u][0] + LANES * v); });
          }
          typename S::I sums[H][M];
          each<M>([&](auto m) {
            sums[0][m] = S::nothing();
            if (OFFSET<S, F>) sums[H - 1][m] = S::copies(a.sums + (row + m) * a.row_sums + (8 * b + u) * S::COPIES);
          });
          const uint8_t *fifth = nullptr;
          if constexpr (F == Q5_K) fifth = w->high[u];
          if constexpr (H == 2) add_pairs<S, M>(codes[u % 2], x, 256 * b + 32 * u, sums);
          else add_32<S, F, M>(w->codes[u][0], fifth, x, 256 * b + 32 * u, sums[0]);
          each<H>([&](auto h) {
            const typename S::I scale = S::template unsigned_byte<i>(scales[h]);
            each<M>([&](auto m) {
              total[h][m] = S::mla(total[h][m], h ? S::sub(sums[h][m], sums[0][m]) : sums[0][m], scale);
            });
          });
        });
      });
      each<H>([&](auto h) {
        const typename S::F scale = S::halves(w->d + h * S::R), min = S::halves(w->m + h * S::R);
        each<M>([&](auto m) {
          const int64_t at = (row + m) * a.row_split + b * SPLIT<F>;
          const float dx = d[m * a.row_blocks + b];
          if constexpr (h == 1) total[1][m] = S::template shr<4>(total[1][m]);
          typename S::F &to = f[h * M + m];
          to = S::fma(to, S::to_float(total[h][m]), S::times(scale, dx));
          const typename S::I mins = times_sums<S, 8, H * LANES>(S::small(), w->mins[0] + LANES * h, a.split + at);
          to = S::fms(to, S::small_to_float(mins), S::times(min, dx));
        });
      });
    }
  }
  each<H * M>([&](auto i) { results[i] = f[i]; });
}

template <class S, Format F, int M, int G>
void multiply(const Weight<S, F> *w, int64_t blocks, const Activations &a, int64_t row, typename S::F *results) {
  if constexpr (super_blocks(F))
    each<G>([&](auto g) { multiply_super_blocks<S, F, M>(w + g * blocks, blocks, a, row, results + g * HALVES<S, F> * M); });
  else multiply_blocks<S, F, M, G>(w, blocks, a, row, results);
}

}  // namespace lz::quant

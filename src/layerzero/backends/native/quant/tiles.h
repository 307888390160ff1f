// Products for many rows by tiles of 16 x 16 sums: up to 16 rows of x by the 16 rows of a group, 32 or 64 codes at once.
// S adds to lane vectors of 16 rows the tile instructions (amx.h); a lane vector is a row of a tile of codes.
//
// Floats are computed as in gemm.h, of the same integers in the same order: the results have the same bits.
#pragma once

#include "gemm.h"

namespace lz::quant {

template <class S> struct TilesOf { using type = void; };      // S with tile instructions, where there are some

constexpr int64_t TILE_ROWS = 16;               // of x, at most
constexpr int64_t TILE_WIDTH = 512;             // codes of a row, decoded together: two groups stay in the L1 cache

// Scales of super-blocks are integers of some digits. Codes are multiplied by each digit of their scale before they are
// multiplied with x, so that a tile adds up a whole super-block: the digits are 0 to 7 of base 8, and for signed scales,
// with codes from -32 to 31, -3 to 3 of base 7. Products of codes and digits are bytes.
template <Format F> constexpr int DIGITS = F == Q6_K ? 3 : super_blocks(F) ? 2 : 1;
template <Format F> constexpr int TILE_DEPTH = super_blocks(F) ? 64 : 32;              // codes of a product
template <Format F> constexpr bool SIGNED_TILES = F != Q4_K && F != Q5_K;
// Groups multiplied together: a product of tiles takes long, and four sums at once keep the unit busy.
template <Format F> constexpr int TILE_GROUPS = DIGITS<F> == 2 ? 2 : 1;

template <class S, Format F> struct alignas(64) TileBlock {
  uint8_t codes[DIGITS<F>][block_size(F) / 4][4 * S::R];
  float d[S::R];
  [[no_unique_address]] If<has_min(F), float[S::R]> m;
  [[no_unique_address]] If<F == Q4_K || F == Q5_K, uint8_t[2][4 * S::R]> mins;
};

template <class S, Format F> FLATTEN void multiply_digits(const Decoded<S, F> &from, TileBlock<S, F> &to) {
  typedef int32_t Ints __attribute__((vector_size(4 * S::R)));
  typedef uint16_t Words __attribute__((vector_size(4 * S::R)));
  constexpr int PARTS = Decoded<S, F>::PARTS, VECTORS = 64 / PARTS;
  for (int i = 0; i < PARTS; i++) {
    Ints scale, digits[3];
    std::memcpy(&scale, from.scales[i], sizeof scale);
    if (F == Q6_K) {                            // 9363 / 2^16: 1 / 7, rounded to the nearest digit
      const Ints high = scale * 9363 + 32768 >> 16;
      digits[2] = high * 9363 + 32768 >> 16, digits[1] = high - 7 * digits[2], digits[0] = scale - 7 * high;
    } else {
      digits[0] = scale & 7, digits[1] = scale >> 3;
    }
    for (int v = i * VECTORS; v < (i + 1) * VECTORS; v++) {
      Words codes;                              // two to a word
      std::memcpy(&codes, from.codes[v], sizeof codes);
      each<DIGITS<F>>([&](auto p) {
        const Words factor = (Words)(digits[p] & 0xffff | digits[p] << 16);
        Words product = codes * factor;         // of unsigned bytes nothing is carried from one to the next
        if (F == Q6_K) product = product & 255 | (codes & 0xff00) * factor;
        std::memcpy(to.codes[p][v], &product, sizeof product);
      });
    }
  }
}

template <class S, Format F> void decode_tile(const Weight<S, F> &w, TileBlock<S, F> &to) {
  Decoded<S, F> decoded;
  decode<S, F>(w, &decoded, 0);
  if constexpr (super_blocks(F)) multiply_digits<S, F>(decoded, to);
  else std::memcpy(to.codes, decoded.codes, sizeof to.codes);
  std::memcpy(to.d, decoded.d, sizeof to.d);
  if constexpr (has_min(F)) std::memcpy(to.m, decoded.m, sizeof to.m);
  if constexpr (F == Q4_K || F == Q5_K) std::memcpy(to.mins, decoded.mins, sizeof to.mins);
}

// Tiles 0 to 3 hold sums, 4 and 5 x, 6 and 7 codes; the products of a block are begun before the sums of the one before
// are scaled.

// Adds the products of `blocks` blocks of a group, beginning with block `first` of rows row .. row + rows - 1 of x, to
// `results`, `width` apart. ROWS >= rows are scaled, and those beyond not stored.
template <class S, Format F, int ROWS>
FLATTEN void add_tile_blocks(const TileBlock<S, F> *w, const Activations &a, int64_t row, int64_t rows, int64_t first,
                             int64_t blocks, float *results, int64_t width) {
  alignas(64) int32_t sums[2][TILE_ROWS][S::R];
  const int8_t *x = a.codes_at(row, first * 32);
  const float *d = a.d + row * a.row_blocks + first, *s = a.s + row * a.row_blocks + first;
  auto multiply = [&](auto slot, int64_t b) {
    S::template tile_load<4 + slot>(x + 32 * b, a.row_codes), S::template tile_load<6 + slot>(w[b].codes, 4 * S::R);
    S::template tile_zero<slot>(), S::template tile_dot<slot, 4 + slot, 6 + slot, SIGNED_TILES<F>>();
    S::template tile_store<slot>(sums[slot], 4 * S::R);
  };
  typename S::F f[ROWS];
  each<ROWS>([&](auto m) { f[m] = S::load_f(results + m * width); });
  multiply(std::integral_constant<int, 0>{}, 0);
  for (int64_t b = 0; b < blocks; b++) {
    if (b + 1 < blocks && b % 2) multiply(std::integral_constant<int, 0>{}, b + 1);
    else if (b + 1 < blocks) multiply(std::integral_constant<int, 1>{}, b + 1);
    const typename S::F scale = S::load_f(w[b].d);
    typename S::F min;
    if constexpr (has_min(F)) min = S::load_f(w[b].m);
    each<ROWS>([&](auto m) {
      const int64_t at = m * a.row_blocks + b;
      f[m] = S::fma(f[m], S::to_float(S::load_i(sums[b % 2][m])), S::times(scale, d[at]));
      if constexpr (has_min(F)) f[m] = S::fma(f[m], min, S::splat_f(s[at]));
    });
  }
  each<ROWS>([&](auto m) { if (m < rows) S::store_f(results + m * width, f[m]); });
}

// The same for super-blocks of TILE_GROUPS groups, `step` blocks apart.
template <class S, Format F>
FLATTEN void add_tile_super_blocks(const TileBlock<S, F> *w, int64_t step, const Activations &a, int64_t row, int64_t rows,
                                   int64_t first, int64_t blocks, float *results, int64_t width) {
  constexpr int P = DIGITS<F>, G = TILE_GROUPS<F>;
  alignas(64) int32_t sums[2][G * P][TILE_ROWS][S::R];
  const int8_t *x = a.codes_at(row, first * 256), *split = a.split + row * a.row_split + first * SPLIT<F>;
  const float *d = a.d + row * a.row_blocks + first;
  auto scale_rows = [&](int64_t b, int64_t begin, int64_t end) {
    each<G>([&](auto g) {
      const TileBlock<S, F> &block = w[g * step + b];
      const typename S::F scale = S::load_f(block.d);
      for (int64_t m = begin; m < end; m++) {
        auto digit = [&](int p) { return S::load_i(sums[b % 2][g * P + p][m]); };
        auto seven = [&](typename S::I i) { return S::sub(S::template shl<3>(i), i); };
        typename S::I all;
        if constexpr (P == 2) all = S::add(digit(0), S::template shl<3>(digit(1)));
        else all = S::add(digit(0), seven(S::add(digit(1), seven(digit(2)))));
        const float dx = d[m * a.row_blocks + b];
        float *to = results + m * width + g * S::R;
        typename S::F f = S::fma(S::load_f(to), S::to_float(all), S::times(scale, dx));
        if constexpr (has_min(F)) {
          const int8_t *own = split + m * a.row_split + b * SPLIT<F>;
          f = S::fms(f, S::small_to_float(times_sums<S, 8>(S::small(), block.mins[0], own)),
                     S::times(S::load_f(block.m), dx));
        }
        S::store_f(to, f);
      }
    });
  };
  // A quarter of the sums of the block before is scaled after each quarter of the products.
  auto multiply = [&](int64_t b) {
    each<G * P>([&](auto c) { S::template tile_zero<c>(); });
    each<4>([&](auto k) {
      S::template tile_load<4 + k % 2>(x + 256 * b + 64 * k, a.row_codes);
      each<G * P>([&](auto c) {
        S::template tile_load<6 + c % 2>(w[c / P * step + b].codes[c % P][16 * k], 4 * S::R);
        S::template tile_dot<c, 4 + k % 2, 6 + c % 2, SIGNED_TILES<F>>();
      });
      if (b) scale_rows(b - 1, k * rows / 4, (k + 1) * rows / 4);
    });
    each<G * P>([&](auto c) { S::template tile_store<c>(sums[b % 2][c], 4 * S::R); });
  };
  for (int64_t b = 0; b < blocks; b++) multiply(b);
  scale_rows(blocks - 1, 0, rows);
}

// Adds the products of TILE_GROUPS groups with a tile of rows, as gemm.h's add_rows.
template <class S, Format F>
void add_tile(const TileBlock<S, F> *w, int64_t step, const Activations &a, int64_t row, int64_t rows, int64_t first,
              int64_t blocks, float *results, int64_t width) {
  if constexpr (super_blocks(F)) add_tile_super_blocks<S, F>(w, step, a, row, rows, first, blocks, results, width);
  else if (rows <= 8) add_tile_blocks<S, F, 8>(w, a, row, rows, first, blocks, results, width);
  else add_tile_blocks<S, F, 16>(w, a, row, rows, first, blocks, results, width);
}

}  // namespace lz::quant

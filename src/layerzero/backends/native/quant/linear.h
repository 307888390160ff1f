// Linear layers with ggml's weights: y = x W^T + bias, x rounded to bytes as ggml rounds it.
//
// Threads share out rows of the weight, and every result is computed by one thread in one order: it
// has the same bits for any number of threads and of rows.
#pragma once

#include <algorithm>

#include "portable.h"
#include "tiles.h"
// With vectors of 128 bits NEON does the same work.
#if defined(__ARM_FEATURE_SVE) && (__ARM_FEATURE_SVE_BITS == 256 || __ARM_FEATURE_SVE_BITS == 512)
#define LZ_SVE
#include "sve.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "neon.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "avx512.h"
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__linux__)
#include "amx.h"
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
#endif

namespace lz::quant {

#if defined(LZ_SVE)
using Isa = Sve;
constexpr const char *ISA = Sve::MATRIX ? "sve i8mm" : "sve";
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)
using Isa = NeonMatrix;
constexpr const char *ISA = "neon i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
using Isa = Neon;
constexpr const char *ISA = "neon dotprod";
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
using Isa = Avx512;
constexpr const char *ISA = "avx512 vnni";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
using Isa = Avx2;
constexpr const char *ISA = "avx2";
#else
using Isa = Portable;
constexpr const char *ISA = "portable";
#endif

template <class S = Isa> bool tiles_usable() {
  using T = typename TilesOf<S>::type;
  if constexpr (std::is_void_v<T>) return false;
  else return T::usable();
}

// Rows of x up to which codes are decoded in registers, for every four of them again.
constexpr int64_t few_rows_of(Format f) { return f == Q6_K ? 4 : 8; }
constexpr int64_t PANEL_ROWS = 32;              // of the weight, decoded together
constexpr int64_t TILE_PANEL_ROWS = 128;        // the same for tiles, at most
constexpr int64_t PANEL_WIDTH = 2048;           // codes of a row, decoded together: 64 KiB with the rows
// Rows of x from which tiles are used, where there are some: where they were faster than vectors on a Xeon.
constexpr int64_t tile_rows_of(Format f) { return super_blocks(f) ? 64 : 16; }
enum TileUse { NEVER, BY_ROWS, ALWAYS };

struct Linear {
  const void *x, *weight, *bias;
  void *out;
  bool has_bias;
  int64_t rows, inputs, outputs, x_row;         // x_row: elements from row to row
  int threads;
  // `count` elements of x from `at` on, and results of a row, its outputs first .. first + count - 1:
  // all that depends on the dtype, so that the kernels need not be compiled for each.
  void (*read)(const Linear &, int64_t at, int64_t count, float *to);
  void (*write)(const Linear &, int64_t row, int64_t first, int64_t count, const float *from);
  TileUse tiles = BY_ROWS;
};

template <class T> void read_elements(const Linear &q, int64_t at, int64_t count, float *to) {
  for (int64_t i = 0; i < count; i++) to[i] = to_float(((const T *)q.x)[at + i]);
}

template <class T> void write_results(const Linear &q, int64_t row, int64_t first, int64_t count, const float *from) {
  T *to = (T *)q.out + row * q.outputs + first;
  const T *bias = (const T *)q.bias + first;
  for (int64_t r = 0; r < count; r++) from_float(to + r, q.has_bias ? from[r] + to_float(bias[r]) : from[r]);
}

template <class S, Format F> constexpr int64_t GROUP = HALVES<S, F> * S::R;            // rows
template <class S, Format F> int64_t groups(int64_t outputs) { return (outputs + GROUP<S, F> - 1) / GROUP<S, F>; }

template <class S, Format F> int64_t packed_bytes(int64_t outputs, int64_t inputs) {
  return groups<S, F>(outputs) * (inputs / block_size(F)) * int64_t(sizeof(Weight<S, F>));
}

template <class S, Format F> void pack_all(const uint8_t *from, int64_t outputs, int64_t inputs, void *to, int threads) {
  const int64_t blocks = inputs / block_size(F), count = groups<S, F>(outputs);
  share(threads, count, [&](int64_t g, int) {
    pack<F, GROUP<S, F>>(from, outputs, blocks, S::SIGNED, HALVES<S, F> == 2, g, (Weight<S, F> *)to);
  });
}

// Rounds block i of all rows of x.
template <class S, Format F> void round_input(const Linear &q, const Activations &a, int64_t i) {
  constexpr int64_t SIZE = block_size(F);
  const int64_t row = i / (q.inputs / SIZE), b = i % (q.inputs / SIZE);
  alignas(64) float wide[SIZE];
  q.read(q, row * q.x_row + b * SIZE, SIZE, wide);
  round_block_at<S, F>(wide, a, row, b);
}

// Groups of the weight in a piece of work: those whose products with one row of x are computed side by side, unless
// threads would go without work.
template <class S, Format F> int64_t groups_at_once(const Linear &q) {
  return q.rows == 1 && groups<S, F>(q.outputs) >= 2 * S::streams(F) * q.threads ? S::streams(F) : 1;
}

template <class S, Format F> int64_t few_rows_pieces(const Linear &q) {
  const int64_t at_once = groups_at_once<S, F>(q);
  return (groups<S, F>(q.outputs) + at_once - 1) / at_once;
}

template <class S, Format F> void few_rows(const Linear &q, const Activations &a, int64_t piece) {
  constexpr int H = HALVES<S, F>;
  const int64_t blocks = q.inputs / block_size(F), at_once = groups_at_once<S, F>(q);
  int64_t group = piece * at_once;
  const int64_t end = std::min(group + at_once, groups<S, F>(q.outputs));
  // Products of G groups with M rows.
  auto tile = [&](auto m, auto g, int64_t row) {
    typename S::F f[g * H * m];
    multiply<S, F, m, g>((const Weight<S, F> *)q.weight + group * blocks, blocks, a, row, f);
    for (int i = 0; i < m; i++) {
      alignas(64) float results[g * H * S::R];
      for (int h = 0; h < g * H; h++) S::store_f(results + h * S::R, f[h * m + i]);
      const int64_t first = group * GROUP<S, F>;
      q.write(q, row + i, first, std::min(g * GROUP<S, F>, q.outputs - first), results);
    }
  };
  using One = std::integral_constant<int, 1>;
  if constexpr (S::streams(F) > 1)
    if (end - group == S::streams(F)) return tile(One{}, std::integral_constant<int, S::streams(F)>{}, 0);
  for (; group < end; group++) {
    int64_t row = 0;
    auto rows = [&](auto m) {
      for (; row + m <= q.rows; row += m) tile(m, One{}, row);
    };
    if constexpr (S::TILE > 1) rows(std::integral_constant<int, 4>{}), rows(std::integral_constant<int, 2>{});
    rows(One{});
  }
}

// PANEL_ROWS rows of the weight with all rows of x. `sums` has rows * PANEL_ROWS floats.
template <class S, Format F>
void panel(const Linear &q, const Activations &a, int64_t index, Decoded<S, F> *decoded, float *sums) {
  constexpr int64_t H = HALVES<S, F>, G = PANEL_ROWS / S::R, TILES = G / S::GROUPS, WIDTH = S::GROUPS * S::R;
  const int64_t blocks = q.inputs / block_size(F), most = PANEL_WIDTH / block_size(F);
  const int64_t first = index * G, some = std::min(G, groups<S, F>(q.outputs) * H - first);
  const auto *w = (const Weight<S, F> *)q.weight + first / H * blocks;
  std::fill(sums, sums + q.rows * PANEL_ROWS, 0.0f);
  for (int64_t b = 0; b < blocks; b += most) {
    const int64_t count = std::min(most, blocks - b);
    for (int64_t g = 0; g < some; g += H)
      for (int64_t i = 0; i < count; i++) decode<S, F>(w[g / H * blocks + b + i], decoded + g * most + i, most);
    for (int64_t row = 0; row < q.rows; row += S::TILE)      // rows of x stay in the L1 cache
      for (int64_t t = 0; t < TILES && t * S::GROUPS < some; t++)
        add_rows<S, F>(decoded + t * S::GROUPS * most, most, a, row, std::min<int64_t>(S::TILE, q.rows - row), b, count,
                       sums + (t * q.rows + row) * WIDTH);
  }
  for (int64_t row = 0; row < q.rows; row++) {
    alignas(64) float results[PANEL_ROWS];
    for (int64_t t = 0; t < TILES; t++) std::copy_n(sums + (t * q.rows + row) * WIDTH, WIDTH, results + t * WIDTH);
    q.write(q, row, first * S::R, std::min(PANEL_ROWS, q.outputs - first * S::R), results);
  }
}

// Rows of x in a tile: as many in each as can be, so that no last one is almost empty.
inline int64_t rows_of_tile(int64_t rows) {
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  return (rows + tiles - 1) / tiles;
}

// Rows of the weight whose products with tiles are computed together, all with the same part of x, which lies beyond the
// L2 cache: as many as leave some such panels for every thread.
inline int64_t tile_panel_rows(const Linear &q) {
  return std::clamp(q.outputs / (PIECES * q.threads) / PANEL_ROWS * PANEL_ROWS, PANEL_ROWS, TILE_PANEL_ROWS);
}

// And rows of x: their sums stay in the L2 cache.
inline int64_t tile_chunk_rows(const Linear &q) { return 32 * rows_of_tile(q.rows); }

// The same as `panel`, by tiles, for a chunk of the rows of x. `sums` has as many floats as panel and chunk have rows, and
// those of TILE_ROWS rows of x more.
template <class S, Format F>
void tile_panel(const Linear &q, const Activations &a, int64_t index, TileBlock<S, F> *decoded, float *sums) {
  constexpr int64_t most = TILE_WIDTH / block_size(F);
  const int64_t tile = rows_of_tile(q.rows), chunk = tile_chunk_rows(q), chunks = (q.rows + chunk - 1) / chunk;
  const int64_t begin = index % chunks * chunk, end = std::min(begin + chunk, q.rows);
  const int64_t width = tile_panel_rows(q), output = index / chunks * width, first = output / S::R;
  const int64_t blocks = q.inputs / block_size(F), some = std::min(width / S::R, groups<S, F>(q.outputs) - first);
  const auto *w = (const Weight<S, F> *)q.weight + first * blocks;
  std::fill(sums, sums + (end - begin) * width, 0.0f);
  S::tile_configure(int(tile), TILE_DEPTH<F>);
  for (int64_t b = 0; b < blocks; b += most) {
    const int64_t count = std::min(most, blocks - b);
    for (int64_t g = 0; g < some; g++)
      for (int64_t i = 0; i < count; i++) decode_tile<S, F>(w[g * blocks + b + i], decoded[g * most + i]);
    for (int64_t g = 0; g < some; g += TILE_GROUPS<F>)       // codes stay in the L1 cache
      for (int64_t row = begin; row < end; row += tile)
        add_tile<S, F>(decoded + g * most, most, a, row, std::min(tile, end - row), b, count,
                       sums + (row - begin) * width + g * S::R, width);
  }
  S::tile_release();
  for (int64_t row = begin; row < end; row++)
    q.write(q, row, output, std::min(width, q.outputs - output), sums + (row - begin) * width);
}

// How a call is shared out: `count` pieces, each with `own` bytes, zero at first, of the thread that computes it.
struct Pieces {
  int64_t count, own;
  void (*compute)(const Linear &, const Activations &, int64_t i, char *own);
};

// Rounds x, with room for TILE_ROWS rows more, and computes the pieces.
template <class S, Format F> bool run_pieces(const Linear &q, const Pieces &pieces) {
  const int threads = q.rows * q.outputs * q.inputs < 65536 ? 1 : q.threads;
  const int64_t own = (pieces.own + 63) / 64 * 64, rows = q.rows + (pieces.own ? TILE_ROWS : 0);
  Activations a;
  const int64_t shared = activation_bytes<S, F>(rows, q.inputs, a, nullptr);
  char *memory = (char *)std::aligned_alloc(64, shared + threads * own + 64);
  if (!memory) return false;
  activation_bytes<S, F>(rows, q.inputs, a, memory);
  std::memset(memory + shared, 0, threads * own);
  std::fill(a.d + q.rows * a.row_blocks, a.d + rows * a.row_blocks, 0.0f);     // not slow, as subnormal numbers are
  std::fill(a.s + q.rows * a.row_blocks, a.s + rows * a.row_blocks, 0.0f);
  const int64_t rounded = q.rows * (q.inputs / block_size(F));
  // A few blocks are rounded sooner than another thread is there.
  share(rounded * block_size(F) < 8192 ? 1 : threads, rounded, [&](int64_t i, int) { round_input<S, F>(q, a, i); });
  share(threads, pieces.count, [&](int64_t i, int thread) { pieces.compute(q, a, i, memory + shared + thread * own); });
  std::free(memory);
  return true;
}

constexpr int64_t panels(int64_t outputs) { return (outputs + PANEL_ROWS - 1) / PANEL_ROWS; }

// T: lane vectors with tile instructions.
template <class T, Format F> bool run_tiles(const Linear &q) {
  constexpr int64_t bytes = TILE_WIDTH / block_size(F) * (TILE_PANEL_ROWS / T::R) * int64_t(sizeof(TileBlock<T, F>));
  const int64_t width = tile_panel_rows(q), chunk = tile_chunk_rows(q);
  const int64_t pieces = (q.outputs + width - 1) / width * ((q.rows + chunk - 1) / chunk);
  return run_pieces<T, F>(q, {pieces, bytes + (chunk + TILE_ROWS) * width * int64_t(sizeof(float)),
      [](const Linear &q, const Activations &a, int64_t i, char *own) {
        tile_panel<T, F>(q, a, i, (TileBlock<T, F> *)own, (float *)(own + bytes));
      }});
}

template <class S, Format F> bool run_linear(const Linear &q) {
  using T = typename TilesOf<S>::type;
  if constexpr (!std::is_void_v<T>)
    if ((q.tiles == ALWAYS || q.tiles == BY_ROWS && q.rows >= tile_rows_of(F)) && T::usable()) return run_tiles<T, F>(q);
  if constexpr (S::TILE > 1)
    if (q.rows > few_rows_of(F)) {
      // A tile may lie half outside of the last panel: its groups are multiplied, and not written.
      constexpr int64_t bytes = PANEL_WIDTH / block_size(F) * (PANEL_ROWS / S::R) * int64_t(sizeof(Decoded<S, F>));
      return run_pieces<S, F>(q, {panels(q.outputs), bytes + q.rows * PANEL_ROWS * int64_t(sizeof(float)),
          [](const Linear &q, const Activations &a, int64_t i, char *own) {
            panel<S, F>(q, a, i, (Decoded<S, F> *)own, (float *)(own + bytes));
          }});
    }
  return run_pieces<S, F>(q, {few_rows_pieces<S, F>(q), 0,
      [](const Linear &q, const Activations &a, int64_t i, char *) { few_rows<S, F>(q, a, i); }});
}

// Products of the same few rows of x with `count` weights of one format, x rounded once.
template <class S, Format F> bool run_few(const Linear *q, int count) {
  Activations a;
  char *memory = (char *)std::aligned_alloc(64, activation_bytes<S, F>(q->rows, q->inputs, a, nullptr) + 64);
  if (!memory) return false;
  activation_bytes<S, F>(q->rows, q->inputs, a, memory);
  for (int64_t i = 0; i < q->rows * (q->inputs / block_size(F)); i++) round_input<S, F>(*q, a, i);
  int64_t work = 0, outputs = 0;
  for (int i = 0; i < count; i++) work += few_rows_pieces<S, F>(q[i]), outputs += q[i].outputs;
  share(q->rows * q->inputs * outputs < 65536 ? 1 : q->threads, work, [&](int64_t i, int) {
    const Linear *one = q;
    for (; i >= few_rows_pieces<S, F>(*one); one++) i -= few_rows_pieces<S, F>(*one);
    few_rows<S, F>(*one, a, i);
  });
  std::free(memory);
  return true;
}

// Calls work(format as a constant).
template <class W> auto for_format(int64_t format, W work) {
  switch (format) {
    case Q4_0: return work(std::integral_constant<Format, Q4_0>{});
    case Q4_1: return work(std::integral_constant<Format, Q4_1>{});
    case Q5_0: return work(std::integral_constant<Format, Q5_0>{});
    case Q5_1: return work(std::integral_constant<Format, Q5_1>{});
    case Q8_0: return work(std::integral_constant<Format, Q8_0>{});
    case Q4_K: return work(std::integral_constant<Format, Q4_K>{});
    case Q5_K: return work(std::integral_constant<Format, Q5_K>{});
    default: return work(std::integral_constant<Format, Q6_K>{});
  }
}

}  // namespace lz::quant

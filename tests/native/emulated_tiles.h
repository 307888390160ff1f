// The tile instructions of amx.h in plain C++, one after the other as the manual describes them, on lane vectors with the
// layout of AVX-512: what is multiplied, and where it lies, is checked on any processor.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "quant/portable.h"
#include "quant/tiles.h"

namespace lz::quant {

struct EmulatedTiles : PlainLanes<16, false> {
  static constexpr bool TILES = true;
  static constexpr int streams(Format f) { return super_blocks(f) ? 1 : f == Q4_0 ? 8 : 4; }     // as of AVX-512

  struct Tile { int rows, bytes; uint8_t at[16][64]; };
  static inline thread_local Tile tiles[8];
  static inline thread_local bool configured = false;

  static void demand(bool met, const char *what) {
    if (!met) std::printf("FAILED: %s\n", what), std::exit(1);
  }
  static void tile_configure(int rows, int depth) {
    demand(!configured, "tiles were configured twice, and not released");
    demand(rows >= 1 && rows <= 16 && depth % 4 == 0 && depth <= 64, "a tile has up to 16 rows of 64 bytes");
    for (int t = 0; t < 8; t++) {
      tiles[t] = {t < 6 ? rows : depth / 4, t == 4 || t == 5 ? depth : 64, {}};
      std::memset(tiles[t].at, 0, sizeof tiles[t].at);
    }
    configured = true;
  }
  static void tile_release() { configured = false; }
  template <int t> static void tile_zero() { std::memset(tiles[t].at, 0, sizeof tiles[t].at); }
  template <int t> static void tile_load(const void *p, int64_t step) {
    demand(configured, "a tile was loaded that is not configured");
    for (int r = 0; r < tiles[t].rows; r++) std::memcpy(tiles[t].at[r], (const char *)p + r * step, tiles[t].bytes);
  }
  template <int t> static void tile_store(void *p, int64_t step) {
    for (int r = 0; r < tiles[t].rows; r++) std::memcpy((char *)p + r * step, tiles[t].at[r], tiles[t].bytes);
  }
  template <int sums, int x, int codes, bool is_signed> static void tile_dot() {
    const Tile &a = tiles[x], &b = tiles[codes];
    demand(configured && a.bytes == 4 * b.rows && a.rows == tiles[sums].rows, "shapes of tiles do not match");
    for (int m = 0; m < a.rows; m++)
      for (int n = 0; n < b.bytes / 4; n++) {
        int32_t sum;
        std::memcpy(&sum, tiles[sums].at[m] + 4 * n, 4);
        for (int k = 0; k < a.bytes; k++) {
          const uint8_t code = b.at[k / 4][4 * n + k % 4];
          sum += int8_t(a.at[m][k]) * (is_signed ? int8_t(code) : code);
        }
        std::memcpy(tiles[sums].at[m] + 4 * n, &sum, 4);
      }
  }
};

}  // namespace lz::quant

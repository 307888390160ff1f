// The tile instructions of x86: products of 16 x 64 signed bytes with 64 x 16, which lie as lane vectors of AVX-512.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "avx512.h"
#include "tiles.h"

namespace lz::quant {

struct Amx : Avx512 {
  static constexpr bool TILES = true;

  // Linux gives the registers to a process that asks; a processor, a kernel or a sandbox without them refuses.
  static bool usable() {
    static const bool permitted = [] {
      constexpr int REQUEST = 0x1023, TILE_DATA = 18;          // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
      unsigned a, b, c, d = 0;
      const bool present = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3;     // amx-tile, amx-int8
      return present && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }();
    return permitted;
  }

  // For this thread, until tile_release: `rows` rows of x, `depth` codes of each.
  static void tile_configure(int rows, int depth) {
    struct alignas(64) { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {1};
    for (int t = 0; t < 8; t++) {
      shape.bytes[t] = uint16_t(t == 4 || t == 5 ? depth : 64);
      shape.rows[t] = uint8_t(t < 6 ? rows : depth / 4);
    }
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  static void tile_release() { asm volatile("tilerelease" ::: "memory"); }

  template <int t> INLINE static void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(t)); }
  template <int t> INLINE static void tile_load(const void *p, int64_t step) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(step), "i"(t) : "memory");
  }
  template <int t> INLINE static void tile_store(void *p, int64_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(step), "i"(t) : "memory");
  }
  // Bytes of x are signed, those of codes are what the format needs.
  template <int sums, int x, int codes, bool is_signed> INLINE static void tile_dot() {
    if constexpr (is_signed) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(x), "i"(codes));
    else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(x), "i"(codes));
  }
};

template <> struct TilesOf<Avx512> { using type = Amx; };

}  // namespace lz::quant

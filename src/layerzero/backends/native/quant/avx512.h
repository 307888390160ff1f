// Lane vectors of 16 rows for AVX-512 with VNNI: bytes of weights are unsigned.
#pragma once

#include "blocks.h"

namespace lz::quant {

struct Avx512 {
  static constexpr int R = 16, GROUPS = 2, TILE = 8, AHEAD = 16384;
  static constexpr bool SIGNED = false, PAIRED = false, KEEPS_SUMS = false, MATRIX = false, TILES = false;
  static constexpr int FIFTH = 0, SMALL = 0, COPIES = 1;

  // Measured on a Xeon; super-blocks are as fast by one stream.
  static constexpr int streams(Format f) { return super_blocks(f) ? 1 : f == Q4_0 ? 8 : 4; }

  using B = __m512i;
  using I = __m512i;
  using F = __m512;
  using X = const int8_t *;

  INLINE static B load(const uint8_t *p) { return _mm512_loadu_si512(p); }
  // Into the L2 cache. By assembly: GCC takes a function of builtin prefetches for one without effect, and drops its calls.
  INLINE static void fetch(const void *p) { asm volatile("prefetcht1 %0" ::"m"(*(const char *)p)); }
  INLINE static void store(uint8_t *p, B b) { _mm512_storeu_si512(p, b); }
  INLINE static X load_x(const int8_t *p) { return p; }
  INLINE static B add_bytes(B b, int n) { return _mm512_add_epi8(b, _mm512_set1_epi8(char(n))); }

  template <int n> INLINE static B shift(B b) {  // to the left if n > 0; bits may cross bytes
    if constexpr (n > 0) return _mm512_slli_epi16(b, n);
    else if constexpr (n < 0) return _mm512_srli_epi16(b, -n);
    else return b;
  }
  INLINE static B with(B low, B high, int mask) { // low | (high & mask)
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(char(mask)), 0xf8);
  }
  INLINE static B low4(B q) { return _mm512_and_si512(q, _mm512_set1_epi8(15)); }
  INLINE static B high4(B q) { return low4(_mm512_srli_epi16(q, 4)); }
  template <int v> INLINE static B low5(B q, B fifth) { return with(low4(q), shift<4 - 2 * v>(fifth), 16); }
  template <int v> INLINE static B high5(B q, B fifth) { return with(high4(q), shift<3 - 2 * v>(fifth), 16); }
  INLINE static void six(B q0, B q1, B high, B *to) {
    to[0] = with(low4(q0), high, 0x30), to[1] = with(high4(q0), shift<-2>(high), 0x30);
    to[2] = with(low4(q1), shift<4>(high), 0x30), to[3] = with(high4(q1), shift<2>(high), 0x30);
  }

  template <int at> INLINE static I dot(I a, B w, X x) {
    int32_t four;
    std::memcpy(&four, x + 4 * at, 4);
    return _mm512_dpbusd_epi32(a, w, _mm512_set1_epi32(four));
  }
  template <int at> INLINE static I dot_wide(I a, B w, X x) { return dot<at>(a, w, x); }
  INLINE static I splat(int n) { return _mm512_set1_epi32(n); }
  INLINE static I copies(const int32_t *p) { return splat(*p); }
  INLINE static I nothing() { return _mm512_setzero_si512(); }
  INLINE static I small() { return nothing(); }
  INLINE static I load_i(const int32_t *p) { return _mm512_loadu_si512(p); }
  INLINE static void store_i(int32_t *p, I i) { _mm512_storeu_si512(p, i); }
  INLINE static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  INLINE static I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  INLINE static I mla(I a, I b, I c) { return _mm512_add_epi32(a, _mm512_mullo_epi32(b, c)); }
  template <int n> INLINE static I shl(I a) { return _mm512_slli_epi32(a, n); }
  template <int at> INLINE static I unsigned_byte(B b) {
    return _mm512_and_si512(_mm512_srli_epi32(b, 8 * at), _mm512_set1_epi32(255));
  }
  template <int at> INLINE static I scale_byte(B b) { return sub(unsigned_byte<at>(b), splat(128)); }

  INLINE static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  INLINE static F small_to_float(I a) { return to_float(a); }
  INLINE static F halves(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
  INLINE static F splat_f(float x) { return _mm512_set1_ps(x); }
  INLINE static F load_f(const float *p) { return _mm512_loadu_ps(p); }
  INLINE static void store_f(float *p, F f) { _mm512_storeu_ps(p, f); }
  INLINE static F times(F a, float b) { return _mm512_mul_ps(a, splat_f(b)); }
  INLINE static F fma(F a, F b, F c) { return _mm512_fmadd_ps(b, c, a); }
  INLINE static F fms(F a, F b, F c) { return _mm512_fnmadd_ps(b, c, a); }
};

}  // namespace lz::quant

// Lane vectors of 8 rows for AVX2, with or without VNNI: bytes of weights are unsigned.
#pragma once

#include "blocks.h"

namespace lz::quant {

struct Avx2 {
  static constexpr int R = 8, GROUPS = 2, TILE = 4, AHEAD = 0;
  static constexpr int streams(Format) { return 1; }
  static constexpr bool SIGNED = false, PAIRED = false, KEEPS_SUMS = false, MATRIX = false, TILES = false;
  static constexpr int FIFTH = 0, SMALL = 0, COPIES = 1;

  using B = __m256i;
  using I = __m256i;
  using F = __m256;
  using X = const int8_t *;

  INLINE static B load(const uint8_t *p) { return _mm256_loadu_si256((const B *)p); }
  INLINE static void store(uint8_t *p, B b) { _mm256_storeu_si256((B *)p, b); }
  INLINE static X load_x(const int8_t *p) { return p; }
  INLINE static B add_bytes(B b, int n) { return _mm256_add_epi8(b, _mm256_set1_epi8(char(n))); }

  template <int n> INLINE static B shift(B b) {  // to the left if n > 0; bits may cross bytes
    if constexpr (n > 0) return _mm256_slli_epi16(b, n);
    else if constexpr (n < 0) return _mm256_srli_epi16(b, -n);
    else return b;
  }
  INLINE static B masked(B b, int mask) { return _mm256_and_si256(b, _mm256_set1_epi8(char(mask))); }
  INLINE static B with(B low, B high, int mask) { return _mm256_or_si256(low, masked(high, mask)); }
  INLINE static B low4(B q) { return masked(q, 15); }
  INLINE static B high4(B q) { return low4(_mm256_srli_epi16(q, 4)); }
  template <int v> INLINE static B low5(B q, B fifth) { return with(low4(q), shift<4 - 2 * v>(fifth), 16); }
  template <int v> INLINE static B high5(B q, B fifth) { return with(high4(q), shift<3 - 2 * v>(fifth), 16); }
  INLINE static void six(B q0, B q1, B high, B *to) {
    to[0] = with(low4(q0), high, 0x30), to[1] = with(high4(q0), shift<-2>(high), 0x30);
    to[2] = with(low4(q1), shift<4>(high), 0x30), to[3] = with(high4(q1), shift<2>(high), 0x30);
  }

  INLINE static B four(X x, int at) {
    int32_t bytes;
    std::memcpy(&bytes, x + 4 * at, 4);
    return _mm256_set1_epi32(bytes);
  }
  // Codes up to 127: pairs of products fit into 16 bits.
  template <int at> INLINE static I dot(I a, B w, X x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(a, w, four(x, at));
#else
    return add(a, _mm256_madd_epi16(_mm256_maddubs_epi16(w, four(x, at)), _mm256_set1_epi16(1)));
#endif
  }
  // Codes up to 255: the highest bit on its own.
  template <int at> INLINE static I dot_wide(I a, B w, X x) {
#if defined(__AVXVNNI__)
    return dot<at>(a, w, x);
#else
    return dot<at>(dot<at>(a, masked(w, 127), x), masked(w, 128), x);
#endif
  }
  INLINE static I splat(int n) { return _mm256_set1_epi32(n); }
  INLINE static I copies(const int32_t *p) { return splat(*p); }
  INLINE static I nothing() { return _mm256_setzero_si256(); }
  INLINE static I small() { return nothing(); }
  INLINE static I load_i(const int32_t *p) { return _mm256_loadu_si256((const I *)p); }
  INLINE static void store_i(int32_t *p, I i) { _mm256_storeu_si256((I *)p, i); }
  INLINE static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  INLINE static I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  INLINE static I mla(I a, I b, I c) { return _mm256_add_epi32(a, _mm256_mullo_epi32(b, c)); }
  template <int n> INLINE static I shl(I a) { return _mm256_slli_epi32(a, n); }
  template <int at> INLINE static I unsigned_byte(B b) {
    return _mm256_and_si256(_mm256_srli_epi32(b, 8 * at), _mm256_set1_epi32(255));
  }
  template <int at> INLINE static I scale_byte(B b) { return sub(unsigned_byte<at>(b), splat(128)); }

  INLINE static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  INLINE static F small_to_float(I a) { return to_float(a); }
  INLINE static F halves(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
  INLINE static F splat_f(float x) { return _mm256_set1_ps(x); }
  INLINE static F load_f(const float *p) { return _mm256_loadu_ps(p); }
  INLINE static void store_f(float *p, F f) { _mm256_storeu_ps(p, f); }
  INLINE static F times(F a, float b) { return _mm256_mul_ps(a, splat_f(b)); }
  INLINE static F fma(F a, F b, F c) { return _mm256_fmadd_ps(b, c, a); }
  INLINE static F fms(F a, F b, F c) { return _mm256_fnmadd_ps(b, c, a); }
};

}  // namespace lz::quant

// Lane vectors for SVE beyond 128 bits, of 8 or 16 rows: those of neon.h, by instructions that work on each 128 bits of a
// vector alike. The compiler is told the length (-msve-vector-bits), so that arrays of vectors can be declared.
#pragma once

#include <arm_sve.h>

#include "blocks.h"

namespace lz::quant {

struct Sve {
  static constexpr int R = __ARM_FEATURE_SVE_BITS / 32, GROUPS = 2, TILE = 4, AHEAD = 0;
  static constexpr int streams(Format) { return 1; }
  static constexpr bool KEEPS_SUMS = true, SIGNED = true, TILES = false, PAIRED = true;
#if defined(__ARM_FEATURE_SVE_MATMUL_INT8)
  static constexpr bool MATRIX = true;
#else
  static constexpr bool MATRIX = false;
#endif
  static constexpr int FIFTH = 0, SMALL = 0, COPIES = 1;

#define SIZED __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)))
  typedef svuint8_t B SIZED;
  typedef svint32_t I SIZED;
  typedef svfloat32_t F SIZED;
  typedef svint8_t X SIZED;                     // 16 activations of a row in each 128 bits
#undef SIZED

  INLINE static svbool_t every() { return svptrue_b8(); }
  INLINE static B load(const uint8_t *p) { return svld1_u8(every(), p); }
  INLINE static B load_now(const uint8_t *p) { return load(p); }
  INLINE static void store(uint8_t *p, B b) { svst1_u8(every(), p, b); }
  INLINE static X load_x(const int8_t *p) { return svld1rq_s8(every(), p); }
  INLINE static B add_bytes(B b, int n) { return svadd_n_u8_x(every(), b, uint8_t(n)); }

  INLINE static B masked(B b, int mask) { return svand_n_u8_x(every(), b, uint8_t(mask)); }
  template <int n> INLINE static B shift(B b) { // to the left if n > 0
    if constexpr (n > 0) return svlsl_n_u8_x(every(), b, n);
    else if constexpr (n < 0) return svlsr_n_u8_x(every(), b, -n);
    else return b;
  }
  INLINE static B with(B low, B high, int mask) { return svorr_u8_x(every(), low, masked(high, mask)); }
  INLINE static B low4(B q) { return masked(q, 15); }
  INLINE static B high4(B q) { return shift<-4>(q); }
  // Fifth bits are stored inverted.
  INLINE static B fifth_of(B low, B bits) { return with(low, sveor_n_u8_x(every(), bits, 255), 16); }
  template <int v> INLINE static B low5(B q, B fifth) { return fifth_of(low4(q), shift<4 - 2 * v>(fifth)); }
  template <int v> INLINE static B high5(B q, B fifth) { return fifth_of(high4(q), shift<3 - 2 * v>(fifth)); }
  INLINE static void six(B q0, B q1, B high, B *to) {
    to[0] = with(low4(q0), high, 0x30), to[1] = with(high4(q0), shift<-2>(high), 0x30);
    to[2] = with(low4(q1), shift<4>(high), 0x30), to[3] = with(high4(q1), shift<2>(high), 0x30);
  }

  template <int at> INLINE static I dot(I a, B w, X x) { return svdot_lane_s32(a, svreinterpret_s8_u8(w), x, at); }
  template <int at> INLINE static I dot_wide(I a, B w, X x) { return dot<at>(a, w, x); }
  INLINE static I splat(int n) { return svdup_n_s32(n); }
  INLINE static I copies(const int32_t *p) { return splat(*p); }
  INLINE static I nothing() { return splat(0); }
  INLINE static I small() { return nothing(); }
  INLINE static I load_i(const int32_t *p) { return svld1_s32(every(), p); }
  INLINE static void store_i(int32_t *p, I i) { svst1_s32(every(), p, i); }
  INLINE static I add(I a, I b) { return svadd_s32_x(every(), a, b); }
  INLINE static I sub(I a, I b) { return svsub_s32_x(every(), a, b); }
  INLINE static I mla(I a, I b, I c) { return svmla_s32_x(every(), a, b, c); }
  template <int n> INLINE static I shl(I a) { return svlsl_n_s32_x(every(), a, n); }
  template <int n> INLINE static I shr(I a) { return svasr_n_s32_x(every(), a, n); }
  template <int at> INLINE static I unsigned_byte(B b) {
    const I wide = svreinterpret_s32_u8(b);
    if constexpr (at == 0) return svand_n_s32_x(every(), wide, 255);
    else return svand_n_s32_x(every(), shr<8 * at>(wide), 255);
  }
  template <int at> INLINE static I scale_byte(B b) {     // signed
    const I wide = svreinterpret_s32_u8(b);
    if constexpr (at == 3) return shr<24>(wide);
    else return shr<24>(shl<24 - 8 * at>(wide));
  }

  // Two lane vectors become 8 codes of each of the first rows, and of the others.
  INLINE static void pair_rows(uint8_t *p) {
    const svuint32_t first = svreinterpret_u32_u8(load(p)), second = svreinterpret_u32_u8(load(p + 4 * R));
    store(p, svreinterpret_u8_u32(svzip1_u32(first, second)));
    store(p + 4 * R, svreinterpret_u8_u32(svzip2_u32(first, second)));
  }
  // Eight codes of each of two rows of x: the first, or those after them.
  template <int half> INLINE static X pair_x(X a, X b) {
    const svint64_t one = svreinterpret_s64_s8(a), two = svreinterpret_s64_s8(b);
    return svreinterpret_s8_s64(half ? svtrn2_s64(one, two) : svtrn1_s64(one, two));
  }
#if defined(__ARM_FEATURE_SVE_MATMUL_INT8)
  // Each 128 bits of a tile have x0 w0, x0 w1, x1 w0, x1 w1 of two rows of the weight.
  INLINE static I multiply_pairs(I tile, X x, B w) { return svmmla_s32(tile, x, svreinterpret_s8_u8(w)); }
#endif
  // Of two tiles, of the first rows of the weight and of the others, the sums of one row of x.
  template <int row> INLINE static I row_sums(I a, I b) {
    const svint64_t one = svreinterpret_s64_s32(a), two = svreinterpret_s64_s32(b);
    return svreinterpret_s32_s64(row ? svuzp2_s64(one, two) : svuzp1_s64(one, two));
  }

  INLINE static F to_float(I a) { return svcvt_f32_s32_x(every(), a); }
  INLINE static F small_to_float(I a) { return to_float(a); }
  INLINE static F small_difference(I a, I b) { return to_float(sub(a, b)); }
  INLINE static F halves(const uint16_t *p) {
    return svcvt_f32_f16_x(every(), svreinterpret_f16_u32(svld1uh_u32(every(), p)));
  }
  INLINE static F splat_f(float x) { return svdup_n_f32(x); }
  INLINE static F load_f(const float *p) { return svld1_f32(every(), p); }
  INLINE static void store_f(float *p, F f) { svst1_f32(every(), p, f); }
  INLINE static F times(F a, float b) { return svmul_n_f32_x(every(), a, b); }
  INLINE static F fma(F a, F b, F c) { return svmla_f32_x(every(), a, b, c); }
  INLINE static F fms(F a, F b, F c) { return svmls_f32_x(every(), a, b, c); }
};

}  // namespace lz::quant

// Lane vectors of 4 rows for NEON with dot products: bytes are signed.
#pragma once

#include <arm_neon.h>

#include "blocks.h"

namespace lz::quant {

struct Neon {
  static constexpr int R = 4, GROUPS = 2, TILE = 4;
  static constexpr int streams(Format) { return 1; }      // groups of the weight multiplied with one row of x at once
  static constexpr int AHEAD = 0;               // bytes fetched before they are loaded
  static constexpr bool KEEPS_SUMS = true;      // of a tile, in registers
  static constexpr bool SIGNED = true;          // bytes of weights may be negative
  static constexpr bool MATRIX = false;         // products of two rows of each at once
  static constexpr bool TILES = false;          // codes are decoded for tiles.h
  static constexpr bool PAIRED = true;          // bytes of four-bit codes hold two rows
  static constexpr int FIFTH = -16;             // what low5 and high5 add to a code

  using B = uint8x16_t;
  using I = int32x4_t;
  using F = float32x4_t;
  using X = int8x16_t;                          // 16 activations of a row

  INLINE static B load(const uint8_t *p) { return vld1q_u8(p); }
  INLINE static B load_now(const uint8_t *p) {  // not moved to where it is used
    B b;
    asm volatile("ldr %q0, %1" : "=w"(b) : "m"(*(const uint8_t(*)[16])p));
    return b;
  }
  INLINE static void store(uint8_t *p, B b) { vst1q_u8(p, b); }
  INLINE static X load_x(const int8_t *p) { return vld1q_s8(p); }

  INLINE static B add_bytes(B b, int n) { return vaddq_u8(b, vdupq_n_u8(uint8_t(n))); }

  INLINE static B low4(B q) { return vandq_u8(q, vdupq_n_u8(15)); }
  INLINE static B high4(B q) { return vshrq_n_u8(q, 4); }
  // A code whose fifth bit is clear, stored inverted, gets 1111 above its nibble: code - 16.
  template <int v> INLINE static B low5(B q, B fifth) {
    return vbslq_u8(vdupq_n_u8(15), q, vtstq_u8(fifth, vdupq_n_u8(1 << 2 * v)));
  }
  template <int v> INLINE static B high5(B q, B fifth) {
    return vsriq_n_u8(vtstq_u8(fifth, vdupq_n_u8(2 << 2 * v)), q, 4);
  }
  // The 6-bit codes of two lane vectors, in order: low and high nibbles of each.
  INLINE static void six(B q0, B q1, B high, B *to) {
    const B low = vdupq_n_u8(15), two = vdupq_n_u8(0x30), odd = vshlq_n_u8(high, 4);
    to[0] = vbslq_u8(low, q0, vandq_u8(high, two));
    to[1] = vsriq_n_u8(vshrq_n_u8(high, 2), q0, 4);
    to[2] = vbslq_u8(low, q1, vandq_u8(odd, two));
    to[3] = vsriq_n_u8(vshrq_n_u8(odd, 2), q1, 4);
  }

  template <int at> INLINE static I dot(I a, B w, X x) { return vdotq_laneq_s32(a, vreinterpretq_s8_u8(w), x, at); }
  template <int at> INLINE static I dot_wide(I a, B w, X x) { return dot<at>(a, w, x); }
  INLINE static I splat(int n) { return vdupq_n_s32(n); }
  // A number and its copies: broadcasting, or copying a register, would take an arithmetic pipe.
  static constexpr int COPIES = 4;
  INLINE static I copies(const int32_t *p) {
    I all;
    asm volatile("ldr %q0, %1" : "=w"(all) : "m"(*(const int32_t(*)[4])p));
    return all;
  }
  INLINE static I nothing() {                   // not a copy of another zero, which would cost an instruction
    I zero;
    asm volatile("movi %0.4s, 0" : "=w"(zero));
    return zero;
  }
  INLINE static I load_i(const int32_t *p) { return vld1q_s32(p); }
  INLINE static void store_i(int32_t *p, I i) { vst1q_s32(p, i); }
  INLINE static I add(I a, I b) { return vaddq_s32(a, b); }
  INLINE static I sub(I a, I b) { return vsubq_s32(a, b); }
  INLINE static I mla(I a, I b, I c) { return vmlaq_s32(a, b, c); }
  template <int n> INLINE static I shl(I a) { return vshlq_n_s32(a, n); }
  template <int n> INLINE static I shr(I a) { return vshrq_n_s32(a, n); }
  // Byte `at` of each lane: by table lookup, as shifts have one pipe only.
  template <int at> INLINE static I unsigned_byte(B b) {
    const uint32x4_t index = {0xffffff00u + at, 0xffffff04u + at, 0xffffff08u + at, 0xffffff0cu + at};
    return vreinterpretq_s32_u8(vqtbl1q_u8(b, vreinterpretq_u8_u32(index)));
  }
  template <int at> INLINE static I scale_byte(B b) {     // signed
    const I wide = vreinterpretq_s32_u8(b);
    if constexpr (at == 3) return vshrq_n_s32(wide, 24);
    else return vshrq_n_s32(vshlq_n_s32(wide, 24 - 8 * at), 24);
  }

  // Sums of a block of 32 and of minima, |sum| < 2^22, begin as the bits of 1.5 * 2^23: so a subtraction on
  // either pipe makes them floats, where a conversion occupies one pipe for two cycles.
  static constexpr int SMALL = 0x4b400000;
  INLINE static I small() {
    alignas(16) static constexpr int32_t bits[4] = {SMALL, SMALL, SMALL, SMALL};
    return copies(bits);
  }
  INLINE static F small_to_float(I a) { return vsubq_f32(vreinterpretq_f32_s32(a), vdupq_n_f32(12582912.0f)); }
  INLINE static F small_difference(I a, I b) { return vsubq_f32(vreinterpretq_f32_s32(a), vreinterpretq_f32_s32(b)); }

  INLINE static F to_float(I a) { return vcvtq_f32_s32(a); }
  INLINE static F halves(const uint16_t *p) { return vcvt_f32_f16(vld1_f16((const __fp16 *)p)); }
  INLINE static F splat_f(float x) { return vdupq_n_f32(x); }
  INLINE static F load_f(const float *p) { return vld1q_f32(p); }
  INLINE static void store_f(float *p, F f) { vst1q_f32(p, f); }
  INLINE static F times(F a, float b) { return vmulq_n_f32(a, b); }
  INLINE static F fma(F a, F b, F c) { return vfmaq_f32(a, b, c); }
  INLINE static F fms(F a, F b, F c) { return vfmsq_f32(a, b, c); }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
// With products of matrices, for panels of many rows: two rows of x by two of the weight, eight codes of each.
struct NeonMatrix : Neon {
  static constexpr bool MATRIX = true;

  // Two lane vectors, 4 codes of each of 4 rows, become 8 codes of rows 0 and 1, and of 2 and 3.
  INLINE static void pair_rows(uint8_t *p) {
    const uint32x4_t first = vreinterpretq_u32_u8(load(p)), second = vreinterpretq_u32_u8(load(p + 16));
    store(p, vreinterpretq_u8_u32(vzip1q_u32(first, second))), store(p + 16, vreinterpretq_u8_u32(vzip2q_u32(first, second)));
  }
  // Eight codes of each of two rows of x: the first, or those after them.
  template <int half> INLINE static X pair_x(X a, X b) {
    const int64x2_t one = vreinterpretq_s64_s8(a), two = vreinterpretq_s64_s8(b);
    return vreinterpretq_s8_s64(half ? vzip2q_s64(one, two) : vzip1q_s64(one, two));
  }
  // A tile has x0 w0, x0 w1, x1 w0, x1 w1.
  INLINE static I multiply_pairs(I tile, X x, B w) { return vmmlaq_s32(tile, x, vreinterpretq_s8_u8(w)); }
  // Of two tiles, of rows 0 and 1 and of rows 2 and 3 of the weight, the sums of one row of x.
  template <int row> INLINE static I row_sums(I a, I b) {
    const int64x2_t one = vreinterpretq_s64_s32(a), two = vreinterpretq_s64_s32(b);
    return vreinterpretq_s32_s64(row ? vzip2q_s64(one, two) : vzip1q_s64(one, two));
  }
};
#endif

}  // namespace lz::quant

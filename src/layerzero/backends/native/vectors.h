// Vectors of floats as compiler extensions, as wide as the target's registers, and operations on
// them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "threads.h"

namespace lz {

constexpr int W = VECTOR_BYTES / 4;             // floats in a vector
typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

#define INLINE __attribute__((always_inline))

// Calls work(a value of that dtype), numbered as DTYPES in declaration.py.
template <class F> bool for_dtype(int64_t dtype, F work) {
  return dtype == 2 ? work(fp16{}) : dtype == 1 ? work(bf16{}) : work(0.0f);
}

// Calls f(0), ..., f(N - 1), unrolled, so that arrays of vectors stay in registers.
template <class F, int... I> INLINE inline void each(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F> INLINE inline void each(F f) { each(f, std::make_integer_sequence<int, N>{}); }

inline vf bits_to_float(vu u) { vf f; std::memcpy(&f, &u, sizeof f); return f; }
inline vu float_to_bits(vf f) { vu u; std::memcpy(&u, &f, sizeof u); return u; }
inline vf all(float x) { return x - vf{}; }

inline vf load(const float *p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float *p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vf load(const bf16 *p) {
#if defined(__aarch64__)
  return (vf)vshll_n_u16(vld1_u16(&p->bits), 16);
#endif
  vh h;
  std::memcpy(&h, p, sizeof h);
  return bits_to_float(__builtin_convertvector(h, vu) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store(bf16 *p, vf v) {
#if defined(__aarch64__)
  uint32x4_t bits = (uint32x4_t)v, odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint16x4_t number = vmovn_u32(vceqq_f32((float32x4_t)v, (float32x4_t)v));
  uint16x4_t rounded = vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
  vst1_u16(&p->bits, vbsl_u16(number, rounded, vdup_n_u16(0x7fc0)));
  return;
#endif
  vu u = float_to_bits(v);
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u = v == v ? u : (vu{} + 0x7fc0);
  vh h = __builtin_convertvector(u, vh);
  std::memcpy(p, &h, sizeof h);
}

inline float to_float(fp16 x) {
#if defined(__aarch64__)
  __fp16 h;
  std::memcpy(&h, &x, sizeof h);
  return h;
#elif defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  float f;
  if (rest < 0x400) {                           // zero or subnormal: a multiple of 2^-24
    f = float(rest) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  const uint32_t u = sign | (rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23);
  std::memcpy(&f, &u, sizeof f);
  return f;
#endif
}

// Rounds to nearest, ties to even.
inline void from_float(fp16 *to, float x) {
#if defined(__aarch64__)
  __fp16 h = __fp16(x);
  std::memcpy(to, &h, sizeof h);
#elif defined(__F16C__)
  to->bits = uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  const uint32_t sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) to->bits = uint16_t(sign | 0x7e00);
  else if (rest >= 0x477ff000) to->bits = uint16_t(sign | 0x7c00);
  else if (rest < 0x38800000) {                 // subnormal: adding 1/2 puts the last bit at 2^-24
    float shifted;
    std::memcpy(&shifted, &rest, sizeof shifted);
    shifted += 0.5f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    to->bits = uint16_t(sign | (bits - 0x3f000000));
  } else {
    to->bits = uint16_t(sign | (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13);
  }
#endif
}

inline vf load(const fp16 *p) {
#if defined(__aarch64__)
  return (vf)vcvt_f32_f16(vld1_f16((const __fp16 *)p));
#elif defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}

inline void store(fp16 *p, vf v) {
#if defined(__aarch64__)
  vst1_f16((__fp16 *)p, vcvt_f16_f32((float32x4_t)v));
#elif defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; i++) from_float(p + i, v[i]);
#endif
}

// Two consecutive vectors: for half types one load of a whole vector.
template <class T> INLINE inline void load_two(const T *p, vf *to) { to[0] = load(p), to[1] = load(p + W); }
template <class T> INLINE inline void store_two(T *p, const vf *from) { store(p, from[0]), store(p + W, from[1]); }
#if defined(__aarch64__)
INLINE inline void load_two(const bf16 *p, vf *to) {
  uint16x8_t h = vld1q_u16(&p->bits);
  to[0] = (vf)vshll_n_u16(vget_low_u16(h), 16), to[1] = (vf)vshll_high_n_u16(h, 16);
}
INLINE inline void load_two(const fp16 *p, vf *to) {
  float16x8_t h = vld1q_f16((const __fp16 *)p);
  to[0] = (vf)vcvt_f32_f16(vget_low_f16(h)), to[1] = (vf)vcvt_high_f32_f16(h);
}
// In the upper half of each word; of a NaN only if its lower half is zero.
INLINE inline uint32x4_t round_half(vf v) {
  const uint32x4_t bits = (uint32x4_t)v, odd = vandq_u32(bits, vdupq_n_u32(0x10000));
  return vsraq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd, 16);
}
INLINE inline void store_two(bf16 *p, const vf *from) {
  uint32x4_t r[2], number[2];
  each<2>([&](auto i) {
    r[i] = round_half(from[i]), number[i] = vceqq_f32((float32x4_t)from[i], (float32x4_t)from[i]);
  });
  uint16x8_t high = vuzp2q_u16((uint16x8_t)r[0], (uint16x8_t)r[1]);
  vst1q_u16(&p->bits, vbslq_u16(vuzp1q_u16((uint16x8_t)number[0], (uint16x8_t)number[1]), high, vdupq_n_u16(0x7fc0)));
}
INLINE inline void store_two(fp16 *p, const vf *from) {
  vst1q_f16((__fp16 *)p, vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)from[0]), (float32x4_t)from[1]));
}
// Stores numbers whose NaN have nothing in their lower half: what comes from bfloat16 and quiet NaN.
INLINE inline void store_short(bf16 *p, const vf *from) {
  vst1q_u16(&p->bits, vuzp2q_u16((uint16x8_t)round_half(from[0]), (uint16x8_t)round_half(from[1])));
}
// The same, and `both` becomes what was stored.
INLINE inline void store_rounded(bf16 *p, vf *both) {
  const uint32x4_t r[2] = {round_half(both[0]), round_half(both[1])};
  vst1q_u16(&p->bits, vuzp2q_u16((uint16x8_t)r[0], (uint16x8_t)r[1]));
  each<2>([&](auto i) { both[i] = (vf)vandq_u32(r[i], vdupq_n_u32(0xffff0000)); });
}
INLINE inline void store_rounded(fp16 *p, vf *both) {
  const float16x8_t h = vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)both[0]), (float32x4_t)both[1]);
  vst1q_f16((__fp16 *)p, h);
  both[0] = (vf)vcvt_f32_f16(vget_low_f16(h)), both[1] = (vf)vcvt_high_f32_f16(h);
}
#endif
template <class T> INLINE inline void store_short(T *p, const vf *from) { store_two(p, from); }
template <class T> INLINE inline void store_rounded(T *p, vf *both) { store_two(p, both), load_two(p, both); }
INLINE inline void store_rounded(float *p, vf *both) { store_two(p, both); }

// The first n < W elements; the rest is zero.
template <class T> inline vf load_some(const T *p, int n) {
  T some[W] = {};
  std::memcpy(some, p, n * sizeof(T));
  return load(some);
}
template <class T> inline void store_some(T *p, vf v, int n) {
  T some[W];
  store(some, v);
  std::memcpy(p, some, n * sizeof(T));
}

// A vector of memory as floats. For bfloat16 these are two vectors: one of the even and one of the
// odd elements, which takes one operation each instead of two in memory order.
template <class T> struct Unit;

template <> struct Unit<float> {
  static constexpr int VECTORS = 1, SIZE = W;
  INLINE static void get(const float *p, vf *to) { to[0] = load(p); }
  INLINE static void get_some(const float *p, int n, vf *to) {
#if defined(__AVX512F__)
    to[0] = (vf)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
#else
    to[0] = load_some(p, n);
#endif
  }
  static void put(float *p, const vf *from) { store(p, from[0]); }
};

template <> struct Unit<fp16> {
  static constexpr int VECTORS = 1, SIZE = W;
  INLINE static void get(const fp16 *p, vf *to) { to[0] = load(p); }
  INLINE static void get_some(const fp16 *p, int n, vf *to) { to[0] = load_some(p, n); }
  static void put(fp16 *p, const vf *from) { store(p, from[0]); }
};

template <> struct Unit<bf16> {
  static constexpr int VECTORS = 2, SIZE = 2 * W;
  INLINE static void split(vu u, vf *to) {
    to[0] = bits_to_float(u << 16);
    to[1] = bits_to_float(u & 0xffff0000u);
  }
  INLINE static void get(const bf16 *p, vf *to) {
    vu u;
    std::memcpy(&u, p, sizeof u);
    split(u, to);
  }
  INLINE static void get_some(const bf16 *p, int n, vf *to) {
#if defined(__AVX512BW__)
    split((vu)_mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), p), to);
#else
    bf16 some[SIZE] = {};
    std::memcpy(some, p, n * sizeof(bf16));
    get(some, to);
#endif
  }
  static vu rounded(vf v) {                     // in the upper half of each word
    vu u = float_to_bits(v);
    u += 0x7fff + ((u >> 16) & 1);
    return v == v ? u : vu{} + 0x7fc00000u;
  }
  static void put(bf16 *p, const vf *from) {
    vu u = (rounded(from[0]) >> 16) | (rounded(from[1]) & 0xffff0000u);
    std::memcpy(p, &u, sizeof u);
  }
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}
inline void from_float(float *to, float x) { *to = x; }
inline void from_float(bf16 *to, float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  to->bits = x == x ? uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#elif defined(__aarch64__)
  return vaddvq_f32((float32x4_t)v);
#else
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}

inline float largest(vf v) {
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// e^x for x <= 88, to about one ulp; 0 where the true value is subnormal; NaN stays NaN.
inline vf exponential(vf x) {
  const float magic = 12582912.0f;              // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
  vf f = x - n * 0.693359375f - n * -2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  vf power = bits_to_float((float_to_bits(shifted) + 127u) << 23);
  return x < -87.0f ? vf{} : p * power;
}

inline vf hyperbolic_tangent(vf x) {
  vf size = x < 0.0f ? -x : x, z = x * x;
  vf small = all(-5.70498872745e-3f);
  small = small * z + 2.06390887954e-2f;
  small = small * z - 5.37397155531e-2f;
  small = small * z + 1.33314422036e-1f;
  small = small * z - 3.33332819422e-1f;
  small = small * z * x + x;
  vf big = 1.0f - 2.0f / (exponential(size > 10.0f ? all(20.0f) : 2.0f * size) + 1.0f);
  big = x < 0.0f ? -big : big;
  return size < 0.625f ? small : x == x ? big : x;
}

}  // namespace lz

// Vectors of floats in the compiler's own terms, as wide as the target has them, and what the kernels do with them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace lz {

constexpr int W = VECTOR_BYTES / 4;             // floats in a vector
typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));

struct bf16 { uint16_t bits; };

#define INLINE __attribute__((always_inline))

// f(0), ..., f(N - 1), written out: only so do arrays of vectors stay in registers.
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
  vh h;
  std::memcpy(&h, p, sizeof h);
  return bits_to_float(__builtin_convertvector(h, vu) << 16);
}

// To the nearest, ties to even; NaN stays one.
inline void store(bf16 *p, vf v) {
  vu u = float_to_bits(v);
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u = v == v ? u : (vu{} + 0x7fc0);
  vh h = __builtin_convertvector(u, vh);
  std::memcpy(p, &h, sizeof h);
}

// The first n < W elements; the others are zero.
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

// A vector's worth of memory as floats. Of bfloat16 that is twice as many: the even ones come in one vector and the odd
// ones in another, which needs one operation each where the order of memory needs two.
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
  static vu rounded(vf v) {                     // in the upper half
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

// e^x for x <= 88: about one unit in the last place; 0 where the true value is not a normal number; NaN stays one.
inline vf exponential(vf x) {
  const float magic = 12582912.0f;              // 1.5 * 2^23: adding it rounds to a whole number
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

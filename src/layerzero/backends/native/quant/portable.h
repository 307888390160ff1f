// Lane vectors in plain C++, and what each operation means: the same bits as the others. Of 4 rows and with signed
// bytes they are the twin of every ISA; of 16 and unsigned they have the layout of AVX-512.
#pragma once

#include "blocks.h"

#define SLOW __attribute__((noinline))           // FLATTEN would unroll all of it

namespace lz::quant {

template <int ROWS, bool SIGNED_BYTES> struct PlainLanes {
  static constexpr int R = ROWS, GROUPS = 1, TILE = 1, AHEAD = 0;
  static constexpr int streams(Format) { return 1; }
  static constexpr bool SIGNED = SIGNED_BYTES, PAIRED = false, KEEPS_SUMS = false, MATRIX = false, TILES = false;
  static constexpr int FIFTH = 0, SMALL = 0, COPIES = 1;

  struct B { uint8_t v[4 * R]; };
  struct I { int32_t v[R]; };
  struct F { float v[R]; };
  using X = const int8_t *;

  template <class T, class W> INLINE static T lanes(W of) {
    T to;
    for (int i = 0; i < int(sizeof to.v / sizeof to.v[0]); i++) to.v[i] = of(i);
    return to;
  }
  SLOW static B load(const uint8_t *p) { return lanes<B>([&](int i) { return p[i]; }); }
  SLOW static void store(uint8_t *p, B b) { std::memcpy(p, b.v, sizeof b.v); }
  SLOW static X load_x(const int8_t *p) { return p; }
  SLOW static B add_bytes(B b, int n) { return lanes<B>([&](int i) { return uint8_t(b.v[i] + n); }); }

  SLOW static B low4(B q) { return lanes<B>([&](int i) { return q.v[i] & 15; }); }
  SLOW static B high4(B q) { return lanes<B>([&](int i) { return q.v[i] >> 4; }); }
  // Fifth bits are stored inverted for every ISA with signed bytes.
  static constexpr int INVERTED = SIGNED ? 255 : 0;
  template <int v> SLOW static B low5(B q, B fifth) {
    return lanes<B>([&](int i) { return (q.v[i] & 15) | ((fifth.v[i] ^ INVERTED) >> 2 * v & 1) << 4; });
  }
  template <int v> SLOW static B high5(B q, B fifth) {
    return lanes<B>([&](int i) { return q.v[i] >> 4 | ((fifth.v[i] ^ INVERTED) >> (2 * v + 1) & 1) << 4; });
  }
  SLOW static void six(B q0, B q1, B high, B *to) {
    to[0] = lanes<B>([&](int i) { return (q0.v[i] & 15) | (high.v[i] >> 4 & 3) << 4; });
    to[1] = lanes<B>([&](int i) { return q0.v[i] >> 4 | (high.v[i] >> 6 & 3) << 4; });
    to[2] = lanes<B>([&](int i) { return (q1.v[i] & 15) | (high.v[i] & 3) << 4; });
    to[3] = lanes<B>([&](int i) { return q1.v[i] >> 4 | (high.v[i] >> 2 & 3) << 4; });
  }

  template <int at> SLOW static I dot(I a, B w, X x) {
    for (int i = 0; i < 4 * R; i++) a.v[i / 4] += (SIGNED ? int8_t(w.v[i]) : w.v[i]) * x[4 * at + i % 4];
    return a;
  }
  template <int at> static I dot_wide(I a, B w, X x) { return dot<at>(a, w, x); }
  SLOW static I splat(int n) { return lanes<I>([&](int) { return n; }); }
  SLOW static I copies(const int32_t *p) { return splat(*p); }
  SLOW static I nothing() { return splat(0); }
  SLOW static I small() { return splat(SMALL); }
  SLOW static I load_i(const int32_t *p) { return lanes<I>([&](int i) { return p[i]; }); }
  SLOW static void store_i(int32_t *p, I a) { std::memcpy(p, a.v, sizeof a.v); }
  SLOW static I add(I a, I b) { return lanes<I>([&](int i) { return a.v[i] + b.v[i]; }); }
  SLOW static I sub(I a, I b) { return lanes<I>([&](int i) { return a.v[i] - b.v[i]; }); }
  SLOW static I mla(I a, I b, I c) { return lanes<I>([&](int i) { return a.v[i] + b.v[i] * c.v[i]; }); }
  template <int n> SLOW static I shl(I a) { return lanes<I>([&](int i) { return a.v[i] * (1 << n); }); }
  template <int at> SLOW static I unsigned_byte(B b) { return lanes<I>([&](int i) { return b.v[4 * i + at]; }); }
  template <int at> SLOW static I scale_byte(B b) {
    return lanes<I>([&](int i) { return SIGNED ? int8_t(b.v[4 * i + at]) : b.v[4 * i + at] - 128; });
  }

  SLOW static F small_to_float(I a) { return to_float(a); }
  SLOW static F to_float(I a) { return lanes<F>([&](int i) { return float(a.v[i]); }); }
  SLOW static F halves(const uint16_t *p) { return lanes<F>([&](int i) { return lz::to_float(fp16{p[i]}); }); }
  SLOW static F splat_f(float x) { return lanes<F>([&](int) { return x; }); }
  SLOW static F load_f(const float *p) { return lanes<F>([&](int i) { return p[i]; }); }
  SLOW static void store_f(float *p, F f) { std::memcpy(p, f.v, sizeof f.v); }
  // Not inlined: contracted with an addition it would give other bits.
  SLOW static F times(F a, float b) { return lanes<F>([&](int i) { return a.v[i] * b; }); }
  SLOW static F fma(F a, F b, F c) { return lanes<F>([&](int i) { return std::fma(b.v[i], c.v[i], a.v[i]); }); }
  SLOW static F fms(F a, F b, F c) { return lanes<F>([&](int i) { return std::fma(-b.v[i], c.v[i], a.v[i]); }); }
};

using Portable = PlainLanes<4, true>;

}  // namespace lz::quant

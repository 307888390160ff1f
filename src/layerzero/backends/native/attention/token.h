// One token of a decoder layer, fused: rotates queries and keys in place, appends key and value to
// the cache, and attends to it. Each of these operations on a few kilobytes would cost more to call
// than to run.
#pragma once

#include "decode.h"

namespace lz {

struct Token {
  void *qkv, *keys, *values, *out;              // qkv: (batch, heads + 2 * kv_heads, dim), overwritten
  const void *cos, *sin;                        // (batch, >= half)
  int64_t batch, heads, kv_heads, dim, half, angle_row, room_row, length;
  float scale;
  int threads;
};

template <class T> bool run_token(const Token &t) {
  const int64_t width = (t.heads + 2 * t.kv_heads) * t.dim, kept = t.kv_heads * t.dim;
  for (int64_t b = 0; b < t.batch; b++) {
    T *row = (T *)t.qkv + b * width;
    const T *cos = (const T *)t.cos + b * t.angle_row, *sin = (const T *)t.sin + b * t.angle_row;
    for (int64_t h = 0; h < t.heads + t.kv_heads; h++)
      for (int64_t i = 0; i < t.half; i++) {
        T *first = row + h * t.dim + i, *second = first + t.half;
        float x = to_float(*first), y = to_float(*second), c = to_float(cos[i]), s = to_float(sin[i]);
        from_float(first, x * c - y * s);
        from_float(second, y * c + x * s);
      }
    const int64_t place = b * t.room_row + t.length * kept;
    std::memcpy((T *)t.keys + place, row + t.heads * t.dim, kept * sizeof(T));
    std::memcpy((T *)t.values + place, row + t.heads * t.dim + kept, kept * sizeof(T));
  }
  Attention a;
  a.query = t.qkv, a.key = t.keys, a.value = t.values, a.out = t.out, a.has_lse = false;
  a.batch = t.batch, a.heads = t.heads, a.seq_q = 1, a.head_dim = a.head_dim_v = t.dim;
  a.kv_heads = t.kv_heads, a.seq_k = t.length + 1;
  a.q = {width, t.dim, 0}, a.k = a.v = {t.room_row, t.dim, kept};
  a.offset = 0, a.left = a.right = -1, a.scale = t.scale, a.softcap = 0, a.threads = t.threads;
  return attend<T>(a);
}

}  // namespace lz

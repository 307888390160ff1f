// The remembered choices of one op: an open-addressed table from keys to calls, guarded by the GIL.
#pragma once

#include <string>

#include "call.h"
#include "key.h"

namespace fastpath {

struct Slot {
  uint64_t hash = 0;                            // 0: empty
  std::vector<uint64_t> key;
  PyObject *entry = nullptr, *override_object = nullptr;
  Call call;
  uint64_t hits = 0, reported = 0, swept_hits = 0;
  bool same_in_capture = false;                 // the same would be called while a CUDA graph is captured
  bool watched = false;                         // on a fault, say which inputs were written into before it
  bool suspect = false;                         // it has failed: its calls go to Python until it is `put` again
};

struct Dispatcher {
  PyObject_HEAD
  PyObject *miss, *recover, *call;
  PyMethodDef method;
  std::string *name, *doc;
  Program *program;
  std::vector<Slot> *table;
  size_t used, limit;
  long long epoch;
};

inline uint64_t mix(uint64_t a, uint64_t b) {
  __uint128_t product = (__uint128_t)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

inline uint64_t hash_of(const uint64_t *words, size_t n) {  // pairs of words are independent
  uint64_t h = n, salt = 0x9E3779B97F4A7C15ull;
  size_t i = 0;
  for (; i + 2 <= n; i += 2, salt += 0x9E3779B97F4A7C16ull)
    h += mix(words[i] ^ salt, words[i + 1] ^ (salt + 0xe7037ed1a0b428dbull));
  if (i < n) h += mix(words[i] ^ salt, 0xe7037ed1a0b428dbull);
  return mix(h, 0x9E3779B97F4A7C15ull) | 1;
}

inline Slot *find(Dispatcher *d, const uint64_t *words, size_t n, uint64_t hash) {
  std::vector<Slot> &table = *d->table;
  size_t mask = table.size() - 1;
  for (size_t i = hash & mask; table[i].hash; i = (i + 1) & mask) {
    Slot &s = table[i];
    if (s.hash == hash && s.key.size() == n && !std::memcmp(s.key.data(), words, n * 8)) return &s;
  }
  return nullptr;
}

// The slot for these values, inside or outside of a capture; null if there is none. Adds the capture to the key in
// `words`.
inline Slot *find_for(Dispatcher *d, PyObject **values, uint64_t *words, size_t n) {
  Slot *s = find(d, words, n, hash_of(words, n));
  if (s && s->same_in_capture) return s;
  int captured = in_capture(*d->program, values);
  if (!captured) return s;
  words[FLAG_WORD] |= IN_CAPTURE;
  return captured < 0 ? nullptr : find(d, words, n, hash_of(words, n));
}

inline void report_hits(Slot &s) {              // add the hits of this slot to those of the Python entry
  if (s.hits == s.reported) return;
  PyObject *old = PyObject_GetAttrString(s.entry, "native_hits");
  long long before = old ? PyLong_AsLongLong(old) : 0;
  Py_XDECREF(old);
  PyObject *now = PyLong_FromLongLong(before + (long long)(s.hits - s.reported));
  if (now) PyObject_SetAttrString(s.entry, "native_hits", now);
  Py_XDECREF(now);
  s.reported = s.hits;
}

inline void release(Slot &s) {
  report_hits(s);
  PyErr_Clear();
  Py_CLEAR(s.entry);
  Py_CLEAR(s.override_object);
  Py_CLEAR(s.call.fn);
  Py_CLEAR(s.call.keywords);
  for (PyObject *&c : s.call.constants) Py_CLEAR(c);
}

constexpr size_t SMALLEST = 64;

inline void clear(Dispatcher *d) {
  std::vector<Slot> old(SMALLEST);
  old.swap(*d->table);                          // releasing may run Python code: the table must be consistent by then
  d->used = 0;
  for (Slot &s : old)
    if (s.hash) release(s);
}

inline void insert(Dispatcher *d, Slot &&s) {
  if (2 * (d->used + 1) > d->table->size()) {
    std::vector<Slot> old(2 * d->table->size());
    old.swap(*d->table);
    d->used = 0;
    for (Slot &moved : old)
      if (moved.hash) insert(d, std::move(moved));
  }
  std::vector<Slot> &table = *d->table;
  size_t mask = table.size() - 1, i = s.hash & mask;
  while (table[i].hash) i = (i + 1) & mask;
  table[i] = std::move(s);
  d->used++;
}

inline void sweep(Dispatcher *d) {                     // second chance: drop what was not hit since the last sweep
  std::vector<Slot> old(d->table->size()), dropped;
  old.swap(*d->table);
  d->used = 0;
  size_t kept = 0, enough = d->limit / 2;
  for (Slot &s : old) {
    if (!s.hash) continue;
    if (s.hits != s.swept_hits && kept < enough) {
      s.swept_hits = s.hits;
      kept++;
      insert(d, std::move(s));
    } else dropped.push_back(std::move(s));
  }
  for (Slot &s : dropped) release(s);
}

}  // namespace fastpath

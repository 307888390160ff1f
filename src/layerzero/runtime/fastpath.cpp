// The hot path, natively: read the key of a call straight from its tensors, find the entry, call it.
//
// This is the twin of the Python that hotpath.py generates, and like it is driven by the op's key
// program: nothing here knows any particular op. native.py writes the program down as plain tuples.
// A call that is not an ordinary one (a subclass, a wrong rank, an unknown keyword) is handed to
// Python, which knows what to say about it. All state is guarded by the GIL: between reading a key
// and taking a reference on what it finds, no other thread runs.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int MAX_PARAMS = 48, MAX_WORDS = 96, MAX_SLOTS = 48, MAX_STACK = 24;

PyTypeObject *tensor_type, *parameter_type;
PyObject *override_var;   // the ContextVar of context.py
PyObject *capturing;      // torch's question whether a CUDA graph is being captured, or NULL
PyObject *faults;         // what a kernel may throw: faults.py

// ---------------------------------------------------------------- the program

enum Kind { TENSOR, BOOL, INT, FLOAT, STR, GENERATOR };   // a generator is passed on, never read
enum Token { SIZE, LITERAL, LEAD, SPREAD };
enum Code { FACT, CONST, ADD, SUB, MUL, DIV, MOD, EQ, NE, LT, LE, GT, GE, MAX, MIN };

struct Param {
  PyObject *name, *fallback;                    // fallback: the default, or NULL if it must be given
  Kind kind;
  bool optional, keyword_only;
  std::vector<PyObject *> choices;              // of a str parameter
  int64_t least = 0, most = 0;                  // of an int parameter
  double lowest = 0, highest = 0;               // of a float parameter
};
struct Dim { Token token; int64_t value; };     // value: a slot, or the literal
struct Tensor {
  int param;
  bool want_stride, want_ndim, want_grad;
  int want_alignment;                           // 1: always, 2: only off the CPU, where alone some rule asks
  bool alike;                                   // must have the main tensor's dtype
  std::vector<std::vector<Dim>> shapes;         // one per variant
};
struct Instruction { Code code; int64_t value; };
struct Derived { int slot; std::vector<Instruction> code; };
struct Field {                                  // a number, as the key keeps it
  int slot, param;                              // one of them, the other is -1
  bool exact, bucket;
  std::vector<double> equals, above;
  std::vector<int64_t> multiples;
};
struct Program {
  std::vector<Param> params;
  std::vector<PyObject *> defaults;             // of every parameter, or NULL; in a row, because every call reads them
  uint64_t bool_mask = 0, scalar_mask = 0;      // which parameters are bools, and which other plain values
  uint64_t default_bools = 0;                   // their bits in the key
  std::vector<Tensor> tensors;
  std::vector<Derived> derived;
  std::vector<Field> fields;                    // of sizes and derived numbers
  std::vector<int> bools, scalars, whole;       // parameters: bools; the other plain ones; ints that derived facts read
  std::vector<Field> numbers;                   // of scalars
  std::vector<uint64_t> standing;               // the words of the scalars, each at its default
  int standing_variant = -1;                    // -1: some scalar has no default
  int variant = -1;                             // the str parameter that picks the shapes
  int main = -1;                                // the tensor that gives dtype and device
  int variants = 1, slots = 0;
  Py_ssize_t positional = 0;                    // parameters that may be given by their place
  uint64_t required = 0;                        // those without a default
  bool watch_capture = false;
  bool sdpa_switches = false;                   // torch.nn.attention.sdpa_kernel says which kernels may serve it
};

// ---------------------------------------------------------------- what to call, and the table of it

struct Call {                                   // how to hand the op's arguments to a library's function
  PyObject *fn = nullptr, *keywords = nullptr;
  std::vector<int> sources;                     // a parameter, or -1 - i for constant i
  std::vector<PyObject *> constants;
  Py_ssize_t positional = 0;
  Py_ssize_t item = -1, first = -1;
};
struct Slot {
  uint64_t hash = 0;                            // 0: empty
  std::vector<uint64_t> key;
  PyObject *entry = nullptr, *override_object = nullptr;
  Call call;
  uint64_t hits = 0, reported = 0, seen = 0;
  bool anywhere = false;                        // in a capture of a CUDA graph the same would be called
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

uint64_t mix(uint64_t a, uint64_t b) {
  __uint128_t product = (__uint128_t)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t hash_of(const uint64_t *words, size_t n) {       // in pairs that do not wait for each other
  uint64_t h = n, salt = 0x9E3779B97F4A7C15ull;
  size_t i = 0;
  for (; i + 2 <= n; i += 2, salt += 0x9E3779B97F4A7C16ull)
    h += mix(words[i] ^ salt, words[i + 1] ^ (salt + 0xe7037ed1a0b428dbull));
  if (i < n) h += mix(words[i] ^ salt, 0xe7037ed1a0b428dbull);
  return mix(h, 0x9E3779B97F4A7C15ull) | 1;
}

int64_t bucket(int64_t n) {                     // as spec/grid.py
  if (n <= 16) return n >= 0 ? n : -1;
  int octave = 63 - __builtin_clzll((unsigned long long)(n - 1));
  return 64 + 2 * octave + (((n - 1) >> (octave - 1)) & 1);
}

bool is_plain(PyObject *o) { return Py_TYPE(o) == tensor_type || Py_TYPE(o) == parameter_type; }

// ---------------------------------------------------------------- reading a call

// Order the arguments by parameter; which were given, a bit each. 0: not an ordinary call.
uint64_t order_arguments(const Program &p, PyObject *const *args, Py_ssize_t n, PyObject *keywords, PyObject **out) {
  size_t count = p.params.size();
  if (n > p.positional) return 0;
  uint64_t given = (1ull << n) - 1;
  std::memcpy(out, args, n * sizeof(*out));
  std::memcpy(out + n, p.defaults.data() + n, (count - n) * sizeof(*out));
  Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t j = 0; j < named; j++) {
    PyObject *name = PyTuple_GET_ITEM(keywords, j);
    size_t i = n;
    while (i < count && p.params[i].name != name) i++;       // mostly both are interned: equal means identical
    if (i == count)
      for (i = n; i < count && PyUnicode_Compare(p.params[i].name, name); i++) {}
    if (i == count || given >> i & 1) return 0;
    out[i] = args[n + j];
    given |= 1ull << i;
  }
  return (given & p.required) == p.required ? given : 0;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// False: it has no answer in 64 bits, so Python must give it.
bool evaluate(const std::vector<Instruction> &code, const int64_t *slots, const bool *known, int64_t *out, bool *is_known) {
  int64_t stack[MAX_STACK];
  int top = 0;
  *is_known = true;
  for (const Instruction &i : code) {
    if (top == MAX_STACK) return false;
    if (i.code == FACT) {
      if (!known[i.value]) { *is_known = false; return true; }
      stack[top++] = slots[i.value];
      continue;
    }
    if (i.code == CONST) { stack[top++] = i.value; continue; }
    int64_t b = stack[--top], a = stack[--top], r = 0;
    switch (i.code) {
      case ADD: if (__builtin_add_overflow(a, b, &r)) return false; break;
      case SUB: if (__builtin_sub_overflow(a, b, &r)) return false; break;
      case MUL: if (__builtin_mul_overflow(a, b, &r)) return false; break;
      case DIV: if (!b) return false; r = floor_div(a, b); break;
      case MOD: if (!b) return false; r = a - floor_div(a, b) * b; break;
      case EQ: r = a == b; break;
      case NE: r = a != b; break;
      case LT: r = a < b; break;
      case LE: r = a <= b; break;
      case GT: r = a > b; break;
      case GE: r = a >= b; break;
      case MAX: r = a > b ? a : b; break;
      default: r = a < b ? a : b; break;
    }
    stack[top++] = r;
  }
  *out = stack[0];
  return true;
}

// The sizes of a call, by slot. One that only absent tensors have stays unknown.
struct Sizes {
  int64_t value[MAX_SLOTS];
  bool known[MAX_SLOTS] = {};
  const int64_t *lead[MAX_SLOTS];               // of a slot that stands for leading sizes: where they are
  size_t leads[MAX_SLOTS];                      // and how many

  bool agree(const Dim &d, int64_t size) {
    if (d.token == LITERAL) return size == d.value;
    if (known[d.value]) return size == value[d.value];
    value[d.value] = size;
    return known[d.value] = true;
  }

  // Bind the sizes of one tensor and check those seen before; notes how it broadcasts.
  bool bind(const std::vector<Dim> &shape, c10::IntArrayRef sizes, uint64_t *spread) {
    size_t n = sizes.size(), m = shape.size();
    if (!m) return true;
    if (shape[0].token == SPREAD) {
      if (n > m) return false;
      *spread = n;
      for (size_t i = 0; i < n; i++) {
        int64_t slot = shape[m - n + i].value;
        if (known[slot] && sizes[i] == value[slot]) continue;
        if (sizes[i] != 1) return false;
        *spread |= 256ull << i;
      }
      return true;
    }
    size_t leading = shape[0].token == LEAD, tail = m - leading;
    if (leading ? n < tail || n < 1 : n != m) return false;
    for (size_t i = 0; i < tail; i++)
      if (!agree(shape[leading + i], sizes[n - tail + i])) return false;
    if (!leading) return true;
    int64_t slot = shape[0].value, rows = 1;
    c10::IntArrayRef head = sizes.slice(0, n - tail);
    if (known[slot]) return head.equals(c10::IntArrayRef(lead[slot], leads[slot]));
    for (int64_t size : head) rows *= size;
    value[slot] = rows;
    known[slot] = true;
    lead[slot] = head.data();
    leads[slot] = head.size();
    for (size_t i = 0; i < tail; i++)
      if (!sizes[n - tail + i]) return false;
    return true;
  }
};

uint64_t alignment_of(const at::Tensor &t) {    // as facts.py
  uint64_t bits = 128 | (uint64_t)(uintptr_t)t.unsafeGetTensorImpl()->data();
  c10::IntArrayRef strides = t.strides();
  int64_t size = (int64_t)t.element_size();
  if (t.is_contiguous()) bits |= strides.size() > 1 ? (uint64_t)(t.sizes().back() * size) : 0;
  else
    for (size_t i = 0; i + 1 < strides.size(); i++) bits |= (uint64_t)(strides[i] * size);
  return bits & (~bits + 1);
}

// Of a whole number. native.py sees to it that no field makes more than 47 tests.
uint64_t number_word(const Field &f, int64_t value) {
  if (f.exact) return (uint64_t)value;
  uint64_t word = 0;
  int bit = 0;
  for (double x : f.equals) word |= (uint64_t)((double)value == x) << bit++;
  for (double x : f.above) word |= (uint64_t)((double)value > x) << bit++;
  for (int64_t x : f.multiples) word |= (uint64_t)(value - floor_div(value, x) * x == 0) << bit++;
  return f.bucket ? word << 16 | (uint16_t)bucket(value) : word << 16;
}

uint64_t number_word(const Field &f, double value) {
  uint64_t word = 0;
  if (f.exact) {
    value += 0.0;                               // -0.0 is 0.0
    std::memcpy(&word, &value, 8);
    return word;
  }
  int bit = 0;
  for (double x : f.equals) word |= (uint64_t)(value == x) << bit++;
  for (double x : f.above) word |= (uint64_t)(value > x) << bit++;
  for (int64_t x : f.multiples) word |= (uint64_t)(std::fmod(value, (double)x) == 0) << bit++;
  return word << 16;
}

// Is it a number of the declared kind, in its range? NaN is in none.
bool fits(const Param &param, PyObject *v) {
  double value;
  if (PyLong_CheckExact(v)) {
    int overflow = 0;
    int64_t whole = PyLong_AsLongLongAndOverflow(v, &overflow);
    if (overflow) return false;
    if (param.kind == INT) return param.least <= whole && whole <= param.most;
    value = (double)whole;
  } else if (param.kind == FLOAT && PyFloat_CheckExact(v)) value = PyFloat_AS_DOUBLE(v);
  else return false;
  return param.lowest <= value && value <= param.highest;
}

// The words of the strings and numbers among the parameters; -1 if one is not as it should be.
int read_scalars(const Program &p, PyObject **values, uint64_t *words, int *variant) {
  int n = 0, filled = 0;
  uint64_t packed = 0;                          // choices of strings, a byte each
  for (int i : p.scalars) {
    const Param &param = p.params[i];
    PyObject *v = values[i];
    if (param.kind != STR) {
      if (v == Py_None ? !param.optional : !fits(param, v)) return -1;
      continue;
    }
    size_t c = 0;
    while (c < param.choices.size() && param.choices[c] != v) c++;
    if (c == param.choices.size()) {            // not the interned object: compare the text
      if (!PyUnicode_CheckExact(v)) return -1;
      for (c = 0; c < param.choices.size(); c++)
        if (param.choices[c] != Py_None && PyUnicode_Compare(param.choices[c], v) == 0) break;
      if (c == param.choices.size()) return -1;
    }
    if (i == p.variant) {
      if ((int)c >= p.variants) return -1;      // "auto" and the like
      *variant = (int)c;
    }
    packed = packed << 8 | c;
    if (++filled == 8) { words[n++] = packed; packed = 0; filled = 0; }
  }
  words[n++] = packed;
  uint64_t absent = 0;                          // which numbers are None, a bit each
  int numbered = 0;
  for (const Field &f : p.numbers) {
    PyObject *v = values[f.param];
    absent = absent << 1 | (v == Py_None);
    if (++numbered % 64 == 0) { words[n++] = absent; absent = 0; }
    if (v == Py_None) words[n++] = 0;
    else if (p.params[f.param].kind == INT) {
      int64_t value = PyLong_AsLongLong(v);
      if (value == -1 && PyErr_Occurred()) { PyErr_Clear(); return -1; }
      words[n++] = number_word(f, value);
    } else {
      double value = PyFloat_AsDouble(v);
      if (value == -1.0 && PyErr_Occurred()) { PyErr_Clear(); return -1; }
      words[n++] = number_word(f, value);
    }
  }
  words[n++] = absent;
  return n;
}

// The bools among the parameters, two bits each. False: one is not as it should be.
bool read_bools(const Program &p, PyObject **values, uint64_t *out) {
  uint64_t packed = 0;
  for (int i : p.bools) {
    PyObject *v = values[i];
    packed <<= 2;
    if (v == Py_True) packed |= 1;
    else if (v == Py_None && p.params[i].optional) packed |= 2;
    else if (v != Py_False) return false;
  }
  *out = packed;
  return true;
}

constexpr int FLAG_WORD = 3;                     // grad, determinism, capture, what of SDPA is switched off
constexpr uint64_t IN_CAPTURE = 4;

// What torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp have switched off, a bit each.
uint64_t sdpa_off(const at::Context &context) {
  return (uint64_t)!context.userEnabledFlashSDP() << 3 | (uint64_t)!context.userEnabledMemEfficientSDP() << 4 |
         (uint64_t)!context.userEnabledMathSDP() << 5 | (uint64_t)!context.userEnabledCuDNNSDP() << 6;
}

// The key of a call into `words`, as outside of a capture; the number of words, 0 for a call that is not ordinary, -1 on
// a Python error.
int read_key(const Program &p, uint64_t given, PyObject **values, uint64_t *words) {
  int n = 0;
  Sizes sizes;
  PyObject *over = nullptr;
  if (PyContextVar_Get(override_var, Py_None, &over) < 0) return -1;
  words[n++] = (uint64_t)(uintptr_t)over;
  Py_DECREF(over);                              // the variable keeps it alive while this call looks it up
  auto tls = c10::impl::tls_local_dispatch_key_set();
  words[n++] = tls.included_.raw_repr();
  words[n++] = tls.excluded_.raw_repr();
  bool grad = c10::GradMode::is_enabled();
  uint64_t flags = (uint64_t)at::globalContext().deterministicAlgorithms() << 1;
  if (p.sdpa_switches) flags |= sdpa_off(at::globalContext());
  n++;                                          // FLAG_WORD
  uint64_t packed = p.default_bools;
  if (given & p.bool_mask && !read_bools(p, values, &packed)) return 0;
  // Mostly every string and number is the default itself: then one word stands for them all.
  int variant = p.standing_variant;
  bool standing = variant >= 0;
  if (given & p.scalar_mask)
    for (size_t i = 0; standing && i < p.scalars.size(); i++)
      standing = values[p.scalars[i]] == p.defaults[p.scalars[i]];
  if (!standing) {
    variant = 0;
    uint64_t *section = words + n + 1;          // behind the word for the bools
    int count = read_scalars(p, values, section, &variant);
    if (count < 0) return 0;
    standing = (size_t)count == p.standing.size() && p.standing_variant >= 0 &&
               !std::memcmp(section, p.standing.data(), count * 8);      // equal to the defaults, by value
    words[n++] = packed << 1 | !standing;
    if (!standing) n += count;
  } else words[n++] = packed << 1;
  for (int i : p.whole) {
    int slot = p.slots + i;
    if (values[i] == Py_None) continue;
    sizes.value[slot] = PyLong_AsLongLong(values[i]);
    if (sizes.value[slot] == -1 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
    sizes.known[slot] = true;
  }
  if (p.main >= 0 && !is_plain(values[p.main])) return 0;
  const at::Tensor *main = p.main >= 0 ? &THPVariable_Unpack(values[p.main]) : nullptr;
  for (const Tensor &t : p.tensors) {
    PyObject *v = values[t.param];
    if (v == Py_None) {
      if (!p.params[t.param].optional) return 0;
      words[n++] = 0;
      continue;
    }
    if (!is_plain(v)) return 0;
    const at::Tensor &tensor = THPVariable_Unpack(v);
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (impl->layout() != c10::kStrided || tensor.is_nested()) return 0;
    c10::Device device = impl->device();
    if (main && device != main->device()) return 0;             // the caller's mistake: Python says so
    if (t.alike && impl->dtype() != main->dtype()) return 0;
    uint64_t spread = 0;
    if (!sizes.bind(t.shapes[variant], impl->sizes(), &spread)) return 0;
    uint64_t word = 1ull << 63 | (uint64_t)(uint8_t)c10::typeMetaToScalarType(impl->dtype()) |
                    (uint64_t)(uint8_t)device.type() << 8 | (uint64_t)(uint8_t)device.index() << 16 | spread << 24;
    if (grad && impl->requires_grad()) {
      if (t.want_grad) word |= 1ull << 62;
      else flags |= 1;
    }
    bool contiguous = t.want_stride && impl->is_contiguous();
    if (contiguous) word |= 1ull << 61;
    if (t.want_ndim) word |= (uint64_t)impl->dim() << 48;
    words[n++] = word;
    if (t.want_stride && !contiguous)
      words[n++] = impl->sizes().back() == 1 ? 1 : (uint64_t)impl->strides().back();
    if (t.want_alignment == 1 || (t.want_alignment && !device.is_cpu())) {
      if (!impl->has_storage()) return 0;       // a wrapper, as under vmap
      words[n++] = device.is_meta() ? 0 : alignment_of(tensor);
    }
  }
  for (const Derived &d : p.derived)
    if (!evaluate(d.code, sizes.value, sizes.known, &sizes.value[d.slot], &sizes.known[d.slot])) return 0;
  uint64_t absent = 0;                          // which sizes are unknown, a bit each
  int numbered = 0;
  for (const Field &f : p.fields) {
    bool given = sizes.known[f.slot];
    absent = absent << 1 | !given;
    if (++numbered % 64 == 0) { words[n++] = absent; absent = 0; }
    words[n++] = given ? number_word(f, sizes.value[f.slot]) : 0;
  }
  words[n++] = absent;
  words[FLAG_WORD] = flags;
  return n;
}

// Is a CUDA graph being captured? Asking the driver takes longer than all else, so it is asked only where the answer
// matters. 0 or 1; -1: it cannot be asked, which Python knows how to tell (the device is lost).
int in_capture(const Program &p, PyObject **values) {
  if (!p.watch_capture || !capturing || p.main < 0 || !THPVariable_Unpack(values[p.main]).is_cuda()) return 0;
  PyObject *answer = PyObject_CallNoArgs(capturing);
  if (!answer) PyErr_Clear();
  Py_XDECREF(answer);                           // a bool outlives it
  return answer ? answer == Py_True : -1;
}

// ---------------------------------------------------------------- the table

Slot *find(Dispatcher *d, const uint64_t *words, size_t n, uint64_t hash) {
  std::vector<Slot> &table = *d->table;
  size_t mask = table.size() - 1;
  for (size_t i = hash & mask; table[i].hash; i = (i + 1) & mask) {
    Slot &s = table[i];
    if (s.hash == hash && s.key.size() == n && !std::memcmp(s.key.data(), words, n * 8)) return &s;
  }
  return nullptr;
}

// What to call for these values, inside or outside of a capture; null if that is not known. `words` becomes the key.
Slot *find_for(Dispatcher *d, PyObject **values, uint64_t *words, size_t n) {
  Slot *s = find(d, words, n, hash_of(words, n));
  if (s && s->anywhere) return s;
  int captured = in_capture(*d->program, values);
  if (!captured) return s;
  words[FLAG_WORD] |= IN_CAPTURE;
  return captured < 0 ? nullptr : find(d, words, n, hash_of(words, n));
}

void report(Slot &s) {                          // tell the Python entry how often it was hit natively
  if (s.hits == s.reported) return;
  PyObject *old = PyObject_GetAttrString(s.entry, "native_hits");
  long long before = old ? PyLong_AsLongLong(old) : 0;
  Py_XDECREF(old);
  PyObject *now = PyLong_FromLongLong(before + (long long)(s.hits - s.reported));
  if (now) PyObject_SetAttrString(s.entry, "native_hits", now);
  Py_XDECREF(now);
  s.reported = s.hits;
}

void release(Slot &s) {
  report(s);
  PyErr_Clear();
  Py_CLEAR(s.entry);
  Py_CLEAR(s.override_object);
  Py_CLEAR(s.call.fn);
  Py_CLEAR(s.call.keywords);
  for (PyObject *&c : s.call.constants) Py_CLEAR(c);
}

constexpr size_t SMALLEST = 64;

void clear(Dispatcher *d) {
  std::vector<Slot> old(SMALLEST);
  old.swap(*d->table);                          // releasing may run Python code: the table must be whole by then
  d->used = 0;
  for (Slot &s : old)
    if (s.hash) release(s);
}

void place(Dispatcher *d, Slot &&s) {
  if (2 * (d->used + 1) > d->table->size()) {
    std::vector<Slot> old(2 * d->table->size());
    old.swap(*d->table);
    d->used = 0;
    for (Slot &o : old)
      if (o.hash) place(d, std::move(o));
  }
  std::vector<Slot> &table = *d->table;
  size_t mask = table.size() - 1, i = s.hash & mask;
  while (table[i].hash) i = (i + 1) & mask;
  table[i] = std::move(s);
  d->used++;
}

void sweep(Dispatcher *d) {                     // second chance: drop what was not hit since the last sweep
  std::vector<Slot> old(d->table->size()), dropped;
  old.swap(*d->table);
  d->used = 0;
  size_t kept = 0, enough = d->limit / 2;
  for (Slot &s : old) {
    if (!s.hash) continue;
    if (s.hits != s.seen && kept < enough) {
      s.seen = s.hits;
      kept++;
      place(d, std::move(s));
    } else dropped.push_back(std::move(s));
  }
  for (Slot &s : dropped) release(s);
}

// ---------------------------------------------------------------- calling

// The slot may be dropped while the kernel runs, by a new world in another thread: what is needed after
// the call is taken before it. The function and the constants live as long as the entry, which `dispatch` holds.
PyObject *run(const Call &call, PyObject **values) {
  PyObject *stack[2 * MAX_PARAMS + 1], **argv = stack + 1;
  Py_ssize_t item = call.item, first = call.first;
  PyObject *keywords = Py_XNewRef(call.keywords);
  for (size_t i = 0; i < call.sources.size(); i++)
    argv[i] = call.sources[i] >= 0 ? values[call.sources[i]] : call.constants[-1 - call.sources[i]];
  PyObject *out = PyObject_Vectorcall(call.fn, argv, call.positional | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords);
  Py_XDECREF(keywords);
  if (!out || (item < 0 && first < 0)) return out;
  PyObject *part = item >= 0 ? PySequence_GetItem(out, item) : PySequence_GetSlice(out, 0, first);
  Py_DECREF(out);
  return part;
}

PyObject *recover(Dispatcher *d, PyObject *entry, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  PyObject *type, *fault, *trace;
  PyErr_Fetch(&type, &fault, &trace);
  PyErr_NormalizeException(&type, &fault, &trace);
  if (trace) PyException_SetTraceback(fault, trace);
  PyObject *given = PyTuple_New(n), *named = PyDict_New(), *out = nullptr;
  if (given && named) {
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    Py_ssize_t m = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < m; i++) PyDict_SetItem(named, PyTuple_GET_ITEM(keywords, i), args[n + i]);
    out = PyObject_CallFunctionObjArgs(d->recover, entry, given, named, fault, nullptr);
  }
  Py_XDECREF(given);
  Py_XDECREF(named);
  Py_XDECREF(type);
  Py_XDECREF(fault);
  Py_XDECREF(trace);
  return out;
}

PyObject *dispatch(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  Dispatcher *d = (Dispatcher *)self;
  if (d->program) {
    PyObject *values[MAX_PARAMS];
    uint64_t words[MAX_WORDS];
    if (uint64_t given = order_arguments(*d->program, args, n, keywords, values)) {
      int count = read_key(*d->program, given, values, words);
      if (count < 0) return nullptr;
      Slot *s = count ? find_for(d, values, words, count) : nullptr;
      if (s) {
        s->hits++;
        PyObject *entry = Py_NewRef(s->entry);
        PyObject *out = run(s->call, values);
        if (!out && PyErr_ExceptionMatches(faults)) out = recover(d, entry, args, n, keywords);
        Py_DECREF(entry);
        return out;
      }
    }
  }
  return PyObject_Vectorcall(d->miss, args, n, keywords);
}

// ---------------------------------------------------------------- what Python sees

int64_t at_index(PyObject *tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)); }

void numbers(PyObject *tuple, std::vector<double> *out) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) out->push_back(PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, i)));
}

// params: ((name, kind, optional, keyword_only, has_default, default, choices, least, most), ...)
// tensors: ((param, (want_stride, want_ndim, want_grad, want_alignment, alike), (((token, value), ...) per variant)), ...)
// derived: ((slot, ((code, value), ...)), ...)   fields: ((slot, param, exact, bucket, equals, above, multiples), ...)
PyObject *install(PyObject *self, PyObject *args) {
  Dispatcher *d = (Dispatcher *)self;
  PyObject *params, *tensors, *derived, *fields;
  int variant, variants, slots, main, watch, sdpa;
  long long epoch, limit;
  if (!PyArg_ParseTuple(args, "O!O!O!O!iiiippLL", &PyTuple_Type, &params, &PyTuple_Type, &tensors, &PyTuple_Type, &derived,
                        &PyTuple_Type, &fields, &variant, &variants, &slots, &main, &watch, &sdpa, &epoch, &limit))
    return nullptr;
  Py_ssize_t count = PyTuple_GET_SIZE(params), numbered = PyTuple_GET_SIZE(fields);
  Py_ssize_t bools = 0;
  for (Py_ssize_t i = 0; i < count; i++) bools += at_index(PyTuple_GET_ITEM(params, i), 1) == BOOL;
  if (count > MAX_PARAMS || slots + count > MAX_SLOTS || bools > 31 ||
      12 + 3 * PyTuple_GET_SIZE(tensors) + numbered + numbered / 64 + count / 8 > MAX_WORDS) {
    d->program = nullptr;                       // more than the native path holds: every call goes to Python
    clear(d);
    Py_RETURN_FALSE;
  }
  Program *p = new Program;
  p->variant = variant;
  p->variants = variants;
  p->slots = slots;
  p->main = main;
  p->watch_capture = watch;
  p->sdpa_switches = sdpa;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params); i++) {
    PyObject *t = PyTuple_GET_ITEM(params, i);
    Param param;
    param.name = Py_NewRef(PyTuple_GET_ITEM(t, 0));
    PyUnicode_InternInPlace(&param.name);
    param.kind = (Kind)at_index(t, 1);
    param.optional = at_index(t, 2);
    param.keyword_only = at_index(t, 3);
    param.fallback = at_index(t, 4) ? Py_NewRef(PyTuple_GET_ITEM(t, 5)) : nullptr;
    if (param.kind == INT) { param.least = at_index(t, 7); param.most = at_index(t, 8); }
    else if (param.kind == FLOAT) {
      param.lowest = PyFloat_AsDouble(PyTuple_GET_ITEM(t, 7));
      param.highest = PyFloat_AsDouble(PyTuple_GET_ITEM(t, 8));
    }
    PyObject *choices = PyTuple_GET_ITEM(t, 6);
    for (Py_ssize_t c = 0; c < PyTuple_GET_SIZE(choices); c++) {
      PyObject *choice = Py_NewRef(PyTuple_GET_ITEM(choices, c));
      if (PyUnicode_CheckExact(choice)) PyUnicode_InternInPlace(&choice);
      param.choices.push_back(choice);
    }
    p->params.push_back(param);
    p->defaults.push_back(param.fallback);
    if (!param.fallback) p->required |= 1ull << i;
    if (!param.keyword_only) p->positional = i + 1;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
    PyObject *t = PyTuple_GET_ITEM(tensors, i), *wants = PyTuple_GET_ITEM(t, 1), *shapes = PyTuple_GET_ITEM(t, 2);
    Tensor tensor{(int)at_index(t, 0), (bool)at_index(wants, 0), (bool)at_index(wants, 1), (bool)at_index(wants, 2),
                  (int)at_index(wants, 3), (bool)at_index(wants, 4), {}};
    for (Py_ssize_t v = 0; v < PyTuple_GET_SIZE(shapes); v++) {
      std::vector<Dim> dims;
      PyObject *shape = PyTuple_GET_ITEM(shapes, v);
      for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(shape); k++) {
        PyObject *dim = PyTuple_GET_ITEM(shape, k);
        dims.push_back({(Token)at_index(dim, 0), at_index(dim, 1)});
      }
      tensor.shapes.push_back(dims);
    }
    p->tensors.push_back(tensor);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(derived); i++) {
    PyObject *t = PyTuple_GET_ITEM(derived, i), *code = PyTuple_GET_ITEM(t, 1);
    Derived item{(int)at_index(t, 0), {}};
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(code); k++) {
      PyObject *step = PyTuple_GET_ITEM(code, k);
      item.code.push_back({(Code)at_index(step, 0), at_index(step, 1)});
    }
    p->derived.push_back(item);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields); i++) {
    PyObject *t = PyTuple_GET_ITEM(fields, i);
    Field f{(int)at_index(t, 0), (int)at_index(t, 1), (bool)at_index(t, 2), (bool)at_index(t, 3), {}, {}, {}};
    numbers(PyTuple_GET_ITEM(t, 4), &f.equals);
    numbers(PyTuple_GET_ITEM(t, 5), &f.above);
    PyObject *multiples = PyTuple_GET_ITEM(t, 6);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(multiples); k++) f.multiples.push_back(at_index(multiples, k));
    (f.param >= 0 ? p->numbers : p->fields).push_back(f);
  }
  for (int i = 0; i < (int)count; i++) {
    Kind kind = p->params[i].kind;
    if (kind == BOOL) {
      p->bools.push_back(i);
      p->bool_mask |= 1ull << i;
    } else if (kind == INT || kind == FLOAT || kind == STR) {
      p->scalars.push_back(i);
      p->scalar_mask |= 1ull << i;
    }
    bool derived_from = false;
    for (const Derived &item : p->derived)
      for (const Instruction &step : item.code) derived_from |= step.code == FACT && step.value == slots + i;
    if (derived_from) p->whole.push_back(i);
  }
  if (PyErr_Occurred()) { delete p; return nullptr; }
  // A bool without a default is always given, and then all are read.
  if (!(p->required & p->bool_mask) && !read_bools(*p, p->defaults.data(), &p->default_bools)) p->bool_mask = ~0ull;
  if (!(p->required & p->scalar_mask)) {
    uint64_t words[MAX_WORDS];
    int first = 0, n = read_scalars(*p, p->defaults.data(), words, &first);
    if (n >= 0) {
      p->standing.assign(words, words + n);
      p->standing_variant = first;
    }
  }
  Program *old = d->program;
  d->program = p;
  d->limit = (size_t)limit;
  d->epoch = epoch;
  clear(d);
  delete old;                                   // its names and defaults are kept: they are few and shared
  Py_RETURN_TRUE;
}

// put(entry, epoch, values, fn, sources, constants, keywords or None, positional, item, first, anywhere) -> bool
PyObject *put(PyObject *self, PyObject *args) {
  Dispatcher *d = (Dispatcher *)self;
  PyObject *entry, *tuple, *fn, *sources, *constants, *keywords;
  long long epoch;
  Py_ssize_t positional, item, first;
  int anywhere;
  if (!PyArg_ParseTuple(args, "OLO!OO!O!Onnnp", &entry, &epoch, &PyTuple_Type, &tuple, &fn, &PyTuple_Type, &sources,
                        &PyTuple_Type, &constants, &keywords, &positional, &item, &first, &anywhere))
    return nullptr;
  if (!d->program || epoch != d->epoch || PyTuple_GET_SIZE(tuple) != (Py_ssize_t)d->program->params.size() ||
      PyTuple_GET_SIZE(sources) > MAX_PARAMS)
    Py_RETURN_FALSE;
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) values[i] = PyTuple_GET_ITEM(tuple, i);
  int n = read_key(*d->program, ~0ull, values, words);
  if (n < 0) return nullptr;
  if (!n || find_for(d, values, words, n)) Py_RETURN_FALSE;
  Slot s;
  s.anywhere = anywhere;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); i++) s.call.sources.push_back((int)at_index(sources, i));
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(constants); i++)
    s.call.constants.push_back(Py_NewRef(PyTuple_GET_ITEM(constants, i)));
  s.hash = hash_of(words, n);
  s.key.assign(words, words + n);
  s.entry = Py_NewRef(entry);
  PyContextVar_Get(override_var, Py_None, &s.override_object);
  s.call.fn = Py_NewRef(fn);
  s.call.keywords = keywords == Py_None ? nullptr : Py_NewRef(keywords);
  s.call.positional = positional;
  s.call.item = item;
  s.call.first = first;
  if (d->used >= d->limit) {
    sweep(d);
    if (epoch != d->epoch) { release(s); Py_RETURN_FALSE; }     // what the sweep dropped may have run Python code
  }
  place(d, std::move(s));
  Py_RETURN_TRUE;
}

// As read_key, of arguments in any order, which it orders into `values`.
int ordered(Dispatcher *d, PyObject *const *args, Py_ssize_t n, PyObject *keywords, PyObject **values, uint64_t *words) {
  uint64_t given = d->program ? order_arguments(*d->program, args, n, keywords, values) : 0;
  return given ? read_key(*d->program, given, values, words) : 0;
}

PyObject *key(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  int count = ordered((Dispatcher *)self, args, n, keywords, values, words);
  if (count < 0) return nullptr;
  if (!count) Py_RETURN_NONE;
  PyObject *out = PyTuple_New(count);
  for (int i = 0; out && i < count; i++) PyTuple_SET_ITEM(out, i, PyLong_FromUnsignedLongLong(words[i]));
  return out;
}

PyObject *lookup(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  int count = ordered((Dispatcher *)self, args, n, keywords, values, words);
  if (count < 0) return nullptr;
  Slot *s = count ? find_for((Dispatcher *)self, values, words, count) : nullptr;
  return Py_NewRef(s ? s->entry : Py_None);
}

PyObject *collect(PyObject *self, PyObject *) {
  std::vector<Slot> &table = *((Dispatcher *)self)->table;
  for (size_t i = 0; i < table.size(); i++)
    if (table[i].hash) report(table[i]);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject *size(PyObject *self, PyObject *) { return PyLong_FromSize_t(((Dispatcher *)self)->used); }

PyObject *get_call(PyObject *self, void *) { return Py_NewRef(((Dispatcher *)self)->call); }

PyObject *make(PyTypeObject *type, PyObject *args, PyObject *) {
  const char *name, *doc;
  PyObject *miss, *recover_fn;
  if (!PyArg_ParseTuple(args, "ssOO", &name, &doc, &miss, &recover_fn)) return nullptr;
  Dispatcher *d = (Dispatcher *)type->tp_alloc(type, 0);
  if (!d) return nullptr;
  d->miss = Py_NewRef(miss);
  d->recover = Py_NewRef(recover_fn);
  d->name = new std::string(name);
  d->doc = new std::string(doc);
  d->program = nullptr;
  d->table = new std::vector<Slot>(SMALLEST);
  d->used = 0;
  d->limit = 32;
  d->epoch = -1;
  d->method = {d->name->c_str(), (PyCFunction)(void (*)(void))dispatch, METH_FASTCALL | METH_KEYWORDS, d->doc->c_str()};
  PyObject *module = PyUnicode_FromString("layerzero");
  d->call = PyCFunction_NewEx(&d->method, (PyObject *)d, module);   // lives as long as the process
  Py_XDECREF(module);
  return (PyObject *)d;
}

PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, "Take a key program and forget every entry; False if it is too large."},
    {"put", put, METH_VARARGS, "Remember what to call for calls like these values; False if they are not ordinary."},
    {"key", (PyCFunction)(void (*)(void))key, METH_FASTCALL | METH_KEYWORDS, "The key of a call outside of a capture, or None."},
    {"lookup", (PyCFunction)(void (*)(void))lookup, METH_FASTCALL | METH_KEYWORDS, "The entry a call would hit, or None."},
    {"collect", collect, METH_NOARGS, "Add the native hits to the Python entries."},
    {"size", size, METH_NOARGS, "How many entries there are."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef getters[] = {{"call", get_call, nullptr, "The public function.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyTypeObject dispatcher_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// setup(Tensor, Parameter, override ContextVar, capturing or None, what a kernel may throw)
PyObject *setup(PyObject *, PyObject *args) {
  PyObject *t, *p, *v, *c, *f;
  if (!PyArg_ParseTuple(args, "OOOOO", &t, &p, &v, &c, &f)) return nullptr;
  faults = Py_NewRef(f);
  tensor_type = (PyTypeObject *)Py_NewRef(t);
  parameter_type = (PyTypeObject *)Py_NewRef(p);
  override_var = Py_NewRef(v);
  capturing = c == Py_None ? nullptr : Py_NewRef(c);
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"setup", setup, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fastpath", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fastpath(void) {
  dispatcher_type.tp_name = "layerzero.Dispatcher";
  dispatcher_type.tp_basicsize = sizeof(Dispatcher);
  dispatcher_type.tp_flags = Py_TPFLAGS_DEFAULT;
  dispatcher_type.tp_new = make;
  dispatcher_type.tp_methods = methods;
  dispatcher_type.tp_getset = getters;
  if (PyType_Ready(&dispatcher_type) < 0) return nullptr;
  PyObject *m = PyModule_Create(&module);
  if (m) PyModule_AddObject(m, "Dispatcher", Py_NewRef((PyObject *)&dispatcher_type));
  return m;
}

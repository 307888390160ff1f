// The key of a call, read straight from its arguments: what selection/key.py says the cache must know.
//
// It follows the op's key program, which native/__init__.py encodes as plain tuples: nothing here knows any
// particular op.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fastpath {

constexpr int MAX_PARAMS = 48, MAX_WORDS = 96, MAX_SLOTS = 48, MAX_STACK = 24;

inline PyTypeObject *tensor_type, *parameter_type;
inline PyObject *override_var;   // the ContextVar of world/context.py
inline PyObject *for_call;       // world/context.py: makes the override of a call with backend= or policy=
inline PyTypeObject *layer_type; // an immutable policy layer
inline PyObject *backend_name, *policy_name;    // the interned keywords
inline PyObject *capturing;      // torch._C._cuda_isCurrentStreamCapturing, or NULL
inline PyObject *faults;         // the exceptions a kernel may raise: machine/faults.py

// ---------------------------------------------------------------- the program

enum Kind { TENSOR, BOOL, INT, FLOAT, STR, GENERATOR };   // a generator is passed on, never read
enum Token { SIZE, LITERAL, LEAD, BROADCAST };
enum Code { FACT, CONST, ADD, SUB, MUL, DIV, MOD, EQ, NE, LT, LE, GT, GE, MAX, MIN };

struct Param {
  PyObject *name, *default_value;               // default_value: NULL if it must be given
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
  int want_alignment;                           // 1: always, 2: only off the CPU, where rules read it
  bool same_dtype;                              // must have the main tensor's dtype
  std::vector<std::vector<Dim>> shapes;         // one per variant
};
struct Instruction { Code code; int64_t value; };
struct Derived { int slot; std::vector<Instruction> code; };
struct Field {                                  // a number in the key
  int slot, param;                              // one of them, the other is -1
  bool exact, bucket;
  std::vector<double> equals, above;
  std::vector<int64_t> multiples;
};
struct Program {
  std::vector<Param> params;
  std::vector<PyObject *> defaults;             // of every parameter, or NULL; contiguous, because every call copies them
  uint64_t bool_mask = 0, scalar_mask = 0;      // which parameters are bools, and which are other scalars
  uint64_t default_bools = 0;                   // their bits in the key
  std::vector<Tensor> tensors;
  std::vector<Derived> derived;
  std::vector<Field> fields;                    // of sizes and derived numbers
  std::vector<int> bools, scalars, derived_inputs;      // parameters: bools; other scalars; ints that derived facts read
  std::vector<Field> numbers;                   // of scalars
  std::vector<uint64_t> default_words;          // the words of the scalars if all are at their defaults
  int default_variant = -1;                    // -1: some scalar has no default
  int variant = -1;                             // the str parameter that picks the shapes
  int main = -1;                                // the tensor that gives dtype and device
  int variants = 1, slots = 0;
  Py_ssize_t positional = 0;                    // how many parameters may be given by position
  uint64_t required = 0;                        // those without a default
  bool watch_capture = false;
  bool sdpa_switches = false;                   // torch.nn.attention.sdpa_kernel decides which kernels may serve it
};

inline int64_t bucket(int64_t n) {                     // as spec/grid.py
  if (n <= 16) return n >= 0 ? n : -1;
  int octave = 63 - __builtin_clzll((unsigned long long)(n - 1));
  return 64 + 2 * octave + (((n - 1) >> (octave - 1)) & 1);
}

inline bool is_plain(PyObject *o) { return Py_TYPE(o) == tensor_type || Py_TYPE(o) == parameter_type; }

// ---------------------------------------------------------------- reading a call

// The keywords of a call that are not the op's; null or None if absent.
struct Extras { PyObject *backend = nullptr, *policy = nullptr; };

// Order the arguments by parameter; returns a bit for each that was given, 0 for a call that is not ordinary.
inline uint64_t order_arguments(const Program &p, PyObject *const *args, Py_ssize_t n, PyObject *keywords,
                                PyObject **out, Extras *extras) {
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
    if (i == count) {
      if (name == backend_name) { extras->backend = args[n + j]; continue; }
      if (name == policy_name) { extras->policy = args[n + j]; continue; }
      for (i = n; i < count && PyUnicode_Compare(p.params[i].name, name); i++) {}
    }
    if (i == count || given >> i & 1) return 0;
    out[i] = args[n + j];
    given |= 1ull << i;
  }
  return (given & p.required) == p.required ? given : 0;
}

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// False: it does not fit 64 bits, so Python must compute it.
inline bool evaluate(const std::vector<Instruction> &code, const int64_t *slots, const bool *known, int64_t *out, bool *is_known) {
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
  const int64_t *lead[MAX_SLOTS];               // the leading sizes that a slot stands for
  size_t leads[MAX_SLOTS];                      // how many they are

  bool agree(const Dim &d, int64_t size) {
    if (d.token == LITERAL) return size == d.value;
    if (known[d.value]) return size == value[d.value];
    value[d.value] = size;
    return known[d.value] = true;
  }

  // Bind the sizes of one tensor and check those bound before; writes how it broadcasts.
  bool bind(const std::vector<Dim> &shape, c10::IntArrayRef sizes, uint64_t *broadcast) {
    size_t n = sizes.size(), m = shape.size();
    if (!m) return true;
    if (shape[0].token == BROADCAST) {
      if (n > m) return false;
      *broadcast = n;
      for (size_t i = 0; i < n; i++) {
        int64_t slot = shape[m - n + i].value;
        if (known[slot] && sizes[i] == value[slot]) continue;
        if (sizes[i] != 1) return false;
        *broadcast |= 256ull << i;
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

inline uint64_t alignment_of(const at::Tensor &t) {    // as facts.py
  uint64_t bits = 128 | (uint64_t)(uintptr_t)t.unsafeGetTensorImpl()->data();
  c10::IntArrayRef strides = t.strides();
  int64_t size = (int64_t)t.element_size();
  if (t.is_contiguous()) bits |= strides.size() > 1 ? (uint64_t)(t.sizes().back() * size) : 0;
  else
    for (size_t i = 0; i + 1 < strides.size(); i++) bits |= (uint64_t)(strides[i] * size);
  return bits & (~bits + 1);
}

// Of a whole number. native.py sees to it that no field makes more than 47 tests.
inline uint64_t number_word(const Field &f, int64_t value) {
  if (f.exact) return (uint64_t)value;
  uint64_t word = 0;
  int bit = 0;
  for (double x : f.equals) word |= (uint64_t)((double)value == x) << bit++;
  for (double x : f.above) word |= (uint64_t)((double)value > x) << bit++;
  for (int64_t x : f.multiples) word |= (uint64_t)(value - floor_div(value, x) * x == 0) << bit++;
  return f.bucket ? word << 16 | (uint16_t)bucket(value) : word << 16;
}

inline uint64_t number_word(const Field &f, double value) {
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
inline bool fits(const Param &param, PyObject *v) {
  double value;
  if (PyLong_CheckExact(v)) {
    int overflow = 0;
    int64_t integer = PyLong_AsLongLongAndOverflow(v, &overflow);
    if (overflow) return false;
    if (param.kind == INT) return param.least <= integer && integer <= param.most;
    value = (double)integer;
  } else if (param.kind == FLOAT && PyFloat_CheckExact(v)) value = PyFloat_AS_DOUBLE(v);
  else return false;
  return param.lowest <= value && value <= param.highest;
}

// Read the words of the strings and numbers among the parameters; -1 if one has a wrong type or value.
inline int read_scalars(const Program &p, PyObject **values, uint64_t *words, int *variant) {
  int n = 0, filled = 0;
  uint64_t packed = 0;                          // the index of each string's choice, a byte each
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

// Read the bools among the parameters, two bits each. False: one is no bool.
inline bool read_bools(const Program &p, PyObject **values, uint64_t *out) {
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

// A cache of overrides of calls with backend= or policy=, by the identity of these and the context. A string and a
// Layer are immutable; what is cached is alive, so no other object has its address.
struct NamedOverride { PyObject *backend, *policy, *context, *result; };
constexpr size_t RECENT = 64;
inline NamedOverride recent[RECENT];

// The override of a call, borrowed; null for a call that Python must handle.
inline PyObject *named_override(const Extras &extras, PyObject *context) {
  PyObject *backend = extras.backend ? extras.backend : Py_None, *policy = extras.policy ? extras.policy : Py_None;
  if (backend == Py_None && policy == Py_None) return context;
  if (backend != Py_None && !PyUnicode_CheckExact(backend)) return nullptr;
  bool is_immutable = policy == Py_None || Py_TYPE(policy) == layer_type;
  uint64_t mixed = ((uint64_t)(uintptr_t)backend * 31 + (uint64_t)(uintptr_t)policy) * 31 +
                   (uint64_t)(uintptr_t)context;
  NamedOverride &cached = recent[(mixed * 0x9E3779B97F4A7C15ull) >> 58];
  if (is_immutable && cached.backend == backend && cached.policy == policy && cached.context == context)
    return cached.result;
  PyObject *result = PyObject_CallFunctionObjArgs(for_call, backend, policy, nullptr);
  if (!result) { PyErr_Clear(); return nullptr; }      // Python reports what is wrong with it
  NamedOverride old = cached;
  cached = is_immutable ? NamedOverride{Py_NewRef(backend), Py_NewRef(policy), Py_NewRef(context), result}
                        : NamedOverride{nullptr, nullptr, nullptr, result};
  for (PyObject *o : {old.backend, old.policy, old.context, old.result}) Py_XDECREF(o);
  return result;
}

constexpr int FLAG_WORD = 3;                    // grad, determinism, capture, disabled SDPA backends
constexpr uint64_t IN_CAPTURE = 4;

// The SDPA backends that torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp disable, a bit each.
inline uint64_t sdpa_off(const at::Context &context) {
  return (uint64_t)!context.userEnabledFlashSDP() << 3 | (uint64_t)!context.userEnabledMemEfficientSDP() << 4 |
         (uint64_t)!context.userEnabledMathSDP() << 5 | (uint64_t)!context.userEnabledCuDNNSDP() << 6;
}

// The override in force, borrowed: the ContextVar or `recent` keeps it alive while this call looks it up.
// Null: a Python error, or, with none set, a call that is not ordinary.
inline PyObject *override_of(const Extras &extras) {
  PyObject *context = nullptr;
  if (PyContextVar_Get(override_var, Py_None, &context) < 0) return nullptr;
  Py_DECREF(context);
  return extras.backend || extras.policy ? named_override(extras, context) : context;
}

// Are the values not what lies in memory: a wrapper that has left its transform, a negated or conjugated view, zeros that
// were never written, a storage that was freed? Python says which.
inline bool is_unreadable(const c10::TensorImpl *impl, c10::Device device) {
  constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                      c10::DispatchKey::Functionalize});
  if (impl->key_set().has_any(lazy)) return true;
  if (!device.is_cpu() && !device.is_cuda()) return false;
  if (!impl->has_storage()) return true;
  return !impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() && impl->numel();
}

// Does the tensor carry a tangent (torch.autograd.forward_ad)? A view may get its base's when asked for it.
inline bool is_dual(const at::Tensor &tensor, c10::TensorImpl *impl) {
  auto *meta = static_cast<torch::autograd::AutogradMeta *>(impl->autograd_meta());
  return meta && (meta->fw_grad_ || meta->is_view_) && tensor._fw_grad(0).defined();
}

// Read the key of a call, as outside of a capture, into `words`; returns their number, 0 for a call that is not ordinary.
inline int read_key(const Program &p, uint64_t given, PyObject **values, PyObject *override, uint64_t *words) {
  int n = 0;
  Sizes sizes;
  words[n++] = (uint64_t)(uintptr_t)override;
  auto tls = c10::impl::tls_local_dispatch_key_set();
  words[n++] = tls.included_.raw_repr();
  words[n++] = tls.excluded_.raw_repr();
  bool grad = c10::GradMode::is_enabled();
  uint64_t flags = (uint64_t)at::globalContext().deterministicAlgorithms() << 1;
  if (p.sdpa_switches) flags |= sdpa_off(at::globalContext());
  n++;                                          // FLAG_WORD
  uint64_t packed = p.default_bools;
  if (given & p.bool_mask && !read_bools(p, values, &packed)) return 0;
  // Mostly every string and number is the default object itself: then one bit stands for them all.
  int variant = p.default_variant;
  bool at_defaults = variant >= 0;
  if (given & p.scalar_mask)
    for (size_t i = 0; at_defaults && i < p.scalars.size(); i++)
      at_defaults = values[p.scalars[i]] == p.defaults[p.scalars[i]];
  if (!at_defaults) {
    variant = 0;
    uint64_t *section = words + n + 1;          // behind the word for the bools
    int count = read_scalars(p, values, section, &variant);
    if (count < 0) return 0;
    at_defaults = (size_t)count == p.default_words.size() && p.default_variant >= 0 &&
               !std::memcmp(section, p.default_words.data(), count * 8);  // equal to the defaults, by value
    words[n++] = packed << 1 | !at_defaults;
    if (!at_defaults) n += count;
  } else words[n++] = packed << 1;
  for (int i : p.derived_inputs) {
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
    if (is_unreadable(impl, device) || is_dual(tensor, impl)) return 0;
    if (t.same_dtype && impl->dtype() != main->dtype()) return 0;
    uint64_t broadcast = 0;
    if (!sizes.bind(t.shapes[variant], impl->sizes(), &broadcast)) return 0;
    uint64_t word = 1ull << 63 | (uint64_t)(uint8_t)c10::typeMetaToScalarType(impl->dtype()) |
                    (uint64_t)(uint8_t)device.type() << 8 | (uint64_t)(uint8_t)device.index() << 16 | broadcast << 24;
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
      if (!impl->has_storage()) return 0;       // as on other accelerators
      words[n++] = device.is_meta() ? 0 : alignment_of(tensor);
    }
  }
  for (const Derived &d : p.derived)
    if (!evaluate(d.code, sizes.value, sizes.known, &sizes.value[d.slot], &sizes.known[d.slot])) return 0;
  uint64_t absent = 0;                          // which sizes are unknown, a bit each
  int numbered = 0;
  for (const Field &f : p.fields) {
    bool known = sizes.known[f.slot];
    absent = absent << 1 | !known;
    if (++numbered % 64 == 0) { words[n++] = absent; absent = 0; }
    words[n++] = known ? number_word(f, sizes.value[f.slot]) : 0;
  }
  words[n++] = absent;
  words[FLAG_WORD] = flags;
  return n;
}

// The current CUDA device; -1 if it is lost.
inline int current_device() {
  try {
    return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getDevice().index();
  } catch (const c10::Error &) {                // Python reports it
    return -1;
  }
}

// Is torch's current stream on this device the default one, which is null for the driver?
inline bool on_default_stream(int device) {
  c10::Device place(c10::DeviceType::CUDA, (c10::DeviceIndex)device);
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getStream(place).id() == 0;
}

// Is a CUDA graph being captured? Asking the driver takes longer than all else, so it is asked only where the answer
// matters, and not for the default stream, which cannot be captured. 0 or 1; -1: the device is lost, which Python reports.
inline int in_capture(const Program &p, PyObject **values) {
  if (!p.watch_capture || !capturing || p.main < 0 || !THPVariable_Unpack(values[p.main]).is_cuda()) return 0;
  int device = current_device();
  if (device >= 0 && on_default_stream(device)) return 0;
  PyObject *answer = PyObject_CallNoArgs(capturing);
  if (!answer) PyErr_Clear();
  Py_XDECREF(answer);                           // True and False outlive it
  return answer ? answer == Py_True : -1;
}

}  // namespace fastpath

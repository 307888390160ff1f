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

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int MAX_PARAMS = 48, MAX_WORDS = 96, MAX_SLOTS = 48, MAX_STACK = 24;

PyTypeObject *tensor_type, *parameter_type;
PyObject *override_var;   // the ContextVar of context.py
PyObject *capturing;      // torch's question whether a CUDA graph is being captured, or NULL

// ---------------------------------------------------------------- the program

enum Kind { TENSOR, BOOL, INT, FLOAT, STR, GENERATOR };   // a generator is passed on, never read
enum Token { BIND, CHECK, LITERAL, LEAD, SAME_LEAD, SPREAD };
enum Code { FACT, CONST, ADD, SUB, MUL, DIV, MOD, EQ, NE, LT, LE, GT, GE, MAX, MIN };

struct Param {
  PyObject *name, *fallback;                    // fallback: the default, or NULL if it must be given
  Kind kind;
  bool optional, keyword_only;
  std::vector<PyObject *> choices;              // of a str parameter
};
struct Dim { Token token; int64_t value; };     // value: slot, literal, or index of the tensor with the same lead
struct Tensor {
  int param;
  bool want_stride, want_alignment, want_ndim;
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
  std::vector<Tensor> tensors;
  std::vector<Derived> derived;
  std::vector<Field> fields;
  int variant = -1;                             // the str parameter that picks the shapes
  int variants = 1, slots = 0;
  bool watch_capture = false;
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

uint64_t hash_of(const uint64_t *words, size_t n) {
  uint64_t h = 0x9E3779B97F4A7C15ull;
  for (size_t i = 0; i < n; i++) h = mix(h ^ words[i], 0xe7037ed1a0b428dbull + i);
  return h | 1;
}

int64_t bucket(int64_t n) {                     // as spec/grid.py
  if (n <= 16) return n >= 0 ? n : -1;
  int octave = 63 - __builtin_clzll((unsigned long long)(n - 1));
  return 64 + 2 * octave + (((n - 1) >> (octave - 1)) & 1);
}

bool is_plain(PyObject *o) { return Py_TYPE(o) == tensor_type || Py_TYPE(o) == parameter_type; }

// ---------------------------------------------------------------- reading a call

// Order the arguments by parameter. False: not an ordinary call.
bool order_arguments(const Program &p, PyObject *const *args, Py_ssize_t n, PyObject *keywords, PyObject **out) {
  size_t count = p.params.size();
  if ((size_t)n > count) return false;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (p.params[i].keyword_only) return false;
    out[i] = args[i];
  }
  for (size_t i = n; i < count; i++) out[i] = nullptr;
  Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t j = 0; j < named; j++) {
    PyObject *name = PyTuple_GET_ITEM(keywords, j);
    size_t i = n;
    while (i < count && p.params[i].name != name) i++;       // both interned: equal means identical
    if (i == count || out[i]) return false;
    out[i] = args[n + j];
  }
  for (size_t i = n; i < count; i++)
    if (!out[i] && !(out[i] = p.params[i].fallback)) return false;
  return true;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

bool evaluate(const std::vector<Instruction> &code, const int64_t *slots, const bool *known, int64_t *out, bool *is_known) {
  int64_t stack[MAX_STACK];
  int top = 0;
  *is_known = true;
  for (const Instruction &i : code) {
    if (i.code == FACT) {
      if (!known[i.value]) { *is_known = false; return true; }
      stack[top++] = slots[i.value];
      continue;
    }
    if (i.code == CONST) { stack[top++] = i.value; continue; }
    int64_t b = stack[--top], a = stack[--top], r = 0;
    switch (i.code) {
      case ADD: r = a + b; break;
      case SUB: r = a - b; break;
      case MUL: r = a * b; break;
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

// Bind the sizes of one tensor to slots and check those seen before; notes how it broadcasts.
bool bind_shape(const std::vector<Dim> &shape, const at::Tensor &t, int64_t *slots, bool *known, uint64_t *spread,
                const at::Tensor **by_param) {
  c10::IntArrayRef sizes = t.sizes();
  size_t n = sizes.size(), m = shape.size();
  if (!m) return true;
  if (shape[0].token == SPREAD) {
    if (n > m) return false;
    uint64_t bits = n;
    for (size_t i = 0; i < n; i++) {
      int64_t want = slots[shape[m - n + i].value];
      if (sizes[i] != want) {
        if (sizes[i] != 1) return false;
        bits |= 256ull << i;
      }
    }
    *spread = bits;
    return true;
  }
  if (shape[0].token == LEAD || shape[0].token == SAME_LEAD) {
    size_t tail = m - 1;
    if (n < tail || n < 1) return false;
    if (shape[0].token == SAME_LEAD) return sizes.equals(by_param[shape[0].value]->sizes());
    int64_t rows = 1;
    for (size_t i = 0; i + tail < n; i++) rows *= sizes[i];
    slots[shape[0].value] = rows;
    known[shape[0].value] = true;
    for (size_t i = 0; i < tail; i++) {
      slots[shape[1 + i].value] = sizes[n - tail + i];
      known[shape[1 + i].value] = true;
    }
    return slots[shape[tail].value] != 0;
  }
  if (n != m) return false;
  for (size_t i = 0; i < m; i++) {
    const Dim &d = shape[i];
    if (d.token == BIND) { slots[d.value] = sizes[i]; known[d.value] = true; }
    else if (sizes[i] != (d.token == CHECK ? slots[d.value] : d.value)) return false;
  }
  return true;
}

uint64_t alignment_of(const at::Tensor &t) {    // as facts.py
  uint64_t bits = 128 | (uint64_t)(uintptr_t)t.unsafeGetTensorImpl()->data();
  c10::IntArrayRef strides = t.strides();
  for (size_t i = 0; i + 1 < strides.size(); i++) bits |= (uint64_t)(strides[i] * (int64_t)t.element_size());
  return bits & (~bits + 1);
}

uint64_t number_word(const Field &f, double value, int64_t whole) {
  if (f.exact) return (uint64_t)whole;
  uint64_t word = 0;
  int bit = 0;
  for (double x : f.equals) word |= (uint64_t)(value == x) << bit++;
  for (double x : f.above) word |= (uint64_t)(value > x) << bit++;
  for (int64_t x : f.multiples) word |= (uint64_t)(whole - floor_div(whole, x) * x == 0) << bit++;
  return f.bucket ? word << 16 | (uint16_t)bucket(whole) : word << 16;
}

// The key of a call into `words`; the number of words, 0 for a call that is not ordinary, -1 on a Python error.
int read_key(const Program &p, PyObject **values, uint64_t *words) {
  int n = 0;
  int64_t slots[MAX_SLOTS];
  bool known[MAX_SLOTS] = {};
  const at::Tensor *by_param[MAX_PARAMS] = {};
  PyObject *over = nullptr;
  if (PyContextVar_Get(override_var, Py_None, &over) < 0) return -1;
  words[n++] = (uint64_t)(uintptr_t)over;
  Py_DECREF(over);                              // the variable keeps it alive while this call looks it up
  auto tls = c10::impl::tls_local_dispatch_key_set();
  words[n++] = tls.included_.raw_repr();
  words[n++] = tls.excluded_.raw_repr();
  bool grad = c10::GradMode::is_enabled();
  uint64_t flags = grad | (uint64_t)at::globalContext().deterministicAlgorithms() << 1;
  int flag_word = n++;
  int variant = 0;
  uint64_t packed = 0;                          // bools, and choices of strings, a byte each
  int filled = 0;
  for (size_t i = 0; i < p.params.size(); i++) {
    const Param &param = p.params[i];
    if (param.kind != BOOL && param.kind != STR) continue;
    PyObject *v = values[i];
    uint64_t code = 0;
    if (param.kind == BOOL) {
      if (v == Py_True) code = 1;
      else if (v != Py_False) return 0;
    } else {
      size_t c = 0;
      while (c < param.choices.size() && param.choices[c] != v) c++;
      if (c == param.choices.size()) {          // not the interned object: compare the text
        if (!PyUnicode_CheckExact(v)) return 0;
        for (c = 0; c < param.choices.size(); c++)
          if (param.choices[c] != Py_None && PyUnicode_Compare(param.choices[c], v) == 0) break;
        if (c == param.choices.size()) return 0;
      }
      code = c;
      if ((int)i == p.variant) {
        if ((int)c >= p.variants) return 0;     // "auto" and the like
        variant = (int)c;
      }
    }
    packed = packed << 8 | code;
    if (++filled == 8) { words[n++] = packed; packed = 0; filled = 0; }
  }
  words[n++] = packed;
  bool on_cuda = false;
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
    by_param[t.param] = &tensor;
    uint64_t spread = 0;
    if (!bind_shape(t.shapes[variant], tensor, slots, known, &spread, by_param)) return 0;
    c10::Device device = impl->device();
    on_cuda |= device.is_cuda();
    uint64_t word = 1ull << 63 | (uint64_t)(uint8_t)c10::typeMetaToScalarType(impl->dtype()) |
                    (uint64_t)(uint8_t)device.type() << 8 | (uint64_t)(uint8_t)device.index() << 16 | spread << 24;
    if (grad && impl->requires_grad()) word |= 1ull << 62;
    bool contiguous = t.want_stride && impl->is_contiguous();
    if (contiguous) word |= 1ull << 61;
    if (t.want_ndim) word |= (uint64_t)impl->dim() << 48;
    words[n++] = word;
    if (t.want_stride && !contiguous) {
      auto strides = impl->strides();
      auto sizes = impl->sizes();
      words[n++] = strides.empty() || sizes.back() == 1 ? 1 : (uint64_t)strides.back();
    }
    if (t.want_alignment) words[n++] = alignment_of(tensor);
  }
  for (size_t i = 0; i < p.params.size(); i++)  // whole numbers may appear in derived facts
    if (p.params[i].kind == INT) {
      int slot = p.slots + (int)i;
      if (values[i] == Py_None) { if (!p.params[i].optional) return 0; continue; }
      if (!PyLong_CheckExact(values[i])) return 0;
      slots[slot] = PyLong_AsLongLong(values[i]);
      if (slots[slot] == -1 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
      known[slot] = true;
    }
  for (const Derived &d : p.derived)
    if (!evaluate(d.code, slots, known, &slots[d.slot], &known[d.slot])) return 0;
  for (const Field &f : p.fields) {
    if (f.slot >= 0) {
      words[n++] = known[f.slot] ? number_word(f, (double)slots[f.slot], slots[f.slot]) : ~0ull;
      continue;
    }
    PyObject *v = values[f.param];
    double value;
    if (v == Py_None) {
      if (!p.params[f.param].optional) return 0;
      words[n++] = ~0ull;
      continue;
    }
    if (PyFloat_CheckExact(v)) value = PyFloat_AS_DOUBLE(v);
    else if (PyLong_CheckExact(v)) {
      value = PyLong_AsDouble(v);
      if (value == -1.0 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
    } else return 0;
    int64_t bits;
    std::memcpy(&bits, &value, 8);
    words[n++] = number_word(f, value, bits);
  }
  if (p.watch_capture && on_cuda && capturing) {
    PyObject *answer = PyObject_CallNoArgs(capturing);
    if (!answer) return -1;
    flags |= (uint64_t)(answer == Py_True) << 2;
    Py_DECREF(answer);
  }
  words[flag_word] = flags;
  return n;
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

void clear(Dispatcher *d) {
  std::vector<Slot> old(d->table->size());
  old.swap(*d->table);                          // releasing may run Python code: the table must be whole by then
  d->used = 0;
  for (Slot &s : old)
    if (s.hash) release(s);
}

void place(Dispatcher *d, Slot &&s) {
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
    if (order_arguments(*d->program, args, n, keywords, values)) {
      int count = read_key(*d->program, values, words);
      if (count < 0) return nullptr;
      Slot *s = count ? find(d, words, count, hash_of(words, count)) : nullptr;
      if (s) {
        s->hits++;
        PyObject *entry = Py_NewRef(s->entry);
        PyObject *out = run(s->call, values);
        if (!out && PyErr_ExceptionMatches(PyExc_Exception)) out = recover(d, entry, args, n, keywords);
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

// params: ((name, kind, optional, keyword_only, has_default, default, choices), ...)
// tensors: ((param, want_stride, want_alignment, want_ndim, (((token, value), ...) per variant)), ...)
// derived: ((slot, ((code, value), ...)), ...)   fields: ((slot, param, exact, bucket, equals, above, multiples), ...)
PyObject *install(PyObject *self, PyObject *args) {
  Dispatcher *d = (Dispatcher *)self;
  PyObject *params, *tensors, *derived, *fields;
  int variant, variants, slots, watch;
  long long epoch, limit;
  if (!PyArg_ParseTuple(args, "O!O!O!O!iiipLL", &PyTuple_Type, &params, &PyTuple_Type, &tensors, &PyTuple_Type, &derived,
                        &PyTuple_Type, &fields, &variant, &variants, &slots, &watch, &epoch, &limit))
    return nullptr;
  if (PyTuple_GET_SIZE(params) > MAX_PARAMS || slots + PyTuple_GET_SIZE(params) > MAX_SLOTS ||
      12 + 3 * PyTuple_GET_SIZE(tensors) + PyTuple_GET_SIZE(fields) + PyTuple_GET_SIZE(params) / 8 > MAX_WORDS) {
    PyErr_SetString(PyExc_OverflowError, "this op has more parameters or facts than the native path holds");
    return nullptr;
  }
  Program *p = new Program;
  p->variant = variant;
  p->variants = variants;
  p->slots = slots;
  p->watch_capture = watch;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params); i++) {
    PyObject *t = PyTuple_GET_ITEM(params, i);
    Param param;
    param.name = Py_NewRef(PyTuple_GET_ITEM(t, 0));
    PyUnicode_InternInPlace(&param.name);
    param.kind = (Kind)at_index(t, 1);
    param.optional = at_index(t, 2);
    param.keyword_only = at_index(t, 3);
    param.fallback = at_index(t, 4) ? Py_NewRef(PyTuple_GET_ITEM(t, 5)) : nullptr;
    PyObject *choices = PyTuple_GET_ITEM(t, 6);
    for (Py_ssize_t c = 0; c < PyTuple_GET_SIZE(choices); c++) {
      PyObject *choice = Py_NewRef(PyTuple_GET_ITEM(choices, c));
      if (PyUnicode_CheckExact(choice)) PyUnicode_InternInPlace(&choice);
      param.choices.push_back(choice);
    }
    p->params.push_back(param);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
    PyObject *t = PyTuple_GET_ITEM(tensors, i), *shapes = PyTuple_GET_ITEM(t, 4);
    Tensor tensor{(int)at_index(t, 0), (bool)at_index(t, 1), (bool)at_index(t, 2), (bool)at_index(t, 3), {}};
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
    p->fields.push_back(f);
  }
  if (PyErr_Occurred()) { delete p; return nullptr; }
  size_t size = 64;
  while (size < 2 * (size_t)limit) size *= 2;
  Program *old = d->program;
  d->program = p;
  d->limit = (size_t)limit;
  d->epoch = epoch;
  clear(d);
  if (d->table->size() != size) d->table->assign(size, Slot());
  delete old;                                   // its names and defaults are kept: they are few and shared
  Py_RETURN_NONE;
}

// put(entry, epoch, values, fn, sources, constants, keywords or None, positional, item, first) -> bool
PyObject *put(PyObject *self, PyObject *args) {
  Dispatcher *d = (Dispatcher *)self;
  PyObject *entry, *tuple, *fn, *sources, *constants, *keywords;
  long long epoch;
  Py_ssize_t positional, item, first;
  if (!PyArg_ParseTuple(args, "OLO!OO!O!Onnn", &entry, &epoch, &PyTuple_Type, &tuple, &fn, &PyTuple_Type, &sources,
                        &PyTuple_Type, &constants, &keywords, &positional, &item, &first))
    return nullptr;
  if (!d->program || epoch != d->epoch || PyTuple_GET_SIZE(tuple) != (Py_ssize_t)d->program->params.size() ||
      PyTuple_GET_SIZE(sources) > MAX_PARAMS)
    Py_RETURN_FALSE;
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) values[i] = PyTuple_GET_ITEM(tuple, i);
  int n = read_key(*d->program, values, words);
  if (n < 0) return nullptr;
  if (!n) Py_RETURN_FALSE;
  uint64_t hash = hash_of(words, n);
  if (find(d, words, n, hash)) Py_RETURN_FALSE;
  Slot s;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); i++) s.call.sources.push_back((int)at_index(sources, i));
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(constants); i++)
    s.call.constants.push_back(Py_NewRef(PyTuple_GET_ITEM(constants, i)));
  s.hash = hash;
  s.key.assign(words, words + n);
  s.entry = Py_NewRef(entry);
  PyContextVar_Get(override_var, Py_None, &s.override_object);
  s.call.fn = Py_NewRef(fn);
  s.call.keywords = keywords == Py_None ? nullptr : Py_NewRef(keywords);
  s.call.positional = positional;
  s.call.item = item;
  s.call.first = first;
  if (d->used >= d->limit) sweep(d);
  place(d, std::move(s));
  Py_RETURN_TRUE;
}

PyObject *ordered(Dispatcher *d, PyObject *const *args, Py_ssize_t n, PyObject *keywords, uint64_t *words, int *count) {
  PyObject *values[MAX_PARAMS];
  *count = 0;
  if (d->program && order_arguments(*d->program, args, n, keywords, values)) *count = read_key(*d->program, values, words);
  return *count < 0 ? nullptr : Py_None;
}

PyObject *key(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  uint64_t words[MAX_WORDS];
  int count;
  if (!ordered((Dispatcher *)self, args, n, keywords, words, &count)) return nullptr;
  if (!count) Py_RETURN_NONE;
  PyObject *out = PyTuple_New(count);
  for (int i = 0; out && i < count; i++) PyTuple_SET_ITEM(out, i, PyLong_FromUnsignedLongLong(words[i]));
  return out;
}

PyObject *lookup(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  uint64_t words[MAX_WORDS];
  int count;
  if (!ordered((Dispatcher *)self, args, n, keywords, words, &count)) return nullptr;
  Slot *s = count ? find((Dispatcher *)self, words, count, hash_of(words, count)) : nullptr;
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
  d->table = new std::vector<Slot>(64);
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
    {"install", install, METH_VARARGS, "Take a key program and forget every entry."},
    {"put", put, METH_VARARGS, "Remember what to call for calls like these values; False if they are not ordinary."},
    {"key", (PyCFunction)(void (*)(void))key, METH_FASTCALL | METH_KEYWORDS, "The key of a call, or None."},
    {"lookup", (PyCFunction)(void (*)(void))lookup, METH_FASTCALL | METH_KEYWORDS, "The entry a call would hit, or None."},
    {"collect", collect, METH_NOARGS, "Add the native hits to the Python entries."},
    {"size", size, METH_NOARGS, "How many entries there are."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef getters[] = {{"call", get_call, nullptr, "The public function.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyTypeObject dispatcher_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// setup(Tensor, Parameter, override ContextVar, capturing or None)
PyObject *setup(PyObject *, PyObject *args) {
  PyObject *t, *p, *v, *c;
  if (!PyArg_ParseTuple(args, "OOOO", &t, &p, &v, &c)) return nullptr;
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

// The hot path in C++: `dispatch` is what lz.<op> runs on a hit. It reads the key of a call straight
// from its tensors (key.h), finds the entry (table.h) and calls it (call.h, aten.h, launch.h).
//
// It does what the Python that hotpath.py generates does, and like it follows the op's key program:
// nothing here knows any particular op. native/__init__.py encodes the program as plain tuples.
// A call that is not an ordinary one (a subclass, a wrong rank, an unknown keyword) goes to Python,
// which reports what is wrong. All state is guarded by the GIL: between reading a key and taking a
// reference on what it finds, no other thread runs.
#include "aten.h"
#include "call.h"
#include "key.h"
#include "launch.h"
#include "table.h"

using namespace fastpath;

namespace {

// The version counters of a call's tensors, by which torch counts writes. Inference tensors have none.
struct Versions {
  uint64_t tensors = 0;                         // a bit for each parameter that is a tensor
  uint32_t counts[MAX_PARAMS];

  static uint32_t of(PyObject *value) {
    const c10::VariableVersion &version = THPVariable_Unpack(value).unsafeGetTensorImpl()->version_counter();
    return version.enabled() ? version.current_version() : 0;
  }

  void read(const Program &p, PyObject **values) {
    for (const Tensor &t : p.tensors) {
      if (values[t.param] == Py_None) continue;
      tensors |= 1ull << t.param;
      counts[t.param] = of(values[t.param]);
    }
  }

  uint64_t changed(PyObject **values) const {
    uint64_t bits = 0;
    for (int i = 0; i < MAX_PARAMS; i++)
      if (tensors >> i & 1 && counts[i] != of(values[i])) bits |= 1ull << i;
    return bits;
  }
};

PyObject *recover(Dispatcher *d, PyObject *entry, PyObject *const *args, Py_ssize_t n, PyObject *keywords,
                  uint64_t changed) {
  PyObject *type, *fault, *trace;
  PyErr_Fetch(&type, &fault, &trace);
  PyErr_NormalizeException(&type, &fault, &trace);
  if (trace) PyException_SetTraceback(fault, trace);
  PyObject *arguments = PyTuple_New(n), *kwargs = PyDict_New(), *out = nullptr;
  if (arguments && kwargs) {
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(arguments, i, Py_NewRef(args[i]));
    Py_ssize_t m = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < m; i++) PyDict_SetItem(kwargs, PyTuple_GET_ITEM(keywords, i), args[n + i]);
    PyObject *written = PyLong_FromUnsignedLongLong(changed);
    if (written) out = PyObject_CallFunctionObjArgs(d->recover, entry, arguments, kwargs, fault, written, nullptr);
    Py_XDECREF(written);
  }
  Py_XDECREF(arguments);
  Py_XDECREF(kwargs);
  Py_XDECREF(type);
  Py_XDECREF(fault);
  Py_XDECREF(trace);
  return out;
}

// Order the arguments of a call into `values` and read its key into `words`. Returns as read_key; -1 on a Python error.
int read_call(Dispatcher *d, PyObject *const *args, Py_ssize_t n, PyObject *keywords, PyObject **values,
            uint64_t *words) {
  Extras extras;
  uint64_t is_given = d->program ? order_arguments(*d->program, args, n, keywords, values, &extras) : 0;
  if (!is_given) return 0;
  PyObject *override = override_of(extras);
  if (!override) return PyErr_Occurred() ? -1 : 0;
  return read_key(*d->program, is_given, values, override, words);
}

PyObject *dispatch(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  Dispatcher *d = (Dispatcher *)self;
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  int count = read_call(d, args, n, keywords, values, words);
  if (count < 0) return nullptr;
  Slot *s = count ? find_for(d, values, words, count) : nullptr;
  if (!s || s->suspect) return PyObject_Vectorcall(d->miss, args, n, keywords);
  s->hits++;
  PyObject *entry = Py_NewRef(s->entry);
  Versions before;
  if (s->watched) before.read(*d->program, values);
  PyObject *out = s->call.invoke(s->call, values);
  if (!out && PyErr_ExceptionMatches(faults)) {
    s = find(d, words, count, hash_of(words, count));   // a new world may have dropped it meanwhile
    if (s && s->entry == entry && s->watched) s->suspect = true;
    out = recover(d, entry, args, n, keywords, before.changed(values));
  }
  Py_DECREF(entry);
  return out;
}

// ---------------------------------------------------------------- the Python interface

int64_t at_index(PyObject *tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)); }

void numbers(PyObject *tuple, std::vector<double> *out) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) out->push_back(PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, i)));
}

// params: ((name, kind, optional, keyword_only, has_default, default, choices, least, most), ...)
// tensors: ((param, (want_stride, want_ndim, want_grad, want_alignment, same_dtype), (((token, value), ...) per variant)), ...)
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
    d->program = nullptr;                       // too large for the native path: every call goes to Python
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
    param.default_value = at_index(t, 4) ? Py_NewRef(PyTuple_GET_ITEM(t, 5)) : nullptr;
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
    p->defaults.push_back(param.default_value);
    if (!param.default_value) p->required |= 1ull << i;
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
    if (derived_from) p->derived_inputs.push_back(i);
  }
  if (PyErr_Occurred()) { delete p; return nullptr; }
  // If a bool has no default, it is always given, and all bools are read.
  if (!(p->required & p->bool_mask) && !read_bools(*p, p->defaults.data(), &p->default_bools)) p->bool_mask = ~0ull;
  if (!(p->required & p->scalar_mask)) {
    uint64_t words[MAX_WORDS];
    int first = 0, n = read_scalars(*p, p->defaults.data(), words, &first);
    if (n >= 0) {
      p->default_words.assign(words, words + n);
      p->default_variant = first;
    }
  }
  Program *old = d->program;
  d->program = p;
  d->limit = (size_t)limit;
  d->epoch = epoch;
  clear(d);
  delete old;                                   // its names and defaults are never freed: they are few and shared
  Py_RETURN_TRUE;
}

bool read_sources(PyObject *tuple, std::vector<Source> *out) {       // ((kind, index), ...)
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    PyObject *source = PyTuple_GET_ITEM(tuple, i);
    out->push_back({(Source::Kind)at_index(source, 0), (int)at_index(source, 1)});
  }
  return !PyErr_Occurred();
}

// put(entry, epoch, values, override, fn, sources, constants, keywords or None, positional, item, first, same_in_capture,
//     name of an ATen operator or None, inputs, Recordings or None, watched) -> bool
PyObject *put(PyObject *self, PyObject *args) {
  Dispatcher *d = (Dispatcher *)self;
  PyObject *entry, *tuple, *override, *fn, *sources, *constants, *keywords, *inputs, *recordings;
  const char *operator_name;
  long long epoch;
  int same_in_capture, watched;
  Slot s;
  if (!PyArg_ParseTuple(args, "OLO!OOO!O!OnnnpzO!Op", &entry, &epoch, &PyTuple_Type, &tuple, &override, &fn,
                        &PyTuple_Type, &sources, &PyTuple_Type, &constants, &keywords, &s.call.positional,
                        &s.call.item, &s.call.first, &same_in_capture, &operator_name, &PyTuple_Type, &inputs,
                        &recordings, &watched))
    return nullptr;
  if (!d->program || epoch != d->epoch || PyTuple_GET_SIZE(tuple) != (Py_ssize_t)d->program->params.size() ||
      PyTuple_GET_SIZE(sources) > MAX_PARAMS)
    Py_RETURN_FALSE;
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) values[i] = PyTuple_GET_ITEM(tuple, i);
  int n = read_key(*d->program, ~0ull, values, override, words);
  Slot *known = n ? find_for(d, values, words, n) : nullptr;
  if (known && known->entry == entry) known->suspect = false;
  if (!n || known) Py_RETURN_FALSE;
  if (!read_sources(sources, &s.call.sources) || !read_sources(inputs, &s.call.inputs)) return nullptr;
  // torch.jit.trace records sizes only through Python's functions. The mode is part of the key.
  bool traced = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
  if (!operator_name || traced || !call_operator(operator_name, &s.call)) s.call.invoke = call_python;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(constants); i++)
    s.call.constants.push_back(Py_NewRef(PyTuple_GET_ITEM(constants, i)));
  s.same_in_capture = same_in_capture;
  s.watched = watched;
  s.hash = hash_of(words, n);
  s.key.assign(words, words + n);
  s.entry = Py_NewRef(entry);
  s.override_object = Py_NewRef(override);
  s.call.fn = Py_NewRef(fn);
  s.call.keywords = keywords == Py_None ? nullptr : Py_NewRef(keywords);
  if (recordings != Py_None && !traced) {       // the entry holds them
    s.call.invoke = call_recorded;
    s.call.recordings = recordings;
  }
  if (d->used >= d->limit) {
    sweep(d);
    if (epoch != d->epoch) { release(s); Py_RETURN_FALSE; }     // releasing entries may have run Python code
  }
  insert(d, std::move(s));
  Py_RETURN_TRUE;
}

PyObject *key(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  int count = read_call((Dispatcher *)self, args, n, keywords, values, words);
  if (count < 0) return nullptr;
  if (!count) Py_RETURN_NONE;
  PyObject *out = PyTuple_New(count);
  for (int i = 0; out && i < count; i++) PyTuple_SET_ITEM(out, i, PyLong_FromUnsignedLongLong(words[i]));
  return out;
}

// The slot that a call would hit; null if none, with or without a Python error.
Slot *find_call(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  PyObject *values[MAX_PARAMS];
  uint64_t words[MAX_WORDS];
  int count = read_call((Dispatcher *)self, args, n, keywords, values, words);
  return count > 0 ? find_for((Dispatcher *)self, values, words, count) : nullptr;
}

PyObject *lookup(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  Slot *s = find_call(self, args, n, keywords);
  return !s && PyErr_Occurred() ? nullptr : Py_NewRef(s ? s->entry : Py_None);
}

PyObject *kind(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
  Slot *s = find_call(self, args, n, keywords);
  if (s) return PyUnicode_FromString(s->call.kind);
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyObject *collect(PyObject *self, PyObject *) {
  std::vector<Slot> &table = *((Dispatcher *)self)->table;
  for (size_t i = 0; i < table.size(); i++)
    if (table[i].hash) report_hits(table[i]);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject *size(PyObject *self, PyObject *) { return PyLong_FromSize_t(((Dispatcher *)self)->used); }

PyObject *get_call(PyObject *self, void *) { return Py_NewRef(((Dispatcher *)self)->call); }

PyObject *new_dispatcher(PyTypeObject *type, PyObject *args, PyObject *) {
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
    {"put", put, METH_VARARGS, "Add an entry for calls like these values; False if they are not ordinary."},
    {"key", (PyCFunction)(void (*)(void))key, METH_FASTCALL | METH_KEYWORDS, "The key of a call outside of a capture, or None."},
    {"lookup", (PyCFunction)(void (*)(void))lookup, METH_FASTCALL | METH_KEYWORDS, "The entry a call would hit, or None."},
    {"kind", (PyCFunction)(void (*)(void))kind, METH_FASTCALL | METH_KEYWORDS,
     "How the entry that a call would hit is called: python, or the name of an operator; None if there is none."},
    {"collect", collect, METH_NOARGS, "Add the native hits to the Python entries."},
    {"size", size, METH_NOARGS, "How many entries there are."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef getters[] = {{"call", get_call, nullptr, "The public function.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyTypeObject dispatcher_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// setup(Tensor, Parameter, override ContextVar, context.for_call, Layer, _cuda_isCurrentStreamCapturing or None,
//       the exceptions a kernel may raise, _cuda_getCurrentRawStream or None)
PyObject *setup(PyObject *, PyObject *args) {
  PyObject *t, *p, *v, *o, *l, *c, *f, *r;
  if (!PyArg_ParseTuple(args, "OOOOOOOO", &t, &p, &v, &o, &l, &c, &f, &r)) return nullptr;
  raw_stream = r == Py_None ? nullptr : Py_NewRef(r);
  for_call = Py_NewRef(o);
  layer_type = (PyTypeObject *)Py_NewRef(l);
  backend_name = PyUnicode_InternFromString("backend");
  policy_name = PyUnicode_InternFromString("policy");
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
  dispatcher_type.tp_new = new_dispatcher;
  dispatcher_type.tp_methods = methods;
  dispatcher_type.tp_getset = getters;
  if (PyType_Ready(&dispatcher_type) < 0) return nullptr;
  PyObject *m = PyModule_Create(&module);
  if (m) PyModule_AddObject(m, "Dispatcher", Py_NewRef((PyObject *)&dispatcher_type));
  if (m && !add_recordings_type(m)) return nullptr;
  return m;
}

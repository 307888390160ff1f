// Launches of our own GPU kernels: recorded once in Python, replayed here.
//
// A recording is what one call of a kernel did: which tensors it allocated, which compiled functions it launched,
// with which grid and parameters, and what it returned. A later call of the same signature (dtypes, sizes, strides,
// alignment, plain values, device) is replayed: allocate, put the new addresses into the parameters, launch on
// torch's current stream. A size or a stride that a launcher declares to vary is a range in the signature and a
// number that is written into the parameters. What fits no recording goes to Python.
//
// The driver's launch comes as an address: neither headers of CUDA nor torch's CUDA library are needed.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/rand.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <memory>

#include "call.h"

namespace fastpath {

// Of cuda.h.
struct LaunchAttribute { int id; char pad[4]; uint32_t value[16]; };
struct LaunchConfig {
  uint32_t grid[3], block[3], shared;
  void *stream;
  LaunchAttribute *attributes;
  uint32_t attribute_count;
};
using DriverLaunch = int (*)(const LaunchConfig *config, void *function, void **params, void **extra);
constexpr int CLUSTER_DIMENSION = 4;

constexpr size_t MAX_BYTES = 1024, MAX_KERNEL_PARAMS = 96;     // of one launch
constexpr size_t MAX_RECORDINGS = 16;                          // of one entry

struct Free { bool is_stride; int axis; int64_t low, high, step; };
struct Form {                                   // what a tensor of the call must be like
  int param;
  c10::ScalarType dtype;
  c10::Device device;
  uint8_t misaligned;                           // its address modulo 16
  std::vector<int64_t> sizes, strides;
  std::vector<Free> free;                       // of these, the ones that may be others
};
struct Scalar { int param; PyObject *value; };
struct Allocation { bool drawn, dense; std::vector<int64_t> sizes, strides; at::TensorOptions options; };
enum Origin { INPUT, ALLOCATED, KEPT };
struct Pointer { size_t offset; Origin origin; int index; int64_t add; };
struct Number { size_t offset; int width, param; bool is_stride; int axis; int64_t factor; };
struct Launch {
  DriverLaunch launch;
  void *function;
  uint32_t grid[3], threads, shared, cluster;
  std::vector<uint8_t> params;
  std::vector<size_t> places;                   // where each parameter of the kernel begins
  std::vector<Pointer> pointers;
  std::vector<Number> numbers;
  PyObject *refused;                            // (code, device, grid) -> exception
};
struct Recording {
  std::vector<Form> forms;
  std::vector<Scalar> scalars;
  std::vector<Allocation> allocations;
  std::vector<Launch> launches;
  std::vector<int> outputs;                     // an allocation, or -1 - parameter
  bool single = true;                           // not a tuple
  int device = -1;                              // of CUDA; -1: the tensors are on the CPU
  bool one_stream = false;                      // it holds memory that belongs to `stream`
  uintptr_t stream = 0;
  std::vector<PyObject *> hooks;                // lists; while somebody is in one, Python launches
  PyObject *kept = nullptr;                     // what must live as long as this
  uint64_t hits = 0;

  ~Recording() {                                // the GIL is held: see Recordings
    for (Scalar &s : scalars) Py_XDECREF(s.value);
    for (Launch &l : launches) Py_XDECREF(l.refused);
    for (PyObject *h : hooks) Py_XDECREF(h);
    Py_XDECREF(kept);
  }
};

// The recordings of one entry. A replay holds its own while the GIL is released.
struct Recordings {
  PyObject_HEAD
  std::vector<std::shared_ptr<Recording>> *list;
  uint64_t hits, attempts;
};

inline int64_t read_axis(const at::Tensor &t, bool is_stride, int axis) {
  return is_stride ? t.strides()[axis] : t.sizes()[axis];
}

inline bool agrees(const Form &f, c10::IntArrayRef given, const std::vector<int64_t> &want, bool is_stride) {
  if (given.size() != want.size()) return false;
  for (size_t i = 0; i < want.size(); i++) {
    if (given[i] == want[i]) continue;
    bool fits = false;
    for (const Free &v : f.free)
      if (v.is_stride == is_stride && v.axis == (int)i) fits = given[i] >= v.low && given[i] <= v.high && given[i] % v.step == 0;
    if (!fits) return false;
  }
  return true;
}

inline bool same_value(PyObject *a, PyObject *b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return !std::memcmp(&x, &y, 8);
  }
  if (PyLong_CheckExact(a)) {
    int over = 0, beyond = 0;
    long long x = PyLong_AsLongLongAndOverflow(a, &over), y = PyLong_AsLongLongAndOverflow(b, &beyond);
    return !over && !beyond && x == y;
  }
  return PyUnicode_CheckExact(a) && PyUnicode_Compare(a, b) == 0;
}

inline bool matches(const Recording &r, PyObject **values, int device, uintptr_t stream) {
  if (r.device != device || (r.one_stream && r.stream != stream)) return false;
  for (const Scalar &s : r.scalars)
    if (!same_value(s.value, values[s.param])) return false;
  for (const Form &f : r.forms) {
    if (!is_plain(values[f.param])) return false;
    const at::Tensor &t = THPVariable_Unpack(values[f.param]);
    c10::TensorImpl *impl = t.unsafeGetTensorImpl();
    if (c10::typeMetaToScalarType(impl->dtype()) != f.dtype || impl->device() != f.device) return false;
    if (!agrees(f, impl->sizes(), f.sizes, false) || !agrees(f, impl->strides(), f.strides, true)) return false;
    if (((uintptr_t)impl->data() & 15) != f.misaligned) return false;
  }
  for (PyObject *hooks : r.hooks)
    if (PyList_GET_SIZE(hooks)) return false;
  return true;
}

inline PyObject *raw_stream;                    // torch._C._cuda_getCurrentRawStream, or NULL

// Torch's current stream there, as the driver knows it. False: Python must say why not.
inline bool stream_of(int device, uintptr_t *stream) {
  *stream = 0;
  if (on_default_stream(device)) return true;
  PyObject *index = PyLong_FromLong(device), *found = index ? PyObject_CallOneArg(raw_stream, index) : nullptr;
  Py_XDECREF(index);
  if (found) *stream = (uintptr_t)PyLong_AsUnsignedLongLong(found);
  Py_XDECREF(found);
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

struct WithoutGil {
  PyThreadState *state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// Allocates and launches; the driver's code, and in `at` the launch that got it.
inline int perform(const Recording &r, const uint8_t *const *inputs, const int64_t *varying, uintptr_t stream,
                   at::Tensor *made, size_t *at) {
  for (size_t i = 0; i < r.allocations.size(); i++) {
    const Allocation &a = r.allocations[i];
    made[i] = a.drawn ? at::rand(a.sizes, a.options)
              : a.dense ? at::empty(a.sizes, a.options)
                        : at::empty_strided(a.sizes, a.strides, a.options);
  }
  size_t next = 0;
  for (*at = 0; *at < r.launches.size(); ++*at) {
    const Launch &l = r.launches[*at];
    alignas(16) uint8_t bytes[MAX_BYTES];
    void *params[MAX_KERNEL_PARAMS];
    std::memcpy(bytes, l.params.data(), l.params.size());
    for (const Pointer &p : l.pointers) {
      const uint8_t *base = p.origin == INPUT ? inputs[p.index] : (const uint8_t *)made[p.index].unsafeGetTensorImpl()->data();
      const uint8_t *address = base + p.add;
      std::memcpy(bytes + p.offset, &address, 8);
    }
    for (const Number &n : l.numbers) {
      int64_t value = varying[next++];
      int32_t narrow = (int32_t)value;
      if (n.width == 8) std::memcpy(bytes + n.offset, &value, 8);
      else std::memcpy(bytes + n.offset, &narrow, 4);
    }
    for (size_t i = 0; i < l.places.size(); i++) params[i] = bytes + l.places[i];
    LaunchAttribute cluster{CLUSTER_DIMENSION, {}, {l.cluster, 1, 1}};
    LaunchConfig config{{l.grid[0], l.grid[1], l.grid[2]}, {l.threads, 1, 1}, l.shared, (void *)stream,
                        l.cluster > 1 ? &cluster : nullptr, l.cluster > 1 ? 1u : 0u};
    if (int code = l.launch(&config, l.function, params, nullptr)) return code;
  }
  return 0;
}

constexpr size_t MAX_MADE = 16, MAX_VARYING = 32;

inline PyObject *replay(const std::shared_ptr<Recording> &held, PyObject **values, int device, uintptr_t stream) {
  HANDLE_TH_ERRORS
  const Recording &r = *held;
  const uint8_t *inputs[MAX_PARAMS];
  int64_t varying[MAX_VARYING];
  at::Tensor made[MAX_MADE];
  for (const Form &f : r.forms)
    inputs[f.param] = (const uint8_t *)THPVariable_Unpack(values[f.param]).unsafeGetTensorImpl()->data();
  size_t count = 0, at = 0;
  for (const Launch &l : r.launches)
    for (const Number &n : l.numbers)
      varying[count++] = n.factor * read_axis(THPVariable_Unpack(values[n.param]), n.is_stride, n.axis);
  int code;
  {
    WithoutGil released;                        // a full queue, or the allocator, may make this thread wait
    code = perform(r, inputs, varying, stream, made, &at);
  }
  if (code) {
    const Launch &l = r.launches[at];
    PyObject *fault = PyObject_CallFunction(l.refused, "ii(III)", code, device, l.grid[0], l.grid[1], l.grid[2]);
    if (fault) PyErr_SetObject((PyObject *)Py_TYPE(fault), fault);
    Py_XDECREF(fault);
    return nullptr;
  }
  held->hits++;
  auto output = [&](int i) { return i >= 0 ? THPVariable_Wrap(made[i]) : Py_NewRef(values[-1 - i]); };
  if (r.single) return output(r.outputs[0]);
  PyObject *out = PyTuple_New((Py_ssize_t)r.outputs.size());
  for (size_t i = 0; out && i < r.outputs.size(); i++) {
    PyObject *item = output(r.outputs[i]);
    if (!item) { Py_DECREF(out); return nullptr; }
    PyTuple_SET_ITEM(out, (Py_ssize_t)i, item);
  }
  return out;
  END_HANDLE_TH_ERRORS
}

// A thread that has not called CUDA yet has no context. Launching in Python gives it one: a bit for each device.
inline thread_local uint64_t entered = 0;

// The recording that fits this call, now and in this thread; null if there is none.
inline std::shared_ptr<Recording> find_recording(Recordings *recordings, PyObject **values, int *device, uintptr_t *stream) {
  std::vector<std::shared_ptr<Recording>> &list = *recordings->list;
  if (list.empty()) return nullptr;
  if (list[0]->device >= 0) {
    *device = current_device();
    if (*device < 0 || *device > 63 || !raw_stream || !stream_of(*device, stream)) return nullptr;
  }
  for (size_t i = 0; i < list.size(); i++) {
    if (!matches(*list[i], values, *device, *stream)) continue;
    if (i) std::swap(list[0], list[i]);         // mostly the next call is like this one
    return list[0];
  }
  return nullptr;
}

// The kind of call: replayed where a recording fits, else made by Python, which may record it.
inline PyObject *call_recorded(const Call &call, PyObject **values) {
  Recordings *recordings = (Recordings *)call.recordings;
  int device = -1;
  uintptr_t stream = 0;
  std::shared_ptr<Recording> found = find_recording(recordings, values, &device, &stream);
  if (found && (device < 0 || entered >> device & 1)) {
    recordings->hits++;
    return replay(found, values, device, stream);
  }
  PyObject *out = call_python(call, values);    // the entry, and with it the recordings, is held by `dispatch`
  if (out && !recordings->list->empty() && recordings->list->front()->device >= 0) {
    device = current_device();
    if (device >= 0 && device < 64) entered |= 1ull << device;
  }
  return out;
}

// ---------------------------------------------------------------- what Python sees

inline int64_t number_at(PyObject *tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)); }

inline bool read_values(Recording *r, PyObject *values) {
  for (int i = 0; i < (int)PyTuple_GET_SIZE(values); i++) {
    PyObject *v = PyTuple_GET_ITEM(values, i);
    if (THPVariable_Check(v)) {
      const at::Tensor &t = THPVariable_Unpack(v);
      if (t.layout() != c10::kStrided || !t.has_storage()) return false;
      r->forms.push_back({i, t.scalar_type(), t.device(), (uint8_t)((uintptr_t)t.unsafeGetTensorImpl()->data() & 15),
                          t.sizes().vec(), t.strides().vec(), {}});
    } else if (v == Py_None || PyBool_Check(v) || PyLong_CheckExact(v) || PyFloat_CheckExact(v) || PyUnicode_CheckExact(v))
      r->scalars.push_back({i, Py_NewRef(v)});
    else return false;                          // a generator, say
  }
  return true;
}

// launch: (address, function, grid, threads, shared, cluster, params, places,
//          ((offset, source, index, add), ...), ((offset, width, param, is_stride, axis, factor), ...), refused)
inline bool read_launch(Recording *r, PyObject *given, size_t *numbers) {
  unsigned long long address, function;
  unsigned grid[3], threads, shared, cluster;
  char *params;
  Py_ssize_t size;
  PyObject *bytes, *places, *pointers, *varying, *refused;
  if (!PyArg_ParseTuple(given, "KK(III)IIIO!O!O!O!O", &address, &function, &grid[0], &grid[1], &grid[2], &threads, &shared,
                        &cluster, &PyBytes_Type, &bytes, &PyTuple_Type, &places, &PyTuple_Type, &pointers, &PyTuple_Type,
                        &varying, &refused) ||
      PyBytes_AsStringAndSize(bytes, &params, &size) < 0)
    return false;
  if ((size_t)size > MAX_BYTES || (size_t)PyTuple_GET_SIZE(places) > MAX_KERNEL_PARAMS) return false;
  Launch l{(DriverLaunch)address, (void *)function, {grid[0], grid[1], grid[2]}, threads, shared, cluster,
           {params, params + size}, {}, {}, {}, Py_NewRef(refused)};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) l.places.push_back((size_t)number_at(places, i));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pointers); i++) {
    PyObject *p = PyTuple_GET_ITEM(pointers, i);
    Pointer pointer{(size_t)number_at(p, 0), (Origin)number_at(p, 1), (int)number_at(p, 2), number_at(p, 3)};
    if (pointer.origin != KEPT) l.pointers.push_back(pointer);           // what is kept stands in the bytes
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(varying); i++) {
    PyObject *n = PyTuple_GET_ITEM(varying, i);
    l.numbers.push_back({(size_t)number_at(n, 0), (int)number_at(n, 1), (int)number_at(n, 2), (bool)number_at(n, 3),
                         (int)number_at(n, 4), number_at(n, 5)});
  }
  *numbers += l.numbers.size();
  r->launches.push_back(std::move(l));
  return true;
}

// add(values, free, allocations, drawn, launches, outputs, single, device, stream or None, hooks, kept) -> bool
// values: of the call. free: ((param, is_stride, axis, low, high, step), ...). allocations: the tensors.
// drawn: of each, is it of random numbers. outputs: as in Recording. hooks: lists. kept: anything.
inline PyObject *add_recording(PyObject *self, PyObject *args) {
  PyObject *values, *free, *allocations, *drawn, *launches, *outputs, *stream, *hooks, *kept;
  int single, device;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!piOO!O", &PyTuple_Type, &values, &PyTuple_Type, &free, &PyTuple_Type, &allocations,
                        &PyTuple_Type, &drawn, &PyTuple_Type, &launches, &PyTuple_Type, &outputs, &single, &device, &stream,
                        &PyTuple_Type, &hooks, &kept))
    return nullptr;
  auto r = std::make_shared<Recording>();
  if ((size_t)PyTuple_GET_SIZE(values) > MAX_PARAMS || (size_t)PyTuple_GET_SIZE(allocations) > MAX_MADE) Py_RETURN_FALSE;
  if (!read_values(r.get(), values)) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(free); i++) {
    PyObject *f = PyTuple_GET_ITEM(free, i);
    for (Form &form : r->forms)
      if (form.param == number_at(f, 0))
        form.free.push_back({(bool)number_at(f, 1), (int)number_at(f, 2), number_at(f, 3), number_at(f, 4), number_at(f, 5)});
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(allocations); i++) {
    const at::Tensor &t = THPVariable_Unpack(PyTuple_GET_ITEM(allocations, i));
    r->allocations.push_back({number_at(drawn, i) != 0, t.is_contiguous(), t.sizes().vec(), t.strides().vec(),
                              at::TensorOptions().dtype(t.dtype()).device(t.device())});
  }
  size_t numbers = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); i++)
    if (!read_launch(r.get(), PyTuple_GET_ITEM(launches, i), &numbers)) {
      if (PyErr_Occurred()) return nullptr;
      Py_RETURN_FALSE;
    }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); i++) r->outputs.push_back((int)number_at(outputs, i));
  r->single = single;
  r->device = device;
  r->one_stream = stream != Py_None;
  if (r->one_stream) r->stream = (uintptr_t)PyLong_AsUnsignedLongLong(stream);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks); i++) {
    PyObject *list = PyTuple_GET_ITEM(hooks, i);
    if (!PyList_Check(list)) { PyErr_SetString(PyExc_TypeError, "hooks: wanted lists"); return nullptr; }
    r->hooks.push_back(Py_NewRef(list));
  }
  r->kept = Py_NewRef(kept);
  if (PyErr_Occurred()) return nullptr;
  if (numbers > MAX_VARYING || r->outputs.empty()) Py_RETURN_FALSE;
  std::vector<std::shared_ptr<Recording>> &list = *((Recordings *)self)->list;
  std::shared_ptr<Recording> out;               // dropped at the end, when the list is whole: that may run Python code
  if (list.size() >= MAX_RECORDINGS) {
    auto least = std::min_element(list.begin(), list.end(), [](auto &a, auto &b) { return a->hits < b->hits; });
    out.swap(*least);
    least->swap(r);
  } else list.push_back(r);
  Py_RETURN_TRUE;
}

// Recording costs as much as some ten launches in Python, so there is one for every 64 replays beyond the first few.
inline PyObject *wants_recording(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Recordings *r = (Recordings *)self;
  int device = -1;
  uintptr_t stream = 0;
  PyObject *values[MAX_PARAMS];
  if (r->attempts >= MAX_RECORDINGS + r->hits / 64 || n > MAX_PARAMS) Py_RETURN_FALSE;
  std::copy(args, args + n, values);
  if (find_recording(r, values, &device, &stream)) Py_RETURN_FALSE;      // in a thread that was new to CUDA
  r->attempts++;
  Py_RETURN_TRUE;
}

inline PyObject *recording_counts(PyObject *self, PyObject *) {
  Recordings *r = (Recordings *)self;
  return Py_BuildValue("nKK", (Py_ssize_t)r->list->size(), (unsigned long long)r->hits, (unsigned long long)r->attempts);
}

inline PyObject *make_recordings(PyTypeObject *type, PyObject *, PyObject *) {
  Recordings *r = (Recordings *)type->tp_alloc(type, 0);
  if (r) r->list = new std::vector<std::shared_ptr<Recording>>;
  return (PyObject *)r;
}

inline void drop_recordings(PyObject *self) {
  delete ((Recordings *)self)->list;
  Py_TYPE(self)->tp_free(self);
}

inline PyMethodDef recordings_methods[] = {
    {"add", add_recording, METH_VARARGS, "Remember what a call did; False if that cannot be replayed."},
    {"wanted", (PyCFunction)(void (*)(void))wants_recording, METH_FASTCALL,
     "Is a call with these values worth recording? Counts as an attempt."},
    {"counts", recording_counts, METH_NOARGS, "(recordings, replays, attempts to record)."},
    {nullptr, nullptr, 0, nullptr}};
inline PyTypeObject recordings_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

inline bool add_launch(PyObject *module) {
  recordings_type.tp_name = "layerzero.Recordings";
  recordings_type.tp_basicsize = sizeof(Recordings);
  recordings_type.tp_flags = Py_TPFLAGS_DEFAULT;
  recordings_type.tp_new = make_recordings;
  recordings_type.tp_dealloc = drop_recordings;
  recordings_type.tp_methods = recordings_methods;
  return PyType_Ready(&recordings_type) == 0 &&
         PyModule_AddObject(module, "Recordings", Py_NewRef((PyObject *)&recordings_type)) == 0;
}

}  // namespace fastpath

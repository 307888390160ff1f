// Launches of our own GPU kernels: recorded once in Python (replays.py), replayed here.
//
// A recording is what one call of a kernel did: which tensors it allocated, which compiled functions it launched,
// with which grid and parameters, and what it returned. A later call of the same signature (dtypes, sizes, strides,
// alignment, plain values, device) is replayed: allocate, put the new addresses into the parameters, launch on
// torch's current stream. A size or a stride that a launcher declares to vary is a range in the signature and is
// written into the parameters. A call that matches no recording goes to Python.
//
// The driver's launch function comes as an address: neither CUDA headers nor torch's CUDA library are needed.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/rand_ops.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <memory>

#include "call.h"

namespace fastpath {

// As in cuda.h.
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

struct Range { bool is_stride; int axis; int64_t low, high, step; };
struct TensorForm {                             // what a tensor of the call must look like
  int param;
  c10::ScalarType dtype;
  c10::Device device;
  uint8_t misaligned;                           // its address modulo 16
  std::vector<int64_t> sizes, strides;
  std::vector<Range> ranges;                    // sizes and strides that may vary
};
struct Scalar { int param; PyObject *value; };
struct Allocation {
  bool is_random, dense;
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  c10::Allocator *allocator;                    // that of the recorded call
  size_t bytes;
};
enum Origin { INPUT, ALLOCATED, PERSISTENT };
struct Pointer { size_t offset; Origin origin; int index; int64_t add; };
struct Number { size_t offset; int width, param; bool is_stride; int axis; int64_t factor; };
struct Launch {
  DriverLaunch launch;
  void *function;
  uint32_t grid[3], threads, shared, cluster;
  std::vector<uint8_t> params;
  std::vector<size_t> places;                   // the offset of each kernel parameter
  std::vector<Pointer> pointers;
  std::vector<Number> numbers;
  PyObject *refused;                            // (code, device, grid) -> exception
};
struct Recording {
  std::vector<TensorForm> forms;
  std::vector<Scalar> scalars;
  std::vector<Allocation> allocations;
  std::vector<Launch> launches;
  std::vector<int> outputs;                     // the index of an allocation, or -1 - that of a parameter
  bool single = true;                           // the result is no tuple
  int device = -1;                              // the CUDA device; -1: the tensors are on the CPU
  bool one_stream = false;                      // it uses memory that belongs to `stream`
  uintptr_t stream = 0;
  std::vector<PyObject *> hooks;                // lists of launch hooks; while one is not empty, Python launches
  PyObject *kept = nullptr;                     // objects that must live as long as this
  uint64_t hits = 0;

  ~Recording() {                                // the GIL is held: see Recordings
    for (Scalar &s : scalars) Py_XDECREF(s.value);
    for (Launch &l : launches) Py_XDECREF(l.refused);
    for (PyObject *h : hooks) Py_XDECREF(h);
    Py_XDECREF(kept);
  }
};

// The recordings of one entry. A replay keeps its recording alive while the GIL is released.
struct Recordings {
  PyObject_HEAD
  std::vector<std::shared_ptr<Recording>> *list;
  uint64_t hits, attempts;
};

inline int64_t read_axis(const at::Tensor &t, bool is_stride, int axis) {
  return is_stride ? t.strides()[axis] : t.sizes()[axis];
}

inline bool within_ranges(const TensorForm &f, c10::IntArrayRef sizes, const std::vector<int64_t> &recorded,
                          bool is_stride) {
  if (sizes.size() != recorded.size()) return false;
  for (size_t i = 0; i < recorded.size(); i++) {
    if (sizes[i] == recorded[i]) continue;
    bool fits = false;
    for (const Range &v : f.ranges)
      if (v.is_stride == is_stride && v.axis == (int)i) fits = sizes[i] >= v.low && sizes[i] <= v.high && sizes[i] % v.step == 0;
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
  for (const TensorForm &f : r.forms) {
    if (!is_plain(values[f.param])) return false;
    const at::Tensor &t = THPVariable_Unpack(values[f.param]);
    c10::TensorImpl *impl = t.unsafeGetTensorImpl();
    if (c10::typeMetaToScalarType(impl->dtype()) != f.dtype || impl->device() != f.device) return false;
    if (!within_ranges(f, impl->sizes(), f.sizes, false) || !within_ranges(f, impl->strides(), f.strides, true)) return false;
    if (((uintptr_t)impl->data() & 15) != f.misaligned) return false;
  }
  for (PyObject *hooks : r.hooks)
    if (PyList_GET_SIZE(hooks)) return false;
  return true;
}

inline PyObject *raw_stream;                    // torch._C._cuda_getCurrentRawStream, or NULL

// The handle of torch's current stream on this device. False: an error, which Python reports.
inline bool stream_of(int device, uintptr_t *stream) {
  *stream = 0;
  if (on_default_stream(device)) return true;
  PyObject *index = PyLong_FromLong(device), *handle = index ? PyObject_CallOneArg(raw_stream, index) : nullptr;
  Py_XDECREF(index);
  if (handle) *stream = (uintptr_t)PyLong_AsUnsignedLongLong(handle);
  Py_XDECREF(handle);
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// As at::empty, but not through torch's dispatcher, which takes longer than the allocation itself. The current device is
// that of the recording.
inline at::Tensor allocate(const Allocation &a) {
  if (a.is_random)
    return at::_ops::rand::call(c10::fromIntArrayRefSlow(a.sizes), c10::typeMetaToScalarType(a.options.dtype()),
                                a.options.layout(), a.options.device(), a.options.pinned_memory());
  const c10::DispatchKeySet keys(a.options.computeDispatchKey());
  const c10::ScalarType dtype = c10::typeMetaToScalarType(a.options.dtype());
  return a.dense ? at::detail::empty_generic(a.sizes, a.allocator, keys, dtype, std::nullopt)
                 : at::detail::empty_strided_generic(a.sizes, a.strides, a.allocator, keys, dtype);
}

// Allocate and launch; returns the driver's error code, and in `at` the launch that failed.
inline int allocate_and_launch(const Recording &r, const uint8_t *const *inputs, const int64_t *varying,
                               uintptr_t stream, at::Tensor *allocated, size_t *at) {
  for (size_t i = 0; i < r.allocations.size(); i++) allocated[i] = allocate(r.allocations[i]);
  size_t next = 0;
  for (*at = 0; *at < r.launches.size(); ++*at) {
    const Launch &l = r.launches[*at];
    alignas(16) uint8_t bytes[MAX_BYTES];
    void *params[MAX_KERNEL_PARAMS];
    std::memcpy(bytes, l.params.data(), l.params.size());
    for (const Pointer &p : l.pointers) {
      const uint8_t *base = p.origin == INPUT ? inputs[p.index] : (const uint8_t *)allocated[p.index].unsafeGetTensorImpl()->data();
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

constexpr size_t MAX_ALLOCATIONS = 16, MAX_VARYING = 32;

inline PyObject *replay(const std::shared_ptr<Recording> &held, PyObject **values, int device, uintptr_t stream) {
  HANDLE_TH_ERRORS
  const Recording &r = *held;
  const uint8_t *inputs[MAX_PARAMS];
  int64_t varying[MAX_VARYING];
  at::Tensor allocated[MAX_ALLOCATIONS];
  for (const TensorForm &f : r.forms)
    inputs[f.param] = (const uint8_t *)THPVariable_Unpack(values[f.param]).unsafeGetTensorImpl()->data();
  size_t count = 0, at = 0;
  for (const Launch &l : r.launches)
    for (const Number &n : l.numbers)
      varying[count++] = n.factor * read_axis(THPVariable_Unpack(values[n.param]), n.is_stride, n.axis);
  int code;
  {
    WithoutGil released;                        // a full queue or the allocator may block
    code = allocate_and_launch(r, inputs, varying, stream, allocated, &at);
  }
  if (code) {
    const Launch &l = r.launches[at];
    PyObject *fault = PyObject_CallFunction(l.refused, "ii(III)", code, device, l.grid[0], l.grid[1], l.grid[2]);
    if (fault) PyErr_SetObject((PyObject *)Py_TYPE(fault), fault);
    Py_XDECREF(fault);
    return nullptr;
  }
  held->hits++;
  auto output = [&](int i) { return i >= 0 ? THPVariable_Wrap(allocated[i]) : Py_NewRef(values[-1 - i]); };
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

// The devices on which this thread has a CUDA context, a bit each. Launching through Python creates it.
inline thread_local uint64_t has_context = 0;

// The recording that matches this call, on the current device and stream; null if there is none.
inline std::shared_ptr<Recording> find_recording(Recordings *recordings, PyObject **values, int *device, uintptr_t *stream) {
  std::vector<std::shared_ptr<Recording>> &list = *recordings->list;
  if (list.empty()) return nullptr;
  if (list[0]->device >= 0) {
    *device = current_device();
    if (*device < 0 || *device > 63 || !raw_stream || !stream_of(*device, stream)) return nullptr;
  }
  for (size_t i = 0; i < list.size(); i++) {
    if (!matches(*list[i], values, *device, *stream)) continue;
    if (i) std::swap(list[0], list[i]);         // the next call is mostly like this one
    return list[0];
  }
  return nullptr;
}

// An `invoke`: replays a matching recording, else calls Python, which may record the call.
inline PyObject *call_recorded(const Call &call, PyObject **values) {
  Recordings *recordings = (Recordings *)call.recordings;
  int device = -1;
  uintptr_t stream = 0;
  std::shared_ptr<Recording> found = find_recording(recordings, values, &device, &stream);
  if (found && (device < 0 || has_context >> device & 1)) {
    recordings->hits++;
    return replay(found, values, device, stream);
  }
  PyObject *out = call_python(call, values);    // `dispatch` holds the entry, which holds the recordings
  if (out && !recordings->list->empty() && recordings->list->front()->device >= 0) {
    device = current_device();
    if (device >= 0 && device < 64) has_context |= 1ull << device;
  }
  return out;
}

// ---------------------------------------------------------------- the Python interface

inline int64_t number_at(PyObject *tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)); }

inline bool read_values(Recording *r, PyObject *values) {
  for (int i = 0; i < (int)PyTuple_GET_SIZE(values); i++) {
    PyObject *v = PyTuple_GET_ITEM(values, i);
    if (PyObject_TypeCheck(v, tensor_type)) {
      const at::Tensor &t = THPVariable_Unpack(v);
      if (t.layout() != c10::kStrided || !t.has_storage()) return false;
      r->forms.push_back({i, t.scalar_type(), t.device(), (uint8_t)((uintptr_t)t.unsafeGetTensorImpl()->data() & 15),
                          t.sizes().vec(), t.strides().vec(), {}});
    } else if (v == Py_None || PyBool_Check(v) || PyLong_CheckExact(v) || PyFloat_CheckExact(v) || PyUnicode_CheckExact(v))
      r->scalars.push_back({i, Py_NewRef(v)});
    else return false;                          // such as a generator
  }
  return true;
}

// launch: (address, function, grid, threads, shared, cluster, params, places,
//          ((offset, source, index, add), ...), ((offset, width, param, is_stride, axis, factor), ...), refused)
inline bool read_launch(Recording *r, PyObject *tuple, size_t *numbers) {
  unsigned long long address, function;
  unsigned grid[3], threads, shared, cluster;
  char *params;
  Py_ssize_t size;
  PyObject *bytes, *places, *pointers, *varying, *refused;
  if (!PyArg_ParseTuple(tuple, "KK(III)IIIO!O!O!O!O", &address, &function, &grid[0], &grid[1], &grid[2], &threads, &shared,
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
    if (pointer.origin != PERSISTENT) l.pointers.push_back(pointer);  // its address is in the bytes already
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

// Make one allocation of all that the call neither returns nor draws at random: each takes the host a microsecond or two.
inline void join_workspaces(Recording *r) {
  constexpr int64_t ALIGNMENT = 512;            // of torch's allocator
  std::vector<Allocation> kept;
  std::vector<int> place(r->allocations.size(), -1);
  std::vector<int64_t> offset(r->allocations.size(), 0);
  int64_t total = 0;
  const Allocation *first = nullptr;
  for (int i = 0; i < (int)r->allocations.size(); i++) {
    const Allocation &a = r->allocations[i];
    if (a.is_random || std::find(r->outputs.begin(), r->outputs.end(), i) != r->outputs.end()) {
      place[i] = (int)kept.size();
      kept.push_back(a);
    } else {
      first = first ? first : &a;
      offset[i] = total;
      total += ((int64_t)a.bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
  }
  if (first) kept.push_back({false, true, {total}, {1}, first->options.dtype(c10::kByte), first->allocator, (size_t)total});
  for (Launch &l : r->launches)
    for (Pointer &p : l.pointers) {
      if (p.origin != ALLOCATED) continue;
      p.add += offset[p.index];
      p.index = place[p.index] < 0 ? (int)kept.size() - 1 : place[p.index];
    }
  for (int &i : r->outputs) i = i < 0 ? i : place[i];
  r->allocations = std::move(kept);
}

// add(values, ranges, allocations, is_random, launches, outputs, single, device, stream or None, hooks, kept) -> bool
// values: of the call. ranges: ((param, is_stride, axis, low, high, step), ...). allocations: the tensors.
// is_random: was each filled with random numbers? outputs: as in Recording. hooks: lists. kept: anything.
inline PyObject *add_recording(PyObject *self, PyObject *args) {
  PyObject *values, *ranges, *allocations, *is_random, *launches, *outputs, *stream, *hooks, *kept;
  int single, device;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!piOO!O", &PyTuple_Type, &values, &PyTuple_Type, &ranges, &PyTuple_Type, &allocations,
                        &PyTuple_Type, &is_random, &PyTuple_Type, &launches, &PyTuple_Type, &outputs, &single, &device, &stream,
                        &PyTuple_Type, &hooks, &kept))
    return nullptr;
  auto r = std::make_shared<Recording>();
  if ((size_t)PyTuple_GET_SIZE(values) > MAX_PARAMS || (size_t)PyTuple_GET_SIZE(allocations) > MAX_ALLOCATIONS) Py_RETURN_FALSE;
  if (!read_values(r.get(), values)) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ranges); i++) {
    PyObject *f = PyTuple_GET_ITEM(ranges, i);
    for (TensorForm &form : r->forms)
      if (form.param == number_at(f, 0))
        form.ranges.push_back({(bool)number_at(f, 1), (int)number_at(f, 2), number_at(f, 3), number_at(f, 4), number_at(f, 5)});
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(allocations); i++) {
    const at::Tensor &t = THPVariable_Unpack(PyTuple_GET_ITEM(allocations, i));
    if (!t.storage().allocator()) Py_RETURN_FALSE;
    r->allocations.push_back({number_at(is_random, i) != 0, t.is_contiguous(), t.sizes().vec(), t.strides().vec(),
                              at::TensorOptions().dtype(t.dtype()).device(t.device()), t.storage().allocator(),
                              t.storage().nbytes()});
  }
  size_t numbers = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); i++)
    if (!read_launch(r.get(), PyTuple_GET_ITEM(launches, i), &numbers)) {
      if (PyErr_Occurred()) return nullptr;
      Py_RETURN_FALSE;
    }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); i++) r->outputs.push_back((int)number_at(outputs, i));
  join_workspaces(r.get());
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
  std::shared_ptr<Recording> out;               // freed at the end, when the list is consistent: that may run Python code
  if (list.size() >= MAX_RECORDINGS) {
    auto least = std::min_element(list.begin(), list.end(), [](auto &a, auto &b) { return a->hits < b->hits; });
    out.swap(*least);
    least->swap(r);
  } else list.push_back(r);
  Py_RETURN_TRUE;
}

// Recording costs as much as about ten launches in Python, so it is tried once for every 64 replays after the first few.
inline PyObject *is_worth_recording(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Recordings *r = (Recordings *)self;
  int device = -1;
  uintptr_t stream = 0;
  PyObject *values[MAX_PARAMS];
  if (r->attempts >= MAX_RECORDINGS + r->hits / 64 || n > MAX_PARAMS) Py_RETURN_FALSE;
  std::copy(args, args + n, values);
  if (find_recording(r, values, &device, &stream)) Py_RETURN_FALSE;  // a recording exists: this thread was new to CUDA
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
    {"is_worth_recording", (PyCFunction)(void (*)(void))is_worth_recording, METH_FASTCALL,
     "Is a call with these values worth recording? Counts as an attempt."},
    {"counts", recording_counts, METH_NOARGS, "(recordings, replays, attempts to record)."},
    {nullptr, nullptr, 0, nullptr}};
inline PyTypeObject recordings_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

inline bool add_recordings_type(PyObject *module) {
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

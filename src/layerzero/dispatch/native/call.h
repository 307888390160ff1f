// How a table entry is called.
//
// `invoke` is one of three functions, chosen by `put`: call_python below, an ATen operator in
// aten.h, or replayed launches in launch.h.
#pragma once

#include "key.h"

namespace fastpath {

struct Call;
using Invoke = PyObject *(*)(const Call &call, PyObject **values);

struct Source {                                 // where an argument comes from
  enum Kind { PARAM, CONSTANT, LAST_SIZE } kind;      // LAST_SIZE: x.shape[-1:] of a tensor
  int index;                                    // a parameter or a constant
};

struct Call {
  Invoke invoke = nullptr;
  const char *kind = "python";                  // "python" or the operator's name, for diagnosis
  PyObject *fn = nullptr, *keywords = nullptr;  // the Python function, and the names of its last arguments
  Py_ssize_t positional = 0;
  std::vector<Source> sources;                  // the arguments of `fn`
  std::vector<Source> inputs;                   // the arguments of an operator, in its order
  std::vector<PyObject *> constants;
  PyObject *recordings = nullptr;               // recorded launches (launch.h), borrowed from the entry
  Py_ssize_t item = -1, first = -1;             // which element, or how many, of a tuple to return
};

struct WithoutGil {
  PyThreadState *state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// A borrowed reference.
inline PyObject *argument(const Call &call, PyObject **values, Source source) {
  return source.kind == Source::CONSTANT ? call.constants[source.index] : values[source.index];
}

// x.shape[-1:] through Python: while torch traces, sizes are more than integers. A new reference.
inline PyObject *last_size(PyObject *tensor) {
  PyObject *shape = PyObject_GetAttrString(tensor, "shape");
  Py_ssize_t n = shape ? PySequence_Size(shape) : -1;
  PyObject *out = n < 0 ? nullptr : PySequence_GetSlice(shape, n ? n - 1 : 0, n);
  Py_XDECREF(shape);
  return out;
}

// Call `fn` by Python's calling convention.
//
// The slot, and `call` with it, may be dropped while the kernel runs, by a new world in another
// thread: what is needed after the call is read before it. The function and the constants live as
// long as the entry, which `dispatch` holds. The same is true of every other `invoke`.
inline PyObject *call_python(const Call &call, PyObject **values) {
  PyObject *stack[2 * MAX_PARAMS + 1], **argv = stack + 1, *shapes[MAX_PARAMS];
  Py_ssize_t item = call.item, first = call.first;
  int shape_count = 0;
  PyObject *keywords = Py_XNewRef(call.keywords), *out = nullptr;
  bool complete = true;
  for (size_t i = 0; complete && i < call.sources.size(); i++) {
    Source source = call.sources[i];
    argv[i] = argument(call, values, source);
    if (source.kind == Source::LAST_SIZE) {
      argv[i] = last_size(argv[i]);
      if ((complete = argv[i])) shapes[shape_count++] = argv[i];
    }
  }
  size_t count = call.positional | PY_VECTORCALL_ARGUMENTS_OFFSET;
  if (complete) out = PyObject_Vectorcall(call.fn, argv, count, keywords);
  while (shape_count) Py_DECREF(shapes[--shape_count]);
  Py_XDECREF(keywords);
  if (!out || (item < 0 && first < 0)) return out;
  PyObject *part = item >= 0 ? PySequence_GetItem(out, item) : PySequence_GetSlice(out, 0, first);
  Py_DECREF(out);
  return part;
}

}  // namespace fastpath

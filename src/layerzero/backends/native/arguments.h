// What functions of the module have in common: reading arguments, the GIL, dtypes, results.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "vectors.h"

namespace lz {

extern PyMethodDef ggml_methods[];              // of quant/ggml.cpp, which is compiled beside kernels.cpp

// Reads the arguments in order; `ok` is false after the first error.
struct Arguments {
  PyObject *const *at;
  Py_ssize_t left;
  bool ok = true;

  PyObject *next() {
    if (!left) {
      if (ok) PyErr_SetString(PyExc_TypeError, "too few arguments");
      ok = false;
      return nullptr;
    }
    left--;
    return *at++;
  }
  int64_t whole(PyObject *o) {
    int64_t n = ok && o ? PyLong_AsLongLong(o) : 0;
    if (ok && n == -1 && PyErr_Occurred()) ok = false;
    return n;
  }
  int64_t whole() { return whole(next()); }
  void *address() { return (void *)(intptr_t)whole(); }
  // An address, or None if absent. An address of 0 does not mean absent: a tensor without elements
  // may have it.
  void *address(bool &given) {
    PyObject *o = next();
    given = ok && o && o != Py_None;
    return given ? (void *)(intptr_t)whole(o) : nullptr;
  }
  double real() {
    PyObject *o = next();
    double x = ok && o ? PyFloat_AsDouble(o) : 0.0;
    if (ok && x == -1.0 && PyErr_Occurred()) ok = false;
    return x;
  }
  template <int N> void tuple(int64_t (&to)[N]) {
    PyObject *o = next();
    for (int i = 0; i < N; i++) {
      PyObject *item = ok && o ? PyTuple_GetItem(o, i) : nullptr;
      if (!item) { ok = false; return; }
      to[i] = whole(item);
    }
  }
};

template <class F> bool without_gil(bool worth_it, F work) {
  if (!worth_it) return work();
  PyThreadState *state = PyEval_SaveThread();
  bool done = work();
  PyEval_RestoreThread(state);
  return done;
}

// Runs the kernel for the dtypes of the data and of its parameters.
#define FOR_DTYPES(run, call, dtype, of_parameters)                                                      \
  for_dtype(dtype, [&](auto t) {                                                                         \
    return for_dtype(of_parameters, [&](auto p) { return run<decltype(t), decltype(p)>(call); });        \
  })

inline PyObject *none_or_memory_error(bool done) {
  return done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

}  // namespace lz

// Our own CPU kernels as a small Python module: numbers and addresses in, nothing of torch needed to compile it.
//
// The callers in __init__.py have checked dtypes and strides by rules; here tuples of sizes and strides are read,
// the GIL is released where the work is worth it, and the work is done by `threads` threads of torch's own OpenMP.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef _OPENMP
#include <omp.h>
static inline int thread_number() { return omp_get_thread_num(); }
#else
static inline int thread_number() { return 0; }
#endif

#include "attention.h"

namespace {

using namespace lz;

// Reads the arguments one after the other; `ok` is false after the first that does not fit.
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

PyObject *none_or_memory_error(bool done) {
  return done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

PyObject *attention_decode(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Attention a;
  bool half = in.whole();
  a.query = in.address(), a.key = in.address(), a.value = in.address();
  a.out = in.address(), a.lse = (float *)in.address();
  int64_t q[4], k[4], qs[4], ks[4], vs[4];
  in.tuple(q), in.tuple(k);
  a.head_dim_v = in.whole();
  in.tuple(qs), in.tuple(ks), in.tuple(vs);
  a.offset = in.whole(), a.left = in.whole(), a.right = in.whole();
  a.scale = float(in.real()), a.softcap = float(in.real());
  a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  a.batch = q[0], a.heads = q[1], a.seq_q = q[2], a.head_dim = q[3], a.kv_heads = k[1], a.seq_k = k[2];
  a.q = {qs[0], qs[1], qs[2]}, a.k = {ks[0], ks[1], ks[2]}, a.v = {vs[0], vs[1], vs[2]};
  if (!a.kv_heads || !a.batch) return Py_NewRef(Py_None);
  bool worth_it = a.batch * a.kv_heads * a.seq_k * a.head_dim > 16384;
  return none_or_memory_error(without_gil(
      worth_it, [&] { return half ? Decoder<bf16>(a).run() : Decoder<float>(a).run(); }));
}

PyMethodDef methods[] = {
    {"attention_decode", (PyCFunction)(void (*)(void))attention_decode, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernels", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_kernels() { return PyModule_Create(&module); }

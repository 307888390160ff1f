// What torch's python_variable.h and Exceptions.h name of four headers that take longer to compile than all else here:
// the build puts this file in their place (native/__init__.py). Only names: no layout that is read comes from here.
#pragma once

#include <Python.h>

#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <vector>

namespace pybind11 {                            // pybind11/pybind11.h, torch/csrc/utils/pybind.h
class dict;
class handle;
class object;
struct error_already_set : std::exception {};
struct builtin_exception : std::exception {};
struct gil_scoped_acquire {
  PyGILState_STATE state = PyGILState_Ensure();
  ~gil_scoped_acquire() { PyGILState_Release(state); }
};
struct gil_scoped_release {
  PyThreadState *state = PyEval_SaveThread();
  ~gil_scoped_release() { PyEval_RestoreThread(state); }
};
}  // namespace pybind11
namespace py = pybind11;

namespace c10 {                                 // ATen/core/function_schema.h
struct IValue;
class OperatorHandle;
}  // namespace c10
namespace torch::jit {
using Stack = std::vector<c10::IValue>;
}

namespace torch::autograd {                     // torch/csrc/autograd/node.h
struct Node : c10::intrusive_ptr_target {};
}

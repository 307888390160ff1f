// What a table entry calls, and how.
//
// `invoke` is the kind of the call: call_python below; another kind (an ATen operator, a launch through the
// driver) is another function of this type, in a header of its own, that `put` chooses when an entry is stored.
#pragma once

#include "key.h"

namespace fastpath {

struct Call;
using Invoke = PyObject *(*)(const Call &call, PyObject **values);

PyObject *call_python(const Call &call, PyObject **values);

struct Call {
  Invoke invoke = call_python;
  const void *target = nullptr;                 // what `invoke` alone knows; lives as long as the entry
  PyObject *fn = nullptr, *keywords = nullptr;  // the function, and the names of the last arguments
  std::vector<int> sources;                     // of each argument: a parameter, or -1 - i for constant i
  std::vector<PyObject *> constants;
  Py_ssize_t positional = 0;
  Py_ssize_t item = -1, first = -1;             // of a tuple: the one element, or how many of the first
};

inline PyObject *argument(const Call &call, PyObject **values, size_t i) {
  int source = call.sources[i];
  return source >= 0 ? values[source] : call.constants[-1 - source];
}

// Through Python's calling convention.
//
// The slot, and `call` with it, may be dropped while the kernel runs, by a new world in another thread: what is
// needed after the call is taken before it. The function and the constants live as long as the entry, which
// `dispatch` holds. The same goes for every other kind of call.
inline PyObject *call_python(const Call &call, PyObject **values) {
  PyObject *stack[2 * MAX_PARAMS + 1], **argv = stack + 1;
  Py_ssize_t item = call.item, first = call.first;
  PyObject *keywords = Py_XNewRef(call.keywords);
  for (size_t i = 0; i < call.sources.size(); i++) argv[i] = argument(call, values, i);
  PyObject *out =
      PyObject_Vectorcall(call.fn, argv, call.positional | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords);
  Py_XDECREF(keywords);
  if (!out || (item < 0 && first < 0)) return out;
  PyObject *part = item >= 0 ? PySequence_GetItem(out, item) : PySequence_GetSlice(out, 0, first);
  Py_DECREF(out);
  return part;
}

}  // namespace fastpath

// ATen operators, called without Python's argument parser and without a Python frame.
//
// The arguments are those that the key reader accepts: plain tensors, numbers, bools and None. To
// convert these for an operator needs no parser. The types come from the operator's own signature
// in torch's headers, so that another operator is another name in the list below. What does not
// convert, and every call under a torch function mode, goes through the Python function.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include <ATen/ops/_scaled_dot_product_attention_math_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/group_norm_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/rms_norm_ops.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>
#if __has_include(<ATen/ops/_fused_rms_norm_ops.h>)     // since torch 2.9
#include <ATen/ops/_fused_rms_norm_ops.h>
#define LZ_FUSED_RMS_NORM(_) _(_fused_rms_norm)
#else
#define LZ_FUSED_RMS_NORM(_)
#endif

#define LZ_OPERATORS(_)                                                                 \
  _(scaled_dot_product_attention) _(_scaled_dot_product_attention_math)                 \
  _(_scaled_dot_product_flash_attention_for_cpu) _(_scaled_dot_product_flash_attention) \
  _(_scaled_dot_product_efficient_attention) _(_scaled_dot_product_cudnn_attention)     \
  _(rms_norm) _(layer_norm) _(group_norm) _(linear) _(embedding) LZ_FUSED_RMS_NORM(_)

#include "call.h"

namespace fastpath {

// One argument: `read` takes it from the call, false if Python's parser must convert it; `get`
// passes it to the operator.
template <class T> struct Argument;

// Takes its own reference while the GIL is held: in newer torch (2.10, not 2.8) a second reference to
// a tensor that only Python held counts for its Python object too. ATen would take that reference
// without the GIL, and so would acquire the GIL for each, several times in a call.
template <> struct Argument<const at::Tensor &> {
  at::Tensor value;
  bool read(const Call &call, PyObject **values, Source source) {
    PyObject *o = argument(call, values, source);
    if (source.kind == Source::LAST_SIZE || !is_plain(o)) return false;
    value = THPVariable_Unpack(o);
    return true;
  }
  const at::Tensor &get() { return value; }
};

template <> struct Argument<const std::optional<at::Tensor> &> {
  std::optional<at::Tensor> value;
  bool read(const Call &call, PyObject **values, Source source) {
    PyObject *o = argument(call, values, source);
    if (o == Py_None) return true;
    if (source.kind == Source::LAST_SIZE || !is_plain(o)) return false;
    value = THPVariable_Unpack(o);
    return true;
  }
  const std::optional<at::Tensor> &get() { return value; }
};

template <> struct Argument<double> {
  double value = 0;
  bool read(const Call &call, PyObject **values, Source source) {
    PyObject *o = argument(call, values, source);
    if (PyFloat_CheckExact(o)) value = PyFloat_AS_DOUBLE(o);
    else if (PyLong_CheckExact(o)) value = PyLong_AsDouble(o);
    else return false;
    if (value != -1.0 || !PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }
  double get() { return value; }
};

template <> struct Argument<std::optional<double>> {
  Argument<double> number;
  bool present = false;
  bool read(const Call &call, PyObject **values, Source source) {
    present = argument(call, values, source) != Py_None;
    return !present || number.read(call, values, source);
  }
  std::optional<double> get() { return present ? std::optional<double>(number.value) : std::nullopt; }
};

template <> struct Argument<bool> {
  bool value = false;
  bool read(const Call &call, PyObject **values, Source source) {
    PyObject *o = argument(call, values, source);
    value = o == Py_True;
    return value || o == Py_False;
  }
  bool get() { return value; }
};

template <> struct Argument<int64_t> {
  int64_t value = 0;
  bool read(const Call &call, PyObject **values, Source source) {
    PyObject *o = argument(call, values, source);
    if (!PyLong_CheckExact(o)) return false;
    value = PyLong_AsLongLong(o);
    if (value != -1 || !PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }
  int64_t get() { return value; }
};

template <> struct Argument<c10::SymInt> : Argument<int64_t> {
  c10::SymInt get() { return value; }
};

template <class T> struct Argument<c10::ArrayRef<T>> {  // a shape, of int64_t or SymInt
  T value = 0;
  bool read(const Call &call, PyObject **values, Source source) {
    if (source.kind != Source::LAST_SIZE || !is_plain(values[source.index])) return false;
    const at::Tensor &tensor = THPVariable_Unpack(values[source.index]);
    if (!tensor.dim()) return false;
    value = tensor.sizes().back();
    return true;
  }
  c10::ArrayRef<T> get() { return {&value, 1}; }
};

// Wrap the result for Python: a tensor, or of a tuple one element (`item`) or the `first` ones.
inline PyObject *wrap(at::Tensor &&out, Py_ssize_t, Py_ssize_t) {
  return THPVariable_Wrap(std::move(out));
}

inline PyObject *wrap_element(at::Tensor &&out) { return THPVariable_Wrap(std::move(out)); }
template <class T> PyObject *wrap_element(T &&) {
  PyErr_SetString(PyExc_TypeError, "only tensors are taken from the result of an operator");
  return nullptr;
}

template <class... T> PyObject *wrap(std::tuple<T...> &&out, Py_ssize_t item, Py_ssize_t first) {
  auto element = [&](Py_ssize_t index) {
    PyObject *wrapped = nullptr;
    auto take = [&](Py_ssize_t i, auto &value) {
      if (i == index) wrapped = wrap_element(std::move(value));
    };
    Py_ssize_t i = 0;
    std::apply([&](auto &...each) { (take(i++, each), ...); }, out);
    return wrapped;
  };
  if (item >= 0) return element(item);
  PyObject *tuple = PyTuple_New(first);
  for (Py_ssize_t i = 0; tuple && i < first; i++) {
    PyObject *value = element(i);
    if (value) PyTuple_SET_ITEM(tuple, i, value);
    else Py_CLEAR(tuple);
  }
  return tuple;
}

template <class T> struct Results { static constexpr Py_ssize_t count = 0; };      // 0: no tuple
template <class... T> struct Results<std::tuple<T...>> {
  static constexpr Py_ssize_t count = sizeof...(T);
};

template <class Op, class Schema = typename Op::schema> struct Operator;

template <class Op, class R, class... A> struct Operator<Op, R(A...)> {
  static constexpr size_t arity = sizeof...(A);
  static constexpr Py_ssize_t results = Results<R>::count;

  static PyObject *invoke(const Call &call, PyObject **values) {
    if (at::impl::torch_function_mode_enabled()) return call_python(call, values);
    HANDLE_TH_ERRORS
    std::tuple<Argument<A>...> arguments;
    bool converts = [&]<size_t... I>(std::index_sequence<I...>) {
      return (std::get<I>(arguments).read(call, values, call.inputs[I]) && ...);
    }(std::index_sequence_for<A...>{});
    if (!converts) return call_python(call, values);
    Py_ssize_t item = call.item, first = call.first;
    R out = std::apply([](auto &...each) {
      WithoutGil released;                      // `call` may be freed from here on
      return Op::call(each.get()...);
    }, arguments);
    return wrap(std::move(out), item, first);
    END_HANDLE_TH_ERRORS
  }
};

// Make `call` call the operator `Op`. False if Python must call it: for a part of the result that `wrap`
// cannot return.
template <class Op> bool call_as(Call *call) {
  using Caller = Operator<Op>;
  bool fits = Caller::results ? (call->item >= 0 ? call->item < Caller::results
                                                 : call->first >= 0 && call->first <= Caller::results)
                              : call->item < 0 && call->first < 0;
  if (!fits || call->inputs.size() != Caller::arity) return false;
  call->invoke = Caller::invoke;
  call->kind = Op::name;
  return true;
}

// The same by the operator's name; false also if it is not in the list.
inline bool call_operator(std::string_view name, Call *call) {
#define LZ_OPERATOR(op) \
  if (name == #op) return call_as<at::_ops::op>(call);
  LZ_OPERATORS(LZ_OPERATOR)
#undef LZ_OPERATOR
  return false;
}

}  // namespace fastpath

// Linear layers with ggml's weights and the decoder that they make, as functions of the module.
#include "../arguments.h"
#include "decode.h"

namespace lz {
namespace {

// The instruction set of this build, and whether products for many rows may use tiles.
PyObject *ggml_isa(PyObject *, PyObject *const *, Py_ssize_t) {
  return Py_BuildValue("(sO)", quant::ISA, quant::tiles_usable() ? Py_True : Py_False);
}

PyObject *ggml_packed_bytes(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  const int64_t format = in.whole(), outputs = in.whole(), inputs = in.whole();
  if (!in.ok) return nullptr;
  return PyLong_FromLongLong(quant::for_format(format, [&](auto f) {
    return quant::packed_bytes<quant::Isa, f>(outputs, inputs);
  }));
}

PyObject *ggml_pack(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  const int64_t format = in.whole();
  const uint8_t *from = (const uint8_t *)in.address();
  void *to = in.address();
  const int64_t outputs = in.whole(), inputs = in.whole();
  const int threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(true, [&] {
    quant::for_format(format, [&](auto f) { quant::pack_all<quant::Isa, f>(from, outputs, inputs, to, threads); });
    return true;
  }));
}

PyObject *ggml_linear(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  quant::Linear q;
  const int64_t format = in.whole(), dtype = in.whole();
  q.x = in.address(), q.weight = in.address(), q.bias = in.address(q.has_bias), q.out = in.address();
  q.rows = in.whole(), q.inputs = in.whole(), q.outputs = in.whole(), q.x_row = in.whole();
  q.threads = int(in.whole()), q.tiles = quant::TileUse(in.whole());
  if (!in.ok) return nullptr;
  for_dtype(dtype, [&](auto t) {
    q.read = quant::read_elements<decltype(t)>, q.write = quant::write_results<decltype(t)>;
    return true;
  });
  return none_or_memory_error(without_gil(q.rows * q.inputs * q.outputs > 65536, [&] {
    return quant::for_format(format, [&](auto f) { return quant::run_linear<quant::Isa, f>(q); });
  }));
}

// One token through a decoder; returns the likeliest next one. Product and layers are what
// decode.h calls so, written by Python.
PyObject *ggml_decode(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  quant::DecoderStep s;
  const int64_t dtype = in.whole();
  s.layers = (const quant::DecoderLayer *)in.address(), s.count = in.whole();
  const quant::Product *ends = (const quant::Product *)in.address();
  s.norm = (const float *)in.address();
  s.hidden = in.whole(), s.heads = in.whole(), s.kv_heads = in.whole(), s.dim = in.whole();
  s.half = in.whole(), s.inner = in.whole(), s.activation = Activation(in.whole());
  s.eps = float(in.real()), s.scale = float(in.real()), s.softcap = float(in.real());
  s.embed_scale = float(in.real()), s.token = in.whole(), s.logits = (float *)in.address();
  s.position = in.whole(), s.threads = int(in.whole());
  if (!in.ok) return nullptr;
  s.embed = ends[0], s.head[0] = ends[1];
  const bool done = without_gil(true, [&] {
    return for_dtype(dtype, [&](auto kept) { return quant::run_decoder<decltype(kept)>(s); });
  });
  return done ? PyLong_FromLongLong(quant::likeliest(s.logits, s.head[0].outputs)) : PyErr_NoMemory();
}

}  // namespace

PyMethodDef ggml_methods[] = {
    {"ggml_isa", (PyCFunction)(void (*)(void))ggml_isa, METH_FASTCALL, nullptr},
    {"ggml_decode", (PyCFunction)(void (*)(void))ggml_decode, METH_FASTCALL, nullptr},
    {"ggml_packed_bytes", (PyCFunction)(void (*)(void))ggml_packed_bytes, METH_FASTCALL, nullptr},
    {"ggml_pack", (PyCFunction)(void (*)(void))ggml_pack, METH_FASTCALL, nullptr},
    {"ggml_linear", (PyCFunction)(void (*)(void))ggml_linear, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace lz

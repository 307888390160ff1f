// Our own CPU kernels as a Python module that takes numbers and addresses and does not depend on
// torch.
//
// Rules in __init__.py check dtypes and strides; here sizes and strides are read, the GIL is
// released if the work is worth it, and up to `threads` threads of one pool do the work (threads.h).
#include "arguments.h"
#include "attention/decode.h"
#include "attention/grouped.h"
#include "attention/linear.h"
#include "attention/token.h"
#include "group_norm.h"
#include "norms.h"
#include "products.h"
#include "rope.h"
#include "rows.h"

namespace lz {

template <class T> bool attend(const Attention &a) { return Decoder<T>(a).run(); }
template bool attend<float>(const Attention &);
template bool attend<fp16>(const Attention &);
template bool attend<bf16>(const Attention &);

}  // namespace lz

namespace {

using namespace lz;

PyObject *attention_decode(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Attention a;
  int64_t dtype = in.whole();
  a.query = in.address(), a.key = in.address(), a.value = in.address();
  a.out = in.address(), a.lse = (float *)in.address(a.has_lse);
  int64_t q[4], k[4], qs[4], ks[4], vs[4];
  in.tuple(q), in.tuple(k);
  a.head_dim_v = in.whole();
  in.tuple(qs), in.tuple(ks), in.tuple(vs);
  a.offset = in.whole(), a.left = in.whole(), a.right = in.whole();
  a.scale = float(in.real()), a.softcap = float(in.real());
  a.threads = int(in.whole()), a.invariant = in.whole();
  if (!in.ok) return nullptr;
  a.batch = q[0], a.heads = q[1], a.seq_q = q[2], a.head_dim = q[3], a.kv_heads = k[1], a.seq_k = k[2];
  a.q = {qs[0], qs[1], qs[2]}, a.k = {ks[0], ks[1], ks[2]}, a.v = {vs[0], vs[1], vs[2]};
  if (!a.kv_heads || !a.batch) return Py_NewRef(Py_None);
  bool worth_it = a.batch * a.kv_heads * a.seq_k * a.head_dim > 16384;
  return none_or_memory_error(without_gil(worth_it, [&] {
    return for_dtype(dtype, [&](auto t) { return attend<decltype(t)>(a); });
  }));
}

// Reads what attention of items and of pages have in common.
void read_grouped(Arguments &in, Grouped &a) {
  a.query = in.address(), a.key = in.address(), a.value = in.address();
  a.out = in.address(), a.lse = (float *)in.address(a.has_lse);
  int64_t sizes[3], strides[3];
  in.tuple(sizes);
  a.tokens = sizes[0], a.heads = sizes[1], a.head_dim = sizes[2];
  a.kv_heads = in.whole(), a.head_dim_v = in.whole();
  in.tuple(strides);
  a.q_token = strides[0], a.q_head = strides[1];
  a.k_token = in.whole(), a.k_head = in.whole(), a.v_token = in.whole(), a.v_head = in.whole();
  a.left = in.whole(), a.right = in.whole();
  a.scale = float(in.real()), a.softcap = float(in.real()), a.threads = int(in.whole());
}

// Plans and runs without the GIL: how much work there is, only the plan knows.
template <class Table> PyObject *run_grouped(int64_t dtype, const Grouped &a, const Table &table) {
  return none_or_memory_error(without_gil(true, [&] {
    try {
      Plan plan(a);
      table.plan(plan);
      return for_dtype(dtype, [&](auto t) { return GroupedAttention<decltype(t)>::run(a, plan); });
    } catch (const std::bad_alloc &) {
      return false;
    }
  }));
}

// Returns None, or the first item that does not fit the tensors.
PyObject *grouped_attention(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Grouped a;
  int64_t dtype = in.whole();
  read_grouped(in, a);
  ItemTable t;
  t.items = (const int32_t *)in.address(), t.count = in.whole();
  t.starts = (const int32_t *)in.address(t.has_chunks), t.lengths = (const int32_t *)in.address(), t.chunks = in.whole();
  t.tokens_q = a.tokens, t.tokens_k = in.whole();
  if (!in.ok) return nullptr;
  int64_t invalid = t.first_invalid();
  return invalid >= 0 ? PyLong_FromLongLong(invalid) : run_grouped(dtype, a, t);
}

// Returns None, or False if lengths or pages do not fit the cache.
PyObject *paged_attention(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  const int64_t dtype = in.whole();
  PageTable t;
  t.wide = in.whole();
  Grouped a;
  read_grouped(in, a);
  t.table = in.address(), t.table_row = in.whole(), t.batch = in.whole(), t.width = in.whole();
  t.lengths = in.address(), t.starts = in.address(t.has_starts);
  t.pages = in.whole(), t.page_size = in.whole(), t.k_page = in.whole(), t.v_page = in.whole();
  t.tokens = a.tokens;
  if (!in.ok) return nullptr;
  return t.valid() ? run_grouped(dtype, a, t) : Py_NewRef(Py_False);
}

PyObject *rms_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Norm a;
  int64_t dtype = in.whole(), weight_dtype = in.whole();
  a.x = in.address(), a.residual = in.address(a.has_residual), a.weight = in.address(a.has_weight);
  a.out = in.address(), a.total = in.address();
  a.rows = in.whole(), a.hidden = in.whole(), a.x_row = in.whole(), a.residual_row = in.whole();
  a.eps = float(in.real()), a.offset = float(in.real());
  a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(
      a.rows * a.hidden > 65536, [&] { return FOR_DTYPES(run_norm, a, dtype, weight_dtype); }));
}

// Reads shape and strides of (batch,) heads, tokens, dim in the order of `tokens_first`; absent
// tensors have no heads.
void read_heads(Arguments &in, bool tokens_first, int64_t dims, Heads &h, int64_t &batch, int64_t &seq, int64_t &dim) {
  bool given;
  h = {in.address(given), in.address()};
  if (!given) {
    in.next(), in.next();
    return;
  }
  int64_t shape[4] = {1}, strides[4] = {0};
  int64_t sizes3[3], strides3[3];
  if (dims == 4) {
    in.tuple(shape), in.tuple(strides);
  } else {
    in.tuple(sizes3), in.tuple(strides3);
    for (int i = 0; i < 3; i++) shape[i + 1] = sizes3[i], strides[i + 1] = strides3[i];
  }
  int head = tokens_first ? 2 : 1, token = tokens_first ? 1 : 2;
  batch = shape[0], seq = shape[token], dim = shape[3], h.count = shape[head];
  h.from_batch = strides[0], h.from_head = strides[head], h.from_token = strides[token];
  h.to_batch = h.count * seq * dim;
  h.to_head = tokens_first ? dim : seq * dim, h.to_token = tokens_first ? h.count * dim : dim;
}

// Returns None, or the first id that is not in the table.
PyObject *rope(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Rope a = {};
  int64_t dtype = in.whole(), table_dtype = in.whole();
  bool tokens_first = in.whole();
  a.interleaved = in.whole();
  int64_t dims = in.whole();
  read_heads(in, tokens_first, dims, a.query, a.batch, a.seq, a.dim);
  read_heads(in, tokens_first, dims, a.key, a.batch, a.seq, a.dim);
  a.cos = in.address(), a.sin = in.address(), a.positions = in.whole(), a.half = in.whole();
  a.cos_batch = in.whole(), a.cos_row = in.whole(), a.sin_batch = in.whole(), a.sin_row = in.whole();
  a.ids = in.address(a.has_ids), a.wide_ids = in.whole(), a.ids_batch = in.whole(), a.ids_token = in.whole();
  a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  int64_t bad_token = a.first_out_of_range();
  if (bad_token >= 0) return PyLong_FromLongLong(a.position(bad_token / a.seq, bad_token % a.seq));
  int64_t work = a.batch * a.seq * (a.query.count + a.key.count) * a.dim;
  return none_or_memory_error(without_gil(work > 65536, [&] { return FOR_DTYPES(run_rope, a, dtype, table_dtype); }));
}

// Of float32 weights only the invariant product is used: else torch's own matmul is as good.
template <class F> PyObject *run_multiply(int64_t dtype, const Product &first, F work) {
  bool worth_it = first.tokens * first.inputs * first.outputs > 65536;
  return none_or_memory_error(without_gil(worth_it, [&] {
    return dtype == 2 ? work(fp16{}) : dtype == 1 ? work(bf16{}) : work(float{});
  }));
}

PyObject *product(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Product a{};
  int64_t dtype = in.whole();
  a.x = in.address(), a.weight = in.address(), a.bias = in.address(a.has_bias), a.out = in.address();
  a.tokens = in.whole(), a.inputs = in.whole(), a.outputs = in.whole();
  a.x_row = in.whole(), a.weight_row = in.whole();
  a.out_row = a.outputs;
  a.activation = Activation(in.whole()), a.threads = int(in.whole()), a.invariant = in.whole();
  if (!in.ok) return nullptr;
  return run_multiply(dtype, a, [&](auto t) { return run_product<decltype(t)>(a); });
}

PyObject *feed_forward(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  FeedForward f{};
  Product &a = f.in, &b = f.down;
  int64_t dtype = in.whole();
  a.x = in.address(), a.weight = in.address(), a.second = in.address(a.has_second);
  a.bias = in.address(a.has_bias), a.second_bias = in.address(a.has_second_bias);
  b.weight = in.address(), b.bias = in.address(b.has_bias), b.out = in.address();
  a.tokens = b.tokens = in.whole(), a.inputs = in.whole(), a.outputs = b.inputs = in.whole();
  b.outputs = b.out_row = in.whole();
  a.x_row = in.whole(), a.weight_row = in.whole(), a.second_row = in.whole(), b.weight_row = in.whole();
  a.activation = Activation(in.whole()), a.threads = b.threads = int(in.whole());
  a.invariant = b.invariant = in.whole();
  if (!in.ok) return nullptr;
  return run_multiply(dtype, a, [&](auto t) { return run_feed_forward<decltype(t)>(f); });
}

PyObject *token(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Token t;
  int64_t dtype = in.whole();
  t.qkv = in.address(), t.cos = in.address(), t.sin = in.address();
  t.keys = in.address(), t.values = in.address(), t.out = in.address();
  t.batch = in.whole(), t.heads = in.whole(), t.kv_heads = in.whole(), t.dim = in.whole(), t.half = in.whole();
  t.angle_row = in.whole(), t.room_row = in.whole(), t.length = in.whole();
  t.scale = float(in.real()), t.threads = int(in.whole());
  if (!in.ok) return nullptr;
  bool worth_it = t.batch * t.kv_heads * t.length * t.dim > 16384;
  return none_or_memory_error(without_gil(worth_it, [&] {
    return for_dtype(dtype, [&](auto number) { return run_token<decltype(number)>(t); });
  }));
}

PyObject *group_norm(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  GroupNorm a;
  int64_t dtype = in.whole(), weight_dtype = in.whole();
  a.x = in.address(), a.weight = in.address(a.has_weight), a.bias = in.address(a.has_bias), a.out = in.address();
  a.batch = in.whole(), a.channels = in.whole(), a.pixels = in.whole(), a.groups = in.whole();
  a.eps = float(in.real()), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(
      a.batch * a.channels * a.pixels > 65536, [&] { return FOR_DTYPES(run_group_norm, a, dtype, weight_dtype); }));
}

PyObject *argmax(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Argmax a;
  int64_t dtype = in.whole();
  a.x = in.address(), a.out = (int64_t *)in.address();
  a.rows = in.whole(), a.width = in.whole(), a.x_row = in.whole(), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(a.rows * a.width > 65536, [&] {
    return for_dtype(dtype, [&](auto t) { return run_argmax<decltype(t)>(a); });
  }));
}

PyObject *gate(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Gate a;
  a.scores = (float *)in.address(), a.choice = (float *)in.address();
  a.ids = (int64_t *)in.address(), a.weights = (float *)in.address();
  a.rows = in.whole(), a.experts = in.whole(), a.k = in.whole();
  a.normalize = in.whole(), a.scale = float(in.real()), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(a.rows * a.experts > 65536, [&] { return run_gate(a); }));
}

PyObject *cross_entropy(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  CrossEntropy a;
  int64_t dtype = in.whole();
  a.x = in.address(), a.targets = (int64_t *)in.address(), a.out = (float *)in.address();
  a.rows = in.whole(), a.width = in.whole(), a.x_row = in.whole(), a.ignored = in.whole();
  a.smoothing = float(in.real()), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(a.rows * a.width > 65536, [&] {
    return for_dtype(dtype, [&](auto t) { return run_cross_entropy<decltype(t)>(a); });
  }));
}

PyObject *quantize(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Quantize a;
  int64_t dtype = in.whole();
  a.x = in.address(), a.codes = in.address(), a.scales = (float *)in.address();
  a.rows = in.whole(), a.width = in.whole(), a.block = in.whole(), a.x_row = in.whole();
  a.fp8 = in.whole(), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(a.rows * a.width > 65536, [&] {
    return for_dtype(dtype, [&](auto t) { return run_quantize<decltype(t)>(a); });
  }));
}

PyObject *dequantize(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Dequantize a;
  int64_t dtype = in.whole();
  a.codes = (int8_t *)in.address(), a.scales = (float *)in.address(), a.out = in.address();
  a.rows = in.whole(), a.width = in.whole(), a.block = in.whole(), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(a.rows * a.width > 65536, [&] {
    return for_dtype(dtype, [&](auto t) { return run_dequantize<decltype(t)>(a); });
  }));
}

// Reads (dtype, address, a step for each of N dimensions), or None.
template <int N> View read_view(Arguments &in) {
  View v;
  v.given = in.left && *in.at != Py_None;
  if (!v.given) return in.next(), v;
  int64_t numbers[2 + N] = {};
  in.tuple(numbers);
  v.dtype = numbers[0], v.at = (void *)(intptr_t)numbers[1];
  std::copy(numbers + 2, numbers + 2 + N, v.step);
  return v;
}

PyObject *state_update(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  StateUpdate a;
  a.state = read_view<4>(in), a.x = read_view<3>(in), a.dt = read_view<3>(in), a.A = read_view<3>(in);
  a.B = read_view<3>(in), a.C = read_view<3>(in), a.D = read_view<2>(in), a.z = read_view<3>(in);
  a.dt_bias = read_view<2>(in), a.out = read_view<3>(in), a.to = read_view<4>(in);
  a.batch = in.whole(), a.heads = in.whole(), a.dim = in.whole(), a.size = in.whole(), a.groups = in.whole();
  a.softplus = in.whole(), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  bool worth_it = a.batch * a.heads * a.dim * a.size > 16384;
  return none_or_memory_error(without_gil(worth_it, [&] { return run_state_update(a); }));
}

PyObject *delta_rule(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  DeltaRule a;
  a.q = read_view<4>(in), a.k = read_view<4>(in), a.v = read_view<4>(in), a.g = read_view<3>(in);
  a.beta = read_view<3>(in), a.state = read_view<4>(in), a.out = read_view<4>(in), a.to = read_view<4>(in);
  a.batch = in.whole(), a.heads = in.whole(), a.value_heads = in.whole(), a.dim = in.whole(), a.value_dim = in.whole();
  a.scale = float(in.real()), a.normalize = in.whole(), a.eps = float(in.real()), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  bool worth_it = a.batch * a.value_heads * a.dim * a.value_dim > 16384;
  return none_or_memory_error(without_gil(worth_it, [&] { return run_delta_rule(a); }));
}

PyObject *convolution(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  Convolution a;
  a.x = read_view<3>(in), a.weight = read_view<2>(in), a.bias = read_view<1>(in);
  a.state = read_view<3>(in), a.out = read_view<3>(in), a.to = read_view<3>(in);
  a.batch = in.whole(), a.channels = in.whole(), a.width = in.whole(), a.length = in.whole();
  a.silu = in.whole(), a.threads = int(in.whole());
  if (!in.ok) return nullptr;
  return none_or_memory_error(without_gil(a.batch * a.channels > 8192, [&] { return run_convolution(a); }));
}

// Whether OpenMP is to share out the work in place of the pool; returns whether it does.
PyObject *use_openmp(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Arguments in{args, count};
  const bool wanted = in.whole();
  if (!in.ok) return nullptr;
#ifdef _OPENMP
  by_openmp() = wanted;
#endif
  return PyBool_FromLong(by_openmp());
}

PyMethodDef methods[] = {
    {"use_openmp", (PyCFunction)(void (*)(void))use_openmp, METH_FASTCALL, nullptr},
    {"token", (PyCFunction)(void (*)(void))token, METH_FASTCALL, nullptr},
    {"product", (PyCFunction)(void (*)(void))product, METH_FASTCALL, nullptr},
    {"feed_forward", (PyCFunction)(void (*)(void))feed_forward, METH_FASTCALL, nullptr},
    {"attention_decode", (PyCFunction)(void (*)(void))attention_decode, METH_FASTCALL, nullptr},
    {"grouped_attention", (PyCFunction)(void (*)(void))grouped_attention, METH_FASTCALL, nullptr},
    {"paged_attention", (PyCFunction)(void (*)(void))paged_attention, METH_FASTCALL, nullptr},
    {"rms_norm", (PyCFunction)(void (*)(void))rms_norm, METH_FASTCALL, nullptr},
    {"group_norm", (PyCFunction)(void (*)(void))group_norm, METH_FASTCALL, nullptr},
    {"argmax", (PyCFunction)(void (*)(void))argmax, METH_FASTCALL, nullptr},
    {"gate", (PyCFunction)(void (*)(void))gate, METH_FASTCALL, nullptr},
    {"cross_entropy", (PyCFunction)(void (*)(void))cross_entropy, METH_FASTCALL, nullptr},
    {"quantize", (PyCFunction)(void (*)(void))quantize, METH_FASTCALL, nullptr},
    {"dequantize", (PyCFunction)(void (*)(void))dequantize, METH_FASTCALL, nullptr},
    {"state_update", (PyCFunction)(void (*)(void))state_update, METH_FASTCALL, nullptr},
    {"delta_rule", (PyCFunction)(void (*)(void))delta_rule, METH_FASTCALL, nullptr},
    {"convolution", (PyCFunction)(void (*)(void))convolution, METH_FASTCALL, nullptr},
    {"rope", (PyCFunction)(void (*)(void))rope, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "layerzero_cpu_kernels", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_layerzero_cpu_kernels() {
  PyObject *made = PyModule_Create(&module);
  if (made && PyModule_AddFunctions(made, lz::ggml_methods) == 0) return made;
  Py_XDECREF(made);
  return nullptr;
}

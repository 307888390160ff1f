"""ATen operators that the native path calls itself: results, errors and modes are those of the call
through Python.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import tracemalloc
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import outcome, qkv, rows, same_outcome
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero.dispatch.binding import as_operator_call
from layerzero.machine.loading import satisfies
from layerzero.selection.policy import Layer
from layerzero.spec.errors import InvalidCall, NamedKernelRefused
from layerzero.spec.kernel import ByFact, Const, direct
from layerzero.world import snapshot as worlds

KERNELS = {
    "torch.sdpa": ("attention", "aten::scaled_dot_product_attention"),
    "torch.sdpa_math": ("attention", "aten::_scaled_dot_product_attention_math"),
    "torch.sdpa_flash": ("attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "torch.sdpa_flash_lse": ("attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "torch.rms_norm": ("rms_norm", "aten::rms_norm"),
    "torch.layer_norm": ("layer_norm", "aten::layer_norm"),
    "torch.group_norm": ("group_norm", "aten::group_norm"),
    "torch.linear": ("linear", "aten::linear"),
    "torch.embedding": ("embedding", "aten::embedding"),
}
# A plain call of each op, and what to lock it to.
PLAIN = {"attention": "torch.sdpa", "rms_norm": "torch.rms_norm", "layer_norm": "torch.layer_norm",
         "group_norm": "torch.group_norm", "linear": "torch.linear", "embedding": "torch.embedding"}


def plain(op, dtype=torch.float32):
    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape, dtype=dtype) for shape in ((3, 8), (8,), (8,)))
    return {"attention": tuple(t.to(dtype) for t in qkv(4, 4)), "rms_norm": (x, w),
            "layer_norm": (x, w, b), "group_norm": (torch.randn(2, 4, 3, 3, dtype=dtype), 2),
            "linear": (x, torch.randn(5, 8, dtype=dtype)),
            "embedding": (torch.tensor([1, 2, 2]), torch.randn(4, 8, dtype=dtype))}[op]


@pytest.fixture
def locked(both):
    """The dispatcher of an op that is locked to a kernel, and has served `args` by the native path.
    """
    def find(op, *args, kernel=None, **kwargs):
        lz.lock(op, kernel or PLAIN[op])
        dispatcher = both(op)
        for _ in range(2):
            dispatcher.public(*args, **kwargs)
        assert dispatcher.native.compiled.kind(*args, **kwargs).startswith("aten::")
        return dispatcher

    return find


# results and errors

@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_case_of_the_contract_is_the_same_by_both_paths(both, kernel):
    op, operator = KERNELS[kernel]
    dispatcher, kinds = both(op), set()
    wanted = worlds.current().catalog.by_id[kernel].torch
    if wanted and not satisfies(torch.__version__, wanted):
        pytest.skip(f"{kernel} is for torch {wanted}")
    lz.lock(op, kernel)
    for dtype in (torch.float32, torch.float64):
        for case in dispatcher.op.cases:
            values = dispatcher.op.inputs(**case, dtype=dtype)
            if kernel == "torch.sdpa_flash_lse":
                values["return_lse"] = True
            call = ((), values)
            first = outcome(dispatcher.public, call)
            if first[0] == "raised":
                assert first[1] is NamedKernelRefused, first
                continue
            if values.get("dropout_p"):
                continue                       # drawn anew in each call
            kinds.add(dispatcher.native.compiled.kind(**values))
            assert (same_outcome(first, outcome(dispatcher.public, call))
                    and same_outcome(first, outcome(dispatcher.python_call, call))), case
    assert operator in kinds and kinds <= {operator, "python", None}


@pytest.mark.parametrize("op", sorted(PLAIN))
def test_gradients_are_the_same_by_both_paths(locked, op):
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in plain(op, torch.float64)]
    # torch.sdpa goes through Python for gradients where torch is built for CUDA
    dispatcher = locked(op, *args, kernel="torch.sdpa_math" if op == "attention" else None)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    assert torch.autograd.gradcheck(lambda *_: dispatcher.public(*args), leaves)
    outs = [run(*args) for run in (dispatcher.public, dispatcher.python_call)]
    assert type(outs[0].grad_fn) is type(outs[1].grad_fn)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize(("op", "odd"), [
    ("rms_norm", {"eps": 0}), ("rms_norm", {"eps": 10**400}), ("rms_norm", {"eps": float("nan")}),
    ("layer_norm", {"eps": 1}), ("group_norm", {"groups": 2**70}), ("group_norm", {"groups": -2}),
    ("group_norm", {"groups": 3}), ("attention", {"scale": 10**400}), ("attention", {"scale": 2}),
    ("attention", {"dropout_p": 0}), ("embedding", {"padding_idx": 3}), ("embedding", {"scale": 1}),
    ("embedding", {"scale": 2.0}), ("linear", {"activation": "relu"}),
    ("linear", {"activation": None}), ("rms_norm", {"offset": 1.0}), ("rms_norm", {"weight": None}),
    ("layer_norm", {"bias": None})])
def test_odd_numbers_are_the_same_by_both_paths(locked, op, odd):
    dispatcher = locked(op, *plain(op))
    lz.configure(breaker_threshold=10**9)
    values = {**dict(zip((p.name for p in dispatcher.op.params), plain(op))), **odd}
    for _ in range(2):
        assert same_outcome(outcome(dispatcher.public, ((), values)),
                            outcome(dispatcher.python_call, ((), values)))


def test_what_an_operator_throws_comes_out_as_pythons_own_exception(locked):
    """The values of ids are not in the key: the operator itself finds what is wrong, on a hit."""
    ids, weight = plain("embedding")
    dispatcher = locked("embedding", ids, weight)
    bad = torch.tensor([1, 2, 9])
    caught = []
    for run in (dispatcher.public, dispatcher.python_call):
        with pytest.raises(InvalidCall) as error:
            run(bad, weight)
        caught.append((str(error.value), type(error.value.__cause__), str(error.value.__cause__)))
    assert caught[0] == caught[1] and caught[0][1] is IndexError


def test_an_error_of_autograd_is_the_same(locked):
    """It is raised by torch's dispatcher around the operator, of a call that keeps the contract."""
    with torch.inference_mode():
        weight = torch.randn(5, 8)
    x = rows(3, 8)
    dispatcher = locked("linear", x, weight)
    x.requires_grad_()
    lz.configure(breaker_threshold=10**9)
    compiled, python = (outcome(run, ((x, weight), {}))
                        for run in (dispatcher.public, dispatcher.python_call))
    assert compiled == python and "Inference tensors cannot be saved for backward" in compiled[2]


def test_a_warning_of_torch_is_a_warning_of_python(locked):
    x, weight = rows(3, 8), torch.randn(8, dtype=torch.float64)
    dispatcher = locked("rms_norm", x, weight)
    torch.set_warn_always(True)                # else this one comes once in a process
    try:
        received = []
        for run in (dispatcher.public, dispatcher.python_call):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                run(x, weight)
            received.append([str(w.message).partition("(Triggered")[0] for w in seen])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(UserWarning) if seen else warnings.catch_warnings():
                    run(x, weight)
    finally:
        torch.set_warn_always(False)
    assert received[0] == received[1]
    if not received[0]:
        pytest.skip("this torch says nothing about a weight of another dtype")


# modes

class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Operators])
@pytest.mark.parametrize("op", sorted(PLAIN))
def test_a_mode_sees_the_call(locked, op, mode):
    args = plain(op)
    dispatcher = locked(op, *args)
    received = []
    for run in (dispatcher.public, dispatcher.public, dispatcher.python_call):
        with mode() as seen:
            assert torch.equal(run(*args), dispatcher.public(*args))
        received.append(seen.seen)
    own = KERNELS[PLAIN[op]][1].removeprefix("aten::")
    assert mode is Operators or any(own == name for name in received[0])
    # What is asked on the way (shape, dtype) differs between the two; what is computed does not.
    computed = [[name for name in seen if mode is Operators or name == own] for seen in received]
    assert computed[0] and computed[0] == computed[1] == computed[2]


@pytest.mark.parametrize("op", sorted(PLAIN))
def test_inference_mode_and_no_grad(locked, op):
    args = plain(op)
    dispatcher = locked(op, *args)
    with torch.inference_mode():
        for _ in range(2):
            assert dispatcher.public(*args).is_inference()
    trained = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point()
               else a for a in args]
    for _ in range(2):
        assert dispatcher.public(*trained).requires_grad
        with torch.no_grad():
            assert not dispatcher.public(*trained).requires_grad


def test_vmap_and_grad_transforms(locked):
    x, weight = rows(3, 8), torch.randn(5, 8)
    dispatcher = locked("linear", x, weight)
    torch.testing.assert_close(torch.vmap(lambda row: dispatcher.public(row, weight))(x),
                               F.linear(x, weight))
    torch.testing.assert_close(torch.func.grad(lambda t: dispatcher.public(t, weight).sum())(x),
                               torch.ones(3, 5) @ weight)


@pytest.mark.filterwarnings("ignore")
def test_a_trace_records_sizes_as_before(locked):
    x, w, b = plain("layer_norm")
    dispatcher = locked("layer_norm", x, w, b)
    graphs = []
    for run in (dispatcher.public, dispatcher.python_call):
        for _ in range(2):                     # the second is a hit, with the tracer in its key
            traced = torch.jit.trace(lambda x, run=run: run(x), (x,), check_trace=False)
        graphs.append(str(traced.graph))
        wide = rows(2, 12)
        torch.testing.assert_close(traced(wide), F.layer_norm(wide, (12,)))
    assert all("aten::layer_norm" in graph and "aten::size" in graph for graph in graphs)


# threads

def test_the_gil_is_free_while_an_operator_runs(locked):
    """The other thread counts, and publishes new worlds: the entry that runs is dropped from the
    table meanwhile."""
    x, weight = torch.randn(700, 1500), torch.randn(1500, 1500)
    dispatcher = locked("linear", x, weight)
    want, got = F.linear(x, weight), []

    def work(started):
        started.set()
        got.append(dispatcher.public(x, weight))

    def count_meanwhile():
        got.clear()
        started, counted = threading.Event(), 0
        thread = threading.Thread(target=work, args=(started,))
        thread.start()
        started.wait()
        while not got and thread.is_alive():
            lz.clear_cache()
            counted += 1
            time.sleep(0.001)                  # the other thread wants the GIL back
        thread.join()
        assert torch.equal(got[0], want)
        return counted

    before = [sys.getrefcount(t) for t in (x, weight)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(60.0)                # nobody is made to give the GIL up: it must be given
    try:
        # in a busy machine this thread may sleep through an operator, but not through all
        assert any(count_meanwhile() > 1 for _ in range(20))
    finally:
        sys.setswitchinterval(switch)
    got.clear()
    assert [sys.getrefcount(t) for t in (x, weight)] == before


def test_many_threads_and_many_worlds(locked):
    args = {op: plain(op) for op in PLAIN}
    dispatcher = {op: locked(op, *args[op]) for op in PLAIN}
    want = {op: dispatcher[op].public(*args[op]) for op in PLAIN}
    wrong, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            for op in PLAIN:
                if not torch.equal(dispatcher[op].public(*args[op], backend=PLAIN[op]), want[op]):
                    wrong.append(op)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for _ in range(60):
        lz.clear_cache()
    stop.set()
    for t in threads:
        t.join()
    assert not wrong


# memory

@pytest.mark.parametrize("op", sorted(PLAIN))
def test_hits_leak_nothing(locked, op):
    args = plain(op)
    dispatcher = locked(op, *args)
    watched = [a for a in args if isinstance(a, torch.Tensor)]

    def calls(n):
        for _ in range(n):
            dispatcher.public(*args)

    calls(100)
    gc.collect()
    before = [sys.getrefcount(t) for t in watched]
    tracemalloc.start()
    try:
        calls(100)
        first = tracemalloc.get_traced_memory()[0]
        calls(5000)
        grown = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    # an object a call would be 80,000 bytes; what other threads do meanwhile is some thousands
    assert [sys.getrefcount(t) for t in watched] == before and grown < 20_000


def test_errors_leak_nothing(locked):
    ids, weight = plain("embedding")
    dispatcher = locked("embedding", ids, weight)
    bad = torch.tensor([1, 2, 9])
    outcome(dispatcher.public, ((bad, weight), {}))
    gc.collect()
    before = [sys.getrefcount(t) for t in (bad, weight)]
    for _ in range(100):
        assert outcome(dispatcher.public, ((bad, weight), {}))[1] is InvalidCall
    gc.collect()
    assert [sys.getrefcount(t) for t in (bad, weight)] == before


# declarations

def test_a_call_of_torchs_own_function_is_known_as_its_operator():
    name, arguments = as_operator_call(direct(torch.group_norm, "x", "groups", eps="eps"))
    assert name == "group_norm"
    assert arguments == ("x", "groups", Const(None), Const(None), "eps", Const(True))
    assert as_operator_call(direct(len, "x")) is None, "no function of torch"
    assert as_operator_call(direct(torch.group_norm, "x")) is None, "an argument is missing"
    assert as_operator_call(direct(torch.group_norm, "x", "groups", nonsense="eps")) is None
    assert as_operator_call(direct(torch.sum, "x")) is not None, "of several forms the plain one"
    assert as_operator_call(direct(lambda x: x, "x")) is None


def test_a_constant_by_fact_is_right_for_every_call_until_more_is_known():
    call = direct(torch.sum, "x", ByFact("group", 1, False, True))
    assert call.facts == ("group",) and call.params == ("x",)
    assert [call.resolve(known).args[1] for known in ({}, {"group": 1}, {"group": 2})] == [
        Const(True), Const(False), Const(True)]


def test_groups_of_heads_are_asked_for_only_where_there_are_some(both):
    dispatcher = both("attention")
    lz.lock("attention", "torch.sdpa")
    q, k, v = qkv(heads=4)
    for keys, values in ((k, v), (k[:, :2], v[:, :2])):
        for _ in range(2):
            out = dispatcher.public(q, keys, values)
        torch.testing.assert_close(out, dispatcher.op.reference(q, keys, values))
        entry = dispatcher.native.compiled.lookup(q, keys, values)
        assert ("enable_gqa" in entry.binding.call.kwargs) == (keys.shape[1] == 2)


# backend= and policy=

@pytest.mark.parametrize("path_name", ["public", "python_call"])
def test_a_call_that_names_its_kernel_is_remembered(both, path_name):
    dispatcher, (q, k, v) = both("attention"), qkv()
    run, compiled = getattr(dispatcher, path_name), dispatcher.native.compiled
    for name in ("torch.sdpa_math", "torch.sdpa", "torch"):
        for _ in range(3):
            run(q, k, v, backend=name)
    if path_name == "public":
        assert compiled.lookup(q, k, v) is None
        entries = [compiled.lookup(q, k, v, backend=n) for n in ("torch.sdpa_math", "torch.sdpa")]
        assert [e.plan.kernel for e in entries] == ["torch.sdpa_math", "torch.sdpa"]
        other = "".join(["torch", ".sdpa"])    # the same name in another object
        assert compiled.lookup(q, k, v, backend=other) is entries[1]
        assert compiled.kind(q, k, v, backend="torch.sdpa") == "aten::scaled_dot_product_attention"
    assert [e.plan.kernel for e in dispatcher.cache.table.values()][:2] == ["torch.sdpa_math",
                                                                            "torch.sdpa"]
    assert len(dispatcher.cache.table) == 3, "one for each name"
    lz.clear_cache()
    assert compiled.lookup(q, k, v, backend="torch.sdpa") is None


@pytest.mark.parametrize("path_name", ["public", "python_call"])
def test_a_context_around_a_call_that_names_its_kernel(both, path_name):
    dispatcher, (q, k, v) = both("attention"), qkv()
    run = getattr(dispatcher, path_name)
    for _ in range(2):
        run(q, k, v, backend="torch.sdpa")
        with lz.prefer("torch.sdpa_math"):
            run(q, k, v)
            run(q, k, v, backend="torch.sdpa")
        with lz.prefer(deterministic=True):
            run(q, k, v, backend="torch.sdpa")
    kernels = [e.plan.kernel for e in dispatcher.cache.table.values()]
    assert sorted(kernels) == ["torch.sdpa", "torch.sdpa", "torch.sdpa", "torch.sdpa_math"]


@pytest.mark.parametrize("path_name", ["public", "python_call"])
def test_a_policy_is_read_again_when_it_has_changed(both, path_name):
    dispatcher, (q, k, v) = both("attention"), qkv()
    run, policy = getattr(dispatcher, path_name), {"deterministic": False}
    layer = Layer("call", {}, (lz.PolicyRule.of("lock", "torch.sdpa_math", "attention"),))
    for _ in range(3):
        run(q, k, v, policy=policy)
    assert len(dispatcher.cache.table) == 1
    policy["deterministic"] = True
    for _ in range(3):
        run(q, k, v, policy=policy)
        run(q, k, v, policy={"deterministic": True})
    assert len(dispatcher.cache.table) == 2
    for _ in range(3):
        run(q, k, v, policy=layer)
    assert [e.plan.kernel for e in dispatcher.cache.table.values()][2:] == ["torch.sdpa_math"]
    with pytest.raises(lz.errors.LayerZeroError):
        run(q, k, v, policy={"no_such_setting": 1})
    with pytest.raises(lz.errors.LayerZeroError):
        run(q, k, v, policy={"deterministic": [1]})

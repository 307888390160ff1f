"""Kernels that write into their inputs and fail, and kernels that return what their op does not
give.
"""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch
from helpers import (
    ATTENTION,
    RMS_NORM,
    Fake,
    events_of,
    faults_of,
    path_of,
    python,
    qkv,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.dispatch import protection
from layerzero.dispatch import torch_library as torch_face
from layerzero.dispatch.background import learning
from layerzero.dispatch.dispatcher import public_function
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.event import Fallback, KernelRefused, Selected
from layerzero.spec.reason import Code
from layerzero.world import snapshot as worlds

EMBEDDING = lz.op("embedding")


def by_torch(t):
    with torch.no_grad():
        t.zero_()


def by_data(t):
    t.data.mul_(3)                                         # has a version counter of its own


def by_pointer(t):
    ctypes.memset(t.data_ptr(), 0x55, t.element_size())    # one element


def by_numpy(t):
    t.detach().numpy()[..., -1] += 1


DAMAGE = [by_torch, by_data, by_pointer, by_numpy]


class Vandal(Fake):
    """Damages an argument with `damage`, then throws, while `armed`."""

    def __init__(self, damage, op=RMS_NORM, name="x", id="fake.vandal", armed=True, **declared):
        self.damage, self.name, self.armed = damage, name, armed
        super().__init__(id, op, before=self.strike, **declared)

    def strike(self):
        if self.armed:
            self.damage(self.got[self.name])
            raise RuntimeError("lost my way")


class Returns(Fake):
    """Gives `make(arguments)` instead of what the op gives."""

    def __init__(self, make, op=RMS_NORM, id="fake.odd", **declared):
        self.make = make
        super().__init__(id, op, **declared)

    def _load(self):
        run = super()._load()

        def instead(*args, **kwargs):
            run(*args, **kwargs)
            return self.make(self.got)

        instead.__signature__ = run.__signature__
        return instead


# inputs that were changed by a kernel that failed

@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_is_answered_from_inputs_that_the_first_call_has_damaged(damage, path, emitted):
    vandal = Vandal(damage)
    register(vandal)
    call, x = path_of(RMS_NORM, path), rows()
    with pytest.raises(lz.errors.InputDamaged,
                       match=r"fake\.vandal failed .*lost my way.* changed x"):
        call(x)
    assert not events_of(Fallback, emitted) and faults_of("fake.vandal") == 1
    (refused,) = events_of(KernelRefused, emitted)
    assert refused.kernel == "fake.vandal" and refused.reason.code is Code.INPUT_CHANGED
    x = rows()
    # another serves, and the vandal is not asked
    torch.testing.assert_close(call(x), RMS_NORM.reference(x))
    assert vandal.calls == 1
    assert [r.code for r in lz.explain("rms_norm", x).why_not("fake.vandal")] == [
        Code.INPUT_CHANGED]


def test_the_error_is_of_our_tree_and_says_what_to_do(path):
    register(Vandal(by_pointer))
    with pytest.raises(RuntimeError) as caught:
        path_of(RMS_NORM, path)(rows())
    assert (isinstance(caught.value, lz.errors.LayerZeroError)
            and caught.value.codes == (Code.INPUT_CHANGED,))
    assert ("restore the inputs" in str(caught.value)
            and isinstance(caught.value.__cause__.fault, RuntimeError))


def test_a_kernel_that_fails_without_touching_anything_is_followed_as_ever(path, emitted):
    register(Fake("fake.broken", fault=RuntimeError("no")))
    x = rows()
    torch.testing.assert_close(path_of(RMS_NORM, path)(x), RMS_NORM.reference(x))
    assert len(events_of(Fallback, emitted)) == 1 and not events_of(KernelRefused, emitted)


@pytest.mark.parametrize("inference", [False, True])
def test_a_hit_that_damages_as_torch_counts_it_is_noticed(path, inference):
    """Long after the first call.

    What is made in inference mode counts no writes, so there it is not noticed.
    """
    vandal = Vandal(by_torch, armed=False)
    register(vandal)
    call = path_of(RMS_NORM, path)
    with torch.inference_mode(inference):
        for _ in range(40):
            x = rows()
            call(x)
        vandal.armed, x = True, rows()
        if inference:
            call(x)                                        # documented: see protect_inputs
        else:
            with pytest.raises(lz.errors.InputDamaged):
                call(x)


@pytest.mark.parametrize("damage", DAMAGE)
def test_after_a_fault_the_kernel_is_looked_at_again_with_checksums(damage, path):
    vandal = Vandal(damage, armed=False)
    register(vandal)
    call = path_of(RMS_NORM, path)
    for _ in range(30):
        call(rows())
    vandal.fault = RuntimeError("a warning shot")
    call(rows())
    vandal.fault = None
    for _ in range(protection.CLEAN_CALLS // 2):
        call(rows())
    vandal.armed = True
    with pytest.raises(lz.errors.InputDamaged):
        call(rows())


def test_a_kernel_that_behaves_again_runs_bare_again(path):
    flaky = Fake("fake.flaky")
    register(flaky)
    call, x = path_of(RMS_NORM, path), rows()
    call(x)
    entry = next(e for e in dispatcher_of("rms_norm").cache.table.values()
                 if e.plan.kernel == "fake.flaky")
    assert not isinstance(entry.run, protection.Guard)
    flaky.fault = RuntimeError("once")
    call(x)
    assert isinstance(entry.run, protection.Guard)
    flaky.fault = None
    for _ in range(protection.CLEAN_CALLS + 1):
        call(x)
    assert not isinstance(entry.run, protection.Guard)
    before = flaky.calls
    call(x)
    assert flaky.calls == before + 1


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("inference", [False, True])
def test_policy_can_ask_for_every_call_to_be_looked_at(damage, inference, path):
    vandal = Vandal(damage, armed=False)
    register(vandal)
    lz.configure(protect_inputs=True)
    call = path_of(RMS_NORM, path)
    with torch.inference_mode(inference):
        for _ in range(40):
            torch.testing.assert_close(call(rows()), RMS_NORM.reference(rows()))
        vandal.armed, x = True, rows()
        with pytest.raises(lz.errors.InputDamaged):
            call(x)


def overlapping():
    return torch.randn(60).as_strided((5, 16), (4, 1))     # each row shows most of the one before


@pytest.mark.parametrize("make", [
    lambda: torch.randn(3, 32)[:, ::2], lambda: torch.randn(16, 3).t(),
    lambda: torch.randn(1, 16).expand(3, 16), overlapping, lambda: torch.randn(3, 64)[:, 3:19],
    lambda: torch.randn(16).expand(4, 3, 16)],
    ids=["strided", "transposed", "expanded", "overlapping", "offset", "twice expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_every_layout_are_read_rightly(make, dtype, path):
    register(Vandal(by_pointer))
    x = make().to(dtype) if dtype is not torch.float32 else make()
    original = x.clone()
    with pytest.raises(lz.errors.InputDamaged):
        path_of(RMS_NORM, path)(x)
    assert not torch.equal(x, original)
    lz.unregister("fake.vandal")
    # and left alone it is not accused
    register(Fake("fake.broken", fault=RuntimeError("no")))
    torch.testing.assert_close(path_of(RMS_NORM, path)(original), RMS_NORM.reference(original))


def test_whole_numbers_are_protected_too(path):
    register(Vandal(by_pointer, EMBEDDING, "ids"))
    ids, weight = torch.arange(6).view(2, 3), torch.randn(8, 4)
    with pytest.raises(lz.errors.InputDamaged, match="changed ids"):
        path_of(EMBEDDING, path)(ids, weight)


def test_an_exchange_of_equal_numbers_is_noticed():
    """A sum would be the same: signs turned, rows in another order."""
    x = torch.tensor([[1.0, -1.0, 2.0, -2.0]] * 4)
    before = protection.checksum(x, protection.ALL_BYTES)
    assert protection.checksum(-x, protection.ALL_BYTES) != before
    assert protection.checksum(x.flip(1), protection.ALL_BYTES) != before
    assert protection.checksum(x.clone(), protection.ALL_BYTES) == before


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64,
                                   torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_has_a_checksum(dtype):
    x = torch.zeros(64, dtype=dtype)
    before = protection.checksum(x, protection.ALL_BYTES)
    ctypes.memset(x.data_ptr(), 1, 1)
    assert before is not None and protection.checksum(x, protection.ALL_BYTES) != before


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t(), lambda t: t[:, ::3],
                                  lambda t: t[1:-1, 5:-5]])
def test_of_a_large_tensor_both_ends_and_all_parts_are_sampled(view):
    x = torch.zeros(2048, 3000)
    before = protection.checksum(view(x), protection.SAMPLE_BYTES)
    view(x)[...] = 1
    assert protection.checksum(view(x), protection.SAMPLE_BYTES) != before
    x.zero_()
    for part in (view(x)[:64], view(x)[900:1000], view(x)[-64:]):
        part.fill_(1)
        assert protection.checksum(view(x), protection.SAMPLE_BYTES) != before
        part.zero_()
    assert protection.checksum(view(x), protection.SAMPLE_BYTES) == before
    sampled = protection._sample(view(x).view(torch.int32), protection.SAMPLE_BYTES)
    assert sampled.nbytes <= protection.SAMPLE_BYTES + protection.BLOCK_BYTES


def test_the_second_kernel_of_a_plan_may_be_the_vandal(path, emitted):
    register(Fake("fake.broken", fault=RuntimeError("no"), prior=1e7), Vandal(by_data))
    with pytest.raises(lz.errors.InputDamaged, match=r"fake\.vandal"):
        path_of(RMS_NORM, path)(rows())
    assert not events_of(Fallback, emitted)


def test_out_of_memory_after_half_a_write_is_damage_too(path):
    class Greedy(Vandal):
        def strike(self):
            self.damage(self.got["x"])
            raise torch.OutOfMemoryError("CUDA out of memory")

    register(Greedy(by_torch))
    with pytest.raises(lz.errors.InputDamaged, match="out of memory"):
        path_of(RMS_NORM, path)(rows())


def test_a_named_kernel_that_damages_raises_the_same(path):
    register(Vandal(by_data))
    call = path_of(RMS_NORM, path)
    with pytest.raises(lz.errors.InputDamaged):
        call(rows(), backend="fake.vandal")
    with pytest.raises(lz.errors.NamedKernelRefused, match="INPUT_CHANGED"):
        call(rows(), backend="fake.vandal")


def test_several_inputs_are_told_by_name(path):
    def both(query):
        fake.got["value"].zero_()
        query.data.zero_()

    fake = Vandal(both, ATTENTION, "query")
    register(fake)
    with pytest.raises(lz.errors.InputDamaged, match="changed query, value"):
        path_of(ATTENTION, path)(*qkv())


def test_parameters_and_gradients_are_read_without_a_trace(path):
    register(Vandal(by_data, name="weight"))
    x, weight = rows(hidden=16), torch.nn.Parameter(torch.ones(16))
    with pytest.raises(lz.errors.InputDamaged, match="weight"):
        path_of(RMS_NORM, path)(x, weight)
    lz.unregister("fake.vandal")
    out = path_of(RMS_NORM, path)(x, weight)
    out.sum().backward()
    assert weight.grad is not None


def test_a_caller_s_mistake_is_still_the_caller_s(path):
    register(Vandal(by_torch))
    with pytest.raises(lz.errors.InvalidCall):
        path_of(RMS_NORM, path)(rows(), torch.ones(3))


def test_in_pure_python_it_is_the_same():
    out = python("""
        import torch, layerzero as lz
        from layerzero.dispatch import native
        assert native.module() is None
        armed = False
        def load():
            def run(x, weight=None, eps=1e-6):
                if armed:
                    x.zero_()
                    raise RuntimeError("late")
                return lz.op("rms_norm").reference(x, weight, eps)
            return run
        lz.register(lz.Kernel("fake.late", lz.op("rms_norm"), load, prior=1e6, less_work="none"))
        for _ in range(50):
            lz.rms_norm(torch.randn(3, 16))
        armed = True
        try:
            lz.rms_norm(torch.randn(3, 16))
        except lz.errors.InputDamaged as e:
            print(type(e).__name__)
    """, LAYERZERO_NATIVE="0")
    assert out == "InputDamaged"


# what comes out

WRONG = {
    "None": lambda got: None,
    "another shape": lambda got: got["x"][:1].clone(),
    "a dimension more": lambda got: got["x"].clone()[None],
    "another dtype": lambda got: got["x"].double(),
    "another device": lambda got: got["x"].to("meta"),
    "its input": lambda got: got["x"],
    "a view of its input": lambda got: got["x"].view_as(got["x"]),
    "its input by another name": lambda got: torch.from_numpy(got["x"].numpy()),
    "a tuple": lambda got: (got["x"].clone(),),
    "a number": lambda got: 1.0,
    "a sparse tensor": lambda got: got["x"].to_sparse(),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_result_is_caught_on_first_use_and_the_next_kernel_serves(what, path, emitted):
    odd = Returns(WRONG[what])
    register(odd)
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(5):
        torch.testing.assert_close(call(x), RMS_NORM.reference(x))
    assert odd.calls == 1 and faults_of("fake.odd") == 1
    (fallback,) = events_of(Fallback, emitted)
    assert fallback.reason.code is Code.WRONG_RESULT
    call(rows(300, 16))                                    # another kind of call: another first use
    assert odd.calls == 2


def test_a_named_kernel_with_a_wrong_result_raises(path):
    register(Returns(WRONG["another shape"]))
    call = path_of(RMS_NORM, path)
    with pytest.raises(lz.errors.KernelExecutionError, match=r"returned float32\[1, 16\]"):
        call(rows(), backend="fake.odd")
    with pytest.raises(lz.errors.NamedKernelRefused, match="WRONG_RESULT"):
        call(rows(), backend="fake.odd")


def test_too_few_and_too_many_results(path, emitted):
    for make in (lambda got: got["query"].clone(), lambda got: (got["query"].clone(),) * 3,
                 lambda got: (got["query"].clone(), got["query"].clone())):
        register(Returns(make, ATTENTION))
        q, k, v = qkv()
        out, lse = path_of(ATTENTION, path)(q, k, v, return_lse=True)
        torch.testing.assert_close(out, ATTENTION.reference(q, k, v))
        assert lse.shape == (1, 2, 8)
        lz.unregister("fake.odd")
    assert {e.reason.code for e in events_of(Fallback, emitted)} == {Code.WRONG_RESULT}


def test_the_kernel_that_is_tried_next_is_looked_at_too(path, emitted):
    register(Fake("fake.broken", fault=RuntimeError("no"), prior=1e7), Returns(WRONG["None"]))
    x = rows()
    torch.testing.assert_close(path_of(RMS_NORM, path)(x), RMS_NORM.reference(x))
    (fallback,) = events_of(Fallback, emitted)
    assert (fallback.kernel == "fake.broken"
            and fallback.served_by not in ("fake.odd", "fake.broken"))


def test_what_is_proven_runs_without_a_wrapper(path):
    register(Fake("fake.good"))
    call, x = path_of(RMS_NORM, path), rows()
    call(x)
    dispatcher = dispatcher_of("rms_norm")
    entry = next(e for e in dispatcher.cache.table.values() if e.plan.kernel == "fake.good")
    assert not isinstance(entry.run, protection.Guard)
    if path == "native":
        assert dispatcher.native.compiled.lookup(x) is entry


def test_torch_s_own_kernels_run_with_nothing_around_them(world):
    call, x = path_of(RMS_NORM, "python"), rows()
    call(x, backend="torch.rms_norm")
    entry = next(e for e in dispatcher_of("rms_norm").cache.table.values()
                 if e.plan.kernel == "torch.rms_norm")
    assert entry.run is entry.binding.run


def test_threads_that_come_before_the_first_use_is_judged_get_no_wrong_result(path):
    started, go = threading.Event(), threading.Event()

    def slow():
        started.set()
        go.wait(60)

    odd = Returns(WRONG["another shape"], before=slow)
    register(odd)
    call, x, results = path_of(RMS_NORM, path), rows(), []
    threads = [threading.Thread(target=lambda: results.append(call(x))) for _ in range(8)]
    threads[0].start()
    started.wait(60)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.05)
    go.set()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8 and all(r.shape == x.shape for r in results)


def test_a_candidate_that_is_being_learned_is_looked_at(path, emitted):
    """Its first use is an exploring call: what it returns reaches nobody."""
    lz.configure(learn=True)
    odd = Returns(WRONG["another shape"], prior=1e6, less_work="")
    register(odd)
    call = path_of(RMS_NORM, path)
    x = rows(64, 256)

    def served():
        out = call(x)
        assert out.shape == x.shape
        return odd.calls

    wait_for(served)
    for _ in range(50):
        assert call(x).shape == x.shape
    assert odd.calls == 1
    learning.flush()
    learning.reset()


def test_a_kernel_that_compiled_in_the_background_and_is_wrong_never_takes_over(emitted):
    odd = Returns(WRONG["another dtype"], jit=True, package="torch")
    register(odd)
    x = rows(5, 32)
    with lz.prefer("fake.odd"):
        lz.rms_norm(x)
        wait_for(lambda: odd.calls)
        wait_for(lambda: "fake.odd" in worlds.current().refused)
        for _ in range(5):
            torch.testing.assert_close(lz.rms_norm(x), RMS_NORM.reference(x))
    assert "fake.odd" in worlds.current().refused


def test_an_op_may_declare_what_it_writes_into(world):
    def reference(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        """Adds `by` to x, in place."""
        return x.add_(by)

    def meta(x, by=1.0):
        return torch.empty_like(x)

    op = lz.Op("bumped", "elementwise", reference, meta, lambda: {"x": torch.zeros(2, 3)}, ({},),
               lz.Tolerance({"float32": (0.0, 0.0)}), {"x": "rows cols"}, returns=("rows cols",),
               in_place=("x",))
    lz.register(op)
    lz.register(lz.Kernel("fake.bump", op, lambda: reference, prior=1e6, less_work="none"))
    call, x = public_function(op), torch.zeros(2, 3)
    for n in range(1, 4):
        assert call(x) is x and bool((x == n).all())       # its memory may come back
    assert "Tensor(a!) x" in torch_face.schema(op)
    lz.unregister("fake.bump")

    def half(x, by=1.0):
        x[0] += by
        raise RuntimeError("half way")

    lz.register(lz.Kernel("fake.half", op, lambda: half, prior=1e6, less_work="none"))
    with pytest.raises(lz.errors.InputDamaged, match=r"writes into it, and this was not finished"):
        call(torch.zeros(2, 3))
    with pytest.raises(lz.errors.SpecError, match="in_place names 'y'"):
        lz.Op("odd", "elementwise", reference, meta, lambda: {}, ({},), op.tolerance,
              {"x": "rows cols"},
              in_place=("y",))


def test_a_table_s_choice_is_looked_at_like_any_other(path, emitted):
    odd = Returns(WRONG["another shape"])
    register(odd)
    x, weight = rows(4, 64), torch.ones(64)
    specs = {"x": lz.testing.TensorSpec((4, 64), "float32"),
             "weight": lz.testing.TensorSpec((64,), "float32")}
    lz.tables.use_table(lz.tables.solve([lz.testing.Call("rms_norm", specs)], device="cpu"))
    torch.testing.assert_close(path_of(RMS_NORM, path)(x, weight), RMS_NORM.reference(x, weight))
    assert odd.calls == 1 and events_of(Selected, emitted)[-1].kernel == "fake.odd"
    assert [e.reason.code for e in events_of(Fallback, emitted)] == [Code.WRONG_RESULT]

"""torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp say which kernels may serve
attention.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from helpers import ATTENTION, Fake, path_of, qkv, register
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerzero as lz
from layerzero.backends._sequences import sdpa, with_plain_gradient
from layerzero.dispatch.binding import bind
from layerzero.dispatch.facts import read
from layerzero.machine import faults, loading
from layerzero.operate import recording
from layerzero.operate.inspection import dispatcher_of
from layerzero.selection.key import fixed_by_key
from layerzero.spec.errors import NamedKernelRefused, NoKernelFoundError, RegistrationError
from layerzero.spec.kernel import SDPA, SDPA_BACKENDS
from layerzero.spec.reason import Code
from layerzero.world import snapshot as worlds

MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
EFFICIENT, CUDNN = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
VARLEN = lz.op("varlen_attention")
SWITCHES = {"FLASH_ATTENTION": torch.backends.cuda.enable_flash_sdp,
            "EFFICIENT_ATTENTION": torch.backends.cuda.enable_mem_efficient_sdp,
            "MATH": torch.backends.cuda.enable_math_sdp,
            "CUDNN_ATTENTION": torch.backends.cuda.enable_cudnn_sdp}


@pytest.fixture(autouse=True)
def _all_on(world):
    assert faults.sdpa_backends() is None, "a test left an implementation switched off"
    yield
    for switch in SWITCHES.values():
        switch(True)


@contextmanager
def off(*names: str):
    for name in names:
        SWITCHES[name](False)
    try:
        yield
    finally:
        for name in names:
            SWITCHES[name](True)


def implementation(op: str, id: str) -> str:
    return next(k for k in worlds.current().kernels(op) if k.id == id).sdpa_backend


def kernels_that_may(op: str, *args, **kwargs) -> set[str]:
    return {implementation(op, step.kernel) for step in lz.explain(op, *args, **kwargs).steps}


def packed():
    return tuple(VARLEN.inputs(lengths_q=(3, 5), hq=2, hkv=2, d=8).values())[:7]


def test_every_kernel_of_torch_and_of_flash_attention_says_which_implementation_it_is():
    for op in ("attention", "varlen_attention"):
        for kernel in worlds.current().kernels(op):
            if kernel.backend in ("flash_attn", "reference") or kernel.id.startswith("torch.sdpa"):
                assert kernel.sdpa_backend in (SDPA, *SDPA_BACKENDS), kernel.id
            if kernel.backend in ("native", "cuda", "triton", "flashinfer"):
                assert kernel.sdpa_backend == "", kernel.id


@pytest.mark.parametrize("allowed", [(MATH,), (FLASH,), (FLASH, MATH), (EFFICIENT, MATH),
                                     (CUDNN, FLASH)])
def test_only_what_is_allowed_is_in_the_plan(allowed):
    names = {a.name for a in allowed}
    for op, args in (("attention", qkv()), ("attention", qkv(1, 40, heads=4, kv_heads=2)),
                     ("varlen_attention", packed())):
        free, before = kernels_that_may(op, *args), lz.explain(op, *args)
        with sdpa_kernel(list(allowed)):
            left = kernels_that_may(op, *args)
            plan = lz.explain(op, *args)
        assert left <= names | {SDPA} and left >= free & (names | {SDPA})
        for step in before.steps:
            refused = implementation(op, step.kernel) not in (SDPA, *names)
            codes = [r.code for r in plan.why_not(step.kernel)]
            assert codes == [Code.SDPA_BACKEND_DISABLED] * refused, (step.kernel, codes)
        assert kernels_that_may(op, *args) == free     # restored after the block


def test_the_reason_names_what_is_allowed():
    with sdpa_kernel(MATH):
        output = str(lz.explain("attention", *qkv()))
    assert "is FLASH_ATTENTION; torch.nn.attention.sdpa_kernel allows only MATH" in output
    assert ("is none of torch's implementations; torch.nn.attention.sdpa_kernel allows only MATH"
            in output)
    with off(*SWITCHES), pytest.raises(NoKernelFoundError, match="allows only none"):
        lz.attention(*qkv())


def test_a_remembered_choice_does_not_leave_its_block(path):
    # none of torch's: serves only while nothing is switched off
    ours = Fake("fake.one", ATTENTION)
    math = Fake("fake.math", ATTENTION, prior=1e5, sdpa_backend="MATH")
    flash = Fake("fake.flash", ATTENTION, prior=1e4, sdpa_backend="FLASH_ATTENTION")
    register(ours, math, flash)
    attention, args = path_of(ATTENTION, path), qkv()

    def served():
        before = [f.calls for f in (ours, math, flash)]
        torch.testing.assert_close(attention(*args), ATTENTION.reference(*args))
        return [b - a for a, b in zip(before, [f.calls for f in (ours, math, flash)])].index(1)

    for _ in range(2):                                 # the second time everything is remembered
        assert served() == 0
        with sdpa_kernel(MATH):
            assert served() == 1
            with sdpa_kernel(FLASH):
                assert served() == 2
                with sdpa_kernel([FLASH, MATH]):
                    assert served() == 1
                assert served() == 2
            assert served() == 1
        with off("CUDNN_ATTENTION"):
            assert served() == 1
        with off("MATH"):
            assert served() == 2
        with sdpa_kernel([FLASH, MATH, EFFICIENT, CUDNN]):
            assert served() == 0                       # everything is allowed, so ours are too


def test_keys_differ_by_every_switch_and_only_for_ops_that_ask():
    dispatcher, norm = dispatcher_of("attention"), dispatcher_of("rms_norm")
    values, x = dispatcher.order_arguments(tuple(qkv()), {}), torch.randn(2, 8)
    lz.attention(*qkv()), lz.rms_norm(x)
    named = norm.order_arguments((x,), {})

    def keys():
        keyed = [dispatcher.key_of(*values)]
        if dispatcher.native is not None:
            keyed.append(dispatcher.native.compiled.key(*values[:8]))
        return keyed, norm.key_of(*named)

    seen = [keys()]
    for names in (("MATH",), ("FLASH_ATTENTION",), ("EFFICIENT_ATTENTION",), ("CUDNN_ATTENTION",),
                  tuple(SWITCHES)):
        with off(*names):
            seen.append(keys())
    for place in range(len(seen[0][0])):
        assert len({keyed[place] for keyed, _ in seen}) == len(seen)
    assert len({key for _, key in seen}) == 1


def test_threads_see_the_switches_of_the_process():
    """torch keeps them for the process, not for a thread; so do we."""
    math = Fake("fake.math", ATTENTION, sdpa_backend="MATH")
    register(math)
    results = []
    with sdpa_kernel(FLASH):
        worker = threading.Thread(target=lambda: results.append(lz.which("attention", *qkv())))
        worker.start()
        worker.join()
    assert implementation("attention", results[0]) in ("FLASH_ATTENTION", SDPA)
    assert lz.which("attention", *qkv()) == "fake.math"


@pytest.mark.parametrize("case", [
    (EFFICIENT, {}), (CUDNN, {}), (FLASH, {"dropout_p": 0.5}), (FLASH, {"softcap": 2.0}),
    (MATH, {"backend": "torch.sdpa_flash"}), (FLASH, {"dropout_p": 0.5, "backend": "torch.sdpa"})],
                         ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")     # torch says why each implementation cannot
def test_what_nothing_allowed_can_serve_is_refused_and_nobody_is_blamed(path, case):
    allowed, extra = case
    if absent := worlds.current().availability().get(extra.get("backend", "")):
        pytest.skip(str(absent))
    attention, args = path_of(ATTENTION, path), qkv()
    before = lz.which("attention", *args)
    with sdpa_kernel(allowed):
        for _ in range(5):
            with pytest.raises(NamedKernelRefused if "backend" in extra
                               else NoKernelFoundError) as caught:
                attention(*args, **extra)
            assert Code.SDPA_BACKEND_DISABLED in caught.value.codes
    assert not worlds.current().health
    assert lz.which("attention", *args) == before
    torch.testing.assert_close(attention(*args), ATTENTION.reference(*args))


def test_the_results_are_those_of_torch_inside_the_block(path):
    for q, k, v in (qkv(), qkv(5, 9), qkv(1, 30, heads=4, kv_heads=2)):
        # every head its own: before torch 2.9 flash takes no groups of query heads
        heads = [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v)]
        for allowed in (MATH, FLASH):
            with sdpa_kernel(allowed):
                got = path_of(ATTENTION, path)(q, k, v)
                want = torch.nn.functional.scaled_dot_product_attention(q, *heads)
            torch.testing.assert_close(got, want)


def test_gradients_inside_the_block():
    q, k, v = (t.requires_grad_() for t in qkv())
    with sdpa_kernel(MATH):
        lz.attention(q, k, v).sum().backward()
    assert all(t.grad is not None for t in (q, k, v))


def test_other_ops_do_not_ask():
    x = torch.randn(2, 8)
    with off(*SWITCHES):
        torch.testing.assert_close(lz.rms_norm(x), lz.op("rms_norm").reference(x))


def test_a_recorded_call_is_the_same_inside_and_outside_of_the_block(tmp_path):
    """What was allowed is, like a policy, no part of the call."""
    with recording.recording(tmp_path / "outside.jsonl"):
        lz.attention(*qkv(), backend="torch.sdpa")
    with sdpa_kernel(MATH), recording.recording(tmp_path / "inside.jsonl"):
        lz.attention(*qkv(), backend="torch.sdpa")
    outside, inside = ((tmp_path / f"{name}.jsonl").read_text() for name in ("outside", "inside"))
    assert outside == inside and outside


def test_an_unknown_implementation_is_refused_when_it_is_declared():
    with pytest.raises(RegistrationError, match="sdpa_backend must be one of FLASH_ATTENTION"):
        lz.Kernel("ours.one", ATTENTION, lambda: ATTENTION.reference, sdpa_backend="flash")


def test_a_mask_that_was_remembered_in_inference_mode_serves_a_call_that_trains():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 5, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, 23, 16, generator=generator)
    call = {"is_causal": True, "causal_align": "bottom_right"}
    with torch.inference_mode():
        first = lz.attention(q, k, v, **call, backend="torch.sdpa_bias").clone()
    q.requires_grad_()
    again = lz.attention(q, k, v, **call, backend="torch.sdpa_bias")
    again.sum().backward()
    want = lz.attention(q.detach(), k, v, **call, backend="reference.attention")
    torch.testing.assert_close(first, want)
    torch.testing.assert_close(again.detach(), want)
    # other sizes and another alignment have masks of their own
    for align, keys in (("top_left", 23), ("bottom_right", 22)):
        args = (q.detach(), k[:, :, :keys], v[:, :, :keys], None, 0.0, True)
        torch.testing.assert_close(
            lz.attention(*args, causal_align=align, backend="torch.sdpa_bias"),
            lz.attention(*args, causal_align=align, backend="reference.attention"))


def test_a_bias_that_could_be_trained_is_served_like_any_other_where_nothing_is_recorded():
    """torch computes each score for a bias that requires a gradient, even where none is recorded."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 17, 32, generator=generator)
    bias = torch.randn(2, 1, 17, 17, generator=generator)
    with torch.no_grad():
        plain = lz.attention(q, k, v, bias, backend="torch.sdpa_bias")
        parameter = lz.attention(q, k, v, torch.nn.Parameter(bias), backend="torch.sdpa_bias")
    assert torch.equal(parameter, plain)
    trained = torch.nn.Parameter(bias)
    lz.attention(q, k, v, trained, backend="torch.sdpa_bias").sum().backward()
    assert trained.grad is not None


# With CUDA torch.sdpa has a function of its own, since cuDNN misreads a gradient with gaps.

class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(grad)
        return grad * 2, None


def test_a_backward_gets_a_gradient_without_gaps():
    x, seen, grad = torch.randn(2, 3, 4, requires_grad=True), [], torch.randn(2, 3, 8)[..., ::2]
    out = with_plain_gradient(_Seen.apply(x, seen))
    (got,) = torch.autograd.grad(out, x, grad)
    assert seen[0].is_contiguous() and torch.equal(seen[0], grad) and torch.equal(got, grad * 2)
    assert with_plain_gradient(x.detach()).grad_fn is None


def test_sdpa_with_cuda_is_torchs_own_where_no_gradient_is_asked_for(monkeypatch):
    kernel = worlds.current().catalog.by_id["torch.sdpa"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    call, torchs_own = loading.load(kernel), torch.nn.functional.scaled_dot_product_attention
    assert call.resolve({"grad": False}).fn is torchs_own
    assert call.resolve({"grad": True}).fn is call.resolve({}).fn is sdpa
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    values = {p.name: p.default for p in ATTENTION.params} | {
        "query": query, "key": key, "value": value, "is_causal": True, "scale": 0.3}
    bound = [bind(ATTENTION, kernel, call, (), "bhsd", {"grad": grad}) for grad in (False, True)]
    assert [b.operator is not None for b in bound] == [True, False]
    for binding in bound:
        out = binding.run(*(values[p.name] for p in ATTENTION.params))
        assert torch.equal(out, torchs_own(query, key, value, is_causal=True, scale=0.3,
                                           enable_gqa=True))


def test_whether_a_gradient_is_asked_for_is_fixed_by_a_key():
    program = worlds.current().program(ATTENTION)
    for wants_grad in (False, True):
        values = {p.name: p.default for p in ATTENTION.params} | dict(
            zip(("query", "key", "value"), (t.requires_grad_(wants_grad) for t in qkv())))
        assert fixed_by_key(program, read(ATTENTION, values))["grad"] is wants_grad

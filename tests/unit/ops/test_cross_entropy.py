"""Cross entropy of logits, and of a linear layer's logits that never exist as a whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import path_of
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero.backends import torch_loss
from layerzero.backends.native import build
from layerzero.world import snapshot as worlds

KERNELS = ("torch.cross_entropy", "torch.cross_entropy_chunked", "reference.cross_entropy")
LINEAR = ("torch.linear_cross_entropy", "torch.linear_cross_entropy_chunked",
          "reference.linear_cross_entropy")
SETTINGS = [{"reduction": r, "label_smoothing": s, "ignore_index": i}
            for r, s, i in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (-100, 3))]


@pytest.fixture
def small_chunks(monkeypatch):
    """Three rows of eleven classes at a time, so that small inputs take several turns and the last
    is not full."""
    monkeypatch.setattr(torch_loss, "CPU_CHUNK_BYTES", 3 * 11 * 4)
    monkeypatch.setattr(torch_loss, "CHUNK_BYTES", 3 * 11 * 4)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def targets_of(ignore_index: int, rows: int = 10, vocab: int = 11) -> torch.Tensor:
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(1))
    targets[::4] = ignore_index
    return targets


def ask_of_each(out: torch.Tensor) -> torch.Tensor:
    """One number, in which every result has a weight of its own."""
    return (out * torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)).sum()


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_loss_and_gradient_are_torchs(small_chunks, kernel, settings):
    targets = targets_of(settings["ignore_index"])
    ours, theirs = rand(10, 11).requires_grad_(), rand(10, 11).requires_grad_()
    out = lz.cross_entropy(ours, targets, **settings, backend=kernel)
    want = cross_entropy(theirs, targets, **settings)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    ask_of_each(out).backward()
    ask_of_each(want).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [k for k in LINEAR if not k.endswith("chunked")])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_linear_loss_and_gradient_are_torchs(kernel, settings):
    _linear_like_torch(kernel, settings)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("settings", [s for s in SETTINGS if s["reduction"] != "none"],
                         ids=lambda s: "-".join(map(str, s.values())))
def test_chunked_linear_loss_and_gradient_are_torchs(small_chunks, settings, with_bias):
    _linear_like_torch("torch.linear_cross_entropy_chunked", settings, with_bias)


def _linear_like_torch(kernel, settings, with_bias=True):
    targets = targets_of(settings["ignore_index"])

    def leaves():
        tensors = [rand(10, 6), rand(11, 6, seed=1), *([rand(11, seed=2)] if with_bias else [])]
        return [t.requires_grad_() for t in tensors]

    ours, theirs = leaves(), leaves()
    bias = ours[2] if with_bias else None
    out = lz.linear_cross_entropy(ours[0], ours[1], targets, bias, **settings, backend=kernel)
    want = cross_entropy(linear(*theirs), targets, **settings)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    ask_of_each(out * 0.7).backward()
    ask_of_each(want * 0.7).backward()
    torch.testing.assert_close([t.grad for t in ours], [t.grad for t in theirs], rtol=1e-5,
                               atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(small_chunks, kernel, reduction):
    logits = rand(5, 11, dtype=torch.float64).requires_grad_()
    targets = targets_of(-100, 5)
    assert torch.autograd.gradcheck(lambda x: lz.cross_entropy(
        x, targets, label_smoothing=0.2, reduction=reduction, backend=kernel), [logits])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kernel", LINEAR)
def test_gradcheck_of_the_linear_loss(small_chunks, kernel, reduction):
    leaves = [rand(*s, seed=i, dtype=torch.float64).requires_grad_()
              for i, s in enumerate(((5, 4), (11, 4), (11,)))]
    targets = targets_of(-100, 5)
    assert torch.autograd.gradcheck(lambda h, w, b: lz.linear_cross_entropy(
        h, w, targets, b, label_smoothing=0.2, reduction=reduction, backend=kernel), leaves)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False),
                                    (False, False, True)])
def test_the_chunked_linear_loss_computes_just_the_gradients_that_are_asked_for(small_chunks,
                                                                                wanted):
    tensors = [t.requires_grad_(w)
               for t, w in zip((rand(10, 6), rand(11, 6, seed=1), rand(11, seed=2)), wanted)]
    hidden, weight, bias = tensors
    lz.linear_cross_entropy(hidden, weight, targets_of(-100), bias, backend=LINEAR[1]).backward()
    assert tuple(t.grad is not None for t in tensors) == wanted


def test_a_chunked_backward_can_run_twice(small_chunks):
    for run in (lambda x: lz.cross_entropy(x, targets_of(-100), backend=KERNELS[1]),
                lambda x: lz.linear_cross_entropy(x, rand(11, 11, seed=3), targets_of(-100),
                                                  backend=LINEAR[1])):
        logits = rand(10, 11).requires_grad_()
        loss = run(logits)
        (first,), (second,) = (torch.autograd.grad(loss, logits, retain_graph=True)
                               for _ in range(2))
        assert torch.equal(first, second) and first.any()


# Half types.

@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_give_a_float32_loss(small_chunks, kernel, dtype):
    logits, targets = rand(10, 11, dtype=dtype).requires_grad_(), targets_of(-100)
    out = lz.cross_entropy(logits, targets, backend=kernel)
    assert out.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    want = cross_entropy(exact, targets)
    # no rounding to a half type on the way
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)
    out.backward()
    want.backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kernel", LINEAR)
def test_many_chunks_of_bfloat16_sum_their_gradients_in_float32(monkeypatch, kernel):
    # a row at a time: 512 shares of the weight's gradient
    monkeypatch.setattr(torch_loss, "CHUNK_BYTES", 1)
    hidden, weight = rand(512, 8, dtype=torch.bfloat16), rand(11, 8, seed=1, dtype=torch.bfloat16)
    targets = targets_of(-100, 512)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    cross_entropy(linear(*exact), targets, reduction="sum").backward()
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    out = lz.linear_cross_entropy(*leaves, targets, reduction="sum", backend=kernel)
    assert out.dtype == torch.float32
    out.backward()
    for got, want in zip(leaves, exact):
        assert got.grad.dtype == torch.bfloat16
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=2e-2,
                                   atol=2e-2 * float(want.grad.abs().max()))


# Rows that do not count.

@pytest.mark.parametrize("kernel", KERNELS)
def test_when_all_rows_are_ignored(small_chunks, kernel):
    logits, targets = rand(10, 11).requires_grad_(), torch.full((10,), -100)
    assert lz.cross_entropy(logits, targets, backend=kernel).isnan()       # as torch has it
    assert lz.cross_entropy(logits, targets, reduction="none",
                            backend=kernel).tolist() == [0.0] * 10
    total = lz.cross_entropy(logits, targets, reduction="sum", backend=kernel)
    total.backward()
    assert total == 0.0 and not logits.grad.any()


@pytest.mark.parametrize("kernel", LINEAR)
def test_when_all_rows_of_the_linear_loss_are_ignored(small_chunks, kernel):
    hidden, weight = rand(10, 6).requires_grad_(), rand(11, 6, seed=1).requires_grad_()
    targets = torch.full((10,), -100)
    assert lz.linear_cross_entropy(hidden, weight, targets, backend=kernel).isnan()
    lz.linear_cross_entropy(hidden, weight, targets, reduction="sum", backend=kernel).backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("kernel", LINEAR)
def test_no_rows(kernel):
    hidden, weight = rand(0, 6).requires_grad_(), rand(11, 6).requires_grad_()
    targets = torch.empty(0, dtype=torch.int64)
    out = lz.linear_cross_entropy(hidden, weight, targets, reduction="sum", backend=kernel)
    out.backward()
    assert out == 0.0 and hidden.grad.shape == (0, 6) and not weight.grad.any()
    assert lz.cross_entropy(rand(0, 11), targets, reduction="none").shape == (0,)


def test_rows_of_any_shape():
    logits, targets = rand(2, 3, 11), targets_of(-100, 6).view(2, 3)
    for kernel in KERNELS:
        got = lz.cross_entropy(logits, targets, reduction="none", backend=kernel)
        assert got.shape == (2, 3)
        torch.testing.assert_close(got,
                                   cross_entropy(logits.movedim(-1, 1), targets, reduction="none"))
    hidden, weight = rand(2, 3, 6), rand(11, 6, seed=1)
    for kernel in LINEAR:
        got = lz.linear_cross_entropy(hidden, weight, targets, reduction="none", backend=kernel)
        torch.testing.assert_close(got,
                                   lz.cross_entropy(hidden @ weight.t(), targets, reduction="none"))


# Memory.

class _Allocations(TorchDispatchMode):
    """The number of elements of each tensor that an operation makes, views of what there is not
    counted."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        known = {a.untyped_storage().data_ptr() for a in inputs}
        self.sizes += [t.numel() for t in (out if isinstance(out, (tuple, list)) else (out,))
                       if isinstance(t, torch.Tensor)
                       and t.untyped_storage().data_ptr() not in known]
        return out


def sizes_allocated(run) -> list[int]:
    """Sizes of all tensors made, the largest first."""
    with _Allocations() as seen:
        run()
    return sorted(seen.sizes, reverse=True)


def test_the_logits_never_exist_as_a_whole(monkeypatch):
    monkeypatch.setattr(torch_loss, "CHUNK_BYTES", 4 * 16 * 500)           # 16 of 400 rows
    hidden, weight = rand(400, 8).requires_grad_(), rand(500, 8, seed=1).requires_grad_()
    targets = targets_of(-100, 400, 500)
    assert sizes_allocated(lambda: torch_loss._linear_cross_entropy()(hidden, weight,
                                                                      targets).backward())[
        0] == 400 * 500
    chunked = torch_loss._linear_cross_entropy_chunked()
    assert sizes_allocated(lambda: chunked(hidden, weight, targets).backward())[0] == 16 * 500
    with torch.no_grad():
        assert sizes_allocated(lambda: chunked(hidden, weight, targets))[0] == 16 * 500


def test_the_chunked_loss_makes_nothing_as_large_as_the_logits_but_their_gradient(monkeypatch):
    monkeypatch.setattr(torch_loss, "CPU_CHUNK_BYTES", 4 * 16 * 500)
    logits, targets = rand(400, 500).requires_grad_(), targets_of(-100, 400, 500)
    chunked = torch_loss._cross_entropy_chunked()
    with torch.no_grad():
        assert sizes_allocated(lambda: chunked(logits, targets))[0] == 16 * 500
    assert sizes_allocated(lambda: chunked(logits, targets).backward())[:2] == [400 * 500, 16 * 500]


def test_which_kernel(world):
    small, large = (rand(4, 32), torch.zeros(4).long()), (torch.empty(1024, 32000),
                                                          torch.zeros(1024).long())
    own = "native" if build.is_built() is True else "torch"
    assert [lz.which("cross_entropy", *call) for call in (small, large)] == [
        "torch.cross_entropy", f"{own}.cross_entropy"]
    for logits, _ in (small, large):
        logits.requires_grad_()
    assert {lz.which("cross_entropy", *call) for call in (small, large)} == {"torch.cross_entropy"}
    hidden, weight, targets = torch.empty(4096, 64).requires_grad_(), torch.empty(
        32000, 64), torch.zeros(4096).long()
    lz.configure(memory_headroom=2 ** 28)      # a quarter of the logits in float32, four times over
    plan = lz.explain("linear_cross_entropy", hidden, weight, targets)
    assert plan.steps[0].kernel == "torch.linear_cross_entropy_chunked"
    refused = {r.kernel: [x.code for x in r.reasons] for r in plan.rejected}
    assert refused["torch.linear_cross_entropy"] == [lz.Code.MEMORY_HEADROOM_EXCEEDED]
    (reason,) = lz.validate("linear_cross_entropy", LINEAR[1], hidden, weight, targets,
                            reduction="none")
    assert reason.code is lz.Code.FEATURE_UNSUPPORTED and reason.fact == "reduction"


# What a caller does wrong.

@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize("bad", [11, -1, -99])
def test_a_target_outside_the_vocabulary_is_the_callers_error_also_on_a_hit(world, path, kernel,
                                                                            bad):
    call, logits = path_of("cross_entropy", path), rand(2, 11)
    call(logits, torch.tensor([0, -100]), backend=kernel)
    for _ in range(12):
        with pytest.raises(lz.errors.InvalidCall,
                           match="targets must be between 0 and 10, or -100 to be ignored"):
            call(logits, torch.tensor([0, bad]), backend=kernel)
    assert not worlds.current().health


@pytest.mark.parametrize("kernel", [None, *LINEAR])
def test_a_target_outside_the_rows_of_weight_likewise(world, kernel):
    hidden, weight = rand(2, 6), rand(11, 6)
    lz.linear_cross_entropy(hidden, weight, torch.tensor([0, 10]), backend=kernel)
    with pytest.raises(lz.errors.InvalidCall, match="targets must be between 0 and 10"):
        lz.linear_cross_entropy(hidden, weight, torch.tensor([0, 11]), backend=kernel)
    assert not worlds.current().health


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"targets": torch.rand(4, 11)}, "DIM_MISMATCH", "targets's leading shape"),
    ({"targets": torch.rand(4)}, "DTYPE_UNSUPPORTED", r"targets\.dtype must be int32 or int64"),
    ({"targets": torch.zeros(5).long()}, "DIM_MISMATCH", "targets's leading shape"),
    ({"logits": torch.ones(4, 0)}, "EMPTY_INPUT", "vocab must be >= 1"),
    ({"logits": torch.ones(4, 11).long()}, "DTYPE_UNSUPPORTED", "dtype must be float16"),
    ({"label_smoothing": 1.5}, "VALUE_OUT_OF_RANGE", "label_smoothing must be <= 1.0"),
    ({"label_smoothing": -0.1}, "VALUE_OUT_OF_RANGE", "label_smoothing must be >= 0.0"),
    ({"reduction": "avg"}, "VALUE_OUT_OF_RANGE", "reduction must be one of mean, sum, none"),
    ({"ignore_index": None}, "WRONG_TYPE", "ignore_index"),
    ({"targets": None}, "WRONG_TYPE", "targets"),
])
def test_a_wrong_call_names_the_argument(path, changes, code, words):
    call = path_of("cross_entropy", path)
    call(rand(4, 11), torch.zeros(4).long())
    with pytest.raises(lz.errors.InvalidCall, match=words) as raised:
        call(**{"logits": rand(4, 11), "targets": torch.zeros(4).long(), **changes})
    assert code in raised.value.codes


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"weight": torch.ones(11, 5)}, "DIM_MISMATCH", r"weight\.shape\[-1\] must be 6"),
    ({"weight": torch.ones(11, 6).half()}, "MIXED_DTYPES", "weight must be float32"),
    ({"bias": torch.ones(10)}, "DIM_MISMATCH", r"bias\.shape"),
    ({"bias": torch.ones(11).half()}, "MIXED_DTYPES", "bias must be float32"),
    ({"targets": torch.zeros(3).long()}, "DIM_MISMATCH", "targets's leading shape"),
])
def test_a_wrong_linear_call_names_the_argument(changes, code, words):
    with pytest.raises(lz.errors.InvalidCall, match=words) as raised:
        lz.linear_cross_entropy(**{"hidden": rand(4, 6), "weight": rand(11, 6),
                                   "targets": torch.zeros(4).long(),
                                   **changes})
    assert code in raised.value.codes


def test_under_compile_vmap_and_autocast():
    logits, targets = rand(4, 11), targets_of(-100, 4)
    compiled = torch.compile(lambda x: lz.cross_entropy(x, targets) * 2, fullgraph=True,
                             backend="aot_eager")
    torch.testing.assert_close(compiled(logits), cross_entropy(logits, targets) * 2)
    batched = torch.vmap(lambda x: lz.cross_entropy(x, targets))(rand(3, 4, 11))
    torch.testing.assert_close(batched,
                               torch.stack([cross_entropy(x, targets) for x in rand(3, 4, 11)]))
    hidden, weight = rand(4, 6), rand(11, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out = lz.linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(out,
                               cross_entropy(linear(hidden.bfloat16(), weight.bfloat16()).float(),
                                             targets))


@pytest.mark.parametrize("ignore_index", [2**32 + 3, 2**32, -2**32 + 5, 2**31, 2**40])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kernel", [None, *KERNELS, *LINEAR])
def test_an_index_beyond_int32_ignores_no_target_of_int32(kernel, reduction, ignore_index):
    """Torch's comparison of int32 with a number looks at its lowest 32 bits."""
    targets = torch.arange(11)
    settings = {"ignore_index": ignore_index, "reduction": reduction, "backend": kernel}
    if kernel in LINEAR:
        weight = rand(11, 7, seed=1)
        logits = linear(rand(11, 7), weight)
        got = lz.linear_cross_entropy(rand(11, 7), weight, targets.int(), **settings)
    else:
        logits = rand(11, 11)
        got = lz.cross_entropy(logits, targets.int(), **settings)
    want = cross_entropy(logits, targets, reduction=reduction)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_a_target_that_only_has_the_low_bits_of_ignore_index_is_refused(kernel):
    targets = torch.tensor([-2**31], dtype=torch.int32)
    with pytest.raises(lz.errors.InvalidCall, match="targets must be between 0 and 10"):
        lz.cross_entropy(rand(1, 11), targets, ignore_index=2**31, backend=kernel)

"""Every kernel against the contract of its op: kernel x case x dtype, generated from the
declarations. A test is a kernel and a dtype and names each case that fails, as thousands of tests
of a millisecond would cost more than what they test.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from catalog_kernels import KERNELS, case_id, cpu_facts, serves
from helpers import FULL

from layerzero.machine import loading
from layerzero.ops import CATALOG as OPS
from layerzero.ops.attention import OP as attention
from layerzero.ops.rms_norm import OP as rms_norm
from layerzero.spec.kernel import Kernel
from layerzero.spec.reason import Category
from layerzero.verify.kernel.contract import (
    case_outline,
    case_values,
    check_case,
    check_kernel,
    refusals,
)
from layerzero.verify.kernel.judging import worst_indices

ALSO_FLOAT64 = ("reference.", "torch.sdpa_math", "torch.sdpa_flash", "torch.rms_norm",
                "torch.layer_norm")
# A compiling kernel takes seconds per case: enough of them to meet every feature once.
# LZ_TEST_JIT=all runs the whole grid of the compiled formulas too, which takes half an hour.
JIT_CASES: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "attention": (
        ({"hkv": 2, "sq": 192, "sk": 320, "causal": True, "align": "bottom_right",
          "window": (16, -1)}, "bfloat16"),
        ({"alibi": True, "softcap": 5.0, "window": (8, 8), "sq": 9, "sk": 5, "causal": True,
          "align": "bottom_right"}, "float32"),
        *((({"hkv": 2}, "float32"),
           ({"sq": 9, "sk": 5, "causal": True, "align": "bottom_right"}, "float32"),
           ({"sq": 192, "sk": 320, "causal": True, "align": "bottom_right", "window": (16, -1)},
            "bfloat16"),
           ({"alibi": True, "softcap": 5.0, "window": (8, 8)}, "float32")) if FULL else ())),
    "rms_norm": (({"rows": (3, 2, 5), "hidden": 96, "offset": 1.0, "weight_dtype": "float32"},
                  "bfloat16"),),
    "add_rms_norm": (({"stride": "padded"}, "bfloat16"),),
    "layer_norm": (({"weight_dtype": "float32"}, "float16"),),
    "rope": (({"layout": "bshd", "ids": "int64", "d": 128, "rotary": 64}, "bfloat16"),),
    "cross_entropy": (({"ignored": "some", "smoothing": 0.1}, "float32"),),
    "dequantize": (({"symmetric": False, "granularity": "block", "block_size": 16}, "bfloat16"),),
}
ALL_JIT_CASES = os.environ.get("LZ_TEST_JIT") == "all"
# A kernel made of torch's functions meets each case in one dtype of 16 bits, another one of its op
# the same case in the other. Our own kernels have code for each; LZ_TEST_FULL=1: all in both.
HALVES = ("bfloat16", "float16")
COMPOSED = () if FULL else ("torch", "reference")


def here(kernel: Kernel) -> str:
    """Why a kernel can serve no call at all on this CPU, or nothing."""
    reason = loading.availability(kernel)
    if reason is not None:
        return str(reason)
    facts = cpu_facts(kernel.op, case_outline(kernel.op, kernel.op.cases[0], "float32"))
    device_rules = [rule for rule in kernel.requires if {leaf.fact for leaf in rule.leaves()}
                    <= {"device", "isa"}]
    outcome = next((r for rule in device_rules if (r := rule.check(facts)) is not None), None)
    return "" if outcome is None else str(outcome)


def grid() -> list[Any]:
    rows = []
    for turn, kernel in enumerate(KERNELS):
        absent = here(kernel)
        if absent:
            rows.append(pytest.param(kernel, "float32", (), id=kernel.id,
                                     marks=pytest.mark.skip(reason=absent)))
            continue
        dtypes = ((*kernel.op.dtypes, "float64") if kernel.id.startswith(ALSO_FLOAT64)
                  else kernel.op.dtypes)
        left_out = HALVES if kernel.backend in COMPOSED and {*HALVES} <= {*dtypes} else ("", "")
        cells: Any = [(case, dtype) for dtype in dtypes for i, case in enumerate(kernel.op.cases)
                      if dtype != left_out[(turn + i) % 2]]
        if kernel.jit and not (ALL_JIT_CASES and kernel.id.startswith("torch.compiled")):
            cells = JIT_CASES.get(kernel.op.name, cells[:1])
        cells = [(case, dtype) for case, dtype in cells if not _refused(kernel, case, dtype)]
        if kernel.jit:                         # compiled for seconds, each in a test of its own
            rows += [pytest.param(kernel, dtype, (case,), id=f"{kernel.id}-{dtype}-{case_id(case)}")
                     for case, dtype in cells]
            continue
        by_dtype: dict[str, list[dict[str, Any]]] = {}
        for case, dtype in cells:
            by_dtype.setdefault(dtype, []).append(case)
        rows += [pytest.param(kernel, dtype, tuple(cases), id=f"{kernel.id}-{dtype}")
                 for dtype, cases in by_dtype.items()]
    return rows


# the facts of a case, read once for all kernels of its op
_FACTS: dict[tuple[str, str, str], Any] = {}
_REFUSED: dict[str, int] = {}                  # kernel -> how many cases its rules refuse


def _refused(kernel: Kernel, case: dict[str, Any], dtype: str) -> bool:
    """A cell that the rules refuse is no test: it is counted, and left out of the grid."""
    key = kernel.op.name, repr(case), dtype
    if key not in _FACTS:
        _FACTS[key] = cpu_facts(kernel.op, case_outline(kernel.op, case, dtype))
    refused = not serves(kernel, _FACTS[key])
    _REFUSED[kernel.id] = _REFUSED.get(kernel.id, 0) + refused
    return refused


GRID = grid()
_FACTS.clear()


@pytest.mark.parametrize(("kernel", "dtype", "cases"), GRID)
def test_kernel_keeps_the_contract(kernel: Kernel, dtype: str,
                                   cases: tuple[dict[str, Any], ...]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore",
                                message=".*does not have a deterministic implementation.*")
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight.*")
        results = [check_case(kernel, case, dtype) for case in cases]
    assert len(results) > 0
    wrong = [str(result) for result in results if not result.passed]
    assert not wrong, f"{len(wrong)} of {len(results)} cases:\n" + "\n".join(wrong)


def test_enough_of_the_grid_runs_here() -> None:
    """The rules must not hide what they are there to admit: what they refuse is counted."""
    served = [p.values[0] for p in GRID if not p.marks for _ in p.values[2]]
    assert sum(kernel.op is attention for kernel in served) >= 300
    assert sum(_REFUSED.values()) < len(served)
    assert not {k for k, count in _REFUSED.items() if count and k.startswith("reference.")}


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_its_formula_and_a_library(name: str) -> None:
    backends = {k.backend for k in KERNELS if k.op.name == name}
    without_tensors = any(k.op.read is not None for k in KERNELS if k.op.name == name)
    assert ("reference" in backends and (len(backends) > 1 if without_tensors
                                         else "torch" in backends))


@pytest.mark.parametrize("name", OPS)
def test_the_formula_serves_every_case(name: str) -> None:
    kernel = next(k for k in KERNELS if k.id == f"reference.{name}")
    for dtype in kernel.op.dtypes:
        for case in kernel.op.cases:
            assert refusals(kernel, case_values(kernel.op, case, dtype)) == ()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_what_a_kernel_does_not_take_its_rules_speak_of(kernel: Kernel) -> None:
    """A parameter left out of the call must be held at its default by a rule."""
    if loading.availability(kernel) is not None:
        pytest.skip(str(loading.availability(kernel)))
    try:
        taken = loading.accepted_params(kernel.id, kernel.op, loading.load(kernel))
    except loading.LoadFailed as e:
        pytest.skip(str(e.reason))
    spoken = {leaf.fact.partition(".")[0] for rule in kernel.requires for leaf in rule.leaves()}
    left_out = {p.name for p in kernel.op.params if not p.required} - {*taken, "enable_gqa",
                                                                       kernel.op.variant}
    # only one format has it, and the kernel names the formats it takes
    of_a_format = {"global_scale"} if "format" in spoken else set()
    # the contract refuses one without a history or counts, which the kernel refuses
    penalties = ({n for n in left_out if n.endswith("_penalty")}
                 if {"history", "token_counts"} <= spoken else set())
    assert left_out <= spoken | of_a_format | penalties


def test_ids_are_unique_and_loads_can_be_named() -> None:
    assert len({k.id for k in KERNELS}) == len(KERNELS)
    for kernel in KERNELS:
        assert "<" not in kernel.to_json()[
            "load"], f"{kernel.id}: load must be a function of its module"


# The judge is judged: each kind of wrong kernel must be found out.

def _right(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    return rms_norm.reference(x, weight, eps)


def _a_little_off(x: torch.Tensor, weight: torch.Tensor | None = None,
                  eps: float = 1e-6) -> torch.Tensor:
    return _right(x, weight, eps) * (1 + 2e-5)


def _eps_forgotten(x: torch.Tensor, weight: torch.Tensor | None = None,
                   eps: float = 1e-6) -> torch.Tensor:
    return _right(x, weight, 0.0)


def _one_element_wrong(x: torch.Tensor, weight: torch.Tensor | None = None,
                       eps: float = 1e-6) -> torch.Tensor:
    out = _right(x, weight, eps)
    out[-1, -1] += 0.01
    return out


def _leaves_a_gap(x: torch.Tensor, weight: torch.Tensor | None = None,
                  eps: float = 1e-6) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:, 1:] = _right(x, weight, eps)[:, 1:]
    return out


def _overwrites_its_input(x: torch.Tensor, weight: torch.Tensor | None = None,
                          eps: float = 1e-6) -> torch.Tensor:
    out = _right(x, weight, eps)
    x.mul_(2)
    return out


def _overwrites_without_a_trace(x: torch.Tensor, weight: torch.Tensor | None = None,
                                eps: float = 1e-6) -> torch.Tensor:
    out = _right(x, weight, eps)
    if weight is not None:
        weight.data.mul_(2)                    # bumps no version
    return out


def _writes_beside_its_input(x: torch.Tensor, weight: torch.Tensor | None = None,
                             eps: float = 1e-6) -> torch.Tensor:
    torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[-1] = 7.0
    return _right(x, weight, eps)


def _returns_its_input(x: torch.Tensor, weight: torch.Tensor | None = None,
                       eps: float = 1e-6) -> torch.Tensor:
    return x


def _returns_another_dtype(x: torch.Tensor, weight: torch.Tensor | None = None,
                           eps: float = 1e-6) -> torch.Tensor:
    return _right(x, weight, eps).double()


def _returns_another_shape(x: torch.Tensor, weight: torch.Tensor | None = None,
                           eps: float = 1e-6) -> torch.Tensor:
    return _right(x, weight, eps)[None]


def _returns_two(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> Any:
    return _right(x, weight, eps), x.clone()


def _returns_nothing(x: torch.Tensor, weight: torch.Tensor | None = None,
                     eps: float = 1e-6) -> None:
    return None


def _gives_nan(x: torch.Tensor, weight: torch.Tensor | None = None,
               eps: float = 1e-6) -> torch.Tensor:
    out = _right(x, weight, eps)
    out[0, 0] = float("nan")
    return out


def _rolls_dice(x: torch.Tensor, weight: torch.Tensor | None = None,
                eps: float = 1e-6) -> torch.Tensor:
    return _right(x, weight, eps) * (1 + 1e-7 * torch.rand_like(x))


def _raises(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


WRONG = {
    _a_little_off: "exceeds", _one_element_wrong: "worst at [(4, 63)", _leaves_a_gap: "not finite",
    _overwrites_its_input: "x was overwritten",
    _overwrites_without_a_trace: "weight was overwritten",
    _writes_beside_its_input: "x was overwritten", _returns_its_input: "shares memory with x",
    _returns_another_dtype: "the contract says", _returns_another_shape: "the contract says",
    _returns_two: "returned 2 results", _returns_nothing: "result 0 is None",
    _gives_nan: "not finite", _rolls_dice: "two runs differ",
    _raises: "no kernel image",
}


def fake(run: Callable[..., Any]) -> Kernel:
    return Kernel("fake.kernel", rms_norm, lambda: run)


def test_a_right_kernel_passes() -> None:
    results = check_kernel(fake(_right))
    assert len(results) == len(rms_norm.cases) * len(rms_norm.dtypes)
    assert all(r.passed for r in results)


@pytest.mark.parametrize(("run", "word"), WRONG.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_a_wrong_kernel_is_found_out(run: Callable[..., Any], word: str) -> None:
    case = {"stride": "padded"} if run is _writes_beside_its_input else {}
    result = check_case(fake(run), case, "float32")
    assert result.status == "failed"
    assert word in result.detail


def test_an_error_only_small_inputs_show_is_found_by_the_cases() -> None:
    assert any(r.status == "failed"
               for r in check_kernel(fake(_eps_forgotten), dtypes=("float32",)))


def test_a_library_that_is_not_here_skips_with_its_reason() -> None:
    missing = replace(fake(_right), package="no_such_package")
    result = check_case(missing, {}, "float32")
    assert result.status == "skipped"
    assert [r.code.category for r in result.reasons] == [Category.SOFTWARE]


def test_worst_indices_come_worst_first() -> None:
    truth = torch.zeros(2, 3, dtype=torch.float64)
    out = torch.tensor([[0.0, 0.5, 0.0], [2.0, 0.0, float("nan")]])
    assert worst_indices(out, truth, 3) == [(1, 2), (1, 0), (0, 1)]

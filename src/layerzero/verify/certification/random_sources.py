"""Draws without a seed: they come from torch's default generator, as the formula's do, so that
torch.manual_seed repeats them, and leave it as the formula does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ..cases.chosen_cells import Cell
from ..kernel.contract import CaseResult, call, case_values, formula, refusals, results_of

SOURCES = ("uniforms", "seed", "seed_rows", "generator")
NAME = "with torch's default generator"


def _unseeded(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str,
              seed: int) -> dict[str, Any]:
    """Returns the values of a case without what its random numbers come from."""
    return {**case_values(kernel.op, case, dtype, device, seed),
            **{name: None for name in SOURCES if name in kernel.op.by_name}}


def check_default_generator(kernel: Kernel, case: Mapping[str, Any], dtype: str,
                            device: str = "cpu", seed: int = 0) -> CaseResult:
    """Compares a draw after torch.manual_seed with that of the formula, and the number after."""
    def result(status: str, kind: str = "", detail: str = "", reasons: Any = ()) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                          circumstance=NAME, seed=seed, kinds=(kind,) if kind else ())

    values = _unseeded(kernel, case, dtype, device, seed)
    reasons = refusals(kernel, values)
    if reasons:
        return result("skipped", reasons=reasons)

    def draw(function: Callable[[], Any]) -> tuple[Any, ...]:
        torch.manual_seed(seed + 17)
        with torch.no_grad():
            return (*results_of(function()), torch.rand(4, device=device))

    with torch.random.fork_rng(enabled=True):
        try:
            got = draw(lambda: call(kernel, values))
        except loading.LoadFailed as e:
            return result("skipped", reasons=(e.reason,))
        except FAULTS as e:
            return result("failed", "fault", str(reason_of(e, classify(e))))
        want = draw(lambda: formula(kernel.op, values))
    *drawn, after = (_is_same(a, b) for a, b in zip(got, want))
    if not all(drawn) or len(got) != len(want):
        return result("failed", "distribution", "another draw than the formula's after the same "
                      "torch.manual_seed")
    return result("passed") if after else result(
        "failed", "global state", "torch's default generator is not where the formula leaves it")


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (torch.allclose(a, b, 1e-3, 1e-3, equal_nan=True)
                                   if a.is_floating_point() else torch.equal(a, b))


def default_generator_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                             seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the first cells that the kernel takes without a seed, of an op that draws."""
    op, found = kernel.op, 0
    if "generator" not in op.by_name or kernel.backend == "reference":
        return
    for case, dtype in cells:
        if dtype == op.dtypes[0] and not refusals(kernel, _unseeded(kernel, case, dtype, device,
                                                                    seed)):
            yield partial(check_default_generator, kernel, case, dtype, device, seed)
            found += 1
            if found == 2:
                return

"""What is known of the failing cases of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...spec.kernel import Kernel
from ...spec.op import Op
from ..kernel.contract import CaseResult
from .altered_references import CLASS_OF_ARGUMENT
from .conditions import named_facts, speaks_of_sizes
from .reruns.calls_again import (
    confirmed_arguments,
    fails_again,
    fails_with_other_numbers,
    is_wrong_by_itself,
    is_wrong_in_few_rows,
    passes_at_some_size,
    passes_with_the_same_arguments,
    plain_failures,
    row_dim,
)
from .reruns.rounding_reruns import (
    errors_are_others,
    is_rounded,
    is_rounding,
    is_slight,
    is_wrong_when_wide,
)
from .reruns.row_reruns import mixes_rows
from .reruns.value_reruns import is_right_when_finite

Explanation = tuple[str, str]                  # a class of diagnosis.CLASSES, and a sentence


@dataclass
class Evidence:
    """What is known of the failing cases of a kernel; what takes reruns is found out once, when it
    is asked for."""

    kernel: Kernel
    failed: Sequence[CaseResult]
    results: Sequence[CaseResult]
    device: str
    where: str                                 # what distinguishes them: conditions.py

    def __post_init__(self) -> None:
        # a backward case judges the result of its forward pass too
        self.forward = [r for r in self.failed if not r.circumstance.startswith("backward")
                        or {"error", "not finite"} & set(r.kinds)]

    def add_plain_failures(self) -> None:
        """Runs plain cases where every failing one is under a circumstance: of what comes late none
        may have run."""
        if all(r.circumstance for r in self.forward):
            plain = plain_failures(self.kernel, self.failed, self.results, self.device)
            self.forward, self.results = plain or self.forward, [*self.results, *plain]

    @property
    def op(self) -> Op:
        return self.kernel.op

    @property
    def detail(self) -> str:
        return (self.forward or self.failed)[0].detail

    def ask(self, question: Callable[..., bool]) -> bool:
        """Asks about the failing forward cases."""
        return question(self.kernel, self.forward, self.device)

    @cached_property
    def of_sizes(self) -> bool:
        """Do sizes distinguish the failing cases, and nothing else?"""
        return (speaks_of_sizes(self.op, self.where) and self.ask(fails_again)
                and passes_at_some_size(self.kernel, self.results, self.device)
                and passes_with_the_same_arguments(self.kernel, self.results, self.device)
                and not fails_with_other_numbers(self.kernel, self.results, self.device)
                and not self.ask(is_right_when_finite)
                and not (_rows_alone(self.op, self.where) and self.ask(is_wrong_in_few_rows)))

    @property
    def of_large_sizes(self) -> bool:
        return self.of_sizes and "(it passes" in self.where

    @cached_property
    def arguments(self) -> list[str]:
        return confirmed_arguments(self.kernel, self.forward, self.device)

    @property
    def several_arguments(self) -> bool:
        return len(_kinds_of_facts(self.arguments)) > 1

    @property
    def distinguished(self) -> bool:
        """Does a confirmed argument distinguish the failing cases?"""
        return any(part in self.where for name in self.arguments for part in name.split(" and "))

    @cached_property
    def is_wrong_in_one_call(self) -> bool:
        return self.ask(is_wrong_by_itself)

    @cached_property
    def is_slight(self) -> bool:
        return self.ask(is_slight) or self.ask(is_rounded)

    @cached_property
    def is_rounded_somewhere(self) -> bool:
        """Are errors no more than roundings to 16 bits? What is done with an argument may round."""
        return (self.op.family != "sampling" and self.is_slight and self.ask(is_rounding)
                and self.ask(errors_are_others) and not self.ask(mixes_rows))

    @cached_property
    def dtypes(self) -> set[str]:
        dtypes = {r.dtype for r in self.forward}
        wide = "float32" not in dtypes and self.ask(is_wrong_when_wide)
        return dtypes | ({"float32"} if wide else set())

    @property
    def is_right_when_wide(self) -> bool:
        return "float32" not in self.dtypes and any(r.passed and r.dtype == "float32"
                                                    for r in self.results)


def _kinds_of_facts(arguments: Sequence[str]) -> set[str]:
    """Returns what arguments speak of; beside a window neither causality nor the diagonal."""
    facts = {fact: kind for fact, kind in CLASS_OF_ARGUMENT for name in arguments
             if fact in name}
    if "window" in facts:
        facts = {fact: kind for fact, kind in facts.items() if "causal" not in fact}
    return set(facts.values())


def _rows_alone(op: Op, where: str) -> bool:
    """Is the number of rows the only size that the condition names?"""
    sizes = {n for n in named_facts(where) if n in op.dims or n in op.derived}
    return sizes == {row_dim(op)}

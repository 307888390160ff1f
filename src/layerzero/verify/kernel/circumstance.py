"""How a case is run: as it is, or in a way of certification/circumstances."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ...spec.kernel import Kernel
from ...spec.op import Op


class Circumstance:
    """How a case is run. This one changes nothing."""

    name = ""
    runs = 2                                   # the second over poisoned and guarded memory
    even = True                                # no number is much larger than the others
    alike = False                              # rows are equal: their errors do not average out
    may_be_refused = False                     # by a GPU's library when called: the next one serves
    any_dtype = False                          # it tells the same of every dtype
    records = True                             # gradients, where an input requires one

    @property
    def keeps_values(self) -> bool:
        """Are the judged values those of `alter`, whatever the kernel does?"""
        return type(self).before is Circumstance.before

    def as_formula_takes(self, values: dict[str, Any]) -> dict[str, Any]:
        return values

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the values in this circumstance; None if it does not apply."""
        return values

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Runs before the judged calls; `other` gives values of the same case from another seed."""
        return values

    def around(self, device: str) -> Any:
        return nullcontext()


AS_DECLARED = Circumstance()

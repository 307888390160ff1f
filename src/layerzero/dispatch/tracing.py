"""Choosing under torch.compile and torch.export, where sizes are symbols.

Kernels are ranked for the sizes seen while tracing (the hints); then only the chosen kernel's own
rules are checked on the symbols, so that the graph is guarded by what its validity needs and by
nothing else. Kernels made of torch ops are run as they are, and so become part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from ..spec.kernel import Kernel
from ..spec.op import DEVICE_FACTS, Op
from ..spec.plan import Step
from ..world.context import Override
from ..world.snapshot import World

TRACED_TYPES = ("FakeTensor", "FunctionalTensor")
_UNKNOWN_SIZE = 1024       # stands for a size that tracing has seen no example of

# Called instead of choosing and running: (op, values, facts, override) -> the stand-in result
Recorder = Callable[[Op, dict[str, Any], Mapping[str, Any], Override | None], Any]
recorder: ContextVar[Recorder | None] = ContextVar("layerzero_recorder", default=None)


def is_traced(tensors: list[torch.Tensor]) -> bool:
    return any(type(t).__name__ in TRACED_TYPES for t in tensors)


def hinted_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with hints in place of symbols, marked as those of a compiled call."""
    return {**{name: hint(value) for name, value in facts.items()}, "tensor_kind": "plain",
            "compiled": True}


def choose(world: World, op: Op, facts: Mapping[str, Any], override: Override | None,
           opaque: bool = False) -> tuple[Step, Kernel] | None:
    """Return the best traceable kernel, or None; with `opaque` also one torch cannot enter."""
    for step in world.plan(op, hinted_facts(facts), override).steps:
        kernel = world.catalog.by_id[step.kernel]
        if (opaque or kernel.traceable) and _rules_hold(kernel, facts, step):
            return step, kernel
    return None


def _rules_hold(kernel: Kernel, facts: Mapping[str, Any], step: Step) -> bool:
    """Check the kernel's rules on the symbols; torch then guards the graph by each answer. Rules
    that a transform of the inputs repairs, and rules about the device, are not checked."""
    repaired = {t.target for t in step.transforms}
    return all(rule.check(facts) is None for rule in kernel.requires
               if not (rule.repair and getattr(rule, "fact", "").partition(".")[0] in repaired)
               and not any(leaf.fact in DEVICE_FACTS or leaf.fact == "tensor_kind"
                           for leaf in rule.leaves()))


def hint(value: Any) -> Any:
    """Return the size seen while tracing, without a guard on it."""
    if isinstance(value, torch.SymInt):
        node = value.node
        return int(node.hint) if node.has_hint() else _UNKNOWN_SIZE
    if isinstance(value, torch.SymBool):
        node = value.node
        return bool(node.hint) if node.has_hint() else False
    return value

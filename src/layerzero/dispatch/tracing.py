"""Choosing under torch.compile and torch.export, where sizes are symbols.

The ranking is made for the sizes seen while tracing; then only the chosen kernel's own rules are asked
of the symbols, so that the graph is guarded by what its validity needs and by nothing else. Kernels
made of torch ops are run as they are, and so become part of the graph.
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
_UNKNOWN_SIZE = 1024

# Instead of choosing and running: gets (op, values, facts, override) and gives what stands for the result.
Recorder = Callable[[Op, dict[str, Any], Mapping[str, Any], Override | None], Any]
recorder: ContextVar[Recorder | None] = ContextVar("layerzero_recorder", default=None)


def is_traced(tensors: list[torch.Tensor]) -> bool:
    return any(type(t).__name__ in TRACED_TYPES for t in tensors)


def seen_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with the sizes seen while tracing in place of the symbols; measurements of compiled calls count."""
    return {**{name: hint(value) for name, value in facts.items()}, "tensor_kind": "plain", "compiled": True}


def choose(world: World, op: Op, facts: Mapping[str, Any], override: Override | None,
           opaque: bool = False) -> tuple[Step, Kernel] | None:
    """The best kernel that can be traced, or None; with `opaque` also one that torch cannot look into."""
    for step in world.plan(op, seen_facts(facts), override).steps:
        kernel = world.catalog.by_id[step.kernel]
        if (opaque or kernel.traceable) and _holds(kernel, facts, step):
            return step, kernel
    return None


def _holds(kernel: Kernel, facts: Mapping[str, Any], step: Step) -> bool:
    """Asks the symbols, and so guards on the answers. What a transform repairs is not asked again."""
    repaired = {t.target for t in step.transforms}
    return all(rule.check(facts) is None for rule in kernel.requires
               if not (rule.repair and getattr(rule, "fact", "").partition(".")[0] in repaired)
               and not any(leaf.fact in DEVICE_FACTS or leaf.fact == "tensor_kind" for leaf in rule.leaves()))


def hint(value: Any) -> Any:
    """The size seen while tracing, without a guard on it."""
    if isinstance(value, torch.SymInt):
        node = value.node
        return int(node.hint) if node.has_hint() else _UNKNOWN_SIZE
    if isinstance(value, torch.SymBool):
        node = value.node
        return bool(node.hint) if node.has_hint() else False
    return value

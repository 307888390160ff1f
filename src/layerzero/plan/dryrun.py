"""lz.dry_run: which kernels would serve a model's lz calls, found with fake tensors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..dispatch import facts as reading
from ..dispatch import tracing
from ..machine import hardware
from ..spec.call import Call, TensorSpec
from ..spec.codec import Record
from ..spec.display import Cells, Displayed, plural
from ..spec.errors import DataError, InvalidCall
from ..spec.op import Op
from ..world import snapshot as worlds
from ..world.context import Override
from ..world.tables import describe_call
from .call_facts import assumed_alignment, facts_of


@dataclass(frozen=True)
class PlannedCall(Record, json="op count kernel expected_us source note call"):
    """One kind of call that a model makes, and the kernel that would serve it."""

    call: Call
    kernel: str                                # "": nothing can
    expected_us: float
    # where the expectation comes from, or why there is no kernel
    source: str
    shapes: str
    note: str = ""                             # from which table, or why not from the one in force

    @property
    def op(self) -> str:
        return self.call.op

    @property
    def count(self) -> int:
        return self.call.count


@dataclass(frozen=True, repr=False)
class DryRun(Displayed, Record, names={"rows": "calls"}):
    """The lz calls of one run of a model, in the order in which they first came."""

    rows: tuple[PlannedCall, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls, as lz.tables.solve and lz.tune take them."""
        return tuple(row.call for row in self.rows)

    def _headline(self) -> str:
        calls = sum(row.count for row in self.rows)
        return f"{plural(calls, 'lz call')} of {plural(len(self.rows), 'kind')}"

    def _cells(self) -> Cells:
        return ("calls", "operation", "kernel", "us", "from", "shapes"), [
            (row.count, f"lz.{row.op}", row.kernel or "none", f"{row.expected_us:.2f}", row.source,
             row.shapes) for row in self.rows]

    def __str__(self) -> str:
        lines = [f"{row.call.count:>5} x lz.{row.call.op:<18} {row.kernel or 'no kernel':<28} "
                 f"{row.expected_us:10.2f} us ({row.source})  "
                 f"{row.shapes}{'  ' + row.note if row.note else ''}"
                 for row in self.rows]
        return "\n".join(lines) or "no lz call was made"


def dry_run(model: Callable[..., Any], *args: Any, **kwargs: Any) -> DryRun:
    """Find the kernel for each lz call of this model without running any: tensors have shapes and
    no memory.

    A model that reads the values of tensors cannot be followed this way: DataError.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )
    seen: dict[str, PlannedCall] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def without_memory(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    try:
        with _recording(seen), mode:
            args, kwargs = pytree.tree_map(without_memory, (args, kwargs))
            if isinstance(model, torch.nn.Module):
                state = {n: without_memory(t) for n, t in
                         itertools.chain(model.named_parameters(), model.named_buffers())}
                torch.func.functional_call(model, state, args, kwargs)
            else:
                model(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise DataError(
            f"lz.dry_run: the model looks at the values of a tensor ({e.func}), which has none "
            "here; run it in `with lz.recording(path)` instead and give the calls to "
            "lz.tables.solve") from e
    return DryRun(tuple(seen.values()))


@contextmanager
def _recording(seen: dict[str, PlannedCall]) -> Iterator[None]:
    def note(op: Op, values: dict[str, Any], facts: Mapping[str, Any],
             override: Override | None) -> Any:
        known = {**tracing.hinted_facts(facts), **assumed_alignment(values, facts)}
        call = _call(op, values, known)
        row = _plan_call(op, call, known, override, shapes(op, values))
        # calls alike are counted, not listed again
        key = f"{row.kernel} {json.dumps(call.to_json())}"
        old = seen.get(key)
        seen[key] = row if old is None else replace(old, call=call.times(old.call.count + 1))
        return _result(op, values, bool(facts["grad"]))

    token = tracing.recorder.set(note)
    try:
        yield
    finally:
        tracing.recorder.reset(token)


def choices_for(calls: Iterable[Call], device: str | None = None) -> DryRun:
    """Find the kernel for each of these calls on a device, by default the accelerator."""
    kind = device or hardware.main_kind()
    rows = []
    for i, call in enumerate(calls):
        try:
            op, facts = facts_of(call, worlds.current(), kind)
        except InvalidCall as e:
            raise DataError(f"call {i} ({call.name or call.op}) cannot be decided: {e}") from e
        text = describe_call(op, facts) if call.case is not None else shapes(
            worlds.current().catalog.ops[call.op], call.arguments)
        rows.append(_plan_call(op, call, facts, None, text))
    return DryRun(tuple(rows))


def _plan_call(op: Op, call: Call, facts: Mapping[str, Any], override: Override | None,
               shapes: str) -> PlannedCall:
    plan = worlds.current().plan(op, facts, override, thorough=True)
    note = f"from table {plan.table}" if plan.table else str(plan.missed or "")
    if plan.steps:
        first = plan.steps[0]
        return PlannedCall(call, first.kernel, first.score.total_us, first.score.source, shapes,
                           note)
    why = dict.fromkeys(reason.message for rejected in plan.rejected for reason in rejected.reasons)
    return PlannedCall(call, "", 0.0, "; ".join(why), shapes, note)


def _call(op: Op, values: Mapping[str, Any], facts: Mapping[str, Any]) -> Call:
    arguments: dict[str, Any] = {}
    for p in op.params:
        value = values[p.name]
        if isinstance(value, Tensor):
            strides = None if value.is_contiguous() else tuple(map(tracing.hint, value.stride()))
            shape = tuple(map(tracing.hint, value.shape))
            arguments[p.name] = TensorSpec(shape, reading.dtype_name(value.dtype), strides)
        elif p.kind not in ("generator", "object") and (p.required or value != p.default):
            arguments[p.name] = tracing.hint(value)
    return Call(op.name, arguments, grad=bool(facts["grad"]))


def _result(op: Op, values: Mapping[str, Any], grad: bool) -> Any:
    """Return a result as the contract describes it; with a gradient where the real one has."""
    out = op.meta(**values)
    if grad:
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.is_floating_point() and not t.requires_grad:
                t.requires_grad_()
    return out


def shapes(op: Op, values: Mapping[str, Any]) -> str:
    """Describe the shapes and options of a call without guarding on symbolic sizes."""
    parts = []
    for p in op.params:
        value = values.get(p.name, p.default)
        if isinstance(value, Tensor):
            shape = "x".join(str(tracing.hint(n)) for n in value.shape)
            parts.append(f"{p.name}={shape}:{reading.dtype_name(value.dtype)}")
        elif isinstance(value, TensorSpec):
            parts.append(f"{p.name}={'x'.join(map(str, value.shape))}:{value.dtype}")
        elif p.kind != "generator" and not p.required and value != p.default:
            parts.append(f"{p.name}={value}")
    return " ".join(parts)

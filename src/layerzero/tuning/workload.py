"""The calls to tune: from a file, a model, an op's cases, one call, the standard workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dispatch.facts import read as read_facts
from ..files.calls import LIMITS, read_calls
from ..files.reading import parse_json, read_lines
from ..operate.calls import describe, make_values
from ..operate.inspection import dispatcher_of
from ..perf.record import kind_of
from ..spec.call import Call, TensorSpec
from ..spec.errors import ConfigError, DataError, InvalidCall, SpecError
from ..spec.event import FileRefused
from ..spec.names import suggest
from ..spec.op import Op
from ..world import events
from ..world import snapshot as worlds
from .models import MODELS, Model, calls_of

STANDARD_DTYPES = ("float32", "bfloat16")


def calls_for(source: str | Path, *, arguments: Mapping[str, Any] | None = None,
              dtype: str = "bfloat16", batch: int = 1, prompt: int = 512, context: int = 4096,
              scale: float = 1.0, decode: bool = True, prefill: bool = True) -> tuple[Call, ...]:
    """Return the calls of `source`: "standard", a model, an op, or a file of JSON lines such as lz
    record writes.

    An op stands for its own cases, or with `arguments` for one call with these. `batch` to
    `prefill` say which steps of a model are meant.
    """
    text, ops = str(source), worlds.current().catalog.ops
    if arguments is not None or text in ops:
        op = dispatcher_of(text).op
        return (_call(op, arguments),) if arguments is not None else cases_of(op, dtype)
    if text == "standard":
        return standard()
    if text in MODELS:
        return merge(calls_of(text, batch=batch, prompt=prompt, context=context, dtype=dtype,
                              decode=decode, prefill=prefill, scale=scale))
    if Path(source).is_file():
        return merge(read_calls(Path(source)))
    known = ("standard", *MODELS, *ops)
    raise ConfigError(f"{text!r} is no file, no model and no operation{suggest(text, known)}; "
                      f"models: {', '.join(MODELS)}")


def _call(op: Op, arguments: Mapping[str, Any]) -> Call:
    unknown = [name for name in arguments if name not in op.by_name]
    if unknown:
        raise InvalidCall(
            f"lz.{op.name} has no parameter {', '.join(unknown)}; it has {', '.join(op.by_name)}")
    return describe(op, arguments)


def cases_of(op: Op, dtype: str = "float32") -> tuple[Call, ...]:
    """Return the cases of an op's contract, without those that compute nothing."""
    if not op.tensors:
        raise ConfigError(
            f"the cases of lz.{op.name} are not made of tensors; they cannot be replayed")
    calls = (Call(op.name, case=case, dtype=dtype, name=f"case {dict(case)}") for case in op.cases)
    return merge(call for call in calls
                 if all(n != 0 for _, n in kind_of(op, _facts(op, call)).sizes))


def merge(calls: Iterable[Call]) -> tuple[Call, ...]:
    """Merge the calls of each kind: the first stands for all; counts add, names join."""
    by_kind: dict[Any, Call] = {}
    for call in calls:
        key = kind_key(call)
        known = by_kind.get(key)
        by_kind[key] = call if known is None else Call(
            known.op, known.arguments, known.case, known.dtype, known.count + call.count,
            known.grad, _join(known.name, call.name))
    return tuple(by_kind.values())


def kind_key(call: Call) -> tuple[Any, ...]:
    """Return a key that calls share if measurements cannot tell them and strides are alike."""
    op = dispatcher_of(call.op).op
    facts = _facts(op, call)
    strided = tuple(n for n, v in call.arguments.items() if isinstance(v, TensorSpec)
                    and v.strides is not None)
    return call.op, call.grad, kind_of(op, facts).bucket, strided, (call.case or {}).get("stride",
                                                                                         "")


def _facts(op: Op, call: Call) -> dict[str, Any]:
    """Read the facts of a call without memory for its tensors."""
    if call.case is not None:
        return read_facts(op, make_values(op, call))
    values = {p.name: p.default for p in op.params}
    for name, value in call.arguments.items():
        if name not in values:
            raise InvalidCall(f"lz.{op.name} has no parameter {name!r}{suggest(name, op.by_name)}")
        values[name] = meta_tensor(value) if isinstance(value, TensorSpec) else value
    missing = [p.name for p in op.params if p.required and p.name not in call.arguments]
    if missing:
        raise InvalidCall(
            f"lz.{op.name} needs {', '.join(missing)}; the call has "
            f"{', '.join(call.arguments) or '-'}")
    return {**read_facts(op, values), "grad": call.grad}


def meta_tensor(spec: TensorSpec) -> Tensor:
    """Make a tensor without memory for it."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidCall(f"there is no dtype {spec.dtype!r} in this torch")
    try:
        if spec.strides is None:
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="meta")
    # more elements than an address has bits
    except (RuntimeError, TypeError, OverflowError) as e:
        raise InvalidCall(
            f"there can be no tensor of shape {spec.shape!r:.100}: {str(e).splitlines()[0]}") from e


def _join(*names: str) -> str:
    parts = [part for name in names for part in name.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


def read_recordings(folder: Path) -> tuple[Call, ...]:
    """Read what all processes of a recorded program wrote, as one workload.

    A process may have died in the middle of a line. Of a file that is damaged otherwise, the lines
    before the damage are taken, and a `FileRefused` event says so.
    """
    calls: list[Call] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            calls += _read_recording(path)
        except DataError as e:
            events.emit(FileRefused(path=str(path), problem=str(e)))
    # an op that the program itself registered is not known
    known = worlds.current().catalog.ops
    return merge(c for c in calls if c.op in known) + tuple(c for c in calls if c.op not in known)


def _read_recording(path: Path) -> Iterator[Call]:
    lines = tuple(read_lines(path, "calls as JSON lines, such as lz record writes", limits=LIMITS))
    for i, (number, line) in enumerate(lines, 1):
        try:
            origin = f"{path}:{number}"
            yield Call.from_json(parse_json(line, origin, "one call on the line", nan=True), origin)
        except (DataError, SpecError) as e:
            if i < len(lines):
                raise DataError(f"{e}; the lines before it were read") from e


def standard(dtypes: Sequence[str] = STANDARD_DTYPES) -> tuple[Call, ...]:
    """Return shapes of well-known models, narrowed so that two cores can tune them in some minutes.

    Attention of all kinds (prefill, decode, cross, windowed), norms, rope, MLP, linear layers, a
    mixture, sampling.
    """
    calls: list[Call] = []
    for dtype in dtypes:
        calls += calls_of("llama-3-8b", prompt=256, context=4096, dtype=dtype, scale=1 / 16)
        calls += calls_of("qwen3-0.6b", batch=2, prompt=64, context=512, dtype=dtype, scale=1 / 8)
        calls += calls_of("smollm2-135m", prompt=128, context=1024, dtype=dtype, scale=1 / 3)
        calls += calls_of("sdxl", dtype=dtype, scale=1 / 10)
        calls += calls_of("vit-base-16", dtype=dtype, scale=1 / 3)
        local = Model("windowed", "decoder", 1, 128, 4, 2, 64, 128, 128, window=64)
        calls += [c for c in calls_of(local, prompt=256, decode=False, dtype=dtype)
                  if c.op == "attention"]
    calls += calls_of("t5-base", prompt=64, context=128, dtype="float32", scale=1 / 4)
    calls += [c for c in calls_of("qwen3-30b-a3b", prompt=32, context=512, dtype="float32",
                                  scale=1 / 16)
              if c.op.startswith("moe")]
    for batch, vocab in ((1, 32768), (8, 8192)):
        logits = TensorSpec((batch, vocab), "float32")
        calls.append(Call("sample", {"logits": logits, "temperature": 0.0}, name="greedy"))
        calls.append(Call("sample", {"logits": logits, "temperature": 0.8, "seed": 1},
                          name="plain sampling"))
    return merge(calls)

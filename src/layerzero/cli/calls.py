"""The calls of a command, from what the command line was given."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ..machine import hardware
from ..operate.inspection import dispatcher_of
from ..plan import dryrun
from ..plan.table import Table
from ..spec.call import Call
from ..spec.errors import ConfigError, InvalidCall
from ..tuning.workload import calls_for
from .arguments import parse_call
from .options import AUTO, Source

AND = "and"                                    # between the shapes of two calls


def device_kind(device: str | None) -> str:
    """Return the type of the named device, else of this machine's accelerator, else "cpu"."""
    return hardware.probe(device).type if device is not None else hardware.main_kind()


def resolve_dtype(dtype: str, device: str | None) -> str:
    """Return the dtype that `auto` stands for on this device; any other as it is."""
    if dtype != AUTO:
        return dtype
    return "bfloat16" if hardware.probe(device_kind(device)).supports_bf16 else "float32"


def calls_of(source: Source, device: str | None = None, default: str = "") -> tuple[Call, ...]:
    """Return the calls of a checked source; `default` is a workload where none was named."""
    dtype = resolve_dtype(source.dtype, device)
    if source.program is not None:
        return dryrun.dry_run(*load_program(source.program)).calls
    if source.table is not None:
        return tuple(artefact.call for artefact in Table.load(source.table).jit)
    if source.op is not None:
        dispatcher_of(source.op)               # raises for an unknown op
        if source.words:
            return parse_calls(source.op, source.words, dtype)
    name = source.op or source.calls or source.model or default
    return tuple(calls_for(name, dtype=dtype, batch=source.batch, prompt=source.prompt,
                           context=source.context, scale=source.scale)) if name else ()


def parse_calls(op: str, words: Sequence[str], dtype: str) -> tuple[Call, ...]:
    """Parse the calls on the command line, with `and` between them."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word == AND:
            groups.append([])
        else:
            groups[-1].append(word)
    declared = dispatcher_of(op).op
    return tuple(call for group in groups
                 for call in calls_for(op, arguments=parse_call(declared, group, dtype)))


def load_program(name: str) -> tuple[Any, ...]:
    """Call module:function, which returns a model and its arguments."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")         # as python -m does, so that modules of this folder are found
    try:
        program = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"--program {name}: {e}") from e
    finally:
        sys.path.remove("")
    if not isinstance(program, tuple) or not program or not callable(program[0]):
        raise InvalidCall(
            f"--program {name} must give (model, *arguments), got {type(program).__name__}")
    return program

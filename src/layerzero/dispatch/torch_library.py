"""Every op as a torch.library op in namespace `layerzero`, for torch.compile and torch.export.

Eager calls never come here. Under Dynamo the public function is replaced by its torch op. That op
is composite: when AOTAutograd or export takes it apart, the dispatcher chooses a kernel and its
torch ops land in the graph, where Inductor can fuse them. So there is no graph break and no opaque
call, autograd needs no formula of its own, and fake tensors run the code that real ones do.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from ..spec.errors import RegistrationError
from ..spec.op import Op, Param
from .dispatcher import dispatchers

_library = torch.library.Library("layerzero", "FRAGMENT")
_defined: dict[str, str] = {}                  # op -> its schema; torch never forgets one
_TYPES = {"tensor": "Tensor", "bool": "bool", "int": "SymInt", "float": "float", "str": "str",
          "generator": "Generator"}


def schema(op: Op) -> str:
    written = {name: f"({chr(ord('a') + i)}!)" for i, name in enumerate(op.in_place)}

    def declare(p: Param) -> str:
        text = f"{_TYPES[p.kind]}{written.get(p.name, '')}{'?' if p.optional else ''} {p.name}"
        if p.required:
            return text
        default = f'"{p.default}"' if isinstance(p.default, str) else str(p.default)
        return f"{text}={default}"

    positional = [declare(p) for p in op.params if not p.keyword_only]
    keyword = [declare(p) for p in op.params if p.keyword_only]
    arguments = ", ".join([*positional, "*", *keyword, "str? backend=None"])
    return f"{op.name}({arguments}) -> {op.outputs}"


def check(op: Op) -> None:
    """Refuse an op whose name torch knows with another signature, which a process cannot change."""
    if op.read is None and op.name in _defined and _defined[op.name] != schema(op):
        raise RegistrationError(
            f"op {op.name!r} was registered with torch as {_defined[op.name]}, which a "
            "process cannot change; give the new one another name")


def define(op: Op) -> None:
    """Register the op with torch; a second op of its name must have the same schema."""
    if op.read is not None:                     # an op without tensors
        return
    check(op)
    if op.name in _defined:
        return
    # first: torch asks its namespace for the op while it is being defined
    _defined[op.name] = schema(op)
    _library.define(schema(op))
    _library.impl(op.name, _implementation(op.name, op.outputs == "Tensor[]"),
                  "CompositeImplicitAutograd")
    if "torch._dynamo" in sys.modules:
        substitute(op.name)


def _implementation(name: str, as_list: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dispatcher = dispatchers.get(name)
        if dispatcher is None:
            raise RegistrationError(
                f"torch.ops.layerzero.{name}: the op {name!r} was unregistered; register it again")
        out = dispatcher.python_call(*args, **kwargs)
        return (list(out) if isinstance(out, tuple) else [out]) if as_list else out

    return run


def substitute(name: str) -> None:
    """Tell Dynamo what to trace in place of the public function."""
    dispatcher = dispatchers.get(name)
    if dispatcher is None:                     # unregistered
        return
    packet = getattr(torch.ops.layerzero, name).default
    as_list = dispatcher.op.outputs == "Tensor[]"
    unwrap, names = dispatcher.op.unwrap, dispatcher.names
    no_policy = (
        f"lz.{name}: policy= cannot be traced by torch.compile; put `with lz.prefer(...)` around "
        "the compiled function, or name a kernel with backend=")

    def traced(*args: Any, policy: Any = None, **kwargs: Any) -> Any:
        if policy is not None:                  # a plain ValueError: Dynamo cannot build ours
            raise ValueError(no_policy)
        plain = None if unwrap is None else unwrap({**dict(zip(names, args)), **kwargs})
        if plain is not None:
            args, kwargs = (), plain
        out = packet(*args, **kwargs)
        if as_list:
            return out[0] if len(out) == 1 else tuple(out)
        return out

    for fn in {id(f): f for f in (dispatcher.public, dispatcher.python_call)}.values():
        torch.compiler.substitute_in_graph(fn, skip_signature_check=True)(traced)


class _Namespace(torch._ops._OpNamespace):
    """`torch.ops.layerzero`, which loads an op when it is first read."""

    def __getattr__(self, name: str) -> Any:
        if name in _loaders and name not in _defined:
            _loaders[name](name)
        return super().__getattr__(name)


_loaders: dict[str, Callable[[str], Any]] = {}


class _DynamoImportHook(importlib.abc.MetaPathFinder):
    """Substitutes our ops once somebody imports torch._dynamo, which takes seconds."""

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> Any:
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                original(module)
                for op in list(_defined):
                    substitute(op)
                _load_all()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _load_all() -> None:
    """Load every op: Dynamo looks attributes up without calling __getattr__."""
    for name, load in _loaders.copy().items():
        if name not in _defined:
            load(name)


def install(names: Sequence[str], load: Callable[[str], Any]) -> None:
    """Make the ops available; `load(name)`, which calls `define`, runs on first need."""
    _loaders.update(dict.fromkeys(names, load))
    setattr(torch.ops, "layerzero", _Namespace("layerzero"))  # noqa: B010 torch does not declare the attribute
    if "torch._dynamo" in sys.modules:
        _load_all()
    else:
        sys.meta_path.insert(0, _DynamoImportHook())

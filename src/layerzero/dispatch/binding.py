"""Binding: from a step of a plan to a function of the op's parameters, in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch

from ..files import codegen
from ..spec.errors import SpecError
from ..spec.kernel import Const, Direct, Kernel, LastSize, accepted_params
from ..spec.op import Op
from ..spec.plan import Transform

# a copy comes last: what the kernel sees must be contiguous
_ORDER = ("layout", "cast", "contiguous")


@dataclass(frozen=True)
class Binding:
    """`run` takes the op's parameters by position; `call`, or None, has no Python frame."""

    run: Callable[..., Any]
    call: Direct | None

    @cached_property
    def operator(self) -> tuple[str, tuple[Any, ...]] | None:
        """The name and the arguments of the ATen operator that `call` calls, if it calls one."""
        return None if self.call is None else as_operator_call(self.call)


def bind(op: Op, kernel: Kernel, loaded: Callable[..., Any] | Direct,
         transforms: Sequence[Transform],
         variant: str, fixed: Mapping[str, Any] = MappingProxyType({})) -> Binding:
    """Bind a loaded kernel: transform its inputs, call it with those it takes, restore the caller's
    layout and dtype.

    `fixed` holds parameters and sizes that have these values in every call this binding will serve.
    """
    accepted = accepted_params(kernel.id, op, loaded)
    if isinstance(loaded, Direct) and loaded.otherwise is not None and not all(
            name in loaded.params or _at_default(op, name, fixed) for name in accepted):
        loaded = loaded.otherwise
        accepted = accepted_params(kernel.id, op, loaded)
    if isinstance(loaded, Direct):
        call = loaded.resolve(fixed) if loaded.facts else loaded
    else:
        params = inspect.signature(loaded).parameters
        by_position = [n for n in accepted if params[n].kind is not inspect.Parameter.KEYWORD_ONLY]
        call = Direct(loaded, tuple(by_position), {n: n for n in accepted if n not in by_position})
    changes_layout = any(t.kind == "layout" for t in transforms)
    call = drop_defaults(call, {n: v for n, v in fixed.items()
                                if not (changes_layout and n == op.variant)})
    names = ", ".join(p.name for p in op.params)
    scope: dict[str, Any] = {"FN": call.fn}
    lines: list[str] = []
    target = variant
    for t in sorted(transforms, key=lambda t: _ORDER.index(t.kind)):
        if not is_valid_transform(op, t):
            raise SpecError(f"wanted a tensor of {op.name}, one of its layouts or a dtype, got {t}")
        if t.kind == "layout":
            target = t.target
            lines += _permute_lines(op, variant, target)
        elif t.kind == "contiguous":
            lines.append(f"if {t.target} is not None: {t.target} = {t.target}.contiguous()")
        else:
            scope["DTYPE"] = _torch_dtype(t.target)
            lines += _cast_lines(op, variant)
    if target != variant:
        lines.append(f"{op.variant} = {target!r}")
    arguments = [_argument(a, scope) for a in call.args]
    arguments += [f"{k}={_argument(a, scope)}" for k, a in call.kwargs.items()]
    result = f"FN({', '.join(arguments)})"
    if call.item is not None:
        result += f"[{call.item}]"
    elif call.first is not None:
        result += f"[:{call.first}]"
    lines.append(f"out = {result}" if transforms else f"return {result}")
    if transforms:
        lines += _restore_lines(op, transforms, variant, target, scope)
        lines.append("return out")
    # made above from declarations only
    source = f"def run({names}):\n    " + "\n    ".join(lines)
    exec(codegen.compile(source, f"{op.name} run"), scope)
    return Binding(scope["run"], None if transforms else call)


def is_valid_transform(op: Op, t: Transform) -> bool:
    """Is this a transform of the op's inputs? A plan from a file becomes code here."""
    if t.kind == "contiguous":
        return t.target in op.by_name and op.by_name[t.target].kind == "tensor"
    return (t.target in op.patterns if t.kind == "layout" else t.kind == "cast"
            and _is_dtype(t.target))


def drop_defaults(call: Direct, fixed: Mapping[str, Any]) -> Direct:
    """Leave out arguments at the function's own defaults: parsing each costs about 100 ns."""
    order, defaults = defaults_of(call.fn)

    def is_default(name: str, argument: Any) -> bool:
        value = argument.value if isinstance(argument, Const) else (
            _UNKNOWN if isinstance(argument, LastSize) else fixed.get(argument, _UNKNOWN))
        default = defaults.get(name, _UNKNOWN)
        return default is not _UNKNOWN and type(value) is type(default) and value == default

    args = list(call.args)
    while args and len(args) <= len(order) and is_default(order[len(args) - 1], args[-1]):
        args.pop()
    kwargs = {name: argument for name, argument in call.kwargs.items()
              if not is_default(name, argument)}
    return replace(call, args=tuple(args), kwargs=kwargs)


_UNKNOWN: Any = object()


def _at_default(op: Op, name: str, fixed: Mapping[str, Any]) -> bool:
    value, param = fixed.get(name, _UNKNOWN), op.by_name[name]
    return (value is not _UNKNOWN and not param.required and type(value) is type(param.default)
            and bool(value == param.default))


def defaults_of(fn: Callable[..., Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return a function's parameters in order, and their defaults; torch's by their schema."""
    return _operator_defaults(fn) if isinstance(fn, BuiltinFunctionType) else _python_defaults(fn)


@lru_cache(maxsize=1024)
def _operator_defaults(fn: Callable[..., Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    operator = aten_operator(fn)
    if operator is not None and {*operator._overloadpacket.overloads()} <= {"default", "out"}:
        arguments = operator._schema.arguments
        return (tuple(a.name for a in arguments if not a.kwarg_only),
                {a.name: a.default_value for a in arguments if a.has_default_value()})
    return (), {}


def _python_defaults(fn: Callable[..., Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Reads the defaults anew: a cache would keep the function alive."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return (), {}
    return (tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY),
            {p.name: p.default for p in parameters if p.default is not p.empty})


def aten_operator(fn: Callable[..., Any]) -> Any:
    """Return the default ATen overload behind one of torch's built-in functions, or None."""
    return _aten_operator(fn) if isinstance(fn, BuiltinFunctionType) else None


@lru_cache(maxsize=1024)
def _aten_operator(fn: Callable[..., Any]) -> Any:
    namespaces = (torch, torch._C._nn, torch._C._VariableFunctions)
    is_torchs = any(getattr(namespace, fn.__name__, None) is fn for namespace in namespaces)
    packet = getattr(torch.ops.aten, fn.__name__, None) if is_torchs else None
    return packet.default if packet is not None and "default" in packet.overloads() else None


def as_operator_call(call: Direct) -> tuple[str, tuple[Any, ...]] | None:
    """Return name and all arguments, defaults included, of an ATen operator call; else None."""
    operator = aten_operator(call.fn)
    if operator is None:
        return None
    arguments = operator._schema.arguments
    by_position = [a.name for a in arguments if not a.kwarg_only]
    by_name = {**dict(zip(by_position, call.args)), **call.kwargs}
    by_name = {**{a.name: Const(a.default_value) for a in arguments if a.has_default_value()},
               **by_name}
    if len(call.args) > len(by_position) or by_name.keys() != {a.name for a in arguments}:
        return None
    return call.fn.__name__, tuple(by_name[a.name] for a in arguments)


def _argument(value: Any, scope: dict[str, Any]) -> str:
    if isinstance(value, LastSize):
        return f"{value.param}.shape[-1:]"
    if not isinstance(value, Const):
        return str(value)
    name = f"CONST{len(scope)}"
    scope[name] = value.value
    return name


def permutation(source: Sequence[str], target: Sequence[str]) -> tuple[int, ...] | None:
    """Return the axes that permute `source` order into `target` order; None if there are none."""
    if tuple(source) == tuple(target) or sorted(source) != sorted(target):
        return None
    return tuple(source.index(token) for token in target)


def _permute_text(name: str, axes: tuple[int, ...]) -> str:
    # from the end: leading axes may be missing
    swapped = [i - len(axes) for i, a in enumerate(axes) if a != i]
    if len(swapped) == 2:
        return f"{name}.transpose({swapped[0]}, {swapped[1]})"
    return f"{name}.permute({axes})"


def _permute_lines(op: Op, source: str, target: str) -> list[str]:
    lines = []
    for name, tokens in op.patterns[source].items():
        axes = permutation(tokens, op.patterns[target][name])
        if axes:
            prefix = f"if {name} is not None: " if op.by_name[name].optional else ""
            lines.append(f"{prefix}{name} = {_permute_text(name, axes)}")
    return lines


def _cast_lines(op: Op, variant: str) -> list[str]:
    """Cast the tensors that share a dtype, and a mask that has it too."""
    masks = [n for n, tokens in op.patterns[variant].items() if tokens[0].startswith("~")]
    return [f"_dtype_before = {op.main_tensor}.dtype",
            *(f"if {n} is not None: {n} = {n}.to(DTYPE)" for n in op.same_dtype
              or (op.main_tensor,)),
            *(f"if {n} is not None and {n}.dtype == _dtype_before: {n} = {n}.to(DTYPE)"
              for n in masks)]


def _restore_lines(op: Op, transforms: Sequence[Transform], source: str, target: str,
                   scope: dict[str, Any]) -> list[str]:
    """Put the results back into the caller's layout and dtype."""
    lines = []
    if target != source:
        axes = [permutation(t, s)
                for s, t in zip(op.result_patterns[source], op.result_patterns[target])]
        scope["PERMUTE"] = lambda i, t: t if i >= len(axes) or axes[i] is None else t.permute(
            axes[i])
        lines.append(
            "out = tuple(PERMUTE(i, t) for i, t in enumerate(out)) if type(out) is tuple else "
            "PERMUTE(0, out)")
    if any(t.kind == "cast" for t in transforms):
        lines.append(
            "out = (out[0].to(_dtype_before), *out[1:]) if type(out) is tuple else "
            "out.to(_dtype_before)")
    return lines


def _torch_dtype(name: str) -> Any:
    return getattr(torch, name)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)

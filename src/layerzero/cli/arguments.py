"""Parse `query=1x32x1x128 is_causal=true` into the arguments of a call, with meta tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from ..spec.errors import InvalidCall
from ..spec.names import suggest
from ..spec.op import Op, Param
from .options import ALIASES

_SHAPE = re.compile(r"(?P<sizes>\d+(?:[x,]\d+)*|)(?::(?P<dtype>[a-z0-9_]+))?")
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_NONE = ("none", "null")
_EXAMPLES = {"tensor": "a shape such as 1x32x1x128 or 5:int32", "bool": "true or false",
             "int": "a whole number",
             "float": "a number", "str": "text"}


def parse_call(op: Op, words: Iterable[str], dtype: str) -> dict[str, Any]:
    """Return keyword arguments of `op`; a name may be shortened to an unambiguous prefix."""
    default_dtype = parse_dtype(dtype)
    call: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign:
            raise InvalidCall(
                f"lz {op.name}: wanted parameter=value, got {word!r}; write it like {_example(op)}")
        param = _param(op, name.strip())
        if param.name in call:
            raise InvalidCall(f"lz {op.name}: {param.name} is given twice; give it once")
        call[param.name] = _value(op, param, text.strip(), default_dtype)
    missing = [p.name for p in op.params if p.required and p.name not in call]
    if missing:
        raise InvalidCall(f"lz {op.name} needs {', '.join(missing)}; write it like "
                          f"{_example(op, missing[0])}")
    return call


def parse_dtype(name: str) -> torch.dtype:
    """Return a dtype by torch's name or a short one, such as fp16."""
    dtype = getattr(torch, ALIASES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        known = sorted({str(d).removeprefix("torch.") for d in vars(torch).values()
                        if isinstance(d, torch.dtype)})
        raise InvalidCall(f"there is no dtype {name!r}{suggest(name, known)}")
    return dtype


def _param(op: Op, name: str) -> Param:
    if name in op.by_name:
        return op.by_name[name]
    matches = [p for p in op.params if name and p.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InvalidCall(
            f"lz {op.name}: {name!r} may be {' or '.join(p.name for p in matches)}; write one of "
            "them")
    raise InvalidCall(f"lz {op.name} has no parameter {name!r}{suggest(name, op.by_name)}")


def _value(op: Op, param: Param, text: str, default_dtype: torch.dtype) -> Any:
    if param.optional and text.lower() in _NONE:
        return None
    try:
        if param.kind == "tensor":
            return _tensor(op, param, text, default_dtype)
        if param.kind == "bool":
            return _BOOLS[text.lower()]
        return {"int": int, "float": float, "str": str}[param.kind](text)
    except InvalidCall:
        raise
    except (ValueError, KeyError):
        end = " or none" if param.optional else ""
        raise InvalidCall(
            f"lz {op.name}: {param.name} must be {_EXAMPLES[param.kind]}{end}, "
            f"got {text!r}") from None


def _tensor(op: Op, param: Param, text: str, default_dtype: torch.dtype) -> torch.Tensor:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    sizes = [int(n) for n in re.findall(r"\d+", match["sizes"])]
    dtype = (parse_dtype(match["dtype"]) if match["dtype"]
             else _declared_dtype(op, param.name, default_dtype))
    return torch.empty(sizes, dtype=dtype, device="meta")


def _declared_dtype(op: Op, name: str, default_dtype: torch.dtype) -> torch.dtype:
    """Return `default_dtype`, or the dtype of integers and booleans in the op's cases."""
    for case in op.cases:
        tensor = op.inputs(**case).get(name)
        if tensor is not None:
            return default_dtype if tensor.dtype.is_floating_point else tensor.dtype
    return default_dtype


def _example(op: Op, name: str = "") -> str:
    """Return how a parameter is written, by default the first tensor."""
    name = name or next(p.name for p in op.params if p.kind == "tensor")
    if op.by_name[name].kind != "tensor":
        return f"{name}=..., {_EXAMPLES[op.by_name[name].kind]}"
    shape = next(iter(op.patterns.values()))
    return f"{name}=" + "x".join("8" for _ in shape.get(name, ("n",)))

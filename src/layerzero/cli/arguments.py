"""From `query=1x32x1x128 is_causal=true` to the arguments of a call. Tensors are on "meta": nothing is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from ..select.policy import suggest
from ..spec.errors import InvalidCall
from ..spec.op import Op, Param

_SHAPE = re.compile(r"(?P<sizes>\d+(?:[x,]\d+)*|)(?::(?P<dtype>[a-z0-9_]+))?")
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_NONE = ("none", "null")
_EXAMPLES = {"tensor": "a shape such as 1x32x1x128 or 5:int32", "bool": "true or false", "int": "a whole number",
             "float": "a number", "str": "text"}


def parse_call(op: Op, words: Iterable[str], dtype: str) -> dict[str, Any]:
    """Keyword arguments of `op`. A name may be shortened as long as one parameter begins with it."""
    floating = parse_dtype(dtype)
    call: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign:
            raise InvalidCall(f"lz {op.name}: wanted parameter=value, got {word!r}; write it like {_example(op)}")
        param = _param(op, name.strip())
        if param.name in call:
            raise InvalidCall(f"lz {op.name}: {param.name} is given twice; give it once")
        call[param.name] = _value(op, param, text.strip(), floating)
    missing = [p.name for p in op.params if p.required and p.name not in call]
    if missing:
        raise InvalidCall(f"lz {op.name} needs {', '.join(missing)}; write it like {_example(op)}")
    return call


def parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        known = sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)})
        raise InvalidCall(f"there is no dtype {name!r}{suggest(name, known)}")
    return dtype


def _param(op: Op, name: str) -> Param:
    if name in op.by_name:
        return op.by_name[name]
    found = [p for p in op.params if name and p.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidCall(f"lz {op.name}: {name!r} may be {' or '.join(p.name for p in found)}; write one of them")
    raise InvalidCall(f"lz {op.name} has no parameter {name!r}{suggest(name, op.by_name)}")


def _value(op: Op, param: Param, text: str, floating: torch.dtype) -> Any:
    if param.optional and text.lower() in _NONE:
        return None
    try:
        if param.kind == "tensor":
            return _tensor(op, param, text, floating)
        if param.kind == "bool":
            return _BOOLS[text.lower()]
        return {"int": int, "float": float, "str": str}[param.kind](text)
    except InvalidCall:
        raise
    except (ValueError, KeyError):
        end = " or none" if param.optional else ""
        raise InvalidCall(f"lz {op.name}: {param.name} must be {_EXAMPLES[param.kind]}{end}, got {text!r}") from None


def _tensor(op: Op, param: Param, text: str, floating: torch.dtype) -> torch.Tensor:
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(text)
    sizes = [int(n) for n in re.findall(r"\d+", found["sizes"])]
    dtype = parse_dtype(found["dtype"]) if found["dtype"] else _usual_dtype(op, param.name, floating)
    return torch.empty(sizes, dtype=dtype, device="meta")


def _usual_dtype(op: Op, name: str, floating: torch.dtype) -> torch.dtype:
    """`floating`, unless the op's own cases make this tensor of another kind, such as int32 offsets."""
    for case in op.cases:
        made = op.inputs(**case).get(name)
        if made is not None:
            return floating if made.dtype.is_floating_point else made.dtype
    return floating


def _example(op: Op) -> str:
    shape = next(iter(op.patterns.values()))
    first = next(p.name for p in op.params if p.kind == "tensor")
    return f"{first}=" + "x".join("8" for _ in shape.get(first, ("n",)))

"""The facts of a call, read from its arguments as the op declares them.

`read` is the careful reader: it names every mistake of the caller. hotpath.py generates a fast
reader of the same facts, which gives up on anything unusual; the call then comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from ..machine.faults import capturing, sdpa_backends
from ..spec.errors import InvalidCall, LayerZeroError
from ..spec.op import FINITE, INT64, Op
from ..spec.reason import FOREIGN_ERRORS, Code, Reason
from ..spec.rules.expr import parse

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_PARAM_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int, torch.SymInt), "float": (float, int, torch.SymFloat),
    "str": (str,), "generator": (torch.Generator,), "object": (object,)}
PLAIN_SCALARS = (bool, int, float, str, torch.SymInt, torch.SymFloat)
PLAIN_KINDS = ("int", "float", "str")
_COMPARISONS = ("__eq__", "__ne__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__index__",
                "__int__", "__float__")
_dtype_names: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def read(op: Op, values: Mapping[str, Any],
         needed: Collection[str] | None = None) -> dict[str, Any]:
    """Return all facts of the call, or those `needed`; InvalidCall names the argument."""
    # a subclass may raise anything from any method
    with torch._C.DisableTorchFunctionSubclass():
        return _read(op, values, needed)


def _read(op: Op, values: Mapping[str, Any], needed: Collection[str] | None) -> dict[str, Any]:
    tensors = check_types(op, values)
    check_storage(op, tensors)
    facts: dict[str, Any] = {p.name: values[p.name] for p in op.params
                             if p.kind in ("bool", "int", "float", "str")}
    if op.read is not None:
        try:
            facts.update(op.read(dict(values)))
        except LayerZeroError:
            raise
        # from a method of an object among the arguments
        except FOREIGN_ERRORS as e:
            if not any(p.kind == "object" for p in op.params):
                raise
            raise InvalidCall(
                f"lz.{op.name}: an argument cannot be read: {type(e).__name__}: {e}") from e
    variant = facts[op.variant] if op.variant else ""
    patterns = op.patterns.get(variant)
    if patterns is None:
        raise InvalidCall.of(op.name, Reason(Code.LAYOUT_UNKNOWN, tuple(op.patterns), variant,
                                             op.variant))
    dims = bind_sizes(op, patterns, tensors, facts)
    if not tensors:
        facts.update(device="cpu", dtype=None, itemsize=0, tensor_kind="plain")
    else:
        first = tensors[op.main_tensor]
        facts["dtype"], facts["itemsize"] = dtype_name(first.dtype), first.dtype.itemsize
        facts["device"] = first.device.type
        facts["tensor_kind"] = tensor_kind(tensors.values())
        _check_same_device_and_dtype(op, tensors, first)
    facts.update(dims)
    for name, text in op.derived.items():
        absent = any(facts[n] is None for n in parse(text).names)
        facts[name] = None if absent else parse(text)(facts)
    for name in op.tensors:
        tensor = tensors.get(name)
        for fact, get in TENSOR_READERS.items():
            full = f"{name}.{fact}"
            if fact != "broadcast" and (needed is None or full in needed):
                facts[full] = None if tensor is None else get(tensor)
    grad = torch.is_grad_enabled()
    facts["grad"] = grad and any(t.requires_grad for t in tensors.values())
    facts["deterministic"] = torch.are_deterministic_algorithms_enabled()
    facts["graph"] = facts["device"] == "cuda" and capturing()
    if op.sdpa_switches:
        facts["sdpa_backends"] = sdpa_backends()
    return facts


def unwrap_numbers(op: Op, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with plain numbers for those in tensors without dimensions, as torch
    takes them for its own functions: not such as need a gradient."""
    if not any(isinstance(v, Tensor) and p.kind in ("int", "float")
               for p, v in zip(op.params, values)):
        return values
    return tuple(v.item() if p.kind in ("int", "float") and _is_number(v, p.kind) else v
                 for p, v in zip(op.params, values))


def _is_number(value: Any, kind: str) -> bool:
    return (type(value) in PLAIN_TYPES and value.dim() == 0 and not value.requires_grad
            and not value.is_meta and not value.is_complex() and value.dtype is not torch.bool
            and (kind == "float" or not value.is_floating_point()))


def check_types(op: Op, values: Mapping[str, Any],
                may_be_foreign: bool = False) -> dict[str, Tensor]:
    """Return the tensors among the arguments; raise InvalidCall for one that has not its declared
    type or range. `may_be_foreign`: the caller asks `canonical` next, which rewrites what
    `foreign` accepts."""
    tensors: dict[str, Tensor] = {}
    for p in op.params:
        value = values[p.name]
        if value is None:
            if not p.optional:
                raise InvalidCall.of(op.name, Reason(Code.WRONG_TYPE, p.kind, "None", p.name))
        elif p.kind == "tensor":
            if isinstance(value, Tensor):
                tensors[p.name] = value
            elif not (may_be_foreign and p.name in op.foreign and op.foreign[p.name](value)):
                raise InvalidCall.of(op.name,
                                     Reason(Code.WRONG_TYPE, "a Tensor", type(value).__name__,
                                            p.name))
        elif (not isinstance(value, _PARAM_TYPES[p.kind])
              or (p.kind in ("int", "float") and isinstance(value, bool))):
            raise InvalidCall.of(op.name, Reason(Code.WRONG_TYPE, p.kind, type(value).__name__,
                                                 p.name))
        elif (type(value) not in PLAIN_SCALARS and p.kind in PLAIN_KINDS
              and overrides_comparison(type(value))):
            raise InvalidCall.of(op.name, Reason(Code.WRONG_TYPE, f"a plain {p.kind}",
                                                 type(value).__name__, p.name))
        elif p.choices and value not in p.choices:
            raise InvalidCall.of(op.name, Reason(
                Code.LAYOUT_UNKNOWN if p.name == op.variant else Code.VALUE_OUT_OF_RANGE,
                tuple(c for c in p.choices if c), str(value), p.name))
        # a symbol has no value yet
        elif p.kind in ("int", "float") and isinstance(value, (int, float)):
            low, high = op.limits[p.name]
            overflows = (p.kind == "float" and isinstance(value, int)
                         and not INT64[0] <= value <= INT64[1])
            if overflows or not low <= value <= high:
                raise InvalidCall.of(op.name, Reason(
                    Code.VALUE_OUT_OF_RANGE, range_text(low, high), number_text(value), p.name))
    return tensors


def overrides_comparison(cls: type) -> bool:
    """Does a subclass of int, float or str compare in Python? In a key, other calls run that."""
    bases = [base for base in cls.__mro__ if base.__module__ not in ("builtins", "enum")]
    return any(isinstance(vars(base).get(name), FunctionType) for base in bases
               for name in _COMPARISONS)


def range_text(low: float, high: float) -> str:
    return ("a finite float, or an int of 64 bits" if (low, high) == FINITE
            else f"between {low} and {high}")


def number_text(value: float) -> str:
    """Return a number as text, a very long one by its length: Python refuses to write that out."""
    if isinstance(value, int) and not INT64[0] <= value <= INT64[1]:
        return f"an int of {value.bit_length()} bits"
    return str(value)


def check_storage(op: Op, tensors: Mapping[str, Tensor], may_be_nested: bool = False) -> None:
    """Refuse sparse, nested and blocked layouts, which have no sizes and strides that a kernel
    knows, and tensors whose memory was freed."""
    for name, t in tensors.items():
        if type(t) in PLAIN_TYPES and t.layout is torch.strided and not t.is_nested:
            if _is_freed(t):
                raise InvalidCall.of(op.name, Reason(
                    Code.TENSOR_UNREADABLE, f"a tensor with memory for {t.numel()} elements",
                    "one whose storage was freed", name))
            continue
        if is_lazy(t):                         # of a LazyLinear that was never called: no sizes yet
            raise InvalidCall.of(op.name, Reason(Code.TENSOR_UNREADABLE, "a tensor with sizes",
                                                 "an uninitialized parameter", name))
        with torch._C.DisableTorchFunctionSubclass():
            kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        if kind != "strided" and not (may_be_nested and kind == "nested"):
            raise InvalidCall.of(op.name, Reason(Code.TENSOR_UNREADABLE, "a strided tensor", kind,
                                                 name))


_LAZY = 0                                      # dispatch keys of tensors that are not their memory
for _key in ("Conjugate", "Negative", "ZeroTensor", "Functionalize"):
    _LAZY |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key)).raw_repr()


def _address(t: Tensor) -> int | None:
    """Return where the elements of a plain tensor are; None if they are not what lies in memory: a
    wrapper, as under vmap, a negated or conjugated view, zeros that were never written."""
    # t.is_neg() and the like release the GIL, which costs a process of many threads a switch
    if torch._C._dispatch_keys(t).raw_repr() & _LAZY:
        return None
    try:
        return t.data_ptr()
    except RuntimeError:                        # it has no storage
        return None


def _is_freed(t: Tensor) -> bool:
    return t.device.type in ("cpu", "cuda") and _address(t) == 0 and t.numel() > 0


def has_memory(values: Collection[Any]) -> bool:
    """Returns whether every plain tensor among the arguments has memory that a kernel can read."""
    return not any(type(t) in PLAIN_TYPES and t.device.type in ("cpu", "cuda")
                   and not _address(t) and t.numel() for t in values)


def bind_sizes(op: Op, patterns: Mapping[str, tuple[str, ...]], tensors: Mapping[str, Tensor],
               facts: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes by name, which must agree; adds the broadcast axes to `facts`."""
    dims: dict[str, Any] = {}
    lead: dict[str, tuple[Any, ...]] = {}
    for name, tokens in patterns.items():
        tensor = tensors.get(name)
        if tensor is None:
            if tokens[0].startswith("~"):
                facts[f"{name}.broadcast"] = None
            continue
        if tokens[0].startswith("~"):
            facts[f"{name}.broadcast"] = _broadcast_axes(op, name, tokens, tensor, dims)
            continue
        shape = tuple(tensor.shape)
        if tokens[0].startswith("*"):
            if len(shape) < len(tokens) - 1:
                raise InvalidCall.of(op.name, Reason(Code.WRONG_NDIM, f"at least {len(tokens) - 1}",
                                                     len(shape), name))
            head, shape = shape[:len(shape) - len(tokens) + 1], shape[len(shape) - len(tokens) + 1:]
            label, tokens = tokens[0][1:], tokens[1:]
            if lead.setdefault(label, head) != head:
                raise InvalidCall.of(op.name, Reason(
                    Code.DIM_MISMATCH, f"{lead[label]} like the other tensors", str(head),
                    f"{name}'s leading shape"))
            rows = 1
            for n in head:
                rows = rows * n
            dims[label] = rows
        if len(shape) != len(tokens):
            raise InvalidCall.of(op.name, Reason(
                Code.WRONG_NDIM, f"{len(tokens)} ({' '.join(tokens)})", len(shape), name))
        for axis, (token, size) in enumerate(zip(tokens, shape)):
            if token.isdigit():
                if size != int(token):
                    raise InvalidCall.of(op.name, Reason(Code.DIM_MISMATCH, token, size,
                                                         f"{name}.shape[{axis}]"))
            elif dims.setdefault(token, size) != size:
                raise InvalidCall.of(op.name, Reason(
                    Code.DIM_MISMATCH, f"{dims[token]} ({token})",
                    f"{size} in {tuple(tensor.shape)}", f"{name}.shape[{axis - len(tokens)}]"))
    for label in op.dims:
        dims.setdefault(label, None)
    return dims


def _broadcast_axes(op: Op, name: str, tokens: tuple[str, ...], tensor: Tensor,
                    dims: Mapping[str, Any]) -> str:
    """Return the named axes that the tensor is broadcast over, comma separated; "" if none."""
    shape = tuple(tensor.shape)
    full_shape = tuple(dims[t[1:]] for t in tokens)
    repeated = [t[1:] for t in tokens[:len(tokens) - len(shape)]]
    fits = len(shape) <= len(tokens)
    for token, size, full in zip(tokens[len(tokens) - len(shape):], shape,
                                 full_shape[len(tokens) - len(shape):]):
        if size == full:
            continue
        if size != 1:
            fits = False
        repeated.append(token[1:])
    if not fits:
        raise InvalidCall.of(op.name, Reason(Code.MASK_BROADCAST_INVALID, str(full_shape),
                                             str(shape), name))
    return ",".join(repeated)


def _check_same_device_and_dtype(op: Op, tensors: Mapping[str, Tensor], first: Tensor) -> None:
    for name, t in tensors.items():
        if t.device != first.device:
            raise InvalidCall.of(op.name,
                                 Reason(Code.MIXED_DEVICES, str(first.device), str(t.device), name))
    for name in op.same_dtype:
        if name in tensors and tensors[name].dtype != first.dtype:
            raise InvalidCall.of(op.name, Reason(
                Code.MIXED_DTYPES, dtype_name(first.dtype), dtype_name(tensors[name].dtype), name))


def tensor_kind(tensors: Collection[Tensor]) -> str:
    """Return "plain", or the kind of tensor whose storage cannot be read directly."""
    for t in tensors:
        if type(t) not in PLAIN_TYPES:
            return type(t).__name__
        if t.is_nested:
            return "nested"
        if t.layout != torch.strided:
            return str(t.layout).removeprefix("torch.")
    if (torch._C._functorch.maybe_current_level() is not None
        # one that has left its transform, or a lazy view
        or any(_address(t) is None for t in tensors if t.device.type in ("cpu", "cuda"))):
        return "functorch"
    return "plain" if forward_ad._current_level < 0 else "forward_ad"


def stride_last(t: Tensor) -> Any:
    """Return the last stride; 1 also where the axis or tensor has one element or none."""
    if t.dim() == 0 or t.layout != torch.strided:
        return 1
    last = t.stride(-1)
    return 1 if last == 1 or t.shape[-1] == 1 or t.numel() == 0 else last


def alignment(t: Tensor) -> int | None:
    """Return the largest power of 2 up to 128 that divides the address and all outer strides."""
    if type(t) not in PLAIN_TYPES or t.device.type == "meta":
        return None
    try:
        bits = 128 | t.data_ptr()
    except RuntimeError:                        # a wrapper, as under vmap, has no storage
        return None
    if t.is_contiguous():                       # all outer strides are multiples of the last size
        bits |= t.shape[-1] * t.element_size() if t.dim() > 1 else 0
    else:
        for stride in t.stride()[:-1]:
            bits |= stride * t.element_size()
    return bits & -bits


TENSOR_READERS: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda t: dtype_name(t.dtype),
    "device": lambda t: t.device.type,
    "stride_last": stride_last,
    "contiguous": lambda t: t.layout == torch.strided and t.is_contiguous(),
    "alignment": alignment,
    "requires_grad": lambda t: torch.is_grad_enabled() and t.requires_grad,
    "ndim": lambda t: t.dim(),
}

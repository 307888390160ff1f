"""Calls as data: describe a call with tensors, and make the tensors of a described call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..dispatch.facts import dtype_name
from ..machine.faults import FAULTS
from ..spec.call import MAX_VALUES, Call, Scalar, TensorSpec
from ..spec.errors import DataError, InvalidCall
from ..spec.op import Op

LARGE = 1 << 22        # elements; more are drawn on the GPU that will use them, or repeated
PERIOD = LARGE - 3     # a prime: no two rows of a large tensor are the same


def describe(op: Op, values: Mapping[str, Any], name: str = "") -> Call:
    """Describe a call; DataError for what cannot be described, such as a tokenizer object."""
    arguments: dict[str, TensorSpec | Scalar] = {}
    for p in op.params:
        value = values.get(p.name, p.default)
        if isinstance(value, Tensor):
            arguments[p.name] = _describe_tensor(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            if p.required or value != p.default:
                arguments[p.name] = value
        elif p.kind != "generator":            # a new generator is made from the seed
            raise DataError(
                f"lz.{op.name}: {p.name} is a {type(value).__name__}, which cannot be written down")
    grad = (torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad
                                            for v in values.values()))
    return Call(op.name, arguments, grad=grad, name=name)


def _describe_tensor(tensor: Tensor) -> TensorSpec:
    shape, is_integer = tuple(tensor.shape), not (tensor.is_floating_point() or tensor.is_complex())
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    dtype = dtype_name(tensor.dtype)
    if not is_integer or tensor.is_meta or tensor.is_quantized:
        return TensorSpec(shape, dtype, strides)
    if tensor.numel() <= MAX_VALUES:
        return TensorSpec(shape, dtype, strides, tuple(tensor.to(torch.int64).flatten().tolist()))
    return TensorSpec(shape, dtype, strides, below=max(int(tensor.max()) + 1, 1))


def make_values(op: Op, call: Call, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return every parameter of the op by name; equal seeds give equal tensors."""
    if call.case is not None:
        dtype = _torch_dtype(call.dtype)
        try:
            arguments = op.inputs(**call.case, dtype=dtype, device=device, seed=seed)
        except FAULTS as e:                    # a case from a file may hold anything
            raise InvalidCall(
                f"lz.{op.name}: case {dict(call.case)!r:.200}: no inputs can be made of it: "
                f"{type(e).__name__}: {e}") from e
    else:
        unknown = [n for n in call.arguments if n not in op.by_name]
        if unknown:
            raise InvalidCall(
                f"lz.{op.name} has no parameter {', '.join(unknown)}; it has "
                f"{', '.join(op.by_name)}")
        generator = torch.Generator("cpu").manual_seed(seed)
        arguments = {n: _make_tensor(v, device, generator) if isinstance(v, TensorSpec) else v
                     for n, v in call.arguments.items()}
    values = {p.name: arguments.get(p.name, p.default) for p in op.params}
    missing = [p.name for p in op.params if p.required and p.name not in arguments]
    if missing:
        raise InvalidCall(
            f"lz.{op.name} needs {', '.join(missing)}; the call has "
            f"{', '.join(arguments) or 'nothing'}")
    if call.grad:
        for name in op.differentiable:
            if isinstance(values[name], Tensor) and values[name].is_floating_point():
                values[name] = values[name].detach().requires_grad_()
    return values


def _make_tensor(spec: TensorSpec, device: str, generator: torch.Generator) -> Tensor:
    dtype = _torch_dtype(spec.dtype)
    if spec.values is not None:
        flat = torch.tensor(spec.values, dtype=torch.int64).to(dtype).view(spec.shape)
    elif dtype.is_floating_point or dtype.is_complex:
        flat = _normal(spec.shape, dtype, device, generator)
    else:
        flat = torch.randint(0, max(spec.below, 2), spec.shape, generator=generator,
                             dtype=torch.int64).to(dtype)
    if spec.strides is None:
        return flat.to(device)
    extent = (1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides)) if all(spec.shape)
              else 0)
    tensor = torch.zeros(extent, dtype=dtype, device=device).as_strided(spec.shape, spec.strides)
    # an expanded tensor: repeated elements are written once
    if 0 in spec.strides:
        axes = tuple(0 if s == 0 else slice(None) for s in spec.strides)
        tensor[axes] = flat.to(device)[axes]
    else:
        tensor.copy_(flat.to(device))
    return tensor


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: str,
            generator: torch.Generator) -> Tensor:
    """Draw on the host, so that the numbers are equal on every device. A large tensor takes the
    host tens of seconds: it is drawn on the GPU that will use it, or repeats its first numbers."""
    count = math.prod(shape)
    if count < LARGE:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    if torch.device(device).type == "cuda":
        on_device = torch.Generator(device).manual_seed(
            int(torch.randint(1 << 62, (), generator=generator)))
        return torch.randn(shape, generator=on_device, dtype=torch.float32, device=device).to(dtype)
    drawn = torch.randn(PERIOD, generator=generator, dtype=torch.float32).to(dtype)
    tensor = torch.empty(count, dtype=dtype)
    whole = count - count % PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(drawn)
    tensor[whole:] = drawn[:count - whole]
    return tensor.view(shape)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidCall(f"there is no dtype {name!r} in this torch")
    return dtype

"""Inputs like those of a call, made up in the background: to compile a kernel for such calls, or to
load it before it serves one.

Shapes, strides, dtypes and alignment are those of the call. Its integers are copied, because they
cannot be made up: page tables, lengths, token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...machine.memory import free_bytes
from ...spec.kernel import Kernel
from ...spec.op import Op

MAX_COPIED = 1 << 26                           # bytes of integers that may be copied
MEMORY_SHARE = 0.1                             # of free memory that the inputs may take


class TensorLike(NamedTuple):
    """The description of a tensor; `numbers` are copies of the integers, which must be real."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    # elements: the pointer modulo 16 bytes is compiled in
    offset: int
    grad: bool
    numbers: Tensor | None

    def make(self) -> Tensor:
        extent = _extent(self.shape, self.stride)
        flat = torch.empty(self.offset + extent, dtype=self.dtype, device=self.device)
        if self.numbers is not None:
            flat[self.offset:].copy_(self.numbers)
        elif self.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            # A generator of its own: the caller's next random numbers stay the same.
            flat.normal_(generator=torch.Generator(self.device).manual_seed(0))
        else:
            flat.zero_()
        return flat.as_strided(self.shape, self.stride, self.offset).requires_grad_(self.grad)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0


def _tensor_like(t: Tensor, grad: bool) -> TensorLike:
    shape, stride, numbers = tuple(t.shape), t.stride(), None
    if not t.is_floating_point():
        numbers = t.detach().as_strided((_extent(shape, stride),), (1,)).clone()
    offset = 0 if t.is_cpu else t.data_ptr() % 16 // t.element_size()
    return TensorLike(shape, stride, t.dtype, t.device, offset, grad and t.requires_grad, numbers)


def why_no_inputs(kernel: Kernel, facts: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    """Return why inputs like these must not be made; "" if they may be."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if facts.get("dropout_p"):
        return "it draws random numbers, which are the caller's"
    if any(p.kind == "generator" for p in kernel.op.params) and not kernel.package:
        return "torch compiles random numbers in"
    if any(p.kind == "object" for p in kernel.op.params):
        return "it takes objects, of which there is no other"
    nbytes = sum(_extent(tuple(t.shape), t.stride()) * t.element_size() for t in tensors)
    # the call, and both ends of its bucket
    if 3 * nbytes > (limit := MEMORY_SHARE * free_bytes(facts["device"])):
        return (f"inputs like its own take {nbytes >> 20} MiB, and {int(limit) >> 20} MiB may be "
                "taken; use lz.warmup")
    if sum(t.nbytes for t in tensors if not t.is_floating_point()) > MAX_COPIED:
        return (f"more than {MAX_COPIED >> 20} MiB of whole numbers would have to be copied; use "
                "lz.warmup")
    return ""


class Inputs(NamedTuple):
    """Descriptions of the arguments of a call, in the order of the op's parameters."""

    values: tuple[Any, ...]                    # tensors as TensorLike
    waits_for: Any = None                      # a CUDA event: the copies of integers are complete

    def make(self, op: Op) -> tuple[Any, ...]:
        """Returns arguments like those described; a generator is not the caller's own."""
        values = tuple(v.make() if isinstance(v, TensorLike) else v for v in self.values)
        device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
        return tuple(torch.Generator(device).manual_seed(0) if p.kind == "generator" else v
                     for p, v in zip(op.params, values))

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Run on a stream of its own, outside of any capture of another thread."""
        with ExitStack() as stack:
            device = next((v.device for v in self.values if isinstance(v, TensorLike)
                           and v.device.type == "cuda"), None)
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
                if torch.version.hip is None:
                    # `import layerzero` reads no backend
                    from ...backends.cuda.compiler import outside_captures

                    stack.enter_context(outside_captures())
                stream = torch.cuda.Stream(device)
                if self.waits_for is not None:
                    stream.wait_event(self.waits_for)
                stack.enter_context(torch.cuda.stream(stream))
            yield


def describe(values: tuple[Any, ...], grad: bool) -> Inputs:
    described = tuple(_tensor_like(v, grad) if isinstance(v, Tensor) else v for v in values)
    cuda = next((v for v in values if isinstance(v, Tensor) and v.is_cuda), None)
    copied = torch.cuda.current_stream(cuda.device).record_event() if cuda is not None else None
    return Inputs(described, copied)

"""The formulas themselves, fused into one loop by torch.compile.

Compiled once for each kind of call: dtypes, exact sizes, switches and numbers are constants of the code; the other
sizes are symbols in it, so a longer sequence does not compile anew. A size of 1 is a kind of its own.

One thread of a CPU with AVX-512, against the eager formula: at some hundred rows 2 to 6 times as fast, at one row half
as fast, since a call costs 20 to 30 us before it computes. Measured too and left out, because another kernel is
faster: matmuls, routing, sampling, group norm and quantization on the CPU, codes of four bits.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..ops.add_rms_norm import OP as add_rms_norm
from ..ops.cross_entropy import OP as cross_entropy
from ..ops.dequantize import OP as dequantize
from ..ops.group_norm import OP as group_norm
from ..ops.layer_norm import OP as layer_norm
from ..ops.rms_norm import OP as rms_norm
from ..ops.rope import OP as rope
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.reason import Code, Reason
from ..spec.rules import Condition, at_least, device, dtypes, one_of, plain_tensors

NONE: frozenset[int] = frozenset()
_serial = count()
COMPILERS = {"win32": "cl", "darwin": "clang++"}           # what Inductor calls where CXX does not say; else g++


@functools.lru_cache(maxsize=None)
def compiler() -> bool | Reason:
    """True, or why nothing can be compiled here. Triton, which serves a GPU, wants a compiler as well."""
    wanted = os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++")
    return bool(shutil.which(wanted.split()[0])) or Reason(Code.COMPILER_MISSING, f"a C++ compiler ({wanted})")


class Compiled:
    """The compiled formula of one op, by kind of call."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.names = tuple(p.name for p in op.params)
        # variant -> tensor -> the axes whose size the op keeps exactly; from the end, as a starred one may be several
        self.exact = {variant: {name: frozenset(i - len(tokens) for i, token in enumerate(tokens) if token in op.exact)
                                for name, tokens in shapes.items()} for variant, shapes in op.patterns.items()}
        self.by_kind: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(self.names, args)), **kwargs}
        variant = self.op.variant
        exact = self.exact[values.get(variant, self.op.by_name[variant].default) if variant else ""]
        kind = (*values, *[self.part(v, exact.get(name, NONE)) if isinstance(v, Tensor) else v
                           for name, v in values.items()])
        with torch.no_grad():                  # one kind less: there is no backward anyway
            found = self.by_kind.get(kind)
            if found is not None:
                return found(*args, **kwargs)
            made = self.compiled()
            marked = {name: self.marked(v, exact.get(name, NONE)) if isinstance(v, Tensor) else v
                      for name, v in values.items()}
            out = made(*[marked[name] for name in self.names[:len(args)]], **{name: marked[name] for name in kwargs})
            self.by_kind[kind] = made          # two threads may both make it: torch compiles one after the other
            return out

    @staticmethod
    def part(value: Tensor, exact: frozenset[int]) -> Any:
        """What of a tensor the code is made for."""
        ndim = value.dim()
        sizes = [n if n < 2 or i - ndim in exact else None for i, n in enumerate(value.shape)]
        order = () if value.is_contiguous() else (value.stride(-1), *sorted(range(ndim), key=value.stride))
        return (value.dtype, value.device.type, order, *sizes)

    @staticmethod
    def marked(value: Tensor, exact: frozenset[int]) -> Tensor:
        """The same tensor, with the sizes that are to be symbols marked; on an alias, so that the caller's is not."""
        alias, ndim = value.detach(), value.dim()
        for i, n in enumerate(value.shape):
            if n > 1 and i - ndim not in exact:
                torch._dynamo.maybe_mark_dynamic(alias, i)
        return alias

    def compiled(self) -> Callable[..., Any]:
        """With a name of its own: by that torch counts recompilations, and past eight it goes on unfused without a
        word. fullgraph makes it raise instead, should one kind need so many."""
        formula: Any = self.op.reference
        own = FunctionType(formula.__code__.replace(co_name=f"{self.op.name}_{next(_serial)}"), formula.__globals__,
                           formula.__name__, formula.__defaults__, formula.__closure__)
        own.__kwdefaults__ = formula.__kwdefaults__
        return torch.compile(own, fullgraph=True)


def _loader(op: Op) -> Callable[[], Callable[..., Any]]:
    """By a function of this module's own, so that a descriptor can name it."""
    def load() -> Callable[..., Any]:
        run = Compiled(op)

        @functools.wraps(op.reference)         # the signature is the formula's
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        return call

    load.__name__ = load.__qualname__ = f"_{op.name}"
    globals()[load.__name__] = load
    return load


def _kernel(op: Op, prior: float, *requires: Condition, devices: tuple[str, ...] = ("cpu", "cuda"),
            untested: bool = False, versions: str = "") -> Kernel:
    rules: list[Condition] = [device(*devices), plain_tensors()]
    if op is not dequantize:                   # whose main tensor holds codes
        rules.append(dtypes("float16", "bfloat16", "float32"))
    variants = tuple(op.patterns) if op.variant else ()
    return Kernel(f"torch.compiled_{op.name}", op, _loader(op), (*rules, *requires), prior=prior,
                  overhead_us=OVERHEAD_US, variants=variants, differentiable=False, graph_safe=False, traceable=False,
                  jit=True, untested=untested, torch=versions, built=compiler,
                  note="the formula, compiled for each dtype and exact size")


# A call costs 20 to 30 us. The rest is what the guess of small calls is too high by: the formula runs them from the
# cache, several times faster than the roofline of memory says.
OVERHEAD_US = 100.0
SOME_ROWS = at_least("rows", 1, Code.EMPTY_INPUT)

KERNELS = (
    _kernel(rms_norm, 5.0, SOME_ROWS),
    _kernel(add_rms_norm, 4.5, SOME_ROWS),
    # torch's own is faster and refuses weights of another dtype.
    _kernel(layer_norm, 4.0, SOME_ROWS),
    # torch's own loses digits in the half types on a GPU; on the CPU it is four times as fast.
    _kernel(group_norm, 4.0, at_least("batch", 1, Code.EMPTY_INPUT), devices=("cuda",), untested=True),
    _kernel(rope, 4.0, at_least("batch", 1, Code.EMPTY_INPUT), at_least("seq", 1, Code.EMPTY_INPUT)),
    # Before torch 2.13 what Inductor makes of it reads outside of the logits for a target outside of the vocabulary.
    _kernel(cross_entropy, 2.7, SOME_ROWS, versions=">=2.13"),
    _kernel(dequantize, 6.0, SOME_ROWS,
            one_of("format", "int8", "fp8_e4m3", "fp8_e5m2", code=Code.QUANT_FORMAT_UNSUPPORTED)),
)

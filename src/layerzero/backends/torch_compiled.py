"""The references, fused by torch.compile.

Each specialization is compiled once: dtypes, exact sizes, flags and numbers are constants of the
code; other sizes are symbolic, so a longer sequence does not recompile. A size of 1 is a
specialization of its own.

On one thread of a CPU with AVX-512, compared with the eager reference: 2 to 6 times as fast for
some hundred rows, half as fast for one row, since a call has 20 to 30 us of overhead. Measured and
left out, because another kernel is faster: matmuls, routing, sampling, group norm and quantization
on the CPU, four-bit codes.
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
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.reason import Code, Reason

NO_AXES: frozenset[int] = frozenset()
_serial = count()
# what Inductor calls without CXX; else g++
COMPILERS = {"win32": "cl", "darwin": "clang++"}


@functools.lru_cache(maxsize=None)
def compiler() -> bool | Reason:
    """Returns True, or why nothing compiles here. Triton needs a C++ compiler for a GPU too."""
    name = os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++")
    return (bool(shutil.which(name.split()[0]))
            or Reason(Code.COMPILER_MISSING, f"a C++ compiler ({name})"))


class CompiledReference:
    """The compiled reference of one op, by specialization."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.names = tuple(p.name for p in op.params)
        # variant -> tensor -> the axes of exact sizes, from the end, as a starred one is several
        self.exact = {variant: {name: frozenset(i - len(tokens) for i, token in enumerate(tokens)
                                                if token in op.exact)
                                for name, tokens in shapes.items()}
                      for variant, shapes in op.patterns.items()}
        self.specializations: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(self.names, args)), **kwargs}
        variant = self.op.variant
        exact = self.exact[values.get(variant, self.op.by_name[variant].default) if variant else ""]
        key = (*values, *[self.key_of(v, exact.get(name, NO_AXES)) if isinstance(v, Tensor) else v
                          for name, v in values.items()])
        with torch.no_grad():                  # fewer specializations: there is no backward anyway
            known = self.specializations.get(key)
            if known is not None:
                return known(*args, **kwargs)
            run = self.compile()
            marked = {name: self.mark_dynamic(v, exact.get(name, NO_AXES)) if isinstance(v, Tensor)
                      else v
                      for name, v in values.items()}
            out = run(*[marked[name] for name in self.names[:len(args)]],
                      **{name: marked[name] for name in kwargs})
            # two threads may both compile it: torch serializes them
            self.specializations[key] = run
            return out

    @staticmethod
    def key_of(value: Tensor, exact: frozenset[int]) -> Any:
        """Returns the properties of a tensor that the code is specialized for."""
        ndim = value.dim()
        sizes = [n if n < 2 or i - ndim in exact else None for i, n in enumerate(value.shape)]
        order = (() if value.is_contiguous()
                 else (value.stride(-1), *sorted(range(ndim), key=value.stride)))
        return (value.dtype, value.device.type, order, *sizes)

    @staticmethod
    def mark_dynamic(value: Tensor, exact: frozenset[int]) -> Tensor:
        """Returns an alias of the tensor whose symbolic sizes are marked as dynamic."""
        alias, ndim = value.detach(), value.dim()
        for i, n in enumerate(value.shape):
            if n > 1 and i - ndim not in exact:
                torch._dynamo.maybe_mark_dynamic(alias, i)
        return alias

    def compile(self) -> Callable[..., Any]:
        """Compiles a copy of the reference with a unique name. torch counts recompilations by name,
        and past eight it silently runs eagerly. fullgraph makes it raise instead."""
        formula: Any = self.op.reference
        own = FunctionType(formula.__code__.replace(co_name=f"{self.op.name}_{next(_serial)}"),
                           formula.__globals__, formula.__name__, formula.__defaults__,
                           formula.__closure__)
        own.__kwdefaults__ = formula.__kwdefaults__
        return torch.compile(own, fullgraph=True)


def _loader(op: Op) -> Callable[[], Callable[..., Any]]:
    """Returns a loader as a global of this module, so that a descriptor can name it."""
    def load() -> Callable[..., Any]:
        run = CompiledReference(op)

        @functools.wraps(op.reference)         # the signature is the reference's
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        return call

    load.__name__ = load.__qualname__ = f"_{op.name}"
    globals()[load.__name__] = load
    return load


def _kernel(op: Op, prior: float, *requires: r.Condition,
            devices: tuple[str, ...] = ("cpu", "cuda"), untested: bool = False, versions: str = "",
            dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")) -> Kernel:
    rules: list[r.Condition] = [r.device(*devices), r.plain_tensors()]
    if dtypes:
        rules.append(r.dtypes(*dtypes))
    variants = tuple(op.patterns) if op.variant else ()
    return Kernel(f"torch.compiled_{op.name}", op, _loader(op), (*rules, *requires), prior=prior,
                  overhead_us=OVERHEAD_US, variants=variants, differentiable=False,
                  graph_safe=False, traceable=False, jit=True, untested=untested, torch=versions,
                  built=compiler, note="the formula, compiled for each dtype and exact size")


# A call has 20 to 30 us of overhead. The rest makes up for the estimate of small eager calls, which
# run from the cache, several times faster than the memory roofline.
OVERHEAD_US = 100.0
HAS_ROWS = r.at_least("rows", 1, Code.EMPTY_INPUT)

KERNELS = (
    _kernel(rms_norm, 5.0, HAS_ROWS),
    _kernel(add_rms_norm, 4.5, HAS_ROWS),
    # torch's own is faster but takes no weights of another dtype.
    _kernel(layer_norm, 4.0, HAS_ROWS),
    # torch's own loses precision in half types on a GPU; on the CPU it is four times as fast.
    _kernel(group_norm, 4.0, r.at_least("batch", 1, Code.EMPTY_INPUT), devices=("cuda",),
            untested=True),
    _kernel(rope, 4.0, r.at_least("batch", 1, Code.EMPTY_INPUT),
            r.at_least("seq", 1, Code.EMPTY_INPUT)),
    # Before torch 2.13 Inductor's code reads out of bounds for a target outside of the vocabulary.
    _kernel(cross_entropy, 2.7, HAS_ROWS, versions=">=2.13"),
    # Its main tensor holds codes, so there is no rule on its dtype.
    _kernel(dequantize, 6.0, HAS_ROWS,
            r.one_of("format", "int8", "fp8_e4m3", "fp8_e5m2", code=Code.QUANT_FORMAT_UNSUPPORTED),
            # Inductor's code reads beyond the scales where the last block of a row is short.
            r.one_of("block_size", 0, 8, 16, 32, 64, 128, 256),
            r.any_of(r.equals("block_size", 0), r.multiple_of("packed", 256)),
            dtypes=()),
)

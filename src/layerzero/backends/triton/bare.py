"""Describes the launch of a kernel that Triton compiled, so that it can be launched through the
driver without Triton.

The driver says which parameters the machine code takes, instead of assuming a version of Triton:
first those of the signature that are not constants, then up to two pointers to scratch memory,
which are null if unused. Kernels that do not match this, or are launched differently (clusters,
cooperative grids, dependent launches), are left to Triton.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import byref, c_char_p, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

from torch import Tensor

from ...spec.replay import MAX_INT32, Grid, Launch, Varying, expand_format, field_offsets, fields_of

# Types in a Triton signature -> codes of the struct module; pointers begin with a star.
CODES = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
         "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
# pointers: global scratch since Triton 3.3, a profiler's since 3.5
MAX_SCRATCH = 2
# Triton specializes on whether a number is a multiple of this
ALIGNED = 16
UNUSUAL = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size",
           "tensordesc_meta")


@lru_cache(maxsize=None)
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def parameter_sizes(function: int) -> tuple[int, ...] | None:
    """Returns the bytes of each parameter of a loaded function; None before CUDA 12.4."""
    get_info = getattr(driver(), "cuFuncGetParamInfo", None)
    if get_info is None:
        return None
    sizes: list[int] = []
    offset, size = c_size_t(), c_size_t()
    while get_info(c_void_p(function), c_size_t(len(sizes)), byref(offset), byref(size)) == 0:
        sizes.append(size.value)
    return tuple(sizes)


def launch(fn: Any, compiled: Any, grid: Grid, args: tuple[Any, ...], varying: tuple[Varying, ...],
           hooks: tuple[list[Any], ...]) -> Launch | str:
    """Returns the launch of a CompiledKernel with these arguments, or why Triton does it."""
    metadata = compiled.metadata
    unusual = [name for name in UNUSUAL if getattr(metadata, name, None)]
    if unusual or getattr(metadata, "num_ctas", 1) != 1:
        return f"it is launched with {', '.join(unusual) or 'clusters'}"
    sizes = parameter_sizes(compiled.function)
    if sizes is None:
        return "the driver does not tell the parameters of a function"
    return describe(fn, compiled, grid, args, varying, hooks, sizes)


def describe(fn: Any, compiled: Any, grid: Grid, args: tuple[Any, ...],
             varying: tuple[Varying, ...],
             hooks: tuple[list[Any], ...], sizes: tuple[int, ...]) -> Launch | str:
    """Describes a launch of a function with parameters of these sizes."""
    passed = [(i, p, str(compiled.src.signature.get(p.name, "")))
              for i, p in enumerate(fn.params[:len(args)])]
    # such as a number that is 1
    passed = [(i, p, kind) for i, p, kind in passed if kind != "constexpr"]
    codes = ["P" if kind.startswith("*") else CODES.get(kind, "") for _, _, kind in passed]
    scratch = len(sizes) - len(codes)
    format = "@" + "".join(codes) + "P" * scratch
    if ("" in codes or not 0 <= scratch <= MAX_SCRATCH
        or tuple(map(struct.calcsize, expand_format(format))) != sizes):
        return (f"parameters of {sizes} bytes are not those of the signature "
                f"{[kind for _, _, kind in passed]}")
    values = [args[i] for i, _, _ in passed]
    try:
        params = struct.pack(format, *[v.data_ptr() if isinstance(v, Tensor) else v
                                       for v in values], *[0] * scratch)
    except (struct.error, OverflowError) as e:
        return f"its numbers do not fit their types: {e}"
    fields = fields_of(format)
    field_of = {i: field for field, (i, _, _) in enumerate(passed)}
    free = tuple(bounded for v in varying if (bounded := _bound(v, fn, args, field_of)) is not None)
    return Launch(
        ctypes.cast(driver().cuLaunchKernelEx, c_void_p).value or 0, compiled.function, grid,
        compiled.metadata.num_warps * 32, compiled.metadata.shared, 1, params,
        field_offsets(fields), fields,
        tuple((field, v) for field, v in enumerate(values) if isinstance(v, Tensor)), free,
        launch_error, hooks, compiled)


def _bound(v: Varying, fn: Any, args: tuple[Any, ...], place: dict[int, int]) -> Varying | None:
    """Returns the range in which the specialization is the same: 32 bits stay 32, multiples of 16
    stay multiples. None if there is no other value."""
    if v.field < 0:
        return v
    now = args[v.field]
    if v.field not in place or not -MAX_INT32 - 1 <= now <= MAX_INT32:
        return None
    bounded = v._replace(field=place[v.field], high=min(v.high, MAX_INT32 // v.factor))
    if fn.params[v.field].do_not_specialize:
        return bounded
    if now % ALIGNED or v.factor != 1:
        return None
    return bounded._replace(step=ALIGNED)


def launch_error(code: int, device: int, grid: Grid) -> BaseException:
    """Returns the error that Triton's own launcher raises."""
    text = c_char_p()
    driver().cuGetErrorString(code, byref(text))
    return RuntimeError(f"Triton Error [CUDA]: {(text.value or b'unknown').decode()}")

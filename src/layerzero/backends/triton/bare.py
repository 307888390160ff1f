"""A kernel that Triton compiled, as the driver is to be given it: without Triton.

Which parameters the machine code takes is asked of the driver, not assumed of a version of Triton: first those of the
signature that are no constants, then up to two pointers to scratch memory, which are null where none is wanted. What
does not come out so, or is launched in another way (clusters, cooperative grids, dependent launches), stays Triton's.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import byref, c_char_p, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

from torch import Tensor

from ...spec.replay import MOST, Grid, Launch, Varying, expand_format, fields_of, places_of

# Of types in a signature of Triton, as the struct module has them; pointers begin with a star.
CODES = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
         "u64": "Q", "fp32": "f", "fp64": "d"}
MOST_SCRATCH = 2                               # pointers: global scratch since Triton 3.3, that of a profiler since 3.5
ALIGNED = 16                                   # what Triton compiles in of a number: is it a multiple of this?
UNUSUAL = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size", "tensordesc_meta")


@lru_cache(maxsize=None)
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def parameter_sizes(function: int) -> tuple[int, ...] | None:
    """Bytes of each parameter of a loaded function; None where the driver (before CUDA 12.4) cannot tell."""
    ask = getattr(driver(), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    found: list[int] = []
    offset, size = c_size_t(), c_size_t()
    while ask(c_void_p(function), c_size_t(len(found)), byref(offset), byref(size)) == 0:
        found.append(size.value)
    return tuple(found)


def launch(fn: Any, made: Any, grid: Grid, args: tuple[Any, ...], varying: tuple[Varying, ...],
           hooks: tuple[list[Any], ...]) -> Launch | str:
    """The launch of a CompiledKernel with these run-time arguments; or why it must be left to Triton."""
    metadata = made.metadata
    unusual = [name for name in UNUSUAL if getattr(metadata, name, None)]
    if unusual or getattr(metadata, "num_ctas", 1) != 1:
        return f"it is launched with {', '.join(unusual) or 'clusters'}"
    sizes = parameter_sizes(made.function)
    if sizes is None:
        return "the driver does not tell the parameters of a function"
    return describe(fn, made, grid, args, varying, hooks, sizes)


def describe(fn: Any, made: Any, grid: Grid, args: tuple[Any, ...], varying: tuple[Varying, ...],
             hooks: tuple[list[Any], ...], sizes: tuple[int, ...]) -> Launch | str:
    """As `launch`, of a function with parameters of these sizes."""
    passed = [(i, p, str(made.src.signature.get(p.name, ""))) for i, p in enumerate(fn.params[:len(args)])]
    passed = [(i, p, kind) for i, p, kind in passed if kind != "constexpr"]    # a number that is 1, say
    codes = ["P" if kind.startswith("*") else CODES.get(kind, "") for _, _, kind in passed]
    scratch = len(sizes) - len(codes)
    format = "@" + "".join(codes) + "P" * scratch
    if "" in codes or not 0 <= scratch <= MOST_SCRATCH or tuple(map(struct.calcsize, expand_format(format))) != sizes:
        return f"parameters of {sizes} bytes are not those of the signature {[kind for _, _, kind in passed]}"
    given = [args[i] for i, _, _ in passed]
    try:
        params = struct.pack(format, *[v.data_ptr() if isinstance(v, Tensor) else v for v in given], *[0] * scratch)
    except (struct.error, OverflowError) as e:
        return f"its numbers do not fit their types: {e}"
    fields = fields_of(format)
    place = {i: at for at, (i, _, _) in enumerate(passed)}
    free = tuple(found for v in varying if (found := _bounded(v, fn, args, place)) is not None)
    return Launch(
        ctypes.cast(driver().cuLaunchKernelEx, c_void_p).value or 0, made.function, grid,
        made.metadata.num_warps * 32, made.metadata.shared, 1, params, places_of(fields), fields,
        tuple((at, v) for at, v in enumerate(given) if isinstance(v, Tensor)), free, refused, hooks, made)


def _bounded(v: Varying, fn: Any, args: tuple[Any, ...], place: dict[int, int]) -> Varying | None:
    """Where the compiled kernel is the same: a number of 32 bits stays one, a multiple of 16 stays one. None: nowhere
    else."""
    if v.field < 0:
        return v
    now = args[v.field]
    if v.field not in place or not -MOST - 1 <= now <= MOST:
        return None
    bounded = v._replace(field=place[v.field], high=min(v.high, MOST // v.factor))
    if fn.params[v.field].do_not_specialize:
        return bounded
    if now % ALIGNED or v.factor != 1:
        return None
    return bounded._replace(step=ALIGNED)


def refused(code: int, device: int, grid: Grid) -> BaseException:
    """In the words of Triton's own launcher."""
    text = c_char_p()
    driver().cuGetErrorString(code, byref(text))
    return RuntimeError(f"Triton Error [CUDA]: {(text.value or b'unknown').decode()}")

"""Tensor maps (CUtensorMap), by which one TMA copy of Hopper reads a box of a matrix."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64, c_void_p

from torch import Tensor

from . import compiler

RUN = 128                      # bytes of a row that are swizzled together
SWIZZLED = 8                   # rows after which the swizzle pattern repeats
SIZE = 128                     # bytes of a tensor map
ALIGNMENT = 64                 # of a tensor map
# Constants of cuda.h: elements are bytes, no interleaving, units of 16 bytes swizzled in 128, bytes
# that the L2 cache fetches at a time, elements outside the matrix are zero.
UINT8, INTERLEAVE_NONE, SWIZZLE_128B, FILL_ZERO = 0, 0, 3, 0
PROMOTION_128B, PROMOTION_256B = 2, 3


def encode(matrix: Tensor, rows: int, runs: int) -> bytes:
    """Returns the tensor map of boxes of `rows` rows times `runs` runs of 128 bytes; the rows of
    the matrix are whole runs. In shared memory a box is its runs one after the other, each of all
    rows."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    if not matrix.is_contiguous() or row_bytes % RUN or matrix.data_ptr() % 16:
        raise ValueError(
            f"boxes are copied from contiguous rows of whole {RUN} bytes that begin at a multiple "
            f"of 16, and these are {row_bytes} bytes at {matrix.data_ptr():#x}, strides "
            f"{matrix.stride()}; copy the matrix first")
    memory = ctypes.create_string_buffer(SIZE + ALIGNMENT)
    address = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    code = compiler.driver().cuTensorMapEncodeTiled(
        c_void_p(address), UINT8, 3, c_void_p(matrix.data_ptr()),
        (c_uint64 * 3)(RUN, matrix.shape[0], row_bytes // RUN), (c_uint64 * 2)(row_bytes, RUN),
        (c_uint32 * 3)(RUN, rows, runs), (c_uint32 * 3)(1, 1, 1), INTERLEAVE_NONE, SWIZZLE_128B,
        PROMOTION_256B if runs > 1 else PROMOTION_128B, FILL_ZERO)
    if code:
        raise compiler.failure(code, f"describing a matrix of {tuple(matrix.shape)} for copies")
    return ctypes.string_at(address, SIZE)

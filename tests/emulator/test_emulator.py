"""The emulator that our CUDA kernels are tested in: does it do what the hardware does, and find
what it would not.
"""

from __future__ import annotations

import struct

import pytest
import torch

from .run import COMPILER, FAILURES, HERE, built

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_primitives(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype)
    product, sums, seen = torch.full((4, 16, 8),
                                     torch.nan), torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    run = built(HERE / "primitives.cu", BF16=int(dtype == torch.bfloat16))
    pointers = struct.pack("@5P", *(t.data_ptr() for t in (left, right, product, sums, seen)))
    run.launch("primitives", (4, 1, 1), 64, pointers, shared=2048, cluster=2)
    want = left.float() @ right.float().t()
    torch.testing.assert_close(product, want.expand(4, 16, 8))
    assert sums.tolist() == [sum(range(128))] * 2 + [sum(range(128, 256))] * 2
    assert [n & 0xFFFFFFFF for n in seen.tolist()] == [0xAAAAAAAA] * 4


@pytest.mark.parametrize("how", [1, 2, 3, 4])
def test_what_hardware_leaves_undefined_is_found(how: int) -> None:
    with pytest.raises(RuntimeError, match=FAILURES[how]):
        built(HERE / "primitives.cu", BF16=1).launch("broken", (2, 1, 1), 64,
                                                     struct.pack("@i", how), shared=256)
    with pytest.raises(ValueError, match="clusters of 2"):
        built(HERE / "primitives.cu", BF16=1).launch("broken", (3, 1, 1), 64, struct.pack("@i", 0),
                                                     cluster=2)

"""Triton kernels as somebody else would bring them: to lz.rms_norm, with configurations. Also run
as a script, in Triton's interpreter, by test_own_triton.py."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from layerzero.operate.triton_kernels import triton_kernel, triton_kernels
from layerzero.ops.rms_norm import OP
from layerzero.spec.rules import at_most, contiguous, dtypes, equals


@triton.jit
def scaled_rows(x_ptr, weight_ptr, out_ptr, hidden, eps, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(x_ptr + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    if WEIGHT:
        x = x * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden + column, x.to(out_ptr.dtype.element_ty), mask=inside)


def launch(x, weight=None, eps=1e-6):
    out, hidden = torch.empty_like(x), x.shape[-1]
    block = {"BLOCK": triton.next_power_of_2(hidden), "WEIGHT": weight is not None}
    return out, (x, x if weight is None else weight, out, hidden, eps), block


def grid(meta):
    return (meta["x_ptr"].numel() // max(meta["hidden"], 1),)


REQUIRES = (dtypes("float16", "bfloat16", "float32"), contiguous("x"), contiguous("weight"),
            at_most("hidden", 4096),
            equals("offset", 0.0))
MINE = triton_kernel("mine.rms_norm", OP, scaled_rows, launch=launch, grid=grid, requires=REQUIRES)
TUNED = triton_kernels("mine.tuned", OP, "own_triton:scaled_rows", launch=launch, grid=grid,
                       requires=REQUIRES,
                       configs=({"num_warps": 2}, {"num_warps": 4},
                                {"num_warps": 8, "num_stages": 1}))


def on_cpu(kernel):
    """The same for the interpreter."""
    return kernel.constrained(tuple(r for r in kernel.requires
                                    if getattr(r, "fact", "") != "device"))


if __name__ == "__main__":
    import layerzero as lz
    from layerzero.verify.kernel.contract import check_case

    for kernel in (MINE, TUNED[0]):
        for case in OP.cases[::3]:
            result = check_case(on_cpu(kernel), case, "float32")
            print(json.dumps({"kernel": kernel.id, "status": result.status, "text": str(result)}))
    lz.register(on_cpu(MINE))
    lz.configure(jit="in_request")
    x = torch.randn(3, 100)
    got = lz.rms_norm(x, backend="mine.rms_norm")
    print(json.dumps({"kernel": "lz.rms_norm", "status": "passed"
                      if torch.allclose(got, OP.reference(x), atol=1e-5)
                      else "failed", "text": lz.which("rms_norm", x, backend="mine.rms_norm")}))
    too_long = triton_kernel("mine.long", OP, scaled_rows, launch=launch,
                             grid=lambda given: (1, 70000),
                             requires=REQUIRES)
    lz.register(on_cpu(too_long))
    try:
        lz.rms_norm(x, backend="mine.long")
        status = "failed"
    except lz.errors.KernelExecutionError as e:
        status = "passed" if e.codes == (lz.Code.CUDA_BLOCK_LIMIT_EXCEEDED,) else "failed"
    print(json.dumps({"kernel": "limits", "status": status, "text": ""}))

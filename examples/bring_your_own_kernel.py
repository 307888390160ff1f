"""Add a kernel of your own: declare what it can do, prove it, and let it be chosen where it may
serve.

The kernel is an RMS norm of three torch calls that knows float32 only. You will see it proven
against the contract of the operation, chosen for a call it can serve, and refused with a reason for
one it cannot. A second version with a mistake in it is found out before it computes anything for
anybody.

    python examples/bring_your_own_kernel.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import layerzero as lz
from layerzero.spec.rules import device, dtypes, equals
from layerzero.verify.certification.certify import certify

RMS_NORM = lz.op("rms_norm")


def load() -> Callable[..., Tensor]:
    """Called when the kernel is first chosen: import your library here, not above."""

    def run(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return out if weight is None else (out * weight).to(x.dtype)

    return run


def load_wrong() -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        out = x / (x.square().mean(-1, keepdim=True).sqrt() + eps)     # eps belongs under the root
        return out if weight is None else (out * weight).to(x.dtype)

    return run


# Every limit is a rule: the filter, the error text, the tables and the tests all read it.
RULES = (device("cpu"), dtypes("float32", "float64"),
         dtypes("float32", "float64", None, of="weight.dtype"),
         equals("offset", 0.0))
MINE = lz.Kernel("example.rms_norm", RMS_NORM, load, requires=RULES)
WRONG = lz.Kernel("example.wrong", RMS_NORM, load_wrong, requires=RULES)


def main() -> int:
    verdict = certify(MINE)
    print(
        f"{MINE.id}: {verdict.status}, {verdict.ran} cases, largest error {verdict.worst:.2f} of "
        "what is allowed")

    bad = certify(WRONG, stop_early=True)
    print(f"{WRONG.id}: {bad.status}")
    if bad.diagnosis is not None:
        print(f"  {bad.diagnosis.kind}: {bad.diagnosis.says}")

    lz.register(MINE)
    x, weight = torch.randn(4, 256), torch.randn(256)
    # by name; without backend= it competes with the others
    out = lz.rms_norm(x, weight, backend=MINE.id)
    error = (out - torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)).abs().max().item()
    print(f"served by name, {error:.1e} from torch's own")

    try:
        lz.rms_norm(x.bfloat16(), weight.bfloat16(), backend=MINE.id)
        refused = False
    # asked for by name, it is never replaced in silence
    except lz.errors.NamedKernelRefused as reason:
        print(f"for bfloat16:\n  {str(reason).splitlines()[0]}")
        refused = True

    with lz.prefer(MINE.id, op="rms_norm"):
        chosen = lz.which("rms_norm", x, weight)
        other = lz.which("rms_norm", x.bfloat16(), weight.bfloat16())
    print(f"preferred: {chosen} for float32, {other} for bfloat16")
    lz.unregister(MINE.id)
    fine = verdict.status == "passed" and bad.status == "failed" and error < 1e-5 and refused
    return 0 if fine and chosen == MINE.id != other else 1


if __name__ == "__main__":
    sys.exit(main())

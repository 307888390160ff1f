"""torch's own group norm. It is fed contiguous images only: on a GPU it copies others anyway, and on the CPU its own
way through channels-last ones subtracts squared means, which loses the variance where the mean is large.
"""

from __future__ import annotations

from ..ops.formulas import FLOATS
from ..ops.group_norm import OP as group_norm
from ..spec.kernel import Direct, Kernel, direct
from ..spec.reason import Code
from ..spec.rules import Condition, When, any_of, contiguous, device, differs, dtypes, equals, one_of, present, when


def _group_norm() -> Direct:
    import torch
    return direct(torch.group_norm, "x", "groups", "weight", "bias", "eps")


def _parameters(dtype: str) -> tuple[Condition, ...]:
    """torch takes weight and bias like the input; for a half type on the CPU also both in float32."""
    wide = ("float32",) if dtype in ("float16", "bfloat16") else ()
    rules: list[Condition] = []
    for name in ("weight", "bias"):
        on_cpu = any_of(one_of(f"{name}.dtype", None, dtype), device("cpu"))
        allowed = one_of(f"{name}.dtype", None, dtype, *wide, code=Code.DTYPE_UNSUPPORTED)
        rules += [When(equals("dtype", dtype), on_cpu), When(equals("dtype", dtype), allowed)]
    if wide:
        both = [when(one_of("weight.dtype", w), one_of("bias.dtype", None, w, code=Code.DTYPE_UNSUPPORTED))
                for w in (dtype, *wide)]
        rules += [When(equals("dtype", dtype), rule) for rule in both]
        # Without a weight the backward takes the bias's dtype from the input.
        alone = any_of(one_of("weight.dtype", *wide), one_of("bias.dtype", None, dtype, code=Code.DTYPE_UNSUPPORTED))
        rules.append(When(equals("dtype", dtype), alone))
    return tuple(rules)


KERNELS = (
    Kernel("torch.group_norm", group_norm, _group_norm, prior=6.0, overhead_us=3.0, baseline=True,
           requires=(contiguous("x"), *(rule for dtype in FLOATS for rule in _parameters(dtype)),
                     # On an H200 the half types lose four times the eager error where the mean is large.
                     any_of(device("cpu"), dtypes("float32", "float64")),
                     # Its backward of a bias without a weight ends in an error.
                     any_of(present("weight.dtype"), differs("bias.requires_grad", True, Code.BACKWARD_UNSUPPORTED)))),
)

"""A model gives wrong answers. Which kernel is it, and what does it do wrong?

A kernel with the most common mistake is planted: where queries are fewer than keys, as when
decoding with a KV cache, it takes the causal diagonal from the wrong corner. Prompts are right and
later tokens are not. You will see the ladder find the stage and the kernel, say what kind of
mistake it is, and pass once that kernel is locked out.

    python examples/debug_a_wrong_kernel.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero.models.decoder_config import CONFIGS
from layerzero.spec.rules import absent, equals, off
from layerzero.verify.model.ladder import climb


def load() -> Callable[..., Any]:
    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale,
                                              enable_gqa=True)

    return run


# It should say that it knows one diagonal only: equals("causal_offset", 0). Without that rule it is
# chosen too often.
PLANTED = lz.Kernel("example.diagonal", lz.op("attention"), load, variants=("bhsd",), prior=1e6,
                    less_work="example", requires=(
    absent("attn_mask.dtype"), absent("alibi_slopes.dtype"), equals("window_left", -1),
    equals("window_right", -1), equals("softcap", 0.0), equals("dropout_p", 0.0),
    off("return_lse")))


def ladder() -> Any:
    """A whole layer at a time: every stage against plain torch in float64, with a prompt and with
    single tokens."""
    return next(iter(climb(2, configs=[("gqa", CONFIGS["gqa"])], dtypes=["float32"])))


def main() -> int:
    print("before:", ladder().status)
    lz.register(PLANTED)
    rung = ladder()
    print(f"\nwith the new kernel: {rung.status}\n{rung.culprit}")

    lz.configure(rules=(lz.PolicyRule.of("deny", PLANTED.id, "attention", {}),))
    mended = ladder()
    print(f"\nwithout it: {mended.status}")
    lz.unregister(PLANTED.id)
    found = (rung.culprit is not None and rung.culprit.kernel == PLANTED.id
             and rung.culprit.kind == "alignment")
    return 0 if found and mended.passed else 1


if __name__ == "__main__":
    sys.exit(main())

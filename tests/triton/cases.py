"""Runs our Triton kernels in Triton's interpreter against the contracts of their ops; prints one JSON line each.

A process of its own: the interpreter is chosen by TRITON_INTERPRET=1 before Triton is first imported, for good.
It runs on CPU tensors, so the rules about the device are lifted. What it computes with bfloat16 in a matrix
product is wrong, so that dtype is left to the device tests.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from layerzero.backends.triton import HARDWARE, KERNELS
from layerzero.spec.kernel import Kernel
from layerzero.spec.rules import Condition, Rule
from layerzero.verify.contract import check_case

EASIER = {"sm", "vendor", "device", "gpu_generation"}


def interpretable(kernel: Kernel, dtypes: tuple[str, ...]) -> Kernel:
    """The same kernel on the CPU, for these dtypes."""
    def kept(rule: Condition) -> bool:
        return not any(leaf.fact in EASIER or (leaf.fact == "dtype" and isinstance(rule, Rule))
                       for leaf in rule.leaves())

    return kernel.constrained(tuple(rule for rule in kernel.requires if rule not in HARDWARE and kept(rule)))


def small(case: Mapping[str, Any], limit: int) -> bool:
    """The interpreter takes a millisecond for each operation of each program: large cases add nothing."""
    return all(not isinstance(v, int) or v <= limit for v in case.values())


def main(name: str, *dtypes: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kernel = interpretable(next(k for k in KERNELS if k.id == name), dtypes)
    for dtype in dtypes:
        for case in kernel.op.cases:
            if small(case, 10_000):
                result = check_case(kernel, case, dtype)
                print(json.dumps({"status": result.status, "text": str(result)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

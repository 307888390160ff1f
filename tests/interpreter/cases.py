"""Runs our Triton kernels in Triton's interpreter against the contracts of their ops; prints one
JSON line for each.

    python cases.py KERNEL:DTYPE:EVERY ...     every n-th case of the op, and those of our own
    python cases.py crowded                    sampling from a row of thousands of equal scores
    python cases.py expanded                   attention over a KV head that was expanded
    python cases.py configured                 how many programs are launched
    python cases.py grouped_backward           gradients of grouped attention

A process of its own: the interpreter is chosen by TRITON_INTERPRET=1 before Triton is first
imported, for good. It runs on CPU tensors, so the rules about the device are lifted. What it
computes with bfloat16 in a matrix product is wrong, so that dtype is left to the device tests.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from layerzero.backends.triton import HARDWARE, KERNELS
from layerzero.spec.kernel import Kernel
from layerzero.spec.rules import Condition, Rule
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.gradients import check_gradients

# What the op's own cases do not reach: several splits and rows, long stretches, the other ways
# through a kernel.
OURS: dict[str, tuple[dict[str, Any], ...]] = {
    "triton.attention_decode": (
        {"b": 1, "hq": 8, "hkv": 2, "sq": 1, "sk": 1500, "d": 64, "lse": True},
        {"b": 1, "hq": 8, "hkv": 2, "sq": 8, "sk": 700, "d": 32, "causal": True,
         "align": "bottom_right"},
        {"b": 1, "hq": 4, "hkv": 1, "sq": 3, "sk": 600, "window": (100, 0), "align": "bottom_right",
         "d": 32},
        {"b": 1, "hq": 2, "hkv": 1, "sq": 2, "sk": 300, "causal": True, "align": "top_left",
         "d": 32}),
    "triton.paged_attention_decode": (
        {"context": (900, 3), "hq": 8, "hkv": 2, "lse": True},
        {"context": (400, 90), "lengths_q": (3, 2), "hq": 8, "hkv": 2, "window": 70},
        {"context": (300,), "stored": "float8_e4m3fn", "scales": "head", "layout": "HND"}),
    "triton.grouped_attention": (               # chunks long enough for a loop each
        {"items": ((0, 3, 500, 600), (3, 2, 0, 1100)), "hq": 2, "hkv": 1, "chunk": 550},),
    "triton.linear_gemv": ({"rows": (1,), "k": 1536, "n": 70}, {"rows": (3,), "k": 600, "n": 40}),
    "triton.quantized_linear_gemv": (
        {"format": "int4", "rows": (1,), "k": 1536, "n": 20, "group": 128},
        {"format": "int4", "rows": (1,), "k": 256, "n": 20, "group": 64, "symmetric": False,
         "bias": True},
        {"format": "int8", "rows": (1,), "k": 2112, "n": 20},
        {"format": "fp8_e4m3", "rows": (1,), "k": 64, "n": 9},
        {"format": "int8", "rows": (1,), "k": 256, "n": 20, "group": 32, "symmetric": False}),
    "triton.quantized_linear_tiled": (
        {"format": "int4", "rows": (9,), "k": 1024, "n": 40, "group": 32},
        {"format": "int4", "rows": (3,), "k": 512, "n": 33, "group": 128, "symmetric": False,
         "bias": True},
        {"format": "int8", "rows": (2,), "k": 144, "n": 20, "group": 64, "symmetric": False},
        {"format": "fp8_e4m3", "rows": (33,), "k": 96, "n": 9, "scale_dtype": "bfloat16"},
        {"format": "nf4", "rows": (1,), "k": 256, "n": 20, "group": 64},
        {"format": "mxfp4", "rows": (5,), "k": 160, "n": 20, "group": 32},
        {"format": "nvfp4", "rows": (2,), "k": 128, "n": 20, "group": 16}),
    "triton.int8_dynamic_linear": (
        {"activations": "int8", "rows": (17,), "k": 96, "n": 40},
        {"activations": "int8", "rows": (20,), "k": 64, "n": 8, "bias": True},
        {"activations": "int8", "rows": (3, 7), "k": 64, "n": 16, "scale_dtype": "bfloat16"}),
    "triton.quantized_linear_decoded": (
        {"format": "int4", "rows": (17,), "k": 160, "n": 40, "group": 32, "symmetric": False},
        {"format": "int8", "rows": (20,), "k": 48, "n": 8, "bias": True},
        {"format": "fp8_e4m3", "rows": (17,), "k": 1040, "n": 9, "group": 128},
        {"format": "nvfp4", "rows": (17,), "k": 96, "n": 11, "group": 16}),
}


def interpretable(kernel: Kernel) -> Kernel:
    """The same kernel on the CPU, and for the dtype the interpreter can."""
    def about_hardware(rule: Condition) -> bool:
        return any(leaf.fact == "sm" or (leaf.fact == "dtype" and isinstance(rule, Rule))
                   for leaf in rule.leaves())

    return kernel.constrained(tuple(r for r in kernel.requires if r not in HARDWARE
                                    and not about_hardware(r)))


def say(name: str, status: str, text: str) -> None:
    print(json.dumps({"kernel": name, "status": status, "text": text}), flush=True)


def contract(name: str, dtype: str, every: str) -> None:
    kernel = interpretable(next(k for k in KERNELS if k.id == name))
    ours = OURS.get(name.removesuffix("_half").removesuffix("_double"), ())
    for case in (*kernel.op.cases[::int(every)], *ours):
        result = check_case(kernel, case, dtype)
        say(name, result.status, str(result))


def crowded() -> None:
    """More ties than the last step can list: it must go through the whole row, and find the same
    token."""
    from layerzero.backends.triton.sampling import sample
    from layerzero.backends.triton.sampling_search import MAX_LISTED
    from layerzero.ops.sample import reference

    logits = torch.zeros(1, MAX_LISTED + 500)
    logits[:, ::30], logits[:, 7] = -1.0, 2.0
    uniforms = torch.tensor([0.73], dtype=torch.float64)
    for options in ({"top_p": 0.6}, {"top_k": 900}, {"top_k": 900, "top_p": 0.5, "min_p": 0.1}):
        got, want = (f(logits, **options, uniforms=uniforms) for f in (sample, reference))
        say("crowded", "passed" if torch.equal(got, want) else "failed",
            f"{options}: {got} instead of {want}")


def expanded() -> None:
    """One KV head that the caller has expanded to all query heads, which the strides show."""
    from layerzero.backends.triton.attention.decode import attention_decode
    from layerzero.ops.attention import reference

    gen = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, 3, 32, generator=gen).half()
    key, value = (torch.randn(2, 1, 200, 32, generator=gen).half().expand(2, 8, 200, 32)
                  for _ in "kv")
    for options in ({}, {"is_causal": True, "causal_align": "bottom_right"},
                    {"window_left": 20, "scale": 0.3}):
        got, want = attention_decode(query, key, value, **options), reference(
            query.float(), key.float(), value.float(), **options)
        gap = (got.float() - want).abs().max().item()
        say("expanded", "passed" if gap < 4e-3 else "failed", f"{options}: off by {gap}")


def configured() -> None:
    """Half and twice as many programs are other launches of the same kernel."""
    from layerzero.backends.triton import gemv
    from layerzero.backends.triton.attention import decode

    here = torch.device("cpu")
    for text, result, rising in (
            ("decode", [decode.config(16, 2, 64, 1 << 14, False, here, p).splits
                        for p in (0.5, 1.0, 2.0)], [2, 4, 8]),
            ("paged", [decode.config(16, 64, 64, 1 << 14, True, here, p).splits
                       for p in (0.5, 1.0, 2.0)], [2, 4, 8]),
            ("gemv", [gemv.config(1, 4096, 4096, False, here, p).block_n
                      for p in (2.0, 1.0, 0.5)], [2, 4, 8])):
        say("configured", "passed" if result == rising else "failed",
            f"{text}: {result} instead of {rising}")


def grouped_backward() -> None:
    """dQ, dK and dV against the formula in float64; the kernel declares its backward."""
    kernel = interpretable(next(k for k in KERNELS if k.id == "triton.grouped_attention"))
    for case in kernel.op.gradient_cases[1:4]:
        result = check_gradients(kernel, case, "float32")
        say("grouped_backward", result.status, str(result))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for task in sys.argv[1:]:
        own = {"crowded": crowded, "expanded": expanded, "configured": configured,
               "grouped_backward": grouped_backward}.get(task)
        own() if own else contract(*task.split(":"))

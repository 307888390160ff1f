"""torch.backends.cuda.can_use_* and our rules for the same implementations agree, call by call.

Where ours are stricter, STRICTER says why. Ours are never looser: what torch would refuse an
implementation, we must not hand to it behind torch's back.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from helpers import ATTENTION, call_facts
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerzero as lz
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import SDPA
from layerzero.spec.reason import Code
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.gpu

BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
ALIGNED = ("the kernels load 16 bytes at a time, and from another address answer wrongly or kill "
           "the context")
EMPTY = "without a batch or a head the entries give None or divide by zero"
GRID = "batch and heads are axes of a grid that end at 65535"
# (implementation, code) -> why our rules refuse where torch would go on
STRICTER = {
    ("FLASH_ATTENTION",
     Code.HEAD_DIM_ALIGNMENT): "torch pads the head dimension before the entry we call; torch.sdpa",
    ("CUDNN_ATTENTION",
     Code.DROPOUT_UNSUPPORTED): "dropout of cuDNN has a resolution of 1/16; torch.sdpa serves it",
    ("CUDNN_ATTENTION",
     Code.HEAD_DIM_TOO_LARGE): "192 and 256 depend on the version of cuDNN; torch.sdpa serves them",
    ("EFFICIENT_ATTENTION",
     Code.GQA_UNSUPPORTED): "torch repeats the key heads before the entry we call",
    **{(b, Code.POINTER_ALIGNMENT): ALIGNED for b in BACKENDS},
    **{(b, Code.EMPTY_INPUT): EMPTY for b in BACKENDS},
    **{(b, Code.CUDA_BLOCK_LIMIT_EXCEEDED): GRID for b in BACKENDS},
}


@dataclass(frozen=True)
class Case:
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    seq_q: int = 64
    seq_k: int = 64
    dim: int = 64
    dim_v: int = 64
    dtype: str = "float16"
    mask: str = ""
    causal: bool = False
    dropout: float = 0.0
    stride: str = ""
    grad: bool = False


def cases(count: int = 400, seed: int = 0) -> Iterator[Case]:
    """Ordinary calls with a few things changed at a time."""
    draw = random.Random(seed)
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        yield Case(dtype=dtype)
    for _ in range(count):
        case = {"dtype": draw.choice(("float16", "bfloat16", "float16", "bfloat16", "float32",
                                      "float64"))}
        for _ in range(draw.randint(0, 3)):
            what = draw.choice(("dim", "dim_v", "group", "mask", "causal", "stride", "grad", "seq",
                                "empty", "dropout"))
            if what == "dim":
                case["dim"] = case["dim_v"] = draw.choice((1, 4, 7, 8, 20, 33, 40, 72, 96, 128, 136,
                                                           192, 256, 264))
            elif what == "dim_v":
                case["dim_v"] = draw.choice((8, 32, 44, 128))
            elif what == "group":
                case |= {"heads": 8, "kv_heads": draw.choice((1, 2, 4))}
            elif what == "mask" and not case.get("causal"):
                case["mask"] = draw.choice(("bool", "float", "float2d"))
            elif what == "causal" and not case.get("mask"):
                case["causal"] = True
            elif what == "stride":
                case["stride"] = draw.choice(("transposed", "padded", "sparse", "shifted"))
            elif what == "grad":
                case["grad"] = True
            elif what == "seq":
                case |= {"seq_q": draw.choice((1, 17, 64, 200)),
                         "seq_k": draw.choice((1, 2, 63, 64, 257))}
            elif what == "empty":
                case[draw.choice(("batch", "seq_q", "seq_k"))] = 0
            elif what == "dropout":
                case["dropout"] = draw.choice((0.1, 0.25))
        yield Case(**case)


def tensors(case: Case, device: str) -> dict[str, object]:
    dtype = getattr(torch, case.dtype)

    def one(heads: int, seq: int, dim: int) -> torch.Tensor:
        shape = (case.batch, heads, seq, dim)
        if case.stride == "transposed":
            t = torch.zeros((case.batch, seq, heads, dim), dtype=dtype,
                            device=device).transpose(1, 2)
        elif case.stride == "padded":
            t = torch.zeros((*shape[:-1], dim + 8), dtype=dtype, device=device)[..., :dim]
        elif case.stride == "sparse":
            t = torch.zeros((*shape[:-1], dim * 2), dtype=dtype, device=device)[..., ::2]
        elif case.stride == "shifted":         # one element behind an address that is aligned
            t = torch.zeros(torch.Size(shape).numel() + 1, dtype=dtype,
                            device=device)[1:].view(shape)
        else:
            t = torch.zeros(shape, dtype=dtype, device=device)
        return t.requires_grad_(case.grad)

    shape = ((case.seq_q, case.seq_k) if case.mask == "float2d"
             else (case.batch, 1, case.seq_q, case.seq_k))
    mask = None
    if case.mask:
        mask = torch.ones(shape, dtype=torch.bool if case.mask == "bool" else dtype, device=device)
    return {"query": one(case.heads, case.seq_q, case.dim),
            "key": one(case.kv_heads, case.seq_k, case.dim),
            "value": one(case.kv_heads, case.seq_k, case.dim_v), "attn_mask": mask,
            "dropout_p": case.dropout, "is_causal": case.causal}


def refusals(inputs: dict[str, object], backend: str,
             device: dict[str, object]) -> list[tuple[str, tuple]]:
    """Every kernel that is this implementation on CUDA, with the reasons its rules have against the
    call."""
    facts = {**device, **call_facts(ATTENTION, **inputs)}
    every = [k for k in worlds.current().kernels("attention")
             if k.sdpa_backend == backend and k.backend == "torch" and not k.id.endswith("_lse")
             and not k.only_invariant]             # those repeat heads and refuse more themselves
    by_kernel = [(k.id, tuple(k.reasons(facts))) for k in every]
    return [(id, reasons) for id, reasons in by_kernel
            if not any(r.code in (Code.PLATFORM_MISMATCH, Code.VENDOR_MISMATCH) for r in reasons)]


def allowed_by_torch(inputs: dict[str, object], backend: str) -> bool:
    params = torch.backends.cuda.SDPAParams(
        inputs["query"], inputs["key"], inputs["value"], inputs["attn_mask"], inputs["dropout_p"],
        inputs["is_causal"], inputs["query"].shape[1] != inputs["key"].shape[1])
    ask = {"FLASH_ATTENTION": torch.backends.cuda.can_use_flash_attention,
           "EFFICIENT_ATTENTION": torch.backends.cuda.can_use_efficient_attention,
           "CUDNN_ATTENTION": torch.backends.cuda.can_use_cudnn_attention}[backend]
    return bool(ask(params, False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_our_rules_and_torch_agree(backend):
    device = dict(worlds.current().selection_context("cuda", None).device)
    verdicts, strict, wrong = Counter(), Counter(), []
    for case in cases():
        inputs = tensors(case, "cuda")
        theirs = allowed_by_torch(inputs, backend)
        refused = refusals(inputs, backend, device)
        assert refused, f"no kernel of ours is torch's {backend}"
        ours = [id for id, reasons in refused if not reasons]
        verdicts[bool(ours), theirs] += 1
        if ours and not theirs:
            wrong.append(f"{case}: {', '.join(ours)} would serve, torch refuses")
        elif theirs and not ours:
            # The one with the fewest objections is the one that was meant for such a call.
            reasons = min((reasons for _, reasons in refused), key=len)
            unknown = [r for r in reasons if (backend, r.code) not in STRICTER]
            strict.update(r.code for r in reasons)
            if unknown:
                wrong.append(f"{case}: torch allows it, ours say {'; '.join(map(str, unknown))}")
    print(backend, dict(verdicts), {code.value: n for code, n in strict.items()})
    assert not wrong, "\n".join([f"{len(wrong)} of {sum(verdicts.values())} calls:", *wrong[:20]])
    assert (verdicts[True, True] >= 20
            and verdicts[False, False] >= 20), f"nothing was compared: {verdicts}"


@pytest.mark.parametrize("backend", [*BACKENDS, "MATH"])
def test_inside_of_sdpa_kernel_only_that_implementation_serves(backend):
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn((2, 4, 128, 64), device="cuda", dtype=torch.float16, generator=gen)
               for _ in range(3))
    before = lz.which("attention", q, k, v)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        plan = lz.explain("attention", q, k, v)
        out = lz.attention(q, k, v)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    names = {kernel.id: kernel.sdpa_backend for kernel in worlds.current().kernels("attention")}
    assert {names[step.kernel] for step in plan.steps} <= {SDPA, backend}
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    assert lz.which("attention", q, k, v) == before


def test_what_no_allowed_implementation_takes_is_refused_and_nobody_is_blamed():
    q = torch.zeros((1, 2, 16, 64), device="cuda", dtype=torch.float64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
        warnings.simplefilter("ignore")        # torch says why each implementation cannot
        for _ in range(5):
            with pytest.raises(NoKernelFoundError, match="allows only FLASH_ATTENTION"):
                lz.attention(q, q, q)
    assert not worlds.current().health

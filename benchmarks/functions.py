"""LayerZero beside the function of torch that one would write in its place, where torch's own
kernel serves.

Each op is locked to the kernel that is the same operator of ATen, so that what differs is the way
to it: the lookup here, the argument parser of Python there. dispatch.py runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timing import Contestant, Race

import layerzero as lz


@dataclass(frozen=True)
class Pair:
    """`function` written as `by_torch`, and the same as `by_lz`; both call `f` with the names of
    `scope`."""

    op: str
    kernel: str
    function: str
    by_torch: str
    by_lz: str
    scope: dict[str, Any]


def pairs(device: str, dtype: torch.dtype) -> list[Pair]:
    made = torch.Generator("cpu").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(device=device, dtype=dtype)

    q, k, v, x, image = *(randn(1, 1, 4, 16) for _ in range(3)), randn(4, 16), randn(1, 4, 2, 2)
    norm = {"x": x, "shape": (16,), "w": randn(16), "b": randn(16)}
    ids = torch.tensor([1, 5, 3, 3], device=device)
    return [
        Pair("attention", "torch.sdpa", "F.scaled_dot_product_attention", "f(q, k, v)",
             "f(q, k, v)",
             {"q": q, "k": k, "v": v}),
        Pair("attention", "torch.sdpa", "F.scaled_dot_product_attention",
             "f(q, k, v, is_causal=True)",
             "f(q, k, v, is_causal=True)", {"q": q, "k": k, "v": v}),
        Pair("rms_norm", "torch.rms_norm", "F.rms_norm", "f(x, shape, w, 1e-6)", "f(x, w, 1e-6)",
             norm),
        Pair("layer_norm", "torch.layer_norm", "F.layer_norm", "f(x, shape, w, b)", "f(x, w, b)",
             norm),
        Pair("group_norm", "torch.group_norm", "F.group_norm", "f(x, 2)", "f(x, 2)", {"x": image}),
        Pair("linear", "torch.linear", "F.linear", "f(x, w)", "f(x, w)",
             {"x": x, "w": randn(16, 16)}),
        Pair("linear", "torch.linear", "F.linear", "f(x, w, b)", "f(x, w, b)",
             {"x": x, "w": randn(16, 16), "b": randn(16)}),
        Pair("embedding", "torch.embedding", "F.embedding", "f(ids, w)", "f(ids, w)",
             {"ids": ids, "w": randn(8, 16)}),
    ]


def contestants(found: list[Pair]) -> Iterator[Contestant]:
    """Of each pair: torch's function, LayerZero's, and LayerZero's with the kernel named in the
    call."""
    for pair in found:
        function = getattr(F, pair.function.removeprefix("F."))
        ours = getattr(lz, pair.op)
        expect = eval(pair.by_torch, {**pair.scope, "f": function})
        base, mine = _names(pair)
        yield Contestant(base, f"out = {pair.by_torch}",
                         {**_read(pair.by_torch, pair.scope), "f": function})
        scope = {**_read(pair.by_lz, pair.scope), "f": ours}
        yield Contestant(mine, f"out = {pair.by_lz}", scope, base, expect)
        named = f"{pair.by_lz[:-1]}, backend=kernel)"
        yield Contestant(f"{mine} backend=", f"out = {named}", {**scope, "kernel": pair.kernel},
                         mine, expect)


def _names(pair: Pair) -> tuple[str, str]:
    arguments = pair.by_lz.removeprefix("f")
    return pair.function + pair.by_torch.removeprefix("f"), f"lz.{pair.op}{arguments}"


def _read(call: str, scope: dict[str, Any]) -> dict[str, Any]:
    names = compile(call, "<call>", "eval").co_names
    return {name: scope[name] for name in names if name in scope}


def rows(found: list[Pair], race: Race) -> list[dict[str, Any]]:
    out = []
    for pair in found:
        base, mine = _names(pair)
        over, named = race.over(mine), race.over(f"{mine} backend=")
        assert over is not None and named is not None
        out.append({"function": base, "call": mine, "kernel": pair.kernel,
                    "function_ns": race.of(base).to_json(), "call_ns": race.of(mine).to_json(),
                    "over_function": over.to_json(), "backend_over_call": named.to_json()})
    return out


def say(found: list[dict[str, Any]]) -> None:
    print(
        "\nbeside the function of torch: ns (median; p10 .. p90), both over the same operator of "
        "ATen")
    print(f"{'':<46}{'torch':>8}{'lz':>8}{'over torch':>12}{'':>20}{'backend= adds':>15}")
    for row in found:
        over, named = row["over_function"], row["backend_over_call"]
        span = f"{over['p10']:.0f} .. {over['p90']:.0f}"
        print(
            f"{row['function']:<46}{row['function_ns']['median']:>8.0f}{row['call_ns']['median']:>8.0f}"
            f"{over['median']:>12.0f}{span:>20}{named['median']:>15.0f}")

"""Level 5 of the ladder: the same weights, N steps of SGD and AdamW, loss and every parameter against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...models.decoder import Decoder, DecoderConfig, Note, Trace, Weights, cast, make_weights, parts_of
from .plain import Plain, rope_angles
from .route import GRADIENT, TIMES_EAGER, Route, Row, difference
from .served import tables_of

# Steps -> how far parameters and loss may have drifted apart after them.
DRIFT: Mapping[int, tuple[float, float]] = {1: (1e-5, 1e-5), 5: (1e-3, 1e-2), 20: (1e-2, 1e-1)}
LOSS_SCALE = 1024.0        # of float16, with parameters that are kept in float32
CURVE = 0.1                # after more steps: the loss curves stay this close, and both fall
OPTIMIZERS: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    # Above the rounding of a gradient: with 1e-8 one that is zero up to rounding, as that of a key's bias is, moves its
    # parameter by a whole step in an arbitrary direction, in plain torch as well.
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-5)}


def training_routes(c: DecoderConfig, dtype: str, device: str = "cpu", seed: int = 0, steps: int = 5) -> list[Route]:
    kind = getattr(torch, dtype)
    start = cast(make_weights(c, seed), kind, device)
    gen = torch.Generator().manual_seed(seed + 1)
    seq = min(16, c.max_positions - 1)
    texts = torch.randint(0, c.vocab, (steps, 2, seq + 1), generator=gen).to(device)
    # In float16 without it the gradients' squares are zero and AdamW goes astray, in plain torch as well.
    scale = LOSS_SCALE if dtype == "float16" else 1.0
    marks = {*(n for n in DRIFT if n <= steps), *((steps,) if steps <= max(DRIFT) else ())}

    def train(do: Any, optimizer: str, weights: Weights, tables: Any, fused: bool) -> Trace:
        params = {n: t.clone().requires_grad_() for n, t in weights.items()}
        model, trace = Decoder(c, params, do, tables, fused=fused), {}     # type: Decoder, Trace
        kept = {n: t.detach().to(torch.promote_types(t.dtype, torch.float32)) for n, t in params.items()} if (
            scale != 1.0) else params          # what the optimizer steps, as in training with mixed precision
        step = OPTIMIZERS[optimizer](list(kept.values()))
        losses = []
        for n in range(1, steps + 1):
            text = texts[n - 1]
            logits = model(text[:, :-1])
            loss = do("cross_entropy", logits=logits.flatten(0, 1), targets=text[:, 1:].flatten())
            for t in params.values():
                t.grad = None
            (loss * scale).backward()
            for name, t in params.items():
                if scale != 1.0 and t.grad is not None:
                    t.grad = t.grad / scale
                    kept[name].grad = t.grad.to(kept[name].dtype)
            if n == 1:
                trace |= {f"grad {known}": Note(part.clone()) for name, t in params.items() if t.grad is not None
                          for known, part in parts_of(c, name, t.grad).items()}
            step.step()
            with torch.no_grad():
                for name, t in params.items() if scale != 1.0 else ():
                    t.copy_(kept[name])
            losses.append(loss.detach())
            if n in marks:
                trace[f"loss after {n}"] = Note(loss.detach())
                trace |= {f"{known} after {n}": Note(part.detach().clone()) for name, t in params.items()
                          for known, part in parts_of(c, name, t).items()}
        trace["losses"] = Note(torch.stack(losses).double())
        return trace

    def limit(stage: str) -> float:
        if stage.startswith("grad"):
            return GRADIENT
        n = int(stage.rpartition(" ")[2])
        weight, loss = DRIFT[min((m for m in DRIFT if m >= n), default=max(DRIFT))]
        return loss if stage.startswith("loss") else weight

    routes = []
    for optimizer in OPTIMIZERS:
        truth = values_of(train(Plain(), optimizer, cast(start, torch.float64), wide_angles(c, device), False))
        eager = values_of(train(Plain(), optimizer, start, rope_angles(c, device), False)) if dtype != "float32" else {}
        curve, own = truth.pop("losses"), eager.pop("losses", None)
        for form, fused in (("separate", False), ("fused", True)):
            routes.append(Route(
                f"{steps} steps of {optimizer}, {form}", kind,
                lambda do, o=optimizer, f=fused: train(do, o, start, tables_of(c, device), f),  # type: ignore[misc]
                truth, limit, eager, extra=_curves(curve, own) if steps > max(DRIFT) else None,
                scaled=lambda stage: False, jumps=lambda stage: c.jumps))
    return routes


def _curves(want: Tensor, eager: Tensor | None) -> Callable[[Trace], list[Row]]:
    """Beyond the table of drift: the curves stay close, and both go the same way."""
    close = CURVE if eager is None else max(CURVE, TIMES_EAGER * difference(eager, want))

    def rows(trace: Trace) -> list[Row]:
        got = trace["losses"].value
        tenth = max(len(want) // 10, 1)
        falls = [bool(t[-tenth:].mean() < t[:tenth].mean()) for t in (got, want)]
        return [Row("loss curve", difference(got, want), close),
                Row("trend", float(falls[0] != falls[1]), 0.0, text=f"falls: {falls[0]}, plain torch: {falls[1]}")]

    return rows


def wide_angles(c: DecoderConfig, device: str) -> tuple[Tensor, Tensor] | None:
    """The angles of float32, as numbers of float64."""
    made = rope_angles(c, device)
    return None if made is None else (made[0].double(), made[1].double())


def values_of(trace: Trace) -> dict[str, Tensor]:
    return {stage: note.value for stage, note in trace.items()}

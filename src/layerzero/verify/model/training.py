"""Level 5 of the ladder: N steps of SGD and AdamW, every parameter against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...models.decoder import Decoder, StageValue, Trace
from ...models.decoder_config import DecoderConfig, Weights, cast, make_weights, split_parameter
from .plain import PlainTorch, rope_angles
from .route import GRADIENT, TIMES_EAGER, LadderRow, Route, difference
from .served import rope_tables_of

# steps -> allowed drift of (parameters, loss) after them
DRIFT: Mapping[int, tuple[float, float]] = {1: (1e-5, 1e-5), 5: (1e-3, 1e-2), 20: (1e-2, 1e-1)}
LOSS_SCALE = 1024.0        # for float16, with master parameters in float32
CURVE = 0.1                # after more steps: allowed difference of the loss curves
OPTIMIZERS: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    # eps is above the rounding of a gradient: with 1e-8 a gradient that is zero up to rounding, as
    # that of a key's bias, moves its parameter by a whole step in an arbitrary direction, in plain
    # torch as well.
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-5)}


def training_routes(c: DecoderConfig, dtype: str, device: str = "cpu", seed: int = 0,
                    steps: int = 5) -> list[Route]:
    kind = getattr(torch, dtype)
    start = cast(make_weights(c, seed), kind, device)
    gen = torch.Generator().manual_seed(seed + 1)
    seq = min(16, c.max_positions - 1)
    texts = torch.randint(0, c.vocab, (steps, 2, seq + 1), generator=gen).to(device)
    # Without it the squares of float16 gradients are zero and AdamW diverges in torch too.
    scale = LOSS_SCALE if dtype == "float16" else 1.0
    checkpoints = {*(n for n in DRIFT if n <= steps), *((steps,) if steps <= max(DRIFT) else ())}

    def train(do: Any, optimizer: str, weights: Weights, tables: Any, fused: bool) -> Trace:
        params = {n: t.clone().requires_grad_() for n, t in weights.items()}
        model, trace = Decoder(c, params, do, tables, fused=fused), {}     # type: Decoder, Trace
        master_params = ({n: t.detach().to(torch.promote_types(t.dtype, torch.float32))
                          for n, t in params.items()} if (
             scale != 1.0) else params)          # what the optimizer updates, as in mixed precision
        step = OPTIMIZERS[optimizer](list(master_params.values()))
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
                    master_params[name].grad = t.grad.to(master_params[name].dtype)
            if n == 1:
                trace |= {f"grad {part_name}": StageValue(part.clone())
                          for name, t in params.items() if t.grad is not None
                          for part_name, part in split_parameter(c, name, t.grad).items()}
            step.step()
            with torch.no_grad():
                for name, t in params.items() if scale != 1.0 else ():
                    t.copy_(master_params[name])
            losses.append(loss.detach())
            if n in checkpoints:
                trace[f"loss after {n}"] = StageValue(loss.detach())
                trace |= {f"{part_name} after {n}": StageValue(part.detach().clone())
                          for name, t in params.items()
                          for part_name, part in split_parameter(c, name, t).items()}
        trace["losses"] = StageValue(torch.stack(losses).double())
        return trace

    def limit(stage: str) -> float:
        if stage.startswith("grad"):
            return GRADIENT
        n = int(stage.rpartition(" ")[2])
        weight, loss = DRIFT[min((m for m in DRIFT if m >= n), default=max(DRIFT))]
        return loss if stage.startswith("loss") else weight

    routes = []
    for optimizer in OPTIMIZERS:
        truth = values_of(train(PlainTorch(), optimizer, cast(start, torch.float64),
                                rope_angles_float64(c, device), False))
        eager = {} if dtype == "float32" else values_of(
            train(PlainTorch(), optimizer, start, rope_angles(c, device), False))
        curve, eager_curve = truth.pop("losses"), eager.pop("losses", None)
        for form, fused in (("separate", False), ("fused", True)):
            routes.append(
                Route(
                    f"{steps} steps of {optimizer}, {form}",
                    kind,
                    lambda do, o=optimizer, f=fused: train(do, o, start, rope_tables_of(c, device),
                                                           f),  # type: ignore[misc]
                    truth,
                    limit,
                    eager,
                    extra=_curves(curve, eager_curve) if steps > max(DRIFT) else None,
                    scaled=lambda stage: False,
                    jumps=lambda stage: c.jumps,
                )
            )
    return routes


def _curves(want: Tensor, eager: Tensor | None) -> Callable[[Trace], list[LadderRow]]:
    """Returns rows for runs longer than DRIFT: loss curves stay close, with one trend."""
    limit = CURVE if eager is None else max(CURVE, TIMES_EAGER * difference(eager, want))

    def rows(trace: Trace) -> list[LadderRow]:
        got = trace["losses"].value
        tenth = max(len(want) // 10, 1)
        falls = [bool(t[-tenth:].mean() < t[:tenth].mean()) for t in (got, want)]
        return [
            LadderRow("loss curve", difference(got, want), limit),
            LadderRow("trend", float(falls[0] != falls[1]), 0.0,
                      text=f"falls: {falls[0]}, plain torch: {falls[1]}"),
        ]

    return rows


def rope_angles_float64(c: DecoderConfig, device: str) -> tuple[Tensor, Tensor] | None:
    """Returns the float32 angles cast to float64."""
    angles = rope_angles(c, device)
    return None if angles is None else (angles[0].double(), angles[1].double())


def values_of(trace: Trace) -> dict[str, Tensor]:
    return {stage: note.value for stage, note in trace.items()}

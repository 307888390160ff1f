"""The verification ladder from a layer to training: levels 2 to 5. Level 1, single kernels, is
certify.py.

    2  a whole layer: every stage, every gradient, and prefill + decode against the full forward
    3  each layer of a model alone, stage by stage, from its real input
    4  a whole model: logits, and the likeliest token at each position
    5  training: the same weights, N steps of SGD and AdamW, loss and every parameter

The expected values are plain torch in float64 over the same numbers (plain.py), or a trace of
another library. For a failure culprit.py finds the stage and the kernel.

The limits are those of the parity tables in docs/verification.md; inside a layer they scale with
values above one (route.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.decoder import STAGES, CachedKV, ConcatKV, Decoder, PastKV, StageValue, Trace
from ...models.decoder_config import CONFIGS, DecoderConfig, Weights, cast, make_weights
from ...spec.codec import encode
from ...spec.errors import ConfigError, KernelExecutionError, NoKernelFoundError
from .culprit import Culprit, find
from .plain import PlainTorch, rope_angles
from .route import GRADIENT, LAYER, LOGITS, TIMES_EAGER, LadderRow, Route, allowed, rms_difference
from .served import LzCaller, rope_tables_of
from .training import rope_angles_float64, training_routes, values_of


class Effort(NamedTuple):
    """What a lane tries."""

    configs: tuple[str, ...]
    dtypes: tuple[str, ...]
    seq: int
    steps: int
    seeds: int


EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(("tiny", "gqa"), ("float32", "bfloat16"), 24, 5, 1),
    "full": Effort(tuple(CONFIGS), ("float32", "bfloat16", "float16"), 40, 20, 1),
    "stress": Effort(tuple(CONFIGS), ("float32", "bfloat16", "float16"), 160, 100, 3),
}


class LadderModel(NamedTuple):
    """Weights in float32 and tokens for levels 3 and 4. `truth`: a trace of another library, by
    default plain torch; `fused`: as few calls as possible instead of one per stage."""

    name: str
    config: DecoderConfig
    weights: Weights
    tokens: Tensor
    truth: Mapping[str, Tensor] | None = None
    truth_name: str = "plain torch in float64"
    fused: bool = False


@dataclass(frozen=True)
class Rung:
    """The result of one level for one model at one dtype."""

    level: int
    name: str
    dtype: str
    status: str                                # passed | failed | not served
    rows: tuple[LadderRow, ...] = ()
    # route -> its rows
    tables: Mapping[str, tuple[LadderRow, ...]] = field(default_factory=dict)
    kernels: Mapping[tuple[str, str], int] = field(default_factory=dict)     # (op, kernel) -> calls
    named: str = ""
    served: int = 0                            # calls that `named` has served
    # op -> why `named` could not serve
    refused: Mapping[str, str] = field(default_factory=dict)
    culprit: Culprit | None = None
    problem: str = ""
    against: str = "plain torch in float64"

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def worst(self) -> LadderRow | None:
        """The row nearest to its limit, or furthest beyond."""
        return max(self.rows, key=lambda row: (not row.ok, row.ratio), default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level, "name": self.name, "dtype": self.dtype, "status": self.status,
            "against": self.against, "problem": self.problem, "named": self.named,
            "served": self.served, "refused": dict(self.refused),
            "tables": encode(self.tables),
            "kernels": [{"op": op, "kernel": kernel, "calls": n}
                        for (op, kernel), n in self.kernels.items()],
            "culprit": encode(self.culprit)}

    def __str__(self) -> str:
        head = f"level {self.level}, {self.name}, {self.dtype}: {self.status}"
        if self.problem:
            head += f": {self.problem}"
        elif self.worst is not None:
            head += (f" ({len(self.rows)} comparisons with {self.against}; nearest to its limit: "
                     f"{self.worst})")
        if self.named:
            head += f"\n  {self.named} served {self.served} calls"
            head += "".join(f"\n  it could not serve some of lz.{op}: {why}"
                            for op, why in self.refused.items())
        return head + (f"\n{self.culprit}" if self.culprit else "")


def climb(level: int, *, configs: Sequence[tuple[str, DecoderConfig]] = (),
          dtypes: Sequence[str] = (), effort: str = "quick", named: str = "", device: str = "cpu",
          seed: int = 0, steps: int = 0, model: LadderModel | None = None) -> Iterator[Rung]:
    """Yields every rung of a level. Levels 3 and 4 run `model` if given, else random weights."""
    if level not in (2, 3, 4, 5):
        raise ConfigError(f"the ladder's levels here are 2 to 5, got {level}")
    if effort not in EFFORTS:
        raise ConfigError(f"the effort is one of {', '.join(EFFORTS)}; got {effort!r}")
    plan = EFFORTS[effort]
    shapes = tuple(configs) or tuple((name, CONFIGS[name]) for name in plan.configs)
    use_model = model is not None and level in (3, 4)
    for dtype in dtypes or (("float32",) if use_model and effort == "quick" else plan.dtypes):
        if use_model:
            assert model is not None
            yield judge(level, model.name, dtype, _model_routes(level, model, dtype, device), named,
                        model.truth_name)
            continue
        for name, config in shapes:
            for s in range(seed, seed + plan.seeds):
                seq = min(plan.seq, config.max_positions)
                if level == 2:
                    routes = layer_routes(config, dtype, device, s, seq)
                elif level == 5:
                    routes = training_routes(config, dtype, device, s, steps or plan.steps)
                else:
                    routes = _model_routes(level, random_model(name, config, s, seq), dtype, device)
                yield judge(level, name if plan.seeds == 1 else f"{name}, seed {s}", dtype, routes,
                            named)


def random_model(name: str, config: DecoderConfig, seed: int = 0, seq: int = 24) -> LadderModel:
    gen = torch.Generator().manual_seed(seed + 1)
    return LadderModel(
        name, config, make_weights(config, seed),
        torch.randint(0, config.vocab, (2, seq), generator=gen)
    )


def judge(level: int, name: str, dtype: str, routes: Sequence[Route], named: str = "",
          against: str = "plain torch in float64") -> Rung:
    """Runs the routes with lz, and finds the culprit of the first that fails."""
    counts: Counter[tuple[str, str]] = Counter()
    refused: dict[str, str] = {}
    tables: dict[str, tuple[LadderRow, ...]] = {}
    culprit, problem, served = None, "", 0
    for route in routes:
        caller = LzCaller(named)
        try:
            tables[route.name] = tuple(route.rows(route.run(caller)))
        except (KernelExecutionError, NoKernelFoundError) as e:
            problem = f"{route.name}: {e}"
        counts += caller.counts
        served += caller.served
        refused = {**caller.refused, **refused}
        if problem or not all(row.ok for row in tables[route.name]):
            culprit = None if problem else find(route, named)
            break
    rows = tuple(row for table in tables.values() for row in table)
    failed = bool(problem) or not all(row.ok for row in rows)
    status = "failed" if failed else "not served" if named and not served else "passed"
    if status == "not served":
        problem = f"{named} served no call of this level, so nothing was shown of it"
    return Rung(level, name, dtype, status, rows, tables, counts, named, served, refused, culprit,
                problem, against)


# Level 2.

def layer_routes(c: DecoderConfig, dtype: str, device: str = "cpu", seed: int = 0,
                 seq: int = 24) -> list[Route]:
    """Returns the routes of one layer: forward, backward, fused; prefill + decode, 3 caches."""
    kind = getattr(torch, dtype)
    weights = cast({n: t for n, t in make_weights(c, seed).items() if n.startswith("0.")}, kind,
                   device)
    weights["norm"] = torch.ones(c.hidden, dtype=kind, device=device)
    gen = torch.Generator().manual_seed(seed + 1)
    x, output_grad = (torch.randn(2, seq, c.hidden, generator=gen).to(device, kind)
                      for _ in range(2))

    def whole(do: Any, w: Weights, x: Tensor, output_grad: Tensor, tables: Any,
              fused: bool) -> Trace:
        trace: Trace = {}
        leaves = {"x": x.detach().requires_grad_(),
                  **{n: t.detach().requires_grad_() for n, t in w.items()}}
        model = Decoder(c, leaves, do, tables, fused=fused, trace=trace)
        out = model.layer(0, leaves["x"], model.positions(seq))
        used = {n: t for n, t in leaves.items() if n != "norm"}
        for name, grad in zip(used, torch.autograd.grad(out, list(used.values()), output_grad)):
            trace[f"grad {name}"] = StageValue(grad)
        return trace

    exact = whole(PlainTorch(), cast(weights, torch.float64, device), x.double(),
                  output_grad.double(), rope_angles_float64(c, device), False)
    truth = values_of(exact)
    eager = {} if dtype == "float32" else values_of(
        whole(PlainTorch(), weights, x, output_grad, rope_angles(c, device), False))
    # which elements change sides is chance: the worst of several
    if eager and c.jumps:
        noise = (torch.randn(x.shape, generator=gen).sign().to(x) * torch.finfo(kind).eps
                 for _ in range(6))
        eager_runs = [eager,
                      *(values_of(whole(PlainTorch(), weights, x * (1 + n), output_grad,
                                        rope_angles(c, device), False))
                        for n in noise)]
        eager = {stage: max((t[stage] for t in eager_runs),
                            key=lambda t: rms_difference(t, truth[stage]))
                 if stage.startswith("grad") else value for stage, value in eager.items()}

    def limit(stage: str) -> float:
        return GRADIENT if stage.startswith("grad") else LAYER

    routes = [Route(f"forward and backward, {form}", kind, lambda do, fused=fused: whole(  # type: ignore[misc]
        do, weights, x, output_grad, rope_tables_of(c, device), fused), truth, limit, eager,
        jumps=lambda stage: c.jumps and stage.startswith("grad"))
        for form, fused in (("separate", False), ("fused", True))]
    for cache_kind in ("grown", "contiguous", "paged"):
        routes.append(_decoding(c, weights, x, cache_kind, device, truth, eager))
    return routes


def _decoding(c: DecoderConfig, weights: Weights, x: Tensor, cache_kind: str, device: str,
              truth: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> Route:
    """Returns a route of a prompt, some tokens, then single ones, against the full forward."""
    batch, seq = x.shape[:2]
    steps = _steps(seq, seq // 2)

    def run(do: LzCaller) -> Trace:
        past: PastKV = (ConcatKV(c) if cache_kind == "grown"
                        else CachedKV(c, cache_kind, batch, seq, x.dtype, device))
        trace: Trace = {}
        model = Decoder(c, weights, do, rope_tables_of(c, device), fused=True, trace=trace)
        with torch.no_grad():
            for a, b in steps:
                model.prefix = _step_prefix(a, b)
                model.layer(0, x[:, a:b], model.positions(b - a, past), past)
                past.length += b - a
        return _unpack(trace, batch)

    expected = _slice_steps(truth, steps)
    return Route(f"prefill + decode, {cache_kind}", x.dtype, run, expected, lambda stage: LAYER,
                 _slice_steps(eager, steps),
                 [s for s in expected if s.endswith(" 0.output")])


def _steps(seq: int, prompt: int) -> list[tuple[int, int]]:
    """Returns (start, end) of each step: the prompt, a few tokens, single ones."""
    bounds = sorted({0, prompt, *range(min(prompt + 4, seq), seq + 1)})
    return list(itertools.pairwise(bounds))


def _step_prefix(a: int, b: int) -> str:
    return f"tokens {a}-{b - 1}, "


def _slice_steps(values: Mapping[str, Tensor],
                 steps: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Slices each stage of a whole sequence into steps."""
    stages = [s for s in values if not s.endswith(".scores")
              and not s.startswith(("grad", "learned"))]
    return {_step_prefix(a, b) + s: values[s][:, a:b] for a, b in steps for s in stages}


def _unpack(trace: Trace, batch: int) -> Trace:
    """Reshapes the packed tokens of paged attention to (batch, seq, ...)."""
    return {stage: replace(note, value=note.value.unflatten(0, (batch, -1)))
            if note.op == "paged_attention" else note
            for stage, note in trace.items()}


# Levels 3 and 4.

def _model_routes(level: int, model: LadderModel, dtype: str, device: str) -> list[Route]:
    truth = model.truth
    if truth is None:
        wide_weights = cast(cast(model.weights, getattr(torch, dtype), device), torch.float64)
        truth = values_of(_forward(model, wide_weights, PlainTorch(),
                                   rope_angles_float64(model.config, device), device)[1])
    return (stage_routes if level == 3 else forward_routes)(model, dtype, truth, device)


def _forward(model: LadderModel, weights: Weights, do: Any, tables: Any,
             device: str) -> tuple[Tensor, Trace]:
    trace: Trace = {}
    with torch.no_grad():
        logits = Decoder(model.config, weights, do, tables, fused=model.fused,
                         trace=trace)(model.tokens.to(device))
    return logits, trace


def stage_routes(model: LadderModel, dtype: str, truth: Mapping[str, Tensor],
                 device: str = "cpu") -> list[Route]:
    """Returns a route for each layer alone, from its input in `truth`."""
    c, kind = model.config, getattr(torch, dtype)
    weights = cast(model.weights, kind, device)

    def layer_route(i: int) -> Route:
        x = truth[f"{i}.input"].to(device, kind)

        def run(do: Any, tables: Any = None) -> Trace:
            trace: Trace = {}
            decoder = Decoder(c, weights, do, tables or rope_tables_of(c, device),
                              fused=model.fused, trace=trace)
            with torch.no_grad():
                decoder.layer(i, x, decoder.positions(x.shape[1]))
            return trace

        stages = [f"{i}.{s}" for s in (*STAGES, "mlp_out") if f"{i}.{s}" in truth]
        layer_truth = {s: t for s, t in truth.items() if s.startswith(f"{i}.")}
        eager = values_of(run(PlainTorch(), rope_angles(c, device))) if dtype != "float32" else {}
        return Route(f"layer {i}", kind, run, layer_truth, lambda stage: LAYER, eager, stages)

    return [layer_route(i) for i in range(c.layers)]


def forward_routes(model: LadderModel, dtype: str, truth: Mapping[str, Tensor],
                   device: str = "cpu") -> list[Route]:
    """Returns the routes of the whole model: all tokens at once, and prompt plus tokens."""
    c, kind = model.config, getattr(torch, dtype)
    weights = cast(model.weights, kind, device)
    eager = {} if dtype == "float32" else values_of(
        _forward(model, weights, PlainTorch(), rope_angles(c, device), device)[1])
    batch, seq = model.tokens.shape
    steps = _steps(seq, max(seq - 8, 1))

    def stepwise(do: LzCaller) -> Trace:
        trace: Trace = {}
        past = CachedKV(c, "contiguous", batch, seq, kind, device)
        run = Decoder(c, weights, do, rope_tables_of(c, device), fused=True, trace=trace)
        with torch.no_grad():
            for a, b in steps:
                run.prefix = _step_prefix(a, b)
                run(model.tokens[:, a:b].to(device), past)
        return trace

    def likeliest(trace: Trace) -> list[LadderRow]:
        got = torch.cat([note.value for stage, note in trace.items() if stage.endswith("logits")],
                        1)
        tolerance = allowed(kind, truth["logits"], eager.get("logits"), LOGITS, scaled=False)
        return likeliest_rows(got, truth["logits"].to(got.device), tolerance, eager.get("logits"))

    def limit(stage: str) -> float:
        return LOGITS

    expected = _slice_steps(truth, steps)
    return [
        Route("forward", kind,
              lambda do: _forward(model, weights, do, rope_tables_of(c, device), device)[1], truth,
              limit, eager, ("logits",), likeliest),
        Route("prefill + decode", kind, stepwise, expected, limit, _slice_steps(eager, steps),
              [s for s in expected if s.endswith(" logits")], likeliest)]


def likeliest_rows(got: Tensor, want: Tensor, tolerance: float,
                   eager: Tensor | None) -> list[LadderRow]:
    """Returns rows for the top-1 of all positions and of each, and the mean KL divergence.

    In 16 bits the top-1 may differ where the best two are closer than twice the tolerance, and KL
    may be twice eager's.
    """
    best = want.double().topk(2).values
    tokens, expected = got.argmax(-1), want.argmax(-1)
    differs = tokens != expected
    too_close = (best[..., 0] - best[..., 1] <= 2 * tolerance if eager is not None
                 else torch.zeros_like(differs))
    wrong = differs & ~too_close
    wrong_positions = tuple(tuple(int(i) for i in index) for index in wrong.nonzero()[:3].tolist())
    text = f"{int((~differs).sum())} of {differs.numel()} positions equal"
    bound = TIMES_EAGER * kl(eager, want) + 1e-6 if eager is not None else 1e-6
    each = [LadderRow(f"top-1 at {i}, {n}", float(differs[i, n]), float(too_close[i, n]),
                text=f"{int(tokens[i, n])}, wanted {int(expected[i, n])}")
            for i in range(differs.shape[0]) for n in range(differs.shape[1])]
    return [LadderRow("top-1", float(wrong.sum()), 0.0, worst=wrong_positions, text=text),
            LadderRow("mean KL", kl(got, want), bound, eager=kl(eager, want) if eager is not None
                      else None), *each]


def kl(got: Tensor, want: Tensor) -> float:
    """Returns the mean over positions of KL(want || got)."""
    p, q = (t.double().log_softmax(-1) for t in (want, got))
    return max(float((p.exp() * (p - q)).sum(-1).mean()), 0.0)


__all__ = ["EFFORTS", "LadderModel", "Rung", "climb", "forward_routes", "judge", "kl",
           "layer_routes", "likeliest_rows", "random_model", "stage_routes", "training_routes"]

"""Tokens that were drawn cannot be compared one by one: their distribution can.

The filters are computed again by torch, in float64. A drawn token must be one that they leave;
where they leave one, it is that. Every row is drawn from several times, and no token comes much
more or less often than its probability says. And lz.sample, given evenly spaced random numbers,
must draw each token as often as its probability says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...comparison import ComparisonVerdict, ElementDifference, Metrics
from .answer import Answer, Inputs, lz

DRAWS = 64                                     # evenly spaced numbers for one row
REPEATS, MAX_NUMBERS = 128, 1 << 22           # of a row; of all rows together
EXPECTED = 12.0                                # draws of a token that comes at least once, surely
COLUMNS = 1024                                 # of the vocabulary, for the frequencies
# of the mass: whether a token on the edge of top-p stays is rounding
ROUNDING = 1e-5


def column(value: Any, rows: int, default: float) -> Tensor:
    """A filter as one number for each row."""
    if value is None:
        return torch.full((rows, 1), default, dtype=torch.float64)
    values = torch.as_tensor(value).detach().cpu().double().reshape(-1, 1)
    return values.expand(rows, 1)


def filtered(rows: Tensor, top_k: Any, top_p: Any, min_p: Any, temperature: Any, probs: bool,
             slack: float) -> Tensor:
    """What is left of each row, not normalised: top_k first, of these top_p, then min_p."""
    n, vocab = rows.shape
    weights = rows.detach().cpu().double()
    if not probs:
        warm = column(temperature, n, 1.0)
        weights = (weights / torch.where(warm > 0, warm, 1e-6)).softmax(-1)
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    k = column(top_k, n, 0.0)
    k = torch.where((k > 0) & (k < vocab), k, float(vocab))
    ranked = torch.where(torch.arange(vocab) < k, ranked, 0.0)
    p, total = column(top_p, n, 1.0), ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    first = torch.arange(vocab) == 0
    ranked = torch.where((before < (p + slack) * total) & ((p > 0) | first) | first, ranked, 0.0)
    ranked = torch.where(ranked >= column(min_p, n, 0.0) * ranked[:, :1] * (1 - slack), ranked, 0.0)
    return torch.zeros_like(ranked).scatter_(1, order, ranked)


def of(answer: Answer, x: Inputs, slack: float) -> Tensor:
    """What the filters of a call leave of the row of each token."""
    r = answer.roles
    filters = {name: x[r[name]] if name in r else None
               for name in ("top_k", "top_p", "min_p", "temperature")}
    drawn_from = x[r["rows"]][x[r["picked"]].long()] if r["picked"] else x[r["rows"]]
    return filtered(drawn_from, probs=r["probs"], slack=slack, **filters)


def repeated(answer: Answer, x: Inputs) -> tuple[dict[str, Any], int]:
    """The inputs with every row several times, and how often: at most REPEATS."""
    r, specs = answer.roles, answer.definition.inputs
    times = max(1, min(REPEATS, MAX_NUMBERS // max(x[r["rows"]].numel(), 1)))
    axis = (specs[r["picked"] or r["rows"]].shape or ("",))[0]
    return {n: v.repeat_interleave(times, 0) if isinstance(v, Tensor) and v.dim()
            and (specs[n].shape or ("",))[0] == axis else v for n, v in x.items()}, times


def often(answer: Answer, x: Inputs, tokens: Tensor, times: int) -> ComparisonVerdict:
    """Do tokens that were drawn `times` from each row come as often as they should? Judged by the
    largest distance of cumulative frequencies, which chance exceeds once in 100,000 rows, and by
    likely tokens that never come."""
    out, weights = answer.roles["out"], of(answer, x, 0.0)[::times]
    order = weights.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(
        order.shape[1]).expand_as(order))
    drawn = ranks.gather(1, tokens.detach().cpu().long().view(-1, times).clamp(
        0, order.shape[1] - 1))
    counts = torch.zeros_like(weights).scatter_add_(1, drawn, torch.ones(
        drawn.shape, dtype=weights.dtype))
    shares = weights.gather(1, order) / weights.sum(-1, keepdim=True)
    missing = ((counts == 0) & (shares * times > EXPECTED)).nonzero()
    if len(missing):
        row, rank = missing[0].tolist()
        return ComparisonVerdict(
            out, "INCORRECT_NUMERICAL", Metrics(max_abs=float(shares[row, rank])),
            f"token {int(order[row, rank])} of row {row} has the probability "
            f"{float(shares[row, rank]):.3g} and never came in {times} draws")
    gaps = (counts.cumsum(-1) / times - shares.cumsum(-1)).abs().amax(-1)
    worst, allowed = float(gaps.max()) if gaps.numel() else 0.0, 2.5 / times ** 0.5
    at = int(gaps.argmax()) if gaps.numel() else 0
    passed = worst <= allowed
    return ComparisonVerdict(
        out, "passed" if passed else "INCORRECT_NUMERICAL", Metrics(max_abs=worst),
        f"{times} draws of each row, cumulative frequencies in row {at} are {worst:.3g} from the "
        f"probabilities, allowed are {allowed:.3g}")


def possible(answer: Answer, x: Inputs, tokens: Tensor) -> ComparisonVerdict:
    """Is every token one that the filters leave?"""
    out = answer.roles["out"]
    weights = of(answer, x, ROUNDING)
    tokens = tokens.detach().cpu().long()
    if tokens.shape != weights.shape[:1]:
        return ComparisonVerdict(
            out, "INCORRECT_SHAPE",
            detail=f"shape {tuple(tokens.shape)}, wanted {tuple(weights.shape[:1])}"
        )
    inside = (tokens >= 0) & (tokens < weights.shape[1])
    good = inside & (weights.gather(1, tokens.clamp(0, weights.shape[1] - 1)[:, None])[:, 0] > 0)
    bad = (~good).nonzero().flatten().tolist()
    likeliest = weights.argmax(-1)
    worst = tuple(ElementDifference((i,), float(tokens[i]), float(likeliest[i])) for i in bad[:5])
    share = float(good.double().mean()) if len(good) else 1.0
    if bad:
        return ComparisonVerdict(out, "INCORRECT_NUMERICAL", Metrics(hit_ratio=share, worst=worst),
                       f"{len(bad)} of {len(good)} tokens are none that the filters leave, first "
                       f"in row {bad[0]}: {int(tokens[bad[0]])}")
    single = int((weights > 0).sum(-1).eq(1).sum())
    return ComparisonVerdict(
        out, "passed", Metrics(hit_ratio=share),
        f"{len(good)} tokens possible, {single} of them certain"
    )


def frequencies(answer: Answer, x: Inputs, step: int = 1) -> ComparisonVerdict:
    """lz.sample over evenly spaced numbers, on the first columns of every `step`-th row."""
    r = answer.roles
    rows = x[r["rows"]][:, :COLUMNS].contiguous()
    worst, at = 0.0, 0
    for i in range(0, len(rows), step):
        filters = {name: torch.as_tensor(x[r[name]]).reshape(-1)[
            i % torch.as_tensor(x[r[name]]).numel()].item()
                   for name in ("top_k", "top_p", "min_p", "temperature") if name in r}
        filters["top_k"] = (int(filters.get("top_k", 0))
                            if int(filters.get("top_k", 0)) < rows.shape[1] else 0)
        spaced = (torch.arange(DRAWS, device=rows.device, dtype=torch.float64) + 0.5) / DRAWS
        drawn = lz("sample", logits=rows[i].expand(DRAWS, -1).contiguous(), from_probs=r["probs"],
                   uniforms=spaced, **filters)
        exact = filtered(rows[i:i + 1], filters["top_k"], filters.get("top_p"),
                         filters.get("min_p"), filters.get("temperature"), r["probs"], 0.0)[0]
        counted = torch.bincount(drawn.cpu(), minlength=rows.shape[1]).double() / DRAWS
        gap = float((counted.cumsum(0) - (exact / exact.sum()).cumsum(0)).abs().max())
        worst, at = (gap, i) if gap > worst else (worst, at)
    metrics, allowed = Metrics(max_abs=worst), 1.0 / DRAWS + 1e-3
    if worst > allowed:
        return ComparisonVerdict(
            r["out"],
            "INCORRECT_NUMERICAL",
            metrics,
            f"cumulative frequencies in row {at} are {worst:.3g} from the probabilities, allowed "
            f"are {allowed:.3g}",
        )
    return ComparisonVerdict(r["out"], "passed", metrics,
                             f"frequencies within {worst:.3g} of the probabilities")

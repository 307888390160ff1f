"""Tokens that were drawn cannot be compared one by one: their distribution can.

The filters are computed again by torch, in float64. A drawn token must be one that they leave;
where they leave one, it is that. Every row is drawn from many times, and no token comes more or
less often than chance allows with its probability. And lz.sample, given evenly spaced random
numbers, must draw each token as often as its probability says.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...comparison import ComparisonVerdict, ElementDifference, Metrics
from .answer import Answer, Inputs, lz

DRAWS = 64                                     # evenly spaced numbers for one row
REPEATS, MAX_NUMBERS = 512, 1 << 22           # of a row; of all rows together
# fewer draws tell nothing of frequencies; so many show whether tokens are possible
MIN_REPEATS, FEW_REPEATS = 32, 4
FALSE_ALARM = 1e-6                             # of all tests of one definition together
TINY = 1e-300                                  # of a token that may be kept as well as its equals
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
    inside = (before < (p + slack) * total) & (p > 0) | (p >= 1)
    ranked = torch.where(inside | first, ranked, 0.0)
    ranked = torch.where(ranked >= column(min_p, n, 0.0) * ranked[:, :1] * (1 - slack), ranked, 0.0)
    return torch.zeros_like(ranked).scatter_(1, order, ranked)


def of(answer: Answer, x: Inputs, slack: float) -> Tensor:
    """What the filters of a call leave of the row of each token."""
    r = answer.roles
    filters = {name: x[r[name]] if name in r else None
               for name in ("top_k", "top_p", "min_p", "temperature")}
    drawn_from = x[r["rows"]][x[r["picked"]].long()] if r["picked"] else x[r["rows"]]
    return filtered(drawn_from, probs=r["probs"], slack=slack, **filters)


def repeated(answer: Answer, x: Inputs, few: int = FEW_REPEATS) -> tuple[dict[str, Any], int]:
    """The inputs with every row several times, and how often: at most REPEATS; `few` where so many
    are too much."""
    times = max(1, min(REPEATS, MAX_NUMBERS // max(x[answer.roles["rows"]].numel(), 1)))
    times = times if times >= MIN_REPEATS else min(times, few)
    per_row = inputs_per_token(answer, x)
    return {n: v.repeat_interleave(times, 0) if n in per_row else v for n, v in x.items()}, times


def inputs_per_token(answer: Answer, x: Inputs) -> set[str]:
    """Which inputs have something for each token that is drawn."""
    r, specs = answer.roles, answer.definition.inputs
    axis = (specs[r["picked"] or r["rows"]].shape or ("",))[0]
    return {n for n, v in x.items() if isinstance(v, Tensor) and v.dim()
            and (specs[n].shape or ("",))[0] == axis}


def _shares(answer: Answer, x: Inputs) -> tuple[Tensor, Tensor]:
    """The probability of every token, and in which rows it is beyond doubt: where a token lies on
    the edge of a filter, rounding decides whether it stays."""
    weights = of(answer, x, 0.0)
    kept = weights > 0
    sure = ((of(answer, x, ROUNDING) > 0) == (of(answer, x, -ROUNDING) > 0)).all(-1)
    r = answer.roles
    rows = (x[r["rows"]][x[r["picked"]].long()] if r["picked"] else x[r["rows"]]).cpu().double()
    least = rows.masked_fill(~kept, math.inf).amin(-1)
    sure &= least > rows.masked_fill(kept, -math.inf).amax(-1)      # of equals, any may be kept
    return weights / weights.sum(-1, keepdim=True), sure


def often(answer: Answer, x: Inputs, tokens: Tensor, times: int) -> ComparisonVerdict:
    """Do tokens that were drawn `times` from each row come as often as they should?

    Every token is counted, and the r likeliest together for every r. Of n draws at least (or at
    most) a share s falls where p was expected with a probability <= exp(-n KL(s, p)) (Chernoff), at
    any n: tests of a right sampler together fail once in 1 / FALSE_ALARM."""
    out, per_row = answer.roles["out"], inputs_per_token(answer, x)
    shares, sure = _shares(answer, {n: v[::times] if n in per_row else v for n, v in x.items()})
    shares, order = shares.sort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(
        order.shape[1]).expand_as(order))
    drawn = ranks.gather(1, tokens.detach().cpu().long().view(-1, times).clamp(
        0, order.shape[1] - 1))
    counts = torch.zeros_like(shares).scatter_add_(1, drawn, torch.ones(
        drawn.shape, dtype=shares.dtype))
    seen, wanted = (torch.cat((t, t.cumsum(-1)), -1) for t in (counts / times, shares))
    surprise = times * _divergence(seen.clamp(max=1.0), wanted.clamp(max=1.0))
    surprise = surprise.masked_fill(~sure[:, None], 0.0)
    allowed = math.log(2 * max(surprise.numel(), 1) / FALSE_ALARM)
    worst = float(surprise.max()) if surprise.numel() else 0.0
    row, cell = divmod(int(surprise.argmax()), surprise.shape[1]) if surprise.numel() else (0, 0)
    rank, several = cell % max(shares.shape[1], 1), cell >= shares.shape[1]
    found = (f"{times} draws of each of {int(sure.sum())} rows: the {rank + 1} likeliest tokens"
             if several else f"{times} draws of each of {int(sure.sum())} rows: token "
             f"{int(order[row, rank]) if surprise.numel() else 0}")
    gap = float((seen - wanted).abs()[sure].max()) if bool(sure.any()) else 0.0
    if worst <= allowed:
        return ComparisonVerdict(out, "passed", Metrics(max_abs=gap),
                                 f"{times} draws of each of {int(sure.sum())} rows come as often "
                                 f"as the probabilities say, within {gap:.3g}")
    return ComparisonVerdict(
        out, "INCORRECT_NUMERICAL", Metrics(max_abs=gap),
        f"{found} of row {row} came {float(seen[row, cell]) * times:.0f} times, "
        f"{float(wanted[row, cell]) * times:.1f} were expected; a right sampler does so once in "
        f"1e{worst / math.log(10):.0f}")


def _divergence(seen: Tensor, wanted: Tensor) -> Tensor:
    """Kullback-Leibler divergence of two coins."""
    def part(s: Tensor, w: Tensor) -> Tensor:
        return torch.where(s > 0, s * (s / w.clamp(min=1e-300)).log(), 0.0)

    return part(seen, wanted) + part(1 - seen, 1 - wanted)


def left_of(answer: Answer, x: Inputs, times: int = 1) -> Tensor:
    """What the filters leave of the row of each token, with a token on the edge, and with those
    that equal the least one: of equals any may be kept. Every row comes `times` in succession."""
    per_row, r = inputs_per_token(answer, x), answer.roles
    each = {n: v[::times] if n in per_row else v for n, v in x.items()}
    left = of(answer, each, ROUNDING)
    rows = (each[r["rows"]][each[r["picked"]].long()] if r["picked"] else each[r["rows"]]).cpu()
    least = rows.double().masked_fill(left <= 0, math.inf).amin(-1, keepdim=True)
    return torch.where(rows == least, left.clamp(min=TINY), left).repeat_interleave(times, 0)


def possible(answer: Answer, x: Inputs, tokens: Tensor,
             left: Tensor | None = None) -> ComparisonVerdict:
    """Is every token one that the filters leave? `left` is left_of() the same inputs."""
    out = answer.roles["out"]
    weights = left_of(answer, x) if left is None else left
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

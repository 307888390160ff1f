"""What each case of the list takes on this GPU, by every kernel that can serve it, and whether the
goal is met.

    python benchmarks/gpu.py --goals
        less than a minute, where what FlashInfer needs is compiled or left out

The goals are for an H200: bfloat16, 32 query heads, 8 KV heads, head dimension 128. "Ours" is the
fastest kernel that is written here, checked against its contract in the same sizes; "chosen" is
what selection takes after measuring.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import dispatch
import torch
import torch.nn.functional as F
from gpu_libraries import ERRORS, candidates, captured, timed, uncompiled
from regret import keep
from timing import race
from torch import Tensor

import layerzero as lz
from layerzero.backends import flashinfer
from layerzero.machine.loading import is_importable
from layerzero.tuning.regret import replay
from layerzero.tuning.tuner import tune
from layerzero.tuning.workload import calls_for
from layerzero.verify.kernel.contract import case_values, check_case
from layerzero.world import context
from layerzero.world import snapshot as worlds

OURS = ("triton", "cuda")                      # backends whose kernels are written here
HEADS = {"hq": 32, "hkv": 8, "d": 128}
LATE = {"causal": True, "align": "bottom_right"}
RAGGED = tuple(512 + (i * 1117) % 3585 for i in range(32))
LINEAR = {"rows": (1,), "k": 4096, "n": 14336}
NUCLEUS = {"batch": 64, "vocab": 128256, "logprobs": False, "top_p": 0.9}
# of the best candidate's time: a choice may take so much
NEAR = 1.02
WITHOUT_EXPANDING = 1.1                        # of the time without expanded K/V
MAX_MEDIAN, MAX_P95, MIN_STOCK, MAX_DISPATCH_US = 0.02, 0.08, 3.0, 0.25
Way = Callable[[], Any]

@dataclass(frozen=True)
class Goal:
    """`most_us` of our own kernel; it must not be slower than the kernels of `beside` either."""

    name: str
    op: str
    sizes: Mapping[str, Any]
    most_us: float | None = None
    beside: tuple[str, ...] = ()               # backends, or names of other ways
    dtype: str = "bfloat16"


GOALS = (
    Goal("decode B1 K1024", "attention", {**HEADS, "b": 1, "sq": 1, "sk": 1024}, 6.5),
    Goal("decode B1 K4096", "attention", {**HEADS, "b": 1, "sq": 1, "sk": 4096}, 9.0),
    Goal("decode B8 K4096", "attention", {**HEADS, "b": 8, "sq": 1, "sk": 4096}, 37.0),
    Goal("decode B1 K32768", "attention", {**HEADS, "b": 1, "sq": 1, "sk": 32768}, 37.0),
    Goal("decode B32 512-4096, pages of 16", "paged_attention", {**HEADS, "context": RAGGED},
         beside=("flashinfer", "SDPA, in one piece")),
    Goal("verify B4 Q8 K8192", "attention", {**HEADS, **LATE, "b": 4, "sq": 8, "sk": 8192}, 40.0),
    Goal("RMSNorm 1x4096", "rms_norm", {"rows": (1,), "hidden": 4096}, 4.5, ("quack",)),
    Goal("RMSNorm 4096x4096", "rms_norm", {"rows": (4096,), "hidden": 4096}, 21.0, ("quack",)),
    Goal("linear 1x4096 to 14336", "linear", {**LINEAR, "bias": False}, 32.0),
    Goal("the same, int4 in groups of 128", "quantized_linear",
         {**LINEAR, "format": "int4", "group": 128}, 12.0,
         ("F.linear in bfloat16 / 2.8",)),
    Goal("top-p 64x128256", "sample", NUCLEUS, 110.0, ("FlashInfer's own sampler",), "float32"),
)
PREFILL = tuple((f"prefill B{b} S{s}", {**HEADS, "b": b, "sq": s, "sk": s, "causal": True})
                for b, s in ((1, 2048), (1, 8192), (8, 512)))


def goals(compile: bool = False, summary: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """A row for each goal. `summary`: regret and gain over stock transformers, of a run that
    measured them.

    `compile`: also what takes a minute to compile; our own Triton kernels, which take a second or
    two, always do.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    slow = frozenset() if compile else frozenset({*uncompiled(), *(
        k.id for k in worlds.current().catalog.kernels if k.jit and k.backend == "torch")})
    denied = (lz.PolicyRule.of("deny", sorted(slow)),) if slow else ()
    rows: list[dict[str, Any]] = []

    def take(name: str, work: Callable[[], Any]) -> None:
        start = time.time()
        try:
            found = work()
        except ERRORS as e:                    # the others still have their row
            found = _row(name, "", None, None,
                         notes=(f"failed: {type(e).__name__}: {str(e)[:160]}",))
        for row in found if isinstance(found, list) else [found]:
            rows.append({**row, "seconds": round(time.time() - start, 1)})
            print(_line(rows[-1]), flush=True)
        torch.cuda.empty_cache()

    with torch.no_grad():
        with context.overriding(rules=denied):
            for goal in GOALS:
                take(goal.name, partial(_limit, goal, slow))
            for batch in (1, 32):
                take(f"K/V expanded by the caller, B{batch}", partial(_expanded, batch))
            for name, sizes in PREFILL:
                take(name, partial(_prefill, name, sizes, slow))
        take("summary", partial(_summarised, summary or {}))
        take("dispatch", _dispatch)            # outside: a call under an override is another one
    return rows


def _line(row: Mapping[str, Any]) -> str:
    met = {True: "met", False: "MISSED", None: "?"}[row["met"]]
    ours = "" if row["ours"] is None else f"{row['ours']:.4g}"
    text = f"{row['name']:34} {met:6} {ours:>8} {row['wanted']:28} {row['by']:32.32} "
    beside = [f"{k} {us:.4g}" for k, us in list(row["us"].items())[:7]]
    return text + ", ".join(beside) + "".join(f" | {note}" for note in row["notes"])


def _row(name: str, wanted: str, met: bool | None, ours: float | None, by: str = "",
         us: Mapping[str, float] | None = None, notes: tuple[str, ...] = (),
         **more: Any) -> dict[str, Any]:
    known = dict(sorted((us or {}).items(), key=lambda pair: pair[1]))
    return {"name": name, "wanted": wanted, "met": met, "ours": ours, "by": by, "us": known,
            "best": next(iter(known), None), "notes": list(notes), **more}


def _limit(goal: Goal, slow: frozenset[str]) -> dict[str, Any]:
    op = lz.op(goal.op)
    values = case_values(op, goal.sizes, goal.dtype, "cuda")
    found = candidates(goal.op, values, lambda k: k.id not in slow)
    us = {f["kernel"]: f["us"] for f in found if "us" in f}
    notes = [f"{f['kernel']} failed: {f['failed'][:80]}" for f in found if "failed" in f]
    for name, way in _others(goal, values, slow).items():
        try:
            us[name] = timed(way)[0] / (2.8 if name.endswith("/ 2.8") else 1.0)
        except ERRORS as e:
            notes.append(f"{name} failed: {type(e).__name__}: {str(e)[:80]}")
    ours = {k: t for k, t in us.items() if k.partition(".")[0] in OURS}
    rivals = {k: t for k, t in us.items() if k in goal.beside or k.partition(".")[0] in goal.beside}
    wanted = [f"<= {goal.most_us:g}"] if goal.most_us else []
    wanted += [f"<= {'/'.join(goal.beside)}"] if goal.beside else []
    if not ours:
        return _row(goal.name, ", ".join(wanted), False, None, us=us,
                    notes=(*notes, "no kernel of ours serves it"))
    by = min(ours, key=lambda k: ours[k])
    checked = check_case(worlds.current().catalog.by_id[by], goal.sizes, goal.dtype, "cuda")
    if checked.status != "passed":
        notes.append(f"{by} is wrong: {checked}"[:200])
    absent = [name for name in goal.beside
              if not any(name in (k, k.partition(".")[0]) for k in rivals)]
    notes += [f"no time of {name} in this run" for name in absent]
    fast = ((goal.most_us is None or ours[by] <= goal.most_us)
            and all(ours[by] <= t for t in rivals.values()))
    met = None if fast and absent else fast        # undecided while a rival has no time
    met = met if checked.status == "passed" else False
    return _row(goal.name, ", ".join(wanted), met, ours[by], by, us, tuple(notes),
                most_us=goal.most_us,
                worst_error=checked.ratio)


def _others(goal: Goal, values: Mapping[str, Any], slow: frozenset[str]) -> dict[str, Way]:
    """What is no kernel of the operation, and yet to be compared with."""
    if goal.op == "quantized_linear":
        weight = torch.randn(LINEAR["n"], LINEAR["k"], device="cuda").to(torch.bfloat16)
        return {goal.beside[0]: lambda: F.linear(values["x"], weight)}
    if goal.op == "paged_attention":
        return {goal.beside[1]: _in_one_piece(values)}
    if (goal.op == "sample" and is_importable("flashinfer")
        and (not slow or "sampling" in flashinfer.compiled())):
        from flashinfer import sampling
        return {goal.beside[0]: lambda: sampling.top_p_sampling_from_probs(
            sampling.softmax(values["logits"]), goal.sizes["top_p"])}
    return {}


def _in_one_piece(values: Mapping[str, Any]) -> Way:
    """torch's attention over the same keys, gathered before the clock runs, padded and masked."""
    table, lengths, query = values["block_table"].clamp(min=0).long(), values[
        "context_lens"], values["query"]
    seen = torch.arange(table.shape[1] * values["key_cache"].shape[1],
                        device="cuda") < lengths[:, None]
    key, value = (values[name][table].flatten(1, 2).masked_fill(~seen[..., None, None],
                                                                0.0).transpose(1, 2)
                  .contiguous() for name in ("key_cache", "value_cache"))
    mask = torch.zeros(seen.shape, dtype=query.dtype,
                       device="cuda").masked_fill(~seen, -math.inf)[:, None, None]
    return lambda: F.scaled_dot_product_attention(query[:, :, None], key, value, mask,
                                                  enable_gqa=True)


def _expanded(batch: int) -> dict[str, Any]:
    """K/V that the caller has expanded to all query heads, as strides show: a group dimension of
    stride 0."""
    q, k, v = (torch.randn(batch, heads, seq, 128, device="cuda").to(torch.bfloat16)
               for heads, seq in ((32, 1), (8, 4096), (8, 4096)))
    grouped = [q.unflatten(1, (8, 4)), *(t[:, :, None].expand(-1, -1, 4, -1, -1) for t in (k, v))]
    calls = {"as given": lambda: lz.attention(q, k, v), "expanded": lambda: lz.attention(*grouped)}
    tune([call for given in ((q, k, v), grouped)
          for call in calls_for("attention", arguments=dict(zip(
        ("query", "key", "value"), given)))], device="cuda", mode="captured", rounds=20, save=keep)
    us = {name: timed(way)[0] for name, way in calls.items()}
    us["copied, then SDPA"] = timed(lambda: _copied(q, k, v))[0]
    same = torch.equal(calls["as given"]().flatten(), calls["expanded"]().flatten())
    limit = us["as given"] * WITHOUT_EXPANDING
    return _row(f"K/V expanded by the caller, B{batch} K4096", f"<= {WITHOUT_EXPANDING} x without",
                us["expanded"] <= limit, us["expanded"], "lz.attention", us, () if same
                else ("another kernel: results differ in bits",))


def _copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, *(t.repeat_interleave(q.shape[1] // t.shape[1], 1)
                                               for t in (k, v)))


def _prefill(name: str, sizes: Mapping[str, Any], slow: frozenset[str]) -> dict[str, Any]:
    """What is chosen after tuning, in turns with all that could be; beside it those that are
    declared untested."""
    wanted = f"<= {NEAR} x the best"
    values = case_values(lz.op("attention"), sizes, "bfloat16", "cuda")
    calls = calls_for("attention", arguments=values)
    tune(calls, device="cuda", mode="captured", rounds=40, save=keep, again=True)
    found = replay(calls, seconds=0.3, device="cuda", watch=captured(), mode="captured")
    if not found.rows:
        return _row(name, wanted, None, None, notes=tuple(s.why[:120] for s in found.skipped))
    row = found.rows[0]
    us = {k: row.us(k) for k in row.rounds}
    others = candidates("attention", values, lambda k: k.untested and k.id not in slow)
    us |= {f["kernel"]: f["us"] for f in others if "us" in f}
    notes = [f"{f['kernel']} failed: {f['failed'][:80]}" if "failed" in f
             else f"{f['kernel']} is declared untested: "
             "not chosen" for f in others]
    notes.append(f"regret {row.regret:.1%}")
    # those in turns are in the regret
    rivals = [t for k, t in us.items() if k not in row.rounds]
    met = row.regret <= NEAR - 1 and all(us[row.chosen] <= NEAR * t for t in rivals)
    return _row(name, wanted, met, us[row.chosen], row.chosen, us, tuple(notes), regret=row.regret)


def _summarised(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What only the whole benchmark tells."""
    later = ("measured by benchmarks/gpu.py without --goals",)
    median, p95, stock = (summary.get(name)
                          for name in ("median_regret", "p95_regret", "gain_over_stock"))
    if median is None or p95 is None:
        regret = _row("regret over 80 shapes",
                      f"median <= {MAX_MEDIAN:.0%}, p95 <= {MAX_P95:.0%}", None, None,
                      notes=later)
    else:
        behind = tuple(f"behind torch's default: {text}" for text in summary["behind_default"])
        regret = _row("regret over 80 shapes",
                      f"median <= {MAX_MEDIAN:.0%}, p95 <= {MAX_P95:.0%}",
                      median <= MAX_MEDIAN and p95 <= MAX_P95 and not behind
                      and summary["shapes"] >= 80, p95,
                      f"{summary['shapes']} shapes, median {median:.1%}", notes=behind)
    return [regret, _row("over stock transformers", f">= {MIN_STOCK:g}", None if stock is None
                         else stock >= MIN_STOCK, stock, "geometric mean", notes=() if stock
                         else later)]


def _dispatch() -> dict[str, Any]:
    """What it takes to find the kernel of a call that was seen before; beside it the whole call,
    above the same kernel by hand. A launch takes a hundred times as long as the lookup, and varies
    by more than that."""
    wanted = f"<= {MAX_DISPATCH_US:g} us native"
    try:
        setting = dispatch.prepare("cuda")
        lookup = dispatch.LOOKUPS[0]
        runners = [c for c in dispatch._attention(setting)
                   if c.name in (dispatch.DIRECT, dispatch.NATIVE, lookup)]
        if len(runners) < 3:
            return _row("dispatch, cached", wanted, None, None,
                        notes=(f"native: {dispatch.native.status().text}",))
        found = race(runners, 300, 25, setting.wait)
    except SystemExit as e:                    # no kernel that serves it can be called by hand
        return _row("dispatch, cached", wanted, None, None, notes=(str(e)[:120],))
    finally:
        lz.unlock()
    took, over = found.of(lookup), found.over(dispatch.NATIVE)
    assert over is not None
    note = (
        f"p10 {took.p10:.0f}, p90 {took.p90:.0f} ns; the whole call {over.median:.0f} ns above the "
        f"kernel ({over.p10:.0f} .. {over.p90:.0f})")
    return _row("dispatch, cached", wanted, took.median / 1e3 <= MAX_DISPATCH_US,
                took.median / 1e3, "lz.attention",
                notes=(note,))

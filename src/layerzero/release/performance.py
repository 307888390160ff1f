"""Is lz as fast against torch as it was? A fixed list of calls, timed against plain torch in one
run.

A baseline (benchmarks/baselines/<target>.json) holds for each call how many times faster than torch
it was. Both sides are timed in turns in the same rounds, so a machine that is busy slows both. A
call has regressed if the whole 95 % interval of its ratio lies below that of the baseline by more
than the threshold, also in other processes.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..files.reading import read_json
from ..files.sealed import replace_output
from ..machine import hardware
from ..operate.inspection import dispatcher_of
from ..spec.codec import Check, Record
from ..spec.errors import DataError
from ..tuning.harness import in_turns
from ..verify.cases.declarations import Checked, Finding
from ..world import snapshot as worlds
from ..world.settings import configure

SCHEMA = "layerzero.baseline/1"
THRESHOLD = 0.15                               # of the ratio that may be lost
SECONDS, QUICK_SECONDS = 1.5, 0.4              # for each call
# that a baseline is made in, and that a slower call is confirmed in
PROCESSES = 3
RESAMPLES, SURE = 1000, 0.95
Positive = Annotated[float, Check("a number > 0", lambda n: 0 < n < math.inf)]
Ways = tuple[Callable[[], Any], Callable[[], Any]]     # lz, torch


@dataclass(frozen=True)
class MeasuredSpeed(Record):
    """The speed as a multiple of torch, and its 95 % confidence interval."""

    ratio: Positive
    low: Positive
    high: Positive
    lz_us: Positive
    torch_us: Positive
    rounds: int

    def to_json(self) -> dict[str, Any]:
        return {name: round(v, 4) if isinstance(v, float) else v
                for name, v in super().to_json().items()}


# calls, device, seconds for each
Timer = Callable[[Sequence[str], str, float], Mapping[str, MeasuredSpeed]]


@dataclass(frozen=True)
class Baseline(Record, header={"schema": SCHEMA}, whole=True,
               json="target device torch made threshold calls"):
    target: str
    device: str
    torch: str
    made: str
    calls: Mapping[str, MeasuredSpeed]
    threshold: Annotated[float, Check("a share between 0 and 1", lambda n: 0 < n < 1)] = THRESHOLD

    def least(self, call: str) -> float:
        """The ratio below which a call has regressed."""
        return self.calls[call].low * (1 - self.threshold)

    @classmethod
    def load(cls, path: Path) -> Baseline:
        return cls.from_json(read_json(path, "a baseline, such as lz gate --write-baseline makes"),
                             str(path))

    def save(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_output(path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as e:
            raise DataError(f"{path}: cannot write the baseline: {e.strerror}") from e


def make_baseline(target: str, device: str, seconds: float = SECONDS,
                  again: Timer | None = None) -> Baseline:
    """Time every call now, in several processes: memory placement differs between them."""
    timer = again or in_new_process
    runs = [timer(tuple(CALLS), device, seconds) for _ in range(PROCESSES)]
    return Baseline(target, hardware.probe(device).name, str(torch.__version__),
                    datetime.now(timezone.utc).date().isoformat(),
                    {name: merged([run[name] for run in runs]) for name in CALLS})


def compare(path: Path, target: str, device: str, seconds: float = SECONDS,
            first: Timer | None = None,
            again: Timer | None = None, say: Callable[[str], None] = lambda text: None) -> Iterator[
                Checked]:
    """Compares every call with the baseline of this file. A machine without a baseline of its own
    is a finding.

    A call that seems slower is timed by `again`, in processes of its own, and counts as slower only
    if each of them says so.
    """
    says, name = "there is a baseline of this device", hardware.probe(device).name
    if not path.is_file():
        yield Checked("baseline", says, 1, (Finding("baseline", target, f"there is no {path}",
                                                    "lz gate --write-baseline makes one; commit "
                                                    "it, or waive this"),))
        return
    baseline = Baseline.load(path)
    if (baseline.target, baseline.device) != (target, name):
        yield Checked("baseline", says, 1, (Finding(
            "baseline", target,
            f"{path} is of {baseline.target}, {baseline.device}; this is {target}, {name}",
            "lz gate --write-baseline makes one for this device; or waive this"),))
        return
    missing = tuple(Finding("baseline", call, f"{path} does not have it",
                            "lz gate --write-baseline")
                    for call in CALLS if call not in baseline.calls)
    gone = tuple(Finding("baseline", call, f"{path} has it, and it is not timed any more",
                         "lz gate --write-baseline")
                 for call in baseline.calls if call not in CALLS)
    note = "" if baseline.torch == torch.__version__ else f"made with torch {baseline.torch}"
    yield Checked("baseline", says, len(CALLS), missing + gone, note)
    known = tuple(call for call in CALLS if call in baseline.calls)
    now = dict((first or in_this_process)(known, device, seconds))
    for _ in range(PROCESSES):
        slower = tuple(call for call in known if now[call].high < baseline.least(call))
        if slower:
            retimed = (again or in_new_process)(slower, device, 2 * seconds)
            now |= {call: max(now[call], retimed[call], key=lambda timed: timed.high)
                    for call in slower}
    findings = []
    for call in known:
        timed, was, least = now[call], baseline.calls[call], baseline.least(call)
        text = (
            f"{timed.ratio:.2f} times torch's speed (95 % of {timed.low:.2f} to {timed.high:.2f}), "
            f"was {was.ratio:.2f}")
        say(f"      {call}: {text}")
        if timed.high < least:
            findings.append(Finding(target, call, f"{text}; at least {least:.2f} is wanted",
                                    "find the change that made it slower, or waive it with a "
                                    "reason and a day"))
    yield Checked(target,
                  f"no call is more than {baseline.threshold:.0%} slower against torch than it was",
                  len(known), tuple(findings))


def merged(runs: Sequence[MeasuredSpeed]) -> MeasuredSpeed:
    """Merge the timings of several processes: medians, and the hull of the intervals."""
    middle = statistics.median
    return MeasuredSpeed(
        middle(r.ratio for r in runs), min(r.low for r in runs), max(r.high for r in runs),
        middle(r.lz_us for r in runs), middle(r.torch_us for r in runs),
        sum(r.rounds for r in runs))


def in_this_process(calls: Sequence[str], device: str,
                    seconds: float) -> Mapping[str, MeasuredSpeed]:
    with _conditions(device):
        return {name: time_call(CALLS[name], device, seconds) for name in calls}


def in_new_process(calls: Sequence[str], device: str,
                   seconds: float) -> Mapping[str, MeasuredSpeed]:
    code = "import sys; from layerzero.release.performance import _print; _print(sys.argv[1:])"
    process = subprocess.run([sys.executable, "-c", code, device, str(seconds), *calls],
                             capture_output=True, text=True,
                             timeout=600 + 10 * seconds * len(calls))
    if process.returncode:
        raise DataError(
            f"timing {', '.join(calls)} in a process of its own ended with {process.returncode}:\n"
            f"{process.stderr.strip()[-2000:]}")
    return {name: MeasuredSpeed(**row)
            for name, row in json.loads(process.stdout.splitlines()[-1]).items()}


def _print(words: Sequence[str]) -> None:
    device, seconds, *calls = words
    print(json.dumps({name: t.to_json()
                      for name, t in in_this_process(calls, device, float(seconds)).items()}))


def time_call(make: Callable[[str], Ways], device: str, seconds: float) -> MeasuredSpeed:
    """Time lz and torch in turns; return the median ratio with a bootstrap interval."""
    with torch.no_grad():
        lz_call, torch_call = make(device)
        timings = in_turns({"lz": lz_call, "torch": torch_call}, seconds, device)
    ratios = torch.tensor([t / o for o, t in zip(timings.rounds["lz"], timings.rounds["torch"])],
                          dtype=torch.float64)
    draws = torch.randint(len(ratios), (RESAMPLES, len(ratios)),
                          generator=torch.Generator().manual_seed(0))
    medians = ratios[draws].quantile(0.5, dim=1)
    low, high = (float(medians.quantile(q)) for q in ((1 - SURE) / 2, (1 + SURE) / 2))
    return MeasuredSpeed(float(ratios.quantile(0.5)), low, high, timings.median("lz"),
                         timings.median("torch"), len(ratios))


@contextmanager
def _conditions(device: str) -> Iterator[None]:
    """Sets one CPU thread and only the shipped measurements, as on a machine just set up."""
    before, threads = worlds.current().policy, torch.get_num_threads()
    configure(perfdb="off", learn=False)
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        worlds.publish(lambda world: world.replace(policy=before), "gate")


# The calls: what a decoder makes, in plain torch as its authors would write it.

def _tensors(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [(torch.randn(shape, generator=gen) / math.sqrt(shape[-1])).to(device, dtype)
            for shape in shapes]


def _hidden(device: str) -> int:
    return 1024 if device == "cpu" else 4096


def _op(name: str) -> Any:
    return dispatcher_of(name).public


def _rms_norm(rows: int, device: str) -> Ways:
    h, op = _hidden(device), _op("rms_norm")
    x, w = _tensors(device, (rows, h), (h,))
    return lambda: op(x, w, 1e-6), lambda: F.rms_norm(x, (h,), w, 1e-6)


def _layer_norm(rows: int, device: str) -> Ways:
    h, op = _hidden(device), _op("layer_norm")
    x, w, b = _tensors(device, (rows, h), (h,), (h,))
    return lambda: op(x, w, b), lambda: F.layer_norm(x, (h,), w, b)


def _add_rms_norm(rows: int, device: str) -> Ways:
    h, op = _hidden(device), _op("add_rms_norm")
    x, r, w = _tensors(device, (rows, h), (rows, h), (h,))

    def plain() -> tuple[Tensor, Tensor]:
        total = x + r
        return F.rms_norm(total, (h,), w, 1e-6), total
    return lambda: op(x, r, w), plain


def _attention(queries: int, keys: int, device: str) -> Ways:
    heads, kv, causal, op = 8, 2, queries > 1, _op("attention")
    q, k, v = _tensors(device, (1, heads, queries, 64), (1, kv, keys, 64), (1, kv, keys, 64))
    return (lambda: op(q, k, v, is_causal=causal),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))


def _linear(rows: int, device: str) -> Ways:
    h, op = _hidden(device), _op("linear")
    x, w = _tensors(device, (rows, h), (h, h))
    return lambda: op(x, w), lambda: F.linear(x, w)


def _mlp(rows: int, device: str) -> Ways:
    h, op = _hidden(device), _op("mlp")
    x, w, down = _tensors(device, (rows, h), (4 * h, h), (h, 2 * h))

    def plain() -> Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)
    return lambda: op(x, w, down), plain


CALLS: Mapping[str, Callable[[str], Ways]] = {
    "rms_norm decode": partial(_rms_norm, 1), "rms_norm prefill": partial(_rms_norm, 128),
    "layer_norm decode": partial(_layer_norm, 1), "layer_norm prefill": partial(_layer_norm, 128),
    "add_rms_norm decode": partial(_add_rms_norm, 1),
    "add_rms_norm prefill": partial(_add_rms_norm, 128),
    "attention decode": partial(_attention, 1, 1024),
    "attention prefill": partial(_attention, 128, 128),
    "linear decode": partial(_linear, 1), "linear prefill": partial(_linear, 32),
    "mlp decode": partial(_mlp, 1)}

"""What to run next: commands with their reasons, the most useful one first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ..spec.display import plural
from .formats import format_share, format_time
from .overview import CallKind, Overview

MAX_COMMANDS = 5
WORTH_SAYING = 0.01    # of the time of the workload


@dataclass(frozen=True)
class Advice:
    command: str
    reason: str


def advise(overview: Overview) -> tuple[Advice, ...]:
    """Return at most MAX_COMMANDS commands; there is always one."""
    return tuple(islice(_advices(overview), MAX_COMMANDS)) or (
        Advice("lz perf show", "Nothing is left to do: this lists what was measured."),)


def _advices(overview: Overview) -> Iterator[Advice]:
    words = overview.workload.words if overview.workload else ""
    yield from _measure(overview, words)
    yield from _use_what_is_there(overview)
    if not overview.kinds:
        return
    if overview.workload is None:
        yield Advice("lz record -- python app.py",
                     "Writes down the calls of your program. Then lz report --calls calls.jsonl "
                     "weighs every number by them; now each kind of call counts once.")
    yield from _choose(overview)
    if overview.rates is None:
        yield Advice(_join("lz tune", words, "--again"),
                     "Measures the rates of this device, without which there is no roofline.")
    yield from _measure_again(overview, words)
    if overview.regret is None:
        yield Advice(_join("lz regret", words, "--json > regret.json"),
                     "Replays the calls and times the chosen kernel against all others; then "
                     "lz report --regret regret.json shows where a choice costs time.")
    if overview.against is None:
        yield Advice(_join("lz report", words, "--json > before.json"),
                     "Keeps this report, so that lz report --against before.json shows what a new "
                     "kernel, a new torch or another tuning changed.")
    if words and not any(option in words for option in ("--batch", "--prompt", "--context")):
        yield Advice(f"lz lock {words}",
                     "Pins the kernels of these calls with their versions and builds.")


def _measure(overview: Overview, words: str) -> Iterator[Advice]:
    unmeasured = overview.workload.unmeasured if overview.workload else ()
    if unmeasured:
        expected = sum(kind.expected_us for kind in unmeasured)
        share = expected / (expected + overview.total.us) if expected else 0.0
        yield Advice(f"lz tune {words}",
                     f"{plural(len(unmeasured), 'kind')} of call of this workload "
                     f"{'is' if len(unmeasured) == 1 else 'are'} not measured, expected to take "
                     f"{format_share(share)} of its time.")
    elif not overview.kinds:
        yield Advice(_join("lz tune", words),
                     "Nothing is measured yet. This times every kernel that may serve and lets the "
                     "measurements decide.")


def _use_what_is_there(overview: Overview) -> Iterator[Advice]:
    """Kernels made for this hardware that are refused for want of a command."""
    ops = {op for op, _ in overview.totals_by_op}
    commands: dict[str, set[str]] = {}
    for kernel in overview.rejected:
        if not kernel.other_hardware and (kernel.op in ops or not ops):
            for reason in kernel.reasons:
                if reason.command:
                    commands.setdefault(reason.command, set()).add(kernel.kernel)
    for command, kernels in sorted(commands.items(), key=lambda item: (-len(item[1]), item[0])):
        names = ", ".join(sorted(kernels)[:3]) + (" and others" if len(kernels) > 3 else "")
        verb = "serves" if len(kernels) == 1 else "serve"
        yield Advice(command, f"Brings {names}, which {verb} operations of this report and cannot "
                              "run now. Tune again afterwards.")


def _choose(overview: Overview) -> Iterator[Advice]:
    losing = max(overview.total.kinds, key=lambda kind: kind.lost_us, default=None)
    if losing is None or not losing.usage.words:
        return
    if losing.lost_us > WORTH_SAYING * overview.total.us:
        yield Advice(f"lz explain {shlex.quote(losing.op)} {losing.usage.words}",
                     f"{losing.used.kernel} is chosen although {losing.fastest.kernel} was faster: "
                     f"{format_time(losing.lost_us)} of this workload. This says why.")


def _measure_again(overview: Overview, words: str) -> Iterator[Advice]:
    noisy = [kind for kind in overview.total.kinds if kind.used.noisy]
    share = sum(kind.us for kind in noisy) / overview.total.us if noisy else 0.0
    if share > WORTH_SAYING and words:
        yield Advice(f"lz tune {words} --again",
                     f"{format_share(share)} of the time is known from noisy measurements "
                     f"({_names(noisy)}): measure again while the machine does nothing else.")


def _join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _names(kinds: list[CallKind]) -> str:
    return ", ".join(dict.fromkeys(kind.op for kind in kinds))

"""`lz verify kernels`: kernels against their contract, and certificates for those that pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ....files.sealed import replace_output
from ....machine import hardware
from ....spec.errors import ConfigError
from ....spec.kernel import Kernel
from ....spec.names import find_kernels, suggest
from ....verify.certification.certify import LANES, Verdict, publish
from ....verify.certification.processes import certify_in_processes
from ....verify.kernel.probing import probe_unknown
from ....world import snapshot as worlds
from ....world.registry import certificates
from ... import show
from ...calls import device_kind
from ...root import INTERRUPTED

_MARKS = {"passed": "ok", "failed": "!!", "unproven": "??", "skipped": "--"}
UNPROVEN_ADVICE = ("--full searches longer; else let a rule refuse the calls that this code "
                   "is for, take it out, or mark the line `# pragma: no cover`, if it is for other "
                   "machines alone")
SHOWN = 4                                      # failing cases of a kernel that are printed


def verify_kernels(lane: str = "quick", *, backend: str = "", kernel: str = "", op: str = "",
                   device: str | None = "cpu", seeds: Sequence[int] = (), as_json: bool = False,
                   isolated: bool = False, untested: bool = True, workers: int = 0,
                   report: Path | None = None) -> int:
    """Certify kernels and print each verdict; returns 1 if a kernel fails or is left unproven, or
    none could be tested.

    Without `untested`, kernels that were never run on their hardware are left out. `report` is
    written with the verdicts and the device. `workers`: processes that certify at once, 0 for one
    of each core of a CPU. An interrupt keeps the certificates of those that passed until then.
    """
    if lane not in LANES:
        raise ConfigError(f"the lanes of lz verify are {', '.join(LANES)}, got {lane!r}")
    kernels, device = match_kernels(backend, kernel, op), device_kind(device)
    kernels = [k for k in kernels if untested or not k.untested]
    crashed = probe_unknown(kernels, device) if isolated else {}
    for name, reason in crashed.items():
        if not as_json:
            show.text(f"!!  {name}, in a process of its own: {reason.message}")
    kernels = [k for k in kernels if k.id not in crashed]
    verdicts: list[Verdict] = []
    interrupted = False
    try:
        for verdict in certify_in_processes(kernels, device, lane, tuple(seeds) or None, workers):
            verdicts.append(verdict)
            if not as_json:
                show.text(_verdict_text(verdict, len(verdicts), len(kernels)))
    except KeyboardInterrupt:
        interrupted = True
    publish()
    counts = Counter(v.status for v in verdicts)
    result = {"level": 1, "lane": lane, "device": device, "interrupted": interrupted,
              "counts": dict(counts),
              "certificates": str(certificates.folder(hardware.probe(device))),
              "condemned": {name: reason.to_json() for name, reason in crashed.items()},
              "kernels": [v.to_json() for v in verdicts]}
    if report is not None:
        replace_output(report, json.dumps({**result, "hardware": hardware.probe(device).to_json()},
                                          indent=1, default=str) + "\n")
    if as_json:
        show.as_json(result)
    else:
        _show_summary(verdicts, counts, len(kernels), device, interrupted)
    lacking = crashed or counts["failed"] or counts["unproven"] or not counts["passed"]
    return INTERRUPTED if interrupted else 1 if lacking else 0


def match_kernels(backend: str = "", kernel: str = "", op: str = "") -> list[Kernel]:
    """Return kernels by library, id (with * and ?) and operation; no match is an error."""
    catalog = worlds.current().catalog
    if op and not any(fnmatchcase(name, op) for name in catalog.ops):
        raise ConfigError(f"OP: there is no {op!r}{suggest(op, catalog.ops)}")
    chosen = [set(find_kernels(name or "*", catalog.op_of_kernel, what=option))
              for option, name in (("--backend", backend), ("--kernel", kernel))]
    kernels = [k for k in catalog.kernels if all(k.id in ids for ids in chosen)
               and fnmatchcase(k.op.name, op or "*")]
    if not kernels:
        raise ConfigError(
            f"no kernel is of library {backend or '*'}, id {kernel or '*'} and operation "
            f"{op or '*'}")
    return kernels


def _verdict_text(v: Verdict, number: int, total: int) -> str:
    head = f"{_MARKS[v.status]}  {number}/{total} {v.kernel}"
    if v.status == "skipped":
        return f"{head}: {v.refusal or 'nothing of it could be asked here'}"
    refused = len(v.results) - v.ran
    text = f"{head}: {v.ran} cases ({refused} refused by its rules), {v.seconds:.1f} s"
    if v.status == "passed":
        lines = [f"covers {v.coverage}"] if str(v.coverage) else []
        lines += [f"not covered: {text}" for text in v.coverage.missing]
        return "\n".join([f"{text}, worst {v.worst:.2f} of what is allowed",
                          *(f"      {line}" for line in lines)])
    if v.status == "unproven":
        count = f"{len(v.unrun)} part{'s' * (len(v.unrun) > 1)}"
        return "\n".join([f"{text}, UNPROVEN: no call reached {count} of its code",
                          *(f"      {part}" for part in v.unrun),
                          f"      what to do: {UNPROVEN_ADVICE}"])
    return "\n".join([f"{text}, {len(v.failures)} FAILED",
                      *(f"      {line}" for line in diagnosis_lines(v))])


def diagnosis_lines(v: Verdict) -> list[str]:
    """Return the likely class of the mistake, where it shows, failing cases, and what to do."""
    diagnosis = v.diagnosis
    lines = [] if diagnosis is None else [
        f"likely class: {diagnosis.kind}", f"why: {diagnosis.says}",
        *([f"fails exactly where {diagnosis.where}"] if diagnosis.where else []),
        f"what to do: {diagnosis.advice}"]
    for r in v.failures[:SHOWN]:
        under = f", {r.circumstance}" if r.circumstance else ""
        lines.append(f"{r.dtype} {dict(r.case)}{under}, seed {r.seed}: {r.detail}")
    rest = len(v.failures) - SHOWN
    return [*lines, f"and {rest} more (--json has them)"] if rest > 0 else lines


def _show_summary(verdicts: Sequence[Verdict], counts: Counter[str], total: int, device: str,
                  interrupted: bool) -> None:
    show.heading(f"kernels on {device}, torch {torch.__version__}")
    ran = [v for v in verdicts if v.status != "skipped"]
    show.table(("", "kernel", "op", "cases", "refused", "worst", "class"), [
        (_MARKS[v.status], v.kernel, v.op, str(v.ran), str(len(v.results) - v.ran),
         f"{v.worst:.2f}", v.diagnosis.kind if v.diagnosis else "") for v in ran],
               right=("cases", "refused", "worst"))
    show.text(", ".join(f"{counts[s]} {s}" for s in _MARKS if counts[s]) or "nothing was asked")
    if interrupted:
        show.text(f"interrupted after {len(verdicts)} of {total}; what passed is certified")
    if counts["passed"]:
        show.text(f"certificates: {certificates.folder(hardware.probe(device))}; demand them with "
                  "require_certificates = true")

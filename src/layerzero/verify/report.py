"""What was proved, when and on what: summaries of logged verdicts.

`benchmarks/false_alarms.py` logs a line for each kernel and seed. A summary keeps, for each
machine, how often each kernel was verified and everything that failed; docs/reference/proof.md is
written from summaries and from the results of `lz verify definitions --mutate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files.reading import parse_json, read_lines
from ..spec.errors import DataError

# What a verdict of a kernel depends on.
_ROOMS = ("ops", "backends", "dispatch", "verify/cases", "verify/kernel",
          "verify/certification", "verify/code")
_SUFFIXES = (".py", ".cpp", ".h", ".cu")
_SAME = ("machine", "arch", "device", "torch", "python", "lane", "sources")
_TEXTS, _NUMBERS = (*_SAME, "kernel", "op", "at", "says"), ("seed", "cases", "worst", "cpu_seconds")
_STATES = ("passed", "failed", "skipped")


def sources_digest() -> str:
    """Returns a digest of the contracts, the kernels, the call and the checks: verdicts with the
    same one are about the same code."""
    home, digest = Path(__file__).parents[1], hashlib.sha256()
    for room in _ROOMS:
        for path in sorted(p for p in (home / room).rglob("*") if p.suffix in _SUFFIXES):
            digest.update(f"{path.relative_to(home).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log; the last one may be cut where a run was ended."""
    rows, lines = [], list(read_lines(path, "a log of benchmarks/false_alarms.py"))
    for i, (number, line) in enumerate(lines):
        try:
            row = parse_json(line, f"{path}: line {number}", "a verdict as JSON", nan=True)
        except DataError:
            if i + 1 < len(lines):
                raise
            continue
        wrong = _problem(row)
        if wrong:
            raise DataError(f"{path}: line {number}: wanted a verdict of benchmarks/"
                            f"false_alarms.py; {wrong}")
        rows.append(row)
    return rows


def _problem(row: Any) -> str:
    """Says what a line lacks to be a verdict; "" if it is one."""
    if not isinstance(row, dict):
        return f"got {type(row).__name__}"
    wrong = [name for name in _TEXTS if not isinstance(row.get(name), str)]
    wrong += [name for name in _NUMBERS if type(row.get(name)) not in (int, float)]
    if row.get("status") not in _STATES:
        wrong.append("status")
    if row.get("status") == "failed":
        wrong += [name for name in ("class", "failures") if name not in row]
    return f"missing or of another type: {', '.join(wrong)}" if wrong else ""


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a summary for each machine, version and digest of the sources, the newest last."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in _SAME), []).append(row)
    summaries = [_summary(dict(zip(_SAME, key)), group) for key, group in groups.items()]
    return sorted(summaries, key=lambda s: str(s["last"]))


def _summary(about: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kernels: dict[str, dict[str, Any]] = {}
    for row in rows:
        k = kernels.setdefault(row["kernel"], {
            "op": row["op"], "passed": [], "failed": [], "skipped": [], "cases": 0, "worst": 0.0,
            "cpu_seconds": 0.0, "why_skipped": ""})
        k[row["status"]] = sorted({*k[row["status"]], row["seed"]})
        k["cases"] += row["cases"]
        k["worst"] = max(k["worst"], row["worst"])
        k["cpu_seconds"] = round(k["cpu_seconds"] + row["cpu_seconds"], 2)
        if row["status"] == "skipped":
            k["why_skipped"] = row["says"]
    ran = [r for r in rows if r["status"] != "skipped"]
    return {**about, "first": min(r["at"] for r in rows), "last": max(r["at"] for r in rows),
            "verdicts": len(ran), "cases": sum(r["cases"] for r in ran),
            "alarms": [{n: r[n] for n in ("kernel", "seed", "class", "says", "failures")}
                       for r in rows if r["status"] == "failed"],
            "kernels": dict(sorted(kernels.items()))}


# The page.

def page(summaries: Sequence[Mapping[str, Any]], mutations: Sequence[Mapping[str, Any]],
         planted: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the page about what was proved, in Markdown. A summary may have `notes`, which say
    what its alarms were found to be. `planted`: runs of benchmarks/planted_faults.py."""
    parts = ["# Proof\n",
             "What was verified, when and on what, written from the logs in `benchmarks/results`. "
             "A sound kernel that fails is a false alarm of the verifier or a mistake of the "
             "kernel; both are listed. First every run, then what failed in each, then every "
             "kernel of a machine with its newest run.\n",
             "## Kernels\n", _table(
                 ("machine", "torch", "lane", "when (UTC)", "kernels", "seeds", "verdicts",
                  "cases", "failed"),
                 [_machine_row(s) for s in summaries])]
    parts += [line for s in summaries if s["alarms"] or s.get("notes") for line in _told(s)]
    places = dict.fromkeys((s["machine"], s["device"]) for s in summaries)
    for machine, device in places:
        here = [s for s in summaries if (s["machine"], s["device"]) == (machine, device)]
        parts += [f"### {machine}, {device}: every kernel\n", _table(
            ("kernel", "op", "newest run", "lane", "seeds passed", "seeds failed", "cases",
             "worst of what is allowed", "all runs", "failed"), list(_kernel_rows(here)))]
        parts += _not_run(here)
    parts += _planted_faults(planted)
    parts += ["## Definitions\n",
              "References of public definitions, each changed in one place at a time "
              "(`lz verify definitions --mutate`). A mutant is killed where the check of the "
              "definition disagrees with it or it does not end well; equivalent where it gave the "
              "same to the bit on every input that is drawn, in float64 too.\n"]
    for m in mutations:
        parts.append(f"### {m['machine']}, torch {m['torch']}, {m['at'][:16]}\n")
        parts.append(_table(("type", "definitions", "killed", "survived", "equivalent", "rate"), [
            *((t, *_counts(c)) for t, c in m["by_type"].items() if c["rate"] is not None),
            ("**all**", *_counts(m))]))
        survivors = [(r["definition"], o) for r in m["reports"] for o in r["not_killed"]
                     if o["status"] == "survived"]
        parts += [f"- {name}: line {o['line']}, {o['kind']}: `{_cell(o['change'])[:120]}`"
                  for name, o in survivors] + ([""] if survivors else [])
        skipped = [r for r in m["reports"] if r["skipped"]]
        if skipped:
            parts.append("Not mutated:\n")
            parts += [f"- {r['definition']}: {_cell(r['skipped'])[:160]}" for r in skipped] + [""]
    return "\n".join(parts).rstrip() + "\n"


def _told(s: Mapping[str, Any]) -> list[str]:
    """Returns what failed in a run, and what was found of it."""
    alarms = [f"- {a['kernel']}, seed {a['seed']}: {a['class']}: {_cell(a['says'])[:300]}"
              for a in s["alarms"]]
    return [f"### {s['first'][:16].replace('T', ' ')}, {s['machine']}, {s['device']}, {s['lane']} "
            "lane\n", f"Sources {s['sources']}, torch {s['torch']}, Python {s['python']}, "
            f"{s['arch']}.\n", *alarms, *([""] if alarms else []),
            *(f"{note}\n" for note in s.get("notes", ()))]


def _kernel_rows(summaries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yields each kernel with its newest run and with the number of its verdicts in all runs."""
    for name in sorted({n for s in summaries for n in s["kernels"]}):
        ran = [(s, k) for s in summaries if (k := s["kernels"].get(name)) is not None
               and (k["passed"] or k["failed"])]
        if ran:
            s, k = ran[-1]
            failed = sum(len(k["failed"]) for _, k in ran)
            yield (f"`{name}`", k["op"], s["last"][:16].replace("T", " "), s["lane"],
                   _ranges(k["passed"]), _ranges(k["failed"]) or "none", f"{k['cases']:,}",
                   f"{k['worst']:.2f}", str(sum(len(k["passed"]) for _, k in ran) + failed),
                   str(failed))


def _not_run(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the kernels that no run could ask, by their reason."""
    newest = {name: k for s in summaries for name, k in s["kernels"].items()}
    ran = {name for s in summaries for name, k in s["kernels"].items()
           if k["passed"] or k["failed"]}
    refused: dict[str, list[str]] = {}
    for name in sorted(newest.keys() - ran):
        why = _cell(newest[name]["why_skipped"])[:120] or "nothing it accepts could be asked"
        refused.setdefault(why, []).append(f"`{name}`")
    lines = [f"- {why}: {', '.join(names)}" for why, names in refused.items()]
    return ["Not run here:\n", *lines, ""] if lines else []


def _planted_faults(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    if not runs:
        return []
    parts = ["## Planted faults\n",
             "Kernels that are wrong in one way each (`tests/faults`), verified as any other by "
             "`benchmarks/planted_faults.py`. A fault is named where the diagnosis has the right "
             "class or says that it does not know.\n",
             _table(("set", "machine", "torch", "lane", "seed", "when (UTC)", "planted", "caught",
                     "named"),
                    [(run["set"], run["machine"], run["torch"], run["lane"], str(run["seed"]),
                      run["at"][:16].replace("T", " "), str(run["planted"]), str(run["caught"]),
                      str(run["named"])) for run in runs])]
    for run in runs:
        wrong = [row for row in run["faults"] if not row["right"]]
        parts += [f"- {run['set']}, {run['at'][:16]}: `{row['fault']}` of {row['op']}: "
                  + (f"taken for {row['class']}" if row["status"] == "failed" else row["status"])
                  for row in wrong] + ([""] if wrong else [])
        parts += [f"{note}\n" for note in run.get("notes", ())]
    return parts


def _machine_row(s: Mapping[str, Any]) -> tuple[str, ...]:
    ran = [k for k in s["kernels"].values() if k["passed"] or k["failed"]]
    counts = [len({*k["passed"], *k["failed"]}) for k in ran] or [0]
    seeds = (f"{min(counts)}" if min(counts) == max(counts)
             else f"{min(counts)} to {max(counts)}")
    return (s["machine"], s["torch"], f"{s['lane']}, {s['device']}",
            f"{s['first'][:16].replace('T', ' ')} to {s['last'][11:16]}", str(len(ran)), seeds,
            f"{s['verdicts']:,}", f"{s['cases']:,}", str(len(s["alarms"])))


def _counts(c: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(c["definitions"]), str(c["killed"]), str(c["survived"]), str(c["equivalent"]),
            f"{c['rate']:.2%}")


def _ranges(numbers: Sequence[int]) -> str:
    """Returns 0-3, 7 for 0 1 2 3 7."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}",
             *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"

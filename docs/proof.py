"""docs/reference/proof.md: what was verified, when and on what, from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from figures import table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def page() -> str:
    """Return a table of the runs, and one of the kernels of each machine."""
    records = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("proof-*.json"))]
    parts = ["# What was verified\n",
             "Each kernel against its contract ([certificates](../certificates.md)), by "
             "`benchmarks/proof.py`. This says where and when it was run, how far it reached and "
             "what it left out; it is no promise for another machine: `lz verify kernels` is "
             "yours.\n",
             table(("device", "torch", "cores", "lane", "date", "seed", "kernels", "failed",
                    "cases", "seconds"), [row for r in records for row in _runs(r)])]
    for record in records:
        parts += [f"\n## {record['device']}\n",
                  table(("kernel", "cases", "worst", "covers", "not covered"),
                        [_kernel(record, k) for k in record["runs"][0]["kernels"]])]
    return "\n".join(parts)


def _runs(record: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for run in record["runs"]:
        kernels = run["kernels"]
        rows.append((record["device"], record["torch"], str(record["cores"]), record["lane"],
                     record["date"], str(run["seed"]), str(len(kernels)),
                     str(sum(k["status"] == "failed" for k in kernels)),
                     f"{sum(k['cases'] for k in kernels):,}", f"{run['seconds']:.0f}"))
    return rows


def _kernel(record: dict[str, Any], kernel: dict[str, Any]) -> tuple[str, ...]:
    """One row: the cases of all seeds, the worst of them, what the first covers."""
    same = [k for run in record["runs"] for k in run["kernels"] if k["kernel"] == kernel["kernel"]]
    return (f"`{kernel['kernel']}`", str(sum(k["cases"] for k in same)),
            f"{max(k['worst'] for k in same):.2f}", kernel["covers"],
            "; ".join(kernel["misses"]))

"""The benchmarks run from beginning to end and write what they promise.

What they measure is not judged here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from helpers import run_python

ROOT = Path(__file__).parents[3]


def run(out: Path, **environment: str) -> tuple[dict, str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run_python(
        ROOT / "benchmarks" / "dispatch.py", "--quick", "--device", "cpu", "--out", out,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
             **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """In pure Python, so that the result does not depend on what was built."""
    return run(tmp_path_factory.mktemp("benchmark") / "deeper" / "dispatch.json",
               LAYERZERO_NATIVE="0")


def test_says_where_it_ran(report):
    env = report[0]["environment"]
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["native"] is False and env["cores"] >= 1 and env["torch_threads"] == 1
    assert {"cpu", "gpu", "torch", "layerzero", "load_average", "load_average_after", "date",
            "peers"} <= env.keys()
    assert report[0]["quick"] is True
    assert any("native fast path" in text for text in report[0]["warnings"])


def test_every_contestant_has_a_time_and_its_target_ran(report):
    part = report[0]["devices"]["cpu"]
    rows = {row["name"]: row for row in part["rows"]}
    assert len(rows) == len(part["rows"]), "two contestants share a name"
    for row in rows.values():
        assert row["ns"]["p10"] <= row["ns"]["median"] <= row["ns"]["p90"]
        assert (row["over"] is None) == (row["target"] == "")
        assert row["target"] in ("", *rows)
    for name in ("direct: the kernel by hand", "F.scaled_dot_product_attention",
                 "lz.attention, pure Python", "lz.attention in lz.prefer(...)",
                 "lz.attention, backend=...", "torch.ops.layerzero.attention",
                 "with sdpa_kernel([...]) around F.sdpa", "lz.rms_norm, pure Python"):
        assert name in rows
    assert "lz.attention, native" not in rows


def test_what_is_absent_is_listed_not_failed(report):
    part = report[0]["devices"]["cpu"]
    peers = report[0]["environment"]["peers"]
    assert "native fast path" in part["missing"]
    for package, row in (("transformers", "transformers attention interface"),
                         ("diffusers", "diffusers dispatch_attention_fn"),
                         ("flashinfer-bench", "flashinfer-bench apply, hit")):
        ran = any(r["name"] == row for r in part["rows"])
        assert ran != (package in part["missing"])
        if package not in peers:
            assert part["missing"][package] == "not installed"


def test_misses_are_split_and_counted(report):
    misses = report[0]["devices"]["cpu"]["misses"]
    shipped, enough = misses[0], misses[-1]
    assert enough["viable"] >= 20, "copies should fill up what the machine lacks"
    assert enough["kernels"] - shipped["kernels"] == enough["viable"] - shipped["viable"]
    for miss in misses:
        assert miss["keys"] > 1
        assert {"first", "whole", "facts", "select", "bind"} == miss["us"].keys()


def test_threads_are_measured(report):
    names = {row["name"] for row in report[0]["devices"]["cpu"]["threads"]}
    assert {"direct: the kernel by hand", "lz.attention, pure Python",
            "lz lookup alone, pure Python"} <= names


def test_prints_a_plain_table(report):
    data, text = report
    for row in data["devices"]["cpu"]["rows"]:
        assert f"\n{row['name']} " in text
    assert "\x1b[" not in text
    assert "misses:" in text and "threads at once" in text


def test_a_wrong_answer_stops_the_race():
    code = ("import torch\nfrom timing import Contestant, race\n"
            "race([Contestant('wrong', 'out = x + 1', {'x': torch.zeros(2)}, "
            "expect=torch.zeros(2))], 1, 1)\n")
    done = run_python("-c", code, cwd=ROOT / "benchmarks")
    assert done.returncode != 0 and "wrong computes something else" in done.stderr


def test_operations_are_timed_against_the_formula_and_torch(tmp_path):
    pytest.importorskip("rich")
    out = tmp_path / "deeper" / "ops.json"
    done = run_python(
        ROOT / "benchmarks" / "ops.py", "--quick", "--op", "rms_norm,dequantize,moe_gate",
        "--dtype", "float32,bfloat16", "--threads", "1", "--json", out,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(out.read_text())
    assert data["quick"] is True and data["environment"]["cores"] >= 1 and data["verdict"]
    assert [(row["op"], row["dtype"]) for row in data["rows"]] == [
        (op, dtype) for op in ("rms_norm", "dequantize", "moe_gate")
        for dtype in ("float32", "bfloat16")]
    for row in data["rows"]:
        assert {"eager", "torch", "lz", row["chosen"], f"reference.{row['op']}"} <= row["us"].keys()
        assert (row["us"].keys() == row["over_eager"].keys()
                and row["over_eager"]["eager"]["median"] == 1.0)
        assert row["best"] in row["us"] and row["threads"] == 1 and not row["failed"]
    assert "*" in done.stdout and "SmolLM2, 1 row" in done.stdout


def test_an_unknown_operation_is_named():
    done = run_python(ROOT / "benchmarks" / "ops.py", "--op", "rms_nrom",
                      env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode != 0 and "rms_nrom" in done.stderr and "rms_norm" in done.stderr


def test_every_operation_on_tensors_has_a_shape():
    code = ("from shapes import SHAPES\nfrom layerzero.ops import CATALOG\n"
            "print(set(CATALOG) - {s.op for s in SHAPES})\n")
    done = run_python("-c", code, cwd=ROOT / "benchmarks",
                      env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert set(eval(done.stdout)) == {"tokenize", "detokenize"}

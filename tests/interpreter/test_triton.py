"""Our Triton kernels, run by Triton's own interpreter on the CPU, keep their contracts. See cases.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")]

# The dtype, and every how many of its op's cases: the interpreter takes a tenth of a second or more for each.
RUNS = {
    "triton.attention_decode": "float16:4", "triton.paged_attention_decode": "float16:4",
    "triton.rms_norm": "bfloat16:2", "triton.add_rms_norm": "bfloat16:2", "triton.rope": "float32:4",
    "triton.mlp": "float32:3", "triton.quantize": "float32:3", "triton.linear_gemv": "float16:4",
    "triton.quantized_linear_gemv": "float16:5", "triton.sample": "float32:7"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """One process for all of them: most of its time would be imports. And one for all workers of a test run: the first
    one runs it, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    begun, kept = folder / "interpreted.begun", folder / "interpreted.jsonl"
    try:
        begun.touch(exist_ok=False)
    except FileExistsError:
        for _ in range(2500):
            if kept.exists():
                break
            time.sleep(0.1)
    else:
        unfinished = folder / "interpreted.unfinished"
        try:
            unfinished.write_text(_ran())
        finally:
            unfinished.touch()
            unfinished.rename(kept)
    found: dict[str, list[dict[str, str]]] = {}
    for line in kept.read_text().splitlines():
        result = json.loads(line)
        found.setdefault(result["kernel"], []).append(result)
    return found


def _ran() -> str:
    tasks = [f"{name}:{how}" for name, how in RUNS.items()]
    done = subprocess.run([sys.executable, str(Path(__file__).parent / "cases.py"), *tasks, "crowded", "expanded"],
                          capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", [*RUNS, "crowded", "expanded"])
def test_kernel_keeps_the_contract_in_the_interpreter(name: str, results: dict[str, list[dict[str, str]]]) -> None:
    ran = [r for r in results[name] if r["status"] != "skipped"]
    assert len(ran) >= 3, results[name]
    assert all(r["status"] == "passed" for r in ran), "\n".join(r["text"] for r in ran if r["status"] != "passed")

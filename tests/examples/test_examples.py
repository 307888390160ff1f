"""Every script in examples/ runs from its beginning to its end, says what it promises, and fails
loudly.
"""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from helpers import run_python

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
pytestmark = pytest.mark.integration
# What a reader is promised to see.
SHOWN = {
    "patch_a_model": ("the same tokens: True", "unpatched, bit by bit as before: True", "why:",
                      "attention"),
    "tune_for_your_traffic": ("recorded:", "decoding before:", "measured", " us ("),
    "bring_your_own_kernel": ("example.rms_norm: passed", "example.wrong: failed", "eps",
                              "cannot serve this call"),
    "serve_with_a_paged_cache": ("waiting; joins: r0, r1",
                                 "every answer as if it were alone: True"),
    "serve_with_ray": ("8 requests at once, in batches of up to",
                       "every answer as if it were alone: True", "as answered whole: True",
                       "/metrics has"),
    "debug_a_wrong_kernel": ("before: passed", "culprit: lz.attention by example.diagonal",
                             "alignment",
                             "without it: passed"),
}
NEEDS = {"patch_a_model": "transformers", "serve_with_ray": "ray"}


def run(script: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(script, cwd=folder,
                      env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_runs_and_shows_what_it_says(script, tmp_path):
    needed = NEEDS.get(script.stem, "torch")
    pytest.importorskip(needed, reason=f"needs {needed}" + (
        ": make test-fleet installs it and runs this" if needed == "ray" else ""))
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [text for text in SHOWN[script.stem] if text not in done.stdout] == [], done.stdout
    assert list(tmp_path.iterdir()) == []      # nothing is left behind where it was started


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_its_head_says_what_one_will_see(script):
    head = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
    assert "You will see" in head and f"python examples/{script.name}" in head


def test_there_is_one_for_each_purpose():
    assert {script.stem for script in SCRIPTS} == set(SHOWN)


def test_a_wrong_result_is_an_exit_code(tmp_path):
    """An example that could not fail would prove nothing: with its own kernel denied, nobody serves
    by that name."""
    done = run(ROOT / "examples" / "bring_your_own_kernel.py", tmp_path, LAYERZERO_DENY="example.*")
    assert done.returncode != 0

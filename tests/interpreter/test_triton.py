"""Our Triton kernels, run by Triton's own interpreter on the CPU, keep their contracts.

See cases.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import FULL, triton_interpreter_works

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(not triton_interpreter_works(),
                                 reason="no Triton whose interpreter works here")]

# The dtype, and every how many of its op's cases in `make test` (0: none, another kernel has the same
# code with other blocks) and with LZ_TEST_FULL=1: the interpreter takes a tenth of a second or more
# for each, and for some cases seconds.
RUNS = {
    "triton.attention_decode": ("float16", 24, 4),
    "triton.paged_attention_decode": ("float16", 16, 4),
    "triton.grouped_attention": ("float16", 12, 8),
    "triton.rms_norm": ("bfloat16", 2, 2), "triton.add_rms_norm": ("bfloat16", 2, 2),
    "triton.rope": ("float32", 16, 4), "triton.mlp": ("float32", 3, 3),
    "triton.quantize": ("float32", 3, 3), "triton.linear_gemv": ("float16", 8, 4),
    "triton.quantized_linear_gemv": ("float16", 20, 5),
    "triton.quantized_linear_tiled": ("float16", 30, 30),
    "triton.quantized_linear_decoded": ("float16", 40, 40),
    "triton.int8_dynamic_linear": ("float16", 50, 50),
    "triton.linear_invariant": ("float32", 8, 8), "triton.mlp_invariant": ("float32", 8, 8),
    "triton.attention_invariant": ("float16", 10, 8),
    "triton.selective_state_update": ("float32", 1, 1),
    "triton.mamba_chunk_scan": ("float16", 2, 1),
    "triton.gated_delta_rule_tokens": ("float16", 2, 1),
    "triton.gated_delta_rule": ("float32", 3, 2), "triton.sample": ("float32", 21, 7),
    "triton.attention_decode_half": ("float16", 0, 40),
    "triton.paged_attention_decode_double": ("float16", 0, 40),
    "triton.linear_gemv_double": ("float16", 0, 20),
    "triton.quantized_linear_gemv_half": ("float16", 0, 40)}


def test_kernels_keep_their_contracts_in_the_interpreter() -> None:
    """One process and one test for all of them: most of its time would be imports."""
    own = ("crowded", "expanded", "configured", "grouped_backward")
    chosen = {name: (dtype, every if FULL else few) for name, (dtype, few, every) in RUNS.items()
              if FULL or few}
    tasks = [*(f"{name}:{dtype}:{every}" for name, (dtype, every) in chosen.items()), *own]
    done = subprocess.run([sys.executable, str(Path(__file__).parent / "cases.py"), *tasks],
                          capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    ran: dict[str, list[dict[str, str]]] = {}
    for line in done.stdout.splitlines():
        result = json.loads(line)
        if result["status"] != "skipped":
            ran.setdefault(result["kernel"], []).append(result)
    assert {name: len(ran.get(name, ())) >= 3
            for name in (*chosen, *own)} == dict.fromkeys((*chosen, *own), True)
    wrong = [r["text"] for results in ran.values() for r in results if r["status"] != "passed"]
    assert not wrong, "\n".join(wrong)

"""norm.cu in the emulator keeps the contracts of the RMS norms."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.norm import norm
from layerzero.verify.kernel.contract import check_case

from .run import COMPILER, Kernel, on_cpu

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

CASES: tuple[dict[str, Any], ...] = (
    {"hidden": 264, "rows": (3, 4)}, {"hidden": 4096, "rows": (1,)},
    {"hidden": 264, "affine": False}, {"hidden": 264, "weight_dtype": "float32"},
    {"hidden": 264, "rows": (2,), "extreme": True},
    {"hidden": 264, "rows": (0,)})


@pytest.mark.parametrize("name", ["cuda.rms_norm", "cuda.add_rms_norm"])
def test_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    norm._prepare.cache_clear()
    results = [check_case(on_cpu(name), case, "bfloat16", "cpu") for case in CASES]
    norm._prepare.cache_clear()
    assert [str(r) for r in results if r.status != "passed"] == []

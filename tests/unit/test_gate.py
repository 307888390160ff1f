"""lz gate: what is right passes, and each kind of wrong declaration is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Fake, happened, register, world

import layerzero as lz
from layerzero.cli.gate import run
from layerzero.ops.linear import OP as linear
from layerzero.ops.rms_norm import OP as rms_norm
from layerzero.runtime import world as worlds
from layerzero.runtime.catalog import Catalog
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op, Tolerance
from layerzero.spec.rules import at_least, at_most, dtypes, multiple_of, one_of
from layerzero.verify import gate
from layerzero.verify.gate import docs_check, static_checks
from layerzero.verify.gate_models import FAMILIES, model_cells

__all__ = ["happened", "world"]
ROOT = Path(__file__).parents[2]


def right() -> Callable[..., Any]:
    return rms_norm.reference


def findings(op: Op = rms_norm, **declared: Any) -> list[str]:
    """What the checks say of a catalog with one op and one kernel of it."""
    kernel = Kernel("fake.one", op, declared.pop("load", right), **declared)
    only = Catalog({op.name: op}, (kernel,))
    return [f"{f.check}: {f}" for checked in static_checks(only) for f in checked.findings]


def test_every_declaration_of_the_library_passes() -> None:
    every = list(static_checks(worlds.current().catalog))
    assert [c.name for c in every] == ["cases", "meta", "tolerances", "cost", "loads", "rules", "claims"]
    assert [str(f) for c in every for f in c.findings] == []
    assert all(c.asked >= 20 for c in every)


def test_a_right_kernel_has_no_findings() -> None:
    assert findings() == []
    assert findings(requires=(at_most("hidden", 512), dtypes("float32", "bfloat16"))) == []


def _inputs_without_a_seed(**case: Any) -> dict[str, Any]:
    case.pop("seed", None)
    return {"x": torch.randn(2, 8, dtype=case.get("dtype", torch.float32)), "weight": None, "eps": 1e-6, "offset": 0.0}


def _two_results(x: torch.Tensor, weight: Any = None, eps: float = 1e-6, *, offset: float = 0.0) -> Any:
    return torch.empty_like(x), torch.empty_like(x)


@pytest.mark.parametrize(("wrong", "word"), [
    (lambda: replace(rms_norm, inputs=_inputs_without_a_seed), "cases: lz.rms_norm: case {} at float32 differs"),
    (lambda: replace(rms_norm, requires=(at_most("hidden", 16),)), "breaks the contract: SHAPE_UNSUPPORTED"),
    (lambda: replace(rms_norm, meta=_two_results), "meta: lz.rms_norm: case {}: meta says"),
    (lambda: replace(rms_norm, tolerance=Tolerance({"float32": (1e-5, 1e-5)})), "gives bfloat16, which has no toler"),
    (lambda: replace(rms_norm, tolerance=Tolerance(dict.fromkeys(rms_norm.dtypes, (2.0, 0.1)))), "let anything pass"),
    (lambda: replace(rms_norm, tolerance=replace(rms_norm.tolerance, times_eager=50.0)), "times_eager = 50"),
    (lambda: replace(rms_norm, bytes="0"), "declares no bytes"),
    (lambda: replace(rms_norm, flops="0 - hidden"), "flops of case"),
])
def test_an_op_that_lacks_something_is_named(wrong: Callable[[], Op], word: str) -> None:
    assert [line for line in findings(wrong()) if word in line]


def _without_weight() -> Callable[..., Any]:
    return lambda x, eps=1e-6: rms_norm.reference(x, None, eps)


@pytest.mark.parametrize(("declared", "word"), [
    ({"load": _without_weight}, "does not take weight, and no rule holds it"),
    ({"requires": (at_least("hidden", 0),)}, "'hidden >= 0' refuses no call at all"),
    ({"requires": (multiple_of("hidden", 1),)}, "refuses no call at all"),
    ({"requires": (at_least("hidden", 10**6),)}, "accepts no case of its op"),
    ({"requires": (at_most("hidden", 64), at_least("hidden", 65))}, "accepts no case of its op"),
    ({"requires": (dtypes("float32", "bfloat16"), one_of("itemsize", 4))}, "claims the dtype bfloat16, which no case"),
])
def test_a_kernel_that_is_declared_wrongly_is_named(declared: dict[str, Any], word: str) -> None:
    assert [line for line in findings(**declared) if word in line]


def test_an_argument_that_no_case_gives_is_named() -> None:
    """Without the case that has an activation, nobody would know what a kernel does with one."""
    bare = replace(linear, cases=({}, {"bias": False}))
    lines = findings(bare, load=lambda: linear.reference)
    assert [line for line in lines if "takes activation and no rule limits it" in line]


def test_a_check_that_breaks_is_a_finding_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**case: Any) -> dict[str, Any]:
        raise RuntimeError("no such size")

    lines = findings(replace(rms_norm, inputs=broken))
    assert [line for line in lines if "the check ended in RuntimeError: no such size" in line]


def test_the_pages_are_checked_where_they_are(tmp_path: Path) -> None:
    assert docs_check(tmp_path).passed and "not a source checkout" in docs_check(tmp_path).note
    script = tmp_path / "docs" / "generate.py"
    script.parent.mkdir()
    script.write_text("import sys\nprint('docs/reference/ops.md is out of date')\nsys.exit('--check' in sys.argv)\n")
    found = docs_check(tmp_path)
    assert not found.passed and "ops.md is out of date" in str(found.findings[0])


# Models.

def test_the_families_agree_with_plain_torch() -> None:
    cells = list(model_cells(dtypes=("float32", "bfloat16")))
    assert [str(c) for c in cells if not c.passed] == []
    assert {c.family for c in cells} == set(FAMILIES) and len(cells) == 3 * 2 * 2
    served = {op for c in cells for op, _ in c.kernels}
    assert {"attention", "paged_attention", "rope", "rms_norm", "layer_norm", "group_norm", "mlp", "linear"} <= served


class Halved(Fake):
    """A norm that gives half of what it should."""

    def _load(self) -> Callable[..., Any]:
        right = super()._load()
        return lambda x, weight=None, eps=1e-6, *, offset=0.0: right(x, weight, eps, offset=offset) / 2


@pytest.mark.usefixtures("world")
def test_a_wrong_kernel_fails_its_families_only() -> None:
    register(Halved("fake.half", prior=1e6))
    cells = list(model_cells(dtypes=("float32",)))
    assert {c.family for c in cells if not c.passed} == {"decoder", "encoder-decoder"}
    worst = next(c for c in cells if not c.passed)
    assert "logits" in str(worst) and "allowed" in str(worst)
    assert any(kernel == "fake.half" for _, kernel in worst.kernels)


def test_names_that_fit_nothing_are_errors(tmp_path: Path) -> None:
    with pytest.raises(lz.ConfigError, match="encoder-decoder"):
        list(model_cells(["decodre"]))
    with pytest.raises(lz.ConfigError, match="quick, full"):
        list(model_cells(lane="fast"))
    (tmp_path / "file").write_text("")
    with pytest.raises(lz.ConfigError, match="wanted a folder"):
        run(out=tmp_path / "file")


# The command.

def test_reports_are_written_beside_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerzero.cli.gate._ROOT", tmp_path)
    for name in ("_cases", "_meta", "_tolerances", "_cost", "_loads", "_rules"):       # they have tests of their own
        monkeypatch.setattr(gate, name, lambda subject: iter([]))
    monkeypatch.setattr(gate, "_claims", lambda kernel: iter(["claims the moon"] if kernel.id == "torch.mlp" else []))
    assert run(static=True, models=True, families=["image"], out=tmp_path / "new" / "folder") == 1
    out = capsys.readouterr().out
    assert "torch.mlp: claims the moon" in out and "FAILED: " in out and "ok  image float32 batch 1 length 7" in out
    data = json.loads((tmp_path / "new" / "folder" / "gate.json").read_text())
    assert data["passed"] is False and len(data["models"]) == 6 and len(data["static"]) == 8
    assert data["static"][6]["findings"] == [
        {"check": "claims", "subject": "torch.mlp", "problem": "claims the moon", "advice": ""}]
    assert (tmp_path / "new" / "folder" / "gate.txt").read_text() == out


def test_as_json_it_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(static=False, families=["image"], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] and told["static"] == [] and {c["dtype"] for c in told["models"]} == {
        "float32", "bfloat16", "float16"}

"""lz gate: what is right passes, and each kind of wrong declaration is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Fake, emitted, register, world

import layerzero as lz
from layerzero.cli import main
from layerzero.cli.commands.prove.gate import run
from layerzero.machine import hardware
from layerzero.operate.readiness import Readiness, ReadinessCheck
from layerzero.ops.linear import OP as linear
from layerzero.ops.rms_norm import OP as rms_norm
from layerzero.release import performance, schemas, stages, targets
from layerzero.release.gate import combine, run_gate, stages_of
from layerzero.release.performance import CALLS, Baseline, MeasuredSpeed
from layerzero.release.soak import SoakPart, SoakReport, SoakSample
from layerzero.release.stages import GateOptions, readiness_checked, soak_checks
from layerzero.release.waivers import Waiver, read_waivers
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op, Tolerance
from layerzero.spec.rules import at_least, at_most, dtypes, multiple_of, one_of
from layerzero.verify.cases import declarations as gate
from layerzero.verify.cases.declarations import docs_check, static_checks
from layerzero.verify.model.families import FAMILIES, model_cells
from layerzero.world import snapshot as worlds
from layerzero.world.registry.catalog import Catalog

__all__ = ["emitted", "world"]
ROOT = Path(__file__).parents[3]
FULL = os.environ.get("LZ_TEST_FULL") == "1"


def right() -> Callable[..., Any]:
    return rms_norm.reference


def findings(op: Op = rms_norm, **declared: Any) -> list[str]:
    """What the checks say of a catalog with one op and one kernel of it."""
    kernel = Kernel("fake.one", op, declared.pop("load", right), **declared)
    only = Catalog({op.name: op}, (kernel,))
    return [f"{f.check}: {f}" for checked in static_checks(only) for f in checked.findings]


def test_the_declarations_of_the_library_pass() -> None:
    """All operations and a ninth of the kernels: tests/contract asks each for its rules, and so
    does the nightly gate."""
    catalog = worlds.current().catalog
    every = list(static_checks(catalog if FULL else Catalog(catalog.ops, catalog.kernels[::9])))
    assert [c.name for c in every] == ["cases", "meta", "tolerances", "cost", "loads", "rules",
                                       "claims"]
    assert [str(f) for c in every for f in c.findings] == []
    assert all(c.asked >= 20 for c in every)


def test_a_right_kernel_has_no_findings() -> None:
    assert findings() == []
    assert findings(requires=(at_most("hidden", 512), dtypes("float32", "bfloat16"))) == []


def _inputs_without_a_seed(**case: Any) -> dict[str, Any]:
    case.pop("seed", None)
    return {"x": torch.randn(2, 8, dtype=case.get("dtype", torch.float32)), "weight": None,
            "eps": 1e-6, "offset": 0.0}


def _two_results(x: torch.Tensor, weight: Any = None, eps: float = 1e-6, *,
                 offset: float = 0.0) -> Any:
    return torch.empty_like(x), torch.empty_like(x)


@pytest.mark.parametrize(("wrong", "word"), [
    (lambda: replace(rms_norm, inputs=_inputs_without_a_seed),
     "cases: lz.rms_norm: case {} at float32 differs"),
    (lambda: replace(rms_norm, requires=(at_most("hidden", 16),)),
     "breaks the contract: SHAPE_UNSUPPORTED"),
    (lambda: replace(rms_norm, meta=_two_results), "meta: lz.rms_norm: case {}: meta says"),
    (lambda: replace(rms_norm, tolerance=Tolerance({"float32": (1e-5, 1e-5)})),
     "gives bfloat16, which has no toler"),
    (lambda: replace(rms_norm, tolerance=Tolerance(dict.fromkeys(rms_norm.dtypes, (2.0, 0.1)))),
     "let anything pass"),
    (lambda: replace(rms_norm, tolerance=replace(rms_norm.tolerance, times_eager=50.0)),
     "times_eager = 50"),
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
    ({"requires": (dtypes("float32", "bfloat16"), one_of("itemsize", 4))},
     "claims the dtype bfloat16, which no case"),
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
    script.write_text(
        "import sys\nprint('docs/reference/ops.md is out of date')\nsys.exit('--check' in "
        "sys.argv)\n")
    findings = docs_check(tmp_path)
    assert not findings.passed and "ops.md is out of date" in str(findings.findings[0])


# Models.

def test_the_families_agree_with_plain_torch() -> None:
    cells = list(model_cells(dtypes=("float32", "bfloat16")))
    assert [str(c) for c in cells if not c.passed] == []
    assert {c.family for c in cells} == set(FAMILIES) and len(cells) == 3 * 2 * 2
    served = {op for c in cells for op, _ in c.kernels}
    assert {"attention", "paged_attention", "rope", "rms_norm", "layer_norm", "group_norm", "mlp",
            "linear"} <= served


class Halved(Fake):
    """A norm that gives half of what it should."""

    def _load(self) -> Callable[..., Any]:
        right = super()._load()
        return lambda x, weight=None, eps=1e-6, *, offset=0.0: right(x, weight, eps,
                                                                     offset=offset) / 2


@pytest.mark.usefixtures("world")
def test_a_wrong_kernel_fails_its_families_only() -> None:
    register(Halved("fake.half", prior=1e6))
    cells = list(model_cells(dtypes=("float32",)))
    assert {c.family for c in cells if not c.passed} == {"decoder", "encoder-decoder"}
    worst = next(c for c in cells if not c.passed)
    assert "logits" in str(worst) and "allowed" in str(worst)
    assert any(kernel == "fake.half" for _, kernel in worst.kernels)


def test_names_that_fit_nothing_are_errors(tmp_path: Path) -> None:
    with pytest.raises(lz.errors.ConfigError, match="encoder-decoder"):
        list(model_cells(["decodre"]))
    with pytest.raises(lz.errors.ConfigError, match="quick, full"):
        list(model_cells(lane="fast"))
    (tmp_path / "file").write_text("")
    with pytest.raises(lz.errors.ConfigError, match="wanted a folder"):
        run(GateOptions("cpu", "cpu"), out=tmp_path / "file")
    with pytest.raises(lz.errors.ConfigError, match="did you mean 'performance'"):
        stages_of(["static,perfomance"])
    with pytest.raises(lz.errors.ConfigError, match="this machine has cpu-"):
        targets.choose_target("blackwell" if "blackwell" not in targets.local_targets()
                              else "cdna1")
    with pytest.raises(lz.errors.ConfigError, match="give one of them"):
        targets.choose_target("hopper", "cpu")


# The command.

def gate_options(root: Path, **more: Any) -> GateOptions:
    return GateOptions(targets.target_of(hardware.probe("cpu")), "cpu", "quick", root, **more)


def test_reports_are_written_beside_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    # they have tests of their own
    for name in ("_cases", "_meta", "_tolerances", "_cost", "_loads", "_rules"):
        monkeypatch.setattr(gate, name, lambda subject: iter([]))
    monkeypatch.setattr(gate, "_claims",
                        lambda kernel: iter(["claims <the> moon"] if kernel.id == "torch.mlp"
                                            else []))
    folder = tmp_path / "new" / "folder"
    assert run(gate_options(tmp_path, families=["image"]), ("static", "models"), out=folder) == 1
    out = capsys.readouterr().out
    assert ("torch.mlp: claims <the> moon" in out and "FAILED: " in out
            and "not asked: correctness, schema" in out)
    assert "ok  models: image float32 batch 1 length 7: as plain torch" in out and "linear: " in out
    data = json.loads((folder / "gate.json").read_text())
    assert data["passed"] is False and len(data["models"]) == 6 and len(data["static"]) == 8
    assert data["static"][6]["findings"] == [
        {"check": "claims", "subject": "torch.mlp", "problem": "claims <the> moon", "advice": ""}]
    assert [s["state"] for s in data["stages"]] == ["failed", "passed"] and data["failed"] == 1
    assert (folder / "gate.txt").read_text() == out
    matrix = json.loads((folder / "model_matrix_report_latest.json").read_text())
    assert matrix["passed"] and matrix["cells"] == data["models"] and matrix["stage"] == "models"
    assert not (folder / "contract_report_latest.json").exists()   # correctness was not asked
    page = (folder / "gate.html").read_text()
    assert "static: FAILED" in page and "claims &lt;the&gt; moon" in page and "<script" not in page


def test_as_json_it_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["gate", "--models", "--family", "image", "--device", "cpu", "--json"])
    assert not stop.value.code
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] and data["static"] == [] and {c["dtype"] for c in data["models"]} == {
        "float32", "bfloat16", "float16"}
    assert data["target"].startswith("cpu-") and data["schema"] == "layerzero.gate/1"


def test_a_stage_that_breaks_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Any) -> Any:
        raise RuntimeError("no disk")

    monkeypatch.setattr(schemas, "check", broken)
    report = run_gate(gate_options(tmp_path), ("schema",))
    assert (not report["passed"]
            and "RuntimeError: no disk" in report["stages"][0]["checks"][0]["findings"][0][
                "problem"])


@pytest.mark.usefixtures("world")
def test_a_wrong_kernel_fails_the_contract() -> None:
    register(Halved("fake.half", prior=1e6))
    report = run_gate(gate_options(ROOT), ("correctness",))
    (check,) = report["stages"][0]["checks"]
    assert [f["subject"] for f in check["findings"]] == ["fake.half"] and check["asked"] > 40


# Waivers.

HEAD = "version: 1\nwaivers:\n"
ROW = ("  - what: performance/cpu-arm/rms_norm decode\n    reason: torch became faster\n    "
       "expires: 2030-01-31\n")


def waivers_in(tmp_path: Path, text: str) -> tuple[Waiver, ...]:
    path = tmp_path / "waivers.yaml"
    path.write_text(text)
    return read_waivers(path)


def test_waivers_are_read(tmp_path: Path) -> None:
    first, second = waivers_in(tmp_path, HEAD + ROW + ROW + "    target: cpu-arm\n")
    assert (first.what, first.expires, first.target) == ("performance/cpu-arm/rms_norm decode",
                                                         date(2030, 1, 31), "")
    assert second.target == "cpu-arm" and waivers_in(tmp_path, "version: 1\nwaivers: []\n") == ()


@pytest.mark.parametrize(("text", "word"), [
    (HEAD + ROW + "    until: 2030-02-01\n", "unknown key 'until'"),
    (HEAD + ROW.replace("    reason: torch became faster\n", ""), "reason is missing"),
    (HEAD + ROW.replace("torch became faster", "todo"), "must say why"),
    (HEAD + ROW.replace("2030-01-31", "soon"),
     "expires must be a day such as 2026-12-31, got 'soon'"),
    (HEAD + ROW.replace("2030-01-31", "2030-02-31"), "not a file of waivers"),
    (HEAD + ROW.replace("performance/cpu-arm/", "correctness/contract/"),
     "a wrong answer is corrected, not waived"),
    (HEAD + "  - all of it\n", "wanted what, reason, expires"),
    ("version: 2\nwaivers: []\n", "wanted `version: 1`"),
    ("version: 1\nwaivers: []\nmore: 1\n", "got version, waivers, more"),
    ("version: 1\nwaivers: {}\n", "must be a list"),
    ("a: [", "not a file of waivers"),
    ("!!python/object/apply:os.system [true]\n", "not a file of waivers"),
    (HEAD + "  - &a [x, x]\n  - &b [*a, *a]\n", "an alias (*name) is not supported"),
    (HEAD + ROW + "#" * (1 << 20), "at most 64 KiB"),
])
def test_a_wrong_file_of_waivers_waives_nothing(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(lz.errors.ConfigError, match=r"waivers\.yaml") as raised:
        waivers_in(tmp_path, text)
    assert word in str(raised.value)


def test_waivers_are_read_from_a_file_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path, tmp_path / "absent"):
        with pytest.raises(lz.errors.ConfigError, match="wanted a file of waivers"):
            read_waivers(path)


# Baselines.

TIMED = MeasuredSpeed(2.0, 1.9, 2.1, 10.0, 20.0, 99)


def always(ratio: float, **others: float) -> performance.Timer:
    def timer(calls: Sequence[str], device: str, seconds: float) -> Mapping[str, MeasuredSpeed]:
        return {name: replace(TIMED, ratio=r, low=r * 0.95, high=r * 1.05) for name in calls
                for r in (others.get(name.replace(" ", "_"), ratio),)}
    return timer


def baseline_in(tmp_path: Path, **changed: Any) -> Path:
    path = tmp_path / "benchmarks" / "baselines" / f"{gate_options(tmp_path).target}.json"
    baseline = Baseline(gate_options(tmp_path).target, hardware.probe("cpu").name,
                        str(torch.__version__),
                        "2026-01-01",
                        dict.fromkeys(CALLS, TIMED))
    replace(baseline, **changed).save(path)
    return path


def slower(path: Path, first: performance.Timer, again: performance.Timer) -> list[str]:
    every = performance.compare(path, gate_options(path).target, "cpu", 0.1, first, again)
    return [f"{f.check}/{f.subject}: {f.problem}" for check in every for f in check.findings]


def test_a_regression_is_beyond_the_threshold_with_its_whole_interval_and_again(
        tmp_path: Path) -> None:
    path, target = baseline_in(tmp_path), gate_options(tmp_path).target
    assert Baseline.load(path).least("mlp decode") == pytest.approx(1.9 * 0.85)
    assert slower(path, always(2.0), always(0.0)) == []
    # 1.68 is inside: noise does not decide
    assert slower(path, always(1.6), always(0.0)) == []
    # another process says otherwise
    assert slower(path, always(1.0), always(2.0)) == []
    (finding,) = slower(path, always(2.0, mlp_decode=1.0), always(1.0))
    assert (finding.startswith(f"{target}/mlp decode: 1.00 times torch's speed")
            and "at least 1.61 is wanted" in finding)


def test_a_machine_without_its_own_baseline_is_told(tmp_path: Path) -> None:
    assert "there is no" in slower(tmp_path / "none.json", always(2.0), always(2.0))[0]
    path = baseline_in(tmp_path, device="another CPU")
    assert "is of" in slower(path, always(2.0), always(2.0))[0]
    path = baseline_in(tmp_path, calls={"rms_norm decode": TIMED, "gone": TIMED})
    messages = slower(path, always(2.0), always(2.0))
    assert ([t for t in messages if t.startswith("baseline/mlp decode")]
            and [t for t in messages if "not timed any more" in t])


@pytest.mark.parametrize("change", [
    {"schema": "layerzero.baseline/9"}, {"threshold": 2.0}, {"threshold": True}, {"calls": []},
    {"more": 1}, {"calls": {"one": {"ratio": -1.0}}}, {"torch": 2}])
def test_a_damaged_baseline_is_a_data_error(tmp_path: Path, change: dict[str, Any]) -> None:
    path = baseline_in(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(lz.errors.DataError, match="benchmarks"):
        Baseline.load(path)


def test_calls_are_timed_against_torch() -> None:
    timed = performance.in_this_process(["rms_norm decode", "attention decode"], "cpu", 0.02)
    assert all(0 < t.low <= t.ratio <= t.high and t.rounds >= 7 for t in timed.values())
    for name, make in CALLS.items():
        ours, torchs = (way() for way in make("cpu"))
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, torchs))):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_the_committed_baselines_can_be_read() -> None:
    folder = ROOT / "benchmarks" / "baselines"
    baselines = [Baseline.load(path) for path in folder.glob("*.json")
                 if path.name != schemas.RECORD]
    assert (baselines
            and all(b.target in targets.KNOWN and set(b.calls) == set(CALLS) for b in baselines))


# Waivers over baselines.

def run_performance_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                         *waivers: Waiver) -> dict[str, Any]:
    baseline_in(tmp_path)
    monkeypatch.setattr(performance, "in_this_process", always(2.0, mlp_decode=1.0))
    monkeypatch.setattr(performance, "in_new_process", always(1.0))
    return run_gate(gate_options(tmp_path), ("performance",), waivers, today=date(2026, 6, 15))


def waiver(what: str = "performance/*/mlp decode", day: int = 15, **more: Any) -> Waiver:
    return Waiver(what, "the new layout comes first", date(2026, 6, day), **more)


def test_a_clock_that_was_set_back_revives_no_waiver(tmp_path: Path) -> None:
    baseline_in(tmp_path)
    path = gate_options(tmp_path).baseline_file
    path.write_text(json.dumps({**json.loads(path.read_text()), "made": "2999-01-01"}))
    old = Waiver("performance/*/mlp decode", "as long as it lasts", date(2998, 12, 31))
    assert run_gate(gate_options(tmp_path), ("schema",), (old,))["waivers"][0]["state"] == "expired"


def test_a_waiver_lets_one_threshold_pass_until_its_day(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_performance_gate(tmp_path, monkeypatch)["passed"]
    report = run_performance_gate(tmp_path, monkeypatch, waiver())
    assert report["passed"] and [w["state"] for w in report["waivers"]] == ["used"]
    assert list(report["waived"]) == [f"performance/{report['target']}/mlp decode"]
    assert [s["state"] for s in report["stages"]] == ["waived", "passed"]


def test_an_expired_waiver_fails_and_says_so(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_performance_gate(tmp_path, monkeypatch, waiver(day=14))
    assert (not report["passed"] and report["waived"] == {}
            and [w["state"] for w in report["waivers"]] == ["expired"])
    assert "expired on 2026-06-14" in report["stages"][-1]["checks"][0]["findings"][0]["problem"]


def test_an_unused_waiver_is_told_and_one_of_another_target_is_not(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_performance_gate(tmp_path, monkeypatch, waiver(),
                                  waiver("performance/*/rope decode"),
                                  waiver(target="cdna1"),
                                  waiver("soak/trend/RSS"))
    assert (report["passed"] and [w["state"] for w in report["waivers"]]
            == ["used", "unused", "not asked", "not asked"])
    note = report["stages"][-1]["checks"][0]["note"]
    assert "unused: performance/*/rope decode" in note and "RSS" not in note and "cdna1" not in note


# Files, soak, readiness, several targets.

def test_every_kind_of_file_is_of_its_version() -> None:
    every = list(schemas.check(ROOT / "benchmarks" / "baselines" / schemas.RECORD))
    assert [str(f) for c in every for f in c.findings] == []
    kinds = ("capabilities", "table", "lockfile", "calls", "perf export", "trace", "baseline",
             "soak", "perfdb")
    assert [c.says.startswith(kind) for c, kind in zip(every, kinds)] == [True] * 9


def test_a_field_that_comes_or_goes_under_the_same_version_is_a_finding(tmp_path: Path) -> None:
    recorded = json.loads((ROOT / "benchmarks" / "baselines" / schemas.RECORD).read_text())
    recorded["baseline"]["structure"].remove("made")
    recorded["baseline"]["structure"].append("author")
    recorded["soak"]["version"] = "layerzero.soak/0"
    path = tmp_path / "schemas.json"
    path.write_text(json.dumps(recorded))
    messages = [str(f) for c in schemas.check(path) for f in c.findings]
    assert (len(messages) == 2 and "changed under the same version" in messages[0]
            and "new: made; gone: author" in messages[0])
    assert "version layerzero.soak/1 is not recorded" in messages[1]


def test_a_reader_that_takes_anything_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    careless = replace(schemas.KINDS["baseline"], read=lambda path: path.read_text())
    monkeypatch.setattr(schemas, "KINDS", {"baseline": careless})
    (files, _) = schemas.check(None)
    assert ([f.problem for f in files.findings if "another version was read" in f.problem]
            and "checkout" in files.note)


def soaked(counts: dict[str, int], rss: Callable[[float], float]) -> SoakReport:
    samples = [SoakSample(60.0 * i, rss(i), 9, 4, 10.0, 20.0, 12.0, i) for i in range(60)]
    texts = [f"{kind}: lz.rope is off" for kind in counts if kind != "calls"]
    return SoakReport(3600.0,
                      [SoakPart("2026-01-01", "a CPU", "2.13", samples, counts, texts, 3600.0)])


def test_what_a_soak_found_becomes_findings() -> None:
    good = list(soak_checks(soaked({"calls": 9}, lambda i: 300 + i % 7), 3600))
    assert [c.passed for c in good] == [True, True] and good[1].note == ""
    bad = list(soak_checks(soaked({"calls": 9, "wrong results": 2}, lambda i: 300 + 5 * i), 3600))
    assert [f.problem for f in bad[0].findings] == ["2 times; wrong results: lz.rope is off"]
    assert ([f.subject for f in bad[1].findings] == ["RSS"]
            and "grows by 300 MiB an hour" in bad[1].findings[0].problem)


def test_what_is_not_ready_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert readiness_checked("cpu").name == "ready"
    report = Readiness(
        (
            ReadinessCheck("table", "fail", "a table", "none", "lz solve"),
            ReadinessCheck("memory", "warning", "free memory", "little"),
            ReadinessCheck("x", "ok", "", ""),
        )
    )
    monkeypatch.setattr(stages, "readiness_check", lambda device=None: report)
    outcome = readiness_checked("cpu")
    assert ([str(f) for f in outcome.findings] == ["table: none; lz solve"]
            and outcome.note == "warnings: memory")


def test_a_release_needs_every_target_with_every_stage(tmp_path: Path) -> None:
    whole = [{"stage": name} for name in stages_of([])]
    rows = {"arm": ("cpu-arm", True, whole), "hopper": ("hopper", True, whole[:3]),
            "x86": ("cpu-x86", False, whole)}
    for name, (target, passed, ran) in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({
            "schema": "layerzero.gate/1", "target": target, "passed": passed, "lane": "usual",
            "stages": ran}))
    arm, hopper, x86 = (tmp_path / f"{name}.json" for name in rows)
    assert combine([arm], ["cpu-arm"])["accepted"]
    # stages were left out
    assert combine([arm, hopper], ["cpu-arm", "hopper"])["missing"] == ["hopper"]
    assert not combine([arm, x86], ["cpu-arm"])["accepted"]
    with pytest.raises(lz.errors.ConfigError, match="there is no target 'hoper'"):
        combine([arm], ["hoper"])
    lane = json.loads(arm.read_text())
    del lane["lane"]                           # who knows how long it was
    arm.write_text(json.dumps(lane))
    assert combine([arm], ["cpu-arm"])["missing"] == ["cpu-arm"]
    with pytest.raises(lz.errors.DataError, match=r"layerzero\.gate/1"):
        combine([baseline_in(tmp_path)], [])


@pytest.mark.usefixtures("world")
def test_without_quick_a_kernel_is_verified_once_and_then_its_certificate_holds(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    register(Halved("fake.half", prior=1e6))
    monkeypatch.setattr(stages, "_can_run",
                        lambda kernel, device: kernel.id in ("torch.layer_norm", "fake.half"))
    usual = replace(gate_options(ROOT), lane="usual")
    for proven, verified in ((0, 1), (1, 0)):
        (check,) = stages.run_stage("correctness", usual)
        assert [f.subject for f in check.findings] == ["fake.half"] and check.asked == 2
        assert f"{proven} by a certificate that holds, {verified} verified now" in check.says

"""make nightly: a lane that fails is told and does not stop the others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import lanes
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def nightly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("nightly", ROOT / ".ci" / "nightly.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nightly", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "nightly")
    return module


def lane(nightly: Any, name: str, code: str, **more: Any) -> Any:
    return nightly.Lane(name, "a lane of a test", (sys.executable, "-c", code), **more)


def test_every_lane_runs_and_the_summary_says_how(nightly: Any, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    every = [lane(nightly, "bad", "print('2 failed'); raise SystemExit(3)"),
             lane(nightly, "hangs", "import time; print('on', flush=True); time.sleep(600)",
                  hours=1 / 3600),
             lane(nightly, "absent", "", needs="no_such_module"),
             lane(nightly, "good", "import os; print(os.environ['LZ_X'])",
                  environ={"LZ_X": "9 passed"})]
    monkeypatch.setattr(nightly, "lanes", lambda scale: every)
    assert nightly.main([]) == 1
    rows = {line.split()[0]: line
            for line in (nightly.LOGS / "summary.txt").read_text().splitlines()}
    assert "FAILED" in rows["bad"] and "exit 3: 2 failed" in rows["bad"]
    assert "FAILED" in rows["hangs"] and "not done after" in rows["hangs"]
    assert "skipped" in rows["absent"] and "needs no_such_module" in rows["absent"]
    assert "passed" in rows["good"] and rows["good"].endswith("9 passed")
    assert ("9 passed" in (nightly.LOGS / "good.log").read_text()
            and "bad" in capsys.readouterr().out)
    assert nightly.main(["--lanes", "good,absent"]) == 0
    with pytest.raises(SystemExit):
        nightly.main(["--lanes", "worse"])


def test_its_commands_exist(nightly: Any) -> None:
    known = {one.name: one for one in nightly.lanes(1.0)}
    assert {"contract", "seeds", "soak", "models", "rest", "sizes"} <= known.keys()
    for one in known.values():
        for word in one.command:
            if word.startswith("tests/"):
                assert (ROOT / word).is_dir(), word


def test_what_make_test_leaves_out_has_a_lane(nightly: Any) -> None:
    """Each test that is named in lanes.py is there, and a lane that asks for it runs its folder."""
    asked = {word for one in nightly.lanes(1.0) if one.environ.get("LZ_TEST_FULL") == "1"
             for word in one.command if word.startswith("tests/")}
    for folder, tests in lanes.LONG.items():
        assert f"tests/{folder}" in asked, folder
        for test in tests:
            file, _, inside = test.partition("::")
            name = inside.rpartition("::")[2].partition("[")[0]
            text = (ROOT / "tests" / folder / file).read_text("utf-8")
            assert f"def {name}(" in text, test
    assert {f"tests/{folder}" for folder in ("faults", "interpreter", "contract")} <= asked

"""What is packed and what is said about it: one version, extras that exist, archives that work."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import layerzero as lz

ROOT = Path(__file__).parents[3]
NOT_FOR_USERS = {"all", "dev", "docs"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    # pytest brings tomli where Python has no tomllib
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import what is in .ci/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    yield importlib.import_module
    for name in ("dist", "matrix", "release"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def ci() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))


def test_the_version_is_written_once(project: dict[str, Any], scripts: Any) -> None:
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert (project["tool"]["setuptools"]["dynamic"]["version"]
            == {"attr": "layerzero.__version__"})
    # A literal: setuptools, the release check and others read it without importing torch.
    assert scripts("release").version() == lz.__version__


def test_all_is_every_extra(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == project["project"]["name"]
    assert everything.extras == extras.keys() - NOT_FOR_USERS


def test_messages_and_pages_name_extras_that_exist(project: dict[str, Any]) -> None:
    texts = {path: path.read_text(encoding="utf-8")
             for folder, pattern in (("src", "*.py"), ("docs", "*.md"), ("", "README.md"))
             for path in (ROOT / folder).rglob(pattern) if ".venv" not in path.parts}
    extras = project["project"]["optional-dependencies"]
    named = [(path.name, extra) for path, text in texts.items()
             for names in re.findall(r"(?:layerzero|'\.)\[([a-z,]+)\]", text)
             for extra in names.split(",")]
    assert len(named) > 5
    assert [(name, extra) for name, extra in named if extra not in extras] == []


def test_nobody_is_sent_to_the_package_of_another(project: dict[str, Any]) -> None:
    """`layerzero` on PyPI is another project. Where ours is installed, pip finds the extras of it;
    -U would replace it, and a page is read before anything is installed."""
    assert "Private :: Do Not Upload" in project["project"]["classifiers"]
    upgrades = [path.name for path in (ROOT / "src").rglob("*.py")
                if re.search(r"install (-U|--upgrade) '?layerzero", path.read_text("utf-8"))]
    pages = [path.name for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
             if re.search(r"pip install [^`\n]*\blayerzero\b", path.read_text("utf-8"))]
    assert upgrades == [] and pages == []


def test_ci_covers_what_is_claimed(project: dict[str, Any], ci: dict[str, Any]) -> None:
    claimed = [c.rpartition(" ")[2] for c in project["project"]["classifiers"]
               if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", c)]
    axes = ci["jobs"]["matrix"]["strategy"]["matrix"]
    assert axes["python"] == claimed
    assert project["project"]["requires-python"] == f">={claimed[0]}"
    (torch,) = (r for r in map(Requirement, project["project"]["dependencies"])
                if r.name == "torch")
    assert str(torch.specifier) == f">={axes['torch'][0].rpartition('.')[0]}"
    newest = re.search(r"^TORCH +\?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert newest and newest[1] == axes["torch"][-1]
    minors = [int(version.split(".")[1]) for version in axes["torch"]]
    assert minors == list(range(minors[0], minors[-1] + 1))


@pytest.mark.parametrize("file", sorted(
    str(path.relative_to(ROOT)) for path in ((ROOT / ".github").rglob("*.yml"))))
def test_workflows_and_forms_run_what_is_here(file: str) -> None:
    parsed = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in parsed.get("jobs", {}).values():
        commands = " ".join(step.get("run", "") for step in job["steps"])
        assert job["timeout-minutes"] <= 120
        assert [t for t in re.findall(r"\bmake ([a-z]+)", commands) if t not in targets] == []
        named = re.findall(r"\.ci/[a-z.]+", commands)
        assert [name for name in named if not (ROOT / name).exists()] == []
    for part in parsed.get("body", []):
        assert {"type", "attributes"} <= part.keys()
        assert part["type"] == "markdown" or part["attributes"]["label"]


def test_a_release_whose_words_disagree_is_told_so(scripts: Any) -> None:
    release = scripts("release")
    home = re.search(r"github\.com/([\w-]+/[\w-]+)", (ROOT / "pyproject.toml").read_text())
    assert home is not None
    messages = release.disagreements("v9.9.9", "somebody/fork")
    assert any("v9.9.9" in line and f"tag v{lz.__version__}" in line for line in messages)
    assert sum("somebody/fork" in line for line in messages) == 2   # pyproject and citation
    date, text = release.notes(lz.__version__)
    assert date and text.startswith("### ")
    # What is left when all agree is the date of a version that is not released yet.
    left = release.disagreements(f"v{lz.__version__}", home[1])
    assert all("CHANGELOG.md" in line for line in left) and bool(left) == (date == "unreleased")


def test_the_matrix_tells_which_rows_could_not_run(scripts: Any, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    matrix = scripts("matrix")
    for name in ("OUT", "VENVS"):
        monkeypatch.setattr(matrix, name, tmp_path / name.lower())
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix.dist, "build", lambda *_, **__: [tmp_path / "layerzero-1.whl"])
    assert matrix.main(["--rows", "3.99:2.8.0"]) == 1
    assert "there is no Python 3.99 here" in capsys.readouterr().out
    written = (tmp_path / "out" / "results.json").read_text()
    assert '"state": "FAILED"' in written and '"ok": false' in written
    with pytest.raises(SystemExit):
        matrix.main(["--rows", "3.12"])
    assert "wants PYTHON:TORCH like 3.12:2.9.1, got '3.12'" in capsys.readouterr().err
    assert matrix.find_python(".".join(map(str, sys.version_info[:2]))) == sys.executable


def test_the_wheel_is_whole_and_works_outside_the_checkout(scripts: Any, tmp_path: Path) -> None:
    for name in ("build", "pip"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: pip install {name}")
    dist = scripts("dist")
    (wheel,) = dist.build(tmp_path, isolated=False, kinds=("wheel",))
    assert dist.missing(wheel) == []
    message = dist.install_and_call(wheel, commands=False)
    assert f"layerzero {lz.__version__}, torch" in message and "imported and called" in message

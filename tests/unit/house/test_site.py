"""The site is whole: a page for everything, a notebook that runs, figures that are those of
benchmarks/results, commands that exist; and mkdocs, where it is installed, finds no broken link.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import python

from layerzero.cli import main
from layerzero.selection.policy import RENAMED
from layerzero.spec.reason import Code

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))


def module(name: str) -> Any:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_navigation_has_every_page_once():
    listed = [page for section in CONFIG["nav"] for pages in section.values() for page in pages]
    pages = [str(page.relative_to(DOCS)) for page in PAGES[1:]]
    assert sorted(listed) == sorted(["index.md", *pages])       # index.md is README.md


def test_mkdocs_finds_no_broken_link(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed; make site does it")
    python(f"from mkdocs.__main__ import cli\n"
           f"cli(['build', '--strict', '--quiet', '--config-file', {str(ROOT / 'mkdocs.yml')!r}, "
           f"'--site-dir', {str(tmp_path / 'site')!r}])")
    first = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "lz.attention" in first
    assert 'src="http' not in first             # a reader's browser asks nobody else
    assert (tmp_path / "site" / "quickstart.ipynb").exists()


# the notebook

def test_the_notebook_is_the_page_and_runs(world, monkeypatch, tmp_path, capsys):
    notebook = json.loads((DOCS / "quickstart.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    text = (DOCS / "quickstart.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert cells == [block.strip("\n") for block in blocks]
    assert all(not cell.get("outputs") for cell in notebook["cells"])      # nothing that could age
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"quickstart.ipynb, cell {number}", "exec", dont_inherit=True), names)
    assert capsys.readouterr().out.startswith("lz.attention -> ")


# figures

def test_the_chart_follows_the_results(monkeypatch):
    figures = module("figures")
    assert figures.chart() == (DOCS / "img" / "h200.svg").read_text("utf-8")
    results = json.loads((ROOT / "benchmarks" / "results" / "gpu-h200.json").read_text("utf-8"))
    for row in results["rows"]:
        row["candidates"] = {kernel: time and time * (3 if kernel.startswith("torch.") else 1)
                             for kernel, time in row["candidates"].items()}
    monkeypatch.setattr(figures, "load", lambda name: results)
    assert figures.chart() != (DOCS / "img" / "h200.svg").read_text("utf-8")
    results["rows"] = results["rows"][:1]
    with pytest.raises(SystemExit, match="at least 5 of the rows"):
        figures.chart()


def test_every_figure_of_the_table_is_in_the_results():
    """As the files have it, rounded as the table does."""
    results = ROOT / "benchmarks" / "results"
    numbers = {float(text) for file in results.glob("*.json")
               for text in re.findall(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?", file.read_text("utf-8"))}
    figures = {f"{number:.0f}" for number in numbers} | {f"{number:.1f}" for number in numbers}
    table = re.search(r"<!-- generated:results -->\n(.*?)<!-- /", (ROOT / "README.md").read_text(
        "utf-8"), re.DOTALL)
    assert table is not None
    cells = [cell for row in table[1].splitlines()[2:] for cell in row.split("|")[2:4]]
    shown = [number for cell in cells for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", cell)]
    assert len(shown) >= 10
    assert [number for number in shown if number not in figures and number != "32"] == []


# troubleshooting and stability

def test_every_code_has_a_remedy_and_every_remedy_a_code():
    sys.path.insert(0, str(DOCS))
    try:
        remedies = module("remedies")
    finally:
        sys.path.remove(str(DOCS))
    assert [code.value for code in Code if not (code.advice or remedies.REMEDIES.get(code))] == []
    assert set(remedies.REMEDIES) - {code.value for code in Code} == set()


def test_what_is_deprecated_is_listed():
    page = (DOCS / "stability.md").read_text("utf-8")
    assert [name for name in RENAMED if f"`{name}`" not in page] == []


# commands

@pytest.fixture(scope="module")
def help_of():
    """The help of a command, asked once."""
    texts: dict[tuple[str, ...], str] = {}

    def ask(capsys, *words: str) -> str:
        if words not in texts:
            with pytest.raises(SystemExit) as stop:
                main([*words, "--help"])
            out = capsys.readouterr().out
            texts[words] = out if stop.value.code in (0, None) else ""
        return texts[words]

    return ask


def subcommands(text: str) -> list[str]:
    """The names in the lists of commands of a help text, which stand in panels."""
    return re.findall(r"^  ([a-z][a-z-]+)  +\S", text, re.MULTILINE)


def test_every_command_that_a_page_names_exists_with_its_options(help_of, capsys):
    top = subcommands(help_of(capsys))
    assert {"doctor", "explain", "tune"} <= set(top)
    named = {(line, page.name) for page in PAGES
             for line in re.findall(r"(?:^\$ |`)(lz [a-z][^`\n]*)", page.read_text("utf-8"),
                                    re.MULTILINE)}
    wrong = []
    for line, page in sorted(named):
        words = re.sub(r"\s+#.*| -- .*|\|.*", "", line).split()[1:]
        path = words[:1]
        if path[0] not in top:
            wrong.append((page, line, "no such command"))
            continue
        options = re.findall(r"(?<!\S)--[a-z][a-z-]+", " ".join(words))
        if not options:
            continue
        if len(words) > 1 and words[1] in subcommands(help_of(capsys, *path)):
            path.append(words[1])
        text = help_of(capsys, *path)
        wrong += [(page, line, word) for word in options if word not in text and word != "--help"]
    assert wrong == []

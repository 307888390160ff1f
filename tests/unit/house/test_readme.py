"""README.md says nothing that does not run: its Python, its commands (and those of docs/cli.md),
its names.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers import run_python

import layerzero as lz
from layerzero.cli import main
from layerzero.world import snapshot as worlds

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
FUNCTIONS = (ROOT / "docs" / "functions.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


CLI = (ROOT / "docs" / "cli.md").read_text()
COMMANDS = [line.split() for line in re.findall(r"^\$ (lz .*)$", README + CLI, re.MULTILINE)]


def test_the_python_blocks_run_as_typed(tmp_path):
    """In one process of its own and in order, as a reader would type them."""
    code = "\n".join(blocks("python"))
    assert len(blocks("python")) >= 2
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lz.attention -> ")
    assert "flash_attn.v2 was asked for by backend=" in done.stdout


def test_explain_looks_as_shown():
    """Line for line, but for the basis of a score, which depends on the processor; docs/generate.py
    leaves some out of those that may not serve."""
    *shown, rest = blocks("text")[0].splitlines()
    q, (k, v) = torch.zeros(1, 32, 1, 128), torch.zeros(2, 1, 8, 4096, 128)
    plan = lz.explain("attention", q, k, v)
    if not plan.kernel.startswith("native."):
        pytest.skip("our CPU kernels, which the output shows, are not compiled here: lz build")
    said = str(plan).splitlines()
    assert shown[:2] == said[:2]
    assert {line.partition(" us (")[0] for line in shown} <= {
        line.partition(" us (")[0] for line in said}
    refused = sum(line.startswith("   x ") for line in shown)
    more = len(plan.rejected) - refused
    assert refused and rest == f"   ... and {more} more, each with its reasons"


def test_it_is_short_and_has_its_parts():
    assert len(README.splitlines()) <= 150
    assert len(re.findall(r"^!\[.+\]\(docs/img/\w+\.svg\)$", README, re.MULTILINE)) == 1
    assert len(re.findall(r"^\|(?:---\|)+$", README, re.MULTILINE)) == 1        # one table
    assert all(f"$ make {target} " in README for target in ("run", "test"))
    sections = ["Why", "A minute of it", "Where next", "Limits"]
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == sections


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_commands_run_as_typed(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words[1:])
    assert stop.value.code in (0, None)
    assert capsys.readouterr().out


def test_there_are_commands():
    assert len(COMMANDS) >= 5


def test_the_table_names_every_function_that_is_no_op():
    named = set(re.findall(r"\blz\.(\w+)", FUNCTIONS))
    ops = set(worlds.current().catalog.ops)    # these have a reference page of their own
    functions = {name for name in lz.__all__ if not name[0].isupper() and name != "direct"} - ops
    assert functions - named == set()
    assert {name for name in named if not hasattr(lz, name)} == set()

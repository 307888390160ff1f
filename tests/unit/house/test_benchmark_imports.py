"""What the benchmarks import from the package is there: they are run by hand, and a rename would
show only then."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted((ROOT / "benchmarks").glob("*.py"))


@lru_cache(maxsize=None)
def defined(module: Path) -> set[str]:
    """The names that a module has at its top level, whatever `if` or `try` they stand in."""
    names: set[str] = set()
    open_nodes: list[ast.AST] = [ast.parse(module.read_text())] if module.exists() else []
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            open_nodes += ast.iter_child_nodes(node)
    return names


def missing(program: Path) -> list[str]:
    absent = []
    for node in ast.walk(ast.parse(program.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        place = ROOT / "src" / node.module.replace(".", "/")
        if node.module.partition(".")[0] != "layerzero" or node.module == "layerzero":
            continue
        module = place.with_suffix(".py") if place.with_suffix(".py").exists() else (
            place / "__init__.py")
        absent += [f"{node.module}.{a.name}" for a in node.names if a.name not in defined(module)
                   and not (place / f"{a.name}.py").exists() and not (place / a.name).is_dir()]
    return absent


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_the_package_has_what_a_benchmark_imports(program: Path) -> None:
    assert not missing(program)


def test_a_name_that_is_gone_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "old.py"
    program.write_text("from layerzero.tuning.regret import replay, no_such_name\n")
    assert missing(program) == ["layerzero.tuning.regret.no_such_name"]

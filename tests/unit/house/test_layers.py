"""The house's plan, kept: imports point down only, and siblings in ops/ and backends/ do not know
each other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "src" / "layerzero"
RANK = {"spec": 0, "ops": 1, "perf": 1, "backends": 2, "selection": 2, "machine": 3, "world": 4,
        "dispatch": 5, "models": 6, "operate": 6, "plan": 7, "tuning": 7, "verify": 7,
        "integrations": 8, "report": 8, "release": 9,
        # "": __init__.py and the groups beside it, the public names
        "cli": 10, "__main__": 10, "": 10}
STRANGERS = ("ops", "backends")                # rooms whose files do not import each other
# No operation and no library, shared by those that are: formulas, packed weights.
HELPERS = {"ops": ("formulas",), "backends": ("_packing", "_pages", "_sequences")}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(source: str, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every module that `source` may import, as parts below the package; others by their full name.

    `parts` is the path of the file below the package without its ending: ("ops", "attention").
    """
    here = ("layerzero", *parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[:len(here) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def faults(source: str, parts: tuple[str, ...]) -> list[str]:
    """What is wrong with the imports of one file."""
    where = "/".join(parts)
    room = parts[0] if len(parts) > 1 or parts[0] in RANK else ""
    if room not in RANK:
        return [f"{where}: {room!r} is no known room; give it a rank in {Path(__file__).name}"]
    found = []
    for target in imports(source, parts):
        top = target[0]
        if top != "layerzero":
            if room == "spec" and top not in sys.stdlib_module_names:
                found.append(
                    f"{where} imports {top}; spec/ is pure data and imports the standard library "
                    "only")
            continue
        aim = target[1] if len(target) > 1 and target[1] in RANK else ""
        named = ".".join(target)
        if aim != room and RANK[aim] >= RANK[room] and not (RANK[aim] == RANK[room] == 10):
            found.append(
                f"{where} (rank {RANK[room]}) imports {named} (rank {RANK[aim]}); imports point "
                "down only")
        if aim == room and room in STRANGERS and len(target) > 2 and parts[1] != "__init__":
            other = target[2]
            helper = other.endswith(HELPERS[room])
            if other != parts[1] and not helper and _is_module(room, other):
                found.append(
                    f"{where} imports its sibling {named}; move what they share down or into a "
                    "helper")
    for node in ast.walk(ast.parse(source)):
        absolute = [a.name for a in node.names] if isinstance(node, ast.Import) else (
            [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
        ours = [name for name in absolute if name.split(".")[0] == "layerzero"]
        found += [f"{where}: write {name} as a relative import" for name in ours]
    return found


def _is_module(room: str, name: str) -> bool:
    return (PACKAGE / room / f"{name}.py").exists() or (PACKAGE / room / name).is_dir()


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(parts_of(p)))
def test_imports_point_down(path):
    assert faults(path.read_text(), parts_of(path)) == []


def imported_modules(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports anywhere but for its types, by their names below the
    package."""
    class Visitor(ast.NodeVisitor):
        found: tuple[ast.ImportFrom, ...] = ()

        def visit_If(self, node: ast.If) -> None:
            if "TYPE_CHECKING" not in ast.dump(node.test):
                self.generic_visit(node)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            if node.level:
                self.found = (*self.found, node)

    visitor = Visitor()
    visitor.visit(ast.parse(path.read_text()))
    parts = parts_of(path)
    here = parts[:-1]
    for node in visitor.found:
        base = here[:len(here) - node.level + 1] + tuple(node.module.split(".") if node.module
                                                         else ())
        for alias in node.names:
            deeper = (*base, alias.name)
            yield ".".join(deeper if module_file(deeper) else base)


def module_file(parts: tuple[str, ...]) -> Path | None:
    here = PACKAGE.joinpath(*parts)
    return next((p for p in (here.with_suffix(".py"), here / "__init__.py") if parts
                 and p.exists()), None)


def test_no_circle():
    """Also none that an import inside a function would hide."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        parts = parts_of(path)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[name] = {m for m in imported_modules(path) if m not in (name, "")}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as e:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(e.args[1])}")


def test_every_room_was_read():
    seen = {parts_of(path)[0] for path in FILES}
    assert {"spec", "ops", "backends", "selection", "machine", "world", "dispatch", "operate",
            "cli"} <= seen


@pytest.mark.parametrize(("parts", "source", "word"), [
    (("spec", "op"), "import torch", "pure data"),
    (("spec", "op"), "def f():\n    from torch import nn", "pure data"),
    (("spec", "op"), "from ..world import snapshot", "point down"),
    (("ops", "attention"), "from ..selection.policy import Policy", "point down"),
    (("selection", "engine"), "from ..backends import torch_sdpa", "point down"),
    (("world", "snapshot"), "from .. import attention", "point down"),
    (("world", "snapshot"), "from ..cli.app import app", "point down"),
    (("ops", "attention"), "from .rms_norm import OP", "sibling"),
    (("ops", "attention"), "from . import rms_norm", "sibling"),
    (("backends", "reference"), "from .torch_sdpa import KERNELS", "sibling"),
    (("backends", "deep", "inner"), "from ..reference import KERNELS", "sibling"),
    (("world", "snapshot"), "import layerzero.spec.op", "relative"),
    (("cli", "app"), "from layerzero import doctor", "relative"),
    (("attic", "old"), "", "no known room"),
])
def test_a_fault_is_found(parts, source, word):
    assert [line for line in faults(source, parts) if word in line]


@pytest.mark.parametrize(("parts", "source"), [
    (("spec", "op"), "import json\nfrom .rules import Rule"),
    (("ops", "attention"), "import torch\nfrom .formulas import attend\nfrom ..spec.op import Op"),
    (("backends", "reference"), "from ..ops.attention import OP\nimport flash_attn"),
    (("backends", "deep", "inner"), "from .other import f\nfrom ...spec.op import Op"),
    (("world", "snapshot"), "from . import config\nfrom ..selection.engine import select"),
    (("cli", "block"), "from .. import attention\nfrom .show import table"),
    (("__init__",), "from .world import snapshot\nfrom .cli import main"),
])
def test_what_is_allowed_is_not_called_a_fault(parts, source):
    assert faults(source, parts) == []

"""The house's plan, kept: imports point down only, and siblings in ops/ and backends/ do not know
each other.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[3] / "src" / "layerzero"
FACE = 11                                      # rooms on this floor may import each other
RANK = {"spec": 0, "files": 1, "ops": 2, "perf": 2, "backends": 3, "selection": 3, "machine": 4,
        "world": 5, "dispatch": 6, "models": 7, "operate": 7, "plan": 8, "tuning": 8, "verify": 8,
        "integrations": 9, "report": 9, "release": 10,
        # "": __init__.py and the groups beside it, the public names
        "cli": FACE, "__main__": FACE, "": FACE}
PURE = ("spec", "files")                       # rooms that import the standard library only
INDEPENDENT = ("ops", "backends")              # rooms whose files do not import each other
# No operation and no library, shared by those that are: formulas, packed weights.
HELPERS = {"ops": ("formulas",), "backends": ("_flex", "_packing", "_pages", "_sequences")}
Module = tuple[str, ...]                       # its names below the package
FILES = sorted(PACKAGE.rglob("*.py"))


parsed = functools.cache(ast.parse)              # every test below looks at the same trees


@functools.cache
def import_statements(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Wherever they stand. No expression holds one, so none is looked at."""
    statements = []
    nodes: list[ast.AST] = [parsed(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            statements.append(node)
        nodes += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return tuple(statements)


def imports(source: str, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every module that `source` may import, as parts below the package; others by their full name.

    `parts` is the path of the file below the package without its ending: ("ops", "attention").
    """
    here = ("layerzero", *parts[:-1])
    for node in import_statements(source):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        else:
            base = here[:len(here) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def faults(source: str, parts: tuple[str, ...]) -> list[str]:
    """What is wrong with the imports of one file."""
    where = "/".join(parts)
    room = parts[0] if len(parts) > 1 or parts[0] in RANK else ""
    if room not in RANK:
        return [f"{where}: {room!r} is no known room; give it a rank in {Path(__file__).name}"]
    violations = []
    for target in imports(source, parts):
        top = target[0]
        if top != "layerzero":
            if room in PURE and top not in sys.stdlib_module_names:
                violations.append(
                    f"{where} imports {top}; {room}/ imports the standard library only")
            continue
        aim = target[1] if len(target) > 1 and target[1] in RANK else ""
        named = ".".join(target)
        if aim != room and RANK[aim] >= RANK[room] and not (RANK[aim] == RANK[room] == FACE):
            violations.append(
                f"{where} (rank {RANK[room]}) imports {named} (rank {RANK[aim]}); imports point "
                "down only")
        if aim == room and room in INDEPENDENT and len(target) > 2 and parts[1] != "__init__":
            other = target[2]
            helper = other.endswith(HELPERS[room])
            if other != parts[1] and not helper and _is_module(room, other):
                violations.append(
                    f"{where} imports its sibling {named}; move what they share down or into a "
                    "helper")
    for node in import_statements(source):
        absolute = [a.name for a in node.names] if isinstance(node, ast.Import) else (
            [] if node.level else [node.module or ""])
        ours = [name for name in absolute if name.split(".")[0] == "layerzero"]
        violations += [f"{where}: write {name} as a relative import" for name in ours]
    return violations


def _is_module(room: str, name: str) -> bool:
    return (PACKAGE / room / f"{name}.py").exists() or (PACKAGE / room / name).is_dir()


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


def module_of(path: Path) -> Module:
    parts = parts_of(path)
    return parts[:-1] if parts[-1] == "__init__" else parts


def test_imports_point_down():
    assert len(FILES) > 500
    assert [fault for path in FILES for fault in faults(path.read_text(), parts_of(path))] == []


class Imports(NamedTuple):
    """What a file imports, but for its types."""

    libraries: set[str]                        # when it is imported
    early: set[Module]                         # modules of ours, when it is imported
    late: list[tuple[int, Module]]             # inside functions, by line


@functools.cache
def imports_of(path: Path) -> Imports:
    imports = Imports(set(), set(), [])
    here = parts_of(path)[:-1]
    nodes: list[tuple[ast.AST, bool]] = [(parsed(path.read_text()), False)]
    while nodes:
        node, late = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[:len(here) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            ours = {(*base, a.name) if module_file((*base, a.name)) else base for a in node.names}
            if late:
                imports.late.extend((node.lineno, module) for module in ours)
            else:
                imports.early.update(ours)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and not late:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            imports.libraries.update((name or "").split(".")[0] for name in names)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        nodes += [(child, late)
                  for child in (node.orelse if typing else ast.iter_child_nodes(node))
                  if not isinstance(child, ast.expr)]
    return imports


def module_file(parts: Module) -> Path | None:
    here = PACKAGE.joinpath(*parts)
    return next((p for p in (here.with_suffix(".py"), here / "__init__.py") if parts
                 and p.exists()), None)


def test_no_circle():
    """Also none that an import inside a function would hide."""
    graph = {}
    for path in FILES:
        module, imports = module_of(path), imports_of(path)
        graph[module] = (imports.early | {late for _, late in imports.late}) - {module, ()}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as e:
        circle = " -> ".join(".".join(module) for module in e.args[1])
        pytest.fail(f"modules import each other in a circle: {circle}")


# imports inside functions

LIGHT = {"packaging", *sys.stdlib_module_names} - {"sqlite3"}    # what may be loaded at any time
# The loaders of our own kernels: the file of one is read when it is first selected.
LOADERS = (("backends", "cuda", "__init__"),)


def heavy_libraries(module: Module) -> set[str]:
    """What is loaded when a module of ours and its packages are imported and costs time."""
    seen: set[Module] = set()
    libraries: set[str] = set()
    waiting = [module]
    while waiting:
        last = waiting.pop()
        for parts in {last[:n] for n in range(1, len(last) + 1)} - seen:
            seen.add(parts)
            if path := module_file(parts):
                libraries |= imports_of(path).libraries
                waiting += imports_of(path).early - seen
            if parts[0] == "backends" and len(parts) > 1:
                libraries.add("our backends")  # `import layerzero` reads none of them
    return libraries - LIGHT


def idle_imports(path: Path) -> list[str]:
    """Imports of ours inside functions that keep nothing unloaded: they belong at the top."""
    parts = parts_of(path)
    if parts in LOADERS:
        return []
    late = imports_of(path).late
    own = heavy_libraries(module_of(path)) if late else set()
    return [f"{'/'.join(parts)}:{line} imports {'.'.join(module)} inside a function and keeps no "
            "library unloaded by that; import it at the top"
            for line, module in late if not heavy_libraries(module) - own]


def test_an_import_inside_a_function_keeps_a_library_unloaded():
    assert [fault for path in FILES for fault in idle_imports(path)] == []


@pytest.mark.parametrize(("library", "faults"), [("re", 1), ("sqlite3", 0)])
def test_an_import_that_keeps_nothing_unloaded_is_found(tmp_path, monkeypatch, library, faults):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / "spec" / "op.py"
    path.parent.mkdir()
    path.write_text("def f():\n    from .rules import Rule\n")
    (tmp_path / "spec" / "rules.py").write_text(f"import {library}\n")
    assert len(idle_imports(path)) == faults


def test_every_room_was_read():
    seen = {parts_of(path)[0] for path in FILES}
    assert {"spec", "files", "ops", "backends", "selection", "machine", "world", "dispatch",
            "operate", "cli"} <= seen


@pytest.mark.parametrize(("parts", "source", "word"), [
    (("spec", "op"), "import torch", "standard library only"),
    (("files", "reading"), "def f():\n    from torch import nn", "standard library only"),
    (("spec", "op"), "from ..world import snapshot", "point down"),
    (("spec", "call"), "from ..files.reading import read_json", "point down"),
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

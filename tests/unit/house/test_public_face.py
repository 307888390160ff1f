"""What a type checker and an editor see of `lz` is what there is."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import run_python

import layerzero as lz

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "layerzero"


def load_stub() -> ModuleType:
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("stub")
    finally:
        sys.path[:] = path


STUB = load_stub()
EXAMPLES = [*STUB.top(), *STUB.CATALOG,
            *(f"{group}.{name}" for group, module in STUB.groups().items()
                                          if group != "errors" for name in module.__all__)]


def test_the_stubs_are_up_to_date():
    written = {path.name: path.read_text("utf-8") for path in PACKAGE.glob("*.pyi")}
    assert written == {path.name: text
                       for path, text in STUB.stubs().items()}, "run: python docs/stub.py"


def names_in(path: Path) -> set[str]:
    """What a stub defines or exports."""
    tree = ast.parse(path.read_text("utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return defined | {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom)
                      for alias in node.names
                      if alias.asname == alias.name
                      or (alias.asname and not alias.asname.startswith("_"))}


def test_every_list_of_names_is_the_same():
    assert {*lz.__all__} == names_in(PACKAGE / "__init__.pyi")
    assert {*lz.__all__} <= {*dir(lz)}
    assert [name for name in dir(lz) if not hasattr(lz, name)] == []
    for group in lz._GROUPS:
        module = getattr(lz, group)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        if group != "errors":                  # classes only: its source is read
            assert {*module.__all__} == names_in(PACKAGE / f"{group}.pyi")


def test_a_name_is_in_one_place():
    homes: dict[str, list[str]] = {}
    for name in lz.__all__:
        homes.setdefault(name, []).append("lz")
    for group in lz._GROUPS:
        for name in getattr(lz, group).__all__:
            homes.setdefault(name, []).append(f"lz.{group}")
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_the_top_stays_small():
    assert len([*STUB.top()]) <= 55            # operations and groups beside


def test_functions_are_not_their_packages():
    """Also after everything below these packages was imported."""
    code = (
        "import layerzero as lz, layerzero.testing, layerzero.tuning.tuner, "
        "layerzero.selection.engine\nimport types; print([type(f) is types.FunctionType for f in "
        "(lz.select, lz.tune)])")
    done = run_python("-c", code)
    assert done.stdout.strip() == "[True, True]"


def test_groups_load_when_first_used():
    code = ("import layerzero as lz, sys\n"
            "before = [g for g in lz._GROUPS if f'layerzero.{g}' in sys.modules]\n"
            "lz.errors.InvalidCall\n"
            "print(before, [g for g in lz._GROUPS if f'layerzero.{g}' in sys.modules])")
    done = run_python("-c", code)
    assert done.stdout.strip() == "[] ['errors']"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_name_runs(name, world, tmp_path, monkeypatch, capsys):
    for library in ("transformers", "tokenizers", "diffusers"):
        if library in STUB.example(name):                  # register_diffusers needs it too
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec(compile(STUB.example(name), name, "exec", dont_inherit=True),
             {"torch": torch, "lz": lz})


# type checkers

GOOD = """
import torch
import layerzero as lz

q = torch.randn(1, 8, 16, 64)
out: torch.Tensor = lz.attention(q, q, q, is_causal=True, backend="torch", policy={"deterministic": True})
both: tuple[torch.Tensor, torch.Tensor] = lz.attention(q, q, q, return_lse=True)
q2, k2 = lz.rope(q, q, torch.ones(16, 32), torch.zeros(16, 32), style="rotate_half")
print(lz.explain("attention", q, q, q).kernel)
cos, sin = lz.positions.rope_tables(64, 16)
bound: torch.Tensor = lz.tables.bind("rms_norm", q)(q)
table: lz.tables.Table | None = lz.tables.table_in_force()
with lz.recording() as recorder, lz.disabled():
    calls: tuple[lz.testing.Call, ...] = tuple(recorder.calls)
try:
    safe: bool = bool(lz.graphs.is_graph_safe("torch.rms_norm"))
except lz.errors.NoKernelFoundError as error:
    codes: tuple[lz.Code, ...] = error.codes
report: lz.SelectionReport = lz.select("rms_norm", q)
"""
BAD = {
    "lz.atention": ("has no attribute", "is not a known attribute"),
    "lz.rms_norm(3)": ("incompatible type", "cannot be assigned"),
    "lz.attention(q, q, q, isCausal=True)": ("No overload variant", "No overloads"),
    "x: str = lz.attention(q, q, q)": ("Incompatible types in assignment", "is not assignable"),
    "lz.tables.solv": ("has no attribute", "is not a known attribute"),
    "lz.errors.NoKernel": ("has no attribute", "is not a known attribute"),
    "lz.solve": ("has no attribute", "is not a known attribute"),
    'lz.quant.limit_packed("1 GB")': ("incompatible type", "cannot be assigned"),
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The functions of an example need no annotations; all else is as strict as for our own code, in
# whose cache the types of torch lie already.
RELAXED = ("# mypy: allow-untyped-defs, allow-incomplete-defs, warn-return-any, warn-unused-ignores, "
           "disallow-subclassing-any\n")


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Path:
    """A folder with good.py, bad.py (a mistake in each line from the fourth on), the pages and the
    examples."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "good.py").write_text(RELAXED + GOOD)
    (folder / "bad.py").write_text(
        "import torch\nimport layerzero as lz\nq = torch.ones(1, 2, 3, 4)\n"
        + "\n".join(BAD) + "\n")
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        (folder / f"{page.stem.replace('-', '_')}_page.py").write_text(RELAXED + "\n\n".join(blocks))
    (folder / "examples_page.py").write_text(RELAXED + "import torch\nimport layerzero as lz\n" + "".join(
        f"\n\ndef example_{i}() -> None:\n    " + STUB.example(name).replace("\n", "\n    ") + "\n"
        for i, name in enumerate(EXAMPLES)))
    return folder


def check(lines: list[str], which: int, output: str) -> None:
    """Everything but bad.py is accepted, and every line of that is refused with the right words."""
    assert not [line for line in lines if "bad.py" not in line], output
    for i, (code, words) in enumerate(BAD.items()):
        message = " ".join(line for line in lines if f"bad.py:{i + 4}:" in line)
        assert words[which] in message, f"{code}: {output}"


def test_mypy_accepts_what_is_right_and_refuses_what_is_not(checked):
    pytest.importorskip("mypy")
    done = subprocess.run([sys.executable, "-m", "mypy", *map(str, sorted(checked.glob("*.py")))],
                          cwd=ROOT, capture_output=True, text=True)
    check([line for line in done.stdout.splitlines() if " error: " in line], 0, done.stdout)


def test_pyright_accepts_what_is_right_and_refuses_what_is_not(checked):
    pyright = shutil.which("pyright") or shutil.which("basedpyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    # whose own types are not asked, as mypy does not
    for library in ("transformers", "diffusers"):
        (checked / "typings" / library).mkdir(parents=True, exist_ok=True)
        (checked / "typings" / library / "__init__.pyi").write_text(
            "def __getattr__(name: str): ...\n")
    (checked / "pyrightconfig.json").write_text(json.dumps({
        "include": ["*.py"], "extraPaths": [str(ROOT / "src")], "typeCheckingMode": "basic",
        "reportMissingImports": False, "reportMissingModuleSource": False}))
    done = subprocess.run([pyright, "--project", str(checked), "--pythonpath", sys.executable,
                           "--outputjson"],
                          cwd=checked, capture_output=True, text=True)
    errors = [d for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    lines = [f"{Path(d['file']).name}:{d['range']['start']['line'] + 1}: {d['message']}"
             for d in errors]
    check(lines, 1, "\n".join(lines))

"""What a type checker and an editor see of `lz` is what there is."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import layerzero as lz

ROOT = Path(__file__).parents[3]
STUB = ROOT / "src" / "layerzero" / "__init__.pyi"


def made_now() -> str:
    spec = importlib.util.spec_from_file_location("stub", ROOT / "docs" / "stub.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.stub())


def test_the_stub_is_up_to_date():
    assert STUB.read_text("utf-8") == made_now(), "run: python docs/stub.py"


def test_every_name_of_the_stub_is_there():
    tree = ast.parse(STUB.read_text("utf-8"))
    names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    names |= {alias.asname for n in tree.body if isinstance(n, ast.ImportFrom) and n.level
              for alias in n.names if alias.asname}
    missing = {name for name in names if not hasattr(lz, name)} - {"Tokens"}
    assert not missing
    assert {*lz.__all__} <= names


GOOD = """
import torch
import layerzero as lz

q = torch.randn(1, 8, 16, 64)
out: torch.Tensor = lz.attention(q, q, q, is_causal=True, backend="torch", policy={"deterministic": True})
both: tuple[torch.Tensor, torch.Tensor] = lz.attention(q, q, q, return_lse=True)
q2, k2 = lz.rope(q, q, torch.ones(16, 32), torch.zeros(16, 32), style="rotate_half")
print(lz.explain("attention", q, q, q).kernel)
"""
BAD = {
    "lz.atention": 'Module has no attribute "atention"',
    "lz.rms_norm(3)": "incompatible type",
    "lz.attention(q, q, q, isCausal=True)": "call-overload",
    'x: str = lz.attention(q, q, q)': "Incompatible types in assignment",
}


CHECKED = ["README.md", *(f"docs/{name}.md" for name in (
    "architecture", "guide", "tuning", "learning", "production", "tables", "adding-an-op", "adding-a-backend"))]
# The functions of an example need no annotations, and torch and transformers are typed in part.
SETTINGS = """
[mypy]
strict = true
disallow_untyped_defs = false
disallow_incomplete_defs = false
disallow_untyped_calls = false
disallow_untyped_decorators = false
follow_imports = silent
ignore_missing_imports = true
[mypy-transformers.*,diffusers.*]
follow_imports = skip
"""


def test_mypy_accepts_what_is_right_and_refuses_what_is_not(tmp_path):
    pytest.importorskip("mypy")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(GOOD)
    bad.write_text("import torch\nimport layerzero as lz\nq = torch.ones(1, 2, 3, 4)\n" + "\n".join(BAD) + "\n")
    pages = []
    for name in CHECKED:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)
        pages.append(tmp_path / f"{Path(name).stem.replace('-', '_')}_page.py")
        pages[-1].write_text("\n\n".join(blocks))
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path / "cache"),
         *map(str, (good, bad, *pages))], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert not [line for line in lines if "bad.py" not in line and " error: " in line], done.stdout
    for i, (code, words) in enumerate(BAD.items()):
        said = [line for line in lines if f"bad.py:{i + 4}: error" in line]
        assert said and words in " ".join(said), f"{code}: {done.stdout}"

"""Plugins: packages with entry points, found where they are installed, refused by name where they do not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import layerzero

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[1] / "fixtures" / "plugin_example"
SOURCES = Path(layerzero.__file__).parents[1]


def install(target: Path, version: str = "1.0") -> None:
    """The example package as an installer would leave it in `target`."""
    shutil.copytree(EXAMPLE / "lz_plugin_example", target / "lz_plugin_example",
                    ignore=shutil.ignore_patterns("__pycache__"))
    init = target / "lz_plugin_example" / "__init__.py"
    init.write_text(init.read_text().replace('"1.0"', f'"{version}"'))
    entries = {"layerzero.ops": {"scale_shift": "lz_plugin_example.scale_shift"},
               "layerzero.backends": {"example": "lz_plugin_example.kernels"}}
    metadata(target, "lz-plugin-example", version, entries)


def metadata(target: Path, name: str, version: str, entries: dict[str, dict[str, str]]) -> None:
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items()) for group, points in entries.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def broken(target: Path, name: str, text: str, group: str = "layerzero.backends") -> None:
    """A plugin called `name` whose module says `text`."""
    target.mkdir(exist_ok=True)
    (target / f"lz_{name}.py").write_text(textwrap.dedent(text))
    metadata(target, f"lz-{name}", "3.1", {group: {name: f"lz_{name}"}})


def run(code: str, *folders: Path) -> dict:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_") or k == "LAYERZERO_CACHE_DIR"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (*folders, SOURCES)))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


ASK = """
import json, sys, torch
import layerzero as lz
from layerzero.runtime import world
seen = []
lz.subscribe(seen.append)
loaded_at_import = "lz_plugin_example" in sys.modules
x, scale, shift = torch.randn(3, 8), torch.randn(8), torch.randn(8)
out = [lz.scale_shift(x, scale, shift) for _ in range(3)][-1]
norm = lz.rms_norm(x)
print(json.dumps({
    "right": bool(torch.allclose(out, x * scale + shift, atol=1e-6)) and bool(torch.allclose(
        norm, lz.op("rms_norm").reference(x), atol=1e-5)),
    "torch_op": bool(torch.equal(torch.ops.layerzero.scale_shift(x, scale, shift), out)),
    "kernels": [lz.which("scale_shift", x, scale, shift), lz.which("rms_norm", x), lz.which("rms_norm", x.double())],
    "origins": dict(world.current().catalog.origins), "at_import": loaded_at_import,
    "notes": [row.note for row in lz.list_kernels("scale_shift")], "calls": lz.stats().calls["scale_shift"],
    "refused": {e.kernel: e.reason.message for e in seen if e.name == "unavailable"},
    "doctor": {c.name: [c.ok, c.found, c.hint] for c in lz.doctor().checks}}))
"""


def test_an_installed_plugin_is_found(tmp_path):
    install(tmp_path / "site")
    found = run(ASK, tmp_path / "site")
    assert found["right"] and found["torch_op"] and not found["at_import"], "imported when first needed"
    assert found["kernels"][:2] == ["example.addcmul", "example.rms_norm"] and found["kernels"][2] != "example.rms_norm"
    assert found["origins"] == dict.fromkeys(("scale_shift", "example.addcmul", "example.rms_norm"),
                                             "lz-plugin-example 1.0")
    assert found["calls"] == {"example.addcmul": 4} and found["notes"] == ["version 1.0"] and found["refused"] == {}


def test_an_upgrade_on_the_path_is_the_one_that_is_used(tmp_path):
    install(tmp_path / "old", "1.0")
    install(tmp_path / "new", "2.0")
    found = run(ASK, tmp_path / "new", tmp_path / "old")
    assert found["right"] and found["notes"] == ["version 2.0"] and found["refused"] == {}
    assert set(found["origins"].values()) == {"lz-plugin-example 2.0"}


def test_broken_plugins_are_refused_by_name_and_all_else_works(tmp_path):
    site = tmp_path / "site"
    install(site)
    broken(site, "typo", """
        import layerzero as lz
        from layerzero.spec.rules import at_most
        KERNELS = (lz.Kernel("typo.kernel", lz.op("attention"), lambda: None, requires=(at_most("hed_dim", 64),)),)
        """)
    broken(site, "twice", """
        import layerzero as lz
        KERNELS = (lz.Kernel("twice.fine", lz.op("rms_norm"), lambda: None, prior=1e9),
                   lz.Kernel("torch.rms_norm", lz.op("rms_norm"), lambda: None))
        """)
    broken(site, "unknown_op", """
        import dataclasses, layerzero as lz
        KERNELS = (lz.Kernel("unknown.kernel", dataclasses.replace(lz.op("rms_norm"), name="rms_morn"), lambda: None),)
        """)
    broken(site, "missing", "import no_such_library_at_all")
    broken(site, "syntax", "KERNELS = (")
    broken(site, "exits", "import sys; sys.exit('not on this machine')")
    broken(site, "strange", "class Refusal(Exception): pass\nraise Refusal('of its own kind')")
    broken(site, "nothing", "VALUE = 3")
    broken(site, "wrong_thing", "KERNELS = ('a kernel',)")
    broken(site, "no_cases", """
        import dataclasses, layerzero as lz
        OP = dataclasses.replace(lz.op("rms_norm"), name="other_norm", cases=())
        """, group="layerzero.ops")
    metadata(site, "lz-gone", "1.0", {"layerzero.backends": {"gone": "lz_gone_module:KERNELS"}})
    found = run(ASK, site)
    assert found["right"] and found["torch_op"] and found["kernels"][0] == "example.addcmul"
    said = {
        "typo": ["lz-typo 3.1", "typo.kernel", "'hed_dim'", "did you mean 'head_dim'"],
        "twice": ["lz-twice 3.1", "'torch.rms_norm'", "already registered by layerzero"],
        "unknown_op": ["'unknown.kernel'", "'rms_morn'", "not registered"],
        "missing": ["ModuleNotFoundError", "no_such_library_at_all"], "syntax": ["SyntaxError"],
        "exits": ["SystemExit", "not on this machine"], "strange": ["Refusal", "of its own kind"],
        "nothing": ["without OP or KERNELS"], "wrong_thing": ["offers a str", "Op and Kernel"],
        "no_cases": ["'other_norm' has no cases"], "gone": ["ModuleNotFoundError", "lz_gone_module"]}
    assert found["refused"].keys() == said.keys()
    for name, words in said.items():
        for word in words:
            assert word in found["refused"][name], (name, found["refused"][name])
        ok, text, hint = found["doctor"][f"plugin {name}"]
        assert not ok and words[-1] in text and hint
    assert "twice.fine" not in found["origins"], "all of a plugin or nothing"


def test_a_plugin_that_only_fails_when_it_is_loaded_costs_its_own_kernel(tmp_path):
    site = tmp_path / "site"
    install(site)
    broken(site, "late", """
        import layerzero as lz
        def load_missing():
            import no_such_library_at_all
        def load_wrong():
            return lambda x, axis: x
        KERNELS = (lz.Kernel("late.missing", lz.op("rms_norm"), load_missing, prior=1e6),
                   lz.Kernel("late.wrong", lz.op("rms_norm"), load_wrong, prior=1e5))
        """)
    found = run(ASK, site)
    assert found["right"] and found["kernels"][1] == "example.rms_norm"
    assert set(found["refused"]) == {"late.missing", "late.wrong"}
    assert "no_such_library_at_all" in found["refused"]["late.missing"]
    assert "wants a parameter 'axis'; lz.rms_norm has x, weight, eps" in found["refused"]["late.wrong"]
    assert not found["doctor"]["loading late.wrong"][0]


def test_the_package_says_in_its_project_file_what_the_tests_install():
    text = (EXAMPLE / "pyproject.toml").read_text()
    for line in ('[project.entry-points."layerzero.ops"]', 'scale_shift = "lz_plugin_example.scale_shift"',
                 '[project.entry-points."layerzero.backends"]', 'example = "lz_plugin_example.kernels"',
                 'name = "lz-plugin-example"', 'version = "1.0"'):
        assert line in text.splitlines()


@pytest.mark.skipif(shutil.which("pip") is None and not (Path(sys.executable).parent / "pip").exists(),
                    reason="needs pip")
def test_pip_installs_the_example(tmp_path):
    """The same with a real installer, where its build backend is here already."""
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
                           "--no-index",
                           "--disable-pip-version-check", "-t", str(tmp_path / "site"), str(source)],
                          capture_output=True, text=True, timeout=120)
    if done.returncode != 0 and "setuptools" in done.stderr:
        pytest.skip("needs setuptools")
    assert done.returncode == 0, done.stderr
    found = run(ASK, tmp_path / "site")
    assert found["right"] and set(found["origins"].values()) == {"lz-plugin-example 1.0"}

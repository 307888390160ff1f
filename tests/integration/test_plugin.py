"""Plugins: packages with entry points, found where they are installed, refused by name where they
do not fit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest
from helpers import run_python

import layerzero

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
SOURCES = Path(layerzero.__file__).parents[1]


def install(target: Path, version: str = "1.0") -> None:
    """The example package as an installer would leave it in `target`."""
    shutil.copytree(EXAMPLE / "lz_plugin_example", target / "lz_plugin_example",
                    ignore=shutil.ignore_patterns("__pycache__"))
    init = target / "lz_plugin_example" / "__init__.py"
    init.write_text(init.read_text().replace('"1.0"', f'"{version}"'))
    entries = {"layerzero.ops": {"scale_shift": "lz_plugin_example.scale_shift"},
               "layerzero.backends": {"example": "lz_plugin_example.kernels"},
               "layerzero.policies": {"example": "lz_plugin_example.policy"}}
    metadata(target, "lz-plugin-example", version, entries)


def metadata(target: Path, name: str, version: str, entries: dict[str, dict[str, str]],
             needs: str = "layerzero>=0.1,<1") -> None:
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                                     f"Requires-Dist: {needs}\n")
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items())
             for group, points in entries.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def write_plugin(target: Path, name: str, text: str, group: str = "layerzero.backends",
                 needs: str = "layerzero>=0.1,<1") -> None:
    """A plugin called `name` whose module says `text`."""
    target.mkdir(exist_ok=True)
    (target / f"lz_{name}.py").write_text(textwrap.dedent(text))
    metadata(target, f"lz-{name}", "3.1", {group: {name: f"lz_{name}"}}, needs)


def run(code: str, *folders: Path, cache: str | Path = "") -> dict:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")}
    env["LAYERZERO_CACHE_DIR"] = str(cache or os.environ["LAYERZERO_CACHE_DIR"])
    env["PYTHONPATH"] = os.pathsep.join(map(str, (*folders, SOURCES)))
    done = run_python("-c", textwrap.dedent(code), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


ASK = """
import json, sys, torch
import layerzero as lz
from layerzero.world import snapshot as world
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
    "doctor": {c.name: [c.ok, c.detail, c.hint] for c in lz.doctor().checks}}))
"""


def test_an_installed_plugin_is_found(tmp_path):
    install(tmp_path / "site")
    answer = run(ASK, tmp_path / "site")
    assert (answer["right"] and answer["torch_op"]
            and not answer["at_import"]), "imported when first needed"
    assert (answer["kernels"][:2] == ["example.addcmul", "example.rms_norm"]
            and answer["kernels"][2] != "example.rms_norm")
    assert answer["origins"] == dict.fromkeys(("scale_shift", "example.addcmul",
                                               "example.rms_norm"),
                                              "lz-plugin-example 1.0")
    assert (answer["calls"] == {"example.addcmul": 4} and answer["notes"] == ["version 1.0"]
            and answer["refused"] == {})


def test_an_upgrade_on_the_path_is_the_one_that_is_used(tmp_path):
    install(tmp_path / "old", "1.0")
    install(tmp_path / "new", "2.0")
    answer = run(ASK, tmp_path / "new", tmp_path / "old")
    assert answer["right"] and answer["notes"] == ["version 2.0"] and answer["refused"] == {}
    assert set(answer["origins"].values()) == {"lz-plugin-example 2.0"}


def test_broken_plugins_are_refused_by_name_and_all_else_works(tmp_path):
    site = tmp_path / "site"
    install(site)
    write_plugin(site, "typo", """
        import layerzero as lz
        from layerzero.spec.rules import at_most
        KERNELS = (lz.Kernel("typo.kernel", lz.op("attention"), lambda: None, requires=(at_most("hed_dim", 64),)),)
        """)
    write_plugin(site, "twice", """
        import layerzero as lz
        KERNELS = (lz.Kernel("twice.fine", lz.op("rms_norm"), lambda: None, prior=1e9, less_work="a test"),
                   lz.Kernel("torch.rms_norm", lz.op("rms_norm"), lambda: None))
        """)
    write_plugin(site, "unknown_op", """
        import dataclasses, layerzero as lz
        KERNELS = (lz.Kernel("unknown.kernel", dataclasses.replace(lz.op("rms_norm"), name="rms_morn"), lambda: None),)
        """)
    write_plugin(site, "missing", "import no_such_library_at_all")
    write_plugin(site, "syntax", "KERNELS = (")
    write_plugin(site, "exits", "import sys; sys.exit('not on this machine')")
    write_plugin(site, "strange",
                 "class Refusal(Exception): pass\nraise Refusal('of its own kind')")
    write_plugin(site, "nothing", "VALUE = 3")
    write_plugin(site, "wrong_thing", "KERNELS = ('a kernel',)")
    write_plugin(site, "no_cases", """
        import dataclasses, layerzero as lz
        OP = dataclasses.replace(lz.op("rms_norm"), name="other_norm", cases=())
        """, group="layerzero.ops")
    metadata(site, "lz-gone", "1.0", {"layerzero.backends": {"gone": "lz_gone_module:KERNELS"}})
    answer = run(ASK, site)
    assert answer["right"] and answer["torch_op"] and answer["kernels"][0] == "example.addcmul"
    messages = {
        "typo": ["lz-typo 3.1", "typo.kernel", "'hed_dim'", "did you mean 'head_dim'"],
        "twice": ["lz-twice 3.1", "'torch.rms_norm'", "already registered by layerzero"],
        "unknown_op": ["'unknown.kernel'", "'rms_morn'", "not registered"],
        "missing": ["ModuleNotFoundError", "no_such_library_at_all"], "syntax": ["SyntaxError"],
        "exits": ["SystemExit", "not on this machine"], "strange": ["Refusal", "of its own kind"],
        "nothing": ["without OP or KERNELS"], "wrong_thing": ["offers a str", "Op and Kernel"],
        "no_cases": ["'other_norm' has no cases"],
        "gone": ["ModuleNotFoundError", "lz_gone_module"]}
    assert answer["refused"].keys() == messages.keys()
    for name, words in messages.items():
        for word in words:
            assert word in answer["refused"][name], (name, answer["refused"][name])
        ok, text, hint = answer["doctor"][f"plugin {name}"]
        assert not ok and words[-1] in text and hint
    assert "twice.fine" not in answer["origins"], "all of a plugin or nothing"


def test_a_plugin_that_only_fails_when_it_is_loaded_costs_its_own_kernel(tmp_path):
    site = tmp_path / "site"
    install(site)
    write_plugin(site, "late", """
        import layerzero as lz
        def load_missing():
            import no_such_library_at_all
        def load_wrong():
            return lambda x, axis: x
        KERNELS = (lz.Kernel("late.missing", lz.op("rms_norm"), load_missing, prior=1e6, less_work="a test"),
                   lz.Kernel("late.wrong", lz.op("rms_norm"), load_wrong, prior=1e5, less_work="a test"))
        """)
    answer = run(ASK, site)
    assert answer["right"] and answer["kernels"][1] == "example.rms_norm"
    assert set(answer["refused"]) == {"late.missing", "late.wrong"}
    assert "no_such_library_at_all" in answer["refused"]["late.missing"]
    assert "wants a parameter 'axis'; lz.rms_norm has x, weight, eps" in answer["refused"][
        "late.wrong"]
    assert not answer["doctor"]["loading late.wrong"][0]


def test_the_package_says_in_its_project_file_what_the_tests_install():
    text = (EXAMPLE / "pyproject.toml").read_text()
    for line in ('[project.entry-points."layerzero.ops"]',
                 'scale_shift = "lz_plugin_example.scale_shift"',
                 '[project.entry-points."layerzero.backends"]',
                 'example = "lz_plugin_example.kernels"',
                 '[project.entry-points."layerzero.policies"]',
                 'example = "lz_plugin_example.policy"',
                 'name = "lz-plugin-example"', 'version = "1.0"'):
        assert line in text.splitlines()


# Policy, and other releases

ADVICE = """
import json, os, torch
import layerzero as lz
seen = []
lz.subscribe(seen.append)
x = torch.randn(3, 3)
plan = lz.explain("rms_norm", x)
before = lz.get_config()
lz.rms_norm(x, backend="example.rms_norm")
lz.configure(rules=(lz.PolicyRule.of("allow", "example.rms_norm", "rms_norm"),), cache_size=77)
print(json.dumps({
    "why": [str(r) for row in plan.rejected if row.kernel == "example.rms_norm" for r in row.reasons],
    "wide": lz.which("rms_norm", torch.randn(3, 8)), "allowed": lz.which("rms_norm", x),
    "rules": [[r["layer"], r["origin"], r["text"]] for r in before["rules"]],
    "sizes": [before["settings"]["cache_size"], lz.get_config()["settings"]["cache_size"]],
    "refused": {e.kernel: e.reason.message for e in seen if e.name == "unavailable"},
    "doctor": {c.name: c.detail for c in lz.doctor().checks if c.name.startswith("plugin")}}))
"""


def test_a_policy_of_a_plugin_is_advice(tmp_path):
    site = tmp_path / "site"
    install(site)
    write_plugin(site, "sizes", "POLICY = {'settings': {'cache_size': 33}}", "layerzero.policies")
    answer = run(ADVICE, site)
    assert (answer["why"] == ["DENIED_BY_POLICY: denied by lz-plugin-example 1.0"]
            and answer["wide"] == "example.rms_norm")
    assert answer["allowed"] == "example.rms_norm", "what the program says wins"
    assert ["default", "lz-plugin-example 1.0",
            "boost example.addcmul x1.5 for scale_shift"] in answer["rules"]
    assert answer["sizes"] == [33, 77] and answer["refused"] == {}


def test_a_policy_that_does_not_fit_is_refused_by_name(tmp_path):
    site = tmp_path / "site"
    install(site)
    made = ("from layerzero import PolicyRule\nPOLICY = {{'rules': (PolicyRule.of('deny', "
            "'torch.*', {}),)}}")
    for name, text in {
            "typo": made.format("'rms_morn'"), "fact": made.format("'rms_norm', {'hiden': 3}"),
            "text": "POLICY = 'deny'",
            "unruly": "POLICY = {'rules': ('deny torch.*',)}",
            "setting": "POLICY = {'settings': {'cash_size': 3}}",
            "exits": "raise SystemExit('no')", "a": "POLICY = {'settings': {'cache_size': 33}}",
            "b": "POLICY = {'settings': {'cache_size': 34}}"}.items():
        write_plugin(site, name, text, "layerzero.policies")
    answer = run(ADVICE, site)
    assert answer["wide"] == "example.rms_norm" and answer["sizes"][0] in (33, 34)
    late = "b" if "b" in answer["refused"] else "a"
    messages = {"typo": "did you mean 'rms_norm'", "fact": "did you mean 'hidden'",
                "text": "a mapping POLICY", "unruly": "lz.PolicyRule.of",
                "setting": "did you mean 'cache_size'", "exits": "SystemExit: no",
                late: "another one set it to"}
    assert answer["refused"].keys() == messages.keys()
    for name, word in messages.items():
        assert word in answer["refused"][name] and f"lz-{name} 3.1" in answer["refused"][name]
        assert word in answer["doctor"][f"plugin {name}"]


def test_a_plugin_for_another_release_is_refused_before_it_is_imported(tmp_path):
    site = tmp_path / "site"
    fitting = {"k0": "layerzero>=0.1", "k1": "layerzero", "k2": "LayerZero~=0.1",
               "k3": "layerzero>=7; python_version < '3'"}
    others = {"k4": "layerzero>=7,<8", "k5": "layerzero<0.1"}
    for name, needs in {**fitting, **others}.items():
        write_plugin(site, name, f"""
            from pathlib import Path
            Path({str(tmp_path / name)!r}).write_text("imported")
            import layerzero as lz
            KERNELS = (lz.Kernel("{name}.kernel", lz.op("rms_norm"), lambda: None),)
            """, needs=needs)
    write_plugin(site, "policy", "POLICY = {'settings': {'cache_size': 33}}", "layerzero.policies",
                 needs="layerzero>=7")
    answer = run("""
        import json
        import layerzero as lz
        seen = []
        lz.subscribe(seen.append)
        ids = [row.id for row in lz.list_kernels("rms_norm")]
        print(json.dumps({"ids": ids, "version": lz.__version__, "size": lz.get_config()["settings"]["cache_size"],
                          "refused": {e.kernel: str(e.reason) for e in seen if e.name == "unavailable"}}))
        """, site)
    assert ({i.partition(".")[0] for i in answer["ids"] if i.startswith("k")} == set(fitting)
            and answer["size"] != 33)
    assert (all((tmp_path / n).exists() for n in fitting)
            and not any((tmp_path / n).exists() for n in others))
    assert answer["refused"].keys() == {*others, "policy"}
    for name, needs in others.items():
        message = answer["refused"][name]
        assert message.startswith("VERSION_CONFLICT: needs layerzero ") and needs[9:12] in message
        assert f"found {answer['version']} (plugin {name} of lz-{name} 3.1)" in message


# With a real installer

# what version 2.0 changes: a kernel's formula, its name, one kernel more
SECOND = {
    "pyproject.toml": [('version = "1.0"', 'version = "2.0"')],
    "lz_plugin_example/__init__.py": [('"1.0"', '"2.0"')],
    "lz_plugin_example/kernels.py": [
        ("return x * scale * gain if shift", "return x * (scale * gain) if shift"),
        ("KERNELS = (",
         'KERNELS = (\n    lz.Kernel("example.plain", scale_shift, lambda: scale_shift.reference),'),
        ('"example.rms_norm"', '"example.norm"')]}

STATE = """
import json, torch
import layerzero as lz
from layerzero.world import snapshot as world
from layerzero.world.registry import certificates
from layerzero.machine import hardware
from layerzero.verify.certification.certify import certify_all
seen = []
lz.subscribe(seen.append)
x, scale = torch.randn(3, 8), torch.randn(8)
kernel, here = world.current().catalog.by_id["example.addcmul"], hardware.probe("cpu")
standing = certificates.statuses([kernel], here)[kernel.id]
if {certify}:
    assert [v.status for v in certify_all([kernel], "cpu")] == ["passed"]
print(json.dumps({{
    "right": bool(torch.allclose(lz.scale_shift(x, scale), x * scale, atol=1e-6)),
    "standing": "holds" if isinstance(standing, certificates.Certificate) else standing.code.value,
    "origins": dict(world.current().catalog.origins), "refused": [e.kernel for e in seen if e.name == "unavailable"]}}))
"""


def wheels_of(*sources: Path) -> list[Path]:
    """Built one after the other by one process."""
    pytest.importorskip("setuptools")
    code = ("import os, sys\nfrom setuptools import build_meta\n"
            "for folder in sys.argv[1:]:\n"
            "    os.chdir(folder)\n    build_meta.build_wheel('dist')")
    subprocess.run([sys.executable, "-c", code, *map(str, sources)], check=True,
                   capture_output=True, timeout=240)
    return [next((source / "dist").glob("*.whl")) for source in sources]


def pip_install(place: Path, wheel: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python",
         str(place / "bin" / "python"), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        capture_output=True, text=True, timeout=240)
    if done.returncode and "No module named pip" in done.stderr:
        pytest.skip("needs pip")
    assert done.returncode == 0, done.stderr


def second_version(folder: Path) -> Path:
    shutil.copytree(EXAMPLE, folder,
                    ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    for name, changes in SECOND.items():
        text = (folder / name).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


@pytest.mark.skipif(os.name != "posix", reason="looks for bin/python")
def test_upgrade_and_downgrade(tmp_path):
    place = tmp_path / "place"
    venv.create(place, with_pip=False)
    installed = next(place.glob("lib/python*/site-packages"))
    first = tmp_path / "first"
    shutil.copytree(EXAMPLE, first,
                    ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    first, second = wheels_of(first, second_version(tmp_path / "second"))
    names = {"1.0": {"scale_shift", "example.addcmul", "example.rms_norm"},
             "2.0": {"scale_shift", "example.addcmul", "example.norm", "example.plain"}}
    for wheel, version, standing in ((first, "1.0", "UNCERTIFIED"),
                                     (second, "2.0", "CERTIFICATE_VOID"),
                                     (first, "1.0", "holds")):
        pip_install(place, wheel)
        answer = run(STATE.format(certify=standing == "UNCERTIFIED"), installed,
                     cache=tmp_path / "cache")
        assert answer["right"] and answer["refused"] == []
        assert answer["origins"] == dict.fromkeys(names[version],
                                                  f"lz-plugin-example {version}"), "nothing is left over"
        assert answer[
            "standing"] == standing, "a proof is for one build, and holds again when that is back"

"""Loading, versions side by side, namespaces, and a kernel from a repository as one of ours with a
certificate.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import hub_repositories as repositories
import pytest
import torch
from helpers import run_python
from hub_repositories import STABLE, UNIVERSAL, build, in_cache, native_build, native_id

import layerzero as lz
from layerzero.integrations.hub import (
    Hub,
    HubError,
    NamespaceClash,
    NotAllowed,
    NotHere,
    Unproven,
    importing,
)
from layerzero.machine import hardware
from layerzero.machine.builds import build_of
from layerzero.spec.rules import absent, contiguous, dtypes, equals, plain_tensors
from layerzero.world.registry import certificates

NO_OFFSET = (equals("offset", 0.0),)
NATIVE_LIMITS = (*NO_OFFSET, absent("weight.dtype"), dtypes("float32"), contiguous("x"),
                 plain_tensors())


def hub_of(**folders: Path) -> Hub:
    return Hub(folders={f"me/{name}": folder for name, folder in folders.items()}, allow=("me/*",),
               backend="cpu")


def run_in_process(code: str, *arguments: object) -> dict:
    """Run in a process of its own, which what is imported there does not outlive."""
    start = f"import json, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    done = run_python("-c", start + textwrap.dedent(code), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


# By name and version

def test_two_versions_side_by_side(tmp_path):
    for version in (1, 2):
        build(tmp_path / str(version), version=version, id=f"_side_{version}", nested=version == 2)
        in_cache(tmp_path / "cache", tmp_path / str(version), "me/norm", version)
    hub = Hub(cache=tmp_path / "cache", allow=("me/*",))
    one, two = (hub.load("me/norm", version=v) for v in (1, 2))
    assert (one.module.VERSION, two.module.VERSION) == (1, 2) and one.module is not two.module
    assert hub.load("me/norm", version=1).module is one.module, "once in a process"
    assert {one.id, two.id} <= set(sys.modules) and one.offers == ("rms_norm",)


def test_folders_of_two_versions(tmp_path):
    for version in (1, 2):
        build(tmp_path / str(version), version=version, id=f"_folders_{version}")
    hub = Hub(folders={"me/norm@1": tmp_path / "1", "me/norm@2": tmp_path / "2"}, allow=("me/*",))
    assert [hub.load("me/norm", version=v).module.VERSION for v in (2, 1)] == [2, 1]


def test_what_is_imported_is_the_copy_that_was_checked(tmp_path, own_cache):
    folder = build(tmp_path / "r", id="_copy_a")
    loaded = hub_of(norm=tmp_path / "r").load("me/norm")
    copy = own_cache / "hub" / f"{loaded.sha256[:32]}-{UNIVERSAL}" / UNIVERSAL / "__init__.py"
    assert Path(loaded.module.__file__) == copy
    copy.write_text("damaged = True")
    again = run_in_process("""
        from layerzero.integrations.hub import Hub
        module = Hub(folders={"me/norm": sys.argv[1]}, allow=("me/*",)).load("me/norm").module
        print(json.dumps({"offers": sorted(vars(module))}))
        """, tmp_path / "r")
    assert "rms_norm" in again["offers"] and "damaged" not in again["offers"], "made anew"
    assert not (folder / "__pycache__").exists(), "the repository is left as it is"


def test_the_same_kernel_loaded_by_kernels_itself(tmp_path):
    from kernels import get_local_kernel

    build(tmp_path / "r", id="_before_a")
    first = get_local_kernel(tmp_path / "r")
    assert hub_of(norm=tmp_path / "r").load("me/norm").module is first


def test_a_module_that_does_not_import(tmp_path):
    for text, word in (("import no_such_library", "no_such_library"),
                       ("raise SystemExit('no')", "SystemExit: no"),
                       ("x = (", "SyntaxError")):
        build(tmp_path / "r", files={"__init__.py": text}, id="_broken_a")
        with pytest.raises(HubError, match=word):
            hub_of(norm=tmp_path / "r").load("me/norm")


def test_another_module_called_kernels(tmp_path):
    (tmp_path / "kernels.py").write_text("x = 1")
    answer = run_in_process("""
        sys.path.insert(0, sys.argv[1])
        from layerzero.integrations.hub import Hub, NotHere
        try:
            Hub(allow=("me/*",)).load("me/norm", version=1)
        except NotHere as e:
            print(json.dumps({"said": str(e)}))
        """, tmp_path)
    assert str(tmp_path / "kernels.py") in answer["said"] and "rename it" in answer["said"]


def test_our_own_compiled_kernels_leave_the_name_to_the_package():
    answer = run_in_process("""
        from layerzero.backends.native import build
        from layerzero.dispatch import native
        native.module()
        built = build.library_path().exists() and bool(build.module())
        import kernels.variants
        print(json.dumps({"built": built, "modules": [n for n in sys.modules if n == "fastpath"]}))
        """)
    assert answer["modules"] == []
    if not answer["built"]:
        pytest.skip("needs lz build")


# Namespaces

def test_one_id_for_two_contents(tmp_path):
    build(tmp_path / "1", version=1, id="_same_id")
    build(tmp_path / "2", version=2, id="_same_id")
    hub = Hub(folders={"me/norm@1": tmp_path / "1", "me/norm@2": tmp_path / "2"}, allow=("me/*",))
    hub.load("me/norm", version=1)
    with pytest.raises(NamespaceClash, match="its id '_same_id' is that of another kernel"):
        hub.load("me/norm", version=2)


@pytest.mark.parametrize("id", ["torch", "json", "layerzero", "this", "_strptime"])
def test_an_id_that_would_replace_a_module(tmp_path, id):
    build(tmp_path / "r", id=id)
    with pytest.raises(NamespaceClash, match=f"its id '{id}' is the name of a Python module"):
        hub_of(norm=tmp_path / "r").load("me/norm")


@pytest.mark.parametrize("way", ["library", "custom_op"])
def test_operations_outside_of_the_own_namespace(tmp_path, way):
    text = {"library": "import torch\nlibrary = torch.library.Library('shared_ns', 'FRAGMENT')\n"
                       "library.define('twice(Tensor x) -> Tensor')",
            "custom_op":
                "import torch\n@torch.library.custom_op('shared_ns::thrice', mutates_args=())\n"
                         "def thrice(x: torch.Tensor) -> torch.Tensor:\n    return x * 3"}[way]
    build(tmp_path / "r", id=f"_foreign_{way}", files={"__init__.py": text})
    with pytest.raises(NamespaceClash,
                       match=rf"in torch\.ops\._foreign_{way}, got torch\.ops\.shared_ns"):
        hub_of(norm=tmp_path / "r").load("me/norm")
    own = text.replace("shared_ns", f"_own_{way}")
    build(tmp_path / "own", id=f"_own_{way}", files={"__init__.py": f"import torch._refs\n{own}"})
    assert hub_of(norm=tmp_path / "own").load("me/norm").id == f"_own_{way}"


def test_what_torch_registers_itself_is_not_laid_at_a_kernels_door():
    torch.ops.layerzero.rms_norm(torch.randn(1, 2))
    result = importing.namespaces_since(set())
    assert "layerzero" in result and not result & {"aten", "prims", "prim", "quantized"}


def test_two_compiled_versions_side_by_side(tmp_path, compiled):
    for version in (1, 2):
        native_build(tmp_path / str(version), compiled, version)
        in_cache(tmp_path / "cache", tmp_path / str(version), "me/native", version)
    hub = Hub(cache=tmp_path / "cache", allow=("me/*",), backend="cpu")
    x = torch.randn(3, 8)
    for version in (1, 2):
        loaded = hub.load("me/native", version=version)
        assert loaded.variant == STABLE and loaded.id == native_id(version)
        assert loaded.module.version() == version == getattr(torch.ops,
                                                             native_id(version)).version()
        torch.testing.assert_close(loaded.module.rms_norm(x), torch.rms_norm(x, (8,), eps=1e-6))


def test_a_compiled_namespace_that_is_taken_costs_no_process(tmp_path, compiled):
    """To load it would end the process: torch refuses a second library of a namespace while it is
    being loaded."""
    folder = native_build(tmp_path / "r", compiled, 1)
    text = (folder / "metadata.json").read_text()
    (folder / "metadata.json").write_text(text.replace(native_id(1), "_another_id"))
    with pytest.raises(NamespaceClash,
                       match=rf"in torch\.ops\._another_id, got torch\.ops\.{native_id(1)}"):
        hub_of(norm=tmp_path / "r").load("me/norm")
    answer = run_in_process("""
        import torch
        from layerzero.integrations.hub import Hub, NamespaceClash
        taken = torch.library.Library(sys.argv[2], "DEF")
        taken.define("f(Tensor x) -> Tensor")
        try:
            Hub(folders={"me/norm": sys.argv[1]}, allow=("me/*",), backend="cpu").load("me/norm")
        except NamespaceClash as e:
            print(json.dumps({"said": str(e)}))
        """, native_build(tmp_path / "fine", compiled, 2).parents[1], native_id(2))
    assert f"torch.ops.{native_id(2)} is there already" in answer["said"]


def test_a_compiled_build_that_crashes_takes_only_its_own_process_down(tmp_path):
    library = repositories.plain_library(
        tmp_path / "c", "crash.abi3.so",
        "#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { abort(); }")
    build(tmp_path / "r", STABLE, id="_crash_a", files={
        "__init__.py": repositories.MODULE.format(id="_crash_a"),
        "crash.abi3.so": library.read_bytes()})
    with pytest.raises(HubError, match="killed by signal 6"):
        hub_of(norm=tmp_path / "r").load("me/norm")


# Kernels that need other kernels

NEEDS = {
    "__init__.py":
        "from kernels import get_kernel_dep\nVERSION = get_kernel_dep('me/inner').VERSION"}


def test_a_kernel_that_needs_another(tmp_path):
    build(tmp_path / "inner", version=4, id="_inner_a")
    build(tmp_path / "outer", id="_outer_a", files=NEEDS,
          depends=({"repo-id": "me/inner", "version": 4},))
    assert hub_of(outer=tmp_path / "outer",
                  inner=tmp_path / "inner").load("me/outer").module.VERSION == 4


@pytest.mark.parametrize(("hub", "error"),
                         [({"allow": ("me/outer",)}, NotAllowed), ({"folders": {}}, NotHere)])
def test_what_a_kernel_needs_is_checked_like_itself(tmp_path, hub, error):
    build(tmp_path / "inner", version=5, id="_inner_b")
    build(tmp_path / "outer", id="_outer_b", files=NEEDS,
          depends=({"repo-id": "me/inner", "version": 5},))
    folders = {"me/outer": tmp_path / "outer",
               **hub.get("folders", {"me/inner": tmp_path / "inner"})}
    with pytest.raises(error, match="me/inner"):
        Hub(folders=folders, allow=hub.get("allow", ("me/*",)), cache=tmp_path).load("me/outer")
    build(tmp_path / "circle", id="_circle", depends=({"repo-id": "me/circle", "version": 1},))
    with pytest.raises(HubError, match="needs itself"):
        hub_of(circle=tmp_path / "circle").load("me/circle")


# One of ours

def test_it_serves_with_a_certificate(tmp_path, world):
    build(tmp_path / "r", version=7, id="_serves_a")
    hub = hub_of(norm=tmp_path / "r")
    kernel = hub.register("me/norm", "rms_norm", "rms_norm", version=7, requires=NO_OFFSET,
                          prior=1e6,
                          less_work="a test")
    assert kernel.id == "hub.me_norm.v7.rms_norm" and json.dumps(kernel.to_json())
    standing = certificates.statuses([kernel], hardware.probe("cpu"))[kernel.id]
    assert isinstance(standing, certificates.Certificate) and standing.cases > 50
    x, weight = torch.randn(3, 40), torch.randn(40)
    lz.configure(require_certificates=True)
    plan = lz.explain("rms_norm", x, weight)
    assert plan.kernel == kernel.id, plan
    torch.testing.assert_close(lz.rms_norm(x, weight), lz.op("rms_norm").reference(x, weight))
    assert lz.stats().calls["rms_norm"][kernel.id] >= 1
    assert {r.code for r in lz.validate("rms_norm", kernel.id, x.requires_grad_())} == {
        lz.Code.BACKWARD_UNSUPPORTED}


def test_an_unproven_one_is_not_chosen_where_proof_is_demanded(tmp_path, world):
    build(tmp_path / "r", version=8, id="_unproven_a")
    kernel = hub_of(norm=tmp_path / "r").register("me/norm", "rms_norm", "rms_norm",
                                                  requires=NO_OFFSET, prior=1e6, less_work="a test",
                                                  certify=False)
    x = torch.randn(3, 41)
    assert lz.which("rms_norm", x) == kernel.id
    with lz.prefer(require_certificates=True):
        plan = lz.explain("rms_norm", x)
        assert plan.kernel != kernel.id
        assert lz.Code.UNCERTIFIED in {r.code for row in plan.rejected if row.kernel == kernel.id
                                       for r in row.reasons}


def test_one_that_is_wrong_is_not_registered(tmp_path, world):
    build(tmp_path / "r", id="_wrong_a", mistake=" + 1e-3")
    with pytest.raises(Unproven,
                       match=r"hub\.me_norm\.v1\.rms_norm breaks the contract of lz\.rms_norm on cpu: "):
        hub_of(norm=tmp_path / "r").register("me/norm", "rms_norm", "rms_norm", requires=NO_OFFSET)
    build(tmp_path / "limits", id="_limits_a", version=2)
    with pytest.raises(Unproven, match="offset of the weight ignored"):
        hub_of(norm=tmp_path / "limits").register("me/norm", "rms_norm", "rms_norm")
    assert not [row for row in lz.list_kernels("rms_norm") if row.id.startswith("hub.")]


def test_a_certificate_is_for_one_content(tmp_path, world):
    build(tmp_path / "r", id="_content_a")
    first = hub_of(norm=tmp_path / "r").register("me/norm", "rms_norm", "rms_norm",
                                                 requires=NO_OFFSET)
    here = hardware.probe("cpu")
    lz.unregister(first.id)
    build(tmp_path / "r", id="_content_b",
          files={"__init__.py": repositories.RMS_NORM.format(version=1, mistake="+0")})
    second = hub_of(norm=tmp_path / "r").register("me/norm", "rms_norm", "rms_norm",
                                                  requires=NO_OFFSET, certify=False)
    assert build_of(first) != build_of(second)
    assert isinstance(certificates.statuses([first], here)[first.id], certificates.Certificate)
    void = certificates.statuses([second], here)[second.id]
    assert isinstance(void, lz.Reason) and void.code is lz.Code.CERTIFICATE_VOID


def test_an_adapter_is_part_of_the_build(tmp_path, world):
    build(tmp_path / "r", id="_adapt_a")
    hub = hub_of(norm=tmp_path / "r")

    def half(module):
        return lambda x, weight=None, eps=1e-6: module.rms_norm(x, weight, eps)

    kernel = hub.register("me/norm", lz.op("rms_norm"), adapt=half, requires=NO_OFFSET,
                          certify=False)
    other = hub.register("me/norm", "rms_norm", "rms_norm", requires=NO_OFFSET, certify=False)
    assert kernel.id == "hub.me_norm.v1.half" and build_of(kernel) != build_of(other)
    x = torch.randn(2, 6)
    torch.testing.assert_close(lz.rms_norm(x, backend=kernel.id), lz.rms_norm(x, backend=other.id))
    with pytest.raises(HubError, match="got neither"):
        hub.register("me/norm", "rms_norm")
    with pytest.raises(lz.errors.RegistrationError, match="no op 'rms_morn'"):
        hub.register("me/norm", "rms_morn", "rms_norm")


def test_a_repository_that_changes_between_registering_and_the_first_call(tmp_path, world,
                                                                          emitted):
    folder = build(tmp_path / "r", id="_late_a")
    hub = hub_of(norm=tmp_path / "r")
    kernel = hub.register("me/norm", "rms_norm", "rms_norm", requires=NO_OFFSET, certify=False,
                          prior=1e6,
                          less_work="a test")
    missing = hub.register("me/norm", "rms_norm", "no_such", requires=NO_OFFSET, certify=False,
                           prior=1e5,
                           less_work="a test")
    (folder / "__init__.py").write_text(repositories.RMS_NORM.format(version=1, mistake=" * 2"))
    x = torch.randn(3, 42)
    torch.testing.assert_close(lz.rms_norm(x), torch.rms_norm(x, (42,), eps=1e-6))
    messages = {e.kernel: e.reason.message for e in emitted if e.name == "unavailable"}
    assert ("register it again" in messages[kernel.id]
            and kernel.id in messages[kernel.id]), "the reason, and no other kernel's"
    assert set(messages) == {kernel.id, missing.id}


def test_a_function_that_is_not_there(tmp_path, world, emitted):
    build(tmp_path / "r", id="_nothing_a")
    hub = hub_of(norm=tmp_path / "r")
    kernel = hub.register("me/norm", "rms_norm", "layers.norm", requires=NO_OFFSET, certify=False,
                          prior=1e6,
                          less_work="a test")
    lz.rms_norm(torch.randn(2, 3))
    reason = next(e.reason for e in emitted if e.name == "unavailable" and e.kernel == kernel.id)
    assert (reason.code is lz.Code.IMPORT_FAILED
            and "no function 'layers.norm'; it offers rms_norm" in reason.message)


def test_a_compiled_one_serves_with_a_certificate(tmp_path, world, compiled):
    native_build(tmp_path / "r", compiled, 1)
    hub = hub_of(native=tmp_path / "r")
    kernel = hub.register("me/native", "rms_norm", "rms_norm", version=1, requires=NATIVE_LIMITS,
                          prior=1e6,
                          less_work="a test")
    assert str(kernel.requires[0]) == "device cpu", "a build for one device is for that device"
    lz.configure(require_certificates=True)
    x = torch.randn(4, 24)
    assert lz.which("rms_norm", x) == kernel.id and lz.which("rms_norm", x.double()) != kernel.id
    torch.testing.assert_close(lz.rms_norm(x), torch.rms_norm(x, (24,), eps=1e-6))
    assert lz.explain("rms_norm", x.t()).steps, "what it does not take is served by another"


def test_versions_as_kernels_side_by_side(tmp_path, world):
    for version in (1, 2):
        build(tmp_path / str(version), version=version, id=f"_both_{version}")
    hub = Hub(folders={f"me/norm@{v}": tmp_path / str(v) for v in (1, 2)}, allow=("me/*",))
    ids = [hub.register("me/norm", "rms_norm", "rms_norm", version=v, requires=NO_OFFSET,
                        certify=False).id
           for v in (1, 2)]
    assert ids == ["hub.me_norm.v1.rms_norm", "hub.me_norm.v2.rms_norm"]
    x = torch.randn(2, 5)
    assert all(torch.equal(lz.rms_norm(x, backend=i), lz.rms_norm(x, backend=ids[0])) for i in ids)
    with pytest.raises(lz.errors.RegistrationError, match="already registered by me/norm@1"):
        hub.register("me/norm", "rms_norm", "rms_norm", version=1, requires=NO_OFFSET,
                     certify=False)


def test_threads_that_load_the_same_kernel(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    build(tmp_path / "r", id="_threads_a")
    hub = hub_of(norm=tmp_path / "r")
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: hub.load("me/norm").module, range(16)))
    assert all(m is modules[0] for m in modules)
    assert not [p for p in Path(os.environ["LAYERZERO_CACHE_DIR"], "hub").iterdir()
                if p.name.startswith("copying")]

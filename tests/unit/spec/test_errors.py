"""The error tree is as it is drawn, and nothing in it is there for show."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.files.sealed import UntrustedFile
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.perf.interface import CorruptStore, StoreError
from layerzero.spec import errors
from layerzero.world import incidents
from layerzero.world import snapshot as worlds

PACKAGE = Path(errors.__file__).parents[1]
NAMED_BY_THE_DOCUMENTS = {
    "NoKernelFoundError", "KernelExecutionError", "PolicyValidationError", "CacheCorruptionError",
    "BackendNotAvailableError", "CudaGraphUnsafeError", "SelectionTimeoutError"}
HUB = "integrations/hub/errors.py"             # its kinds are drawn there, below HubError


def drawn() -> dict[str, str]:
    """Class -> the one above it, as the drawing has them."""
    above: list[str] = []
    parents: dict[str, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?:  |$)", line)
        if match:
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            parents[match[2]] = above[depth - 1] if depth else ""
    return parents


def defined() -> dict[str, tuple[str, ...]]:
    """Every class below LayerZeroError in the source, with its bases."""
    bases = {node.name: (str(path.relative_to(PACKAGE)),
                         tuple(ast.unparse(base) for base in node.bases))
             for path in PACKAGE.rglob("*.py")
             if re.search(r"^ *class \w+\(", text := path.read_text("utf-8"), re.MULTILINE)
             for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.ClassDef)}
    ours = {"LayerZeroError"}
    while grown := {name for name, (_, of) in bases.items() if ours.intersection(of)} - ours:
        ours |= grown
    return {name: bases[name][1] for name in ours if not name.startswith("_")
            and (bases[name][0] != HUB or name == "HubError")}


def test_the_drawing_is_the_tree():
    tree = defined()
    assert {*drawn()} == {*tree}
    for name, parent in drawn().items():
        assert not parent or parent in tree[
            name], f"{name} is drawn below {parent}, its bases are {tree[name]}"


@pytest.mark.parametrize("name", sorted(set(drawn()) - {"LayerZeroError"}))
def test_every_error_is_raised_somewhere(name):
    made = re.compile(rf"\b{name}(\.of)?\(|error = .*\b{name}\b|class _\w+\(.*\b{name}\b")
    below = {child for child, parent in drawn().items() if parent == name}
    assert below or any(made.search(source) for source in sources())


@lru_cache(maxsize=1)
def sources():
    """Of every module, without the first lines of its classes."""
    return [re.sub(r"^class [A-Z].*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
            for path in PACKAGE.rglob("*.py")]


def test_the_names_of_the_documents_are_public():
    assert {*lz.errors.__all__} >= NAMED_BY_THE_DOCUMENTS
    public = {name for name in vars(errors) if isinstance(getattr(errors, name), type)
              and issubclass(getattr(errors, name), (errors.LayerZeroError, Warning))}
    assert {*lz.errors.__all__} == public and lz.errors.__doc__ == errors.__doc__


def test_a_library_that_is_missing_is_told_from_a_call_that_does_not_fit(world):
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(lz.errors.BackendNotAvailableError, match=r"flash_attn\.v2"):
        lz.attention(q, q, q, backend="flash_attn.v2")
    with pytest.raises(lz.errors.NamedKernelRefused) as refused:
        lz.attention(q, q, q, backend="torch.sdpa_bias")       # installed; the call has no mask
    assert type(refused.value) is lz.errors.NamedKernelRefused


def test_a_bad_policy_is_told_from_a_bad_setting_of_the_machine(world, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("rules: [{forbid: torch.sdpa}]")
    for act in (lambda: lz.load_config(path), lambda: lz.PolicyRule.of("forbid", "torch.*"),
                lambda: lz.configure(no_such_setting=1),
                lambda: lz.rms_norm(torch.ones(1, 2), policy=3)):
        with pytest.raises(lz.errors.PolicyValidationError):
            act()
    with pytest.raises(lz.errors.ConfigError) as other:
        lz.explain("no_such_op")
    assert not isinstance(other.value, lz.errors.PolicyValidationError)


def test_a_lost_capture_is_a_graph_error(world):
    kernel = worlds.current().catalog.by_id["torch.rms_norm"]
    fault = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    with pytest.raises(lz.errors.CudaGraphUnsafeError, match="capture"):
        incidents.blame(worlds.current(), kernel, fault, [], RMS_NORM.name)
    assert issubclass(lz.errors.CudaGraphUnsafeError, lz.errors.KernelExecutionError)


def test_damaged_files_of_the_cache_are_one_kind():
    assert (issubclass(CorruptStore, lz.errors.CacheCorruptionError)
            and issubclass(CorruptStore, StoreError))
    assert [kind for kind in UntrustedFile.__subclasses__()
            if issubclass(kind, lz.errors.CacheCorruptionError)]


def test_reports_of_calls_and_blocks_have_the_same_totals():
    x = torch.ones(2, 8)
    plan = lz.explain("rms_norm", x)
    assert isinstance(plan, lz.SelectionReport) and plan.fused_ops == ()
    assert plan.transform_cost_total == plan.steps[0].score.transform_us
    norm = lz.tables.Stage("rms_norm", {"x": "input"}, ("output",))
    whole = lz.tables.plan_block(lz.tables.Block("norm", (norm,), ("output",)), {"input": x})
    assert isinstance(whole, lz.SelectionReport) and whole.transform_cost_total >= 0.0


def test_a_generation_is_compared_by_age():
    generation = lz.kernels.GPUGeneration
    assert (generation.TURING < generation.AMPERE < generation.ADA_LOVELACE < generation.HOPPER
            < generation.BLACKWELL)

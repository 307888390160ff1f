"""The GPU libraries without their hardware: what they refuse and why, what is told of a build that
does not fit, how a page table is turned into FlashInfer's, how its plans are reused, and Liger's
kernels in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.backends import flash_attn, flashinfer, liger, quack, triton, xformers
from layerzero.backends.flashinfer import paged
from layerzero.backends.flashinfer.common import ready
from layerzero.dispatch.facts import read
from layerzero.machine import loading
from layerzero.ops.formulas.paged import page_table_from_csr
from layerzero.perf.record import Measurement, PerfView, kind_of
from layerzero.perf.store import SqliteStore
from layerzero.selection.engine import SelectionContext, make_roster, select
from layerzero.selection.policy import Policy
from layerzero.selection.score import rates_of
from layerzero.spec.device import Device
from layerzero.spec.kernel import Kernel
from layerzero.spec.reason import Code
from layerzero.verify.kernel.contract import case_values
from layerzero.world import snapshot as worlds

MODULES = (flashinfer, liger, quack, xformers, flash_attn)
KERNELS = {k.id: k for m in MODULES for k in m.KERNELS}
H200 = Device("cuda", 0, "NVIDIA H200", "nvidia", sm=90, gpu_generation="hopper",
              tensor_core_generation=4)
A100 = Device("cuda", 0, "NVIDIA A100", "nvidia", sm=80, gpu_generation="ampere",
              tensor_core_generation=3)
T4 = Device("cuda", 0, "Tesla T4", "nvidia", sm=75, gpu_generation="turing",
            tensor_core_generation=3)


def codes(kernel: str, device: Device, dtype: str = "bfloat16", **case) -> set[Code]:
    """Why the kernel would not take such a call on that device."""
    declared = KERNELS[kernel]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = read(declared.op, case_values(declared.op, case, dtype))
    facts = {**facts, **device.facts(), "device": device.type}
    return {reason.code for reason in declared.reasons(facts)}


def test_importing_the_declarations_imports_no_library():
    names = ", ".join(m.__name__.rpartition(".")[2] for m in MODULES)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(f"""
        import sys
        from layerzero.backends import {names}
        found = {{"flashinfer", "liger_kernel", "quack", "xformers", "flash_attn", "triton"}} & set(sys.modules)
        assert not found, found""")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-800:]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: k.id)
def test_a_declaration_survives_json(kernel):
    again = Kernel.from_json(json.loads(json.dumps(kernel.to_json())), kernel.op)
    assert again.to_json() == kernel.to_json() and again.load is kernel.load


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: k.id)
def test_each_says_that_it_does_not_run_on_a_cpu(kernel):
    assert Code.PLATFORM_MISMATCH in codes(kernel.id, Device("cpu", 0, "a CPU", "intel"))


@pytest.mark.parametrize(("kernel", "device", "case", "code"), [
    ("flashinfer.prefill_fa3", A100, {"b": 1}, Code.GPU_GENERATION_UNSUPPORTED),
    ("flashinfer.prefill_fa2", T4, {"b": 1}, Code.SM_TOO_OLD),
    ("flashinfer.prefill_fa2", H200, {"b": 2}, Code.SHAPE_UNSUPPORTED),
    ("flashinfer.prefill_fa2", H200, {"b": 1, "d": 80}, Code.HEAD_DIM_INVALID),
    ("flashinfer.prefill_fa2", H200, {"b": 1, "d": 128, "dv": 64}, Code.HEAD_DIM_INVALID),
    ("flashinfer.prefill_fa2", H200, {"b": 1, "sq": 9, "sk": 5, "causal": True,
                                      "align": "bottom_right"},
     Code.SEQ_LEN_UNSUPPORTED),
    ("flashinfer.prefill_fa2", H200, {"b": 1, "window": (8, 8)}, Code.WINDOW_UNSUPPORTED),
    ("flashinfer.prefill_fa2", H200, {"b": 1, "sq": 5, "sk": 9, "causal": True,
                                      "align": "top_left"},
     Code.CAUSAL_ALIGNMENT_UNSUPPORTED),
    ("flashinfer.prefill_fa2", H200, {"b": 1, "scale": -1.0}, Code.SCALE_UNSUPPORTED),
    ("flashinfer.decode", H200, {"b": 1, "sq": 1, "hq": 20, "hkv": 4}, Code.GQA_UNSUPPORTED),
    ("flashinfer.decode", H200, {"b": 1, "sq": 1, "sk": 9, "stride": "transposed"},
     Code.NOT_CONTIGUOUS),
    ("flashinfer.paged_decode", H200, {"d": 128, "lengths_q": (1, 2, 3)}, Code.SEQ_LEN_UNSUPPORTED),
    ("flashinfer.paged_decode", H200, {"d": 128, "stored": "int8", "scales": "one"},
     Code.SCALE_LAYOUT_MISMATCH),
    ("flashinfer.paged_xqa", H200, {"d": 128, "page_size": 1}, Code.PAGE_SIZE_UNSUPPORTED),
    ("flashinfer.paged_xqa", H200, {"d": 128, "lse": True}, Code.LSE_UNSUPPORTED),
    ("flashinfer.mla_fa2", H200, {}, Code.HEAD_DIM_INVALID),
    ("flashinfer.rms_norm", H200, {"weight_dtype": "float32"}, Code.DTYPE_UNSUPPORTED),
    ("flashinfer.rms_norm", H200, {"affine": False}, Code.FEATURE_UNSUPPORTED),
    ("flashinfer.rope", H200, {"alone": True}, Code.FEATURE_UNSUPPORTED),
    ("flashinfer.sample", H200, {"top_p": 0.9}, Code.FEATURE_UNSUPPORTED),
    ("liger.rope", H200, {"style": "interleaved"}, Code.ROPE_STYLE_UNSUPPORTED),
    ("liger.layer_norm", H200, {"affine": False}, Code.FEATURE_UNSUPPORTED),
    ("quack.rms_norm", A100, {}, Code.SM_TOO_OLD),
    ("quack.cross_entropy", H200, {"vocab": 40, "smoothing": 0.1}, Code.FEATURE_UNSUPPORTED),
    ("xformers.attention", H200, {"mask": "bool"}, Code.MASK_DTYPE_UNSUPPORTED),
    ("xformers.attention", H200, {"lse": True}, Code.LSE_UNSUPPORTED),
    ("flash_attn.v2_paged", H200, {"page_size": 16}, Code.PAGE_SIZE_UNSUPPORTED),
    ("flash_attn.v3_paged", A100, {}, Code.GPU_GENERATION_UNSUPPORTED),
    ("flash_attn.v4_paged", H200, {"page_size": 64, "context": (130, 64)},
     Code.PAGE_SIZE_UNSUPPORTED),
])
def test_a_limit_is_refused_with_its_reason(kernel, device, case, code):
    assert code in codes(kernel, device, **case)


@pytest.mark.parametrize(("kernel", "case"), [
    ("flashinfer.prefill_fa2", {"b": 1, "hkv": 2, "causal": True, "layout": "bshd"}),
    ("flashinfer.prefill_fa3", {
        "b": 1, "d": 128, "sq": 3, "sk": 9, "causal": True, "align": "bottom_right", "lse": True}),
    ("flashinfer.decode", {"b": 1, "sq": 1, "sk": 300, "hq": 8, "hkv": 2}),
    ("flashinfer.decode", {"b": 1, "sq": 1, "sk": 300, "hq": 8, "hkv": 2, "layout": "bshd"}),
    ("flashinfer.paged_decode", {"d": 128, "layout": "HND", "window": 3}),
    ("flashinfer.paged_xqa", {"d": 128}),
    ("flashinfer.paged_prefill_fa3", {"d": 128, "lengths_q": (3, 1, 5), "table": "int64"}),
    ("flashinfer.varlen_fa2", {}), ("flashinfer.mla_fa3", {"ckv": 512, "kpe": 64}),
    ("flashinfer.rms_norm", {}), ("flashinfer.rope", {"d": 128, "layout": "bshd"}),
    ("flashinfer.sample", {"top_k": 20, "top_p": 0.8}),
    ("liger.swiglu", {}), ("liger.linear_cross_entropy", {}), ("quack.rms_norm", {}),
    ("xformers.attention", {"mask": "float", "hkv": 2}),
    ("flash_attn.v4_paged", {"lengths_q": (3, 1, 5)}),
    ("flash_attn.v2_paged", {"page_size": 256}),
])
def test_what_it_is_made_for_is_taken(kernel, case):
    assert codes(kernel, H200, **case) == set()


# Configurations of our own Triton kernels.

def test_of_several_configurations_the_one_that_was_fastest_here_serves(tmp_path):
    """Tuning's rows, out of a store, choose; without any the default is used."""
    op, kernels = lz.op("linear"), [k for k in triton.KERNELS
                                    if k.id.startswith("triton.linear_gemv") and not k.untested]
    assert [k.id for k in kernels] == ["triton.linear_gemv", "triton.linear_gemv_half",
                                       "triton.linear_gemv_double"]
    values = case_values(op, {"rows": (1,), "k": 64, "n": 48}, "bfloat16")
    facts = {**read(op, values), **H200.facts(), "device": "cuda"}

    def chosen(perf: PerfView) -> str | None:
        context = SelectionContext(policy=Policy(()), device=H200.facts(), place=H200.signature,
                                   rates=rates_of("cuda"),
                                   perf=perf, warmed=frozenset(k.id for k in kernels))
        return select(op, make_roster(kernels, context), facts, context).kernel

    assert chosen(PerfView()) == "triton.linear_gemv"
    kind = kind_of(op, facts)
    with SqliteStore(tmp_path / "perf.sqlite") as store:
        store.put([Measurement(k.id, "linear", kind.bucket, H200.signature, us, samples=20,
                               family=kind.family, sizes=kind.sizes_text, build="v1")
                   for k, us in zip(kernels, (31.0, 29.0, 35.0))],
                  {"driver": "1"})
        assert chosen(store.view({k.id: "v1" for k in kernels})) == "triton.linear_gemv_half"
        # another Triton
        assert chosen(store.view({k.id: "v2" for k in kernels})) == "triton.linear_gemv"


# Builds that do not fit.

@pytest.mark.parametrize(("cuda_here", "torch_here", "good"), [
    ("12.8", "2.10.0+cu128", True), ("12.9", "2.11.0+cu129", True), ("13.0", "2.11.0+cu130", False),
    ("12.8", "2.9.1+cu128", False), (None, "2.13.0+cpu", False)])
def test_xformers_fits_one_cuda_and_no_older_torch(cuda_here, torch_here, good):
    fit = xformers.fits(1208, "2.10.0+cu128", cuda_here, torch_here)
    if good:
        assert fit is True
    else:
        assert fit.code is Code.ABI_MISMATCH
        assert ("2.10.0+cu128" in fit.message and torch_here in fit.message
                and "12.8" in fit.message)


def installed(folder: Path, monkeypatch, made_for: str | None) -> None:
    """An xformers that is there, as the package index has it, but for its extension."""
    (folder / "xformers").mkdir()
    (folder / "xformers" / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    if made_for is not None:
        (folder / "xformers" / "cpp_lib.json").write_text(made_for)
    (folder / "xformers-0.0.35.dist-info").mkdir()
    (folder / "xformers-0.0.35.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: xformers\n"
        "Version: 0.0.35\n")
    monkeypatch.syspath_prepend(str(folder))
    loading.is_importable.cache_clear()
    loading.installed_version.cache_clear()
    worlds.publish(lambda w: w.replace(unloadable={}), "test")     # and what a world knows of it


@pytest.fixture
def forgotten():
    """What was found on the path is looked for again afterwards."""
    yield
    loading.is_importable.cache_clear()
    loading.installed_version.cache_clear()
    worlds.publish(lambda w: w.replace(unloadable={}), "test")     # and what a world knows of it


BUILT = '{"version": {"cuda": 1208, "hip": null, "torch": "2.10.0+cu128", "python": "3.10.19"}}'


@pytest.mark.skipif(torch.version.cuda is not None,
                    reason="for a torch that the build does not fit")
@pytest.mark.parametrize("made_for", [BUILT, "not json", "{}", None])
def test_an_xformers_built_for_another_cuda_is_a_reason_and_a_hint(made_for, tmp_path, monkeypatch,
                                                                   forgotten, world):
    installed(tmp_path, monkeypatch, made_for)
    reason = loading.availability(xformers.KERNELS[0])
    assert (reason is not None and reason.code is Code.ABI_MISMATCH
            and "made for this torch" in reason.code.advice)
    if "xformers.attention" not in {k.id for k in lz.list_kernels("attention")}:
        lz.register(xformers.KERNELS[0])
    check = next(c for c in lz.doctor().checks if c.name == "library xformers")
    assert not check.ok and check.hint == reason.code.advice and check.detail == reason.message


def test_flashinfer_without_a_compiler_says_so(monkeypatch, tmp_path):
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        pytest.skip("its modules are here ready made")
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    reason = ready()
    assert reason is not True and reason.code is Code.COMPILER_MISSING and "nvcc" in reason.message
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("")
    assert ready() is True


def test_flashinfers_cache_is_visible(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    assert flashinfer.compiled() == ()
    made = tmp_path / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops" / "norm"
    made.mkdir(parents=True)
    (made / "norm.so").write_text("")
    assert flashinfer.compiled() == ("norm",)


def test_modules_that_flashinfer_brings_along_need_no_compiler(monkeypatch, tmp_path):
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("the real package may be found first")
    module = tmp_path / "site" / "flashinfer" / "data" / "aot" / "rope" / "rope.so"
    module.parent.mkdir(parents=True)
    for file in (module, tmp_path / "site" / "flashinfer" / "__init__.py"):
        file.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert ready() is True and flashinfer.compiled() == ("rope",)


def test_version_4_of_flash_attention_is_not_taken_for_version_2(monkeypatch, tmp_path):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    loading.is_importable.cache_clear()
    try:
        by_id = {k.id: k for k in flash_attn.KERNELS}
        reason = loading.availability(by_id["flash_attn.v2"])
        assert (reason is not None and reason.code is Code.NOT_INSTALLED
                and "flash-attn" in reason.message)
        assert loading.availability(by_id["flash_attn.v4"]) is None
    finally:
        loading.is_importable.cache_clear()


# FlashInfer's page tables and plans.

def test_a_page_table_and_its_csr_say_the_same():
    table = torch.tensor([[7, 2, -1], [-1, -1, -1], [4, 9, 0]])
    lengths = torch.tensor([20, 0, 48])
    csr = paged.to_csr("paged_attention", 3, table, lengths, None, 16, True)
    assert csr.indptr.tolist() == [0, 2, 2, 5] and csr.indices.tolist() == [7, 2, 4, 9, 0]
    assert csr.last.tolist() == [4, 0, 16] and csr.starts_q.tolist() == [0, 1, 2, 3]
    back, counted = page_table_from_csr(csr.indptr, csr.indices, csr.last, 16)
    assert counted.tolist() == lengths.tolist() and back[2].tolist() == [4, 9, 0]
    assert csr.dead is not None and csr.dead.tolist() == [False, True, False]


@pytest.mark.parametrize(("causal", "blind"), [(True, [0, 1, 5, 6]), (False, [5, 6])])
def test_queries_before_the_first_key_are_known(causal, blind):
    table, starts = torch.tensor([[0], [1], [2]]), torch.tensor([0, 5, 7, 8])
    csr = paged.to_csr("paged_attention", 8, table, torch.tensor([3, 0, 9]), starts, 16, causal,
                       5)
    assert csr.dead is not None and csr.dead.nonzero()[:, 0].tolist() == blind
    out, lse = paged._finish((torch.ones(8, 2, 4), torch.ones(8, 2)), csr.dead, True, 0.5)
    assert (out[blind] == 0).all() and (lse[blind] == -torch.inf).all()
    rest = [i for i in range(8) if i not in blind]
    assert (out[rest] == 1).all() and (lse[rest] == 0.5).all()


class Wrapper:
    """Stands in for one of FlashInfer's: what it was planned with last."""

    def __init__(self, workspace: torch.Tensor) -> None:
        self.planned: list[list[int]] = []


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.setattr(paged, "WORKSPACE", 16)
    made = paged.Plans(Wrapper, torch.device("cpu"))

    def get(lengths: torch.Tensor, config: str = "") -> Wrapper:
        def plan(wrapper: Wrapper) -> None:
            wrapper.planned.append(lengths.tolist())

        return made.get(config, (lengths,), plan).wrapper

    return made, get


def test_a_plan_is_made_once_for_unchanged_lengths(plans):
    shelf, get = plans
    lengths = torch.tensor([3, 4])
    first = get(lengths)
    assert get(lengths) is first and (shelf.planned, shelf.reused) == (1, 1)
    lengths += 1
    # planned anew, in the same wrapper
    assert get(lengths) is first and first.planned == [[3, 4], [4, 5]]
    assert get(lengths, "other") is not first and shelf.planned == 3


def test_other_lengths_at_the_same_address_are_planned_anew(plans):
    shelf, get = plans
    memory = torch.tensor([3, 4, 0, 0])
    # storages of their own over the same memory
    first = torch.from_numpy(memory.numpy()[:2])
    get(first)
    del first
    memory[0] = 9
    second = torch.from_numpy(memory.numpy()[:2])
    assert get(second).planned[-1] == [9, 4] and shelf.planned == 2


def test_a_plan_for_inference_tensors_is_never_trusted(plans):
    shelf, get = plans
    with torch.inference_mode():
        lengths = torch.tensor([3, 4])
    get(lengths)
    get(lengths)
    assert (shelf.planned, shelf.reused) == (2, 0)


def test_the_oldest_wrapper_is_planned_again(plans):
    shelf, get = plans
    kept = [torch.tensor([i]) for i in range(paged.MAX_PLANS + 1)]
    wrappers = [get(lengths) for lengths in kept]
    assert wrappers[-1] is wrappers[0] and len(set(map(id, wrappers))) == paged.MAX_PLANS
    assert get(kept[1]) is wrappers[1] and shelf.reused == 1
    assert get(kept[0]).planned[-1] == [0]


# xFormers' biases.

@pytest.mark.parametrize("width", [5, 8, 13])
def test_a_bias_is_spaced_by_sixteen_bytes(width):
    mask = torch.randn(2, 1, 3, width, dtype=torch.float16)
    tensor = xformers.align_rows(mask)
    assert (torch.equal(tensor, mask) and tensor.stride(-1) == 1
            and all(s % 8 == 0 for s in tensor.stride()[:-1]))
    assert (tensor is mask) == (width % 8 == 0 and mask.data_ptr() % 16 == 0)


# Liger in Triton's interpreter: those of its kernels that the interpreter can run.

INTERPRETED = ("liger.rope", "liger.swiglu", "liger.cross_entropy", "liger.linear_cross_entropy")
INTERPRET = """
import warnings
from dataclasses import replace
from layerzero.backends.liger import KERNELS
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases
warnings.simplefilter("ignore")
for kernel in KERNELS:
    if kernel.id not in {names!r}:
        continue
    kernel = replace(kernel, requires=tuple(
        r for r in kernel.requires if not any(leaf.fact in ("device", "vendor", "sm") for leaf in r.leaves())))
    checks = [(check_gradients, c) for c in gradient_cases(kernel.op)[:3]] if kernel.differentiable else []
    checks += [(check_case, c) for c in kernel.op.cases if not c.get("separate")]     # those take a float argument
    ran = []
    for check, case in checks:
        result = check(kernel, case, "float32")
        ran += [result] if result.status != "skipped" else []
        if len(ran) == 6:
            break
    print(kernel.id, len(ran), *(str(r) for r in ran if not r.passed), sep="|", flush=True)
"""


@pytest.fixture(scope="module")
def interpreted():
    done = subprocess.run([sys.executable, "-c", INTERPRET.format(names=INTERPRETED)],
                          capture_output=True, text=True,
                          timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-1500:]
    return {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()
            if "|" in line}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None
                    or importlib.util.find_spec("liger_kernel") is None,
                    reason="triton and liger-kernel are not installed")
@pytest.mark.parametrize("name", INTERPRETED)
def test_liger_keeps_the_contract_in_the_interpreter(name, interpreted):
    assert interpreted[name] == ["6"]

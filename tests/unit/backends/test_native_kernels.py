"""Our own CPU kernels: built on demand, right over the contract and at the edges, refused with a
reason elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_build import COMPILER, build_by_plain_compiler

import layerzero as lz
from layerzero.backends.native import KERNELS, MAX_QUERY_ROWS, build, ggml
from layerzero.dispatch import native
from layerzero.machine import hardware, loading
from layerzero.machine.process_lock import process_lock
from layerzero.ops.attention import OP as ATTENTION
from layerzero.spec.errors import ConfigError, InvalidCall
from layerzero.spec.reason import Code
from layerzero.verify.kernel import contract
from layerzero.verify.kernel.contract import case_values, check_case, refusals
from layerzero.world import config

BY_ID = {k.id: k for k in KERNELS}
BY_OP = sorted(KERNELS, key=lambda k: k.op.name)       # one's references serve the next of its op
DECODE, DECODE_MHA = BY_ID["native.attention_decode"], BY_ID["native.attention_decode_mha"]
DECODE_ROWS = BY_ID["native.attention_decode_rows"]
DTYPES = ("float32", "bfloat16", "float16")


def forget() -> None:
    build.is_built.cache_clear()               # files that skip by it ask while they are collected
    build.module.cache_clear()
    contract.load_once.cache_clear()
    contract.bind_once.cache_clear()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library in the cache if it is built, else built into a folder of this run: by one of its
    workers, for which the others wait."""
    with pytest.MonkeyPatch.context() as patch:
        if build.is_built() is not True:
            if COMPILER is None:
                pytest.skip("needs a C++ compiler")
            base = tmp_path_factory.getbasetemp()
            run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
            patch.setenv("LAYERZERO_CACHE_DIR", str(run / "cache-with-kernels"))
            patch.delenv("CXX", raising=False)
            with process_lock("the CPU kernels of the tests", 280.0):
                build.build()
        forget()
        yield build.module()
    forget()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield tmp_path / "cache"
    forget()


PROCESSOR = {"isa", "fast_bf16_matmul", "fast_fp16_matmul"}    # facts of it that rules read


def lacking(kernel) -> str:
    """What the kernel wants of a processor and this one has not; "" where it runs."""
    facts = hardware.probe("cpu").facts()
    reasons = (rule.check(facts) for rule in kernel.requires
               if {leaf.fact for leaf in rule.leaves()} <= PROCESSOR)
    return "; ".join(reason.message for reason in reasons if reason is not None)


def skip_where_the_processor_lacks_something(kernel) -> None:
    if missing := lacking(kernel):
        pytest.skip(f"{kernel.id}: {missing}")


# the contract

# kernels for a part of their op's cases, and how many of these they serve at least
PART_OF_ITS_OP = {"native.group_norm_channels_last": 4, "native.sample_greedy": 2,
                  "native.quantize": 6, "native.dequantize": 4,
                  "native.linear_invariant": 20, "native.gated_delta_rule_token": 3,
                  "native.causal_conv1d_token": 4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", BY_OP, ids=lambda k: k.id)
def test_every_case_of_the_contract(library, kernel, dtype):
    skip_where_the_processor_lacks_something(kernel)
    results = [check_case(kernel, case, dtype) for case in kernel.op.cases]
    assert [str(r) for r in results if r.status == "failed"] == []
    # The rules must not hide what they are there to admit; a decode is a small part of attention's
    # cases, and kernels divide those of items and pages.
    partial = kernel.op.name in ("attention", "grouped_attention", "paged_attention")
    least = 1 if kernel is DECODE_ROWS else 3 if partial else len(results) - 2
    if kernel.id == "native.ggml_linear":      # a case of each of its formats
        least = len(ggml.FORMATS)
    if kernel.id.endswith(("_vector", "_half")):
        least = 0 if refused_everywhere(kernel, dtype) else 3 if kernel.op is not ATTENTION else 1
    assert Counter(r.status for r in results)["passed"] >= PART_OF_ITS_OP.get(kernel.id, least)


def refused_everywhere(kernel, dtype) -> bool:
    """By the dtype or the CPU alone."""
    reasons = refusals(kernel, case_values(kernel.op, kernel.op.cases[0], dtype))
    return any(r.code in (Code.DTYPE_UNSUPPORTED, Code.CPU_ISA_MISSING, Code.MATMUL_IS_FAST)
               for r in reasons)


DECODES: tuple[dict[str, Any], ...] = (
    *({"sq": sq, "sk": 77, "hq": 8, "hkv": 2} for sq in (1, 2, 3, 5, 7, 8)),
    *({"sq": 1, "sk": sk, "hq": 4, "hkv": 1, "lse": True}
      for sk in (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 1500)),
    *({"sq": 1, "sk": 33, "hq": 3, "hkv": 3, "d": d}
      for d in (1, 2, 15, 16, 17, 31, 32, 33, 72, 84, 128, 192, 257)),
    *({"sq": 2, "sk": 33, "hq": 6, "hkv": 2, "d": 24, "dv": dv}
      for dv in (1, 7, 16, 33, 48, 64, 65, 80, 130)),
    {"sq": 1, "sk": 3000, "hq": 8, "hkv": 8, "b": 1},
    {"sq": 1, "sk": 2100, "hq": 7, "hkv": 1, "b": 3, "lse": True},
    {"sq": 4, "sk": 1300, "hq": 4, "hkv": 2, "causal": True, "align": "bottom_right", "lse": True},
    {"sq": 4, "sk": 90, "causal": True, "align": "top_left", "lse": True},
    {"sq": 8, "sk": 8, "causal": True},
    # rows that see nothing
    {"sq": 8, "sk": 3, "causal": True, "align": "bottom_right", "lse": True},
    {"sq": 3, "sk": 0, "lse": True}, {"sq": 0, "sk": 5, "lse": True},
    {"b": 0, "sq": 1, "lse": True},
    {"sq": 1, "sk": 4000, "causal": True, "align": "bottom_right", "window": (100, 0), "hkv": 2},
    {"sq": 3, "sk": 2500, "window": (700, 5), "align": "bottom_right", "lse": True},
    {"sq": 3, "sk": 200, "window": (-1, 5)},
    {"sq": 2, "sk": 40, "window": (0, 0), "align": "bottom_right"},
    {"sq": 1, "sk": 700, "softcap": 20.0, "hkv": 1},
    {"sq": 1, "sk": 70, "softcap": 0.5, "scale": 3.0, "lse": True},
    {"sq": 1, "sk": 700, "scale": 0.0}, {"sq": 1, "sk": 70, "scale": -0.4},
    {"sq": 1, "sk": 700, "extreme": True},
    {"sq": 4, "sk": 90, "extreme": True, "causal": True, "align": "bottom_right", "lse": True,
     "hkv": 1},
    {"sq": 1, "sk": 90, "stride": "transposed", "hkv": 2},
    {"sq": 5, "sk": 90, "stride": "padded", "hkv": 2},
    {"sq": 1, "sk": 600, "layout": "bshd", "hkv": 2, "lse": True},
    {"sq": 2, "sk": 60, "layout": "bshd", "stride": "padded"},
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decoding_at_its_edges(library, case, dtype):
    results = [check_case(kernel, {"b": 2, **case}, dtype)
               for kernel in (DECODE, DECODE_ROWS, DECODE_MHA)]
    assert sorted(r.status for r in results) == ["passed", "skipped",
                                                 "skipped"], "\n".join(map(str, results))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_nothing_is_zero(library, dtype):
    case = {"sq": 6, "sk": 2, "hkv": 2, "causal": True, "align": "bottom_right", "lse": True}
    out, lse = contract.call(DECODE, case_values(ATTENTION, case, dtype))
    assert out[:, :, :4].eq(0).all() and lse[:, :, :4].eq(-torch.inf).all()
    assert out[:, :, 4:].ne(0).any() and lse[:, :, 4:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_error_of_a_sum_does_not_grow_with_its_length(library, rows):
    gen = torch.Generator().manual_seed(rows)

    def error(length: int) -> float:
        x, weight = (torch.randn(n, length, generator=gen) for n in (rows, 48))
        exact = x.double() @ weight.double().T
        out = lz.linear(x, weight, backend="native.linear_invariant")
        return float((out - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    assert error(65_536 + 5) < 2 * error(1024)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_row_has_the_same_bits_whatever_is_beside_it(library, dtype):
    gen = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 5003, generator=gen).to(getattr(torch, dtype)) for n in (9, 37))

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return lz.linear(x, weight, backend="native.linear_invariant")

    together = product(x, weight)
    assert all(torch.equal(product(x[:n], weight), together[:n]) for n in range(1, 9))
    assert torch.equal(torch.cat([product(x, w) for w in weight.split(13)], 1), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(library, dtype):
    calls = [(BY_ID[name], case_values(BY_ID[name].op, case, dtype)) for name, case in (
        ("native.attention_decode", {"sq": 3, "sk": 2500, "hq": 8, "hkv": 2}),
        ("native.add_rms_norm", {"rows": (41,), "hidden": 1000}),
        ("native.rope", {"s": 90, "d": 96, "hq": 9}),
        *((("native.linear_half", {"rows": (rows,), "k": 300, "n": 215}) for rows in (1, 3, 11))
          if dtype != "float32" else ()))]
    before = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append([t for kernel, values in calls
                            for t in contract.results_of(contract.call(kernel, values))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_comes_out_as_in_the_formula(library, name, bad, dtype):
    values = case_values(ATTENTION, {"b": 1, "hq": 2, "hkv": 1, "sq": 1, "sk": 70}, dtype)
    values[name] = values[name].clone()
    values[name][0, 0, 0, 3] = bad
    got, want = contract.call(DECODE, values), ATTENTION.reference(**contract.upcast(values))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("kernel", ["native.rms_norm", "native.add_rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_keep_nan_in_its_row(library, kernel, dtype):
    values = case_values(BY_ID[kernel].op, {"rows": (3,), "hidden": 50}, dtype)
    values["x"][1, 7] = float("nan")
    out = contract.results_of(contract.call(BY_ID[kernel], values))[0]
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


@pytest.mark.parametrize("dtype, bits", [(torch.float32, (0x7fffffff, -1)),
                                         (torch.float16, (0x7fff, -1)),
                                         (torch.bfloat16, (0x7fff, -1, 0x7f81))])
def test_any_nan_stays_one_in_half_types(library, dtype, bits):
    """A NaN with all its bits set, rounded as a number is, would become zero."""
    ints = torch.int32 if dtype == torch.float32 else torch.int16
    weight, x = torch.ones(24, dtype=dtype), torch.ones(2, 24, dtype=torch.bfloat16)
    weight[3:3 + len(bits)] = torch.tensor(bits, dtype=ints).view(dtype)
    out = lz.rms_norm(x, weight, backend="native.rms_norm")
    assert out.isnan()[:, 3:3 + len(bits)].all() and out[:, :3].isfinite().all()
    stray = x.clone().view(torch.int16)
    stray[1, 5] = -1
    out, total = lz.add_rms_norm(stray.view(torch.bfloat16), x, backend="native.add_rms_norm")
    assert out[1].isnan().all() and total[1, 5].isnan() and out[0].isfinite().all()


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case",
                         [{"hidden": h, "rows": (3,)} for h in (1, 15, 16, 17, 63, 64, 65, 200)]
                         + [{"hidden": 300, "rows": (200,)}, {"offset": 1.0},
                            {"rows": (4, 3), "stride": "transposed"}],
                         ids=str)
def test_norms_with_any_weight(library, case, dtype, weight_dtype):
    for kernel in (BY_ID["native.rms_norm"], BY_ID["native.add_rms_norm"]):
        own = {k: v for k, v in case.items() if k != "offset" or kernel.op.name == "rms_norm"}
        result = check_case(kernel, {**own, "weight_dtype": weight_dtype}, dtype)
        assert result.passed, str(result)


@pytest.mark.parametrize("stray", [-1, 22])
def test_an_id_outside_the_table_is_the_callers_error(library, stray):
    values = case_values(BY_ID["native.rope"].op, {"ids": "int64"}, "float32")
    assert values["cos"].shape[0] == 22
    values["position_ids"][1, 3] = stray
    with pytest.raises(InvalidCall, match=rf"position_ids.*between 0 and 21.*{stray}"):
        contract.call(BY_ID["native.rope"], values)


# An empty tensor is given, though its address is 0: what is not given is told otherwise.

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["rotate_half", "interleaved"])
@pytest.mark.parametrize("case", [
    {"b": 0}, {"s": 0}, {"hq": 0}, {"hkv": 0}, {"hq": 0, "hkv": 0}, {"s": 0, "ids": "int64"},
    {"b": 0, "ids": "int32"}, {"b": 0, "alone": True}, {"hq": 0, "alone": True},
    {"s": 0, "packed": True}, {"hkv": 0, "packed": True},
    {"b": 0, "batched": True}, *({"hkv": 0, "layout": "bshd", "b": b} for b in (0, 1, 2))], ids=str)
def test_rope_of_nothing(library, case, style, dtype):
    kernel = BY_ID["native.rope"]
    result = check_case(kernel, {"style": style, **case}, dtype)
    assert result.passed, str(result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("id", "case"), [
    ("native.rms_norm", {"rows": (0,)}), ("native.rms_norm", {"rows": (3, 0, 2)}),
    ("native.add_rms_norm", {"rows": (0,)}), ("native.add_rms_norm", {"rows": (2, 0)}),
    ("native.attention_decode", {"b": 0, "sq": 1, "hq": 4, "hkv": 2, "lse": True}),
    ("native.attention_decode", {"sq": 0, "hq": 4, "hkv": 2, "lse": True}),
    ("native.attention_decode", {"sq": 1, "sk": 0, "hq": 4, "hkv": 2, "lse": True})], ids=str)
def test_norms_and_attention_of_nothing(library, id, case, dtype):
    result = check_case(BY_ID[id], case, dtype)
    assert result.passed, str(result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_no_width_are_for_others(library, dtype):
    values = case_values(ATTENTION, {"sq": 1, "hq": 4, "hkv": 2, "lse": True}, dtype)
    values["value"] = values["value"][..., :0]
    assert Code.EMPTY_INPUT in [r.code for r in refusals(DECODE, values)]


# what they do not take

@pytest.mark.parametrize(("case", "code"), [
    ({"sq": MAX_QUERY_ROWS + 1}, Code.SEQ_LEN_UNSUPPORTED),
    ({"sq": 1, "mask": "bool"}, Code.MASK_UNSUPPORTED),
    ({"sq": 1, "alibi": True}, Code.ALIBI_UNSUPPORTED),
    ({"sq": 1, "stride": "sparse"}, Code.STRIDE_LAST_DIM)])
def test_refused_with_a_reason(case, code):
    assert code in [r.code for r in refusals(DECODE, case_values(ATTENTION, case, "float32"))]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_none_of_them_has_a_backward_or_other_dtypes(kernel):
    assert not kernel.differentiable and not kernel.traceable
    if kernel.id == "native.dequantize":       # its input is int8
        return
    values = case_values(kernel.op, kernel.op.cases[0], "float64")
    assert Code.DTYPE_UNSUPPORTED in [r.code for r in refusals(kernel, values)]


# building

@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_not_built_says_what_to_do_and_builds_nothing(kernel, empty_cache):
    with pytest.raises(loading.LoadFailed, match="not built; run: lz build"):
        loading.load(kernel)
    assert not empty_cache.exists()


@pytest.mark.parametrize("environ", [
    {"LAYERZERO_CACHE_DIR": "/some/where"}, {"LAYERZERO_CACHE_DIR": " ~/there "},
    {"XDG_CACHE_HOME": "/xdg"}, {"XDG_CACHE_HOME": "relative"}, {}])
def test_the_cache_is_the_one_of_the_configuration(environ):
    assert build.cache_dir(environ) == config.cache_dir(environ)
    assert build.library_path(environ).parents[2] == config.cache_dir(environ)


def test_a_broken_library_says_what_to_do(empty_cache):
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"do not load.*lz build --force"):
        build.module()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_stands_in_the_way_of_a_build_is_told(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx",
                                     "echo 'x.cpp:7: error: no such header' >&2; exit 1"))
    with pytest.raises(ConfigError,
                       match=r"did not compile; LayerZero works without them.\n.*no such header"):
        build.build()
    monkeypatch.setenv("CXX", "/no/such/g++")
    with pytest.raises(ConfigError, match=r"'/no/such/g\+\+' cannot be run: .*unset CXX"):
        native.build_kernels()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*set CXX"):
        build.build()
    assert list(empty_cache.rglob("*.so")) == [], "nothing half made is left"


@pytest.mark.integration
def test_a_compiler_without_openmp_or_wide_vectors_will_do(empty_cache, tmp_path_factory,
                                                           monkeypatch):
    folder, _, said = build_by_plain_compiler(tmp_path_factory)
    assert "the compiler has no OpenMP: the CPU kernels have their own threads only" in said
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(folder))
    assert build.is_built() is True
    unproven = []
    for kernel in (k for k in BY_OP if not lacking(k)):
        cases = (*kernel.op.cases, *(DECODES if kernel.op is ATTENTION else ()))
        results = [check_case(kernel, case, dtype) for case in cases for dtype in DTYPES]
        assert [str(r) for r in results if r.status == "failed"] == []
        if not any(r.passed for r in results):
            unproven.append((kernel.id, str(results[0])))
    assert not unproven

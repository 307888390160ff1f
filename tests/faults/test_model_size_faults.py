"""Kernels that were right at the sizes of a test; the rest are run by benchmarks/planted_faults.py.
"""

from __future__ import annotations

import functools
import gc
import os
import random
from typing import Any

import pytest
import torch
from broken_kernels import Fault
from helpers import Fake, register, world
from model_size_faults import SIZE_FAULTS

import layerzero as lz
from layerzero.machine import hardware
from layerzero.ops.attention import OP as ATTENTION
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.spec.kernel import Kernel
from layerzero.spec.reason import Code
from layerzero.verify.cases.pairs import pair_cases, residues
from layerzero.verify.certification.certify import certify, certify_all, failure_of, publish
from layerzero.verify.certification.circumstances.call_circumstances import UnusualValues
from layerzero.verify.certification.non_finite import check_non_finite
from layerzero.verify.diagnosis.diagnose import CLASSES, diagnose
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.gradients import check_gradients
from layerzero.verify.kernel.process_state import find_leak, process_state, put_back
from layerzero.world import snapshot as worlds
from layerzero.world.registry import certificates

__all__ = ["world"]
# One of each mechanism; quick to find.
FEW = ("flushes_denormals", "onethreadoneveryoddcall", "returns_a_parameter",
       "returns_an_inference_tensor", "keepseveryresult", "byte_offsets_in_32_bits",
       "weight_read_as_if_contiguous")
LOUD = {"sq": 8, "sk": 90, "hkv": 2, "causal": True, "align": "bottom_right"}


def test_every_fault_is_another_and_has_a_class() -> None:
    assert len({f.name for f in SIZE_FAULTS}) == len(SIZE_FAULTS) >= 48
    assert {kind for f in SIZE_FAULTS for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize("fault", [f for f in SIZE_FAULTS if f.name in FEW], ids=lambda f: f.name)
def test_it_is_found_and_named(fault: Fault) -> None:
    verdict = certify(fault.kernel(), stop_early=True)
    assert verdict.status == "failed" and verdict.certificate is None
    assert verdict.diagnosis is not None and verdict.diagnosis.kind in fault.kinds, str(
        verdict.diagnosis)


@pytest.mark.parametrize("name", ["swallows_nan", "nan_spreads_to_every_row",
                                  "infinity_is_clamped"])
def test_a_nan_or_infinity_is_where_the_formula_has_one(name: str) -> None:
    broken = next(f for f in SIZE_FAULTS if f.name == name).kernel()
    right = worlds.current().catalog.by_id[f"torch.{broken.op.name}"]
    results = [check_non_finite(kernel, {}, "float32") for kernel in (broken, right)]
    assert [r.status for r in results] == ["failed", "passed"]
    assert results[0].kinds == ("not finite",)


def test_what_a_kernel_changes_is_named_and_put_back() -> None:
    before = process_state("cpu")
    torch.set_flush_denormal(True)
    torch.backends.mkldnn.enabled = not torch.backends.mkldnn.enabled
    os.environ["PLANTED"] = "1"
    random.random()
    gc.disable()
    changed = put_back(before, "cpu")
    assert set(changed) >= {"denormals or rounding", "oneDNN", "the environment",
                            "the garbage collector", "the state of Python's random numbers"}
    assert not put_back(before, "cpu") and "PLANTED" not in os.environ and gc.isenabled()


def test_a_leak_is_what_every_round_leaves_behind() -> None:
    def rounds(*objects: int) -> list[dict[str, int]]:
        return [{"Python objects": n} for n in objects]

    assert "2 Python objects" in find_leak(rounds(0, 20, 40, 60), 10)
    assert not find_leak(rounds(0, 500, 500, 500), 10)


def test_four_seeds_meet_every_remainder() -> None:
    met = {case[0]["hidden"] % 128 for seed in range(4)
           for _, cases in residues(RMS_NORM, "quick", seed) for case in cases}
    assert met == set(range(128))


def test_pairs_are_covered_as_far_as_a_kernel_accepts_them() -> None:
    chosen = pair_cases(worlds.current().catalog.by_id["torch.rms_norm"], "cpu", "quick", 0)
    assert chosen.covered >= 0.97 * chosen.reachable > 50 and len(chosen.cells) <= 20


def test_a_cache_of_one_byte_an_element_has_no_gradient() -> None:
    kernel = worlds.current().catalog.by_id["reference.paged_attention"]
    case = next(c for c in kernel.op.cases if str(c.get("stored", "")).startswith("float8"))
    assert check_gradients(kernel, case, "float32").passed


# A failure is a result, and is remembered.

def _raise() -> None:
    def run(x, weight=None, eps=1e-6, *, offset=0.0):
        raise KeyError("key_cache")

    return run


@pytest.fixture
def own_cache(tmp_path, monkeypatch, world) -> None:
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))


def test_one_kernel_that_breaks_does_not_stop_the_others(own_cache, monkeypatch) -> None:
    def broken(kernel, *args, **kwargs):
        raise KeyError("key_cache")

    good = worlds.current().catalog.by_id["torch.alibi"]
    monkeypatch.setattr("layerzero.verify.certification.checks._many_call_checks", broken)
    verdicts = list(certify_all([Kernel("fake.raises", RMS_NORM, _raise), good]))
    assert [v.kernel for v in verdicts] == ["fake.raises", "torch.alibi"]
    assert all(v.status == "failed" and "fault" in v.failures[0].kinds for v in verdicts)
    assert "key_cache" in verdicts[1].failures[-1].detail


def test_a_failed_certification_is_remembered(own_cache) -> None:
    class Doubles(Fake):
        def _load(self):
            right = super()._load()
            return lambda x, weight=None, eps=1e-6, *, offset=0.0: right(
                x, weight, eps, offset=offset) * 2

    register(Doubles("fake.bad", prior=1e7))
    x = RMS_NORM.inputs()["x"]
    assert lz.which("rms_norm", x) == "fake.bad"
    here, bad = hardware.probe("cpu"), worlds.current().catalog.by_id["fake.bad"]
    verdict = certify(bad, stop_early=True)
    certificates.write_failure(failure_of(bad, "cpu", verdict), here)
    publish()
    assert lz.which("rms_norm", x) != "fake.bad"
    output = str(lz.explain("rms_norm", x))
    assert "fake.bad" in output and "failed when it was verified here" in output
    assert certificates.failures([bad], here)["fake.bad"].code is Code.CERTIFICATION_FAILED
    assert lz.which("rms_norm", x, backend="fake.bad") == "fake.bad"
    path = certificates.folder(here) / "fake.bad.failed.json"
    path.write_text(path.read_text().replace("fake.bad", "fake.god"))
    assert not certificates.failures([bad], here)          # the seal does not fit


def test_a_result_is_the_callers_own() -> None:
    kept = []

    def load():
        def run(x, weight=None, eps=1e-6, *, offset=0.0):
            out = RMS_NORM.reference(x, weight, eps, offset=offset)
            kept.append(out.detach())
            return out

        return run

    result = check_case(Kernel("fake.keeps", RMS_NORM, load), {}, "float32")
    assert result.kinds == ("result",) and "still holds" in result.detail


# The diagnosis.

def _wrong_where(condition) -> Kernel:
    def load():
        def run(x, weight=None, eps=1e-6, *, offset=0.0):
            right = RMS_NORM.reference(x, weight, eps, offset=offset)
            return right * 1.5 if condition(x, offset) else right

        return run

    return Kernel("fake.wrong", RMS_NORM, load)


def test_an_argument_is_named_if_the_call_is_right_without_it_alone() -> None:
    kernel = _wrong_where(lambda x, offset: offset)
    results = [check_case(kernel, case, "float32") for case in (
        {}, {"eps": 1.0}, {"offset": 1.0}, {"offset": -0.5, "eps": 1.0, "hidden": 17})]
    diagnosis = diagnose(kernel, results)
    # wrong whenever it is given, whatever the sizes: it means something else to the kernel
    assert (diagnosis is not None and diagnosis.kind == "convention"
            and "without offset (" in diagnosis.says)


def test_a_forward_pass_that_is_wrong_is_not_called_right() -> None:
    kernel = _wrong_where(lambda x, offset: torch.is_grad_enabled())
    results = [check_case(kernel, {}, "float32"), check_gradients(kernel, {}, "float32")]
    assert [r.status for r in results] == ["passed", "failed"]
    diagnosis = diagnose(kernel, results)
    assert (diagnosis is not None and diagnosis.kind == "mode"
            and "forward pass is right" not in diagnosis.says)


def test_what_is_wrong_in_a_few_last_rows_is_told_so() -> None:
    def load():
        def run(x, weight=None, eps=1e-6, *, offset=0.0):
            out = RMS_NORM.reference(x, weight, eps, offset=offset)
            out[-1] *= 3
            return out

        return run

    kernel = Kernel("fake.tail", RMS_NORM, load)
    results = [check_case(kernel, {"rows": (n,)}, "float32") for n in (5, 6, 9)]
    diagnosis = diagnose(kernel, results)
    assert (diagnosis is not None and diagnosis.kind == "last rows"
            and "0.0 times" not in str(diagnosis))


@pytest.mark.parametrize("name", ["page_count_in_8_bits", "page_ids_in_15_bits",
                                  "latent_pages_in_15_bits"])
def test_pages_beyond_small_integers_are_a_matter_of_size(name: str) -> None:
    kernel = next(f for f in SIZE_FAULTS if f.name == name).kernel()
    cases = (*kernel.op.cases[:3], *kernel.op.stress[:3])
    results = [check_case(kernel, case, "float32", seed=1) for case in cases]
    diagnosis = diagnose(kernel, results)
    assert diagnosis is not None and diagnosis.kind == "sizes", str(diagnosis)


@pytest.mark.parametrize(("roundings", "draw", "status"), [
    *((2.0, draw, "passed") for draw in range(6)), (300.0, 1, "failed")])
def test_a_loud_number_costs_what_its_roundings_cost(roundings: float, draw: int,
                                                     status: str) -> None:
    """With these numbers a rounding of the keys moves the exact result by far more than the eager
    formula happens to be off."""
    right = ATTENTION.reference

    @functools.wraps(right)
    def rounded(query: torch.Tensor, key: torch.Tensor, *args: Any, **rest: Any) -> Any:
        gen = torch.Generator().manual_seed(draw)
        signs = torch.randint(0, 2, key.shape, generator=gen) * 2 - 1
        wide = [t.double() if isinstance(t, torch.Tensor) else t for t in args]
        key = key.double() * (1 + signs * roundings * 2.0 ** -24)
        return right(query.double(), key, *wide, **rest).to(query.dtype)

    kernel = Kernel("fake.rounds_the_keys", ATTENTION, lambda: rounded,
                    variants=tuple(ATTENTION.patterns))
    result = check_case(kernel, LOUD, "float32", seed=2,
                        circumstance=UnusualValues("one loud number"))
    assert result.status == status, str(result)

"""What a kernel keeps of a call: for another thread, for other contents, for another mode."""

from __future__ import annotations

import functools
import sys
import threading

import pytest
from broken_kernels import Fault
from call_faults import CALL_FAULTS

from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.growth import check_other_contents
from layerzero.verify.certification.threads import check_interrupted, check_threads
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds

FAULTS = {f.name: f for f in CALL_FAULTS}


@pytest.mark.parametrize("fault", CALL_FAULTS, ids=lambda f: f.name)
def test_it_is_found_and_named_rightly_or_not_at_all(fault: Fault) -> None:
    verdict = certify(fault.kernel(), seeds=(0,), stop_early=True)
    assert verdict.status == "failed" and verdict.diagnosis is not None
    assert verdict.diagnosis.kind in {*fault.kinds, "unknown"}, str(verdict.diagnosis)


def test_a_call_in_the_midst_of_another_is_made_however_short_it_is() -> None:
    kernel = FAULTS["stagingbysize"].kernel()
    assert check_case(kernel, {}, "float32").passed
    result = check_interrupted(kernel, [({}, "float32")])
    assert result.status == "failed" and result.kinds == ("threads",), str(result)


def test_calls_that_wait_for_each_other_are_right() -> None:
    fault, lock = FAULTS["stagingbysize"], threading.Lock()

    def make():
        run = fault.make()

        @functools.wraps(run)
        def locked(*args, **kwargs):
            with lock:
                return run(*args, **kwargs)

        return locked

    result = check_interrupted(fault._replace(make=make).kernel(), [({}, "float32")])
    assert result.status == "passed", str(result)


@pytest.mark.parametrize(("entries", "status"), [(100, "passed"), (10_000, "failed")])
def test_a_cache_of_bounded_size_is_no_leak(entries: int, status: str) -> None:
    fault = FAULTS["scoresforeverytotal"]

    def make():
        run, kept = fault.make(), {}

        @functools.wraps(run)
        def keeping(*args, **kwargs):
            if len(kept) < entries:
                kept[len(kept), "call"] = [len(kept)]
            return fault.op.reference(*args, **kwargs)

        return keeping

    result = check_other_contents(fault._replace(make=make).kernel(), {}, "float32")
    assert result.status == status, str(result)


@pytest.mark.parametrize("name", ["reference.rms_norm", "torch.mlp", "torch.rope",
                                  "torch.paged_gather"])
def test_a_sound_kernel_passes(name: str) -> None:
    kernel, interval, trace = (worlds.current().catalog.by_id[name], sys.getswitchinterval(),
                               sys.gettrace())
    cells = [(case, "float32") for case in kernel.op.cases[:3]]
    results = [check_interrupted(kernel, cells), check_threads(kernel, cells[0][0], "float32")]
    assert [r.status for r in results] == ["passed", "passed"]
    assert (sys.getswitchinterval(), sys.gettrace()) == (interval, trace)

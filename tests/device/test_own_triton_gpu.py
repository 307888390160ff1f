"""Somebody's own Triton kernel on a GPU: the contract, the cache of what was compiled, the limits,
tuning, graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import NVIDIA_ONLY, RMS_NORM, emitted, events_of, world

import layerzero as lz
from layerzero.operate.triton_kernels import TritonCompiled, triton_cache, triton_kernel
from layerzero.perf.record import CAPTURED, EAGER
from layerzero.spec.reason import Code
from layerzero.spec.rules.launch import LaunchRefused
from layerzero.verify.certification.capture import capture_cases
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds

__all__ = ["emitted", "world"]                # fixtures

pytestmark = NVIDIA_ONLY
HOME = Path(__file__).parents[1] / "interpreter"


@pytest.fixture
def mine(monkeypatch, world):
    monkeypatch.syspath_prepend(str(HOME))
    import own_triton
    lz.configure(jit="in_request")
    return own_triton


def rows(n: int = 8, hidden: int = 300, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, hidden, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_it_keeps_the_contract(mine, dtype):
    results = [check_case(mine.MINE, case, dtype, "cuda") for case in RMS_NORM.cases[::2]]
    ran = [r for r in results if r.status != "skipped"]
    assert len(ran) >= 2 and all(r.passed for r in ran), [str(r) for r in results]


def test_compiled_once_then_hits_and_an_event_says_which(mine, emitted):
    lz.register(mine.MINE)
    x = rows()
    for _ in range(5):
        torch.testing.assert_close(lz.rms_norm(x, backend="mine.rms_norm"), RMS_NORM.reference(x))
    (row,) = [r for r in triton_cache() if r.kernel == "mine.rms_norm"]
    made = [e for e in events_of(TritonCompiled, emitted) if e.kernel == "mine.rms_norm"]
    assert row.hits >= 4 and len(made) <= 1
    assert all(e.cache in ("compiled", "disk", "memory") for e in made)
    assert lz.stats().events.get("triton_compiled", 0) == len(events_of(TritonCompiled, emitted))


@pytest.mark.parametrize("hidden", [1, 2, 16, 17, 48, 1000])
def test_every_specialisation_is_launched_right(mine, hidden):
    """Sizes that Triton compiles differently for, from pointers that are aligned and that are not.
    """
    run = mine.MINE.load()
    for offset in (0, 1, 4):
        flat = torch.randn(7 * hidden + offset, device="cuda")
        x = flat[offset:].view(7, hidden)
        weight = torch.randn(hidden + offset, device="cuda")[offset:]
        for _ in range(2):
            torch.testing.assert_close(run(x, weight), RMS_NORM.reference(x, weight), atol=2e-5,
                                       rtol=2e-5)
            torch.testing.assert_close(run(x), RMS_NORM.reference(x), atol=2e-5, rtol=2e-5)


SECOND = """
import json, sys
sys.path.insert(0, {home!r})
import torch, own_triton
from layerzero.world import events
seen = []
events.subscribe(lambda e: seen.append(e) if e.name == "triton_compiled" else None)
own_triton.MINE.load()(torch.randn(8, 300, device="cuda"))
print(json.dumps([e.cache for e in seen]))
"""


def test_another_process_finds_it_on_disk(mine, tmp_path):
    messages = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SECOND.format(home=str(HOME))],
                              capture_output=True, text=True,
                              timeout=240, env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        messages.append(json.loads(done.stdout.splitlines()[-1]))
    assert messages == [["compiled"], ["disk"]]


def test_a_profilers_hook_sees_every_launch(mine):
    from triton import knobs
    run, x, seen = mine.MINE.load(), rows(), []
    run(x)

    def hook(metadata):
        seen.append(metadata)

    chain = knobs.runtime.launch_enter_hook
    if not hasattr(chain, "add"):
        pytest.skip("this Triton has one hook, not a chain")
    chain.add(hook)
    try:
        run(x)
    finally:
        chain.remove(hook)
    run(x)
    assert len(seen) == 1


# limits

def test_a_grid_beyond_the_device_is_refused_with_a_typed_reason(mine):
    kernel = triton_kernel("mine.long", RMS_NORM, mine.scaled_rows, launch=mine.launch,
                           grid=lambda g: (1, 70000))
    with pytest.raises(LaunchRefused,
                       match="grid y must be a whole number from 1 to 65535, got 70000") as caught:
        kernel.load()(rows())
    assert caught.value.codes == (Code.CUDA_BLOCK_LIMIT_EXCEEDED,)
    lz.register(kernel)
    with pytest.raises(lz.errors.KernelExecutionError):
        lz.rms_norm(rows(), backend="mine.long")
    assert "mine" not in worlds.current().health           # it trips nothing


def test_too_much_shared_memory_is_refused_before_the_launch(tmp_path, monkeypatch, mine):
    (tmp_path / "wide_dot.py").write_text(WIDE_DOT)
    monkeypatch.syspath_prepend(str(tmp_path))
    import wide_dot
    kernel = triton_kernel("mine.wide", RMS_NORM, wide_dot.wide, launch=wide_dot.launch, grid=(1,),
                           meta={"BLOCK": 256, "num_warps": 8, "num_stages": 6})
    with pytest.raises(LaunchRefused,
                       match="shared memory of a block in bytes must be <= ") as caught:
        kernel.load()(rows(256, 2048, torch.float16))
    assert caught.value.codes == (Code.CUDA_BLOCK_LIMIT_EXCEEDED,)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0


WIDE_DOT = '''
import torch
import triton
import triton.language as tl

@triton.jit
def wide(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        a = tl.load(x_ptr + row * n + first + column)
        b = tl.load(x_ptr + (first + row) * BLOCK + column)
        total = tl.dot(a, b, total)
    tl.store(out_ptr + row * BLOCK + column, total)

def launch(x, weight=None, eps=1e-6):
    out = torch.empty(256, 256, device=x.device)
    return out, (x, out, x.shape[1])
'''


# tuning and graphs

def test_the_tuner_times_every_configuration_and_selection_follows(mine, tmp_path):
    # others, to save time
    compiling = [k.id for k in worlds.current().catalog.kernels if k.jit]
    lz.configure(perfdb=str(tmp_path / "perf.sqlite"), rules=(lz.PolicyRule.of("deny", compiling),))
    for kernel in mine.TUNED:
        lz.register(kernel)
    call = lz.testing.Call("rms_norm", {"x": lz.testing.TensorSpec((512, 1024), "float16")})
    report = lz.tune([call], device="cuda")
    tuned = {t.mode: t for t in report.tuned}
    assert tuned.keys() == {EAGER, CAPTURED}
    for one in tuned.values():
        timed = {t.kernel for t in one.kernels}
        assert {k.id for k in mine.TUNED} <= timed, (timed, one.failed)
    x = rows(512, 1024, torch.float16)
    assert lz.which("rms_norm", x) == tuned[EAGER].chosen


def test_it_can_be_captured(mine):
    verdict = capture_cases(mine.MINE)
    assert verdict, verdict


def test_what_a_launch_costs(mine):
    """Told, not judged."""
    run, x = mine.MINE.load(), rows(1, 256)

    def plainly():
        result, args, meta = mine.launch(x)
        mine.scaled_rows[(1,)](*args, **meta)
        return result

    for name, fn in (("triton's own", plainly), ("ours", lambda: run(x))):
        for _ in range(50):
            fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            fn()
        took = (time.perf_counter() - start) / 2000 * 1e6
        torch.cuda.synchronize()
        print(f"{name}: {took:.1f} us a call")

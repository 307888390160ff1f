"""Ctrl-C in what takes longer than a call: recording, workers, agreement between ranks, packing of
weights and the loop of generate(). What comes next is right, and nothing stays behind: no lock, no
process, no draft of a file.

As in test_interrupts.py; here SWEEP=N takes N points of each, SWEEP=all all.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rows
from test_interrupts import Interrupt, in_another_thread, take_every_lock

import layerzero as lz
from layerzero.files import sealed
from layerzero.files.calls import read_calls
from layerzero.machine.isolation import pool as pools
from layerzero.operate import recording
from layerzero.operate.inspection import dispatcher_of
from layerzero.world import snapshot as worlds

SWEEP = os.environ.get("SWEEP", "8")
PACKAGE = f"{Path(lz.__file__).parent}{os.sep}"


def sweep(act: Callable[[], Any], check: Callable[[str], None],
          rooms: tuple[str, ...] = ("",)) -> None:
    """Interrupts `act` at points spread over its instructions in those rooms, and checks after
    each that all is well."""
    paths = tuple(f"{PACKAGE}{room}" for room in rooms)
    act()
    with Interrupt(0, paths) as counter:
        act()
    points = counter.seen if SWEEP == "all" else int(SWEEP)
    # golden steps: no two points at the same place in a loop, and the ends of blocks as well
    raised, problems = 0, []
    for i in range(points):
        at = 1 + (i if SWEEP == "all" else int(i * 0.6180339887 % 1.0 * counter.seen))
        interrupt = Interrupt(at, paths)
        try:
            with interrupt:
                act()
        except KeyboardInterrupt:
            raised += 1
        try:
            in_another_thread(take_every_lock, interrupt.where)
            check(interrupt.where)
        except AssertionError as e:
            if not os.environ.get("COLLECT"):
                raise
            problems.append(f"{interrupt.where}: {e!r:.300}")
    print(points, "points", raised, "raised of", counter.seen)
    assert not problems, "\n".join(problems)
    assert raised >= points // 2


def test_a_recording(tmp_path, world):
    x, path = rows(), tmp_path / "calls.jsonl"

    def act():
        with lz.recording(path):
            lz.rms_norm(x)
            lz.rms_norm(rows(hidden=4))

    def check(where):
        assert not recording._observers, f"it records for ever after an interrupt at {where}"
        assert type(dispatcher_of("rms_norm")) is recording._PLAIN, where
        act()
        assert len(read_calls(path)) == 2, where
        assert [p.name for p in tmp_path.iterdir()] == ["calls.jsonl"], where

    sweep(act, check)


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "unit" / "machine"))
    import misbehaving_kernels as bad
    before = worlds.current().policy
    lz.register(bad.KERNELS[0])
    lz.configure(isolation="misbehaving.*=worker", isolation_memory=64 << 20,
                 isolation_timeout=20.0)
    yield lambda x: lz.rms_norm(x, backend="worker.misbehaving.rms_norm")
    worlds.publish(lambda w: w.replace(policy=before), "end of the tests")
    lz.unregister("misbehaving")


def test_a_call_of_a_worker(workers):
    x = torch.randn(512, 64)
    wanted = torch.rms_norm(x, (64,), None, 1e-6)

    def check(where):
        until = time.monotonic() + 30
        while True:                            # a worker that died comes back by itself
            try:
                out = in_another_thread(lambda: workers(x), where)
                break
            except AssertionError as e:
                assert "starting" in str(e.__cause__).lower() and time.monotonic() < until, (
                    where, e.__cause__)
                time.sleep(0.02)
        assert torch.equal(out, wanted), where
        pool = next(p for p in pools.pools() if p.name == "misbehaving")
        assert len(pool.workers) == 1 and pool.starting == 0, where
        living = {w.process.pid for w in pool.workers}
        assert children() <= living, f"{where}: a process stays behind"

    sweep(lambda: workers(x), check, ("machine",))


def children() -> set[int]:
    """Processes of this one that run a worker."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                command = Path("/proc", child, "cmdline").read_bytes()
            except OSError:
                continue
            if b"layerzero.operate.worker" in command:
                found.add(int(child))
    return found


def test_packed_weights(tmp_path, monkeypatch):
    from layerzero.backends.native import build
    if build.is_built() is not True:
        pytest.skip("needs the native kernels: lz build")
    from layerzero.backends.native import ggml
    from layerzero.ops.formulas.ggml import quantize_blocks
    cache = tmp_path / "cache"
    monkeypatch.setattr(ggml, "cache_dir", lambda: cache)
    weight = quantize_blocks(torch.randn(64, 256), "q8_0")
    numbers = iter(range(10**9))
    wanted = ggml.pack_weight(weight, "q8_0")

    def act():
        for file in cache.glob("packed/*.bin*"):
            file.unlink()
        ggml.packed_file(weight, "q8_0")

    def check(where):
        assert torch.equal(ggml.packed_file(weight, "q8_0"), wanted), where
        left = [p.name for p in cache.rglob(".making-*")]
        assert not left, f"{where}: {left}"
        fresh = weight.clone() + next(numbers) * 0
        for _ in ggml.pack_model([(fresh, "q8_0")]):
            pass
        assert torch.equal(ggml.packed_weight(fresh, "q8_0"), wanted), where

    sweep(act, check, ("backends", "files"))


def test_ranks_that_agree():
    from torch.distributed import HashStore

    from layerzero.integrations.distributed import lifecycle as distributed
    from layerzero.integrations.distributed import agreement, lifecycle
    from layerzero.integrations.distributed.exchange import StoreGroup
    from layerzero.spec.call import Call
    x = rows()
    call = Call("rms_norm", {"x": x})

    def act():
        distributed.shutdown()
        distributed.init(group=StoreGroup(HashStore(), 0, 1), timeout=5.0)
        distributed.agree([call])
        distributed.shutdown()

    def check(where):
        distributed.shutdown()
        assert agreement.layers_of(worlds.current())[0] == [], where
        act()
        assert not lifecycle._sessions, where
        lz.rms_norm(x)
        assert agreement.layers_of(worlds.current())[0] == [], where

    sweep(act, check)


@pytest.mark.parametrize("how", [{}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_generate(how, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "hf"))
    from test_accelerate import build, prompt

    from layerzero.integrations.transformers.accelerate import accelerate
    from layerzero.integrations.transformers.decoding import shared_prompt
    monkeypatch.setattr(shared_prompt, "LEAST_PROMPT", 4)
    monkeypatch.setattr(shared_prompt, "LEAST_ROOM", 4)
    model, ids = build(), prompt(1)
    model.generation_config.eos_token_id = None
    accelerate(model, measure=False, patch=False)

    def act():
        torch.manual_seed(5)
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6,
                              **{"do_sample": False, **how})

    wanted = act()

    def check(where):
        assert torch.equal(act(), wanted), where

    sweep(act, check, ("integrations", "models"))


def test_a_gguf_file(tmp_path, monkeypatch):
    pytest.importorskip("gguf"), pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "unit" / "integrations"))
    import test_gguf_models as models
    path = tmp_path / "model.gguf"
    models.write(path, "llama", models.build("llama"), "Q8_0")
    ids = torch.tensor([[1, 2, 3]])

    def logits():
        model = lz.load_gguf(path)
        return model(ids) if callable(model) else model

    def check(where):
        lz.load_gguf(path)
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.islink(f"/proc/self/fd/{fd}")]
        assert sum(str(path) in name for name in opened) <= 1, where

    sweep(lambda: lz.load_gguf(path), check, ("integrations", "models", "backends", "files"))


_ = sys, threading, sealed

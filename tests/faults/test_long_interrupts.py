"""Ctrl-C in what takes longer than a call: recording, workers, agreement between ranks, packing of
weights and the loop of generate(). What comes next is right, and nothing stays behind: no lock, no
process, no draft of a file.

As in test_interrupts.py; SWEEP=N takes N points of each, SWEEP=all every one.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from helpers import rows
from test_interrupts import Interrupt, in_another_thread, take_every_lock

import layerzero as lz
from layerzero.files.calls import read_calls
from layerzero.machine.isolation import pool as pools
from layerzero.machine.isolation.process import Limits
from layerzero.operate import recording
from layerzero.operate.inspection import dispatcher_of
from layerzero.world import snapshot as worlds

SWEEP, POINTS = os.environ.get("SWEEP", ""), 5
PACKAGE = f"{Path(lz.__file__).parent}{os.sep}"


@pytest.fixture(autouse=True)
def nothing_is_left_to_collect() -> Iterator[None]:
    """Closes here what an interrupt dropped: later tests count the open files of a call."""
    yield
    gc.collect()


def sweep(act: Callable[[], Any], check: Callable[[str], None],
          rooms: tuple[str, ...] = ("",), points: int = POINTS) -> None:
    """Interrupts `act` at points spread over its instructions in those rooms, and checks after
    each that all is well."""
    paths = tuple(f"{PACKAGE}{room}" for room in rooms)
    act()
    with Interrupt(0, paths) as counter:
        act()
    points = counter.seen if SWEEP == "all" else int(SWEEP or points)
    raised = 0
    for i in range(points):
        # golden steps: no two points at the same place in a loop
        at = 1 + (i if SWEEP == "all" else int(i * 0.6180339887 % 1.0 * counter.seen))
        interrupt = Interrupt(at, paths)
        try:
            with interrupt:
                act()
        except KeyboardInterrupt:
            raised += 1
        in_another_thread(take_every_lock, interrupt.where)
        check(interrupt.where)
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


class Lent:
    """Stands in for a worker process, which takes seconds to start: what is swept is the pool."""

    living: ClassVar[WeakSet[Lent]] = WeakSet()        # one that is dropped ends by itself

    def __init__(self, *_: object) -> None:
        self.alive = True
        Lent.living.add(self)

    def call(self, kernel: str, values: Any, in_place: Any, seconds: float) -> Any:
        assert self.alive
        return values

    def load(self, declared: dict[str, Any]) -> tuple[str, ...]:
        return ()

    def kill(self) -> None:
        self.alive = False
        Lent.living.discard(self)

    stop = kill


def test_a_worker_is_given_back_or_replaced(monkeypatch):
    monkeypatch.setattr(pools, "Worker", Lent)
    monkeypatch.setattr(pools, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(pools, "FIRST_DELAY", 0.0)
    limits = Limits(5.0, 1 << 20)
    pool = pools.Pool("lent", "", lambda: limits, lambda: 1)

    def act():
        pool.wait()
        pool.call("k", (1,), ())

    def check(where):
        pool.wait()
        assert in_another_thread(lambda: pool.call("k", (2,), ()), where) == (2,)
        deadline = time.monotonic() + 10
        while pool.starting and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(pool.workers) == 1 and set(pool.workers) == set(Lent.living), where
        assert not pool.holders and pool.idle.qsize() == 1, where

    sweep(act, check, ("machine/isolation",), points=60)

    def start():
        nonlocal pool
        pool = pools.Pool("lent", "", lambda: limits, lambda: 1)
        Lent.living.clear()
        pool.wait()

    sweep(start, check, ("machine/isolation",), points=60)


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

    from layerzero.integrations.distributed import agreement
    from layerzero.integrations.distributed import lifecycle as distributed
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
        assert not distributed._sessions, where
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
    monkeypatch.setattr(shared_prompt, "MIN_PROMPT_TOKENS", 4)
    monkeypatch.setattr(shared_prompt, "MIN_CAPACITY", 4)
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

    def check(where):
        lz.load_gguf(path)
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.islink(f"/proc/self/fd/{fd}")]
        assert sum(str(path) in name for name in opened) <= 1, where

    sweep(lambda: lz.load_gguf(path), check, ("integrations", "models", "backends", "files"))

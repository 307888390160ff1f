"""Calls of our CUDA kernels, replayed by the compiled path: through the driver's signature into the
emulator.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import world
from torch import Tensor

import layerzero as lz
from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.attention import decode, grouped
from layerzero.backends.cuda.linear import gemv, planes
from layerzero.backends.cuda.norm import norm
from layerzero.backends.cuda.sampling import sample
from layerzero.dispatch import dispatcher as dispatch
from layerzero.dispatch import native
from layerzero.dispatch.background import compiling
from layerzero.dispatch.native.replays import LaunchRecorder
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec import replay

from .run import COMPILER, Kernel, on_cpu

__all__ = ["world"]
pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]
PREPARED = (norm._prepare, decode._compiled, grouped._compiled_cascade, gemv._prepare, planes._prepare,
            sample._plan)


@pytest.fixture(scope="session")
def compiled() -> None:
    if native.module() is None and native.is_enabled() and shutil.which("g++"):
        native.build_fast_path(False, print)
    if native.module() is None:
        pytest.skip(f"there is no native path here: {native.status().text}")
    for name, dispatcher in list(dispatch.dispatchers.items()):
        if dispatcher.native is None:               # made before it was built
            dispatch.dispatchers[name] = dispatch.Dispatcher(dispatcher.op)


@pytest.fixture
def serve(compiled: None, world: Any,
          monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Callable[..., Any]]]:
    """serve("cuda.rms_norm") is lz.rms_norm, served by that kernel in the emulator."""
    # what an earlier test has compiled would publish a world, and the entries be made anew
    assert compiling.wait(150)
    monkeypatch.setattr(compiler, "kernel", Kernel)
    monkeypatch.setattr(decode, "config", small_config)
    monkeypatch.setattr(grouped, "cascade_config", lambda *facts: grouped.Config(2, 2, 3, 32, 6))
    monkeypatch.setattr(sample, "config", lambda *facts: sample.Config(2, 64, 64))
    for cached in PREPARED:
        cached.cache_clear()

    def chosen(name: str) -> Callable[..., Any]:
        kernel = dataclasses.replace(on_cpu(name), id=name.replace("cuda.", "emulated."))
        lz.register(kernel)
        lz.lock(kernel.op.name, kernel.id)
        return dispatcher_of(kernel.op.name).public

    yield chosen
    for cached in PREPARED:
        cached.cache_clear()


def small_config(rows: int, homes: int, keys: int, *rest: Any) -> decode.Config:
    """Few warps, because each is 32 fibers; bounds are powers of two, as those of the real one are.
    """
    return decode.Config(2, 2, 2 if keys >= 64 else 1)


def counts(op: str, *args: Any, **kwargs: Any) -> tuple[int, int, int]:
    """(recordings, replays, attempts) of the entry that serves these arguments."""
    dispatcher = dispatcher_of(op)
    assert dispatcher.native is not None
    entry = dispatcher.native.compiled.lookup(*args, **kwargs)
    return entry.recordings.counts()                                           # type: ignore[no-any-return]


def replayed(op: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> int:
    """Replays of the entries that served these calls, all others of which were recorded; how many
    entries there are depends on the rules of this machine's kernels."""
    native = dispatcher_of(op).native
    assert native is not None
    entries = {id(e): e for e in (native.compiled.lookup(*a, **k) for a, k in calls)}.values()
    recordings, replays, attempts = (sum(n) for n in zip(*(e.recordings.counts() for e in entries)))
    assert recordings == attempts and recordings + replays == len(calls)
    return replays


def half(*shape: int, seed: int = 0) -> Tensor:
    """Drawn numbers that begin at a multiple of 128 bytes, as all memory of a GPU: torch's memory of
    a CPU does at times, and an entry serves calls of one alignment."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    memory = drawn.new_empty(drawn.numel() + 64)
    start = -memory.data_ptr() % 128 // 2
    return memory[start:start + drawn.numel()].view(shape).copy_(drawn)


def test_a_norm_is_recorded_once_and_replayed_with_other_memory(serve: Any) -> None:
    call = serve("cuda.rms_norm")
    weight = half(264)
    inputs = [half(3, 264, seed=s) for s in range(6)]
    got = [call(x, weight) for x in inputs]
    for x, y in zip(inputs, got):
        assert torch.equal(y, norm.rms_norm(x, weight)) and y.shape == x.shape and y.is_contiguous()
    # the first call is recorded
    assert counts("rms_norm", inputs[0], weight) == (1, 5, 1)


def test_what_the_signature_tells_apart(serve: Any) -> None:
    call = serve("cuda.rms_norm")
    wide, weight = half(6, 528), half(264)
    for _ in range(3):
        for x in (wide[:3, :264], wide[:, :264], half(3, 264), half(2, 3, 264), wide[::2, 264:]):
            for options in ({}, {"eps": 1e-3}, {"eps": 1e-3, "offset": 1.0}):
                assert torch.equal(call(x, weight, **options),
                                   norm.rms_norm(x, weight, **options)), (x.shape, options)
            assert torch.equal(call(x), norm.rms_norm(x))
    assert torch.equal(call(half(3, 264)[:0], weight), half(0, 264))           # nothing is launched


def test_several_results(serve: Any) -> None:
    call = serve("cuda.add_rms_norm")
    for seed in range(4):
        x, residual, weight = half(2, 264, seed=seed), half(2, 264,
                                                            seed=9 - seed), half(264, seed=20)
        out, total = call(x, residual, weight)
        want, its_total = norm.add_rms_norm(x, residual, weight)
        assert torch.equal(out, want) and torch.equal(total, its_total)
    assert counts("add_rms_norm", x, residual, weight) == (1, 3, 1)
    x = half(2, 264)
    # one tensor twice: of another call that would not be known
    for _ in range(3):
        assert torch.equal(call(x, x, weight)[1], (x.float() + x.float()).bfloat16())
    other = half(2, 264, seed=5)
    assert torch.equal(call(x, other, weight)[1], (x.float() + other.float()).bfloat16())


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_keys_that_grow_in_a_cache_of_fixed_strides(serve: Any, layout: str) -> None:
    call, axis = serve("cuda.attention_decode"), 2 if layout == "bhsd" else 1
    caches = [half(*((1, 2, 80, 64) if layout == "bhsd" else (1, 80, 2, 64)), seed=s)
              for s in (1, 2)]
    query = half(*((1, 4, 1, 64) if layout == "bhsd" else (1, 1, 4, 64)))
    for length in range(33, 48):
        key, value = (c.narrow(axis, 0, length) for c in caches)
        want = decode.dense(query, key, value, layout=layout)
        assert torch.equal(call(query, key, value, layout=layout), want), length
    assert counts("attention", query, key, value, layout=layout) == (1, 14, 1)
    for length in (63, 64, 65):                # another configuration from 64 on
        key, value = (c.narrow(axis, 0, length) for c in caches)
        want = decode.dense(query, key, value, layout=layout)
        assert torch.equal(call(query, key, value, layout=layout), want), length


def test_keys_that_grow_in_a_new_tensor_each(serve: Any) -> None:
    call = serve("cuda.attention_decode")
    calls = []
    for length in range(33, 40):
        query, key, value = (half(2, n, s, 64, seed=length + s)
                             for n, s in ((4, 1), (2, length), (2, length)))
        calls.append(((query, key, value), {"return_lse": True}))
        out, lse = call(query, key, value, return_lse=True)
        want, its_lse = decode.dense(query, key, value, return_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, its_lse), length
    assert replayed("attention", calls) >= 3


def test_pages_of_a_table_that_grows(serve: Any) -> None:
    call = serve("cuda.paged_attention_decode")
    keys, values = half(12, 16, 2, 64, seed=1), half(12, 16, 2, 64, seed=2)
    for pages in (4, 5, 6, 4, 5):
        query = half(2, 4, 64, seed=pages)
        table = torch.arange(2 * pages, dtype=torch.int32).reshape(2, pages) % 12
        lengths = torch.tensor([pages * 16 - 3, 17], dtype=torch.int32)
        got = call(query, keys, values, table, lengths)
        assert torch.equal(got, decode.paged(query, keys, values, table, lengths)), pages
    assert counts("paged_attention", query, keys, values, table, lengths)[1] >= 1


def test_shared_pages_of_a_table_that_grows(serve: Any) -> None:
    """Three launches, with a workspace between them."""
    call = serve("cuda.paged_attention_shared")
    keys, values = half(36, 16, 2, 64, seed=1), half(36, 16, 2, 64, seed=2)
    calls = []
    for pages in (17, 18, 19, 20):
        query = half(2, 8, 64, seed=pages)
        table = torch.arange(pages, dtype=torch.int32).repeat(2, 1)
        table[1, 4:] += 16
        lengths = torch.tensor([pages * 16 - 3, 70], dtype=torch.int32)
        got = call(query, keys, values, table, lengths)
        assert torch.equal(got, grouped.paged_attention_shared(query, keys, values, table, lengths)), pages
        calls.append(((query, keys, values, table, lengths), {}))
    assert replayed("paged_attention", calls) >= 1


def test_a_product_with_codes(serve: Any) -> None:
    call = serve("cuda.quantized_linear")
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    packed = lz.quantize(weight, "int8", granularity="block", block_size=64)
    codes, scales = packed[0], packed[1].float()
    for seed in range(4):
        x = half(2, 128, seed=seed)
        got = call(x, codes, scales, format="int8", group_size=64)
        assert torch.equal(got,
                           gemv.quantized_linear(x, codes, scales, format="int8", group_size=64))
    assert counts("quantized_linear", x, codes, scales, format="int8", group_size=64) == (1, 3, 1)


def test_numbers_that_are_drawn_anew_at_each_replay(serve: Any) -> None:
    """Without a seed torch's generator draws: also in a replay, and from the same place."""
    call = serve("cuda.sample")
    logits = torch.zeros(1, 300)
    torch.manual_seed(5)
    native_tokens = [int(call(logits)) for _ in range(8)]
    assert counts("sample", logits) == (1, 7, 1)
    torch.manual_seed(5)
    assert native_tokens == [int(sample.sample(logits)) for _ in range(8)]
    assert len(set(native_tokens)) > 1


def test_a_seed_is_part_of_the_signature(serve: Any) -> None:
    call = serve("cuda.sample")
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for seed, offset in ((1, 0), (2, 0), (1, 1)):
            want = sample.sample(logits, seed=seed, offset=offset)
            assert torch.equal(call(logits, seed=seed, offset=offset), want)


def test_signatures_without_end_are_not_recorded_without_end(serve: Any) -> None:
    call = serve("cuda.sample")
    logits = torch.randn(1, 300)
    for offset in range(40):
        call(logits, seed=1, offset=offset)
    recordings, replays, attempts = counts("sample", logits, seed=1)
    assert recordings <= 16 and attempts <= 16 and replays == 0


def test_a_caller_s_generator_is_python_s_business(serve: Any) -> None:
    call = serve("cuda.sample")
    logits = torch.zeros(1, 300)
    got = [int(call(logits, generator=torch.Generator().manual_seed(3))) for _ in range(3)]
    assert len(set(got)) == 1 and counts("sample", logits, generator=torch.Generator())[0] == 0


def test_a_copy_keeps_a_call_in_python(serve: Any) -> None:
    call = serve("cuda.rms_norm")
    x = half(4, 3, 264).transpose(0, 1)        # its rows are not evenly spaced: reshape copies
    for _ in range(3):
        assert torch.equal(call(x), norm.rms_norm(x))
    assert counts("rms_norm", x)[:2] == (0, 0)


def test_a_launch_that_the_driver_refuses(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception is the launcher's own.

    A kernel that is locked has no other in its place, so it is seen.
    """
    messages: list[tuple[int, int, tuple[int, ...]]] = []

    def refused(self: Kernel, code: int, device: int, grid: tuple[int, int, int]) -> Exception:
        messages.append((code, device, grid))
        return RuntimeError(compiler.describe_error(code, b"CUDA_ERROR_INVALID_VALUE",
                                                    b"invalid argument", "launching"))

    launched = compiler.CompiledCuda.launch

    def too_tall(self: Kernel, *args: Any, **kwargs: Any) -> None:
        """Recorded with a grid that the driver does not take."""
        launched(self, *args, **kwargs)
        watcher = replay.watcher()
        assert isinstance(watcher, LaunchRecorder)
        watcher.launches.append(dataclasses.replace(watcher.launches.pop(), grid=(1, 70000, 1)))

    monkeypatch.setattr(Kernel, "_launch_error", refused)
    call, x = serve("cuda.rms_norm"), half(2, 264)
    call(x, eps=1e-3)
    monkeypatch.setattr(Kernel, "launch", too_tall)
    call(x)
    with pytest.raises(lz.errors.KernelExecutionError, match="CUDA error: invalid argument"):
        call(x)
    assert messages == [(1, -1, (1, 70000, 1))]
    monkeypatch.undo()
    assert torch.equal(call(x, eps=1e-3), norm.rms_norm(x, eps=1e-3))


def test_a_hook_takes_launches_back_to_python(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    launched = compiler.CompiledCuda.launch

    def hooked(self: Kernel, *args: Any, **kwargs: Any) -> None:
        watcher = replay.watcher()
        launched(self, *args, **kwargs)
        if watcher is not None:
            assert isinstance(watcher, LaunchRecorder)
            watcher.launches.append(dataclasses.replace(watcher.launches.pop(), hooks=(hooks,)))

    monkeypatch.setattr(Kernel, "launch", hooked)
    call, x = serve("cuda.rms_norm"), half(2, 264)
    for _ in range(3):
        call(x)
    before = counts("rms_norm", x)[1]
    hooks.append(print)
    assert torch.equal(call(x), norm.rms_norm(x)) and counts("rms_norm", x)[1] == before == 2
    hooks.clear()
    call(x)
    assert counts("rms_norm", x)[1] == 3


def test_threads_replay_side_by_side_while_worlds_change(serve: Any) -> None:
    call = serve("cuda.rms_norm")
    weight = half(264)
    wrong: list[str] = []

    def work(n: int) -> None:
        for i in range(30):
            x = half(1 + (n + i) % 3, 264, seed=n)
            if not torch.equal(call(x, weight), want[n, x.shape[0]]):
                wrong.append(f"thread {n}, call {i}")

    want = {(n, r): norm.rms_norm(half(r, 264, seed=n), weight) for n in range(4)
            for r in (1, 2, 3)}
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for _ in range(5):
        lz.clear_cache()
    for t in threads:
        t.join()
    assert wrong == []


def test_recordings_end_with_their_entry(serve: Any) -> None:
    call, x = serve("cuda.rms_norm"), half(2, 264)
    call(x), call(x)
    assert counts("rms_norm", x)[0] == 1
    lz.clear_cache()
    call(x)
    assert counts("rms_norm", x)[:2] == (1, 0)


@pytest.mark.parametrize("machine", [compiler.Machine(132), compiler.Machine(48, 99 << 10)])
def test_configurations_of_decode_are_alike_in_the_range_that_is_told(
        machine: compiler.Machine) -> None:
    for rows, homes, dim, paged in ((1, 8, 128, False), (8, 256, 64, True), (32, 8, 64, False),
                                    (4, 1, 256, False)):
        for keys in (1, 2, 63, 64, 500, 1023, 1024, 2047, 2048, 5000, 100_000):
            low, high = decode.same_config_range(keys, -1, 1)
            assert low <= keys <= high
            config = decode.config(rows, homes, keys, dim, paged, machine)
            for other in {low, high, (low + min(high, 1 << 20)) // 2}:
                assert decode.config(rows, homes, other, dim, paged, machine) == config, (keys,
                                                                                          other)
    assert decode.same_config_range(500, 99, 1) == (100, replay.MAX_INT32)
    assert decode.same_config_range(70, 99, 1) == (64, 99)

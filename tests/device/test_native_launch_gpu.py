"""Native replays of our own launches on a GPU: what Python's launchers compute, to the bit, from
the second call on.

Needs the native path (`lz build`). The kernels are locked one after the other; each call is
compared with the launcher's own, and the counters say that it was really replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.dispatch import native
from layerzero.operate.inspection import dispatcher_of
from layerzero.world import incidents
from layerzero.world import snapshot as worlds

pytestmark = [pytest.mark.gpu, pytest.mark.correctness]


class Case(NamedTuple):
    kernel: str
    make: Callable[[], tuple[Any, ...]]        # new arguments of the same signature
    kwargs: dict[str, Any] = {}                # noqa: RUF012  never changed
    captured: bool = True                      # recorded inside of a capture too


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def paged() -> tuple[Any, ...]:
    table = torch.randperm(64, device="cuda").to(torch.int32).view(2, 32)
    lengths = torch.tensor([500, 77], device="cuda", dtype=torch.int32)
    return rand(2, 32, 128), rand(64, 16, 8, 128), rand(64, 16, 8, 128), table, lengths


def coded() -> tuple[Any, ...]:
    return rand(1, 1024), *lz.quantize(rand(512, 1024), "int4", granularity="block",
                                       block_size=128)[:2]


def attended(keys: int = 3000) -> tuple[Tensor, Tensor, Tensor]:
    return rand(1, 32, 1, 128), rand(1, 8, keys, 128), rand(1, 8, keys, 128)


GROUPS = {"format": "int4", "group_size": 128}
CASES = (
    Case("cuda.rms_norm", lambda: (rand(3, 4096), rand(4096))),
    Case("cuda.add_rms_norm", lambda: (rand(3, 4096), rand(3, 4096), rand(4096))),
    Case("cuda.attention_decode", attended),
    Case("cuda.attention_decode", attended, {"return_lse": True}),
    Case("cuda.paged_attention_decode", paged), Case("cuda.quantized_linear", coded, GROUPS),
    Case("cuda.sample", lambda: (torch.randn(2, 32000, device="cuda"),), {"seed": 3, "top_p": 0.9}),
    Case("triton.rms_norm", lambda: (rand(3, 4096), rand(4096))),
    Case("triton.add_rms_norm", lambda: (rand(3, 4096), rand(3, 4096), rand(4096))),
    Case("triton.attention_decode", attended, captured=False),
    Case("triton.paged_attention_decode", paged, captured=False),
    Case("triton.linear_gemv", lambda: (rand(1, 4096), rand(1024, 4096))),
    Case("triton.linear_gemv", lambda: (rand(3, 4096), rand(1024, 4096)), captured=False),
    Case("triton.quantized_linear_gemv", coded, GROUPS),
    Case("triton.rope", lambda: (rand(1, 32, 1, 128), rand(1, 8, 1, 128), rand(1, 64), rand(1, 64)),
         {"style": "rotate_half"}),
    Case("triton.sample", lambda: (torch.randn(2, 32000, device="cuda"),),
         {"seed": 3, "top_p": 0.9}, False),
    Case("triton.quantize", lambda: (rand(4, 1024), "int8")),
)
NAMES = [f"{c.kernel}{'+' if c.kwargs else ''}{i}" for i, c in enumerate(CASES)]


@pytest.fixture(autouse=True)
def unlocked() -> Iterator[None]:
    if native.module() is None:
        pytest.skip(f"there is no native path here: {native.status().text}; run lz build")
    torch.manual_seed(0)
    yield
    lz.unlock()


class Locked:
    """One kernel, as lz.<op> calls it and as its launcher does."""

    def __init__(self, case: Case) -> None:
        kernel = worlds.current().catalog.by_id[case.kernel]
        self.op, self.kwargs = kernel.op.name, case.kwargs
        loaded = incidents.loaded(kernel)
        self.launcher: Callable[..., Any] = getattr(loaded, "fn", loaded)
        lz.lock(self.op, kernel.id)
        self.public: Callable[..., Any] = getattr(lz, self.op)

    def native(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple_of(self.public(*args, **self.kwargs))

    def python(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple_of(self.launcher(*args, **self.kwargs))

    def replays(self, *args: Any) -> int:
        dispatcher = dispatcher_of(self.op).native
        assert dispatcher is not None
        entry = dispatcher.compiled.lookup(*args, **self.kwargs)
        return 0 if entry is None or entry.recordings is None else int(entry.recordings.counts()[1])


def tuple_of(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return len(got) == len(want) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(got, want))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_replayed_to_the_bit(case: Case) -> None:
    lock = Locked(case)
    for i in range(8):
        args = case.make()
        assert same(lock.native(*args), lock.python(*args)), f"call {i}"
    assert lock.replays(*args) >= 4, "the call was not replayed: see Recorder.problem"


@pytest.mark.parametrize("library", ["cuda", "triton"])
@pytest.mark.parametrize("dense", [False, True])
def test_keys_grow_at_every_step(library: str, dense: bool) -> None:
    lock = Locked(Case(f"{library}.attention_decode", attended))
    query, keys, values = attended(4096)
    for length in range(3073, 3173):           # one bucket
        key, value = keys[:, :, :length], values[:, :, :length]
        # a tensor of its own, as torch.cat makes it: strides grow too
        if dense:
            key, value = key.contiguous(), value.contiguous()
        assert same(lock.native(query, key, value), lock.python(query, key, value)), length
    assert lock.replays(query, key, value) >= 90


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025,
                                    2047, 2048, 2049])
@pytest.mark.parametrize("library", ["cuda", "triton"])
def test_lengths_around_every_bound(library: str, length: int) -> None:
    lock = Locked(Case(f"{library}.attention_decode", attended))
    query, keys, values = attended(4096)
    for n in (length, length + 1, length, max(1, length - 1)) * 2:
        key, value = keys[:, :, :n], values[:, :, :n]
        assert same(lock.native(query, key, value), lock.python(query, key, value)), n


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_captured_and_replayed_with_other_inputs(case: Case) -> None:
    lock = Locked(case)
    args = case.make()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            lock.native(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # the first is a miss: captured and not captured are different entries
        for _ in range(3):
            out = lock.native(*args)
        inside = lock.replays(*args)
    if case.captured:
        assert inside >= 1
    for _ in range(3):
        for old, new in zip(args, case.make()):
            if isinstance(old, Tensor):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert same(out, lock.python(*args))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_two_streams(case: Case) -> None:
    lock = Locked(case)
    streams = [torch.cuda.Stream() for _ in range(2)]
    case_inputs = [case.make() for _ in streams]
    torch.cuda.synchronize()
    got: list[tuple[Tensor, ...]] = []
    for _ in range(5):
        got = []
        for stream, args in zip(streams, case_inputs):
            with torch.cuda.stream(stream):
                got.append(lock.native(*args))
    torch.cuda.synchronize()
    for args, out in zip(case_inputs, got):
        assert same(out, lock.python(*args))


@pytest.mark.parametrize("kernel", ["cuda.rms_norm", "cuda.attention_decode", "triton.rms_norm"])
def test_threads_that_never_called_cuda(kernel: str) -> None:
    case = next(c for c in CASES if c.kernel == kernel)
    lock = Locked(case)
    case_inputs = [case.make() for _ in range(4)]
    want = [lock.python(*args) for args in case_inputs]
    for args in case_inputs:
        lock.native(*args)
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(n: int) -> None:
        try:
            for i in range(50):
                if not same(lock.native(*case_inputs[n]), want[n]):
                    wrong.append(f"thread {n}, call {i}")
        except Exception as e:                 # told by the main thread
            wrong.append(f"thread {n}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == [] and lock.replays(*case_inputs[0]) >= 4 * 40


def test_numbers_of_torch_s_generator_go_on() -> None:
    lock = Locked(Case("cuda.sample", lambda: ()))
    logits = torch.zeros(4, 5000, device="cuda")
    torch.manual_seed(7)
    got = [lock.native(logits)[0].tolist() for _ in range(6)]
    torch.manual_seed(7)
    assert got == [lock.python(logits)[0].tolist() for _ in range(6)]
    assert lock.replays(logits) >= 3 and len(set(map(tuple, got))) > 1


def test_a_hook_of_a_profiler_sees_triton_s_launches() -> None:
    from triton import knobs
    case = next(c for c in CASES if c.kernel == "triton.rms_norm")
    lock, args = Locked(case), case.make()
    for _ in range(4):
        lock.native(*args)
    if not hasattr(knobs.runtime.launch_enter_hook, "calls"):
        pytest.skip("hooks of this Triton are no chain: its kernels are not replayed at all")
    seen: list[str] = []
    hook = lambda metadata: seen.append(metadata.get()["name"])                                     # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        out = lock.native(*args)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen and same(out, lock.python(*args))

"""Worker processes: real ones, of this interpreter, that serve real kernels and misbehave."""

from __future__ import annotations

import gc
import os
import signal
import threading

import misbehaving_kernels as bad
import pytest
import torch
from helpers import RMS_NORM

import layerzero as lz
from layerzero.machine.faults import WorkerFault, WorkerLost, WorkerStarting
from layerzero.machine.isolation import pool as pools
from layerzero.machine.isolation.arena import Arena, ArenaFull
from layerzero.machine.isolation.wire import MAX_FORMS, SMALL, Spec
from layerzero.spec.errors import ConfigError, NamedKernelRefused
from layerzero.spec.event import Fallback
from layerzero.spec.reason import Code
from layerzero.spec.rules.launch import LaunchRefused
from layerzero.world import snapshot as worlds

ISOLATED = "worker.misbehaving.rms_norm"
LIMITS = {"isolation": "misbehaving.*=worker", "isolation_memory": 128 << 20,
          "isolation_timeout": 20.0}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The kernel and its worker: one process for the tests of this file, with those that follow
    it."""
    before = worlds.current().policy
    lz.register(bad.KERNELS[0])
    lz.configure(**LIMITS)
    yield
    worlds.publish(lambda world: world.replace(policy=before), "end of the tests")
    lz.unregister("misbehaving")


@pytest.fixture
def workers():
    """The pool, with a worker that serves."""
    lz.rms_norm(torch.randn(2, 8), backend=ISOLATED)
    return next(p for p in pools.pools() if p.name == "misbehaving")


def wish(number: int, size: int = 8) -> torch.Tensor:
    return torch.full((size,), float(number))


def test_a_worker_serves_like_the_kernel_itself(workers):
    assert workers.workers[0].process.pid != os.getpid()
    for x in (torch.randn(4, 8), torch.randn(4, 8, dtype=torch.bfloat16),
              torch.randn(8, 4).T, torch.randn(4, 16)[:, ::2], torch.randn(1, 8).expand(4, 8),
              torch.randn(5, 3, 8).transpose(0, 1), torch.randn(0, 8), torch.randn(8)):
        weight = torch.randn(8, dtype=x.dtype).abs()
        out = lz.rms_norm(x, weight, backend=ISOLATED)
        wanted = torch.rms_norm(x, (8,), weight, 1e-6)
        assert out.dtype is x.dtype and torch.equal(out, wanted), x.stride()


def test_more_kinds_of_calls_than_are_remembered(workers):
    for rows in (*range(1, MAX_FORMS + 8), 1, 2, 1):       # numbers of forms and results come again
        x = torch.full((rows, 8), float(rows % 7))
        for _ in range(2):
            out = workers.call("misbehaving.rms_norm", (x, None, 1e-6), ())
            assert torch.equal(out, torch.rms_norm(x, (8,), None, 1e-6)), rows


def test_strides_survive_both_ways():
    for t in (torch.randn(8, 4).T, torch.randn(4, 10)[:, :8], torch.randn(1, 8).expand(4, 8),
              torch.randn(5, 3, 8).transpose(0, 1)):
        assert Spec.of(t).strides == t.stride()
    thin, windows = torch.randn(4, 800)[:, ::100], torch.randn(20).unfold(0, 8, 2)
    assert Spec.of(thin).strides == (8, 1)                 # 100 times its size would travel
    assert Spec.of(windows).strides == (8, 1)              # a copy cannot overlap itself


def test_large_tensors_lie_in_shared_memory_until_they_are_gone(workers):
    x, weight = torch.randn(512, 1024), torch.rand(1024)
    wanted = torch.rms_norm(x, (1024,), weight, 1e-6)
    first = lz.rms_norm(x, weight, backend=ISOLATED)
    arena = workers.workers[0].arena
    assert first.nbytes > SMALL and arena.position(first.data_ptr(), first.nbytes) is not None
    kept = [lz.rms_norm(x, weight, backend=ISOLATED) for _ in range(3)]
    assert all(torch.equal(out, wanted) for out in (first, *kept))
    again = lz.rms_norm(first, weight, backend=ISOLATED)   # read where it lies
    assert torch.equal(again, torch.rms_norm(wanted, (1024,), weight, 1e-6))
    view = first[0]                                        # of the same storage
    del first, kept, again
    gc.collect()
    assert len(arena.live) == 1 and torch.equal(view, wanted[0])
    del view
    gc.collect()
    arena.allocate(1)
    assert not arena.live and len(arena.free) == 1


def test_memory_that_torch_shares_is_not_copied(workers):
    x, weight = torch.randn(512, 1024).share_memory_(), torch.rand(1024)
    worker = workers.workers[0]
    for _ in range(2):
        assert torch.equal(lz.rms_norm(x, weight, backend=ISOLATED),
                           torch.rms_norm(x, (1024,), weight, 1e-6))
    assert len(worker.segments) == 1
    x.mul_(2)                                              # seen by the worker as it is now
    assert torch.equal(lz.rms_norm(x[256:], weight, backend=ISOLATED),
                       torch.rms_norm(x[256:], (1024,), weight, 1e-6))
    del x
    other = torch.randn(512, 1024).share_memory_()
    assert torch.equal(lz.rms_norm(other, weight, backend=ISOLATED),
                       torch.rms_norm(other, (1024,), weight, 1e-6))
    assert len(worker.segments) == 1


def test_a_worker_that_died_between_two_calls_is_named_by_its_signal(workers):
    workers.workers[0].process.kill()
    workers.workers[0].process.wait()
    with pytest.raises(WorkerLost, match="signal 9"):      # of a form that it has not been told
        workers.call("misbehaving.rms_norm", (torch.randn(3, 8), wish(0), 1e-6), ())
    workers.wait()


def test_errors_keep_their_type_and_words(workers):
    call = workers.call
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"the worker dislikes this weight.*worker of misbehaving"):
        call("misbehaving.rms_norm", (x, wish(bad.ERROR), 1e-6), ())
    with pytest.raises(WorkerFault, match="Outsider: nobody else knows me") as caught:
        call("misbehaving.rms_norm", (x, wish(bad.OUTSIDER), 1e-6), ())
    assert "misbehaving_kernels.py" in caught.value.worker_traceback
    with pytest.raises(MemoryError, match="no room in the worker"):
        call("misbehaving.rms_norm", (x, wish(bad.MEMORY), 1e-6), ())
    assert len(workers.workers) == 1 and call("misbehaving.rms_norm", (x, None, 1e-6), ()).shape


@pytest.mark.parametrize("rows", [4, 8192], ids=["small", "large"])
def test_what_a_kernel_writes_into_an_argument_arrives_if_its_op_says_so(workers, rows):
    x = torch.zeros(2 * rows, 8)[::2]
    workers.call("misbehaving.rms_norm", (x, wish(bad.WRITE), 1e-6), ())
    assert not x.any()
    out = workers.call("misbehaving.rms_norm", (x, wish(bad.WRITE), 1e-6), (0,))
    assert (x == 1).all() and out.shape == x.shape


def test_gradients_are_refused(workers):
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(NamedKernelRefused) as refused:
        lz.rms_norm(x, backend=ISOLATED)
    assert Code.BACKWARD_UNSUPPORTED in refused.value.codes
    with pytest.raises(LaunchRefused):
        workers.call("misbehaving.rms_norm", (x, None, 1e-6), ())
    with torch.no_grad():
        assert torch.equal(lz.rms_norm(x, backend=ISOLATED), torch.rms_norm(x, (8,), None, 1e-6))


def test_what_does_not_fit_is_out_of_memory_and_the_worker_lives(workers):
    with pytest.raises(ArenaFull, match="isolation_memory"):
        Arena(16 << 20).allocate(17 << 20)
    worker, x = workers.workers[0], torch.empty(40 << 20, dtype=torch.float16).view(-1, 1024)
    with pytest.raises(MemoryError):                       # 80 MB in, no room for as much out
        workers.call("misbehaving.rms_norm", (x, None, 1e-6), ())
    assert workers.workers == [worker] and lz.rms_norm(torch.randn(2, 8), backend=ISOLATED).shape


def test_the_kernel_here_is_not_loaded_and_says_where_it_went():
    plan = lz.explain("rms_norm", torch.randn(2, 8))
    reasons = {r.kernel: r.reasons[0] for r in plan.rejected}
    assert reasons["misbehaving.rms_norm"].code is Code.ISOLATED
    assert ISOLATED in reasons["misbehaving.rms_norm"].message
    assert ISOLATED in [step.kernel for step in plan.steps]


def test_threads_share_a_worker(workers):
    x = torch.randn(4, 8)
    wanted, wrong = torch.rms_norm(x, (8,), None, 1e-6), []

    def work(scale):
        for _ in range(20):
            if not torch.equal(lz.rms_norm(x * scale, backend=ISOLATED),
                               torch.rms_norm(x * scale, (8,), None, 1e-6)):
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(1, 5)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong and wanted.shape == x.shape


def test_a_forked_child_leaves_the_workers_alone(workers):
    x, weight = torch.randn(512, 1024), torch.rand(1024)
    shared = lz.rms_norm(x, weight, backend=ISOLATED)
    wanted = shared.clone()
    pid = os.fork()
    if pid == 0:                                           # the child: no assertion may reach pytest
        try:
            mine = torch.equal(shared, wanted)
            shared.zero_()
            os._exit(0 if mine and not workers.workers and not shared.any() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(shared, wanted)                     # what the child wrote is the child's
    assert torch.equal(lz.rms_norm(x, weight, backend=ISOLATED), wanted)


def test_a_worker_that_ends_in_a_call_costs_it_a_detour(workers, emitted):
    """The plan goes on, and the worker comes back. It ends here as it would with this process: the
    other end of its pipe is closed while a kernel is at work."""
    x, weight, worker = torch.randn(4, 8), wish(bad.SLEEP), workers.workers[0]
    ending = threading.Timer(0.3, worker.close_lifeline)
    with lz.prefer(ISOLATED):
        lz.rms_norm(x)                                     # the choice is made
        ending.start()
        while not any(isinstance(e, Fallback) for e in emitted):
            out = lz.rms_norm(x, weight)
    ending.join()
    assert torch.allclose(out, RMS_NORM.reference(x, weight), atol=1e-3)
    fallback = next(e for e in emitted if isinstance(e, Fallback))
    assert fallback.kernel == ISOLATED and "killed by signal" in fallback.reason.message
    assert worker.process.returncode == -signal.SIGIO and not workers.workers
    with pytest.raises(WorkerStarting, match="killed by signal"):
        workers.call("misbehaving.rms_norm", (x, None, 1e-6), ())
    # named: the call waits for the new worker
    assert torch.equal(lz.rms_norm(x, backend=ISOLATED), torch.rms_norm(x, (8,), None, 1e-6))
    assert not workers.deaths


def test_a_hung_worker_is_a_timeout_and_the_plan_goes_on(workers, emitted, monkeypatch):
    monkeypatch.setattr(pools, "FIRST_DELAY", 600.0)       # no other is started
    x, process = torch.randn(4, 8), workers.workers[0].process
    lz.configure(isolation_timeout=0.3)
    with lz.prefer(ISOLATED):
        out = lz.rms_norm(x, wish(bad.HANG))
    assert torch.allclose(out, RMS_NORM.reference(x, wish(bad.HANG)), atol=1e-3)
    fallback = next(e for e in emitted if isinstance(e, Fallback))
    assert fallback.reason.code is Code.KERNEL_TIMEOUT
    assert process.returncode == -signal.SIGKILL           # killed and reaped: no zombie
    assert worlds.current().health[ISOLATED].state == "open"
    with pytest.raises(NamedKernelRefused) as refused:
        lz.rms_norm(x, backend=ISOLATED)
    assert Code.CIRCUIT_OPEN in refused.value.codes


def test_an_interpreter_that_is_not_there_is_a_reason(world):
    lz.configure(isolation="misbehaving.*=worker:/nowhere/python")
    with pytest.raises(NamedKernelRefused, match="could not be started") as refused:
        lz.rms_norm(torch.randn(2, 8), backend=ISOLATED)
    assert Code.WORKER_UNAVAILABLE in refused.value.codes
    assert lz.rms_norm(torch.randn(2, 8)).shape == (2, 8)
    with pytest.raises(ConfigError, match="PATTERN=worker"):
        lz.configure(isolation="misbehaving.*=thread")

"""Shared by the tests: fake kernels, devices that are not here, other processes, and the fixtures
of two folders.
"""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

import layerzero as lz
from layerzero.cli import main
from layerzero.dispatch import facts as reading
from layerzero.dispatch import native
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.operate.inspection import dispatcher_of
from layerzero.selection.policy import Layer, Policy
from layerzero.spec.device import Device, generation_of
from layerzero.spec.op import Op
from layerzero.world import context, events, incidents
from layerzero.world import snapshot as worlds

ATTENTION, RMS_NORM = lz.op("attention"), lz.op("rms_norm")
ROOT = Path(__file__).parents[1]
# The nightly lanes ask for what `make test` has no time for.
FULL = os.environ.get("LZ_TEST_FULL") == "1"
# the pytestmark of a file whose tests need CUDA itself, not ROCm
NVIDIA_ONLY = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip),
                       reason="needs an NVIDIA GPU"),
]


def collect_garbage() -> None:
    """A full collection from now on, in whichever thread: while another thread collects, gc.collect
    does nothing."""
    phases: list[str] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and (phase == "start" or phases):
            phases.append(phase)

    gc.callbacks.append(watch)
    try:
        while "stop" not in phases:
            gc.collect()
            time.sleep(0.001)
    finally:
        gc.callbacks.remove(watch)


@pytest.fixture(scope="module")
def frozen_heap():
    """What is alive before the tests of a file is not looked at by their collections, as in
    conftest.py: what was imported since is frozen too."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def world():
    """What the test registers, configures and breaks is gone after it."""
    saved, override = worlds.current(), context.current.get()
    yield
    assert context.current.get() is override, "a test left an override behind"
    worlds.publish(lambda w: replace(saved, epoch=w.epoch + 1, changed=w.epoch + 1, memo={},
                                     created_at=time.monotonic()),
                   "end of a test")
    incidents._faults.clear()
    events.reset()
    for dispatcher in dispatchers.values():
        dispatcher.ledger.fallbacks.clear()


@pytest.fixture
def emitted(world):
    """Every event of the test, in order."""
    seen: list = []
    stop = lz.subscribe(seen.append)
    yield seen
    stop()


@pytest.fixture(params=["native", "python"])
def path(request, world):
    """Both ways a call can go: through the compiled table, and through the generated Python."""
    if request.param == "native" and native.module() is None:
        pytest.skip(f"the native path is not in use: {native.status().text}")
    return request.param


class Fake:
    """A kernel that computes the contract's formula, counts its calls, and throws `fault` while
    that is set.

    It is chosen before all others; of two fakes, the one with the greater prior goes first.
    """

    def __init__(self, id: str = "fake.one", op: Op = RMS_NORM, *,
                 fault: BaseException | None = None, before: Callable[[], object] | None = None,
                 prior: float = 1e6, **declared) -> None:
        self.fault, self.before, self.op = fault, before, op
        self.loads, self._calls = 0, itertools.count()
        self.got: dict[str, object] = {}       # the arguments of the last call
        self.here = threading.local()          # here.got: of this thread's last call
        # else torch's own would stay the default
        declared = {"less_work": "none of it is real", **declared}
        self.kernel = lz.Kernel(id, op, self._load, prior=prior, **declared)

    @property
    def id(self) -> str:
        return self.kernel.id

    @property
    def calls(self) -> int:
        return int(repr(self._calls)[6:-1])

    def _load(self):
        self.loads += 1
        signature = inspect.signature(self.op.reference)

        def run(*args, **kwargs):
            next(self._calls)
            self.got = self.here.got = signature.bind(*args, **kwargs).arguments
            # what it is told to do besides is for no certificate
            if self.before is not None:        # pragma: no cover
                self.before()
            if self.fault is not None:         # pragma: no cover
                raise self.fault
            return self.op.reference(*args, **kwargs)

        run.__signature__ = signature
        return run


def register(*fakes: Fake) -> None:
    for fake in fakes:
        lz.register(fake.kernel)


def allow_only(*patterns: str, op: str = "*") -> None:
    """From now on just these kernels may serve: not even the reference."""
    ids = [k.id for k in worlds.current().catalog.kernels if k.id not in patterns]
    lz.configure(rules=(lz.PolicyRule.of("deny", ids, op),))


def outcome(fn, call):
    """What a call gives or raises, as something to compare."""
    try:
        return "returned", fn(*call[0], **call[1])
    except Exception as e:
        return "raised", type(e), str(e)


def same_outcome(a, b):
    """Are these outcomes equal, in every bit of a tensor and every word of an error?"""
    if a[0] != b[0] or a[0] == "raised":
        return a == b
    pairs = zip(a[1], b[1]) if isinstance(a[1], tuple) else [(a[1], b[1])]
    return type(a[1]) is type(b[1]) and all(
        x.dtype == y.dtype and x.stride() == y.stride()
        and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x,
        y in pairs)


def health_of(group: str):
    """Its breaker; None while that is closed."""
    return worlds.current().health.get(group)


def faults_of(kernel: str) -> int:
    """How many of its last calls failed."""
    op = worlds.current().catalog.by_id[kernel].op
    return incidents.faults_of(kernel, dispatcher_of(op.name).calls_of(kernel))[0]


def end_cooldown(group: str) -> None:
    """Ends the cooling of a breaker now, however long it was to last; the clock does the rest."""
    def ended(world):
        breaker = replace(world.health[group], until=time.monotonic())
        return world.replace(health={**world.health, group: breaker})

    worlds.publish(ended, "test")


def wait_for(condition: Callable[[], object], seconds: float = 150.0) -> object:
    """What `condition` gives once it holds; the test fails if it never does."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, (
            f"not within {seconds} s: {inspect.getsource(condition).strip()}")
        time.sleep(0.005)
    # if that was a new world, every op has taken it over after this
    worlds.call_with_current(lambda world: None)
    return result


def events_of(kind: type, events: list) -> list:
    return [e for e in events if isinstance(e, kind)]


def rows(n: int = 3, hidden: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(seed))


def normalized(x: torch.Tensor) -> torch.Tensor:
    return RMS_NORM.reference(x)


def qkv(seq_q: int = 8, seq_k: int | None = None, heads: int = 2, kv_heads: int | None = None,
        dim: int = 16, batch: int = 1, dtype: torch.dtype = torch.float32,
        layout: str = "bhsd") -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seq_q)

    def rand(n_heads: int, seq: int) -> torch.Tensor:
        shape = (batch, n_heads, seq, dim) if layout == "bhsd" else (batch, seq, n_heads, dim)
        return torch.randn(shape, generator=gen).to(dtype)

    seq_k, kv_heads = seq_k or seq_q, kv_heads or heads
    return [rand(heads, seq_q), rand(kv_heads, seq_k), rand(kv_heads, seq_k)]


def nvidia(sm: int) -> Device:
    """A GPU that need not be here."""
    row = generation_of(sm)
    return Device("cuda", 0, f"a GPU of SM {sm}", "nvidia", sm=sm, gpu_generation=row.name,
                  tensor_core_generation=row.tensor_core, supports_bf16=row.bf16,
                  supports_fp8=row.fp8, supports_fp4=row.fp4, runtime_version="12.8",
                  torch_version="2.9.0")


def call_facts(op: Op, *args, **kwargs) -> dict[str, object]:
    """Every fact of a call of `op`, as selection gets them."""
    bound = inspect.signature(op.reference).bind(*args, **kwargs)
    bound.apply_defaults()
    return reading.read(op, bound.arguments)


def policy(*rules: lz.PolicyRule, **settings) -> Policy:
    return Policy((Layer("programmatic", settings, rules),))


def path_of(op: Op | str, path: str) -> Callable:
    """The public function of an op by its native or by its Python path."""
    dispatcher = dispatcher_of(op if isinstance(op, str) else op.name)
    return dispatcher.python_call if path == "python" else dispatcher.public


class TorchServer:
    """Processes forked from one that has imported torch, which takes seconds; torch_server.py is
    the other side. It is started with the first of them and ends with this process."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="layerzero-torch-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(16)
            environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "torch_server.py"), str(listener.fileno())],
                stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environ)
        atexit.register(self.process.communicate)


_torch_server: dict[int, TorchServer] = {}     # by process: a fork has none yet


def torch_server() -> TorchServer:
    if os.getpid() not in _torch_server:
        _torch_server[os.getpid()] = TorchServer()
    return _torch_server[os.getpid()]


class Program:
    """`python *words` in a process of its own: with -c, -m or a script, and no other option."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None,
                 cwd: str | Path = "", stdin: int = -1, stdout: int, stderr: int) -> None:
        request = {"words": [str(word) for word in words],
                   "environ": dict(os.environ if env is None else env),
                   "folder": str(cwd) or os.getcwd(), "ends_with_client": False}
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(torch_server().path)
        with open(os.devnull) as nothing:
            files = [nothing.fileno() if stdin == -1 else stdin, stdout, stderr]
            socket.send_fds(self.connection, [b" "], files)
            self.connection.sendall(json.dumps(request).encode() + b"\0")
            self._answers = self.connection.makefile()
            self.pid = int(self._answers.readline())

    def wait(self, timeout: float = 240.0) -> int:
        """Its exit code, once it has ended; it is killed if that takes longer."""
        self.connection.settimeout(timeout)
        try:
            return int(self._answers.readline())
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            self._answers.close()
            self.connection.close()


WARM_PYTHON = """#!{python} -IS
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({path!r})
socket.send_fds(connection, [b" "], [0, 1, 2])
request = dict(words=sys.argv[1:], environ=dict(os.environ), folder=os.getcwd(),
               ends_with_client=True)
connection.sendall(json.dumps(request).encode() + b"\\0")
answers = connection.makefile()
answers.readline()
code = int(answers.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm_python() -> str:
    """An interpreter for what starts one by itself: its program runs in a process that has torch
    already, and it ends as that does. With -c, -m or a script, and no other option."""
    if not hasattr(os, "fork"):
        return sys.executable
    server = torch_server()
    command = Path(server.path).with_name("python")
    if not command.exists():
        command.write_text(WARM_PYTHON.format(python=sys.executable, path=server.path))
        command.chmod(0o755)
    return str(command)


def run_python(*words: str | Path, env: Mapping[str, str] | None = None, cwd: str | Path = "",
               input: str | bytes = "", timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    """What `python *words` did. Its process has torch already: for a test of what is imported, or
    of what the environment says to Python or torch, start one."""
    command = [sys.executable, *map(str, words)]
    given = input.encode() if isinstance(input, str) else input
    if not hasattr(os, "fork"):
        done = subprocess.run(command, env=env, cwd=cwd or None, input=given, capture_output=True,
                              timeout=timeout)
        return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(),
                                           done.stderr.decode())
    with (tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout,
          tempfile.TemporaryFile() as stderr):
        stdin.write(given)
        stdin.seek(0)
        program = Program(*map(str, words), env=env, cwd=cwd, stdin=stdin.fileno(),
                          stdout=stdout.fileno(), stderr=stderr.fileno())
        code = program.wait(timeout)
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(command, code, stdout.read().decode(),
                                           stderr.read().decode())


def python(code: str, *, timeout: float = 240.0, **environ: str) -> str:
    """What `code` prints in a process of its own, with no LAYERZERO_* variable but those given."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")
           or k == "LAYERZERO_CACHE_DIR"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"),
                                         env.get("PYTHONPATH", "")])
    done = run_python("-c", textwrap.dedent(code), env={**env, **environ}, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_lz(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Runs the command `lz` in this process; its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def triton_interpreter_works() -> bool:
    """Can Triton's interpreter run a loop whose end is a number it was given? Not that of 3.6 with
    a NumPy that no longer takes an array of one element for a number."""
    if importlib.util.find_spec("triton") is None:
        return False
    version = tuple(int(n) for n in importlib.metadata.version("triton").split(".")[:2])
    try:
        return version > (3, 6) or int(numpy.zeros(1)) == 0
    except TypeError:
        return False


def run_interpreted(script: Path) -> None:
    """Run a program that compares kernels in Triton's interpreter; it says that all agree."""
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and "all agree" in done.stdout, done.stderr[-3000:]

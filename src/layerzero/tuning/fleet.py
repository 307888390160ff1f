"""Tuning on a fleet: the kinds of call are spread over the nodes of a Ray cluster.

Machines of one model share: where device, driver, torch, threads and the builds of the kernels are
equal, each kind of call is timed once, by whichever machine is free. A machine of another model
times all of it for itself. The process that asked hands out one kind at a time and writes what
comes back into its own store, so a lost node costs at most the kind it was timing, which another
machine of the model takes over, and no node needs access to the store.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..machine import builds, hardware
from ..machine.loading import installed_version
from ..operate.readiness import first_line
from ..perf.record import Measurement, Rates, environment_id
from ..spec.call import Call
from ..spec.codec import Record
from ..spec.errors import ConfigError
from ..world import measurements, settings
from ..world import snapshot as worlds
from .report import Skipped, Tuned, TuneReport
from .tuner import ROUNDS, Progress, is_measured, modes_of, survey, tune
from .workload import calls_for

ATTEMPTS = 3           # at one kind of call, and at a worker of one node
START_SECONDS = 120.0  # to wait for a node that has no room for a worker, when all else is done
CONNECT_SECONDS = 5.0
GRACE_SECONDS = 30.0   # after the deadline, for a call that has begun
KIND_SECONDS = 600.0   # after which a worker counts as hanging
ACCELERATORS = ("GPU", "HPU")                  # the resources that Ray counts


@dataclass(frozen=True)
class Machine(Record):
    """One worker on a node of the cluster: a GPU, or all CPUs of a node without one."""

    node: str                                  # Ray's name of it
    device: str = ""                           # its model
    place: str = ""                            # machines of one place share measurements
    tuned: int = 0                             # kinds of call that it timed
    problem: str = ""                          # why it was not used, or not to the end


@dataclass(frozen=True, repr=False)
class FleetReport(TuneReport):
    machines: tuple[Machine, ...] = ()

    @property
    def closing(self) -> str:
        places = {m.place for m in self.machines if m.place}
        lost = sum(bool(m.problem) for m in self.machines)
        return (f"{super().closing}; {len(self.machines)} machines of {len(places)} models"
                + (f", {lost} of them not to the end" if lost else ""))


@dataclass(frozen=True)
class Task:
    """One kind of call in one mode, to be timed by some machine of the model."""

    call: Call
    mode: str
    name: str
    attempts: int = 0


@dataclass(frozen=True)
class Options:
    """The options of `lz tune` that every node needs."""

    device: str | None = None
    rounds: int = ROUNDS
    again: bool = False
    mode: str | Sequence[str] | None = None
    cold: bool = False
    compile: bool = True


def release() -> str:
    return installed_version("layerzero") or "unknown"


# on a node

class NodeTuner:
    """Times kinds of call in a process of a node, and keeps nothing there. An actor of Ray."""

    def start(self, node: str, version: str, options: Options, threads: int,
              cpus: float) -> tuple[str, str, str]:
        """Return the model of the device, its place, and a digest of the kernels' builds."""
        if version != release():
            raise ConfigError(f"node {node} has layerzero {release()}, the tuning process has "
                              f"{version}; install one version on all nodes")
        settings.configure(perfdb="off")
        self.node, self.options = node, options
        self.kind = (hardware.probe(options.device).type if options.device
                     else hardware.main_kind())
        device = hardware.probe(self.kind)
        if self.kind == "cpu":
            torch.set_num_threads(threads or max(1, min(device.cores or 1, int(cpus))))
        kernels = sorted((k.id, builds.build_of(k)) for k in worlds.current().catalog.kernels)
        digest = hashlib.sha256(repr(kernels).encode()).hexdigest()[:16]
        return device.name, worlds.current().place(self.kind), digest

    def survey(self, calls: Sequence[Call], rows: Sequence[Measurement],
               rates: Mapping[str, Rates]) -> tuple[list[Task], list[Call], list[Skipped]]:
        """Return the kinds that are to be timed here, the largest first; the calls whose kinds
        are measured in `rows`; and those that cannot be made."""
        options, world = self.options, worlds.current()
        measurements.record([m for m in rows if m.kernel in world.catalog.by_id
                             and m.build == builds.build_of(world.catalog.by_id[m.kernel])], rates)
        surveyed, skipped = survey(calls, self.kind)
        jobs = [replace(job, mode=m) for job in surveyed for m in modes_of(options.mode, self.kind)]
        known = [not options.again and is_measured(worlds.current(), job, options.compile)
                 for job in jobs]
        return ([Task(job.call, job.mode, str(job)) for job, k in zip(jobs, known) if not k],
                [job.call for job, k in zip(jobs, known) if k], skipped)

    def tune(self, task: Task, seconds: float | None, rates: Mapping[str, Rates]) -> tuple[
            TuneReport, list[Measurement], dict[str, dict[str, Any]], dict[str, Rates]]:
        """Return the report of one kind, and its measurements with environments and rates."""
        known, options = worlds.current().perf.rates, self.options
        measurements.record((), {place: r for place, r in rates.items() if place not in known})
        rows: list[Measurement] = []
        measured_rates: dict[str, Rates] = {}

        def keep(new: Sequence[Measurement], new_rates: Mapping[str, Rates] | None) -> None:
            rows.extend(new)
            measured_rates.update(new_rates or {})
            measurements.record(new, new_rates)

        report = tune([task.call], device=options.device, seconds=seconds, rounds=options.rounds,
                      again=True, mode=task.mode, cold=options.cold, compile=options.compile,
                      save=keep)
        environment = {**measurements.environment(self.kind), "node": self.node}
        name = environment_id(environment)
        return (report, [m._replace(environment=name) for m in rows],
                {name: environment} if rows else {}, measured_rates)


# in the process that asked

def tune_fleet(calls: str | Path | Iterable[Call], *, address: str = "auto",
               device: str | None = None, seconds: float | None = None, rounds: int = ROUNDS,
               again: bool = False, mode: str | Sequence[str] | None = None, cold: bool = False,
               compile: bool = True, progress: Progress | None = None) -> FleetReport:
    """Tune these calls on every model of device in a Ray cluster, as `tune` does on one machine.

    address  of the cluster; "auto": the one that runs on this machine

    Nodes with a GPU are tuned for it, the others for their CPU; `device` asks for one kind only.
    Each node uses its own policy and libraries. OMP_NUM_THREADS of this process counts on all
    nodes; without it a CPU is tuned with as many threads as it has cores for Ray.
    """
    workload = calls_for(calls) if isinstance(calls, (str, Path)) else tuple(calls)
    with measurements.open_store(read_only=True):      # the results would have nowhere to go
        pass
    options = Options(device, rounds, again, mode, cold, compile)
    with connected(address) as ray:
        fleet = Fleet(ray, workload, options, seconds, progress or (lambda *_: None))
        report = fleet.run()
    measurements.reload_measurements()
    return report


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to the cluster for the block, unless this process is connected already."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as e:
        raise ConfigError("tuning on a fleet needs Ray, on every node; run: pip install "
                          "'layerzero[ray]'") from e
    if ray.is_initialized():
        yield ray
        return
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    try:
        if colon and port.isdecimal():         # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        raise ConfigError(f"--ray {address}: there is no Ray cluster to be reached "
                          f"({first_line(e)}); start one with: ray start --head, or give the "
                          "address of its head, such as 10.0.0.1:6379") from e
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass
class Worker:
    """One actor, and what it does now."""

    node_id: str
    name: str
    needs: Mapping[str, float]                 # resources of the node
    actor: Any = None
    doing: Task | str = "start"                # "start", "survey", "" for nothing, or a task
    since: float = 0.0
    starts: int = 0
    model: Model | None = None
    device: str = ""
    tuned: int = 0
    problem: str = ""

    @property
    def machine(self) -> Machine:
        return Machine(self.name, self.device, self.model.place if self.model else "", self.tuned,
                       self.problem)


@dataclass
class Model:
    """The machines that share measurements, and the kinds of call that they have still to time."""

    place: str
    queue: deque[Task] = field(default_factory=deque)
    surveyed: bool = False


class Fleet:
    """Hands out kinds of call to workers until none is left; owned by `tune_fleet`."""

    def __init__(self, ray: Any, calls: tuple[Call, ...], options: Options, seconds: float | None,
                 progress: Progress) -> None:
        self.ray, self.calls, self.options, self.progress = ray, calls, options, progress
        self.started_at = time.perf_counter()
        self.deadline = None if seconds is None else self.started_at + seconds
        threads = os.environ.get("OMP_NUM_THREADS", "")
        self.threads = int(threads) if threads.isdecimal() else 0
        self.affinity = importlib.import_module(
            "ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        self.actor = ray.remote(NodeTuner)
        self.workers: list[Worker] = []
        self.models: dict[tuple[str, str], Model] = {}
        self.pending: dict[Any, Worker] = {}
        self.seen: set[str] = set()            # ids of nodes
        self.rates: dict[str, Rates] = {}
        self.tuned: list[Tuned] = []
        self.already: list[Call] = []
        self.skipped: list[Skipped] = []
        self.total = self.done = 0

    def run(self) -> FleetReport:
        stopped, late = "", -math.inf
        try:
            while True:
                late = (-math.inf if self.deadline is None
                        else time.perf_counter() - self.deadline)
                if late <= 0:
                    self._admit_nodes()
                    self._hand_out()
                # workers know the deadline: what they have begun is not thrown away
                busy = any(isinstance(w.doing, Task) for w in self.pending.values())
                if (not self.pending or self._only_waiting()
                        or (late > 0 and (not busy or late > GRACE_SECONDS))):
                    break
                ready, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=1.0)
                for ref in ready:
                    self._receive(ref, self.pending.pop(ref))
                self._give_up_hanging()
        except KeyboardInterrupt:
            stopped = "interrupted"
        finally:
            for worker in self.workers:
                self._kill(worker)
        left = [task.call for model in self.models.values() for task in model.queue]
        left += [w.doing.call for w in self.workers if isinstance(w.doing, Task)]
        surveyed = any(m.surveyed for m in self.models.values())
        if not stopped and late > 0 and (left or not surveyed):
            stopped = "out of time"
        elif left and not stopped:
            stopped = "no machine of the model is left"
        if not surveyed and not stopped:
            raise ConfigError("no node of the Ray cluster could be used: " + (
                "; ".join(f"{w.name}: {w.problem}" for w in self.workers)
                or f"none has a {self._resource() or 'CPU'}"))
        self.progress(self.done, self.total, stopped)
        return FleetReport(
            tuple(self.tuned), tuple(self.already), tuple(self.skipped), tuple(left), stopped,
            self.rates, time.perf_counter() - self.started_at,
            tuple(w.machine for w in self.workers))

    # nodes and workers

    def _resource(self) -> str:
        """Returns the Ray resource of the wanted kind of device, "" for what a node has."""
        kind = (self.options.device or "").partition(":")[0]
        return "" if not kind else {"cpu": "CPU", "hpu": "HPU"}.get(kind, "GPU")

    def _admit_nodes(self) -> None:
        """Start workers on the nodes that are new, at the beginning or since."""
        for node in self.ray.nodes():
            if not node["Alive"] or node["NodeID"] in self.seen:
                continue
            self.seen.add(node["NodeID"])
            has, wanted = node["Resources"], self._resource()
            kind = wanted or next((a for a in ACCELERATORS if has.get(a)), "CPU")
            cpus, count = has.get("CPU", 0.0), int(has.get(kind, 0))
            if not count:
                continue
            name = node.get("NodeName") or node["NodeManagerAddress"]
            # A CPU is timed alone on its node; a GPU has its share of the CPUs.
            needs = [{"CPU": cpus}] if kind == "CPU" else count * [{
                kind: 1.0, "CPU": float(int(cpus) // count)}]
            for need in needs:
                self.workers.append(worker := Worker(node["NodeID"], name, need))
                self._start(worker)

    def _start(self, worker: Worker) -> None:
        worker.starts += 1
        cpus = worker.needs["CPU"]
        worker.actor = self.actor.options(
            num_cpus=cpus, num_gpus=worker.needs.get("GPU", 0),
            resources={k: n for k, n in worker.needs.items() if k not in ("CPU", "GPU")},
            scheduling_strategy=self.affinity(worker.node_id, soft=False)).remote()
        self._ask(worker, "start", worker.actor.start.remote(
            worker.name, release(), self.options, self.threads, cpus))

    def _ask(self, worker: Worker, doing: Task | str, ref: Any) -> None:
        worker.doing, worker.since = doing, time.monotonic()
        self.pending[ref] = worker

    def _kill(self, worker: Worker) -> None:
        if worker.actor is not None:
            self.ray.kill(worker.actor)
            worker.actor = None

    def _only_waiting(self) -> bool:
        """Is all done but for nodes that have had no room for a worker for long?"""
        busy = [w for w in self.pending.values() if w.doing != "start"]
        late = [w for w in self.pending.values()
                if time.monotonic() - w.since > START_SECONDS]
        if busy or len(late) < len(self.pending):
            return False
        for worker in late:
            wants = ", ".join(f"{n:g} {name}" for name, n in worker.needs.items())
            worker.problem = f"no worker started in {START_SECONDS:.0f} s; it wants {wants} free"
        return True

    # work

    def _hand_out(self) -> None:
        for worker in self.workers:
            model = worker.model
            if worker.actor is None or worker.doing or model is None:
                continue
            if not model.surveyed:             # one machine looks for all of its model
                if not any(w.model is model and w.doing == "survey" for w in self.workers):
                    with measurements.open_store(read_only=True) as store:
                        rows, rates = list(store.rows(place=model.place)), store.rates()
                    rates = {place: r for place, r in rates.items() if place == model.place}
                    self._ask(worker, "survey", worker.actor.survey.remote(self.calls, rows, rates))
            elif model.queue:
                task = model.queue.popleft()
                seconds = (None if self.deadline is None
                           else max(self.deadline - time.perf_counter(), 0.1))
                known = {p: r for p, r in self.rates.items() if p == model.place}
                self._ask(worker, task, worker.actor.tune.remote(task, seconds, known))
                self.progress(self.done, self.total, f"{task.name} on {worker.name}")

    def _receive(self, ref: Any, worker: Worker) -> None:
        doing, worker.doing = worker.doing, ""
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayError as e:
            self._failed(worker, doing, e)
            return
        if doing == "start":
            worker.device, place, digest = answer
            worker.model = self.models.setdefault((place, digest), Model(place))
        elif doing == "survey" and worker.model is not None:
            tasks, already, skipped = answer
            worker.model.queue.extend(tasks)
            worker.model.surveyed = True
            self.total += len(tasks)
            self.already += already
            self.skipped += skipped
        elif isinstance(doing, Task):
            report, rows, environments, rates = answer
            measurements.store_rows(rows, environments, rates)
            self.rates.update(rates)
            self.tuned += report.tuned
            self.skipped += report.skipped
            worker.tuned += len(report.tuned)
            if report.left and worker.model is not None:   # out of time
                worker.model.queue.appendleft(doing)
            else:
                self.done += 1

    def _failed(self, worker: Worker, doing: Task | str, error: Exception) -> None:
        """Let another machine take over the task; start the worker anew where its node lives."""
        problem = first_line(getattr(error, "cause", None) or error)
        self._kill(worker)
        worker.doing = ""
        if isinstance(doing, Task) and worker.model is not None:
            task = replace(doing, attempts=doing.attempts + 1)
            if task.attempts < ATTEMPTS:
                worker.model.queue.appendleft(task)
            else:
                self.skipped.append(Skipped(
                    task.call, f"{ATTEMPTS} workers failed at it, the last on {worker.name}: "
                    f"{problem}"))
                self.done += 1
        alive = any(n["NodeID"] == worker.node_id and n["Alive"] for n in self.ray.nodes())
        refused = (isinstance(error, self.ray.exceptions.RayTaskError)     # it lives, and said why
                   and not isinstance(doing, Task))
        if alive and not refused and worker.starts < ATTEMPTS:
            self._start(worker)
        else:
            worker.problem = problem if alive else f"the node was lost: {problem}"

    def _give_up_hanging(self) -> None:
        now = time.monotonic()
        for ref, worker in self.pending.copy().items():
            if worker.doing != "start" and now - worker.since > KIND_SECONDS:
                del self.pending[ref]
                self._failed(worker, worker.doing,
                             TimeoutError(f"it did not answer in {KIND_SECONDS:.0f} s"))

"""Hours of everything at once: does an answer go wrong, does memory grow, does a call get slower?

The time is cut into cycles. In each, worker threads call (soak_load.py) while one disturbance after
the other happens (soak_disturbances.py); at its end the threads pause, policy goes back to what it
was, and a sample is taken: resident memory, open files, threads, and the latency of one fixed call,
with torch's own beside it so that a machine that got slower is not taken for a library that did.
The report holds every sample, and is written after each: an interruption loses one cycle. A soak
may be run in parts, each a process of its own; trends are of the parts together (trend.py).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..files.reading import read_json
from ..files.sealed import replace_output
from ..machine import hardware
from ..operate.inspection import dispatcher_of
from ..spec.codec import Record
from ..spec.errors import ConfigError, DataError
from ..world import events
from ..world import snapshot as worlds
from ..world.registry.plugin_probe import native_threads
from ..world.settings import configure
from .soak_disturbances import Disturbances
from .soak_load import CALLS, WRONG, Tally, Workers, cases_of, other_breakers
from .trend import Trend, theil_sen

SCHEMA = "layerzero.soak/1"
# remembered choices: full after seconds, so that a leak is told from it
CACHE_SIZE = 256
# a cycle is longer where there would be more samples than these
CYCLE_SECONDS, MAX_SAMPLES = 5.0, 720
PROBE_CALLS, PROBE_ROUNDS = 20, 100
# of each part: caches fill and libraries load, which is no trend
WARM_UP = 0.25
# a slope per hour of less time than this would be a guess
MIN_JUDGED_HOURS = 0.1


@dataclass(frozen=True)
class SoakSample(Record):
    """The process at one moment. Times are of the part, in seconds; latencies in microseconds."""

    at: float
    rss_mib: float
    fds: int
    threads: int
    p50_us: float
    p99_us: float
    torch_us: float                            # p50 of torch's own call of the same thing
    calls: int

    @property
    def ratio(self) -> float:
        return self.p50_us / self.torch_us if self.torch_us > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {name: round(v, 4) if isinstance(v, float) else v
                for name, v in super().to_json().items()}


@dataclass
class SoakPart(Record, whole=True):
    """One process of a soak."""

    began: str
    device: str
    torch: str
    samples: list[SoakSample] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "seconds": round(self.seconds, 1)}

    @property
    def judged(self) -> list[SoakSample]:
        """The samples after the warm-up."""
        return self.samples[int(len(self.samples) * WARM_UP):]


@dataclass(frozen=True)
class Bound:
    """The most that one series may grow in an hour: in its own unit, or as a share of its level."""

    name: str
    unit: str
    most: float
    relative: bool
    of: Callable[[SoakSample], float]


BOUNDS: tuple[Bound, ...] = (
    Bound("RSS", "MiB", 32.0, False, lambda s: s.rss_mib),
    Bound("open files", "", 2.0, False, lambda s: s.fds),
    Bound("threads", "", 2.0, False, lambda s: s.threads),
    Bound("p50 over torch", "x", 0.10, True, lambda s: s.ratio),
    Bound("p50", "us", 0.25, True, lambda s: s.p50_us),
    Bound("p99", "us", 1.0, True, lambda s: s.p99_us),
)


@dataclass(frozen=True)
class Series(Record, json="name unit most first last passed judged trend",
             names={"name": "series", "most": "most_per_hour"}):
    """One series of samples, its trend, and whether that is surely beyond its bound."""

    name: str
    unit: str
    most: float                                # per hour, in the unit
    first: float
    last: float
    trend: Trend | None                        # None: too short to tell
    judged: bool

    @property
    def passed(self) -> bool:
        """Only a slope whose whole interval is beyond the bound fails: noise does not decide."""
        return not self.judged or self.trend is None or self.trend.low <= self.most


@dataclass
class SoakReport(Record, header={"schema": SCHEMA}, whole=True,
             json="target_seconds seconds complete passed counts series failures parts"):
    """All parts of a soak so far."""

    target_seconds: float
    parts: list[SoakPart] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def counts(self) -> dict[str, int]:
        names = dict.fromkeys(name for part in self.parts for name in part.counts)
        return {name: sum(part.counts.get(name, 0) for part in self.parts) for name in names}

    @property
    def failures(self) -> list[str]:
        return [text for part in self.parts for text in part.failures]

    @property
    def complete(self) -> bool:
        return self.seconds >= self.target_seconds * 0.99

    @property
    def series(self) -> list[Series]:
        series = []
        parts = [part.judged for part in self.parts]
        long_enough = sum(s[-1].at - s[0].at for s in parts if s) / 3600 >= MIN_JUDGED_HOURS
        flat = [s for samples in parts for s in samples]
        for bound in BOUNDS if flat else ():
            trend = theil_sen([[(s.at / 3600, float(bound.of(s))) for s in samples]
                               for samples in parts])
            level = statistics.median(bound.of(s) for s in flat)
            series.append(Series(bound.name, bound.unit, bound.most * level if bound.relative
                                 else bound.most, float(bound.of(flat[0])),
                                 float(bound.of(flat[-1])), trend, long_enough
                                 and trend is not None))
        return series

    @property
    def passed(self) -> bool:
        """Nothing went wrong and nothing grows so far, whether or not it is complete."""
        return (not any(self.counts.get(kind) for kind in WRONG)
                and all(s.passed for s in self.series))

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "seconds": round(self.seconds, 1)}

    @classmethod
    def load(cls, path: Path) -> SoakReport:
        return cls.from_json(read_json(path, "a report, such as lz soak --out writes"), str(path))

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        try:
            replace_output(path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as e:
            raise DataError(
                f"{path}: cannot write the report: {e.strerror}; give a file that can be "
                "written") from e


def soak(seconds: float, *, device: str = "cpu", threads: int = 4, rate: float = 0.02,
         forks: bool = True, report: SoakReport | None = None, out: Path | None = None,
         ops: tuple[str, ...] = (), seed: int = 0, say: Callable[[SoakSample, Tally], None]
         | None = None) -> SoakReport:
    """Run for `seconds` more and return the report with this part added.

    `rate`: the share of calls of the planted kernels that fail. KeyboardInterrupt ends the part
    early; the report then says so, and `out` holds it.
    """
    if not seconds > 0:
        raise ConfigError(f"a soak wants seconds > 0, got {seconds!r}")
    if threads < 1:
        raise ConfigError(f"a soak wants at least one thread, got {threads}")
    for op in ops:
        dispatcher_of(op)                      # raises for an unknown one
    kind = hardware.probe(device).type
    report = report if report is not None else SoakReport(seconds)
    part = SoakPart(datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    hardware.probe(device).name, str(torch.__version__))
    report.parts.append(part)
    tally = Tally()
    cases = cases_of(tuple(dict.fromkeys(("cpu", kind))), ops)
    with _own_world(), _counting(tally), _noticed_interrupt() as interrupted:
        disturbances = Disturbances(cases, tally, kind, rate, forks, seed)
        workers = Workers(cases, tally, threads, seed)
        probe = Probe(kind)
        start = time.monotonic()
        cycle = min(max(CYCLE_SECONDS, report.target_seconds / MAX_SAMPLES), max(seconds / 4, 0.5))
        try:
            disturbances.start()
            workers.start()
            step = 0
            while not interrupted.is_set() and time.monotonic() - start < seconds:
                end = min(time.monotonic() + cycle, start + seconds)
                pause = cycle / (len(disturbances) + 1)
                for _ in range(len(disturbances)):
                    time.sleep(max(min(pause, end - time.monotonic()), 0.0))
                    # all of them in every cycle, however busy the machine is
                    disturbances.do(step)
                    step += 1
                workers.pause()
                disturbances.quiet()
                sample = probe.sample(time.monotonic() - start, tally)
                part.samples.append(sample)
                _note(part, tally, time.monotonic() - start, disturbances)
                if out is not None:
                    report.save(out)
                if say is not None:
                    say(sample, tally)
                workers.resume()
        except KeyboardInterrupt:
            interrupted.set()
        finally:
            part.interrupted = interrupted.is_set()
            workers.end()
            disturbances.end()
            _note(part, tally, time.monotonic() - start, disturbances)
            if out is not None:
                report.save(out)
    return report


@contextmanager
def _noticed_interrupt() -> Iterator[threading.Event]:
    """Sets an event when an interrupt comes, too: Python drops one that is raised while an object
    is being freed, of which a soak frees thousands a second."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.getsignal(signal.SIGINT)

    def notice(number: int, frame: FrameType | None) -> None:
        came.set()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, notice)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _note(part: SoakPart, tally: Tally, seconds: float, disturbances: Disturbances) -> None:
    for name in other_breakers():
        text = (f"breakers of other kernels: {name} is out of service, and no fault was planted in "
                "it")
        if text not in tally.failures:
            tally.fail("breakers of other kernels", text.partition(": ")[2])
    part.counts, part.failures, part.seconds = dict(tally.counts), list(tally.failures), seconds
    part.notes = [f"no forks: {disturbances.no_forks}"] if disturbances.no_forks else []


@contextmanager
def _own_world() -> Iterator[None]:
    """Measurements go to the soak's own store, and settings are restored after it."""
    before = worlds.current().policy
    with tempfile.TemporaryDirectory(prefix="layerzero-soak-",
                                     ignore_cleanup_errors=True) as folder:
        configure(perfdb=str(Path(folder) / "perf.sqlite"), cache_size=CACHE_SIZE,
                  breaker_cooldown=0.2,
                  log_level="error")   # every planted fault would be a line
        try:
            yield
        finally:
            worlds.publish(lambda world: world.replace(policy=before), "soak")


@contextmanager
def _counting(tally: Tally) -> Iterator[None]:
    """Counts events by kind: a soak in which nothing was learned or fell back tested less."""
    stop = events.subscribe(lambda event: tally.add(f"event {type(event).__name__}"))
    try:
        yield
    finally:
        stop()


class Probe:
    """The fixed call whose latency is followed: a layer norm, which no fault is planted in."""

    def __init__(self, device: str) -> None:
        x, weight = torch.randn(4, 256, device=device), torch.ones(256, device=device)
        public = dispatcher_of("layer_norm").public
        self._wait: Callable[[], Any] = (torch.accelerator.synchronize if device != "cpu"
                                         else lambda: None)
        self._lz: Callable[[], Any] = lambda: public(x, weight)
        self._torch: Callable[[], Any] = lambda: torch.nn.functional.layer_norm(x, (256,), weight)

    def sample(self, at: float, tally: Tally) -> SoakSample:
        """Returns the state of the process. lz and torch are timed in turns."""
        gc.collect()
        rss, fds, threads = rss_bytes() / 2**20, open_files(), native_threads()
        lz_times: list[float] = []
        torch_times: list[float] = []
        with torch.no_grad():
            for _ in range(PROBE_CALLS):       # what is made on first use is made now
                self._lz()
                self._torch()
            for _ in range(PROBE_ROUNDS):
                for call, times in ((self._lz, lz_times), (self._torch, torch_times)):
                    for _ in range(PROBE_CALLS):
                        start = time.perf_counter_ns()
                        call()
                        self._wait()
                        times.append((time.perf_counter_ns() - start) / 1e3)
        lz_times.sort()
        return SoakSample(at, rss, fds, threads, statistics.median(lz_times),
                          lz_times[int(len(lz_times) * 0.99)], statistics.median(torch_times),
                          sum(tally.counts[kind] for kind in CALLS))


def rss_bytes() -> int:
    """Resident memory of this process."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:                            # no /proc: the peak, which a leak raises too
        import resource
        import sys
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder)) - 1             # the listing itself is one
        except OSError:
            continue
    return 0

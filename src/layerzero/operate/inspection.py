"""Questions about selection (explain, which, validate, ...), answered by the code that selects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..dispatch import casting, native
from ..dispatch.background import compiling, jit, learning
from ..dispatch.dispatcher import Dispatcher, dispatchers, public_function
from ..dispatch.facts import check_types
from ..files import codegen
from ..machine import hardware, loading
from ..machine.isolation import pool
from ..selection.score import with_casts
from ..spec.codec import Record
from ..spec.device import Device
from ..spec.display import Cells, Displayed, plural
from ..spec.errors import ConfigError, InvalidCall, LayerZeroError
from ..spec.event import BackendUnavailable
from ..spec.kernel import Kernel
from ..spec.names import find_kernel, suggest
from ..spec.plan import Plan, Step
from ..spec.reason import Code, Reason
from ..world import context, events, measurements, perf_loading
from ..world import snapshot as worlds
from ..world.incidents import extend_keys, faults_of, no_kernel_error
from ..world.registry import catalog, isolation
from ..world.snapshot import World


def dispatcher_of(op: str | Callable[..., Any]) -> Dispatcher:
    """Return the dispatcher of an op, by its name or its public function."""
    if isinstance(op, str):
        ops = worlds.current().catalog.ops
        if op in ops:
            public_function(ops[op])           # made now if it was never called
            return dispatchers[op]
        raise ConfigError(f"there is no op {op!r}{suggest(op, ops)}")
    for dispatcher in dispatchers.values():
        if op in (dispatcher.public, dispatcher.python_call):
            return dispatcher
    raise ConfigError(f"{op!r} is not an lz operation; pass its name or lz.<op> itself")


def generated_code(op: str | Callable[..., Any], /) -> str:
    """Return the generated Python text that calls of an op run through, for a debugger."""
    dispatcher = dispatcher_of(op)
    dispatcher.ensure_world()
    code = dispatcher.python_call.__code__
    text = codegen.text(code)
    note = "; calls go through its twin in C++" if dispatcher.native is not None else ""
    return f"# {code.co_filename}{note}\n{text}"


def explain(op: str | Callable[..., Any], /, *args: Any, backend: str | None = None,
            policy: Any = None, on: Device | None = None, **kwargs: Any) -> Plan:
    """Return the whole decision for this call: every kernel, accepted or rejected, every reason.
    Runs nothing.

    `on` asks for another device than the tensors' own, so that a choice can be examined anywhere.
    """
    dispatcher = dispatcher_of(op)
    dispatcher.ensure_world()
    override = context.override_for_call(backend, policy)
    extend_keys(override)
    values = dispatcher.order_arguments(args, kwargs)
    named = dict(zip(dispatcher.names, values))
    tensors = check_types(dispatcher.op, named, may_be_foreign=True)   # before they are read
    if dispatcher.op.canonical is not None:
        redirect = dispatcher.op.canonical(named)
        if redirect is not None:
            return explain(redirect.op, backend=backend, policy=policy, on=on, **redirect.values)
    first = next(iter(tensors.values()), None)
    cast = casting.autocast(dispatcher.op, named, first)
    if cast is not None and first is not None:
        with torch.autocast(first.device.type, enabled=False):
            return explain(op, backend=backend, policy=policy, on=on, **cast)
    try:
        facts = dispatcher.facts(values, worlds.current())
    except InvalidCall as e:
        adaptation = casting.adapt(dispatcher.op, named, e, override)
        if adaptation is None:
            raise
        plan = explain(op, backend=backend, policy=policy, on=on, **adaptation.values)
        rates = _with_device(worlds.current(), on).selection_context(plan.facts["device"],
                                                                     override).rates
        return replace(plan, steps=tuple(with_casts(step, adaptation.casts, rates)
                                         for step in plan.steps))
    world = _with_device(worlds.current(), on)
    if on is not None:
        facts = {**facts, "device": on.type}
    else:
        world = jit.world_for_call(world, dispatcher.op, facts, values)
    plan = world.plan(dispatcher.op, facts, override, thorough=True)
    if on is not None:
        return plan
    key = dispatcher.key_of(*values) if override is context.current.get() else None
    progress = (learning.progress_of(dispatcher.op, world, plan) if override is None
                else lambda kernel: "")
    steps = (
        tuple(
            s._replace(
                note=", ".join(filter(None, (*_notes(s, dispatcher, world), progress(s.kernel)))))
            for s in plan.steps))
    return replace(plan, steps=steps, from_cache=key is not None and key in dispatcher.cache.table)


def _notes(step: Step, dispatcher: Dispatcher, world: worlds.World) -> Iterator[str]:
    """Yields what happened to earlier calls of a kernel."""
    if step.note:
        yield step.note
    health = world.health.get(world.catalog.by_id[step.kernel].health)
    failures, last = faults_of(step.kernel, dispatcher.calls_of(step.kernel))
    if health is not None:
        yield (f"{health.state}, {health.failures} faults; last: "
               f"{health.reason.got if health.reason else ''}")
    elif failures and last is not None:
        yield f"{failures} of its last calls failed; last: {last.got}"
    if times := dispatcher.ledger.fallbacks.get(step.kernel):
        yield f"served {plural(times, 'call')} as a fallback"


def _with_device(world: worlds.World, device: Device | None) -> worlds.World:
    """Return the world as it would be with this device in it."""
    if device is None:
        return world
    return replace(world, devices={**world.devices, device.type: device}, table=None, memo={})


def select_kernel(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Plan:
    """Return the plan as explain does; raise if no kernel can serve the call."""
    plan = explain(op, *args, **kwargs)
    if not plan.steps:
        override = context.override_for_call(kwargs.get("backend"), kwargs.get("policy"))
        raise no_kernel_error(_with_device(worlds.current(), kwargs.get("on")),
                              worlds.current().catalog.ops[plan.op], plan.facts, override)
    return plan


def which(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """Return the id of the kernel that would serve this call."""
    kernel = select_kernel(op, *args, **kwargs).kernel
    assert kernel is not None
    return kernel


def validate(op: str | Callable[..., Any], kernel: str, /, *args: Any,
             **kwargs: Any) -> tuple[Reason, ...]:
    """Return why `kernel` may not serve this call, empty if it may; mistakes of the caller are
    reasons too."""
    kernels = worlds.current().catalog.by_id
    if kernel not in kernels:
        kernel = find_kernel(kernel, worlds.current().catalog.op_of_kernel,
                             dispatcher_of(op).op.name)
    try:
        plan = explain(op, *args, **kwargs)
    except InvalidCall as e:
        return e.reasons
    if kernels[kernel].op.name != plan.op:
        raise ConfigError(
            f"{kernel} is a kernel of lz.{kernels[kernel].op.name}; this call is one of "
            f"lz.{plan.op}")
    return plan.why_not(kernel)


@dataclass(frozen=True)
class KernelInfo(Record):
    """One row of `lz list`."""

    id: str
    op: str
    # ready | not warmed | untested on hardware | unavailable | ...
    status: str
    reasons: tuple[Reason, ...]
    requires: tuple[str, ...]
    package: str
    note: str


def list_kernels(op: str | None = None, device: str | None = None) -> list[KernelInfo]:
    """Return every kernel with its status on this machine's device (the first accelerator, else the
    CPU)."""
    world = worlds.current()
    if op is not None:
        dispatcher_of(op)
    kind = device or hardware.main_kind()
    context = world.selection_context(kind, None)
    rows = []
    for o in world.catalog.ops.values():
        if op is not None and o.name != op:
            continue
        roster = world.roster(o, kind, context)
        reasons = {r.kernel: r.reasons for r in roster.rejected}
        rows += [KernelInfo(k.id, o.name, status_of(k, reasons.get(k.id, ()), world),
                            reasons.get(k.id, ()), tuple(map(str, k.requires)), k.package, k.note)
                 for k in world.kernels(o.name)]
    return rows


def status_of(kernel: Kernel, refused: tuple[Reason, ...], world: worlds.World) -> str:
    if refused:
        return refused[0].code.value.lower().replace("_", " ")
    if kernel.untested:
        return "untested on hardware"
    if kernel.jit and kernel.id not in world.warmed:
        return "ready, compiles on first use"
    return "ready"


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the doctor."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


@dataclass(frozen=True, repr=False)
class DoctorReport(Displayed, Record, json="ok checks versions devices"):
    checks: tuple[DoctorCheck, ...]
    devices: tuple[Device, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks)

    def _headline(self) -> str:
        failed = [check.name for check in self.checks if not check.ok]
        return (f"{len(self.checks)} checks, " + (f"{len(failed)} failed: {', '.join(failed)}"
                                                  if failed else "all well"))

    def _cells(self) -> Cells:
        return ("", "check", "found", "hint"), [
            ("ok" if c.ok else "!!", c.name, c.detail, c.hint) for c in self.checks]

    def __str__(self) -> str:
        lines = [f"{d.type}:{d.index} {d.name}" for d in self.devices]
        for c in self.checks:
            lines.append(f"{'ok ' if c.ok else '!! '} {c.name:<28} {c.detail}")
            if c.hint:
                lines.append(f"     hint: {c.hint}")
        return "\n".join(lines)


def doctor(deep: bool = False) -> DoctorReport:
    """Report what is installed, what is broken and what to do.

    `deep` imports each library in its own process.
    """
    checks: list[DoctorCheck] = []
    try:
        devices = hardware.all_devices()
    except LayerZeroError as e:
        devices = (hardware.probe("cpu"),)
        checks.append(DoctorCheck("devices", False, str(e)))
    try:
        world = worlds.current()
    except ConfigError as e:
        return DoctorReport(
            (*checks, DoctorCheck("configuration", False, str(e), "nothing of it was applied")),
            devices
        )
    checks += (*_configuration_checks(world), *_measurement_checks(world, devices),
               *_plugin_checks(world), *_library_checks(world, deep), *_trouble_checks(world, deep))
    versions = {"python": sys.version.split()[0], "torch": torch.__version__,
                "layerzero": _version()}
    return DoctorReport(tuple(checks), devices, versions)


def _configuration_checks(world: World) -> Iterator[DoctorCheck]:
    yield DoctorCheck("configuration", True, f"policy {world.policy.hash}, "
                      f"{sum(len(layer.rules) for layer in world.policy.layers)} rules")
    for layer in world.policy.layers:
        for text in worlds.unknown_kernels(layer, world.catalog):
            yield DoctorCheck("policy names", False, text,
                              "correct the rule; lz list shows the kernels")
    state = native.status()
    yield DoctorCheck("native fast path", state.ok or not state.expected, state.text, state.hint)


def _measurement_checks(world: World, devices: Iterable[Device]) -> Iterator[DoctorCheck]:
    store = measurements.status()
    yield DoctorCheck("measurements", store.ok, store.text, store.hint)
    for device in devices:
        shipped = measurements.shipped_status(world, device)
        yield DoctorCheck(f"shipped measurements ({device.type})", shipped.ok, shipped.text,
                          shipped.hint)
    learns = world.policy.setting("learn")
    yield DoctorCheck("learning", True, str(learning.status()) if learns else "off", "" if learns
                      else "lz.configure(learn=True) or LAYERZERO_LEARN=1 learns while it serves")


def _plugin_checks(world: World) -> Iterator[DoctorCheck]:
    for refused in (*catalog.discover(again=True)[1],
                    *catalog.plugin_policy(world.catalog, again=True)[1]):
        if isinstance(refused, BackendUnavailable) and refused.reason is not None:
            yield DoctorCheck(f"plugin {refused.kernel}", False, refused.reason.message,
                              "correct or uninstall it; everything else works")


def _library_checks(world: World, deep: bool) -> Iterator[DoctorCheck]:
    seen: set[str] = set()
    for kernel in world.catalog.kernels:
        if not kernel.package or kernel.package in seen:
            continue
        seen.add(kernel.package)
        reason = world.availability().get(kernel.id)
        if reason is None and deep:
            reason = loading.import_in_subprocess(kernel.package)
        distribution = kernel.distribution or kernel.package.replace("_", "-")
        missing = reason is not None and reason.code is Code.NOT_INSTALLED
        optional = missing or (reason is not None and reason.code is Code.NOT_BUILT)
        text = (reason.message if reason
                else f"{distribution} {loading.installed_version(distribution) or ''}".strip())
        yield DoctorCheck(f"library {kernel.package}", reason is None or optional, text,
                          reason.code.advice if reason and not missing else "")


def _trouble_checks(world: World, deep: bool) -> Iterator[DoctorCheck]:
    """Yield what went wrong in this process: breakers, libraries, workers, refused calls."""
    for name, health in world.health.items():
        yield DoctorCheck(f"health of {name}", health.blocks is None,
                          f"{health.state}, {health.failures} faults",
                          str(health.reason.message) if health.reason else "")
    for name, reason in world.unloadable.items():
        yield DoctorCheck(f"loading {name}", False, reason.message,
                          _advice(world.catalog.by_id.get(name), reason, deep))
    for workers in pool.pools():
        yield DoctorCheck(
            f"worker of {workers.name}", not workers.deaths,
            f"{len(workers.workers)} of {workers.size()} run, {workers.python or 'this Python'}",
            workers.why if workers.deaths else "")
    for name, kinds in world.refused.items():
        kind, reason = list(kinds.items())[-1]
        yield DoctorCheck(f"refused by {name}", True,
                          f"{len(kinds)} kinds of calls; last: {kind}", reason.message)
    compiles = compiling.status()
    if compiles.compiling:
        yield DoctorCheck("compiling in the background", True, str(compiles),
                          "another kernel serves meanwhile")


def _advice(kernel: Kernel | None, reason: Reason, deep: bool) -> str:
    """Returns what to do about a kernel that does not load: isolate it, if that helps."""
    if (deep and kernel is not None and kernel.package and reason.code in isolation.CONFLICTS
        and loading.import_in_subprocess(kernel.package) is None):
        return (f"{kernel.package} works in a process of its own: set isolation: "
                f"{kernel.backend}.*=worker")
    return reason.code.advice


def _version() -> str:
    """Returns the installed release; of a source tree that is not installed, the tree's own."""
    return loading.installed_version("layerzero") or str(sys.modules["layerzero"].__version__)


@dataclass(frozen=True, repr=False)
class Stats(Displayed, Record):
    """Calls by op and kernel; events by name; what was learned; what compiles."""

    calls: Mapping[str, Mapping[str, int]]
    events: Mapping[str, int]
    learning: learning.LearnStatus
    compiling: compiling.CompileStatus = field(default_factory=compiling.CompileStatus)

    def _headline(self) -> str:
        return (f"{sum(n for kernels in self.calls.values() for n in kernels.values())} calls of "
                f"{len(self.calls)} operations, {sum(self.events.values())} events")

    def _cells(self) -> Cells:
        return ("operation", "kernel", "calls"), [
            (f"lz.{op}", kernel, n) for op, kernels in self.calls.items()
            for kernel, n in kernels.items()]

    def __str__(self) -> str:
        calls = [f"  {n:>8} x {op:<24} {kernel}" for op, kernel, n in self._cells()[1]]
        events = [f"  {n:>8} x {name}" for name, n in self.events.items()]
        return "\n".join([self._headline(), *calls, *(["events:", *events] if events else []),
                          f"learning: {self.learning}", f"compiling: {self.compiling}"])


def stats() -> Stats:
    calls = {name: {k: n for k, n in d.hits().items() if n} for name, d in dispatchers.items()
             if d.world is not None}
    totals: dict[str, int] = {}
    for (name, _, _), n in events.counts().items():
        totals[name] = totals.get(name, 0) + n
    return Stats(calls, totals, learning.status(), compiling.status())


def get_config() -> dict[str, Any]:
    """Return every setting with its value and its source, and the rules in force."""
    policy = worlds.current().policy
    override = context.current.get()
    for layer in override.layers if override else ():
        policy = policy.with_layer(layer)
    source = {name: layer.name for layer in reversed(policy.layers) for name in layer.settings}
    # without its password
    settings = {**policy.settings,
                "perfdb": perf_loading.without_password(policy.setting("perfdb"))}
    return {"settings": settings, "source": {n: source.get(n, "default") for n in policy.settings},
            "rules": [{**r.to_json(), "layer": layer.name, "text": str(r)}
                      for layer in policy.layers for r in layer.rules],
            "policy_hash": policy.hash, "policy_file": str(worlds.current().policy_file or "")}


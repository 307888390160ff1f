"""Questions about the choice, answered by the same code that makes it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..dispatch import casting, native
from ..dispatch import facts as reading
from ..dispatch.background import compiling, jit, learning
from ..dispatch.dispatcher import Dispatcher, dispatchers, function
from ..machine import hardware, loading
from ..select.score import with_casts
from ..spec import codegen
from ..spec.codec import Record
from ..spec.device import Device
from ..spec.errors import ConfigError, InvalidCall, LayerZeroError
from ..spec.event import BackendUnavailable
from ..spec.kernel import Kernel
from ..spec.plan import Plan, Step
from ..spec.reason import Reason
from ..world import catalog, context, events, measurements, perf_loading
from ..world import snapshot as worlds
from ..world.incidents import extend_keys, faults_of, no_kernel_error


def dispatcher_of(op: str | Callable[..., Any]) -> Dispatcher:
    """By name or by public function."""
    if isinstance(op, str):
        ops = worlds.current().catalog.ops
        if op in ops:
            function(ops[op])                  # made now if it was never called
            return dispatchers[op]
        from ..select.policy import suggest
        raise ConfigError(f"there is no op {op!r}{suggest(op, ops)}; known: {', '.join(sorted(ops))}")
    for found in dispatchers.values():
        if op in (found.public, found.twin):
            return found
    raise ConfigError(f"{op!r} is not an lz operation; pass its name or lz.<op> itself")


def generated_code(op: str | Callable[..., Any], /) -> str:
    """The Python text that calls of an operation run through, as a debugger shows it."""
    found = dispatcher_of(op)
    found._ready()
    code = found.twin.__code__
    text = codegen.text(code)
    served = "; calls go through its twin in C++" if found.native is not None else ""
    return f"# {code.co_filename}{served}\n{text}"


def explain(op: str | Callable[..., Any], /, *args: Any, backend: str | None = None, policy: Any = None,
            on: Device | None = None, **kwargs: Any) -> Plan:
    """The whole decision for this call: every kernel, accepted or rejected, every reason. Runs nothing.

    `on` asks for another device than the tensors' own, so that a choice can be examined anywhere.
    """
    found = dispatcher_of(op)
    found._ready()
    override = context.override_for_call(backend, policy)
    extend_keys(override)
    values = found.bound(args, kwargs)
    named = dict(zip(found.names, values))
    tensors = reading.check_types(found.op, named)             # before anything looks into them
    first = next(iter(tensors.values()), None)
    lowered = casting.autocast(found.op, named, first)
    if lowered is not None and first is not None:
        with torch.autocast(first.device.type, enabled=False):
            return explain(op, backend=backend, policy=policy, on=on, **lowered)
    if found.op.canonical is not None:
        redirect = found.op.canonical(named)
        if redirect is not None:
            return explain(redirect.op, backend=backend, policy=policy, on=on, **redirect.values)
    try:
        facts = found.facts(values, worlds.current())
    except InvalidCall as e:
        fit = casting.adapted(found.op, named, e, override)
        if fit is None:
            raise
        plan = explain(op, backend=backend, policy=policy, on=on, **fit.values)
        rates = _imagining(worlds.current(), on).surroundings(plan.facts["device"], override).rates
        return replace(plan, steps=tuple(with_casts(step, fit.casts, rates) for step in plan.steps))
    world = _imagining(worlds.current(), on)
    if on is not None:
        facts = {**facts, "device": on.type}
    else:
        world = jit.as_seen(world, found.op, facts, values)
    plan = world.plan(found.op, facts, override, thorough=True)
    if on is not None:
        return plan
    key = found.key_of(*values) if override is context.current.get() else None
    learned = learning.standing(found.op, world, plan) if override is None else lambda kernel: ""
    steps = tuple(s._replace(note=", ".join(filter(None, (*_notes(s, found, world), learned(s.kernel)))))
                  for s in plan.steps)
    return replace(plan, steps=steps, from_cache=key is not None and key in found.cache.table)


def _notes(step: Step, found: Dispatcher, world: worlds.World) -> Iterator[str]:
    """What became of earlier calls of this op."""
    if step.note:
        yield step.note
    health = world.health.get(world.catalog.by_id[step.kernel].health)
    failures, last = faults_of(step.kernel, found.calls_of(step.kernel))
    if health is not None:
        yield f"{health.state}, {health.failures} faults; last: {health.reason.got if health.reason else ''}"
    elif failures and last is not None:
        yield f"{failures} of its last calls failed; last: {last.got}"
    if times := found.ledger.fallbacks.get(step.kernel):
        yield f"served {times} calls as a fallback"


def _imagining(world: worlds.World, device: Device | None) -> worlds.World:
    """The world as it would be with this device in it."""
    if device is None:
        return world
    return replace(world, devices={**world.devices, device.type: device}, table=None, memo={})


def select_kernel(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Plan:
    """As explain, but an error if nothing can serve the call."""
    plan = explain(op, *args, **kwargs)
    if not plan.steps:
        override = context.override_for_call(kwargs.get("backend"), kwargs.get("policy"))
        raise no_kernel_error(_imagining(worlds.current(), kwargs.get("on")), worlds.current().catalog.ops[plan.op],
                              plan.facts, override)
    return plan


def which(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """The id of the kernel that would serve this call."""
    kernel = select_kernel(op, *args, **kwargs).kernel
    assert kernel is not None
    return kernel


def validate(op: str | Callable[..., Any], kernel: str, /, *args: Any, **kwargs: Any) -> tuple[Reason, ...]:
    """Why `kernel` may not serve this call; empty if it may. The caller's own mistakes are reasons too."""
    known = worlds.current().catalog.by_id
    if kernel not in known:
        from ..select.policy import suggest
        raise ConfigError(f"there is no kernel {kernel!r}{suggest(kernel, known)}")
    try:
        plan = explain(op, *args, **kwargs)
    except InvalidCall as e:
        return e.reasons
    if known[kernel].op.name != plan.op:
        raise ConfigError(f"{kernel} is a kernel of lz.{known[kernel].op.name}; this call is one of lz.{plan.op}")
    return plan.why_not(kernel)


@dataclass(frozen=True)
class KernelInfo(Record):
    """One row of `lz list`."""

    id: str
    op: str
    status: str                                # ready | not warmed | untested on hardware | unavailable | ...
    reasons: tuple[Reason, ...]
    requires: tuple[str, ...]
    package: str
    note: str


def list_kernels(op: str | None = None, device: str | None = None) -> list[KernelInfo]:
    """Every kernel and how it stands on this machine's device (the first accelerator, else the CPU)."""
    world = worlds.current()
    if op is not None:
        dispatcher_of(op)
    kind = device or hardware.main_kind()
    around = world.surroundings(kind, None)
    rows = []
    for o in world.catalog.ops.values():
        if op is not None and o.name != op:
            continue
        roster = world.roster(o, kind, around)
        refused = {r.kernel: r.reasons for r in roster.rejected}
        rows += [KernelInfo(k.id, o.name, status_of(k, refused.get(k.id, ()), world), refused.get(k.id, ()),
                            tuple(map(str, k.requires)), k.package, k.note) for k in world.kernels(o.name)]
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
class Check:
    """One line of the doctor."""

    name: str
    ok: bool
    found: str
    hint: str = ""


@dataclass(frozen=True)
class Diagnosis(Record, json="ok checks versions devices"):
    checks: tuple[Check, ...]
    devices: tuple[Device, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks)

    def __str__(self) -> str:
        lines = [f"{d.type}:{d.index} {d.name}" for d in self.devices]
        for c in self.checks:
            lines.append(f"{'ok ' if c.ok else '!! '} {c.name:<28} {c.found}")
            if c.hint:
                lines.append(f"     hint: {c.hint}")
        return "\n".join(lines)


def doctor(deep: bool = False) -> Diagnosis:
    """What is here, what is broken, and what to do. `deep` imports each library in a process of its own."""
    checks: list[Check] = []
    try:
        devices = hardware.all_devices()
    except LayerZeroError as e:
        devices = (hardware.probe("cpu"),)
        checks.append(Check("devices", False, str(e)))
    try:
        world = worlds.current()
    except ConfigError as e:
        return Diagnosis((*checks, Check("configuration", False, str(e), "nothing of it was applied")), devices)
    checks.append(Check("configuration", True, f"policy {world.policy.hash}, "
                        f"{sum(len(layer.rules) for layer in world.policy.layers)} rules"))
    state = native.status()
    checks.append(Check("native fast path", state.ok or not state.wanted, state.text, state.hint))
    kept = measurements.status()
    checks.append(Check("measurements", kept.ok, kept.text, kept.hint))
    for device in devices:
        came = measurements.shipped_status(world, device)
        checks.append(Check(f"shipped measurements ({device.type})", came.ok, came.text, came.hint))
    on = world.policy.setting("learn")
    checks.append(Check("learning", True, str(learning.status()) if on else "off",
                        "" if on else "lz.configure(learn=True) or LAYERZERO_LEARN=1 learns while it serves"))
    for refused in (*catalog.discover()[1], *catalog.plugin_policy(world.catalog)[1]):
        if isinstance(refused, BackendUnavailable) and refused.reason is not None:
            checks.append(Check(f"plugin {refused.kernel}", False, refused.reason.message,
                                "correct or uninstall it; everything else works"))
    seen: set[str] = set()
    for kernel in world.catalog.kernels:
        if not kernel.package or kernel.package in seen:
            continue
        seen.add(kernel.package)
        reason = world.availability().get(kernel.id)
        if reason is None and deep:
            reason = loading.import_in_subprocess(kernel.package)
        distribution = kernel.distribution or kernel.package.replace("_", "-")
        missing = reason is not None and reason.code.value == "NOT_INSTALLED"
        found = reason.message if reason else f"{distribution} {loading.installed_version(distribution) or ''}".strip()
        checks.append(Check(f"library {kernel.package}", reason is None or missing, found,
                            reason.code.advice if reason and not missing else ""))
    for name, health in world.health.items():
        checks.append(Check(f"health of {name}", health.blocks is None, f"{health.state}, {health.failures} faults",
                            str(health.reason.message) if health.reason else ""))
    for name, reason in world.unloadable.items():
        checks.append(Check(f"loading {name}", False, reason.message, reason.code.advice))
    for name, kinds in world.refused.items():
        kind, reason = list(kinds.items())[-1]
        checks.append(Check(f"refused by {name}", True, f"{len(kinds)} kinds of calls; last: {kind}", reason.message))
    busy = compiling.status()
    if busy.compiling:
        checks.append(Check("compiling in the background", True, str(busy), "another kernel serves meanwhile"))
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "layerzero": _version()}
    return Diagnosis(tuple(checks), devices, versions)


def _version() -> str:
    return loading.installed_version("layerzero") or "unknown"


@dataclass(frozen=True)
class Stats(Record):
    """What ran so far, by op and kernel; events by name; what was learned while serving; what is compiled behind it."""

    calls: Mapping[str, Mapping[str, int]]
    events: Mapping[str, int]
    learning: learning.Status
    compiling: compiling.Status = field(default_factory=compiling.Status)


def stats() -> Stats:
    calls = {name: {k: n for k, n in d.hits().items() if n} for name, d in dispatchers.items() if d.world is not None}
    totals: dict[str, int] = {}
    for (name, _, _), n in events.counts().items():
        totals[name] = totals.get(name, 0) + n
    return Stats(calls, totals, learning.status(), compiling.status())


def get_config() -> dict[str, Any]:
    """Every setting with its value and where it comes from, and the rules in force."""
    policy = worlds.current().policy
    outer = context.current.get()
    for layer in outer.layers if outer else ():
        policy = policy.with_layer(layer)
    source = {name: layer.name for layer in reversed(policy.layers) for name in layer.settings}
    # without its password
    settings = {**policy.settings, "perfdb": perf_loading.without_password(policy.setting("perfdb"))}
    return {"settings": settings, "source": {n: source.get(n, "default") for n in policy.settings},
            "rules": [{**r.to_json(), "layer": layer.name, "text": str(r)}
                      for layer in policy.layers for r in layer.rules],
            "policy_hash": policy.hash, "policy_file": str(worlds.current().policy_file or "")}


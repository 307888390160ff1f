"""lz.readiness_check: may this process begin to serve these calls?

One report with a line for each check. What surrounds the calls is checked by operate/readiness.py;
here are the checks of the calls themselves, decided by the same code that decides when they are
made, from tensors without memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union

from ..dispatch.background import compiling
from ..files.calls import Calls, load_calls
from ..machine.builds import build_of
from ..operate import readiness as base
from ..operate.readiness import FAIL, Readiness, ReadinessCheck, ReadinessFinding, first_line
from ..perf.interface import StoreError
from ..selection.engine import is_warm
from ..spec.call import Call
from ..spec.display import plural
from ..spec.errors import LayerZeroError
from ..spec.op import Op
from ..spec.plan import DEFAULT, PRIOR, Plan
from ..spec.reason import Code
from ..world import measurements, perf_loading
from ..world.registry import certificates
from ..world.snapshot import World
from .call_facts import facts_of
from .force import check_table
from .lockfile import Lockfile, check_lockfile
from .table import Table

T = TypeVar("T")
OrPath = Union[T, str, "os.PathLike[str]", None]
WANTED = "lz.readiness_check: wanted calls (lz.testing.Call) or a file of them"


@dataclass(frozen=True)
class Decision:
    """A call, and the plans for it: as things are, and as if every kernel were compiled."""

    name: str
    op: Op
    facts: Mapping[str, Any]
    plan: Plan
    compiled: Plan


def readiness_check(calls: Calls = (), device: str | None = None, *, table: OrPath[Table] = None,
                    lock: OrPath[Lockfile] = None, capabilities: str | os.PathLike[str]
                    | None = None) -> Readiness:
    """Check that everything these calls need is here. The report is true where nothing failed;
    print it to see all.

    `calls` are descriptions or a file of them; without any, the kernels of this device are checked
    as they stand. `table`, `lock` and `capabilities` are what will be put in force. Nothing is run,
    compiled or written.
    """
    world = base.current_world()
    if isinstance(world, Readiness):
        return world
    kind = base.device_kind(device)
    workload = load_calls(calls, WANTED)
    loaded, table_check = _table(table, world)
    if not workload and loaded is not None:
        workload = tuple(artefact.call for artefact in loaded.jit)
    decided, wrong = _decide(workload, world, kind)
    workspace = max((d.plan.steps[0].workspace for d in decided if d.plan.steps), default=0)
    checks = [
        _kernels(decided, wrong, world, kind), _certificates(decided, world, kind),
        _warm_up(decided, world), _measurements(decided, world, kind),
        *([_check_coverage(table_check, loaded, decided)] if table_check else []),
        *([_lockfile(lock)] if lock is not None else []),
        *base.check_surroundings(world, kind, workspace, None if capabilities is None
                                 else Path(capabilities))]
    return Readiness(tuple(checks), world.device(kind).name)


def _decide(calls: Sequence[Call], world: World, kind: str) -> tuple[list[Decision],
                                                                     list[ReadinessFinding]]:
    decided, wrong = [], []
    for call in calls:
        name = f"{call.op} ({call.name})" if call.name else call.op
        try:
            op, facts = facts_of(call, world, kind)
        except LayerZeroError as e:
            wrong.append(base.failure(f"{name}: {first_line(e)}", "correct the workload"))
            continue
        decided.append(Decision(name, op, facts, world.plan(op, facts, thorough=True),
                                world.plan(op, facts, compiled=True)))
    return decided, wrong


# kernels

def _kernels(decided: Sequence[Decision], wrong: Sequence[ReadinessFinding], world: World,
             kind: str) -> ReadinessCheck:
    findings = [*wrong, *_required(world, kind)]
    for d in decided:
        if not d.plan.steps:
            why = ("; ".join(dict.fromkeys(str(r) for no in d.plan.rejected for r in no.reasons))
                   or "there is none")
            hint = ("run lz warmup" if d.compiled.steps
                    else "lz explain says more; allow or install a kernel")
            findings.append(base.failure(f"{d.name}: no kernel may serve it: {why[:400]}", hint))
        elif d.plan.steps[0].kernel.startswith("reference.") and len(world.kernels(d.op.name)) > 1:
            findings.append(base.warning(f"{d.name}: only the reference formula serves it",
                                         "lz explain says why the others do not"))
    unbuilt = sorted(k for k, reason in world.availability().items()
                     if reason.code is Code.NOT_BUILT)
    if unbuilt and kind == "cpu":
        findings.append(base.warning(f"not compiled for this machine: {', '.join(unbuilt)}",
                                     "run: lz build"))
    if decided or wrong:
        served = sorted({d.plan.kernel for d in decided if d.plan.kernel})
        return ReadinessCheck.of(
            "kernels", "a kernel that may serve each call, and those that policy locks", findings,
            f"{plural(len(decided), 'call')}, served by {', '.join(served)}")
    context = world.selection_context(kind, None)
    viable = {op.name: world.roster(op, kind, context).viable for op in world.catalog.ops.values()}
    findings += [base.failure(f"{op}: no kernel can run on {kind}", "lz list shows why")
                 for op, kernels in viable.items() if not kernels]
    return ReadinessCheck.of(
        "kernels", "a kernel for each op, and those that policy locks", findings,
        f"{len(viable)} ops, {sum(map(len, viable.values()))} kernels that can run on {kind}")


def _required(world: World, kind: str) -> Iterator[ReadinessFinding]:
    """Yield the locks of the policy whose kernels cannot run here."""
    context = world.selection_context(kind, None)
    for layer in world.policy.layers:
        for rule in layer.rules:
            if rule.action != "lock":
                continue
            for op in world.catalog.ops.values():
                named = [k for k in world.kernels(op.name) if rule.applies_to(op.name)
                         and rule.covers(k.id)]
                refused = {r.kernel: r.reasons for r in world.roster(op, kind, context).rejected}
                if named and all(k.id in refused for k in named):
                    why = "; ".join(str(r) for r in refused[named[0].id])
                    yield base.failure(
                        f"{op.name} is locked to {', '.join(rule.kernels)} ({rule.origin}): {why}",
                        "install or build it, or take the lock away")


# certificates

def _certificates(decided: Sequence[Decision], world: World, kind: str) -> ReadinessCheck:
    want = "a certificate for each kernel that serves"
    if not world.policy.setting("require_certificates"):
        return ReadinessCheck("certificates", base.OK, "none: policy does not demand them",
                              "not demanded")
    if decided:
        ids = {d.plan.kernel or "" for d in decided}
        near = {r.kernel for d in decided for r in d.plan.rejected
                if {reason.code for reason in r.reasons} == {Code.UNCERTIFIED}}
    else:
        context = world.selection_context(kind, None)
        viable = {k.id for op in world.catalog.ops.values()
                for k in world.roster(op, kind, context).viable
                if not k.untested}
        ids = {i for i in viable if i in context.certified}
        near = viable - ids
    near = {i for i in near if not i.startswith("reference.")}
    statuses = certificates.statuses([world.catalog.by_id[i] for i in sorted(near)],
                                     world.device(kind))
    findings = [base.warning(f"{kernel}: {why}", "run lz verify kernels for it")
                for kernel, reason in statuses.items() if (why := getattr(reason, "message", ""))]
    proven = {i for i in ids if i and not i.startswith("reference.")}
    if near and not proven:
        findings.insert(0, base.failure(
            "no kernel here is proven: only the reference formulas serve", "run lz verify kernels"))
    return ReadinessCheck.of("certificates", want, findings,
                             f"{len(proven)} kernels, each with its certificate")


# warm-up

def _warm_up(decided: Sequence[Decision], world: World) -> ReadinessCheck:
    """Check that no request would wait for a compiler."""
    mode = world.policy.setting("jit")
    findings, warm = [], 0
    for d in decided:
        best = d.compiled.steps[0] if d.compiled.steps else None
        kernel = world.catalog.by_id[best.kernel] if best is not None else None
        if best is None or kernel is None or not kernel.jit:
            continue
        if is_warm(kernel, d.facts, world.warmed):
            warm += 1
            continue
        if mode == "background" and not d.plan.locked and not compiling.is_worth_it(kernel, best):
            continue                           # nobody would compile it unasked
        before = compiling.was_compiled(kernel, d.facts)
        waits = mode == "in_request" or bool(d.plan.locked)
        text = f"{d.name}: {kernel.id} is not compiled in this process"
        text += ", this machine's caches have it" if before else " and in no cache of this machine"
        if waits:
            finding = base.warning if before else base.failure
            findings.append(finding(f"{text}; a request would wait for it", "run lz warmup"))
        elif not before or mode == "never":
            findings.append(base.warning(
                f"{text}; {d.plan.kernel or 'nothing'} serves meanwhile", "run lz warmup"))
    return ReadinessCheck.of(
        "warm-up", f"nothing to compile in a request (jit: {mode})", findings,
        f"{warm} calls are served by kernels compiled here" if warm
        else "no call waits for a compiler")


# measurements

def _measurements(decided: Sequence[Decision], world: World, kind: str) -> ReadinessCheck:
    want = "times measured on this machine, of the kernels as they are built now"
    findings = []
    sources: dict[str, int] = {}
    for d in decided:
        if d.plan.steps:
            source = d.plan.steps[0].score.source
            sources[source] = sources.get(source, 0) + 1
            if source in (DEFAULT, PRIOR):
                findings.append(base.warning(
                    f"{d.name}: not measured; {d.plan.kernel} serves as {source}",
                    "run lz tune for these calls, or set learn"))
    stale = _stale(world, kind)
    if stale:
        findings.append(base.warning(
            f"{stale} measurements of this device are of other builds or expired",
            "run lz tune again; lz perf prune removes them"))
    shipped = measurements.shipped_status(world, world.device(kind))
    counted = ", ".join(f"{n} calls {source}" for source, n in sorted(sources.items()))
    in_use = counted or f"{len(world.perf)} in use"
    return ReadinessCheck.of("measurements", want, findings, f"{in_use}; shipped: {shipped.text}")


def _stale(world: World, kind: str) -> int:
    """Count the void rows of this device; 0 if the database, which is checked, cannot be read."""
    where = perf_loading.location(world.policy)
    if not isinstance(where, Path) or not where.exists():
        return 0
    from ..perf import snapshot  # sqlite3 is not loaded without a database
    signature, builds = world.device(kind).signature, {k.id: build_of(k)
                                                       for k in world.catalog.kernels}
    days = world.policy.setting("perfdb_ttl")
    since = time.time() - days * perf_loading.DAY if days else 0.0
    try:
        return sum(g.rows for g in snapshot.groups(where, base.READ_SECONDS)
                   if measurements.signature_of(g.place) == signature
                   and (builds.get(g.kernel, g.build) != g.build or g.newest < since))
    except StoreError:
        return 0


# tables and lockfiles

def _table(source: OrPath[Table], world: World) -> tuple[Table | None, ReadinessCheck | None]:
    want = "a dispatch table that holds on this machine"
    in_force = world.table.table if world.table is not None else None
    table = in_force if source is None and isinstance(in_force, Table) else source
    if table is None:
        return None, None
    try:
        loaded = table if isinstance(table, Table) else Table.load(table)
    except LayerZeroError as e:
        return None, ReadinessCheck("table", FAIL, want, first_line(e), "make it again: lz solve")
    try:
        check_table(loaded, world)
    except LayerZeroError as e:
        wrong = [base.failure(reason.message, "run lz solve on this machine")
                 for reason in getattr(e, "reasons", ())]
        return loaded, ReadinessCheck.of(
            "table", want, wrong or [base.failure(first_line(e), "run lz solve")], "")
    state = "in force" if in_force is not None and in_force.id == loaded.id else "valid here"
    return loaded, ReadinessCheck("table", base.OK, want, f"{loaded}; {state}")


def _check_coverage(check: ReadinessCheck, table: Table | None,
                    decided: Sequence[Decision]) -> ReadinessCheck:
    """Add the calls that the table has no row for to its check."""
    if check.state != base.OK or table is None:
        return check
    missed = [base.warning(f"{d.name}: the table has no row for it",
                           "run lz solve with these calls")
              for d in decided if table.find(d.op.name, d.facts) is None]
    return ReadinessCheck.of(check.name, check.want, missed, check.got)


def _lockfile(lock: OrPath[Lockfile]) -> ReadinessCheck:
    want = "the kernels, versions and builds that the lockfile names"
    assert lock is not None
    try:
        violations = check_lockfile(lock)
    except LayerZeroError as e:
        return ReadinessCheck("lockfile", FAIL, want, first_line(e), "make it again: lz lock")
    broken = [base.failure(str(v), "install what it names, or make it again: lz lock")
              for v in violations]
    return ReadinessCheck.of("lockfile", want, broken, "this machine holds to it")

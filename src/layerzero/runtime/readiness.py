"""Is this machine ready to serve? What stands between the calls of a workload and kernels that are proven, warm and
measured here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..spec.call import Call
from ..spec.errors import LayerZeroError
from ..spec.kernel import Kernel
from . import calls as making
from . import certificates, dispatch, hardware
from . import world as worlds
from .certificates import Certificate


@dataclass(frozen=True)
class Missing:
    """One thing that is not ready."""

    what: str                                  # certificate | warm-up | measurement | kernel
    kernel: str
    op: str
    found: str
    hint: str
    call: str = ""

    def __str__(self) -> str:
        return f"{self.what:<12} {self.kernel or self.op:<28} {self.found}; {self.hint}"


@dataclass(frozen=True)
class Readiness:
    checked: int                               # kernels, or calls
    missing: tuple[Missing, ...]

    @property
    def ok(self) -> bool:
        return not self.missing

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "checked": self.checked, "missing": [dict(m.__dict__) for m in self.missing]}

    def __str__(self) -> str:
        return "\n".join([f"{self.checked} checked, {len(self.missing)} not ready", *map(str, self.missing)])


def readiness_check(calls: Iterable[Call] = (), device: str | None = None) -> Readiness:
    """What is missing for `calls`: a kernel at all, its certificate, its warm-up, its measurement.

    Without calls: which of the kernels that can run on this device have no certificate that holds.
    """
    world = worlds.current()
    kind = device or hardware.main_kind()
    asked = tuple(calls)
    if not asked:
        around = world.surroundings(kind, None)
        able = [k for op in world.catalog.ops.values() for k in world.roster(op, kind, around).viable
                if k.backend != "reference" and not k.untested]
        return Readiness(len(able), tuple(m for k in able for m in _uncertified(k, world, kind)))
    missing = dict.fromkeys(m for call in asked for m in _of_call(call, world, kind))
    return Readiness(len(asked), tuple(missing))


def _of_call(call: Call, world: worlds.World, kind: str) -> Iterable[Missing]:
    name = call.name or call.op
    try:
        op = world.catalog.ops[call.op]
        dispatch.function(op)
        values = making.values(op, call, kind)
        facts = dispatch.dispatchers[op.name].facts(tuple(values[p.name] for p in op.params), world)
    except KeyError:
        yield Missing("kernel", "", call.op, "there is no such op", "correct the workload", name)
        return
    except LayerZeroError as e:
        yield Missing("kernel", "", call.op, str(e), "correct the call", name)
        return
    plan = world.plan(op, facts, thorough=True)
    if not plan.steps:
        yield Missing("kernel", "", call.op, "no kernel can serve this call", "lz explain says why", name)
        return
    first = plan.steps[0]
    kernel = world.catalog.by_id[first.kernel]
    yield from _uncertified(kernel, world, kind)
    if first.score.source != "measured":
        yield Missing("measurement", kernel.id, op.name, f"its time is {first.score.source}", "run lz tune", name)
    colder = [r.kernel for r in plan.rejected if {c.code.value for c in r.reasons} == {"JIT_NOT_WARMED"}]
    for cold in colder:
        yield Missing("warm-up", cold, op.name, "may be faster and is not compiled yet", "run lz warmup", name)


def _uncertified(kernel: Kernel, world: worlds.World, kind: str) -> Iterable[Missing]:
    if kernel.backend == "reference" or kernel.id in world.certified:
        return
    found = certificates.standing([kernel], world.device(kind))[kernel.id]
    if not isinstance(found, Certificate):
        yield Missing("certificate", kernel.id, kernel.op.name, found.message, found.code.advice)

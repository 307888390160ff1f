"""policy -> filter -> score. A pure function: same arguments, same Plan; no I/O, no globals, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..perf.record import PerfView, bucket_of
from ..spec.expr import parse
from ..spec.grid import bucket_top
from ..spec.kernel import Kernel
from ..spec.op import DEVICE_FACTS, Op
from ..spec.plan import Plan, Rejected, Step, Transform
from ..spec.reason import Code, Reason
from ..spec.rules import Rule
from .policy import Policy
from .score import Rates, calibration, guess_us, roofline_us, score

SMALL_WORKSPACE = 1 << 24      # up to this the live headroom is not asked: finding it out would cost more


@dataclass(frozen=True)
class Surroundings:
    """Everything a selection depends on besides the call itself."""

    policy: Policy
    device: Mapping[str, Any]                  # the device's facts
    device_signature: str
    rates: Rates
    perf: PerfView = field(default_factory=PerfView)
    availability: Mapping[str, Reason] = field(default_factory=dict)   # kernel -> why it cannot be loaded
    health: Mapping[str, Reason] = field(default_factory=dict)         # health group -> why it is out
    warmed: Collection[str] = frozenset()      # JIT kernels that are compiled already
    certified: Collection[str] = frozenset()
    headroom: Callable[[], int] = lambda: 1 << 62


@dataclass(frozen=True)
class Roster:
    """The kernels of an op that may ever serve on a device, and why the others may not."""

    viable: tuple[Kernel, ...]
    dynamic: Mapping[str, tuple[Any, ...]]     # kernel -> the rules that depend on the call
    rejected: tuple[Rejected, ...]


def roster(kernels: Sequence[Kernel], around: Surroundings) -> Roster:
    """What can be decided once per device: libraries, health, and rules that read only the device."""
    viable, dynamic, rejected = [], {}, []
    for kernel in kernels:
        reasons = list(_standing(kernel, around))
        rules = []
        for rule in kernel.requires:
            if not all(leaf.fact in DEVICE_FACTS for leaf in rule.leaves()):
                rules.append(rule)
            elif not any(r.code is Code.PLATFORM_MISMATCH for r in reasons):   # a CPU's "sm" says nothing
                reason = rule.check(around.device)
                if reason is not None:
                    reasons.append(reason)
        if reasons:
            rejected.append(Rejected(kernel.id, tuple(reasons)))
        else:
            viable.append(kernel)
            dynamic[kernel.id] = tuple(rules)
    return Roster(tuple(viable), dynamic, tuple(rejected))


def _standing(kernel: Kernel, around: Surroundings) -> Sequence[Reason]:
    found = (around.availability.get(kernel.id), around.health.get(kernel.health), around.health.get(kernel.id))
    return list(dict.fromkeys(reason for reason in found if reason is not None))


def select(op: Op, crew: Roster, facts: Mapping[str, Any], around: Surroundings, thorough: bool = False) -> Plan:
    """Rank the kernels that may serve. `thorough` collects every reason of every other, not just the first."""
    policy = around.policy
    lock = policy.lock(op.name, facts)
    named = lock.kernels if lock else ()
    rejected: list[Rejected] = []
    fit: list[tuple[Kernel, tuple[Transform, ...], int]] = []
    for kernel in crew.viable:
        reasons, transforms, workspace = _judge(
            kernel, crew.dynamic[kernel.id], op, facts, around, bool(named), thorough)
        if reasons:
            rejected.append(Rejected(kernel.id, tuple(reasons)))
        else:
            fit.append((kernel, transforms, workspace))
    steps = _rank(op, fit, facts, around)
    return Plan(op.name, facts, steps, (*rejected, *crew.rejected), policy.hash, lock.origin if lock else "")


def _judge(kernel: Kernel, rules: tuple[Any, ...], op: Op, facts: Mapping[str, Any], around: Surroundings,
           named: bool, thorough: bool) -> tuple[list[Reason], tuple[Transform, ...], int]:
    policy = around.policy
    reasons: list[Reason] = []
    transforms: list[Transform] = []
    denied = policy.verdict(kernel.id, op.name, facts)
    if denied is not None:
        reasons.append(denied)
    for reason in _modes(kernel, facts, around, named):
        reasons.append(reason)
    for rule in rules:
        if reasons and not thorough:
            return reasons, (), 0
        reason = rule.check(facts)
        if reason is None:
            continue
        transform = _repair(rule, op, facts) if rule.repair else None
        refusal = "strict_mode" if policy.setting("strict_mode") else ""
        if transform is not None and transform.kind == "cast" and not policy.setting("allow_adaptation"):
            transform = None
        if transform is None:
            reasons.append(reason)
        elif refusal:
            reasons += [reason, Reason(Code.STRICT_TRANSFORM_REFUSED, refusal, str(transform))]
        else:
            transforms.append(transform)
    if op.variant and kernel.variants and facts[op.variant] not in kernel.variants:
        if policy.setting("strict_mode"):
            reasons.append(Reason(Code.LAYOUT_UNSUPPORTED, kernel.variants, facts[op.variant], op.variant))
        else:
            transforms.append(Transform("layout", kernel.variants[0]))   # a view: moves no bytes
            for rule in _broken_by_view(rules, op, facts, kernel.variants[0]):
                if (transform := _repair(rule, op, facts)) is not None:
                    transforms.append(transform)
                else:
                    reasons.append(Reason(rule.code, rule.want, False, rule.fact))
    workspace = 0
    if kernel.workspace != "0":
        workspace = int(parse(kernel.workspace)(_largest(op, facts)))
        asked = workspace > SMALL_WORKSPACE or policy.setting("memory_headroom") is not None
        if asked and workspace > (room := around.headroom()):
            reasons.append(Reason(Code.MEMORY_HEADROOM_EXCEEDED, room, workspace))
    return reasons, tuple(dict.fromkeys(transforms)), workspace


def _modes(kernel: Kernel, facts: Mapping[str, Any], around: Surroundings, named: bool) -> list[Reason]:
    """What the mode of the call or the policy asks of every kernel."""
    setting = around.policy.setting
    reasons = []
    if facts["grad"] and not kernel.differentiable:
        reasons.append(Reason(Code.BACKWARD_UNSUPPORTED))
    if facts["deterministic"] or setting("deterministic"):
        if not kernel.deterministic or (facts["grad"] and not kernel.deterministic_backward):
            reasons.append(Reason(Code.NOT_DETERMINISTIC))
    if (facts["graph"] or setting("graph_strict_mode")) and not kernel.graph_safe and facts["device"] == "cuda":
        reasons.append(Reason(Code.CUDA_GRAPH_UNSAFE))
    if setting("disabled") and not kernel.baseline and kernel.backend != "reference":
        reasons.append(Reason(Code.LZ_DISABLED))
    if setting("require_certificates") and kernel.id not in around.certified:
        reasons.append(Reason(Code.UNCERTIFIED))
    if not named:
        if kernel.jit and kernel.id not in around.warmed and not setting("allow_jit"):
            reasons.append(Reason(Code.JIT_NOT_WARMED))
        if kernel.untested and not setting("allow_untested"):
            reasons.append(Reason(Code.UNTESTED_ON_HARDWARE))
    return reasons


def _repair(rule: Any, op: Op, facts: Mapping[str, Any]) -> Transform | None:
    if rule.repair == "contiguous":
        tensor = rule.fact.partition(".")[0]
        return Transform("contiguous", tensor, _tensor_bytes(op, tensor, facts))
    if rule.repair == "cast":
        total = sum(_tensor_bytes(op, t, facts) for t in op.same_dtype or (op.main_tensor,))
        return Transform("cast", str(rule.value[0]), total)
    return None


def _broken_by_view(rules: Iterable[Any], op: Op, facts: Mapping[str, Any], target: str) -> Iterator[Rule]:
    """Rules that hold for a tensor as it was given, and not for the view of it in another layout."""
    source = op.patterns[facts[op.variant]]
    for rule in rules:
        if isinstance(rule, Rule) and rule.fact.endswith(".contiguous") and facts[rule.fact] is not None:
            tensor = rule.fact.partition(".")[0]
            if source.get(tensor) != op.patterns[target].get(tensor):
                yield rule


def _tensor_bytes(op: Op, tensor: str, facts: Mapping[str, Any]) -> int:
    tokens = op.patterns[facts[op.variant] if op.variant else ""].get(tensor, ())
    total = facts["itemsize"]
    for token in tokens:
        total *= int(token) if token.isdigit() else facts[token.lstrip("*~")] or 1
    return int(total)


def _largest(op: Op, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the largest call that shares this call's key: its memory must fit too."""
    top = dict(facts)
    for dim in op.dims:
        if dim not in op.exact and top[dim] is not None:
            top[dim] = bucket_top(top[dim])
    for name, text in op.derived.items():
        top[name] = parse(text)(top)
    return top


def _rank(op: Op, fit: Sequence[tuple[Kernel, tuple[Transform, ...], int]], facts: Mapping[str, Any],
          around: Surroundings) -> tuple[Step, ...]:
    if not fit:
        return ()
    rates = around.rates
    roofline = roofline_us(op, facts, rates)
    guesses = {k.id: guess_us(k, roofline) for k, _, _ in fit}
    measured = {}
    if len(around.perf):
        bucket = bucket_of(op, facts)
        for kernel, _, _ in fit:
            if (m := around.perf.get(kernel.id, bucket, around.device_signature)) is not None:
                measured[kernel.id] = m
    scale = calibration(guesses, measured) if measured else 1.0
    steps = []
    for kernel, transforms, workspace in fit:
        boost = around.policy.boost(kernel.id, op.name, facts)
        worth = score(guesses[kernel.id] * scale, measured.get(kernel.id), transforms, boost, rates)
        steps.append(Step(kernel.id, worth, transforms, workspace, "untested on hardware" if kernel.untested else ""))
    steps.sort(key=lambda s: (s.score.total_us, s.kernel))
    return tuple(steps)

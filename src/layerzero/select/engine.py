"""policy -> filter -> score. A pure function: same arguments, same Plan; no I/O, no globals, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from ..perf.record import Kind, PerfView, Rates, kind_of, mode_of
from ..spec.expr import parse
from ..spec.grid import bucket_top
from ..spec.kernel import SDPA, Kernel
from ..spec.launch import SHARED
from ..spec.op import DEVICE_FACTS, Op
from ..spec.plan import DEFAULT, LESS_WORK, POLICY, PRIOR, SHIPPED, Plan, Rejected, Step, Transform
from ..spec.reason import Code, Reason
from ..spec.rules import Rule
from .policy import Policy
from .score import Found, calibration, guess_us, roofline_us, score
from .verdicts import Verdicts, compile_verdicts

UNSURE = 0.04                  # by how much, and again per octave, a neighbour or another machine may be wrong


class Shipped(NamedTuple):
    """Measurements that came with the package for this model of device."""

    view: PerfView = PerfView()
    title: str = ""


NOTHING_SHIPPED = Shipped()


@dataclass(frozen=True)
class Surroundings:
    """Everything a selection depends on besides the call itself."""

    policy: Policy
    device: Mapping[str, Any]                  # the device's facts
    place: str                                 # the device's signature and threads: where measurements must be from
    rates: Rates
    perf: PerfView = field(default_factory=PerfView)
    availability: Mapping[str, Reason] = field(default_factory=dict)   # kernel -> why it cannot be loaded
    health: Mapping[str, Reason] = field(default_factory=dict)         # health group -> why it is out
    warmed: Collection[Any] = frozenset()      # JIT kernels compiled already: for (kernel, kind), or all of a kernel
    certified: Collection[str] = frozenset()
    headroom: Callable[[], int] = lambda: 1 << 62
    captures: Callable[[], Mapping[str, bool]] = dict  # kernel -> could it be captured in a CUDA graph here? Tried ones
    shipped: Shipped = NOTHING_SHIPPED
    refused: Mapping[str, Mapping[str, Reason]] = field(default_factory=dict)  # kernel -> kind of call -> why not


@dataclass(frozen=True)
class Roster:
    """The kernels of an op that may ever serve on a device, and why the others may not."""

    viable: tuple[Kernel, ...]
    dynamic: Mapping[str, tuple[Any, ...]]     # kernel -> the rules that depend on the call
    rejected: tuple[Rejected, ...]

    @cached_property
    def fitting(self) -> Verdicts:
        """The indices of the viable kernels that a call breaks no rule of that a transform could not mend."""
        return compile_verdicts([[r for r in self.dynamic[k.id] if not r.repair] for k in self.viable])

    @cached_property
    def repairable(self) -> Mapping[str, tuple[Any, ...]]:
        return {k.id: tuple(r for r in self.dynamic[k.id] if r.repair) for k in self.viable}


def make_roster(kernels: Sequence[Kernel], around: Surroundings) -> Roster:
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


def select(op: Op, roster: Roster, facts: Mapping[str, Any], around: Surroundings, thorough: bool = False) -> Plan:
    """Rank the kernels that may serve. `thorough` also collects every reason of every other; no call waits for it."""
    policy = around.policy
    speaks = policy.concerns(op.name)
    lock = policy.lock(op.name, facts) if speaks else None
    asked = Demands.of(facts, around, lock is not None)
    rejected: list[Rejected] = []
    fit: list[tuple[Kernel, tuple[Transform, ...], int]] = []
    largest: dict[str, Any] = {}               # filled when first asked for
    lacking: list[int] = []                    # workspaces that nothing but memory stood against
    if thorough:
        for kernel in roster.viable:
            reasons, transforms, workspace = _judge(
                kernel, roster.dynamic[kernel.id], op, facts, around, asked, largest)
            if reasons:
                rejected.append(Rejected(kernel.id, tuple(reasons)))
            else:
                fit.append((kernel, transforms, workspace))
        rejected += roster.rejected
    else:
        for i in roster.fitting(facts):
            kernel = roster.viable[i]
            if asked.refuses(kernel) or (speaks and policy.verdict(kernel.id, op.name, facts) is not None):
                continue
            rules, moved = roster.repairable[kernel.id], _moved(kernel, op, facts)
            if not rules and not moved and kernel.workspace == "0" == kernel.shared_memory:
                fit.append((kernel, (), 0))
                continue
            reasons, transforms, workspace = _fitted(kernel, rules, op, facts, around, largest)
            if not reasons:
                fit.append((kernel, transforms, workspace))
            elif all(reason.code is Code.MEMORY_HEADROOM_EXCEEDED for reason in reasons):
                lacking.append(workspace)
    steps = _rank(op, fit, facts, around, speaks)
    return Plan(op.name, facts, steps, tuple(rejected), policy.hash, lock.origin if lock else "",
                lacking=min(lacking, default=0))


def _moved(kernel: Kernel, op: Op, facts: Mapping[str, Any]) -> bool:
    """Must the inputs be viewed in another layout?"""
    return bool(op.variant and kernel.variants and facts[op.variant] not in kernel.variants)


def _judge(kernel: Kernel, rules: tuple[Any, ...], op: Op, facts: Mapping[str, Any], around: Surroundings,
           asked: Demands, largest: dict[str, Any]) -> tuple[list[Reason], tuple[Transform, ...], int]:
    """Every reason against a kernel: policy, mode, its rules, the transforms it would need, memory."""
    reasons: list[Reason] = []
    denied = around.policy.verdict(kernel.id, op.name, facts)
    if denied is not None:
        reasons.append(denied)
    reasons += asked.reasons(kernel)
    reasons += [r for rule in rules if not rule.repair and (r := rule.check(facts)) is not None]
    more, transforms, workspace = _fitted(kernel, tuple(r for r in rules if r.repair), op, facts, around, largest)
    return [*reasons, *more], transforms, workspace


def _fitted(kernel: Kernel, repairable: tuple[Any, ...], op: Op, facts: Mapping[str, Any],
            around: Surroundings, largest: dict[str, Any]) -> tuple[list[Reason], tuple[Transform, ...], int]:
    """What the inputs must go through for this kernel, or why they may not; and the memory it needs."""
    policy = around.policy
    reasons: list[Reason] = []
    transforms: list[Transform] = []
    for rule in repairable:
        reason = rule.check(facts)
        if reason is None:
            continue
        transform = _repair(rule, op, facts)
        if transform is not None and transform.kind == "cast" and not policy.setting("allow_adaptation"):
            transform = None
        if transform is None:
            reasons.append(reason)
        elif policy.setting("strict_mode"):
            reasons += [reason, Reason(Code.STRICT_TRANSFORM_REFUSED, "strict_mode", str(transform))]
        else:
            transforms.append(transform)
    if _moved(kernel, op, facts):
        if policy.setting("strict_mode"):
            reasons.append(Reason(Code.LAYOUT_UNSUPPORTED, kernel.variants, facts[op.variant], op.variant))
        else:
            transforms.append(Transform("layout", kernel.variants[0]))   # a view: moves no bytes
            for rule in _broken_by_view(kernel.requires, op, facts, kernel.variants[0]):
                if (transform := _repair(rule, op, facts)) is not None:
                    transforms.append(transform)
                else:
                    reasons.append(Reason(rule.code, rule.want, False, rule.fact))
    workspace = 0
    if not largest and (kernel.workspace != "0" or kernel.shared_memory != "0"):
        largest.update(_largest(op, facts))
    if kernel.shared_memory != "0" and (reason := _lack_of_shared(kernel, largest)) is not None:
        reasons.append(reason)
    if kernel.workspace != "0":
        workspace = int(parse(kernel.workspace)(largest))
        if workspace and workspace > (room := around.headroom()):
            reasons.append(Reason(Code.MEMORY_HEADROOM_EXCEEDED, room, workspace))
    return reasons, tuple(dict.fromkeys(transforms)), workspace


def _lack_of_shared(kernel: Kernel, facts: Mapping[str, Any]) -> Reason | None:
    """A launch that the device would refuse. A number that was not given counts as 0."""
    room, needs = facts.get("shared_per_block"), parse(kernel.shared_memory)
    if not room:                               # not known of this device
        return None
    need = int(needs({name: facts[name] or 0 for name in needs.names}))
    return Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, f"<= {room}", need, SHARED) if need > room else None


def kind_to_compile(op: Op, facts: Mapping[str, Any]) -> str:
    """What a JIT kernel is warmed up for, as far as selection can tell calls apart."""
    return f"{facts['device']} {kind_of(op, facts).bucket}"


def is_warm(kernel: Kernel, facts: Mapping[str, Any], warmed: Collection[Any]) -> bool:
    return kernel.id in warmed or (bool(warmed) and (kernel.id, kind_to_compile(kernel.op, facts)) in warmed)


def _refused(facts: Mapping[str, Any], around: Surroundings, named: bool, kernel: Kernel) -> Reason | None:
    kinds = around.refused.get(kernel.id)
    found = kinds.get(kind_to_compile(kernel.op, facts)) if kinds else None
    if named and found is not None and found.code is Code.OUT_OF_MEMORY:
        return None                            # it may fit this time, and nobody else may serve
    return found


class Demands(NamedTuple):
    """What the mode of the call and the policy ask of every kernel."""

    grad: bool
    deterministic: bool
    graph: bool
    baseline: bool
    certified: Collection[str] | None          # None: certificates are not asked for
    jit: Callable[[Kernel], bool] | None       # is it warmed for this call? None: anything may compile
    tested: bool
    captures: Mapping[str, bool]               # which kernels a capture has shown to be safe, or not
    sdpa_backends: Collection[str] | None      # what torch.nn.attention.sdpa_kernel allows; None: everything
    refused: Callable[[Kernel], Reason | None]     # was it found unable to serve this kind of call?

    @classmethod
    def of(cls, facts: Mapping[str, Any], around: Surroundings, named: bool) -> Demands:
        settings = around.policy.settings
        graph = (facts["graph"] or settings["graph_strict_mode"]) and facts["device"] == "cuda"
        return cls(
            facts["grad"], facts["deterministic"] or settings["deterministic"], graph, settings["disabled"],
            around.certified if settings["require_certificates"] else None,
            None if named or settings["jit"] == "in_request" else lambda kernel: is_warm(kernel, facts, around.warmed),
            not (named or settings["allow_untested"]), around.captures() if graph else {},
            facts.get("sdpa_backends"), partial(_refused, facts, around, named))

    def refuses(self, kernel: Kernel) -> bool:
        return bool((self.grad and not kernel.differentiable)
                    or (self.deterministic and (not kernel.deterministic
                                                or (self.grad and not kernel.deterministic_backward)))
                    or (self.graph and self.uncapturable(kernel) is not None)
                    or (self.baseline and not kernel.baseline and kernel.backend != "reference")
                    or self.unproven(kernel)
                    or (kernel.jit and self.jit is not None and not self.jit(kernel))
                    or (self.tested and kernel.untested)
                    or self.switched_off(kernel) or self.refused(kernel) is not None)

    def switched_off(self, kernel: Kernel) -> bool:
        """Is it another implementation of attention than those the caller allows torch to use?"""
        return self.sdpa_backends is not None and kernel.sdpa_backend not in (SDPA, *self.sdpa_backends)

    def unproven(self, kernel: Kernel) -> bool:
        """The reference needs no proof: it is what the others are compared with."""
        return self.certified is not None and kernel.backend != "reference" and kernel.id not in self.certified

    def uncapturable(self, kernel: Kernel) -> str | None:
        """Why it may not be captured in a CUDA graph: what a capture has shown counts more than what is declared."""
        shown = self.captures.get(kernel.id)
        if shown is None:
            if self.certified is not None and kernel.backend != "reference":
                return "no capture has shown that it is, and policy demands proof; run lz verify for it"
            return None if kernel.graph_safe else "it is declared so"
        return None if shown else "a capture on this device failed"

    def reasons(self, kernel: Kernel) -> list[Reason]:
        if not self.refuses(kernel):
            return []
        uncapturable = self.uncapturable(kernel) if self.graph else None
        told = (
            (self.grad and not kernel.differentiable, Code.BACKWARD_UNSUPPORTED),
            (self.deterministic and (not kernel.deterministic or (self.grad and not kernel.deterministic_backward)),
             Code.NOT_DETERMINISTIC),
            (uncapturable is not None, Code.CUDA_GRAPH_UNSAFE),
            (self.baseline and not kernel.baseline and kernel.backend != "reference", Code.LZ_DISABLED),
            (self.unproven(kernel), Code.UNCERTIFIED),
            (kernel.jit and self.jit is not None and not self.jit(kernel), Code.JIT_NOT_WARMED),
            (self.tested and kernel.untested, Code.UNTESTED_ON_HARDWARE))
        reasons = [Reason(code, got=uncapturable if code is Code.CUDA_GRAPH_UNSAFE else None)
                   for holds, code in told if holds]
        if self.switched_off(kernel):
            own = kernel.sdpa_backend or "none of torch's implementations"
            reasons.append(Reason(Code.SDPA_BACKEND_DISABLED, own, tuple(self.sdpa_backends or ())))
        refused = self.refused(kernel)
        return reasons if refused is None else [*reasons, refused]


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
    whole = [p.name for p in op.params if p.kind == "int"]
    for name in (*op.dims, *whole):
        if name not in op.exact and top[name] is not None and top[name] > 0:
            top[name] = bucket_top(top[name])
    for name, text in op.derived.items():
        top[name] = None if any(top[n] is None for n in parse(text).names) else parse(text)(top)
    return top


Candidate = tuple[Kernel, tuple[Transform, ...], int]      # with what its inputs go through, and the memory it needs


def _rank(op: Op, fit: Sequence[Candidate], facts: Mapping[str, Any], around: Surroundings,
          speaks: bool) -> tuple[Step, ...]:
    """Numbers decide, and a guess never overrules torch: what torch itself would run is the default, and another
    kernel comes before it only with evidence (measured, shipped, less work by construction, asked for)."""
    if not fit:
        return ()
    rates = around.rates
    roofline = roofline_us(op, facts, rates)
    guesses = {k.id: guess_us(k, roofline) for k, _, _ in fit}
    default = min((k for k, _, _ in fit if k.baseline), key=lambda k: guesses[k.id], default=None)
    found = _numbers(op, fit, facts, around, roofline, default)
    scale = calibration(guesses, found.by_kernel) if found.by_kernel else 1.0
    steps = []
    for kernel, transforms, workspace in fit:
        boost = around.policy.boost(kernel.id, op.name, facts) if speaks else 1.0
        number = found.by_kernel.get(kernel.id)
        worth = score(guesses[kernel.id] * scale, number, transforms, boost, rates, mixed=default is None)
        if number is not None:
            if found.shipped:
                worth = worth._replace(source=SHIPPED, evidence=found.shipped)
            if kernel is not default and worth.distance + bool(found.shipped):
                worth = worth._replace(total_us=worth.total_us * (1.0 + UNSURE * (1.0 + worth.distance)))
        elif boost > 1.0:
            worth = worth._replace(source=POLICY)
        elif kernel is default:
            worth = worth._replace(source=DEFAULT)
        elif not found.by_kernel and kernel.does_less(facts):
            worth = worth._replace(source=LESS_WORK, evidence=kernel.less_work)
        steps.append(Step(kernel.id, worth, transforms, workspace, "untested on hardware" if kernel.untested else ""))
    own = {kernel.id for kernel, _, _ in fit if kernel.baseline}
    steps.sort(key=lambda s: (default is not None and s.score.source == PRIOR, s.score.total_us, s.kernel not in own,
                              s.kernel))
    return tuple(steps)


class Numbers(NamedTuple):
    """What is known of the candidates, all of it from one source: times of two machines are not compared."""

    by_kernel: Mapping[str, Found] = {}
    shipped: str = ""                          # the table they come from, where they came with the package


def _beside(view: PerfView, default: str, ids: Sequence[str], kind: Kind, around: Surroundings, roofline: float,
            mode: str) -> dict[str, Found]:
    """Estimates for a kind of call that was not measured: torch's own by its neighbours, each other kernel by how it
    stood beside torch's own at those same neighbours."""
    own = view.estimate(default, kind, around.place, around.rates, roofline, mode)
    if own is None:
        return {}
    near = view.near(default, kind, around.place, mode)
    ratios = ((k, view.relative(k, near)) for k in ids if k != default)
    return {default: own, **{k: own._replace(us=own.us * ratio) for k, ratio in ratios if ratio is not None}}


def _numbers(op: Op, fit: Sequence[Candidate], facts: Mapping[str, Any], around: Surroundings, roofline: float,
             default: Kernel | None) -> Numbers:
    """The best source that knows the default: this kind of call as measured here, as shipped, then neighbours."""
    if not around.perf and not around.shipped.view:
        return Numbers()
    kind, mode, place = kind_of(op, facts), mode_of(facts), around.place
    for near in (False, True):
        for view, table in ((around.perf, ""), (around.shipped.view, around.shipped.title)):
            if not view:
                continue
            ids = [kernel.id for kernel, _, _ in fit]
            found: dict[str, Found]
            if not near:
                found = {k: m for k in ids if (m := view.get(k, kind.bucket, place, mode)) is not None}
            elif default is None:
                found = {k: e for k in ids if (e := view.estimate(k, kind, place, around.rates, roofline, mode))}
            else:
                found = _beside(view, default.id, ids, kind, around, roofline, mode)
            if found and (default is None or default.id in found):
                return Numbers(found, table)
    return Numbers()

"""Selection: policy, then filter, then score.

`select` is a pure function: the same arguments give the same Plan; no I/O, no globals, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..perf.record import PerfView, Rates, kind_of
from ..spec.grid import bucket_top
from ..spec.kernel import SDPA, Kernel
from ..spec.op import DEVICE_FACTS, Op
from ..spec.plan import DEFAULT, LESS_WORK, POLICY, PRIOR, SHIPPED, Plan, Rejected, Step, Transform
from ..spec.reason import Code, Reason
from ..spec.rules import Rule
from ..spec.rules.expr import parse
from ..spec.rules.launch import SHARED
from .policy import Policy
from .score import calibration, guess_us, roofline_us, score
from .timings import timings_of
from .verdicts import Verdicts, compile_verdicts

UNCERTAINTY = 0.04     # relative error of a neighbour or another machine, and again per octave
Candidate = tuple[Kernel, tuple[Transform, ...], int]  # with its transforms and workspace in bytes


class Shipped(NamedTuple):
    """Measurements that came with the package for this model of device."""

    view: PerfView = PerfView()
    title: str = ""


NOTHING_SHIPPED = Shipped()


@dataclass(frozen=True)
class SelectionContext:
    """Everything that a selection depends on besides the call."""

    policy: Policy
    device: Mapping[str, Any]                  # the device's facts
    # signature and threads: measurements must be from there
    place: str
    rates: Rates
    perf: PerfView = field(default_factory=PerfView)
    # kernel -> why it cannot be loaded
    availability: Mapping[str, Reason] = field(default_factory=dict)
    # health group -> why it is out
    health: Mapping[str, Reason] = field(default_factory=dict)
    warmed: Collection[Any] = frozenset()      # compiled JIT kernels: (kernel, kind), or kernel
    certified: Collection[str] = frozenset()
    headroom: Callable[[], int] = lambda: 1 << 62
    captures: Callable[[], Mapping[str, bool]] = dict  # tried kernel -> did a CUDA graph capture it
    shipped: Shipped = NOTHING_SHIPPED
    # kernel -> kind of call -> why not
    refused: Mapping[str, Mapping[str, Reason]] = field(default_factory=dict)
    failed: Mapping[str, Reason] = field(default_factory=dict)     # kernel -> why verification did


@dataclass(frozen=True)
class Roster:
    """The kernels of an op that can serve on a device, and why the others cannot."""

    viable: tuple[Kernel, ...]
    dynamic: Mapping[str, tuple[Any, ...]]     # kernel -> the rules that depend on the call
    rejected: tuple[Rejected, ...]

    # Fields and not cached properties: before Python 3.12 those take one lock for all rosters of
    # the process.
    #
    # indices of the viable kernels that a call suits, repairs aside
    fitting: Verdicts
    # kernel -> the rules that a transform of the inputs can satisfy
    repairable: Mapping[str, tuple[Any, ...]]


def make_roster(kernels: Sequence[Kernel], context: SelectionContext) -> Roster:
    """Decide once per device what no call changes: libraries, health, rules on the device alone."""
    viable, dynamic, rejected = [], {}, []
    for kernel in kernels:
        reasons = list(_outages(kernel, context))
        rules = []
        for rule in kernel.requires:
            if not all(leaf.fact in DEVICE_FACTS for leaf in rule.leaves()):
                rules.append(rule)
            # a CPU's "sm" says nothing
            elif not any(r.code is Code.PLATFORM_MISMATCH for r in reasons):
                reason = rule.check(context.device)
                if reason is not None:
                    reasons.append(reason)
        if reasons:
            rejected.append(Rejected(kernel.id, tuple(reasons)))
        else:
            viable.append(kernel)
            dynamic[kernel.id] = tuple(rules)
    fitting = compile_verdicts([[r for r in dynamic[k.id] if not r.repair] for k in viable])
    repairable = {k.id: tuple(r for r in dynamic[k.id] if r.repair) for k in viable}
    return Roster(tuple(viable), dynamic, tuple(rejected), fitting, repairable)


def _outages(kernel: Kernel, context: SelectionContext) -> Sequence[Reason]:
    health = context.health
    reasons = (context.availability.get(kernel.id), health.get(kernel.health),
               health.get(kernel.id))
    return list(dict.fromkeys(reason for reason in reasons if reason is not None))


def select(op: Op, roster: Roster, facts: Mapping[str, Any], context: SelectionContext,
           thorough: bool = False) -> Plan:
    """Rank the kernels that can serve the call. `thorough` also collects every reason against every
    other kernel; no call waits for that."""
    policy = context.policy
    has_rules = policy.has_rules_for(op.name)
    lock = policy.lock(op.name, facts) if has_rules else None
    demands = Demands.of(facts, context, lock is not None)
    rejected: list[Rejected] = []
    fit: list[Candidate] = []
    largest: dict[str, Any] = {}               # filled by _fitted when needed
    refused: list[int] = []                    # workspaces of kernels that only memory kept out
    if thorough:
        for kernel in roster.viable:
            reasons, transforms, workspace = _judge(
                kernel, roster.dynamic[kernel.id], op, facts, context, demands, largest)
            if reasons:
                rejected.append(Rejected(kernel.id, tuple(reasons)))
            else:
                fit.append((kernel, transforms, workspace))
        rejected += roster.rejected
    else:
        for i in roster.fitting(facts):
            kernel = roster.viable[i]
            if (demands.refuses(kernel)
                or (has_rules and policy.verdict(kernel.id, op.name, facts) is not None)):
                continue
            rules = roster.repairable[kernel.id]
            if (not rules and not _needs_layout(kernel, op, facts)
                and kernel.workspace == "0" == kernel.shared_memory):
                fit.append((kernel, (), 0))
                continue
            reasons, transforms, workspace = _fitted(kernel, rules, op, facts, context, largest)
            if not reasons:
                fit.append((kernel, transforms, workspace))
            elif all(reason.code is Code.MEMORY_HEADROOM_EXCEEDED for reason in reasons):
                refused.append(workspace)
    steps = _rank(op, fit, facts, context, has_rules)
    return Plan(op.name, facts, steps, tuple(rejected), policy.hash, lock.origin if lock else "",
                refused_workspace=min(refused, default=0))


def _needs_layout(kernel: Kernel, op: Op, facts: Mapping[str, Any]) -> bool:
    """Returns whether the inputs must be viewed in another layout."""
    return bool(op.variant and kernel.variants and facts[op.variant] not in kernel.variants)


def _judge(kernel: Kernel, rules: tuple[Any, ...], op: Op, facts: Mapping[str, Any],
           context: SelectionContext, demands: Demands,
           largest: dict[str, Any]) -> tuple[list[Reason], tuple[Transform, ...], int]:
    """Returns all reasons against a kernel, its transforms and its workspace in bytes."""
    reasons: list[Reason] = []
    denied = context.policy.verdict(kernel.id, op.name, facts)
    if denied is not None:
        reasons.append(denied)
    reasons += demands.reasons(kernel)
    reasons += op.reasons((rule for rule in rules if not rule.repair), facts)
    unfit, transforms, workspace = _fitted(kernel, tuple(r for r in rules if r.repair), op, facts,
                                           context, largest)
    return [*reasons, *unfit], transforms, workspace


def _fitted(
    kernel: Kernel, repairable: tuple[Any, ...], op: Op, facts: Mapping[str, Any],
    context: SelectionContext, largest: dict[str, Any],
) -> tuple[list[Reason], tuple[Transform, ...], int]:
    """Returns reasons against a kernel's transforms, these transforms, and its workspace."""
    policy = context.policy
    reasons: list[Reason] = []
    transforms: list[Transform] = []
    for rule in repairable:
        reason = rule.check(facts)
        if reason is None:
            continue
        transform = _repair(rule, op, facts)
        if (transform is not None and transform.kind == "cast"
            and not policy.setting("allow_adaptation")):
            transform = None
        if transform is None:
            reasons.append(reason)
        elif policy.setting("strict_mode"):
            reasons += [reason, Reason(Code.STRICT_TRANSFORM_REFUSED, "strict_mode",
                                       str(transform))]
        else:
            transforms.append(transform)
    if _needs_layout(kernel, op, facts):
        if policy.setting("strict_mode"):
            reasons.append(Reason(Code.LAYOUT_UNSUPPORTED, kernel.variants, facts[op.variant],
                                  op.variant))
        else:
            transforms.append(Transform("layout", kernel.variants[0]))   # a view moves no bytes
            for rule in _broken_by_view(kernel.requires, op, facts, kernel.variants[0]):
                if (transform := _repair(rule, op, facts)) is not None:
                    transforms.append(transform)
                else:
                    reasons.append(Reason(rule.code, rule.want, False, rule.fact))
    workspace = 0
    if not largest and (kernel.workspace != "0" or kernel.shared_memory != "0"):
        largest.update(_largest(op, facts))
    if (kernel.shared_memory != "0"
        and (reason := _shared_memory_reason(kernel, largest)) is not None):
        reasons.append(reason)
    if kernel.workspace != "0":
        workspace = int(parse(kernel.workspace)(largest))
        if workspace and workspace > (available := context.headroom()):
            reasons.append(Reason(Code.MEMORY_HEADROOM_EXCEEDED, available, workspace))
    return reasons, tuple(dict.fromkeys(transforms)), workspace


def _shared_memory_reason(kernel: Kernel, facts: Mapping[str, Any]) -> Reason | None:
    """Returns why a launch would exceed the device's shared memory, if so; absent is 0."""
    available, needs = facts.get("shared_per_block"), parse(kernel.shared_memory)
    if not available:                          # unknown for this device
        return None
    need = int(needs({name: facts[name] or 0 for name in needs.names}))
    return (None if need <= available
            else Reason(Code.CUDA_BLOCK_LIMIT_EXCEEDED, f"<= {available}", need, SHARED))


def kind_to_compile(op: Op, facts: Mapping[str, Any]) -> str:
    """Returns the kind of call that a JIT kernel is compiled for, as selection tells them."""
    return f"{facts['device']} {kind_of(op, facts).bucket}"


def is_warm(kernel: Kernel, facts: Mapping[str, Any], warmed: Collection[Any]) -> bool:
    return (kernel.id in warmed
            or (bool(warmed) and (kernel.id, kind_to_compile(kernel.op, facts)) in warmed))


def _refused(facts: Mapping[str, Any], context: SelectionContext, named: bool,
             kernel: Kernel) -> Reason | None:
    kinds = context.refused.get(kernel.id)
    reason = kinds.get(kind_to_compile(kernel.op, facts)) if kinds else None
    if named and reason is not None and reason.code is Code.OUT_OF_MEMORY:
        return None                            # it may fit this time, and no other may serve
    return reason


INVARIANCES = ("batch_invariant", "batch"), ("tp_invariant", "tp")     # settings
INVARIANCE_CODES = {"batch_invariant": Code.BATCH_INVARIANCE_REQUIRED,
                    "tp_invariant": Code.TP_INVARIANCE_REQUIRED}


def compiles_in_request(kernel: Kernel, settings: Mapping[str, Any]) -> bool:
    """Returns whether a kernel may compile within a call: where policy says so, and where it keeps
    bits that must stay, since a choice that waits until a size was compiled would change them."""
    return (settings["jit"] == "in_request"
            or (kernel.batch_invariant and settings["batch_invariant"])
            or (kernel.tp_invariant and settings["tp_invariant"]))


def _is_invariant(to: str, facts: Mapping[str, Any], kernel: Kernel) -> bool:
    return kernel.is_invariant(to, facts)


class Demands(NamedTuple):
    """The demands of mode and policy on every kernel."""

    grad: bool
    device: str
    deterministic: bool
    graph: bool
    invariant: tuple[tuple[str, Callable[[Kernel], bool]], ...]    # the setting; does it hold?
    named: bool
    baseline: bool
    certified: Collection[str] | None          # None: no certificates are demanded
    jit: Callable[[Kernel], bool] | None       # is it compiled for this call? None: any may compile
    tested: bool
    captures: Mapping[str, bool]               # tried kernel -> whether a capture succeeded
    # what torch.nn.attention.sdpa_kernel allows; None: everything
    sdpa_backends: Collection[str] | None
    refused: Callable[[Kernel], Reason | None]     # why it cannot serve this kind of call, if known
    failed: Mapping[str, Reason]               # kernels that failed verification, unless named

    @classmethod
    def of(cls, facts: Mapping[str, Any], context: SelectionContext, named: bool) -> Demands:
        settings = context.policy.settings
        graph = (facts["graph"] or settings["graph_strict_mode"]) and facts["device"] == "cuda"
        invariant = tuple((name, partial(_is_invariant, to, facts)) for name, to in INVARIANCES
                          if settings[name])
        return cls(
            facts["grad"], facts["device"], facts["deterministic"] or settings["deterministic"],
            graph, invariant, named, settings["disabled"],
            context.certified if settings["require_certificates"] else None,
            None if named else lambda kernel: (compiles_in_request(kernel, settings)
                                               or is_warm(kernel, facts, context.warmed)),
            not (named or settings["allow_untested"]), context.captures() if graph else {},
            facts.get("sdpa_backends"), partial(_refused, facts, context, named),
            {} if named else context.failed)

    def refuses(self, kernel: Kernel) -> bool:
        return bool((self.grad and not kernel.differentiable)
                    or (self.deterministic and not self._repeats(kernel))
                    or (self.graph and self.uncapturable(kernel) is not None)
                    or any(not holds(kernel) for _, holds in self.invariant)
                    or (kernel.only_invariant and not self.invariant and not self.named)
                    or (self.baseline and not kernel.baseline and kernel.backend != "reference")
                    or self.unproven(kernel)
                    or (kernel.jit and self.jit is not None and not self.jit(kernel))
                    or (self.tested and kernel.untested)
                    or self.switched_off(kernel) or self.refused(kernel) is not None
                    or kernel.id in self.failed)

    def _repeats(self, kernel: Kernel) -> bool:
        """Returns whether it gives the same bits every time, in the backward pass too."""
        return kernel.deterministic and not (self.grad and not kernel.backward_repeats(self.device))

    def switched_off(self, kernel: Kernel) -> bool:
        """Returns whether torch.nn.attention.sdpa_kernel excludes this implementation."""
        return (self.sdpa_backends is not None
                and kernel.sdpa_backend not in (SDPA, *self.sdpa_backends))

    def unproven(self, kernel: Kernel) -> bool:
        """Returns whether it lacks a certificate; the reference needs none."""
        return (self.certified is not None and kernel.backend != "reference"
                and kernel.id not in self.certified)

    def uncapturable(self, kernel: Kernel) -> str | None:
        """Returns why it may not be captured in a CUDA graph; a tried capture decides."""
        captured = self.captures.get(kernel.id)
        if captured is None:
            if self.certified is not None and kernel.backend != "reference":
                return ("no capture has shown that it is, and policy demands proof; run lz verify "
                        "for it")
            return None if kernel.graph_safe else "it is declared so"
        return None if captured else "a capture on this device failed"

    def reasons(self, kernel: Kernel) -> list[Reason]:
        if not self.refuses(kernel):
            return []
        uncapturable = self.uncapturable(kernel) if self.graph else None
        checks = (
            (self.grad and not kernel.differentiable, Code.BACKWARD_UNSUPPORTED),
            (self.deterministic and not self._repeats(kernel), Code.NOT_DETERMINISTIC),
            (uncapturable is not None, Code.CUDA_GRAPH_UNSAFE),
            (self.baseline and not kernel.baseline and kernel.backend != "reference",
             Code.LZ_DISABLED),
            (self.unproven(kernel), Code.UNCERTIFIED),
            (kernel.jit and self.jit is not None and not self.jit(kernel), Code.JIT_NOT_WARMED),
            (self.tested and kernel.untested, Code.UNTESTED_ON_HARDWARE))
        reasons = [Reason(code, got=uncapturable if code is Code.CUDA_GRAPH_UNSAFE else None)
                   for failed, code in checks if failed]
        if self.switched_off(kernel):
            own = kernel.sdpa_backend or "none of torch's implementations"
            reasons.append(Reason(Code.SDPA_BACKEND_DISABLED, own, tuple(self.sdpa_backends or ())))
        reasons += [Reason(INVARIANCE_CODES[name], name) for name, holds in self.invariant
                    if not holds(kernel)]
        if kernel.only_invariant and not self.invariant and not self.named:
            reasons.append(Reason(Code.INVARIANCE_NOT_REQUIRED, "batch_invariant"))
        others = (self.refused(kernel), self.failed.get(kernel.id))
        return [*reasons, *(reason for reason in others if reason is not None)]


def _repair(rule: Any, op: Op, facts: Mapping[str, Any]) -> Transform | None:
    if rule.repair == "contiguous":
        tensor = rule.fact.partition(".")[0]
        return Transform("contiguous", tensor, _tensor_bytes(op, tensor, facts))
    if rule.repair == "cast":
        total = sum(_tensor_bytes(op, t, facts) for t in op.same_dtype or (op.main_tensor,))
        return Transform("cast", str(rule.value[0]), total)
    return None


def _broken_by_view(rules: Iterable[Any], op: Op, facts: Mapping[str, Any],
                    target: str) -> Iterator[Rule]:
    """Yields rules that hold for a tensor as passed, but not for its view in another layout."""
    source = op.patterns[facts[op.variant]]
    for rule in rules:
        if (isinstance(rule, Rule) and rule.fact.endswith(".contiguous")
            and facts[rule.fact] is not None):
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
    """Returns the facts of the largest call with this call's key: its memory must fit too."""
    top = dict(facts)
    integers = [p.name for p in op.params if p.kind == "int"]
    for name in (*op.dims, *integers):
        if name not in op.exact and top[name] is not None and top[name] > 0:
            top[name] = bucket_top(top[name])
    for name, text in op.derived.items():
        top[name] = None if any(top[n] is None for n in parse(text).names) else parse(text)(top)
    return top


def _rank(op: Op, fit: Sequence[Candidate], facts: Mapping[str, Any], context: SelectionContext,
          has_rules: bool) -> tuple[Step, ...]:
    """Order the candidates by expected time, where a guess never overrules torch.

    The kernel that torch itself would run is the default. Another one comes before it only with
    evidence: measured, shipped, less work by construction, or preferred by the policy.
    """
    if not fit:
        return ()
    rates = context.rates
    roofline = roofline_us(op, facts, rates)
    guesses = {k.id: guess_us(k, roofline) for k, _, _ in fit}
    default = min((k for k, _, _ in fit if k.baseline), key=lambda k: guesses[k.id], default=None)
    timings = timings_of(op, [k.id for k, _, _ in fit], facts, context, roofline, default)
    scale = calibration(guesses, timings.by_kernel) if timings.by_kernel else 1.0
    steps = []
    for kernel, transforms, workspace in fit:
        boost = context.policy.boost(kernel.id, op.name, facts) if has_rules else 1.0
        timing = timings.by_kernel.get(kernel.id)
        expected = score(guesses[kernel.id] * scale, timing, transforms, boost, rates,
                         mixed=default is None)
        if timing is not None:
            if timings.shipped:
                expected = expected._replace(source=SHIPPED, evidence=timings.shipped)
            elif timings.note:
                expected = expected._replace(evidence=timings.note)
            if kernel is not default and expected.distance + bool(timings.shipped):
                factor = 1.0 + UNCERTAINTY * (1.0 + expected.distance)
                expected = expected._replace(total_us=expected.total_us * factor)
        elif boost > 1.0:
            expected = expected._replace(source=POLICY)
        elif kernel is default:
            expected = expected._replace(source=DEFAULT)
        elif not timings.by_kernel and kernel.does_less(facts):
            expected = expected._replace(source=LESS_WORK, evidence=kernel.less_work)
        note = "untested on hardware" if kernel.untested else ""
        steps.append(Step(kernel.id, expected, transforms, workspace, note))
    if any(context.policy.setting(name) for name, _ in INVARIANCES):
        return _fixed_order(op, fit, facts, context, steps)
    own = {kernel.id for kernel, _, _ in fit if kernel.baseline}
    steps.sort(key=lambda s: (default is not None and s.score.source == PRIOR, s.score.total_us,
                              s.kernel not in own,
                              s.kernel))
    return tuple(steps)


def _fixed_order(op: Op, fit: Sequence[Candidate], facts: Mapping[str, Any],
                 context: SelectionContext, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Order invariant kernels by what they declare, not by what was measured: the fastest one for a
    batch may be another than for one row, and give other bits."""
    rank = {k.id: (-k.prior * context.policy.boost(k.id, op.name, facts), k.id) for k, _, _ in fit}
    return tuple(sorted(steps, key=lambda step: rank[step.kernel]))

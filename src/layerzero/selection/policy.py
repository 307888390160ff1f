"""The user's decisions: settings, and rules that lock, allow, deny or boost kernels.

Pure data: nothing here reads a file, the environment or a clock. A `Policy` is a stack of layers;
for a setting the highest layer that has it decides, for a kernel the highest layer with an opinion.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from ..spec.codec import Record, decode
from ..spec.errors import DataError, PolicyValidationError, warn_caller
from ..spec.names import OpOfKernel, kernel_patterns, suggest, unknown_kernel
from ..spec.reason import Code, Reason, shown
from ..spec.rules import Facts, Rule
from . import isolation
from .conditions import Like, Test, matches_any, parse_when

LAYERS = ("call", "context", "programmatic", "environment", "file", "default")   # highest first
ACTIONS = ("lock", "allow", "deny", "boost")
ALWAYS = ("reference.*",)                      # an allow list keeps these: a fallback must remain
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
JIT_MODES = ("background", "never", "in_request")
REDACTIONS = ("paths", "shapes", "texts")


class Setting(NamedTuple):
    """A setting whose default is None may be set to None."""

    type: type
    default: Any
    doc: str


SETTINGS: Mapping[str, Setting] = MappingProxyType({
    "strict_mode": Setting(bool, False,
                           "refuse every implicit transform, even a copy to make a tensor "
                           "contiguous"),
    "allow_adaptation": Setting(bool, False,
                                "also allow casts to a dtype a kernel takes; strict_mode wins over "
                                "it"),
    "deterministic": Setting(bool, False, "only kernels that give the same bits every time"),
    "batch_invariant": Setting(bool, False, "only kernels with which a row's result does not "
                               "depend on its neighbours; see docs/distributed.md"),
    "tp_invariant": Setting(bool, False, "only kernels with which a head's or a column's result "
                            "does not depend on how many ranks share the work"),
    "graph_strict_mode": Setting(bool, False, "on CUDA, only kernels that may be captured in a "
                                              "graph"),
    "require_certificates": Setting(bool, False, "only kernels verified on this machine with these "
                                                 "versions"),
    "jit": Setting(str, "background", "when a kernel that must be compiled first is: in the "
                   "background while another serves, never (but by lz.warmup and lz.tune), or "
                   "in_request, which waits for it"),
    "allow_untested": Setting(bool, False, "kernels never run on their hardware may be chosen"),
    "disabled": Setting(bool, False, "call torch's default only"),
    "memory_headroom": Setting(int, None, "bytes a kernel's workspace may take; none: the device's "
                                          "free memory, live"),
    "memory_headroom_fraction": Setting(float, 0.9, "how much of the live free memory a workspace "
                                                    "may take"),
    "protect_inputs": Setting(bool, False, "look at the inputs of every call: a kernel that writes "
                              "into them and then fails is noticed even where torch does not count "
                              "the write; a pass over the inputs"),
    "shipped_measurements": Setting(bool, True, "use what was measured on this model of device and "
                                    "came with the package, until something was measured here"),
    "learn": Setting(bool, False, "calls of a kind that was not measured here are served by the "
                     "kernels that may serve it in turn and timed, until it is clear which is "
                     "fastest; see docs/learning.md"),
    "call_timeout": Setting(float, None, "seconds that a call without gradients may take; then it "
                            "raises, and its kernel is left out. Such calls run on a thread of "
                            "their own; none: as long as it takes"),
    "isolation": Setting(str, "", "kernels that run in a worker process: a list of PATTERN=worker, "
                         "or =auto for only where the library conflicts with this process, each "
                         "with :PYTHON for another interpreter; see docs/isolation.md"),
    "isolation_timeout": Setting(float, 30.0, "seconds that a call in a worker may take; then the "
                                 "worker is killed and the next kernel serves"),
    "isolation_memory": Setting(int, None, "bytes a worker may share with this process, and again "
                                "use itself; none: half of the machine's memory"),
    "isolation_workers": Setting(int, 1, "processes per library: so many calls run at once"),
    "cache_size": Setting(int, 4096, "remembered choices per op"),
    "cache_ttl": Setting(float, None, "seconds after which a remembered choice is made anew; none: "
                                      "never"),
    "breaker_threshold": Setting(int, 3, "faults in a row after which a kernel is left out, and "
                                 "the fewest that count as a rate"),
    "breaker_rate": Setting(float, 0.05, "share of its last calls that must fail for a kernel to "
                                         "be left out"),
    "breaker_window": Setting(int, 200, "how many calls of a kernel are its last ones"),
    "breaker_cooldown": Setting(float, 30.0, "seconds until a kernel that is left out is tried "
                                             "again"),
    "native": Setting(bool, True, "use the compiled call path where it is built; read from the "
                                  "environment at import"),
    "log_level": Setting(str, "warning", f"how much is logged: {', '.join(LOG_LEVELS)}"),
    "redact": Setting(str, "", "what events, logs, spans, /ready and bundles do not say: "
                      f"{', '.join(REDACTIONS)}, or several of them; see docs/production.md"),
    "perfdb": Setting(str, "", "where measurements are kept: a file, postgresql://... for a fleet, "
                      "or off; empty: perf.sqlite in the cache folder"),
    "perfdb_ttl": Setting(float, 0.0, "days after which a measurement counts no more; 0: never"),
    "policy_poll": Setting(float, 1.0, "seconds between looks at the policy file; 0: never"),
})

_LIMITS: Mapping[str, tuple[float, float]] = {
    "memory_headroom": (0, math.inf), "memory_headroom_fraction": (0, 1),
    "cache_size": (1, math.inf), "cache_ttl": (0, math.inf), "call_timeout": (0.001, 1e9),
    "isolation_timeout": (0.001, 1e9), "isolation_memory": (1, math.inf),
    "isolation_workers": (1, 64), "breaker_threshold": (1, math.inf), "breaker_rate": (0, 1),
    "breaker_window": (1, 1 << 20), "breaker_cooldown": (0, math.inf), "policy_poll": (0, math.inf),
    "perfdb_ttl": (0, math.inf)}
_CHOICES: Mapping[str, tuple[str, ...]] = {"log_level": LOG_LEVELS, "jit": JIT_MODES}
RENAMED: Mapping[str, str] = {"allow_jit": "jit"}          # old name of a setting -> new name
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False,
          "off": False}
_ACCEPTED_TYPES: Mapping[type, tuple[type, ...]] = {int: (int, str), float: (float, int, str),
                                                    str: (str,)}
_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def validate_setting(name: str, value: Any) -> Any:
    """Converts a value to the type of the setting; text is parsed like an environment variable."""
    if name in RENAMED:
        return validate_setting(RENAMED[name], _convert_allow_jit(name, value))
    if name not in SETTINGS:
        raise PolicyValidationError(f"unknown setting {shown(name)}{suggest(str(name), SETTINGS)}")
    kind, default, _ = SETTINGS[name]
    if (default is None
        and (value is None
             or (isinstance(value, str) and value.strip().lower() in ("none", "null")))):
        return None
    try:
        return _coerce(name, kind, value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise PolicyValidationError(
            f"{name} must be {_describe(name)}, got {shown(value)}") from None


def _convert_allow_jit(name: str, value: Any) -> str:
    """Returns the value of `jit` for the old setting `allow_jit`, true or false."""
    if isinstance(value, str) and value in JIT_MODES:      # converted before
        return value
    allowed = _BOOLS.get(shown(value, str).strip().lower())
    if allowed is None:
        raise PolicyValidationError(
            f"{name} must be true or false, got {shown(value)}; it is deprecated: write jit: "
            "in_request for true, jit: never for false")
    new = "in_request" if allowed else "never"
    warn_caller(
        f"the setting {name} is deprecated; write jit: {new} for {str(allowed).lower()}, or leave "
        "it out: kernels are compiled in the background then", DeprecationWarning)
    return new


def _coerce(name: str, kind: type, value: Any) -> Any:
    if kind is bool:
        return _BOOLS[shown(value, str).strip().lower()]
    if name == "perfdb" and value is False:    # what YAML makes of a bare off
        return "off"
    if name == "isolation":
        return isolation.canonical(value)
    if name == "redact":
        words = (value.replace(",", " ").split() if isinstance(value, str)
                 else [str(word).strip() for word in value])
        return ",".join(REDACTIONS[i]
                        for i in sorted({REDACTIONS.index(word.lower()) for word in words}))
    if isinstance(value, bool) or not isinstance(value, _ACCEPTED_TYPES[kind]):
        raise TypeError
    if kind is str:
        choices = _CHOICES.get(name)
        return value if choices is None else choices[choices.index(str(value).strip().lower())]
    low, high = _LIMITS[name]
    number = kind(value)
    if not low <= number <= high or not math.isfinite(number):
        raise ValueError
    return number


def _describe(name: str) -> str:
    kind, default, _ = SETTINGS[name]
    text = f"one of {', '.join(_CHOICES[name])}" if name in _CHOICES else _TYPE_WORDS[kind]
    if name == "redact":
        text = f"a list of {', '.join(REDACTIONS)}, or empty"
    if name == "isolation":
        text = "a list of PATTERN=worker or PATTERN=auto, each with :PYTHON or not"
    if name in _LIMITS:
        low, high = _LIMITS[name]
        text += f" from {low} to {high}" if math.isfinite(high) else f" >= {low}"
    return text + " or none" if default is None else text


# Rules

# characters of a pattern: matching a longer one can take seconds
_LONGEST = 200
_PATTERN = re.compile(rf"[a-z0-9_.*?!\[\]-]{{1,{_LONGEST}}}")


def _is_valid(pattern: str) -> bool:
    return bool(_PATTERN.fullmatch(pattern)) and ("!" not in pattern or "[" in pattern)


def _listed(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class PolicyRule(Record, omit="expires_at", whole=True):
    """One decision about some kernels, for some ops, under some conditions."""

    action: str
    kernels: tuple[str, ...]                   # fnmatch patterns over kernel ids, from any names
    ops: tuple[str, ...] = ("*",)              # fnmatch patterns over op names
    when: tuple[Test, ...] = ()
    factor: float = 1.0                        # of a boost: expected time is divided by it
    origin: str = "policy"                     # where it was written, for messages
    expires_at: float | None = None            # time.monotonic()

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise PolicyValidationError(
                f"unknown action {shown(self.action)}{suggest(shown(self.action, str), ACTIONS)}")
        for what, names in (("kernel", self.kernels), ("op", self.ops)):
            if not names:
                raise PolicyValidationError(
                    f"{self.action} names no {what}; give at least one pattern")
            for name in names:
                if not isinstance(name, str) or not all(map(_is_valid, (
                        kernel_patterns(name) if what == "kernel" else (name,)))):
                    raise PolicyValidationError(
                        f"{self.action}: a {what} pattern has a-z 0-9 _ . * ? [ ] only, at most "
                        f"{_LONGEST} of them, got {shown(name)}")
        object.__setattr__(self, "kernels", tuple(
            pattern for name in self.kernels for pattern in kernel_patterns(name)))
        if not all(isinstance(test, (Rule, Like)) for test in self.when):
            raise PolicyValidationError(
                f"{self.action}: when takes single rules; build it with parse_when")
        for test in self.when:
            words = (test.fact, *test.patterns) if isinstance(test, Like) else (test.fact,)
            if not all(isinstance(word, str) for word in words):
                raise PolicyValidationError(
                    f"{self.action}: a condition has a fact and patterns that are text, got "
                    f"{test!r}")
        try:
            factor = float(self.factor)
            if not 0 < factor < math.inf or isinstance(self.factor, (str, bool)):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise PolicyValidationError(
                f"boost: the factor must be a number > 0, got {shown(self.factor)}") from None
        if self.action != "boost" and factor != 1.0:
            raise PolicyValidationError(f"{self.action} takes no factor; only boost does")
        object.__setattr__(self, "factor", factor)

    @classmethod
    def of(cls, action: str, kernels: str | Iterable[str], ops: str | Iterable[str] = "*",
           when: Mapping[str, Any] | None = None, **rest: Any) -> PolicyRule:
        """Build a rule from one pattern or several, with conditions as `parse_when` takes them."""
        return cls(action, _listed(kernels), _listed(ops), parse_when(when or {}), **rest)

    def applies_to(self, op: str) -> bool:
        return matches_any(self.ops, op)

    def covers(self, kernel_id: str) -> bool:
        return matches_any(self.kernels, kernel_id)

    def holds(self, facts: Facts) -> bool:
        """Returns whether all conditions hold; not on a fact that is absent or mistyped."""
        try:
            return all(test.fact in facts and test.check(facts) is None for test in self.when)
        except TypeError:
            return False

    def matches(self, op: str, facts: Facts) -> bool:
        return self.applies_to(op) and self.holds(facts)

    def check(self, ops: Mapping[str, Collection[str]]) -> None:
        """Raise for an op pattern or fact unknown to `ops` (name -> facts), a likely typo."""
        for pattern in self.ops:
            if not any(fnmatchcase(op, pattern) for op in ops):
                raise PolicyValidationError(
                    f"{self.action}: no op matches {pattern!r}{suggest(pattern, ops)}")
        facts = {fact for op, names in ops.items() if self.applies_to(op) for fact in names}
        for test in self.when:
            if test.fact not in facts:
                raise PolicyValidationError(
                    f"{self.action}: no op of {', '.join(self.ops)} has the fact "
                    f"{test.fact!r}{suggest(test.fact, facts)}")

    def unknown_kernels(self, kernels: OpOfKernel) -> Iterator[str]:
        """Yields a sentence with near names for each pattern that no kernel of its ops matches."""
        for pattern in self.kernels:
            if not any(fnmatchcase(k, pattern) and self.applies_to(op)
                       for k, op in kernels.items()):
                yield unknown_kernel(pattern, kernels, self.ops[0] if len(self.ops) == 1 else "*")

    def __str__(self) -> str:
        text = f"{self.action} {', '.join(self.kernels)}"
        text += f" x{self.factor:g}" if self.action == "boost" else ""
        text += f" for {', '.join(self.ops)}" if self.ops != ("*",) else ""
        return text + (f" when {' and '.join(map(str, self.when))}" if self.when else "")

    @classmethod
    def from_json(cls, data: Any, what: str = "policy rule") -> PolicyRule:
        try:
            return decode(cls, data, what)
        except DataError as e:
            raise PolicyValidationError(str(e)) from e


@dataclass(frozen=True)
class Layer(Record, json="name settings rules expires_at", omit="expires_at"):
    """The settings and rules from one source, perhaps only until a deadline."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rules: tuple[PolicyRule, ...] = ()
    expires_at: float | None = None            # time.monotonic()
    before: Layer | None = None                # the layer that is in force again after that

    def __post_init__(self) -> None:
        if self.name not in LAYERS:
            raise PolicyValidationError(
                f"unknown policy layer {self.name!r}{suggest(str(self.name), LAYERS)}")
        settings = {RENAMED.get(name, name): validate_setting(name, value) for name, value in
                    # the new name wins
                    sorted(self.settings.items(), key=lambda item: item[0] not in RENAMED)}
        object.__setattr__(self, "settings", MappingProxyType(settings))
        object.__setattr__(self, "rules", tuple(self.rules))

    def __bool__(self) -> bool:
        return bool(self.settings or self.rules)

    def at(self, now: float) -> Layer | None:
        """Returns the layer at `now`, without what has expired; None if nothing is left."""
        if self.expires_at is not None and now >= self.expires_at:
            return self.before.at(now) if self.before is not None else None
        return self.keep_rules(lambda rule: rule.expires_at is None or now < rule.expires_at)

    def keep_rules(self, keep: Callable[[PolicyRule], bool]) -> Layer:
        """Returns the layer, and those in `before`, with only the rules that `keep` accepts."""
        return replace(self, rules=tuple(filter(keep, self.rules)),
                       before=self.before.keep_rules(keep) if self.before is not None else None)


class _View(NamedTuple):
    """The rules of one layer for one op, by action."""

    lock: tuple[PolicyRule, ...]
    allow: tuple[PolicyRule, ...]
    deny: tuple[PolicyRule, ...]
    boost: tuple[PolicyRule, ...]


@dataclass(frozen=True)
class Policy(Record, json="hash layers"):
    """All layers, highest precedence first."""

    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise PolicyValidationError(
                f"each policy layer may be given once, got {', '.join(names)}; merge them first")
        ranked = tuple(sorted(self.layers, key=lambda layer: LAYERS.index(layer.name)))
        object.__setattr__(self, "layers", ranked)

    # settings

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Every setting with the value in force."""
        merged = {name: setting.default for name, setting in SETTINGS.items()}
        for layer in reversed(self.layers):
            merged.update(layer.settings)
        return MappingProxyType(merged)

    def setting(self, name: str) -> Any:
        if name == "allow_jit":                # the old name of "jit"
            return self.settings["jit"] == "in_request"
        try:
            return self.settings[name]
        except KeyError:
            raise PolicyValidationError(
                f"unknown setting {name!r}{suggest(str(name), SETTINGS)}") from None

    # rules

    @cached_property
    def _by_op(self) -> dict[str, tuple[_View, ...]]:
        return {}

    def _views(self, op: str) -> tuple[_View, ...]:
        views = self._by_op.get(op)
        if views is None:
            by_layer = ([r for r in layer.rules if r.applies_to(op)] for layer in self.layers)
            views = tuple(_View(*(tuple(r for r in rules if r.action == action)
                                  for action in ACTIONS))
                          for rules in by_layer if rules)
            self._by_op[op] = views            # two threads may both store the same answer
        return views

    def has_rules_for(self, op: str) -> bool:
        """Returns whether any rule is about this op."""
        return bool(self._views(op))

    def lock(self, op: str, facts: Facts) -> PolicyRule | None:
        """Returns the lock in force for this call; a higher layer's allow list overrides it."""
        for view in self._views(op):
            for rule in view.lock:
                if rule.holds(facts):
                    return rule
            if any(rule.holds(facts) for rule in view.allow):
                return None
        return None

    def verdict(self, kernel_id: str, op: str, facts: Facts) -> Reason | None:
        """Returns why policy forbids the kernel, or None: lock beats deny beats allow."""
        locks_count = True
        for view in self._views(op):
            lock = next((r for r in view.lock if r.holds(facts)), None) if locks_count else None
            if lock is not None:
                return (None if lock.covers(kernel_id)
                        else Reason(Code.LOCKED_TO_ANOTHER, lock.kernels, lock.origin))
            for rule in view.deny:
                if rule.covers(kernel_id) and rule.holds(facts):
                    return Reason(Code.DENIED_BY_POLICY, got=rule.origin)
            allowing = [r for r in view.allow if r.holds(facts)]
            if any(r.covers(kernel_id) for r in allowing):
                return None
            if allowing and not matches_any(ALWAYS, kernel_id):
                return Reason(Code.NOT_ALLOWED_BY_POLICY,
                              ", ".join(k for r in allowing for k in r.kernels),
                              ", ".join(dict.fromkeys(r.origin for r in allowing)))
            locks_count = locks_count and not allowing   # as in lock()
        return None

    def boost(self, kernel_id: str, op: str, facts: Facts) -> float:
        """Returns the product of the factors of all matching boosts in all layers."""
        factors = (r.factor for view in self._views(op) for r in view.boost if r.covers(kernel_id)
                   and r.holds(facts))
        # a time is divided by it: never 0, never inf
        return min(max(math.prod(factors, start=1.0), 1e-9), 1e9)

    def leaves(self, op: str, known: Container[str] | None = None) -> Iterator[Rule]:
        """Yields each test that rules for this op make, once: a cache key must hold its outcome.

        Rules that read a fact outside `known`, the facts of the op, never match: they are left out.
        """
        rules = [r for view in self._views(op) for group in view for r in group
                 if known is None or all(test.fact in known for test in r.when)]
        return iter(dict.fromkeys(leaf for r in rules for test in r.when for leaf in test.leaves()))

    # changes, each of which gives a new policy

    def with_layer(self, layer: Layer) -> Policy:
        return Policy((*(old for old in self.layers if old.name != layer.name), layer))

    def without(self, name: str) -> Policy:
        return Policy(tuple(layer for layer in self.layers if layer.name != name))

    def at(self, now: float) -> Policy:
        """Returns the policy at `now` (monotonic) without what expired; `self` if nothing has."""
        deadline = self.next_deadline
        if deadline is None or now < deadline:
            return self
        return Policy(tuple(rest for layer in self.layers if (rest := layer.at(now)) is not None))

    @cached_property
    def next_deadline(self) -> float | None:
        ends = [end for layer in self.layers
                for end in (layer.expires_at, *(r.expires_at for r in layer.rules))]
        return min((end for end in ends if end is not None), default=None)

    @cached_property
    def hash(self) -> str:
        """A hash of the decisions, without where they were written and when they expire."""
        content = [layer.to_json() for layer in self.layers if layer]
        for data in (*content, *(rule for layer in content for rule in layer["rules"])):
            data.pop("expires_at", None)
            data.pop("origin", None)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Rules: each reads one named fact of a call and yields a reason or nothing.

A rule is data, so one declaration serves the filter, `explain`, the error text, the capability
tables, `capabilities.json`, the boundary tests, and the cache key: the key keeps of a size just
what some rule can tell apart. `any_of` and `when` combine rules; what a test means is in
`predicate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Union

from ..codec import Record
from ..errors import SpecError
from ..reason import Code, Reason, Value, plain
from .predicate import PREDICATES, Predicate

Facts = Mapping[str, Any]


class Wording(NamedTuple):
    """The wording of a fact that no caller passes as such, such as heads % kv_heads."""

    name: str                                  # as in "query heads per KV head must be >= 4"
    inputs: str = ""                           # of it: "{heads} query heads, {kv_heads} KV heads"
    demands: Mapping[str, str] = {}            # a rule's `want` -> the whole demand in plain words

    def message(self, want: str, got: Any, facts: Facts) -> str:
        inputs = self.inputs.format_map(facts)
        if want in self.demands:
            return self.demands[want] + (f", got {inputs}" if inputs else "")
        return f"{self.name} must be {want}, got {got}" + (f" ({inputs})" if inputs else "")


Words = Mapping[str, Wording]


@dataclass(frozen=True)
class Rule(Record, omit="repair"):
    """`fact` `test` `value`, else `code`. `repair` names the transform that would satisfy it."""

    fact: str
    test: str
    value: Annotated[Value, Any]
    code: Code
    repair: str = ""

    def __post_init__(self) -> None:
        if self.test not in PREDICATES:
            raise SpecError(f"rule on {self.fact!r}: unknown test {self.test!r}; "
                            f"known are {', '.join(PREDICATES)}")
        object.__setattr__(self, "value", plain(self.value))

    @cached_property
    def predicate(self) -> Predicate:
        return PREDICATES[self.test](self.value)

    @property
    def want(self) -> str:
        return self.predicate.text()

    def check(self, facts: Facts) -> Reason | None:
        got = facts[self.fact]
        return None if self.predicate.holds(got) else Reason(self.code, self.want, got, self.fact)

    def complain(self, facts: Facts, words: Words) -> str:
        """Returns why these facts break the rule, in the words of the op."""
        wording, got = words.get(self.fact), facts[self.fact]
        return (Reason(self.code, self.want, got, self.fact).message if wording is None
                else wording.message(self.want, got, facts))

    def circumstance(self, words: Words) -> str:
        """Returns the rule as a fulfilled condition, as in "where dtype is float16"."""
        name = words[self.fact].name if self.fact in words else self.fact.removesuffix(".dtype")
        return f"{name} is {self.want.replace('absent', 'None')}"

    def decide(self, verdict: Callable[[Rule], bool | None]) -> bool | None:
        """Returns the answer if each leaf has that of `verdict`; None is "unknown"."""
        return verdict(self)

    def expression(self, variable: Callable[[str], str]) -> str:
        """Returns `check(...) is None` as Python; `variable(fact)` is the local that holds the
        fact."""
        return self.predicate.code(variable(self.fact))

    def leaves(self) -> Iterator[Rule]:
        yield self

    def __str__(self) -> str:
        return f"{self.fact} {self.want}"


@dataclass(frozen=True)
class AnyOf(Record, names={"rules": "any_of"}):
    """At least one rule must hold. The reason is that of the last alternative."""

    rules: tuple[Condition, ...]

    @property
    def repair(self) -> str:
        return ""

    def check(self, facts: Facts) -> Reason | None:
        last: Reason | None = None
        for rule in self.rules:
            last = rule.check(facts)
            if last is None:
                return None
        return last

    def complain(self, facts: Facts, words: Words) -> str:
        """Returns all alternatives, or the last one if its code is a sentence about the whole."""
        last = self.rules[-1]
        if isinstance(last, Rule) and last.fact not in words and "{" not in last.code.template:
            return last.complain(facts, words)
        sentences = dict.fromkeys(rule.complain(facts, words) for rule in self.rules)
        return "; or ".join(filter(None, sentences))

    def circumstance(self, words: Words) -> str:
        return " or ".join(rule.circumstance(words) for rule in self.rules)

    def decide(self, verdict: Callable[[Rule], bool | None]) -> bool | None:
        answers = [rule.decide(verdict) for rule in self.rules]
        return True if True in answers else None if None in answers else False

    def expression(self, variable: Callable[[str], str]) -> str:
        return f"({' or '.join(rule.expression(variable) for rule in self.rules)})"

    def leaves(self) -> Iterator[Rule]:
        for rule in self.rules:
            yield from rule.leaves()

    def __str__(self) -> str:
        return " or ".join(map(str, self.rules))


@dataclass(frozen=True)
class When(Record, names={"condition": "when"}):
    """`then` must hold if `condition` does."""

    condition: Condition
    then: Condition

    @property
    def repair(self) -> str:
        return ""

    def check(self, facts: Facts) -> Reason | None:
        return None if self.condition.check(facts) is not None else self.then.check(facts)

    def complain(self, facts: Facts, words: Words) -> str:
        return f"{self.then.complain(facts, words)}, where {self.condition.circumstance(words)}"

    def circumstance(self, words: Words) -> str:
        return f"{self.then.circumstance(words)} where {self.condition.circumstance(words)}"

    def decide(self, verdict: Callable[[Rule], bool | None]) -> bool | None:
        condition, then = self.condition.decide(verdict), self.then.decide(verdict)
        return True if condition is False or then is True else then if condition else None

    def expression(self, variable: Callable[[str], str]) -> str:
        return f"(not {self.condition.expression(variable)} or {self.then.expression(variable)})"

    def leaves(self) -> Iterator[Rule]:
        yield from self.condition.leaves()
        yield from self.then.leaves()

    def __str__(self) -> str:
        return f"{self.then} when {self.condition}"


Condition = Union[Rule, AnyOf, When]


# The functions that declarations are written with.

def any_of(*rules: Condition) -> AnyOf:
    return AnyOf(rules)


def when(condition: Condition, then: Condition) -> When:
    return When(condition, then)


def one_of(fact: str, *allowed: Any, code: Code = Code.FEATURE_UNSUPPORTED) -> Rule:
    return Rule(fact, "in", allowed, code)


def equals(fact: str, value: Any, code: Code = Code.FEATURE_UNSUPPORTED) -> Rule:
    return Rule(fact, "eq", value, code)


def differs(fact: str, value: Any, code: Code = Code.FEATURE_UNSUPPORTED) -> Rule:
    return Rule(fact, "ne", value, code)


def at_most(fact: str, n: float, code: Code = Code.SHAPE_UNSUPPORTED) -> Rule:
    return Rule(fact, "le", n, Code.HEAD_DIM_TOO_LARGE if fact.startswith("head_dim") else code)


def at_least(fact: str, n: float, code: Code = Code.SHAPE_UNSUPPORTED) -> Rule:
    return Rule(fact, "ge", n, code)


def multiple_of(fact: str, n: int, code: Code = Code.SHAPE_UNSUPPORTED) -> Rule:
    return Rule(fact, "multiple_of", n, Code.HEAD_DIM_ALIGNMENT if fact.startswith("head_dim")
                else code)


def absent(fact: str, code: Code = Code.FEATURE_UNSUPPORTED) -> Rule:
    return Rule(fact, "absent", None, code)


def present(fact: str, code: Code = Code.MISSING_METADATA) -> Rule:
    return Rule(fact, "present", None, code)


def on(fact: str, code: Code = Code.FEATURE_UNSUPPORTED) -> Rule:
    return Rule(fact, "eq", True, code)


def off(fact: str, code: Code = Code.FEATURE_UNSUPPORTED) -> Rule:
    return Rule(fact, "eq", False, code)


def device(*kinds: str) -> Rule:
    return Rule("device", "in", kinds, Code.PLATFORM_MISMATCH)


def vendor(*names: str) -> Rule:
    return Rule("vendor", "in", names, Code.VENDOR_MISMATCH)


def sm(at_least: int = 0, below: int = 0) -> Rule:
    """Limit the compute capability, 10 x major + minor, from one side."""
    if at_least and below:
        raise SpecError("sm() takes at_least or below; give two rules for a range")
    if below:
        return Rule("sm", "le", below - 1, Code.SM_TOO_NEW)
    return Rule("sm", "ge", at_least, Code.SM_TOO_OLD)


def generations(*names: str) -> Rule:
    return Rule("gpu_generation", "in", names, Code.GPU_GENERATION_UNSUPPORTED)


def cpu_isa(name: str) -> Rule:
    return Rule("isa", "has", name, Code.CPU_ISA_MISSING)


def slow_half_matmul() -> tuple[Condition, ...]:
    """Require a CPU without matmul instructions for the half dtype, where torch is very slow."""
    bf16, fp16 = (Rule(f"fast_{name}_matmul", "eq", False, Code.MATMUL_IS_FAST)
                  for name in ("bf16", "fp16"))
    # of the device alone
    return (device("cpu"), dtypes("bfloat16", "float16"), any_of(bf16, fp16),
            when(dtypes("bfloat16"), bf16), when(dtypes("float16"), fp16))


def dtypes(*names: str, of: str = "dtype", cast: bool = False) -> Rule:
    """Limit a dtype; with `cast` the policy may allow casts to the first name and back."""
    code = Code.MASK_DTYPE_UNSUPPORTED if of.startswith("attn_mask") else Code.DTYPE_UNSUPPORTED
    return Rule(of, "in", names, code, repair="cast" if cast else "")


def unit_stride(tensor: str, repair: bool = True) -> Rule:
    """The last dimension must be contiguous; copying the tensor repairs it."""
    return Rule(f"{tensor}.stride_last", "eq", 1, Code.STRIDE_LAST_DIM, repair="contiguous"
                if repair else "")


def contiguous(tensor: str, repair: bool = True) -> Rule:
    return Rule(f"{tensor}.contiguous", "eq", True, Code.NOT_CONTIGUOUS, repair="contiguous"
                if repair else "")


def aligned(tensor: str, to_bytes: int) -> Rule:
    return Rule(f"{tensor}.alignment", "ge", to_bytes, Code.POINTER_ALIGNMENT, repair="contiguous")


def plain_tensors() -> Rule:
    """No subclass, no vmap, no fake tensor: for kernels that read raw storage."""
    return Rule("tensor_kind", "in", ("plain",), Code.TENSOR_SUBCLASS_UNSUPPORTED)

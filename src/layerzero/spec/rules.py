"""Constraints: each reads one named fact of a call and yields a reason or nothing.

A rule is data, so one pass of it serves the filter, `explain`, the error text, the capability
tables, `capabilities.json`, the boundary tests, and the cache key: the key keeps of a size just
what some rule can tell apart. `any_of` and `when` combine rules.

A fact that is None (an absent tensor, say) passes `le`, `ge`, `eq` and `multiple_of`; `in`,
`present` and `absent` take None literally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union

from .codec import Record
from .errors import SpecError
from .reason import Code, Reason, Value, plain

Facts = Mapping[str, Any]

TESTS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "eq": (lambda got, want: got is None or got == want, "{}"),
    "ne": (lambda got, want: got != want, "other than {}"),
    "le": (lambda got, want: got is None or got <= want, "<= {}"),
    "ge": (lambda got, want: got is None or got >= want, ">= {}"),
    "multiple_of": (lambda got, want: got is None or got % want == 0, "a multiple of {}"),
    "in": (lambda got, want: got in want, "{}"),
    "not_in": (lambda got, want: got not in want, "none of {}"),
    "present": (lambda got, want: got is not None, "given"),
    "absent": (lambda got, want: got is None, "absent"),
    "has": (lambda got, want: want in (got or ()), "{}"),
}


@dataclass(frozen=True)
class Rule(Record, omit="repair"):
    """`fact` `test` `value`, else `code`. `repair` names the transform that would satisfy it."""

    fact: str
    test: str
    value: Annotated[Value, Any]
    code: Code
    repair: str = ""

    def __post_init__(self) -> None:
        if self.test not in TESTS:
            raise SpecError(f"rule on {self.fact!r}: unknown test {self.test!r}; known are {', '.join(TESTS)}")
        object.__setattr__(self, "value", plain(self.value))

    @property
    def want(self) -> str:
        value = self.value
        if isinstance(value, tuple):
            value = " or ".join("absent" if v is None else str(v) for v in value)
        return TESTS[self.test][1].format(value)

    def check(self, facts: Facts) -> Reason | None:
        got = facts[self.fact]
        return None if TESTS[self.test][0](got, self.value) else Reason(self.code, self.want, got, self.fact)

    def leaves(self) -> Iterator[Rule]:
        yield self

    def __str__(self) -> str:
        return f"{self.fact} {self.want}"


@dataclass(frozen=True)
class AnyOf(Record, names={"rules": "any_of"}):
    """At least one must hold. The reason is the one of the last alternative."""

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

    def leaves(self) -> Iterator[Rule]:
        for rule in self.rules:
            yield from rule.leaves()

    def __str__(self) -> str:
        return " or ".join(map(str, self.rules))


@dataclass(frozen=True)
class When(Record, names={"condition": "when"}):
    """`then` must hold wherever `condition` does."""

    condition: Condition
    then: Condition

    @property
    def repair(self) -> str:
        return ""

    def check(self, facts: Facts) -> Reason | None:
        return None if self.condition.check(facts) is not None else self.then.check(facts)

    def leaves(self) -> Iterator[Rule]:
        yield from self.condition.leaves()
        yield from self.then.leaves()

    def __str__(self) -> str:
        return f"{self.then} when {self.condition}"


Condition = Union[Rule, AnyOf, When]


# The words backends write their requirements in.

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
    return Rule(fact, "multiple_of", n, Code.HEAD_DIM_ALIGNMENT if fact.startswith("head_dim") else code)


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


def sm(at_least: int = 0, below: int = 0) -> Rule | AnyOf:
    """Compute capability as 10 x major + minor, in [at_least, below)."""
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
    """A half type whose matmul this CPU has no instructions for, so that torch computes it an element at a time."""
    bf16, fp16 = (Rule(f"fast_{name}_matmul", "eq", False, Code.MATMUL_IS_FAST) for name in ("bf16", "fp16"))
    return (device("cpu"), dtypes("bfloat16", "float16"), any_of(bf16, fp16),   # the last is of the device alone
            when(dtypes("bfloat16"), bf16), when(dtypes("float16"), fp16))


def dtypes(*names: str, of: str = "dtype", cast: bool = False) -> Rule:
    """`cast=True`: with allow_adaptation the inputs may be cast to the first name and back."""
    code = Code.MASK_DTYPE_UNSUPPORTED if of.startswith("attn_mask") else Code.DTYPE_UNSUPPORTED
    return Rule(of, "in", names, code, repair="cast" if cast else "")


def unit_stride(tensor: str, repair: bool = True) -> Rule:
    """The last dimension must be contiguous; a copy of that tensor repairs it."""
    return Rule(f"{tensor}.stride_last", "eq", 1, Code.STRIDE_LAST_DIM, repair="contiguous" if repair else "")


def contiguous(tensor: str, repair: bool = True) -> Rule:
    return Rule(f"{tensor}.contiguous", "eq", True, Code.NOT_CONTIGUOUS, repair="contiguous" if repair else "")


def aligned(tensor: str, to_bytes: int) -> Rule:
    return Rule(f"{tensor}.alignment", "ge", to_bytes, Code.POINTER_ALIGNMENT, repair="contiguous")


def plain_tensors() -> Rule:
    """For kernels that read raw storage: no subclass, no vmap, no fake tensor."""
    return Rule("tensor_kind", "in", ("plain",), Code.TENSOR_SUBCLASS_UNSUPPORTED)

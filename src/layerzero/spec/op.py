"""The contract of an operation: its formula, the facts of a call, the tolerated error.

Everything else is generated from it: the cache key, the checks of a call, the tests, the docs
tables, the roofline. The signature of `reference` is the public signature.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType, NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union

from .codec import Layout, Record, decode, encode_fields
from .errors import SpecError
from .mistake import Mistake
from .names import suggest
from .plan import Transform
from .reason import Reason
from .rules import Condition, Facts, Wording, Words
from .rules.expr import parse

DEVICE_FACTS = frozenset({
    "device", "vendor", "sm", "gpu_generation", "tensor_core_generation", "isa", "fast_bf16_matmul",
    "fast_fp16_matmul", "supports_bf16", "supports_fp8", "supports_fp4", "torch_version",
    "cuda_version", "shared_per_block"})
CALL_FACTS = frozenset({"dtype", "grad", "deterministic", "graph", "tensor_kind", "itemsize"})
TENSOR_FACTS = ("dtype", "device", "stride_last", "contiguous", "alignment", "requires_grad",
                "ndim", "broadcast")

Returns = Union[tuple[str, ...], Mapping[str, tuple[str, ...]]]
# Ranges of numeric parameters: most kernels take lengths and counts as 32 bits, torch takes 64.
Range = tuple[float, float]                    # both ends included
INT32: Range = (-2**31, 2**31 - 1)
INT64: Range = (-2**63, 2**63 - 1)
# as torch.manual_seed: negative ones are taken modulo 2^64
SEED: Range = (-2**63, 2**64 - 1)
FINITE: Range = (-sys.float_info.max, sys.float_info.max)

# Facts that every op of a family must declare.
FAMILY_FACTS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "attention": ("head_dim", "seq_q", "seq_k"),
    "tokenization": ("vocab_hash",),
    "norm": ("hidden",),
    "sampling": ("vocab",),
    "linear": ("in_features",),
})


@dataclass(frozen=True)
class Tolerance(Record):
    """A kernel's error may be `times_eager` times the eager one at its dtype, within (rtol, atol).
    """

    by_dtype: Mapping[str, tuple[float, float]]
    times_eager: float = 2.0
    # Kernels go on from what they have, rounded, with each term: roundings add up as the terms do.
    chained: bool = False

    def of(self, dtype: str) -> tuple[float, float]:
        return self.by_dtype.get(dtype, self.by_dtype["float32"])


@dataclass(frozen=True)
class Param:
    """One parameter of the signature."""

    name: str
    # tensor | bool | int | float | str | generator | object
    kind: str
    optional: bool = False                     # may be None
    default: Any = inspect.Parameter.empty
    choices: tuple[str | None, ...] = ()       # of a Literal
    keyword_only: bool = False

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class Redirect:
    """An unusual call rewritten as a plain call of `op`; `restore` converts the result back."""

    op: str
    values: dict[str, Any]
    restore: Callable[[Any], Any]


class Adaptation(NamedTuple):
    """The values of a call with the dtypes that the op needs, and the casts made for that."""

    values: dict[str, Any]
    casts: tuple[Transform, ...]


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. See docs/adding-an-op.md for a walk through every field."""

    json_layout: ClassVar[Layout]
    name: str
    family: str
    reference: Callable[..., Any]
    meta: Callable[..., Any]
    inputs: Callable[..., dict[str, Any]]
    cases: tuple[Mapping[str, Any], ...]
    tolerance: Tolerance
    # param -> "batch heads seq_q head_dim", or per variant
    shapes: Mapping[str, Any]
    variant: str = ""                          # the str parameter whose value picks the shapes
    returns: Annotated[Any, Returns] = ()      # shape of each result, or per variant
    same_dtype: tuple[str, ...] = ()           # tensors that must share the main one's dtype
    # the tensor that gives dtype and device; else the first
    main: str = ""
    derived: Mapping[str, str] = field(default_factory=dict)
    exact: tuple[str, ...] = ()                # sizes that validity or speed needs exactly
    # sizes along which the results are independent: rows, sequences; None: not declared
    batch_dims: tuple[str, ...] | None = None
    # sizes that tensor-parallel ranks share among them, in the same proportion; (): none does
    shard_dims: tuple[str, ...] | None = None
    # by default INT64 for an int, FINITE for a float
    ranges: Mapping[str, Range] = field(default_factory=dict)
    # the contract's own limits: breaking one is the caller's error
    requires: tuple[Condition, ...] = ()
    flops: str = "0"
    bytes: str = "0"
    differentiable: tuple[str, ...] = ()
    # floating tensors with a gradient too, which a kernel may refuse by a rule on requires_grad
    also_differentiable: tuple[str, ...] = ()
    # "lower": cast to autocast's dtype; "promote": to the widest given
    autocast: str = ""
    # rewrites unusual calls (3-D, nested)
    canonical: Callable[[dict[str, Any]], Redirect | None] | None = None
    # values that are no tensors, of parameters that are, which `canonical` rewrites
    foreign: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    # says in plain arguments what a tensor subclass means, if it does; Dynamo traces it
    unwrap: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    # what rules cannot express
    extra_check: Callable[[dict[str, Any], Mapping[str, Any]], None] | None = None
    # casts what may be cast, such as a KV cache
    adapt: Callable[[dict[str, Any]], Adaptation | None] | None = None
    # Tensor, or Tensor[] for several or where the count depends on the call
    outputs: str = "Tensor"
    # facts of an op whose arguments are not tensors
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    reads: tuple[str, ...] = ()                # the names of those facts
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    nested: bool = False                       # `canonical` knows what to do with nested tensors
    stress: tuple[Mapping[str, Any], ...] = ()  # large cases, for the longer lanes of verification
    # long and wide ones, which kernels split into parts
    invariance_cases: tuple[Mapping[str, Any], ...] = ()
    # for the backward; by default some of `cases`
    gradient_cases: tuple[Mapping[str, Any], ...] = ()
    # of the generator's arguments: values with which the gradient is an accident of rounding
    no_gradient: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # sizes at which dropped weights show
    dropout_case: Mapping[str, Any] = field(default_factory=dict)
    mistakes: tuple[Mistake, ...] = ()         # that a kernel could make: verification names them
    # fields of reference.<name>: its workspace, say
    reference_kernel: Mapping[str, Any] = field(default_factory=dict)
    # torch.nn.attention.sdpa_kernel says which kernels may serve it
    sdpa_switches: bool = False
    # tensors that a kernel writes into, and whose memory it may return
    in_place: tuple[str, ...] = ()
    words: Words = field(default_factory=dict)   # how messages speak of `derived` and other facts

    def __post_init__(self) -> None:
        self._check_names()
        if not self.cases:
            raise SpecError(
                f"op {self.name!r} has no cases: without inputs nothing of it can be tested")
        missing = [f for f in FAMILY_FACTS.get(self.family, ()) if f not in self.fact_names]
        if missing:
            raise SpecError(
                f"op {self.name!r} of family {self.family!r} must declare {', '.join(missing)}: "
                "name it in shapes, in derived, or as a parameter")
        for rule in self.requires:
            self.check_rule(rule, f"op {self.name!r}")
        self._check_ranges()
        for what in ("in_place", "also_differentiable"):
            unknown = [name for name in getattr(self, what) if name not in self.tensors]
            if unknown:
                raise SpecError(f"op {self.name!r}: {what} names {unknown[0]!r}; its tensors are "
                                f"{', '.join(self.tensors)}")

    def _check_ranges(self) -> None:
        """Raise unless each range is of a number, contains its default and fits torch's range."""
        for name, (low, high) in self.ranges.items():
            p = self.by_name.get(name)
            if p is None or p.kind not in ("int", "float"):
                raise SpecError(
                    f"op {self.name!r}: ranges names {name!r}, which is no int or float parameter")
            widest = SEED if p.kind == "int" else FINITE
            if not widest[0] <= low <= high <= widest[1]:
                raise SpecError(
                    f"op {self.name!r}: the range of {name!r} must lie within {widest}, got "
                    f"{(low, high)}")
            if not p.required and p.default is not None and not low <= p.default <= high:
                raise SpecError(
                    f"op {self.name!r}: the range of {name!r} is {(low, high)}, its default "
                    f"{p.default}")

    @cached_property
    def limits(self) -> Mapping[str, Range]:
        """The range of every numeric parameter. Rules may be narrower."""
        return {p.name: self.ranges.get(p.name, INT64 if p.kind == "int" else FINITE)
                for p in self.params if p.kind in ("int", "float")}

    def _check_names(self) -> None:
        """Raise unless every name in an expression and in `exact` is a number of the call."""
        known = {*self.dims, *self.derived, "itemsize",
                 *(p.name for p in self.params if p.kind in ("int", "float"))}
        for what, text in (*self.derived.items(), ("flops", self.flops), ("bytes", self.bytes)):
            self.check_expression(text, f"op {self.name!r}: {what}", known)
        for name in (*(self.batch_dims or ()), *(self.shard_dims or ())):
            if name not in self.dims:
                raise SpecError(f"op {self.name!r}: batch_dims and shard_dims name {name!r}; the "
                                f"sizes are {', '.join(self.dims)}")
        for name in self.exact:
            if name not in known:
                raise SpecError(
                    f"op {self.name!r}: exact names {name!r}; the sizes are {', '.join(self.dims)}")

    def check_expression(self, text: str, owner: str, known: Collection[str] | None = None) -> None:
        numbers = (p.name for p in self.params if p.kind in ("int", "float"))
        known = {*self.dims, *self.derived, "itemsize", *numbers} if known is None else known
        for name in parse(text).names:
            if name not in known:
                raise SpecError(
                    f"{owner} = {text!r} reads {name!r}; there are {', '.join(sorted(known))}")

    @cached_property
    def params(self) -> tuple[Param, ...]:
        hints = typing.get_type_hints(self.reference)
        return tuple(_param(p, hints.get(p.name), self.name, self.read is not None)
                     for p in inspect.signature(self.reference).parameters.values())

    @cached_property
    def by_name(self) -> Mapping[str, Param]:
        return {p.name: p for p in self.params}

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params if p.kind == "tensor")

    @cached_property
    def patterns(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """variant -> tensor parameter -> tokens of its shape."""
        table = self.shapes if self.variant else {"": self.shapes}
        return {v: {p: tuple(text.split()) for p, text in shapes.items()}
                for v, shapes in table.items()}

    @cached_property
    def result_patterns(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        table = self.returns if self.variant else {"": self.returns}
        return {v: tuple(tuple(text.split()) for text in shapes) for v, shapes in table.items()}

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The named sizes, in order of first appearance."""
        first = next(iter(self.patterns.values()))
        names = [t.lstrip("*") for tokens in first.values() for t in tokens
                 if not t.startswith("~") and re.match(r"\*?[a-z_]", t)]
        return tuple(dict.fromkeys(names))

    @cached_property
    def fact_names(self) -> frozenset[str]:
        tensor_facts = {f"{t}.{f}" for t in self.tensors for f in TENSOR_FACTS}
        return frozenset({*DEVICE_FACTS, *CALL_FACTS, *self.dims, *self.derived, *tensor_facts,
                          *self.reads,
                          *(p.name for p in self.params
                            if p.kind in ("bool", "int", "float", "str"))})

    @property
    def main_tensor(self) -> str:
        return (self.main
                or next((p.name for p in self.params if p.kind == "tensor" and not p.optional), ""))

    def check_rule(self, rule: Condition, owner: str) -> None:
        for leaf in rule.leaves():
            if leaf.fact not in self.fact_names:
                raise SpecError(
                    f"{owner} reads the fact {leaf.fact!r}, which {self.name!r} does not "
                    f"have{suggest(leaf.fact, self.fact_names)}")

    @cached_property
    def wording(self) -> Words:
        """Returns the wording of facts in messages: declared, or a derived one's expression."""
        derived = {name: Wording(text, ", ".join(
            f"{n} {{{n}}}" for n in parse(text).names if n != text))
            for name, text in self.derived.items()}
        grads = {f"{t}.requires_grad": Wording(f"{t}.requires_grad", demands={
            "other than True": f"has no backward for {t}, which requires a gradient"})
            for t in self.tensors}
        grad = Wording("grad", demands={"False": "no gradient may be asked for",
                                        "True": "a gradient must be asked for"})
        return {**derived, **grads, "grad": grad, **self.words}

    def reasons(self, rules: Iterable[Condition], facts: Facts) -> list[Reason]:
        """Returns what these rules have against a call, each in terms of what the caller gave."""
        broken = [(rule, reason) for rule in rules if (reason := rule.check(facts)) is not None]
        texts = [rule.complain(facts, self.wording) for rule, _ in broken]
        return [reason if text == reason.message else replace(reason, sentence=text)
                for (_, reason), text in zip(broken, texts)]

    def to_json(self) -> dict[str, Any]:
        code = {name: import_path(getattr(self, name)) for name in _CALLABLES
                if getattr(self, name) is not None}
        return {**encode_fields(self), "code": code}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], resolve: Callable[[str], Any] | None = None) -> Op:
        code = {name: (resolve or resolve_import_path)(path) for name, path in data["code"].items()}
        return decode(cls, {key: value for key, value in data.items() if key != "code"}, "op",
                      **code)


_CALLABLES = ("reference", "meta", "inputs", "canonical", "unwrap", "extra_check", "adapt", "read")
Op.json_layout = Layout(tuple(f.name for f in fields(Op)
                              if f.name not in (*_CALLABLES, "mistakes", "words", "batch_dims",
                                                "shard_dims", "invariance_cases", "foreign",
                                                "no_gradient", "also_differentiable")))


def import_path(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}:{fn.__qualname__}"


def resolve_import_path(path: str) -> Any:
    module, _, name = path.partition(":")
    if "<" in name:
        raise SpecError(
            f"{path!r} names a local function; only module-level functions can be loaded by name")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


_KINDS = {"Tensor": "tensor", "bool": "bool", "int": "int", "float": "float", "str": "str",
          "Generator": "generator"}


def _param(p: inspect.Parameter, hint: Any, op: str, any_object: bool) -> Param:
    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        raise SpecError(f"op {op!r}: *args and **kwargs hide what a call is; name every parameter")
    options = typing.get_args(hint)
    optional = NoneType in options
    members = [o for o in options if o is not NoneType] if optional else [hint]
    choices: tuple[str | None, ...] = ()
    if typing.get_origin(hint) is Literal or any(typing.get_origin(m) is Literal for m in members):
        literal = hint if typing.get_origin(hint) is Literal else members[0]
        choices = tuple(typing.get_args(literal)) + ((None,) if optional else ())
        kind = "str"
    else:
        kind = _KINDS.get(getattr(members[0], "__name__", ""), "") if len(members) == 1 else ""
    if not kind and any_object:
        kind, optional = "object", True
    if not kind:
        raise SpecError(f"op {op!r}: parameter {p.name!r} has type {hint!r}; "
                        "known are Tensor, bool, int, float, str, Literal, Generator, each also "
                        "optional")
    return Param(p.name, kind, optional, p.default, choices, p.kind is p.KEYWORD_ONLY)



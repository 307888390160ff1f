"""The cache key of a call: everything that a rule can tell apart, and nothing more.

`compile_key` reads the op's declaration and the leaves of all rules in force and returns a
`KeyProgram`. Sizes that validity needs exactly are kept exactly; of the others the key keeps the
bucket (speed) and the outcome of each test that some rule makes (validity). So two calls with one
key cannot differ in any rule's verdict, and a KV cache that grows inside a bucket keeps its entry.
The program is compiled twice: to Python (`dispatch/hotpath.py`) and to the native table
(`dispatch/native/fastpath.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from ..spec.grid import bucket_top
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.rules import Condition, Rule
from ..spec.rules.expr import parse
from ..spec.rules.predicate import Cuts, Predicate

# Suffix of a fact that only kernels of other devices read: it is not read on the CPU.
OFF_CPU = "_off_cpu"


@dataclass(frozen=True)
class NumberField:
    """The key's part that holds a size, derived number or numeric parameter, or None."""

    fact: str
    exact: bool = False
    bucket: bool = False
    equals: tuple[float, ...] = ()             # one bit each: value == x
    above: tuple[float, ...] = ()              # one bit each: value > x
    multiples: tuple[int, ...] = ()            # one bit each: value % x == 0

    def bits(self, x: str) -> list[str]:
        """Returns the bits as Python expressions over the variable `x`."""
        return [*(f"{x} == {n!r}" for n in self.equals), *(f"{x} > {n!r}" for n in self.above),
                *(f"{x} % {n!r} == 0" for n in self.multiples)]


@dataclass(frozen=True)
class KeyProgram:
    op: Op
    fields: tuple[NumberField, ...]
    tensor_facts: tuple[tuple[str, str], ...]  # (tensor, fact) that some rule reads
    id: int

    @cached_property
    def needed(self) -> frozenset[str]:
        """The tensor facts that the slow path must read for the rules."""
        return frozenset(f"{t}.{f.removesuffix(OFF_CPU)}" for t, f in self.tensor_facts)


def tests_of(kernel: Kernel) -> tuple[Rule, ...]:
    """Returns the tests in a kernel's rules. Those of alignment get the suffix OFF_CPU if the
    kernel does not run on the CPU, or if the rule holds for every CPU call anyway."""
    tests = _tests.get(kernel)
    if tests is None:
        off_cpu = any(_on_cpu(rule) is False for rule in kernel.requires)
        tests = _tests[kernel] = tuple(
            replace(leaf, fact=leaf.fact + OFF_CPU)
            if leaf.fact.endswith(".alignment") and (off_cpu or _on_cpu(rule)) else leaf
            for rule in (*kernel.requires, *kernel.less_work_when, *kernel.invariant_when)
            for leaf in rule.leaves())
    return tests


_tests: WeakKeyDictionary[Kernel, tuple[Rule, ...]] = WeakKeyDictionary()


def _on_cpu(rule: Condition) -> bool | None:
    """Returns what the rule says of every CPU call; None if that depends on more."""
    return rule.decide(lambda leaf: leaf.predicate.holds("cpu") if leaf.fact == "device" else None)


def compile_key(op: Op, leaves: Iterable[Rule], measured: Iterable[str] = ()) -> KeyProgram:
    """Decide what a key of `op` holds, from the rules in force. `measured` are expressions that
    depend on sizes, such as workspaces; the numbers they read are bucketed too."""
    numbers = {p.name for p in op.params if p.kind in ("int", "float")}
    sized = {*op.dims, *op.derived, *numbers}
    timing = {n for text in (op.flops, op.bytes, *measured) for n in parse(text).names}
    tests: dict[str, list[Predicate]] = {name: [] for name in op.dims}
    tensor_facts: set[tuple[str, str]] = {(t, "dtype") for t in op.tensors}
    for leaf in (*leaves, *(leaf for rule in op.requires for leaf in rule.leaves())):
        tensor, _, fact = leaf.fact.rpartition(".")
        if tensor:
            tensor_facts.add((tensor, fact))
        elif leaf.fact in sized:
            tests.setdefault(leaf.fact, []).append(leaf.predicate)
    for name in (*op.exact, *sorted(numbers & timing)):
        tests.setdefault(name, [])
    for p in op.params:
        if p.kind in ("int", "float") and p.optional:
            tests.setdefault(p.name, [])       # whether it is given: an absent one is not passed on
    fields = []
    for name, predicates in tests.items():
        exact = name in op.exact
        if name in op.derived and set(parse(op.derived[name]).names) <= set(op.exact):
            continue                           # the key already determines it
        bucket = not exact and (name in op.dims or name in numbers & timing)
        fields.append(_field(name, exact, bucket, Cuts() if exact else Cuts.of(predicates)))
    fields.sort(key=lambda f: f.fact)
    order = tuple(sorted(tensor_facts))
    identity = hash((op.name, tuple(fields), order)) & 0xFFFFFFFF
    return KeyProgram(op, tuple(fields), order, identity)


def _field(fact: str, exact: bool, bucket: bool, cuts: Cuts) -> NumberField:
    equals, above = cuts.at | cuts.below, cuts.above | cuts.below      # `>= n` is `== n` or `> n`
    # it is exact up to 16; all negative numbers share one
    if bucket:
        equals = frozenset(n for n in equals if not 0 <= n <= 16)
        above = frozenset(n for n in above if (n < 0 and n != -1)
                          or (n > 16 and n != bucket_top(int(n))))
    return NumberField(fact, exact, bucket, tuple(sorted(equals)), tuple(sorted(above)),
                       tuple(sorted(cuts.multiples)))


def fixed_by_key(program: KeyProgram, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that all calls with this call's key share. They are the parameters at
    their defaults, the sizes that the key keeps exactly, what is derived from those alone, the
    dtype, and whether a gradient is asked for."""
    op, fields = program.op, {f.fact: f for f in program.fields}
    fixed = {name: facts[name] for name in op.dims if name in op.exact}
    fixed.update({name: facts[name] for name, text in op.derived.items()
                  if {*parse(text).names} <= {*op.exact}})
    fixed["grad"] = facts["grad"]
    if "dtype" in facts:
        fixed["dtype"] = facts["dtype"]
    for p in op.params:
        if p.required:
            continue
        if p.kind == "tensor":
            at_default = p.default is None and facts.get(f"{p.name}.dtype") is None
        elif p.kind in ("bool", "str"):
            at_default = facts[p.name] == p.default
        elif p.kind in ("int", "float"):
            field, value = fields.get(p.name), facts[p.name]
            at_default = (value == p.default and type(value) is type(p.default)
                          and field is not None
                          and (value is None or field.exact or p.default in field.equals))
        else:
            at_default = False
        if at_default:
            fixed[p.name] = p.default
    return fixed

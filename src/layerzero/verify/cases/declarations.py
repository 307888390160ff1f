"""Static checks of all declarations, without running a kernel.

An op has a reference, cases that its own contract allows, results with the shapes and dtypes of its
meta function, a tolerance for each dtype, a cost. A kernel loads or says why not; each of its rules
can be met and can refuse a call by itself; everything it claims (a dtype, a layout, a parameter, a
backward) is tested by some case of its op.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine import hardware, loading
from ...machine.faults import FAULTS
from ...spec.codec import Record
from ...spec.device import CPU_ISA, Device
from ...spec.kernel import Kernel, accepted_params
from ...spec.op import Op
from ...spec.rules import AnyOf, Condition, Rule, When
from ...spec.rules.expr import parse
from ...world.registry.catalog import Catalog
from ..kernel.contract import case_outline, case_values, formula, generate_values, results_of
from ..kernel.gradients import gradient_cases
from .generated import (
    find_argument_cases,
    given_arguments,
    known_cases,
    small_stress,
    unrestricted_arguments,
)

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A violation: which check, of what subject, what is wrong, what to do."""

    check: str
    subject: str
    problem: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}" + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Checked(Record, json="name says asked passed note seconds findings", names={"name": "check"}):
    """The result of one check over everything it applies to."""

    name: str
    says: str
    asked: int                                 # number of ops or kernels
    findings: tuple[Finding, ...] = ()
    note: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "seconds": round(self.seconds, 2)}


def static_checks(catalog: Catalog) -> Iterator[Checked]:
    """Yields the report of each check over the whole catalog."""
    ops, kernels = tuple(catalog.ops.values()), catalog.kernels
    of_ops: tuple[tuple[str, str, Callable[[Op], Iterator[str]]], ...] = (
        ("cases", "every case is a call that the contract allows, the same again for the same seed",
         _cases),
        ("meta", "the meta function foretells shape and dtype of every result", _meta),
        ("tolerances", "every dtype of the cases has a tolerance", _tolerances),
        ("cost", "operations and bytes of every case can be told", _cost))
    of_kernels: tuple[tuple[str, str, Callable[[Kernel], Iterator[str]]], ...] = (
        ("loads", "every kernel loads, or says why not", _loads),
        ("rules", "every rule reads a fact of its op, can be met, and turns calls away by itself",
         _rules),
        ("claims", "what a kernel claims, some case reaches", _claims))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, says, check in of_ops:
            yield _run_check(name, says, ops, check, lambda op: f"lz.{op.name}")
        for name, says, of_kernel in of_kernels:
            yield _run_check(name, says, kernels, of_kernel, lambda kernel: kernel.id)


def _run_check(name: str, says: str, subjects: Sequence[Any], check: Callable[[Any], Iterator[str]],
               name_of: Callable[[Any], str]) -> Checked:
    started, findings = time.perf_counter(), []
    for subject in subjects:
        try:
            findings += [Finding(name, name_of(subject), text) for text in check(subject)]
        except FAULTS as e:                    # code in a declaration may raise anything
            findings.append(Finding(name, name_of(subject),
                                    f"the check ended in {type(e).__name__}: {e}"))
    return Checked(name, says, len(subjects), tuple(findings),
                   seconds=time.perf_counter() - started)


def docs_check(root: Path) -> Checked:
    """Checks that the generated pages match the declarations, in a source checkout."""
    says, script = "the generated pages of docs/ are up to date", root / "docs" / "generate.py"
    if not script.is_file():
        return Checked("docs", says, 0, note=f"there is no {script}: not a source checkout")
    started = time.perf_counter()
    process = subprocess.run([sys.executable, str(script), "--check"], capture_output=True,
                             text=True, timeout=300)
    lines = [line for line in (process.stdout + process.stderr).splitlines() if line.strip()]
    findings = () if process.returncode == 0 else tuple(
        Finding("docs", "docs/", line, "run make docs") for line in lines or ["--check failed"])
    return Checked("docs", says, 1, findings, seconds=time.perf_counter() - started)


# Checks of an op.

def _cases(op: Op) -> Iterator[str]:
    for case in op.cases:
        for dtype in op.dtypes:
            values, again = (generate_values(op, case, dtype) for _ in range(2))
            facts = read(op, values)
            violations = list(map(str, op.reasons(op.requires, facts)))
            if violations:
                yield f"case {dict(case)} at {dtype} breaks the contract: {violations[0]}"
            if any(isinstance(v, Tensor) and not torch.equal(_bits(v), _bits(again[n]))
                   for n, v in values.items()):
                yield (f"case {dict(case)} at {dtype} differs from call to call: draw from a "
                       "generator with the seed")


def _bits(t: Tensor) -> Tensor:
    """Returns the bytes of a tensor: NaN then equals itself, and one-byte dtypes can be
    compared."""
    flat = t.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


def _meta(op: Op) -> Iterator[str]:
    if not op.tensors:
        return
    for case in op.cases:
        values = case_values(op, case, op.dtypes[0])
        with torch.no_grad():
            results, declared = formula(op, values), results_of(op.meta(**values))
        shapes = [[(tuple(t.shape), t.dtype) for t in side] for side in (results, declared)]
        if shapes[0] != shapes[1]:
            yield f"case {dict(case)}: meta says {shapes[1]}, the reference gives {shapes[0]}"


def _tolerances(op: Op) -> Iterator[str]:
    if not op.tensors:
        return
    for dtype in set(op.dtypes) - op.tolerance.by_dtype.keys():
        dtypes = [t.dtype for case in op.cases
                  for t in results_of(op.meta(**case_values(op, case, dtype)))]
        if getattr(torch, dtype) in dtypes:    # other result dtypes are judged as what they are
            yield f"gives {dtype}, which has no tolerance and would be judged by that of float32"
    for dtype, (rtol, atol) in op.tolerance.by_dtype.items():
        if not (0 <= rtol < 1 and 0 <= atol < 1):
            yield f"{dtype}: (rtol, atol) = ({rtol:g}, {atol:g}) would let anything pass"
    if not 1 <= op.tolerance.times_eager <= 8:
        yield f"times_eager = {op.tolerance.times_eager:g}; between 1 and 8 is a test"


def _cost(op: Op) -> Iterator[str]:
    if not op.tensors:                    # text has no roofline
        return
    if op.bytes.strip() == "0":
        yield "declares no bytes: a call moves at least its inputs"
    for name in ("flops", "bytes"):
        cost = parse(getattr(op, name))
        for case in op.cases:
            facts = read(op, case_values(op, case, op.dtypes[0]))
            if any(facts.get(n) is None for n in cost.names):
                continue
            value = cost(facts)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                yield f"{name} of case {dict(case)} is {value!r}"


# Checks of a kernel.

def _loads(kernel: Kernel) -> Iterator[str]:
    if loading.availability(kernel) is not None:
        return                                 # which is the reason why it does not load
    try:
        accepted = accepted_params(kernel.id, kernel.op, loading.load(kernel))
    except loading.LoadFailed:                 # with a reason, too
        return
    restricted = {leaf.fact.partition(".")[0] for rule in kernel.requires for leaf in rule.leaves()}
    for p in kernel.op.params:
        handled = (*accepted, *restricted, "enable_gqa", kernel.op.variant)
        if not p.required and p.name not in handled and not _forbidden(
                kernel.op, p.name, [facts for _, facts in _accepted_calls(kernel)]):
            yield (f"does not take {p.name}, and no rule holds it at its default: it would be "
                   "ignored in silence")


def _nvidia_device(name: str, sm: int, generation: str, cores: int) -> Device:
    return Device("cuda", 0, name, "nvidia", sm=sm, gpu_generation=generation,
                  tensor_core_generation=cores, supports_bf16=True, supports_fp8=sm >= 89,
                  supports_fp4=sm >= 100, torch_version=str(torch.__version__),
                  runtime_version="13.0")


@lru_cache(maxsize=None)
def _device_models() -> tuple[Device, ...]:
    """Returns models of the hardware that a kernel may be for, whatever this machine has."""
    cpu = hardware.probe("cpu")
    return (replace(cpu, isa=CPU_ISA, supports_bf16=True),
            replace(cpu, isa=("avx2",), supports_bf16=False),
            _nvidia_device("H200", 90, "hopper", 4), _nvidia_device("B200", 100, "blackwell", 5),
            _nvidia_device("A100", 80, "ampere", 3),
            Device("cuda", 0, "MI300X", "amd", arch="gfx942", gpu_generation="cdna3",
                   supports_bf16=True,
                   supports_fp8=True, torch_version=str(torch.__version__)))


@lru_cache(maxsize=None)
def _known_calls(op: Op) -> tuple[tuple[frozenset[str], Facts], ...]:
    """Returns (given arguments, facts) of every case at every dtype, with and without gradients."""
    return tuple(row for dtype in op.dtypes
                 for case in (*op.cases, *small_stress(op), *gradient_cases(op))
                 for row in _call_rows(op, case_outline(op, case, dtype)))


def _call_rows(op: Op, values: Mapping[str, Any]) -> Iterator[tuple[frozenset[str], Facts]]:
    arguments, facts = given_arguments(op, values), read(op, values)
    yield arguments, facts
    if op.differentiable:
        yield arguments, {**facts, "grad": True, **{
            f"{n}.requires_grad": True for n in op.differentiable if isinstance(values[n], Tensor)}}


@lru_cache(maxsize=None)
def _accepted_calls(kernel: Kernel) -> list[tuple[frozenset[str], Facts]]:
    """Returns the calls that the kernel would serve on some device, with the facts of that
    device."""
    accepted: list[tuple[frozenset[str], Facts]] = []
    for device in _allowed_devices(kernel):
        # on further devices a sample is enough
        rows = _known_calls(kernel.op) if not accepted else _known_calls(kernel.op)[::5]
        accepted += [(arguments, {**facts, **device}) for arguments, facts in rows
                     if next(kernel.reasons({**facts, **device}), None) is None]
    return accepted


def _allowed_devices(kernel: Kernel) -> list[Mapping[str, Any]]:
    """Returns the facts of the devices that the kernel's rules on hardware allow."""
    facts_of_models = [device.facts() for device in _device_models()]
    return [facts for facts in facts_of_models if all(
        r.check(facts) is None for r in kernel.requires
        if {leaf.fact for leaf in r.leaves()} <= facts.keys())]


def _rules(kernel: Kernel) -> Iterator[str]:
    for rule in kernel.requires:
        unknown = sorted({leaf.fact for leaf in rule.leaves()} - kernel.op.fact_names)
        if unknown:
            yield (f"the rule '{rule}' reads {', '.join(unknown)}, which lz.{kernel.op.name} does "
                   "not have")
    accepted = _accepted_calls(kernel)
    if not accepted:
        return                                 # reported by _claims
    for rule in kernel.requires:
        if not _can_refuse(rule, kernel.op, [facts for _, facts in accepted]):
            yield f"the rule '{rule}' refuses no call at all: leave it out"


def _can_refuse(rule: Condition, op: Op, accepted: Sequence[Facts]) -> bool:
    """Can the rule alone refuse a call: an accepted one with only the facts changed that the rule
    reads?"""
    calls = [accepted[0], *accepted[1::max(len(accepted) // 8, 1)]]
    return any(_refuses(rule, {**facts, **change}) for change in _violating_facts(rule, op)
               for facts in calls)


def _refuses(rule: Condition, facts: Facts) -> bool:
    try:
        return rule.check(facts) is not None
    except TypeError:                          # a text where the rule compares numbers
        return False


def _violating_facts(rule: Condition, op: Op) -> Iterator[Facts]:
    """Yields changes of facts that violate a rule: beyond each limit, and each other value."""
    if isinstance(rule, When):
        for satisfying in _satisfying_facts(rule.condition):
            yield from ({**satisfying, **change} for change in _violating_facts(rule.then, op))
    elif isinstance(rule, AnyOf):
        changes: list[Facts] = [{}]
        for part in rule.rules:
            changes = [{**a, **b} for a in changes[:64]
                       for b in list(_violating_facts(part, op))[:8]]
        yield from changes
    else:
        yield from ({rule.fact: value} for value in _refused_values(rule, op))


def _satisfying_facts(rule: Condition) -> Iterator[Facts]:
    if isinstance(rule, When):
        yield from _satisfying_facts(rule.then)
    elif isinstance(rule, AnyOf):
        for part in rule.rules:
            yield from _satisfying_facts(part)
    else:
        yield from ({rule.fact: v} for v in rule.predicate.boundaries() if rule.predicate.holds(v))


def _refused_values(rule: Rule, op: Op) -> Iterator[Any]:
    """Values that the leaf refuses."""
    test = rule.predicate
    values = test.boundaries() + (_other_values(rule, op) if test.reads == "value" else ())
    least = 0 if rule.fact in op.dims else -math.inf           # a size is not negative
    refused = (v for v in values if not test.holds(v))
    yield from (v for v in refused if not isinstance(v, (int, float)) or v >= least)


def _other_values(rule: Rule, op: Op) -> tuple[Any, ...]:
    """Values of a fact that may be text or nothing: the choices of a parameter, dtypes, devices,
    numbers."""
    param = op.by_name.get(rule.fact)
    return param.choices if param is not None and param.choices else (
        "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool",
        "float8_e4m3fn", "float8_e5m2", "cpu", "cuda", "xpu", "mps", "nvidia", "amd", "intel",
        "subclass", "another", "BPE", None, True, False, 0, 1, 2, 3, 7, 64, 192, 1000, "ampere",
        "hopper", "blackwell")


def _claims(kernel: Kernel) -> Iterator[str]:
    op, accepted = kernel.op, _accepted_calls(kernel)
    if not accepted:
        # cases of text depend on the library that reads the tokenizer
        if op.read is None:
            yield ("accepts no case of its op on any known hardware: add a case that reaches it, "
                   "or drop it")
        return
    if not op.tensors:
        return
    for fact, value in _declared_values(kernel):
        if (not any(facts.get(fact) == value for _, facts in accepted)
            and not _in_quick_lane(kernel, fact, value) and (
                 fact == "dtype"
                 or fact in find_argument_cases(kernel, "quick", _allowed_devices(kernel))[1])):
            yield f"claims the {fact} {value}, which no case that it accepts has"
    if (kernel.differentiable and op.differentiable
        and not any(facts["grad"] for _, facts in accepted) and not any(
             leaf.fact == "grad" or leaf.fact.endswith("requires_grad") for r in kernel.requires
             for leaf in r.leaves())):
        yield "claims a backward, which no case that it accepts asks for"
    untested = set(unrestricted_arguments(kernel)).difference(
        {op.variant}, *(arguments for arguments, _ in accepted))
    if untested:
        untested &= find_argument_cases(kernel, "quick", _allowed_devices(kernel))[1]
    for name in sorted(n for n in untested
                       if not _forbidden(op, n, [facts for _, facts in accepted])):
        yield f"takes {name} and no rule limits it, but no case gives it, nor any two cases joined"


def _declared_values(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """The dtypes and variants that the declaration names."""
    limits = [r.predicate for r in kernel.requires if isinstance(r, Rule) and r.fact == "dtype"]
    if limits:
        yield from (("dtype", d) for d in kernel.op.dtypes if all(test.holds(d) for test in limits))
    yield from ((kernel.op.variant, variant) for variant in kernel.variants)


def _in_quick_lane(kernel: Kernel, fact: str, value: str) -> bool:
    """Does an accepted case of the quick lane, which sweeps sizes, have this value?"""
    dtypes = (value,) if fact == "dtype" else kernel.op.dtypes
    return any(facts.get(fact) == value and next(kernel.reasons({**facts, **device}), None) is None
               for dtype in dtypes for _, _, facts in known_cases(kernel.op, "quick", 0, dtype)
               for device in _allowed_devices(kernel))


def _forbidden(op: Op, name: str, accepted: Sequence[Facts]) -> bool:
    """Does the contract itself refuse the argument in every call that the kernel accepts?"""
    with_argument = [facts for arguments, facts in _known_calls(op) if name in arguments][:4]
    changes = [{n: v for n, v in facts.items() if n.partition(".")[0] == name}
               for facts in with_argument]
    calls = [{**facts, **change} for facts in accepted[::max(len(accepted) // 16, 1)]
             for change in changes]
    return (bool(calls) and all(any(_refuses(rule, facts) for rule in op.requires)
                                for facts in calls))

"""The declarations, checked as a whole without running a kernel: what every op and every kernel must have and keep.

An op has a reference, cases that its own contract allows, shapes and dtypes that its meta function foretells, a
tolerance for each dtype, a cost. A kernel loads or says why not; each of its rules can be met and can turn a call away
by itself; whatever it claims (a dtype, a layout, a parameter, a backward) some case of its op reaches.
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
from ...spec.expr import parse
from ...spec.kernel import Kernel, accepted_params
from ...spec.op import Op
from ...spec.rules import AnyOf, Condition, Rule, When
from ...world.catalog import Catalog
from .cases import given_by, known_cases, reaching, small_stress, unlimited
from .contract import case_values, formula, results_of
from .gradients import gradient_cases

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """Something that is not as it must be: which check, of what, what is wrong, what to do."""

    check: str
    subject: str
    problem: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}" + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Checked(Record, json="name says asked passed note seconds findings", names={"name": "check"}):
    """One check over everything it applies to."""

    name: str
    says: str
    asked: int                                 # ops or kernels it was asked of
    findings: tuple[Finding, ...] = ()
    note: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "seconds": round(self.seconds, 2)}


def static_checks(catalog: Catalog) -> Iterator[Checked]:
    """Each check over the whole catalog, as it is done."""
    ops, kernels = tuple(catalog.ops.values()), catalog.kernels
    of_ops: tuple[tuple[str, str, Callable[[Op], Iterator[str]]], ...] = (
        ("cases", "every case is a call that the contract allows, the same again for the same seed", _cases),
        ("meta", "the meta function foretells shape and dtype of every result", _meta),
        ("tolerances", "every dtype of the cases has a tolerance", _tolerances),
        ("cost", "operations and bytes of every case can be told", _cost))
    of_kernels: tuple[tuple[str, str, Callable[[Kernel], Iterator[str]]], ...] = (
        ("loads", "every kernel loads, or says why not", _loads),
        ("rules", "every rule reads a fact of its op, can be met, and turns calls away by itself", _rules),
        ("claims", "what a kernel claims, some case reaches", _claims))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, says, check in of_ops:
            yield _each(name, says, ops, check, lambda op: f"lz.{op.name}")
        for name, says, of_kernel in of_kernels:
            yield _each(name, says, kernels, of_kernel, lambda kernel: kernel.id)


def _each(name: str, says: str, subjects: Sequence[Any], check: Callable[[Any], Iterator[str]],
          named: Callable[[Any], str]) -> Checked:
    started, found = time.perf_counter(), []
    for subject in subjects:
        try:
            found += [Finding(name, named(subject), text) for text in check(subject)]
        except FAULTS as e:                    # code of a declaration may do anything
            found.append(Finding(name, named(subject), f"the check ended in {type(e).__name__}: {e}"))
    return Checked(name, says, len(subjects), tuple(found), seconds=time.perf_counter() - started)


def docs_check(root: Path) -> Checked:
    """Are the generated pages those of the declarations? Where there are such pages."""
    says, script = "the generated pages of docs/ are up to date", root / "docs" / "generate.py"
    if not script.is_file():
        return Checked("docs", says, 0, note=f"there is no {script}: not a source checkout")
    started = time.perf_counter()
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=300)
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    found = () if done.returncode == 0 else tuple(
        Finding("docs", "docs/", line, "run make docs") for line in told or ["--check failed"])
    return Checked("docs", says, 1, found, seconds=time.perf_counter() - started)


# Of an op.

def _cases(op: Op) -> Iterator[str]:
    for case in op.cases:
        for dtype in op.dtypes:
            values, again = case_values(op, case, dtype), case_values(op, case, dtype)
            facts = read(op, values)
            broken = [str(r) for rule in op.requires if (r := rule.check(facts)) is not None]
            if broken:
                yield f"case {dict(case)} at {dtype} breaks the contract: {broken[0]}"
            if any(isinstance(v, Tensor) and not torch.equal(_bits(v), _bits(again[n])) for n, v in values.items()):
                yield f"case {dict(case)} at {dtype} differs from call to call: draw from a generator with the seed"


def _bits(t: Tensor) -> Tensor:
    """NaN is to equal itself, and few types of one byte can be compared."""
    flat = t.detach().contiguous()
    return flat.view(torch.uint8) if flat.dim() and flat.numel() else flat.reshape(1).view(torch.uint8) if (
        flat.numel()) else flat.to(torch.uint8)


def _meta(op: Op) -> Iterator[str]:
    if op.read is not None:
        return
    for case in op.cases:
        values = case_values(op, case, op.dtypes[0])
        with torch.no_grad():
            made, told = formula(op, values), results_of(op.meta(**values))
        kinds = [[(tuple(t.shape), t.dtype) for t in side] for side in (made, told)]
        if kinds[0] != kinds[1]:
            yield f"case {dict(case)}: meta says {kinds[1]}, the reference gives {kinds[0]}"


def _tolerances(op: Op) -> Iterator[str]:
    if op.read is not None:
        return
    for dtype in set(op.dtypes) - op.tolerance.by_dtype.keys():
        told = [t.dtype for case in op.cases for t in results_of(op.meta(**case_values(op, case, dtype)))]
        if getattr(torch, dtype) in told:      # tokens, codes and float32 weights are judged as what they are
            yield f"gives {dtype}, which has no tolerance and would be judged by that of float32"
    for dtype, (rtol, atol) in op.tolerance.by_dtype.items():
        if not (0 <= rtol < 1 and 0 <= atol < 1):
            yield f"{dtype}: (rtol, atol) = ({rtol:g}, {atol:g}) would let anything pass"
    if not 1 <= op.tolerance.times_eager <= 8:
        yield f"times_eager = {op.tolerance.times_eager:g}; between 1 and 8 is a test"


def _cost(op: Op) -> Iterator[str]:
    if op.read is not None:                    # text has no roofline
        return
    if op.bytes.strip() == "0":
        yield "declares no bytes: a call moves at least its inputs"
    for name in ("flops", "bytes"):
        cost = parse(getattr(op, name))
        for case in op.cases:
            facts = read(op, case_values(op, case, op.dtypes[0]))
            if any(facts.get(n) is None for n in cost.names):
                continue
            told = cost(facts)
            if not isinstance(told, (int, float)) or not 0 <= told < math.inf:
                yield f"{name} of case {dict(case)} is {told!r}"


# Of a kernel.

def _loads(kernel: Kernel) -> Iterator[str]:
    if loading.availability(kernel) is not None:
        return                                 # it says why
    try:
        taken = accepted_params(kernel.id, kernel.op, loading.load(kernel))
    except loading.LoadFailed:                 # so does this
        return
    spoken = {leaf.fact.partition(".")[0] for rule in kernel.requires for leaf in rule.leaves()}
    for p in kernel.op.params:
        if not p.required and p.name not in (*taken, *spoken, "enable_gqa", kernel.op.variant) and not _forbidden(
                kernel.op, p.name, [facts for _, facts in _accepted(kernel)]):
            yield f"does not take {p.name}, and no rule holds it at its default: it would be ignored in silence"


def _gpu(name: str, sm: int, generation: str, cores: int) -> Device:
    return Device("cuda", 0, name, "nvidia", sm=sm, gpu_generation=generation, tensor_core_generation=cores,
                  supports_bf16=True, supports_fp8=sm >= 89, supports_fp4=sm >= 100,
                  torch_version=str(torch.__version__), runtime_version="13.0")


@lru_cache(maxsize=None)
def devices() -> tuple[Device, ...]:
    """Kinds of hardware that a kernel may be for, whatever is here."""
    cpu = hardware.probe("cpu")
    return (replace(cpu, isa=CPU_ISA, supports_bf16=True), replace(cpu, isa=("avx2",), supports_bf16=False),
            _gpu("H200", 90, "hopper", 4), _gpu("B200", 100, "blackwell", 5), _gpu("A100", 80, "ampere", 3),
            Device("cuda", 0, "MI300X", "amd", arch="gfx942", gpu_generation="cdna3", supports_bf16=True,
                   supports_fp8=True, torch_version=str(torch.__version__)))


@lru_cache(maxsize=None)
def _seen(op: Op) -> tuple[tuple[frozenset[str], Facts], ...]:
    """(arguments that are given, facts) of every case at every dtype, with and without gradients."""
    return tuple(row for dtype in op.dtypes for case in (*op.cases, *small_stress(op), *gradient_cases(op))
                 for row in _rows(op, case_values(op, case, dtype)))


def _rows(op: Op, values: Mapping[str, Any]) -> Iterator[tuple[frozenset[str], Facts]]:
    given, facts = given_by(op, values), read(op, values)
    yield given, facts
    if op.differentiable:
        yield given, {**facts, "grad": True, **{
            f"{n}.requires_grad": True for n in op.differentiable if isinstance(values[n], Tensor)}}


@lru_cache(maxsize=None)
def _accepted(kernel: Kernel) -> list[tuple[frozenset[str], Facts]]:
    """Of the cases, those that the kernel would serve on some device, with the facts of that device."""
    found: list[tuple[frozenset[str], Facts]] = []
    for here in _homes(kernel):
        rows = _seen(kernel.op) if not found else _seen(kernel.op)[::5]        # what is another on other hardware
        found += [(given, {**facts, **here}) for given, facts in rows
                  if next(kernel.reasons({**facts, **here}), None) is None]
    return found


def _homes(kernel: Kernel) -> list[Mapping[str, Any]]:
    """The facts of the devices that the kernel's rules on hardware alone allow."""
    known = [device.facts() for device in devices()]
    return [here for here in known if all(
        r.check(here) is None for r in kernel.requires if {leaf.fact for leaf in r.leaves()} <= here.keys())]


def _rules(kernel: Kernel) -> Iterator[str]:
    for rule in kernel.requires:
        unknown = sorted({leaf.fact for leaf in rule.leaves()} - kernel.op.fact_names)
        if unknown:
            yield f"the rule '{rule}' reads {', '.join(unknown)}, which lz.{kernel.op.name} does not have"
    met = _accepted(kernel)
    if not met:
        return                                 # told by _claims
    for rule in kernel.requires:
        if not _can_refuse(rule, kernel.op, [facts for _, facts in met]):
            yield f"the rule '{rule}' refuses no call at all: leave it out"


def _can_refuse(rule: Condition, op: Op, met: Sequence[Facts]) -> bool:
    """Is there a call that it turns away: one that is served, but for the facts that the rule reads?"""
    tried = [met[0], *met[1::max(len(met) // 8, 1)]]
    return any(_refuses(rule, {**facts, **change}) for change in _breaking(rule, op) for facts in tried)


def _refuses(rule: Condition, facts: Facts) -> bool:
    try:
        return rule.check(facts) is not None
    except TypeError:                          # a change that made text of a number
        return False


def _breaking(rule: Condition, op: Op) -> Iterator[Facts]:
    """Changes of facts that would break a rule: beyond each limit, at each other value."""
    if isinstance(rule, When):
        for meets in _meeting(rule.condition):
            yield from ({**meets, **change} for change in _breaking(rule.then, op))
    elif isinstance(rule, AnyOf):
        changes: list[Facts] = [{}]
        for part in rule.rules:
            changes = [{**a, **b} for a in changes[:64] for b in list(_breaking(part, op))[:8]]
        yield from changes
    else:
        yield from ({rule.fact: value} for value in _others(rule, op))


def _meeting(rule: Condition) -> Iterator[Facts]:
    if isinstance(rule, When):
        yield from _meeting(rule.then)
    elif isinstance(rule, AnyOf):
        for part in rule.rules:
            yield from _meeting(part)
    else:
        yield from ({rule.fact: v} for v in rule.predicate.boundaries() if rule.predicate.holds(v))


def _others(rule: Rule, op: Op) -> Iterator[Any]:
    """Values that the leaf refuses."""
    test = rule.predicate
    values = test.boundaries() + (_words(rule, op) if test.reads == "value" else ())
    least = 0 if rule.fact in op.dims else -math.inf           # a size is not negative
    refused = (v for v in values if not test.holds(v))
    yield from (v for v in refused if not isinstance(v, (int, float)) or v >= least)


def _words(rule: Rule, op: Op) -> tuple[Any, ...]:
    """Values of a fact that may be text or nothing: the choices of a parameter, dtypes, devices, numbers."""
    param = op.by_name.get(rule.fact)
    return param.choices if param is not None and param.choices else (
        "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool", "float8_e4m3fn",
        "float8_e5m2", "cpu", "cuda", "xpu", "mps", "nvidia", "amd", "intel", "subclass", "another", "BPE", None,
        True, False, 0, 1, 2, 3, 7, 64, 192, 1000, "ampere", "hopper", "blackwell")


def _claims(kernel: Kernel) -> Iterator[str]:
    op, met = kernel.op, _accepted(kernel)
    if not met:
        if op.read is None:                    # the cases of text are for whichever library reads the tokenizer
            yield "accepts no case of its op on any known hardware: add a case that reaches it, or drop it"
        return
    if op.read is not None:
        return
    for fact, value in _named(kernel):
        if not any(facts.get(fact) == value for _, facts in met) and not _swept(kernel, fact, value) and (
                fact == "dtype" or fact in reaching(kernel, "quick", _homes(kernel))[1]):
            yield f"claims the {fact} {value}, which no case that it accepts has"
    if kernel.differentiable and op.differentiable and not any(facts["grad"] for _, facts in met) and not any(
            leaf.fact == "grad" or leaf.fact.endswith("requires_grad") for r in kernel.requires for leaf in r.leaves()):
        yield "claims a backward, which no case that it accepts asks for"
    unreached = set(unlimited(kernel)).difference({op.variant}, *(given for given, _ in met))
    if unreached:
        unreached &= reaching(kernel, "quick", _homes(kernel))[1]
    for name in sorted(n for n in unreached if not _forbidden(op, n, [facts for _, facts in met])):
        yield f"takes {name} and no rule limits it, but no case gives it, nor any two cases joined"


def _named(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """The dtypes and variants that the declaration names."""
    limits = [r.predicate for r in kernel.requires if isinstance(r, Rule) and r.fact == "dtype"]
    if limits:
        yield from (("dtype", d) for d in kernel.op.dtypes if all(test.holds(d) for test in limits))
    yield from ((kernel.op.variant, variant) for variant in kernel.variants)


def _swept(kernel: Kernel, fact: str, value: str) -> bool:
    """Is there such a case among the many of the quick lane, which go through sizes?"""
    dtypes = (value,) if fact == "dtype" else kernel.op.dtypes
    return any(facts.get(fact) == value and next(kernel.reasons({**facts, **here}), None) is None
               for dtype in dtypes for _, _, facts in known_cases(kernel.op, "quick", 0, dtype)
               for here in _homes(kernel))


def _forbidden(op: Op, name: str, met: Sequence[Facts]) -> bool:
    """Does the contract itself refuse the argument in every call that the kernel serves?"""
    giving = [facts for given, facts in _seen(op) if name in given][:4]
    changes = [{n: v for n, v in facts.items() if n.partition(".")[0] == name} for facts in giving]
    tried = [{**facts, **change} for facts in met[::max(len(met) // 16, 1)] for change in changes]
    return bool(tried) and all(any(_refuses(rule, facts) for rule in op.requires) for facts in tried)

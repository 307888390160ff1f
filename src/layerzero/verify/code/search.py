"""Looks for calls that reach the code of a kernel which no other check has run, and judges them.

Cases are chosen by the contract; what a kernel does for some calls alone, it says in its code. So
its code is traced while it is checked (tracing.py), and where a part has not run, calls are drawn
from its constants (drawn_calls.py) and changed, from those that came nearest, until one runs it or
time is up. A call that does is judged as any other, with other seeds, sizes and dtypes too.
"""

from __future__ import annotations

import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.drawn_sizes import arguments_of_cases, consistent, counts_of
from ..cases.generated import HALVES, Case, case_key, relative_cost
from ..cases.pairs import accepted_pool
from ..certification.calls import passes_extra_check
from ..certification.checks import LONG_HALF_FLOPS
from ..certification.circumstances.call_circumstances import circumstances
from ..certification.circumstances.grad_circumstances import RecordingGradients
from ..certification.circumstances.value_circumstances import value_circumstances
from ..diagnosis.circumstance_names import is_of_layout
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import (
    AS_DECLARED,
    CaseResult,
    Circumstance,
    accepts_case,
    call,
    case_facts,
    case_values,
    check_case,
    load_once,
    refusals,
    results_of,
)
from ..kernel.gradients import check_gradients, gradient_cases, requiring_grad
from .drawn_calls import (
    Drawn,
    OtherContents,
    Probe,
    crossed_calls,
    given_numbers,
    is_affordable,
    limits_of,
    sized_calls,
)
from .own_code import own_values
from .tracing import Tracer

SEARCH_S = {"quick": 6.0, "full": 30.0, "stress": 60.0}
# Words of conditions, and what they are about.
OF_SIZES = {"shape", "size", "numel", "ndim", "dim", "len", "nbytes"}
OF_VALUES = {"int", "float", "bool", "item", "tolist", "all", "any", "equal", "max", "min", "sum",
             "diff", "unique", "amax", "count_nonzero", "eq", "isnan", "isinf"}
OF_LAYOUT = {"stride", "is_contiguous", "data_ptr", "storage_offset", "untyped_storage", "_base"}
OF_GRADIENTS = {"requires_grad", "is_grad_enabled", "needs_input_grad", "grad_fn", "is_leaf"}
OF_MODES = {"is_inference", "is_inference_mode_enabled", "is_autocast_enabled", "_version",
            "get_default_dtype", "get_num_threads", *OF_GRADIENTS}
MODE_WORDS = ("mode", "autocast", "set_", "gradients", "parameters", "changed")
VARIED = 6                                     # sizes and arguments, of such a call
SEEDS = 3                                      # of a call that reaches what no other has


def search_unrun_code(kernel: Kernel, tracer: Tracer, device: str, lane: str, seed: int,
                      limit_s: float | None = None) -> Iterator[CaseResult]:
    """Yields the results of calls that reach code which had not run before them."""
    if tracer.complete:
        return
    search = _Search(kernel, tracer, device, lane, seed)
    for probe in search.probes(SEARCH_S[lane] if limit_s is None else limit_s):
        if tracer.complete:
            return
        before = tracer.count()
        raised = _runs_into_fault(kernel, probe, tracer, device, seed)
        if tracer.count() == before and not raised:
            continue
        search.learn(probe)
        for near in (probe, *_variations(kernel, probe, search.numbers, search.rng)):
            # what cannot be drawn, altered or computed by the formula is no matter of the kernel
            with suppress(*FAULTS):
                yield from _judged(kernel, near, device, seed, SEEDS if near is probe else 1)


class _Search:
    """Draws calls, those more often that conditions of the code speak of."""

    def __init__(self, kernel: Kernel, tracer: Tracer, device: str, lane: str, seed: int) -> None:
        self.kernel, self.tracer, self.device, self.seed = kernel, tracer, device, seed
        op, self.rng = kernel.op, random.Random(f"code {kernel.id} {seed}")
        self.named = [*own_values(kernel.load, load_once(kernel))]
        every = tuple(dict.fromkeys((*op.dtypes[:1], *(
            d for d in op.dtypes if d == "bfloat16"), *op.dtypes)))
        accepted = {dtype: [(case, dtype) for case in op.cases
                            if accepts(kernel, case, dtype, device, seed)] for dtype in every}
        self.dtypes = [dtype for dtype in every if accepted[dtype]] or [*every[:1]]
        self.own = [cell for dtype in self.dtypes[:2] for cell in accepted[dtype]]
        if op.tensors:
            self.own += [(case, dtype) for _, case, dtype in accepted_pool(
                kernel, device, lane, seed)]
        self.circumstances = [*circumstances(op, "full"), *value_circumstances(op)]
        self.reached: list[Probe] = []         # what led further
        self.read_conditions()

    def read_conditions(self) -> None:
        """Reads what the conditions before unrun code speak of."""
        spoken = self.tracer.conditions()
        words = {word for word in spoken if isinstance(word, str)}
        self.numbers = limits_of(self.named, spoken)
        op = self.kernel.op
        self.arguments = [p for p in op.params if p.name in words]
        of_layout, of_modes = bool(words & OF_LAYOUT), bool(words & OF_MODES)
        self.fitting = [c for c in self.circumstances if any(
            p.name in c.name.split() for p in self.arguments) or (
                of_modes and any(word in c.name for word in MODE_WORDS)) or (
                    of_layout and is_of_layout(c.name))]
        self.bordering = [Probe(case, dtype) for case, dtype in self.tracer.border_calls()
                          if accepts(self.kernel, case, dtype, self.device, self.seed)]
        self.weights = {
            "sized": 4 if words & OF_SIZES else 2, "crossed": 3,
            "contents": 8 if words & OF_VALUES else 3,
            "circumstances": 1, "fitting": (8 if of_layout or of_modes else 2)
            if self.fitting else 0, "numbers": 2 if any(p.kind in ("int", "float")
                                                        for p in self.arguments) else 1,
            "gradients": 3 if words & OF_GRADIENTS else 1,
            "together": 2 if self.reached or self.bordering else 0}
        self.streams: dict[str, Iterator[Probe | None]] = {
            name: getattr(self, f"_{name}")() for name in self.weights}

    def learn(self, probe: Probe) -> None:
        self.reached.append(probe)
        self.read_conditions()

    def probes(self, limit_s: float) -> Iterator[Probe]:
        """Yields calls of every kind, as long as there are some and for so much CPU time."""
        ends = time.thread_time() + limit_s
        while self.own and any(self.weights.values()) and time.thread_time() < ends:
            kind, = self.rng.choices([*self.weights], [*self.weights.values()])
            try:
                probe = next(self.streams[kind])
            except StopIteration:
                self.weights[kind] = 0
                continue
            if probe is not None and not _is_too_long(self.kernel.op, probe, self.device) and (
                    accepts(self.kernel, probe.case, probe.dtype, self.device, self.seed)):
                yield probe

    def _dtype(self) -> str:
        return self.dtypes[0] if self.rng.random() < 0.6 else self.rng.choice(self.dtypes)

    def _cell(self) -> Probe:
        """Returns a call to change: one at the border of what ran, or one of the op's own."""
        if self.reached and self.rng.random() < 0.3:
            return self.rng.choice(self.reached)
        if self.bordering and self.rng.random() < 0.6:
            return self.rng.choice(self.bordering)
        return Probe(*self.rng.choice(self.own))

    def _with(self, circumstance: Circumstance) -> Probe:
        probe = (self.rng.choice(self.bordering) if self.bordering and self.rng.random() < 0.5
                 else self._cell())
        if probe.circumstance is AS_DECLARED:
            case = self._near(probe.case) if self.rng.random() < 0.3 else probe.case
            return probe._replace(case=case, circumstance=circumstance)
        if self.rng.random() < 0.7:
            circumstance = Together(probe.circumstance, circumstance)
        return probe._replace(circumstance=circumstance)

    def _near(self, case: Case) -> Case:
        """Returns the case with another size: of a batch of one nothing is shared."""
        op = self.kernel.op
        sizes = [n for n, d in numbers_of(op).items() if type(d) is int and d > 0]
        return consistent(op, {**case, self.rng.choice(sizes): self.rng.choice((2, 3, 5))
                               }) if sizes else case

    def _sized(self) -> Iterator[Probe]:
        if not self.kernel.op.tensors:
            return
        for case in sized_calls(self.kernel.op, self.numbers, self.rng):
            yield Probe(case, self._dtype(), records=self.rng.random() < 0.2)

    def _crossed(self) -> Iterator[Probe | None]:
        for case in crossed_calls(self.kernel.op, self.numbers, self.rng,
                                  [probe.case for probe in self.reached]):
            records = self.rng.random() < 0.2
            yield None if case is None else Probe(case, self._dtype(), records=records)

    def _together(self) -> Iterator[Probe | None]:
        """Yields what led further with other sizes and arguments."""
        led = [*self.reached, *self.bordering]
        for case in crossed_calls(self.kernel.op, self.numbers, self.rng,
                                  [probe.case for probe in led]) if led else ():
            yield None if case is None else self.rng.choice(led)._replace(case=case)

    def _contents(self) -> Iterator[Probe]:
        for number in itertools.count() if self.kernel.op.tensors else ():
            names = tuple(p.name for p in self.arguments) if self.rng.random() < 0.7 else ()
            yield self._with(OtherContents(1000 * self.seed + number, tuple(self.numbers), names))

    def _circumstances(self) -> Iterator[Probe]:
        return self._each(self.circumstances)

    def _fitting(self) -> Iterator[Probe]:
        return self._each(self.fitting)

    def _each(self, some: Sequence[Circumstance]) -> Iterator[Probe]:
        """Yields every circumstance once, and then again."""
        while some:
            for circumstance in self.rng.sample(some, len(some)):
                yield self._with(circumstance)

    def _numbers(self) -> Iterator[Probe]:
        op = self.kernel.op
        for circumstance in given_numbers(op, self.arguments or op.params, self.numbers, self.rng):
            yield from (self._with(circumstance) for _ in range(3))

    def _gradients(self) -> Iterator[Probe]:
        cases = gradient_cases(self.kernel.op) if self.kernel.differentiable else ()
        while cases:
            yield Probe(self.rng.choice(cases), self.rng.choice(self.dtypes[:2]), records=True)


class Together(Circumstance):
    """Two circumstances at once."""

    def __init__(self, first: Circumstance, second: Circumstance) -> None:
        self.first, self.second = first, second
        self.name = f"{first.name}, {second.name}"
        self.runs = max(first.runs, second.runs)
        self.even, self.alike = first.even and second.even, first.alike or second.alike
        self.may_be_refused = first.may_be_refused or second.may_be_refused
        self.records = first.records and second.records

    @property
    def keeps_values(self) -> bool:
        return self.first.keeps_values and self.second.keeps_values

    def as_formula_takes(self, values: dict[str, Any]) -> dict[str, Any]:
        return self.second.as_formula_takes(self.first.as_formula_takes(values))

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        altered = self.first.alter(op, values)
        return None if altered is None else self.second.alter(op, altered)

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        prepared = self.first.before(kernel, values, other)
        return None if prepared is None else self.second.before(kernel, prepared, other)

    @contextmanager
    def around(self, device: str) -> Iterator[None]:
        with self.first.around(device), self.second.around(device):
            yield


def accepts(kernel: Kernel, case: Case, dtype: str, device: str, seed: int) -> bool:
    """Does the kernel accept the call, if it is one?"""
    try:
        return accepts_case(kernel, case, dtype, device, seed)
    except FAULTS:                             # no call
        return False


def _is_too_long(op: Op, probe: Probe, device: str) -> bool:
    """Is it a large call in 16 bits on a CPU? One without products of these takes a thousand times
    as long for it."""
    return (device == "cpu" and probe.dtype in HALVES
            and (relative_cost(op, probe.case) or math.inf) > LONG_HALF_FLOPS)


def _runs_into_fault(kernel: Kernel, probe: Probe, tracer: Tracer, device: str, seed: int) -> bool:
    """Calls the kernel, whose code is traced. Does it raise, for a call that it accepts?"""
    op, circumstance = kernel.op, probe.circumstance
    tracer.next_check()
    try:
        drawn = case_values(op, probe.case, probe.dtype, device, seed)
        values = (circumstance.change(op, drawn) if isinstance(circumstance, Drawn)
                  else circumstance.alter(op, drawn))
        if values is None:
            return False
        if probe.records:
            values = requiring_grad(op, values, _some(op.differentiable, probe))
        if op.extra_check is not None or circumstance is not AS_DECLARED or probe.records:
            if refusals(kernel, values):
                return False
            if op.extra_check is not None:
                op.extra_check(values, read(op, values))
    except FAULTS:
        return False
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(probe.records), \
                circumstance.around(device):
            warnings.simplefilter("ignore")
            prepared = circumstance.before(kernel, values, partial(
                case_values, op, probe.case, probe.dtype, device, seed + 1))
            if prepared is None:
                return False
            with tracer.watching():
                results = results_of(call(kernel, prepared))
                if probe.records:
                    _backward(results, prepared, _source(results, probe))
    except FAULTS:
        return True
    return False


def _some(names: Sequence[str], probe: Probe) -> str:
    """Returns one tensor that alone requires a gradient, for every other call; else "": all do."""
    number = sum(case_key(probe.case).encode())
    return names[number // 2 % len(names)] if names and number % 2 else ""


def _source(results: Sequence[Any], probe: Probe) -> int | None:
    """Returns the one of several results that alone has a gradient, for every other call."""
    number = sum(case_key(probe.case).encode()) // 4
    several = [i for i, r in enumerate(results) if isinstance(r, Tensor) and r.requires_grad]
    return several[number % len(several)] if len(several) > 1 and number % 2 else None


def _backward(results: Sequence[Any], values: dict[str, Any], source: int | None) -> None:
    wanted = [v for v in values.values() if isinstance(v, Tensor) and v.requires_grad]
    given = [r for i, r in enumerate(results) if isinstance(r, Tensor) and r.requires_grad
             and source in (None, i)]
    if wanted and given:
        torch.autograd.grad(given, wanted, [torch.ones_like(r) for r in given], allow_unused=True)


def _variations(kernel: Kernel, probe: Probe, limits: Sequence[int],
                rng: random.Random) -> Iterator[Probe]:
    """Yields calls like one that has reached a part of the code: what that part does may show at
    other sizes, beside other arguments and in other dtypes only."""
    op, numbers = kernel.op, numbers_of(kernel.op)
    cases: list[Case] = []
    for name in rng.sample(list(numbers), min(len(numbers), VARIED)):
        n = probe.case.get(name, numbers[name])
        if type(n) is int:
            cases += [{**probe.case, name: m} for m in (
                2 * n + 1, n + 1, *(limit + 3 for limit in limits[:2] if limit > n))]
        elif isinstance(n, tuple) and n and all(type(i) is int for i in n):
            cases += [{**probe.case, name: (*n[:-1], 2 * n[-1] + 3)}]
    lengths = [n for n, d in numbers.items() if type(d) is int and n not in counts_of(op)]
    cases += [{**probe.case, **dict.fromkeys(lengths, limit + 3)} for limit in limits[:2]]
    options = [o for o in arguments_of_cases(op) if o]
    cases += [{**probe.case, **o} for o in rng.sample(options, min(len(options), VARIED))]
    # what the circumstance alone has reached, beside more keys and wider rows
    if probe.circumstance is not AS_DECLARED:
        cases += rng.sample(op.cases, min(len(op.cases), 2 * VARIED))
    for case in cases:
        fixed = consistent(op, case)
        if is_affordable(op, fixed):
            yield probe._replace(case=fixed)
    yield from (probe._replace(dtype=dtype) for dtype in op.dtypes if dtype != probe.dtype)


def _judged(kernel: Kernel, probe: Probe, device: str, seed: int,
            seeds: int) -> Iterator[CaseResult]:
    op, circumstance = kernel.op, probe.circumstance
    if (_is_too_long(op, probe, device)
            or not accepts(kernel, probe.case, probe.dtype, device, seed)
            or not _is_allowed(op, probe, device, seed)):
        return
    if probe.records and circumstance is AS_DECLARED:
        yield check_case(kernel, probe.case, probe.dtype, device, seed, RecordingGradients())
        values = case_values(op, probe.case, probe.dtype, device, seed)
        count = len(results_of(op.meta(**values)))
        yield from (check_gradients(kernel, probe.case, probe.dtype, device, seed,
                                    _some(op.differentiable, probe), source=source)
                    for source in (None, *(range(count) if count > 1 else ())))
        return
    for other in range(seeds):
        yield check_case(kernel, probe.case, probe.dtype, device, seed + other, circumstance)


def _is_allowed(op: Op, probe: Probe, device: str, seed: int) -> bool:
    """Does the contract allow the case?"""
    try:
        values = case_values(op, probe.case, probe.dtype, device, seed)
        return passes_extra_check(op, values, case_facts(op, probe.case, probe.dtype, device, seed))
    except FAULTS:
        return False

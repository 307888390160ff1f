"""Is a kernel safe in a CUDA graph? Shown by capturing it: the replays must follow inputs that have changed.

A kernel is captured twice in one graph, each call with inputs of its own. Then both get other numbers in the same
memory, three times over, each replay on another stream; every result is judged as its contract judges it. So a kernel
that waits for the host, works on another stream, keeps what it saw at the capture, or hands out the same memory twice
is found by what it does, whatever it declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...dispatch import facts as reading
from ...machine import faults, hardware
from ...machine.loading import LoadFailed
from ...operate.graphs import WARM_UPS, Attempt, Calls, Problem, attempt, first_cause, problem_of, why_no_capture
from ...operate.inspection import dispatcher_of
from ...select.policy import suggest
from ...spec.errors import ConfigError
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...world import certificates, context
from ...world import snapshot as worlds
from ...world.certificates import Certificate
from ..comparison import compare, tolerance_of
from .contract import call, case_values, judge, loaded, maybe_luck, refusals, results_of, upcast

REPLAYS = 3
MOST_CASES = 2                                 # captured of each kernel: the first that it takes, and the last
FACTORS = (-1.0, 0.5, -1.25)                   # of a user's inputs, replay by replay; a norm undoes a positive one


@dataclass(frozen=True)
class GraphVerdict:
    """True where a capture has shown that it is safe. `safe` None: it could not be tried, and `why` says why."""

    kernel: str
    safe: bool | None
    why: str = ""
    problems: tuple[Problem, ...] = ()
    pool_bytes: int = 0
    captures: int = 0                          # that were made and replayed for this
    source: str = "capture"                    # capture | certificate

    def __bool__(self) -> bool:
        return self.safe is True

    def __str__(self) -> str:
        told = {True: "safe", False: "not safe", None: "not known to be safe"}[self.safe]
        return f"{self.kernel}: {told} in a CUDA graph" + (f": {self.why}" if self.why else "")


def is_graph_safe(kernel_or_op: str | Kernel | Callable[..., Any], /, *args: Any, **kwargs: Any) -> GraphVerdict:
    """Can this kernel be captured in a CUDA graph on this machine? With an op and a call: the kernel it would get.

    What its certificate says, if that holds and says it; else it is captured now. With a call, that very call is.
    """
    kernel = kernel_or_op if isinstance(kernel_or_op, Kernel) else (
        worlds.current().catalog.by_id.get(kernel_or_op) if isinstance(kernel_or_op, str) else None)
    if absent := why_no_capture():
        return GraphVerdict(kernel.id if kernel else str(kernel_or_op), None, absent)
    if kernel is not None and not args and not kwargs:
        return recorded(kernel) or prove(kernel)
    return _of_call(kernel, kernel.op.name if kernel else _op_name(kernel_or_op), args, kwargs)


def _op_name(op: Any) -> str:
    known = worlds.current().catalog.by_id
    if isinstance(op, str) and "." in op:
        raise ConfigError(f"there is no kernel {op!r}{suggest(op, known)}")
    return dispatcher_of(op).op.name


def _of_call(kernel: Kernel | None, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GraphVerdict:
    found = dispatcher_of(op)
    values = found.order_arguments(args, kwargs)
    if kernel is None:
        with context.overriding({"graph_strict_mode": True}) as asked:
            plan = worlds.current().plan(found.op, found.facts(values), asked, thorough=True)
        if not plan.steps:
            told = Problem("no kernel", str(plan))
            return GraphVerdict(op, False, "no kernel may serve this call in a graph", (told,))
        kernel = worlds.current().catalog.by_id[plan.steps[0].kernel]
    named = dict(zip(found.names, values))
    if reasons := refusals(kernel, named):
        return GraphVerdict(kernel.id, None, "it does not take this call: " + "; ".join(r.message for r in reasons))
    problems, made = captured(kernel, named, None, str(reading.dtype_name(_first(named).dtype)))
    return _concluded(kernel, problems, made, 1)


def recorded(kernel: Kernel) -> GraphVerdict | None:
    """What its certificate says; None if there is none that holds, or it does not say."""
    found = certificates.standing([kernel], hardware.probe("cuda"))[kernel.id]
    if not isinstance(found, Certificate) or found.graph_safe is None:
        return None
    return GraphVerdict(kernel.id, found.graph_safe, found.graph_problem, (), found.graph_bytes, 0, "certificate")


def prove(kernel: Kernel) -> GraphVerdict:
    """Capture the kernel with cases of its op, and replay. Selection in this process knows the outcome afterwards."""
    problems: list[Problem] = []
    made, tried = Attempt(), 0
    try:
        loaded(kernel)
    except LoadFailed as e:
        return GraphVerdict(kernel.id, None, e.reason.message)
    for values, others, dtype in _cells(kernel):
        found, made = captured(kernel, values, others, dtype)
        problems += found
        tried += 1
        if problems or tried == MOST_CASES:
            break
    return _concluded(kernel, problems, made, tried)


def _concluded(kernel: Kernel, problems: list[Problem], made: Attempt, tried: int) -> GraphVerdict:
    if not tried:
        return GraphVerdict(kernel.id, None, "it takes no case of its op whose inputs can be changed in place")
    why = str(problems[0]) if problems else ""
    if not made.begun:                         # it fails by itself, so nothing was shown about graphs
        return GraphVerdict(kernel.id, None, why, tuple(problems), 0, tried)
    certificates.note_capture(kernel, why)
    if worlds.current().catalog.by_id.get(kernel.id) is kernel:
        worlds.publish(lambda w: w.replace(), f"capture:{kernel.id}")
    return GraphVerdict(kernel.id, not problems, why, tuple(problems), made.pool_bytes, tried)


def certificate_fields(kernel: Kernel, device: str) -> dict[str, Any]:
    """For its certificate: what a capture has shown."""
    if device != "cuda" or kernel.op.read is not None or why_no_capture():
        return {}
    found = prove(kernel)
    return {"graph_safe": found.safe, "graph_problem": found.why if found.safe is False else "",
            "graph_bytes": found.pool_bytes}


# One kernel, one case.

Values = dict[str, Any]
Others = list[tuple[Values, Values]]


def _cells(kernel: Kernel) -> Iterator[tuple[Values, Others | None, str]]:
    """Inputs of the op's cases that the kernel takes, with others of the same shapes for each replay."""
    op = kernel.op
    cells = [(case, dtype) for dtype in reversed(op.dtypes) for case in op.cases]
    for case, dtype in (cells[0], *reversed(cells[1:])) if cells else ():
        values = case_values(op, case, dtype, "cuda")
        if not _changeable(values) or refusals(kernel, values):
            continue
        others = [(case_values(op, case, dtype, "cuda", 2 * i + 1), case_values(op, case, dtype, "cuda", 2 * i + 2))
                  for i in range(REPLAYS)]
        if all(_alike(values, given) for pair in others for given in pair):
            yield values, others, dtype


def _changeable(values: Values) -> bool:
    """Can other numbers be written over every tensor? Not over an expanded one, and there must be some."""
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    return bool(tensors) and not any(isinstance(v, torch.Generator) for v in values.values()) and all(
        t.numel() and not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape)) for t in tensors)


def _alike(a: Values, b: Values) -> bool:
    return all((x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()) if isinstance(x, Tensor)
               and isinstance(y, Tensor) else type(x) is type(y) and x == y for x, y in ((a[n], b[n]) for n in a))


def captured(kernel: Kernel, values: Values, others: Others | None, dtype: str) -> tuple[list[Problem], Attempt]:
    """Capture two calls, replay with other inputs, judge. `others` None: the same inputs times a factor."""
    first, second = _copied(values), _copied(values)
    if others is None:
        others = [(_scaled(values, factor), _scaled(values, -factor)) for factor in FACTORS]
    with torch.no_grad():
        made = attempt(lambda: (results_of(call(kernel, first)), results_of(call(kernel, second))))
        problems = list(made.problems)
        streams = (torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream())
        for number, (pair, stream) in enumerate(zip(others, streams), 1):
            if problems:
                break
            for static, fresh in zip((first, second), pair):
                _write(static, fresh)
            _replay(made.graph, stream)
            for which, static, result in zip(("first", "second"), (first, second), made.result):
                problems += _misjudged(kernel.op, dtype, static, result, f"replay {number}, {which} call")
    return problems, made


def _replay(graph: Any, stream: Any) -> None:
    """On `stream`, which need not be the one of the capture."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _misjudged(op: Op, dtype: str, values: Values, result: tuple[Any, ...], when: str) -> list[Problem]:
    truth, eager = results_of(op.reference(**upcast(values))), results_of(op.reference(**values))
    judged = [judge(op, dtype, f"result {i}", got, got, true, plain)
              for i, (got, true, plain) in enumerate(zip(result, truth, eager)) if isinstance(got, Tensor)]
    complaints = [c.text for found in judged for c in found.complaints]
    if not complaints or maybe_luck(result, max(found.ratio for found in judged)):
        return []                              # a result that is just outside is a matter of rounding, not of graphs
    return [Problem("stale result", f"{when}: the result does not follow the inputs: {complaints[0]}")]


def _copied(values: Values) -> Values:
    return {n: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).copy_(v)
            if isinstance(v, Tensor) else v for n, v in values.items()}


def _scaled(values: Values, factor: float) -> Values:
    return {n: (v.float() * factor).to(v.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in values.items()}


def _write(static: Values, fresh: Values) -> None:
    for name, tensor in static.items():
        if isinstance(tensor, Tensor):
            tensor.copy_(fresh[name])


def _first(values: Mapping[str, Any]) -> Tensor:
    return next(v for v in values.values() if isinstance(v, Tensor))


# A user's function.

@dataclass(frozen=True)
class CapturedCall:
    """A kernel that a captured function called through lz. `shown`: did a capture of its own show it to be safe?"""

    op: str
    kernel: str
    count: int
    shown: bool | None


@dataclass(frozen=True)
class GraphReport:
    """What came of capturing a function."""

    calls: tuple[CapturedCall, ...] = ()
    replays: int = 0                           # whose results were those of the function itself
    pool_bytes: int = 0
    device_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    worst: float = field(default=0.0)          # largest difference of a replay from the function itself

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "replays": self.replays, "pool_bytes": self.pool_bytes,
                "device_bytes": self.device_bytes, "worst": self.worst, "calls": [dict(c.__dict__) for c in self.calls],
                "problems": [dict(p.__dict__) for p in self.problems]}

    def __str__(self) -> str:
        head = "can be captured in a CUDA graph" if self.ok else "cannot be captured in a CUDA graph"
        lines = [f"{head}: {self.replays} replays with changed inputs agree (largest difference {self.worst:.3g}), "
                 f"{self.pool_bytes} bytes in its own pool"]
        lines += [f"  !! {problem}" for problem in self.problems]
        return "\n".join([*lines, *(f"  {c.count:4} x {c.kernel:<28} lz.{c.op}" for c in self.calls)])


def validate_graph_capture(fn: Callable[..., Any], /, *args: Any, warm_ups: int = WARM_UPS,
                           capture_error_mode: str = "global", **kwargs: Any) -> GraphReport:
    """Capture `fn(*args, **kwargs)`, replay it with changed inputs, and compare with `fn` itself.

    The tensors among the arguments get other numbers meanwhile and their own back afterwards; those of whole numbers
    keep theirs. `fn` runs several times: what it keeps elsewhere, such as a cache, moves on.
    """
    if absent := why_no_capture():
        return GraphReport(problems=(Problem("no cuda", absent),))
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    kept = [t.detach().clone() for t in given]

    def restore(factor: float = 1.0) -> None:
        with torch.no_grad():
            for tensor, own in zip(given, kept):
                tensor.copy_(own if factor == 1.0 or not own.is_floating_point() else own * factor)

    problems, worst, agreed = [], 0.0, 0       # type: list[Problem], float, int
    made = attempt(lambda: fn(*args, **kwargs), None, warm_ups, capture_error_mode=capture_error_mode)
    if made.problems:
        restore()
        return GraphReport(_told(made.calls), 0, made.pool_bytes, made.device_bytes, made.problems)
    try:
        streams = (torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream())
        for number, (factor, stream) in enumerate(zip(FACTORS, streams), 1):
            restore(factor)
            _replay(made.graph, stream)
            got = [t.clone() for t in _tensors(made.result)]
            restore(factor)
            want = _tensors(fn(*args, **kwargs))
            off, largest = _differences(got, want, number)
            problems += off
            worst, agreed = max(worst, largest), agreed + (not off)
    except faults.FAULTS as e:
        problems.append(problem_of(first_cause(e), "replaying: "))     # raises where the device is lost
    restore()
    return GraphReport(_told(made.calls), agreed, made.pool_bytes, made.device_bytes, tuple(problems), worst)


def _differences(got: list[Tensor], want: list[Tensor], number: int) -> tuple[list[Problem], float]:
    if len(got) != len(want):
        return [Problem("stale result", f"replay {number}: {len(got)} results, the function gives {len(want)}")], 0.0
    tolerance = tolerance_of(reading.dtype_name(t.dtype) for t in want)
    verdicts = [compare(f"result {i}", a, b, tolerance) for i, (a, b) in enumerate(zip(got, want))]
    wrong = [Problem("stale result", f"replay {number}: {v}") for v in verdicts if not v.passed]
    return wrong, max((v.metrics.max_abs for v in verdicts), default=0.0)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result.detach()]
    parts = result.values() if isinstance(result, Mapping) else result if isinstance(result, (tuple, list)) else ()
    return [t for part in parts for t in _tensors(part)]


def _told(calls: Calls) -> tuple[CapturedCall, ...]:
    shown = certificates.capture_verdicts(worlds.current().catalog.kernels, hardware.probe("cuda"))
    return tuple(CapturedCall(op, kernel, count, shown.get(kernel))
                 for op, kernels in calls.items() for kernel, count in kernels.items())

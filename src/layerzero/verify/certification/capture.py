"""Checks by capture whether a kernel is safe in a CUDA graph: replays must follow changed inputs.

A kernel is captured twice in one graph, each call with its own inputs. Then both get other numbers
in the same memory, three times, each replay on another stream; every result is judged by the
contract. So a kernel that waits for the host, works on another stream, keeps what it saw at
capture, or returns the same memory twice is found by what it does, whatever it declares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...dispatch import facts as reading
from ...machine import faults, hardware
from ...machine.loading import LoadFailed
from ...operate.graphs import (
    WARM_UPS,
    Attempt,
    Calls,
    Problem,
    attempt,
    first_cause,
    problem_of,
    why_no_capture,
)
from ...operate.inspection import dispatcher_of
from ...spec.codec import Record
from ...spec.display import Displayed
from ...spec.errors import ConfigError
from ...spec.kernel import Kernel
from ...spec.names import unknown_kernel
from ...spec.op import Op
from ...world import context
from ...world import snapshot as worlds
from ...world.registry import certificates
from ...world.registry.certificates import Certificate
from ..comparison import compare, tolerance_of
from ..kernel.contract import (
    call,
    case_values,
    load_once,
    may_be_chance,
    refusals,
    results_of,
    upcast,
)
from ..kernel.judging import judge_result

REPLAYS = 3
# captured per kernel: the first that it accepts, and the last
MAX_CASES = 2
# of a user's inputs, per replay; a norm cancels a positive one
FACTORS = (-1.0, 0.5, -1.25)


@dataclass(frozen=True)
class GraphVerdict:
    """True if a capture has shown that the kernel is safe. `safe` None: it could not be tried, for
    the reason `why`."""

    kernel: str
    safe: bool | None
    why: str = ""
    problems: tuple[Problem, ...] = ()
    pool_bytes: int = 0
    captures: int = 0                          # made and replayed for this verdict
    source: str = "capture"                    # capture | certificate

    def __bool__(self) -> bool:
        return self.safe is True

    def __str__(self) -> str:
        verdict = {True: "safe", False: "not safe", None: "not known to be safe"}[self.safe]
        return f"{self.kernel}: {verdict} in a CUDA graph" + (f": {self.why}" if self.why else "")


def is_graph_safe(kernel_or_op: str | Kernel | Callable[..., Any], /, *args: Any,
                  **kwargs: Any) -> GraphVerdict:
    """Can this kernel be captured in a CUDA graph on this machine? With an op and arguments: the
    selected kernel.

    Answers from a valid certificate, if there is one; else the kernel is captured now, with the
    given arguments if any.
    """
    kernel = kernel_or_op if isinstance(kernel_or_op, Kernel) else (
        worlds.current().catalog.by_id.get(kernel_or_op) if isinstance(kernel_or_op, str) else None)
    if absent := why_no_capture():
        return GraphVerdict(kernel.id if kernel else str(kernel_or_op), None, absent)
    if kernel is not None and not args and not kwargs:
        return verdict_of_certificate(kernel) or capture_cases(kernel)
    return _verdict_of_call(kernel, kernel.op.name if kernel else _op_name(kernel_or_op), args,
                            kwargs)


def _op_name(op: Any) -> str:
    if isinstance(op, str) and "." in op:
        raise ConfigError(unknown_kernel(op, worlds.current().catalog.op_of_kernel))
    return dispatcher_of(op).op.name


def _verdict_of_call(kernel: Kernel | None, op: str, args: tuple[Any, ...],
                     kwargs: Mapping[str, Any]) -> GraphVerdict:
    dispatcher = dispatcher_of(op)
    values = dispatcher.order_arguments(args, kwargs)
    if kernel is None:
        with context.overriding({"graph_strict_mode": True}) as override:
            plan = worlds.current().plan(dispatcher.op, dispatcher.facts(values), override,
                                         thorough=True)
        if not plan.steps:
            problem = Problem("no kernel", str(plan))
            return GraphVerdict(op, False, "no kernel may serve this call in a graph", (problem,))
        kernel = worlds.current().catalog.by_id[plan.steps[0].kernel]
    arguments = dict(zip(dispatcher.names, values))
    if reasons := refusals(kernel, arguments):
        return GraphVerdict(kernel.id, None,
                            "it does not take this call: " + "; ".join(r.message for r in reasons))
    problems, graph = capture_and_replay(kernel, arguments, None,
                                         str(reading.dtype_name(_first_tensor(arguments).dtype)))
    return _conclude(kernel, problems, graph, 1)


def verdict_of_certificate(kernel: Kernel) -> GraphVerdict | None:
    """Returns the verdict in a valid certificate; None without one, or if it has none."""
    certificate = certificates.statuses([kernel], hardware.probe("cuda"))[kernel.id]
    if not isinstance(certificate, Certificate) or certificate.graph_safe is None:
        return None
    return GraphVerdict(kernel.id, certificate.graph_safe, certificate.graph_problem, (),
                        certificate.graph_bytes, 0, "certificate")


def capture_cases(kernel: Kernel) -> GraphVerdict:
    """Captures the kernel with cases of its op and replays. Selection in this process uses the
    verdict afterwards."""
    problems: list[Problem] = []
    graph, captures = Attempt(), 0
    try:
        load_once(kernel)
    except LoadFailed as e:
        return GraphVerdict(kernel.id, None, e.reason.message)
    for values, replays, dtype in _capturable_cases(kernel):
        case_problems, graph = capture_and_replay(kernel, values, replays, dtype)
        problems += case_problems
        captures += 1
        if problems or captures == MAX_CASES:
            break
    return _conclude(kernel, problems, graph, captures)


def _conclude(kernel: Kernel, problems: list[Problem], graph: Attempt,
              captures: int) -> GraphVerdict:
    if not captures:
        return GraphVerdict(kernel.id, None,
                            "it takes no case of its op whose inputs can be changed in place")
    why = str(problems[0]) if problems else ""
    # it fails without a graph, which shows nothing about graphs
    if not graph.begun:
        return GraphVerdict(kernel.id, None, why, tuple(problems), 0, captures)
    certificates.record_capture(kernel, why)
    if worlds.current().catalog.by_id.get(kernel.id) is kernel:
        worlds.publish(lambda w: w.replace(), f"capture:{kernel.id}")
    return GraphVerdict(kernel.id, not problems, why, tuple(problems), graph.pool_bytes, captures)


def certificate_fields(kernel: Kernel, device: str) -> dict[str, Any]:
    """Returns the fields of a certificate about graph capture."""
    if device != "cuda" or not kernel.op.tensors or why_no_capture():
        return {}
    verdict = capture_cases(kernel)
    return {"graph_safe": verdict.safe, "graph_problem": verdict.why if verdict.safe is False
            else "",
            "graph_bytes": verdict.pool_bytes}


# One case of one kernel.

Values = dict[str, Any]
ReplayInputs = list[tuple[Values, Values]]


def _capturable_cases(kernel: Kernel) -> Iterator[tuple[Values, ReplayInputs | None, str]]:
    """Yields inputs of cases that the kernel accepts, with other inputs of the same shapes for each
    replay."""
    op = kernel.op
    cells = [(case, dtype) for dtype in reversed(op.dtypes) for case in op.cases]
    for case, dtype in (cells[0], *reversed(cells[1:])) if cells else ():
        values = case_values(op, case, dtype, "cuda")
        if not _is_writable(values) or refusals(kernel, values):
            continue
        replays = [(case_values(op, case, dtype, "cuda", 2 * i + 1),
                    case_values(op, case, dtype, "cuda", 2 * i + 2))
                   for i in range(REPLAYS)]
        if all(_same_layout(values, inputs) for pair in replays for inputs in pair):
            yield values, replays, dtype


def _is_writable(values: Values) -> bool:
    """Can every tensor be overwritten in place? Not if one is expanded or empty, or there is
    none."""
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    return (bool(tensors) and not any(isinstance(v, torch.Generator) for v in values.values())
            and all(
         t.numel() and not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape))
         for t in tensors))


def _same_layout(a: Values, b: Values) -> bool:
    return all((x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
               if isinstance(x, Tensor)
               and isinstance(y, Tensor) else type(x) is type(y) and x == y
               for x, y in ((a[n], b[n]) for n in a))


def capture_and_replay(kernel: Kernel, values: Values, replays: ReplayInputs | None,
                       dtype: str) -> tuple[list[Problem], Attempt]:
    """Captures two calls, replays them with other inputs and judges. `replays` None: the inputs
    times a factor."""
    first, second = _copy(values), _copy(values)
    if replays is None:
        replays = [(_scale(values, factor), _scale(values, -factor)) for factor in FACTORS]
    with torch.no_grad():
        capture = attempt(lambda: (results_of(call(kernel, first)),
                                   results_of(call(kernel, second))))
        problems = list(capture.problems)
        streams = (torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream())
        for number, (pair, stream) in enumerate(zip(replays, streams), 1):
            if problems:
                break
            for static, fresh in zip((first, second), pair):
                _write(static, fresh)
            _replay(capture.graph, stream)
            for position, static, result in zip(("first", "second"), (first, second),
                                                capture.result):
                problems += _stale_results(kernel.op, dtype, static, result,
                                           f"replay {number}, {position} call")
    return problems, capture


def _replay(graph: Any, stream: Any) -> None:
    """Replays on `stream`, which may differ from that of the capture."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _stale_results(op: Op, dtype: str, values: Values, result: tuple[Any, ...],
                   when: str) -> list[Problem]:
    expected, eager = results_of(op.reference(**upcast(values))), results_of(op.reference(**values))
    judgements = [judge_result(op, dtype, f"result {i}", got, got, true, plain)
                  for i, (got, true, plain) in enumerate(zip(result, expected, eager))
                  if isinstance(got, Tensor)]
    complaints = [c.text for judgement in judgements for c in judgement.complaints]
    if not complaints or may_be_chance(result, max(judgement.ratio for judgement in judgements)):
        return []                              # just outside the tolerance: rounding, not the graph
    return [Problem("stale result",
                    f"{when}: the result does not follow the inputs: {complaints[0]}")]


def _copy(values: Values) -> Values:
    return {n: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).copy_(v)
            if isinstance(v, Tensor) else v for n, v in values.items()}


def _scale(values: Values, factor: float) -> Values:
    return {n: (v.float() * factor).to(v.dtype) if isinstance(v, Tensor) and v.is_floating_point()
            else v
            for n, v in values.items()}


def _write(static: Values, fresh: Values) -> None:
    for name, tensor in static.items():
        if isinstance(tensor, Tensor):
            tensor.copy_(fresh[name])


def _first_tensor(values: Mapping[str, Any]) -> Tensor:
    return next(v for v in values.values() if isinstance(v, Tensor))


# A user's function.

@dataclass(frozen=True)
class CapturedCall:
    """A kernel that a captured function called through lz. `shown`: is it known to be graph-safe by
    itself?"""

    op: str
    kernel: str
    count: int
    shown: bool | None


@dataclass(frozen=True, repr=False)
class GraphReport(Displayed, Record,
                  json="ok replays pool_bytes device_bytes worst calls problems"):
    """The result of capturing a function."""

    calls: tuple[CapturedCall, ...] = ()
    replays: int = 0                           # whose results agree with the function's
    pool_bytes: int = 0
    device_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    # largest difference between a replay and the function
    worst: float = field(default=0.0)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = ("can be captured in a CUDA graph" if self.ok
                else "cannot be captured in a CUDA graph")
        lines = [
            f"{head}: {self.replays} replays with changed inputs agree (largest difference "
            f"{self.worst:.3g}), {self.pool_bytes} bytes in its own pool"]
        lines += [f"  !! {problem}" for problem in self.problems]
        return "\n".join([*lines, *(f"  {c.count:4} x {c.kernel:<28} lz.{c.op}"
                                    for c in self.calls)])


def validate_graph_capture(fn: Callable[..., Any], /, *args: Any, warm_ups: int = WARM_UPS,
                           capture_error_mode: str = "global", **kwargs: Any) -> GraphReport:
    """Capture `fn(*args, **kwargs)`, replay it with changed inputs, and compare with `fn` itself.

    Floating-point tensors among the arguments are overwritten meanwhile and restored afterwards.
    `fn` runs several
    times: state that it keeps elsewhere, such as a cache, advances.
    """
    if absent := why_no_capture():
        return GraphReport(problems=(Problem("no cuda", absent),))
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    originals = [t.detach().clone() for t in inputs]

    def restore(factor: float = 1.0) -> None:
        with torch.no_grad():
            for tensor, original in zip(inputs, originals):
                tensor.copy_(original if factor == 1.0 or not original.is_floating_point()
                             else original * factor)

    problems, worst, agreeing = [], 0.0, 0     # type: list[Problem], float, int
    capture = attempt(lambda: fn(*args, **kwargs), None, warm_ups,
                      capture_error_mode=capture_error_mode)
    if capture.problems:
        restore()
        return GraphReport(_captured_calls(capture.calls), 0, capture.pool_bytes,
                           capture.device_bytes, capture.problems)
    handled = sys.exc_info()[1]
    try:
        streams = (torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream())
        for number, (factor, stream) in enumerate(zip(FACTORS, streams), 1):
            restore(factor)
            _replay(capture.graph, stream)
            got = [t.clone() for t in _tensors(capture.result)]
            restore(factor)
            want = _tensors(fn(*args, **kwargs))
            differing, largest = _differences(got, want, number)
            problems += differing
            worst, agreeing = max(worst, largest), agreeing + (not differing)
    except faults.FAULTS as e:
        # raises if the device is lost
        problems.append(problem_of(first_cause(e, handled), "replaying: "))
    restore()
    return GraphReport(_captured_calls(capture.calls), agreeing, capture.pool_bytes,
                       capture.device_bytes, tuple(problems), worst)


def _differences(got: list[Tensor], want: list[Tensor], number: int) -> tuple[list[Problem], float]:
    if len(got) != len(want):
        return [Problem("stale result",
                        f"replay {number}: {len(got)} results, the function gives "
                        f"{len(want)}")], 0.0
    tolerance = tolerance_of(reading.dtype_name(t.dtype) for t in want)
    verdicts = [compare(f"result {i}", a, b, tolerance) for i, (a, b) in enumerate(zip(got, want))]
    problems = [Problem("stale result", f"replay {number}: {v}") for v in verdicts if not v.passed]
    return problems, max((v.metrics.max_abs for v in verdicts), default=0.0)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result.detach()]
    parts = (result.values() if isinstance(result, Mapping) else result
             if isinstance(result, (tuple, list)) else ())
    return [t for part in parts for t in _tensors(part)]


def _captured_calls(calls: Calls) -> tuple[CapturedCall, ...]:
    verdicts = certificates.capture_verdicts(worlds.current().catalog.kernels,
                                             hardware.probe("cuda"))
    return tuple(CapturedCall(op, kernel, count, verdicts.get(kernel))
                 for op, kernels in calls.items() for kernel, count in kernels.items())

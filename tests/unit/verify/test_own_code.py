"""Which code is a kernel's own, what of it ran, and what no call needs to reach."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.verify.code.drawn_calls import limits_of, numbers_in
from layerzero.verify.code.own_code import own_code, own_values
from layerzero.verify.code.tracing import Tracer

LIMIT = 700


def helper(x: int) -> int:
    if x > LIMIT:
        return x + 1
    return x


def shared(x: int) -> int:
    return x + 1 if x > 5 else x


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: int) -> int:
        self.calls += 1
        return helper(x) if self.calls < 3 else -1


def load() -> Callable[..., Any]:
    counter = Counter()

    def run(x: int, y: int | None = None) -> Any:
        try:
            z = [counter(i) for i in range(x)]
        except ValueError:
            z = []
        if y is not None and x > 20:
            raise TypeError("not both")
        return z or shared(x)

    return run


def load_other() -> Callable[..., Any]:
    return lambda x: shared(x)


def traced(load: Callable[..., Any], *others: Callable[..., Any]) -> tuple[Tracer, Any]:
    run = load()
    return Tracer(own_code(load, run, others)), run


def lines(tracer: Tracer) -> list[str]:
    return sorted(text.partition("`")[2].rstrip("`") for text in tracer.texts())


def test_what_did_not_run_is_told_by_its_line():
    tracer, run = traced(load)
    with tracer.watching():
        run(2)
    assert lines(tracer) == [
        "if y is not None and x > 20:", "return helper(x) if self.calls < 3 else -1",
        "return x + 1", "return z or shared(x)"]
    tracer.next_check()
    with tracer.watching():
        run(0), run(30)
    # neither what only raises nor what handles an exception is asked for
    assert lines(tracer) == ["if y is not None and x > 20:", "return x + 1",
                             "return x + 1 if x > 5 else x"]
    tracer.next_check()
    with tracer.watching():
        run(1, 2)
    assert lines(tracer) == ["return x + 1", "return x + 1 if x > 5 else x"]
    assert not tracer.complete


def test_what_other_kernels_reach_too_is_theirs():
    tracer, run = traced(load, load_other)
    with tracer.watching():
        run(0)
    assert not any("x > 5" in line for line in lines(tracer))


def test_the_calls_of_other_threads_count():
    tracer, run = traced(load)
    with tracer.watching():
        run(1)
        thread = threading.Thread(target=run, args=(1, 2))
        thread.start()
        thread.join()
    assert "if y is not None and x > 20:" not in lines(tracer)


def test_conditions_tell_their_numbers_and_names():
    tracer, run = traced(load)
    with tracer.watching():
        run(2)
    assert {"LIMIT", "y", 3} <= tracer.conditions()
    limits = limits_of(own_values(load, run), tracer.conditions())
    assert {3, LIMIT, 3 * LIMIT} <= {*limits} and limits.index(LIMIT) < limits.index(20)


def test_numbers_are_found_within_others():
    assert numbers_in([(1, 64), {"a": 128}, [[-5]], 2.0, 0.5, "9", True, 1 << 40]) == [2, 5, 64, 128]


def test_the_first_call_that_reached_a_part_is_remembered():
    run, now = load(), ["a"]
    tracer = Tracer(own_code(load, run), lambda: now[0])
    for name, x in (("a", 2), ("b", 5), ("c", 6)):
        now[0] = name
        tracer.next_check()
        with tracer.watching():
            run(x)
    assert set(tracer.first_calls.values()) == {"a", "b"} and "a" in tracer.border_calls()


def load_by_machine() -> Callable[..., Any]:
    def run(x: torch.Tensor, n: int) -> Any:
        if x.is_cuda:
            n += 1
        if n > 3:                              # pragma: no cover
            n -= 1
        far = x.is_cuda and x.stride(0) > 5
        on_other = x.device.type == "xpu"
        n = n + 3 if far else n
        if on_other:
            n += 4
        if x.device.type == "cpu" and n < -9:
            n += 2
        return n

    return run


def test_other_machines_and_marked_lines_are_left_out():
    tracer, run = traced(load_by_machine)
    with tracer.watching():
        run(torch.ones(1), 1)
    assert lines(tracer) == ["n += 2"]


def test_a_debugger_keeps_its_trace():
    if sys.version_info >= (3, 12):
        pytest.skip("sys.monitoring has a place for each tool")
    before, seen = sys.gettrace(), []

    def other(frame: Any, event: str, arg: Any) -> None:
        seen.append(event)

    tracer, run = traced(load)
    sys.settrace(other)
    try:
        with tracer.watching():
            run(1)
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)
    assert seen and not tracer.active and tracer.complete

"""Checks that nothing grows with calls that are ever other ones: other contents of the same sizes,
other addresses, other lengths and numbers of tokens, other threads.
"""

from __future__ import annotations

import gc
import itertools
import math
import operator
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.chosen_cells import Cell
from ..kernel.case_sizes import numbers_of, relative_size
from ..kernel.contract import (
    SMALL,
    CaseResult,
    bind_call,
    case_refusals,
    case_tensors,
    case_values,
    case_values_to_read,
    generate_values,
    refusals,
)
from ..kernel.gradients import gradient_cases, requiring_grad
from ..kernel.guarded import with_layout
from ..kernel.process_state import find_leak, memory_in_use
from .calls import check_many_backwards, check_many_calls, passes_extra_check, result_of
from .circumstances.argument_circumstances import BOUNDS, STEPPED

Case = Mapping[str, Any]
# Rounds of calls with other contents, and CPU time for them: of what grows in the first, many more
# than a cache of bounded size holds.
FEW_CONTENTS, CONTENTS_S = (3, 3), 0.02
MANY_CONTENTS, MANY_S = (12, 24, 48, 48, 48, 48), 4.0
CONTENTS_SEED, CONTENTS_ELEMENTS, CONTENTS_INTEGERS = 1000, 1 << 13, 256
PAGES, OBJECTS = "bytes of memory of its own", "Python objects"
KEPT_FOR_EACH = 2                              # objects at least: a key and what it is of
ITEMS = "items"
DIVISIONS = ("cu_seqlens_q", "cu_seqlens_k", ITEMS)
CONTENTS, LENGTHS, ADDRESSES = "other contents", "other lengths", "other addresses"
TOKENS, THREADS, STRIDED = "other numbers of tokens", "a thread of its own", "strided contents"
IN_INFERENCE, RECORDED = "other contents in inference mode", "other contents and gradients"
# Sizes of which a server meets every one; what is kept for the sizes of a model is bounded by it.
OF_TOKENS = ("rows", "tokens", "shape", "s", "sq", "lengths_q", "context", "batch", "b")
FEWEST_NEW_TOKENS, CASE_ROUNDS, SUSPECTS, CALLS_OF_A_SUSPECT = 270, 4, 3, 300
ADDRESS_STEPS, LONG_S = 1024, 0.3              # tries; CPU time in the longer lanes


def check_other_contents(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                         seed: int = 0, other: str = CONTENTS,
                         limit_s: float = CONTENTS_S) -> CaseResult:
    """Calls the kernel with ever `other` contents, lengths, addresses or numbers of tokens, or in
    ever other threads: nothing may grow in every round. What grows for a few is asked for hundreds,
    after which a cache of bounded size is full."""
    op, name = kernel.op, f"{other} in every call"
    reasons = case_refusals(kernel, case, dtype, device, seed)
    values = case_values(op, case, dtype, device, seed)
    if reasons or any(isinstance(v, torch.Generator) for v in values.values()):
        return result_of(kernel, case, dtype, name, seed, "skipped", reasons=reasons)
    try:
        with torch.inference_mode() if other == IN_INFERENCE else torch.no_grad():
            calls = _Calls(kernel, values, _others(op, case, values, dtype, device, seed, other),
                           device, other)
            leak = (_find_growth(calls, FEW_CONTENTS, limit_s)
                    and _find_growth(calls, MANY_CONTENTS, MANY_S)
                    and _find_growth(calls, MANY_CONTENTS, MANY_S))    # a heap may grow by itself
    except loading.LoadFailed as e:
        return result_of(kernel, case, dtype, name, seed, "skipped", reasons=(e.reason,))
    except FAULTS as e:                        # the cases have checks of their own
        return result_of(kernel, case, dtype, name, seed, "skipped",
                         detail=str(reason_of(e, classify(e))))
    return result_of(kernel, case, dtype, name, seed,
                     *(("failed", "leak", leak) if leak else ("passed",)))


def _others(op: Op, case: Case, values: Mapping[str, Any], dtype: str, device: str, seed: int,
            other: str) -> Iterator[dict[str, Any]]:
    """Yields calls that differ from each other in what is to be another one."""
    if other == LENGTHS:
        return _other_lengths(op, values, seed)
    if other in (ADDRESSES, THREADS):
        return _other_addresses(values) if other == ADDRESSES else itertools.repeat(dict(values))
    if other == TOKENS:
        return (generate_values(op, c, dtype, device, seed) for c in _other_tokens(op, case))
    drawn = (generate_values(op, case, dtype, device, CONTENTS_SEED + seed * CONTENTS_SEED + i)
             for i in itertools.count())
    if other == RECORDED:
        return (requiring_grad(op, v) for v in drawn)
    return drawn if other != STRIDED else ({n: _strided(t) for n, t in v.items()} for v in drawn)


def _strided(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    other = with_layout(value, "sparse")
    return value if other is None else other


def _other_lengths(op: Op, values: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Yields calls that differ in their lengths alone, as the steps of decoding do."""
    named = {n: v for n in STEPPED if isinstance(v := values.get(n), Tensor) and v.numel()}
    rng = random.Random(seed)
    while not named and any(isinstance(values.get(n), Tensor) for n in DIVISIONS):
        yield {**values, **_divided_otherwise(values, rng)}
    while named:
        yield {**values, **{n: torch.tensor(
            [rng.randint(min(1, most), most) for most in v.reshape(-1).tolist()], dtype=v.dtype,
            device=v.device).view(v.shape) for n, v in named.items()}}


def _divided_otherwise(values: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns other divisions of as many rows into as many sequences, and other numbers of keys of
    as many items."""
    changed: dict[str, Any] = {}
    for name in (n for n in DIVISIONS if isinstance(values.get(n), Tensor)):
        t = values[name].clone()
        if name == ITEMS:
            t[:, 3] = torch.tensor([rng.randint(min(1, m), m) for m in t[:, 3].tolist()])
        elif t.numel() > 2:
            total = int(t[-1])
            t[1:-1] = torch.tensor(sorted(rng.randint(0, total) for _ in t[1:-1]))
            longest = f"{BOUNDS}{name.removeprefix('cu_seqlens')}"
            changed |= {longest: total} if values.get(longest) is not None else {}
        changed[name] = t
    return changed


def _other_addresses(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the same call with every tensor a little further on in memory of its own, which is
    gone after the call: what a kernel keeps for as long as its weights live is no leak."""
    plain = {n: t for n, t in values.items() if isinstance(t, Tensor) and t.is_contiguous()
             and t.numel()}
    for i in range(ADDRESS_STEPS if plain else 0):
        yield {**values, **{n: _placed(t, 64 * i) for n, t in plain.items()}}


def _placed(t: Tensor, start: int) -> Tensor:
    """Returns a copy so many bytes behind the start of its memory, as memory that was freed has
    its address again."""
    room = torch.empty(t.nbytes + 64 * ADDRESS_STEPS, dtype=torch.uint8, device=t.device)
    return room[start:start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def _other_tokens(op: Op, case: Case) -> Iterator[Case]:
    """Yields the case with one more token in each, of numbers that no other check has."""
    sizes = {**numbers_of(op), **case}
    name = next((n for n in OF_TOKENS if n in numbers_of(op) and sizes[n]), "")
    size = sizes.get(name)
    for i in range(FEWEST_NEW_TOKENS, FEWEST_NEW_TOKENS + ADDRESS_STEPS):
        if isinstance(size, tuple):
            yield {**case, name: (size[0] + i, *size[1:])}
        elif isinstance(size, int):
            yield {**case, name: size + i}


class _Calls(NamedTuple):
    kernel: Kernel
    first: Mapping[str, Any]
    others: Iterator[dict[str, Any]]
    device: str
    other: str

    @property
    def counted(self) -> Callable[[str], bool]:
        """Which counts tell a leak? New inputs move pages, libraries keep words of texts, torch
        plans for many sizes and what belongs to a thread."""
        if not self.kernel.op.tensors or self.other in (TOKENS, THREADS):
            return partial(operator.eq, OBJECTS)
        return partial(operator.ne, PAGES)

    def run(self, values: Mapping[str, Any]) -> None:
        function = bind_call(self.kernel, self.first)
        arguments = [values[p.name] for p in self.kernel.op.params]
        if self.other == THREADS:
            thread = threading.Thread(target=_without_gradients, args=(function, arguments))
            thread.start()
            thread.join()
            return
        with torch.enable_grad() if self.other == RECORDED else nullcontext():
            function(*arguments)

    def drawn(self, count: int) -> Iterator[dict[str, Any]]:
        """Yields calls that the kernel takes, of twice as many."""
        op, shapes = self.kernel.op, _shapes(self.first)
        return (v for v in itertools.islice(self.others, 2 * count)
                if (self.other == TOKENS or _shapes(v) == shapes)
                and passes_extra_check(op, v, read(op, v)) and not refusals(self.kernel, v))


def _without_gradients(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    with torch.no_grad():                      # each thread has a mode of its own
        function(*arguments)


def _find_growth(calls: _Calls, rounds: Sequence[int], limit_s: float) -> str:
    """Returns what every round of calls left behind; "" where too few can be made in time."""
    began = time.thread_time()
    calls.run(calls.first)                     # what is set up once is no leak
    counts = [dict.fromkeys(memory_in_use(calls.device), 0)]
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()                                # so that it looks at what is new alone
    try:
        for count in rounds:
            gc.collect()
            before = memory_in_use(calls.device)
            drawn, made = calls.drawn(count), 0
            for v in itertools.islice(drawn, count):
                calls.run(v)
                made += 1
            # what is kept for as long as the inputs live is no leak
            v = {}
            del drawn
            gc.collect()
            after = memory_in_use(calls.device)
            counts.append({n: counts[-1][n] + after[n] - before[n]
                           for n in filter(calls.counted, after)})
            if made < count:
                return ""
            if time.thread_time() - began > limit_s and len(counts) < len(rounds):
                return ""
            if not find_leak(counts[-2:], KEPT_FOR_EACH * count):
                return ""
            # oneDNN plans for what a kernel cuts to the lengths, and keeps no object of Python
            if calls.other == LENGTHS and after[OBJECTS] - before[OBJECTS] < count // 8:
                return ""
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return (f"{find_leak(counts[-2:], rounds[-1])}, each with {calls.other}"
            if len(counts) > len(rounds) else "")


def check_leaks_of_cases(kernel: Kernel, cases: Sequence[Case], dtype: str, device: str = "cpu",
                         seed: int = 0, limit_s: float = math.inf,
                         recorded: bool = False) -> CaseResult:
    """Calls these cases round by round, as many as one call of each takes `limit_s` of CPU time:
    what is left behind beside one argument alone. The case that leaves something is then asked for
    hundreds of calls. `recorded`: with gradients that nobody asks for."""
    op, name, spent = kernel.op, "cases round by round", 0.0
    name += ", gradients recorded" if recorded else ""
    calls: list[tuple[Callable[..., Any], list[Any], Case]] = []

    def grows(some: Sequence[tuple[Callable[..., Any], list[Any], Case]], times: int) -> bool:
        counts = [0] * (CASE_ROUNDS + 1)       # its own numbers are objects too
        for i in range(CASE_ROUNDS + 1):
            gc.collect()                       # a circle of each call is no leak
            counts[i] = sys.getallocatedblocks()
            for function, arguments, _ in some:
                for _ in range(times):
                    function(*arguments)
        # a graph that is freed leaves room for other blocks
        least = times // 2 if recorded else times
        return all(b - a >= least for a, b in pairwise(counts[1:]))

    collecting = gc.isenabled()
    try:
        with torch.set_grad_enabled(recorded):
            for case in random.Random(seed).sample(cases, len(cases)):
                if spent > limit_s or case_refusals(kernel, case, dtype, device, seed):
                    continue
                values = case_values(op, case, dtype, device, seed)
                values = requiring_grad(op, values) if recorded else values
                if (any(isinstance(v, torch.Generator) for v in values.values())
                    or refusals(kernel, values)):
                    continue
                calls.append((bind_call(kernel, values), [values[p.name] for p in op.params], case))
                began = time.thread_time()
                calls[-1][0](*calls[-1][1])
                spent += time.thread_time() - began
            gc.disable()
            gc.freeze()                        # so that it looks at what is new alone
            suspects = ([c for c in calls if grows([c], 8)]
                        if calls and grows(calls, 8 if recorded else 2) else [])
    except FAULTS as e:                        # the cases have checks of their own
        return result_of(kernel, {}, dtype, name, seed, "skipped",
                         detail=str(reason_of(e, classify(e))))
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    ask = check_many_backwards if recorded else check_many_calls
    found = (ask(kernel, case, dtype, device, seed, CALLS_OF_A_SUSPECT)
             for _, _, case in suspects[:SUSPECTS])
    return next((r for r in found if r.status == "failed"),
                result_of(kernel, {}, dtype, name, seed, "passed" if calls else "skipped"))


def _shapes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: (v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for n, v in values.items()}


def other_contents_checks(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str,
                          seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the check of other contents for the cell with most integers, of which there are most
    contents that a plan may be for, and of other lengths for that with the longest; in the longer
    lanes also for each of the op's own cases, and in every other way for the first."""
    op = kernel.op
    dtype, integers, longest = cells[0][1], [], []
    for i, (case, of) in enumerate(cells):
        tensors = case_tensors(op, case, of, device, seed)
        if of == dtype and tensors[op.main_tensor].numel() <= CONTENTS_ELEMENTS:
            count = sum(t.numel() for t in tensors.values()
                        if t.dtype in (torch.int32, torch.int64))
            integers.append((count if count <= CONTENTS_INTEGERS else 0, -i))
            if any(n in tensors for n in (*STEPPED, *DIVISIONS)):
                lengths = case_values_to_read(op, case, of, device, seed)
                longest.append((sum(int(lengths[n].sum()) for n in (*STEPPED, *DIVISIONS)
                                    if n in tensors), -i))
    for ranked, other in ((integers, CONTENTS), (longest, LENGTHS)):
        if ranked:
            yield partial(check_other_contents, kernel, cells[-max(ranked)[1]][0], dtype, device,
                          seed, other)
    small = [case for case in op.cases if relative_size(op, case) <= SMALL]
    # torch keeps something of every size of a BlockMask
    any_tokens = not any(p.kind == "object" for p in op.params)
    if any_tokens and not kernel.jit:
        yield from (partial(check_other_contents, kernel, case, dtype, device, seed, TOKENS)
                    for case in small[:lane == "quick"])
    if any_tokens and not kernel.jit:
        limit_s = CONTENTS_S if lane == "quick" else math.inf
        yield partial(check_leaks_of_cases, kernel, small, dtype, device, seed, limit_s)
        if kernel.differentiable and op.differentiable:
            recorded = small if lane != "quick" else [
                case for case in gradient_cases(op) if relative_size(op, case) <= SMALL]
            yield partial(check_leaks_of_cases, kernel, recorded, dtype, device, seed, limit_s,
                          True)
    if lane == "quick" or kernel.jit:
        return
    yield from (partial(check_other_contents, kernel, case, dtype, device, seed, CONTENTS, LONG_S)
                for case in small)
    for other in (ADDRESSES, TOKENS, THREADS, STRIDED, IN_INFERENCE, RECORDED):
        if ((other != RECORDED or (kernel.differentiable and op.differentiable))
                and (other != TOKENS or any_tokens)):
            yield from (partial(check_other_contents, kernel, case, dtype, device, seed, other,
                                LONG_S) for case in small[:3])

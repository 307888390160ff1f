"""Diagnoses a failed kernel: its wrong results are compared with those of deliberately altered
references.

A diagnosis is a class, a sentence with its evidence, where the kernel fails ("exactly where seq_q %
128 = 64 and attn_mask is given") and what to do.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.mistake import Results
from ...spec.op import Op
from ..kernel.contract import CaseResult, call, formula, results_of, upcast
from ..kernel.guarded import guarded, poisoned_memory
from ..kernel.results import are_equal, has_holes
from .conditions import failing_conditions
from .head_maps import explain_by_heads
from .reruns import (
    are_close,
    confirmed_arguments,
    explain_by_pages,
    explain_by_values,
    fails_with_other_numbers,
    is_right_when_contiguous,
    is_right_when_loaded_anew,
    is_rounded,
    is_slight,
    is_strided,
    is_wrong_in_few_rows,
    is_wrong_when_wide,
    passes_at_some_size,
    plain_failures,
    row_dim,
    sample_failures,
    values_of,
)

# class -> what to do about it
CLASSES: Mapping[str, str] = {
    "mask":
        "look at how the mask, causality or sequence boundaries reach the kernel; or let a rule "
        "refuse such calls",
    "alignment":
        "the diagonal is where causal_align says: pass the kernel its offset, or let a rule refuse "
        "the other",
    "convention": "the library means something else by this argument: convert it in the backend's "
                  "adapter",
    "scale": "look at which factor the library applies itself, and where",
    "head map": "query head h belongs to KV head h // group: expand with repeat_interleave, not "
                "repeat",
    "window": "the window counts keys left and right of the diagonal, the diagonal itself not "
              "included",
    "position bias": "pass the bias on, or let a rule refuse calls with one",
    "capacity": "an expert serves the first `capacity` pairs in token order, no fewer and no more",
    "distribution": "the draw must be the contract's function of its random number; see "
                    "ops/formulas/sampling.py",
    "precision": "accumulate in float32 or wider, and round once at the end",
    "uninitialised output": "write every element of the result; rows, tails and empty inputs too",
    "out of bounds": "read and write only what the shapes, strides and lengths cover",
    "stale page": "follow block_table on every call",
    "non-determinism": "declare deterministic=False, or make the order of summation fixed",
    "in-place change": "work on a copy: the caller's tensors are not the kernel's",
    "aliasing": "return memory of the result's own",
    "gradient": "mend the backward, or declare differentiable=False",
    "dtype": "the result has the dtype of the contract, whatever autocast says",
    "layout": "honour the strides, or declare a rule (contiguous): such calls are then copied or "
              "refused",
    "stale cache": "look contents up by what cannot come again: an address, an id or a version "
                   "alone can",
    "state": "keep nothing between calls that is not looked up by contents or version",
    "shape": "return what the op's meta function says",
    "global state": "leave torch's settings and random numbers as they were",
    "invariance": "add in one order, however many rows, heads and columns there are, or drop "
                  "batch_invariant and tp_invariant",
    "threads": "give every call scratch memory of its own",
    "index overflow": "count offsets in 64 bits",
    "mode": "one way for every mode of torch: gradients recorded or not, inference mode or not",
    "result": "return a plain tensor of the caller's own: no Parameter, no inference tensor, "
              "nothing that is kept",
    "leak": "free what a call allocates, or use it again",
    "non-finite values": "a NaN or an infinity appears where the formula has one, and nowhere else",
    "overflow": "subtract the maximum before exponentials, and accumulate where there is range",
    "ties": "of equal numbers the one with the lowest index comes first",
    "last rows": "rows that are left over by tiles or vectors need a loop or mask of their own",
    "sizes": "the kernel is wrong for some sizes only: mend it, or let a rule refuse them",
    "fault": "mend it, or let a rule refuse what it cannot do",
    "unknown": "compare it with the op's reference on the case above",
}
# Kinds of complaint that are the diagnosis if every failing case has them.
_DIRECT = ("distribution", "in-place change", "out of bounds", "aliasing", "result", "leak",
           "shape", "dtype", "threads", "fault", "global state", "invariance")
_BY_CIRCUMSTANCE = (
    ("another dtype", "dtype"), ("given ", "convention"), ("every code", "convention"),
    ("since a call", "stale cache"),
    ("every tensor", "layout"), ("autocast", "dtype"), ("2^31", "index overflow"),
    ("changed in place", "stale cache"), ("addresses of earlier", "stale cache"),
    ("after another call", "state"), ("NaN and infinity", "non-finite values"),
    ("set_num_threads", "threads"), ("set_default_dtype", "dtype"), (" calls", "state"),
    ("broadcast by", "layout"), ("threads", "threads"), ("inference mode", "mode"),
    ("recording gradients", "mode"),
    (" is ", "layout"), ("eight times", "state"), ("sparse", "layout"), ("padded", "layout"),
    ("transposed", "layout"), ("offset", "layout"), ("spread", "layout"), ("filled with", "sizes"))
# And by the fact that distinguishes failing calls.
_BY_FACT = (("attn_mask", "mask"), ("window", "window"), ("alibi", "position bias"),
            ("softcap", "scale"), ("capacity", "capacity"), ("is_causal", "mask"),
            ("causal_align", "alignment"), ("stride_last", "layout"), ("contiguous", "layout"),
            ("key_scale", "scale"), ("value_scale", "scale"), ("scales", "scale"))
# Circumstances whose runs differ in more than the state of the kernel.
_OTHER_CONTENTS = ("one buffer", "since a call", "changed in place", "addresses of earlier")
_NO_ARGUMENT = ("stride_last", "contiguous", "causal_align")
STRIDED = ("every tensor", "sparse", "padded", "transposed", "offset", "spread", "broadcast by")
MAX_RERUNS = 8                                 # failing cases that are rerun


@dataclass(frozen=True)
class Diagnosis:
    kind: str                                  # one of CLASSES
    says: str
    where: str = ""

    @property
    def advice(self) -> str:
        return CLASSES[self.kind]

    def __str__(self) -> str:
        where = f"; of these cases it fails exactly where {self.where}" if self.where else ""
        return f"{self.kind}: {self.says}{where}. What to do: {self.advice}"


def diagnose(kernel: Kernel, results: Sequence[CaseResult],
             device: str = "cpu") -> Diagnosis | None:
    """Returns the diagnosis; None if nothing failed."""
    failed = [r for r in results if r.status == "failed"]
    if not failed:
        return None
    where = failing_conditions(kernel.op, results, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, says = _explain(kernel, failed, results, device, where)
    return Diagnosis(kind, says, where)


def _explain(kernel: Kernel, failed: Sequence[CaseResult], results: Sequence[CaseResult],
             device: str, where: str) -> tuple[str, str]:
    for kind in _DIRECT:
        if all(kind in r.kinds for r in failed):
            if kind == "fault" and _fails_by_layout(kernel, failed, device):
                return "layout", f"fails for tensors that are not contiguous: {failed[0].detail}"
            return kind, failed[0].detail
    # a backward case judges the result of its forward pass too
    forward = [r for r in failed if not r.circumstance.startswith("backward")
               or {"error", "not finite"} & set(r.kinds)]
    if all(r.circumstance for r in forward):   # of what comes late no plain case may have run
        plain = plain_failures(kernel, failed, results, device)
        forward, results = plain or forward, [*results, *plain]
    if not forward:
        return "gradient", f"the forward pass is right, the backward is not: {failed[0].detail}"
    if all(r.circumstance.startswith("backward") for r in forward):
        return "mode", f"right as it is, wrong where gradients are recorded: {forward[0].detail}"
    by_heads = explain_by_heads(kernel, forward, device)
    if by_heads:
        return by_heads
    of_sizes = (_speaks_of_sizes(kernel.op, where)
                and passes_at_some_size(kernel, results, device)
                and not fails_with_other_numbers(kernel, results, device)
                and not (_rows_alone(kernel.op, where)
                         and is_wrong_in_few_rows(kernel, forward, device)))
    if of_sizes and is_right_when_loaded_anew(kernel, forward, device):
        return _state(forward)
    if of_sizes and "(it passes" in where and not any(r.circumstance for r in forward) \
            and not confirmed_arguments(kernel, forward, device):
        if ((max(r.ratio for r in forward) < 50 and is_slight(kernel, forward, device))
                or is_rounded(kernel, forward, device)):
            return "precision", f"close, and seen where there are many: {forward[0].detail}"
        return _scale_mistake(kernel, forward, device) or ("sizes", forward[0].detail)
    strided = [r for r in forward if _is_of_layout(kernel, r, device)]
    others = [r for r in forward if r not in strided and "2^31" not in r.circumstance]
    if (strided and not others and not any("out of bounds" in r.kinds for r in forward)
            and is_right_when_contiguous(kernel, strided, device)):
        return "layout", f"wrong for tensors that are not contiguous only: {forward[0].detail}"
    if is_right_when_loaded_anew(kernel, forward, device):     # whatever it looks like now
        return _state(forward)
    mistake = _explain_by_mistake(kernel, forward, device)
    if mistake:
        return mistake
    memory_fault = _explain_by_memory(kernel, forward, device)
    if memory_fault:
        return memory_fault
    names = {r.circumstance for r in forward}
    if all(names):                             # it fails only under circumstances
        if (all("non-determinism" in r.kinds for r in forward)
                and not any(word in name for name in names for word in _OTHER_CONTENTS)):
            return "state", f"two runs with the same contents differ: {forward[0].detail}"
        if all("filled with" in r.circumstance and "not finite" in r.kinds for r in forward):
            return "overflow", f"right as it is, not finite elsewhere: {forward[0].detail}"
        for word, kind in _BY_CIRCUMSTANCE:
            if all(word in name for name in names):
                kind = _kind_of_given(kernel.op, names) if word == "given " else kind
                return kind, (f"right as it is, wrong {_listed_names(sorted(names))}: "
                              f"{forward[0].detail}")
        kinds = Counter(next((k for word, k in _BY_CIRCUMSTANCE if word in name), "unknown")
                        for name in names)
        return kinds.most_common(1)[0][0], (
            f"right as it is, wrong {_listed_names(sorted(names))}: {forward[0].detail}")
    for kind in _DIRECT:
        if all(kind in r.kinds for r in forward):
            return kind, forward[0].detail
    if all("non-determinism" in r.kinds for r in forward):
        has_errors = any("error" in r.kinds or "not finite" in r.kinds for r in forward)
        return ("state" if has_errors else "non-determinism",
                f"the result depends on earlier calls: {forward[0].detail}")
    if not kernel.op.tensors:
        return "unknown", f"no altered reference explains it: {forward[0].detail}"
    arguments = confirmed_arguments(kernel, forward, device)
    by_pages = explain_by_pages(kernel, forward, device)
    if by_pages:
        return by_pages
    several = len(_kinds_of_facts(arguments)) > 1
    for fact, kind in () if several else _BY_FACT:
        if fact in where and ((fact in _NO_ARGUMENT and not all("not finite" in r.kinds
                                                               for r in forward))
                              or any(fact in name for name in arguments)):
            return kind, forward[0].detail
    distinguished = any(part in where for name in arguments for part in name.split(" and "))
    # calls of a smaller size pass with the same arguments
    if of_sizes and "(it passes" in where and not distinguished:
        return "sizes", forward[0].detail
    by_values = explain_by_values(kernel, forward, device)
    if by_values and not (distinguished and by_values[0] == "last rows"):
        return by_values
    dtypes = {r.dtype for r in forward}
    if "float32" not in dtypes and is_wrong_when_wide(kernel, forward, device):
        dtypes.add("float32")
    filters = [name for name in arguments if name != "return_logprobs"]
    if arguments and kernel.op.family == "sampling" and (not distinguished or len(filters) > 1):
        # another call draws other numbers: it may be right by chance
        return "distribution", ("other tokens or probabilities than the contract's: "
                                f"{forward[0].detail}")
    if (arguments and "float32" in dtypes
            and (distinguished or any(r.error >= 0.05 for r in forward))):
        kinds_of = {next((kind for fact, kind in _BY_FACT if fact in name), "convention")
                    for name in arguments}
        # of arguments that go together each one mends it, whichever is wrong
        return (kinds_of.pop() if len(kinds_of) == 1 else "unknown" if several else "convention",
                f"right without {' or without '.join(arguments)} (left out, or one), in float32 "
                "too wrong with it: "
                f"{forward[0].detail}")
    of_one_size = any(where.startswith(f"{dim} is ") for dim in kernel.op.dims)
    slight = is_slight(kernel, forward, device) or is_rounded(kernel, forward, device)
    if of_sizes and ("% " in where or of_one_size) and not slight:
        return "sizes", forward[0].detail
    right_when_wide = ("float32" not in dtypes
                       and any(r.passed and r.dtype == "float32" for r in results))
    ratios = [r.ratio for r in forward if "error" in r.kinds]
    if kernel.op.family == "sampling" and math.inf in ratios:      # tokens do not round
        ratios = []
    if ratios and min(ratios) > 1 and (right_when_wide or slight):
        excess = (f"{max(ratios):.3g} times what is allowed" if math.isfinite(max(ratios))
                  else "other codes")
        return "precision", (f"close, but {excess}, in "
                             f"{', '.join(sorted(dtypes))}: {forward[0].detail}")
    if of_sizes:
        return "sizes", forward[0].detail
    if kernel.op.family == "sampling":
        return ("distribution",
                f"other tokens or probabilities than the contract's: {forward[0].detail}")
    return "unknown", f"no altered reference explains it: {forward[0].detail}"


def _kind_of_given(op: Op, names: Iterable[str]) -> str:
    """Returns what the arguments speak of that were given in these circumstances."""
    if op.family == "sampling":
        return "distribution"
    kinds = {next((kind for fact, kind in _BY_FACT if fact in name), "convention")
             for name in names}
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _kinds_of_facts(arguments: Sequence[str]) -> set[str]:
    """Returns what arguments speak of; beside a window neither causality nor the diagonal."""
    facts = {fact: kind for fact, kind in _BY_FACT for name in arguments if fact in name}
    if "window" in facts:
        facts = {fact: kind for fact, kind in facts.items() if "causal" not in fact}
    return set(facts.values())


def _state(forward: Sequence[CaseResult]) -> tuple[str, str]:
    return "state", ("right where it is loaded anew, wrong after other calls: "
                     f"{forward[0].detail}")


def _named_facts(where: str) -> list[str]:
    return re.findall(r"([\w.]+) (?:>=|<=|%|is) ", where)


def _speaks_of_sizes(op: Op, where: str) -> bool:
    """Does the condition name a size, and no choice of an argument, such as a format?"""
    names = _named_facts(where)
    chosen = [n for n in names if n in op.by_name and op.by_name[n].choices]
    return not chosen and any(n in op.dims or n in op.derived for n in names)


def _rows_alone(op: Op, where: str) -> bool:
    """Is the number of rows the only size that the condition names?"""
    sizes = {n for n in _named_facts(where) if n in op.dims or n in op.derived}
    return sizes == {row_dim(op)}


def _is_of_layout(kernel: Kernel, r: CaseResult, device: str) -> bool:
    """Has the failing call a tensor that is not contiguous?"""
    if not r.circumstance:
        return is_strided(kernel, r, device)
    return (any(word in r.circumstance for word in STRIDED)
            and not r.circumstance.startswith("given "))


def _fails_by_layout(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Does it raise for tensors that are not contiguous only, and serve the same numbers in
    contiguous memory?"""
    return (all(_is_of_layout(kernel, r, device) or "2^31" in r.circumstance for r in failed)
            and is_right_when_contiguous(kernel, failed, device, of_faults=True))


def _listed_names(names: Sequence[str]) -> str:
    return "under " + (" / ".join(names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4
                                                 else "")


# By altered references.

def _explain_by_mistake(kernel: Kernel, failed: Sequence[CaseResult],
                        device: str) -> tuple[str, str] | None:
    """Returns the mistake that explains most failing cases, if two thirds of those it applies
    to."""
    votes: Counter[tuple[str, str]] = Counter()
    applied: Counter[tuple[str, str]] = Counter()
    sample = sample_failures(failed, MAX_RERUNS)
    for r in sample:
        values = values_of(kernel, r, device)
        if values is None:
            continue
        try:
            with torch.no_grad():
                out, expected = results_of(call(kernel, values)), formula(kernel.op, upcast(values))
        except FAULTS:
            continue
        for mistake in kernel.op.mistakes:
            altered = _altered_results(kernel.op, mistake.apply, values)
            if altered is None or are_close(kernel.op, r.dtype, altered, expected):
                continue
            applied[mistake.kind, mistake.words] += 1
            votes[mistake.kind, mistake.words] += are_close(kernel.op, r.dtype, out, altered)
    best = max(votes, key=lambda k: (votes[k], -applied[k]), default=None)
    if best is None or not votes[best] or votes[best] * 3 < applied[best] * 2:
        return None
    return best[0], (f"it gives what the reference gives with {best[1]}, in {votes[best]} of "
                     f"{applied[best]} failing cases where that makes a difference")


def _scale_mistake(kernel: Kernel, failed: Sequence[CaseResult],
                   device: str) -> tuple[str, str] | None:
    """Returns a mistake of the scale, which the sizes of a call make: those of its heads."""
    mistake = _explain_by_mistake(kernel, failed, device)
    return mistake if mistake and mistake[0] == "scale" else None


def _altered_results(op: Op, alter: Any, values: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the results of the altered reference, floats in float64; None where it does not
    apply."""
    try:
        with torch.no_grad():
            outcome = alter(op, upcast(values))
            if outcome is None:
                return None
            return outcome.values if isinstance(outcome, Results) else formula(op, outcome)
    except FAULTS:                             # the mistake makes no sense for this call
        return None


# By poisoned and guarded memory.

def _explain_by_memory(kernel: Kernel, failed: Sequence[CaseResult],
                       device: str) -> tuple[str, str] | None:
    """Reruns failing cases over poisoned memory, between margins of NaN, and repeatedly."""
    if not kernel.op.tensors:
        return None
    for r in sample_failures(failed, 3):
        values = values_of(kernel, r, device)
        if values is None:
            continue
        try:
            with torch.no_grad():
                first = results_of(call(kernel, values))
                again = [results_of(call(kernel, values)) for _ in range(6)]
                with poisoned_memory():
                    poisoned = results_of(call(kernel, values))
                guarded_result = results_of(call(kernel, guarded(values)))
                expected = formula(kernel.op, upcast(values))
        except FAULTS:
            continue
        if not all(isinstance(t, Tensor) for t in first):
            return None
        if not are_equal(first, poisoned) and has_holes(poisoned, expected):
            return ("uninitialised output",
                    "over memory full of NaN its result has NaN: not every element is written")
        if not are_equal(first, guarded_result) and has_holes(guarded_result, expected):
            return ("out of bounds",
                    "with NaN on both sides of every input its result has NaN: it reads beside one")
        if any(not are_equal(first, other) for other in again):
            all_right = all(are_close(kernel.op, r.dtype, out, expected)
                            for out in (first, *again))
            if all_right or (kernel.deterministic and "non-determinism" in r.kinds):
                return "non-determinism", "the same call gives other results from run to run"
            return "state", "the same call gives another result from run to run, and a wrong one"
    return None

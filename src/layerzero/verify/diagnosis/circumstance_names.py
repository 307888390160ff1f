"""What a circumstance is about: the class of a kernel that fails in it alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ..kernel.contract import AS_DECLARED, CaseResult, check_case
from .conditions import find_circumstance
from .reruns.calls_again import sample_failures

# The numbers and how they lie are the same, torch is in another state.
_OF_TORCH = (
    ("autocast", "dtype"), ("set_default_dtype", "dtype"), ("set_num_threads", "threads"),
    ("inference mode", "mode"), ("recording gradients", "mode"), ("recording nothing", "mode"),
    ("in grad mode", "mode"), ("backward", "mode"))
# Contents changed besides, whatever state torch is in.
_CHANGED = ("changed in place", "parts of one", "than in a call before")
_BY_CIRCUMSTANCE = (
    *((word, "stale cache") for word in _CHANGED), *_OF_TORCH,
    ("another dtype", "dtype"), ("given ", "unknown"), ("every code", "unknown"),
    ("codes from", "unknown"), ("loud numbers of float16", "overflow"),
    ("float16 that cancel", "precision"), ("beyond float16", "non-finite values"),
    ("filled with", "unknown"), ("since a call", "stale cache"),
    ("every tensor", "layout"), ("2^31", "index overflow"),
    ("addresses of earlier", "stale cache"),
    ("after another call", "state"), ("NaN and infinity", "non-finite values"),
    (" calls", "state"), ("broadcast by", "layout"), ("threads", "threads"),
    ("column of another", "layout"), ("exchanged in memory", "layout"),
    (" is ", "aliasing"), ("eight times", "state"), ("sparse", "layout"), ("padded", "layout"),
    ("spaced", "layout"),
    ("transposed", "layout"), ("offset", "layout"), ("spread", "layout"))
# Circumstances whose runs differ in more than the state of the kernel.
OTHER_CONTENTS = (*_CHANGED, "one buffer", "since a call", "addresses of earlier")
_OF_LAYOUT = ("every tensor", "sparse", "padded", "spaced", "transposed", "offset", "spread",
              "broadcast by", "column of another", "exchanged in memory")
_OF_EARLIER_CALLS = {"stale cache", "state"}


def kind_of(names: Iterable[str]) -> str:
    """Returns what all these circumstances are about."""
    kinds = {next((kind for word, kind in _BY_CIRCUMSTANCE if word in name), "unknown")
             for name in names}
    if kinds == _OF_EARLIER_CALLS:             # what is found again by its address, too
        return "stale cache"
    return kinds.pop() if len(kinds) == 1 else "unknown"


def are_of_torch(names: Iterable[str]) -> bool:
    """Is torch in another state in each, and nothing else changed?"""
    return all(any(word in name for word, _ in _OF_TORCH)
               and not any(word in name for word in _CHANGED) for name in names)


def is_of_layout(name: str) -> bool:
    return any(word in name for word in _OF_LAYOUT) and not name.startswith("given ")


def listed_names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return "under " + " / ".join(names[:4]) + rest


def recur(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Do sampled cases fail again in their circumstance, and pass without it, before and after?
    Else what is called before matters, or chance."""
    asked = 0
    for r in sample_failures(failed, 3):
        circumstance = find_circumstance(kernel.op, r.circumstance)
        if circumstance is None:               # of a check of its own
            continue
        try:
            statuses = [check_case(kernel, r.case, r.dtype, device, r.seed, c).status
                        for c in (AS_DECLARED, circumstance) * 2]
        except FAULTS:
            return False
        if statuses != ["passed", "failed"] * 2:
            return False
        asked += 1
    return asked > 0 or all(find_circumstance(kernel.op, r.circumstance) is None for r in failed)

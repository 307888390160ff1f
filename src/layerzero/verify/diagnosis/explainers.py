"""Explains failing cases: one small function per explanation, in the order in which they are asked.

Each gets the same evidence and returns a class with its sentence, or None where it explains
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ..kernel.contract import CaseResult
from .altered_references import (
    CLASS_OF_ARGUMENT,
    class_of,
    explain_by_mistake,
    meaning_of,
    scale_mistake,
)
from .circumstance_names import OTHER_CONTENTS, are_of_torch, is_of_layout, kind_of, recur
from .circumstance_names import listed_names as listed
from .doubts import doubt_about
from .evidence import Evidence, Explanation
from .reruns.boundary_reruns import explain_by_boundaries
from .reruns.call_orders import depends_on_earlier_calls, keeps_argument_by_shape, keeps_by_shape
from .reruns.calls_again import (
    fails_again,
    gives_the_same_for_all,
    is_right_when_contiguous,
    is_right_when_loaded_anew,
    is_right_when_recording,
    is_right_with_small_gaps,
    is_strided,
    is_wrong_when_recording,
    others_that_mend,
    passes_with_the_argument,
)
from .reruns.head_maps import explain_by_heads
from .reruns.kept_reruns import (
    explain_by_contents,
    explain_by_earlier_contents,
    keeps_all_results,
)
from .reruns.memory_reruns import explain_by_memory
from .reruns.order_reruns import explain_by_order
from .reruns.rounding_reruns import (
    errors_are_others,
    explain_by_rounded_argument,
    explain_by_rounded_result,
    is_a_rounding_in_half,
    is_rounded,
    is_rounding,
    is_slight,
    is_small_beside_rows,
)
from .reruns.row_reruns import draws_others, has_another_type, mixes_rows
from .reruns.size_reruns import (
    explain_by_bits,
    explain_by_growth,
    explain_by_remainder,
    explain_by_shortness,
    is_wrong_whenever_given,
)
from .reruns.value_reruns import (
    explain_by_factor,
    explain_by_finiteness,
    explain_by_pages,
    explain_by_values,
    is_formula_finite,
    is_right_when_finite,
    is_right_with_other_numbers,
    is_right_with_smaller_numbers,
    is_wrong_beside_zeros,
)

# Kinds of complaint that are the diagnosis if every failing case has them.
_DIRECT = ("distribution", "in-place change", "out of bounds", "aliasing", "result", "leak",
           "shape", "dtype", "mode", "threads", "fault", "global state", "invariance")
# Complaints about whose memory something is.
_OF_MEMORY = ("in-place change", "out of bounds", "aliasing", "result")
_OF_LAYOUT = ("stride_last", "contiguous")
# Complaints about memory that numbers which are wrong in a single call outrank.
_OF_SHARING = ("aliasing", "result")
_OF_ARGUMENTS = ("convention", "mask", "scale", "alignment", "window", "position bias", "head map")
FAR_BEYOND = 1000.0                            # times what is allowed


def explain(evidence: Evidence) -> Explanation:
    """Returns the first explanation that nothing speaks against."""
    doubts: dict[str, str] = {}
    for explainer in EXPLAINERS:
        try:
            explanation = explainer(evidence)
        except FAULTS:                         # the kernel, in a rerun
            continue
        if explanation is None or doubts.get(explanation[0]):
            continue
        kind = explanation[0]
        shown = evidence.forward or evidence.failed
        doubts[kind] = "" if explainer in CONFIRMED else _about_mode(kind, evidence) or doubt_about(
            kind, evidence.kernel, shown, evidence.device)
        if not doubts[kind]:
            return explanation
        if not evidence.forward:               # nothing else to look at
            break
    looks = "; ".join(f"looks like {kind}, but {doubt}" for kind, doubt in doubts.items() if doubt)
    return "unknown", f"{looks or 'no altered reference explains it'}: {evidence.detail}"


# What every failing case shows by itself.

def _by_complaint(e: Evidence) -> Explanation | None:
    if all("gradient" in r.kinds for r in e.failed):
        return None                            # wrong numbers before how they lie
    has_wrong_gradients = any("gradient" in r.kinds for r in e.failed)
    for kind in _DIRECT:
        if all(kind in r.kinds for r in e.failed):
            if kind in _OF_SHARING and (has_wrong_gradients or e.is_wrong_in_one_call):
                continue
            if kind == "fault" and _fails_by_layout(e.kernel, e.failed, e.device):
                return "layout", f"fails for tensors that are not contiguous: {e.failed[0].detail}"
            if kind == "result" and keeps_all_results(e.kernel, e.failed, e.device):
                return "leak", f"the results of all calls are kept: {e.failed[0].detail}"
            return kind, e.failed[0].detail
    if all({"leak", "mode"} & {*r.kinds} for r in e.failed):   # what is kept of a mode is kept
        return "leak", next(r.detail for r in e.failed if "leak" in r.kinds)
    owners = [next((k for k in r.kinds if k in _OF_MEMORY), "") for r in e.failed]
    # one after another, as memory is used again
    if all(owners) and not (set(owners) <= set(_OF_SHARING) and (
            has_wrong_gradients or e.is_wrong_in_one_call)):
        return max(dict.fromkeys(owners), key=owners.count), e.failed[0].detail
    return None


def _by_direction(e: Evidence) -> Explanation | None:
    e.add_plain_failures()
    if not e.forward:
        kind = ("non-determinism" if all(set(r.kinds) == {"non-determinism"} for r in e.failed)
                else "gradient")
        return kind, f"the forward pass is right, the backward is not: {e.failed[0].detail}"
    if not all(r.circumstance.startswith("backward") for r in e.forward):
        return None
    if all("in-place change" in r.kinds for r in e.forward):   # what is wrong is wrong by that
        return "in-place change", f"where gradients are recorded: {e.detail}"
    if e.ask(is_wrong_when_recording):
        return "mode", f"right as it is, wrong where gradients are recorded: {e.detail}"
    wrong = any("gradient" in r.kinds for r in e.failed)       # the forward pass by a rounding
    return "gradient" if wrong else "unknown", f"wrong where gradients are recorded: {e.detail}"


def _by_call_order(e: Evidence) -> Explanation | None:
    if not (depends_on_earlier_calls(e.kernel, e.forward, e.results, e.device)
            or e.ask(keeps_by_shape) or e.ask(keeps_argument_by_shape)):
        return None
    # memory that is used again looks like something that was kept
    return explain_by_memory(e.kernel, e.forward, e.device) or (
        "state", f"right after some calls, wrong after others: {e.detail}")


def _by_earlier_contents(e: Evidence) -> Explanation | None:
    return explain_by_earlier_contents(e.kernel, e.forward, e.device)


def _by_state_of_torch(e: Evidence) -> Explanation | None:
    """By what torch's modes and settings are about, where it fails in them alone."""
    names = {r.circumstance for r in e.forward}
    if not (all(names) and are_of_torch(names) and kind_of(names) != "unknown" and e.ask(recur)):
        return None
    return kind_of(names), f"right as it is, wrong {listed(sorted(names))}: {e.detail}"


def _by_heads(e: Evidence) -> Explanation | None:
    return explain_by_heads(e.kernel, e.forward, e.device)


# Sizes, memory, earlier calls.

def _by_large_sizes(e: Evidence) -> Explanation | None:
    if e.of_sizes and e.ask(is_right_when_loaded_anew):
        return _state(e)
    if not e.of_large_sizes or any(r.circumstance for r in e.forward) or e.arguments:
        return None
    if any({"not finite", "non-determinism"} & set(r.kinds) for r in e.forward):
        by_memory = explain_by_memory(e.kernel, e.forward, e.device)
        if by_memory and by_memory[0] == "uninitialised output":
            return by_memory
    if (((max(r.ratio for r in e.forward) < 50 and e.ask(is_slight)) or e.ask(is_rounded))
            and e.ask(is_rounding)):
        # roundings do not come and go with a remainder
        return explain_by_remainder(e.kernel, e.forward, e.device, True) or (
            "precision", f"close, and seen where there are many: {e.detail}")
    return (scale_mistake(e.kernel, e.forward, e.device)
            or explain_by_bits(e.kernel, e.forward, e.device) or ("sizes", e.detail))


def _by_layout(e: Evidence) -> Explanation | None:
    strided = [r for r in e.forward if _is_of_layout(e.kernel, r, e.device)]
    others = [r for r in e.forward if r not in strided and "2^31" not in r.circumstance]
    if (strided and not others and not e.is_slight
            and not any("out of bounds" in r.kinds for r in e.forward)
            and is_right_when_contiguous(e.kernel, strided, e.device)):
        return "layout", f"wrong for tensors that are not contiguous only: {e.detail}"
    return None


def _by_earlier_calls(e: Evidence) -> Explanation | None:     # whatever it looks like now
    return _state(e) if e.ask(is_right_when_loaded_anew) else None


def _about_mode(kind: str, e: Evidence) -> str:
    """Does the kernel make of an argument what the formula does, where gradients are recorded? Then
    the path that it takes otherwise forgets it, or takes it otherwise."""
    return ("it is right where gradients are recorded, and wrong where none are"
            if kind in _OF_ARGUMENTS and e.kernel.differentiable and e.forward
            and e.ask(is_right_when_recording) else "")


def _state(e: Evidence) -> Explanation:
    return "state", f"right where it is loaded anew, wrong after other calls: {e.detail}"


def _by_mistake(e: Evidence) -> Explanation | None:
    return explain_by_mistake(e.kernel, e.forward, e.device)


def _by_memory(e: Evidence) -> Explanation | None:
    return explain_by_memory(e.kernel, e.forward, e.device)


# Circumstances.

def _by_circumstance(e: Evidence) -> Explanation | None:
    names = {r.circumstance for r in e.forward}
    if not all(names):                         # it fails without any too
        return None
    if (kind_of(names) != "aliasing" and all("non-determinism" in r.kinds for r in e.forward)
            and not any(word in name for name in names for word in OTHER_CONTENTS)):
        return "state", f"two runs with the same contents differ: {e.detail}"
    says = f"right as it is, wrong {listed(sorted(names))}: {e.detail}"
    if all("given a larger " in name for name in names):       # a bound is no length
        return "convention" if e.ask(recur) else "unknown", says
    if all("given " in name for name in names) and not are_of_torch(names):
        return _kind_of_given(e, names), says
    kind = kind_of(names)
    if kind == "index overflow" and not e.ask(is_right_with_small_gaps):
        return "layout", f"wrong with a small gap between rows too, and right without: {e.detail}"
    if kind == "stale cache":
        return explain_by_contents(e.kernel, e.forward, e.device) or (kind, says)
    if kind == "layout" and not e.ask(is_right_when_contiguous):       # the numbers matter
        kind = "unknown"
    if (kind == "dtype" or are_of_torch(names)) and not e.ask(recur):
        kind = "unknown"
    if kind == "dtype" and not are_of_torch(names) and e.ask(is_a_rounding_in_half):
        kind = "precision"                     # the result has its dtype, and too few digits
    elif kind == "precision" and all("differs from the formula" in r.detail for r in e.forward):
        kind = "unknown"                       # what is chosen has no digits
    return kind, says


def _by_forward_complaint(e: Evidence) -> Explanation | None:
    def is_of_some(kind: str) -> bool:
        """Is it a fault of some calls, of which others have wrong numbers in its place?"""
        return kind == "fault" and any("error" in r.kinds and "fault" not in r.kinds
                                       for r in e.failed)

    return next(((kind, e.detail) for kind in _DIRECT
                 if all(kind in r.kinds for r in e.forward) and not is_of_some(kind)
                 and not (kind in _OF_SHARING and e.is_wrong_in_one_call)), None)


def _by_nondeterminism(e: Evidence) -> Explanation | None:
    if not all("non-determinism" in r.kinds for r in e.forward):
        return None
    has_errors = any("error" in r.kinds or "not finite" in r.kinds for r in e.forward)
    return ("state" if has_errors else "non-determinism",
            f"the result depends on earlier calls: {e.detail}")


def _by_repetition(e: Evidence) -> Explanation | None:
    says = f"right when it is called again, and wrong before: {e.detail}"
    return ("state", says) if e.kernel.deterministic and not e.ask(fails_again) else None


def _by_type(e: Evidence) -> Explanation | None:
    says = f"one in place of several, or several in place of one: {e.detail}"
    return ("shape", says) if e.ask(has_another_type) else None


def _without_tensors(e: Evidence) -> Explanation | None:
    return None if e.op.tensors else ("unknown", f"no altered reference explains it: {e.detail}")


# What mends a call.

def _by_pages(e: Evidence) -> Explanation | None:
    # a page that only a large pool has is a matter of size
    return None if e.of_sizes else explain_by_pages(e.kernel, e.forward, e.device)


def _by_finiteness(e: Evidence) -> Explanation | None:
    explanation = explain_by_finiteness(e.kernel, e.forward, e.device)
    if (explanation and explanation[0] == "non-finite values" and e.ask(is_formula_finite)
            and e.of_sizes and not e.ask(is_right_with_other_numbers)):
        return None                            # the same arguments pass in other sizes
    return explanation


def _by_infinities(e: Evidence) -> Explanation | None:
    """By the infinities and NaN of its input, whatever they do to its codes and sums."""
    return (("non-finite values", f"right in the same sizes with numbers in the place of "
             f"infinities and NaN: {e.detail}")
            if e.op.family != "sampling" and e.ask(is_right_when_finite) else None)


def _by_boundaries(e: Evidence) -> Explanation | None:
    found = explain_by_boundaries(e.kernel, e.forward, e.device)
    return found if e.op.family != "sampling" or (found and found[0] == "ties") else None


def _by_order(e: Evidence) -> Explanation | None:
    return (None if e.op.family == "sampling"
            else explain_by_order(e.kernel, e.forward, e.device))


def _by_factor(e: Evidence) -> Explanation | None:
    # where some cases pass it is one of something else
    passes = any(r.passed and not r.circumstance for r in e.results)
    return None if passes else explain_by_factor(e.kernel, e.forward, e.device)


def _by_fact(e: Evidence) -> Explanation | None:
    """By the argument that distinguishes the failing cases, if each is right without it alone."""
    if any(fact in e.where for fact in _OF_LAYOUT) and e.ask(is_right_when_contiguous):
        return "layout", f"right with the same numbers in contiguous memory: {e.detail}"
    if e.several_arguments or e.is_rounded_somewhere:
        return None
    return next(((_unless_unread(e, name, kind), f"right without {name} alone: {e.detail}")
                 for fact, kind in CLASS_OF_ARGUMENT if fact in e.where
                 for name in e.arguments if fact in name), None)


def _unless_unread(e: Evidence, name: str, kind: str) -> str:
    """Returns the class, unless it is of a factor whose number is not read: one of its own, or of
    an earlier call, is taken."""
    return "convention" if kind == "scale" and gives_the_same_for_all(
        e.kernel, e.forward, name, e.device) else kind


def _by_smaller_calls(e: Evidence) -> Explanation | None:
    """Calls of a smaller size pass with the same arguments."""
    return ("sizes", e.detail) if e.of_large_sizes and not e.distinguished else None


def _by_values(e: Evidence) -> Explanation | None:
    explanation = explain_by_values(e.kernel, e.forward, e.device)
    return None if explanation and explanation[0] == "last rows" and e.distinguished \
        else explanation


def _by_arguments(e: Evidence) -> Explanation | None:
    if not e.arguments or e.is_rounded_somewhere:
        return None
    filters = [name for name in e.arguments if name != "return_logprobs"]
    if e.op.family == "sampling" and (not e.distinguished or len(filters) > 1):
        # another call draws other numbers: it may be right by chance
        return "distribution", f"other tokens or probabilities than the contract's: {e.detail}"
    if "float32" not in e.dtypes or not (e.distinguished
                                         or any(r.error >= 0.05 for r in e.forward)):
        return None
    kinds = {class_of(name, "") or _meaning(e, name) for name in e.arguments}
    # causality is right with the other diagonal, which leaves other rows without a key
    if kinds == {"mask", "alignment"} and e.ask(is_wrong_beside_zeros):
        kinds = {"alignment"}
    # of arguments that go together each one mends it, whichever is wrong
    kind = kinds.pop() if len(kinds) == 1 else "unknown"
    if kind == "convention" and (
            len(e.arguments) > 1 or any("not finite" in r.kinds for r in e.forward)
            or passes_with_the_argument(e.kernel, e.results, e.arguments[0], e.device)):
        kind = "unknown"     # of how several go together, of what is read, of some numbers or sizes
    if kind == "unknown" and e.op.family == "sampling" and e.ask(draws_others):
        return "distribution", f"other tokens than the contract's: {e.detail}"
    small = explain_by_shortness(e.kernel, e.forward, e.device) if kind == "unknown" else None
    return small or (
        kind, f"right without {' or without '.join(e.arguments)} (left out, or one), in float32 "
              f"too wrong with it: {e.detail}")


def _meaning(e: Evidence, name: str) -> str:
    """Returns what an argument speaks of if the kernel means something else by it: if it is wrong
    whenever the argument matters, whatever the sizes and the numbers."""
    if not is_wrong_whenever_given(e.kernel, e.forward, name.split(" and "), e.device):
        return "unknown"
    if e.op.family == "sampling":
        return "distribution" if e.ask(draws_others) else "convention"
    return "invariance" if e.ask(mixes_rows) else meaning_of(name)


def _by_rounded_numbers(e: Evidence) -> Explanation | None:
    return (None if e.op.family == "sampling"
            else explain_by_rounded_argument(e.kernel, e.forward, e.device)
            or explain_by_rounded_result(e.kernel, e.forward, e.device))


def _by_one_size(e: Evidence) -> Explanation | None:
    """By what another size mends; tokens that are drawn differ with every size."""
    if e.op.family == "sampling":
        return None
    by_remainder = explain_by_remainder(e.kernel, e.forward, e.device, e.is_slight)
    if by_remainder:
        if e.ask(is_right_with_smaller_numbers):
            return "overflow", f"right in the same sizes with numbers 8 times smaller: {e.detail}"
        return by_remainder
    slight = e.is_slight or (e.is_right_when_wide and e.ask(is_small_beside_rows))
    if slight and e.ask(is_rounding):
        return None
    return (explain_by_bits(e.kernel, e.forward, e.device)
            or explain_by_growth(e.kernel, e.forward, e.device))


def _by_remainders(e: Evidence) -> Explanation | None:
    of_one_size = any(e.where.startswith(f"{dim} is ") for dim in e.op.dims)
    return (("sizes", e.detail) if e.of_sizes and ("% " in e.where or of_one_size)
            and not e.is_slight else None)


def _by_rounding(e: Evidence) -> Explanation | None:
    ratios = [r.ratio for r in e.forward if "error" in r.kinds]
    if e.op.family == "sampling" and math.inf in ratios:       # tokens do not round
        return None
    if not ratios or min(ratios) <= 1 or not (e.is_right_when_wide or e.is_slight):
        return None
    # so far beyond what 16 bits allow it is as large as the numbers themselves
    if any(FAR_BEYOND < ratio < math.inf for ratio in ratios) and not e.ask(is_small_beside_rows):
        return None
    # a part of each row may be rounded alone
    if not e.ask(is_rounding) and not (e.is_right_when_wide and e.is_slight
                                       and e.ask(errors_are_others)):
        return None
    excess = (f"{max(ratios):.3g} times what is allowed" if math.isfinite(max(ratios))
              else "other codes")
    return "precision", f"close, but {excess}, in {', '.join(sorted(e.dtypes))}: {e.detail}"


def _by_sizes(e: Evidence) -> Explanation | None:
    return ("sizes", e.detail) if e.of_sizes else None


def _by_shortness(e: Evidence) -> Explanation | None:
    return (None if e.op.family == "sampling"
            else explain_by_shortness(e.kernel, e.forward, e.device))


def _by_neighbours(e: Evidence) -> Explanation | None:
    return (("invariance", f"a row changes with the numbers of others: {e.detail}")
            if e.op.family != "sampling" and e.ask(mixes_rows) else None)


def _by_draws(e: Evidence) -> Explanation | None:
    if e.op.family != "sampling":
        return None
    if e.is_right_when_wide:                   # the draw is the contract's then
        return "unknown", f"right in float32: {e.detail}"
    return "distribution", f"other tokens or probabilities than the contract's: {e.detail}"


EXPLAINERS: tuple[Callable[[Evidence], Explanation | None], ...] = (
    _by_complaint, _by_direction, _by_call_order, _by_state_of_torch, _by_earlier_contents,
    _by_heads, _by_large_sizes, _by_layout, _by_earlier_calls, _by_mistake,
    _by_memory, _by_pages, _by_finiteness, _by_infinities, _by_circumstance, _by_forward_complaint,
    _by_nondeterminism, _by_repetition, _by_type, _without_tensors, _by_boundaries, _by_order,
    _by_rounded_numbers, _by_fact, _by_smaller_calls, _by_values, _by_one_size, _by_arguments,
    _by_remainders, _by_rounding, _by_sizes, _by_draws, _by_factor, _by_shortness, _by_neighbours)

# Those whose rerun changes the named thing alone, both ways and with other numbers.
CONFIRMED = (_by_rounded_numbers,)


def _kind_of_given(e: Evidence, names: Iterable[str]) -> str:
    """Returns what the arguments speak of that were given in these circumstances, if no other
    argument that is left out mends a call too."""
    if e.op.family == "sampling":
        return "distribution"
    kinds = {class_of(name, "unknown") for name in names}
    kinds |= {class_of(name, "unknown") for name in others_that_mend(e.kernel, e.forward, e.device)}
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _is_of_layout(kernel: Kernel, r: CaseResult, device: str) -> bool:
    """Has the failing call a tensor that is not contiguous?"""
    return is_strided(kernel, r, device) or is_of_layout(r.circumstance)


def _fails_by_layout(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Does it raise for tensors that are not contiguous only, and serve the same numbers in
    contiguous memory?"""
    return (all(_is_of_layout(kernel, r, device) or "2^31" in r.circumstance for r in failed)
            and is_right_when_contiguous(kernel, failed, device))

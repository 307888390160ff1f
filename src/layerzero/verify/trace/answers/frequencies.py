"""How often a reference draws each token.

With a vocabulary of 100,000 tokens a row can be drawn from a few times at most, and nothing is
learnt from that. Its filters do not depend on how many tokens there are: the reference is run once
more with a small vocabulary, on many equal rows.
"""

from __future__ import annotations

from ...comparison import ComparisonVerdict
from ..definition import Definition
from ..inputs.generation import generate
from ..readings import Unmapped
from ..scaling import CannotScale, scaled
from . import draws
from .lookup import answer
from .references import References

FEW_TOKENS = 4096                              # a vocabulary that is drawn from as it is


def small_vocabulary(definition: Definition) -> Definition:
    """The definition with a vocabulary that can be drawn from often; CannotScale if there is
    none."""
    rows = answer(definition).roles["rows"]
    axis = (definition.inputs[rows].shape or ("",))[-1]
    if definition.const_axes.get(axis, 0) <= FEW_TOKENS:
        return definition
    smaller, changes = scaled(definition)
    if axis not in changes:
        raise CannotScale(f"{axis} is not among the axes that can be made smaller", axis)
    return smaller


def drawn_often(definition: Definition) -> Definition:
    """The definition with a small vocabulary where it draws tokens and can have one, else itself.
    """
    try:
        reply = answer(definition)
        return (small_vocabulary(definition) if reply.random and reply.kind == "sampling"
                else definition)
    except (CannotScale, Unmapped):
        return definition


def frequencies(definition: Definition, references: References, device: str = "cpu",
                seed: int = 0) -> tuple[ComparisonVerdict | None, str]:
    """The verdict on how often the reference's tokens come; or None, and why there is none."""
    try:
        used = small_vocabulary(definition)
    except CannotScale as e:
        return None, f"how often tokens come was not tested, the vocabulary is large: {e}"
    reply = answer(used)
    inputs, times = draws.repeated(reply, generate(used, "small", seed=seed, device=device))
    if times < draws.MIN_REPEATS:
        return None, f"how often tokens come was not tested: {times} draws of a row are too few"
    ran = references.run(used, inputs, device)
    if not ran.ok:
        return None, f"how often tokens come was not tested: {ran.why}"
    tokens = ran.outputs[reply.roles["out"]]
    verdict = draws.possible(reply, inputs, tokens, draws.left_of(reply, inputs, times))
    return (draws.often(reply, inputs, tokens, times) if verdict.passed else verdict), ""

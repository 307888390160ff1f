"""From a definition to the lz call that answers it.

A definition is recognised by its op_type and by the names, shapes and dtypes of its inputs and
outputs; its name, tags and descriptions say how it is to be read. One that no call answers raises
`Unmapped`, which names the part without a counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ....operate.inspection import dispatcher_of
from ..definition import Definition
from ..exports import fixed_arguments
from ..readings import Unmapped
from . import attention, layers, linear_attention, moe
from .answer import Answer, Inputs, Outputs, lz


def answers(definition: Definition) -> tuple[Answer, ...]:
    """Every reading of the definition as an lz call, likeliest first; Unmapped if none. Those that
    contradict the text come last: they tell what a wrong reference computes."""
    own = definition.tag("lz_op")
    if own:
        return (_own_op(definition, own),)
    kind = definition.op_type.lower()
    builders: tuple[tuple[str, Callable[[Definition], list[Answer]]], ...] = (
        (r"(gqa|mha|mqa|attention)_paged.*|paged_(attention|gqa|mha)", attention.paged),
        (r"mla_paged.*|paged_mla", attention.mla), (r"dsa_paged.*|sparse_mla.*", attention.sparse),
        (r"(gqa|mha|mqa|mla|attention)_ragged.*|varlen_attention", attention.ragged),
        (r".*rms_?norm.*", layers.rms_norm), (r"gemm.*|matmul|linear|bmm.*", layers.gemm),
        (r".*rope.*|rotary.*", layers.rope), (r".*sampling.*|sample", layers.sampling),
        (r".*moe.*", moe.moe), (r"gdn.*|.*delta_(rule|net).*", linear_attention.gated_delta_rule),
        (r"mamba_?ssu.*|.*selective_state_update.*", linear_attention.selective_state_update))
    for pattern, build in builders:
        if re.fullmatch(pattern, kind):
            return _ordered(build(definition))
    known = ("gqa_paged, gqa_ragged, mla_paged, mla_ragged, dsa_paged, rmsnorm, gemm, rope, "
             "sampling, moe, gdn, mamba_ssu")
    raise Unmapped(
        f"{definition.name}: lz has no operation of the type {definition.op_type!r}; answered are "
        f"{known}")


def _ordered(answers: list[Answer]) -> tuple[Answer, ...]:
    """Those that the text allows, then those that contradict it in one point."""
    return tuple(a for count in (0, 1) for a in answers if len(a.contradictions) == count)


def answer(definition: Definition) -> Answer:
    """The likeliest one."""
    return answers(definition)[0]


def _own_op(definition: Definition, name: str) -> Answer:
    """A definition exported from one of our ops: its inputs are the op's parameters."""
    params = {p.name for p in dispatcher_of(name).op.params}
    strangers = [n for n in definition.inputs if n not in params]
    if strangers:
        raise Unmapped(f"{definition.name}: lz.{name} has no parameter {strangers[0]!r}")
    fixed = fixed_arguments(definition)

    def compute(x: Inputs) -> Outputs:
        results = lz(name, **{n: x[n] for n in definition.inputs}, **fixed)
        return dict(zip(definition.outputs, results if isinstance(results, (tuple, list))
                        else (results,)))

    return Answer(definition, (name,), f"lz.{name}({', '.join(definition.inputs)})", compute,
                  kind="own", params={n: n for n in definition.inputs}, fixed=fixed,
                  random=name == "sample" and "uniforms" not in definition.inputs)

"""The compiled verdicts must be those of the rules."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.dispatch.facts import read
from layerzero.selection.verdicts import compile_verdicts
from layerzero.spec.reason import Code
from layerzero.spec.rules import AnyOf, Condition, Rule, When
from layerzero.world import snapshot as world

FACTS = ("a", "b", "c.d")
value = st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from(["x", "bfloat16"]))
number = st.integers(1, 32)


def leaf() -> st.SearchStrategy[Condition]:
    fact = st.sampled_from(FACTS)
    return st.one_of(
        st.builds(Rule, fact, st.sampled_from(["eq", "ne"]), value,
                  st.just(Code.SHAPE_UNSUPPORTED)),
        st.builds(Rule, fact, st.sampled_from(["in", "not_in"]),
                  st.lists(value, max_size=3).map(tuple),
                  st.just(Code.SHAPE_UNSUPPORTED)),
        st.builds(Rule, fact, st.sampled_from(["present", "absent"]), st.none(),
                  st.just(Code.SHAPE_UNSUPPORTED)),
        st.builds(Rule, st.just("n"), st.sampled_from(["le", "ge", "multiple_of"]), number,
                  st.just(Code.SHAPE_UNSUPPORTED)),
        st.builds(Rule, st.just("isa"), st.just("has"), st.sampled_from(["avx2", "amx"]),
                  st.just(Code.CPU_ISA_MISSING)))


condition = st.recursive(leaf(), lambda inner: st.one_of(
    st.lists(inner, min_size=1, max_size=3).map(lambda rules: AnyOf(tuple(rules))),
    st.builds(When, inner, inner)),
    max_leaves=5)


@settings(max_examples=300, deadline=None)
@given(groups=st.lists(st.lists(condition, max_size=3), max_size=4), a=value, b=value, d=value,
       n=st.one_of(st.none(), st.integers(0, 64)),
       isa=st.one_of(st.none(), st.just(("avx2",)), st.just(())))
def test_compiled_verdicts_are_those_of_the_rules(groups: Any, a: Any, b: Any, d: Any, n: Any,
                                                  isa: Any) -> None:
    facts = {"a": a, "b": b, "c.d": d, "n": n, "isa": isa}
    want = [i for i, group in enumerate(groups) if all(c.check(facts) is None for c in group)]
    assert compile_verdicts(groups)(facts) == want


def test_every_kernel_in_the_catalog() -> None:
    here = world.current()
    for op in here.catalog.ops.values():
        if op.read is not None:
            continue
        kernels = here.kernels(op.name)
        verdicts = compile_verdicts([k.requires for k in kernels])
        for case in op.cases:
            given_values = op.inputs(**case, dtype=torch.float32, device="cpu", seed=1)
            values = {p.name: given_values.get(p.name, p.default) for p in op.params}
            facts = {**here.device("cpu").facts(), **read(op, values)}
            want = [i for i, k in enumerate(kernels) if not list(k.reasons(facts))]
            assert verdicts(facts) == want


def test_the_generated_reader_says_what_the_careful_one_says() -> None:
    """For every case of every op: the same facts, or nothing where the call is not an ordinary one.
    """
    from layerzero.dispatch.dispatcher import dispatchers, public_function
    here = world.current()
    ordinary = 0
    for op in here.catalog.ops.values():
        public_function(op)
        dispatcher = dispatchers[op.name]
        dispatcher.ensure_world()
        if op.read is not None or dispatcher.program is None:
            continue
        for case in op.cases:
            given_values = op.inputs(**case, dtype=torch.float32, device="cpu", seed=1)
            values = {p.name: given_values.get(p.name, p.default) for p in op.params}
            quick = dispatcher.facts_of(*values.values())
            if quick is not None:
                ordinary += 1
                assert quick == read(op, values, dispatcher.program.needed), (op.name, case)
    assert ordinary > 100

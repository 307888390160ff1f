"""Every numeric limit in the rules, one step inside and one step outside.

Generated: no limit is written here twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from catalog_kernels import KERNELS

from layerzero.machine.hardware import probe
from layerzero.spec.device import CPU_ISA, Device
from layerzero.spec.kernel import Kernel
from layerzero.spec.rules import AnyOf, Condition, Rule, When
from layerzero.verify.kernel.contract import case_facts


def _gpu(name: str, sm: int, generation: str, cores: int) -> Device:
    return Device("cuda", 0, name, "nvidia", sm=sm, gpu_generation=generation,
                  tensor_core_generation=cores, supports_bf16=True, torch_version="2.13.0",
                  runtime_version="13.0")


# CPUs with all that any rule asks for and with next to nothing, so that the limits of every kernel
# are tested on every machine; and this one.
DEVICES = (_gpu("H200", 90, "hopper", 4), _gpu("B200", 100, "blackwell", 5),
           _gpu("A100", 80, "ampere", 3), Device("cpu", 0, "every ISA", "intel", isa=CPU_ISA,
                                                 torch_version="2.13.0"), probe("cpu"),
           Device("cpu", 0, "AVX2 alone", "intel", isa=("avx2",), torch_version="2.13.0"),
           Device("cuda", 0, "MI300X", "amd", arch="gfx942", gpu_generation="cdna3"),
           Device("xpu", 0, "Arc B580", "intel", gpu_generation="unknown"),
           Device("hpu", 0, "Gaudi3", "habana", gpu_generation="unknown"))


def passing(leaf: Rule) -> Any:
    """The value nearest to the limit that the leaf lets through."""
    return next(v for v in leaf.predicate.boundaries() if leaf.predicate.holds(v))


def failing(leaf: Rule) -> Any:
    """The value nearest to the limit that it does not."""
    return next(v for v in leaf.predicate.boundaries() if not leaf.predicate.holds(v))


def is_numeric(leaf: Rule) -> bool:
    return type(leaf.value) in (int, float)


def isolated(rule: Condition, leaf: Rule, facts: dict[str, Any]) -> Iterator[Rule]:
    """Set `facts` so that the verdict of `rule` hangs on `leaf` alone; yields `leaf` if that can be
    done."""
    if rule is leaf:
        yield leaf
    elif isinstance(rule, When):
        if leaf in rule.then.leaves():
            for condition in rule.condition.leaves():
                facts[condition.fact] = passing(condition)
            yield from isolated(rule.then, leaf, facts)
        # a leaf of the condition only decides whether `then` is asked
    elif isinstance(rule, AnyOf):
        for other in rule.rules:
            if leaf not in other.leaves():
                for alternative in other.leaves():
                    facts[alternative.fact] = failing(alternative)
        for branch in rule.rules:
            if leaf in branch.leaves():
                yield from isolated(branch, leaf, facts)


def limits() -> dict[str, list[tuple[Condition, Rule]]]:
    """Kernel -> its rules, with each limit in them."""
    rows: dict[str, list[tuple[Condition, Rule]]] = {}
    for kernel in KERNELS:
        for rule in kernel.requires:
            leaves = [leaf for leaf in rule.leaves() if is_numeric(leaf)
                      and list(isolated(rule, leaf, {}))]
            if leaves:
                rows.setdefault(kernel.id, []).extend((rule, leaf) for leaf in leaves)
    return rows


LIMITS = limits()


@pytest.mark.parametrize("kernel", LIMITS)
def test_limits(kernel: str) -> None:
    wrong = [f"{leaf} of {rule}" for rule, leaf in LIMITS[kernel] if not holds(rule, leaf)]
    assert not wrong, "\n".join(wrong)


def holds(rule: Condition, leaf: Rule) -> bool:
    """Does the rule admit what is just within this limit, and refuse what is just beyond it with
    a reason of its own?"""
    inside, outside = passing(leaf), failing(leaf)
    facts: dict[str, Any] = {}
    if list(isolated(rule, leaf, facts)) != [leaf]:
        return False
    reason = rule.check({**facts, leaf.fact: outside})
    if rule.check({**facts, leaf.fact: inside}) is not None or reason is None:
        return False
    return (reason.code in {other.code for other in rule.leaves()}
            and (rule is not leaf
                 or (reason.code, reason.got, reason.fact) == (leaf.code, outside, leaf.fact)))


def accepted_facts(kernel: Kernel) -> dict[str, Any] | None:
    """The facts of some case of the op that the kernel would serve on one of the devices."""
    for device in DEVICES:
        own = device.facts()
        if any(isinstance(rule, Rule) and rule.fact in own and rule.check(own)
               for rule in kernel.requires):
            continue
        for dtype in kernel.op.dtypes:
            for case in kernel.op.cases:
                facts = {**case_facts(kernel.op, case, dtype), **own}
                if not list(kernel.reasons(facts)):
                    return facts
    return None


# The cases of the tokenizer ops hold tokenizers of another library than these.
OTHERS = ("sentencepiece.", "tiktoken.")


@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.id.startswith(OTHERS)],
                         ids=lambda k: k.id)
def test_each_limit_alone_turns_an_accepted_call_away(kernel: Kernel) -> None:
    facts = accepted_facts(kernel)
    assert facts is not None, (
        f"{kernel.id} accepts none of its op's cases on any of {[d.name for d in DEVICES]}")
    for leaf in kernel.requires:
        if isinstance(leaf, Rule) and is_numeric(leaf):
            outside = failing(leaf)
            codes = [r.code for r in kernel.reasons({**facts, leaf.fact: outside})]
            assert leaf.code in codes, f"{leaf}: {outside} was let through"


def test_the_limits_are_many() -> None:
    assert sum(map(len, LIMITS.values())) >= 150

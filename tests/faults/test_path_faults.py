"""Paths that a kernel takes in some calls alone, and what is no mistake: plans of a library for many
lengths, a table that is too large to copy."""

from __future__ import annotations

import functools

import pytest
import torch
from broken_kernels import Fault
from path_faults import PATH_FAULTS

import layerzero as lz
from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.circumstances.table_circumstances import check_long_table
from layerzero.verify.certification.growth import check_other_contents
from layerzero.verify.kernel.guarded import bounded_memory


@pytest.mark.parametrize("fault", PATH_FAULTS, ids=lambda f: f.name)
def test_it_is_found_and_named_rightly_or_not_at_all(fault: Fault) -> None:
    verdict = certify(fault.kernel(), seeds=(1,), stop_early=True)
    assert verdict.status == "failed" and verdict.diagnosis is not None
    assert verdict.diagnosis.kind in {*fault.kinds, "unknown"}, str(verdict.diagnosis)


def sound(op: str, run) -> Fault:
    return PATH_FAULTS[0]._replace(name=run.__name__, op=lz.op(op), make=lambda: run)


def test_sequences_cut_to_their_lengths_leave_nothing_of_the_kernel_behind() -> None:
    """OneDNN keeps what it plans for each new size of a product."""
    op = lz.op("paged_attention")

    @functools.wraps(op.reference)
    def one_by_one(query, key_cache, value_cache, block_table, context_lens, *args, **v):
        longest = int(context_lens.max()) if len(context_lens) else 0
        torch.randn(3, longest + 1) @ torch.randn(longest + 1, 2 * longest + 3)
        return op.reference(query, key_cache, value_cache, block_table, context_lens, *args, **v)

    result = check_other_contents(sound("paged_attention", one_by_one).kernel(),
                                  {"context": (20, 180, 240)}, "float32",
                                  other="other lengths")
    assert result.status == "passed", str(result)


def test_a_kernel_that_copies_its_table_once_is_not_ended_for_it() -> None:
    op, kept = lz.op("embedding"), []

    @functools.wraps(op.reference)
    def copying(ids, weight, *args, **v):
        if len(weight) > 1 << 20:
            kept.append(weight.clone())
        return op.reference(ids, weight, *args, **v)

    result = check_long_table(sound("embedding", copying).kernel(), {}, "float32")
    assert result.status == "skipped", str(result)
    assert all(t.numel() < 1 << 30 for t in kept)


def test_what_is_bounded_is_free_again() -> None:
    with bounded_memory(1 << 28), pytest.raises(RuntimeError, match="memory"):
        torch.empty(1 << 30).fill_(1.0)
    assert torch.empty(1 << 27).fill_(1.0)[-1] == 1.0

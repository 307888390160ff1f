"""Kernels that declare themselves invariant keep their bits: generated from the declarations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from catalog_kernels import KERNELS

from layerzero.machine import loading
from layerzero.ops.linear import OP as linear
from layerzero.ops.mlp import OP as mlp
from layerzero.spec import rules as r
from layerzero.spec.errors import RegistrationError
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.invariance import check_invariance, sliced


def grid() -> list[Any]:
    rows = []
    for kernel in KERNELS:
        for to, declared in (("batch", kernel.batch_invariant), ("tp", kernel.tp_invariant)):
            absent = loading.availability(kernel) or next(
                (reason for rule in kernel.requires
                 if isinstance(rule, r.Rule) and rule.fact == "device"
                 and (reason := rule.check({"device": "cpu"}))), None)
            if declared:
                rows.append(pytest.param(
                    kernel, to, id=f"{kernel.id}-{to}",
                    marks=pytest.mark.skip(reason=str(absent)) if absent is not None else ()))
    return rows


@pytest.mark.parametrize(("kernel", "to"), grid())
def test_a_part_alone_has_the_bits_it_has_in_the_whole(kernel, to):
    op = kernel.op
    # one that splits nothing has nothing to show in long cases
    longer = () if kernel.only_invariant else op.invariance_cases
    results = [check_invariance(kernel, case, dtype, to) for dtype in op.dtypes[:2]
               for case in (*op.cases[::3 if longer else 16], *longer)]
    assert not [str(result) for result in results if result.status == "failed"]
    if all(result.status == "skipped" for result in results):
        pytest.skip("none of the cases runs on this CPU")


def test_a_kernel_that_reads_its_neighbours_is_found_out():
    def load() -> Any:
        def run(x, weight, bias=None, activation=None):
            return linear.reference(x, weight, bias, activation) + x.sum() * 0.5

        return run

    kernel = Kernel("fake.linear", linear, load, batch_invariant=True, tp_invariant=True)
    result = check_invariance(kernel, {}, "float32", "batch")
    assert result.status == "failed" and "along rows" in result.detail
    result = check_invariance(replace(kernel, load=lambda: lambda x, weight, bias=None,
                                      activation=None: x @ weight.t() + weight.sum()),
                              {"bias": False}, "float32", "tp")
    assert result.status == "failed" and "along out_features" in result.detail


def test_a_part_has_the_rows_of_every_tensor_that_has_them():
    x, weight = torch.arange(24.0).view(4, 2, 3), torch.ones(8, 3)
    values = {"x": x, "weight": weight, "bias": None, "activation": None}
    part = sliced(linear, values, linear.batch_dims, (1, 2, 2))
    assert torch.equal(part["x"], x[2:]) and part["weight"] is weight
    part = sliced(linear, values, linear.shard_dims, (3, 4, 4))
    assert torch.equal(part["weight"], weight[6:]) and part["x"] is x


def test_a_declaration_that_depends_on_the_batch_is_refused():
    with pytest.raises(RegistrationError, match="its rules read rows"):
        Kernel("fake.few", linear, lambda: None, (r.at_most("rows", 8),), batch_invariant=True)
    with pytest.raises(RegistrationError, match="shard_dims"):
        Kernel("fake.mlp", mlp, lambda: None, tp_invariant=True)

"""batch_invariant and tp_invariant: who may serve, and in which order."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.errors import NoKernelFoundError
from layerzero.ops.linear import OP as LINEAR
from layerzero.spec.kernel import Kernel

pytestmark = pytest.mark.usefixtures("world")
BATCH, TP = {"batch_invariant": True}, {"tp_invariant": True}


def codes(plan, kernel):
    return {reason.code for reason in plan.why_not(kernel)}


def test_kernels_that_do_not_declare_it_are_refused_with_a_reason():
    x, weight = torch.ones(5, 64), torch.ones(48, 64)
    plan = lz.explain("linear", x, weight, policy={**BATCH, **TP})
    assert codes(plan, "torch.linear") == {lz.Code.BATCH_INVARIANCE_REQUIRED,
                                           lz.Code.TP_INVARIANCE_REQUIRED}
    with pytest.raises(lz.errors.NamedKernelRefused, match="TP_INVARIANCE_REQUIRED"):
        lz.linear(x, weight, backend="torch.linear", policy=TP)
    assert lz.explain("linear", x, weight, policy=BATCH).kernel in (
        "native.linear_invariant", "torch.linear_each_row")


def test_an_op_that_ranks_do_not_share_needs_nothing():
    plan = lz.explain("rms_norm", torch.ones(5, 64), policy=TP)
    assert {s.kernel for s in plan.steps} == {s.kernel for s in lz.explain(
        "rms_norm", torch.ones(5, 64)).steps}


def test_an_op_without_a_proof_raises():
    weight = torch.ones(2, 32, 64)
    with pytest.raises(NoKernelFoundError, match="BATCH_INVARIANCE_REQUIRED"):
        lz.grouped_gemm(torch.ones(4, 32), weight, torch.tensor([2, 4], dtype=torch.int32),
                        policy=BATCH)


def test_row_by_row_serves_only_where_it_is_wanted():
    x, weight = torch.ones(5, 64), torch.ones(48, 64)
    assert codes(lz.explain("linear", x, weight),
                 "torch.linear_each_row") == {lz.Code.INVARIANCE_NOT_REQUIRED}
    assert lz.which("linear", x, weight, backend="torch.linear_each_row")


def test_the_choice_does_not_depend_on_the_batch():
    """Whatever is measured, the order is that of the declarations."""
    weight = torch.ones(48, 64)
    with lz.prefer(batch_invariant=True):
        chosen = {lz.which("linear", torch.ones(rows, 64), weight) for rows in (1, 7, 200)}
    assert len(chosen) == 1


def test_rows_keep_their_bits_and_gradients_flow():
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 520, generator=gen), torch.randn(24, 520, generator=gen)
    lz.configure(batch_invariant=True)
    whole = lz.linear(x, weight)
    assert all(torch.equal(lz.linear(x[i:i + 1], weight), whole[i:i + 1]) for i in range(9))
    x.requires_grad_()
    lz.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(9, -1))


def test_a_kernel_that_compiles_serves_at_once_where_bits_must_stay():
    """To wait until it is compiled would change the choice, and with it the bits."""
    def load():
        return lambda x, weight, bias=None, activation=None: x @ weight.t()

    lz.register(Kernel("fake.compiled", LINEAR, load, jit=True, prior=99.0, batch_invariant=True,
                       tp_invariant=True))
    x, weight = torch.ones(5, 64), torch.ones(48, 64)
    assert lz.Code.JIT_NOT_WARMED in codes(lz.explain("linear", x, weight), "fake.compiled")
    for rows in (1, 5, 200):
        lz.linear(torch.ones(rows, 64), weight, policy={**BATCH, **TP})
        assert lz.which("linear", torch.ones(rows, 64), weight,
                        policy={**BATCH, **TP}) == "fake.compiled"

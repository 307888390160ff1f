"""Half types on CPUs that have no matmul for them: who serves, what is kept, and what comes back.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerzero.backends import torch_upcast
from layerzero.backends._packing import PACKED
from layerzero.dispatch.facts import read
from layerzero.machine import hardware
from layerzero.spec.device import CPU_ISA
from layerzero.spec.reason import Code
from layerzero.verify.kernel.contract import call, case_values, refusals
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases, requiring_grad

BY_ID = {k.id: k for k in torch_upcast.KERNELS}
SLOW = not hardware.probe("cpu").facts()["fast_bf16_matmul"]
needs_slow_half = pytest.mark.skipif(not SLOW, reason="this CPU has a matmul for bfloat16")


@pytest.mark.parametrize("kernel", torch_upcast.KERNELS, ids=lambda k: k.id)
@pytest.mark.parametrize(("isa", "dtype", "refused"), [
    (("avx2",), "bfloat16", False), (("avx2",), "float16", False),
    (("neon", "fp16", "dotprod"), "float16", False),
    (("avx2", "avx512f"), "bfloat16", True), (("avx2", "avx512f"), "float16", False),
    (("neon", "bf16"), "bfloat16", True),
    (CPU_ISA, "bfloat16", True), (CPU_ISA, "float16", True)])
def test_offered_only_where_torch_has_no_instructions_for_the_type(kernel, isa, dtype, refused):
    device = replace(hardware.probe("cpu"), isa=isa)
    facts = {**read(kernel.op, case_values(kernel.op, kernel.op.cases[0], dtype)), **device.facts()}
    assert (Code.MATMUL_IS_FAST in [r.code for r in kernel.reasons(facts)]) == refused


@needs_slow_half
@pytest.mark.parametrize("kernel", [k for k in torch_upcast.KERNELS if k.differentiable],
                         ids=lambda k: k.id)
def test_gradients_in_bfloat16(kernel):
    served = [case for case in gradient_cases(kernel.op)
              if not refusals(kernel,
                              requiring_grad(kernel.op, case_values(kernel.op, case, "bfloat16")))]
    results = [check_gradients(kernel, case, "bfloat16") for case in served]
    assert results and [str(r) for r in results if r.status == "failed"] == []


def test_a_copy_is_kept_follows_its_weight_and_counts_for_what_it_takes():
    kernel = BY_ID["torch.linear_upcast_packed"]
    values = case_values(kernel.op, {"rows": (3,), "k": 96, "n": 80}, "bfloat16")
    before, kept = PACKED.nbytes, len(PACKED)
    first = call(kernel, values)
    assert len(PACKED) == kept + 1 and PACKED.nbytes - before == 4 * 96 * 80
    values["weight"].mul_(2)
    bias = values["bias"].float()
    want = (first.float() - bias) * 2 + bias
    assert (torch.allclose(call(kernel, values).float(), want, rtol=2e-2, atol=2e-2)
            and len(PACKED) == kept + 1)
    del values
    assert len(PACKED) == kept, "it goes with its weight"


def test_where_nothing_may_be_kept_the_weight_is_cast_in_the_call(monkeypatch):
    monkeypatch.setattr(PACKED, "limit", 0)
    kernel = BY_ID["torch.linear_upcast_packed"]
    values = case_values(kernel.op, {"rows": (3,), "k": 96, "n": 80}, "bfloat16")
    kept = len(PACKED)
    assert (torch.equal(call(kernel, values), call(BY_ID["torch.linear_upcast"], values))
            and len(PACKED) == kept)

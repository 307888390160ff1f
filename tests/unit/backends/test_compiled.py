"""Formulas that torch.compile fuses: never by surprise, once per kind of call, and with a reason
where they cannot.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import layerzero as lz
from layerzero.backends import torch_compiled
from layerzero.backends.torch_compiled import KERNELS, CompiledReference
from layerzero.machine import loading
from layerzero.spec.reason import Code

HERE = torch_compiled.compiler() is True
needs_compiler = pytest.mark.skipif(not HERE, reason=str(torch_compiled.compiler()))
BY_OP = {k.op.name: k for k in KERNELS}


def graphs() -> int:
    """How many graphs Dynamo has made in this process."""
    return importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_none_is_chosen_unasked(kernel):
    assert kernel.jit and kernel.id == f"torch.compiled_{kernel.op.name}"


def test_explain_says_why_not():
    x = torch.randn(512, 64)
    plan = lz.explain("rms_norm", x)
    refused = {r.kernel: [reason.code for reason in r.reasons] for r in plan.rejected}
    assert refused["torch.compiled_rms_norm"] == [Code.JIT_NOT_WARMED if HERE
                                                  else Code.COMPILER_MISSING]


def test_without_a_compiler_there_is_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    torch_compiled.compiler.cache_clear()
    try:
        reason = loading.availability(BY_OP["rope"])
        assert reason is not None and reason.code is Code.COMPILER_MISSING
        assert "no-such-compiler" in reason.message and "CXX" in reason.code.advice
    finally:
        monkeypatch.undo()
        torch_compiled.compiler.cache_clear()


def test_the_signature_is_the_formulas():
    for kernel in KERNELS:
        if HERE:
            assert loading.accepted_params(kernel.id, kernel.op,
                                           loading.load(kernel)) == tuple(kernel.op.by_name)


@needs_compiler
def test_sizes_that_vary_compile_once_and_exact_ones_each_time():
    run, weight = CompiledReference(lz.op("rms_norm")), torch.randn(64)
    first = torch.randn(5, 64)
    run(first, weight)
    # what is marked is an alias, not the caller's
    assert not hasattr(first, "_dynamo_weak_dynamic_indices")
    before = graphs()
    for rows in (6, 17, 900, 2):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(run(x, weight), lz.op("rms_norm").reference(x, weight))
    assert len(run.specializations) == 1 and graphs() == before
    run(torch.randn(5, 32), torch.randn(32))
    run(torch.randn(5, 64), weight, eps=1e-3)
    assert len(run.specializations) == 3 and graphs() == before + 2


@needs_compiler
def test_the_wait_is_an_event():
    x, events = torch.randn(40, 24), []
    stop = lz.subscribe(events.append)
    try:
        for _ in range(2):
            lz.rms_norm(x, backend="torch.compiled_rms_norm")
    finally:
        stop()
    warm = [e for e in events if e.name == "warmed_up"]
    assert ([(e.op, e.kernel) for e in warm] == [("rms_norm", "torch.compiled_rms_norm")]
            and warm[0].seconds > 0)
    assert warm[0].to_json()["seconds"] == warm[0].seconds


@needs_compiler
@pytest.mark.parametrize("wrong", [-1, 24])
def test_a_target_outside_the_vocabulary_is_found(wrong):
    logits, targets = torch.randn(9, 24), torch.randint(0, 24, (9,))
    with lz.prefer("torch.compiled_cross_entropy", jit="in_request"):
        refused = lz.validate("cross_entropy", "torch.compiled_cross_entropy", logits, targets)
        if any(reason.code is lz.Code.VERSION_CONFLICT for reason in refused):
            pytest.skip(refused[0].message)
        assert lz.which("cross_entropy", logits, targets) == "torch.compiled_cross_entropy"
        lz.cross_entropy(logits, targets)
        targets[4] = wrong
        with pytest.raises(lz.errors.InvalidCall, match="targets"):
            lz.cross_entropy(logits, targets)

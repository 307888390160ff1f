"""Tensors whose values are not what lies in their memory: tangents, negated views, zeros never
written, wrappers that left their transform, freed storages.

A kernel over raw memory answered from it: without the tangent, with the wrong sign, or not at all.
"""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import path_of
from torch.autograd import forward_ad

import layerzero as lz
from layerzero.spec.errors import InvalidCall
from layerzero.spec.reason import Code
from layerzero.world import snapshot as worlds

# that have kernels over raw memory
OPS = [lz.op(name) for name in ("rms_norm", "add_rms_norm", "attention", "rope", "linear",
                                "dequantize", "paged_attention", "quantized_linear")]
ROWS, WEIGHT = torch.randn(4, 64), torch.rand(64)


def outputs(result: object) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, (tuple, list)) else [result])
            if isinstance(t, torch.Tensor)]


def freed(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_tangent_is_never_lost(op, path):
    function = path_of(op, path)
    inputs = op.inputs(**op.cases[0], dtype=torch.float32)
    name = next(n for n, v in inputs.items()
                if isinstance(v, torch.Tensor) and v.is_floating_point())
    function(**inputs)                          # remembered: a dual must not ride on its key
    tangent = torch.randn_like(inputs[name])
    tangents = []
    for call in (function, op.reference):
        with forward_ad.dual_level():
            out = call(**{**inputs, name: forward_ad.make_dual(inputs[name], tangent)})
            tangents.append([forward_ad.unpack_dual(t).tangent for t in outputs(out)])
    for got, want in zip(*tangents):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert not worlds.current().health


def test_a_negated_view_keeps_its_sign(path):
    """The first call of its kind, and one that could ride on another's key."""
    rms_norm = path_of("rms_norm", path)
    for x in (ROWS[:3], ROWS):
        wanted = torch.nn.functional.rms_norm(x, (64,), WEIGHT, 1e-6)
        if x is ROWS:
            rms_norm(x, WEIGHT)
        torch.testing.assert_close(rms_norm(torch._neg_view(-x), WEIGHT), wanted)
        torch.testing.assert_close(rms_norm(x, torch._neg_view(-WEIGHT)), wanted)
        assert not rms_norm(torch._efficientzerotensor(x.shape), WEIGHT).any()


def test_a_wrapper_that_has_left_its_transform():
    kept = []
    torch.func.functionalize(lambda x: kept.append(x) or x.sum())(ROWS)
    torch.func.grad(lambda x: kept.append(x) or x.sum())(ROWS)
    wanted = torch.nn.functional.rms_norm(ROWS, (64,), WEIGHT, 1e-6)
    for x in kept:
        assert (lz.rms_norm(x, WEIGHT) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_freed_memory_is_refused_and_says_so(path, backend):
    """torch's own functions read address 0 too: the process would end there."""
    rms_norm = functools.partial(path_of("rms_norm", path), backend=backend)
    for rows in (ROWS[:2], ROWS):
        if rows is ROWS:
            rms_norm(rows, WEIGHT)
        with pytest.raises(InvalidCall, match=r"x must be a tensor with memory for .* freed") as e:
            rms_norm(freed(rows), WEIGHT)
        assert e.value.codes == (Code.TENSOR_UNREADABLE,) and "unshard" in str(e.value)
    for _ in range(2):
        assert rms_norm(freed(ROWS[:0]), WEIGHT).shape == (0, 64)      # it needs none
    assert not worlds.current().health


def test_a_worker_takes_only_what_lies_in_memory():
    """A kernel in a worker is sent memory, whatever the kernel itself could take."""
    from layerzero.selection.isolation import parse
    from layerzero.world.registry.isolation import worker_kernel
    entry, = parse("torch.rms_norm=worker")
    kernel = next(k for k in worlds.current().catalog.kernels if k.id == "torch.rms_norm")
    made = worker_kernel("worker.torch.rms_norm", kernel, entry, lambda: worlds.current().policy)
    assert any("tensor_kind" in str(rule) for rule in made.requires)

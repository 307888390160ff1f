"""Feed-forward layers: layouts, gradients, and how they are cut for tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import layerzero as lz
from layerzero.machine.hardware import probe
from layerzero.models.weights.quantization import column_shard, row_shard
from layerzero.ops.formulas.moe import GATED, PLAIN
from layerzero.spec.reason import Code

INTEL = "avx512f" in probe("cpu").isa
ACT = {"swiglu": F.silu, "silu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "reglu": F.relu,
       "relu": F.relu,
       "geglu_tanh": lambda t: F.gelu(t, approximate="tanh"),
       "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}


def weights(activation="swiglu", hidden=32, inner=48, dtype=torch.float32, seed=0, bias=False):
    gen = torch.Generator().manual_seed(seed)
    wide = 2 * inner if activation in GATED else inner
    made = {"weight_in": torch.randn(wide, hidden, generator=gen) / hidden ** 0.5,
            "weight_down": torch.randn(hidden, inner, generator=gen) / inner ** 0.5}
    if bias:
        made |= {"bias_in": torch.randn(wide, generator=gen),
                 "bias_down": torch.randn(hidden, generator=gen)}
    return {name: t.to(dtype) for name, t in made.items()}


@pytest.mark.parametrize("activation", [*GATED, *PLAIN])
def test_gate_first_then_up(activation):
    x, w = torch.randn(5, 32), weights(activation)
    product = F.linear(x, w["weight_in"])
    inner = (ACT[activation](product[:, :48]) * product[:, 48:] if activation in GATED
             else ACT[activation](product))
    torch.testing.assert_close(lz.mlp(x, **w, activation=activation),
                               F.linear(inner, w["weight_down"]))


def test_gate_and_up_apart_are_the_same_layer():
    x, w = torch.randn(5, 32), weights(bias=True)
    gate, up = w["weight_in"].chunk(2)
    bias_gate, bias_up = w["bias_in"].chunk(2)
    apart = lz.mlp(x, gate, w["weight_down"], weight_up=up, bias_in=bias_gate, bias_up=bias_up,
                   bias_down=w["bias_down"])
    torch.testing.assert_close(apart, lz.mlp(x, **w))


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
def test_gradients(activation):
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, generator=gen, dtype=torch.float64, requires_grad=True)
    w = {n: t.requires_grad_() for n, t in weights(activation, 4, 5, torch.float64,
                                                   bias=True).items()}
    names = list(w)
    assert torch.autograd.gradcheck(
        lambda x, *ts: lz.mlp(x, activation=activation, **dict(zip(names, ts))), (x, *w.values()))


def test_gradients_are_torchs():
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    w = {n: t.requires_grad_() for n, t in weights().items()}
    lz.mlp(x, **w).square().sum().backward()
    ours = [t.grad.clone() for t in (x, *w.values())]
    for t in (x, *w.values()):
        t.grad = None
    gate, up = F.linear(x, w["weight_in"]).chunk(2, -1)
    F.linear(F.silu(gate) * up, w["weight_down"]).square().sum().backward()
    for a, b in zip(ours, (x.grad, *(t.grad for t in w.values()))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_sum_of_the_shards_is_the_whole(activation, world):
    """Gate and up cut by columns, each by itself, down by rows: one sum at the end, and one bias.
    """
    x, w = torch.randn(7, 32), weights(activation, bias=True)
    parts = 2 if activation in GATED else 1

    def on(rank):
        return lz.mlp(x, column_shard(w["weight_in"], rank, world, parts=parts),
                      row_shard(w["weight_down"], rank, world), activation,
                      bias_in=column_shard(w["bias_in"], rank, world, parts=parts),
                      bias_down=row_shard(w["bias_down"], rank, world))

    torch.testing.assert_close(sum(on(rank) for rank in range(world)),
                               lz.mlp(x, **w, activation=activation),
                               rtol=1e-5, atol=1e-5)


def test_columns_of_a_linear_layer_side_by_side_are_the_whole():
    x, weight = torch.randn(3, 32), torch.randn(48, 32)
    parts = [lz.linear(x, column_shard(weight, rank, 3)) for rank in range(3)]
    torch.testing.assert_close(torch.cat(parts, -1), lz.linear(x, weight))


@pytest.mark.parametrize("cut", [
    lambda w: column_shard(w, 0, 5), lambda w: column_shard(w, 0, 2, parts=5),
    lambda w: row_shard(w, 0, 3), lambda w: row_shard(w, 0, 2, unit=12),
    lambda w: row_shard(w, 2, 2), lambda w: column_shard(w, -1, 2)])
def test_what_does_not_divide_is_refused(cut):
    with pytest.raises(lz.errors.InvalidCall, match=r"multiple|between"):
        cut(torch.randn(48, 32))


@pytest.mark.parametrize(("change", "code", "name"), [
    ({"weight_in": torch.ones(48, 32)}, Code.DIM_MISMATCH, "weight_in"),
    ({"activation": "gelu"}, Code.DIM_MISMATCH, "weight_in"),
    ({"weight_up": torch.ones(48, 32)}, Code.DIM_MISMATCH, "weight_in"),
    ({"weight_in": torch.ones(96, 31)}, Code.DIM_MISMATCH, "weight_in"),
    ({"activation": "gelu", "weight_in": torch.ones(48, 32), "weight_up": torch.ones(48, 32)},
     Code.FEATURE_UNSUPPORTED, "weight_up"),
    ({"bias_up": torch.ones(48)}, Code.FEATURE_UNSUPPORTED, "bias_up"),
    ({"bias_in": torch.ones(48)}, Code.DIM_MISMATCH, "bias_in"),
    ({"activation": "swish"}, Code.VALUE_OUT_OF_RANGE, "activation")])
def test_a_wrong_argument_is_named(change, code, name):
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.mlp(**{"x": torch.ones(2, 32), **weights(), **change})
    assert any(r.code is code and r.fact.startswith(name)
               for r in error.value.reasons), str(error.value)


@pytest.mark.skipif(not INTEL, reason="torch.mlp_prepacked needs AVX-512")
def test_who_may_serve_which_layer():
    """Torch's own is the default; what goes before it was measured, or does less work on this
    processor."""
    for rows, dtype in ((1, torch.float32), (32, torch.float32), (512, torch.float32),
                        (1, torch.bfloat16)):
        plan = lz.explain("mlp", torch.empty(rows, 576, dtype=dtype),
                          **weights(hidden=576, inner=1536, dtype=dtype))
        names = [s.kernel for s in plan.steps]
        assert all(s.score.source == "less work" for s in plan.steps[:names.index("torch.mlp")])
        assert ("torch.mlp_fused" in names) == (rows <= 64)


def test_inside_torch_compile():
    w = weights()
    compiled = torch.compile(lambda x: lz.mlp(x, **w), fullgraph=True, backend="aot_eager",
                             dynamic=True)
    for rows in (2, 5, 100):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), lz.mlp(x, **w))

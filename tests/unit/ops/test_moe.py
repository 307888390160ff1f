"""Grouped products, routing and mixtures of experts, against plain spellings of what they mean."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import layerzero as lz


def experts(n=4, hidden=32, inner=24, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return ((torch.randn(n, 2 * inner, hidden, generator=gen) / hidden ** 0.5).to(dtype),
            (torch.randn(n, hidden, inner, generator=gen) / inner ** 0.5).to(dtype))


def one_expert(x, w_gate_up, w_down):
    gate, up = F.linear(x, w_gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w_down)


# Routing.

def routed_plainly(logits, top_k, n_group, topk_group, bias, scale):
    """DeepSeek-V3's routing, token by token, in Python."""
    ids, weights = [], []
    for row in logits.double().sigmoid().float().tolist():
        choice = [s + (b if bias is not None else 0.0) for s, b in
                  zip(row, bias.tolist() if bias is not None else row)]
        size = len(row) // n_group
        groups = [choice[g * size:(g + 1) * size] for g in range(n_group)]
        worth = [sum(sorted(g)[-2:]) if bias is not None else max(g) for g in groups]
        kept = sorted(range(n_group), key=lambda g: (-worth[g], g))[:topk_group]
        open_to = [e for e in range(len(row)) if e // size in kept]
        best = sorted(open_to, key=lambda e: (-choice[e], e))[:top_k]
        total = sum(row[e] for e in best)
        ids.append(best)
        weights.append([row[e] / total * scale for e in best])
    return torch.tensor(ids), torch.tensor(weights)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (8, 3)])
def test_routing_is_deepseeks(n_group, topk_group, bias):
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 32, generator=gen)
    correction = torch.randn(32, generator=gen) * 0.3 if bias else None
    ids, weights = lz.moe_gate(logits, 4, "sigmoid", n_group=n_group, topk_group=topk_group,
                               e_score_correction_bias=correction, routed_scaling_factor=2.5)
    want_ids, want_weights = routed_plainly(logits, 4, n_group, topk_group, correction, 2.5)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights)


def test_softmax_then_normalized_is_the_softmax_of_the_chosen():
    logits = torch.randn(20, 16, generator=torch.Generator().manual_seed(2))
    ids, weights = lz.moe_gate(logits, 3)
    best = logits.topk(3)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equals_the_lower_index_wins(scoring, rows):
    for backend in ("reference.moe_gate", "torch.moe_gate") if rows > 8 else (None,):
        ids, _ = lz.moe_gate(torch.zeros(rows, 12), 5, scoring, backend=backend)
        assert ids.tolist() == [[0, 1, 2, 3, 4]] * rows
        logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 0.0]).repeat(rows, 1)
        assert lz.moe_gate(logits, 4, scoring, backend=backend)[0].tolist() == [[1, 3, 2, 4]] * rows
        # all but one score are 0, or 1
        far = torch.tensor([-200.0, -300.0, 200.0, -250.0]).repeat(rows, 1)
        assert lz.moe_gate(far, 3, scoring, backend=backend)[0].tolist() == [[2, 0, 1]] * rows


def test_a_gradient_reaches_the_router():
    for rows in (3, 20):
        logits = torch.randn(rows, 8, requires_grad=True)
        ids, weights = lz.moe_gate(logits, 2, "sigmoid", False)
        weights.sum().backward()
        score = logits.detach().sigmoid()
        want = torch.zeros_like(score).scatter(-1, ids, (score * (1 - score)).gather(-1, ids))
        torch.testing.assert_close(logits.grad, want)


@pytest.mark.parametrize(("inputs", "name"), [
    ({"top_k": 0}, "top_k"), ({"top_k": 17}, "top_k"), ({"top_k": 2, "n_group": 3}, "n_group"),
    ({"top_k": 2, "n_group": 4, "topk_group": 5}, "topk_group"),
    ({"top_k": 9, "n_group": 4, "topk_group": 2}, "top_k"),
    ({"top_k": 2, "scoring": "relu"}, "scoring"),
    ({"top_k": 2, "e_score_correction_bias": torch.ones(15)}, "e_score")])
def test_routing_says_which_argument_is_wrong(inputs, name):
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.moe_gate(torch.randn(3, 16), **inputs)
    assert any(r.fact.startswith(name) for r in error.value.reasons), str(error.value)


# Experts.

@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_goes_through_its_experts(rows, dtype):
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    w1, w2 = experts(dtype=dtype)
    ids, weights = lz.moe_gate(torch.randn(rows, 4, generator=torch.Generator().manual_seed(4)), 2)
    dense = torch.stack([one_expert(x.double(), w1[e].double(), w2[e].double()) for e in range(4)],
                        1)
    want = (dense.gather(1, ids[..., None].expand(-1, -1, 32)) * weights[..., None]).sum(1)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(lz.moe(x, w1, w2, ids, weights).double(), want, rtol=tolerance,
                               atol=tolerance)


def test_logits_are_routed_as_by_the_gate():
    x, (w1, w2), logits = torch.randn(9, 32), experts(), torch.randn(9, 4)
    for scoring in ("softmax", "sigmoid"):
        routed = lz.moe_gate(logits, 2, scoring)
        torch.testing.assert_close(lz.moe(x, w1, w2, logits=logits, top_k=2, scoring=scoring),
                                   lz.moe(x, w1, w2, *routed))


@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_devices_with_some_of_the_experts_add_up_to_the_whole(weight_on):
    x, (w1, w2) = torch.randn(21, 32), experts(8)
    ids, weights = lz.moe_gate(torch.randn(21, 8), 3)
    parts = [lz.moe(x, w1[o:o + 2], w2[o:o + 2], ids, weights, expert_offset=o, weight_on=weight_on)
             for o in range(0, 8, 2)]
    torch.testing.assert_close(sum(parts), lz.moe(x, w1, w2, ids, weights, weight_on=weight_on),
                               rtol=1e-5, atol=1e-5)


def test_no_expert_is_minus_one():
    x, (w1, w2) = torch.randn(3, 32), experts()
    ids = torch.tensor([[0, -1], [-1, -1], [1, 2]])
    out = lz.moe(x, w1, w2, ids, torch.ones(3, 2))
    torch.testing.assert_close(out[0], one_expert(x[0], w1[0], w2[0]))
    assert out[1].count_nonzero() == 0


def test_beyond_its_capacity_an_expert_drops_the_later_tokens():
    x, (w1, w2) = torch.randn(6, 32), experts()
    ids = torch.tensor([[1, 0], [1, 2], [1, 3], [1, 0], [2, 1], [3, 1]])
    weights = torch.rand(6, 2) + 0.5
    original = weights.clone()
    # expert 1 has served tokens 0 and 1 by then
    original[2, 0] = original[3, 0] = original[4, 1] = original[5, 1] = 0.0
    kernels = [k.id for k in lz.list_kernels("moe")]
    assert len(kernels) >= 4
    torch.testing.assert_close(lz.moe(x, w1, w2, ids, weights, capacity=2),
                               lz.moe(x, w1, w2, ids, original))
    assert lz.moe(x, w1, w2, ids, weights, capacity=6).equal(lz.moe(x, w1, w2, ids, weights))


@pytest.mark.parametrize("backend", ["reference.moe", "torch.moe_experts", "torch.moe_masked"])
def test_gradients(backend):
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(4, 6, generator=gen, dtype=torch.float64, requires_grad=True)
    w1 = torch.randn(3, 8, 6, generator=gen, dtype=torch.float64, requires_grad=True)
    w2 = torch.randn(3, 6, 4, generator=gen, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]])
    weights = torch.rand(4, 2, generator=gen, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, a, b, w: lz.moe(x, a, b, ids, w, backend=backend),
                                    (x, w1, w2, weights))


@pytest.mark.parametrize(("change", "name"), [
    ({"topk_ids": None}, "topk_ids"), ({"topk_weights": None}, "topk_weights"),
    ({"logits": torch.ones(3, 4)}, "logits"),
    ({"topk_ids": torch.ones(3, 2)}, "topk_ids"),
    ({"topk_ids": torch.ones(2, 2, dtype=torch.int64)}, "topk_ids"),
    ({"topk_ids": None, "topk_weights": None, "logits": torch.ones(3, 4), "top_k": 5}, "top_k"),
    ({"topk_ids": None, "topk_weights": None, "logits": torch.ones(3, 4)}, "top_k"),
    ({"w_gate_up": torch.ones(4, 47, 32)}, "w_gate_up"),
    ({"w_down": torch.ones(3, 32, 24)}, "w_down"),
    ({"capacity": -1}, "capacity"), ({"activation": "gelu"}, "activation")])
def test_a_mixture_says_which_argument_is_wrong(change, name):
    w1, w2 = experts()
    inputs = {"x": torch.ones(3, 32), "w_gate_up": w1, "w_down": w2,
              "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
              "topk_weights": torch.ones(3, 2), **change}
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.moe(**inputs)
    assert any(r.fact.startswith(name) for r in error.value.reasons), str(error.value)


def test_fp8_block_scales_by_way_of_dequantize():
    """DeepSeek's layer: fp8 activations by 1 x 128, weights by 128 x 128, up before gate, half of
    the experts here."""
    gen = torch.Generator().manual_seed(6)
    tokens, hidden, inner, all_experts, offset, here = 7, 256, 128, 8, 4, 4
    x = torch.randn(tokens, hidden, generator=gen)
    w1, w2 = (torch.randn(here, *shape, generator=gen) * 0.1
              for shape in ((2 * inner, hidden), (hidden, inner)))
    xq, xs = lz.quantize(x, "fp8_e4m3", "block", 128)
    w1q, s1 = lz.quantize(w1, "fp8_e4m3", "block", 128, block_rows=128)
    w2q, s2 = lz.quantize(w2, "fp8_e4m3", "block", 128, block_rows=128)
    assert (xs.shape, s1.shape, s2.shape) == ((7, 2), (4, 2, 2), (4, 2, 1))
    logits, bias = torch.randn(tokens, all_experts,
                               generator=gen), torch.randn(all_experts, generator=gen)

    ids, weights = lz.moe_gate(logits, 3, "sigmoid", e_score_correction_bias=bias,
                               routed_scaling_factor=2.5)
    out = lz.moe(lz.dequantize(xq, xs, format="fp8_e4m3", block_size=128),
                 lz.dequantize(w1q, s1, format="fp8_e4m3", block_size=128, block_rows=128),
                 lz.dequantize(w2q, s2, format="fp8_e4m3", block_size=128, block_rows=128),
                 ids, weights, gate_first=False, expert_offset=offset)

    def blocks(q, s):
        rows, columns = q.shape[-2] // s.shape[-2], 128
        return q.float() * s.repeat_interleave(rows, -2).repeat_interleave(columns, -1)

    a, b, c = blocks(xq, xs), blocks(w1q, s1), blocks(w2q, s2)
    score = logits.sigmoid()
    chosen = (score + bias).topk(3).indices
    mask = torch.zeros_like(score).scatter(1, chosen, 1.0)
    by = score * mask / (score * mask).sum(-1, keepdim=True) * 2.5
    want = torch.zeros(tokens, hidden)
    for e in range(here):
        product = a @ b[e].t()
        up, gate = product[:, :inner], product[:, inner:]
        want += (F.silu(gate) * up) @ c[e].t() * by[:, offset + e, None]
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_inside_torch_compile():
    w1, w2 = experts()

    def block(x, logits):
        return lz.moe(x, w1, w2, *lz.moe_gate(logits, 2))

    x, logits = torch.randn(9, 32), torch.randn(9, 4)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, logits), block(x, logits))


# Grouped products.

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_multiplies_each_group_with_its_own(dtype):
    x, weights = torch.randn(12, 32).to(dtype), (torch.randn(3, 32, 16) / 6).to(dtype)
    want = torch.cat((x[:5].double() @ weights[0].double(), x[5:10].double() @ weights[2].double(),
                      torch.zeros(2, 16, dtype=torch.float64)))
    sizes = torch.tensor([5, 0, 5])
    ids = [k.id for k in lz.list_kernels("grouped_gemm")]
    served = 0
    for kernel in ids:
        if lz.validate("grouped_gemm", kernel, x, weights, sizes):
            continue
        served += 1
        for options in ({"group_sizes": sizes}, {"offsets": sizes.cumsum(0)},
                        {"offsets": sizes.cumsum(0).int()}):
            out = lz.grouped_gemm(x, weights, **options, backend=kernel)
            torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2
                                       if dtype == torch.bfloat16 else 1e-5)
    assert served >= 4


@pytest.mark.parametrize("kernel", ["reference.grouped_gemm", "torch.grouped_loop",
                                    "torch.grouped_bmm"])
@pytest.mark.parametrize(("inputs", "name"), [
    ({"group_sizes": torch.tensor([5, 9])}, "group_sizes"),
    ({"group_sizes": torch.tensor([5, -1])}, "group_sizes"),
    ({"offsets": torch.tensor([5, 4])}, "offsets"),
    ({"offsets": torch.tensor([5, 11])}, "offsets")])
def test_groups_that_do_not_fit_are_refused_on_every_call(kernel, inputs, name):
    x, weights = torch.randn(10, 32), torch.randn(2, 32, 16)
    good = {name: torch.tensor([5, 5] if name == "group_sizes" else [5, 10])}
    lz.grouped_gemm(x, weights, **good, backend=kernel)
    # the same shapes, so the choice is remembered; the sizes are read anew
    for _ in range(2):
        with pytest.raises(lz.errors.InvalidCall) as error:
            lz.grouped_gemm(x, weights, **inputs, backend=kernel)
        assert error.value.reasons[0].fact == name


def test_sizes_or_offsets():
    x, weights, sizes = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([2, 2])
    for options in ({}, {"group_sizes": sizes, "offsets": sizes.cumsum(0)},
                    {"group_sizes": sizes.float()},
                    {"group_sizes": torch.tensor([4])}):
        with pytest.raises(lz.errors.InvalidCall):
            lz.grouped_gemm(x, weights, **options)


def test_gradients_of_groups():
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(6, 3, generator=gen, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 3, 4, generator=gen, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor([2, 0, 3])
    for backend in ("torch.grouped_loop", "torch.grouped_bmm", "torch.grouped_masked"):
        assert torch.autograd.gradcheck(
            lambda x, w, b=backend: lz.grouped_gemm(x, w, sizes, backend=b), (x, weights))

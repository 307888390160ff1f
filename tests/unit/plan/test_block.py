"""Planning a whole block: the search is exact, what it plans runs and is right, and it beats
choosing op by op.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.models.block import Block, Either, Glue, Stage
from layerzero.models.decoder import decoder_block, decoder_values
from layerzero.models.decoder_config import DecoderConfig
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.plan.block import BlockPlan, plan_block
from layerzero.spec.kernel import Kernel
from layerzero.spec.rules import contiguous
from layerzero.world import snapshot as worlds

SMALL = DecoderConfig(96, 8, 2, head_dim=64, inner=160)


def plain(v, c):
    """The same layer in torch alone, in float64."""
    v = {n: t.double() for n, t in v.items()}
    x = v["input"]
    batch, seq, hidden = x.shape
    h = F.rms_norm(x, (hidden,), v["ln1.weight"], 1e-5)
    packed = (h @ v["qkv.weight"].t()).view(batch, seq, -1, c.head_dim).transpose(1, 2)
    q, k, val = packed.split((c.heads, c.kv_heads, c.kv_heads), 1)

    def turn(t):
        a, b = t.chunk(2, -1)
        return torch.cat((a * v["cos"] - b * v["sin"], b * v["cos"] + a * v["sin"]), -1)

    q, k = turn(q), turn(k)
    if "past_k" in v:
        k, val = torch.cat((v["past_k"], k), 2), torch.cat((v["past_v"], val), 2)
    mask = torch.ones(seq, k.shape[2], dtype=torch.bool).tril(k.shape[2] - seq)
    mixed = F.scaled_dot_product_attention(q, k, val, attn_mask=mask, enable_gqa=True)
    total = x + mixed.transpose(1, 2).flatten(2) @ v["out.weight"].t()
    gate, up = (F.rms_norm(total, (hidden,), v["ln2.weight"], 1e-5) @ v["in.weight"].t()).chunk(
        2, -1)
    return total + (F.silu(gate) * up) @ v["down.weight"].t()


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("seq, past", [(33, 0), (1, 40), (5, 7)])
def test_planned_decoder_layer_is_right(seq, past, greedy):
    values = decoder_values(SMALL, batch=2, seq=seq, past=past)
    plan = plan_block(decoder_block(SMALL, cached=past > 0), values, greedy)
    torch.testing.assert_close(plan(**values)[0].double(), plain(values, SMALL), rtol=1e-4,
                               atol=1e-4)


def test_plan_avoids_the_copy_and_the_parts_that_greedy_pays_for():
    config = DecoderConfig(256, 8, 2, head_dim=64, inner=704)
    values, block = decoder_values(config, seq=128), decoder_block(config)
    greedy, plan = plan_block(block, values, greedy=True), plan_block(block, values)
    assert greedy.transform_cost_total > 0 and not greedy.fused_ops
    assert plan.transform_cost_total == 0 and plan.fused_ops   # which, is the machine's affair
    assert plan.total_us < greedy.total_us
    joined = {}
    # what really happens: is the join of the heads a view?
    for name, way in (("greedy", greedy), ("plan", plan)):
        known = dict(values)
        for step in way.steps:
            before = known.get("attn_out")
            step.run(known)
            if step.part == "join heads":
                joined[name] = known["joined"].data_ptr() == before.data_ptr()
    assert joined == {"greedy": False, "plan": True}


def _synthetic(costs_a, costs_b):
    """Two norms one after the other. A kernel of the first leaves its result row by row or column
    by column, and the second wants rows: what greedy likes best is followed by a copy."""
    def kernel(name, us, columns, wants_rows):
        def load():
            def run(x, weight=None, eps=1e-6, offset=0.0):
                out = F.rms_norm(x, (x.shape[-1],), weight, eps)
                return out.t().contiguous().t() if columns else out

            return run

        rules = (contiguous("x"),) if wants_rows else ()
        return Kernel(name, RMS_NORM, load, requires=rules, overhead_us=us, prior=1e9,
                      less_work="a test")

    return [*(kernel(f"lib.a{i}", us, columns, False) for i, (us, columns) in enumerate(costs_a)),
            *(kernel(f"lib.b{i}", us, False, True) for i, us in enumerate(costs_b))]


@pytest.mark.parametrize("seed", range(6))
def test_search_is_exact(world, seed):
    gen = torch.Generator().manual_seed(seed)
    draw = lambda: 1.0 + 200.0 * torch.rand(1, generator=gen).item()            # noqa: E731
    costs_a = [(draw(), i % 2 == 1) for i in range(4)]
    costs_b = [draw() for _ in range(2)]
    for kernel in _synthetic(costs_a, costs_b):
        lz.register(kernel)
    lz.configure(rules=(lz.PolicyRule.of("allow", "lib.*", "rms_norm"),))
    block = Block("two", (Stage("rms_norm", {"x": "x"}, ("y",)),
                          Stage("rms_norm", {"x": "y"}, ("z",))), ("z",))
    x = torch.randn(512, 256)
    plan = plan_block(block, {"x": x})
    rate = worlds.current().selection_context("cpu", None).rates.bytes_per_us
    copy = 2.0 * x.numel() * 4 / rate
    everyone = [(us, columns, False) for us, columns in costs_a] + [(us, False, True)
                                                                    for us in costs_b]
    best = min(a + b + (copy if columns and rows else 0.0)
               for (a, columns, _), (b, _, rows) in itertools.product(everyone, everyone))
    assert plan.total_us == pytest.approx(best, rel=1e-3)


def test_dtype_between_ops_only_where_casting_is_allowed(world):
    def load():
        return lambda x, weight=None, eps=1e-6, offset=0.0: F.rms_norm(x, (x.shape[-1],), weight,
                                                                       eps)

    from layerzero.spec.rules import dtypes
    lz.register(Kernel("lib.half_only", RMS_NORM, load, requires=(dtypes("bfloat16"),), prior=1e9,
                       less_work="a test"))
    block = Block("one", (Stage("rms_norm", {"x": "x"}, ("y",)),), ("y",), dtypes=(torch.bfloat16,))
    x = torch.randn(64, 1024)
    lz.configure(allow_adaptation=False)
    assert plan_block(block, {"x": x}).steps[0].dtype == "float32"
    lz.configure(allow_adaptation=True,
                 rules=(lz.PolicyRule.of("deny", ["torch.*", "native.*", "reference.*"],
                                                                "rms_norm", {"dtype": "float32"}),))
    step = plan_block(block, {"x": x}).steps[0]
    assert (step.kernel, step.dtype, step.transforms) == ("lib.half_only", "bfloat16",
                                                          ("cast(bfloat16)",))
    assert step.transform_us > 0
    (y,) = plan_block(block, {"x": x})(x=x)
    assert y.dtype == torch.float32


def test_remembered_by_signature_and_made_anew_in_a_new_world(world):
    values = decoder_values(SMALL, seq=9)
    block = decoder_block(SMALL)
    first = plan_block(block, values)
    assert plan_block(block, values) is first
    assert plan_block(block, decoder_values(SMALL, seq=10)) is not first
    lz.clear_cache()
    assert plan_block(block, values) is not first


def test_a_kernel_that_fails_is_not_planned(world):
    def load():
        def run(x, weight=None, eps=1e-6, offset=0.0):
            raise RuntimeError("always")

        return run

    lz.register(Kernel("lib.broken", RMS_NORM, load, prior=1e9, less_work="a test"))
    block = Block("one", (Stage("rms_norm", {"x": "x"}, ("y",)),), ("y",))
    plan = plan_block(block, {"x": torch.randn(4, 64)})
    assert plan.steps[0].kernel != "lib.broken"


def test_mistakes_in_a_block_are_named():
    with pytest.raises(lz.errors.SpecError, match="reads q, which nothing before it gives"):
        plan_block(Block("b", (Stage("rms_norm", {"x": "q"}, ("y",)),), ("y",)),
                   {"x": torch.randn(2, 8)})
    with pytest.raises(lz.errors.SpecError, match="no op 'rms'"):
        plan_block(Block("b", (Stage("rms", {"x": "x"}, ("y",)),), ("y",)),
                   {"x": torch.randn(2, 8)})
    with pytest.raises(lz.errors.InvalidCall):
        plan_block(Block("b", (Stage("rms_norm", {"x": "x", "weight": "w"}, ("y",)),), ("y",)),
                   {"x": torch.randn(2, 8), "w": torch.randn(9)})


def test_alternatives_must_give_what_is_read_later():
    ways = Either(((Glue("a", lambda x: x, ("x",), ("y",)),),
                   (Glue("b", lambda x: x, ("x",), ("z",)),)))
    with pytest.raises(lz.errors.SpecError, match="reads y"):
        plan_block(Block("b", (ways, Stage("rms_norm", {"x": "y"}, ("out",))), ("out",)),
                   {"x": torch.randn(2, 8)})


def test_report(world):
    values = decoder_values(SMALL, seq=9)
    plan = plan_block(decoder_block(SMALL), values)
    data = plan.to_json()
    assert isinstance(plan, BlockPlan) and data["transform_cost_total"] == plan.transform_cost_total
    assert data["fused_ops"] == list(plan.fused_ops) and len(data["steps"]) == len(plan.steps)
    assert "us expected" in str(plan) and all(s.part in str(plan) for s in plan.steps)

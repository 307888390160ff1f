"""Models of transformers with linear attention: lz computes their delta rule, state space and
convolution, and gives the same logits and tokens; undone, nothing of it is left."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz

transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
         "mamba_chunk_size": 8, "mamba_expand": 2}
MODELS = {
    "Qwen3Next": ("gated_delta_rule", {
        **ATTENTION, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention",
                                                               "full_attention"]}),
    "Mamba2": ("selective_state_update", {
        "state_size": 16, "num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2,
        "chunk_size": 8}),
    "Bamba": ("selective_state_update", {**ATTENTION, **MAMBA, "attn_layer_indices": [1]}),
    "FalconH1": ("selective_state_update", {**ATTENTION, **MAMBA, "head_dim": 8,
                                            "mamba_d_ssm": 64}),
    "GraniteMoeHybrid": ("selective_state_update", {
        **ATTENTION, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 16})}

OPS = {"gated_delta_rule": ["gated_delta_rule", "causal_conv1d"],
       "selective_state_update": ["selective_state_update", "mamba_chunk_scan", "causal_conv1d"]}


def build(name):
    try:
        config = getattr(transformers, f"{name}Config")(**COMMON, **MODELS[name][1])
        torch.manual_seed(0)
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()
    except AttributeError as e:
        pytest.skip(f"this transformers has no {name}: {e}")


@torch.no_grad()
def results(model, ids):
    return model(ids).logits, model.generate(ids, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_and_tokens(name):
    from layerzero.integrations.transformers.linear_attention import called_functions
    model, ids = build(name), torch.randint(1, 64, (2, 21),
                                            generator=torch.Generator().manual_seed(0))
    if not any(called_functions(type(m).forward) for m in model.modules()):
        pytest.skip("this transformers has its functions of linear attention elsewhere")
    logits, tokens = results(model, ids)
    with lz.accelerate(model, measure=False) as report:
        served = [row for row in report.patched.rows if row.kind == "linear_attention"]
        ops = OPS[MODELS[name][0]]
        assert [row.op.split(", ") for row in served] == [ops], str(report.patched)
        assert all(f"lz.{op}" in str(report.patched) for op in ops)
        assert not any(row.kind == "Conv1d" for row in report.patched.rows)
        ours, ours_tokens = results(model, ids)
        assert {*ops} <= {*lz.stats().calls}
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours_tokens, tokens)
    again, _ = results(model, ids)
    assert torch.equal(again, logits)


def test_a_function_that_computes_something_else_stays():
    from layerzero.integrations.transformers import linear_attention as la
    conv = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(conv, "causal_conv1d_fn"):
        pytest.skip("this transformers has its functions of linear attention elsewhere")
    assert la.agrees("causal_conv1d_fn", conv.causal_conv1d_fn)
    assert not la.agrees("causal_conv1d_fn", lambda *a, **k: 2 * conv.causal_conv1d_fn(*a, **k))
    assert not la.agrees("causal_conv1d_update",           # leaves another state
                         lambda x, state, *rest: conv.causal_conv1d_update(x, state.clone(), *rest))

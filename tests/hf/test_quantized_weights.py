"""lz.accelerate(model, weights=...): codes for weights in prompts and steps alike, an error that is
measured, and a model that can be given back to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from models import tiny, tokens
from torch import nn

import layerzero as lz
from layerzero.integrations.transformers.accelerate import accelerate, unaccelerate
from layerzero.integrations.transformers.quantized import codes_of, joined_codes, quantize_layers
from layerzero.integrations.transformers.weight_error import prediction_error
from layerzero.models.weights.codes import WeightOnly
from layerzero.spec.errors import ConfigError

pytestmark = pytest.mark.integration


def bits_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(model: nn.Module, bits: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == bits.keys() and all(torch.equal(now[name], bits[name]) for name in bits)


@torch.no_grad()
def decode(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of three tokens one by one, and of all at once."""
    ids = tokens(1, 9, seed=1)
    whole = model(ids, use_cache=False).logits[0, 6:]
    cache = model(ids[:, :6], use_cache=True).past_key_values
    steps = [model(ids[:, i:i + 1], past_key_values=cache).logits[0] for i in range(6, 9)]
    return torch.cat(steps), whole


@pytest.mark.parametrize("format, held", [
    ("int4", "q4_0"), ("fp8", "fp8_e4m3"), ("nvfp4", "nvfp4"), ("q4_k", "q5_0")])
def test_prompts_and_steps_use_the_codes_and_undo_gives_the_bits_back(format, held):
    model, stock = tiny("llama"), tiny("llama")
    bits, (before, _) = bits_of(model), decode(stock)
    report = accelerate(model, weights=format, measure=False)
    assert report.weights is not None and report.weights.layers == {held: 14}
    assert report.weights.left == {
        "the head, which stays as it is (WeightOnly(head=True) quantizes it)": 1}
    steps, whole = decode(model)
    assert report.served == {"step": 3} and not report.declined
    off = float((steps - before).norm() / before.norm())
    assert 1e-3 < off < 0.5                    # these are codes, and codes of these weights
    assert float((steps - whole).norm() / whole.norm()) < 0.02
    assert same_bits(model, bits)              # a checkpoint is that of the model as it was
    copied = copy.deepcopy(model)              # the patch is copied, the codes are not
    torch.testing.assert_close(decode(copied)[1], decode(stock)[1], rtol=1e-3, atol=1e-4)
    report.undo()
    assert same_bits(model, bits) and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert torch.equal(decode(model)[1], decode(stock)[1])


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral"])
def test_transposed_weights_biases_and_experts(family):
    model = tiny(family)
    bits = bits_of(model)
    report = accelerate(model, weights="int8", measure=False)
    steps, whole = decode(model)
    assert report.served == {"step": 3}, str(report)
    assert float((steps - whole).norm() / whole.norm()) < 0.02
    assert unaccelerate(model) and same_bits(model, bits)


def test_layers_of_one_product_share_their_codes():
    model = tiny("llama")
    accelerate(model, weights=WeightOnly("nvfp4"), measure=False)
    at = model.model.layers[0].self_attn
    whole = joined_codes([at.q_proj, at.k_proj, at.v_proj])
    assert whole is not None and whole.shape == (128, 64)
    query = codes_of(at.q_proj)
    assert query.codes.data_ptr() == whole.codes.data_ptr()
    assert query.global_scale is whole.global_scale
    assert joined_codes([at.q_proj, at.v_proj]) is None
    assert "weights=nvfp4" in repr(at.q_proj)


def test_dropped_weights_are_gone_and_nobody_takes_codes_for_them():
    model = tiny("llama")
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    report = accelerate(model, weights=WeightOnly("fp8", originals="drop"), measure=False)
    assert "dropped: undoing it leaves the weights that the codes stand for" in str(report)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.shape == before.shape and weight.untyped_storage().nbytes() == 4
    for ask in (model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(ConfigError, match="originals='drop'"):
            ask()
    _, served = decode(model)
    report.undo()
    assert model.model.layers[0].mlp.up_proj.weight is weight
    assert 0 < float((weight - before).abs().max()) < 0.1 * float(before.abs().max())
    # the weights that are left are those that the codes stood for
    torch.testing.assert_close(decode(model)[1], served, rtol=1e-4, atol=1e-5)


def test_what_is_quantized_can_be_chosen():
    model = tiny("llama")
    wanted = WeightOnly("int4", group_size=32, head=True, skip=("*.down_proj",))
    report = accelerate(model, weights=wanted, measure=False)
    assert report.weights.layers == {"int4": 13} and report.weights.left == {"named by skip": 2}
    assert codes_of(model.lm_head).group_size == 32
    assert codes_of(model.model.layers[0].mlp.down_proj) is None
    assert report.kernels["head"] != report.kernels["down"]
    steps, whole = decode(model)
    assert float((steps - whole).norm() / whole.norm()) < 1e-4
    with pytest.raises(ConfigError, match=r"lz\.unaccelerate\(model\) first"):
        accelerate(model, weights="int8")
    assert accelerate(model, weights=wanted) is report


@torch.no_grad()
def test_layers_that_belong_to_no_decoder():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8)).eval()
    x = torch.randn(3, 64)
    before, made = model(x), quantize_layers(model, WeightOnly("int8"), None)
    assert made.formats == {"q8_0": 1} and made.left == {"fewer than 32 inputs or outputs": 1}
    assert 0 < float((model(x) - before).abs().max()) < 0.05
    made.undo()
    assert torch.equal(model(x), before)


def test_the_error_is_that_of_the_given_text():
    model, ids = tiny("llama"), tokens(1, 20, seed=3)
    stock = tiny("llama")
    report = accelerate(model, weights="int4", text=ids, measure=False)
    error = report.weights.error
    assert (error.tokens, error.text) == (20, "the given text")
    with torch.no_grad():
        want, got = (m(ids).logits[0].double().log_softmax(-1) for m in (stock, model))
    assert error.kl == pytest.approx(float((want.exp() * (want - got)).sum(-1).mean()), rel=1e-3)
    assert error.top1 == float((want.argmax(-1) == got.argmax(-1)).float().mean())
    assert report.to_json()["weights"]["error"]["kl"] == error.kl
    exact = prediction_error(lambda i: stock(i).logits, lambda i: stock(i).logits, ids, "")
    assert (exact.kl, exact.top1, exact.loss - exact.stock_loss) == (0.0, 1.0, 0.0)
    with pytest.raises(ConfigError, match="give token ids"):
        accelerate(tiny("llama"), weights="int4", text="no tokenizer here", measure=False)


def test_moving_casting_and_loading():
    model = tiny("llama")
    report = accelerate(model, weights=WeightOnly("fp8"), measure=False)
    model.bfloat16()
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.bfloat16
    assert codes_of(layer).codes.dtype == torch.float8_e4m3fn
    assert decode(model)[1].dtype == torch.bfloat16
    assert any("moved or cast" in why for why in report.declined)
    with pytest.raises(ConfigError, match="load_state_dict"):
        model.load_state_dict(tiny("llama").state_dict())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16
    report.undo()
    assert torch.equal(layer.weight,
                       tiny("llama").model.layers[0].self_attn.q_proj.weight.bfloat16())


def test_inputs_of_prompts_are_rounded_where_that_is_asked_for():
    model, plain = tiny("llama"), tiny("llama")
    accelerate(model, weights=WeightOnly("fp8", activations="fp8"), measure=False)
    accelerate(plain, weights="fp8", measure=False)
    few, many = tokens(1, 16, seed=1), tokens(1, 17, seed=1)
    with torch.no_grad():
        assert torch.equal(model(few).logits, plain(few).logits)
        got, want = model(many).logits, plain(many).logits
    assert 1e-4 < float((got - want).norm() / want.norm()) < 0.1


def test_patching_after_it_leaves_the_codes_alone():
    model = tiny("llama")
    report = accelerate(model, weights="int4", measure=False, patch=False)
    before = decode(model)[1]
    lz.patch(model)
    assert codes_of(model.model.layers[0].mlp.up_proj) is not None
    torch.testing.assert_close(decode(model)[1], before, rtol=2e-2, atol=1e-2)
    lz.unpatch(model)
    report.undo()
    assert torch.equal(decode(model)[1], decode(tiny("llama"))[1])


@pytest.mark.parametrize("inputs, message", [
    ("int5", "did you mean"), ("fp8_e5m2", "wants a format"), (8, "the name of a format")])
def test_unknown_formats_are_refused(inputs, message):
    with pytest.raises(ConfigError, match=message):
        accelerate(tiny("llama"), weights=inputs)


@pytest.mark.parametrize("options, message", [
    ({"format": "mxfp4", "group_size": 64}, "whose blocks have one size"),
    ({"format": "int4", "originals": "disk"}, "originals wants one of cpu, device, drop"),
    ({"format": "int4", "activations": "int8"}, "activations wants 'none'"),
    ({"format": "int8", "activations": "int8", "group_size": 64}, "with group_size 0")])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        WeightOnly(**options)

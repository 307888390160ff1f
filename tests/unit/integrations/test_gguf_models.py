"""Models of transformers with seeded weights, written as GGUF files, give the same logits through
lz.load_gguf; quantized ones those of the same decoder with dequantized weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import layerzero as lz

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'layerzero[gguf]'")
transformers = pytest.importorskip("transformers",
                                   reason="needs transformers: pip install 'layerzero[transformers]'")

from layerzero.backends.native import build as native_build  # noqa: E402
from layerzero.integrations.gguf.architectures import read_model, rows_to_halves  # noqa: E402
from layerzero.integrations.gguf.generation import TextGeneration  # noqa: E402
from layerzero.integrations.gguf.model import GGUFModel  # noqa: E402
from layerzero.integrations.gguf.reader import read_gguf_file  # noqa: E402
from layerzero.integrations.gguf.token_step import TokenStep  # noqa: E402
from layerzero.models.decoder_config import DecoderConfig, make_weights  # noqa: E402
from layerzero.models.sequence_kv import SequenceKV  # noqa: E402
from layerzero.models.weights.ggml import GgmlWeight  # noqa: E402
from layerzero.ops.formulas.ggml import quantize_blocks  # noqa: E402

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5, "pad_token_id": 0, "attn_implementation": "eager"}
HEADS = {"head_dim": 32}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama3": ("llama", "Llama", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    "mistral": ("llama", "Mistral", {"sliding_window": 5}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", HEADS),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", {**HEADS, "num_experts": 4, "num_experts_per_tok": 2,
                                          "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "phi3": ("phi3", "Phi3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "gemma": ("gemma", "Gemma", HEADS),
    "gemma2": ("gemma2", "Gemma2", {**HEADS, "sliding_window": 5, "query_pre_attn_scalar": 32,
                                    "attn_logit_softcapping": 5.0,
                                    "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", "Gemma3", {**HEADS, "sliding_window": 5, "query_pre_attn_scalar": 32,
                                    "layer_types": ["sliding_attention", "full_attention",
                                                    "sliding_attention"],
                                    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "mlp.gate_up_proj": "ffn_up", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
         "block_sparse_moe.gate": "ffn_gate_inp"}
GEMMA = {**NAMES, "post_attention_layernorm": "post_attention_norm",
         "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}


def build(name: str) -> Any:
    _, cls, changes = MODELS[name]
    config = getattr(transformers, f"{cls}{'Text' if cls == 'Gemma3' else ''}Config")(
        **{**SIZES, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{cls}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():   # norms and biases too must matter
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order in which llama.cpp stores the rows of a Llama's queries and keys."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def tensors(name: str, model: Any) -> dict[str, torch.Tensor]:
    architecture, config = MODELS[name][0], model.config
    names = GEMMA if "gemma" in architecture and architecture != "gemma" else NAMES
    named = {}
    for key, value in model.state_dict().items():
        t = value.float()
        if key == "lm_head.weight":
            if not config.tie_word_embeddings:
                named["output.weight"] = t
            continue
        if "gemma" in architecture and "norm" in key:
            t = t + 1
        key = key.removeprefix("model.")
        if not key.startswith("layers."):
            named[{"embed_tokens.weight": "token_embd.weight",
                   "norm.weight": "output_norm.weight"}[key]] = t
            continue
        _, layer, key = key.split(".", 2)
        at = f"blk.{layer}."
        if ".experts." in key:
            if "gate_up" in key:
                gate, up = t.chunk(2, 1)
                named |= {f"{at}ffn_gate_exps.weight": gate, f"{at}ffn_up_exps.weight": up}
            else:
                named[f"{at}ffn_down_exps.weight"] = t
            continue
        stem, _, what = key.rpartition(".")
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            t = pairs(t, config.num_attention_heads if "q_proj" in stem
                      else config.num_key_value_heads)
        named[f"{at}{names[stem]}.{what}"] = t
    if name == "llama3":
        inverse = model.model.rotary_emb.inv_freq
        plain = 10000.0 ** -(torch.arange(0, 16, 2).float() / 16)
        named["rope_freqs.weight"] = plain / inverse
    return named


def write(path: Any, name: str, model: Any, kind: str = "F32", **changes: Any) -> Any:
    """Write a GGUF file as llama.cpp's converter does; matrices in `kind`."""
    architecture, config = MODELS[name][0], model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "head_dim" in MODELS[name][2]:
        writer.add_key_length(32)
        writer.add_value_length(32)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    extra = MODELS[name][2]
    if "sliding_window" in extra:
        writer.add_sliding_window(extra["sliding_window"])
    if name == "gemma3":
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True])
        writer.add_float32("gemma3.rope.scaling.factor", 4.0)
        writer.add_string("gemma3.rope.scaling.type", "linear")
    if name == "gemma2":
        writer.add_attn_logit_softcapping(5.0)
        writer.add_final_logit_softcapping(3.0)
    if name == "phi3":
        writer.add_rope_dimension_count(8)
    if name in ("mixtral", "qwen3moe"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if name == "qwen3moe":
        writer.add_expert_feed_forward_length(32)
    for key, t in tensors(name, model).items():
        if key in changes:
            t = changes[key]
        if t is None:
            continue
        if t.dim() == 1 or "ffn_gate_inp" in key:
            writer.add_tensor(key, t.numpy())
        elif kind in ("F32", "F16"):
            writer.add_tensor(key, t.to(torch.float32 if kind == "F32" else torch.float16).numpy())
        else:
            stored = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(key, gguf.quants.quantize(t.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


IDS = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    model = build(name)
    with torch.no_grad():
        wanted = model(IDS).logits
    ours = lz.load_gguf(write(tmp_path / "m.gguf", name, model))
    assert not any(isinstance(w, GgmlWeight) for w in ours.weights.values())
    error = float((ours.logits(IDS) - wanted).abs().max() / wanted.std())
    assert error < 1e-4, error
    memory = SequenceKV(ours.config, 17, batch=2)          # a prompt, then token by token
    steps = [ours.logits(IDS[:, :9], memory), *(ours.logits(IDS[:, i:i + 1], memory)
                                                for i in range(9, 17))]
    error = float((torch.cat(steps, 1) - wanted).abs().max() / wanted.std())
    assert error < 1e-4, error
    memory = SequenceKV(ours.config, 17)
    run = ours.decoder(length=17)
    with torch.no_grad():
        run(IDS[:1, :9], memory)
        step = TokenStep(run, memory)          # the same by kernels that were chosen once
        logits = torch.stack([step(int(t)) for t in IDS[0, 9:]], 1)
    error = float((logits - wanted[:1, 9:]).abs().max() / wanted.std())
    assert error < 1e-4 and memory.length == 17, error


def test_half_precision_weights_are_widened_once(tmp_path):
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
        wanted = model(IDS).logits
    ours = lz.load_gguf(write(tmp_path / "m.gguf", "llama", model, "F16"))
    assert ours.dtype == torch.float32
    assert float((ours.logits(IDS) - wanted).abs().max() / wanted.std()) < 1e-4


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q4_0"), ("qwen3moe", "Q8_0"),
                                            ("gemma2", "Q5_1")])
def test_quantized_weights_stay_so(name, kind, tmp_path):
    path = write(tmp_path / "m.gguf", name, build(name), kind)
    ours = lz.load_gguf(path, activations="none")
    quantized = [w for w in ours.weights.values() if isinstance(w, GgmlWeight)]
    assert len(quantized) >= 3 * 3 and {w.format for w in quantized} == {kind.lower()}
    wanted = ours.dequantized().logits(IDS)
    got = ours.logits(IDS)
    assert float((got - wanted).abs().max() / wanted.std()) < 1e-4
    rounded = lz.load_gguf(path, activations="q8").logits(IDS)
    error = float((rounded - wanted).pow(2).mean().sqrt() / wanted.std())
    assert 1e-6 < error < 0.1, error


@pytest.mark.parametrize(("name", "kind", "kv"), [
    ("llama", "Q4_0", "float32"), ("qwen2", "Q5_1", "bfloat16"), ("qwen3", "Q8_0", "float16"),
    ("gemma2", "Q4_1", "float32"), ("gemma3", "Q8_0", "float32")])
def test_all_layers_of_a_token_in_one_call(name, kind, kv, tmp_path):
    """Our compiled kernels against the same decoder, call by call."""
    if native_build.is_built() is not True or not hasattr(native_build.module(), "ggml_decode"):
        pytest.skip("needs our compiled kernels: lz build")
    model = build(name)
    ours = lz.load_gguf(write(tmp_path / "m.gguf", name, model, kind))
    assert "0.q" in ours.weights and "0.gate" in ours.weights   # the kernels pack their own copy
    if name == "llama":                        # as in Q4_K_M, where values have more bits
        more = {n: GgmlWeight(quantize_blocks(w.dequantized(), "q8_0"), "q8_0")
                for n, w in ours.weights.items() if n in ("0.v", "2.v", "1.up")}
        ours = replace(ours, weights={**ours.weights, **more})
    wanted, memory = ours.logits(IDS[:1])[0], SequenceKV(ours.config, 17, kv)
    run = ours.decoder(length=17)
    with torch.no_grad():
        run(IDS[:1, :4], memory)
        step = TokenStep(run, memory)
        got = torch.cat([step(int(t)) for t in IDS[0, 4:]])
    assert step.kernels == {"decode": "native.ggml_linear, all layers in one call"}
    assert step.greedy_token == int(got[-1].argmax())
    # a code that is rounded the other way is another number
    error = float((got - wanted[4:]).pow(2).mean().sqrt() / wanted.std())
    assert error < 0.03, error


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_a_token_is_embedded_as_its_row_is_dequantized(format):
    """Our compiled kernels, from the blocks and from the float32 rows: the same bits."""
    if native_build.is_built() is not True:
        pytest.skip("needs our compiled kernels: lz build")
    c = DecoderConfig(256, 4, 2, layers=1, vocab=32, embed_scale=3.0)
    weights = {name: GgmlWeight(quantize_blocks(w, "q8_0"), "q8_0") if w.dim() == 2 else w
               for name, w in make_weights(c).items()}
    blocks = GgmlWeight(quantize_blocks(make_weights(c)["embed"], format), format)
    rows = []
    for embed in (blocks, blocks.dequantized()):
        model = GGUFModel("", c, {**weights, "embed": embed}, activations="q8")
        with torch.no_grad():
            step = TokenStep(model.decoder(length=8), SequenceKV(c, 8))
            rows.append(torch.cat([step(token) for token in (5, 0, 31)]))
        assert "decode" in step.kernels
        for token in (32, -1):                 # no row of the embedding
            with pytest.raises(lz.errors.InvalidCall, match="a token below 32"):
                step(token)
    assert torch.equal(*rows) and rows[0].std() > 0


def test_weights_of_one_product_in_different_formats(tmp_path):
    """As in Q4_K_M, where the values have more bits than queries and keys."""
    model = build("llama")
    whole = lz.load_gguf(write(tmp_path / "m.gguf", "llama", model))
    assert "0.qkv" in whole.weights and "0.in" in whole.weights
    q, k, v = whole.weights["0.qkv"].split([64, 32, 32])
    apart = {name: w for name, w in whole.weights.items() if name != "0.qkv"}
    apart |= {"0.q": GgmlWeight(quantize_blocks(q, "q8_0"), "q8_0"), "0.k": k, "0.v": v}
    mixed = replace(whole, weights=apart)
    error = (mixed.logits(IDS) - whole.logits(IDS)).pow(2).mean().sqrt()
    assert 0 < float(error / whole.logits(IDS).std()) < 0.05


@pytest.mark.parametrize(("kind", "allowed"), [("bfloat16", 0.05), ("q8_0", 0.05)])
def test_keys_and_values_may_be_kept_narrower(kind, allowed, tmp_path):
    ours = lz.load_gguf(write(tmp_path / "m.gguf", "qwen3", build("qwen3")))
    wanted, memory = ours.logits(IDS[:1]), SequenceKV(ours.config, 17, kind)
    got = torch.cat([ours.logits(IDS[:1, :8], memory), ours.logits(IDS[:1, 8:], memory)], 1)
    error = float((got - wanted).pow(2).mean().sqrt() / wanted.std())
    assert 0 < error < allowed, error
    with pytest.raises(lz.errors.CacheFull, match="18 tokens"):
        ours.logits(IDS[:1, :1], memory)
    with pytest.raises(lz.errors.ConfigError, match="a multiple of 32, got 16"):
        SequenceKV(replace(ours.config, head_dim=16), 4, "q8_0")


def test_greedy_and_sampled_steps(tmp_path):
    model = build("llama")
    ours = lz.load_gguf(write(tmp_path / "m.gguf", "llama", model))
    prompt = IDS[0, :5].tolist()
    with torch.no_grad():
        wanted = model.generate(IDS[:1, :5], attention_mask=torch.ones(1, 5), do_sample=False,
                                max_new_tokens=8, eos_token_id=None)[0, 5:].tolist()
    run = TextGeneration(ours, prompt, 8)
    assert list(run.steps()) == wanted and run.generated == 8 and run.decode_seconds > 0
    assert next(TextGeneration(ours, prompt, 8, kv="bfloat16").steps()) == wanted[0]

    def drawn(seed: int) -> list[int]:
        return list(TextGeneration(ours, prompt, 8, temperature=2.0, top_k=20, seed=seed).steps())

    assert drawn(1) == drawn(1) and len({tuple(drawn(s)) for s in range(3)}) > 1
    stopped = replace(ours, stops=frozenset({wanted[3]}))
    assert list(TextGeneration(stopped, prompt, 8).steps()) == wanted[:3]
    for bad in ([], [96], [0] * 64):
        with pytest.raises(lz.errors.ConfigError, match="the prompt"):
            list(TextGeneration(ours, bad, 8).steps())


def test_as_a_model_of_transformers(tmp_path):
    model = build("llama")
    ours = lz.load_gguf(write(tmp_path / "m.gguf", "llama", model)).to_transformers()
    with torch.no_grad():
        assert torch.allclose(ours(IDS).logits, model(IDS).logits, atol=1e-4)
    options = {"attention_mask": torch.ones(2, 5), "max_new_tokens": 6, "eos_token_id": None}
    for more in ({"do_sample": False}, {"do_sample": False, "num_beams": 2},
                 {"do_sample": True, "top_k": 5}):
        results = []
        for one in (ours, model):
            torch.manual_seed(1)
            results.append(one.generate(IDS[:, :5], **options, **more))
        assert torch.equal(*results), more
    one = ours.generate(IDS[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=6,
                        do_sample=False, eos_token_id=None)
    assert one.shape == (1, 11)
    with pytest.raises(lz.errors.ConfigError, match="takes no padding"):
        ours(IDS, attention_mask=torch.zeros(2, 17))


def test_what_is_not_a_model_of_ours_is_refused_by_name(tmp_path):
    model = build("llama")
    for change, message in (
            ({"general.architecture": "mamba"}, "got 'mamba'; it needs state space layers"),
            ({"general.architecture": "nosuch"}, "got 'nosuch'"),
            ({"llama.attention.head_count": 0}, "head_count as a whole number from 1"),
            ({"llama.attention.head_count_kv": 3}, "a divisor of 4"),
            ({"llama.block_count": 2}, "no place in a decoder"),
            ({"llama.embedding_length": 32}, r"of shape \[96, 32\]"),
            ({"llama.rope.scaling.type": "dynamic"}, "none, linear, yarn"),
            ({"split.count": 2}, "llama-gguf-split")):
        write(tmp_path / "m.gguf", "llama", model)
        file = read_gguf_file(tmp_path / "m.gguf")
        with pytest.raises(lz.errors.DataError, match=message):
            read_model(replace(file, metadata={**file.metadata, **change}), torch.float32)
    with pytest.raises(lz.errors.DataError, match="wanted the tensor output_norm"):
        lz.load_gguf(write(tmp_path / "m.gguf", "llama", model, **{"output_norm.weight": None}))
    path = write(tmp_path / "m.gguf", "llama", model)
    with pytest.raises(lz.errors.ConfigError, match="no hpu device is usable here"):
        lz.load_gguf(path, device="hpu")
    with pytest.raises(lz.errors.ConfigError, match=r"\(role, content\) pairs.*got 'hello'"):
        lz.load_gguf(path).chat("hello")


def test_rows_go_to_pairs_and_back():
    weight = torch.arange(32.0).view(8, 4)
    assert torch.equal(rows_to_halves(pairs(weight, 2), 2), weight)
    blocks = GgmlWeight(pairs(weight, 2).to(torch.uint8), "q8_0")
    assert torch.equal(rows_to_halves(blocks, 2).blocks, weight.to(torch.uint8))


def test_packed_weights_of_a_model_are_shared(tmp_path, monkeypatch):
    if native_build.is_built() is not True:
        pytest.skip("needs our compiled kernels: lz build")
    native_build.module()                      # that of the cache folder before
    path = write(tmp_path / "m.gguf", "llama", build("llama"), "Q8_0")
    wanted = lz.load_gguf(path).logits(IDS)
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    for _ in range(2):                         # written, then mapped
        assert torch.equal(lz.load_gguf(path, shared=True).logits(IDS), wanted)
        # 3 layers of 7 products, and the head
        assert len(list((tmp_path / "cache" / "packed").glob("*.bin"))) == 3 * 7 + 1

"""generate() and pipelines with `attn_implementation="layerzero"` give the tokens that stock
transformers gives.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers
from models import CAUSAL, VOCAB, WITH_ALL, inputs, padded, tiny, tokens

from layerzero.spec.errors import ConfigError

pytestmark = pytest.mark.integration
INTERFACED = [family for family in CAUSAL if family != "falcon"]
WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beam": {"num_beams": 2},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "chunks": {"prefill_chunk_size": 5},
    "no_cache": {"use_cache": False},
}


def pair(family: str, **changes):
    return (tiny(family, attn_implementation=WITH_ALL.get(family), **changes),
            tiny(family, attn_implementation="layerzero", **changes))


def generate(model, inputs, new: int = 7, **how) -> torch.Tensor:
    torch.manual_seed(0)
    options = {"do_sample": False, "max_new_tokens": new, "disable_compile": True,
               "pad_token_id": 0, **how}
    return model.generate(**inputs, **options)


@pytest.mark.parametrize("family", INTERFACED)
def test_the_same_tokens_in_every_way(family):
    """A batch with padding on the left, past the sliding window where there is one."""
    stock, mine = pair(family)
    for way, how in WAYS.items():
        inputs = padded(pads=(0, 5)) if way != "chunks" else {"input_ids": tokens(2, 12)}
        assert torch.equal(generate(stock, inputs, **how), generate(mine, inputs, **how)), way


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_encoder_decoders(family):
    stock, mine = pair(family)
    model_inputs = {k: v for k, v in inputs(family).items() if k != "decoder_input_ids"}
    if family != "whisper":
        model_inputs["attention_mask"][1, -4:] = 0
    for way in ("dynamic", "static", "beam"):
        options = {**WAYS[way], "suppress_tokens": [0]} if family == "whisper" else WAYS[way]
        assert torch.equal(generate(stock, model_inputs, **options),
                           generate(mine, model_inputs, **options)), way


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_sliding_window_cache_and_a_plain_one(family):
    """Past the window: a cache that knows it keeps just the window, one that does not keeps
    everything."""
    stock, mine = pair(family)
    inputs = {"input_ids": tokens(2, 9)}
    want = generate(stock, inputs, new=14)
    for make in (lambda: transformers.DynamicCache(config=stock.config), transformers.DynamicCache):
        assert torch.equal(generate(mine, inputs, new=14, past_key_values=make()), want)


@pytest.mark.parametrize("backend, module", [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_quantized_cache(backend, module):
    if (importlib.util.find_spec(module.partition(".")[0]) is None
        or importlib.util.find_spec(module) is None):
        pytest.skip(f"a quantized cache of this kind needs {module}, which is not installed")
    stock, mine = pair("llama")
    how = {"cache_implementation": "quantized", "cache_config": {"backend": backend, "nbits": 4}}
    inputs = {"input_ids": tokens(2, 12)}
    assert torch.equal(generate(stock, inputs, **how), generate(mine, inputs, **how))


class RoundedLayer(transformers.cache_utils.QuantizedLayer):
    """A quantized cache that needs no library: keys and values in 8 bits, one scale for each row.
    """

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor):
        return q_tensor[0] * q_tensor[1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_that_rounds(family):
    """Old keys come back rounded, the newest as they are: attention must take both in their order.
    """
    stock, mine = pair(family)
    inputs = {"input_ids": tokens(2, 12)}

    def cache():
        return transformers.Cache(layers=[RoundedLayer(residual_length=4) for _ in range(2)])

    rounded = generate(stock, inputs, past_key_values=cache())
    assert torch.equal(rounded, generate(mine, inputs, past_key_values=cache()))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_assisted_by_a_smaller_model_and_by_the_prompt(family):
    stock, mine = pair(family)
    inputs = {"input_ids": tokens(1, 10), "attention_mask": torch.ones(1, 10, dtype=torch.long)}
    draft = tiny(family, seed=0, num_hidden_layers=1, layer_types=None,
                 attn_implementation="layerzero")
    want = generate(stock, inputs, new=16)
    assert torch.equal(generate(mine, inputs, new=16, assistant_model=draft), want)
    assert torch.equal(generate(mine, inputs, new=16, prompt_lookup_num_tokens=3), want)


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>",
                                                bos_token="<s>",
                                                eos_token="</s>", padding_side="left")


def test_text_generation_pipeline():
    texts = ["w5 w9 w11 w30", "w7"]
    spoken = []
    for model in pair("llama"):
        speak = transformers.pipeline("text-generation", model=model, tokenizer=word_tokenizer(),
                                      device="cpu")
        spoken.append(speak(texts, batch_size=2, do_sample=False, max_new_tokens=8))
    assert spoken[0] == spoken[1] and spoken[0][1][0]["generated_text"].count("w") == 9


def test_text_to_text():
    """transformers 5 has no text2text pipeline any more: what it did is to encode, generate and
    decode."""
    texts = ["w5 w9 w11 w30", "w7 w8"]
    tokenizer = word_tokenizer()
    messages = []
    for model in pair("t5"):
        if "text2text-generation" in transformers.pipelines.PIPELINE_REGISTRY.get_supported_tasks():
            speak = transformers.pipeline("text2text-generation", model=model, tokenizer=tokenizer,
                                          device="cpu")
            messages.append(speak(texts, batch_size=2, do_sample=False, max_new_tokens=8))
        else:
            inputs = tokenizer(texts, padding=True, return_tensors="pt",
                               return_token_type_ids=False)
            messages.append(tokenizer.batch_decode(generate(model, inputs, new=8)))
    assert messages[0] == messages[1]


def test_a_real_model_speaks_the_same_words():
    pytest.importorskip("gguf", reason="needs gguf: pip install 'layerzero[gguf]'")
    from layerzero.integrations.gguf.llama_peer import build_llama
    from layerzero.integrations.gguf.model import packaged_model, read_gguf

    try:
        read = read_gguf(packaged_model())
    except ConfigError as e:
        pytest.skip(str(e))
    model = build_llama(read.config, read.weights)
    inputs = {"input_ids": torch.tensor([read.tokenize("The capital of France is")])}
    want = generate(model, inputs, new=6)
    model.set_attn_implementation("layerzero")
    assert torch.equal(generate(model, inputs, new=6), want)
    assert "Paris" in read.detokenize(want[0].tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "t5"])
def test_on_a_gpu_half_precision_is_as_close_as_stock(family):
    model_inputs = {k: v.cuda() for k, v in inputs(family, length=40).items()}
    with torch.no_grad():
        truth = tiny(family, attn_implementation="eager").cuda()(**model_inputs).logits

        def error(implementation):
            model = tiny(family, attn_implementation=implementation).to("cuda", torch.bfloat16)
            return (model(**model_inputs).logits - truth).abs().max()

        assert error("layerzero") <= 2 * error("eager")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_on_a_gpu_the_same_tokens(family):
    """Greedy in fp32, with padding, with growing and static caches, the last of them compiled by
    generate itself."""
    stock, mine = (model.cuda() for model in pair(family))
    inputs = {k: v.cuda() for k, v in padded(pads=(0, 5)).items()}
    want = generate(stock, inputs, new=12)
    for how in ({}, {"cache_implementation": "static"},
                {"cache_implementation": "static", "disable_compile": False}):
        assert torch.equal(generate(mine, inputs, new=12, **how), want), how

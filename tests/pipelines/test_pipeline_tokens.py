"""Tokenizers chosen from models, and inside pipelines: the same ids, a prompt encoded once, nothing
shared.
"""

from __future__ import annotations

import copy
import json
import pickle
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers", "5.0")
pytest.importorskip("diffusers", "0.36")       # tiny_pipelines imports it
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pipelines import image, pipeline
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import pipeline as hf_pipeline

import layerzero as lz
from layerzero.integrations.gguf.model import GGUFModel, packaged_model
from layerzero.integrations.gguf.reader import gguf_metadata
from layerzero.integrations.pipeline_tokens import (
    gguf_tokenizer,
    patch_tokenizer,
    tokenizer_for,
    unpatch_tokenizer,
)
from layerzero.models.tokenizers import forget_prefixes, prefix_memories

pytestmark = pytest.mark.integration
CORPUS = ["the cat sat on the mat", "a system prompt of 12 rules and 345 exceptions",
          "don't say it's over: 'wait'",
          "café naïve 日本語 über", "0123456789 !?., hello world"] * 4
SYSTEM = "You are the cat of rule 7: don't sit on mat 12, say it's over. " * 40
QUESTIONS = ["what is rule 3?", "hello world", "日本 12 34", " the mat", "x" * 600]
CHAT = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def train_tokenizer(size: int = 320, digits: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>",
                        "<|end|>"]))
    return tokenizer


def fast(size: int = 320, **changes: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(**{"tokenizer_object": train_tokenizer(size),
                                      "pad_token": "<pad>",
                                      "bos_token": "<s>", "eos_token": "</s>",
                                      "model_max_length": 5000, "chat_template": CHAT, **changes})


def llama(vocab: int = 320) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=5000)).eval()


@pytest.fixture(autouse=True)
def _nothing_remembered():
    forget_prefixes()
    yield
    forget_prefixes()


def hits() -> int:
    return sum(counts.hits for counts in prefix_memories().values())


# the tokenizer of a model

def test_from_a_model_its_config_its_folder_and_its_pipeline(tmp_path):
    model, theirs = llama(), fast()
    model.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    expected = tokenizer_for(AutoTokenizer.from_pretrained(tmp_path)).id
    pipe = hf_pipeline("text-generation", model=str(tmp_path), device="cpu")
    # its padding is on the left
    assert tokenizer_for(pipe).id == tokenizer_for(pipe.tokenizer).id != expected
    for source in (loaded, loaded.config, tmp_path, str(tmp_path), tokenizer_for(loaded)):
        handle = tokenizer_for(source)
        assert handle.id == expected
        assert lz.tokenize("hello cat 12", handle).ids == theirs("hello cat 12")["input_ids"]


def test_from_the_components_of_diffusers():
    pipe = pipeline("sd15")
    assert tokenizer_for(pipe).id == tokenizer_for(pipe.tokenizer).id


def test_a_tokenizer_with_more_ids_than_the_model_has_embeddings(tmp_path):
    llama(200).save_pretrained(tmp_path)
    fast(320).save_pretrained(tmp_path)
    with pytest.raises(
            lz.errors.DataError,
            match=r"ids below 200, got one with the id \d+; the model has no embedding"):
        tokenizer_for(LlamaForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize(("source", "error", "word"), [
    (object(), lz.errors.ConfigError, "pass its tokenizer"),
    (None, lz.errors.ConfigError, "got NoneType"),
    ("/no/such/folder", lz.errors.DataError, "nothing is downloaded here")])
def test_where_there_is_none(source, error, word):
    with pytest.raises(error, match=word):
        tokenizer_for(source)
    with pytest.raises(lz.errors.ConfigError, match="knows the folder"):
        tokenizer_for(llama())                 # made from a config: it has no folder


# in a GGUF file

def gguf(path: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """A file with this tokenizer and one tensor, written by the library of llama.cpp."""
    writer_of = pytest.importorskip("gguf")
    data = json.loads(tokenizer.to_str())
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    special = {token["content"] for token in data["added_tokens"]}
    writer = writer_of.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "default"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    if changes.get("bos"):
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_add_bos_token(True)
    writer.add_tensor("one", torch.zeros(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_tokenizer_inside_a_gguf_file(tmp_path):
    tokenizer = train_tokenizer()
    path = gguf(tmp_path / "model.gguf", tokenizer)
    for source in (path, str(path), tmp_path):
        assert [lz.tokenize(text, tokenizer_for(source)).ids for text in CORPUS] == [
            tokenizer.encode(text).ids for text in CORPUS]
    with_start = gguf_tokenizer(gguf(tmp_path / "start.gguf", tokenizer, bos=True))
    assert lz.tokenize("hello", with_start).ids == [tokenizer.token_to_id("<s>"),
                                                    *tokenizer.encode("hello").ids]
    assert lz.tokenize("hello", with_start,
                       add_special_tokens=False).ids == tokenizer.encode("hello").ids


@pytest.mark.parametrize(("pre", "digits"), [("llama-bpe", "3"), ("qwen2", "1")])
def test_how_a_gguf_file_says_that_text_is_cut(pre, digits, tmp_path):
    tokenizer = train_tokenizer()
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1," + digits + r"}|"
               r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    handle = gguf_tokenizer(gguf(tmp_path / "model.gguf", tokenizer, pre=pre))
    for text in (*CORPUS, "DON'T 1234567 !!\n\n end  "):
        assert lz.tokenize(text, handle).ids == tokenizer.encode(text).ids


def test_smollm2s_own():
    try:
        path = packaged_model()
    except lz.errors.ConfigError as e:
        pytest.skip(str(e))
    handle = tokenizer_for(path)
    assert lz.tokenize("Hello 123 world", handle).ids == [19556, 216, 33, 34, 35, 905]
    assert gguf_metadata(path)["general.architecture"] == "llama"
    prompt = SYSTEM + "Question"
    # digits are cut first there: the prefix must be remembered all the same
    for _ in range(2):
        ids = lz.tokenize(prompt, handle, cache_prefix=True).ids
        prompt += " and one more 12"
    assert (ids == Tokenizer.from_str(handle.payload).encode(
        SYSTEM + "Question and one more 12").ids and hits() == 1)


def test_damaged_gguf_files(tmp_path):
    whole = gguf(tmp_path / "whole.gguf", train_tokenizer()).read_bytes()
    path = tmp_path / "bad.gguf"
    huge = bytearray(whole)
    huge[24:32] = struct.pack("<Q", 1 << 60)   # the length of the first name
    for content, word in ((b"nothing", "does not begin"), (whole[:60], "cut short"),
                          (whole[:2000], "cut short"),
                          (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 2 or 3"),
                          (bytes(huge), "damaged")):
        path.write_bytes(content)
        with pytest.raises(lz.errors.DataError, match=word):
            tokenizer_for(path)
    with pytest.raises(lz.errors.DataError, match="cannot be read"):
        tokenizer_for(tmp_path / "none.gguf")
    with pytest.raises(lz.errors.DataError, match=r"got 'odd' with the pre-tokenizer 'default'"):
        tokenizer_for(gguf(tmp_path / "odd.gguf", train_tokenizer(), model="odd"))


# inside pipelines

CALLS: tuple[dict[str, Any], ...] = (
    {}, {"padding": True}, {"padding": "max_length", "max_length": 900},
    {"truncation": True, "max_length": 50},
    {"truncation": True, "max_length": 50, "padding": "max_length"},
    {"padding": True, "pad_to_multiple_of": 64}, {"padding": True, "padding_side": "left"},
    {"return_offsets_mapping": True}, {"add_special_tokens": False},
    {"return_attention_mask": False}, {"split_special_tokens": True},
    {"return_special_tokens_mask": True}, {"return_token_type_ids": True},
    {"padding": True, "return_tensors": "pt"}, {"return_length": True},
    {"truncation": True, "max_length": 50, "stride": 5, "return_overflowing_tokens": True})


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_patched_tokenizer_says_the_same(call):
    stock, ours = fast(), fast()
    patch_tokenizer(ours)
    batch = [SYSTEM + question for question in QUESTIONS]
    for text in (batch[0], batch, [*batch, "short"], "short", batch[1:2], batch[0]):
        if call.get("return_tensors") is None or not isinstance(text, list) or call.get("padding"):
            theirs, got = stock(text, **call), ours(text, **call)
            assert got.keys() == theirs.keys()
            for key in theirs:
                assert str(got[key]) == str(theirs[key]), key
    if not call.keys() & {"return_special_tokens_mask", "return_token_type_ids", "return_length",
                          "stride"}:
        assert hits() > 0


def test_the_rest_of_a_tokenizer_is_its_own():
    stock, ours = fast(), fast()
    patch_tokenizer(ours)
    assert patch_tokenizer(ours) == ("",)      # twice changes nothing
    theirs, got = stock([SYSTEM, "a cat"], padding=True), ours([SYSTEM, "a cat"], padding=True)
    assert (got.is_fast and got.tokens(1) == theirs.tokens(1)
            and got.char_to_token(0, 40) == theirs.char_to_token(0, 40))
    assert got.word_ids(0) == theirs.word_ids(0) and len(got.encodings) == 2
    again = pickle.loads(pickle.dumps(got))
    assert again["input_ids"] == got["input_ids"] and again.tokens(0) == theirs.tokens(0)
    assert ours.tokenize(SYSTEM) == stock.tokenize(SYSTEM)
    assert ours.encode(SYSTEM, "pair") == stock.encode(SYSTEM, "pair")
    assert ours.decode(ours.encode(SYSTEM)) == stock.decode(stock.encode(SYSTEM))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other(SYSTEM)["input_ids"] == theirs["input_ids"][0]
    unpatch_tokenizer(ours)
    assert type(ours) is type(stock)


def test_a_patched_tokenizer_is_saved_as_it_was(tmp_path):
    ours = fast()
    patch_tokenizer(ours)
    ours.save_pretrained(tmp_path / "ours")
    fast().save_pretrained(tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_text_generation_with_a_system_prompt():
    pipe = hf_pipeline("text-generation", model=llama(), tokenizer=fast(), device="cpu")
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
             for question in QUESTIONS]

    def answers() -> list[Any]:
        return [pipe(chat, max_new_tokens=4, do_sample=False, return_full_text=False)
                for chat in chats]

    stock = answers()
    assert patch_tokenizer(pipe) == ("tokenizer",)
    assert answers() == stock and hits() == len(QUESTIONS) - 1
    assert pipe(chats, max_new_tokens=4, do_sample=False, return_full_text=False,
                batch_size=2) is not None
    unpatch_tokenizer(pipe)
    before = hits()
    assert answers() == stock and hits() == before


def test_the_prompts_of_diffusers():
    pipe = pipeline("sdxl")
    stock = image(pipe, "sdxl")
    assert patch_tokenizer(pipe) == ("tokenizer", "tokenizer_2")
    assert (image(pipe, "sdxl") == stock).all()


def test_any_change_of_a_tokenizer_starts_from_nothing():
    stock, ours = fast(), fast()
    patch_tokenizer(ours)

    def change(tokenizer: Any, step: int) -> None:
        if step == 0:
            tokenizer.add_tokens(["mat"])
        elif step == 1:
            tokenizer.add_special_tokens({"additional_special_tokens": ["don't"]})
        elif step == 2:
            tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()
        elif step == 3:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
                add_prefix_space=True)
        else:
            tokenizer.padding_side = "left"

    seen = set()
    for step in range(-1, 5):
        if step >= 0:
            change(stock, step)
            change(ours, step)
        for question in QUESTIONS[:2]:
            assert ours(SYSTEM + question)["input_ids"] == stock(SYSTEM + question)[
                "input_ids"], step
        seen.add(tokenizer_for(ours).id)
        assert set(prefix_memories()) == seen and len(seen) == step + 2
        assert prefix_memories()[tokenizer_for(ours).id].misses == 1


def test_two_models_in_turn_and_in_threads():
    pairs = [(fast(size), fast(size)) for size in (300, 320, 340)]
    for _, ours in pairs:
        patch_tokenizer(ours)
    expected = [[stock(SYSTEM + q)["input_ids"] for q in QUESTIONS] for stock, _ in pairs]
    assert expected[0] != expected[1] != expected[2]
    wrong: list[Any] = []

    def work(start: int) -> None:
        for n in range(60):
            model, question = (start + n) % 3, (start * 7 + n) % len(QUESTIONS)
            if pairs[model][1](SYSTEM + QUESTIONS[question])["input_ids"] != expected[model][
                    question]:
                wrong.append((model, question))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(prefix_memories()) == 3


def test_a_tokenizer_that_encodes_its_own_way_is_left():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(*args, **kwargs)

    own = Own(tokenizer_object=train_tokenizer(), pad_token="<pad>")
    for wrong in (own, train_tokenizer(), None, llama()):
        with pytest.raises(lz.errors.ConfigError,
                           match="wanted a fast tokenizer of transformers 5"):
            patch_tokenizer(wrong)


PIECES = st.sampled_from(["12", " ", "a", "cat", "don't", "7.5", "\n", "  ", "é", "!", "1 2",
                          " the", "3", "日", "?"])


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, min_size=1), st.lists(PIECES, min_size=1))
def test_digits_that_are_cut_first_change_nothing(middle, end):
    made = DIGITS
    for text in (SYSTEM + "".join(middle), SYSTEM + "".join(middle) + "".join(end),
                 SYSTEM + "".join(end)):
        got = lz.tokenize(text, made, cache_prefix=True, return_offsets=True)
        theirs = made.encode(text)
        assert got.ids == theirs.ids and got.offsets == theirs.offsets


DIGITS = train_tokenizer(digits=True)


def test_a_gguf_model_brings_its_tokenizer():
    model = GGUFModel("tiny", None, {}, json.loads(DIGITS.to_str()))
    assert lz.tokenize(SYSTEM, tokenizer_for(model)).ids == DIGITS.encode(SYSTEM).ids

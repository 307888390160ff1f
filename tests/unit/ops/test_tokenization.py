"""lz.tokenize and lz.detokenize against the libraries themselves: ids, offsets, padding,
truncation, and every mistake.

The tokenizers are made here, from a few sentences: nothing is downloaded.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import unicodedata
from functools import lru_cache
from typing import Any

import pytest
import sentencepiece
import tiktoken
import torch
from helpers import python
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import layerzero as lz
from layerzero.models.tokenizers import load_tokenizer
from layerzero.ops.formulas.tokenizer.bpe import (
    BYTE_CHARACTERS,
    ByteLevelBPE,
    is_byte_level_bpe,
    tiny_tokenizer,
)
from layerzero.ops.tokenize import OP
from layerzero.spec.errors import (
    ConfigError,
    DataError,
    InvalidCall,
    NamedKernelRefused,
    NoKernelFoundError,
)
from layerzero.spec.reason import Code

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, naïve café déjà vu",
          "it's we're they'll don't", "日本語のテキスト 中文", "numbers 12345 and 67890",
          "tokenizers are fun to test, aren't they?"] * 4
TEXTS = ["", " ", "the", "hello world", "  two  spaces ", "line\nbreak\n\n\ttab", "it's DON'T",
         "naïve café", "cafe\u0301 e\u0301\u0323", "日本語 中文", "👩\u200d👧 family 👩🏽\u200d🚀", "\0nul\0",
         "½ ⅷ ﬁne Å Å", "\u200bzero\u00a0width\u3000", "<s>special</s> [CLS] text<extra>",
         "numbers 12345", "the lazy dog " * 60]
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
SPECIAL = {"<|endoftext|>": 900, "<|user|>": 901}
UNICODE = st.text(st.one_of(st.characters(exclude_categories=("Cs",)),
                            st.sampled_from("the lazy dog's \n\té日本👩\u200d<s>12")), max_size=40)


def train_tokenizer(model: Any, trainer: Any, pre: Any, normalizer: Any = None, post: Any = None,
                    decoder: Any = None
                    ) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    if post is not None:
        tokenizer.post_processor = post(tokenizer)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_tokens([AddedToken("<extra>", normalized=True)])
    return tokenizer


def add_template(tokenizer: Tokenizer) -> Any:
    ids = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    return processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>",
                                         special_tokens=ids)


def byte_level(trim: bool = False, template: bool = False) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<s>", "</s>"],
                                  initial_alphabet=alphabet,
                                  show_progress=False)
    post = add_template if template else lambda made: processors.ByteLevel(trim_offsets=trim)
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=trim)
    return train_tokenizer(models.BPE(), trainer, splitter, None, post, decoders.ByteLevel())


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "<s>", "</s>"],
                                        show_progress=False)
    return train_tokenizer(models.WordPiece(unk_token="[UNK]"), trainer,
                           pre_tokenizers.BertPreTokenizer(),
                           normalizers.BertNormalizer(), add_template, decoders.WordPiece())


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["[UNK]", "<s>", "</s>"],
                                      unk_token="[UNK]",
                                      show_progress=False)
    return train_tokenizer(models.Unigram(), trainer, pre_tokenizers.Metaspace(),
                           normalizers.NFKC(),
                           add_template,
                           decoders.Metaspace())


def word_level() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", "<s>", "</s>"],
                                        show_progress=False)
    return train_tokenizer(models.WordLevel(unk_token="[UNK]"), trainer,
                           pre_tokenizers.Whitespace(),
                           normalizers.Lowercase())


MAKERS = {"byte_level": byte_level, "trimmed": lambda: byte_level(trim=True),
          "framed": lambda: byte_level(template=True), "word_piece": word_piece, "unigram": unigram,
          "word_level": word_level}


@lru_cache(maxsize=None)
def hf_tokenizer(name: str) -> Tokenizer:
    return MAKERS[name]()


@lru_cache(maxsize=None)
def ranks() -> dict[bytes, int]:
    """tiktoken's ranks, out of the merges of a byte-level BPE."""
    data = json.loads(hf_tokenizer("byte_level").to_str())
    table = {bytes((b,)): b for b in range(256)}
    back = {c: b for b, c in enumerate(BYTE_CHARACTERS)}
    for a, b in data["model"]["merges"]:
        table.setdefault(bytes(back[c] for c in a + b), len(table))
    return table


@lru_cache(maxsize=None)
def encoding() -> tiktoken.Encoding:
    return tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=ranks(),
                             special_tokens=SPECIAL)


@lru_cache(maxsize=None)
def model_proto(kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS), model_writer=out, model_type=kind, vocab_size=90,
        hard_vocab_limit=False, minloglevel=2, **options)
    return out.getvalue()


@lru_cache(maxsize=None)
def processor(kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model_proto(kind), **options)


# Hugging Face tokenizers

@pytest.mark.parametrize("kernel", ["tokenizers.encode", "tokenizers.encode_batch"])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_tokenizers_ids_and_offsets(name: str, special: bool, kernel: str) -> None:
    theirs = hf_tokenizer(name)
    for text in TEXTS:
        want = theirs.encode(text, add_special_tokens=special)
        got = lz.tokenize(text, theirs, add_special_tokens=special, return_offsets=True,
                          backend=kernel)
        assert (got.ids, got.offsets, got.attention_mask) == (want.ids, want.offsets,
                                                              want.attention_mask)
    want_all = theirs.encode_batch(TEXTS, add_special_tokens=special)
    got = lz.tokenize(TEXTS, theirs, add_special_tokens=special, backend=kernel)
    assert got.ids == [one.ids for one in want_all]
    assert got.offsets is None


@settings(deadline=None, max_examples=60)
@given(text=UNICODE, name=st.sampled_from(sorted(MAKERS)))
def test_tokenizers_on_any_unicode(text: str, name: str) -> None:
    theirs = hf_tokenizer(name)
    want = theirs.encode(text)
    got = lz.tokenize(text, theirs, return_offsets=True)
    assert (got.ids, got.offsets) == (want.ids, want.offsets)
    assert lz.tokenize([text, text], theirs).ids == [want.ids] * 2
    for skip in (True, False):
        assert lz.detokenize(got, theirs, skip_special_tokens=skip) == theirs.decode(
            want.ids, skip_special_tokens=skip)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [2, 3, 9, 10_000])
@pytest.mark.parametrize("name", ["trimmed", "framed", "word_piece", "byte_level"])
def test_truncation_is_the_librarys(name: str, limit: int, side: str) -> None:
    theirs = Tokenizer.from_str(hf_tokenizer(name).to_str())
    handle = load_tokenizer(theirs)
    theirs.enable_truncation(limit, direction=side)
    for text in TEXTS:
        want = theirs.encode(text)
        for cached in (False, True):
            got = lz.tokenize(text, handle, truncation=True, max_length=limit, truncation_side=side,
                              return_offsets=True, cache_prefix=cached)
            assert (got.ids, got.offsets) == (want.ids, want.offsets), text


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [None, 5, 40])
@pytest.mark.parametrize("multiple", [None, 8])
def test_padding_is_the_librarys(side: str, length: int | None, multiple: int | None) -> None:
    theirs = Tokenizer.from_str(hf_tokenizer("framed").to_str())
    handle = load_tokenizer(theirs)
    theirs.enable_padding(length=length, direction=side, pad_id=1, pad_token="</s>",
                          pad_to_multiple_of=multiple)
    texts = TEXTS[:8]
    want = theirs.encode_batch(texts)
    got = lz.tokenize(texts, handle, padding="longest" if length is None else "max_length",
                      max_length=length, pad_id=1, padding_side=side, pad_to_multiple_of=multiple,
                      return_offsets=True)
    assert got.ids == [one.ids for one in want]
    assert got.attention_mask == [one.attention_mask for one in want]
    assert got.offsets == [one.offsets for one in want]
    as_set = lz.tokenize(texts, theirs)        # nothing said: as the tokenizer itself is set
    assert (as_set.ids, as_set.attention_mask) == (got.ids, got.attention_mask)
    assert lz.tokenize(texts, theirs, padding=False).ids == lz.tokenize(texts, handle).ids


def test_truncation_of_the_tokenizer_itself_holds_unless_the_call_says_otherwise() -> None:
    theirs = Tokenizer.from_str(hf_tokenizer("framed").to_str())
    theirs.enable_truncation(6, direction="left")
    text = "the quick brown fox jumps"
    assert lz.tokenize(text, theirs).ids == theirs.encode(text).ids
    assert lz.tokenize(text, theirs,
                       truncation=False).ids == hf_tokenizer("framed").encode(text).ids
    assert len(lz.tokenize(text, theirs, max_length=4).ids) == 4


def test_a_sequence_that_its_template_repeats_is_truncated_by_the_library() -> None:
    theirs = Tokenizer.from_str(hf_tokenizer("byte_level").to_str())
    theirs.post_processor = processors.TemplateProcessing(
        single="$A <s> $A", pair="$A $B", special_tokens=[("<s>", theirs.token_to_id("<s>"))])
    handle = load_tokenizer(theirs)
    theirs.enable_truncation(7)
    want = theirs.encode("the quick brown fox").ids
    assert lz.tokenize("the quick brown fox", handle, truncation=True, max_length=7).ids == want
    text = "the lazy dog " * 60
    assert lz.tokenize(text, handle,
                       cache_prefix=True).ids == Tokenizer.from_str(handle.payload).encode(text).ids


def test_special_tokens_in_the_text_become_tokens_or_stay_text() -> None:
    theirs = Tokenizer.from_str(hf_tokenizer("byte_level").to_str())
    text = "a <s> b</s>"
    as_tokens = lz.tokenize(text, theirs).ids
    as_text = lz.tokenize(text, theirs, parse_special=False).ids
    assert as_tokens == theirs.encode(text).ids
    theirs.encode_special_tokens = True
    assert as_text == theirs.encode(text).ids != as_tokens
    assert lz.tokenize(text, theirs).ids == as_text
    assert lz.tokenize(text, theirs, parse_special=True).ids == as_tokens


def test_a_tokenizer_written_to_a_file(tmp_path: Any) -> None:
    path = tmp_path / "tokenizer.json"
    hf_tokenizer("word_piece").save(str(path))
    for source in (path, str(path), tmp_path, load_tokenizer(path), load_tokenizer(str(tmp_path))):
        assert lz.tokenize("the lazy dog",
                           source).ids == hf_tokenizer("word_piece").encode("the lazy dog").ids


# transformers

transformers = pytest.importorskip("transformers")


@lru_cache(maxsize=None)
def fast(name: str = "framed", **options: Any) -> Any:
    copy = Tokenizer.from_str(hf_tokenizer(name).to_str())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=copy, pad_token="</s>",
                                                bos_token="<s>", **options)


@pytest.mark.parametrize("call", [
    {}, {"add_special_tokens": False}, {"padding": True},
    {"padding": "longest", "padding_side": "left"},
    {"padding": "max_length", "max_length": 30}, {"truncation": True, "max_length": 6},
    {"truncation": True}, {"padding": True, "truncation": True, "max_length": 8,
                           "pad_to_multiple_of": 4}])
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_says_the_same(call: dict[str, Any], side: str) -> None:
    theirs = fast(padding_side=side, truncation_side=side, model_max_length=12)
    want = theirs(TEXTS, return_offsets_mapping=True, **call)
    got = lz.tokenize(TEXTS, theirs, return_offsets=True, **call)
    assert got.ids == want["input_ids"]
    assert got.attention_mask == want["attention_mask"]
    assert got.offsets == [[tuple(span) for span in row] for row in want["offset_mapping"]]


def test_what_a_call_of_transformers_left_behind_is_not_a_setting() -> None:
    theirs = fast(model_max_length=50)
    whole = lz.tokenize("the quick brown fox", theirs).ids
    theirs(["the quick brown fox", "the"], truncation=True, max_length=4, padding=True)
    assert theirs.backend_tokenizer.truncation is not None
    assert lz.tokenize("the quick brown fox", theirs).ids == whole


def test_split_special_tokens_of_transformers() -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(hf_tokenizer("byte_level").to_str()), bos_token="<s>",
        split_special_tokens=True)
    assert lz.tokenize("a <s> b", theirs).ids == theirs("a <s> b")["input_ids"]


# tiktoken

@pytest.mark.parametrize("kernel", ["tiktoken.encode", "tiktoken.encode_batch"])
@pytest.mark.parametrize("parse", [None, True, False])
def test_tiktoken_ids_and_offsets(parse: bool | None, kernel: str) -> None:
    theirs = encoding()
    texts = TEXTS if parse is None else [*TEXTS, "a<|endoftext|>b <|user|>"]
    allowed: dict[str, Any] = {None: {}, True: {"allowed_special": "all"},
                               False: {"disallowed_special": ()}}[parse]
    got = lz.tokenize(texts, theirs, parse_special=parse, return_offsets=True, backend=kernel)
    for text, ids, spans in zip(texts, got.ids, got.offsets or ()):
        assert ids == theirs.encode(text, **allowed)
        back, starts = theirs.decode_with_offsets(ids)
        assert back == text
        assert [start for start, _ in spans] == starts
        # the narrowest range of characters that holds the token's bytes
        for one, (start, end) in zip(ids, spans):
            raw = theirs.decode_single_token_bytes(one)
            assert raw in text[start:end].encode()
            assert ((raw not in text[start + 1:end].encode()
                     and raw not in text[start:end - 1].encode()) or len(raw) < 2)


@settings(deadline=None, max_examples=100)
@given(text=UNICODE)
def test_tiktoken_on_any_unicode(text: str) -> None:
    theirs = encoding()
    got = lz.tokenize(text, theirs, return_offsets=True)
    assert got.ids == theirs.encode(text)
    assert [start for start, _ in got.offsets or ()] == theirs.decode_with_offsets(got.ids)[1]
    assert lz.detokenize(got.ids, theirs) == text


def test_tiktoken_refuses_special_tokens_as_it_does_itself() -> None:
    with pytest.raises(ValueError, match="endoftext"):
        encoding().encode("a<|endoftext|>")
    with pytest.raises(InvalidCall, match="parse_special=True") as caught:
        lz.tokenize(["fine", "a<|endoftext|>"], encoding())
    assert caught.value.codes == (Code.VALUE_OUT_OF_RANGE,)


def test_tiktoken_files(tmp_path: Any) -> None:
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items())
    (tmp_path / "mine.tiktoken").write_bytes(lines)
    (tmp_path / "tokenizer.model").write_bytes(lines)                   # as some models ship it
    (tmp_path / "cl100k_base.tiktoken").write_bytes(lines)
    for name in ("mine.tiktoken", "tokenizer.model"):
        handle = load_tokenizer(tmp_path / name, pattern=PATTERN, special_tokens=SPECIAL)
        assert lz.tokenize("hello the<|user|>", handle,
                           parse_special=True).ids == encoding().encode(
            "hello the<|user|>", allowed_special="all")
        with pytest.raises(InvalidCall,
                           match=r"pass its split pattern: lz.tokens.load_tokenizer\(path, pattern="):
            lz.tokenize("hello", tmp_path / name)
    published, text = tmp_path / "cl100k_base.tiktoken", "it's 12345 <|endofprompt|>"
    known = lz.tokenize(text, published, parse_special=True)
    assert known.ids[-1] == 100276             # as tiktoken says
    assert lz.detokenize(known, published, skip_special_tokens=False) == text


def test_offsets_of_a_pattern_that_leaves_characters_out_are_refused() -> None:
    lossy = tiktoken.Encoding("lossy", pat_str=r"\w+", mergeable_ranks=ranks(), special_tokens={})
    text = "the lazy dog " * 60
    for cached in (False, True):
        for _ in range(2):
            assert lz.tokenize(text + "!", lossy, cache_prefix=cached).ids == lossy.encode(text)
    with pytest.raises(InvalidCall, match="return_offsets must be False"):
        lz.tokenize("the lazy", lossy, return_offsets=True)


# sentencepiece

@pytest.mark.parametrize("kernel", ["sentencepiece.encode", "sentencepiece.encode_batch"])
@pytest.mark.parametrize("options", [{}, {"add_bos": True, "add_eos": True},
                                     {"reverse": True, "add_bos": True},
                                     {"out_type": str}], ids=str)
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_ids(kind: str, options: dict[str, Any], kernel: str) -> None:
    theirs = processor(kind, **options)
    got = lz.tokenize(TEXTS, theirs, backend=kernel)
    assert got.ids == [theirs.encode(text, out_type=int) for text in TEXTS]
    plain = lz.tokenize(TEXTS, theirs, add_special_tokens=False, backend=kernel)
    assert plain.ids == [theirs.encode(text, out_type=int, add_bos=False, add_eos=False)
                         for text in TEXTS]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_offsets(kind: str) -> None:
    theirs = processor(kind, add_bos=True)
    for text in TEXTS:
        got = lz.tokenize(text, theirs, return_offsets=True)
        assert got.ids == theirs.encode(text, out_type=int)
        assert got.offsets is not None and got.offsets[0] == (0, 0)
        spans = got.offsets[1:]
        assert all(0 <= s <= e <= len(text) for s, e in spans)
        assert [s for s, _ in spans] == sorted(s for s, _ in spans)
        # together they cover the text but for white space that was removed
        if spans:
            assert (text[:spans[0][0]].strip(" \u200b\u3000\u00a0") == ""
                    and text[spans[-1][1]:].strip() == "")
    spans = lz.tokenize("日本 dog", theirs, return_offsets=True).offsets
    assert spans is not None and [("日本 dog")[s:e] for s, e in spans if e > s][:2] == ["日", "本"]


@settings(deadline=None, max_examples=60)
@given(text=UNICODE)
def test_sentencepiece_on_any_unicode(text: str) -> None:
    theirs = processor("bpe")
    got = lz.tokenize(text, theirs, return_offsets=True)
    assert got.ids == theirs.encode(text) == lz.tokenize(text, theirs).ids
    assert lz.detokenize(got.ids, theirs) == theirs.decode(got.ids)


def test_sentencepiece_files_and_padding(tmp_path: Any) -> None:
    path = tmp_path / "spiece.model"
    path.write_bytes(model_proto("bpe", pad_id=3))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    got = lz.tokenize(["the", "the lazy dog"], tmp_path, padding="longest")
    assert got.ids[0] == theirs.encode("the") + [3] * (len(got.ids[1]) - len(theirs.encode("the")))
    with pytest.raises(InvalidCall, match="pad_id is required"):
        lz.tokenize(["the", "the lazy"], processor("bpe"), padding=True)


def test_sentencepiece_knows_no_special_tokens_in_text() -> None:
    with pytest.raises(NoKernelFoundError) as caught:
        lz.tokenize("<s>", processor("bpe"), parse_special=True)
    assert Code.FEATURE_UNSUPPORTED in caught.value.codes
    with pytest.raises(NoKernelFoundError):
        lz.detokenize([1], processor("bpe"), skip_special_tokens=False)


# one text or many, tensors

def test_one_text_gives_a_list_and_several_a_list_of_lists() -> None:
    theirs = hf_tokenizer("byte_level")
    assert lz.tokenize("the", theirs).ids == lz.tokenize(["the"], theirs).ids[0] == lz.tokenize(
        ("the",), theirs).ids[0]
    assert lz.tokenize([], theirs) == lz.tokenize((), theirs)
    assert lz.tokenize([], theirs, padding=True, pad_id=0).ids == []
    assert lz.tokenize("the", theirs, return_attention_mask=False).attention_mask is None


def test_to_tensor() -> None:
    theirs = hf_tokenizer("byte_level")
    padded = lz.tokenize(["the", "the lazy dog"], theirs, padding=True, pad_id=0)
    ids, mask = padded.to_tensor(), padded.to_tensor("cpu", of="attention_mask")
    assert ids.dtype == torch.int64 and ids.shape == mask.shape == (2, len(padded.ids[1]))
    assert lz.detokenize(ids, theirs, skip_special_tokens=True) == lz.detokenize(padded, theirs)
    assert lz.tokenize("the", theirs).to_tensor().dim() == 1
    with pytest.raises(InvalidCall, match="padding='longest'"):
        lz.tokenize(["the", "the lazy dog"], theirs).to_tensor()
    with pytest.raises(InvalidCall, match="of must be 'ids' or 'attention_mask'"):
        lz.tokenize("the", theirs, return_attention_mask=False).to_tensor(of="attention_mask")


def test_a_result_cannot_be_changed_by_changing_another() -> None:
    text = "the lazy dog " * 60
    first = lz.tokenize(text, encoding(), cache_prefix=True)
    want = list(first.ids)
    first.ids[0] = -1
    assert lz.tokenize(text, encoding(), cache_prefix=True).ids == want


# detokenize

@pytest.mark.parametrize("name", MAKERS)
def test_detokenize_is_the_librarys(name: str) -> None:
    theirs = hf_tokenizer(name)
    rows = [theirs.encode(text).ids for text in TEXTS]
    for skip in (True, False):
        want = theirs.decode_batch(rows, skip_special_tokens=skip)
        assert lz.detokenize(rows, theirs, skip_special_tokens=skip) == want
        assert [lz.detokenize(row, theirs, skip_special_tokens=skip) for row in rows] == want


def test_detokenize_tiktoken_and_sentencepiece() -> None:
    ids = encoding().encode("hello<|user|> 日本", allowed_special="all")
    assert lz.detokenize(ids, encoding(), skip_special_tokens=False) == "hello<|user|> 日本"
    assert lz.detokenize(ids, encoding()) == "hello 日本"
    half = ids[:-1]                            # of the last character
    assert lz.detokenize(half, encoding()) == encoding().decode([i for i in half if i != 901])
    rows = [processor("bpe").encode(text) for text in TEXTS]
    assert lz.detokenize(rows, processor("bpe")) == [processor("bpe").decode(row) if row else ""
                                                     for row in rows]
    assert (lz.detokenize([], encoding()) == "" and lz.detokenize([[], []], processor("bpe"))
            == ["", ""])


@pytest.mark.parametrize(("ids", "word"), [
    ("the", "ids must be a list of ids"), ([0.5], "ids must be integers"),
    ([1, None], "ids must be integers"), ([-1], "ids must be >= 0"),
    ([[1], [-2]], r"ids\[1\] must be >= 0"), ([[1], 2], r"ids\[1\] must be a list"),
    (torch.zeros(3), "integers in one or two dimensions"),
    (torch.ones(1, 1, 1).long(), "one or two dimensions"),
    (None, "ids must be a list of ids")])
def test_bad_ids(ids: Any, word: str) -> None:
    with pytest.raises(InvalidCall, match=word) as caught:
        lz.detokenize(ids, encoding())
    assert caught.value.reasons[0].fact.startswith("ids")


@pytest.mark.parametrize("ids", [[899], [2 ** 40]])
@pytest.mark.parametrize("tokenizer", [encoding, lambda: processor("bpe")],
                         ids=["tiktoken", "sentencepiece"])
def test_ids_that_the_vocabulary_does_not_have(tokenizer: Any, ids: list[int]) -> None:
    with pytest.raises(InvalidCall, match="ids must be in the vocabulary"):
        lz.detokenize(ids, tokenizer())
    assert lz.detokenize([899],
                         hf_tokenizer("byte_level")) == hf_tokenizer("byte_level").decode([899])


# the caller's mistakes

@pytest.mark.parametrize(("tokenizer", "word"), [
    (None, "got NoneType"), (7, "got int"),
    ("no-such-file", "'no-such-file', which cannot be read"),
    (object(), "got object"), (json, "got module")])
@pytest.mark.parametrize("op", ["tokenize", "detokenize"])
def test_what_is_no_tokenizer(op: str, tokenizer: Any, word: str) -> None:
    with pytest.raises(InvalidCall, match=r"what lz\.tokens\.load_tokenizer returned") as caught:
        getattr(lz, op)("text" if op == "tokenize" else [1], tokenizer)
    assert word in str(caught.value) and "tokenizers.Tokenizer" in str(caught.value)
    assert (caught.value.codes, caught.value.reasons[0].fact) == ((Code.WRONG_TYPE,), "tokenizer")


@pytest.mark.parametrize(("text", "fact"), [(7, "text"), (None, "text"), (["a", 7], "text[1]"),
                                            ([None], "text[0]"),
                                            (b"bytes", "text"), ({"a": 1}, "text")])
def test_what_is_no_text(text: Any, fact: str) -> None:
    with pytest.raises(InvalidCall, match="must be a str") as caught:
        lz.tokenize(text, encoding())
    assert caught.value.reasons[0].fact == fact


@pytest.mark.parametrize("make", [lambda: hf_tokenizer("byte_level"), encoding,
                                  lambda: processor("bpe")])
def test_lone_surrogates_are_refused(make: Any) -> None:
    with pytest.raises(InvalidCall, match="a lone surrogate at character 3") as caught:
        lz.tokenize(["fine", "abc\ud83d"], make())
    assert caught.value.reasons[0].fact == "text[1]"
    assert lz.tokenize("\U0001f600", make()).ids


@pytest.mark.parametrize(("options", "fact", "code"), [
    ({"truncation": True}, "max_length", Code.MISSING_METADATA),
    ({"padding": "max_length", "pad_id": 0}, "max_length", Code.MISSING_METADATA),
    ({"padding": True}, "pad_id", Code.MISSING_METADATA),
    ({"padding": "shortest"}, "padding", Code.VALUE_OUT_OF_RANGE),
    ({"padding": []}, "padding", Code.WRONG_TYPE),
    ({"padding": 1}, "padding", Code.WRONG_TYPE),
    ({"max_length": 0, "truncation": True}, "max_length", Code.VALUE_OUT_OF_RANGE),
    ({"pad_id": -1, "padding": True}, "pad_id", Code.VALUE_OUT_OF_RANGE),
    ({"pad_to_multiple_of": 0}, "pad_to_multiple_of", Code.VALUE_OUT_OF_RANGE),
    ({"max_length": 1, "truncation": True}, "max_length", Code.VALUE_OUT_OF_RANGE),
    ({"max_length": 1, "truncation": True, "truncation_side": "left", "return_offsets": True},
     "max_length",
     Code.VALUE_OUT_OF_RANGE),
    ({"truncation_side": "middle"}, "truncation_side", Code.VALUE_OUT_OF_RANGE),
    ({"max_length": "7"}, "max_length", Code.WRONG_TYPE),
    ({"truncation": "yes"}, "truncation", Code.WRONG_TYPE),
    ({"add_special_tokens": None}, "add_special_tokens", Code.WRONG_TYPE)])
def test_bad_options_are_named(options: dict[str, Any], fact: str, code: Code) -> None:
    with pytest.raises(InvalidCall) as caught:
        lz.tokenize("the lazy dog", hf_tokenizer("framed"), **options)
    assert [(r.fact, r.code) for r in caught.value.reasons] == [(fact, code)]


def test_a_component_in_python_has_no_hash_and_is_refused() -> None:
    class Custom:
        def pre_tokenize(self, pretok: Any) -> None:
            pass

    theirs = Tokenizer.from_str(hf_tokenizer("byte_level").to_str())
    theirs.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Custom())
    with pytest.raises(InvalidCall, match="vocab_hash of tokenizer is required") as caught:
        lz.tokenize("the", theirs)
    assert caught.value.codes == (Code.MISSING_METADATA,)


@pytest.mark.parametrize(("content", "word"), [
    (b"", "found nothing"), (b"{", "it is not JSON"), (b'{"model": 3}', "model.vocab"),
    (b"just words\n", "line 1"), (b"\n\x7fabc", "no protocol buffer"),
    (b"\x12\x00", "without pieces"), (b"{\xff", "UTF-8"), (b"YQ== 0\n", "0x00")])
def test_files_that_are_no_tokenizers(content: bytes, word: str, tmp_path: Any) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=word):
        lz.tokenize("the", tmp_path / "file")


def test_a_file_its_library_cannot_read_is_the_callers_mistake(tmp_path: Any) -> None:
    data = json.loads(hf_tokenizer("word_level").to_str())
    data["pre_tokenizer"] = {"type": "NoSuchThing"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InvalidCall,
                       match="that the installed tokenizers library can read") as caught:
        lz.tokenize("the", tmp_path)
    assert caught.value.reasons[0].fact == "tokenizer"


def test_load_tokenizer_with_parts_that_do_not_belong() -> None:
    with pytest.raises(ConfigError, match="go with the path of a"):
        load_tokenizer(encoding(), pattern=PATTERN)
    with pytest.raises(ConfigError, match="special tokens need a pattern"):
        load_tokenizer("x.tiktoken", special_tokens=SPECIAL)
    with pytest.raises(DataError, match="cannot read it"):
        load_tokenizer("no-such.tiktoken", pattern=PATTERN)


# which kernel

def test_each_kind_is_served_by_its_own_library() -> None:
    assert lz.which("tokenize", "the", encoding()) == "tiktoken.encode"
    assert lz.which("tokenize", "the", hf_tokenizer("unigram")) == "tokenizers.encode"
    assert lz.which("tokenize", ["the"] * 16, hf_tokenizer("unigram")) == "tokenizers.encode_batch"
    assert lz.which("tokenize", ["the", "fox"], processor("bpe")) == "sentencepiece.encode"
    long = "the lazy dog " * 60
    assert lz.which("tokenize", long, encoding(), cache_prefix=True) == "tiktoken.encode_cached"
    assert lz.which("tokenize", long, hf_tokenizer("unigram"),
                    cache_prefix=True) == "tokenizers.encode_cached"
    assert lz.which("tokenize", long, processor("bpe"), cache_prefix=True) == "sentencepiece.encode"
    assert lz.which("detokenize", [1], encoding()) == "tiktoken.decode"
    with pytest.raises(NamedKernelRefused,
                       match="the library of the tokenizer must be sentencepiece, got tiktoken"):
        lz.tokenize("the", encoding(), backend="sentencepiece.encode")


def test_disabled_leaves_the_libraries_as_they_are(world: None) -> None:
    with lz.disabled():
        for tokenizer, name in ((encoding(), "tiktoken"), (hf_tokenizer("unigram"), "tokenizers"),
                                (processor("bpe"), "sentencepiece")):
            assert lz.which("tokenize", "the lazy dog " * 60, tokenizer,
                            cache_prefix=True) == f"{name}.encode"
            assert lz.which("detokenize", [1, 2], tokenizer) == f"{name}.decode"


def test_a_tokenizer_that_draws_is_not_cached() -> None:
    theirs = Tokenizer.from_str(hf_tokenizer("byte_level").to_str())
    theirs.model.dropout = 0.5
    assert lz.which("tokenize", "the lazy dog " * 60, theirs,
                    cache_prefix=True) == "tokenizers.encode"
    reasons = lz.validate("tokenize", "tokenizers.encode_cached", "the lazy dog " * 60, theirs,
                          cache_prefix=True)
    assert [r.code for r in reasons] == [Code.NOT_DETERMINISTIC]


def test_without_the_libraries(tmp_path: Any) -> None:
    """A process in which they cannot be imported: the formula serves what it covers, else their
    absence is named."""
    hf_tokenizer("byte_level").save(str(tmp_path / "tokenizer.json"))
    hf_tokenizer("word_piece").save(str(tmp_path / "bert.json"))
    (tmp_path / "spiece.model").write_bytes(model_proto("bpe"))
    ids = hf_tokenizer("byte_level").encode("hello <s> 日本").ids
    code = f"""
        import sys
        class Hide:
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] in ("tokenizers", "tiktoken", "sentencepiece"):
                    raise ImportError(name)
        sys.meta_path.insert(0, Hide())
        import layerzero as lz
        found = lz.tokenize("hello <s> 日本", {str(tmp_path / "tokenizer.json")!r})
        assert found.ids == {ids!r}, found
        assert lz.detokenize(found, {str(tmp_path / "tokenizer.json")!r}, skip_special_tokens=False) == "hello <s> 日本"
        for path in ({str(tmp_path / "bert.json")!r}, {str(tmp_path / "spiece.model")!r}):
            try:
                lz.tokenize("hello", path)
            except lz.errors.NoKernelFoundError as error:
                assert lz.Code.NOT_INSTALLED in error.codes
            else:
                raise AssertionError(path)
    """
    python(code)


# the formula

@settings(deadline=None, max_examples=150)
@given(text=UNICODE, prefix=st.booleans(), regex=st.booleans(), trim=st.booleans(),
       template=st.booleans(),
       parse=st.booleans())
def test_the_formula_is_exact(text: str, prefix: bool, regex: bool, trim: bool, template: bool,
                              parse: bool) -> None:
    data = tiny_tokenizer(template)
    data["pre_tokenizer"] = {**data["pre_tokenizer"], "add_prefix_space": prefix,
                             "use_regex": regex}
    trimming = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim,
                "use_regex": True}
    data["post_processor"] = {"type": "Sequence", "processors": [trimming, data["post_processor"]]}
    theirs = Tokenizer.from_str(json.dumps(data))
    theirs.encode_special_tokens = not parse
    assert is_byte_level_bpe(data)
    try:
        got = lz.tokenize(text, theirs, return_offsets=True, backend="reference.tokenize")
    except InvalidCall as e:                   # a character newer than Python's tables
        assert (e.codes == (Code.FEATURE_UNSUPPORTED,)
                and any(unicodedata.category(c) == "Cn" for c in text))
        return
    want = theirs.encode(text)
    assert (got.ids, got.offsets) == (want.ids, want.offsets)
    for skip in (True, False):
        assert lz.detokenize(got, theirs, skip_special_tokens=skip,
                             backend="reference.detokenize") == theirs.decode(
            want.ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "trimmed", "framed"])
def test_the_formula_on_trained_merges(name: str) -> None:
    theirs = hf_tokenizer(name)
    for text in TEXTS:
        want = theirs.encode(text)
        got = lz.tokenize(text, theirs, return_offsets=True, backend="reference.tokenize")
        assert (got.ids, got.offsets) == (want.ids, want.offsets)


@pytest.mark.parametrize("added", [
    [("hello", 270, True)], [("hello", 270, False), ("<s>", 271, True)], [("Ġthe", 5, True)],
    [("<s>", 300, True), ("<e>", 280, False)], [("<s>", 270, True), ("<e>", 270, True)],
    [("<s>", 270, True), ("hello", 271, False), ("<s>", 272, False)],
    [("<s>", 270, False), ("<s>", 270, True)], [("", 270, True), ("<e>", 271, False)]],
    ids=lambda added: "-".join(f"{name}:{i}" for name, i, _ in added))
@pytest.mark.parametrize("parse", [True, False])
def test_ids_of_added_tokens_are_the_librarys(added: list[tuple[str, int, bool]], parse: bool
                                              ) -> None:
    """Whatever ids the file gives them: a word of the vocabulary keeps its own."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    data = {**tiny_tokenizer(), "added_tokens": [
        {"id": i, "content": name, "special": special, "normalized": not special, **flags}
        for name, i, special in added]}
    assert is_byte_level_bpe(data)
    theirs, ours = Tokenizer.from_str(json.dumps(data)), ByteLevelBPE(data)
    theirs.encode_special_tokens = not parse
    want = theirs.encode("a hello<s><e> the Ġthe hello", add_special_tokens=False)
    assert ours.encode("a hello<s><e> the Ġthe hello", parse) == (want.ids, want.offsets)
    for i, skip in itertools.product(range(305), (True, False)):
        assert ours.decode([i], skip) == theirs.decode([i], skip_special_tokens=skip)


def test_whole_words_before_merges() -> None:
    data = {**tiny_tokenizer()}
    data["model"] = {**data["model"], "ignore_merges": True}
    data["model"]["vocab"] = {**data["model"]["vocab"], "fox": 400}
    theirs = Tokenizer.from_str(json.dumps(data))
    assert ByteLevelBPE(data).encode("fox", True)[0] == theirs.encode("fox").ids == [400]


@pytest.mark.parametrize(("change", "fact"), [
    ({"normalizer": {"type": "NFC"}}, "normalizer"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "pretokenizer"),
    ({"post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0],
                         "trim_offsets": True,
                         "add_prefix_space": True}}, "plain_bpe")])
def test_the_formula_refuses_what_it_does_not_cover(change: dict[str, Any], fact: str) -> None:
    theirs = Tokenizer.from_str(json.dumps({**tiny_tokenizer(), **change}))
    reasons = lz.validate("tokenize", "reference.tokenize", "the", theirs)
    assert fact in [r.fact for r in reasons]
    assert lz.validate("tokenize", "reference.tokenize", "the", hf_tokenizer("unigram"))


def test_the_op_refuses_to_be_declared_without_a_vocabulary_hash() -> None:
    from dataclasses import replace

    with pytest.raises(lz.errors.SpecError, match="vocab_hash"):
        replace(OP, reads=tuple(name for name in OP.reads if name != "vocab_hash"), requires=())

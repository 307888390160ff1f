"""What is remembered of tokenizers and texts: the identity of a tokenizer, and the tokens of a
common prefix.
"""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import sentencepiece
import tiktoken
from helpers import python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, processors, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

import layerzero as lz
from layerzero.backends.tiktoken import KERNELS
from layerzero.machine.loading import load
from layerzero.models.tokenizers import forget_prefixes, load_tokenizer, prefix_memories
from layerzero.ops.formulas.tokenizer import identity as tokenizer_identity
from layerzero.ops.formulas.tokenizer import prefix as prefix_formulas
from layerzero.ops.formulas.tokenizer.bpe import tiny_tokenizer
from layerzero.ops.formulas.tokenizer.identity import identify
from layerzero.ops.formulas.tokenizer.prefix import (
    PrefixMemory,
    SplitPoints,
    common_length,
    is_known_pattern,
    split_points_from_json,
    split_points_from_pattern,
)
from layerzero.spec.errors import DataError
from layerzero.spec.kernel import Direct
from layerzero.spec.reason import Code

CORPUS = ["the quick brown fox jumps over the lazy dog it's we're",
          "hello world, naïve café déjà vu e\u0301", "日本語 中文", "numbers 12345 and 67890",
          "THE Quick DON'T a\tb\n\nc"] * 4
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s")
O200K = "|".join((
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
PROMPT = ("You are a helpful assistant. Answer in one sentence, and say so when you do not know. "
          * 12)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget_prefixes()
    yield
    forget_prefixes()


def tiny(**changes: Any) -> dict[str, Any]:
    return {**tiny_tokenizer(), **changes}


def encoding(name: str = "tiny", pattern: str = GPT2, special: dict[str, int] | None = None,
             merged: str = "the"
             ) -> tiktoken.Encoding:
    ranks = {bytes((b,)): b for b in range(256)} | {merged[:2].encode(): 256, merged.encode(): 257}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
                             or {"<|im|>": 300})


def model_proto(**options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=iter(CORPUS), model_writer=out,
                                             vocab_size=60, hard_vocab_limit=False, minloglevel=2,
                                             **options)
    return out.getvalue()


# identity

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "vocab": ({"model": {**tiny()["model"], "vocab": {**tiny()["model"]["vocab"], "fox": 999}}},
              "vocab_hash"),
    "merges": ({"model": {**tiny()["model"], "merges": tiny()["model"]["merges"][::-1]}},
               "merges_hash"),
    "normalizer": ({"normalizer": {"type": "NFC"}}, "normalizer_id"),
    "pre_tokenizer": ({"pre_tokenizer": {**tiny()["pre_tokenizer"], "use_regex": False}},
                      "pretokenizer_id"),
    "added": ({"added_tokens": tiny()["added_tokens"][:-1]}, "special_tokens_hash"),
    "flag": ({"added_tokens": [{**t, "rstrip": True} for t in tiny()["added_tokens"]]},
             "special_tokens_hash"),
    "post_processor": ({"post_processor": None}, ""), "decoder": ({"decoder": None}, ""),
    "dropout": ({"model": {**tiny()["model"], "dropout": 0.1}}, ""),
    "truncation": ({"truncation": {"max_length": 9, "direction": "Right",
                                   "strategy": "LongestFirst"}}, "")}


@pytest.mark.parametrize("name", CHANGES)
def test_every_part_of_a_tokenizer_json_is_in_its_identity(name: str, tmp_path: Any) -> None:
    change, part = CHANGES[name]
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(tiny()))
    after.write_text(json.dumps(tiny(**change)))
    one, other = identify(before), identify(after)
    assert one.id != other.id and len(one.id) == 64
    parts = ("vocab_hash", "merges_hash", "normalizer_id", "pretokenizer_id", "special_tokens_hash")
    assert [p for p in parts if one.facts[p] != other.facts[p]] == ([part] if part else [])


def test_the_spelling_of_a_file_is_not_in_its_identity(tmp_path: Any) -> None:
    pairs = [merge.split(" ") for merge in tiny()["model"]["merges"]]
    for name, text in (("a", json.dumps(tiny())),
                       ("b", json.dumps(tiny(), indent=2, sort_keys=True)),
                       ("c", json.dumps(tiny(model={**tiny()["model"], "merges": pairs})))):
        (tmp_path / name).write_text(text)
    assert len({identify(tmp_path / name).id for name in "abc"}) == 1
    assert identify(Tokenizer.from_file(str(tmp_path / "a"))).id == identify(tmp_path / "a").id


def test_an_identity_is_the_same_in_another_process(tmp_path: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps(tiny()))
    (tmp_path / "m.model").write_bytes(model_proto())
    ranks = {bytes((b,)): b for b in range(256)}
    (tmp_path / "t.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r
                                                   for t, r in ranks.items()))
    printed = python(f"""
        from layerzero.ops.formulas.tokenizer.identity import identify
        for name in ("a.json", "m.model", "t.tiktoken"):
            print(identify({str(tmp_path)!r} + "/" + name).id)
    """, PYTHONHASHSEED="1")
    assert printed.split() == [identify(tmp_path / name).id
                               for name in ("a.json", "m.model", "t.tiktoken")]


def test_what_changes_an_object_changes_its_identity() -> None:
    theirs = Tokenizer.from_str(json.dumps(tiny()))
    seen = [identify(theirs)]
    assert identify(theirs) is seen[0]         # looked at, not read again

    def changed() -> None:
        now = identify(theirs)
        assert now.id not in [h.id for h in seen]
        assert identify(theirs) is now
        seen.append(now)

    theirs.add_tokens(["fox"])
    changed()
    theirs.add_special_tokens(["the"])         # in the vocabulary already: its size stays
    changed()
    theirs.add_tokens([AddedToken("fox", rstrip=True)])
    changed()
    theirs.normalizer = norm.Lowercase()
    changed()
    theirs.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    changed()
    theirs.post_processor = processors.ByteLevel(trim_offsets=True)
    changed()
    theirs.enable_truncation(7)
    changed()
    theirs.enable_padding(pad_id=3)
    changed()
    theirs.encode_special_tokens = True
    changed()
    theirs.model.dropout = 0.5
    changed()
    theirs.model = models.BPE(vocab={"a": 0}, merges=[])
    changed()


def test_a_handle_stays_what_it_was() -> None:
    theirs = Tokenizer.from_str(json.dumps(tiny()))
    handle = load_tokenizer(theirs)
    before = lz.tokenize("hello <fox>", handle).ids
    theirs.add_tokens(["<fox>"])
    assert lz.tokenize("hello <fox>", handle).ids == before != theirs.encode("hello <fox>").ids
    assert lz.tokenize("hello <fox>", theirs).ids == theirs.encode("hello <fox>").ids
    assert load_tokenizer(handle) is handle and handle.id[:12] in repr(handle)


def test_encodings_and_processors() -> None:
    same = {identify(encoding()).id for _ in range(2)}
    assert len(same) == 1
    others = [encoding(pattern=LLAMA3), encoding(special={"<|im|>": 301}), encoding(merged="and")]
    assert len(same | {identify(e).id for e in others}) == 4
    plain, cased = model_proto(), model_proto(normalization_rule_name="nmt_nfkc_cf")
    ids = {identify(sentencepiece.SentencePieceProcessor(model_proto=plain, **options)).id
           for options in ({}, {"add_bos": True}, {"reverse": True})}
    assert len(ids) == 3
    assert identify(sentencepiece.SentencePieceProcessor(model_proto=cased)).facts[
        "normalizer_id"] != identify(
        sentencepiece.SentencePieceProcessor(model_proto=plain)).facts["normalizer_id"]
    processor = sentencepiece.SentencePieceProcessor(model_proto=plain)
    before = identify(processor)
    processor.Load(model_proto=model_proto(user_defined_symbols=["<user>"]))
    assert identify(processor).facts["special_tokens_hash"] != before.facts["special_tokens_hash"]


def test_a_file_is_read_again_when_it_changed(tmp_path: Any) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tiny()))
    first = identify(path)
    assert identify(str(path)) is first
    before = lz.tokenize("hello", path).ids
    path.write_text(json.dumps(tiny_tokenizer(merges=("l l",))))
    assert identify(path).id != first.id
    assert lz.tokenize("hello",
                       path).ids == Tokenizer.from_file(str(path)).encode("hello").ids != before
    replaced = tmp_path / "other"
    replaced.write_text(json.dumps(tiny()))
    stat = path.stat()
    os.utime(replaced, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(replaced, path)
    assert identify(path).id == first.id


def test_another_tokenizer_than_the_one_expected() -> None:
    theirs = Tokenizer.from_str(json.dumps(tiny()))
    identity = load_tokenizer(theirs).id
    assert load_tokenizer(theirs, identity=identity).id == identity
    theirs.add_tokens(["fox"])
    with pytest.raises(DataError, match="tokenizer identity must be") as caught:
        load_tokenizer(theirs, identity=identity)
    assert caught.value.codes == (Code.TOKENIZER_MISMATCH,)


def test_few_objects_are_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_identity, "MAX_REMEMBERED", 3)
    text = json.dumps(tiny())
    # an id that Python gives to a new object is no old tokenizer
    for n in range(8):
        theirs = Tokenizer.from_str(text)
        theirs.add_tokens([f"<token{n}>"])
        assert lz.tokenize(f"<token{n}>", theirs).ids == theirs.encode(f"<token{n}>").ids
    assert len(tokenizer_identity._objects) <= 3


def test_the_plan_tells_which_tokenizer() -> None:
    plan = lz.explain("tokenize", "hello", encoding())
    handle = identify(encoding())
    assert (plan.facts["tokenizer_id"] == handle.id
            and plan.facts["vocab_hash"] == handle.facts["vocab_hash"])
    assert plan.facts["tokenizer_kind"] == "tiktoken"
    assert json.dumps(plan.to_json())


# where a text may be cut

@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, CL100K, O200K, LLAMA3.replace("{1,3}", "")])
def test_patterns_in_use_are_known(pattern: str) -> None:
    assert is_known_pattern(pattern)
    assert split_points_from_pattern(pattern, {"<|im|>": 300}).spaces
    assert not split_points_from_pattern(pattern, {"two words": 300}).spaces


def test_the_patterns_tiktoken_publishes_are_known(tmp_path: Any) -> None:
    lines = b"".join(base64.b64encode(bytes((b,))) + b" %d\n" % b for b in range(256))
    for name in ("cl100k_base", "o200k_base"):
        (tmp_path / f"{name}.tiktoken").write_bytes(lines)
        lz.tokenize(PROMPT, tmp_path / f"{name}.tiktoken", cache_prefix=True)
        lz.tokenize(PROMPT + "now", tmp_path / f"{name}.tiktoken", cache_prefix=True)
    assert [c.hits for c in prefix_memories().values()] == [1, 1]


@pytest.mark.parametrize("pattern", [
    "", r"\S+ \S+", r".", r"\w+\s*", GPT2 + r"|\S+\s", r"(?<=a) ?\p{L}+", r"\b\w+", LLAMA3 + "|x y",
    r" ?\p{L}+ ?"])
def test_other_patterns_are_not(pattern: str) -> None:
    assert not is_known_pattern(pattern)


@pytest.mark.parametrize(("change", "spaces"), [
    ({}, True), ({"pre_tokenizer": None}, False),
    ({"pre_tokenizer": {**tiny()["pre_tokenizer"], "use_regex": False}}, False),
    ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, False),
    ({"normalizer": {"type": "NFC"}}, True),
    ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, False),
    ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}},
     False),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
                        "split": False}}, False),
    ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}}, True),
    ({"pre_tokenizer": {"type": "Punctuation", "behavior": "MergedWithNext"}}, False),
    ({"added_tokens": [{**tiny()["added_tokens"][0], "content": "two words"}]}, False),
    ({"added_tokens": [{**tiny()["added_tokens"][0], "rstrip": True}]}, False)])
def test_which_tokenizers_may_be_cut_at_spaces(change: dict[str, Any], spaces: bool) -> None:
    assert split_points_from_json(tiny(**change)).spaces is spaces


# the property: whatever is reused, the result is that of encoding the whole text

NORMALIZERS: dict[str, Any] = {
    "none": None, "nfc": norm.NFC(), "nfd": norm.NFD(), "nfkc": norm.NFKC(),
    "lower": norm.Lowercase(), "strip": norm.Strip(),
    "accents": norm.Sequence([norm.NFD(), norm.StripAccents()]), "bert": norm.BertNormalizer(),
    "nmt": norm.Nmt(), "prepend": norm.Prepend("▁"), "one space": norm.Replace(Regex(" {2,}"), " "),
    "no space": norm.Replace(" ", "▁")}


def split(pattern: str) -> Any:
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"),
                         pre.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Any] = {
    "byte level": pre.ByteLevel(add_prefix_space=False),
    "prefixed": pre.ByteLevel(add_prefix_space=True),
    "no regex": pre.ByteLevel(use_regex=False), "llama3": split(LLAMA3), "o200k": split(O200K),
    "whitespace": pre.Whitespace(), "bert": pre.BertPreTokenizer(), "metaspace": pre.Metaspace(),
    "first": pre.Metaspace(prepend_scheme="first"), "unsplit": pre.Metaspace(split=False),
    "t5": pre.Sequence([pre.WhitespaceSplit(), pre.Metaspace(prepend_scheme="first")]),
    "words": pre.Sequence([pre.WhitespaceSplit(), pre.Digits(True), pre.Punctuation()]),
    "punctuation": pre.Punctuation("merged_with_next"), "none": None}
ADDED: dict[str, list[Any]] = {
    "none": [], "plain": [AddedToken("Foo", normalized=True), AddedToken("<y>", normalized=False)],
    "spaced": [AddedToken("the dog", normalized=False)],
    "right": [AddedToken("<r>", rstrip=True, normalized=False)],
    "left": [AddedToken("<l>", lstrip=True, normalized=False), AddedToken("the", single_word=True)]}


@lru_cache(maxsize=None)
def build_tokenizer(normalizer: str, splitter: str, added: str, trim: str, model: str) -> Tokenizer:
    trainer: Any
    if model == "unigram":
        theirs = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["[UNK]"],
                                          unk_token="[UNK]",
                                          show_progress=False)
    else:
        theirs = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre.ByteLevel.alphabet(),
                                      show_progress=False)
    if NORMALIZERS[normalizer] is not None:
        theirs.normalizer = NORMALIZERS[normalizer]
    if PRE_TOKENIZERS[splitter] is not None:
        theirs.pre_tokenizer = PRE_TOKENIZERS[splitter]
    theirs.train_from_iterator(CORPUS, trainer)
    theirs.add_special_tokens([AddedToken("<|im|>", normalized=False),
                               AddedToken("<|im|>x", normalized=False)])
    theirs.add_tokens(ADDED[added])
    if trim != "no":
        theirs.post_processor = processors.ByteLevel(trim_offsets=True,
                                                     add_prefix_space=trim == "prefixed")
    return theirs


WORDS = ("the", "quick", " ", "  ", "\n", " \n\n", "\t", "hello", ",", ".", "'s", "'", "don't",
         "Foo", "the dog", "<|im|>", "<|im|>x", "<|im", "<y>", "<r>", "<r> ", " <l>", "12", "345",
         "½", "é", "e\u0301", "\u0301", "日本", "👩\u200d👧", "\u00a0", "\u3000", "▁", "\0", "THE", "ﬁ",
         "İ", "\u0600", "\u200b", "\r\n")
ANYTHING = st.text(st.characters(exclude_categories=("Cs",)), max_size=3)
BITS = st.one_of(st.sampled_from(WORDS), st.sampled_from(WORDS), ANYTHING)
PIECES = st.lists(st.tuples(BITS, st.sampled_from(["", " ", " "])), max_size=8).map(
    lambda parts: "".join(word + gap for word, gap in parts))
CUTS = st.one_of(st.integers(0, 100), st.integers(60, 100), st.just(100))
DIALOGUE = st.tuples(PIECES, st.lists(st.tuples(CUTS, PIECES), min_size=1, max_size=4))


def texts_of(dialogue: tuple[str, list[tuple[int, str]]]) -> Iterator[str]:
    """Texts that begin like the one before, up to some place, and go on in their own way."""
    text, turns = "a " + dialogue[0], dialogue[1]
    yield text
    for percent, more in turns:
        text = text[:len(text) * percent // 100] + more
        yield text


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember texts that are long enough to go wrong, not long enough to be slow."""
    monkeypatch.setattr(prefix_formulas, "MIN_CHARACTERS", 6)
    monkeypatch.setattr(prefix_formulas, "KEY_CHARACTERS", 1)


REUSED = {"tokenizers": 0, "tiktoken": 0}


@settings(deadline=None, max_examples=250, suppress_health_check=list(HealthCheck))
@given(dialogue=DIALOGUE, normalizer=st.sampled_from(sorted(NORMALIZERS)),
       splitter=st.sampled_from(sorted(PRE_TOKENIZERS)), added=st.sampled_from(sorted(ADDED)),
       trim=st.sampled_from(["no", "yes", "prefixed"]),
       model=st.sampled_from(["bpe", "unigram"]), parse=st.booleans(), offsets=st.booleans())
def test_reusing_tokens_changes_nothing(short_texts: None, dialogue: Any, normalizer: str,
                                        splitter: str, added: str, trim: str, model: str,
                                        parse: bool, offsets: bool) -> None:
    theirs = Tokenizer.from_str(build_tokenizer(normalizer, splitter, added, trim, model).to_str())
    theirs.encode_special_tokens = not parse
    memory = PrefixMemory(split_points_from_json(json.loads(theirs.to_str())), eager=True)

    def full(text: str) -> Any:
        result = theirs.encode(text, add_special_tokens=False)
        return result.ids, lambda: result.offsets

    for text in texts_of(dialogue):
        got, want = memory.encode(text, parse, offsets,
                                  full), theirs.encode(text, add_special_tokens=False)
        assert got.ids == want.ids
        assert not offsets or got.offsets == want.offsets
    REUSED["tokenizers"] += memory.counts().hits


@settings(deadline=None, max_examples=250, suppress_health_check=list(HealthCheck))
@given(dialogue=DIALOGUE, pattern=st.sampled_from([GPT2, LLAMA3, CL100K, O200K, r"\S+ ?", r"\w+"]),
       parse=st.booleans())
def test_reusing_tokens_of_tiktoken_changes_nothing(short_texts: None, dialogue: Any, pattern: str,
                                                    parse: bool
                                                    ) -> None:
    forget_prefixes()
    theirs = encoding(pattern=pattern, special={"<|im|>": 300, "<|im|>x": 301})
    handle = load_tokenizer(theirs)
    # its rules want long texts
    run = load(next(k for k in KERNELS if k.id == "tiktoken.encode_cached"))
    assert not isinstance(run, Direct)
    want_offsets = pattern not in (r"\S+ ?", r"\w+")
    for text in texts_of(dialogue):
        got = run(text, handle, parse_special=parse, return_offsets=want_offsets)
        want = theirs.encode(text, allowed_special="all") if parse else theirs.encode_ordinary(text)
        assert got.ids == want
        if want_offsets:
            assert [start for start, _ in got.offsets or ()] == theirs.decode_with_offsets(want)[1]
    REUSED["tiktoken"] += sum(c.hits for c in prefix_memories().values())


# reuse

def chat(*turns: str) -> str:
    return "".join(f"<|im|>{turn}\n" for turn in turns)


def test_a_common_prefix_is_encoded_once() -> None:
    for theirs in (encoding(), Tokenizer.from_str(json.dumps(tiny_tokenizer(template=True)))):
        handle = load_tokenizer(theirs)
        for n in range(5):
            text = PROMPT + f"Question {n}: what is it's {n * n}?"
            want = theirs.encode(text)
            got = lz.tokenize(text, handle, cache_prefix=True, return_offsets=True)
            assert got.ids == (want if isinstance(want, list) else want.ids)
            assert isinstance(want, list) or got.offsets == want.offsets
        counts = prefix_memories()[handle.id]
        assert (counts.hits, counts.misses, counts.texts) == (4, 1, 1)
        assert counts.reused > 4 * (len(PROMPT) - 20)


def test_a_conversation_that_grows() -> None:
    theirs = encoding()
    text = PROMPT
    for n in range(12):
        text += f"<|im|>turn {n} " + "of many words and more " * 30
        assert lz.tokenize(text, theirs, cache_prefix=True,
                           parse_special=True).ids == theirs.encode(
            text, allowed_special="all")
    counts = prefix_memories()[identify(theirs).id]
    assert counts.hits == 11 and counts.texts <= prefix_formulas.MAX_TEXTS_PER_KEY
    assert counts.reused > 0.8 * 11 * len(text) / 2


def test_text_without_spaces_is_cut_at_special_tokens() -> None:
    theirs = encoding()
    start = chat(*["日本語" * 40] * 6)
    for end in ("終わり", "はい", "いいえ"):
        text = start + chat(end)
        assert lz.tokenize(text, theirs, cache_prefix=True,
                           parse_special=True).ids == theirs.encode(
            text, allowed_special="all")
    assert prefix_memories()[identify(theirs).id].hits == 2
    # read as text they are no such places
    for end in ("終わり", "はい", "いいえ"):
        text = start + chat(end)
        assert lz.tokenize(text, theirs, cache_prefix=True,
                           parse_special=False).ids == theirs.encode_ordinary(text)
    assert prefix_memories()[identify(theirs).id].hits == 2


def test_a_pattern_nobody_knows_is_reused_for_the_same_text_only() -> None:
    theirs = encoding(pattern=r"\S+ ?|\s")
    for text in (PROMPT, PROMPT + "now", PROMPT):
        assert lz.tokenize(text, theirs, cache_prefix=True).ids == theirs.encode(text)
    counts = prefix_memories()[identify(theirs).id]
    assert (counts.hits, counts.misses) == (1, 2)


def test_a_changed_tokenizer_starts_from_nothing() -> None:
    theirs = Tokenizer.from_str(json.dumps(tiny()))
    before = lz.tokenize(PROMPT + "one", theirs, cache_prefix=True).ids
    theirs.add_tokens(["helpful"])
    after = lz.tokenize(PROMPT + "one", theirs, cache_prefix=True).ids
    assert after == theirs.encode(PROMPT + "one").ids != before
    assert sorted(c.misses for c in prefix_memories().values()) == [1, 1]


def test_texts_with_and_without_special_tokens_are_apart() -> None:
    theirs = Tokenizer.from_str(json.dumps(tiny_tokenizer(template=True)))
    text = PROMPT + "<s> the end"
    for _ in range(2):
        for parse in (True, False):
            for around in (True, False):
                theirs.encode_special_tokens = False
                handle = load_tokenizer(theirs)
                got = lz.tokenize(text, handle, parse_special=parse, add_special_tokens=around,
                                  cache_prefix=True)
                theirs.encode_special_tokens = not parse
                assert got.ids == theirs.encode(text, add_special_tokens=around).ids


def test_truncation_and_padding_come_after() -> None:
    theirs = Tokenizer.from_str(json.dumps(tiny_tokenizer(template=True)))
    handle = load_tokenizer(theirs)
    theirs.enable_truncation(40)
    theirs.enable_padding(length=40, pad_id=7)
    for n in range(3):
        got = lz.tokenize([PROMPT + str(n), "short"], handle, truncation=True, padding="max_length",
                          max_length=40,
                          pad_id=7, cache_prefix=True)
        assert got.ids == [e.ids for e in theirs.encode_batch([PROMPT + str(n), "short"])]


# two models

def test_two_models_in_turn_and_in_threads_never_mix() -> None:
    """Interleaved requests of models that share every text and no tokenizer."""
    tokenizers: list[Any] = [
        encoding("one"), encoding("two", merged="and"), Tokenizer.from_str(json.dumps(tiny())),
        Tokenizer.from_str(json.dumps(tiny_tokenizer(merges=("o u", "Y ou")))),
        encoding("three", pattern=LLAMA3)]
    questions = [PROMPT * (1 + n % 2) + f"Question {n}? " + "and the rest " * (n * 7)
                 for n in range(12)]
    want = [[e if isinstance(e := t.encode(q), list) else e.ids for q in questions]
            for t in tokenizers]
    handles = [load_tokenizer(t) for t in tokenizers]
    assert len({h.id for h in handles}) == len(handles)
    wrong: list[Any] = []
    barrier = threading.Barrier(6)

    def work(seed: int) -> None:
        barrier.wait()
        for step in range(120):
            which, q = (seed + step) % len(handles), (seed * 5 + step * 7) % len(questions)
            source = handles[which] if step % 3 else tokenizers[which]
            try:
                got = lz.tokenize(questions[q], source, cache_prefix=True).ids
            except lz.errors.LayerZeroError as e:
                wrong.append(e)
                return
            if got != want[which][q]:
                wrong.append((which, q))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {h.id for h in handles} <= set(prefix_memories())
    assert all(prefix_memories()[h.id].hits > 50 for h in handles)


# bounds

def pretend(text: str) -> Any:
    return list(range(len(text))), lambda: [(i, i + 1) for i in range(len(text))]


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PrefixMemory(SplitPoints(spaces=True), eager=False)
    for n in range(300):
        memory.encode(f"{n:04} " + "word " * 400, None, False, pretend)
    counts = memory.counts()
    assert counts.texts == prefix_formulas.MAX_TEXTS
    monkeypatch.setattr(prefix_formulas, "MAX_CHARACTERS", 10_000)
    memory.encode("last " + "word " * 400, None, False, pretend)
    assert memory.counts().characters <= 10_000
    assert (memory.encode("last " + "word " * 400, None, False, pretend).ids
            and memory.counts().hits == 1)
    same = PrefixMemory(SplitPoints(), eager=False)
    for n in range(20):
        same.encode("word " * 400 + str(n), None, False, pretend)
    assert same.counts().texts == prefix_formulas.MAX_TEXTS_PER_KEY
    same.encode("x" * 10_000, None, False, pretend)        # longer than a quarter of the room
    same.encode("short", None, False, pretend)
    assert same.counts().texts == prefix_formulas.MAX_TEXTS_PER_KEY


def test_tokenizers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_formulas, "MAX_TOKENIZERS", 3)
    for n in range(8):
        lz.tokenize(PROMPT, encoding(special={"<|im|>": 300 + n}), cache_prefix=True)
    assert len(prefix_memories()) == 3


def test_what_is_used_stays_and_what_is_not_goes() -> None:
    memory = PrefixMemory(SplitPoints(spaces=True), eager=False)
    kept = "kept " + "word " * 200
    memory.encode(kept, None, False, pretend)
    for n in range(200):
        memory.encode(f"{n:04} " + "word " * 200, None, False, pretend)
        memory.encode(kept + str(n), None, False, pretend)
    assert memory.counts().hits == 200


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=10), st.text(max_size=10))
def test_common_length(start: str, one: str, other: str) -> None:
    one_by_one = (i for i, (a, b) in enumerate(zip(start + one, start + other)) if a != b)
    want = next(one_by_one, len(start) + min(len(one), len(other)))
    assert common_length(start + one, start + other) == want
    assert common_length(start + one, start + other, len(start)) == want


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_goes_on_remembering() -> None:
    theirs = encoding()
    lz.tokenize(PROMPT, theirs, cache_prefix=True)
    with prefix_formulas._storing:             # a thread of the parent is storing at this moment
        child = os.fork()
        if child == 0:
            code = 1
            try:
                lz.tokenize("Another prompt. " * 80, theirs, cache_prefix=True)
                code = 0 if prefix_memories()[identify(theirs).id].texts == 2 else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ,
                    reason="the tests above ran in several processes")
def test_the_properties_above_were_about_something() -> None:
    """Runs last: tokens were reused while they were tested."""
    assert REUSED["tokenizers"] > 20 and REUSED["tiktoken"] > 20

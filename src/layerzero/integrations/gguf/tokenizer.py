"""The tokenizer of a GGUF file, in the format of tokenizer.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files.reading import no_panic
from ...models.tokenizers import load_tokenizer
from ...ops.formulas.tokenizer.bpe import BPE_MODEL
from ...ops.formulas.tokenizer.identity import TokenizerHandle, from_json
from ...spec.errors import DataError, LayerZeroError
from ...spec.reason import FOREIGN_ERRORS, shown
from .reader import Texts, gguf_metadata

# Name of a pre-tokenizer in the file -> how it splits the text before pairs are merged.
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CUTS: Mapping[str, Any] = {
    "gpt-2": _BYTES, "default": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                     _BYTES]}}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Name of a pre-tokenizer in a GGUF file -> (pattern of its pieces, normalizer, ignore_merges).
_PATTERNS: Mapping[str, tuple[str, Mapping[str, str] | None, bool]] = {
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST, None, True),
    "qwen2": (_WORDS + r"\p{N}" + _REST, {"type": "NFC"}, False)}
# What llama.cpp calls the models of a tokenizer; transformers takes any other word for one of them.
_MODELS = ("gpt2", "llama", "bert", "t5", "rwkv", "plamo2")
_CONTROL = 3                                   # the type of control tokens


def tokenizer_json(path: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's tokenizer in the format of tokenizer.json."""
    kind, cut = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or not isinstance(cut, str) or cut not in _CUTS:
        raise DataError(
            f"{path}: wanted a byte-pair tokenizer (gpt2) with the pre-tokenizer "
            f"{' or '.join(_CUTS)}, got {kind} with {cut}")
    arrays = (facts.get(f"tokenizer.ggml.{n}") for n in ("tokens", "token_type", "merges"))
    tokens, kinds, merges = (list(a) if isinstance(a, Texts) else a for a in arrays)
    for name, values, item in (("tokens", tokens, str), ("token_type", kinds, int),
                               ("merges", merges, str)):
        if not isinstance(values, list) or not all(isinstance(v, item) for v in values):
            raise DataError(f"{path}: wanted tokenizer.ggml.{name} as an array of {item.__name__}, "
                            f"got {shown(values, limit=80)}")
    assert tokens is not None and kinds is not None and merges is not None
    unpaired = next((pair for pair in merges if " " not in pair[1:]), None)
    if unpaired is not None:
        raise DataError(
            f"{path}: wanted two tokens in each of tokenizer.ggml.merges, got "
            f"{shown(unpaired, limit=80)}")
    added = [{"id": i, "content": token, "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False}
             for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == _CONTROL]
    model = {**BPE_MODEL, "vocab": {token: i for i, token in enumerate(tokens)},
             "merges": [pair.split(" ", 1) for pair in merges]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None, "pre_tokenizer": _CUTS[cut], "post_processor": None,
            "decoder": _BYTES, "model": model}


def gguf_tokenizer(path: str | os.PathLike[str]) -> TokenizerHandle:
    """Return the tokenizer of a GGUF file, without reading its weights."""
    data = tokenizer_data(Path(path), gguf_metadata(path))
    return from_json(json.dumps(data), str(path)) if isinstance(data, dict) else data


def tokenizer_data(file: Path, facts: Mapping[str, Any]) -> dict[str, Any] | TokenizerHandle:
    """Return the tokenizer.json of a file, or the tokenizer that transformers made of it."""
    kind, cut = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre", "default")
    if not isinstance(kind, str) or not isinstance(cut, str):
        raise DataError(
            f"{file}: wanted the names of a tokenizer and its pre-tokenizer, got "
            f"{shown(kind, limit=80)} and {shown(cut, limit=80)}")
    if kind not in _MODELS:
        raise DataError(f"{file}: wanted a tokenizer of the model {' or '.join(_MODELS)}, got "
                        f"{shown(kind, limit=80)} with the pre-tokenizer {shown(cut, limit=80)}")
    if kind != "gpt2":
        return _convert_with_transformers(file, f"{kind!r} with the pre-tokenizer {cut!r}")
    if cut not in _PATTERNS:
        try:
            data = tokenizer_json(file, facts)
        except DataError:
            return _convert_with_transformers(file, f"{kind!r} with the pre-tokenizer {cut!r}")
    else:
        pattern, normalizer, ignore_merges = _PATTERNS[cut]
        data = tokenizer_json(file, {**facts, "tokenizer.ggml.pre": "default"})
        data["normalizer"], data["model"]["ignore_merges"] = normalizer, ignore_merges
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
             "invert": False},
            {**data["decoder"], "use_regex": False}]}
    _add_post_processor(file, data, facts)
    return data


def _add_post_processor(path: Path, data: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Add the bos and eos tokens that the file puts around each text."""
    tokens = facts["tokenizer.ggml.tokens"]
    ids = {side: facts.get(f"tokenizer.ggml.{side}_token_id") for side in ("bos", "eos")
           if facts.get(f"tokenizer.ggml.add_{side}_token")}
    ids = {side: i for side, i in ids.items() if i is not None}
    invalid = next((i for i in ids.values() if type(i) is not int or not 0 <= i < len(tokens)),
                   None)
    if invalid is not None:
        raise DataError(
            f"{path}: wanted a token that is added to each text by an id below {len(tokens)}, "
            f"got {shown(invalid, limit=80)}")
    added = {side: tokens[i] for side, i in ids.items()}
    if added:
        single: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
        if "bos" in added:
            single.insert(0, {"SpecialToken": {"id": added["bos"], "type_id": 0}})
        if "eos" in added:
            single.append({"SpecialToken": {"id": added["eos"], "type_id": 0}})
        data["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single,
                                  "special_tokens": {t: {"id": t, "ids": [ids[side]], "tokens": [t]}
                                                     for side, t in added.items()}}


def _convert_with_transformers(path: Path, kind: str) -> TokenizerHandle:
    """Let transformers convert the tokenizer: it knows more kinds, and is slow."""
    try:
        from transformers import AutoTokenizer
        read = no_panic(AutoTokenizer.from_pretrained)
        return load_tokenizer(read(str(path.parent), gguf_file=path.name, local_files_only=True,
                                   trust_remote_code=False))
    except LayerZeroError:
        raise
    except FOREIGN_ERRORS as e:
        raise DataError(
            f"{path}: wanted a byte-pair tokenizer (gpt2), or one that transformers converts, got "
            f"{kind}: {e}") from e

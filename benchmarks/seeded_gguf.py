"""A Llama with seeded weights as a GGUF file: for timing, where no real one is at hand.

    python benchmarks/seeded_gguf.py 1b model.gguf

Formats are those that llama.cpp's quantizer gives the tensors of a Llama: of 1b in Q4_K_M, of
smollm2 in Q4_1. Rows are drawn from a few dozen that lz.quantize quantized, so a file takes
seconds; it has no tokenizer.
"""

from __future__ import annotations

import argparse
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

POOL = 48                                      # different rows of a width and format
ALIGNMENT = 32
TYPES = {"f32": 0, "q4_1": 3, "q8_0": 8, "q4_k": 12, "q6_k": 14}
CODES = {int: (4, "<I"), float: (6, "<f")}     # of metadata


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    formats: tuple[str, str, str]              # of the embedding, of matrices, of larger ones

    def format(self, layer: int, name: str) -> str:
        """Value and down get more bits in the first and last eighth, and in every third layer."""
        n, some = self.layers, self.layers // 8
        more = layer < some or layer >= 7 * n // 8 or (layer - some) % 3 == 2
        return self.formats[2 if more and name in ("attn_v", "ffn_down") else 1]


SHAPES = {"1b": Shape(2048, 16, 32, 8, 8192, 128256, ("q6_k", "q4_k", "q6_k")),
          "smollm2": Shape(576, 30, 9, 3, 1536, 49152, ("q8_0", "q4_1", "q4_1")),
          "tiny": Shape(256, 3, 4, 2, 512, 512, ("q6_k", "q4_k", "q6_k"))}


def matrices(s: Shape) -> dict[str, tuple[int, int, str]]:
    """Return rows, width and format of every matrix; the embedding is the head too."""
    kv = s.hidden // s.heads * s.kv_heads
    sizes = {"attn_q": (s.hidden, s.hidden), "attn_k": (kv, s.hidden), "attn_v": (kv, s.hidden),
             "attn_output": (s.hidden, s.hidden), "ffn_gate": (s.inner, s.hidden),
             "ffn_up": (s.inner, s.hidden), "ffn_down": (s.hidden, s.inner)}
    return {"token_embd.weight": (s.vocab, s.hidden, s.formats[0])} | {
        f"blk.{i}.{name}.weight": (*size, s.format(i, name))
        for i in range(s.layers) for name, size in sizes.items()}


def metadata(s: Shape, name: str) -> dict[str, Any]:
    return {"general.architecture": "llama", "general.name": f"seeded-{name}",
            "general.alignment": ALIGNMENT, "tokenizer.ggml.model": "no_vocab",
            **{f"llama.{key}": value for key, value in {
                "embedding_length": s.hidden, "block_count": s.layers, "vocab_size": s.vocab,
                "attention.head_count": s.heads, "attention.head_count_kv": s.kv_heads,
                "feed_forward_length": s.inner, "context_length": 4096,
                "rope.dimension_count": s.hidden // s.heads, "rope.freq_base": 500000.0,
                "attention.layer_norm_rms_epsilon": 1e-5}.items()}}


def write_string(out: BinaryIO, text: str) -> None:
    out.write(struct.pack("<Q", len(text)) + text.encode())


def write_model(path: Path, name: str, seed: int = 0) -> None:
    import layerzero as lz

    s, gen = SHAPES[name], torch.Generator().manual_seed(seed)
    found, pools = matrices(s), {}  # type: ignore[var-annotated]
    for _, width, format in found.values():
        if (width, format) not in pools:
            drawn = torch.randn(POOL, width, generator=gen) * width ** -0.5
            pools[width, format] = lz.quantize(drawn, format=format)
    norms = ["output_norm.weight", *(f"blk.{i}.{n}_norm.weight" for i in range(s.layers)
                                     for n in ("attn", "ffn"))]
    with path.open("wb") as out:
        values = metadata(s, name)
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(found) + len(norms), len(values)))
        for key, value in values.items():
            write_string(out, key)
            if isinstance(value, str):
                out.write(struct.pack("<I", 8))
                write_string(out, value)
            else:
                number, layout = CODES[type(value)]
                out.write(struct.pack("<I", number) + struct.pack(layout, value))
        offset = 0
        for key, (rows, width, format) in found.items():
            write_string(out, key)
            out.write(struct.pack("<IQQIQ", 2, width, rows, TYPES[format], offset))
            offset += padded(rows * pools[width, format].shape[1])
        for key in norms:
            write_string(out, key)
            out.write(struct.pack("<IQIQ", 1, s.hidden, TYPES["f32"], offset))
            offset += padded(4 * s.hidden)
        out.write(bytes(padded(out.tell()) - out.tell()))
        for rows, width, format in found.values():
            write_tensor(out, pools[width, format][torch.randint(POOL, (rows,), generator=gen)])
        for _ in norms:
            write_tensor(out, 1 + 0.1 * torch.randn(s.hidden, generator=gen))


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def write_tensor(out: BinaryIO, data: torch.Tensor) -> None:
    out.write(data.numpy().tobytes() + bytes(padded(data.nbytes) - data.nbytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    write_model(given.path, given.shape)
    print(f"{given.path}: {given.path.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()

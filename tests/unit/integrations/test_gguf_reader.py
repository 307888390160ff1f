"""The reader of GGUF files against files that are right, damaged and hostile: a typed error in
bounded time and memory, or a model that runs.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.integrations.gguf import chat_template
from layerzero.integrations.gguf.reader import read_gguf_file
from layerzero.ops.formulas.ggml import quantize_blocks
from layerzero.spec.errors import DataError, LayerZeroError

KINDS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    if isinstance(content, (str, bytes)):
        return struct.pack("<I", 8) + text(content)
    if isinstance(content, list):
        number, form = (8, "") if isinstance(content[0], str) else KINDS[type(content[0])]
        items = b"".join(text(g) if number == 8 else struct.pack("<" + form, g) for g in content)
        return struct.pack("<IIQ", 9, number, len(content)) + items
    number, form = KINDS[type(content)]
    return struct.pack("<I" + form, number, content)


def header(metadata: dict[str, Any], infos: list[tuple[Any, ...]], *, version: int = 3,
           pairs: int | None = None, tensors: int | None = None) -> bytes:
    """`infos` are (name, dimensions as the file has them, type, offset)."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(infos) if tensors is None else tensors,
                                  len(metadata) if pairs is None else pairs)]
    parts += [text(k) + value(v) for k, v in metadata.items()]
    parts += [text(n) + struct.pack(f"<I{len(d)}QIQ", len(d), *d, kind, offset)
              for n, d, kind, offset in infos]
    return b"".join(parts)


def file(metadata: dict[str, Any], tensors: dict[str, tuple[int, torch.Tensor, tuple[int, ...]]],
         alignment: int = 32) -> bytes:
    infos, data = [], b""
    for name, (kind, stored, shape) in tensors.items():
        infos.append((name, shape[::-1], kind, len(data)))
        data += stored.numpy().tobytes()
        data += bytes(-len(data) % alignment)
    head = header(metadata, infos)
    return head + bytes(-len(head) % alignment) + data


def model_file() -> bytes:
    """A Qwen3 with two experts in a layer, its matrices in q8_0."""
    gen = torch.Generator().manual_seed(0)
    sizes = {"embedding_length": 32, "attention.head_count": 2, "attention.head_count_kv": 1,
             "attention.key_length": 32, "block_count": 1, "feed_forward_length": 32,
             "expert_feed_forward_length": 32, "expert_count": 2, "expert_used_count": 1,
             "context_length": 32, "attention.layer_norm_rms_epsilon": 1e-5}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (8, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (64, 32), "blk.0.attn_k": (32, 32), "blk.0.attn_v": (32, 32),
        "blk.0.attn_output": (32, 64), "blk.0.attn_q_norm": (32,), "blk.0.attn_k_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.ffn_gate_inp": (2, 32), "blk.0.ffn_gate_exps": (2, 32, 32),
        "blk.0.ffn_up_exps": (2, 32, 32), "blk.0.ffn_down_exps": (2, 32, 32)}
    tensors = {}
    for name, shape in shapes.items():
        w = torch.randn(shape, generator=gen) / 6
        plain = len(shape) == 1 or name.endswith("inp")
        tensors[f"{name}.weight"] = (F32 if plain else Q8_0,
                                     w if plain else quantize_blocks(w, "q8_0"), shape)
    return file({"general.architecture": "qwen3moe",
                 **{f"qwen3moe.{k}": v for k, v in sizes.items()},
                 "tokenizer.chat_template": "{{ messages[0].content }}"}, tensors)


def test_metadata_and_tensors(tmp_path):
    blocks = quantize_blocks(torch.randn(3, 64), "q8_0")
    half = torch.arange(6, dtype=torch.float16).view(2, 3)
    metadata = {"a": 7, "b": True, "c": 0.5, "d": "日本", "e": [1, 2, 3], "f": ["x", ""]}
    path = tmp_path / "m.gguf"
    path.write_bytes(file({**metadata, "general.alignment": 64},
                          {"q": (Q8_0, blocks, (3, 64)), "h": (1, half, (2, 3))}, 64))
    gguf = read_gguf_file(path)
    assert {k: gguf.metadata[k] for k in metadata} == metadata
    assert torch.equal(gguf.blocks("q"), blocks) and torch.equal(gguf.floats("h"), half)
    assert gguf.tensors["q"].shape == (3, 64) and gguf.tensors["q"].type == "q8_0"
    assert gguf.blocks("q").data_ptr() == gguf.blocks("q").data_ptr()        # no copy
    gguf.blocks("q").zero_()                              # copy on write: the file stays
    assert torch.equal(read_gguf_file(path).blocks("q"), blocks)
    with pytest.raises(DataError, match="wanted the tensor x"):
        gguf.blocks("x")
    with pytest.raises(DataError, match="wanted floats"):
        gguf.floats("q")


ONE = [("t", (4,), F32, 0)]
HOSTILE = {
    "another version": (header({}, [], version=1), "version 2 or 3"),
    "big-endian": (header({}, [], version=3 << 24), "big-endian"),
    "many pairs": (header({}, [], pairs=1 << 60), "pairs of metadata"),
    "many tensors": (header({}, [], tensors=1 << 60), "tensors in"),
    "a key twice": (header({"a": 1}, [], pairs=2) + text("a") + value(1), "'a' twice"),
    "a long string": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "pairs|string"),
    "invalid UTF-8": (header({"a": b"\xff\xfe"}, []), "no UTF-8"),
    "invalid UTF-8 in an array": (
        header({}, [], pairs=1) + text("a") + struct.pack("<IIQ", 9, 8, 1) + text(b"\xff"),
        "no UTF-8"),
    "a huge array": (header({}, [], pairs=1) + text("a") + struct.pack("<IIQ", 9, 0, 1 << 62),
                     "items of an array"),
    "an unknown type": (header({}, [], pairs=1) + text("a") + struct.pack("<IQ", 77, 0), "type 77"),
    "nested arrays": (header({}, [], pairs=1) + text("a") + struct.pack("<I", 9)
                      + struct.pack("<IQ", 9, 1) * 9 + bytes(64), "nested"),
    "no dimensions": (header({}, [("t", (), F32, 0)]) + bytes(64), "0 dimensions"),
    "many dimensions": (header({}, [("t", (1,) * 5, F32, 0)]) + bytes(64), "5 dimensions"),
    "a size of 0": (header({}, [("t", (0, 4), F32, 0)]) + bytes(64), "no size of 0"),
    "sizes that overflow": (header({}, [("t", (1 << 62, 1 << 62), F32, 0)]) + bytes(64), "F|f32"),
    "half a block": (header({}, [("t", (33,), Q8_0, 0)]) + bytes(128), "multiple of 32"),
    "an unknown format": (header({}, [("t", (4,), 999, 0)]) + bytes(64), "type 999"),
    "an offset outside": (header({}, [("t", (4,), F32, 1 << 40)]) + bytes(64), "from byte"),
    "an offset in between": (header({}, [("t", (4,), F32, 4)]) + bytes(128), "aligned to 32"),
    "weights cut off": (header({}, ONE) + bytes(20), "from byte"),
    "an alignment of 0": (header({"general.alignment": 0}, ONE) + bytes(128), "power of two"),
    "an alignment of 3": (header({"general.alignment": 3}, ONE) + bytes(128), "power of two"),
    "an alignment that is a text": (header({"general.alignment": "8"}, ONE) + bytes(64), "power"),
    "overlapping tensors": (header({}, [("t", (16,), F32, 0), ("u", (4,), F32, 32)]) + bytes(256),
                            "lies over"),
    "a tensor twice": (header({}, [*ONE, ("t", (4,), F32, 32)]) + bytes(256), "twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_before_anything_is_allocated(name, tmp_path):
    content, message = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message) as raised:
            read_gguf_file(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "m.gguf" in str(raised.value)


def test_what_is_no_file(tmp_path):
    for content in (b"", b"GG", b"nothing of the sort"):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(DataError, match="wanted a GGUF file"):
            read_gguf_file(tmp_path / "m.gguf")
    for path in (tmp_path, tmp_path / "absent", "a\0b"):
        with pytest.raises(DataError, match="wanted"):
            read_gguf_file(path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")           # nobody writes: it must not be waited for
        with pytest.raises(DataError, match="not a regular file"):
            read_gguf_file(tmp_path / "pipe")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Cut short, bytes changed, or a number put in the place of another."""
    how, end = rng.randrange(4), min(len(content), 1500)
    if how == 0:
        return content[:rng.randrange(len(content))]
    at = rng.randrange(4, end - 8)
    if how == 1:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1:]
    number = rng.choice((0, 1, 3, 7, 255, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    form = "<Q" if how == 2 else "<I"
    raw = struct.pack(form, number & ((1 << 8 * struct.calcsize(form)) - 1))
    return content[:at] + raw + content[at + len(raw):]


def test_a_mutated_model_is_refused_or_runs(tmp_path):
    whole, path, outcomes = model_file(), tmp_path / "m.gguf", {True: 0, False: 0}
    path.write_bytes(whole)
    assert lz.load_gguf(path, activations="none").logits([1, 2, 3]).shape == (1, 3, 8)
    for i in range(300):
        path.write_bytes(mutated(whole, random.Random(i)))
        try:
            model = lz.load_gguf(path, activations="none")
            if i % 5 == 0:
                model.logits([0])
            outcomes[True] += 1
        except LayerZeroError as e:
            assert str(e).strip()
            outcomes[False] += 1
    assert outcomes[False] > 100 and outcomes[True] > 5, outcomes


def test_a_template_that_writes_too_much(monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.setattr(chat_template, "MAX_OUTPUT", 1000)
    for template, message in (("{% for a in range(9999) %}{{ 'x' * 10 }}{% endfor %}", "more than"),
                              ("{{ raise_exception('roles must alternate') }}", "must alternate")):
        with pytest.raises(DataError, match=message):
            chat_template.render(template, [("user", "hello")], "a model")
    text = chat_template.render("{{ bos_token }}|{{ eos_token }}", [("user", "x")], "m",
                                {"bos": "<s>", "eos": "</s>"})
    assert text == "<s>|</s>"

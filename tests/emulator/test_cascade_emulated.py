"""cascade.cu in the emulator keeps the contract of paged attention, and reads shared keys once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.attention import grouped
from layerzero.ops import paged_attention
from layerzero.verify.kernel.contract import check_case

from .run import COMPILER, Kernel, on_cpu

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

CONFIG, BLOCKS = grouped.cascade_config, 6
SHAPE = {"hq": 8, "hkv": 2, "d": 64}            # one compilation serves all cases
PAGED: tuple[dict[str, Any], ...] = (
    {"context": (100, 3, 0, 77), "lse": True},
    {"context": (100, 49), "lengths_q": (3, 2), "window": 20},
    {"context": (100, 90, 70), "lengths_q": (3, 2, 1), "order": "shared", "lse": True},
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    monkeypatch.setattr(grouped, "cascade_config",
                        lambda *facts: grouped.Config(2, 2, 3, 32, BLOCKS))
    monkeypatch.setattr(grouped, "PLANNERS", 64)
    grouped._compiled_cascade.cache_clear()
    yield
    grouped._compiled_cascade.cache_clear()


def test_contract() -> None:
    kernel = on_cpu("cuda.paged_attention_shared")
    results = [check_case(kernel, {**SHAPE, **case}, "bfloat16", "cpu") for case in PAGED]
    assert [str(r) for r in results if r.status != "passed"] == []


def shared_pages(context: tuple[int, ...], runs: tuple[tuple[int, int, int], ...]) -> Any:
    """A paged call in which sequences [first, last) begin with the same `pages` pages, for each
    (first, last, pages)."""
    call = paged_attention.inputs(context, causal=True, dtype=torch.bfloat16, **SHAPE)
    for first, last, pages in runs:
        call["block_table"][first:last, :pages] = call["block_table"][first, :pages].clone()
    names = ("query", "key_cache", "value_cache", "block_table", "context_lens")
    return [call[name] for name in names]


def planned(args: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What the plan made of the sequences: begin, end, table row, first sequence and sequences of
    each entry, its units joined."""
    spaces: list[Tensor] = []
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        spaces.append(empty(*args, **kwargs))
        return spaces[-1]

    monkeypatch.setattr(torch, "empty", watched)
    got = grouped.paged_attention_shared(*args)
    monkeypatch.undo()
    want = paged_attention.reference(*args, is_causal=True)
    torch.testing.assert_close(got.float(), want.float(), atol=1e-2, rtol=2e-2)
    sequences = len(args[4])
    room = BLOCKS // SHAPE["hkv"] + 1 + 2 * sequences
    words = spaces[-1].view(torch.int32)
    count = int(words[8 * room])
    entries: list[tuple[int, ...]] = []
    for begin, end, *rest in words[:8 * count].view(-1, 8)[:, :5].tolist():
        if entries and entries[-1][1:] == (begin, *rest):
            begin = entries.pop()[0]
        entries.append((begin, end, *rest))
    return entries


def test_leading_pages_in_common_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of sequences; the third shares less with the first two, but three reads become one."""
    lengths = (200, 180, 140, 190, 64, 77)
    entries = planned(shared_pages(lengths, ((0, 3, 5), (3, 6, 4), (0, 2, 8))), monkeypatch)
    assert entries == [(0, 80, 0, 0, 3), (80, 200, 0, 0, 1), (80, 180, 1, 1, 1), (80, 140, 2, 2, 1),
                       (0, 64, 3, 3, 3), (64, 190, 3, 3, 1), (64, 77, 5, 5, 1)]


def test_without_common_pages_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = planned(shared_pages((70, 33, 100), ((1, 3, 1),)), monkeypatch)
    assert entries == [(0, n, i, i, 1) for i, n in enumerate((70, 33, 100))]   # one page: too little


@pytest.mark.parametrize("blocks, weight", [(1, 96), (7, 0), (80, 1000)])
def test_wherever_the_pages_are_cut(blocks: int, weight: int,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "cascade_config",
                        lambda *facts: grouped.Config(2, 2, 3, 32, blocks, weight))
    args = shared_pages((200, 180, 140, 64), ((0, 3, 5),))
    out = grouped.paged_attention_shared(*args)
    want = paged_attention.reference(*args, is_causal=True)
    torch.testing.assert_close(out.float(), want.float(), atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("machine", [compiler.Machine(132), compiler.Machine(48, 99 << 10)])
def test_every_configuration_fits_the_machine(machine: compiler.Machine) -> None:
    for dim in (64, 128, 256):
        config = CONFIG(dim, machine)
        assert grouped.cascade_shared_bytes(dim, config) <= machine.shared
        assert config.splits >= machine.processors
        assert config.rows >= (16 if dim > 128 else 32)      # of one item, as the rules allow

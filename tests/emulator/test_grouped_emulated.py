"""grouped.cu in the emulator keeps the contracts of grouped and paged attention, and reads shared
keys once.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.cuda import compiler, grouped
from layerzero.ops import paged_attention
from layerzero.verify.kernel.contract import check_case

from .run import COMPILER, Kernel, on_cpu

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

CONFIG = grouped.config
SHAPE = {"hq": 8, "hkv": 2, "d": 64}            # one compilation serves all cases
# query rows and key rows of no item, items that see no key, ranges that begin within others
ITEMS = ((6, 6, 0, 40), (0, 5, 0, 21), (26, 1, 13, 90), (12, 4, 200, 3), (20, 0, 0, 9),
         (17, 2, 4, 0), (22, 1, 60, 80))
GROUPED: tuple[dict[str, Any], ...] = (
    # 16 items of 8 rows each: two passes, and all tiles of a warp
    {"items": tuple((2 * i, 2, 0, 9 * (i + 1)) for i in range(16)), "lse": True},
    {"items": ITEMS, "lse": True}, {"items": ITEMS, "causal": False, "window": (9, 5)},
    {"items": ITEMS[:3], "window": (6, 0), "extreme": True},
)
PAGED: tuple[dict[str, Any], ...] = (
    {"context": (100, 3, 0, 77), "lse": True},
    {"context": (100, 49), "lengths_q": (3, 2), "window": 20},
    {"context": (100, 90, 70), "lengths_q": (3, 2, 1), "order": "shared", "lse": True},
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    monkeypatch.setattr(grouped, "config", lambda *facts: grouped.Config(2, 4, 3, 32, 3))
    grouped._compiled.cache_clear()
    yield
    grouped._compiled.cache_clear()


@pytest.mark.parametrize("name, cases", [("cuda.grouped_attention_decode", GROUPED),
                                         ("cuda.paged_attention_shared", PAGED)])
def test_contract(name: str, cases: tuple[dict[str, Any], ...]) -> None:
    results = [check_case(on_cpu(name), {**SHAPE, **case}, "bfloat16", "cpu") for case in cases]
    assert [str(r) for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("splits, weight", [(1, 96), (7, 0), (40, 1000)])
def test_wherever_the_keys_are_cut(splits: int, weight: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(9, 8, 64).bfloat16()
    key, value = (torch.randn(200, 2, 64).bfloat16() for _ in range(2))
    items = torch.tensor([(i, 1, 7 * (i % 3), 20 * (i + 1)) for i in range(9)], dtype=torch.int32)
    cut = grouped.grouped(query, key, value, items, 1, 180, return_lse=True,
                          chosen=grouped.Config(2, 4, 3, 32, splits, weight))
    for (out, lse), row in zip(zip(*cut), range(9)):
        begin = 7 * (row % 3)
        k, v = (t[begin:begin + 20 * (row + 1)].float().repeat_interleave(4, 1)
                for t in (key, value))
        scores = torch.einsum("hd,khd->hk", query[row].float(), k) / 8
        torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out.float(), torch.einsum("hk,khd->hd", scores.softmax(-1), v),
                                   atol=8e-3, rtol=2e-2)


def shared_pages(context: tuple[int, ...], runs: tuple[tuple[int, int, int], ...]) -> Any:
    """A paged call in which sequences [first, last) begin with the same `pages` pages, for each
    (first, last, pages)."""
    call = paged_attention.inputs(context, causal=True, dtype=torch.bfloat16, **SHAPE)
    for first, last, pages in runs:
        call["block_table"][first:last, :pages] = call["block_table"][first, :pages].clone()
    names = ("query", "key_cache", "value_cache", "block_table", "context_lens")
    return [call[name] for name in names]


def planned(args: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The items that the plan wrote: first, n, start, end, diagonal, row, shift, unused."""
    spaces: list[Tensor] = []
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        spaces.append(empty(*args, **kwargs))
        return spaces[-1]

    monkeypatch.setattr(torch, "empty", watched)
    got = grouped.paged(*args)
    monkeypatch.undo()
    want = paged_attention.reference(*args, is_causal=True)
    torch.testing.assert_close(got.float(), want.float(), atol=1e-2, rtol=2e-2)
    return spaces[-1].view(torch.int32)[:8 * 2 * len(args[4])].view(-1, 2, 8)


def test_leading_pages_in_common_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of sequences; the third shares less with the first two, but three reads become one."""
    lengths = (200, 180, 140, 190, 64, 77)
    items = planned(shared_pages(lengths, ((0, 3, 5), (3, 6, 4), (0, 2, 8))), monkeypatch)
    shared = [n * (end - start) for _, n, start, end, *_ in items[:, 0].tolist()]
    assert shared == [80, 80, 80, 64, 64, 64]
    assert [end - start for _, _, start, end, *_ in items[:, 1].tolist()] == [
        length - common for length, common in zip(lengths, shared)]
    starts = items[:, 0, 2].tolist()
    assert starts[0] == starts[1] == starts[2] != starts[3] == starts[4] == starts[5]
    assert items[:, 0, 5].tolist() == [0, 0, 0, 3, 3, 3]


def test_without_common_pages_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    items = planned(shared_pages((70, 33, 100), ((1, 3, 1),)), monkeypatch)
    assert items[:, 0, 1].tolist() == [0, 0, 0]    # one page is too little


@pytest.mark.parametrize("machine", [compiler.Machine(132), compiler.Machine(48, 99 << 10)])
def test_every_configuration_fits_the_machine(machine: compiler.Machine) -> None:
    for rows, items, kv_heads, keys, dim in itertools.product((1, 16), (1, 64, 1000), (1, 8, 64),
                                                              (1, 100_000), (64, 128, 256)):
        made = CONFIG(rows, items, kv_heads, keys, dim, machine)
        assert grouped.shared_bytes(dim, made) <= machine.shared
        assert made.splits >= 1 and made.rows >= rows

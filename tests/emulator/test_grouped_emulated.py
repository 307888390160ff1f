"""grouped.cu in the emulator keeps the contract of grouped attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.attention import grouped
from layerzero.verify.kernel.contract import check_case

from .run import COMPILER, Kernel, on_cpu

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

CONFIG = grouped.grouped_config
SHAPE = {"hq": 8, "hkv": 2, "d": 64}            # one compilation serves all cases
# query rows and key rows of no item, items that see no key, ranges that begin within others
ITEMS = ((6, 6, 0, 40), (0, 5, 0, 21), (26, 1, 13, 90), (12, 4, 200, 3), (20, 0, 0, 9),
         (17, 2, 4, 0), (22, 1, 60, 80))
GROUPED: tuple[dict[str, Any], ...] = (
    # 16 items of 8 rows each: two passes, and all tiles of a warp
    {"items": tuple((2 * i, 2, 0, 9 * (i + 1)) for i in range(16)), "lse": True},
    {"items": ITEMS, "lse": True}, {"items": ITEMS, "causal": False, "window": (9, 5)},
    {"items": ITEMS[:3], "window": (6, 0), "extreme": True},
    {"items": tuple((2 * i, 2, 0, 5 * (i + 1)) for i in range(20)), "softcap": 3.0},
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    monkeypatch.setattr(grouped, "grouped_config", lambda *facts: grouped.Config(2, 4, 3, 32, 3))
    grouped._compiled_grouped.cache_clear()
    yield
    grouped._compiled_grouped.cache_clear()


# grouped.cu; grouped_wgmma.cu: two groups of four warps with two products each, as rows and as keys
@pytest.mark.parametrize("config", [grouped.Config(2, 4, 3, 32, 3),
                                    grouped.Config(8, 4, 2, 128, 3, wgmma=True)])
def test_contract(config: grouped.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "grouped_config", lambda *facts: config)
    kernel = on_cpu("cuda.grouped_attention_decode")
    results = [check_case(kernel, {**SHAPE, **case}, "bfloat16", "cpu") for case in GROUPED
               if config.wgmma or "softcap" not in case]
    assert [str(r) for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("splits, weight", [(1, 96), (7, 0), (40, 1000)])
def test_wherever_the_keys_are_cut(splits: int, weight: int,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "grouped_config",
                        lambda *facts: grouped.Config(2, 4, 3, 32, splits, weight))
    torch.manual_seed(0)
    query = torch.randn(9, 8, 64).bfloat16()
    key, value = (torch.randn(200, 2, 64).bfloat16() for _ in range(2))
    items = torch.tensor([(i, 1, 7 * (i % 3), 20 * (i + 1)) for i in range(9)], dtype=torch.int32)
    cut = grouped.grouped_attention_decode(query, key, value, items, 1, 180, return_lse=True)
    for (out, lse), row in zip(zip(*cut), range(9)):
        begin = 7 * (row % 3)
        k, v = (t[begin:begin + 20 * (row + 1)].float().repeat_interleave(4, 1)
                for t in (key, value))
        scores = torch.einsum("hd,khd->hk", query[row].float(), k) / 8
        torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out.float(), torch.einsum("hk,khd->hd", scores.softmax(-1), v),
                                   atol=8e-3, rtol=2e-2)


@pytest.mark.parametrize("machine", [compiler.Machine(132), compiler.Machine(48, 99 << 10)])
def test_every_configuration_fits_the_machine(machine: compiler.Machine) -> None:
    for rows, items, kv_heads, keys, dim in itertools.product((1, 16), (1, 64, 1000), (1, 8, 64),
                                                              (1, 100_000), (64, 128, 256)):
        config = CONFIG(rows, items, kv_heads, keys, dim, machine)
        assert grouped.grouped_shared_bytes(dim, config) <= machine.shared
        assert config.splits >= 1 and config.rows >= rows

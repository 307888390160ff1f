"""decode.cu in the emulator keeps the contracts of attention and paged attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.attention import decode
from layerzero.verify.kernel.contract import check_case

from .run import COMPILER, Kernel, on_cpu

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

CONFIG = decode.config
DENSE: tuple[dict[str, Any], ...] = (
    {"b": 2, "hq": 8, "hkv": 2, "sq": 1, "sk": 300, "d": 64, "lse": True},
    {"b": 1, "hq": 8, "hkv": 2, "sq": 8, "sk": 90, "d": 64, "causal": True, "align": "bottom_right",
     "lse": True},
    {"b": 1, "hq": 4, "hkv": 1, "sq": 3, "sk": 200, "d": 64, "window": (40, -1), "causal": True,
     "align": "bottom_right"},
    {"b": 1, "hq": 8, "hkv": 2, "sq": 1, "sk": 1, "d": 64},
)
PAGED: tuple[dict[str, Any], ...] = (
    {"context": (100, 3), "hq": 8, "hkv": 2, "d": 64, "lse": True},
    {"context": (100, 9), "lengths_q": (3, 2), "hq": 4, "hkv": 2, "d": 64, "causal": True,
     "window": 20},
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    monkeypatch.setattr(decode, "config", lambda *facts: decode.Config(2, 3, 2))
    decode._compiled.cache_clear()
    yield
    decode._compiled.cache_clear()


@pytest.mark.parametrize("name, cases",
                         [("cuda.attention_decode", DENSE), ("cuda.paged_attention_decode", PAGED)])
def test_contract(name: str, cases: tuple[dict[str, Any], ...]) -> None:
    results = [check_case(on_cpu(name), case, "bfloat16", "cpu") for case in cases]
    assert [str(r) for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("config", [decode.Config(2, 1, 3), decode.Config(2, 2, 1)])
def test_other_clusters(config: decode.Config) -> None:
    """Of a number that does not divide the columns, and of one block, which is none."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, s, 64).bfloat16()
                         for n, s in ((4, 2), (2, 150), (2, 150)))
    out, lse = decode.dense(query, key, value, True, return_lse=True, chosen=config)
    mask = torch.ones(2, 150, dtype=torch.bool).tril(148)
    scores = (query.float() / 8) @ key.float().repeat_interleave(2, 1).transpose(2, 3)
    scores = scores.masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
    want = scores.softmax(-1) @ value.float().repeat_interleave(2, 1)
    torch.testing.assert_close(out.float(), want, atol=5e-3, rtol=1e-2)


def test_one_expanded_head_is_read_once() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, s, 64).half() for n, s in ((8, 1), (1, 70), (1, 70)))
    expanded = decode.dense(query, key.expand(1, 8, 70, 64), value.expand(1, 8, 70, 64))
    want = torch.nn.functional.scaled_dot_product_attention(query.float(), key.float(),
                                                            value.float(), enable_gqa=True)
    torch.testing.assert_close(expanded.float(), want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("machine", [compiler.Machine(132), compiler.Machine(48, 99 << 10)])
def test_every_configuration_fits_the_machine(machine: compiler.Machine) -> None:
    for rows, homes, keys, dim, paged in itertools.product(
            (1, 8, 17, 32), (1, 64, 500), (1, 1000, 100_000), (64, 128, 256), (False, True)):
        if rows <= 16 or dim <= 128:
            config = CONFIG(rows, homes, keys, dim, paged, machine)
            assert decode.shared_bytes(rows, dim, config.warps, config.stages) <= machine.shared
            assert config.splits in (1, *decode.SPLITS) and config.warps >= 2

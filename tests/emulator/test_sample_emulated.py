"""sample.cu in the emulator keeps the contract of lz.sample, and draws the token the reference
draws.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FULL
from torch import Tensor

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.sampling import sample as sampling
from layerzero.ops.sample import OP, reference
from layerzero.verify.kernel.contract import check_case

from .run import COMPILER, Kernel, on_cpu

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

THREADS, LISTED = 64, 64
FIXED = 80 * THREADS // 32 + 2816 + 8 * LISTED


def arranged(cluster: int, kept: int) -> sampling.Config:
    """So many blocks for a row, and so many steps of a warp in shared memory."""
    return sampling.Config(cluster, THREADS, LISTED, FIXED + kept * THREADS * 16)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    monkeypatch.setattr(sampling, "config", lambda *facts: arranged(2, 10))
    sampling._plan.cache_clear()
    yield
    sampling._plan.cache_clear()


def agrees(logits: Tensor, **options: Any) -> bool:
    options = {"seed": 7, **options, "return_logprobs": True}
    (token, logprob), (want, its_logprob) = (f(logits, **options)
                                             for f in (sampling.sample, reference))
    return torch.equal(token, want) and torch.allclose(logprob, its_logprob, rtol=1e-5, atol=1e-5)


HALF = [case for case in OP.cases[::3] if "probs" not in case]


# Each case in one of the dtypes; LZ_TEST_FULL=1: all in float32 too.
@pytest.mark.parametrize("dtype, cases", [
    ("float32", [case for case in OP.cases if FULL or case not in HALF]), ("bfloat16", HALF)])
def test_contract(dtype: str, cases: Any) -> None:
    kernel = on_cpu("cuda.sample")
    results = [check_case(kernel, case, dtype, "cpu") for case in cases
               if case.get("special") != "sparse"]
    assert [str(r) for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("cluster, kept", [(1, 0), (4, 63), (16, 100)])
@pytest.mark.parametrize("scale", [3.0, 0.3])
def test_a_wide_row_wherever_it_is_kept(cluster: int, kept: int, scale: float,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "config", lambda *facts: arranged(cluster, kept))
    logits = torch.randn(1, 128256, generator=torch.Generator().manual_seed(0)) * scale
    for options in ({"top_p": 0.9}, {"top_k": 50},
                    {"top_k": 9000, "top_p": 0.8, "min_p": 0.01, "temperature": 0.8}):
        assert agrees(logits, **options), options


@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 900},
                                     {"top_k": 900, "top_p": 0.5, "min_p": 0.1}])
def test_more_ties_than_can_be_listed(options: dict[str, Any]) -> None:
    logits = torch.zeros(2, 3001)
    logits[:, ::30], logits[:, 7] = -1.0, 2.0
    assert agrees(logits, **options)
    logits[1] = 0.0                                # half of the mass is exactly at an edge
    logits[1, ::2] = -2.0 ** 0.5
    assert agrees(logits, **options)


def test_masses_that_only_exact_sums_tell_apart() -> None:
    """Half of all is reached at the last of the first thousand: a sum in float may say otherwise.
    """
    logits = torch.full((1, 6000), -40.0)
    logits[0, :1000], logits[0, 5000:] = 0.0, -2.0 ** -20
    for p in (0.5, 0.5000002, 0.50001, 1.0 - 1e-9):
        assert agrees(logits, top_p=p), p


@pytest.mark.parametrize("least", [0.0, 0.05])
def test_the_cut_is_where_sums_in_double_put_it(least: float) -> None:
    probs = (torch.randn(1, 40000, generator=torch.Generator().manual_seed(4)) * 0.5).softmax(-1)
    ranked = probs[0].sort(descending=True, stable=True).values.double()
    reached = ranked.cumsum(0)
    for at in (300, 9000, 30000):
        for beside in (1e-11, -1e-11):
            p = (reached[at] / reached[-1]).item() + beside
            kept = ranked[:int((reached - ranked < p * reached[-1]).sum())]
            total = sampling.choose(probs, 1.0, 0, p, least, 0, True)[2]
            assert total is not None
            torch.testing.assert_close(total[0], kept[kept >= least * ranked[0]].sum(), rtol=1e-13,
                                       atol=0.0)


@pytest.mark.parametrize("batch", [1, 5])
def test_rows_that_begin_anywhere(batch: int) -> None:
    wide = torch.randn(batch, 1031, generator=torch.Generator().manual_seed(1)) * 3
    wide[:, 0], wide[:, -7:] = 50.0, 60.0          # beside the rows
    for first in range(1, 5):
        for options in ({}, {"top_p": 0.9}, {"temperature": 0.0}):
            assert agrees(wide[:, first:1024], **options), (first, options)
            assert agrees(wide.bfloat16()[:, first:1024], **options), (first, options)


def test_what_is_no_number() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    logits[0, ::2], logits[1] = torch.nan, -torch.inf
    logits[2, 17], logits[2, 200], logits[3] = torch.inf, torch.inf, torch.nan
    logits[4], logits[4, 299] = -torch.inf, -1e30
    for options in ({}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}, {"min_p": 0.5}):
        assert agrees(logits, **options), options
    assert agrees(torch.tensor([[-3.0]]), top_p=0.5)
    assert agrees(logits[:1].clone().fill_(-0.0).index_fill_(1, torch.tensor([4]), 0.0), top_k=1)


def test_every_row_its_own() -> None:
    gen = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 2000, generator=gen) * 2
    rows = {"temperature_rows": torch.tensor([0.0, 0.7, -1.0, 1.0, 2.0], dtype=torch.float16),
            "top_k_rows": torch.tensor([0, 5, 9, 1999, -3], dtype=torch.int32),
            "top_p_rows": torch.tensor([0.5, 0.0, 2.0, 0.9, -1.0], dtype=torch.float64),
            "min_p_rows": torch.tensor([0.0, -1.0, 0.3, 0.01, 2.0], dtype=torch.bfloat16)}
    for name, value in rows.items():
        assert agrees(logits, **{name: value}), name
    assert agrees(logits, **rows)
    for dtype in (torch.int32, torch.int64):
        assert agrees(logits, seed_rows=torch.tensor([1, -2, 3, 2 ** 31 - 1, 0], dtype=dtype),
                      offset=12, top_p=0.9)
    for uniforms in (torch.tensor([0.0, 1.0, 0.5, 0.999, 7.0]),
                     torch.rand(5, generator=gen, dtype=torch.float64)):
        assert agrees(logits, uniforms=uniforms, top_p=0.9)


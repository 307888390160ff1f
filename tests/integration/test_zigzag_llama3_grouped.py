"""Context parallelism in real processes that talk through gloo: every method against one rank, and
zigzag-llama3 with grouped attention against the way that rearranges."""

from __future__ import annotations

import os

import pytest
import torch
from sharded import (
    boundaries,
    check_every_method,
    check_torchs_context,
    check_transformers,
    check_zigzag_llama3,
    start,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.distributed.is_available()
                       or not torch.distributed.is_gloo_available(), reason="this torch has no gloo")]
# twice as long takes four times as long
LENGTHS = (1024, 2048, 4096, *((8192, 16384) if os.environ.get("LZ_TEST_FULL") == "1" else ()))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_method_gives_what_one_rank_gives(world_size, tmp_path):
    start(world_size, str(tmp_path / "store"), check_every_method)


def test_torchs_context_parallel_with_our_attention(tmp_path):
    start(2, str(tmp_path / "store"), check_torchs_context)


def test_a_model_of_transformers_over_sharded_tokens(tmp_path):
    pytest.importorskip("transformers")
    start(2, str(tmp_path / "store"), check_transformers)


class TestZigzagLlama3GroupedAttention:
    def test_grouped_vs_baseline_forward(self, tmp_path):
        start(2, str(tmp_path / "store"), check_zigzag_llama3, boundaries(2, 8, 56), 8, 8, 32,
              False)

    def test_grouped_vs_baseline_backward(self, tmp_path):
        start(2, str(tmp_path / "store"), check_zigzag_llama3, boundaries(2, 8, 56), 8, 8, 32, True)

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_different_sequence_lengths(self, tokens, tmp_path):
        start(2, str(tmp_path / "store"), check_zigzag_llama3, [0, tokens], 1, 1, 16, False)

    def test_with_gqa(self, tmp_path):
        start(2, str(tmp_path / "store"), check_zigzag_llama3, boundaries(2, 8, 56), 32, 8, 16,
              True)

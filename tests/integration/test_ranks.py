"""Ranks that agree on kernels, in real processes that talk through gloo."""

from __future__ import annotations

import pytest
import torch
from agreeing import check_agreement
from sharded import start

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.distributed.is_available()
                       or not torch.distributed.is_gloo_available(), reason="this torch has no gloo")]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree(world_size, tmp_path):
    start(world_size, str(tmp_path / "store"), check_agreement, str(tmp_path / "other"))

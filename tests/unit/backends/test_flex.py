"""flex_attention takes what requires gradients where none are recorded, as a model is served."""

from __future__ import annotations

import torch

from layerzero.verify.certification.circumstances.grad_circumstances import GivenParameters
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds


def test_parameters_are_taken_where_nothing_is_recorded():
    kernel = worlds.current().catalog.by_id["torch.block_sparse_flex"]
    case = {"sq": 200, "sk": 70, "mask": "strided", "blocks": "128x128"}
    with torch.compiler.set_stance("force_eager"):         # it refuses them before it compiles
        result = check_case(kernel, case, "float32", circumstance=GivenParameters())
    assert result.passed, str(result)

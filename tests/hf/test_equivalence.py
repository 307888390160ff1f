"""The grid of transformers' own `test_eager_matches_sdpa_inference`, with our attention in the
place of sdpa.

Its models come with fixed tolerances; here the measure is the same model in double precision: ours
may be off by no more than twice what eager is. transformers' tests themselves run where
LZ_TRANSFORMERS_CHECKOUT says where they are (they are not in the wheel);
benchmarks/transformers_equivalence.py runs more of them.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest
import torch
from exact import exact_model
from helpers import ROOT
from models import ENCODER_DECODER, FAMILIES, inputs, tiny

pytestmark = pytest.mark.integration
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PADDED = [family for family in FAMILIES if family not in ("falcon", "vit")]
PAD = 2


@functools.cache
def model(family: str, implementation: str, dtype: torch.dtype):
    return exact_model(family) if implementation == "exact" else tiny(
        family, attn_implementation=implementation).to(dtype)


def make_inputs(family: str, side: str | None) -> dict[str, torch.Tensor]:
    """A batch of seven as transformers tests it: the last row has two tokens of padding; None for
    no mask at all."""
    made = inputs(family, batch=7, length=10)
    name = "decoder_attention_mask" if family in ENCODER_DECODER else "attention_mask"
    words = made["decoder_input_ids" if family in ENCODER_DECODER else "input_ids"]
    made.pop("attention_mask", None)
    if side is not None:
        made[name] = torch.ones_like(words)
        made[name][-1, slice(None, PAD) if side == "left" else slice(-PAD, None)] = 0
    return made


def hidden(family: str, implementation: str, dtype: torch.dtype, side: str | None) -> torch.Tensor:
    values = {k: v.to(dtype) if v.is_floating_point() else v
              for k, v in make_inputs(family, side).items()}
    with torch.no_grad():
        out = model(family, implementation, dtype)(**values, output_hidden_states=True)
    if family == "clip":
        out = out.text_model_output
    last = (out.decoder_hidden_states if family in ENCODER_DECODER
            else out.hidden_states)[-1].double()
    if side is not None:                        # what padding itself gives does not matter
        last[-1, slice(None, PAD) if side == "left" else slice(-PAD, None)] = 0
    return last


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", PADDED)
def test_padding_on_either_side_or_no_mask(family, dtype):
    for side in ("left", "right", None):
        truth = hidden(family, "exact", torch.float64, side)
        mine, eager = ((hidden(family, name, DTYPES[dtype], side) - truth).abs().max()
                       for name in ("layerzero", "eager"))
        assert mine <= 2 * eager + 1e-7, (side, mine, eager)


@pytest.mark.skipif("LZ_TRANSFORMERS_CHECKOUT" not in os.environ,
                    reason="transformers' tests are not in its wheel; LZ_TRANSFORMERS_CHECKOUT "
                           "names a checkout")
def test_transformers_own_tests():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "transformers_equivalence.py"),
         os.environ["LZ_TRANSFORMERS_CHECKOUT"], "--models", "llama,t5", "-k",
         "eager_matches_sdpa_inference"],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    served = re.search(r"(\d+) of those that passed called", done.stdout)
    assert served and int(served[1]) > 0

"""The values between: every stage of every layer through lz against llama.cpp's own.

What llama.cpp computes inside is seen by the build of llama-cpp-python only (`--build`): the wheel
has no way to ask for it. A stage is compared at the last token of a text, as the norm of the
difference over the norm of llama.cpp's value. Both round activations to 8 bits, so a code that is
rounded the other way moves a value by its step; layers add up what the ones before have moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...models.decoder import Trace
from ...spec.codec import Record
from .llama_cpp import TEXTS, LlamaCpp
from .model import GGUFModel

# llama.cpp's name -> that of a Decoder's trace
STAGES = {"attn_norm": "ln1_out", "kqv_out": "attn_out", "ffn_inp": "resid", "ffn_norm": "ln2_out",
          "ffn_out": "mlp_out", "l_out": "output"}
# of the first layer, which only its own rounding moves, and of any
FIRST_APART, APART = 0.01, 0.15


@dataclass(frozen=True)
class StageParity(Record):
    """The difference of a stage in the first layer, and in the layer where it is largest."""

    name: str
    layers: int
    first: float
    largest: float
    worst_layer: int

    @property
    def passed(self) -> bool:
        return self.first <= FIRST_APART and self.largest <= APART

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "layers": self.layers, "first": self.first,
                "largest": self.largest, "worst_layer": self.worst_layer, "passed": self.passed}


def compare_stages(model: GGUFModel, peer: LlamaCpp) -> list[StageParity]:
    """Compare every layer at the last token of a text; [] where the peer shows no stages."""
    ids = model.tokenize(TEXTS[0], special=True)
    peer_rows = peer.ask_stages(ids, STAGES)
    if not peer_rows:
        return []
    run, trace = model.decoder(length=len(ids), fused=False), Trace()
    run.trace = trace
    with torch.no_grad():
        run(torch.tensor([ids]))
    stages = []
    for name, stage in STAGES.items():
        errors = []
        for i in range(model.config.layers):
            row = trace[f"{i}.{stage}"].value[0, -1].flatten().float()
            want = torch.tensor(peer_rows[f"{name}-{i}"])
            errors.append(float((row - want).norm() / want.norm()))
        worst = max(range(len(errors)), key=errors.__getitem__)
        stages.append(StageParity(stage, len(errors), errors[0], errors[worst], worst))
    return stages

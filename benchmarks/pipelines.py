"""What patching gains in the models of diffusers: one step of a denoiser, stock and patched in
turns.

    python benchmarks/pipelines.py  small models on the CPU, one thread; float32 and bfloat16
    python benchmarks/pipelines.py --size real --device cuda --dtype bfloat16
        widths and lengths of real ones
    python benchmarks/pipelines.py --tune                measure the kernels for these calls first

Weights are random, sizes are not. Both models have the same weights, and their outputs are
compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import nn

import layerzero as lz
from layerzero.integrations.diffusers import patch_diffusers

OUT = Path(__file__).parent / "results" / "local" / "pipelines.json"
Made = tuple[nn.Module, dict[str, Any]]


def unet(real: bool) -> Made:
    widths, side, text = (((320, 640, 1280, 1280), 64, 768) if real
                          else ((64, 128, 128, 128), 32, 128))
    model = UNet2DConditionModel(sample_size=side, block_out_channels=widths,
                                 cross_attention_dim=text,
                                 layers_per_block=2 if real else 1)
    return model, {"sample": torch.randn(2, 4, side, side), "timestep": torch.tensor(5),
                   "encoder_hidden_states": torch.randn(2, 77, text)}


def flux(real: bool) -> Made:
    heads, dim, axes, tokens = (24, 128, (16, 56, 56), 4096) if real else (8, 64, (16, 24, 24), 256)
    model = FluxTransformer2DModel(in_channels=64, num_layers=2, num_single_layers=4,
                                   attention_head_dim=dim, num_attention_heads=heads,
                                   joint_attention_dim=512, pooled_projection_dim=64,
                                   axes_dims_rope=axes)
    return model, {"hidden_states": torch.randn(1, tokens, 64),
                   "encoder_hidden_states": torch.randn(1, 64, 512),
                   "pooled_projections": torch.randn(1, 64), "timestep": torch.tensor([0.5]),
                   "img_ids": torch.zeros(tokens, 3), "txt_ids": torch.zeros(64, 3)}


def sd3(real: bool) -> Made:
    heads, side, layers = (24, 128, 6) if real else (6, 32, 4)
    model = SD3Transformer2DModel(sample_size=side, num_layers=layers, attention_head_dim=64,
                                  num_attention_heads=heads, joint_attention_dim=512,
                                  caption_projection_dim=64 * heads, pooled_projection_dim=64,
                                  qk_norm="rms_norm")
    return model, {"hidden_states": torch.randn(2, 16, side, side),
                   "encoder_hidden_states": torch.randn(2, 77, 512),
                   "pooled_projections": torch.randn(2, 64), "timestep": torch.tensor([5, 5])}


def pixart(real: bool) -> Made:
    heads, dim, side, layers = (16, 72, 128, 8) if real else (6, 64, 32, 6)
    model = PixArtTransformer2DModel(sample_size=side, num_layers=layers, attention_head_dim=dim,
                                     num_attention_heads=heads, cross_attention_dim=heads * dim,
                                     caption_channels=512)
    return model, {"hidden_states": torch.randn(2, 4, side, side), "timestep": torch.tensor([5, 5]),
                   "encoder_hidden_states": torch.randn(2, 120, 512),
                   "encoder_attention_mask": torch.ones(2, 120),
                   "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


MODELS: dict[str, Callable[[bool], Made]] = {"unet": unet, "flux": flux, "sd3": sd3,
                                             "pixart": pixart}


def compare(made: Made, device: str, dtype: torch.dtype, rounds: int, tune: bool) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    stock = made[0].eval().to(device, dtype)
    inputs = {name: moved(value) for name, value in made[1].items()}
    patched = copy.deepcopy(stock)
    patch_diffusers(patched)

    def step(model: nn.Module) -> tuple[float, torch.Tensor]:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = model(**inputs, return_dict=False)[0]
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, out

    with torch.no_grad():
        if tune:
            with lz.recording() as recorder:
                step(patched)
            lz.tune(recorder.calls, rounds=20, compile=False, device=device)
        first, second = step(stock)[1], step(patched)[1]
        times: dict[str, list[float]] = {"stock": [], "patched": []}
        for _ in range(rounds):
            for name, model in (("stock", stock), ("patched", patched)):
                times[name].append(step(model)[0])
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    ratios = [a / b for a, b in zip(times["stock"], times["patched"])]
    return {"stock_ms": medians["stock"], "patched_ms": medians["patched"],
            "times": statistics.median(ratios),
            "difference": float((first.float() - second.float()).abs().max()
                                / first.float().abs().max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("small", "real"), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {}
    for dtype in args.dtype:
        for name in args.model:
            torch.manual_seed(0)
            row = compare(MODELS[name](args.size == "real"), args.device, getattr(torch, dtype),
                          args.rounds, args.tune)
            found[f"{name} {dtype}"] = row
            print(
                f"{name:<7} {dtype:<9} stock {row['stock_ms']:9.2f} ms   patched "
                f"{row['patched_ms']:9.2f} ms   {row['times']:5.2f} x   outputs differ by "
                f"{row['difference']:.1e}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "python": platform.python_version(), "torch": torch.__version__, "size": args.size,
        "device": args.device, "threads": args.threads, "tuned": args.tune, "results": found},
                                   indent=2))


if __name__ == "__main__":
    main()

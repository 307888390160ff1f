"""Our own CPU kernels that work on one row after the other: greedy sampling, routing, cross
entropy, quantizing, and group norm of channels_last images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.cross_entropy import OP as cross_entropy
from ...ops.dequantize import OP as dequantize
from ...ops.dequantize import check_size
from ...ops.formulas.loss import check_targets
from ...ops.formulas.moe import mask_groups, score_experts
from ...ops.formulas.quant import FORMATS
from ...ops.formulas.sampling import random_numbers
from ...ops.group_norm import OP as group_norm
from ...ops.moe_gate import OP as moe_gate
from ...ops.quantize import OP as quantize
from ...ops.sample import FLOAT_ROWS, PENALTIES
from ...ops.sample import OP as sample
from ...spec import rules as r
from ...spec.reason import Code
from . import build
from .declaration import DTYPES, FLOATS, ONE_PASS, declare, rows_of


def _group_norm() -> Callable[..., Any]:
    norm = build.module().group_norm
    threads, channels_last = torch.get_num_threads, torch.channels_last

    def run(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
            eps: float = 1e-5) -> Tensor:
        batch, channels, height, width = x.shape
        rows = x.contiguous(memory_format=channels_last)
        out = torch.empty_like(rows)
        parameters = weight if weight is not None else bias
        norm(DTYPES[x.dtype], 0 if parameters is None else DTYPES[parameters.dtype],
             rows.data_ptr(), None if weight is None else weight.data_ptr(),
             None if bias is None else bias.data_ptr(), out.data_ptr(), batch, channels,
             height * width, groups, eps, threads())
        return out

    return run


def _sample_greedy() -> Callable[..., Any]:
    argmax = build.module().argmax
    empty, threads, int64 = torch.empty, torch.get_num_threads, torch.int64

    def run(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
            min_p: float = 0.0, *, uniforms: Tensor | None = None, seed: int | None = None,
            seed_rows: Tensor | None = None, offset: int = 0,
            generator: torch.Generator | None = None, return_logprobs: bool = False) -> Any:
        batch, vocab = logits.shape
        if uniforms is None and seed is None and seed_rows is None:
            # the generator goes on as with any other kernel
            random_numbers(batch, 1, logits.device, None, None, None, offset, generator)
        tokens = empty(batch, dtype=int64)
        argmax(DTYPES[logits.dtype], logits.data_ptr(), tokens.data_ptr(), batch, vocab,
               logits.stride(0), threads())
        if not return_logprobs:
            return tokens
        return tokens, torch.where(tokens < 0, -torch.inf, 0.0).to(torch.float32)

    return run


def _gate() -> Callable[..., Any]:
    gate = build.module().gate
    empty, threads = torch.empty, torch.get_num_threads

    def run(logits: Tensor, top_k: int, scoring: str = "softmax", normalize: bool = True, *,
            n_group: int = 1, topk_group: int = 1, e_score_correction_bias: Tensor | None = None,
            routed_scaling_factor: float = 1.0) -> tuple[Tensor, Tensor]:
        # torch's own softmax: another one rounds differently, and equal scores would differ
        scores = score_experts(logits, scoring).contiguous()
        choice = (scores if e_score_correction_bias is None
                  else scores + e_score_correction_bias.float())
        if n_group > 1:
            choice = mask_groups(choice, n_group, topk_group, e_score_correction_bias is not None)
        *batch, experts = logits.shape
        ids = empty(*batch, top_k, dtype=torch.int64)      # a tuple would take torch 2 us more
        weights = empty(*batch, top_k, dtype=torch.float32)
        gate(scores.data_ptr(), choice.data_ptr(), ids.data_ptr(), weights.data_ptr(),
             scores.numel() // experts, experts, top_k, normalize, routed_scaling_factor, threads())
        return ids, weights

    return run


def _cross_entropy() -> Callable[..., Any]:
    losses_of = build.module().cross_entropy
    empty, threads, float32 = torch.empty, torch.get_num_threads, torch.float32

    def run(logits: Tensor, targets: Tensor, *, ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        x, step = rows_of(logits)
        flat = targets.reshape(-1).long().contiguous()
        # on every call: a target outside the row would be read all the same
        if len(flat) and not (int(flat.min()) >= 0 and int(flat.max()) < x.shape[-1]):
            check_targets("cross_entropy", {"targets": flat, "ignore_index": ignore_index},
                          {"vocab": x.shape[-1], "tensor_kind": "plain", "graph": False})
        losses = empty(targets.shape, dtype=float32)
        losses_of(DTYPES[x.dtype], x.data_ptr(), flat.data_ptr(), losses.data_ptr(), losses.numel(),
                  x.shape[-1], step, ignore_index, label_smoothing, threads())
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / (flat != ignore_index).sum()

    return run


def _quantize() -> Callable[..., Any]:
    encode = build.module().quantize
    empty, threads, float32 = torch.empty, torch.get_num_threads, torch.float32

    def run(x: Tensor, format: str, granularity: str | None = None,
            block_size: int = 0) -> tuple[Tensor, Tensor]:
        shape = x.shape
        width, fmt = shape[-1], FORMATS[format]
        block = (block_size or fmt.block_size) if granularity == "block" else width
        codes = empty(shape, dtype=fmt.storage)
        scales = empty((*shape[:-1], -(-width // block)), dtype=float32)
        x, step = rows_of(x)
        encode(DTYPES[x.dtype], x.data_ptr(), codes.data_ptr(), scales.data_ptr(),
               codes.numel() // width, width, block, step, format == "fp8_e4m3", threads())
        return codes, scales

    return run


def _dequantize() -> Callable[..., Any]:
    decode = build.module().dequantize
    empty, threads = torch.empty, torch.get_num_threads
    dtypes = {str(dtype).removeprefix("torch."): (dtype, i) for dtype, i in DTYPES.items()}

    def run(q: Tensor, scales: Tensor, *, block_size: int = 0, size: int | None = None,
            out_dtype: str = "float32") -> Tensor:
        dtype, number = dtypes[out_dtype]
        shape, groups, count = q.shape, scales.shape[-1], q.numel()
        width = block = shape[-1]
        out = empty(shape, dtype=dtype)
        if groups != 1 or scales.numel() * width != count:      # not one scale for each row
            block_size = block_size or FORMATS["int8"].block_size
            check_size(q, scales, None, "int8", block_size, 1, None, size)
            scales = scales.expand(*shape[:-1], groups).contiguous()
            block = width if groups == 1 else block_size
        if count:
            decode(number, q.data_ptr(), scales.data_ptr(), out.data_ptr(),
                   count // width, width, block, threads())
        return out

    return run


PARAMETERS: tuple[r.Condition, ...] = (
    r.one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
    r.one_of("bias.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
    r.unit_stride("weight"), r.unit_stride("bias"),
    *(r.when(r.equals("weight.dtype", d), r.one_of("bias.dtype", None, d,
                                                   code=Code.DTYPE_UNSUPPORTED)) for d in FLOATS))

KERNELS = (
    declare(group_norm, _group_norm, 6.0, 4.0, r.equals("x.contiguous", False), *PARAMETERS,
            name="group_norm_channels_last",
            less_work="reads channels_last images as they are, where torch's is given a copy"),
    declare(sample, _sample_greedy, 12.0, 8.0, r.unit_stride("logits"), r.off("from_probs"),
            *(r.absent(f"{name}.dtype") for name in ("history", "token_counts", "top_k_rows",
                                                     *FLOAT_ROWS)),
            *(r.equals(name, off) for name, off in PENALTIES.items()),
            r.any_of(r.equals("top_k", 1), r.equals("temperature", 0.0)), name="sample_greedy",
            less_work=ONE_PASS),
    declare(moe_gate, _gate, 6.0, 12.0, less_work=ONE_PASS),
    declare(cross_entropy, _cross_entropy, 8.0, 10.0, r.unit_stride("logits"),
            less_work="one pass over the logits, and no copy of them",
            less_work_when=(r.at_least("vocab", 8192),)),     # a call costs more than a small copy
    declare(quantize, _quantize, 8.0, 5.0, r.unit_stride("x"),
            r.one_of("format", "int8", "fp8_e4m3", code=Code.QUANT_FORMAT_UNSUPPORTED),
            r.one_of("granularity", None, "channel", "block", code=Code.SCALE_LAYOUT_MISMATCH),
            r.on("symmetric"), r.equals("block_rows", 1, Code.SCALE_LAYOUT_MISMATCH),
            *(r.absent(f"{name}.dtype") for name in ("scales", "zeros", "global_scale")),
            less_work=ONE_PASS),
    declare(dequantize, _dequantize, 8.0, 5.0, r.contiguous("q"), r.contiguous("scales"),
            r.one_of("format", "int8", code=Code.QUANT_FORMAT_UNSUPPORTED),
            r.dtypes("float32", of="scales.dtype"), r.absent("zeros.dtype"),
            r.absent("global_scale.dtype"), r.equals("block_rows", 1, Code.SCALE_LAYOUT_MISMATCH),
            floats=False, less_work=ONE_PASS),
)

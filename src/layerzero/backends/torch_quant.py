"""Quantization, and linear layers with quantized weights, by torch.

On one thread of a CPU with AVX-512, for a bf16 layer of 4096 x 4096, torch's int8 kernel is faster
than dequantizing up to 16 rows, its int4 kernel up to 32; beyond that the weight is dequantized in
slices that stay in the cache.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.dequantize import OP as dequantize
from ..ops.dequantize import check_size
from ..ops.formulas.ggml import (
    GGML_FORMATS,
    block_product,
    dequantize_blocks,
    quantize_blocks,
    rounded_activations,
)
from ..ops.formulas.quant import (
    E2M1,
    FORMATS,
    NF4,
    NF4_MIDPOINTS,
    TINY,
    Format,
    encode,
    expand_scales,
    make_scales,
    pack_nibbles,
)
from ..ops.quantize import OP as quantize
from ..ops.quantize import check_given_scales, clone_optional
from ..ops.quantized_linear import OP as quantized_linear
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._packing import PACKED

# weights dequantized at a time: 2 MiB of bf16, so that the matmul finds them in the cache; of
# float32 more, for a matmul that arranges its input anew for each slice
SLICE, SLICE_FLOAT32 = 1 << 20, 1 << 24
AT_ONCE = 1 << 20          # values quantized to blocks at a time: a search needs 24 bytes for each
FEW_CODES = 8192           # fp8 codes on the CPU up to which torch's own cast is as fast as a table
# Dtypes to which torch casts fp8 codes as fast as a table does, and on all threads.
FAST_CASTS = ((torch.float32, torch.bfloat16)
              if platform.machine().lower() in ("arm64", "aarch64") else ())

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


# Block scales, without one scale per element if the blocks divide the rows.

def _combine_blocks(combine: Callable[..., Tensor], values: Tensor, scales: Tensor, block_size: int,
                    block_rows: int) -> Tensor:
    """Returns combine(values, scale of each value)."""
    width = values.shape[-1]
    whole_rows = values.dim() == 1 or scales.shape[-2] in (1, values.shape[-2])
    if scales.shape[-1] in (1, width) or width % block_size or not whole_rows:
        return combine(values, expand_scales(scales, values.shape, block_size, block_rows))
    return combine(values.unflatten(-1, (-1, block_size)), scales[..., None]).flatten(-2)


# Lookup tables, cached for plain tensors only: under tracing they must be built in the graph.

_table_cache: dict[tuple[Any, ...], Tensor] = {}


def _table(like: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Returns the values of all 256 bytes: one each of an 8-bit format, two of a 4-bit one."""
    key = (name, dtype, like.device)
    table = _table_cache.get(key) if type(like) in PLAIN_TENSORS else None
    if table is None:
        table = _make_table(name, dtype, like.device)
        if type(table) is Tensor and type(like) in PLAIN_TENSORS:
            _table_cache[key] = table
    return table


def _make_table(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if FORMATS[name].bits == 8:
        return codes.view(FORMATS[name].storage).to(dtype)
    values = tuple(map(float, range(-8, 8))) if name == "int4" else NF4 if name == "nf4" else E2M1
    single = torch.tensor(values, device=device, dtype=dtype)
    return torch.stack((single[(codes & 15).long()], single[(codes >> 4).long()]), -1)


def _decode(q: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Returns the values of codes in units of their scale, int4 minus 8; by table where torch's
    cast is slow."""
    if fmt.name == "int8" or (fmt.bits == 8 and (
            q.device.type != "cpu" or q.numel() < FEW_CODES or dtype in FAST_CASTS)):
        return q.to(dtype)
    table = _table(q, fmt.name, dtype)
    if fmt.bits == 8:
        return table.index_select(0, q.view(torch.uint8).reshape(-1).int()).view(q.shape)
    pairs = table.view(torch.int32 if dtype.itemsize == 2 else torch.int64).squeeze(-1)
    return pairs.index_select(0, q.reshape(-1).int()).view(dtype).view(*q.shape[:-1],
                                                                       2 * q.shape[-1])


def _dequantize_codes(q: Tensor, scales: Tensor, zeros: Tensor | None, fmt: Format, size: int,
                      block_size: int, block_rows: int, dtype: torch.dtype) -> Tensor:
    values = _decode(q, fmt, dtype)[..., :size]           # a new tensor, so it can be overwritten
    if zeros is not None:
        shift = zeros.to(dtype) if fmt.name == "int8" else zeros.to(dtype) - 8.0
        values = _combine_blocks(Tensor.sub_, values, shift, block_size, block_rows)
    return _combine_blocks(Tensor.mul_, values, scales.to(dtype), block_size, block_rows)


def _dequantize() -> Callable[..., Any]:
    def run(q: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None, *, format: str,
            block_size: int = 0, block_rows: int = 1, global_scale: Tensor | None = None,
            size: int | None = None, out_dtype: str = "float32") -> Tensor:
        if scales is None:
            return dequantize_blocks(q, format).to(getattr(torch, out_dtype))
        fmt = FORMATS[format]
        block_size = block_size or fmt.block_size
        size = check_size(q, scales, zeros, format, block_size, block_rows, global_scale, size)
        scales = scales.float() if global_scale is None else scales.float() * global_scale.float()
        if fmt.bits == 8 and zeros is None and scales.shape[-1] == 1 and block_rows == 1:
            # the shortest path for the common case
            values = _decode(q, fmt, torch.float32).mul_(scales)
        else:
            values = _dequantize_codes(q, scales, zeros, fmt, size, block_size, block_rows,
                                       torch.float32)
        return values if out_dtype == "float32" else values.to(getattr(torch, out_dtype))

    return run


# Codes.

def _quantize() -> Callable[..., Any]:
    """Makes fewer passes over the data than the reference, and finds nf4 codes by binary search."""
    def run(x: Tensor, format: str, granularity: str | None = None, block_size: int = 0,
            symmetric: bool = True, *, block_rows: int = 1, scales: Tensor | None = None,
            zeros: Tensor | None = None, global_scale: Tensor | None = None) -> Any:
        fmt = FORMATS[format]
        granularity = granularity or fmt.granularity
        block_size = block_size or fmt.block_size
        upcast = x.detach().float()
        # If the sum is finite, so is every value. Not on a GPU, which would be synchronised.
        all_finite = (type(x) in PLAIN_TENSORS and x.device.type == "cpu"
                      and bool(upcast.sum().isfinite()))
        if scales is None:
            finite = upcast if all_finite else upcast.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            scales, zeros, global_scale = make_scales(
                finite, fmt, granularity, block_size, block_rows, symmetric, global_scale)
        else:
            check_given_scales(x, granularity, block_size, block_rows, scales, zeros, global_scale)
            all_finite = False                 # a scale may be zero
            scales, zeros = scales.clone(), clone_optional(zeros)
            if global_scale is not None:
                global_scale = global_scale.to(torch.float32, copy=True)
        factors = scales.float() if global_scale is None else scales.float() * global_scale.float()
        ratio = _combine_blocks(torch.div, upcast, factors, block_size, block_rows)
        shift = None if zeros is None else expand_scales(zeros, x.shape, block_size, block_rows)
        codes = _encode(ratio, fmt, shift, all_finite)
        return tuple(t for t in (codes, scales, zeros, global_scale) if t is not None)

    return run


def _quantize_blocks() -> Callable[..., Any]:
    def run(x: Tensor, format: str) -> Tensor:
        x = x.detach()
        if x.numel() <= AT_ONCE or type(x) not in PLAIN_TENSORS:
            return quantize_blocks(x, format)
        rows = x.reshape(-1, x.shape[-1]).split(max(1, AT_ONCE // x.shape[-1]))
        parts = [quantize_blocks(part, format) for part in rows]
        return torch.cat(parts).view(*x.shape[:-1], -1)

    return run


def _encode(ratio: Tensor, fmt: Format, zeros: Tensor | None, all_finite: bool) -> Tensor:
    """Encodes `ratio`, which is overwritten."""
    if fmt.name.startswith("fp8"):
        return ratio.clamp_(-fmt.largest, fmt.largest).to(fmt.storage)
    if not all_finite:
        ratio.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if fmt.name == "int8":
        ratio.round_()
        if zeros is not None:
            ratio.add_(zeros)
        return ratio.clamp_(-127.0 if zeros is None else -128.0, 127.0).to(torch.int8)
    if fmt.name == "int4":
        ratio.round_().add_(8.0 if zeros is None else zeros)
        return pack_nibbles(ratio.clamp_(1.0 if zeros is None else 0.0, 15.0).to(torch.uint8))
    if fmt.name == "nf4":
        bounds = torch.tensor(NF4_MIDPOINTS, dtype=ratio.dtype, device=ratio.device)
        return pack_nibbles(torch.bucketize(ratio, bounds, out_int32=True).to(torch.uint8))
    return encode(ratio, fmt, None)           # the reference's comparisons are as fast


# Linear layers.

def _dequantized_linear() -> Callable[..., Any]:
    """Dequantizes the weight in slices of rows, and multiplies each while it is in the cache."""
    def run(x: Tensor, weight_q: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None,
            bias: Tensor | None = None, *, format: str, group_size: int = 0,
            activations: str = "none", global_scale: Tensor | None = None) -> Tensor:
        if scales is None:
            return _ggml_linear(x, weight_q, bias, format, activations)
        fmt, k, n = FORMATS[format], x.shape[-1], weight_q.shape[0]
        share = n // scales.shape[0]
        if scales.shape[1] == 1 and zeros is None and fmt.bits == 8 and x.dtype != torch.float16:
            # 8-bit codes are exact in bf16 and float32, so a row's scale can come last; sums of
            # unscaled codes might overflow float16
            parts = [F.linear(x, _decode(weight_q[i:j], fmt, x.dtype))
                     for i, j in _slices(x, n, k, 1)]
            row_scales = (scales if share == 1 else scales.repeat_interleave(share, 0))[:, 0]
            out = (parts[0] if len(parts) == 1
                   else torch.cat(parts, -1)).mul_(row_scales.to(x.dtype))
            return out if bias is None else out.add_(bias)
        if global_scale is not None:
            scales = scales.float() * global_scale.float()
        # a small scale would lose precision in float16, the values of a table in any half type
        acc_dtype = (torch.float32 if x.dtype == torch.float16 or format in ("nf4", "nvfp4")
                else x.dtype)
        parts = []
        for i, j in _slices(x, n, k, share):
            scale_rows = slice(i // share, -(-j // share))
            weight = _dequantize_codes(weight_q[i:j], scales[scale_rows],
                                       None if zeros is None else zeros[scale_rows], fmt, k,
                                       group_size or k, share, acc_dtype).to(x.dtype)
            parts.append(F.linear(x, weight, None if bias is None else bias[i:j]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    return run


def _ggml_linear(x: Tensor, weight_q: Tensor, bias: Tensor | None, format: str,
                 activations: str) -> Tensor:
    slices = _slices(x, len(weight_q), x.shape[-1], 1)
    if activations == "q8":
        rounded = rounded_activations(x, format, torch.float32)
        parts = [block_product(*rounded, weight_q[i:j], format) for i, j in slices]
    else:
        parts = [F.linear(x, dequantize_blocks(weight_q[i:j], format).to(x.dtype),
                          None if bias is None else bias[i:j]) for i, j in slices]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return (out if bias is None or activations == "none" else out + bias.float()).to(x.dtype)


def _slices(x: Tensor, rows: int, width: int, share: int) -> list[tuple[int, int]]:
    """Returns the slices of the weight's rows; one slice unless on the CPU."""
    if x.device.type != "cpu" or type(x) not in PLAIN_TENSORS:     # pragma: no cover
        return [(0, rows)]
    step = max(1, (SLICE_FLOAT32 if x.dtype == torch.float32 else SLICE) // max(width, 1))
    step = -(-step // share) * share
    return [(i, min(i + step, rows)) for i in range(0, rows, step)]


def _int8_linear() -> Callable[..., Any]:
    product = torch._weight_int8pack_mm

    def run(x: Tensor, weight_q: Tensor, scales: Tensor, bias: Tensor | None = None, *,
            format: str) -> Tensor:
        # Its AVX-512 code loads whole vectors from addresses that it takes for aligned.
        flat = _align(x.reshape(-1, x.shape[-1]), 32)
        out = product(flat, _align(weight_q, 16), scales[:, 0].to(x.dtype))
        out = out.view(*x.shape[:-1], len(weight_q))
        return out if bias is None else out.add_(bias)

    return run


def _align(t: Tensor, nbytes: int) -> Tensor:
    """Returns the tensor, copied if it does not begin at a multiple of `nbytes`."""
    return t if t.data_ptr() % nbytes == 0 else t.clone()


def _int4_linear() -> Callable[..., Any]:
    product, convert = torch._weight_int4pack_mm_for_cpu, torch._convert_weight_to_int4pack_for_cpu

    def pack_codes(weight_q: Tensor) -> Tensor:
        return convert(torch.stack((weight_q & 15, weight_q >> 4), -1).flatten(1).int(), 1)

    def run(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
            bias: Tensor | None = None, *, format: str, group_size: int = 0) -> Tensor:
        def pack_scales(scales: Tensor, *zeros: Tensor) -> Tensor:
            upcast = scales.float()
            shift = (8.0 - zeros[0].float()) * upcast if zeros else torch.zeros_like(upcast)
            return torch.stack((upcast.t(), shift.t()), -1).to(x.dtype).contiguous()

        scale_tensors = (scales,) if zeros is None else (scales, zeros)
        packed = PACKED.get("int4", pack_codes, weight_q)
        packed_scales = PACKED.get(f"int4 scales {x.dtype}", pack_scales, *scale_tensors)
        flat = x.reshape(-1, x.shape[-1])
        out = product(flat, pack_codes(weight_q) if packed is None else packed, group_size,
                      pack_scales(*scale_tensors) if packed_scales is None else packed_scales)
        out = out.view(*x.shape[:-1], len(weight_q))
        return out if bias is None else out.add_(bias)

    return run


def _int8_dynamic() -> Callable[..., Any]:
    product = torch._int_mm

    def run(x: Tensor, weight_q: Tensor, scales: Tensor, bias: Tensor | None = None, *, format: str,
            activations: str) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).float()
        step = (flat.abs().amax(-1, keepdim=True) / 127.0).clamp_(min=TINY)
        codes = (flat / step).round_().clamp_(-127.0, 127.0).to(torch.int8)
        share = weight_q.shape[0] // scales.shape[0]
        row_scales = (scales if share == 1 else scales.repeat_interleave(share, 0))[:, 0].float()
        # cuBLASLt takes the weight in rows, and aligned
        weight = weight_q if x.device.type == "cpu" else _align(weight_q.contiguous(), 16)
        out = product(codes, weight.t()).float().mul_(row_scales).mul_(step)
        out = out if bias is None else out.add_(bias.float())
        return out.to(x.dtype).view(*x.shape[:-1], len(weight_q))

    return run


def _fp8_dynamic() -> Callable[..., Any]:
    product, fp8 = torch._scaled_mm, torch.float8_e4m3fn

    def run(x: Tensor, weight_q: Tensor, scales: Tensor, bias: Tensor | None = None, *, format: str,
            activations: str) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).float()
        step = (flat.abs().amax(-1, keepdim=True) / 448.0).clamp_(min=TINY)
        # in rows, which cuBLASLt takes, whatever order x has
        codes = (flat / step).clamp_(-448.0, 448.0).to(fp8, memory_format=torch.contiguous_format)
        if x.device.type == "cuda":
            # rows by columns, both on 16 bytes, and so the scales that cuBLASLt reads as vectors
            out = product(codes, _align(weight_q.contiguous(), 16).t(), step,
                          _align(scales.float().contiguous(), 16).t(), out_dtype=x.dtype)
            out = out if bias is None else out.add_(bias)
        else:
            out = F.linear(codes.float(), weight_q.float()).mul_(scales[:, 0].float()).mul_(step)
            out = (out if bias is None else out.add_(bias.float())).to(x.dtype)
        return out.view(*x.shape[:-1], len(weight_q))

    return run


WEIGHT_ONLY: tuple[r.Condition, ...] = (r.equals("activations", "none"),)
ONE_SCALE_PER_ROW: tuple[r.Condition, ...] = (
    r.absent("zeros.dtype"), r.equals("groups", 1, Code.SCALE_LAYOUT_MISMATCH),
    r.one_of("group_size", 0), r.equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH))
ON_CPU: tuple[r.Condition, ...] = (r.device("cpu"), r.cpu_isa("avx512f"), r.plain_tensors(),
                                   r.contiguous("weight_q"), r.contiguous("x"))

CODES_ONLY = "reads the codes, and writes no dequantized weight"

KERNELS = (
    Kernel("torch.quantize", quantize, _quantize, prior=1.4, overhead_us=37.0, baseline=True,
           workspace="8 * rows * width",
           requires=(r.one_of("format", *FORMATS, code=Code.QUANT_FORMAT_UNSUPPORTED),)),
    Kernel("torch.quantize_blocks", quantize, _quantize_blocks, prior=1.4, overhead_us=100.0,
           baseline=True, workspace="100663296",
           note="under torch.compile the search of a K-quant becomes thousands of nodes",
           requires=(
               r.one_of("format", *GGML_FORMATS, code=Code.QUANT_FORMAT_UNSUPPORTED),
               r.one_of("granularity", None, "block"), r.equals("block_size", 0),
               r.equals("block_rows", 1), r.on("symmetric"), r.absent("scales.dtype"),
               r.absent("zeros.dtype"), r.absent("global_scale.dtype"))),
    Kernel("torch.dequantize", dequantize, _dequantize, prior=3.0, overhead_us=17.0, baseline=True,
           workspace="12 * rows * packed"),
    Kernel("torch.dequantized_linear", quantized_linear, _dequantized_linear, prior=3.0,
           overhead_us=25.0, baseline=True, requires=(r.one_of("activations", "none", "q8"),),
           workspace="8 * in_features * out_features"),
    Kernel("torch.int8_linear", quantized_linear, _int8_linear, prior=9.0, overhead_us=5.0,
           differentiable=False,
           less_work=CODES_ONLY,
           requires=(*WEIGHT_ONLY, *ON_CPU,
                     r.one_of("format", "int8", code=Code.QUANT_FORMAT_UNSUPPORTED),
                     *ONE_SCALE_PER_ROW, r.contiguous("scales"), r.dtypes("bfloat16"),
                     r.at_most("rows", 16),
                     # it crashes on rows that are no whole vectors, and counts codes in 32 bits
                     r.multiple_of("in_features", 32), r.at_most("weight_size", (1 << 31) - 1))),
    Kernel("torch.int4_linear", quantized_linear, _int4_linear, prior=10.0, overhead_us=8.0,
           differentiable=False, less_work=CODES_ONLY,
           traceable=False, workspace="4 * in_features * out_features",
           requires=(*WEIGHT_ONLY, *ON_CPU,
                     r.one_of("format", "int4", code=Code.QUANT_FORMAT_UNSUPPORTED),
                     r.equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH), r.dtypes("bfloat16"),
                     r.at_most("rows", 32),
                     r.one_of("group_size", 32, 64, 128, 256, code=Code.SCALE_LAYOUT_MISMATCH),
                     r.multiple_of("in_features", 32), r.multiple_of("out_features", 16),
                     # no group may be shorter than the others
                     *(r.when(r.equals("group_size", n), r.multiple_of("in_features", n))
                       for n in (64, 128, 256))),
           note="keeps a second copy of the weight, arranged for torch's int4 kernel"),
    Kernel("torch.int8_dynamic_linear", quantized_linear, _int8_dynamic, prior=9.0,
           overhead_us=15.0, differentiable=False, less_work="multiplies the codes as they are",
           requires=(
               r.device("cpu", "cuda"), r.one_of("activations", "int8"), r.absent("zeros.dtype"),
               r.one_of("format", "int8", code=Code.QUANT_FORMAT_UNSUPPORTED),
               r.one_of("group_size", 0),
               # on x86 torch._int_mm of one column gives numbers that it finds beside its inputs
               r.at_least("in_features", 2), r.at_most("in_features", 1 << 17),
               r.dtypes("bfloat16", "float16", "float32"), r.plain_tensors(),
               r.any_of(r.device("cpu"), r.at_least("rows", 17)),
               r.any_of(r.device("cpu"), r.multiple_of("in_features", 8)),
               r.any_of(r.device("cpu"), r.multiple_of("out_features", 8)))),
    Kernel("torch.fp8_dynamic_linear", quantized_linear, _fp8_dynamic, prior=9.0, overhead_us=20.0,
           differentiable=False, less_work="multiplies the codes as they are",
           less_work_when=(r.any_of(r.device("cuda"), r.at_least("in_features", 256)),),
           requires=(
               r.device("cpu", "cuda"), r.one_of("activations", "fp8"), *ONE_SCALE_PER_ROW,
               r.one_of("format", "fp8_e4m3", code=Code.QUANT_FORMAT_UNSUPPORTED),
               r.plain_tensors(), r.contiguous("weight_q"), r.dtypes("bfloat16", "float32"),
               r.at_least("rows", 1, Code.EMPTY_INPUT),
               *(r.any_of(r.device("cpu"), rule) for rule in (
                   # what torch._scaled_mm takes with a scale for each row
                   r.vendor("nvidia"), r.sm(at_least=90), r.dtypes("bfloat16"),
                   r.multiple_of("in_features", 16), r.multiple_of("out_features", 16))))),
)

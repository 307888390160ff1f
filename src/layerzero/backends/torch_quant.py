"""Quantization, and linear layers with quantized weights, by torch.

One thread of a CPU with AVX-512, a bf16 layer of 4096 x 4096: torch's int8 kernel beats dequantizing up to 16 rows,
its int4 kernel up to 32; beyond that the weight is dequantized in slices that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.dequantize import OP as dequantize
from ..ops.dequantize import checked_size
from ..ops.formulas.quant import (
    E2M1,
    FORMATS,
    NF4,
    NF4_MIDPOINTS,
    TINY,
    Format,
    encode,
    make_scales,
    pack_nibbles,
    spread,
)
from ..ops.quantize import OP as quantize
from ..ops.quantize import check_given, cloned
from ..ops.quantized_linear import OP as quantized_linear
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ..spec.rules import (
    Condition,
    absent,
    any_of,
    at_least,
    at_most,
    contiguous,
    cpu_isa,
    device,
    dtypes,
    equals,
    multiple_of,
    one_of,
    plain_tensors,
)
from ._packing import PACKED

SLICE = 1 << 20            # weights dequantized at a time: 2 MiB of bf16, so that the product finds them in the cache


FEW_CODES = 8192           # of fp8 on the CPU: up to here torch's own cast is as fast as a table

PLAIN = (Tensor, torch.nn.Parameter)


# Scales by blocks, without writing one scale for each element where the blocks divide the rows.

def _combined(how: Callable[..., Tensor], values: Tensor, scales: Tensor, block_size: int, block_rows: int) -> Tensor:
    """how(values, scale of each)."""
    width = values.shape[-1]
    whole_rows = values.dim() == 1 or scales.shape[-2] in (1, values.shape[-2])
    if scales.shape[-1] in (1, width) or width % block_size or not whole_rows:
        return how(values, spread(scales, values.shape, block_size, block_rows))
    return how(values.unflatten(-1, (-1, block_size)), scales[..., None]).flatten(-2)


# Values by table. A table is kept for plain tensors only: under tracing it must be made anew.

_tables: dict[tuple[Any, ...], Tensor] = {}


def _table(like: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """The values of all 256 bytes: one of an 8-bit format, two of a 4-bit one."""
    key = (name, dtype, like.device)
    found = _tables.get(key) if type(like) in PLAIN else None
    if found is None:
        found = _make_table(name, dtype, like.device)
        if type(found) is Tensor and type(like) in PLAIN:
            _tables[key] = found
    return found


def _make_table(name: str, dtype: torch.dtype, home: torch.device) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=home)
    if FORMATS[name].bits == 8:
        return codes.view(FORMATS[name].storage).to(dtype)
    values = tuple(map(float, range(-8, 8))) if name == "int4" else NF4 if name == "nf4" else E2M1
    single = torch.tensor(values, device=home, dtype=dtype)
    return torch.stack((single[(codes & 15).long()], single[(codes >> 4).long()]), -1)


def _values(q: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """The values of codes in units of their scale, int4 with 8 taken off; fast where torch's own cast is slow."""
    if form.name == "int8" or (form.bits == 8 and (q.device.type != "cpu" or q.numel() < FEW_CODES)):
        return q.to(dtype)
    found = _table(q, form.name, dtype)
    if form.bits == 8:
        return found.index_select(0, q.view(torch.uint8).reshape(-1).int()).view(q.shape)
    pairs = found.view(torch.int32 if dtype.itemsize == 2 else torch.int64).squeeze(-1)
    return pairs.index_select(0, q.reshape(-1).int()).view(dtype).view(*q.shape[:-1], 2 * q.shape[-1])


def _restored(q: Tensor, scales: Tensor, zeros: Tensor | None, form: Format, size: int, block_size: int,
              block_rows: int, dtype: torch.dtype) -> Tensor:
    values = _values(q, form, dtype)[..., :size]           # our own, so it may be written to
    if zeros is not None:
        shift = zeros.to(dtype) if form.name == "int8" else zeros.to(dtype) - 8.0
        values = _combined(Tensor.sub_, values, shift, block_size, block_rows)
    return _combined(Tensor.mul_, values, scales.to(dtype), block_size, block_rows)


def _dequantize() -> Callable[..., Any]:
    def run(q: Tensor, scales: Tensor, zeros: Tensor | None = None, *, format: str, block_size: int = 0,
            block_rows: int = 1, global_scale: Tensor | None = None, size: int | None = None,
            out_dtype: str = "float32") -> Tensor:
        form = FORMATS[format]
        block_size = block_size or form.block_size
        size = checked_size(q, scales, zeros, format, block_size, block_rows, global_scale, size)
        scales = scales.float() if global_scale is None else scales.float() * global_scale.float()
        if form.bits == 8 and zeros is None and scales.shape[-1] == 1 and block_rows == 1:
            found = _values(q, form, torch.float32).mul_(scales)           # a row is often all there is: no detours
        else:
            found = _restored(q, scales, zeros, form, size, block_size, block_rows, torch.float32)
        return found if out_dtype == "float32" else found.to(getattr(torch, out_dtype))

    return run


# Codes.

def _quantize() -> Callable[..., Any]:
    """Fewer passes over the data than the formula, and the nearest table entry by search."""
    def run(x: Tensor, format: str, granularity: str | None = None, block_size: int = 0, symmetric: bool = True, *,
            block_rows: int = 1, scales: Tensor | None = None, zeros: Tensor | None = None,
            global_scale: Tensor | None = None) -> Any:
        form = FORMATS[format]
        granularity = granularity or form.granularity
        block_size = block_size or form.block_size
        wide = x.detach().float()
        # Where the sum is finite, so is every value. A GPU would have to be waited for.
        clean = type(x) in PLAIN and x.device.type == "cpu" and bool(wide.sum().isfinite())
        if scales is None:
            finite = wide if clean else wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            scales, zeros, global_scale = make_scales(
                finite, form, granularity, block_size, block_rows, symmetric, global_scale)
        else:
            check_given(x, granularity, block_size, block_rows, scales, zeros, global_scale)
            scales, zeros, global_scale = scales.clone(), cloned(zeros), cloned(global_scale)
        whole = scales.float() if global_scale is None else scales.float() * global_scale.float()
        ratio = _combined(torch.div, wide, whole, block_size, block_rows)
        shift = None if zeros is None else spread(zeros, x.shape, block_size, block_rows)
        codes = _codes(ratio, form, shift, clean)
        return tuple(t for t in (codes, scales, zeros, global_scale) if t is not None)

    return run


def _codes(ratio: Tensor, form: Format, zeros: Tensor | None, clean: bool) -> Tensor:
    """`ratio` is overwritten."""
    if form.name.startswith("fp8"):
        return ratio.clamp_(-form.largest, form.largest).to(form.storage)
    if not clean:
        ratio.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if form.name == "int8":
        ratio.round_()
        if zeros is not None:
            ratio.add_(zeros)
        return ratio.clamp_(-127.0 if zeros is None else -128.0, 127.0).to(torch.int8)
    if form.name == "int4":
        ratio.round_().add_(8.0 if zeros is None else zeros)
        return pack_nibbles(ratio.clamp_(1.0 if zeros is None else 0.0, 15.0).to(torch.uint8))
    if form.name == "nf4":
        bounds = torch.tensor(NF4_MIDPOINTS, device=ratio.device)
        return pack_nibbles(torch.bucketize(ratio, bounds, out_int32=True).to(torch.uint8))
    return encode(ratio, form, None)           # the formula's comparisons are as fast as anything


# Linear layers.

def _dequantized_linear() -> Callable[..., Any]:
    """The weight is dequantized in slices of its rows, and each is multiplied while it is in the cache."""
    def run(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None, *,
            format: str, group_size: int = 0) -> Tensor:
        form, k, n = FORMATS[format], x.shape[-1], weight_q.shape[0]
        share = n // scales.shape[0]
        if scales.shape[1] == 1 and zeros is None and form.bits == 8 and x.dtype != torch.float16:
            # Codes of 8 bits are exact in bf16 and float32, so a row's scale can wait; in float16 sums might overflow.
            parts = [F.linear(x, _values(weight_q[i:j], form, x.dtype)) for i, j in _slices(x, n, k, 1)]
            by = (scales if share == 1 else scales.repeat_interleave(share, 0))[:, 0]
            out = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(by.to(x.dtype))
            return out if bias is None else out.add_(bias)
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype      # a small scale would lose bits in float16
        parts = []
        for i, j in _slices(x, n, k, share):
            mine = slice(i // share, -(-j // share))
            weight = _restored(weight_q[i:j], scales[mine], None if zeros is None else zeros[mine], form, k,
                               group_size or k, share, wide).to(x.dtype)
            parts.append(F.linear(x, weight, None if bias is None else bias[i:j]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    return run


def _slices(x: Tensor, rows: int, width: int, share: int) -> list[tuple[int, int]]:
    """Which rows of the weight go together; all of them where there is no cache to fit."""
    if x.device.type != "cpu" or type(x) not in PLAIN:
        return [(0, rows)]
    step = max(1, SLICE // max(width, 1))
    step = -(-step // share) * share
    return [(i, min(i + step, rows)) for i in range(0, rows, step)]


def _int8_in_place() -> Callable[..., Any]:
    product = torch._weight_int8pack_mm

    def run(x: Tensor, weight_q: Tensor, scales: Tensor, bias: Tensor | None = None, *, format: str) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = product(flat, weight_q, scales[:, 0].to(x.dtype)).view(*x.shape[:-1], len(weight_q))
        return out if bias is None else out.add_(bias)

    return run


def _int4_packed() -> Callable[..., Any]:
    product, convert = torch._weight_int4pack_mm_for_cpu, torch._convert_weight_to_int4pack_for_cpu

    def codes(weight_q: Tensor) -> Tensor:
        return convert(torch.stack((weight_q & 15, weight_q >> 4), -1).flatten(1).int(), 1)

    def run(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None, *,
            format: str, group_size: int = 0) -> Tensor:
        def both(scales: Tensor, *zeros: Tensor) -> Tensor:
            by = scales.float()
            shift = (8.0 - zeros[0].float()) * by if zeros else torch.zeros_like(by)
            return torch.stack((by.t(), shift.t()), -1).to(x.dtype).contiguous()

        given = (scales,) if zeros is None else (scales, zeros)
        packed = PACKED.get("int4", codes, weight_q)
        by = PACKED.get(f"int4 scales {x.dtype}", both, *given)
        flat = x.reshape(-1, x.shape[-1])
        out = product(flat, codes(weight_q) if packed is None else packed, group_size,
                      both(*given) if by is None else by).view(*x.shape[:-1], len(weight_q))
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
        by = (scales if share == 1 else scales.repeat_interleave(share, 0))[:, 0].float()
        out = product(codes, weight_q.t()).float().mul_(by).mul_(step)
        out = out if bias is None else out.add_(bias.float())
        return out.to(x.dtype).view(*x.shape[:-1], len(weight_q))

    return run


WEIGHT_ONLY: tuple[Condition, ...] = (equals("activations", "none"),)
ONE_SCALE_PER_ROW: tuple[Condition, ...] = (
    absent("zeros.dtype"), equals("groups", 1, Code.SCALE_LAYOUT_MISMATCH), one_of("group_size", 0),
    equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH))
ON_CPU: tuple[Condition, ...] = (device("cpu"), cpu_isa("avx512f"), plain_tensors(), contiguous("weight_q"),
                                   contiguous("x"))

CODES_ONLY = "reads the codes, and writes no dequantized weight"

KERNELS = (
    Kernel("torch.quantize", quantize, _quantize, prior=1.4, overhead_us=37.0, baseline=True,
           workspace="8 * rows * width"),
    Kernel("torch.dequantize", dequantize, _dequantize, prior=3.0, overhead_us=17.0, baseline=True,
           workspace="12 * rows * packed"),
    Kernel("torch.dequantized_linear", quantized_linear, _dequantized_linear, prior=3.0, overhead_us=25.0,
           baseline=True, requires=WEIGHT_ONLY, workspace="8 * in_features * out_features"),
    Kernel("torch.int8_linear", quantized_linear, _int8_in_place, prior=9.0, overhead_us=5.0, differentiable=False,
           less_work=CODES_ONLY,
           requires=(*WEIGHT_ONLY, *ON_CPU, one_of("format", "int8", code=Code.QUANT_FORMAT_UNSUPPORTED),
                     *ONE_SCALE_PER_ROW, contiguous("scales"), dtypes("bfloat16"), at_most("rows", 16),
                     # it reads whole vectors: the process dies on rows of other lengths
                     multiple_of("in_features", 32))),
    Kernel("torch.int4_linear", quantized_linear, _int4_packed, prior=10.0, overhead_us=8.0, differentiable=False,
           less_work=CODES_ONLY,
           traceable=False, workspace="4 * in_features * out_features",
           requires=(*WEIGHT_ONLY, *ON_CPU, one_of("format", "int4", code=Code.QUANT_FORMAT_UNSUPPORTED),
                     equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH), dtypes("bfloat16"), at_most("rows", 32),
                     one_of("group_size", 32, 64, 128, 256, code=Code.SCALE_LAYOUT_MISMATCH),
                     multiple_of("in_features", 32), multiple_of("out_features", 16)),
           note="keeps a second copy of the weight, arranged for torch's int4 kernel"),
    Kernel("torch.int8_dynamic_linear", quantized_linear, _int8_dynamic, prior=9.0, overhead_us=15.0,
           differentiable=False, less_work="multiplies the codes as they are", requires=(
               device("cpu", "cuda"), one_of("activations", "int8"), absent("zeros.dtype"), one_of("group_size", 0),
               at_most("in_features", 1 << 17),
               dtypes("bfloat16", "float16", "float32"), plain_tensors(),
               any_of(device("cpu"), at_least("rows", 17)), any_of(device("cpu"), multiple_of("in_features", 8)),
               any_of(device("cpu"), multiple_of("out_features", 8)))),
)

"""Our CUDA kernels on a GPU: are they right, how fast are they beside our Triton kernels and torch,
and which configuration is fastest.

    python benchmarks/cuda_kernels.py [--only decode,paged,gemv,sample] [--match TEXT,...] [--quick] [--check [N]]

Times are taken as benchmarks/triton_kernels.py takes them: a replayed CUDA graph, the L2 cache
swept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton_kernels as ours_in_triton
from triton_kernels import BF16, race, rand

from layerzero.backends.cuda import KERNELS
from layerzero.backends.cuda.attention import decode
from layerzero.backends.triton import gemv as triton_gemv
from layerzero.backends.triton import norm as triton_norm
from layerzero.backends.triton import quantized as triton_quantized
from layerzero.backends.triton import sampling as triton_sampling
from layerzero.backends.triton.attention import decode as triton_decode
from layerzero.ops import quantize as quantize_op
from layerzero.ops import sample as sample_op

DECODE = ((8, 2), (8, 3), (4, 3), (4, 2))                    # warps, stages
GEMV = ((16, 4, 8), (16, 4, 5), (16, 8, 8), (8, 4, 8), (8, 8, 8), (8, 4, 8, 1, 2), (24, 4, 6),
        (16, 4, 4, 1, 1, 2), (8, 4, 6, 1, 1, 2), (8, 8, 6, 1, 1, 2), (16, 8, 4, 1, 1, 2),
        (16, 4, 8, 2), (16, 2, 6, 2), (16, 4, 6, 2))
SAMPLE = ((4, 512), (8, 512), (4, 1024), (8, 1024), (2, 1024), (8, 256), (4, 512, 2048),
          (8, 512, 512))


def bench_decode() -> None:
    for name, b, t, k, hkv in (("B1 K1024", 1, 1, 1024, 8), ("B1 K4096", 1, 1, 4096, 8),
                               ("B8 K4096", 8, 1, 4096, 8), ("B32 K4096", 32, 1, 4096, 8),
                               ("B1 K32768", 1, 1, 32768, 8), ("B4 Q8 K8192", 4, 8, 8192, 8),
                               ("B1 MQA K8192", 1, 1, 8192, 1)):
        q, key, value = rand(b, 32, t, 128), rand(b, hkv, k, 128), rand(b, hkv, k, 128)
        if 32 // hkv * t > decode.MAX_ROWS:
            continue
        mask = torch.ones(t, k, dtype=torch.bool, device="cuda").tril(k - t)
        want = F.scaled_dot_product_attention(q.float(), key.float(), value.float(), mask,
                                              enable_gqa=True)

        def ours(made: decode.Config | None, q: Any = q, key: Any = key, value: Any = value,
                 t: int = t) -> Callable[[], Any]:
            return lambda: decode.dense(q, key, value, t > 1, chosen=made)

        options = [("default", ours(None))]
        for (warps, stages), splits in itertools.product(DECODE, (1, 2, 4, 8)):
            if (32 <= b * hkv * splits <= 600 and splits * warps * 16 <= 2 * k
                and (t == 1 or stages > 2)):
                made = decode.Config(warps, stages, splits)
                options.append((str(tuple(made)), ours(made)))
        race(f"decode {name}", options, [
            ("triton", lambda q=q, key=key, value=value, t=t: triton_decode.dense(
                q, key, value, t > 1, None, "bottom_right")),
            ("sdpa",
             lambda q=q, key=key, value=value: F.scaled_dot_product_attention(q, key, value,
                                                                              enable_gqa=True))],
            want)


def bench_paged() -> None:
    for name, b, k, page in (("B1 K4096", 1, 4096, 16), ("B8 K4096", 8, 4096, 16),
                             ("B32 K4096", 32, 4096, 16),
                             ("B32 K512-4096", 32, 4096, 16),
                             ("B32 K512-4096 pages of 64", 32, 4096, 64)):
        pages = b * k // page
        key, value = rand(pages, page, 8, 128), rand(pages, page, 8, 128)
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(b, -1)
        lengths = torch.full((b,), k, device="cuda", dtype=torch.int32)
        if "-" in name:                            # ragged
            lengths = torch.linspace(512, 4096, b,
                                     device="cuda").to(torch.int32)[
                                         torch.randperm(b, device="cuda")]
        seen = (torch.arange(k, device="cuda") < lengths[:, None])[:, None, None, :]
        q = rand(b, 32, 128)
        dense_k, dense_v = (t[table.long()].view(b, k, 8, 128).transpose(1, 2).contiguous()
                            for t in (key, value))
        want = F.scaled_dot_product_attention(q[:, :, None].float(), dense_k.float(),
                                              dense_v.float(), seen, enable_gqa=True)[:, :, 0]

        def ours(made: decode.Config | None, q: Any = q, key: Any = key, value: Any = value,
                 table: Any = table,
                 lengths: Any = lengths) -> Callable[[], Any]:
            return lambda: decode.paged(q, key, value, table, lengths, chosen=made)

        options = [("default", ours(None))]
        for (warps, stages), splits in itertools.product(DECODE, (1, 2, 4, 8)):
            if 32 <= b * 8 * splits <= 1100:
                made = decode.Config(warps, stages, splits)
                options.append((str(tuple(made)), ours(made)))
        race(f"paged {name}", options,
             [("triton", lambda a=(q, key, value, table, lengths): triton_decode.paged(*a))],
             want)


def bench_gemv() -> None:
    from layerzero.backends.cuda.linear import gemv

    for rows, k, n in ((1, 4096, 14336), (1, 14336, 4096), (1, 4096, 6144), (8, 4096, 14336),
                       (16, 4096, 14336)):
        x, w = rand(rows, k), rand(n, k) / k ** 0.5
        for format, group in (("int4", 128), ("int8", 0), ("fp8_e4m3", 0)):
            stored, scales = quantize_op.reference(w.float(), format, "block" if group
                                                   else "channel", group or k)[:2]
            want = x.double() @ ours_in_triton._dequantized(stored, scales, format, group or k).t()
            given = (x, stored, scales, None, None, format, group)
            options: list[tuple[str, Callable[[], Any]]] = [("default",
                                                             lambda a=given: gemv.launch(*a))]
            options += [(str(tuple(made)), lambda a=given, made=made: gemv.launch(*a, chosen=made))
                        for made in (gemv.Config(*c) for c in GEMV)]
            others = [("triton", (lambda a=given: triton_gemv.launch(*a)) if rows == 1 else
                       lambda a=given: triton_quantized.quantized_linear(
                           *a[:5], format=a[5], group_size=a[6])),
                      ("F.linear", lambda x=x, w=w: F.linear(x, w))]
            race(f"gemv {rows}x{k}->{n} {format}", options, others, want)


def bench_sample() -> None:
    from layerzero.backends.cuda.sampling import sample as sampling

    for batch, dtype in ((64, torch.float32), (64, BF16), (1, torch.float32)):
        for name, given in (("top_p 0.9", {"top_p": 0.9}), ("top_k 50", {"top_k": 50}),
                            ("k50 p0.9 t0.8", {"top_k": 50, "top_p": 0.9, "temperature": 0.8}),
                            ("min_p 0.05", {"min_p": 0.05}), ("no filter", {}),
                            ("greedy", {"temperature": 0.0})):
            logits = rand(batch, 128256, dtype=dtype) * 3
            uniform = torch.rand(batch, device="cuda", dtype=torch.float64)
            by = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
            want = sample_op.reference(logits, **given, uniforms=uniform)
            fixed = (logits, by["temperature"], by["top_k"], by["top_p"], by["min_p"])
            ours = (*fixed, 0, False, sampling.Rows(uniform), False)
            options: list[tuple[str, Callable[[], Any]]] = [("default",
                                                             lambda a=ours: sampling.choose(*a)[0])]
            if name == "top_p 0.9":
                options += [(str(tuple(made)),
                             lambda a=ours, made=made: sampling.choose(*a, chosen=made)[0])
                            for made in (sampling.Config(*c) for c in SAMPLE)]
            race(f"sample {batch}x128256 {str(dtype)[6:]} {name}", options,
                 [("triton", lambda a=(*fixed, uniform, 0, False): triton_sampling.choose(*a)[0])],
                 want, keep=3)


def bench_norm() -> None:
    from layerzero.backends.cuda.norm import norm

    for rows in (1, 16, 128, 512, 4096):
        x, y, w = rand(rows, 4096), rand(rows, 4096), rand(4096)
        wide = x.double()
        want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.double()
        options: list[tuple[str, Callable[[], Any]]] = [
            (str(n or "default"), lambda a=(x, None, w, 1e-6, 0.0, n): norm.launch(*a)[0])
            for n in (0, 128, 256, 512)]
        race(f"rms_norm {rows}x4096", options, [
            ("triton", lambda a=(x, w): triton_norm.rms_norm(*a)),
            ("F.rms_norm", lambda x=x, w=w: F.rms_norm(x, w.shape, w, 1e-6))], want)
        total = x + y
        wide = total.double()
        want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.double()
        race(f"add_rms_norm {rows}x4096", [("default", lambda a=(x, y, w): norm.add_rms_norm(*a))],
             [("triton", lambda a=(x, y, w): triton_norm.add_rms_norm(*a))], (want, total))


BENCHES = {"decode": bench_decode, "paged": bench_paged, "gemv": bench_gemv, "sample": bench_sample,
           "norm": bench_norm}


if __name__ == "__main__":
    ours_in_triton.main("cuda_kernels", __doc__, BENCHES, KERNELS)

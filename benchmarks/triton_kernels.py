"""Our Triton kernels on a GPU: are they right, and how fast are they beside torch.

    python benchmarks/triton_kernels.py [--only decode,norm,...] [--match TEXT,...] [--quick] [--check [N]]

Each time is that of a replayed CUDA graph with one call in it, after more than the L2 cache was
read: the median of 40. A graph of one trivial kernel is printed first: nothing can be faster.
`--check` runs the contract's own cases first, which compiles a kernel for each of them. `--quick`
times the defaults only; the other configurations take a second or two each to compile. Without
`--json` the results go to $OUT, if that is set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import TritonError

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from layerzero.backends.triton import KERNELS, codes, gated, gemv, norm, rotary, sampling
from layerzero.backends.triton.attention import decode
from layerzero.ops import quantize as quantize_op
from layerzero.ops import sample as sample_op
from layerzero.spec.kernel import Kernel
from layerzero.tuning.harness import GraphWatch
from layerzero.verify.kernel.contract import check_case

BF16 = torch.bfloat16
# of a configuration that does not fit
ERRORS = (AssertionError, RuntimeError, TypeError, ValueError, TritonError)
RUNS = 40
FOUND: list[dict[str, Any]] = []
QUICK: list[bool] = []
WARM: list[bool] = []
MATCH: list[str] = []
watch = cache(GraphWatch)


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of one call in a graph; unless --warm, nothing of its input in the cache."""
    return watch(not WARM).median(call, RUNS)


def furthest(got: Any, want: Any) -> float:
    """The largest difference over all results; 0 or 1 for what is no float."""
    pairs = zip(got, want) if isinstance(got, (tuple, list)) else ((got, want),)
    worst = 0.0
    for a, b in pairs:
        if a.is_floating_point() and a.element_size() > 1:
            gap = (a.double() - b.double()).abs().max().item()
            worst = max(worst, float("inf") if gap != gap
                        else gap / max(b.double().abs().max().item(), 1e-30))
        else:
            worst = max(worst, float(not torch.equal(a.view(torch.uint8), b.view(torch.uint8))))
    return worst


def race(shape: str, ours: Iterable[tuple[str, Callable[[], Any]]],
         others: Iterable[tuple[str, Callable[[], Any]]],
         want: Any, keep: int = 4) -> None:
    """One line: the best of our configurations, then the others.

    Of ours the error relative to the largest result.
    """
    if MATCH and not any(text in shape for text in MATCH):
        return
    rows, failed, start = [], [], time.time()
    for name, call in itertools.islice(ours, 1 if QUICK else None):
        try:
            error = furthest(call(), want)
            rows.append((timed(call), name, error))
        except ERRORS as e:                        # left out, and said
            failed.append(f"{name}: {type(e).__name__}: {str(e).strip().splitlines()[-1][:90]}")
            torch.cuda.synchronize()
    rows.sort()
    beside = []
    for name, call in others:
        try:
            beside.append((name, timed(call)))
        except ERRORS as e:
            failed.append(f"{name}: {type(e).__name__}: {str(e).strip().splitlines()[-1][:90]}")
    FOUND.append({"shape": shape, "ours": rows, "others": beside, "failed": failed})
    best = ", ".join(f"{us:.2f} {name} (err {error:.1e})" for us, name, error in rows[:keep])
    print(f"{shape:34} ours {best} | " + ", ".join(f"{name} {us:.2f}" for name, us in beside)
          + (f" | failed {len(failed)}: {failed[0]}" if failed else "")
          + f"  [{time.time() - start:.0f} s]",
          flush=True)


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def bench_decode() -> None:
    for name, b, t, k, hkv in (("B1 K1024", 1, 1, 1024, 8), ("B1 K4096", 1, 1, 4096, 8),
                               ("B8 K4096", 8, 1, 4096, 8), ("B32 K4096", 32, 1, 4096, 8),
                               ("B1 K32768", 1, 1, 32768, 8), ("B4 Q8 K8192", 4, 8, 8192, 8),
                               ("B1 MQA K8192", 1, 1, 8192, 1)):
        q, key, value = rand(b, 32, t, 128), rand(b, hkv, k, 128), rand(b, hkv, k, 128)
        mask = torch.ones(t, k, dtype=torch.bool, device="cuda").tril(k - t)
        want = F.scaled_dot_product_attention(q.float(), key.float(), value.float(), mask,
                                              enable_gqa=True)

        def ours(made: decode.Config | None, q: Any = q, key: Any = key, value: Any = value,
                 t: int = t) -> Callable[[], Any]:
            return lambda: decode.dense(q, key, value, t > 1, None, "bottom_right", chosen=made)

        homes, options = b * hkv, [("default", ours(None))]
        shapes = (((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3), (32, 4, 6)) if t == 1
                  else ((64, 4, 3), (128, 8, 3)))
        for (block, warps, stages), waves in itertools.product(shapes, (1, 2, 4)):
            splits = max(1, min(132 * waves // homes, k // block))
            made = decode.Config(block, warps, stages, splits)
            options.append((str(tuple(made)), ours(made)))
        race(f"decode {name}", options, [
            ("sdpa",
             lambda q=q, key=key, value=value: F.scaled_dot_product_attention(q, key, value,
                                                                              enable_gqa=True))],
            want)
    bench_paged()


def bench_paged() -> None:
    for name, b, k, stored in (("B1 K4096", 1, 4096, BF16), ("B8 K4096", 8, 4096, BF16),
                               ("B32 K4096", 32, 4096, BF16),
                               ("B32 K512-4096", 32, 4096, BF16),
                               ("B8 K4096 fp8", 8, 4096, torch.float8_e4m3fn),
                               ("B8 K4096 int8", 8, 4096, torch.int8)):
        pages = b * k // 16
        key, value = ((rand(pages, 16, 8, 128) * 4).to(stored) for _ in "kv")
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(b, -1)
        lengths = torch.full((b,), k, device="cuda", dtype=torch.int32)
        if "-" in name:                            # ragged
            lengths = torch.linspace(512, 4096, b,
                                     device="cuda").to(torch.int32)[
                                         torch.randperm(b, device="cuda")]
        seen = (torch.arange(k, device="cuda") < lengths[:, None])[:, None, None, :]
        q = rand(b, 32, 128)
        scale = torch.full((), 0.25, device="cuda")
        by = {"key_scale": scale, "value_scale": scale}
        dense_k, dense_v = ((t.to(torch.float32) * 0.25).to(BF16)[table.long()].view(
            b, k, 8, 128).transpose(1, 2)
                            .contiguous() for t in (key, value))
        want = F.scaled_dot_product_attention(q[:, :, None].float(), dense_k.float(),
                                              dense_v.float(), seen, enable_gqa=True)[:, :, 0]
        mask = seen if "-" in name else None

        def ours(made: decode.Config | None, q: Any = q, key: Any = key, value: Any = value,
                 table: Any = table, lengths: Any = lengths, by: Any = by) -> Callable[[], Any]:
            return lambda: decode.paged(q, key, value, table, lengths, **by, chosen=made)

        options = [("default", ours(None))]
        for (block, warps, stages), waves in itertools.product(((64, 4, 3), (64, 4, 4)),
                                                               (1, 2, 4, 8)):
            made = decode.Config(block, warps, stages,
                                 max(1, min(132 * waves // (b * 8), k // block)))
            options.append((str(tuple(made)), ours(made)))

        def in_one_piece(q: Any = q, k: Any = dense_k, v: Any = dense_v, mask: Any = mask) -> Any:
            return F.scaled_dot_product_attention(q[:, :, None], k, v, mask, enable_gqa=True)

        race(f"paged {name}", options, [("sdpa over the same keys in one piece", in_one_piece)],
             want)


def bench_norm() -> None:
    for rows, hidden in ((1, 4096), (16, 4096), (512, 4096), (4096, 4096), (4096 * 32, 128)):
        x, y, w = rand(rows, hidden), rand(rows, hidden), rand(hidden)
        wide = x.double()
        want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.double()
        options = [("default", lambda x=x, w=w: norm.rms_norm(x, w))]
        tiles = (1,) if hidden > 1024 else (8, 32)
        for tile, warps, waves in itertools.product(tiles, (2, 4, 8, 16), (0, 4, 8)):
            programs = -(-rows // tile)
            if waves and programs <= 132 * waves:
                continue
            made = (tile, warps, 132 * waves if waves else programs, 3 if waves else 1)
            options.append((str(made),
                            lambda x=x, w=w, made=made: norm.launch(x, None, w, 1e-6, 0.0,
                                                                    made)[0]))
        race(f"rms_norm {rows}x{hidden}", options,
             [("F.rms_norm", lambda x=x, w=w: F.rms_norm(x, w.shape, w, 1e-6))],
             want)
        total = x + y
        wide = total.double()
        want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.double()
        race(f"add_rms_norm {rows}x{hidden}",
             [("default", lambda x=x, y=y, w=w: norm.add_rms_norm(x, y, w))],
             [("eager", lambda x=x, y=y, w=w: F.rms_norm(x + y, w.shape, w, 1e-6))], (want, total))


def bench_gemv() -> None:
    for rows, k, n in ((1, 4096, 14336), (1, 14336, 4096), (1, 4096, 6144), (4, 4096, 14336),
                       (16, 4096, 14336)):
        x, w = rand(rows, k), rand(n, k) / k ** 0.5
        torch_linear = [("F.linear", lambda x=x, w=w: F.linear(x, w))]
        for format, group in (("", 0), ("int8", 0), ("fp8_e4m3", 0), ("int4", 128)):
            scales = None
            stored, whole = w, w.double()
            if format:
                made = quantize_op.reference(w.float(), format, "block" if group else "channel",
                                             group or k)
                stored, scales = made[0], made[1]
                whole = _dequantized(stored, scales, format, group or k)
            want = (x.double() @ whole.t())
            options = [("default", lambda a=(x, stored, scales, None, None, format,
                                             group): gemv.launch(*a))]
            width = stored.shape[1]
            configs = []
            if rows == 1 and n == 14336:
                configs = [(4, 128, 4, 1), (8, 128, 4, 1)]
                if format == "int4":
                    configs = [(block, 128, 4, stages, each) for block, stages, each in (
                        (2, 1, 3), (2, 1, 4), (2, 1, 6), (2, 1, 8), (4, 1, 2), (4, 1, 3), (1, 1, 6),
                        (1, 1, 8))]
                    configs += [(2, 64, 2, 1, 8), (4, 256, 8, 1, 1), (4, 256, 8, 1, 2),
                                (2, 256, 8, 1, 2)]
            elif rows == 1 and format == "int4":
                configs = [(2, 512, 16, 1, 1), (4, 512, 16, 1, 1), (1, 512, 16, 1, 1),
                           (2, 128, 4, 1, 4),
                           (2, 256, 8, 1, 2)]
            elif rows == 1:
                configs = [(4, 128, 4, 1), (2, 128, 4, 1)]
            elif rows == 16:
                configs = [(block, min(columns, group // 2 or columns), 4, stages, splits)
                           for block, columns, stages, splits in ((32, 128, 4, 1), (64, 128, 3, 1),
                                                                  (64, 128, 4, 2),
                                                                  (64, 64, 5, 1))
                           if splits * columns * 4 <= width]
            for made in (gemv.Config(*c) for c in configs):
                options.append((str(tuple(made)),
                                lambda a=(x, stored, scales, None, None, format, group, made):
                                gemv.launch(*a)))
            race(f"gemv {rows}x{k}->{n} {format or 'bf16'}", options, torch_linear, want)


def _dequantized(stored: torch.Tensor, scales: torch.Tensor, format: str,
                 group: int) -> torch.Tensor:
    if format == "int4":
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(1).float() - 8
    return (stored.float() * scales.repeat_interleave(group, 1)[:, :stored.shape[1]]).to(
        BF16).double()


def bench_sample() -> None:
    for batch, dtype in ((64, torch.float32), (64, BF16), (1, torch.float32)):
        for name, given in (("top_p 0.9", {"top_p": 0.9}), ("top_k 50", {"top_k": 50}),
                            ("k50 p0.9 t0.8", {"top_k": 50, "top_p": 0.9, "temperature": 0.8}),
                            ("min_p 0.05", {"min_p": 0.05}), ("no filter", {}),
                            ("greedy", {"temperature": 0.0})):
            logits = rand(batch, 128256, dtype=dtype) * 3
            uniform = torch.rand(batch, device="cuda", dtype=torch.float64)
            by = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
            want = sample_op.reference(logits, **given, uniforms=uniform)

            def ours(chunk: int, tile: int, warps: int, narrowings: int, logits: Any = logits,
                     by: Any = by,
                     uniform: Any = uniform) -> Callable[[], Any]:
                return lambda: sampling.choose(logits, by["temperature"], by["top_k"], by["top_p"],
                                               by["min_p"], uniform, 0, False, chunk, tile, warps,
                                               narrowings)[0]

            options = [("default", ours(0, 4096, 8, 3))]
            if name == "top_p 0.9":
                options += [(str(c), ours(*c))
                            for c in ((8192, 4096, 8, 3), (16384, 2048, 8, 3), (16384, 4096, 16, 3),
                                                         (8192, 4096, 8, 2))]
            others = [("sort", lambda logits=logits: logits.sort(-1))]
            if "top_k" in given:
                others.append(("topk", lambda logits=logits: logits.topk(50)))
            race(f"sample {batch}x128256 {str(dtype)[6:]} {name}", options, others, want, keep=3)


def bench_rest() -> None:
    for b, s in ((1, 1), (32, 1), (1, 4096)):
        q, k = rand(b, 32, s, 128), rand(b, 8, s, 128)
        angle = torch.rand(s, 64, device="cuda") * 6
        cos, sin = angle.cos(), angle.sin()

        def eager(q: Any = q, k: Any = k, cos: Any = cos, sin: Any = sin) -> Any:
            c, n = torch.cat((cos, cos), -1).to(BF16), torch.cat((sin, sin), -1).to(BF16)
            return tuple(t * c + torch.cat((-t[..., 64:], t[..., :64]), -1) * n for t in (q, k))

        want = tuple(torch.cat((t[..., :64].double() * cos - t[..., 64:].double() * sin,
                                t[..., 64:].double() * cos + t[..., :64].double() * sin), -1)
                     for t in (q, k))
        options = [("default",
                    lambda q=q, k=k, c=cos, n=sin: rotary.rope(q, k, c, n, style="rotate_half"))]
        for tile, warps in itertools.product((512, 2048), (2, 4, 8)):
            out = torch.empty_like(q), torch.empty_like(k)

            def ours(q: Any = q, k: Any = k, c: Any = cos, n: Any = sin, out: Any = out,
                     tile: int = tile,
                     warps: int = warps) -> Any:
                rotary.rotate(q, k, *out, c, n, None, "rotate_half", "bhsd", tile, warps)
                return out

            options.append((f"({tile}, {warps})", ours))
        race(f"rope B{b} S{s}", options, [("eager", eager)], want)
    for rows in (1, 512, 4096):
        g = rand(rows, 2 * 14336)
        gates, ups = g.chunk(2, -1)
        want = F.silu(gates.double()) * ups.double()
        options = [(f"({block}, {warps})",
                    lambda a=(gates, ups, "swiglu", block, warps): gated.gate(*a))
                   for block, warps in ((2048, 4), (1024, 4), (1024, 2), (4096, 8), (2048, 8))]
        race(f"swiglu {rows}x14336", options, [("eager", lambda a=gates, b=ups: F.silu(a) * b)],
             want)
    for rows, format, by, size in ((1, "int8", "channel", 0), (4096, "int8", "channel", 0),
                                   (4096, "fp8_e4m3", "channel", 0),
                                   (4096, "fp8_e4m3", "block", 128)):
        x = rand(rows, 4096)
        want = quantize_op.reference(x, format, by, size)
        options = [(f"({tile}, {warps})",
                    lambda a=(x, format, by, size, 1, None, tile, warps): codes.encode(*a))
                   for tile, warps in ((4096, 4), (4096, 8), (4096, 16), (8192, 8))]
        race(f"quantize {rows}x4096 {format} {by}", options,
             [("eager", lambda a=(x, format, by, size): quantize_op.reference(*a))], want)


def check(kernels: Iterable[Kernel], step: int) -> None:
    """Every step-th case of each contract, at both half precisions."""
    warnings.simplefilter("ignore")
    for kernel in kernels:
        start = time.time()
        results = [check_case(kernel, case, dtype, "cuda") for dtype in ("bfloat16", "float16")
                   for case in kernel.op.cases[::step]]
        wrong = [str(r) for r in results if r.status == "failed"]
        ran = sum(r.status != "skipped" for r in results)
        FOUND.append({"kernel": kernel.id, "ran": ran, "failed": wrong})
        print(f"{kernel.id:32} {ran - len(wrong)} of {ran} passed  [{time.time() - start:.0f} s]",
              flush=True)
        for text in wrong[:5]:
            print("   ", text[:300], flush=True)


BENCHES = {"decode": bench_decode, "norm": bench_norm, "gemv": bench_gemv, "sample": bench_sample,
           "rest": bench_rest}


def main(name: str, what: str | None, benches: Mapping[str, Callable[[], None]],
         kernels: Iterable[Kernel]) -> None:
    parser = argparse.ArgumentParser(description=(what or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(benches),
                        help="comma separated: " + ", ".join(benches))
    parser.add_argument("--check", type=int, nargs="?", const=1, default=0, metavar="N",
                        help="first check every N-th case of the contracts")
    parser.add_argument("--json", default=f"{os.environ['OUT']}/{name}.json" if "OUT" in os.environ
                        else "")
    parser.add_argument("--quick", action="store_true", help="the defaults only")
    parser.add_argument("--warm", action="store_true", help="leave the L2 cache as it is")
    parser.add_argument("--match", default="",
                        help="only shapes that contain one of these texts, comma separated")
    args = parser.parse_args()
    QUICK.extend([True] * args.quick)
    WARM.extend([True] * args.warm)
    MATCH.extend(filter(None, args.match.split(",")))
    torch.manual_seed(0)
    one = torch.zeros(1, device="cuda")
    print(f"a graph of one trivial kernel: {timed(lambda: one.add_(1)):.2f} us", flush=True)
    try:
        if args.check:
            check(kernels, args.check)
        for chosen in filter(None, args.only.split(",")):
            benches[chosen]()
    finally:
        if args.json:
            Path(args.json).write_text(json.dumps(FOUND))


if __name__ == "__main__":
    main("triton_kernels", __doc__, BENCHES, KERNELS)

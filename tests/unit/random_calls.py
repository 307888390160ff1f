"""Random calls of every op, drawn near the numbers at which rules change their mind.

Tensors are views of one untouched piece of memory, so that a large one costs nothing. `rng` is a
`random.Random`, or the one that Hypothesis can shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import synthetic
import torch
from torch import Tensor

import layerzero as lz
from layerzero.spec.grid import bucket_top

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
STYLES = ("plain", "plain", "plain", "transposed", "padded", "sparse", "spread", "shifted")
# elements of one tensor that is not spread from fewer
MAX_NUMEL = 1 << 24

EDGES = sorted({e for n in (0, 1, 2, 8, 16, 40, 64, 77, 96, 100, 128, 333, 500, 700, 4096, 65535)
                for e in (n - 1, n, n + 1, bucket_top(n), bucket_top(n) + 1) if e >= 0})
SMALL = [e for e in EDGES if e <= 16]

Call = tuple[tuple[Any, ...], dict[str, Any]]


@lru_cache(maxsize=None)
def _memory(dtype: torch.dtype) -> Tensor:
    return torch.empty(4 * MAX_NUMEL * 8, dtype=torch.uint8).view(dtype)


def tensor(rng: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32,
           style: str | None = None) -> Tensor:
    """A view of `shape` that is stored in one of STYLES."""
    style = style or rng.choice(STYLES)
    numel = 1
    for n in shape:
        numel *= n
    if style == "spread" or numel > MAX_NUMEL:
        return _memory(dtype)[:1].expand(shape) if shape else _memory(dtype)[0]
    order = list(range(len(shape)))
    if style == "transposed" and len(shape) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    step, strides = 1, [0] * len(shape)
    for axis in reversed(order):
        strides[axis] = step * (2 if style == "sparse" and axis == len(shape) - 1 else 1)
        step = strides[axis] * max(shape[axis] + (3 if style == "padded" and axis == len(shape) - 1
                                                  else 0), 1)
    return _memory(dtype).as_strided(shape, strides, 1 if style == "shifted" else 0)


def maybe_grad(rng: Any, t: Tensor) -> Tensor:
    """Now and then a tensor that wants a gradient, or a Parameter."""
    kind = rng.choice(("plain",) * 4 + ("grad", "parameter"))
    if kind == "plain" or not t.is_floating_point():
        return t
    return (t.detach().requires_grad_() if kind == "grad"
            else torch.nn.Parameter(t.detach(), rng.choice((True, False))))


def attention(rng: Any) -> Call:
    b, hkv = rng.choice((0, 1, 2, 17)), rng.choice((1, 1, 2, 4))
    if rng.random() < 0.05:
        b = rng.choice((65534, 65535, 65536))
    hq = rng.choice((hkv, hkv, hkv * 2, hkv * 4, 3, 0))
    sq, sk = rng.choice(EDGES), rng.choice(EDGES)
    sk = sq if rng.random() < 0.4 else sk
    d = rng.choice((1, 4, 8, 15, 16, 64, 72, 128, 129, 192, 256, 264))
    dv = d if rng.random() < 0.8 else rng.choice((8, 64, 72))
    dtype = rng.choice(FLOATS)
    layout = rng.choice(("bhsd", "bhsd", "bshd"))

    def make(heads: int, seq: int, dim: int) -> Tensor:
        shape = (b, heads, seq, dim) if layout == "bhsd" else (b, seq, heads, dim)
        return maybe_grad(rng, tensor(rng, shape, dtype))

    kwargs: dict[str, Any] = {}
    if rng.random() < 0.3:
        shape = tuple(n if rng.random() < 0.6 else 1 for n in (b, hq, sq, sk))[rng.randrange(4):]
        kwargs["attn_mask"] = maybe_grad(rng,
                                         tensor(rng, shape,
                                                rng.choice((torch.bool, dtype, torch.float32)),
                                                     "plain"))
    for name, values in (("dropout_p", (0.0, 0, 0.1, 1.0, 1.5, -0.5, 1.7e308)),
                         ("is_causal", (True, False)), ("scale", (None, 0.5, 1)),
                         ("enable_gqa", (True, False)), ("window_left", (-2, -1, 0, 1, 8)),
                         ("causal_align", (None, "top_left", "bottom_right")),
                         ("window_right", (-1, 0, 5)), ("softcap", (0.0, 20.0, -1.0)),
                         ("return_lse", (True, False))):
        if rng.random() < 0.3:
            kwargs[name] = rng.choice(values)
    if rng.random() < 0.1:
        kwargs["alibi_slopes"] = maybe_grad(rng,
                                            tensor(rng, (hq,), rng.choice((torch.float32, dtype))))
    if layout != "bhsd" or rng.random() < 0.2:
        kwargs["layout"] = layout
    return (make(hq, sq, d), make(hkv, sk, d), make(hkv, sk, dv)), kwargs


def varlen_attention(rng: Any) -> Call:
    tq, tk, n = rng.choice(EDGES), rng.choice(EDGES), rng.choice((*SMALL, 65536, 65537))
    hkv = rng.choice((1, 2, 4))
    hq, d, dtype = rng.choice((hkv, 2 * hkv, 3)), rng.choice((8, 16, 20, 64, 256, 264)), rng.choice(
        FLOATS)
    ints = rng.choice((torch.int32, torch.int32, torch.int64))
    kwargs: dict[str, Any] = {"max_seqlen_q": rng.choice((*EDGES, -1)),
                              "max_seqlen_k": rng.choice((*EDGES, -1))}
    for name, values in (("is_causal", (True, False)), ("scale", (None, 0.5)),
                         ("softcap", (0.0, 10.0)),
                         ("causal_align", (None, "top_left", "bottom_right")),
                         ("window_left", (-1, 0, 8)), ("window_right", (-2, -1, 0, 8)),
                         ("dropout_p", (0.0, 0.25, 1.0)), ("return_lse", (True, False))):
        if rng.random() < 0.3:
            kwargs[name] = rng.choice(values)
    if rng.random() < 0.1:
        kwargs["alibi_slopes"] = maybe_grad(rng, tensor(rng, (hq,), torch.float32))
    tensors = (maybe_grad(rng, tensor(rng, shape, dtype))
               for shape in ((tq, hq, d), (tk, hkv, d), (tk, hkv, d)))
    return (*tensors, tensor(rng, (n,), ints), tensor(rng, (n,), ints)), kwargs


def _norm(rng: Any, *names: str, twice: bool = False) -> Call:
    rows = tuple(rng.choice(EDGES) for _ in range(rng.randrange(4)))
    hidden, dtype = rng.choice((0, 1, 7, 64, 4096)), rng.choice(FLOATS)
    kwargs: dict[str, Any] = {}
    for name in names:
        if rng.random() < 0.5:
            kwargs[name] = maybe_grad(rng,
                                      tensor(rng, (hidden,),
                                             rng.choice((dtype, dtype, torch.float32))))
    if rng.random() < 0.3:
        kwargs["eps"] = rng.choice((0.0, 1e-6, 1e-5, 1, -1.0))
    shape = (*rows, hidden)
    return tuple(maybe_grad(rng, tensor(rng, shape, dtype)) for _ in range(1 + twice)), kwargs


def rms_norm(rng: Any) -> Call:
    return _norm(rng, "weight")


def layer_norm(rng: Any) -> Call:
    return _norm(rng, "weight", "bias")


def add_rms_norm(rng: Any) -> Call:
    return _norm(rng, "weight", twice=True)


def synthetic_op(rng: Any) -> Call:
    lead = tuple(rng.choice((1, 2, 3, 13)) for _ in range(rng.choice((0, 1, 1, 2))))
    seq, depth = rng.choice(EDGES), rng.choice(EDGES)
    depth = seq if rng.random() < 0.3 else depth
    width, dtype = rng.choice((1, 2, 8, 9, 16)), rng.choice(FLOATS)
    order = rng.choice(("sw", "sw", "ws"))
    shape = (*lead, seq, width) if order == "sw" else (*lead, width, seq)
    pages = rng.choice((0, 3, 4, 5, 50))
    kwargs: dict[str, Any] = {} if order == "sw" else {"order": order}
    if rng.random() < 0.3:
        sizes = tuple(n if rng.random() < 0.6 else 1 for n in (seq, width))[rng.randrange(3):]
        kwargs["mask"] = maybe_grad(rng, tensor(rng, sizes, dtype))
    if rng.random() < 0.3:
        kwargs["table"] = tensor(rng, (pages, 2), rng.choice((torch.float32, dtype)))
    if rng.random() < 0.3:
        kwargs["slots"] = tensor(rng, (pages,), dtype)
    if rng.random() < 0.2:
        kwargs["extra"] = tensor(rng, shape, dtype)
    for name, values in (("steps", (-3, -2, -1, 0, 1, 2, 3, 16, 17, 39, 40, 41, 48, 49)),
                         ("limit", (None, -1, 0, 3, 4, 5, 6, 2**40)),
                         ("mode", (None, "plain", "wide")),
                         ("gain", (None, -0.5, -0.51, 0.25, 0.75, 2, 2.5, 2.51, 1.7e308, -1.7e308)),
                         ("eps", (1e-5, 0.1, 0.11, 1, 2.0, -1.0, 1.7e308)), ("flag", (True, False)),
                         ("groups", (1, 2, 4))):
        if rng.random() < 0.4:
            kwargs[name] = rng.choice(values)
    x, y = tensor(rng, shape, dtype), tensor(rng, (*lead, seq, depth), dtype)
    return (maybe_grad(rng, x), maybe_grad(rng, y)), kwargs


def synthetic_sweeps() -> Iterator[Call]:
    """Calls of the awkward op that differ from one another in one or two things only, all else
    equal."""
    edges = (1, 4, 17, 24, 31, 40, 48, 64, 77, 96, 100, 333, 500, 700)
    sizes = sorted({n for e in edges for n in (e - 1, e, e + 1)})

    def call(lead: tuple[int, ...] = (2,), seq: int = 20, depth: int = 20, width: int = 8,
             pages: int = 0,
             dtype: torch.dtype = torch.float32, **kwargs: Any) -> Call:
        one = _memory(dtype)[:1]
        return (one.expand(*lead, seq, width), one.expand(*lead, seq, depth)), kwargs

    for seq in sizes:
        for depth in sizes:
            yield call(seq=seq, depth=depth)
    for steps in range(-6, 60):
        yield call(steps=steps)
        yield call(steps=steps, seq=21)
    for limit in (None, *range(-3, 12), 2**40):
        yield call(limit=limit)
    for number in (None, -1.0, -0.51, -0.5, -0.0, 0, 0.25, 0.26, 0.75, 1, 2, 2.5, 2.51, 1e300,
                   1.7e308, -1.7e308):
        yield call(gain=number)
        yield call(eps=1e-5 if number is None else number)
    for rows in range(30):
        yield call(lead=(rows,))
    for groups in range(1, 9):
        for width in (8, 9, 16):
            yield call(groups=groups, width=width)
    for pages in sizes:
        yield call(table=_memory(torch.float32)[:1].expand(pages, 2))
        yield call(slots=_memory(torch.float32)[:1].expand(pages))
    for shape in ((), (1,), (8,), (1, 1), (1, 8), (20, 1), (20, 8)):
        for dtype in (torch.float32, torch.float64):
            yield call(mask=_memory(dtype)[0].expand(shape))
            yield call(mask=_memory(dtype)[0].expand(shape).detach().requires_grad_())
    for dtype in FLOATS:
        yield call(dtype=dtype)
    for lead in ((), (2,), (1, 2), (2, 1)):
        yield call(lead=lead)
    for option in ({"flag": True}, {"mode": "plain"}, {"mode": "wide"},
                   {"order": "ws", "width": 20}):
        yield call(**option)
    base = torch.zeros(2, 20, 8), torch.zeros(2, 20, 20)
    for i, style in enumerate(("plain", "transposed", "padded", "sparse", "spread", "shifted") * 2):
        tensors = list(base)
        tensors[i % 2] = tensor(None, tuple(base[i % 2].shape), style=style)
        yield tuple(tensors), {}
        tensors[i % 2] = tensors[i % 2].detach().requires_grad_()
        yield tuple(tensors), {}


MAKERS: dict[str, Callable[[Any], Call]] = {
    "attention": attention, "varlen_attention": varlen_attention, "rms_norm": rms_norm,
    "layer_norm": layer_norm, "add_rms_norm": add_rms_norm, "synthetic": synthetic_op}


def neighbour(rng: Any, call: Call) -> Call:
    """The same call with one thing changed a little: a size by one, a dtype, a stride, a number, a
    flag."""
    args, kwargs = list(call[0]), dict(call[1])
    what = rng.choice(("size", "size", "again", "grad", "number", "drop"))
    # the last axis but one is a sequence, in the plain layout
    if what == "size":
        grown = rng.choice((-1, 1, 7))
        axis, old = -2, args[0].shape[-2] if args[0].dim() > 1 else 0
        for i, t in enumerate(args):
            if t.dim() > 1 and t.shape[axis] == old and old + grown >= 0:
                shape = (*t.shape[:-2], old + grown, t.shape[-1])
                args[i] = tensor(rng, shape, t.dtype, "plain")
    elif what == "again":
        i = rng.randrange(len(args))
        args[i] = tensor(rng, tuple(args[i].shape), args[i].dtype)
    elif what == "grad":
        i = rng.randrange(len(args))
        args[i] = maybe_grad(rng, args[i])
    elif kwargs:
        name = rng.choice(sorted(kwargs))
        value = kwargs[name]
        if what == "drop" and not name.startswith("max_"):
            del kwargs[name]
        elif isinstance(value, bool):
            kwargs[name] = not value
        elif isinstance(value, (int, float)):
            kwargs[name] = (value + rng.choice((-1, 1, 0.5)) if isinstance(value, float)
                            else value + rng.choice((-1, 1)))
    return tuple(args), kwargs


def register_synthetic() -> None:
    """The awkward op and a kernel for each of its rules; the world fixture takes them away again.
    """
    lz.register(synthetic.OP)
    for kernel in synthetic.KERNELS:
        lz.register(kernel)

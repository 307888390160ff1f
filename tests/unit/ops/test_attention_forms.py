"""The forms of a call that torch takes and kernels do not: the same answer as torch gives."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from helpers import ATTENTION, path_of, qkv
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import layerzero as lz
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.spec.errors import CausalAlignmentWarning, InvalidArgumentType, InvalidCall
from layerzero.spec.reason import Code

F = torch.nn.functional.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got, want, tolerance=2e-5):
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# CausalBias

@pytest.mark.parametrize("prefer", [None, "reference.attention", "torch.sdpa_flash_bias"])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(6, 6), (5, 9)])
def test_a_causal_bias_means_what_it_means_in_torch(world, path, make, sizes, prefer):
    """Its elements are memory that nobody wrote: read as a mask they would be noise, or NaN."""
    run = path_of("attention", path)
    q, k, v = qkv(*sizes, heads=4)
    want, bias = F(q, k, v, make(*sizes)), make(*sizes)
    bias.untyped_storage().fill_(255)
    with lz.prefer(prefer) if prefer else warnings.catch_warnings():
        for _ in range(2):
            close(run(q, k, v, bias), want)
        with torch.autocast("cpu", torch.bfloat16):
            close(run(q, k, v, bias).float(), want, 3e-2)
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    close(run(*rows, attn_mask=bias, layout="bshd").transpose(1, 2), want)


def test_a_causal_bias_is_compiled_for_what_it_means(world):
    q, k, v = qkv(5, 9)
    for make in (causal_upper_left, causal_lower_right):
        compiled = torch.compile(lambda q, k, v, bias: lz.attention(q, k, v, bias),
                                 backend="aot_eager", fullgraph=True)
        close(compiled(q, k, v, make(5, 9)), F(q, k, v, make(5, 9)))


def test_a_causal_bias_that_contradicts_the_call(world, path):
    run = path_of("attention", path)
    q, k, v = qkv(5, 9)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        run(q, k, v, causal_upper_left(5, 9), is_causal=True)
    with pytest.raises(RuntimeError, match=r"\(5, 9\), got a CausalBias of \(5, 8\)"):
        run(q, k, v, causal_lower_right(5, 8))
    close(run(q, k, v, causal_upper_left(20, 20)), F(q, k, v, causal_upper_left(20, 20)))
    plan = lz.explain("attention", q, k, v, causal_lower_right(5, 9))
    assert plan.facts["is_causal"] and plan.facts["causal_align"] == "bottom_right"


# a mask beside is_causal

@pytest.mark.parametrize("kind", ["bool", "float", "half query"])
@pytest.mark.parametrize("sizes", [(6, 6), (4, 7)])
def test_a_mask_and_causality_both_hide(world, path, kind, sizes):
    run = path_of("attention", path)
    q, k, v = qkv(*sizes, heads=4, kv_heads=2, batch=2)
    mask = rand(2, 1, *sizes) if kind != "bool" else rand(2, 1, *sizes) > -0.7
    whole = mask.masked_fill(~torch.ones(sizes, dtype=torch.bool).tril(),
                             False if kind == "bool" else -math.inf)
    if kind == "half query":                   # torch adds a float32 mask in float32
        q, k, v = (t.bfloat16() for t in (q, k, v))
        want = ATTENTION.reference(q.float(), k.float(), v.float(), whole).bfloat16()
    else:
        want = ATTENTION.reference(q, k, v, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CausalAlignmentWarning)
        for _ in range(2):
            close(run(q, k, v, mask, is_causal=True), want, 2e-2 if kind == "half query" else 2e-5)


# broadcasting

BATCHES = [((2, 4), (1, 4), (1, 4)), ((1, 4), (2, 4), (2, 4)), ((2, 4), (2, 4), (1, 4)),
           ((2, 4), (2, 1), (2, 1)), ((2, 1), (2, 4), (2, 4)), ((2, 4), (2, 4), (2, 1)),
           ((2, 1), (1, 3), (2, 1)), ((2, 4), (4,), (4,)), ((4,), (2, 4), (2, 4)),
           ((2, 4), (), ()), ((3, 2, 4), (1, 2, 4), (3, 1, 4)), ((3, 2, 4), (2, 4), (4,)),
           ((3,), (1,), (1,)), ((1,), (3,), (3,)), ((0, 4), (1, 4), (1, 4))]


@pytest.mark.parametrize("leads", BATCHES)
def test_batches_and_heads_broadcast_as_in_torch(world, path, leads):
    run = path_of("attention", path)
    sizes = zip(leads, (5, 7, 7), (8, 8, 6))
    q, k, v = (rand(*lead, n, d, seed=i) for i, (lead, n, d) in enumerate(sizes))
    scores = q @ k.transpose(-1, -2)
    mask = rand(*scores.shape[-2:]) > -1
    for kwargs in ({}, {"attn_mask": mask}, {"is_causal": True, "causal_align": "top_left"}):
        plain = {name: value for name, value in kwargs.items() if name != "causal_align"}
        for gqa in (True, False):
            close(run(q, k, v, enable_gqa=gqa, **kwargs), F(q, k, v, **plain))
    out, lse = run(q, k, v, return_lse=True)
    assert lse.shape == out.shape[:-1]
    if q.dim() == k.dim() == v.dim() == 4:
        rows = run(*(t.transpose(1, 2) for t in (q, k, v)), layout="bshd")
        close(rows.transpose(1, 2), F(q, k, v))


def test_keys_and_values_are_grouped_each_on_its_own(world):
    q, k, v = rand(2, 8, 5, 8), rand(2, 2, 5, 8, seed=1), rand(1, 4, 5, 8, seed=2)
    close(lz.attention(q, k, v), F(q, k, v.expand(2, -1, -1, -1), enable_gqa=True))
    q.requires_grad_(), k.requires_grad_()
    lz.attention(q, k, v).sum().backward()
    grads = q.grad, k.grad
    q.grad = k.grad = None
    F(q, k, v.expand(2, -1, -1, -1), enable_gqa=True).sum().backward()
    for got, want in zip(grads, (q.grad, k.grad)):
        close(got, want)


# empty heads

@pytest.mark.parametrize("shapes", [
    [(0, 0, 0, 0)] * 3, [(2, 4, 5, 0), (2, 4, 5, 0), (2, 4, 5, 8)],
    [(2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 0)], [(2, 4, 5, 0)] * 3, [(5, 0)] * 3])
def test_heads_of_no_width(world, path, shapes):
    run, tensors = path_of("attention", path), [rand(*shape) for shape in shapes]
    for _ in range(2):
        close(run(*tensors), F(*tensors))
    _, lse = run(*tensors, return_lse=True)
    assert lse.shape == shapes[0][:-1]


# numbers in tensors

@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor(2), torch.tensor(0.3).double()])
def test_a_number_may_come_in_a_tensor(world, path, scale):
    run = path_of("attention", path)
    q, k, v = qkv(5)
    close(run(q, k, v, scale=scale), F(q, k, v, scale=scale))
    assert lz.explain("attention", q, k, v, scale=scale).facts["scale"] == scale.item()


@pytest.mark.parametrize("kwargs", [
    {"scale": torch.tensor([0.5])}, {"scale": torch.tensor(0.5, requires_grad=True)},
    {"scale": torch.tensor(True)}, {"scale": "x"}, {"is_causal": torch.tensor(True)},
    {"attn_mask": [1.0]}, {"window_left": torch.tensor(1.0)}])
def test_what_torch_calls_a_type_error_is_one(world, path, kwargs):
    with pytest.raises(InvalidArgumentType) as caught:
        path_of("attention", path)(*qkv(5), **kwargs)
    assert isinstance(caught.value, (TypeError, RuntimeError, ValueError, InvalidCall))
    assert caught.value.codes == (Code.WRONG_TYPE,)


@pytest.mark.parametrize("wrong", [
    {"dropout_p": 1.5}, {"attn_mask": torch.zeros(4, 5)}, {"attn_mask": torch.zeros(5, 5).int()},
    {"key": torch.zeros(1, 2, 5, 9)}, {"key": torch.zeros(1, 2, 5, 8).double()}])
def test_code_that_catches_torchs_errors_catches_ours(world, path, wrong):
    call = {**dict(zip(("query", "key", "value"), qkv(5))), **wrong}
    for run in (F, path_of("attention", path)):
        with pytest.raises(RuntimeError):
            run(**call)


# nested tensors of layout torch.strided

def nested(lengths, heads=2, dim=8, seed=0):
    parts = [rand(heads, n, dim, seed=seed + i) for i, n in enumerate(lengths)]
    return torch.nested.nested_tensor(parts), parts


@pytest.mark.parametrize("kwargs", [{}, {"scale": 0.2}, {"is_causal": True}])
@pytest.mark.parametrize(("lengths_q", "lengths_k"), [((3, 5), (3, 5)), ((1, 4), (6, 2))])
def test_strided_nested_inputs_are_served(world, kwargs, lengths_q, lengths_k):
    (q, parts_q), (k, parts_k) = nested(lengths_q), nested(lengths_k, seed=5)
    out = lz.attention(q, k, k, **kwargs)
    assert out.is_nested and out.layout is torch.strided
    for got, mine, keys in itertools.zip_longest(out.unbind(), parts_q, parts_k):
        close(got, F(mine[None], keys[None], keys[None], **kwargs)[0])
    if not kwargs.get("is_causal"):            # torch refuses that
        for got, want in zip(out.unbind(), F(q, k, k, **kwargs).unbind()):
            close(got, want)


def test_strided_nested_inputs_without_heads_and_with_gradients(world):
    parts = [rand(n, 8, seed=n).requires_grad_() for n in (3, 5)]
    grads = []
    for run in (lz.attention, F):
        nest = torch.nested.as_nested_tensor(parts)
        out = run(nest, nest, nest)
        sum(part.square().sum() for part in out.unbind()).backward()
        grads.append([part.grad.clone() for part in parts])
        for part in parts:
            part.grad = None
    for got, want in zip(*grads):
        close(got, want)


def test_a_nested_call_is_served_though_varlen_attention_was_never_called(world, monkeypatch):
    monkeypatch.delitem(dispatchers, "varlen_attention", raising=False)
    q, _ = nested((3, 5))
    assert lz.attention(q, q, q).is_nested


# memory

@pytest.mark.parametrize("width", [0, 64])
def test_what_is_expanded_is_not_written_out(world, width):
    """A call that is only explained takes no memory of the size of its tensors: 16 TB here."""
    one = torch.zeros(1, dtype=torch.float16)
    q = one.expand(65536, 32, 4096, width) if width else one[:0].expand(65536, 32, 4096, 0)
    mask = torch.zeros(1, 1).expand(4096, 4096)
    plan = lz.explain("attention", q, q, q, attn_mask=mask)
    assert plan.facts["dtype"] == "float32" and plan.facts["batch"] == 65536
    short = torch.randn(1, 4, 1, 16, dtype=torch.float16).expand(2, 4, 5, 16)
    mask = torch.randn(5, 5)
    close(lz.attention(short, short, short, mask), F(short, short, short, mask), 2e-3)

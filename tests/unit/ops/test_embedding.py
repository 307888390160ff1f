"""Embedding lookup: any shape of ids, the padding row, the scale, and ids that are not there."""

from __future__ import annotations

import pytest
import torch
from helpers import events_of, path_of

import layerzero as lz
from layerzero.spec.event import Fallback
from layerzero.world import snapshot as worlds

KERNELS = ("torch.embedding", "torch.index_select", "reference.embedding")


def table(vocab: int = 20, width: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(vocab, width, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_rows_of_any_shape(kernel, ids_dtype):
    weight = table()
    for ids in (torch.tensor(3), torch.tensor([0, 19, 19]), torch.arange(12).view(2, 3, 2),
                torch.empty(0, 4)):
        got = lz.embedding(ids.to(ids_dtype), weight, backend=kernel)
        assert torch.equal(got, weight[ids.long()])


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale(kernel):
    """Gemma: times the square root of the width, rounded once."""
    weight, ids = table(dtype=torch.bfloat16), torch.tensor([[1, 2], [5, 1]])
    scale = 6 ** 0.5
    got = lz.embedding(ids, weight, scale=scale, backend=kernel)
    assert torch.equal(got, (weight[ids].float() * scale).bfloat16())
    assert torch.equal(weight, table(dtype=torch.bfloat16))    # the table itself is as it was


def test_scale_is_gemma3s_for_the_rounded_number():
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    scale = 6 ** 0.5
    layer = gemma.Gemma3TextScaledWordEmbedding(20, 6, 0, embed_scale=scale).to(torch.bfloat16)
    ids = torch.tensor([3, 0, 7])
    rounded = float(torch.tensor(scale, dtype=torch.bfloat16))
    assert torch.equal(lz.embedding(ids, layer.weight, 0, rounded), layer(ids))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_gradients(kernel, scale):
    weight = table(dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[1, 2], [5, 1]])
    assert torch.autograd.gradcheck(lambda w: lz.embedding(ids, w, None, scale, backend=kernel),
                                    [weight])


@pytest.mark.parametrize("padding", [1, -19])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("kernel", [None, "torch.embedding", "reference.embedding"])
def test_the_padding_row_is_read_and_not_trained(kernel, padding, scale):
    ids, ours, theirs = torch.tensor([[1, 2],
                                      [5, 1]]), table().requires_grad_(), table().requires_grad_()
    out = lz.embedding(ids, ours, padding, scale, backend=kernel)
    want = torch.nn.functional.embedding(ids, theirs, padding) * scale
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert not ours.grad[1].any() and ours.grad[2].any()


def test_index_select_knows_no_padding_row_in_its_backward():
    ids, weight = torch.tensor([1, 2]), table()
    assert not lz.validate("embedding", "torch.index_select", ids, weight, 1)
    (reason,) = lz.validate("embedding", "torch.index_select", ids, weight.requires_grad_(), 1)
    assert reason.code is lz.Code.FEATURE_UNSUPPORTED and reason.fact == "padding_idx"


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize("bad", [20, -1, 2 ** 31 - 1])
def test_an_id_outside_the_table_is_the_callers_error_also_on_a_hit(emitted, path, kernel, bad):
    weight, call = table(), path_of("embedding", path)
    call(torch.tensor([0, 19]), weight, backend=kernel)
    for _ in range(12):                        # more often than any breaker forgives
        with pytest.raises(
                lz.errors.InvalidCall,
                match="ids must be between 0 and 19, the last row of weight") as raised:
            call(torch.tensor([0, bad]), weight, backend=kernel)
        assert raised.value.codes == (lz.Code.VALUE_OUT_OF_RANGE,)
    assert not worlds.current().health and not events_of(Fallback, emitted)
    call(torch.tensor([0, 19]), weight, backend=kernel)


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"ids": torch.tensor([0.0])}, "DTYPE_UNSUPPORTED", r"ids\.dtype must be int32 or int64"),
    ({"ids": [0, 1]}, "WRONG_TYPE", "ids must be a Tensor, got list"),
    ({"ids": torch.tensor([True])}, "DTYPE_UNSUPPORTED", r"ids\.dtype"),
    ({"weight": torch.ones(20)}, "WRONG_NDIM", "weight must have 2"),
    ({"weight": torch.ones(20, 6).int()}, "DTYPE_UNSUPPORTED", "dtype must be"),
    ({"weight": torch.ones(0, 6)}, "VALUE_OUT_OF_RANGE", "ids must be between 0 and -1"),
    ({"padding_idx": 20}, "VALUE_OUT_OF_RANGE", "padding_idx must be between -20 and 19, got 20"),
    ({"padding_idx": -21}, "VALUE_OUT_OF_RANGE", "padding_idx must be between"),
    ({"padding_idx": 1.0}, "WRONG_TYPE", "padding_idx"),
    ({"scale": "2"}, "WRONG_TYPE", "scale must be float"),
    ({"weight": torch.ones(20, 6, device="meta")}, "MIXED_DEVICES", "must be on meta"),
])
def test_a_wrong_call_names_the_argument(path, changes, code, words):
    call = path_of("embedding", path)
    call(torch.tensor([0, 3]), table(), 3)
    with pytest.raises(lz.errors.InvalidCall, match=words) as raised:
        call(**{"ids": torch.tensor([0, 3]), "weight": table(), **changes})
    assert code in raised.value.codes


def test_meta_tensors_have_no_ids_to_check():
    out = lz.embedding(torch.ones(2, 3, dtype=torch.int64, device="meta"),
                       torch.ones(20, 6, device="meta"))
    assert out.shape == (2, 3, 6) and out.device.type == "meta"


def test_under_vmap_and_compile():
    weight, ids = table(), torch.tensor([[1, 2], [5, 1]])
    torch.testing.assert_close(torch.vmap(lambda i: lz.embedding(i, weight, scale=2.0))(ids),
                               weight[ids] * 2)
    compiled = torch.compile(lambda i: lz.embedding(i, weight, scale=2.0) + 1, fullgraph=True,
                             backend="aot_eager")
    torch.testing.assert_close(compiled(ids), weight[ids] * 2 + 1)

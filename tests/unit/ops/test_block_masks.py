"""A BlockMask of torch as the mask of lz.attention."""

from __future__ import annotations

import pytest
import torch
from helpers import world
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import layerzero as lz
from layerzero.backends import torch_block_sparse
from layerzero.ops.block_sparse_attention import CASES, OP
from layerzero.ops.formulas.block_masks import dense_mask

__all__ = ["world"]


def causal(b, h, q, k):
    return q >= k


def qkv(heads: int = 4, kv_heads: int = 2, seq: int = 40, dim: int = 16) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, seq, dim, generator=gen) for n in (heads, kv_heads, kv_heads)]


def mask_of(seq_q: int = 40, seq_k: int = 40, mod=causal, batch=None, heads=None) -> BlockMask:
    return create_block_mask(mod, batch, heads, seq_q, seq_k, device="cpu", BLOCK_SIZE=16)


def expand_by_definition(mask: BlockMask) -> torch.Tensor:
    """The mask element by element, as the documentation of BlockMask says it."""
    def lists(counts: torch.Tensor, indices: torch.Tensor) -> list:
        return [[[set(row[:n]) for n, row in zip(*head)] for head in zip(*batch)]
                for batch in zip(counts.tolist(), indices.tolist())]

    dense = torch.zeros(mask.shape, dtype=torch.bool)
    partial = lists(mask.kv_num_blocks, mask.kv_indices)
    full = (lists(mask.full_kv_num_blocks, mask.full_kv_indices)
            if mask.full_kv_num_blocks is not None else None)
    size_q, size_k = mask.BLOCK_SIZE
    for b, h, q, k in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape)):
        row, column = int(q) // size_q, int(k) // size_k
        inside = column in partial[b][h][row] and bool(mask.mask_mod(b, h, q, k))
        dense[b, h, q, k] = inside or (full is not None and column in full[b][h][row])
    return dense


@pytest.mark.parametrize("case", [
    {"mask": "document", "sq": 23, "sk": 33}, {"mask": "tables", "sq": 20, "sk": 60},
    {"mask": "dead_block", "sq": 24, "sk": 24, "per": "heads", "hq": 2, "hkv": 1}], ids=str)
def test_a_mask_is_expanded_block_by_block(case) -> None:
    mask = OP.inputs(**case)["block_mask"]
    want = expand_by_definition(mask)
    assert torch.equal(dense_mask(mask), want) and want.any() and not want.all()
    values = OP.inputs(**case)
    out = lz.attention(values["query"], values["key"], values["value"], attn_mask=mask)
    dense = lz.attention(values["query"], values["key"], values["value"], attn_mask=want)
    torch.testing.assert_close(out, dense)


def test_blocks_that_are_not_listed_are_hidden_whatever_the_mask_mod_says() -> None:
    mask = mask_of()
    without = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=16,
                                       mask_mod=causal, seq_lengths=(40, 40))
    rows = dense_mask(without)[0, 0]
    assert mask.full_kv_num_blocks.sum() > 0 and not rows[16:32, :16].any() and rows[:16].any()


@pytest.mark.parametrize("case", [c for c in CASES if c.get("b", 1) and not c.get("softcap")
                                  and not c.get("lse")][::3], ids=str)
def test_a_long_mask_is_asked_for_block_by_block(case, monkeypatch) -> None:
    values = OP.inputs(**case)
    values.pop("softcap"), values.pop("return_lse")
    run = torch_block_sparse._rows()
    at_once = run(**values)
    monkeypatch.setattr(torch_block_sparse, "AT_ONCE", 0)
    assert torch.equal(run(**values), at_once)


def test_the_same_in_every_form(world) -> None:
    q, k, v = qkv()
    want = lz.attention(q, k, v, is_causal=True)
    mask = mask_of()
    torch.testing.assert_close(lz.attention(q, k, v, mask), want)
    torch.testing.assert_close(lz.block_sparse_attention(q, k, v, mask), want)
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    out, lse = lz.attention(*rows, attn_mask=mask, layout="bshd", return_lse=True)
    torch.testing.assert_close(out.transpose(1, 2), want)
    assert lse.shape == (2, 4, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert lz.attention(q, k, v, attn_mask=mask).dtype is torch.bfloat16
    q.requires_grad_()
    lz.attention(q, k, v, attn_mask=mask).sum().backward()
    assert q.grad.isfinite().all()


def test_a_mask_mod_may_read_what_changes() -> None:
    """No kernel keeps what a mask_mod said before."""
    q, k, v = qkv()
    hidden = torch.zeros(40, dtype=torch.bool)
    mask = mask_of(mod=lambda b, h, q, k: (q >= k) & ~hidden[k])
    before = lz.attention(q, k, v, attn_mask=mask)
    hidden[1] = True                           # in a block that is listed as partial
    after = lz.attention(q, k, v, attn_mask=mask)
    assert torch.equal(before[:, :, 0], after[:, :, 0])
    assert not torch.equal(before[:, :, 1], after[:, :, 1])


@pytest.mark.parametrize(("given", "says"), [
    ({"attn_mask": mask_of(seq_k=48)}, r"\(2, 4, 40, 40\).*KV_LEN=40.*\(1, 1, 40, 48\)"),
    ({"attn_mask": mask_of(batch=3)}, r"\(3, 1, 40, 40\)"),
    ({"attn_mask": mask_of(heads=2)}, r"\(1, 2, 40, 40\)"),
    ({"attn_mask": mask_of(), "is_causal": True}, "is_causal must be False beside a BlockMask"),
    ({"attn_mask": mask_of(), "window_left": 3}, "window_left must be -1 beside a BlockMask"),
    ({"attn_mask": mask_of(), "alibi_slopes": torch.ones(4)}, "alibi_slopes must be None"),
    ({"attn_mask": mask_of(), "dropout_p": 0.1}, "dropout_p must be 0.0"),
    ({"attn_mask": mask_of(), "enable_gqa": False}, "group must be 1, got 2"),
    ({"attn_mask": causal}, "attn_mask must be a Tensor, got function")],
    ids=lambda v: v if isinstance(v, str) else "")
def test_what_does_not_fit_is_the_callers_mistake(given, says) -> None:
    with pytest.raises(lz.errors.InvalidCall, match=says):
        lz.attention(*qkv(), **given)


def test_a_mask_on_another_device_is_named() -> None:
    mask = mask_of()
    elsewhere = BlockMask.from_kv_blocks(mask.kv_num_blocks.to("meta"), mask.kv_indices.to("meta"),
                                         BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(40, 40),
                                         compute_q_blocks=False)
    with pytest.raises(lz.errors.InvalidCall, match="must be on cpu, attn_mask is meta"):
        lz.attention(*qkv(), attn_mask=elsewhere)
    with pytest.raises(lz.errors.InvalidCall, match="block_mask must be a BlockMask, got NoneType"):
        lz.block_sparse_attention(*qkv(), None)


def test_it_can_be_explained_and_recorded(world, tmp_path) -> None:
    q, k, v = qkv()
    plan = lz.explain("attention", q, k, v, attn_mask=mask_of())
    assert plan.op == "block_sparse_attention" and plan.kernel == "torch.block_sparse_rows"
    assert "torch.block_sparse_flex" in str(plan)
    plan = lz.explain("attention", q, k, v, attn_mask=mask_of(), softcap=2.0)
    assert plan.kernel == "reference.block_sparse_attention"
    assert any("SOFTCAP_UNSUPPORTED" in str(r.reasons) for r in plan.rejected)
    path = tmp_path / "calls.jsonl"
    with lz.recording(path) as calls:          # a function cannot be written down; the rest can
        lz.attention(q, k, v, attn_mask=mask_of())
        lz.attention(q, k, v, is_causal=True)
    assert calls.unwritten == 1 and "is_causal" in path.read_text()


def test_under_torch_compile_the_mask_is_made_dense(world) -> None:
    q, k, v = qkv()
    documents = torch.arange(40) // 15
    mask = mask_of(mod=lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k))
    compiled = torch.compile(lambda *t: lz.attention(*t, attn_mask=mask), backend="eager",
                             fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), lz.attention(q, k, v, attn_mask=mask))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_asks_a_mask_of_one_head_for_that_head() -> None:
    """Torch's flex_attention asks the mask_mod for each batch and head of the query."""
    values = OP.inputs(b=2, hq=2, hkv=1, sq=40, sk=40, d=16, mask="document")
    mask, want = values["block_mask"], OP.reference(**values)
    for asked, right in ((mask, False),
                         (torch_block_sparse.asked_of_its_own(mask, False, False), True)):
        out = flex_attention(*(values[n] for n in ("query", "key", "value")), None, asked,
                             enable_gqa=True)
        assert torch.allclose(out, want, atol=1e-5) is right
    assert mask.mask_mod(0, 1, torch.tensor(20), torch.tensor(20)).item() is False

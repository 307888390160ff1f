"""The kernels of triton_draw.py in Triton's interpreter, against torch; run as a program with
TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from layerzero.integrations.transformers.generation import triton_draw, triton_top_k


def check(batch: int, vocab: int, eos: list[int], pad: int | None, dtype: torch.dtype,
          drawn: bool) -> None:
    gen = torch.Generator().manual_seed(batch + vocab)
    scores = torch.randn(batch, vocab, generator=gen).to(dtype)
    # ties; the first wins, also from another block
    scores[:, vocab // 2] = scores[:, vocab - 1] = scores.float().max() + 1
    scores[0, 0] = scores[0].max()
    want = scores.argmax(-1)
    if drawn:
        scores = want = torch.randint(0, vocab, (batch,), generator=gen)
    unfinished = torch.arange(batch) % 3 != 1
    kept = torch.where(unfinished, want, pad) if pad is not None else want
    left = unfinished & torch.isin(kept, torch.tensor(eos, dtype=torch.int64), invert=True)
    count, row = torch.tensor([7]), torch.tensor([2])
    log, inputs = torch.full((5, batch), -1), torch.full((batch, 1), -1)
    triton_draw.append(scores, torch.tensor(eos, dtype=torch.int64),
                       None if pad is None else torch.tensor([pad]), unfinished, count, row, log,
                       inputs)
    assert torch.equal(inputs[:, 0], kept) and torch.equal(log[2], kept), (inputs, kept)
    assert (log[[0, 1, 3, 4]] == -1).all() and (int(count), int(row)) == (8, 3)
    assert torch.equal(unfinished, left if eos else unfinished)


def by_rank(row: torch.Tensor, t: float, k: int, p: float, m: float, u: float) -> int:
    """The token of one row, plainly."""
    values, order = row.float().sort(descending=True, stable=True)
    weight = torch.where(values > -torch.inf, ((values - values[0]) / t).exp(), 0.0)[:k]
    before = weight.cumsum(0) - weight
    kept = (before < p * weight.sum()) & (weight >= m)
    kept[0] = True
    weight = torch.where(kept, weight, 0.0)
    over = (weight.cumsum(0) > u * weight.sum()).nonzero()
    return int(order[over[0, 0] if len(over) else kept.nonzero()[-1, 0]])


def check_few(vocab: int, special: str = "", dtype: torch.dtype = torch.float32) -> None:
    gen, batch = torch.Generator().manual_seed(vocab), 6
    scores = (torch.randn(batch, vocab, generator=gen) * 3).to(dtype)
    if special == "equal":
        scores[:] = scores[:, :1]
        scores[:, 7] += 1
    if special == "masked":
        scores[:, 5:] = -torch.inf
        scores[1] = -torch.inf
        scores[2, 0] = torch.nan
    t, k = torch.tensor([1.0, 0.5, 2.0, 0.8, 1.0, 5.0]), torch.tensor([50, 1, 7, 128, 3, 100])
    p, m = torch.tensor([0.9, 1.0, 0.5, 0.95, 0.0, 1.0]), torch.tensor([0.0, 0, 0.1, 0, 0, 0.3])
    u = torch.rand(batch, generator=gen, dtype=torch.float64)
    drawn = triton_top_k.draw(scores, t, k, p, m, u)
    for i, token in enumerate(drawn.tolist()):
        row = torch.where(scores[i].isnan(), -torch.inf, scores[i].float())
        if not (row > -torch.inf).any():
            assert token == -1
            continue
        assert token == by_rank(row, *(float(x[i]) if x is not k else int(k[i])
                                       for x in (t, k, p, m, u))), (i, special)


if __name__ == "__main__":
    check_few(4200)
    check_few(300, "masked")
    check_few(600, "masked", torch.bfloat16)
    check_few(700, "equal")
    check(1, 300, [], None, torch.float32, False)
    check(1, 9000, [4500], 3, torch.bfloat16, False)
    check(5, 4097, [0, 2048, 7], 3, torch.float32, False)
    check(4, 50, [1, 2], None, torch.float32, True)
    check(3, 50, [5, 6, 7], 0, torch.float32, True)
    print("all agree")

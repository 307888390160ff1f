"""The kernels of triton_draw.py in Triton's interpreter, against torch; run as a program with
TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from layerzero.integrations.transformers.decoding import triton_draw


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
    log, given = torch.full((5, batch), -1), torch.full((batch, 1), -1)
    triton_draw.append(scores, torch.tensor(eos, dtype=torch.int64),
                       None if pad is None else torch.tensor([pad]), unfinished, count, row, log,
                       given)
    assert torch.equal(given[:, 0], kept) and torch.equal(log[2], kept), (given, kept)
    assert (log[[0, 1, 3, 4]] == -1).all() and (int(count), int(row)) == (8, 3)
    assert torch.equal(unfinished, left if eos else unfinished)


if __name__ == "__main__":
    check(1, 300, [], None, torch.float32, False)
    check(1, 9000, [4500], 3, torch.bfloat16, False)
    check(5, 4097, [0, 2048, 7], 3, torch.float32, False)
    check(4, 50, [1, 2], None, torch.float32, True)
    check(3, 50, [5, 6, 7], 0, torch.float32, True)
    print("all agree")

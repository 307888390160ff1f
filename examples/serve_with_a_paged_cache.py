"""A serving loop: requests come and go, and all that are running share one pool of pages for keys
and values.

A small decoder with random weights, every step of it an lz call. Requests join while others are in
the middle of their answer (continuous batching); who finds no free page waits. You will see the
batch and the pages as they change, and that every answer is what the model says to that prompt
alone.

    python examples/serve_with_a_paged_cache.py
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

import layerzero as lz
from layerzero.models.kv_cache import KVCache

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 256, 64, 4, 2, 16, 128, 2
PAGES, PAGE = 16, 8
COS, SIN = lz.positions.rope_tables(DIM, 512)


@dataclass
class Request:
    name: str
    arrives: int                                   # at which step
    prompt: list[int]
    wanted: int                                    # tokens
    answer: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)         # its sequence in the cache of each layer

    @property
    def pages(self) -> int:
        """All that it may ever need: taken into account before it starts, so nobody is thrown out.
        """
        return -(-(len(self.prompt) + self.wanted) // PAGE)


class Model:
    def __init__(self, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen) / shape[-1] ** 0.5

        self.embed = torch.randn(VOCAB, HIDDEN, generator=gen)
        self.layers = [{"qkv": weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                        "out": weight(HIDDEN, HEADS * DIM),
                        "in": weight(2 * INNER, HIDDEN), "down": weight(HIDDEN, INNER)}
                       for _ in range(LAYERS)]

    def __call__(self, tokens: list[list[int]], starts: list[int], caches: list[KVCache],
                 slots: list[list[int]]) -> Tensor:
        """The logits after the last of each request's new tokens.

        All requests are one packed batch.
        """
        lengths = [len(t) for t in tokens]
        x = lz.embedding(torch.tensor([t for some in tokens for t in some]), self.embed)
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths)])
        for layer, (weights, cache) in enumerate(zip(self.layers, caches)):
            mixed = lz.linear(lz.rms_norm(x), weights["qkv"]).view(len(x), -1, DIM)
            query, key, value = mixed.split((HEADS, KV_HEADS, KV_HEADS), 1)
            query, key = lz.rope(query[None], key[None], COS, SIN, positions[None],
                                 style="rotate_half", layout="bshd")
            names = [some[layer] for some in slots]
            cache.append(key[0], value, names, lengths=lengths)
            x = x + lz.linear(cache.attend(query[0], names, lengths=lengths).flatten(1),
                              weights["out"])
            x = x + lz.mlp(lz.rms_norm(x), weights["in"], weights["down"])
        last = torch.tensor(lengths).cumsum(0) - 1
        return lz.linear(lz.rms_norm(x[last]), self.embed)


def new_caches() -> list[KVCache]:
    return [lz.kv_cache("paged", kv_heads=KV_HEADS, head_dim=DIM, pages=PAGES, page_size=PAGE)
            for _ in range(LAYERS)]


def serve(model: Model, requests: list[Request], say: bool) -> int:
    """Runs all requests to their end; returns how many were in one batch at most."""
    caches, waiting, running = new_caches(), deque(sorted(requests, key=lambda r: r.arrives)), list[
        Request]()
    step = most = 0
    while waiting or running:
        joined = []
        while (waiting and waiting[0].arrives <= step and sum(r.pages for r in running)
               + waiting[0].pages <= PAGES):
            new = waiting.popleft()
            new.slots = [cache.add() for cache in caches]
            running.append(new)
            joined.append(new.name)
        if running:
            # a prompt, or one token: both in one batch
            tokens = [r.answer[-1:] or r.prompt for r in running]
            starts = [len(r.prompt) + len(r.answer) - len(t) for r, t in zip(running, tokens)]
            logits = model(tokens, starts, caches, [r.slots for r in running])
            for request, token in zip(running, lz.sample(logits, temperature=0.0).tolist()):
                request.answer.append(token)
        used = PAGES - len(caches[0].pool.free)
        done = [r for r in running if len(r.answer) == r.wanted]
        if say and (joined or done):
            late = sum(r.arrives <= step for r in waiting)
            print(
                f"step {step:2d}: batch {len(running)}, {used:2d} of {PAGES} pages, {late} waiting"
                + (f"; joins: {', '.join(joined)}" if joined else "")
                + (f"; done: {', '.join(r.name for r in done)}" if done else ""))
        most = max(most, len(running))
        for request in done:
            running.remove(request)
            for cache, slot in zip(caches, request.slots):
                cache.remove(slot)
        step += 1
    return most if all(len(cache.pool.free) == PAGES for cache in caches) else 0


def main() -> int:
    gen = torch.Generator().manual_seed(1)
    shapes = [(0, 20, 8), (0, 5, 12), (2, 33, 6), (3, 9, 10), (4, 40, 5), (6, 3, 4), (7, 17, 9)]

    def requests() -> list[Request]:
        return [Request(f"r{i}", arrives, prompts[i], wanted)
                for i, (arrives, _, wanted) in enumerate(shapes)]

    prompts = [torch.randint(0, VOCAB, (length,), generator=gen).tolist()
               for _, length, _ in shapes]
    model, together = Model(), requests()
    most = serve(model, together, say=True)
    right = True
    for request, alone in zip(together, requests()):
        serve(model, [alone], say=False)
        right &= request.answer == alone.answer
    print(
        f"\n{len(together)} requests, up to {most} at once; every answer as if it were alone: "
        f"{right}")
    calls = lz.stats().calls["paged_attention"]
    print("attention was served by " + ", ".join(f"{kernel} ({n} calls)"
                                                 for kernel, n in calls.items()))
    return 0 if right and most >= 3 else 1


if __name__ == "__main__":
    sys.exit(main())

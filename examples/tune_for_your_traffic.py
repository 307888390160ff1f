"""Let selection follow what was measured on this machine, for the calls that your program really
makes.

A loop that stands for your service is recorded: a prompt, then single tokens. Its calls are timed
with every kernel that may serve them. You will see who was fastest in each kind of call and by how
much, and that the choice for the same call now rests on a measurement where it was a guess before.

    python examples/tune_for_your_traffic.py
"""

from __future__ import annotations

import sys

import torch

import layerzero as lz

HIDDEN, HEADS, KV_HEADS, DIM = 512, 8, 2, 64


def serve(steps: int) -> None:
    """Your traffic: a prompt of 64 tokens, then tokens one by one over the memory of all."""
    norm, weight = torch.ones(HIDDEN), torch.randn(HIDDEN, HIDDEN) * 0.02
    for length in (64, *[1] * steps):
        hidden = lz.rms_norm(torch.randn(1, length, HIDDEN), norm)
        query = lz.linear(hidden, weight).view(1, length, HEADS, DIM).transpose(1, 2)
        keys = torch.randn(1, KV_HEADS, 64 + steps, DIM)
        lz.attention(query, keys, keys, is_causal=True, causal_align="bottom_right")


def main() -> int:
    # or, with no change of your program: lz record -- python app.py
    with lz.recording() as recorder:
        serve(steps=8)
    print("recorded:")
    for call in recorder.calls:
        print(f"  {call.count:3d} x {call.op}")

    query, keys = torch.randn(1, HEADS, 1, DIM), torch.randn(1, KV_HEADS, 72, DIM)

    def basis() -> str:
        first = lz.explain("attention", query, keys, keys, is_causal=True,
                           causal_align="bottom_right").steps[0]
        return f"{first.kernel}, {first.score.source}"

    print(f"\ndecoding before: {basis()}")
    # seconds= would limit it
    report = lz.tune(recorder.calls, rounds=30, compile=False, device="cpu")
    for tuned in report.tuned:
        gain = (f", {tuned.gain} {tuned.baseline}" if tuned.gain and tuned.baseline != tuned.best
                else "")
        print(
            f"  {tuned.label}: {tuned.best} {tuned.winner.summary.median:.1f} us "
            f"({tuned.certainty}){gain}")
    print(f"decoding after: {basis()}")

    serve(steps=2)                                 # from now on, in this process and in later ones
    return 0 if (report.tuned or report.already) and basis().endswith("measured") else 1


if __name__ == "__main__":
    sys.exit(main())

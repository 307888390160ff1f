"""One line in a transformers model: the same tokens, and an answer to "who computed this, and why?"

A small Llama with random weights generates a text, is patched, and generates again. You will see
what was replaced and what was left with the reason, which kernels served, the whole decision for
one of the calls, and that unpatching gives the old model back bit by bit.

    python examples/patch_a_model.py
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerzero as lz


def main() -> int:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2)).eval()
    prompt = torch.randint(0, 1000, (2, 24))

    def generate() -> torch.Tensor:
        return model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(prompt).logits

    stock, before = generate(), logits()

    report = lz.patch(model)                       # the one line
    print(report)

    served = generate()
    print("\nthe same tokens:", torch.equal(served, stock))
    print("largest difference of a logit:", f"{(logits() - before).abs().max():.1e}")

    print("\nwho served:")
    print(report.explain(input_ids=prompt))

    # The decision for a call like those of its attention: every kernel, and what speaks against it.
    query, key = torch.randn(2, 8, 24, 16), torch.randn(2, 2, 24, 16)
    print("\nwhy:")
    print(lz.explain("attention", query, key, key, is_causal=True))

    lz.unpatch(model)
    restored = torch.equal(logits(), before)
    print("\nunpatched, bit by bit as before:", restored)
    return (0 if torch.equal(served, stock) and restored and report.counts().get("attention") == 4
            else 1)


if __name__ == "__main__":
    sys.exit(main())

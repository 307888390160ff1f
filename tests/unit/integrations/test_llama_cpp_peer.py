"""The comparison with llama.cpp: its arithmetic, and its process by a runner that stands in."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from layerzero.integrations.gguf import llama_cpp, llama_cpp_stages
from layerzero.spec.errors import ConfigError

# Answers as llama_cpp_runner.py does, with a model whose next token is the last one plus 1.
STAND_IN = """
import json, sys
print("a line of llama.cpp's own", flush=True)
print(json.dumps({"times_cpu": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "stages" in request:
        print(json.dumps({"stages": {f"{n}-0": [1.0, 2.0] for n in request["stages"]}}), flush=True)
        continue
    if request["count"] > 9:
        raise SystemExit(3)
    first = request["prompt"][-1] + 1
    tokens = list(range(first, first + request["count"]))
    print(json.dumps({"tokens": tokens, "top": [[(t, -0.5)] for t in tokens], "rss": 1}),
          flush=True)
"""


def listed(logits: torch.Tensor, count: int) -> list[tuple[int, float]]:
    values, ids = logits.double().log_softmax(-1).topk(count)
    return list(zip(ids.tolist(), values.tolist()))


def test_divergence_of_listed_tokens():
    gen = torch.Generator().manual_seed(0)
    theirs = torch.randn(100, generator=gen) * 3
    ours = theirs + 0.3 * torch.randn(100, generator=gen)
    p, q = (t.double().log_softmax(-1) for t in (theirs, ours))
    exact = float((p.exp() * (p - q)).sum())
    whole, gap = llama_cpp.divergence(listed(theirs, 100), ours)
    assert whole == pytest.approx(exact, rel=1e-9)
    assert gap == pytest.approx(float(p.max() - p[ours.argmax()]), abs=1e-12)
    part, _ = llama_cpp.divergence(listed(theirs, 20), ours)
    assert 0 < part <= exact                   # the rest as one event can only lower it
    same, none = llama_cpp.divergence(listed(theirs, 20), theirs)
    assert same == pytest.approx(0.0, abs=1e-9) and none == 0.0
    far = theirs.clone()
    far[int(theirs.argmin())] = 50.0
    assert llama_cpp.divergence(listed(theirs, 20), far)[1] == math.inf


def test_agreement_counts_ties():
    rows = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.9, 0.0], [2.0, 0.0, 0.0]])
    ours = torch.tensor([[2.0, 1.0, 0.0], [1.9, 2.0, 0.0], [0.0, 2.0, 0.0]])
    comparison = llama_cpp.agreement("three", [listed(row, 3) for row in rows], ours)
    assert (comparison.positions, comparison.top_1) == (3, pytest.approx(1 / 3))
    assert comparison.agreed == pytest.approx(2 / 3) and not comparison.passed
    assert json.loads(json.dumps(comparison.to_json()))["passed"] is False
    assert llama_cpp.agreement("same", [listed(row, 3) for row in rows], rows).passed


def test_stages_are_compared_layer_by_layer():
    """With a decoder that records two layers, and a peer whose second one is 10 % off."""
    values = {name: torch.arange(1.0, 5.0) for name in llama_cpp_stages.STAGES.values()}

    class Decoder:
        trace = None

        def __call__(self, tokens):
            for i in range(2):
                self.trace.update({f"{i}.{name}": SimpleNamespace(value=v[None, None])
                                   for name, v in values.items()})

    peer = SimpleNamespace(ask_stages=lambda ids, names: {
        f"{n}-{i}": (torch.arange(1.0, 5.0) * (1 + 0.1 * i)).tolist() for n in names
        for i in range(2)})
    model = SimpleNamespace(tokenize=lambda text, special: [1, 2], config=SimpleNamespace(layers=2),
                            decoder=lambda **options: Decoder())
    comparison = llama_cpp_stages.compare_stages(model, peer)
    assert [s.name for s in comparison] == list(llama_cpp_stages.STAGES.values())
    assert all((s.first, s.worst_layer, s.passed) == (0.0, 1, True) for s in comparison)
    assert comparison[0].largest == pytest.approx(0.1 / 1.1)
    values["attn_out"] = torch.tensor([1.0, 2.0, 3.0, 5.0])    # the first layer must be close
    wrong = [s.name for s in llama_cpp_stages.compare_stages(model, peer) if not s.passed]
    assert wrong == ["attn_out"]
    blind = SimpleNamespace(ask_stages=lambda ids, names: {})
    assert llama_cpp_stages.compare_stages(model, blind) == []


def test_the_process(monkeypatch, tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text(STAND_IN)
    monkeypatch.setattr(llama_cpp, "RUNNER", runner)
    with llama_cpp.peer_process(Path(sys.executable), "model", 1, 64) as peer:
        assert peer.times_cpu and peer.ask([4, 5], 3)["tokens"] == [6, 7, 8]
        assert peer.ask([1], 1, top=1)["top"] == [[[2, -0.5]]]
        assert peer.ask_stages([1], ["l_out"]) == {"l_out-0": [1.0, 2.0]}
        with pytest.raises(ConfigError, match="ended with 3 before it answered"):
            peer.ask([1], 10)


def test_a_program_is_a_peer_and_what_it_printed_last_is_told(tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text(STAND_IN)
    with llama_cpp.peer_process([sys.executable, str(runner)], "model", 2, 64) as peer:
        assert not peer.times_cpu and peer.ask([4, 5], 3)["tokens"] == [6, 7, 8]
    runner.write_text("import sys; sys.exit('no such model: ' + sys.argv[1])")
    with pytest.raises(ConfigError, match="ended with 1 before it answered: no such model: m"):
        llama_cpp.LlamaCpp([sys.executable, str(runner)], "m", 1, 64)

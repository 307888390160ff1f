"""lz.accelerate(model, assistant=...): the tokens of plain greedy generation, in fewer rounds."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models  # noqa: E402

from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda import captured  # noqa: E402
from layerzero.integrations.transformers.generation.speculation import Lookup, Speculation  # noqa: E402
from layerzero.spec.errors import ConfigError, NoKernelFoundError  # noqa: E402

pytestmark = pytest.mark.integration
NEW = 16


def generate(model, ids=None, **options):
    ids = models.tokens(1, 9) if ids is None else ids
    return model.generate(ids, attention_mask=torch.ones_like(ids),
                          **{"do_sample": False, "max_new_tokens": NEW, **options})


class Right:
    """An assistant that knows the text, but for every fourth token."""

    def __init__(self, text):
        self.text = text

    def begin(self):
        pass

    def accept(self, length):
        pass

    def __call__(self, ids, most):
        at = len(ids)
        drafted = self.text[at:at + min(3, most)].clone()
        drafted[(torch.arange(at, at + len(drafted)) % 4) == 0] += 1
        return drafted % models.VOCAB, None


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_the_same_tokens_in_fewer_rounds(name):
    model = models.tiny(name)
    before = generate(model)
    report = accelerate(model, measure=False, patch=False, assistant="prompt_lookup")
    report._speculation.draft = Right(before[0])
    assert torch.equal(generate(model), before)
    done = report._speculation.stats
    assert done.tokens == NEW and done.rounds <= 6 and 0 < done.accepted < done.drafted, str(report)
    report.undo()
    assert "generate" not in vars(model) and torch.equal(generate(model), before)


def test_in_the_buffers_of_a_graph(monkeypatch):
    """Rounds of several rows, of one, and a cache that outgrows its buffers."""
    monkeypatch.setattr(captured, "MIN_CAPACITY", 8)
    model = models.tiny("llama")
    before = generate(model, max_new_tokens=70)
    report = accelerate(model, measure=False, patch=False, capture=True, assistant="prompt_lookup")
    report._speculation.draft = Right(before[0])
    for _ in range(2):
        assert torch.equal(generate(model, max_new_tokens=70), before)
    rows = report._speculation.rows
    assert rows.captured is not None and not rows.declined and rows.captured._fixed
    assert report.served.keys() <= {"captured"} and not report.declined, str(report)


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model(same):
    model, draft = models.tiny("llama"), models.tiny("llama", num_hidden_layers=1)
    draft = copy.deepcopy(model) if same else draft
    before = generate(model)
    report = accelerate(model, measure=False, patch=False, assistant=draft)
    assert torch.equal(generate(model), before)
    done = report._speculation.stats
    assert done.tokens == NEW and (done.accepted == done.drafted) == same
    assert not same or done.rounds == 3        # 1 + 5 + 5 + 5
    assert report._assistant.served and "speculation by LlamaForCausalLM" in str(report)
    report.undo()
    assert not any(name in vars(m) for m in (model, draft) for name in ("generate", "forward"))


@pytest.mark.parametrize("branches", [1, 2])
def test_what_stood_in_the_text_before(branches):
    result, parents = Lookup(3, branches)(torch.tensor([5, 6, 7, 8, 9, 5, 6, 1, 2, 5, 6]), 9)
    assert result.tolist() == [1, 2, 5, 7, 8, 9][:3 * branches]
    assert parents is None if branches == 1 else parents.tolist() == [-1, 0, 1, -1, 3, 4]


def test_a_tree_keeps_the_path_that_the_model_chose():
    """Two branches: the second is right, so that its keys move to where the first's were."""
    model = models.tiny("llama")
    before = generate(model)

    class Tree(Right):
        def __call__(self, ids, most):
            right = self.text[len(ids):len(ids) + min(3, most)]
            parents = [*range(-1, len(right) - 1), -1, *range(len(right), 2 * len(right) - 1)]
            return (torch.cat(((right + 1) % models.VOCAB, right)),
                    torch.tensor(parents)) if len(right) else (right, None)

    report = accelerate(model, measure=False, patch=False, assistant="prompt_lookup")
    report._speculation.draft = Tree(before[0])
    assert torch.equal(generate(model), before)
    done = report._speculation.stats
    assert done.accepted == done.drafted // 2 and done.rounds == 4, str(report)


def test_processors_stops_and_streamers_see_every_token_in_order():
    model = models.tiny("llama")
    options = {"repetition_penalty": 1.4, "eos_token_id": int(generate(model)[0, -5])}
    before, seen = generate(model, **options), []

    class Streamer:
        def put(self, value):
            seen.extend(value.flatten().tolist())

        def end(self):
            seen.append("end")

    report = accelerate(model, measure=False, patch=False, assistant="prompt_lookup")
    report._speculation.draft = Right(before[0])
    result = generate(model, streamer=Streamer(), return_dict_in_generate=True, **options)
    assert torch.equal(result.sequences, before) and seen == [*before[0].tolist(), "end"]
    assert result.past_key_values.get_seq_length() == before.shape[1] - 1
    assert report._speculation.stats.accepted


def test_what_is_no_greedy_text_goes_its_own_way():
    model, two = models.tiny("llama"), models.tokens(2, 9)
    ways = [{"do_sample": True}, {"ids": two}, {"prompt_lookup_num_tokens": 2},
            {"cache_implementation": "static"}]

    def each():
        results = []
        for way in ways:
            torch.manual_seed(0)
            out = generate(model, **way)
            results.append(getattr(out, "sequences", out))
        return results

    before = each()
    report = accelerate(model, measure=False, patch=False, assistant="prompt_lookup")
    assert all(map(torch.equal, each(), before)) and not report._speculation.stats.rounds
    assert sum(report._speculation.declined.values()) == len(ways), str(report)


@pytest.mark.parametrize("name, assistant, why", [
    ("mistral", "prompt_lookup", "its layers have a window"),
    ("llama", "another vocabulary", "its vocabulary has 128 tokens and the assistant's 64")])
def test_where_there_is_none_the_report_says_why(name, assistant, why):
    model = models.tiny(name)
    if assistant == "another vocabulary":
        assistant = models.tiny("llama", vocab_size=64)
    report = accelerate(model, measure=False, patch=False, assistant=assistant)
    assert why in str(report) and not report.speculated
    assert not isinstance(vars(model).get("generate"), Speculation)


def test_an_assistant_that_is_none_is_refused():
    model = models.tiny("llama")
    with pytest.raises(ConfigError, match="assistant= wants a model or 'prompt_lookup'"):
        accelerate(model, measure=False, assistant="ngram")
    assert "forward" not in vars(model)


def test_a_copy_does_not_speculate():
    model = models.tiny("llama")
    before = generate(model)
    accelerate(model, measure=False, patch=False, assistant="prompt_lookup")
    other = copy.deepcopy(model)
    assert "generate" not in vars(other) and torch.equal(generate(other), before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_a_cuda_graph(name):
    model = models.tiny(name).cuda()
    before = generate(model, models.tokens(1, 9).cuda())
    report = accelerate(model, measure=False, patch=False, assistant="prompt_lookup")

    class Moved(Right):
        def __call__(self, ids, most):
            return super().__call__(ids, most)[0].cuda(), None

    report._speculation.draft = Moved(before[0].cpu())
    assert torch.equal(generate(model, models.tokens(1, 9).cuda()), before), str(report)
    rows = report._speculation.rows
    assert rows.captured is not None and not rows.declined and report._speculation.stats.accepted


@pytest.mark.parametrize("window", [None, 5])
def test_torch_over_all_of_a_buffer_is_what_the_pages_give(window, monkeypatch):
    """Where no kernel of pages can be captured, as for float32 on a GPU."""
    from layerzero.integrations.transformers.decoding.decode_step import DecodeStep

    bind = DecodeStep.__init__.__globals__["Binder"].__call__

    def none(self, what, op, *tensors, **fixed):
        if op == "paged_attention":
            raise NoKernelFoundError("no kernel")
        return bind(self, what, op, *tensors, **fixed)

    model = models.tiny("mistral", sliding_window=window)
    before = generate(model)
    monkeypatch.setattr(DecodeStep.__init__.__globals__["Binder"], "__call__", none)
    report = accelerate(model, measure=False, patch=False, capture=True,
                        assistant=None if window else "prompt_lookup")
    if window is None:
        report._speculation.draft = Right(before[0])
    assert torch.equal(generate(model), before)
    assert report.kernels["attention, captured"] == "torch.sdpa over all of the buffer"
    assert not report.declined and set(report.served) <= {"captured"}, str(report)

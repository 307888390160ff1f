"""lz.accelerate(model, assistant=...): the tokens of plain greedy generation, in fewer rounds."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from helpers import run_interpreted, triton_interpreter_works

transformers = pytest.importorskip("transformers")

import models  # noqa: E402

from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda import captured  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda.captured_rows import depths  # noqa: E402
from layerzero.integrations.transformers.decoding.planning import Binder  # noqa: E402
from layerzero.integrations.transformers.generation import round_state, rounds  # noqa: E402
from layerzero.integrations.transformers.generation.pace import Pace  # noqa: E402
from layerzero.integrations.transformers.generation.speculation import (  # noqa: E402
    Lookup,
    Speculation,
    SpeculationStats,
)
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


class Always(Pace):
    """Rounds, however long they take."""

    def speculates(self):
        return True


class Turns(Pace):
    """Some rounds, some plain steps, and so on."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def speculates(self):
        return self.asked // 5 % 2 == 0

    def add(self, *args):
        super().add(*args)
        self.asked += 1


def draft_for(model, name, kind):
    """An assistant that is always right, seldom, or a search."""
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    return {"lookup": "prompt_lookup", "same": copy.deepcopy(model),
            "other": models.tiny(name, **{layers: 1}, **long(name))}[kind]


def long(name):
    """Enough learned positions for the texts below."""
    return {"n_positions": 256} if name == "gpt2" else {}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("pace", [Always, Turns])
@pytest.mark.parametrize("name, kind", [("llama", "lookup"), ("llama", "same"), ("gpt2", "other"),
                                        ("qwen3", "other"), ("gpt2", "lookup")])
def test_whole_rounds_where_the_step_is_captured(name, kind, pace, ahead, monkeypatch):
    """Rounds that know where the last one ended without the host, in buffers that are outgrown."""
    monkeypatch.setattr(captured, "MIN_CAPACITY", 8)
    monkeypatch.setattr(rounds, "MAX_WANTED", 32)
    monkeypatch.setattr(rounds, "AHEAD_ON_HOST", ahead)
    model = models.tiny(name, **long(name))
    before = generate(model, max_new_tokens=150)
    report = accelerate(model, measure=False, patch=False, capture=True,
                        assistant=draft_for(model, name, kind))
    speculation = report._speculation
    for _ in range(2):
        speculation.stats = done = SpeculationStats(pace=pace())
        assert torch.equal(generate(model, max_new_tokens=150), before)
        assert done.tokens == 150 and done.rounds and bool(done.steps) == (pace is Turns)
        assert (kind == "same") == (done.accepted == done.drafted) and not done.uncaptured
    assert report.served == {"captured": 2 * 149} and not report.declined, str(report)


@pytest.mark.parametrize("name, paged", [("llama", True), ("llama", False), ("gpt2", True),
                                         ("mixtral", True)])
def test_captured_trees_keep_the_branch_that_the_model_chose(name, paged, monkeypatch):
    """The text comes back to a token that goes on otherwise: the later branch is right."""
    if not paged:
        without_pages(monkeypatch)
    monkeypatch.setattr(captured, "MIN_CAPACITY", 8)
    monkeypatch.setattr(rounds, "MAX_WANTED", 32)
    model = models.tiny(name, **long(name))
    before = generate(model, max_new_tokens=60)[0].tolist()
    # a copy of the text, and after it some of its tokens with others behind them
    other = [t for i, token in enumerate(before[20:50:2]) for t in (token, (token + 7) % 90 + 5)]
    ids = torch.tensor([[*before, *other, *before[:9]]])
    wanted = generate(model, ids, max_new_tokens=60)
    report = accelerate(model, measure=False, patch=False, capture=True, assistant="prompt_lookup")
    speculation, moved = report._speculation, []
    move = round_state.move_branch

    def watched(state, *args):
        moved.append(state.kept.tolist())
        return move(state, *args)

    monkeypatch.setattr(round_state, "move_branch", watched)
    speculation.draft = Lookup(3, 2)
    speculation.stats.pace = Always()
    assert torch.equal(generate(model, ids, max_new_tokens=60), wanted)
    assert not speculation.stats.uncaptured and speculation.stats.rounds == len(moved), str(report)
    assert any(branch and accepted for branch, accepted in moved), moved


@pytest.mark.parametrize("kind", ["lookup", "same"])
def test_rounds_do_not_go_beyond_learned_positions(kind):
    model = models.tiny("gpt2")                # of 128, all of which the text has
    before = generate(model, max_new_tokens=119)
    report = accelerate(model, measure=False, patch=False, capture=True,
                        assistant=copy.deepcopy(model) if kind == "same" else "prompt_lookup")
    report._speculation.stats.pace = Always()
    assert torch.equal(generate(model, max_new_tokens=119), before)
    assert list(report._speculation.stats.uncaptured) == ["its learned positions end soon"]
    assert "not captured in 1 texts: its learned positions end soon" in str(report)


@pytest.mark.parametrize("kind", ["lookup", "same"])
def test_captured_rounds_stop_where_the_text_does(kind):
    """An end in the middle of a round, a criterion of one's own, a streamer, the cache."""
    model = models.tiny("llama")
    text = generate(model, max_new_tokens=40)
    eos = int(text[0, 9 + 17])
    seen, asked = [], []

    class Streamer:
        def put(self, value):
            seen.extend(value.flatten().tolist())

        def end(self):
            seen.append("end")

    def criterion(ids, scores, **kwargs):
        asked.append(ids.tolist()[0])
        return torch.zeros(1, dtype=torch.bool)

    options = {"max_new_tokens": 40, "eos_token_id": eos,
               "stopping_criteria": [criterion]}
    before = generate(model, **options)
    wanted, asked[:] = list(asked), []
    report = accelerate(model, measure=False, patch=False, capture=True,
                        assistant=draft_for(model, "llama", kind))
    report._speculation.stats.pace = Always()
    result = generate(model, streamer=Streamer(), return_dict_in_generate=True, **options)
    assert torch.equal(result.sequences, before) and seen == [*before[0].tolist(), "end"]
    assert asked == wanted[:len(asked)] and len(asked) >= len(wanted) - 1
    assert result.past_key_values.get_seq_length() == before.shape[1] - 1
    assert report._speculation.stats.rounds and not report._speculation.stats.uncaptured
    with torch.no_grad():                      # what is in the cache is that of the text
        fresh = model(before[:, :-1], use_cache=True).past_key_values
    for mine, theirs in zip(result.past_key_values.layers, fresh.layers):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-5)


def test_a_launch_that_gave_up_costs_no_token(monkeypatch):
    """The buffers are dropped, and the host goes on after the last token that was read."""
    model = models.tiny("llama")
    before = generate(model, max_new_tokens=40)
    report = accelerate(model, measure=False, patch=False, capture=True, assistant="prompt_lookup")
    speculation, lost = report._speculation, []
    speculation.stats.pace = Always()

    def gave_up(self):
        lost.append(self)
        return len(lost) > 2 and self is lost[2]

    monkeypatch.setattr(captured.FixedBuffers, "gave_up", gave_up)
    assert torch.equal(generate(model, max_new_tokens=40), before) and len(lost) >= 3
    assert lost[2] not in report._step._captured._fixed[1]


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_search_on_the_device_is_that_of_the_host(seed, branches):
    gen = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 4 + 20 * (seed % 2), (1 + 7 * seed,), generator=gen)

    def inputs(count):
        return round_state.Inputs(torch.zeros((count, 1), dtype=torch.int64),
                                  *(torch.zeros(count, dtype=torch.int64) for _ in "pl"),
                                  depths(count, branches) if count > 1 else torch.tensor([0]))

    state = round_state.make_state(64, inputs(1), inputs(1 + 5 * branches), branches=branches)
    state.start(text)
    round_state.lookup(state)
    drafted = Lookup(5, branches)(text, 99)[0].tolist()
    assert state.rows.tokens[1:1 + int(state.found.sum()), 0].tolist() == drafted


def paced(pace, tokens, round_us, plain_us=100.0, new=2000):
    """Returns how long a text takes as the pace chooses, beside plain steps."""
    done = time = 0.0
    while done < new:
        kind = pace.speculates()
        given, us = (tokens(int(done)), round_us) if kind else (1, plain_us)
        pace.add(kind, given, us / 1e6)
        done, time = done + given, time + us
    return time / (done * plain_us)


def test_plain_steps_take_over_where_rounds_are_slower():
    never, always = Pace(), Pace()
    assert paced(never, lambda at: 1, 250.0) < 1.06 and never.pauses > 2
    assert paced(always, lambda at: 3, 150.0) < 0.51 and not always.pauses
    assert never.gain == pytest.approx(0.4) and always.gain == pytest.approx(2.0)
    late = Pace()                              # drafts are right from the middle of the text on
    assert paced(late, lambda at: 4 if at > 1000 else 1, 200.0) < 0.85 and late.gain > 1.9
    late.begin()
    assert late.speculates() and "rounds are 2.00 times as fast" in str(
        SpeculationStats(rounds=1, pace=late))


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["lookup", "tree", "same", "other"])
def test_whole_rounds_in_a_cuda_graph(kind):
    """float32: the tokens are those of plain steps, exactly."""
    model, ids = models.tiny("llama").cuda(), models.tokens(1, 9).cuda()
    before = generate(model, ids, max_new_tokens=64)
    draft = draft_for(model, "llama", "lookup" if kind == "tree" else kind)
    report = accelerate(model, measure=False, patch=False,
                        assistant=draft if isinstance(draft, str) else draft.cuda())
    if kind == "tree":
        report._speculation.draft.count, report._speculation.draft.branches = 3, 2
    for pace in (Always, Turns, Pace):
        report._speculation.stats = SpeculationStats(pace=pace())
        assert torch.equal(generate(model, ids, max_new_tokens=64), before), str(report)
        assert not report._speculation.stats.uncaptured, str(report)


@pytest.mark.skipif(os.environ.get("LZ_TEST_FULL") != "1",
                    reason="half a minute; LZ_TEST_FULL=1 asks for it")
@pytest.mark.skipif(not triton_interpreter_works(), reason="no Triton whose interpreter works here")
def test_the_device_kernels_agree_in_the_interpreter():
    run_interpreted(Path(__file__).parent / "interpreted_round.py")


def without_pages(monkeypatch):
    """Let there be no kernel of pages, as for float32 on a GPU."""
    bind = Binder.__call__

    def none(self, what, op, *tensors, **fixed):
        if op == "paged_attention":
            raise NoKernelFoundError("no kernel")
        return bind(self, what, op, *tensors, **fixed)

    monkeypatch.setattr(Binder, "__call__", none)


@pytest.mark.parametrize("window", [None, 5])
def test_torch_over_all_of_a_buffer_is_what_the_pages_give(window, monkeypatch):
    model = models.tiny("mistral", sliding_window=window)
    before = generate(model)
    without_pages(monkeypatch)
    report = accelerate(model, measure=False, patch=False, capture=True,
                        assistant=None if window else "prompt_lookup")
    if window is None:
        report._speculation.draft = Right(before[0])
    assert torch.equal(generate(model), before)
    assert report.kernels["attention, captured"] == "torch.sdpa over all of the buffer"
    assert not report.declined and set(report.served) <= {"captured"}, str(report)

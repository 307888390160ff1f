"""generate() of an accelerated model that loops over its tokens on the device: what stock
transformers gives, seen by streamers and criteria in the same order."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from helpers import run_interpreted, triton_interpreter_works

transformers = pytest.importorskip("transformers")

from test_accelerate import build, prompt  # noqa: E402
from transformers.generation import (  # noqa: E402
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import layerzero as lz  # noqa: E402
from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda import captured  # noqa: E402
from layerzero.integrations.transformers.generation import loop as generation  # noqa: E402

pytestmark = pytest.mark.integration
DEVICE = {"on the device": 1}


class RecordingStreamer:
    """A streamer that remembers."""

    def __init__(self, most: int = 1000) -> None:
        self.tokens, self.most, self.ended = [], most, False

    def put(self, value):
        if len(self.tokens) >= self.most:
            raise RuntimeError("the reader went away")
        self.tokens.append(value.tolist())

    def end(self):
        self.ended = True


class Until(StoppingCriteria):
    """Ends row i once it has `lengths[i]` tokens; remembers what it saw."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.seen = torch.tensor(lengths), []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.clone())
        return input_ids.shape[1] >= self.lengths


class Plain(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.fixture(scope="module")
def stock():
    model = build()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["step", "fixed buffers"])
def accelerated(request, stock):
    model = copy.deepcopy(stock)
    accelerate(model, measure=False, patch=False, capture=request.param)
    return model


@pytest.fixture
def served(accelerated, monkeypatch):
    """The same model, accelerated; tokens are looked at as late as on a GPU."""
    monkeypatch.setattr(captured, "MIN_CAPACITY", 16)
    monkeypatch.setattr(generation, "AHEAD_ON_HOST", 3)
    step = accelerated._layerzero_acceleration._step
    for counter in (step.generated, step.served, step.declined):
        counter.clear()
    return accelerated


def generate(model, ids=None, new=10, **how):
    ids = prompt() if ids is None else ids
    torch.manual_seed(5)
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": new,
                                  "do_sample": False, **how})


@pytest.mark.parametrize("how", [
    {}, {"repetition_penalty": 1.4, "suppress_tokens": [32, 27, 51]},
    {"bad_words_ids": [[32], [51]], "begin_suppress_tokens": list(range(3, 90))},
    {"eos_token_id": [5, 40, 60, 70, 80]}, {"eos_token_id": 23, "min_new_tokens": 8},
    {"eos_token_id": [51, 23], "min_length": 14, "repetition_penalty": 1.2},
    {"max_length": 9, "max_new_tokens": None, "renormalize_logits": True},
    {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"do_sample": True, "min_p": 0.1, "typical_p": 0.9, "num_return_sequences": 2}], ids=str)
def test_the_tokens_of_transformers(stock, served, how, request):
    ids = prompt(1 if "step" in request.node.name else 3)
    assert torch.equal(generate(served, ids, **how), generate(stock, ids, **how))
    report = served._layerzero_acceleration
    assert report.generated == DEVICE and not report.declined


def test_more_tokens_than_the_first_buffers_hold(stock, served, monkeypatch):
    monkeypatch.setattr(generation, "MAX_CAPACITY", 8)
    how = {"new": 40, "repetition_penalty": 1.2, "eos_token_id": 2}
    assert torch.equal(generate(served, prompt(2), **how), generate(stock, prompt(2), **how))


def test_a_streamer_gets_every_token_in_order_and_none_after_the_end(stock, served):
    expected, streamer = RecordingStreamer(), RecordingStreamer()
    want = generate(stock, new=30, eos_token_id=51, streamer=expected)
    assert torch.equal(generate(served, new=30, eos_token_id=51, streamer=streamer), want)
    assert streamer.tokens == expected.tokens and streamer.ended and len(streamer.tokens) < 30


@pytest.mark.parametrize("batch, lengths", [(1, (13,)), (3, (9, 14, 12))])
@pytest.mark.parametrize("eos", [None, [51, 23]], ids=str)
def test_a_criterion_sees_every_token_and_ends_rows(stock, served, batch, lengths, eos):
    results, saw = [], []
    for model in (stock, served):
        until = Until(*lengths)
        out = generate(model, prompt(batch), new=20, eos_token_id=eos, return_dict_in_generate=True,
                       stopping_criteria=StoppingCriteriaList([until]))
        results.append(out)
        saw.append(until.seen)
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert len(saw[0]) == len(saw[1]) and all(map(torch.equal, *saw))
    want, result = (r.past_key_values for r in results)
    assert result.get_seq_length() == want.get_seq_length()
    if batch == 1:
        for a, b in zip(want.layers, result.layers):
            torch.testing.assert_close(b.keys, a.keys, rtol=1e-4, atol=1e-4)


def test_a_cache_goes_on_where_it_was(stock, served):
    results = []
    for model in (stock, served):
        first = generate(model, new=9, return_dict_in_generate=True, eos_token_id=[51, 27])
        cache = first.past_key_values
        more = torch.cat([first.sequences, torch.tensor([[7, 8]])], 1)
        second = generate(model, more, new=5, past_key_values=cache)
        third = generate(model, torch.cat([second, torch.tensor([[9]])], 1), new=4,
                         past_key_values=cache)
        results.append((third, cache.get_seq_length()))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert served._layerzero_acceleration.generated == {"on the device": 3}


def test_whoever_interrupts_finds_the_cache_of_the_tokens_he_saw(served):
    cache, streamer = transformers.DynamicCache(config=served.config), RecordingStreamer(most=4)
    with pytest.raises(RuntimeError, match="went away"):
        generate(served, new=20, past_key_values=cache, streamer=streamer)
    # the prompt, then two tokens that were computed on after the streamer's third
    assert len(streamer.tokens) == 4 and cache.get_seq_length() == 7 + 3
    assert torch.equal(generate(served), generate(served))


def test_max_time_ends_it(served):
    assert generate(served, new=200, max_time=0.0).shape[1] == 8


@pytest.mark.parametrize("how, why", [
    ({"logits_processor": LogitsProcessorList([Plain()])}, "Plain"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"), ({"bad_words_ids": [[5, 6]]}, "NoBadWords"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ({"use_cache": False}, "no cache"), ({"cache_implementation": "static"}, "StaticCache"),
    ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]])}, "padding")],
    ids=lambda value: value if isinstance(value, str) else "+".join(value))
def test_the_rest_is_left_to_transformers(stock, served, how, why):
    want, result = generate(stock, **how), generate(served, **how)
    if "output_scores" in how:
        want, result = want.sequences, result.sequences
    assert torch.equal(result, want)
    report = served._layerzero_acceleration
    (reason, count), = report.generated.items()
    assert why in reason and count == 1 and f"transformers' own loop: {reason}" in str(report)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_other_loops_are_not_touched(stock, served, how):
    assert torch.equal(generate(served, **how), generate(stock, **how))
    assert not served._layerzero_acceleration.generated


def test_undo_and_copies(stock, served):
    assert "generate" in vars(served) and served.generate.__name__ == "generate"
    other, want = copy.deepcopy(served), generate(stock, new=4)
    assert "generate" not in vars(other) and torch.equal(generate(other, new=4), want)
    with accelerate(other, measure=False, patch=False):
        assert "generate" in vars(other) and torch.equal(generate(other, new=4), want)
    assert "generate" not in vars(other) and torch.equal(generate(other, new=4), want)


def test_a_hook_on_the_model_gets_the_model(served):
    seen = []
    handle = served.register_forward_hook(lambda module, args, out: seen.append(module))
    generate(served, new=3)
    handle.remove()
    assert len(seen) == 3 and all(m is served for m in seen)


def test_a_fault_in_the_loop_leaves_the_answer_intact(stock):
    model = copy.deepcopy(stock)
    report = accelerate(model, measure=False, patch=False, capture=True)
    step, calls = report._step.step(1), []
    whole = step.layers[1].mlp

    def failing(x):
        calls.append(x)
        return whole(x) if len(calls) < 5 else torch.mm(x, x)

    object.__setattr__(step.layers[1], "mlp", failing)
    assert torch.equal(generate(model), generate(stock))
    assert "a fault of the step" in next(iter(report.declined))


class Tired:
    """A persistent step that gives up at its n-th launch, and at all that follow."""

    def __init__(self, fixed, most: int) -> None:
        self.fixed, self.left, self.given_up = fixed, most, False

    def __call__(self, inputs, state):
        self.left -= 1
        self.given_up = self.given_up or self.left < 0
        self.fixed._persistent = None
        out = self.fixed._run()
        self.fixed._persistent = self
        return out.fill_(torch.nan) if self.given_up else out

    def timed_out(self) -> bool:
        return self.given_up


@pytest.mark.parametrize("how", [{"repetition_penalty": 1.3}], ids=str)
def test_a_launch_that_gives_up_is_done_again_by_the_kernels(stock, how, monkeypatch):
    made = []

    def faster(step, parts, rooms, angles, inputs, state, by_kernels):
        made.append(Tired(by_kernels.__self__, 5)) if not made else None
        return None if step in generation.persistent._lost else made[0]

    model, ids = copy.deepcopy(stock), prompt(2)
    expected = generate(stock, ids, 10, **how)
    accelerate(model, measure=False, capture=True)
    monkeypatch.setattr(captured.persistent, "faster", faster)
    monkeypatch.setattr(generation, "AHEAD_ON_HOST", 3)
    model.forward._captured.forget(2)
    seen: list = []
    stop = lz.subscribe(seen.append)
    try:
        assert torch.equal(generate(model, ids, 10, **how), expected)
    finally:
        stop()
    assert made[0].given_up
    assert [e.served_by for e in seen if type(e).__name__ == "Fallback"] == ["a graph of kernels"]


def test_buffers_that_gave_up_after_their_text_serve_no_other(stock, monkeypatch):
    model, ids, made = copy.deepcopy(stock), prompt(2), []

    def faster(step, parts, rooms, angles, inputs, state, by_kernels):
        made.append(Tired(by_kernels.__self__, 1000)) if not made else None
        return None if step in generation.persistent._lost else made[0]

    accelerate(model, measure=False, capture=True)
    monkeypatch.setattr(captured.persistent, "faster", faster)
    model.forward._captured.forget(2)
    first = generate(model, ids, 10)
    made[0].given_up = True                    # a launch beyond its last token
    assert torch.equal(generate(model, ids, 10), first)
    assert made[0].fixed not in model.forward._captured._fixed[2]
    assert made[0].left > 900 and first.tolist() == generate(stock, ids, 10).tolist()


def test_a_draw_by_lz_sample_has_the_same_probabilities(stock, monkeypatch):
    """Chi-square of two samples, with seeds that are fixed: there is nothing that could differ."""
    monkeypatch.setattr(generation, "draws_without_sort", lambda like: True)
    model, ids = copy.deepcopy(stock), prompt().expand(64, -1).contiguous()
    ways = {"stock": stock, "ours": model}
    accelerate(model, measure=False, patch=False, capture=True)
    counts = {}
    for name, way in ways.items():
        torch.manual_seed(11)
        drawn = torch.cat([way.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True,
                                        max_new_tokens=2, top_k=12, top_p=0.9, temperature=2.0)
                           for _ in range(8)])
        counts[name] = torch.bincount(drawn[:, -2], minlength=96).double()
    a, b = counts["stock"], counts["ours"]
    often = a + b >= 10
    chi, free = float(((a - b) ** 2 / (a + b))[often].sum()), int(often.sum()) - 1
    assert free >= 5 and chi < free + 4 * (2 * free) ** 0.5
    assert not ((a == 0) & (b > 8)).any()
    assert model._layerzero_acceleration.generated == {"on the device": 8}
    assert "sample" in model._layerzero_acceleration.kernels["draw"]


def test_scores_from_which_nothing_can_be_drawn_are_an_error(stock, monkeypatch):
    monkeypatch.setattr(generation, "draws_without_sort", lambda like: True)
    model = copy.deepcopy(stock)
    accelerate(model, measure=False, patch=False, capture=True)
    with pytest.raises(RuntimeError, match="no token can be drawn for row 0 after 7 tokens"):
        generate(model, do_sample=True, suppress_tokens=list(range(96)))


@pytest.mark.skipif(os.environ.get("LZ_TEST_FULL") != "1",
                    reason="half a minute; LZ_TEST_FULL=1 asks for it")
@pytest.mark.skipif(not triton_interpreter_works(), reason="no Triton whose interpreter works here")
def test_the_device_kernels_agree_in_the_interpreter():
    run_interpreted(Path(__file__).parent / "interpreted_draw.py")


def test_the_report_says_so(served):
    report = lz.accelerate(served)
    assert "chooses its tokens on the device" in str(report)
    assert report.to_json()["generated"] == {}


def test_the_public_criterion(stock, monkeypatch):
    """A step that is wrong does not pass, and one that is exactly as right has no difference."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from criterion import bootstrap, criterion

    assert bootstrap([1.0, 1.5, 1.0], [2.0, 2.5, 2.5]).passed
    verdict = bootstrap([1.0, 3.0, 2.0], [2.0, 2.0, 2.0])
    assert not verdict.passed and verdict.low < verdict.difference == 0 < verdict.high
    same = criterion(stock, stock, prompt(2), steps=3)
    assert same["passed"] and same["ours"] == same["native"] and same["ours"]["same"] == [1.0, 1.0]
    assert max(same["ours"]["kl"]) < 1e-9
    wrong = copy.deepcopy(stock)
    with torch.no_grad():
        wrong.model.norm.weight.mul_(1.5)
    agreement = criterion(wrong, stock, prompt(2), steps=3)
    assert not agreement["passed"] and min(agreement["ours"]["kl"]) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"do_sample": True, "top_k": 20}, {
    "do_sample": True, "top_k": 0, "top_p": 0.9}], ids=str)
def test_in_a_cuda_graph(how):
    """Greedy: every token is the likeliest of the step; a sample: the same for a seed."""
    model, ids = build(dtype=torch.bfloat16).cuda(), prompt(2).cuda()
    model.generation_config.eos_token_id = None
    report = accelerate(model, measure=False, patch=False)
    out = generate(model, ids, new=40, **how)
    assert report.generated == DEVICE and report.served["captured"] == 39, str(report)
    if how:
        assert torch.equal(generate(model, ids, new=40, **how), out)
        return
    with torch.no_grad():
        step, cache = report._step, model(ids, use_cache=True).past_key_values
        assert not step.grow(cache)
        for place in range(ids.shape[1], out.shape[1] - 1):
            fixed = step._captured.hold(step.step(2), cache, place)
            logits = fixed.logits(out[:, place:place + 1], cache, place)[:, -1]
            assert torch.equal(logits.argmax(-1), out[:, place + 1])

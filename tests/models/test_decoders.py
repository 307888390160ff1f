"""Decoder models from lz calls only, against the same models in plain torch that recompute
everything.

A prompt, then 32 greedy tokens, of a ragged batch. The logits of every position may be off by at
most twice what eager torch is off by in the same dtype, both against float64. The tokens are judged
at each step by what came before them: in float32 every one is the truth's choice, so the whole
sequence is; in 16 bits wherever eager could not be mistaken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import (
    SHAPES,
    Cached,
    Config,
    Decoder,
    Generated,
    Latent,
    Memory,
    Padded,
    Pages,
    generate,
    make_weights,
)
from decoders import plain_logits as plain
from helpers import world as world
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import layerzero as lz

STEPS = 32
FULL = os.environ.get("LZ_TEST_FULL") == "1"
BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()        # by the CPU's own instructions
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The longest prompt is longer than the window, another ends just where it begins to hide keys.
PROMPTS = {None: (70, 9, 33), 256: (300, 12, 257), 1024: (1100, 12, 40)}
Make = Callable[[Decoder, Sequence[int]], Memory]
MEMORIES: dict[str, Make] = {
    "contiguous": lambda model, room: Cached(model, room, "contiguous"),
    "paged": lambda model, room: Cached(model, room, "paged"),
    "chunked": lambda model, room: Cached(model, room, "chunked"),
    "paged HND": lambda model, room: Cached(model, room, "paged", layout="HND"),
    "pages by hand": Pages,
    "pages by hand HND": lambda model, room: Pages(model, room, "HND"),
    "padded": Padded,
    "latent contiguous": lambda model, room: Latent(model, room, "contiguous"),
    "latent paged": lambda model, room: Latent(model, room, "paged"),
}


@pytest.fixture(autouse=True)
def every_choice_served() -> Iterator[None]:
    """A model that is right only because another kernel took over is not right."""
    seen: list[Any] = []
    stop = lz.subscribe(seen.append)
    yield
    stop()
    assert not [event for event in seen if event.name in ("fallback", "health", "unavailable",
                                                          "adapted")]


def name_of(value: Any) -> str:
    return str(value).removeprefix("torch.")


def prompts_of(lengths: Sequence[int], vocab: int = 320) -> list[list[int]]:
    gen = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, vocab, (n,), generator=gen).tolist() for n in lengths]


@lru_cache(maxsize=2)
def model_of(config: Config, dtype: torch.dtype, device: str = "cpu") -> Decoder:
    return Decoder(config, make_weights(config, dtype, device))


@lru_cache(maxsize=12)
def expected(config: Config, dtype: torch.dtype, device: str,
             tokens: tuple[int, ...]) -> tuple[Tensor, float]:
    """The logits in float64, of the weights as `dtype` holds them, and how far eager torch is off
    in `dtype`."""
    weights = make_weights(config, dtype, device)
    truth = plain(config, {name: t.double() for name, t in weights.items()}, tokens)
    return truth, float((plain(config, weights, tokens).double() - truth).abs().max())


def check_logits(model: Decoder, sequences: Sequence[Sequence[int]],
                 logits: Sequence[Tensor]) -> float:
    """Every position of every sequence; what eager torch is off by."""
    pairs = [(*expected(model.config, model.dtype, model.device.type, tuple(row)), got)
             for row, got in zip(sequences, logits)]
    assert all(got.dtype == model.dtype and got.shape == truth.shape for truth, _, got in pairs)
    eager = max(off for _, off, _ in pairs)
    worst = max(float((got.double() - truth).abs().max()) for truth, _, got in pairs)
    assert worst <= 2 * eager, (
        f"the logits are off by {worst:.3g}, those of eager torch by {eager:.3g}")
    return eager


def check(model: Decoder, prompts: Sequence[Sequence[int]], run: Generated) -> None:
    sequences = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, run.tokens)]
    eager = check_logits(model, sequences, run.logits)
    noise = 0.0 if model.dtype == torch.float32 else 2 * eager
    decided = 0
    for row, tokens in zip(sequences, run.tokens):
        truth = expected(model.config, model.dtype, model.device.type, tuple(row))[0][-len(tokens):]
        first, second = truth.topk(2).values.unbind(-1)
        clear = first - second > noise
        wrong = clear & (truth.argmax(-1) != torch.tensor(tokens, device=truth.device))
        assert not wrong.any(), (
            f"other tokens than the truth's at steps {wrong.nonzero().flatten().tolist()}")
        decided += int(clear.sum())
    assert decided >= len(prompts) * len(
        run.tokens[0]) / 2, "hardly a step says anything: the test is too noisy"


def run_case(shape: str, memory: str, window: int | None, dtype: torch.dtype, device: str = "cpu",
             lengths: Sequence[int] = ()) -> None:
    model = model_of(replace(SHAPES[shape], window=window), dtype, device)
    prompts = prompts_of(lengths or PROMPTS[window])
    run = generate(model, prompts, MEMORIES[memory](model, [len(p) + STEPS for p in prompts]),
                   STEPS)
    check(model, prompts, run)


# Each model, with every kind of cache.

# Without a window every model in every dtype; with one, every model, and every dtype of some model.
# Eager torch without arithmetic in bfloat16 takes minutes for long prompts. LZ_TEST_FULL=1: all.
WINDOWED = [("llama", 256, torch.float32), ("llama", 256, torch.bfloat16),
            ("gpt", 256, torch.float16), ("moe", 256, torch.float32), ("mla", 256, torch.float16),
            ("llama", 1024, torch.float32), ("gpt", 1024, torch.float32),
            ("moe", 1024, torch.float16), ("mla", 1024, torch.float32),
            *([("llama", 1024, torch.bfloat16)] if BFLOAT16 else [])]
MODELS = [(shape, window, dtype) for shape in ("llama", "gpt", "moe", "mla") for window in PROMPTS
          for dtype in DTYPES if FULL or window is None or (shape, window, dtype) in WINDOWED]


@pytest.mark.parametrize("memory", ["contiguous", "paged"])
@pytest.mark.parametrize(("shape", "window", "dtype"), MODELS, ids=name_of)
def test_prefill_and_greedy_decode(shape: str, window: int | None, dtype: torch.dtype,
                                   memory: str) -> None:
    run_case(shape, memory, window, dtype)


@pytest.mark.parametrize("memory", ["latent contiguous", "latent paged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_latent_attention_that_keeps_only_what_is_compressed(dtype: torch.dtype,
                                                             memory: str) -> None:
    run_case("mla", memory, None, dtype)
    if dtype != torch.bfloat16 or BFLOAT16 or FULL:     # else seconds of eager torch
        run_case("mla", memory, None, dtype, lengths=(300, 12, 140))


# In float32 only: which of two experts that are nearly alike is chosen, 16 bits cannot tell.
@pytest.mark.parametrize("memory", ["contiguous", "paged", "latent paged"])
def test_latent_attention_with_grouped_experts(memory: str) -> None:
    run_case("deepseek", memory, None, torch.float32, lengths=(150, 9, 33))


@pytest.mark.parametrize("memory", ["chunked", "paged HND", "pages by hand", "pages by hand HND",
                                    "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", ["llama", "gpt"])
def test_other_ways_to_keep_the_past(shape: str, dtype: torch.dtype, memory: str) -> None:
    window = 256 if shape == "llama" else None
    few = dtype == torch.bfloat16 and not BFLOAT16 and not FULL     # else seconds of eager torch
    run_case(shape, memory, window, dtype, lengths=(40, 12, 33) if few else ())


@pytest.mark.parametrize("memory", ["contiguous", "paged", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("lengths", [(290, 290), (65,), (1, 1, 1)], ids=str)
def test_prompts_of_one_length(lengths: tuple[int, ...], dtype: torch.dtype, memory: str) -> None:
    run_case("llama", memory, 256, dtype, lengths=lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", ["llama", "gpt", "moe", "mla"])
def test_on_a_gpu(shape: str, dtype: torch.dtype) -> None:
    with lz.prefer(jit="in_request"):          # nobody else serves while a kernel compiles
        for window in PROMPTS:
            for memory in ("contiguous", "paged", "padded", "pages by hand"):
                run_case(shape, memory, window, dtype, "cuda")
        if shape == "mla":
            for memory in ("latent contiguous", "latent paged"):
                run_case(shape, memory, None, dtype, "cuda")


# What the above rests on.

@pytest.mark.parametrize("shape", SHAPES)
def test_a_loop_that_recomputes_everything_goes_on_with_the_same_tokens(shape: str) -> None:
    config = SHAPES[shape]
    model, prompts = model_of(config, torch.float32), prompts_of((21, 8))
    run = generate(model, prompts, Cached(model, [60, 60], "paged"), STEPS)
    for prompt, tokens in zip(prompts, run.tokens):
        row = list(prompt)
        for _ in range(STEPS):
            row.append(int(plain(config, model.weights, row)[-1].argmax()))
        assert row[len(prompt):] == tokens
        assert len(set(tokens)) > STEPS / 4    # a model that repeats itself would prove little


@pytest.mark.parametrize("window", [256, 1024])
def test_one_key_more_or_less_in_the_window_would_be_noticed(window: int) -> None:
    config = replace(SHAPES["llama"], window=window)
    prompt = tuple(prompts_of(PROMPTS[window])[0])
    truth, eager = expected(config, torch.float32, "cpu", prompt)
    for other in (window - 1, window + 1):
        moved = (expected(replace(config, window=other), torch.float32, "cpu", prompt)[0]
                 - truth).abs().amax(-1)
        hides = min(window, other)             # the first position from which a key is hidden
        assert float(moved[:hides].max()) == 0.0 and float(moved[hides:].min()) > 20 * eager


def test_a_wrong_model_is_found() -> None:
    """The checks themselves: a head that is off by a few roundings, and one token that is not the
    best."""
    model, prompts = model_of(SHAPES["llama"], torch.float32), prompts_of((40, 7))
    run = generate(model, prompts, Padded(model, [72, 72]), STEPS)
    check(model, prompts, run)
    with pytest.raises(AssertionError, match="the logits are off"):
        check(model, prompts, replace(run, logits=[t + 1e-5 for t in run.logits]))
    last = run.tokens[1][-1]
    with pytest.raises(AssertionError, match=r"other tokens than the truth's at steps \[31\]"):
        check(model, prompts,
              replace(run, tokens=[run.tokens[0], [*run.tokens[1][:-1], (last + 1) % 320]]))


# As a server uses a cache.

@pytest.mark.parametrize("kind", ["contiguous", "paged", "chunked"])
@pytest.mark.parametrize("shape", ["llama", "gpt", "mla"])
def test_a_prompt_in_pieces(shape: str, kind: str) -> None:
    model, prompts = model_of(replace(SHAPES[shape], window=256),
                              torch.float32), prompts_of((300, 40, 130))
    memory = Cached(model, [len(p) for p in prompts], kind)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, 300, 128):
        # none at all of one that is through
        rows = [prompt[start:start + 128] for prompt in prompts]
        for part, new in zip(parts, memory.divided(model(*memory.arrange(rows), memory))):
            part.append(new)
    check_logits(model, prompts, [torch.cat(part) for part in parts])


@pytest.mark.parametrize("kind", ["contiguous", "paged", "chunked", "latent paged"])
def test_sequences_join_and_leave_while_others_go_on(kind: str) -> None:
    latent = kind.startswith("latent")
    model, prompts = model_of(SHAPES["mla" if latent else "llama"],
                              torch.float32), prompts_of((50, 18, 5, 33))
    # the fourth gets the place of another
    room = [80, 80, 80]
    memory = Latent(model, room, "paged") if latent else Cached(model, room, kind)
    for name in memory.names:
        memory.remove(name)
    arrive, leave = {0: 0, 3: 1, 5: 2, 11: 3}, {10: 0}
    # by its name in the cache: all its tokens
    rows: dict[int, list[int]] = {}
    logits: dict[int, list[Tensor]] = {}
    order: list[int] = []
    for step in range(20):
        if step in arrive:
            order.append(memory.add())
            rows[order[-1]], logits[order[-1]] = list(prompts[arrive[step]]), []
        if step in leave:
            memory.remove(order[leave[step]])
        names = [name for name in memory.caches[0].sequences if name in rows][::-1]
        new = [rows[name][memory.caches[0].length(name):] for name in names]
        for name, part in zip(names, memory.divided(model(*memory.arrange(new, names), memory))):
            logits[name].append(part)
            rows[name].append(int(lz.sample(part[-1:], temperature=0.0)))
    assert len(rows) == 4 and min(len(parts) for parts in logits.values()) >= 9
    check_logits(model, [row[:-1] for row in rows.values()],
                 [torch.cat(parts) for parts in logits.values()])
    for row, parts in zip(rows.values(), logits.values()):
        truth = expected(model.config, torch.float32, "cpu", tuple(row[:-1]))[0]
        assert truth.argmax(-1).tolist()[-len(parts):] == row[-len(parts):]


@pytest.mark.parametrize("kind", ["paged", "chunked"])
def test_one_prompt_goes_on_in_two_ways(kind: str) -> None:
    model, (prompt,) = model_of(SHAPES["llama"], torch.float32), prompts_of((37,))
    memory = Cached(model, [80, 80, 80], kind)
    for name in memory.names[1:]:
        memory.remove(name)
    head = model(*memory.arrange([prompt]), memory)
    names = [memory.names[0], memory.fork(memory.names[0])]
    ends = prompts_of((12, 12))
    tails: list[list[Tensor]] = [[], []]
    for tokens in zip(*ends):
        for tail, part in zip(tails,
                              memory.divided(model(*memory.arrange([[t] for t in tokens], names),
                                                   memory))):
            tail.append(part)
    check_logits(model, [[*prompt, *end] for end in ends],
                 [torch.cat([head, *tail]) for tail in tails])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad],
                         ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("memory", ["contiguous", "paged", "padded"])
def test_weights_that_want_gradients_generate_all_the_same(memory: str,
                                                           mode: Callable[[], Any]) -> None:
    weights = make_weights(SHAPES["llama"], torch.float32)
    model, prompts = Decoder(SHAPES["llama"], weights), prompts_of((30, 4))
    room = [len(p) + STEPS for p in prompts]
    for weight in weights.values():
        weight.requires_grad_(True)
    with mode():
        run = generate(model, prompts, MEMORIES[memory](model, room), STEPS)
    check(model, prompts, replace(run, logits=[t.clone() for t in run.logits]))


def test_a_growing_cache_is_seldom_chosen_for_anew() -> None:
    """Of 128 steps, those in which a bucket of lengths begins; the second time none."""
    model, prompts = model_of(SHAPES["llama"], torch.float32), prompts_of((70, 9))
    chosen: list[Any] = []
    stop = lz.subscribe(lambda event: chosen.append(event) if event.name == "selected" else None)
    counts = []
    for _ in range(2):
        generate(model, prompts, Cached(model, [200, 200], "paged"), 128)
        counts.append(len([event for event in chosen if event.op == "paged_attention"]))
    stop()
    assert counts[0] == counts[1] <= 16


@pytest.mark.parametrize(("shape", "memory", "dtype"), [
    ("llama", "contiguous", torch.bfloat16), ("gpt", "padded", torch.float32),
    ("mla", "latent paged", torch.float32)],
    ids=name_of)
def test_whoever_serves_the_model_is_the_same(shape: str, memory: str, dtype: torch.dtype,
                                              world: None) -> None:
    """What was chosen is denied, and again, until nothing but the formulas is left."""
    chosen: set[str] = set()
    rounds = 0
    stop = lz.subscribe(lambda event: chosen.add(event.kernel) if event.name == "selected"
                        else None)
    while True:
        denied = sorted(kernel for kernel in chosen if not kernel.startswith("reference."))
        lz.configure(jit="never", rules=(lz.PolicyRule.of("deny", denied),) if denied else ())
        before, rounds = len(chosen), rounds + 1
        run_case(shape, memory, None, dtype, lengths=(20, 20))
        if len(chosen) == before:
            break
    stop()
    assert rounds >= 3 and "reference.linear" in chosen


# Text to text.

SENTENCES = ["the quick brown fox jumps over the lazy dog",
             "a kernel is chosen by what was measured here",
             "every token sees the keys of its window",
             "the same seed gives the same text, twice and again"]
TEXTS = ["the quick brown", "a kernel",
         "every token sees the keys of the lazy dog, twice and again"]
NEW = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trained_tokenizer = Tokenizer(models.BPE())
    trained_tokenizer.pre_tokenizer, trained_tokenizer.decoder = pre_tokenizers.ByteLevel(
        add_prefix_space=False), decoders.ByteLevel()
    trained_tokenizer.train_from_iterator(SENTENCES * 4, trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    assert trained_tokenizer.get_vocab_size() == SHAPES["llama"].vocab
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained_tokenizer.save(str(path))
    return path


def written(tokenizer: Path, texts: Sequence[str], pick: Callable[[Tensor, int], Tensor],
            memory: str = "paged",
            dtype: torch.dtype = torch.float32) -> list[str]:
    """Tokenize, run the model, sample, and back to text: what each text went on with."""
    model = model_of(SHAPES["llama"], dtype)
    prompts = lz.tokenize(list(texts), str(tokenizer)).ids
    run = generate(model, prompts, MEMORIES[memory](model, [len(p) + NEW for p in prompts]), NEW,
                   pick)
    return lz.detokenize(run.tokens, str(tokenizer))


def by_seeds(*seeds: int) -> Callable[[Tensor, int], Tensor]:
    """A seed for each text; the step moves along its stream."""
    rows = torch.tensor(seeds)
    return lambda logits, step: lz.sample(logits, temperature=0.8, top_p=0.9, seed_rows=rows,
                                          offset=step)


def test_the_same_seed_writes_the_same_text(tokenizer: Path) -> None:
    first = written(tokenizer, TEXTS, by_seeds(1, 2, 3))
    assert written(tokenizer, TEXTS, by_seeds(1, 2, 3)) == first
    for memory in ("contiguous", "chunked", "padded", "pages by hand"):
        assert written(tokenizer, TEXTS, by_seeds(1, 2, 3), memory) == first
    other = written(tokenizer, TEXTS, by_seeds(1, 20, 3))
    assert other[1] != first[1] and [other[0], other[2]] == [first[0], first[2]]


def test_a_batch_writes_what_each_text_alone_would(tokenizer: Path) -> None:
    batch = written(tokenizer, TEXTS, by_seeds(7, 8, 9))
    alone = [written(tokenizer, [text], by_seeds(seed))[0] for text, seed in zip(TEXTS, (7, 8, 9))]
    assert batch == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_in_16_bits_a_seed_writes_the_same_text_too(tokenizer: Path, dtype: torch.dtype) -> None:
    texts = [written(tokenizer, TEXTS, by_seeds(1, 2, 3), dtype=dtype) for _ in range(2)]
    assert texts[0] == texts[1] != written(tokenizer, TEXTS, by_seeds(4, 5, 6), dtype=dtype)


def test_one_seed_or_one_generator_for_the_whole_batch(tokenizer: Path) -> None:
    def seeded(seed: int) -> list[str]:
        return written(tokenizer, TEXTS, lambda logits, step: lz.sample(
            logits, temperature=0.8, top_p=0.9, seed=seed, offset=step))

    def generated(seed: int) -> list[str]:
        gen = torch.Generator().manual_seed(seed)
        return written(tokenizer, TEXTS, lambda logits, step: lz.sample(
            logits, temperature=0.8, top_p=0.9, generator=gen))

    for write in (seeded, generated):
        assert write(3) == write(3) != write(4)


def test_the_text_is_that_of_plain_torch_and_the_tokenizers_library(tokenizer: Path) -> None:
    uniforms = torch.rand(NEW, len(TEXTS), dtype=torch.float64,
                          generator=torch.Generator().manual_seed(0))
    texts = written(tokenizer, TEXTS, lambda logits, step: lz.sample(
        logits, temperature=0.8, top_p=0.9, uniforms=uniforms[step]))
    library, weights = Tokenizer.from_file(str(tokenizer)), make_weights(SHAPES["llama"],
                                                                         torch.float32)
    for text, want, numbers in zip(texts, TEXTS, uniforms.T):
        row = library.encode(want).ids
        start = len(row)
        for number in numbers:
            probabilities = (plain(SHAPES["llama"], weights, row)[-1].double() / 0.8).softmax(-1)
            ranked, order = probabilities.sort(descending=True, stable=True)
            nucleus = order[ranked.cumsum(-1) - ranked < 0.9]
            kept = torch.zeros_like(probabilities).index_copy_(0, nucleus,
                                                               probabilities[nucleus]).cumsum(-1)
            row.append(int((kept > number * kept[-1]).nonzero()[0]))
        assert library.decode(row[start:]) == text

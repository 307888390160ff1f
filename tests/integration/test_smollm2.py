"""A real model, SmolLM2-135M-Instruct, end to end through lz: equal to transformers stage by stage,
and it speaks.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'layerzero[gguf]'")
pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'layerzero[tokenizers]'")

typer = pytest.importorskip("typer", reason="needs typer: pip install 'layerzero[cli]'")

from typer.testing import CliRunner  # noqa: E402

from layerzero.cli.app import app  # noqa: E402
from layerzero.cli.commands.prove.ladder import TEXT, ladder  # noqa: E402
from layerzero.integrations.gguf.architectures import rows_to_halves  # noqa: E402
from layerzero.integrations.gguf.generation import TextGeneration  # noqa: E402
from layerzero.integrations.gguf.llama_peer import build_llama, trace_stages  # noqa: E402
from layerzero.integrations.gguf.model import packaged_model, read_gguf  # noqa: E402
from layerzero.machine.hardware import probe  # noqa: E402
from layerzero.spec.errors import ConfigError, DataError  # noqa: E402
from layerzero.verify.model.ladder import LadderModel, climb  # noqa: E402

pytestmark = pytest.mark.integration
SAMPLES = ("Hello world", "In 1969, Apollo 11 landed: 21.5 kg!", "def f(a):\n    return a+1\n\n",
           "x=123456789;", "", "naïve café — “quotes” 日本語 🚀", "  leading spaces  and\ttabs",
           "don't we'll I'm", "<|im_start|>user\nhi")


@pytest.fixture(scope="module")
def model():
    try:
        return read_gguf(packaged_model())
    except ConfigError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def llama(model):
    """transformers' own, over the same numbers."""
    pytest.importorskip("transformers",
                        reason="needs transformers: pip install 'layerzero[transformers]'")
    return build_llama(replace(model.config, max_positions=512), model.weights)


@pytest.fixture(scope="module")
def stages(model, llama):
    return trace_stages(llama, model.config, torch.tensor([model.tokenize(TEXT)]))


def first_layers(model, layers):
    """They as a model, with the tokenizer that was read once."""
    shorter = replace(model, config=replace(model.config, layers=layers), weights={
        name: weight for name, weight in model.weights.items()
        if not name[0].isdigit() or int(name.partition(".")[0]) < layers})
    vars(shorter)["tokenizer"] = model.tokenizer
    return shorter


@pytest.fixture(scope="module")
def beginning(model):
    """Its first two layers: real weights, in a tenth of the time."""
    return first_layers(model, 2)


def described(model, stages=None, **changes):
    config = replace(model.config, max_positions=512, **changes)
    against = {"truth": stages, "truth_name": "transformers in float32"} if stages else {}
    return LadderModel("SmolLM2", config, model.weights, torch.tensor([model.tokenize(TEXT)]),
                       **against)


def rows_to_pairs(weight, heads):
    """The order in which llama.cpp stores the rows of the query and key projections."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def test_what_the_file_says(model):
    c = model.config
    assert (c.layers, c.heads, c.kv_heads, c.head_dim, c.hidden,
            c.inner) == (30, 9, 3, 64, 576, 1536)
    assert (c.vocab, c.rope_base, c.tied, c.max_positions) == (49152, 1e5, True, 8192)
    assert sum(t.numel() for t in model.weights.values()) == 134_515_008
    assert model.weights["29.qkv"].shape == (960, 576) and model.stops == {2}


def test_the_order_of_rotary_rows_goes_there_and_back(model):
    weight = model.weights["0.qkv"][:576]
    stored = rows_to_pairs(weight, 9)
    assert torch.equal(rows_to_halves(stored, 9), weight) and not torch.equal(stored, weight)


@pytest.mark.parametrize("level", (3, 4))
def test_parity_with_transformers(model, stages, level):
    [rung] = climb(level, model=described(model, stages))
    assert rung.passed, rung
    if level == 3:
        assert len(rung.tables) == 30 and len(rung.rows) == 330
    else:
        assert {row.text for row in rung.rows
                if row.what == "top-1"} == {"54 of 54 positions equal"}
        assert all(row.error <= 1e-3 for row in rung.rows if row.what.endswith("logits"))
        assert {"linear", "rms_norm", "rope", "attention", "embedding", "mlp", "add_rms_norm"} == {
            op for op, _ in rung.kernels}


def test_sixteen_bits_are_as_good_as_eager(model):
    """All of it where the CPU computes in bfloat16; else, where torch takes a hundred times as
    long, its beginning."""
    whole = described(model)
    if not probe("cpu").supports_bf16:
        whole = described(first_layers(model, 2))._replace(tokens=whole.tokens[:, :4])
    [rung] = climb(4, model=whole, dtypes=["bfloat16"])
    assert rung.passed, rung


def test_the_rope_case_study_on_real_weights(beginning):
    """Rows in the order of GGUF want the interleaved rope; turned in halves they are nonsense, and
    it is said why."""
    pytest.importorskip("transformers",
                        reason="needs transformers: pip install 'layerzero[transformers]'")
    model, c = beginning, beginning.config
    stages = trace_stages(build_llama(replace(c, max_positions=512), model.weights), c,
                          torch.tensor([model.tokenize(TEXT)]))
    rows = [n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)]
    stored = dict(model.weights)
    for i in range(c.layers):
        q, k, v = stored[f"{i}.qkv"].split(rows)
        stored[f"{i}.qkv"] = torch.cat((rows_to_pairs(q, c.heads), rows_to_pairs(k, c.kv_heads), v))
    right = described(model, stages, rope_style="interleaved")._replace(weights=stored)
    [rung] = climb(4, model=right)
    assert [row.error for row in rung.rows if row.what == "top-1"] == [0, 0] and rung.passed, rung
    wrong = described(model, stages)._replace(weights=stored)
    [rung] = climb(4, model=wrong)
    culprit = rung.culprit
    assert rung.status == "failed" and "in the order of that" in culprit.why
    assert (culprit.op, culprit.stage, culprit.kind,
            culprit.keeps_contract) == ("rope", "0.q", "convention", True)


def test_tokens_are_those_of_transformers(model, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = packaged_model()
    other = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in (*SAMPLES, TEXT):
        ids = model.tokenize(text)
        assert ids == other(text, add_special_tokens=False)["input_ids"], text
        if "<|" not in text:
            assert model.detokenize(ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert model.chat(("user", "Hi")) == other.apply_chat_template(messages, tokenize=False,
                                                                   add_generation_prompt=True)


def test_greedy_text_is_that_of_transformers(model, llama):
    ids = model.tokenize(model.chat(("user", "What is the capital of France?")))
    run = TextGeneration(model, ids, max_tokens=12, watch=True)
    made = list(run.steps())
    text = torch.tensor([ids])
    with torch.no_grad():
        wanted = llama.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=12,
                                do_sample=False, eos_token_id=2,
                                pad_token_id=2)[0, len(ids):].tolist()
    assert made == [t for t in wanted if t != 2] and run.generated == len(made)
    assert model.detokenize(made) == "The capital of France is Paris."
    assert {"prefill", "decode"} == run.kernels.keys()
    assert {op for op, _ in run.kernels["decode"]} == {
        "embedding", "rms_norm", "add_rms_norm", "linear", "rope", "attention", "mlp", "sample"}


def test_pieces_wait_for_whole_characters(model):
    rocket = model.tokenize("🚀é")
    assert len(rocket) > 2

    class Said(TextGeneration):
        def steps(self):
            yield from rocket

    pieces = list(Said(model, [1]).pieces())
    assert "".join(pieces) == "🚀é" and not any("\ufffd" in piece for piece in pieces)


def test_drawn_text_follows_the_seed(model):
    ids = model.tokenize("Once upon a time")
    def drawn(seed):
        return list(TextGeneration(model, ids, max_tokens=5, temperature=1.0, seed=seed).steps())

    first = drawn(1)
    assert drawn(1) == first and any(drawn(seed) != first for seed in (2, 3))


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing of the sort, but long enough to be read")
    with pytest.raises(DataError, match="wanted a GGUF file"):
        read_gguf(path)
    with pytest.raises(DataError, match="wanted a GGUF file"):
        read_gguf(tmp_path / "absent.gguf")
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(DataError, match=r"wanted the architecture llama, .* got 'mamba'"):
        read_gguf(path)


def run_generate(*words):
    done = CliRunner().invoke(app, ["generate", *words, "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_the_command_speaks(model):
    asked = "Write one sentence about the sea."
    told = run_generate(asked, "--max-tokens", "8", "--explain")
    text, _, kernels = told.partition("\n")
    # its own rounding may choose another word than float32 does, but not another first one
    assert text.startswith("The sea")
    rows = [line.split() for line in kernels.splitlines() if line.startswith(("prefill", "decode"))]
    assert {("prefill", "attention"), ("decode", "attention"),
            ("decode", "sample")} <= {tuple(r[:2]) for r in rows}
    # of each layer q, k, v, out, gate, up and down, and the head; without our own kernels q, k, v
    # are one, and gate and up; or of tensors in their place
    calls = {op: sum(int(r[3]) for r in rows if r[:2] == ["decode", op])
             for op in ("quantized_linear", "linear", "mlp")}
    assert calls in ({"quantized_linear": (30 * 7 + 1) * 7, "linear": 0, "mlp": 0},
                     {"quantized_linear": (30 * 4 + 1) * 7, "linear": 0, "mlp": 0},
                     {"quantized_linear": 0, "linear": (30 * 2 + 1) * 7, "mlp": 30 * 7})


def test_the_command_in_json(model, monkeypatch):
    # not once more
    monkeypatch.setattr("layerzero.cli.commands.setup.generate.load_gguf", lambda path, **_: model)
    data = json.loads(run_generate("1, 2, 3, 4,", "--raw", "--max-tokens", "3", "--json"))
    assert data["text"] == " 5," and data["tokens"] == 3 and data["kernels"] == []
    assert data["tokens_per_second"] > 0 and data["prompt_tokens_per_second"] > 0


def test_a_conversation(model, monkeypatch):
    monkeypatch.setattr("layerzero.cli.commands.setup.generate.load_gguf", lambda path, **_: model)
    words = ["generate", "--chat", "--max-tokens", "3", "--device", "cpu"]
    done = CliRunner().invoke(app, words, input="Name a color.\nAnother one.\n")
    rates = [line for line in done.stdout.splitlines() if "tokens of prompt at" in line]
    first, second = (int(line[1:].split()[0]) for line in rates)
    assert done.exit_code == 0 and second > first + 3          # the first answer is in the second


@pytest.mark.parametrize("words", (["--dtype", "int8"], ["--model", "absent.gguf"]))
def test_a_wrong_command_is_refused(words):
    with pytest.raises((ConfigError, DataError)):
        run_generate("Hi", *words)


def test_the_ladder_as_a_command(beginning, capsys, monkeypatch):
    monkeypatch.setattr("layerzero.cli.commands.prove.ladder.read_gguf", lambda path: beginning)
    assert ladder(4, kernel="torch.sdpa_flash", as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    [rung] = data["rungs"]
    assert data["passed"] and rung["served"] >= 2 and rung["name"].startswith("Smollm2")
    served = {k["kernel"]: k["calls"] for k in rung["kernels"] if k["op"] == "attention"}
    assert served["torch.sdpa_flash"] == rung["served"]

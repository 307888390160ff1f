"""Definitions of the FlashInfer-Trace schema: read, given inputs, answered by lz, compared,
written.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import RMS_NORM, Fake, register, run_lz, run_python

import layerzero as lz
from layerzero.spec.errors import DataError, RegistrationError
from layerzero.verify.comparison import TOLERANCES, ElementTolerance, compare, tolerance_of
from layerzero.verify.kernel.judging import same
from layerzero.verify.trace import exports, solutions, traces
from layerzero.verify.trace.answers import draws
from layerzero.verify.trace.answers import references as runner
from layerzero.verify.trace.answers.lookup import answer, answers
from layerzero.verify.trace.answers.references import References
from layerzero.verify.trace.dataset import find_definitions, find_workloads
from layerzero.verify.trace.definition import (
    BuildSpec,
    Definition,
    Solution,
    SourceFile,
    Trace,
    Workload,
)
from layerzero.verify.trace.inputs import constraints
from layerzero.verify.trace.inputs.generation import generate
from layerzero.verify.trace.readings import Unmapped, readings
from layerzero.verify.trace.run import DefinitionReport, verify
from layerzero.verify.trace.scaling import CannotScale, scaled, too_large
from layerzero.verify.trace.write_tests import write_tests

FOLDER = Path(__file__).parents[2] / "fixtures" / "definitions"
ALL = {d.name: d for d in find_definitions(FOLDER)}
ANSWERED = [name for name, d in ALL.items() if d.op_type != "linear_attention"]
NORM = ALL["norm_h48_one_plus"]


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Iterator[References]:
    """One process for the whole file: starting one takes seconds.

    It trusts the fixtures and what the tests write.
    """
    with References([FOLDER, tmp_path_factory.getbasetemp()]) as opened:
        yield opened


def definition_json(name: str = "one", reference: str = "def run(x):\n    return x\n",
                    **changes) -> dict:
    data = {"name": name, "op_type": "other",
            "axes": {"n": {"type": "var"}, "m": {"type": "const", "value": 4}},
            "inputs": {"x": {"shape": ["n", "m"], "dtype": "float32"}},
            "outputs": {"y": {"shape": ["n", "m"], "dtype": "float32"}}, "reference": reference}
    return {**data, **changes}


def stored(folder: Path, data: dict) -> Definition:
    path = folder / f"{data['name']}.json"
    path.write_text(json.dumps(data))
    return Definition.load(path)


# reading

@pytest.mark.parametrize("name", ALL)
def test_a_definition_comes_back_as_it_was_written(name):
    assert Definition.from_json(json.loads(json.dumps(ALL[name].to_json()))) == ALL[name]


@pytest.mark.parametrize(("changes", "words"), [
    ({"name": ""}, ("name: wanted text that is not empty", "got ''")),
    ({"axes": {"n": {"type": "var"}}}, ("inputs.x.shape: wanted only the axes n, got 'm'",)),
    ({"axes": {"n": {"type": "const"}, "m": {"type": "var"}}},
     ("axes.n.value: wanted a whole number",)),
    ({"axes": {"n": {"type": "const", "value": -1}, "m": {"type": "var"}}},
     ("axes.n.value: wanted a whole number",)),
    ({"axes": {"n": {"type": "range"}, "m": {"type": "var"}}},
     ("axes.n.type: wanted one of var, const",)),
    ({"inputs": {"x": {"shape": ["n"], "dtype": "float7"}}},
     ("inputs.x.dtype: wanted one of float32", "'float7'")),
    ({"inputs": {"x": {"dtype": "float32"}}}, ("inputs.x: missing: shape",)),
    ({"outputs": {"x": {"shape": ["n"], "dtype": "float32"}}},
     ("outputs.x: wanted a name that no input has",)),
    ({"reference": "def run(x:"}, ("reference: wanted Python code",)),
    ({"reference": "def go(x):\n    return x"}, ("code with a function run(...)",)),
    ({"reference": "def run():\n    return 1"},
     ("a run() of the 1 inputs x, got 'no parameters'",)),
    ({"constraints": ["n =="]}, ("constraints[0]: wanted an expression",)),
    ({"tags": "fast"}, ("tags: wanted a list of text",)),
])
def test_a_mistake_is_named_with_its_place(changes, words):
    with pytest.raises(DataError) as e:
        Definition.from_json(definition_json(**changes))
    assert all(word in str(e.value) for word in words), str(e.value)


def test_every_mistake_is_told_at_once_and_the_file_too(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"axes": {}, "inputs": {}}))
    with pytest.raises(DataError) as e:
        Definition.load(path)
    assert str(path) in str(e.value)
    assert "missing: name, op_type, outputs, reference;" in str(e.value)
    path.write_text("{")
    with pytest.raises(DataError, match="readable JSON"):
        Definition.load(path)


def test_a_folder_is_searched_by_name_and_type_and_says_what_it_lacks(tmp_path):
    assert [d.name for d in find_definitions(FOLDER, "nucleus_v300")] == ["nucleus_v300"]
    assert {d.op_type for d in find_definitions(FOLDER, op_type="moe")} == {"moe"}
    with pytest.raises(DataError, match=r"did you mean 'nucleus_v300'"):
        find_definitions(FOLDER, "nucleus_v30")
    with pytest.raises(DataError, match="there is none"):
        find_definitions(tmp_path / "nowhere")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.json").write_text(json.dumps(definition_json()))
    with pytest.raises(DataError, match="more than one definition is called 'one'"):
        find_definitions(tmp_path)


@pytest.mark.parametrize(("data", "word"), [
    ({"definition": "a", "workload": {"axes": {"n": -1}, "inputs": {}, "uuid": "u"}},
     "workload.axes.n"),
    ({"definition": "a", "workload": {"axes": {}, "inputs": {"x": {"type": "file"}}, "uuid": "u"}},
     "workload.inputs.x: wanted"),
    ({"definition": "a", "workload": {"axes": {}, "inputs": {}, "uuid": "u"}, "solution": "s",
      "evaluation": {
        "status": "PASSED", "environment": {"hardware": "h"}, "timestamp": "t", "correctness": {}}},
     "evaluation.performance: wanted an object"),
])
def test_a_wrong_trace_is_refused(data, word):
    with pytest.raises(DataError, match=word.replace(".", r"\.")):
        Trace.from_json(data)


@pytest.mark.parametrize(("changes", "word"), [
    ({"entry_point": "main.py"}, "'file::function'"),
    ({"entry_point": "other.py::run"}, "in one of the sources"),
    ({"path": "../main.py"}, "a path inside the solution"),
    ({"language": "cobol"}, "spec.language")])
def test_a_wrong_solution_is_refused(changes, word):
    spec = {"language": changes.get("language", "python"), "target_hardware": ["cpu"],
            "entry_point": changes.get("entry_point", "main.py::run")}
    with pytest.raises(DataError, match=word.replace(".", r"\.")):
        Solution.from_json({"name": "s", "definition": "d", "author": "a", "spec": spec,
                            "sources": [{"path": changes.get("path", "main.py"), "content": "x"}]})


# inputs

@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", [0, 1])
def test_inputs_fit_the_axes_and_keep_the_constraints(name, seed):
    definition = ALL[name]
    inputs = generate(definition, seed=seed)
    # raises where two tensors disagree about an axis
    sizes = definition.sizes_of(inputs)
    assert list(inputs) == list(definition.inputs)
    for n, spec in definition.inputs.items():
        if spec.shape is not None:
            assert tuple(inputs[n].shape) == definition.shape_of(spec, sizes)
            assert inputs[n].dtype is getattr(torch, spec.dtype)
    for text in definition.constraints:
        assert constraints.value_of(text, {**sizes, **definition.const_axes, **inputs}), text
    again = generate(definition, seed=seed)
    assert all(torch.equal(a.float(), again[n].float()) for n, a in inputs.items()
               if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("size", ["small", "medium"])
def test_page_tables_are_consistent(size):
    inputs = generate(ALL["decode_h4_kv2_d16_ps4"], size)
    indptr, indices, last = inputs["kv_indptr"], inputs["kv_indices"], inputs["kv_last_page_len"]
    assert indptr[0] == 0
    assert (indptr.diff() >= 1).all()
    assert int(indptr[-1]) == len(indices)
    assert len(indices.unique()) == len(indices)                           # no page is used twice
    assert int(indices.min()) >= 0
    assert int(indices.max()) < len(inputs["k_cache"])
    assert ((last >= 1) & (last <= 4)).all()


def test_a_query_never_has_more_rows_than_its_sequence_has_keys():
    for seed in range(5):
        inputs = generate(ALL["latent_prefill_h4_ckv32_kpe8_ps1"], "medium", seed=seed)
        assert (inputs["kv_indptr"].diff() >= inputs["qo_indptr"].diff()).all()


def test_the_sizes_of_a_workload_are_kept():
    axes = {"batch_size": 5, "num_pages": 40, "len_indptr": 6, "num_kv_indices": 17}
    inputs = generate(ALL["decode_h4_kv2_d16_ps4"], axes=axes)
    assert ALL["decode_h4_kv2_d16_ps4"].sizes_of(inputs) == axes
    assert int(inputs["kv_indptr"][-1]) == 17
    case = Workload.from_json({"axes": axes,
                               "inputs": {"sm_scale": {"type": "scalar", "value": 0.5}},
                               "uuid": "u"})
    assert generate(ALL["decode_h4_kv2_d16_ps4"], workload=case)["sm_scale"] == 0.5


def test_an_axis_that_is_not_variable_is_refused():
    with pytest.raises(DataError, match="has no variable axis 'hidden_size'; it has batch_size"):
        generate(NORM, axes={"hidden_size": 3})
    with pytest.raises(DataError, match="size must be one of small, medium, large"):
        generate(NORM, "huge")


def test_an_input_nobody_understands_is_named():
    data = definition_json(inputs={"flavour": {"shape": ["n"], "dtype": "int32"}})
    with pytest.raises(DataError,
                       match=r"nothing is known of the input 'flavour' \(int32, axes n\)"):
        generate(Definition.from_json(data))


def test_experts_that_share_their_storage_still_differ():
    data = definition_json(axes={"e": {"type": "const", "value": 40},
                                 "r": {"type": "const", "value": 1024},
                                 "c": {"type": "const", "value": 2048}},
                           inputs={"w": {"shape": ["e", "r", "c"], "dtype": "float32"}},
                           outputs={"y": {"shape": ["e"], "dtype": "float32"}})
    w = generate(Definition.from_json(data))["w"]
    assert tuple(w.shape) == (40, 1024, 2048)
    assert w.untyped_storage().nbytes() < 16 << 20
    assert len({float(w[e].sum()) for e in range(40)}) == 40


@pytest.mark.parametrize(("text", "value"), [
    ("n == m + 1", True), ("x.shape[0] == 2 * m and n > 1", True), ("len(x) % 3 == 0", True),
    ("x[-1].item() < 4", False), ("max(n, m) - 1", 2)])
def test_constraints_are_computed(text, value):
    assert constraints.value_of(text,
                                {"n": 3, "m": 2, "x": torch.tensor([1, 3, 5])[:3].repeat(2)[:4]
                                 if "2 * m" in text
                                       else torch.tensor([1, 3, 5])}) == value


@pytest.mark.parametrize("text", ["__import__('os').system('true')", "x.__class__", "(lambda: 1)()",
                                  "open('f')",
                                  "[1 for _ in x]", "x.numpy()"])
def test_a_constraint_is_never_code(text):
    with pytest.raises(constraints.NotUnderstood):
        constraints.value_of(text, {"x": torch.zeros(2)})


# comparing

def test_metrics_are_those_of_their_formulas():
    want = torch.tensor([[1.0, -2.0], [4.0, 0.0]])
    got = torch.tensor([[1.5, -2.0], [3.0, 0.0]])
    verdict = compare("o", got, want, TOLERANCES["float32"])
    m = verdict.metrics
    assert verdict.status == "INCORRECT_NUMERICAL"
    assert (m.max_abs, m.mean_abs, m.mse, m.hit_ratio) == (1.0, 0.375, (0.25 + 1.0) / 4, 0.5)
    assert m.max_rel == pytest.approx(0.5)
    assert m.mean_rel == pytest.approx((0.5 + 0.25) / 4)
    assert m.cosine == pytest.approx(float(torch.cosine_similarity(got.flatten(), want.flatten(),
                                                                   0)))
    assert [p.index for p in m.worst] == [(1, 0), (0, 0)]
    assert "[1, 0]: got 3, want 4" in verdict.detail


def test_few_bits_are_judged_by_the_share_that_agrees():
    want = torch.ones(100)
    got = want.clone()
    got[:14] = 1.9
    limits = tolerance_of(["bfloat16", "float8_e4m3fn"])
    assert limits.hit_ratio == 0.85
    assert compare("o", got, want, limits).passed
    got[:16] = 1.9
    assert not compare("o", got, want, limits).passed


def test_small_values_do_not_hide_below_the_tolerance():
    want = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert compare("o", want.clone(), want, TOLERANCES["bfloat16"]).passed
    assert "cosine" in compare("o", -want, want, TOLERANCES["bfloat16"]).detail
    assert "cosine" in compare("o", torch.zeros_like(want), want, TOLERANCES["bfloat16"]).detail


def test_shape_dtype_and_what_is_not_finite():
    x = torch.tensor([1.0, math.inf, -math.inf])
    limits = TOLERANCES["float32"]
    assert compare("o", x.clone(), x, limits).passed
    assert compare("o", x[:2], x, limits).status == "INCORRECT_SHAPE"
    assert compare("o", x.double(), x, limits).status == "INCORRECT_DTYPE"
    assert not compare("o", torch.tensor([1.0, 5.0, -math.inf]), x, limits).passed
    assert not compare("o", torch.tensor([math.nan, math.inf, -math.inf]), x, limits).passed
    messages = compare("o", torch.zeros(2), torch.tensor([math.nan, 0.0]), limits)
    assert messages.passed
    assert messages.metrics.undefined == 1
    # integers
    assert not compare("o", torch.tensor([1, 2]), torch.tensor([1, 3]),
                       ElementTolerance(9.0, 9.0)).passed


# answers

def why_unanswered(definition: Definition) -> str:
    """Why no lz call answers the definition; "" if one does."""
    try:
        answers(definition)
    except Unmapped as e:
        return str(e)
    return ""


def test_every_fixture_is_answered_or_says_why_not():
    assert [name for name, d in ALL.items() if why_unanswered(d)] == ["delta_rule_d8"]
    assert "no operation of the type 'linear_attention'" in why_unanswered(ALL["delta_rule_d8"])


@pytest.mark.parametrize("name", ANSWERED)
def test_lz_agrees_with_the_reference_and_with_torch(name, references):
    report = verify(ALL[name], references)
    assert report.passed, str(report)
    assert "reference" not in report.absent, str(report)
    assert any(c.got == "lz" and c.want.startswith("reference") for c in report.comparisons)
    assert report.kernels


def renamed(definition: Definition) -> Definition:
    return replace(definition, name="x", tags=(), description="")


@pytest.mark.parametrize("name", ANSWERED)
def test_the_name_of_a_definition_decides_nothing(name):
    assert answer(renamed(ALL[name])).ops == answer(ALL[name]).ops


def changed(name: str, **inputs) -> Definition:
    data = ALL[name].to_json()
    data["inputs"] |= inputs
    data["inputs"] = {n: v for n, v in data["inputs"].items() if v is not None}
    data["reference"] = "def run(*inputs):\n    return inputs\n"
    return Definition.from_json(data)


@pytest.mark.parametrize(("definition", "words"), [
    (changed("decode_h4_kv2_d16_ps4", alibi={"shape": ["num_qo_heads"], "dtype": "float32"}),
     "lz.paged_attention has no counterpart of the input alibi"),
    (changed("decode_h4_kv2_d16_ps4", kv_indices=None), "needs the pages (kv_indices)"),
    (changed("norm_h48_one_plus", hidden_states=None), "needs hidden states (hidden_states)"),
    (changed("experts_gate_first_e6_top2", router_logits=None), "needs how tokens are routed"),
    (changed("rope_pairs_d16_r8", cos=None, sin=None), "needs cosines and sines"),
    (changed("matmul_k24_n20_bias", B={"shape": ["N", "N"], "dtype": "float16"}),
     "share no axis to sum over"),
])
def test_what_is_unmapped_says_precisely_why(definition, words):
    with pytest.raises(Unmapped) as e:
        answers(definition)
    assert words in str(e.value)


def test_an_output_nobody_gives_is_named():
    data = NORM.to_json()
    data["outputs"]["variance"] = {"shape": ["batch_size"], "dtype": "float32"}
    with pytest.raises(Unmapped, match="the output variance is none of these"):
        answers(Definition.from_json(data))


def test_readings_start_with_the_likeliest_and_end_with_the_least():
    ordered = readings({"a": (1, 2), "b": ("x", "y")})
    assert ordered[0] == {"a": 1, "b": "x"}
    assert ordered[-1] == {"a": 2, "b": "y"}
    assert len(ordered) == 4


def test_the_reference_decides_where_the_text_is_silent(references):
    report = verify(ALL["rope_pairs_d16_r8"], references)
    assert answers(ALL["rope_pairs_d16_r8"])[0].reading == {"style": "rotate_half"}
    assert report.reading == 1
    assert "style=interleaved" in report.answer
    assert "read as: interleaved (GPT-J); its text does not say" in report.detail


def test_a_wrong_kernel_is_found(world, references):
    fake = Fake("fake.off", RMS_NORM)
    run = fake.kernel.load()

    def load():
        def off(x, weight=None, eps=1e-6, *, offset=0.0):
            out = run(x, weight, eps, offset=offset)
            out[0, 7] += 1.0
            return out
        return off

    lz.register(replace(fake.kernel, load=load))
    report = verify(NORM, references)
    assert report.status == "failed"
    assert report.kernels == ("fake.off",)
    worst = report.comparisons[0].verdicts[0].metrics.worst[0]
    assert worst.index == (0, 7)
    assert "INCORRECT_NUMERICAL" in str(report)


def test_a_kernel_that_steps_in_is_named(world, references):
    register(Fake("fake.broken", RMS_NORM, fault=RuntimeError("no")))
    report = verify(NORM, references)
    assert report.passed
    assert any("fake.broken failed" in k for k in report.kernels)


def test_a_reference_that_is_wrong_is_seen_by_torch(tmp_path, references):
    data = NORM.to_json()
    data["reference"] = data["reference"].replace(".bfloat16()", ".bfloat16() + 1")
    report = verify(stored(tmp_path, data), references)
    assert report.status == "failed"
    disagreement = {(c.got, c.want): c.passed for c in report.comparisons}
    assert disagreement[("lz", "torch")]
    assert not disagreement[("lz", "reference")]
    assert not disagreement[("torch", "reference")]


def test_drawn_tokens_are_judged_by_what_the_filters_leave():
    definition = ALL["nucleus_v300"]
    reply, inputs = answer(definition), generate(definition)
    tokens = reply(inputs)["samples"]
    assert draws.possible(reply, inputs, tokens).passed
    assert draws.frequencies(reply, inputs).passed
    wrong = tokens.clone()
    wrong[1] = inputs["probs"][1].argmin()                                  # top_k is 20 there
    verdict = draws.possible(reply, inputs, wrong)
    assert not verdict.passed
    assert verdict.metrics.worst[0].index == (1,)


# references

def run_text(references: References, folder: Path, text: str):
    return references.run(stored(folder, definition_json(reference=text)), {"x": torch.ones(2, 4)})


def test_code_of_a_folder_that_is_not_trusted_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\ndef run(x):\n    return x\n"
    definition = stored(tmp_path, definition_json(reference=code))
    with References([FOLDER]) as references:
        ran = references.run(definition, {"x": torch.ones(2, 4)})
        assert ran.status == "untrusted"
        assert "--trust" in ran.why
        assert not mark.exists()
        # a path that only looks like one inside
        outside = FOLDER / ".." / definition.origin.name
        assert references.refusal(replace(definition, origin=outside))
        assert references.refusal(replace(definition, origin=None))
        report = verify(replace(NORM, origin=definition.origin), references)
    # torch's own answer is there all the same
    assert report.passed
    assert "no folder that you trust" in report.absent["reference"]


def test_a_reference_has_its_time(tmp_path, references):
    slow = stored(tmp_path,
                  definition_json(reference="import time\ndef run(x):\n    time.sleep(600)\n"))
    good = stored(tmp_path,
                  definition_json("two", "def run(x):\n    print('noise')\n    return x + 1\n"))
    usual = references.timeout_s
    assert references.run(good, {"x": torch.ones(2, 4)}).ok                 # the process is up
    references.timeout_s = 0.5
    ran = references.run(slow, {"x": torch.ones(2, 4)})
    references.timeout_s = usual
    assert (ran.status, ran.why) == ("timeout", "its reference did not end within 0.5 s")
    # the next one has a process of its own
    after = references.run(good, {"x": torch.ones(2, 4)})
    assert torch.equal(after.outputs["y"], torch.full((2, 4), 2.0))


def test_a_reference_that_is_kept_waiting_has_more_time(tmp_path, references, monkeypatch):
    waiting = stored(tmp_path, definition_json(
        reference="import time\ndef run(x):\n    time.sleep(1.5)\n    return x\n"))
    assert references.run(waiting, {"x": torch.ones(2, 4)}).ok              # the process is up
    monkeypatch.setattr(references, "timeout_s", 0.5)
    monkeypatch.setattr(runner, "PATIENCE", 10_000)
    # it wants no core
    monkeypatch.setattr(runner, "cpu_seconds", lambda pid: 0.0)
    assert references.run(waiting, {"x": torch.ones(2, 4)}).status == "timeout"
    # it has a twelfth of one, on a machine that has no more for it
    monkeypatch.setattr(runner, "cpu_seconds", lambda pid: time.monotonic() / 12)
    assert references.run(waiting, {"x": torch.ones(2, 4)}).ok
    monkeypatch.setattr(runner, "PATIENCE", 1)
    assert references.run(waiting, {"x": torch.ones(2, 4)}).status == "timeout"


def test_the_time_of_a_process_is_what_it_computes():
    before = runner.cpu_seconds(os.getpid())
    if before is None:
        pytest.skip("this system does not say")
    while time.process_time() < before + 0.1:
        sum(range(10_000))
    after = runner.cpu_seconds(os.getpid())
    assert after is not None and after > before
    assert runner.cpu_seconds(1 << 30) is None


def test_what_a_reference_raises_is_told_with_its_line(tmp_path, references):
    ran = run_text(references, tmp_path,
                   "def run(x):\n    y = x * 2\n    raise KeyError('missing')\n")
    assert ran.status == "failed"
    assert "KeyError: 'missing'" in ran.why
    assert "line 3" in ran.why
    assert "gave 2 outputs" in run_text(references, tmp_path, "def run(x):\n    return x, x\n").why
    assert "ended with 7" in run_text(references, tmp_path,
                                      "import os\ndef run(x):\n    os._exit(7)\n").why


def test_a_reference_that_wants_too_much_memory_is_told_apart(tmp_path, references):
    ran = run_text(references, tmp_path,
                   "import torch\ndef run(x):\n    return torch.empty(1 << 44)\n")
    assert ran.status == "memory"
    assert "more memory than is here" in ran.why


def test_inputs_are_given_by_name_whatever_their_order(tmp_path, references):
    data = definition_json(reference="def run(y, x):\n    return x - y\n", inputs={
        n: {"shape": ["n", "m"], "dtype": "float32"} for n in ("x", "y")}, outputs={
        "z": {"shape": ["n", "m"], "dtype": "float32"}})
    ran = references.run(stored(tmp_path, data),
                         {"x": torch.full((1, 4), 3.0), "y": torch.ones(1, 4)})
    assert torch.equal(ran.outputs["z"], torch.full((1, 4), 2.0))


# making smaller

def grown(name: str = "experts_groups_fp8_e16_top4", extra: str = "") -> Definition:
    """The mixture with a real model's sizes."""
    data = ALL[name].to_json()
    sizes = {"hidden_size": 7168, "intermediate_size": 2048, "gemm1_out_size": 4096,
             "num_hidden_blocks": 56,
             "num_intermediate_blocks": 16, "num_gemm1_out_blocks": 32}
    for axis, value in sizes.items():
        data["axes"][axis]["value"] = value
    data["reference"] = data["reference"].replace("H = 256",
                                                  "H = 7168").replace("I = 128", "I = 2048") + extra
    return replace(Definition.from_json(data), origin=ALL[name].origin)


def test_a_large_definition_is_made_smaller_and_says_so(references):
    large = grown()
    assert too_large(large)
    assert not too_large(ALL["experts_groups_fp8_e16_top4"])
    small, changes = scaled(large)
    assert changes["hidden_size"] == (7168, 384)
    assert small.const_axes["gemm1_out_size"] == 2 * small.const_axes["intermediate_size"]
    assert small.const_axes["num_hidden_blocks"] * 128 == 384
    assert "H = 384" in small.reference
    assert "TOP_K = 4" in small.reference
    assert small.name != large.name
    report = verify(large, references)
    assert report.passed, str(report)
    assert report.scaled == changes
    assert "smaller than defined" in str(report)
    # it says nothing of the definition itself
    assert traces.trace_of(report) is None


def test_a_size_that_stands_in_an_expression_is_left_alone():
    small, changes = scaled(grown(extra="\n\ndef helper():\n    return 2 * 2048\n"))
    assert "intermediate_size" not in changes
    assert small.const_axes["hidden_size"] == 384
    with pytest.raises(CannotScale, match=r"has (7168|2048), the size of \w+, in an expression"):
        scaled(grown(extra="\n\ndef helper():\n    return 7168 + 2048 * 2\n"))


# our own operations

@pytest.mark.parametrize("name", ["attention", "rms_norm", "moe", "paged_attention", "rope",
                                  "sample", "linear"])
def test_our_operations_are_definitions_that_lz_answers(name, tmp_path, references):
    definition = exports.export(name)
    read = stored(tmp_path, definition.to_json())
    assert read == definition
    inputs = generate(read)
    want = exports.case_inputs(read, 0, "cpu")
    assert all(same(a, want[n]) if isinstance(a, torch.Tensor) else a == want[n]
               for n, a in inputs.items())
    op = lz.op(name)
    out = answer(read)(inputs)
    expected = op.reference(**inputs, **exports.fixed_arguments(read))
    first = expected[0] if isinstance(expected, tuple) else expected
    assert compare("o", next(iter(out.values())), first, TOLERANCES["float32"]).passed


def test_an_exported_reference_runs_apart(tmp_path, references):
    report = verify(stored(tmp_path, exports.export("add_rms_norm").to_json()), references)
    assert report.passed, str(report)
    assert [c.want for c in report.comparisons] == ["reference"]


def test_what_the_schema_has_no_type_for_is_not_exported():
    with pytest.raises(DataError, match="no tensors"):
        exports.export("tokenize")
    four_bits = next(c for c in lz.op("quantized_linear").cases if c.get("format") == "int4")
    with pytest.raises(DataError, match="weight_q is uint8; the schema has"):
        exports.export("quantized_linear", four_bits)


# traces and solutions

@pytest.fixture(scope="module")
def dataset(tmp_path_factory, references) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    names = ("norm_h48_one_plus", "nucleus_v300", "decode_h4_kv2_d16_ps4", "rope_pairs_d16_r8")
    traces.write(folder, [verify(ALL[name], references) for name in names])
    return folder


def test_traces_come_back(dataset):
    trace = Trace.load_lines(dataset / "traces" / "rmsnorm" / "norm_h48_one_plus.jsonl")[0]
    assert trace.evaluation.status == "PASSED"
    assert trace.evaluation.correctness.extra["against"] == "reference"
    assert trace.evaluation.performance.latency_ms > 0
    assert trace.workload.axes == {"batch_size": 5}
    assert Trace.from_json(trace.to_json()) == trace


def test_flashinfer_bench_reads_what_we_write(dataset):
    bench = pytest.importorskip("flashinfer_bench.data")
    trace_set = bench.TraceSet.from_path(str(dataset))
    assert set(trace_set.definitions) == {"norm_h48_one_plus", "nucleus_v300",
                                          "decode_h4_kv2_d16_ps4",
                                          "rope_pairs_d16_r8"}
    for name, runs in trace_set.traces.items():
        assert all(t.is_successful() for t in runs), name
        assert trace_set.get_solution(runs[0].solution).definition == name
    assert trace_set.summary()["passed"] == 4


def test_flashinfer_bench_runs_our_solutions(dataset):
    pytest.importorskip("flashinfer_bench")
    from flashinfer_bench.compile.builders.python_builder import PythonBuilder
    from flashinfer_bench.data import TraceSet
    trace_set = TraceSet.from_path(str(dataset))
    for name in ("norm_h48_one_plus", "rope_pairs_d16_r8"):
        run = PythonBuilder().build(trace_set.definitions[name], trace_set.solutions[name][0])
        inputs = generate(ALL[name])
        outputs = run(*inputs.values())
        want = answers(ALL[name])[1 if name.startswith("rope") else 0](inputs)
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        assert torch.equal(first, next(iter(want.values())))


def test_every_way_to_fail_is_a_trace_of_the_schema(world, references, tmp_path):
    lz.register(Fake("fake.bad", RMS_NORM, fault=ValueError("broken")).kernel)
    lz.configure(rules=(lz.PolicyRule.of("lock", "fake.bad", "rms_norm"),))
    report = verify(NORM, references)
    assert report.status == "failed"
    assert traces.trace_of(report).evaluation.status == "RUNTIME_ERROR"
    traces.write(tmp_path, [report])
    bench = pytest.importorskip("flashinfer_bench.data")
    trace = bench.TraceSet.from_path(str(tmp_path)).traces[NORM.name][0]
    assert trace.evaluation.status.value == "RUNTIME_ERROR"


def solution(content: str, folder: Path, style: bool = False, **changes) -> Solution:
    language = changes.pop("language", "python")
    spec = BuildSpec(language, ("cpu",), "main.py::run", destination_passing_style=style)
    built = Solution("mine", NORM.name, "me", spec, (SourceFile("main.py", content),))
    built = replace(built, **changes)
    path = folder / "mine.json"
    path.write_text(json.dumps(built.to_json()))
    return Solution.load(path)


GOOD = """import torch

def run(hidden_states, weight):
    x = hidden_states.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 3e-5) * (weight.float() + 1)).bfloat16()
"""


def test_a_solution_becomes_a_kernel_for_what_its_definition_says(world, tmp_path):
    kernel = solutions.register(solution(GOOD, tmp_path), NORM, [tmp_path])
    x, weight = torch.randn(3, 48).bfloat16(), torch.randn(48).bfloat16()
    got = lz.rms_norm(x, weight, 3e-5, offset=1.0, backend=kernel.id)
    assert torch.equal(got, answer(NORM)({"hidden_states": x, "weight": weight})["output"])
    for call in ({"x": x.float(), "weight": weight.float(), "eps": 3e-5, "offset": 1.0},
                 {"x": x, "weight": weight, "eps": 1e-6, "offset": 1.0},
                 {"x": x, "weight": weight, "eps": 3e-5},
                 {"x": x[:, :32].contiguous(), "weight": weight[:32], "eps": 3e-5, "offset": 1.0}):
        with pytest.raises(lz.errors.NamedKernelRefused):
            lz.rms_norm(**call, backend=kernel.id)


def test_a_solution_may_write_its_outputs(world, tmp_path):
    content = GOOD.replace("(hidden_states, weight)", "(hidden_states, weight, output)").replace(
        "    return ", "    output.copy_(").rstrip() + ")\n"
    kernel = solutions.register(solution(content, tmp_path, True), NORM, [tmp_path])
    x = torch.randn(2, 48).bfloat16()
    assert lz.rms_norm(x, torch.zeros(48).bfloat16(), 3e-5, offset=1.0,
                       backend=kernel.id).shape == x.shape


@pytest.mark.parametrize(("content", "changes", "words"), [
    (GOOD.replace("3e-5", "0.5"), {}, "does not compute norm_h48_one_plus"),
    (GOOD.replace("def run", "def go"), {}, "has no function 'run'"),
    ("raise OSError('no')\n", {}, "cannot be imported: OSError"),
    (GOOD.replace("x = hid", "x = missing + hid"), {}, "raised NameError"),
    (GOOD, {"language": "cuda"}, "is written in cuda"),
    (GOOD, {"definition": "other"}, "is for other"),
])
def test_a_solution_that_does_not_fit_is_refused(world, tmp_path, content, changes, words):
    before = lz.list_kernels("rms_norm")
    with pytest.raises(RegistrationError) as e:
        solutions.register(solution(content, tmp_path, **changes), NORM, [tmp_path])
    assert words in str(e.value)
    assert lz.list_kernels("rms_norm") == before


def test_a_solution_needs_trust_and_a_direct_answer(tmp_path):
    with pytest.raises(RegistrationError, match="no folder that you trust"):
        solutions.register(solution(GOOD, tmp_path), NORM)
    other = solution(GOOD, tmp_path, definition="decode_h4_kv2_d16_ps4")
    with pytest.raises(RegistrationError,
                       match=r"not the parameters of lz\.paged_attention one for one"):
        solutions.register(other, ALL["decode_h4_kv2_d16_ps4"], [tmp_path])


# written tests and the command

def test_written_tests_are_readable(tmp_path):
    for name, definition in ALL.items():
        (path,) = write_tests(tmp_path, [definition])
        text = path.read_text()
        compile(text, str(path), "exec")
        for part in ("FLASHINFER_AVAILABLE", "def run(", "def generate_random_inputs(",
                     "def test_output_shape", "def test_output_dtype",
                     "def test_numerical_correctness", "def test_determinism", "def main():"):
            assert part in text, (name, part)
        assert all(f"{axis.upper()} = {value}" in text
                   for axis, value in definition.const_axes.items())
        assert write_tests(tmp_path, [definition]) == []                    # what is there stays
        assert write_tests(tmp_path, [definition], overwrite=True) == [path]
    assert {p.name for p in tmp_path.glob("test_*.py")} == {
        f"test_{d.op_type}.py" for d in ALL.values()}
    helpers = (tmp_path / "conftest.py").read_text()
    for name in ("load_definition", "compile_reference", "assert_close", "compute_error_metrics",
                 "check_hit_ratio"):
        assert f"def {name}(" in helpers


def test_written_tests_pass_and_can_fail(tmp_path):
    wrong = replace(NORM, name="wrong",
                    reference=NORM.reference.replace(".bfloat16()", ".bfloat16() * 2"))
    write_tests(tmp_path, [*ALL.values(), wrong], {"rope_pairs_d16_r8": 1})
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-rf",
                      "-m", "not slow", tmp_path, cwd=tmp_path)
    failed = {line.partition("::test_")[0] for line in done.stdout.splitlines()
              if line.startswith("FAILED")}
    assert failed == {"FAILED test_rmsnorm.py::Test_wrong"}, done.stdout
    assert "INCORRECT_NUMERICAL" in done.stdout


@pytest.fixture
def run(capsys):
    def call(*words):
        code, out, err = run_lz(capsys, "verify", "definitions", *words, "--device", "cpu")
        return code, err if code == 2 else out

    return call


def test_the_command_verifies_by_name_type_and_folder(run, tmp_path):
    code, out = run(NORM.name, "--dir", FOLDER, "--trust", FOLDER, "--traces",
                    tmp_path)
    assert code == 0
    assert "equal to reference, torch" in out
    assert (tmp_path / "traces" / "rmsnorm" / f"{NORM.name}.jsonl").exists()
    code, out = run("--op-type", "rmsnorm", "--dir", FOLDER, "--json")
    data = json.loads(out)
    assert data["counts"] == {"passed": 2}
    assert all("no folder that you trust" in r["absent"]["reference"] for r in data["reports"])
    code, out = run("--dir", FOLDER / "linear_attention")
    assert code == 0
    assert "unmapped" in out


def test_the_command_fails_where_lz_disagrees(run, tmp_path):
    data = NORM.to_json()
    data["reference"] = data["reference"].replace(".bfloat16()", ".bfloat16() + 1")
    stored(tmp_path, data)
    code, out = run("--dir", tmp_path, "--trust", tmp_path)
    assert code == 1
    assert "worst at" in out
    code, _ = run("--dir", tmp_path, "--trust", tmp_path, "--tolerance", "5")
    assert code == 1                                                        # the cosine still tells


def test_the_command_writes_tests_and_names_what_is_wrong(run, tmp_path):
    code, out = run(NORM.name, "--dir", FOLDER, "--write-tests", tmp_path)
    assert code == 0
    written = tmp_path / "cases" / "rmsnorm" / "norm_h48_one_plus.py"
    assert out.split() == [str(written)]
    code, out = run(NORM.name, "--dir", FOLDER, "--write-tests", tmp_path)
    assert code == 0 and "--force writes them again" in out
    code, out = run(NORM.name, "--dir", FOLDER, "--write-tests", tmp_path, "--force")
    assert code == 0 and out.split() == [str(written)]
    run("--op-type", "rope", "--dir", FOLDER, "--trust", FOLDER, "--write-tests", tmp_path)
    # as the reference computes
    assert "READING = 1 " in (tmp_path / "cases" / "rope" / "rope_pairs_d16_r8.py").read_text()
    for words, message in (
            ((NORM.name, "--size", "tiny"), "--size must be one of"),
            ((NORM.name, "nucleus_v30", "--dir", FOLDER), "no definition 'nucleus_v30' among"),
            ((NORM.name, "--op-type", "rope", "--dir", FOLDER), "is of the type 'rope'"),
            (("--op-type", "ropes", "--dir", FOLDER), "did you mean 'rope'?"),
            (("--dir", tmp_path / "empty"), "there is none")):
        code, out = run(*words)
        assert code == 2 and message in out and len(out.splitlines()) == 1


def test_a_wrong_name_is_named_where_other_json_files_lie(run, tmp_path):
    (tmp_path / "package.json").write_text('{"name": "something else"}')
    code, out = run("rmsnorm_h128", "--dir", tmp_path)
    assert code == 2 and "there is no definition 'rmsnorm_h128' among 0" in out
    assert "--dir says where" in out


def test_a_report_is_plain_json(references):
    report = verify(NORM, references)
    assert isinstance(report, DefinitionReport)
    data = json.loads(json.dumps(report.to_json()))
    assert data["comparisons"][0]["outputs"]["output"]["hit_ratio"] == 1.0
    assert find_workloads(NORM) == ()

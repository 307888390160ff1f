"""How a definition is read: by its text, by its reference where that is silent, and never by a
reference that contradicts it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import run_lz

from layerzero.verify.comparison import compare, error_budget
from layerzero.verify.trace.answers.lookup import answer, answers
from layerzero.verify.trace.answers.references import References
from layerzero.verify.trace.dataset import find_definitions
from layerzero.verify.trace.definition import Definition
from layerzero.verify.trace.mutation.mutate import readings_of
from layerzero.verify.trace.readings import Unmapped
from layerzero.verify.trace.run import DefinitionReport, verify
from layerzero.verify.trace.traces import trace_of

FOLDER = Path(__file__).parents[2] / "fixtures" / "definitions"
ALL = {d.name: d for d in find_definitions(FOLDER)}
DECODE, PREFILL = ALL["decode_h4_kv2_d16_ps4"], ALL["prefill_table_h6_kv3_d8_ps2"]
NORM, ROPE = ALL["norm_h48_one_plus"], ALL["rope_pairs_d16_r8"]
GROUPS, EXPERTS = ALL["experts_groups_fp8_e16_top4"], ALL["experts_gate_first_e6_top2"]
RAGGED = ALL["ragged_full_h2_kv1_d8_v4"]
SCORES = "* sm_scale\n"


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Iterator[References]:
    with References([FOLDER, tmp_path_factory.getbasetemp()], timeout_s=30) as opened:
        yield opened


@pytest.fixture
def changed(tmp_path):
    def change(definition: Definition, *edits: tuple[str, str], **members) -> Definition:
        data = {**definition.to_json(), **members}
        for old, new in edits:
            assert old in data["reference"]
            data["reference"] = data["reference"].replace(old, new)
        path = tmp_path / f"{data['name']}.json"
        path.write_text(json.dumps(data))
        return Definition.load(path)
    return change


def disputed(report: DefinitionReport, sentence: str) -> bool:
    assert report.status == "disputed" and sentence in report.detail, str(report)
    return True


NATURAL = ("torch.log2(torch.exp(logits).sum(-1))", "logits.logsumexp(-1)")
UNMASKED = ("seen = n - (last - 1 - row)", "seen = n")


def test_an_lse_is_of_base_2_unless_its_text_says_otherwise(changed, references):
    report = verify(changed(DECODE, NATURAL), references)
    assert disputed(report, "by the schema's convention it is lse of base 2, its reference agrees "
                    "only with natural lse")
    assert trace_of(report) is None
    said = changed(DECODE, NATURAL, description="lse is the natural log-sum-exp (not base 2)")
    assert verify(said, references).passed
    wrong = changed(DECODE, description="lse is the natural log-sum-exp")
    assert disputed(verify(wrong, references), "its description says natural lse")


def test_a_mask_is_what_its_text_says(changed, references):
    assert disputed(verify(changed(PREFILL, UNMASKED), references),
                    "its tags say causal, its reference agrees only with not causal")
    silent = verify(changed(PREFILL, UNMASKED, tags=[]), references)
    assert silent.passed and "read as: not causal; its text does not say" in silent.detail
    assert verify(changed(PREFILL, UNMASKED, tags=[], description="Without a causal mask"),
                  references).passed
    both = changed(PREFILL, name="prefill_non_causal", tags=[], description="A causal prefill.")
    assert disputed(verify(both, references),
                    "its name says not causal, its reference agrees only with causal")
    both = changed(PREFILL, name="prefill_causal", description="Attention, not causal.")
    assert disputed(verify(both, references),
                    "its name says causal, its description says not causal")


@pytest.mark.parametrize(("name", "style", "contradicts"), [
    ("rope_neox_style_d16", "rotate_half (NeoX)", True),
    ("rope_gptj_style_d16", "interleaved (GPT-J)", False), ("rope_d16", "", False)])
def test_the_style_of_a_rope(name, style, contradicts, changed, references):
    report = verify(changed(ROPE, name=name), references)
    assert report.passed is not contradicts
    if contradicts:
        assert disputed(report, f"its name says {style}")


def test_a_norm_adds_one_to_its_weight_only_if_it_says_so(changed, references):
    assert disputed(verify(changed(NORM, name="norm_h48"), references),
                    "by the schema's convention it is weight as it is, its reference agrees only "
                    "with 1 + weight")
    assert verify(changed(NORM, name="gemma_rmsnorm_h48"), references).passed
    plain = ("(1.0 + weight.float())", "weight.float()")
    assert disputed(verify(changed(NORM, plain), references), "its name says 1 + weight")
    assert disputed(verify(changed(NORM, description="Epsilon is fixed at 1e-3."), references),
                    "its description says eps 0.001, its reference agrees only with eps 3e-05")
    assert verify(changed(NORM, description="Epsilon is 3e-5."), references).passed


@pytest.mark.parametrize(("edit", "sentence"), [
    (("scores = router_logits.softmax(-1)", "scores = router_logits.sigmoid()"), "softmax"),
    (("    weights = weights / weights.sum(-1, keepdim=True)\n", ""), "renormalised"),
    (("gate, up =", "up, gate ="), "gate before up")])
def test_routing_and_the_order_of_halves_are_what_the_text_says(edit, sentence, changed,
                                                                references):
    text = "Softmax routing, renormalised."
    assert verify(changed(EXPERTS, description=text), references).passed
    assert disputed(verify(changed(EXPERTS, edit, description=text), references), sentence)


@pytest.mark.parametrize(("name", "sentence"), [
    ("experts_ds_routing_ng4_kg2", ""), ("experts_ds_routing_ng4_kg1", "topk_group 1"),
    ("experts_ds_routing_ng1_kg1", "n_group 1")])
def test_the_groups_of_a_name_are_those_of_the_reference(name, sentence, changed, references):
    report = verify(changed(GROUPS, name=name), references)
    assert "n_group=4, topk_group=2" in report.answer
    assert "bias=routing_bias" in report.answer and "hidden_states_scale" in report.answer
    assert report.passed if not sentence else disputed(report, sentence)


LITERALS = (("    N_GROUP = 4\n", ""), ("    TOPK_GROUP = 2\n", ""), ("N_GROUP", "4"),
            ("TOPK_GROUP", "2"))


def test_groups_as_literals_are_read_from_the_text_or_not_mapped(changed, references):
    with pytest.raises(Unmapped, match="groups of experts"):
        answers(changed(GROUPS, *LITERALS))
    assert verify(changed(GROUPS, *LITERALS, name="experts_ng4_kg2"), references).passed
    forgotten = "scatter(1, best, True)", "scatter(1, best, True) | True"
    assert disputed(verify(changed(GROUPS, forgotten, name="experts_ng4_kg2"), references),
                    "agrees only with n_group 1, topk_group 1")


CAPPED = (SCORES, SCORES + "        logits = 2.0 * torch.tanh(logits / 2.0)\n")


def test_a_soft_cap_is_read_or_the_definition_is_not_mapped(changed, references):
    report = verify(changed(DECODE, CAPPED), references)
    assert report.passed and "softcap=2.0" in report.answer
    assert any(c.want == "torch" for c in report.comparisons)
    told = "Logits soft-capped at 2."
    assert verify(changed(DECODE, CAPPED, description=told), references).passed
    assert disputed(verify(changed(DECODE, description=told), references), "no softcap")
    for edits, members in (((), {"name": "decode_softcap"}),
                           (((SCORES, SCORES + "        logits = torch.tanh(logits)\n"),), {})):
        with pytest.raises(Unmapped, match="softcap, and neither the text nor a constant"):
            answers(changed(DECODE, *edits, **members))


WINDOW = (SCORES, SCORES + "        logits[..., :max(length - 2, 0)] = -torch.inf\n")


def test_a_window_is_read_or_the_definition_is_not_mapped(changed, references):
    for text in ("A sliding window of 2 keys.", "window_left = 1"):
        report = verify(changed(DECODE, WINDOW, description=text), references)
        assert report.passed and "window_left=1" in report.answer, str(report)
        assert verify(changed(DECODE, description=text), references).status == "disputed"
    wider = changed(DECODE, WINDOW, description="A sliding window of 3 keys.")
    assert not verify(wider, references).passed
    with pytest.raises(Unmapped, match="its name speaks of a window_left"):
        answers(changed(DECODE, WINDOW, name="decode_window"))
    latent = ALL["latent_prefill_h4_ckv32_kpe8_ps1"]
    with pytest.raises(Unmapped, match="mla_paged_attention does not have"):
        answers(changed(latent, description="A sliding window of 4 keys."))


def test_what_attention_has_no_place_for_is_not_mapped_unless_it_is_absent(changed):
    with pytest.raises(Unmapped, match="its description speaks of attention sinks"):
        answers(changed(DECODE, description="Decode with attention sinks."))
    for text in ("Decode without sinks.", "Decode without a window, no softcap."):
        assert answer(changed(DECODE, description=text)).reading == {"lse_base": "2"}


IN_BETWEEN = ("logits.softmax(-1), v", "logits.softmax(-1).bfloat16().float(), v")


def test_a_reference_that_rounds_in_between_passes_and_it_is_said(changed, references):
    report = verify(changed(DECODE, IN_BETWEEN), references)
    assert report.passed and "its reference rounds in between" in report.detail, str(report)
    # as far off, but no rounding
    scaled = changed(DECODE, ("logits.softmax(-1), v", "logits.softmax(-1) * 1.003, v"))
    assert verify(scaled, references).status in ("disputed", "failed")


@pytest.mark.parametrize("edit", [("F.silu", "F.gelu"), ("row += weight", "row += 1.08 * weight")])
def test_a_mistake_is_no_rounding(edit, changed, references):
    report = verify(changed(EXPERTS, edit), references)
    assert not report.passed and "rounds in between" not in report.detail


def test_mutants_are_judged_in_the_readings_that_a_normal_run_accepts(changed):
    silent, said = changed(ROPE, name="rope_d16"), changed(ROPE, name="rope_gptj_style_d16")
    styles = [a.reading["style"] for a in readings_of(silent, silent.reference, answer(silent))]
    assert sorted(styles) == ["interleaved", "rotate_half"]
    assert [a.reading["style"] for a in readings_of(said, said.reference, answer(said))] == [
        "interleaved"]
    other = NORM.reference.replace("3e-5", "1e-4")
    assert {a.reading["eps"] for a in readings_of(NORM, other, answer(NORM))} == {3e-5, 1e-4}


def test_a_row_that_should_be_zero_is_a_sentence():
    want = torch.zeros(4, 64)
    want[1:] = 1.0
    got = want.clone()
    got[0] = 3.0
    text = str(compare("out", got, want, error_budget(["bfloat16"], "float32", exact=False)))
    assert "a row is not 0 where 0 is wanted" in text and "e+" not in text
    assert "rel without meaning where 0 is wanted" in text


def test_the_command_prints_the_reading_and_fails_where_the_text_says_otherwise(changed, tmp_path,
                                                                                capsys):
    def run() -> tuple[int, str]:
        return run_lz(capsys, "verify", "definitions", "--dir", tmp_path, "--trust", tmp_path)[:2]

    changed(RAGGED)
    code, out = run()
    assert code == 0 and "read as: not causal; its text does not say" in out
    changed(RAGGED, description="A causal mask is applied.")
    code, out = run()
    assert code == 1
    assert "disputed: its description says causal, its reference agrees only with not causal" in out

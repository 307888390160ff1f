"""Changed references: what is changed, what is noticed, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layerzero.cli import main
from layerzero.spec.errors import DataError
from layerzero.verify import report
from layerzero.verify.comparison import compare, error_budget
from layerzero.verify.trace.answers import draws
from layerzero.verify.trace.answers.lookup import answer
from layerzero.verify.trace.answers.references import References
from layerzero.verify.trace.dataset import find_definitions
from layerzero.verify.trace.definition import Axis, Definition
from layerzero.verify.trace.inputs.generation import generate
from layerzero.verify.trace.mutation.mutants import mutants
from layerzero.verify.trace.mutation.mutate import in_float64, mutate
from layerzero.verify.trace.run import run_length, verify
from layerzero.verify.trace.scaling import scaled, too_large

FOLDER = Path(__file__).parents[2] / "fixtures" / "definitions"
ALL = {d.name: d for d in find_definitions(FOLDER)}
NORM = ALL["norm_h48_one_plus"]
CODE = """import torch
def run(x, n):
    \"\"\"A text with 1 + 1.\"\"\"
    assert n == 4
    y = torch.nn.functional.silu(x) * 0.5
    for i in range(n):
        y[i:] = y[i:] + x.sum(dim=-1, keepdim=True)
    a, b = y.to(torch.float32), x
    return a - b
"""


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Iterator[References]:
    with References([FOLDER, tmp_path_factory.getbasetemp()], timeout_s=20) as opened:
        yield opened


def changed(tmp_path: Path, definition: Definition, name: str, old: str, new: str) -> Definition:
    """The definition with another reference, in a file of its own."""
    assert old in definition.reference
    data = {**definition.to_json(), "name": name,
            "reference": definition.reference.replace(old, new)}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(data))
    return Definition.load(path)


def test_every_kind_of_change_is_made_once_and_asserts_stay() -> None:
    every = mutants(CODE)
    assert {m.kind for m in every} >= {"operator", "constant", "function", "dropped term", "axis",
                                       "off by one", "swapped", "dtype", "flag"}
    assert len({m.code for m in every}) == len(every)
    assert all("assert n == 4" in m.code and "A text with 1 + 1." in m.code for m in every)
    assert any("gelu(x)" in m.code for m in every) and any("range(n - 1)" in m.code for m in every)
    few = mutants(CODE, 6, "a")
    assert len(few) == 6 and {m.code for m in few} <= {m.code for m in every}
    assert len({m.kind for m in few}) == 6 and few == mutants(CODE, 6, "a")


def test_mutants_of_a_norm_are_noticed_and_those_that_cannot_be_are_told_apart(
        references, tmp_path) -> None:
    unused = changed(tmp_path, NORM, "unused_one_plus", "return", "unused = 1.0\n    return")
    told = mutate(unused, references, progress=lambda done, total: None)
    assert not told.skipped and told.counts["killed"] >= 15 and not told.counts["survived"]
    assert {o.why for o in told.outcomes if o.mutant.change == "1.1 instead of 1"} >= {
        "the same to the bit"}


@pytest.mark.parametrize(("old", "new"), [("eps=3e-5", "eps=4e-5"),
                                          ("1.0 + weight", "1.01 + weight")])
def test_an_epsilon_and_a_factor_of_one_percent_matter(old, new, references, tmp_path) -> None:
    wrong = changed(tmp_path, NORM, "other", old, new)
    inputs = generate(NORM)
    want, got = references.run(NORM, inputs), references.run(wrong, inputs)
    name, spec = next(iter(NORM.outputs.items()))
    limits = error_budget([spec.dtype], spec.dtype, exact=True)
    assert compare(name, want.outputs[name], want.outputs[name], limits).passed
    assert not compare(name, got.outputs[name], want.outputs[name], limits).passed


def test_the_budget_is_of_the_formats_and_finds_what_is_off_everywhere() -> None:
    gen = torch.Generator().manual_seed(0)
    exact = torch.randn(64, 256, generator=gen, dtype=torch.float64)
    want = exact.bfloat16()
    # codes of one byte are numbers like any other
    tight = error_budget(["float8_e4m3fn", "float32", "bfloat16"], "bfloat16", exact=True)
    assert tight == error_budget(["bfloat16"], "bfloat16", exact=True)
    assert compare("o", (exact * (1 + 1e-6)).bfloat16(), want, tight).passed
    off = compare("o", (exact * 1.004).bfloat16(), want, tight)      # as much as one rounding
    assert not off.passed and "times what is wanted" in off.detail
    loose = error_budget(["bfloat16"], "bfloat16", exact=False)
    rounded_often = (exact.bfloat16() * 3).bfloat16() / 3
    assert compare("o", rounded_often.bfloat16(), want, loose).passed
    assert not compare("o", (exact * 1.08).bfloat16(), want, loose).passed
    one = want.clone()
    one[3, 5] += 0.5
    assert not compare("o", one, want, loose).passed


def test_a_reference_that_dies_is_no_pass(references, tmp_path) -> None:
    for name, code, word in (("raises", "raise ValueError('no')\n    return", "ValueError: no"),
                             ("nan", "x = x * float('nan')\n    return", "NaN"),
                             ("exits", "import os; os._exit(3)\n    return", "ended with 3")):
        made = verify(changed(tmp_path, NORM, name, "return", code), references)
        assert made.status in ("unproven", "failed") and not made.passed
        assert word in str(made), str(made)


def test_the_timeout_holds_for_the_first_reference(tmp_path) -> None:
    slow = changed(tmp_path, NORM, "slow", "return", "while True: pass\n    return")
    with References([tmp_path], timeout_s=0.5) as fresh:
        ran = fresh.run(slow, generate(NORM))
        assert (ran.status, ran.died) == ("timeout", True) and "0.5 s" in ran.why


def test_huge_axes_are_refused_before_they_are_made() -> None:
    axis = NORM.var_axes[0]
    with pytest.raises(DataError, match="GiB are free"):
        generate(NORM, axes={axis: 1 << 40})
    paged = next(d for d in ALL.values() if "paged" in d.op_type)
    rows = next(a for a in paged.var_axes if "batch" in a or "seq" in a or "indptr" in a)
    with pytest.raises(DataError, match=r"GiB are free|at most 1048576 sequences"):
        generate(paged, axes={rows: 1 << 40})


def test_a_matrix_is_made_smaller_and_keeps_two_blocks() -> None:
    gemm = next(d for d in ALL.values() if d.op_type == "gemm")
    a, b = list(gemm.const_axes)[:2]
    large = replace(gemm, axes={**gemm.axes, a: Axis(40960), b: Axis(16384)},
                    reference="def run(A, B):\n    return A\n", constraints=())
    assert too_large(large)
    small, changes = scaled(large)
    assert changes == {a: (40960, 384)}        # what is summed over keeps its size
    assert changes[a][1] // 128 >= 2 and not too_large(small)
    longer = replace(large, axes={**large.axes, b: Axis(65536)})
    _, changes = scaled(longer)
    assert {new for _, new in changes.values()} == {384, 256}
    assert all(new // 128 >= 2 for _, new in changes.values())


def test_products_of_16_bits_are_made_smaller_sooner_on_a_cpu() -> None:
    gemm = next(d for d in ALL.values() if d.op_type == "gemm" and not any(
        "scale" in n for n in d.inputs))
    sizes = {axis: Axis(6144) for axis in gemm.const_axes}
    for dtype, slow in (("float16", True), ("bfloat16", True), ("float32", False)):
        inputs = {n: replace(s, dtype=dtype) for n, s in gemm.inputs.items()}
        large = replace(gemm, axes={**gemm.axes, **sizes}, inputs=inputs)
        assert too_large(large) == slow and not too_large(large, device="cuda")


def test_draws_are_judged_by_how_often_they_come() -> None:
    nucleus = ALL["nucleus_v300"]
    made = answer(nucleus)
    inputs, times = draws.repeated(made, generate(nucleus))
    assert times == draws.REPEATS == run_length(inputs[made.roles["rows"]])
    weights = draws.of(made, inputs, 0.0)
    gen = torch.Generator().manual_seed(0)
    fair = torch.multinomial(weights.float(), 1, generator=gen)[:, 0]
    assert draws.often(made, inputs, fair, times).passed
    likeliest = weights.argmax(-1)
    assert draws.possible(made, inputs, likeliest).passed
    assert not draws.often(made, inputs, likeliest, times).passed


# the report

def line(**changes) -> dict:
    return {"kernel": "torch.rms_norm", "op": "rms_norm", "seed": 0, "status": "passed", "cases": 9,
            "worst": 0.5, "class": "", "says": "", "failures": [], "seconds": 1.0,
            "cpu_seconds": 1.0, "at": "2026-01-01T10:00:00+00:00", "machine": "a machine",
            "arch": "x86_64", "device": "cpu", "torch": "2.9", "python": "3.12", "lane": "quick",
            "sources": "ab", **changes}


def test_a_report_names_what_ran_what_failed_and_what_did_not_run(tmp_path, capsys) -> None:
    rows = [*(line(seed=s) for s in (0, 1, 2, 7)),
            line(kernel="own.norm", status="failed", **{"class": "mask", "says": "a | b"}),
            line(kernel="other.norm", status="skipped", cases=0, says="not installed")]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)) + '\n{"cut')
    out = tmp_path / "proof-a.json"
    with pytest.raises(SystemExit) as stop:
        main(["verify", "report", str(log), "--out", str(out)])
    text = capsys.readouterr().out
    assert stop.value.code == 1 and "0-2, 7" in text and "own.norm, seed 0: mask" in text
    assert "not installed: `other.norm`" in text
    (summary,) = json.loads(out.read_text())["summaries"]
    assert summary["verdicts"] == 5 and [a["kernel"] for a in summary["alarms"]] == ["own.norm"]
    assert len(report.summarise([*rows, line(torch="2.10")])) == 2
    log.write_text('{"cut\n{}')
    with pytest.raises(DataError, match="line 1"):
        report.read_log(log)


def test_in_float64_replaces_every_narrower_float() -> None:
    assert in_float64("x.float() + y.to(torch.bfloat16)") == "x.double() + y.to(torch.float64)"

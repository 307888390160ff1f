"""Public definitions of the FlashInfer-Trace dataset: each is answered by lz, and compared on the
CPU at small sizes.

The dataset is not part of this project. LZ_FLASHINFER_TRACE names a folder with its `definitions/`
(and `workloads/`); without it, `shared/flashinfer-trace` beside the checkout is looked for. What is
too large for a machine like this one is made smaller by `lz verify` itself, which says so; what
takes long (the widest products) is answered but not run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layerzero.verify.trace import traces
from layerzero.verify.trace.answers.lookup import answer, answers
from layerzero.verify.trace.answers.references import References
from layerzero.verify.trace.dataset import find_definitions, find_workloads
from layerzero.verify.trace.definition import Definition
from layerzero.verify.trace.inputs.generation import generate
from layerzero.verify.trace.readings import Unmapped
from layerzero.verify.trace.run import verify
from layerzero.verify.trace.scaling import scaled, too_large

pytestmark = pytest.mark.integration

BESIDE = Path(__file__).parents[3] / "shared" / "flashinfer-trace"
DATASET = Path(os.environ.get("LZ_FLASHINFER_TRACE") or BESIDE)
TYPES = ("gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged", "dsa_paged", "rmsnorm", "rope",
         "sampling", "gemm", "moe", "gdn", "mamba_ssu")
# of a weight: a product that is wider takes seconds to make
ELEMENTS = 12 << 20
ONE_OF_EACH = ("sampling",)                    # the reference sorts a vocabulary for every row

if not (DATASET / "definitions").is_dir():
    pytest.skip(
        "no FlashInfer-Trace dataset: set LZ_FLASHINFER_TRACE to a folder with its definitions",
        allow_module_level=True)

ALL = find_definitions(DATASET)


def of(op_type: str) -> list[Definition]:
    return [d for d in ALL if d.op_type == op_type]


def runnable(op_type: str) -> list[Definition]:
    """Those that run in a moment: not the widest products, and of each kind of sampling one
    vocabulary."""
    definitions = of(op_type)
    if op_type == "gemm":
        definitions = [d for d in definitions if math.prod(d.const_axes.values()) <= ELEMENTS]
    if op_type in ONE_OF_EACH:
        definitions = list({tuple(d.inputs): d for d in definitions}.values())
    return definitions


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    with References([DATASET], timeout_s=60.0) as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def why_unanswered(definition: Definition) -> str:
    """Why no lz call answers the definition; "" if one does."""
    try:
        answers(definition)
    except Unmapped as e:
        return str(e)
    return ""


def test_every_definition_of_a_known_type_is_answered():
    unanswered = {d.name: why for d in ALL if d.op_type in TYPES and (why := why_unanswered(d))}
    assert unanswered == {}


def test_a_type_without_an_operation_says_so():
    unknown = [d for d in ALL if d.op_type not in TYPES]
    if not unknown:
        pytest.skip("every type of the dataset has an operation")
    assert all(f"no operation of the type '{d.op_type}'" in why_unanswered(d) for d in unknown)


@pytest.mark.parametrize("op_type", TYPES)
def test_lz_equals_the_reference_and_torch(op_type, references):
    definitions = runnable(op_type)
    if not definitions:
        pytest.skip(f"the dataset has no definitions of the type {op_type}")
    reports = [verify(d, references) for d in definitions]
    assert [str(r) for r in reports if not r.passed] == []
    assert [r.absent["reference"] for r in reports if "reference" in r.absent] == []
    if op_type != "sampling":                  # of draws, torch judges the filters
        assert all({"reference", "torch"} <= {c.want for c in r.comparisons} for r in reports)


def test_what_is_too_large_can_be_made_smaller():
    for definition in ALL:
        if too_large(definition):
            small, changes = scaled(definition)
            assert changes
            assert not too_large(small, 1 << 30)


def test_the_datasets_own_workloads(references):
    """Their sizes as they are, where they are small enough."""
    ran = 0
    for definition in ALL:
        cases = [w for w in find_workloads(definition)
                 if math.prod(max(n, 1) for n in w.axes.values()) <= 4096]
        if (definition.op_type not in ("rmsnorm", "gqa_paged", "gqa_ragged", "mla_paged")
            or not cases):
            continue
        report = verify(definition, references, workload=cases[0])
        assert report.passed, str(report)
        assert report.workload == cases[0]
        ran += 1
    if not ran:
        pytest.skip("the dataset has no small workloads")


def test_traces_are_read_by_flashinfer_bench(references, tmp_path):
    bench = pytest.importorskip("flashinfer_bench.data")
    by_type = (of(op_type) for op_type in ("rmsnorm", "gqa_paged", "rope"))
    chosen = [definitions[0] for definitions in by_type if definitions]
    traces.write(tmp_path, [verify(d, references) for d in chosen])
    trace_set = bench.TraceSet.from_path(str(tmp_path))
    assert sorted(trace_set.traces) == sorted(d.name for d in chosen)
    assert all(t.is_successful() for runs in trace_set.traces.values() for t in runs)


@pytest.mark.parametrize("op_type", TYPES)
def test_answers_have_the_shapes_and_dtypes_of_the_definition(op_type):
    definitions = runnable(op_type)
    if not definitions:
        pytest.skip(f"the dataset has no definitions of the type {op_type}")
    definition = scaled(definitions[0])[0] if too_large(definitions[0]) else definitions[0]
    inputs = generate(definition, seed=1)
    made, sizes = answer(definition)(inputs), definition.sizes_of(inputs)
    for name, spec in definition.outputs.items():
        assert tuple(made[name].shape) == definition.shape_of(spec, sizes)
        assert made[name].dtype is getattr(torch, spec.dtype)

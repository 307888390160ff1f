"""Readable pytest files for definitions: one test file for each type of operation, which collects
a class for each definition. The class has a file of its own below `cases/`: constants, the
reference as plain code, inputs, and one check per question.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...spec.errors import DataError
from .answers.lookup import answers
from .dataset import inside
from .definition import UNPARSED, Definition, check_names
from .readings import Unmapped
from .scaling import CannotScale, scaled, too_large

_CONFTEST = '''"""Shared by the tests of this folder."""

import json
import math
from pathlib import Path

import pytest
import torch

DEFINITIONS_DIR = Path(__file__).parent / "definitions"


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: larger sizes")


@pytest.fixture
def device():
    """CUDA if it is here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_definition(name):
    """The definition of this name, as its JSON has it."""
    found = sorted(DEFINITIONS_DIR.glob(f"*/{name}.json"))
    if not found:
        raise FileNotFoundError(f"definition {name} not found below {DEFINITIONS_DIR}")
    return json.loads(found[0].read_text(encoding="utf-8"))


def compile_reference(reference_code):
    """run() of a reference. This runs its code."""
    namespace = {"torch": torch, "math": math}
    exec(compile(reference_code, "<reference>", "exec"), namespace)
    return namespace["run"]


def assert_close(actual, expected, rtol=1e-3, atol=1e-3):
    """Tensors, or tuples or dicts of them, within a tolerance."""
    if isinstance(actual, dict):
        actual, expected = list(actual.values()), [expected[name] for name in actual]
    if isinstance(actual, (tuple, list)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected):
            assert_close(a, e, rtol, atol)
    else:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def compute_error_metrics(ref, gt, name="output"):
    """Prints and returns absolute and relative differences; prints cosine similarity and MSE."""
    ref, gt = ref.float(), gt.float()
    absolute = (ref - gt).abs()
    relative = absolute / (gt.abs() + 1e-8)
    cosine = torch.nn.functional.cosine_similarity(ref.flatten(), gt.flatten(), dim=0).item()
    print(f"{name}: abs {absolute.max().item():.6e} (mean {absolute.mean().item():.6e}), "
          f"rel {relative.max().item():.6e} (mean {relative.mean().item():.6e}), "
          f"cosine {cosine:.6f}, mse {(ref - gt).square().mean().item():.6e}")
    return absolute, relative


def check_hit_ratio(ref, gt, atol, rtol, required_percent=0.85):
    """Do so many values agree? For quantized kernels."""
    ref, gt = ref.float(), gt.float()
    hits = ((ref - gt).abs() <= atol + rtol * gt.abs()).float().mean().item()
    print(f"hit ratio {hits:.2%}, needed {required_percent:.2%}")
    return hits >= required_percent
'''

_ABOUT = '''Tests of the definition {name}.

{description}
{note}
The reference against lz, and both against every independent ground truth that is here. Run it with pytest, or as a
program for the numbers: that runs the code of the reference, which stands below as the definition has it.
'''

# Whatever comes from a definition enters these texts as a literal or as a name that was checked;
# only its reference is code, as it must be.
_HEAD = '''{about}

import importlib.util
from pathlib import Path

import pytest
import torch

from layerzero.verify.trace.answers import draws
from layerzero.verify.trace.answers.lookup import answers
from layerzero.verify.comparison import compare
from layerzero.verify.trace.definition import Definition
from layerzero.verify.trace.inputs import generate
from layerzero.verify.trace.answers.truths import truths
from layerzero.verify.trace.run import Limits

FLASHINFER_AVAILABLE = importlib.util.find_spec("flashinfer") is not None and torch.cuda.is_available()
SGLANG_AVAILABLE = importlib.util.find_spec("sgl_kernel") is not None and torch.cuda.is_available()

# Constants of the definition
{constants}

NAME = {name!r}
DEFINITION = Definition.load(Path(__file__).parents[2] / "definitions" / {op_type!r} / {file!r})
LIMITS = Limits(DEFINITION)                      # what its formats cost: comparison.error_budget
SIZES = ["small", pytest.param("medium", marks=pytest.mark.slow)]
READING = {reading}                                   # which of answers(): what the schema leaves open
UNMAPPED = {unmapped!r}
RANDOM = {random}                                # drawn: only the distribution can be compared


# The reference, as the definition has it.

{reference}

# Inputs and answers.

def generate_random_inputs({parameters}size="small", seed=0, device="cpu"):
    """Inputs that keep the constraints of the definition; an axis that is not given comes from the size."""
    given = {{{axes}}}
    axes = {{name: value for name, value in given.items() if value is not None}}
    return generate(DEFINITION, size, axes, seed, device)


def named(made):
    """The outputs of run() by name."""
    parts = made if isinstance(made, (tuple, list)) else (made,)
    return made if isinstance(made, dict) else dict(zip(DEFINITION.outputs, parts))


def reference_outputs(inputs):
    torch.manual_seed(0)
    return named(run(**inputs))


def lz_outputs(inputs):
    if UNMAPPED:
        pytest.skip(UNMAPPED)
    return answers(DEFINITION)[READING](inputs)


def ground_truth(source, inputs):
    """What torch, flashinfer or sglang gives; skips with the reason where it gives nothing."""
    if UNMAPPED:
        pytest.skip(UNMAPPED)
    answer = answers(DEFINITION)[READING]
    device = next(v.device.type for v in inputs.values() if isinstance(v, torch.Tensor))
    truth = next(t for t in truths(answer, device) if t.source == source)
    if truth.compute is None:
        pytest.skip(f"{{source}}: {{truth.why_not}}")
    return truth(answer, inputs)


def assert_close(got, want, exact=False):
    """Every output; prints the numbers, and where they differ most if they do. exact: both compute in float32."""
    verdicts = [compare(name, got[name], want[name], LIMITS.of(name, exact)) for name in want if name in got]
    for verdict in verdicts:
        print(verdict)
    assert all(v.passed for v in verdicts), "\\n".join(str(v) for v in verdicts if not v.passed)


# Tests.

'''

_TESTS = '''class Test{title}:
    """One check per question."""

    def test_output_shape(self, device):
        inputs = generate_random_inputs(device=device)
        sizes = DEFINITION.sizes_of(inputs)
        for name, made in reference_outputs(inputs).items():
            assert tuple(made.shape) == DEFINITION.shape_of(DEFINITION.outputs[name], sizes), name

    def test_output_dtype(self, device):
        for name, made in reference_outputs(generate_random_inputs(device=device)).items():
            assert made.dtype is getattr(torch, DEFINITION.outputs[name].dtype), name

    @pytest.mark.parametrize("size", SIZES)
    def test_numerical_correctness(self, size, device):
        """lz against the reference."""
        inputs = generate_random_inputs(size=size, device=device)
        got = lz_outputs(inputs)
{numerical}

    def test_correctness_vs_torch(self, device):
        inputs = generate_random_inputs(device=device)
        if RANDOM:
            pytest.skip("drawn tokens are compared by their distribution")
        assert_close(reference_outputs(inputs), ground_truth("torch", inputs), exact=True)

    @pytest.mark.skipif(not FLASHINFER_AVAILABLE, reason="FlashInfer or a CUDA device is not here")
    def test_correctness_vs_flashinfer(self):
        inputs = generate_random_inputs(device="cuda")
        assert_close(reference_outputs(inputs), ground_truth("flashinfer", inputs))

    @pytest.mark.skipif(not SGLANG_AVAILABLE, reason="SGLang's kernels or a CUDA device are not here")
    def test_correctness_vs_sglang(self):
        inputs = generate_random_inputs(device="cuda")
        assert_close(reference_outputs(inputs), ground_truth("sglang", inputs))

    @pytest.mark.skipif(not (FLASHINFER_AVAILABLE and SGLANG_AVAILABLE), reason="not both are here")
    def test_ground_truths_match(self):
        inputs = generate_random_inputs(device="cuda")
        assert_close(ground_truth("flashinfer", inputs), ground_truth("sglang", inputs))

    def test_determinism(self, device):
        inputs = generate_random_inputs(device=device)
        first, second = reference_outputs(inputs), reference_outputs(inputs)
        for name in first:
            assert torch.equal(first[name].nan_to_num(), second[name].nan_to_num()), name


def main():
    """Every size, with the numbers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    passed = 0
    sizes = ("small", "medium")
    for size in sizes:
        print(f"\\n{{NAME}}: {{size}}")
        try:
            Test{title}().test_numerical_correctness(size, device)
            passed += 1
        except AssertionError as e:
            print(f"FAILED\\n{{e}}")
    print(f"\\n{{passed}}/{{len(sizes)}} passed")


if __name__ == "__main__":
    main()
'''

_CLOSE = "        assert_close(got, reference_outputs(inputs))"
_DRAWN = '''        answer = answers(DEFINITION)[READING]
        for tokens in (*got.values(), *reference_outputs(inputs).values()):
            verdict = draws.possible(answer, inputs, tokens)
            print(verdict)
            assert verdict.passed, verdict
        assert draws.frequencies(answer, inputs).passed'''


def test_file(definition: Definition, written: Definition, note: str = "", reading: int = 0) -> str:
    """The text of the file; `written` lies beside it, smaller if the definition is large."""
    check_names(written)
    try:
        random, unmapped = answers(written)[reading].random, ""
    except Unmapped as e:
        unmapped, random = str(e), False
    constants = ("\n".join(f"{axis.upper()} = {value:d}"
                           for axis, value in written.const_axes.items()) or "# none")
    title = re.sub(r"[^0-9A-Za-z]", "", definition.name.title())
    about = _ABOUT.format(
        name=definition.name, description=definition.description
        or f"An operation of the type {definition.op_type}.",
        note=f"\n{note}\n" if note else "")
    head = _HEAD.format(
        about=as_docstring(about), name=definition.name, constants=constants,
        op_type=written.op_type, file=f"{definition.name}.json",
        unmapped=unmapped, reading=reading, random=random, reference=written.reference.strip()
        + "\n", parameters="".join(f"{axis}=None, " for axis in written.var_axes),
        axes=", ".join(f'"{axis}": {axis}' for axis in written.var_axes))
    numerical = _DRAWN if random else _CLOSE
    text = head + _TESTS.format(title=title, numerical=numerical)
    try:
        compile(text, "<test>", "exec", dont_inherit=True)     # runs nothing
    except UNPARSED as e:                      # an axis is called like an argument, such as seed
        raise DataError(f"{definition.name!r}: no test can be written for it: {e}") from e
    return text


def as_docstring(text: str) -> str:
    """A literal of this text: in triple quotes where that reads the same, else by repr."""
    plain = f'"""{text}"""'
    try:
        if text.replace("\n", "").isprintable() and ast.literal_eval(plain) == text:
            return plain
    except UNPARSED:
        pass
    return repr(text)


def write_tests(folder: str | Path, definitions: Iterable[Definition],
                readings: Mapping[str, int] | None = None, *,
                overwrite: bool = False) -> list[Path]:
    """One file for each definition below cases/, with the definition in definitions/, and a test
    file for each type that collects them. A file that is there stays, unless overwrite.

    readings: which of answers() a definition means, by its name, where that is known from a report.
    """
    root, written = Path(folder), []
    root.mkdir(parents=True, exist_ok=True)
    if overwrite or not (root / "conftest.py").exists():
        (root / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    for definition in definitions:
        used, note = definition, ""
        if too_large(definition):
            try:
                used, changes = scaled(definition)
                sizes = ", ".join(f"{axis} {new} instead of {old}"
                                  for axis, (old, new) in changes.items())
                note = f"Smaller than defined: {sizes}."
            except CannotScale as e:
                note = f"As large as it is defined: {e}."
        path = Path("cases", _module(definition.op_type), f"{_module(definition.name)}.py")
        if (root / path).exists() and not overwrite:
            continue
        text = test_file(definition, used, note, (readings or {}).get(definition.name, 0))
        beside = Path("definitions", definition.op_type, f"{definition.name}.json")
        for place, content in ((beside, json.dumps(used.to_json(), indent=2) + "\n"),
                               (path, text)):
            target = inside(root, place)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
        written.append(root / path)
    for kind in sorted({path.parent.name for path in written}):
        inside(root, f"test_{kind}.py").write_text(_collect(root, kind), encoding="utf-8")
    return written


def _collect(root: Path, kind: str) -> str:
    """The test file of a type: the classes of its cases, small sizes and, marked slow, medium."""
    lines = [f'"""Tests of the definitions of the type {kind}."""', ""]
    for path in sorted((root / "cases" / kind).glob("*.py")):
        tests = re.search(r"^class (Test\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
        if tests is not None:
            lines.append(f"from cases.{kind}.{path.stem} import {tests[1]} as "
                         f"Test_{path.stem}  # noqa: F401")
    return "\n".join(lines) + "\n"


def _module(name: str) -> str:
    """The name as that of a module."""
    text = re.sub(r"[^0-9A-Za-z_]", "_", name)
    return text if text.isidentifier() and not keyword.iskeyword(text) else f"d_{text}"

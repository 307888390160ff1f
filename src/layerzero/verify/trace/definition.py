"""The FlashInfer-Trace schema: Definition, Workload, Solution and Trace as typed, checked, frozen
data.

A Definition says what a kernel computes (axes, inputs, outputs, a reference in plain torch); a
Workload gives its variable axes values; a Solution is source code for it; a Trace is what came of
running one on the other. The records and their members are those of flashinfer-bench; members that
are not known here are passed over. Reading a definition never runs its code.
"""

from __future__ import annotations

import ast
import hashlib
import keyword
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Union

from ...files.reading import read_json, read_json_lines
from ...spec.codec import At, Check, Count, Record, Text, one_of, read, read_fields
from ...spec.errors import DataError

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1", "int64",
          "int32", "int16",
          "int8", "bool")
# characters, characters, lines
MAX_REFERENCE, MAX_CONSTRAINT, MAX_CONSTRAINTS = 1 << 18, 500, 200
LANGUAGES = ("python", "triton", "cpp", "cuda", "tilelang")
# a zero byte; the parser's own limits
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
STATUSES = ("PASSED", "INCORRECT_SHAPE", "INCORRECT_NUMERICAL", "INCORRECT_DTYPE", "RUNTIME_ERROR",
            "COMPILE_ERROR", "TIMEOUT")
# JSON has texts for these numbers
NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _is_file_name(text: str) -> bool:
    """Datasets have a file per name: one that leads elsewhere or is hidden is refused."""
    return (0 < len(text) <= 200 and text not in (".", "..") and text.isprintable()
            and not {"/", "\\"} & {*text})


def _is_inside(path: str) -> bool:
    return (bool(path) and not PurePosixPath(path).is_absolute()
            and ".." not in PurePosixPath(path).parts)


FileName = Annotated[str, Check("text that is not empty and is the name of a file or folder too",
                                _is_file_name)]


class _Number:
    """A number, or the text that stands for one that is not finite."""

    least = -math.inf

    @classmethod
    def read_json(cls, data: Any, at: At) -> Any:
        value = read(float, NOT_FINITE.get(data, data) if isinstance(data, str) else data, at)
        if isinstance(value, (int, float)) and value < cls.least:
            at.wrong(f"a number >= {cls.least:g}", data)
        return value


class _Magnitude(_Number):
    least = 0.0


# Definitions

@dataclass(frozen=True)
class Axis(Record):
    """A size with a name: fixed (`value`), or chosen by each workload (None)."""

    value: int | None = None
    description: str = ""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = ({"type": "var"} if self.value is None
                                else {"type": "const", "value": self.value})
        return {**data, "description": self.description} if self.description else data

    @classmethod
    def read_json(cls, data: Any, at: At) -> Axis | None:
        axis = read_fields(_AxisMembers, data, at)
        if axis is None:
            return None
        if axis.type == "const" and axis.value is None:
            (at / "value").wrong("a whole number >= 0 for a const axis", None)
        return cls(axis.value if axis.type == "const" else None, axis.description)


@dataclass(frozen=True)
class _AxisMembers(Record, lenient=True):
    """The JSON of an axis."""

    type: Annotated[str, one_of(("var", "const"))]
    value: Union[Count, None] = None
    description: str = ""


@dataclass(frozen=True)
class TensorSpec(Record, omit="description", lenient=True):
    """A tensor by the names of its axes, or a scalar (`shape` is None)."""

    shape: tuple[str, ...] | None
    dtype: Annotated[str, one_of(DTYPES)]
    description: str = ""

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class Definition(Record,
                 json="name op_type description tags axes inputs outputs constraints reference",
                 omit="description tags constraints", lenient=True):
    """`origin` is the file it was read from, which decides whether its reference may be run."""

    name: FileName
    op_type: FileName
    axes: Mapping[str, Axis]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: Text
    tags: tuple[Text, ...] = ()
    description: str = ""
    constraints: tuple[Text, ...] = ()
    origin: Path | None = field(default=None, compare=False)

    @cached_property
    def const_axes(self) -> dict[str, int]:
        return {name: axis.value for name, axis in self.axes.items() if axis.value is not None}

    @cached_property
    def var_axes(self) -> tuple[str, ...]:
        return tuple(name for name, axis in self.axes.items() if axis.value is None)

    def tag(self, key: str) -> str:
        """The value of the tag `key:value`, or nothing."""
        return next((t.partition(":")[2] for t in self.tags if t.partition(":")[0] == key), "")

    def shape_of(self, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """`sizes` are those of the variable axes."""
        known = {**sizes, **self.const_axes}
        return tuple(known[axis] for axis in spec.shape or ())

    def sizes_of(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """What the variable axes are in these inputs; DataError where tensors disagree."""
        sizes: dict[str, int] = {}
        for name, spec in self.inputs.items():
            if spec.shape is None or name not in inputs:
                continue
            shape = tuple(inputs[name].shape)
            if len(shape) != len(spec.shape):
                raise DataError(
                    f"{self.name}: {name} must have the axes {', '.join(spec.shape)}, got shape "
                    f"{shape}")
            for axis, size in zip(spec.shape, shape):
                want = self.const_axes.get(axis, sizes.setdefault(axis, size))
                if want != size:
                    raise DataError(
                        f"{self.name}: axis {axis!r} is {want}, but {size} in {name} of shape "
                        f"{shape}")
        return {axis: size for axis, size in sizes.items() if axis not in self.const_axes}

    @classmethod
    def load(cls, path: str | Path) -> Definition:
        return replace(cls.from_json(read_json(path, "a definition in readable JSON"), str(path)),
                       origin=Path(path))

    def check_json(self, at: At) -> None:
        for group in ("inputs", "outputs"):
            for name, spec in getattr(self, group).items():
                for axis in spec.shape or ():
                    if axis not in self.axes:
                        (at / group / name / "shape").wrong(f"only the axes {', '.join(self.axes)}",
                                                            axis)
        for group, name in unusable_names(self):
            (at / group / name).wrong(
                "a name as Python has them, since it stands in the code that is written", name)
        for name in self.inputs.keys() & self.outputs.keys():
            (at / "outputs" / name).wrong("a name that no input has", name)
        for i, text in enumerate(self.constraints):
            place = at / "constraints" / f"[{i}]"
            if len(text) > MAX_CONSTRAINT or i >= MAX_CONSTRAINTS:
                place.wrong(
                    f"at most {MAX_CONSTRAINTS} constraints of {MAX_CONSTRAINT} characters", text)
                break
            try:
                ast.parse(text, mode="eval")
            except UNPARSED as e:
                place.wrong(f"an expression ({getattr(e, 'msg', '') or e})", text)
        _check_reference(self.reference, tuple(self.inputs), at / "reference")


def unusable_names(definition: Definition) -> Iterator[tuple[str, str]]:
    """(group, name) of axes, inputs and outputs whose names could not stand in code."""
    for group in ("axes", "inputs", "outputs"):
        for name in getattr(definition, group):
            if not name.isidentifier() or keyword.iskeyword(name):
                yield group, name


def check_names(definition: Definition) -> None:
    """Raises DataError for names that are no names in the code written for the definition."""
    for group, name in unusable_names(definition):
        raise DataError(
            f"{definition.name!r}: wanted names as Python has them for its {group}, got {name!r}; "
            "no code is written for it")


def _check_reference(code: str, inputs: tuple[str, ...], at: At) -> None:
    if len(code) > MAX_REFERENCE:
        at.wrong(f"at most {MAX_REFERENCE} characters", code[:60])
        return
    try:
        tree = ast.parse(code)
    except UNPARSED as e:
        where = f"{e.msg} in line {e.lineno}" if isinstance(e, SyntaxError) else str(e)
        at.wrong(f"Python code ({where})", code)
        return
    run = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"), None)
    if run is None:
        at.wrong("code with a function run(...)", "none of that name")
        return
    params = [a.arg for a in (*run.args.posonlyargs, *run.args.args, *run.args.kwonlyargs)]
    if not run.args.vararg and not run.args.kwarg and len(params) < len(inputs):
        at.wrong(f"a run() of the {len(inputs)} inputs {', '.join(inputs)}", ", ".join(params)
                 or "no parameters")


# Workloads

@dataclass(frozen=True)
class RandomInput(Record, header={"type": "random"}, lenient=True):
    """Any values that make sense."""


@dataclass(frozen=True)
class ScalarInput(Record, header={"type": "scalar"}, lenient=True):
    value: Annotated[float, Union[bool, _Number]]


@dataclass(frozen=True)
class StoredInput(Record, header={"type": "safetensors"}, names={"key": "tensor_key"},
                  lenient=True):
    """A tensor of a safetensors file; `path` counts from the root of the dataset."""

    path: Text
    key: Text


InputSpec = Union[RandomInput, ScalarInput, StoredInput]


@dataclass(frozen=True)
class Workload(Record, lenient=True):
    """One concrete case of a definition: the variable axes, and where each input comes from."""

    axes: Mapping[str, Count]
    inputs: Mapping[str, InputSpec]
    uuid: Text


# Solutions

@dataclass(frozen=True)
class SourceFile(Record, lenient=True):
    path: Annotated[str, Check("a path inside the solution", _is_inside)]
    content: Text


@dataclass(frozen=True)
class BuildSpec(Record, omit="binding", lenient=True):
    """How a solution is built and called. `entry_point` is 'file::function'."""

    language: Annotated[str, one_of(LANGUAGES)]
    target_hardware: Annotated[tuple[Text, ...], Check("a list that is not empty", bool)]
    entry_point: Annotated[str, Check("'file::function'", lambda text: text.count("::") == 1)]
    dependencies: tuple[Text, ...] = ()
    # the outputs are its last arguments; else it returns them
    destination_passing_style: bool = True
    binding: Annotated[str, one_of(("", "tvm-ffi", "torch"))] = ""


@dataclass(frozen=True)
class Solution(Record, json="name definition author spec sources description", omit="description",
               lenient=True):
    """Source code that claims to compute a definition."""

    name: Text
    definition: Text
    author: Text
    spec: BuildSpec
    sources: Annotated[tuple[SourceFile, ...], Check("a list that is not empty", bool)]
    description: str = ""
    origin: Path | None = field(default=None, compare=False)

    @property
    def entry_file(self) -> str:
        return self.spec.entry_point.partition("::")[0]

    @property
    def entry_function(self) -> str:
        return self.spec.entry_point.partition("::")[2]

    @property
    def digest(self) -> str:
        parts = [self.name, self.definition, self.spec.entry_point]
        parts += [part for source in self.sources for part in (source.path, source.content)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> Solution:
        return replace(cls.from_json(read_json(path, "a solution in readable JSON"), str(path)),
                       origin=Path(path))

    def check_json(self, at: At) -> None:
        paths = [source.path for source in self.sources]
        if self.entry_file not in paths:
            (at / "spec" / "entry_point").wrong(
                f"a function in one of the sources {', '.join(paths)}", self.entry_file)
        if len(set(paths)) != len(paths):
            (at / "sources").wrong("files with different paths", paths)


# Traces

@dataclass(frozen=True)
class Environment(Record, lenient=True):
    hardware: Text
    libs: Mapping[str, Text] = field(default_factory=dict)


@dataclass(frozen=True)
class Correctness(Record, lenient=True):
    max_relative_error: Annotated[float, _Magnitude] = 0.0
    max_absolute_error: Annotated[float, _Magnitude] = 0.0
    extra: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        texts = {"inf": "Infinity", "nan": "NaN"}
        return {name: texts.get(str(value), value) for name, value in super().to_json().items()}


@dataclass(frozen=True)
class Performance(Record, json="latency_ms reference_latency_ms speedup_factor", lenient=True):
    latency_ms: Annotated[float, _Magnitude] = 0.0
    reference_latency_ms: Annotated[float, _Magnitude] = 0.0

    @property
    def speedup_factor(self) -> float:
        return self.reference_latency_ms / self.latency_ms if self.latency_ms > 0 else 0.0


@dataclass(frozen=True)
class Evaluation(Record, lenient=True):
    """What came of a run: `correctness` if it gave numbers, `performance` if PASSED."""

    status: Annotated[str, one_of(STATUSES)]
    environment: Environment
    timestamp: Text
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    def check_json(self, at: At) -> None:
        for name, statuses in (("correctness", ("PASSED", "INCORRECT_NUMERICAL")),
                               ("performance", ("PASSED",))):
            if (getattr(self, name) is not None) != (self.status in statuses):
                (at
                 / name).wrong(f"an object where status is {' or '.join(statuses)}, null elsewhere",
                                  getattr(self, name))


@dataclass(frozen=True)
class Trace(Record, lenient=True):
    """A solution on a workload. Without solution and evaluation it only states the workload."""

    definition: Text
    workload: Workload
    solution: Union[Text, None] = None
    evaluation: Evaluation | None = None

    @classmethod
    def load_lines(cls, path: str | Path) -> tuple[Trace, ...]:
        lines = read_json_lines(path, "traces in readable JSON Lines")
        return tuple(cls.from_json(data, f"{path}:{number}") for number, data in lines)

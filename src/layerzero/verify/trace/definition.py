"""The FlashInfer-Trace schema: Definition, Workload, Solution and Trace as typed, checked, frozen data.

A Definition says what a kernel computes (axes, inputs, outputs, a reference in plain torch); a Workload gives its
variable axes values; a Solution is source code for it; a Trace is what came of running one on the other. Reading a
definition never runs its code.
"""

from __future__ import annotations

import ast
import hashlib
import keyword
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Union

from ...spec.errors import DataError
from ...spec.event import FileRefused
from ...world import events
from .schema import Fields, read, read_json, read_lines

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1", "int64", "int32", "int16",
          "int8", "bool")
MOST_REFERENCE, MOST_CONSTRAINT, MOST_CONSTRAINTS = 1 << 18, 500, 200     # characters, characters, lines
LANGUAGES = ("python", "triton", "cpp", "cuda", "tilelang")
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)   # a zero byte; the parser's own limits
STATUSES = ("PASSED", "INCORRECT_SHAPE", "INCORRECT_NUMERICAL", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR",
            "TIMEOUT")


@dataclass(frozen=True)
class Axis:
    """A size with a name: fixed (`value`), or chosen by each workload (None)."""

    value: int | None = None
    description: str = ""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"type": "var"} if self.value is None else {"type": "const", "value": self.value}
        return {**data, "description": self.description} if self.description else data


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by the names of its axes, or a scalar (`shape` is None)."""

    shape: tuple[str, ...] | None
    dtype: str
    description: str = ""

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"shape": None if self.shape is None else list(self.shape), "dtype": self.dtype}
        return {**data, "description": self.description} if self.description else data


@dataclass(frozen=True)
class Definition:
    """`origin` is the file it was read from, which decides whether its reference may be run."""

    name: str
    op_type: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: str
    tags: tuple[str, ...] = ()
    description: str = ""
    constraints: tuple[str, ...] = ()
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
        """What the variable axes are in these inputs; DataError where two tensors disagree or one does not fit."""
        sizes: dict[str, int] = {}
        for name, spec in self.inputs.items():
            if spec.shape is None or name not in inputs:
                continue
            shape = tuple(inputs[name].shape)
            if len(shape) != len(spec.shape):
                raise DataError(f"{self.name}: {name} must have the axes {', '.join(spec.shape)}, got shape {shape}")
            for axis, size in zip(spec.shape, shape):
                want = self.const_axes.get(axis, sizes.setdefault(axis, size))
                if want != size:
                    raise DataError(f"{self.name}: axis {axis!r} is {want}, but {size} in {name} of shape {shape}")
        return {axis: size for axis, size in sizes.items() if axis not in self.const_axes}

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "op_type": self.op_type}
        if self.description:
            data["description"] = self.description
        if self.tags:
            data["tags"] = list(self.tags)
        data |= {key: {n: v.to_json() for n, v in getattr(self, key).items()} for key in ("axes", "inputs", "outputs")}
        if self.constraints:
            data["constraints"] = list(self.constraints)
        return {**data, "reference": self.reference}

    @classmethod
    def from_json(cls, data: Any, origin: Path | None = None) -> Definition:
        return read(data, lambda f: _definition(f, origin), "definition", str(origin or "the definition"))

    @classmethod
    def load(cls, path: str | Path) -> Definition:
        path = Path(path)
        return cls.from_json(read_json(path), path)


def _axis(f: Fields) -> Axis:
    kind = f.choice("type", ("var", "const"))
    return Axis(f.count("value") if kind == "const" else None, f.optional_text("description"))


def _tensor(f: Fields) -> TensorSpec:
    if "shape" not in f.data:
        f.missing("shape")
    shape = f.texts("shape") if f.data.get("shape") is not None else None
    return TensorSpec(shape, f.choice("dtype", DTYPES), f.optional_text("description"))


def _definition(f: Fields, origin: Path | None) -> Definition:
    found = Definition(
        f.text("name"), f.text("op_type"), f.each("axes", _axis), f.each("inputs", _tensor), f.each("outputs", _tensor),
        f.text("reference"), f.texts("tags"), f.optional_text("description"), f.texts("constraints"), origin)
    for part in ("name", "op_type"):
        if not _is_file_name(getattr(found, part)):
            f.wrong(part, "the name of a file or folder too", getattr(found, part))
    for group in ("inputs", "outputs"):
        for name, spec in getattr(found, group).items():
            for axis in spec.shape or ():
                if axis not in found.axes:
                    f.wrong(f"{group}.{name}.shape", f"made of the axes {', '.join(found.axes)}", axis)
    for group, name in names_that_are_none(found):
        f.wrong(f"{group}.{name}", "a name as Python has them, since it stands in the code that is written", name)
    for name in found.inputs.keys() & found.outputs.keys():
        f.wrong(f"outputs.{name}", "a name that no input has", name)
    for i, text in enumerate(found.constraints):
        if len(text) > MOST_CONSTRAINT or i >= MOST_CONSTRAINTS:
            f.wrong(f"constraints[{i}]", f"one of at most {MOST_CONSTRAINTS} of {MOST_CONSTRAINT} characters", text)
            break
        try:
            ast.parse(text, mode="eval")
        except UNPARSED as e:
            f.wrong(f"constraints[{i}]", f"an expression ({getattr(e, 'msg', '') or e})", text)
    if found.reference:
        _check_reference(f, found)
    return found


def names_that_are_none(definition: Definition) -> list[tuple[str, str]]:
    """(group, name) of axes, inputs and outputs whose names could not stand in code."""
    return [(group, name) for group in ("axes", "inputs", "outputs") for name in getattr(definition, group)
            if not name.isidentifier() or keyword.iskeyword(name)]


def check_names(definition: Definition) -> None:
    """DataError for names that would be something else than names in code that is written for the definition."""
    for group, name in names_that_are_none(definition):
        raise DataError(f"{definition.name!r}: wanted names as Python has them for its {group}, got {name!r}; no code "
                        "is written for it")


def _is_file_name(text: str) -> bool:
    """Datasets have a file for each name: one that leads elsewhere, or that cannot be seen, is refused."""
    return text not in (".", "..") and len(text) <= 200 and text.isprintable() and not any(c in "/\\" for c in text)


def _check_reference(f: Fields, found: Definition) -> None:
    if len(found.reference) > MOST_REFERENCE:
        f.wrong("reference", f"at most {MOST_REFERENCE} characters", found.reference[:60])
        return
    try:
        tree = ast.parse(found.reference)
    except SyntaxError as e:
        f.wrong("reference", f"Python code ({e.msg} in line {e.lineno})", (e.text or "").strip())
        return
    except UNPARSED as e:
        f.wrong("reference", f"Python code ({e})", found.reference)
        return
    run = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"), None)
    if run is None:
        f.wrong("reference", "code with a function run(...)", "none of that name")
    elif not run.args.vararg and not run.args.kwarg:
        params = [a.arg for a in (*run.args.posonlyargs, *run.args.args, *run.args.kwonlyargs)]
        if len(params) < len(found.inputs):
            f.wrong("reference", f"a run() of the {len(found.inputs)} inputs {', '.join(found.inputs)}",
                    ", ".join(params) or "no parameters")


# Workloads.

@dataclass(frozen=True)
class RandomInput:
    """Any values that make sense."""

    def to_json(self) -> dict[str, Any]:
        return {"type": "random"}


@dataclass(frozen=True)
class ScalarInput:
    value: float

    def to_json(self) -> dict[str, Any]:
        return {"type": "scalar", "value": self.value}


@dataclass(frozen=True)
class StoredInput:
    """A tensor of a safetensors file; `path` counts from the root of the dataset."""

    path: str
    key: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "safetensors", "path": self.path, "tensor_key": self.key}


InputSpec = Union[RandomInput, ScalarInput, StoredInput]


def _input(f: Fields) -> InputSpec:
    kind = f.choice("type", ("random", "scalar", "safetensors"))
    if kind == "scalar":
        value = f.data.get("value")
        return ScalarInput(value if isinstance(value, bool) else f.number("value"))
    return StoredInput(f.text("path"), f.text("tensor_key")) if kind == "safetensors" else RandomInput()


@dataclass(frozen=True)
class Workload:
    """One concrete case of a definition: the variable axes, and where each input comes from."""

    axes: Mapping[str, int]
    inputs: Mapping[str, InputSpec]
    uuid: str

    def to_json(self) -> dict[str, Any]:
        return {"axes": dict(self.axes), "inputs": {n: v.to_json() for n, v in self.inputs.items()}, "uuid": self.uuid}

    @classmethod
    def from_json(cls, data: Any, origin: str = "the workload") -> Workload:
        return read(data, _workload, "workload", origin)


def _workload(f: Fields) -> Workload:
    axes = f.data.get("axes", {})
    sizes = Fields(axes, f.at("axes"), f.errors)
    return Workload({name: sizes.count(name) for name in sizes.data}, f.each("inputs", _input), f.text("uuid"))


# Solutions.

@dataclass(frozen=True)
class SourceFile:
    path: str
    content: str

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "content": self.content}


@dataclass(frozen=True)
class Solution:
    """Source code that claims to compute a definition. `entry_point` is 'file::function'."""

    name: str
    definition: str
    author: str
    language: str
    entry_point: str
    sources: tuple[SourceFile, ...]
    target_hardware: tuple[str, ...] = ("cpu",)
    dependencies: tuple[str, ...] = ()
    destination_passing_style: bool = True     # the outputs are its last arguments; else it returns them
    binding: str = ""
    description: str = ""
    origin: Path | None = field(default=None, compare=False)

    @property
    def entry_file(self) -> str:
        return self.entry_point.partition("::")[0]

    @property
    def entry_function(self) -> str:
        return self.entry_point.partition("::")[2]

    @property
    def digest(self) -> str:
        parts = [self.name, self.definition, self.entry_point, *(p for s in self.sources for p in (s.path, s.content))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "language": self.language, "target_hardware": list(self.target_hardware), "entry_point": self.entry_point,
            "dependencies": list(self.dependencies), "destination_passing_style": self.destination_passing_style}
        if self.binding:
            spec["binding"] = self.binding
        return {"name": self.name, "definition": self.definition, "author": self.author, "spec": spec,
                "sources": [s.to_json() for s in self.sources],
                **({"description": self.description} if self.description else {})}

    @classmethod
    def from_json(cls, data: Any, origin: Path | None = None) -> Solution:
        return read(data, lambda f: _solution(f, origin), "solution", str(origin or "the solution"))

    @classmethod
    def load(cls, path: str | Path) -> Solution:
        path = Path(path)
        return cls.from_json(read_json(path), path)


def _source(f: Fields) -> SourceFile:
    path = f.text("path")
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        f.wrong("path", "a path inside the solution", path)
    return SourceFile(path, f.text("content"))


def _solution(f: Fields, origin: Path | None) -> Solution:
    spec = f.inner("spec")
    found = Solution(
        f.text("name"), f.text("definition"), f.text("author"), spec.choice("language", LANGUAGES),
        spec.text("entry_point"), f.listed("sources", _source), spec.texts("target_hardware"),
        spec.texts("dependencies"), spec.flag("destination_passing_style", True),
        spec.choice("binding", ("", "tvm-ffi", "torch"), "") if spec.data.get("binding") else "",
        f.optional_text("description"), origin)
    if not found.target_hardware:
        spec.wrong("target_hardware", "a list that is not empty", spec.data.get("target_hardware"))
    paths = [s.path for s in found.sources]
    if found.entry_point and found.entry_point.count("::") != 1:
        spec.wrong("entry_point", "'file::function'", found.entry_point)
    elif found.entry_file not in paths:
        spec.wrong("entry_point", f"in one of the sources {', '.join(paths)}", found.entry_file)
    if len(set(paths)) != len(paths):
        f.wrong("sources", "files with different paths", paths)
    return found


# Traces.

@dataclass(frozen=True)
class Evaluation:
    """What came of a run. Errors stand for PASSED and INCORRECT_NUMERICAL, times for PASSED alone."""

    status: str
    hardware: str
    libs: Mapping[str, str]
    timestamp: str
    log: str = ""
    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0
    extra: Mapping[str, Any] | None = None
    latency_ms: float = 0.0
    reference_latency_ms: float = 0.0

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "status": self.status, "environment": {"hardware": self.hardware, "libs": dict(self.libs)},
            "timestamp": self.timestamp, "log": self.log, "correctness": None, "performance": None}
        if self.status in ("PASSED", "INCORRECT_NUMERICAL"):
            data["correctness"] = {"max_relative_error": _number(self.max_relative_error),
                                   "max_absolute_error": _number(self.max_absolute_error),
                                   "extra": None if self.extra is None else dict(self.extra)}
        if self.status == "PASSED":
            speedup = self.reference_latency_ms / self.latency_ms if self.latency_ms > 0 else 0.0
            data["performance"] = {"latency_ms": self.latency_ms, "reference_latency_ms": self.reference_latency_ms,
                                   "speedup_factor": speedup}
        return data


@dataclass(frozen=True)
class Trace:
    """A solution on a workload. Without solution and evaluation it only states the workload."""

    definition: str
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None

    def to_json(self) -> dict[str, Any]:
        return {"definition": self.definition, "workload": self.workload.to_json(), "solution": self.solution,
                "evaluation": None if self.evaluation is None else self.evaluation.to_json()}

    @classmethod
    def from_json(cls, data: Any, origin: str = "the trace") -> Trace:
        return read(data, _trace, "trace", origin)

    @classmethod
    def load_lines(cls, path: str | Path) -> tuple[Trace, ...]:
        return tuple(cls.from_json(data, origin) for origin, data in read_lines(Path(path)))


def _trace(f: Fields) -> Trace:
    evaluation = _evaluation(f.inner("evaluation")) if f.data.get("evaluation") is not None else None
    solution = f.text("solution") if f.data.get("solution") is not None else None
    return Trace(f.text("definition"), _workload(f.inner("workload")), solution, evaluation)


def _evaluation(f: Fields) -> Evaluation:
    environment = f.inner("environment")
    libs = Fields(environment.data.get("libs", {}), environment.at("libs"), f.errors)
    status = f.choice("status", STATUSES)
    judged, timed = status in ("PASSED", "INCORRECT_NUMERICAL"), status == "PASSED"
    for name, wanted in (("correctness", judged), ("performance", timed)):
        if (f.data.get(name) is not None) != wanted:
            f.wrong(name, "given" if wanted else f"absent where status is {status}", f.data.get(name))
    errors = Fields(f.data.get("correctness") or {}, f.at("correctness"), f.errors)
    extra = errors.inner("extra").data if errors.data.get("extra") is not None else None
    times = Fields(f.data.get("performance") or {}, f.at("performance"), f.errors)
    return Evaluation(
        status, environment.text("hardware"), {name: libs.text(name) for name in libs.data}, f.text("timestamp"),
        f.text("log", "", empty=True), errors.number("max_relative_error", 0.0, least=0.0),
        errors.number("max_absolute_error", 0.0, least=0.0), extra,
        times.number("latency_ms", 0.0, least=0.0), times.number("reference_latency_ms", 0.0, least=0.0))


def _number(value: float) -> float | str:
    """JSON has no number for these; the schema writes them as texts."""
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity"


# Folders.

def find_definitions(folder: str | Path, name: str = "", op_type: str = "") -> tuple[Definition, ...]:
    """The definitions of a dataset (a folder with `definitions/`, or that folder itself), sorted by type and name."""
    root = Path(folder)
    if root.is_file():
        found: Sequence[Definition] = (Definition.load(root),)
    elif root.is_dir():
        home = root / "definitions" if (root / "definitions").is_dir() else root
        found = _readable(sorted(home.rglob("*.json")))
    else:
        raise DataError(f"{root}: wanted a folder of definitions or one JSON file; there is none")
    chosen = tuple(d for d in found if name in ("", d.name) and op_type in ("", d.op_type))
    if not chosen:
        from ...select.policy import suggest
        asked, names = (name, {d.name for d in found}) if name else (op_type, {d.op_type for d in found})
        raise DataError(f"{root}: none of {len(found)} definitions is called or of the type {asked!r}"
                        f"{suggest(asked, names)}")
    twice = [d.name for i, d in enumerate(chosen) if d.name in {other.name for other in chosen[:i]}]
    if twice:
        raise DataError(f"{root}: more than one definition is called {twice[0]!r}; names are unique in a dataset")
    return tuple(sorted(chosen, key=lambda d: (d.op_type, d.name)))


def _readable(paths: Sequence[Path]) -> list[Definition]:
    """Those of the files that hold a definition; each of the others is a `FileRefused` event."""
    found: list[Definition] = []
    refused: DataError | None = None
    for path in paths:
        try:
            found.append(Definition.load(path))
        except DataError as e:
            refused = refused or e
            events.emit(FileRefused(path=str(path), problem=str(e)))
    if refused is not None and not found:
        raise refused
    return found


def dataset_root(definition: Definition) -> Path | None:
    """The folder that holds `definitions/`, from which paths of stored inputs count."""
    parents = definition.origin.resolve().parents if definition.origin else ()
    return next((p.parent for p in parents if p.name == "definitions"), None)


def inside(root: Path, path: str | Path) -> Path:
    """`path`, which counts from `root`, with its links followed; DataError if that leads out of `root`."""
    home = root.resolve()
    try:
        found = (home / path).resolve()
        found.exists()                         # a name that no file can have is told here
    except (OSError, RuntimeError, ValueError) as e:
        raise DataError(f"{root}: wanted the path of a file of this dataset, got {str(path)[:200]!r} ({e})") from e
    pure = PurePosixPath(str(path).replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or not found.is_relative_to(home):
        raise DataError(f"{root}: wanted the path of a file of this dataset, got {str(path)[:200]!r}, which leads out "
                        "of it; it is not read")
    return found


def find_workloads(definition: Definition) -> tuple[Workload, ...]:
    """The workloads that the dataset of the definition has for it."""
    root = dataset_root(definition)
    if root is None:
        return ()
    path = inside(root, Path("workloads", definition.op_type, f"{definition.name}.jsonl"))
    try:
        return tuple(t.workload for t in Trace.load_lines(path)) if path.exists() else ()
    except DataError as e:                     # the workloads of the other definitions may be read
        events.emit(FileRefused(path=str(path), problem=str(e)))
        return ()

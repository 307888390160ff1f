"""Folders in flashinfer-bench's layout: their definitions, workloads, and paths that lead out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ...spec.errors import DataError
from ...spec.event import FileRefused
from ...spec.names import suggest
from ...world import events
from .definition import Definition, Trace, Workload


def find_definitions(folder: str | Path, *names: str, op_type: str = "") -> tuple[Definition, ...]:
    """Return the definitions of a dataset (or of its `definitions/`), by type and names."""
    root = Path(folder)
    if root.is_file():
        definitions: Sequence[Definition] = (Definition.load(root),)
    elif root.is_dir():
        home = root / "definitions" if (root / "definitions").is_dir() else root
        definitions = _readable(sorted(home.rglob("*.json")), bool(names))
    else:
        raise DataError(f"{root}: wanted a folder of definitions or one JSON file; there is none")
    by_name = {d.name for d in definitions}
    for name in names:
        if name not in by_name:
            near = suggest(name, by_name) if by_name else "; --dir says where definitions are"
            raise DataError(
                f"{root}: there is no definition {name!r} among {len(definitions)}{near}")
    chosen = tuple(d for d in definitions
                   if (not names or d.name in names) and op_type in ("", d.op_type))
    if not chosen:
        known = {d.op_type for d in definitions}
        wanted = f"{' or '.join(map(repr, names))} is of" if names else "is of"
        raise DataError(f"{root}: none of {len(definitions)} definitions {wanted} the type "
                        f"{op_type!r}{suggest(op_type, known)}" if op_type else
                        f"{root}: wanted definitions as JSON files, there are none; --dir says "
                        "where")
    twice = [d.name for i, d in enumerate(chosen) if d.name in {other.name for other in chosen[:i]}]
    if twice:
        raise DataError(
            f"{root}: more than one definition is called {twice[0]!r}; names are unique in a "
            "dataset")
    return tuple(sorted(chosen, key=lambda d: (d.op_type, d.name)))


def _readable(paths: Sequence[Path], may_be_none: bool) -> list[Definition]:
    """Return the definitions of these files. A file that holds none is a `FileRefused` event."""
    definitions: list[Definition] = []
    refused: DataError | None = None
    for path in paths:
        try:
            definitions.append(Definition.load(path))
        except DataError as e:
            refused = refused or e
            events.emit(FileRefused(path=str(path), problem=str(e)))
    if refused is not None and not definitions and not may_be_none:
        raise refused
    return definitions


def dataset_root(definition: Definition) -> Path | None:
    """The folder that holds `definitions/`, from which paths of stored inputs count."""
    parents = definition.origin.resolve().parents if definition.origin else ()
    return next((p.parent for p in parents if p.name == "definitions"), None)


def inside(root: Path, path: str | Path) -> Path:
    """Resolve `path`, which counts from `root`; DataError if it leads out of `root`."""
    home = root.resolve()
    try:
        resolved = (home / path).resolve()
        resolved.exists()                      # raises for a name that no file can have
    except (OSError, RuntimeError, ValueError) as e:
        raise DataError(
            f"{root}: wanted the path of a file of this dataset, got {str(path)[:200]!r} "
            f"({e})") from e
    pure = PurePosixPath(str(path).replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or not resolved.is_relative_to(home):
        raise DataError(
            f"{root}: wanted the path of a file of this dataset, got {str(path)[:200]!r}, which "
            "leads out of it; it is not read")
    return resolved


def find_workloads(definition: Definition) -> tuple[Workload, ...]:
    """Return the workloads that the dataset of the definition has for it."""
    root = dataset_root(definition)
    if root is None:
        return ()
    path = inside(root, Path("workloads", definition.op_type, f"{definition.name}.jsonl"))
    try:
        return tuple(t.workload for t in Trace.load_lines(path)) if path.exists() else ()
    except DataError as e:                     # the workloads of the other definitions may be read
        events.emit(FileRefused(path=str(path), problem=str(e)))
        return ()

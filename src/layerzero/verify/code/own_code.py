"""The Python code that is a kernel's own, in blocks of which either all runs or nothing.

Own is what the loaded function reaches by its closure, its globals and its methods, in the files of
the kernel and beside them: not torch's code, nor that of any library, nor this library's other
files. Blocks that only raise or that handle exceptions are not asked for, nor what follows from
another device or another version alone, or from a line that says `# pragma: no cover`.
"""

from __future__ import annotations

import dis
import functools
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ...spec.kernel import Direct

_PACKAGE = str(Path(__file__).parents[2])
_BACKENDS = str(Path(_PACKAGE, "backends"))
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib",
                                                            "platlib")} | {sys.prefix, _PACKAGE})
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ALWAYS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP",
           "JUMP_NO_INTERRUPT"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_RAISES = {"RAISE_VARARGS", "RERAISE"}
_COMPARES = {"COMPARE_OP", "IS_OP", "CONTAINS_OP", "UNARY_NOT", "TO_BOOL"}
_HANDLERS = {"SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH", "SETUP_CLEANUP"}
# names that tell one machine, one build or one way to compile from another
_OF_MACHINES = {"is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_available", "device", "hip",
                "device_type", "version_info", "__version__", "platform", "is_compiling",
                "is_scripting", "is_tracing", "is_current_stream_capturing", "cuda", "getenv",
                "environ", "machine", "hasattr", "_get_tracing_state"}
NO_COVER = "pragma: no cover"
MOST_FUNCTIONS = 200


@dataclass(frozen=True)
class Blocks:
    """The blocks of one code object that a call on this machine may reach."""

    code: CodeType
    of_offset: Mapping[int, int]               # offset of an instruction -> its block
    lines: Mapping[int, int]                   # block -> its first line
    before: Mapping[int, tuple[int, ...]]      # block -> those that may lead to it
    excused: frozenset[int]                    # may lead to some that no call needs to reach
    spoken: Mapping[int, tuple[Any, ...]]      # block -> its constants and the names it reads

    def text(self, block: int) -> str:
        """Returns where a block begins and what stands there."""
        line = self.lines[block]
        source = linecache.getline(self.code.co_filename, line).strip()
        place = f"{Path(self.code.co_filename).name}:{line}"
        return f"{place} `{source[:60]}`" if source else place


def own_code(load: Callable[..., Any], function: Any,
             others: Iterable[Callable[..., Any]] = ()) -> dict[int, Blocks]:
    """Returns the blocks of each code object that is a kernel's own, by its id: of the function
    that `load` has returned and of what that reaches. What `others` reach too, which load other
    kernels, may have parts that are for those."""
    homes = {code.co_filename for code in _codes_of(load)}
    shared = {id(part) for other in others if other is not load
              and any(code.co_filename in homes for code in _codes_of(other))
              for code in _reached(other, homes) for part in _nested(code)}
    found = {id(part): part for code in _reached(function, homes) for part in _nested(code)}
    every = {number: _blocks(part) for number, part in found.items() if number not in shared}
    return {number: blocks for number, blocks in every.items() if blocks.lines}


def own_values(load: Callable[..., Any], function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the constants of a kernel's own code, and the globals, closures and attributes that it
    names, each with its name: numbers among them may be those of a limit."""
    homes = {code.co_filename for code in _codes_of(load)}
    for owner in _owners(function, homes):
        if isinstance(owner, FunctionType):
            for code in _nested(owner.__code__):
                yield from (("", value) for value in code.co_consts)
                yield from ((name, owner.__globals__[name]) for name in code.co_names
                            if name in owner.__globals__)
            yield from (("", value) for value in owner.__defaults__ or ())
            yield from (owner.__kwdefaults__ or {}).items()
            yield from zip(owner.__code__.co_freevars, _cells(owner))
        elif not isinstance(owner, type):
            yield from getattr(owner, "__dict__", {}).items()
        else:
            yield from vars(owner).items()


def _is_own(file: str, homes: set[str]) -> bool:
    if file in homes:                          # of a worker or a hub it is not the kernel's
        return not file.startswith(_PACKAGE) or file.startswith(_BACKENDS)
    # what this library's own backends call, or a kernel hub has, has its own tests
    ours = not homes or any(home.startswith(_PACKAGE) for home in homes)
    return not ours and not file.startswith((*_LIBRARIES, "<"))


def _reached(function: Any, homes: set[str]) -> Iterator[CodeType]:
    return (owner.__code__ for owner in _owners(function, homes)
            if isinstance(owner, FunctionType))


def _owners(function: Any, homes: set[str]) -> Iterator[Any]:
    """Yields the functions, classes and objects of their own that a function reaches."""
    seen: set[int] = set()
    left, count = [function], 0
    while left and count < MOST_FUNCTIONS:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, Direct):
            left += [value.fn, value.otherwise]
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            left += [value.__func__, *([value.__self__] if isinstance(value, MethodType) else ())]
        elif isinstance(value, property):
            left += [value.fget, value.fset]
        elif isinstance(value, FunctionType):
            if not _is_own(value.__code__.co_filename, homes):
                continue
            count += 1
            yield value
            names = {name for code in _nested(value.__code__) for name in code.co_names}
            left += [value.__globals__[name] for name in names if name in value.__globals__]
            left += _cells(value)
            left += value.__defaults__ or ()
            left += (value.__kwdefaults__ or {}).values()
        elif isinstance(value, type):
            if _is_own(_file_of(value), homes):
                yield value
                left += [v for v in vars(value).values() if isinstance(
                    v, (FunctionType, staticmethod, classmethod, property))]
        elif not isinstance(value, ModuleType) and _is_own(_file_of(type(value)), homes):
            yield value
            left += [type(value), *getattr(value, "__dict__", {}).values()]


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<unknown>"


def _cells(function: FunctionType) -> list[Any]:
    contents: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:                     # not yet filled
            contents.append(None)
    return contents


def _codes_of(load: Any) -> Iterator[CodeType]:
    while isinstance(load, functools.partial):
        load = load.func
    code = getattr(getattr(load, "__func__", load), "__code__", None)
    if isinstance(code, CodeType):
        yield code


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


# Blocks

def _blocks(code: CodeType) -> Blocks:
    instructions = list(dis.get_instructions(code))
    targets = {i.argval for i in instructions if i.opcode in _JUMPS}
    parts: dict[int, list[Any]] = {}           # block -> its instructions
    line_of: dict[int, int] = {}
    current, ended, line = -1, True, code.co_firstlineno
    for i in instructions:
        line_of[i.offset] = line = _line_of(i, line)
        if ended or i.offset in targets:
            current = i.offset
        parts.setdefault(current, []).append(i)
        ended = i.opcode in _JUMPS or i.opname in _ENDS
    follows = _follows(parts)
    reached = _reachable(instructions[0].offset, follows)
    raising = {block for block in parts if parts[block][-1].opname in _RAISES}
    while more := {s for s in reached - raising if follows[s] and follows[s] <= raising}:
        raising |= more
    wanted = reached - raising
    # of the line of its condition: what stands before that says nothing of it
    names = {block: {i.argval for i in parts[block] if isinstance(i.argval, str)
                     and line_of[i.offset] == line_of[parts[block][-1].offset]} for block in wanted}
    of_machines = {b for b in wanted if names[b] & _OF_MACHINES}
    answers = _answers(parts, line_of, of_machines, follows)
    excused = frozenset(b for b in wanted if names[b] & (_OF_MACHINES | answers) or any(
        NO_COVER in linecache.getline(code.co_filename, line_of[i.offset])
        for i in (parts[b][0], parts[b][-1])))
    spoken = {b: tuple(i.argval for i in parts[b] if i.opname == "LOAD_CONST"
                       or isinstance(i.argval, str)) for b in wanted}
    return Blocks(code, {i.offset: b for b in wanted for i in parts[b]},
                  {b: line_of[b] for b in wanted},
                  {b: tuple(before for before in wanted if b in follows[before]) for b in wanted},
                  excused, spoken)


def _follows(parts: Mapping[int, Sequence[Any]]) -> dict[int, set[int]]:
    """Returns the blocks that may run after each."""
    follows: dict[int, set[int]] = {}
    for start, following in zip(parts, [*list(parts)[1:], -1]):
        end, follows[start] = parts[start][-1], set()
        if end.opcode in _JUMPS and end.opname not in _HANDLERS:
            follows[start].add(end.argval)
        if end.opname not in _ALWAYS and end.opname not in _ENDS and following >= 0:
            follows[start].add(following)
    return follows


def _answers(parts: Mapping[int, Sequence[Any]], line_of: Mapping[int, int], of_machines: set[int],
             follows: Mapping[int, set[int]]) -> set[str]:
    """Returns the variables that keep what a condition says of a machine, such as `x.is_cuda`."""
    led = {to for b in of_machines if len(follows[b]) > 1 for to in follows[b]}
    found: set[str] = set()
    for block, instructions in parts.items():
        for before, i in pairwise([instructions[0], *instructions]):
            line = {n.argval for n in instructions if isinstance(n.argval, str)
                    and line_of[n.offset] == line_of[i.offset]}
            if i.opname in ("STORE_FAST", "STORE_DEREF") and (
                    (block in led and i is instructions[0])
                    or (line & _OF_MACHINES and before.opname in _COMPARES)
                    or (isinstance(before.argval, str)
                        and before.argval in _OF_MACHINES - {"device"})):
                found.add(i.argval)
    return found


def _line_of(instruction: Any, before: int) -> int:
    line = getattr(instruction, "line_number", None)           # from Python 3.13 on
    if line is None:
        line = instruction.starts_line
    return line if type(line) is int else before


def _reachable(start: int, follows: Mapping[int, set[int]]) -> set[int]:
    """Returns the blocks that follow the first by no exception."""
    found, left = {start}, [start]
    while left:
        for block in follows[left.pop()] - found:
            found.add(block)
            left.append(block)
    return found

"""The native fast path: loaded if it was built for this torch and Python, never built in a user's
call.

`lz build` compiles `fastpath.cpp` and its headers against the installed torch (some 10 seconds)
into the cache folder, under a name made of the versions and the sources' hash, and seals it.
Without it, or where others could have written it, everything works in pure Python.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import os
import platform
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...files import toolchain
from ...files.paths import cache_dir
from ...files.sealed import SealedFolder
from ...machine.faults import FAULTS
from ...selection.key import KeyProgram, NumberField
from ...selection.policy import Layer
from ...spec.errors import ConfigError, DataError, RegistrationError
from ...spec.kernel import Const, Direct, LastSize
from ...spec.op import INT64, Op, Param
from ...spec.rules.expr import parse
from ...world import context
from ...world.context import Override
from ..cache import Entry
from ..hotpath import signature

SOURCE = Path(__file__).with_name("fastpath.cpp")
PART = toolchain.BuildPart("the native fast path", "the native fast path", "it")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
# Half of the time would go to headers of which torch's own name a few declarations: stand_ins.h.
REPLACED_HEADERS = ("pybind11/pybind11.h", "torch/csrc/utils/pybind.h",
                    "ATen/core/function_schema.h", "torch/csrc/autograd/node.h")
_KINDS = ("tensor", "bool", "int", "float", "str", "generator")
_CODES = ("fact", "const", "add", "sub", "mul", "div", "mod", "eq", "ne", "lt", "le", "gt", "ge",
          "max", "min")
SIZE, LITERAL, LEAD, BROADCAST = range(4)
PARAM, CONSTANT, LAST_SIZE = range(3)
NO_WORLD = -1              # an epoch that no world has: the table refuses every entry
MAX_TESTS = 47             # of one field: they share a word of the key with its bucket


def library_path() -> Path:
    text = b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    digest = hashlib.sha256(text).hexdigest()[:12]
    tag = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}-{digest}"
    return cache_dir() / "native" / tag / "fastpath.so"


def is_enabled() -> bool:
    """Return False if it is switched off or Python has no GIL, which guards the table."""
    gil = getattr(sys, "_is_gil_enabled", lambda: True)
    return (os.environ.get("LAYERZERO_NATIVE", "1").strip().lower() not in ("0", "false", "no",
                                                                            "off") and gil())


@lru_cache(maxsize=None)
def module() -> Any:
    """Load the compiled module; None if there is none."""
    if not is_enabled():
        return None
    try:
        store, parts = SealedFolder.of(library_path())
        compiled = store.import_library("layerzero.dispatch.native.fastpath", *parts)
    except FileNotFoundError:
        return None
    except NotADirectoryError as e:
        _problem.append(f"LAYERZERO_CACHE_DIR must be a folder, and {e.filename} is a file")
        return None
    except DataError as e:
        _problem.append(f"built but refused: {e}")
        return None
    except (ImportError, OSError, ConfigError) as e:
        _problem.append(f"built but does not load: {type(e).__name__}: {e}")
        return None
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    compiled.setup(
        torch.Tensor,
        torch.nn.Parameter,
        context.current,
        context.override_for_call,
        Layer,
        capturing,
        FAULTS,
        raw_stream,
    )
    # A public function is a method of its dispatcher, and pickle writes "that attribute of it": of
    # the package, where it has the same name and where a process without this path has its own.
    copyreg.pickle(compiled.Dispatcher, lambda _: (importlib.import_module, ("layerzero",)))
    return compiled


_problem: list[str] = []


@dataclass(frozen=True)
class NativeStatus:
    ok: bool
    expected: bool                             # False: nothing is wrong if it is not loaded
    text: str
    hint: str = ""


def status() -> NativeStatus:
    if module() is not None:
        return NativeStatus(True, True, f"loaded for torch {torch.__version__}")
    if not is_enabled():
        return NativeStatus(False, False, "switched off; calls go through pure Python")
    if _problem:
        return NativeStatus(
            False, True, f"{_problem[0]}; calls go through pure Python",
            "name a folder, or unset it" if _problem[0].startswith("LAYERZERO_CACHE_DIR")
            else "build it again: lz build --force"
        )
    return NativeStatus(
        False, False, "not built; calls go through pure Python (about 2 us instead of 0.2)",
        "run: lz build"
    )


def build(force: bool = False, say: Callable[[str], None] = lambda text: None) -> Path:
    """Compile the fast path for this torch and Python, and our own CPU kernels beside it; return
    the fast path's file.

    `say` is called with a text when a part begins and ends, from the thread that waits for its
    compiler. If one part fails, the other is still built. Safe to run in several processes at once.
    """
    with ThreadPoolExecutor(2) as pool:
        fast_path, kernels = (pool.submit(part, force, say)
                              for part in (build_fast_path, build_kernels))
        try:
            wait((fast_path, kernels))
        except BaseException:                  # an interrupt; the threads would wait to the end
            toolchain.stop_compilers()
            raise
    fast_path_error, kernels_error = fast_path.exception(), kernels.exception()
    if isinstance(fast_path_error, ConfigError) and isinstance(kernels_error, ConfigError):
        raise ConfigError(f"{fast_path_error}\n{kernels_error}")
    kernels.result()                           # raises what went wrong
    return fast_path.result()


def build_kernels(force: bool = False, say: Callable[[str], None] = lambda text: None) -> Path:
    """Compile the kernels of backends/native for this processor."""
    from ...backends.native import build as kernels  # `import layerzero` reads no backend

    return kernels.build(force, say)


def build_fast_path(force: bool = False, say: Callable[[str], None] = lambda text: None) -> Path:
    path = toolchain.build(PART, library_path(), SOURCE, f"torch {torch.__version__}", force, say,
                           _compile)
    module.cache_clear()
    _problem.clear()
    return path


def _compile(compiler: list[str], draft: Path) -> None:
    stand_ins = draft.parent / "include"
    for name in REPLACED_HEADERS:
        (stand_ins / name).parent.mkdir(parents=True, exist_ok=True)
        (stand_ins / name).write_text(f'#include "{SOURCE.with_name("stand_ins.h")}"\n')
    # A torch whose headers use more than the stand-ins declare is compiled with its own.
    problem = (toolchain.run_compiler(PART, compile_command(compiler, draft, stand_ins))
               and toolchain.run_compiler(PART, compile_command(compiler, draft)))
    if problem:
        raise toolchain.compile_error(PART, problem)


def compile_command(compiler: list[str], target: Path, *first_includes: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [*first_includes, root / "include",
                root / "include" / "torch" / "csrc" / "api" / "include",
                Path(sysconfig.get_paths()["include"])]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden",
             "-fvisibility-inlines-hidden", "-fno-plt", "-fno-semantic-interposition", "-w",
             f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    return [*compiler, *flags, *(f"-I{i}" for i in includes), str(SOURCE), "-o", str(target),
            f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


class NativeDispatcher:
    """The Python side of the compiled dispatcher of one op."""

    def __init__(self, op: Op, compiled: Any) -> None:
        self.op = op
        self.compiled = compiled
        self.call: Callable[..., Any] = compiled.call
        self.index = {p.name: i for i, p in enumerate(op.params)}
        self._encoded: tuple[KeyProgram, tuple[Any, ...]] | None = None

    def install(self, program: KeyProgram, epoch: int, limit: int) -> None:
        encoded = self._encoded
        if encoded is None or encoded[0] is not program:
            encoded = self._encoded = program, encode(program)
        self.compiled.install(*encoded[1], epoch, limit)

    def put(self, entry: Entry, epoch: int, values: tuple[Any, ...], same_in_capture: bool,
            override: Override | None) -> bool:
        """Add an entry for calls like these values to the table; False if the table cannot hold it.

        `same_in_capture`: the same would be called while a CUDA graph is captured, so that need not
        be checked.
        """
        call = entry.binding.call or Direct(entry.binding.run, tuple(self.index), {})
        constants: list[Any] = []

        def source(argument: Any) -> tuple[int, int]:
            if isinstance(argument, Const):
                constants.append(argument.value)
                return CONSTANT, len(constants) - 1
            if isinstance(argument, LastSize):
                return LAST_SIZE, self.index[argument.param]
            return PARAM, self.index[argument]

        sources = tuple(source(a) for a in (*call.args, *call.kwargs.values()))
        keywords = tuple(map(sys.intern, call.kwargs)) or None
        name, arguments = entry.binding.operator or (None, ())
        inputs = tuple(map(source, arguments))
        return bool(self.compiled.put(
            entry, epoch, values, override, call.fn, sources, tuple(constants), keywords,
            len(call.args), -1 if call.item is None else call.item, -1 if call.first is None
            else call.first, same_in_capture, name, inputs, entry.recordings,
            entry.run is not entry.binding.run))

    def recordings(self) -> Any:
        """Return an empty list of recorded launches for an entry; `put` passes it to the table."""
        return module().Recordings()

    def collect(self) -> None:
        """Add the hits of the table to the counts of its entries."""
        self.compiled.collect()


def make_dispatcher(op: Op, miss: Callable[..., Any],
                    recover: Callable[..., Any]) -> NativeDispatcher | None:
    """Make the native dispatcher of an op; None if there is no native path for it."""
    compiled = module()
    if (compiled is None or op.read is not None
        or any(p.kind == "str" and not p.choices for p in op.params)):
        return None
    floats = {p.name for p in op.params if p.kind == "float"}
    steps = [step for text in op.derived.values() for step in parse(text).postfix]
    if any(value in floats if code == "fact" else isinstance(value, float)
           for code, value in steps):
        return None                            # its derived facts are integers
    doc = f"{op.name}{_text_signature(op)}\n--\n\n{op.reference.__doc__ or ''}"
    on_miss, on_fault = _weak_callback(op, miss), _weak_callback(op, recover)
    return NativeDispatcher(op, compiled.Dispatcher(op.name, doc, on_miss, on_fault))


def _weak_callback(op: Op, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method without keeping its owner alive: the GC does not see into native code."""
    name, reference = op.name, weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        if bound is None:
            raise RegistrationError(
                f"lz.{name} was unregistered; register it again, and call what that returns")
        return bound(*args, **kwargs)

    return call


def _text_signature(op: Op) -> str:
    full = signature(op)
    plain = [p.replace(annotation=p.empty) for p in full.parameters.values()]
    return str(full.replace(parameters=plain, return_annotation=full.empty))


def encode(program: KeyProgram) -> tuple[Any, ...]:
    """Write the key program as the tuples that `install` of fastpath.cpp takes."""
    op = program.op
    index = {p.name: i for i, p in enumerate(op.params)}
    slots = {name: i for i, name in enumerate((*op.dims, *op.derived))}
    count = len(slots)
    variants = list(op.patterns)
    params = tuple(
        (p.name, _KINDS.index(p.kind), int(p.optional), int(p.keyword_only), int(not p.required),
         None if p.required else p.default,
         tuple([*variants, *(c for c in p.choices if c not in variants)] if p.name == op.variant
               else p.choices),
         *_limits(op, p))
        for p in op.params)
    tensor_facts: dict[str, set[str]] = {}
    for tensor, fact in program.tensor_facts:
        tensor_facts.setdefault(tensor, set()).add(fact)
    order = [p for p in op.params if p.kind == "tensor" and not p.optional]
    order += [p for p in op.params if p.kind == "tensor" and p.optional]
    grad_per_tensor = any("requires_grad" in tensor_facts.get(p.name, ()) for p in order
                          if not p.optional)

    def flags(p: Param) -> tuple[int, ...]:
        facts = tensor_facts.get(p.name, set())
        alignment = 1 if "alignment" in facts else 2 if "alignment_off_cpu" in facts else 0
        return (bool(facts & {"contiguous", "stride_last"}), "ndim" in facts, p.optional
                or grad_per_tensor, alignment,
                not p.optional and p.name in op.same_dtype)

    tensors = tuple((index[p.name], flags(p),
                     tuple(_shape(op.patterns[v].get(p.name, ()), slots) for v in variants))
                    for p in order)

    def slot_of(name: str) -> int:
        return slots[name] if name in slots else count + index[name]

    read = {f.fact for f in program.fields}
    derived = tuple(
        (slots[name],
         tuple((_CODES.index(code), slot_of(value) if code == "fact" else int(value or 0))
                            for code, value in parse(text).postfix))
        for name, text in op.derived.items() if name in read or _is_read_by(op, name, read))
    fields = tuple(
        (*((slots[f.fact], -1) if f.fact in slots else (-1, index[f.fact])),
         int(f.exact), int(f.bucket), *tests) for f in program.fields for tests in _tests(f))
    return (params, tensors, derived, fields, index.get(op.variant, -1), len(variants), count,
            index.get(op.main_tensor, -1), torch.version.cuda is not None, op.sdpa_switches)


def _limits(op: Op, p: Param) -> tuple[float, float]:
    """Return the range of an int or float parameter; larger seeds are left to Python."""
    low, high = op.limits.get(p.name, (0, 0))
    return (low, min(high, INT64[1])) if p.kind == "int" else (low, high)


def _tests(f: NumberField) -> Iterator[tuple[tuple[float, ...], tuple[float, ...],
                                             tuple[int, ...]]]:
    """Yields the tests of a field, in groups that fit a word each."""
    size = MAX_TESTS // 3
    for at in range(0, max(len(f.equals), len(f.above), len(f.multiples), 1), size):
        yield tuple(f.equals[at:at + size]), tuple(f.above[at:at + size]), tuple(
            f.multiples[at:at + size])


def _is_read_by(op: Op, name: str, read: set[str]) -> bool:
    """Is a derived fact an input of one that the key reads?"""
    readers = [user for user, text in op.derived.items() if name in parse(text).names]
    return any(user in read or _is_read_by(op, user, read) for user in readers)


def _shape(tokens: tuple[str, ...], slots: dict[str, int]) -> tuple[tuple[int, int], ...]:
    kinds = {"~": BROADCAST, "*": LEAD}
    return tuple((LITERAL, int(token)) if token.isdigit()
                 else (kinds.get(token[0], SIZE), slots[token.lstrip("~*")])
                 for token in tokens)

"""The hot path in pure Python: generated from the key program, so that it does nothing twice.

For each op one function is written out: it checks that the call is an ordinary one, builds the key,
looks it up, and calls what it finds. Anything unusual goes to the slow path, which says what it is.
`fastpath.cpp` is its native twin.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..select.key import KeyProgram, NumberField
from ..spec.expr import parse
from ..spec.grid import bucket
from ..spec.op import Op, Param
from .facts import alignment, stride_last

BUCKETS = [bucket(n) for n in range(4096)]
EXTRAS = ("backend", "policy")


def signature(op: Op) -> inspect.Signature:
    """The public signature: the op's own, and `backend=` and `policy=` by keyword."""
    own = inspect.signature(op.reference)
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in EXTRAS]
    return own.replace(parameters=[*own.parameters.values(), *extra])


def _declaration(op: Op) -> str:
    parts, starred = [], False
    for p in op.params:
        if p.keyword_only and not starred:
            parts.append("*")
            starred = True
        parts.append(p.name if p.required else f"{p.name}={p.default!r}")
    if not starred:
        parts.append("*")
    return ", ".join([*parts, *(f"{e}=None" for e in EXTRAS)])


def source(program: KeyProgram, watch_capture: bool = False) -> str:
    """Python text of `call` (look up and run) and `key_of` (the key alone, or None)."""
    op = program.op
    names = ", ".join(p.name for p in op.params)
    body = _key_lines(program, watch_capture)
    call = [
        f"def call({_declaration(op)}):",
        "    while True:",
        "        if backend is not None or policy is not None: break",
        *("        " + line for line in body),
        "        entry = TABLE.get(KEY)",
        f"        if entry is None: return MISS(KEY, ({names},))",
        "        entry.tick()",
        "        try:",
        f"            return entry.run({names})",
        "        except FAULTS as fault:",
        f"            return RECOVER(entry, ({names},), fault)",
        f"    return SLOW(({names},), backend, policy)",
        "",
        f"def key_of({names}):",
        "    while True:",
        *("        " + line for line in body),
        "        return KEY",
        "    return None",
    ]
    return "\n".join(call)


def _key_lines(program: KeyProgram, watch_capture: bool) -> list[str]:
    op = program.op
    wanted: dict[str, set[str]] = {}
    for tensor, fact in program.tensor_facts:
        wanted.setdefault(tensor, set()).add(fact)
    required = [p for p in op.params if p.kind == "tensor" and not p.optional]
    optional = [p for p in op.params if p.kind == "tensor" and p.optional]
    lines = ["if AUTOCAST() or LEVEL() is not None: break"]
    for p in required:
        lines.append(f"if type({p.name}) is not T and type({p.name}) is not P: break")
    lines.append("try:")
    if op.variant:
        word = "if"
        for variant, patterns in op.patterns.items():
            lines.append(f"    {word} {op.variant} == {variant!r}:")
            lines += ["        " + line for line in _shape_lines(patterns, required)]
            word = "elif"
        lines.append("    else: break")
    else:
        lines += ["    " + line for line in _shape_lines(op.patterns[""], required)]
    key = [str(program.id), "OVERRIDE()", "DETERMINISTIC()"]
    first, alike = required[0].name if required else "", [p.name for p in required[1:] if p.name in op.same_dtype]
    if first:
        lines.append(f"    dtype, home = {first}.dtype, {first}.get_device()")
        key += ["dtype", f"{first}.device"]
    for p in required[1:]:
        if p.name in alike:                     # a mixture is the caller's mistake: the slow path says so
            lines.append(f"    if {p.name}.dtype is not dtype or {p.name}.get_device() != home: break")
        else:
            lines.append(f"    if {p.name}.get_device() != home: break")
            key.append(f"{p.name}.dtype")
    key += _together([p.name for p in required], wanted)
    lines += ["    grad = GRAD()"]
    bound = _always_bound(op)
    for p in optional:
        lines += ["    " + line for line in _optional_lines(p, op, wanted, bound)]
        key.append(f"k_{p.name}")
    key.append(_grad_element([p.name for p in required], wanted))
    lines += [f"    d_{f.fact} = {_over_locals(op.derived[f.fact], op)}" for f in program.fields
              if f.fact in op.derived]
    lines.append("except NOT_PLAIN: break")
    key += [p.name for p in op.params if p.kind == "bool"]
    key += [element for f in program.fields if f.fact not in op.by_name for element in _number_elements(f, op)]
    key += _scalars(program)
    if watch_capture and first:
        key.append(f"{first}.is_cuda and CAPTURING()")
    lines.append("KEY = (" + ", ".join(key) + ",)")
    return lines


def _together(names: list[str], wanted: dict[str, set[str]]) -> list[str]:
    """The strides of several tensors in one element: True when all of them are contiguous."""
    out = []
    strided = [n for n in names if wanted.get(n, set()) & {"contiguous", "stride_last"}]
    if strided:
        every = " and ".join(f"{n}.is_contiguous()" for n in strided)
        one_by_one = ", ".join(f"{n}.is_contiguous() or STRIDE_LAST({n})" for n in strided)
        out.append(f"True if {every} else ({one_by_one},)")
    out += [f"ALIGNMENT({n})" for n in names if "alignment" in wanted.get(n, ())]
    out += [f"{n}.ndim" for n in names if "ndim" in wanted.get(n, ())]
    return out


def _grad_element(names: list[str], wanted: dict[str, set[str]]) -> str:
    flags = [f"{n}.requires_grad" for n in names]
    if not flags:
        return "False"
    if any("requires_grad" in wanted.get(n, ()) for n in names):
        return f"({', '.join(flags)},) if grad else False"
    return f"({' or '.join(flags)}) if grad else False"


def _scalars(program: KeyProgram) -> list[str]:
    """Strings and tested numbers in one element, which is None while all of them are at their defaults."""
    op = program.op
    strings = [p for p in op.params if p.kind == "str"]
    fields = [f for f in program.fields if f.fact in op.by_name]
    plain = [p for p in (*strings, *(op.by_name[f.fact] for f in fields)) if not p.required]
    always = [p.name for p in strings if p.required]
    always += [e for f in fields if op.by_name[f.fact].required for e in _number_elements(f, op)]
    if not plain:
        return always
    tests = [f"{p.name} is None" if p.default is None else f"{p.name} == {p.default!r}" for p in plain]
    parts = [p.name for p in strings if not p.required]
    parts += [e for f in fields if not op.by_name[f.fact].required for e in _number_elements(f, op)]
    return [*always, f"None if {' and '.join(tests)} else ({', '.join(parts)},)"]


def _shape_lines(patterns: Any, tensors: list[Param]) -> list[str]:
    """Unpack each shape into d_<size>, and check that sizes named twice agree."""
    lines: list[str] = []
    seen: set[str] = set()
    lead: dict[str, str] = {}
    count = 0
    for p in tensors:
        tokens = patterns.get(p.name)
        if tokens is None:
            continue
        targets, checks = [], []
        if tokens[0].startswith("*"):
            label = tokens[0][1:]
            lines.append(f"s_{p.name} = {p.name}.shape")
            if label in lead:
                lines.append(f"if s_{p.name} != s_{lead[label]}: break")
                continue
            last = f"d_{tokens[-1]}"
            lines += [f"if len(s_{p.name}) < 1: break", f"{last} = s_{p.name}[-1]",
                      f"d_{label} = {p.name}.numel() // {last}"]
            lead[label] = p.name
            seen |= {label, tokens[-1]}
            continue
        for token in tokens:
            if token.isdigit() or token in seen:
                count += 1
                targets.append(f"t{count}")
                checks.append(f"t{count} != {token if token.isdigit() else 'd_' + token}")
            else:
                seen.add(token)
                targets.append(f"d_{token}")
        comma = "," if len(targets) == 1 else ""
        lines.append(f"{', '.join(targets)}{comma} = {p.name}.shape")
        if checks:
            lines.append(f"if {' or '.join(checks)}: break")
    return lines


def _optional_lines(p: Param, op: Op, wanted: dict[str, set[str]], bound: set[str]) -> list[str]:
    tokens = next(iter(op.patterns.values())).get(p.name, ())
    elements = [f"{p.name}.dtype", f"grad and {p.name}.requires_grad", *_together([p.name], wanted)]
    lines = [f"if {p.name} is None:", f"    k_{p.name} = None",
             *(f"    d_{t} = None" for t in tokens if t not in bound and not t.startswith("~") and not t.isdigit()),
             "else:", f"    if type({p.name}) is not T and type({p.name}) is not P: break",
             f"    if {p.name}.get_device() != home: break"]
    if tokens and tokens[0].startswith("~"):
        sizes = ", ".join(f"d_{t[1:]}" for t in tokens)
        lines += [f"    spread = SPREAD({p.name}.shape, ({sizes},))", "    if spread is None: break"]
        elements.append("spread")
    elif tokens:
        fresh = [t for t in tokens if t not in bound and not t.isdigit()]
        if fresh:
            targets = ", ".join(f"d_{t}" if t in fresh else f"x_{t}" for t in tokens)
            lines.append(f"    {targets}{',' if len(tokens) == 1 else ''} = {p.name}.shape")
            lines += [f"    if x_{t} != {t if t.isdigit() else 'd_' + t}: break" for t in tokens if t not in fresh]
            bound.update(fresh)
        else:
            sizes = ", ".join(t if t.isdigit() else f"d_{t}" for t in tokens)
            lines.append(f"    if {p.name}.shape != ({sizes},): break")
    lines.append(f"    k_{p.name} = ({', '.join(elements)},)")
    return lines


def _number_elements(field: NumberField, op: Op) -> list[str]:
    param = op.by_name.get(field.fact)
    x = field.fact if param else f"d_{field.fact}"
    if field.exact:
        return [x]
    tests = [f"{x} == {v!r}" for v in field.equals] + [f"{x} > {v!r}" for v in field.above]
    tests += [f"{x} % {v!r} == 0" for v in field.multiples]
    if not field.bucket:
        parts = tests
    elif not field.multiples and all(v >= len(BUCKETS) for v in (*field.equals, *field.above)):
        beyond = f"({', '.join([f'BUCKET({x})', *tests])},)"       # below the table's end those tests are all false
        parts = [f"B[{x}] if 0 <= {x} < {len(BUCKETS)} else {beyond}"]
    else:
        parts = [f"B[{x}] if 0 <= {x} < {len(BUCKETS)} else BUCKET({x})", *tests]
    may_be_none = param.optional if param else field.fact in op.dims and field.fact not in _always_bound(op)
    return [f"None if {x} is None else ({', '.join(parts or ['0'])},)"] if may_be_none else parts


def _always_bound(op: Op) -> set[str]:
    patterns = next(iter(op.patterns.values()))
    return {t.lstrip("*") for p in op.params if p.kind == "tensor" and not p.optional
            for t in patterns.get(p.name, ())}


def _over_locals(text: str, op: Op) -> str:
    """A derived fact's expression over the local names of the generated code."""
    def local(match: re.Match[str]) -> str:
        name = match.group(0)
        if name in op.derived:
            return f"({_over_locals(op.derived[name], op)})"
        return name if name in op.by_name or name in ("max", "min") else f"d_{name}"

    return re.sub(r"[A-Za-z_]\w*", local, parse(text).source)


def spread(shape: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...] | None:
    """How `shape` broadcasts to `full`: its rank, then for each axis whether it is spread; None if it does not."""
    gap = len(full) - len(shape)
    if gap < 0:
        return None
    out = [len(shape)]
    for size, want in zip(shape, full[gap:]):
        if size == want:
            out.append(0)
        elif size == 1:
            out.append(1)
        else:
            return None
    return tuple(out)


def namespace(override: Callable[[], Any], faults: tuple[type[BaseException], ...]) -> dict[str, Any]:
    """The globals of a generated function. TABLE, MISS, SLOW and RECOVER are the dispatcher's to set."""
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    return {
        "T": Tensor, "P": torch.nn.Parameter, "B": BUCKETS, "BUCKET": bucket, "SPREAD": spread,
        "STRIDE_LAST": lambda t: (stride_last(t),), "ALIGNMENT": alignment, "OVERRIDE": override, "FAULTS": faults,
        "AUTOCAST": torch._C._is_any_autocast_enabled, "LEVEL": torch._C._functorch.maybe_current_level,
        "GRAD": torch.is_grad_enabled, "DETERMINISTIC": torch._C._get_deterministic_algorithms,
        "CAPTURING": capturing, "NOT_PLAIN": (ValueError, RuntimeError, ZeroDivisionError),
    }


def stub(op: Op) -> str:
    """What stands in for `call` until the op is first used, and `values_of`, which orders arguments."""
    names = ", ".join(p.name for p in op.params)
    declared = _declaration(op)
    return "\n".join([
        f"def call({declared}):", f"    return SLOW(({names},), backend, policy)", "",
        f"def values_of({declared}):", f"    return ({names},)"])

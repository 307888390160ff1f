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

from ..machine.faults import SDPA_SWITCHES, sdpa_backends
from ..select.key import KeyProgram, NumberField
from ..spec.expr import parse
from ..spec.grid import bucket
from ..spec.op import INT64, Op, Param
from .facts import TENSOR_READERS, alignment, dtype_name, stride_last

BUCKETS = [bucket(n) for n in range(4097)]      # to the end of a bucket
EXTRAS = ("backend", "policy")
SDPA_ELEMENT = "None if SDPA_0() and SDPA_1() and SDPA_2() and SDPA_3() else SDPA_BACKENDS()"


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
    """Python text of `call` (look up and run), `key_of` (the key alone) and `facts_of`; None: not an ordinary call."""
    op = program.op
    names = ", ".join(p.name for p in op.params)
    body = _key_lines(program, watch_capture)
    here = "_override = OVERRIDE()"
    call = [
        f"def call({_declaration(op)}):",
        "    while True:",
        f"        {here} if backend is None and policy is None else FOR_CALL(backend, policy)",
        *("        " + line for line in body),
        "        _entry = TABLE.get(KEY)",
        f"        if _entry is None: return MISS(KEY, ({names},), backend, policy)",
        "        _entry.tick()",
        "        try:",
        f"            return _entry.run({names})",
        "        except FAULTS as _fault:",
        f"            return RECOVER(_entry, ({names},), _fault)",
        f"    return SLOW(({names},), backend, policy)",
        "",
        f"def key_of({names}):",
        "    while True:",
        f"        {here}",
        *("        " + line for line in body),
        "        return KEY",
        "    return None",
        "",
        f"def facts_of({names}):",
        "    while True:",
        *("        " + line for line in _facts_lines(program, body)),
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
    names = [p.name for p in required]
    lines = ["if AUTOCAST() or LEVEL() is not None: break", *_scalar_checks(op)]
    lines += [f"if type({n}) is not TENSOR and type({n}) is not PARAMETER: break" for n in names]
    lines.append("try:")
    key = [str(program.id), "_override", "DETERMINISTIC()"]
    first = op.main_tensor
    if first:
        lines.append(f"    _dtype, _home = {first}.dtype, {first}.device")
        key += ["_dtype", "_home"]
    for n in names:
        if n == first:
            continue
        if n in op.same_dtype:                  # a mixture is the caller's mistake: the slow path says so
            lines.append(f"    if {n}.dtype is not _dtype or {n}.device != _home: break")
        else:
            lines.append(f"    if {n}.device != _home: break")
            key.append(f"{n}.dtype")
    lines.append("    _grad = GRAD()")
    word = "if"
    for variant, patterns in op.patterns.items():
        shapes = _shape_lines(patterns, required, optional)
        if not op.variant:
            lines += ["    " + line for line in shapes]
            continue
        lines += [f"    {word} {op.variant} == {variant!r}:", *("        " + line for line in shapes)]
        word = "elif"
    if op.variant:
        lines.append("    else: break")
    lines += ["    " + line for line in _strides(names, wanted)]
    key += _tensor_elements(names, wanted)
    for p in optional:
        elements = [f"{p.name}.dtype", f"_grad and {p.name}.requires_grad", *_tensor_elements([p.name], wanted)]
        if _is_spread(p, op):
            elements.append(f"_s_{p.name}")
        lines += [f"    if {p.name} is None: _k_{p.name} = None", "    else:",
                  *("        " + line for line in _strides([p.name], wanted)),
                  f"        _k_{p.name} = ({', '.join(elements)},)"]
        key.append(f"_k_{p.name}")
    key.append(_grad_element(names, wanted))
    lines += [f"    _d_{f.fact} = {_derived(f.fact, op)}" for f in program.fields if f.fact in op.derived]
    if watch_capture and first:                # on a device that is lost the question fails, which Python tells
        lines.append(f"    _graph = {first}.is_cuda and CAPTURING()")
    lines.append("except NOT_PLAIN: break")
    key += [p.name for p in op.params if p.kind == "bool"]
    key += [element for f in program.fields if f.fact not in op.by_name for element in _number_elements(f, op)]
    key += _scalars(program)
    if op.sdpa_switches:
        key.append(SDPA_ELEMENT)
    if watch_capture and first:
        key.append("_graph")
    lines.append("KEY = (" + ", ".join(key) + ",)")
    return lines


def _facts_lines(program: KeyProgram, body: list[str]) -> list[str]:
    """What facts.read would say of an ordinary call, from the same locals as the key."""
    op = program.op
    end = body.index("except NOT_PLAIN: break")
    told = {f.fact for f in program.fields if f.fact in op.derived}
    derived = [f"    _d_{name} = {_derived(name, op)}" for name in op.derived if name not in told]
    known = {p.name: p.name for p in op.params if p.kind in ("bool", "int", "float", "str")}
    known.update({name: f"_d_{name}" for name in (*op.dims, *op.derived)})
    flags = [f"{p.name}.requires_grad" if not p.optional else f"({p.name} is not None and {p.name}.requires_grad)"
             for p in op.params if p.kind == "tensor"]
    known.update(
        dtype="DTYPE_NAME(_dtype)", itemsize="_dtype.itemsize", device="_home.type", tensor_kind="'plain'",
        grad=f"_grad and ({' or '.join(flags)})", deterministic="DETERMINISTIC()",
        graph="_home.type == 'cuda' and CAPTURING()")
    if op.sdpa_switches:
        known["sdpa_backends"] = SDPA_ELEMENT
    patterns = next(iter(op.patterns.values()))
    for p in op.params:
        if p.kind != "tensor":
            continue
        if patterns.get(p.name, ("",))[0].startswith("~"):
            axes = tuple(t[1:] for t in patterns[p.name])
            known[f"{p.name}.broadcast"] = f"None if {p.name} is None else SPREAD_OVER(_s_{p.name}, {axes!r})"
        for fact in (f for f in TENSOR_READERS if f"{p.name}.{f}" in program.needed):
            value = f"READ_{fact}({p.name})"
            known[f"{p.name}.{fact}"] = f"None if {p.name} is None else {value}" if p.optional else value
    entries = ", ".join(f"{name!r}: {text}" for name, text in known.items())
    choices = [f"if {p.name} not in {p.choices!r}: break" for p in op.params if p.choices]
    # Of required tensors the key's own lines ask this; an optional one's dtype is in the key instead.
    mixed = [f"    if {p.name} is not None and {p.name}.dtype is not _dtype: break"
             for p in op.params if p.optional and p.name in op.same_dtype]
    return [*choices, *body[:end], *mixed, *derived, "except NOT_PLAIN: break", f"return {{{entries}}}"]


def _scalar_checks(op: Op) -> list[str]:
    """A value of the wrong type may equal one of the right type: True == 1. The slow path says what was wrong."""
    lines = []
    for kind, exact in (("bool", "bool"), ("int", "int"), ("float", "float"), ("str", "str")):
        own = [p for p in op.params if p.kind == kind]
        given = [p.name for p in own if not p.optional]
        if given:
            plain = " is ".join([f"type({n})" for n in given] + [exact])
            whole = f" and not WHOLE({', '.join(given)})" if kind == "float" else ""
            lines.append(f"if not ({plain}){whole}: break")
        for n in (p.name for p in own if p.optional):
            whole = f" and type({n}) is not int" if kind == "float" else ""
            lines.append(f"if {n} is not None and type({n}) is not {exact}{whole}: break")
    out_of_range = [_out_of_range(op.by_name[n], *limits) for n, limits in op.limits.items()]
    return [*lines, f"if {' or '.join(out_of_range)}: break"] if out_of_range else lines


def _out_of_range(p: Param, low: float, high: float) -> str:
    """Mostly a number is the default, which is in its range: that is asked first. NaN is in none.

    An int that stands for a float is handed to kernels as it is, and they read 64 bits of it.
    """
    within = f"not {low!r} <= {p.name} <= {high!r}"
    if p.kind == "float":
        within = f"({within} or (type({p.name}) is int and not {INT64[0]} <= {p.name} <= {INT64[1]}))"
    if p.optional:
        return f"{p.name} is not None and {within}"
    return within if p.required else f"{p.name} != {p.default!r} and {within}"


def _strides(names: list[str], wanted: dict[str, set[str]]) -> list[str]:
    """_z_<first tensor>: the strides of several tensors in one value, True when all of them are contiguous."""
    strided = [n for n in names if wanted.get(n, set()) & {"contiguous", "stride_last"}]
    lines = [f"if {n}.layout is not STRIDED: break" for n in names]      # mkldnn's says that it is contiguous
    if strided:                                 # of a sparse tensor STRIDE_LAST says that it is not plain
        every = " and ".join(f"{n}.is_contiguous()" for n in strided)
        one_by_one = ", ".join(f"{n}.is_contiguous() or STRIDE_LAST({n})" for n in strided)
        lines.append(f"_z_{strided[0]} = True if {every} else ({one_by_one},)")
    return lines


def _tensor_elements(names: list[str], wanted: dict[str, set[str]]) -> list[str]:
    strided = [n for n in names if wanted.get(n, set()) & {"contiguous", "stride_last"}]
    off_cpu = [n for n in names if "alignment_off_cpu" in wanted.get(n, ()) and "alignment" not in wanted[n]]
    together = ", ".join(f"ALIGNMENT({n})" for n in off_cpu)
    return [*(f"_z_{n}" for n in strided[:1]), *(f"ALIGNMENT({n})" for n in names if "alignment" in wanted.get(n, ())),
            *([f"None if {off_cpu[0]}.is_cpu else ({together},)"] if off_cpu else []),
            *(f"{n}.ndim" for n in names if "ndim" in wanted.get(n, ()))]


def _grad_element(names: list[str], wanted: dict[str, set[str]]) -> str:
    flags = [f"{n}.requires_grad" for n in names]
    if not flags:
        return "False"
    if any("requires_grad" in wanted.get(n, ()) for n in names):
        return f"({', '.join(flags)},) if _grad else False"
    return f"({' or '.join(flags)}) if _grad else False"


def _scalars(program: KeyProgram) -> list[str]:
    """Strings and tested numbers in one element, which is None while all of them are at their defaults.

    A number whose default no rule tells from others stays out of it: it would split keys for nothing.
    """
    op = program.op
    always: list[str] = []
    tests: list[str] = []
    parts: list[str] = []
    fields: list[tuple[Param, NumberField | None]] = [(p, None) for p in op.params if p.kind == "str"]
    fields += [(op.by_name[f.fact], f) for f in program.fields if f.fact in op.by_name]
    for p, f in fields:
        elements = [p.name] if f is None else _number_elements(f, op)
        if p.required or not (f is None or f.exact or p.default is None or p.default in f.equals):
            always += elements
        else:
            tests.append(f"{p.name} is None" if p.default is None else f"{p.name} == {p.default!r}")
            parts += elements
    return [*always, f"None if {' and '.join(tests)} else ({', '.join(parts)},)"] if tests else always


def _is_spread(p: Param, op: Op) -> bool:
    return next(iter(op.patterns.values())).get(p.name, ("",))[0].startswith("~")


def _shape_lines(patterns: Any, required: list[Param], optional: list[Param]) -> list[str]:
    """Unpack each shape into _d_<size>, and check that sizes named twice agree."""
    binder = _Binder(patterns)
    lines = [line for p in required for line in binder.lines(p.name, certain=True)]
    late = dict.fromkeys(t.lstrip("*") for p in optional for t in patterns.get(p.name, ())
                         if t[0] not in "~0123456789" and t.lstrip("*") not in binder.certain)
    lines += [f"_d_{size} = None" for size in late]
    lines += [f"_l_{size} = None" for size in late if any(f"*{size}" in patterns.get(p.name, ()) for p in optional)]
    for p in optional:
        lines += [f"if {p.name} is not None:",
                  f"    if type({p.name}) is not TENSOR and type({p.name}) is not PARAMETER: break",
                  f"    if {p.name}.device != _home: break" if required else "    pass",
                  *("    " + line for line in binder.lines(p.name, certain=False))]
    return lines


class _Binder:
    """Writes the lines that bind the sizes of one tensor after another.

    A size of a required tensor is bound for certain; one that only optional tensors have may be None still.
    """

    def __init__(self, patterns: Any) -> None:
        self.patterns = patterns
        self.certain: set[str] = set()
        self.lead: dict[str, tuple[str, tuple[str, ...]]] = {}     # of required tensors: who has it, and what follows
        self.count = 0

    def lines(self, name: str, certain: bool) -> list[str]:
        tokens: tuple[str, ...] = self.patterns.get(name, ())
        if not tokens:                          # its sizes, which a nested tensor does not have, are not asked for
            return [f"if {name}.is_nested: break"]
        if tokens[0].startswith("~"):
            sizes = ", ".join(f"_d_{t[1:]}" for t in tokens)
            return [f"_s_{name} = SPREAD({name}.shape, ({sizes},))", f"if _s_{name} is None: break"]
        if not tokens[0].startswith("*"):
            return self._unpack(tokens, f"{name}.shape", certain)
        label, tail = tokens[0][1:], tokens[1:]
        lines = [f"_s_{name} = {name}.shape"]
        if label in self.lead and self.lead[label][1] == tail and set(tail) <= self.certain:
            return [*lines, f"if _s_{name} != _s_{self.lead[label][0]}: break"]
        lines.append(f"if len(_s_{name}) < {max(len(tail), 1)}: break")
        if tail:
            lines += self._unpack(tail, f"_s_{name}[-{len(tail)}:]", certain)
        head = f"_s_{name}[:-{len(tail)}]" if tail else f"_s_{name}"
        rows = f"{name}.numel() // ({' * '.join(t if t.isdigit() else f'_d_{t}' for t in tail) or '1'})"
        if label in self.lead:
            first, behind = self.lead[label]
            return [*lines, f"if {head} != _s_{first}{f'[:-{len(behind)}]' if behind else ''}: break"]
        if certain:
            self.lead[label] = name, tail
            self.certain.add(label)
            return [*lines, f"_d_{label} = {rows}"]
        return [*lines, f"if _l_{label} is None: _l_{label}, _d_{label} = {head}, {rows}",
                f"elif {head} != _l_{label}: break"]

    def _unpack(self, tokens: tuple[str, ...], shape: str, certain: bool) -> list[str]:
        targets, checks, late = [], [], []
        for token in tokens:
            if certain and not token.isdigit() and token not in self.certain:
                self.certain.add(token)
                targets.append(f"_d_{token}")
                continue
            self.count += 1
            targets.append(f"_t{self.count}")
            if token.isdigit() or token in self.certain:
                checks.append(f"_t{self.count} != {token if token.isdigit() else '_d_' + token}")
            else:
                late += [f"if _d_{token} is None: _d_{token} = _t{self.count}",
                         f"elif _d_{token} != _t{self.count}: break"]
        lines = [f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {shape}"]
        if checks:
            lines.append(f"if {' or '.join(checks)}: break")
        return lines + late


def _number_elements(field: NumberField, op: Op) -> list[str]:
    param = op.by_name.get(field.fact)
    x = field.fact if param else f"_d_{field.fact}"
    if field.exact:
        return [x]
    bits = field.bits(x)
    if not field.bucket:
        parts = bits
    elif not field.multiples and all(v >= len(BUCKETS) for v in (*field.equals, *field.above)):
        beyond = f"({', '.join([f'BUCKET({x})', *bits])},)"        # below the table's end those bits are all false
        parts = [f"BUCKETS[{x}] if 0 <= {x} < {len(BUCKETS)} else {beyond}"]
    else:
        parts = [f"BUCKETS[{x}] if 0 <= {x} < {len(BUCKETS)} else BUCKET({x})", *bits]
    return [f"None if {x} is None else ({', '.join(parts or ['0'])},)"] if _may_be_none(field.fact, op) else parts


def _may_be_none(fact: str, op: Op) -> bool:
    if fact in op.by_name:
        return op.by_name[fact].optional
    if fact in op.derived:
        return any(_may_be_none(name, op) for name in parse(op.derived[fact]).names)
    return fact in op.dims and not any(
        fact in [t.lstrip("*") for t in patterns.get(p.name, ())]
        for patterns in op.patterns.values() for p in op.params if p.kind == "tensor" and not p.optional)


def _derived(name: str, op: Op) -> str:
    """A derived fact over the local names; None where something it reads is None."""
    unsure = [n for n in _basis(name, op) if _may_be_none(n, op)]
    value = _over_locals(op.derived[name], op)
    if not unsure:
        return value
    absent = " or ".join(f"{n if n in op.by_name else '_d_' + n} is None" for n in unsure)
    return f"None if {absent} else {value}"


def _basis(name: str, op: Op) -> list[str]:
    """The sizes and parameters that a derived fact comes down to."""
    return [base for n in parse(op.derived[name]).names for base in (_basis(n, op) if n in op.derived else [n])]


def _over_locals(text: str, op: Op) -> str:
    """A derived fact's expression over the local names of the generated code."""
    def local(match: re.Match[str]) -> str:
        name = match.group(0)
        if name in op.derived:
            return f"({_over_locals(op.derived[name], op)})"
        return name if name in op.by_name or name in ("max", "min") else f"_d_{name}"

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


def _stride_last(t: Tensor) -> tuple[Any]:
    if t.layout is not torch.strided:
        raise ValueError("not a strided tensor")
    return (stride_last(t),)


def _whole(*values: Any) -> bool:
    return all(type(v) is float or type(v) is int for v in values)


def _spread_over(found: tuple[int, ...], axes: tuple[str, ...]) -> str:
    """The names of the axes that `spread` found a tensor to be broadcast over, as facts.read has it."""
    missing = axes[:len(axes) - found[0]]
    return ",".join([*missing, *(axis for axis, is_spread in zip(axes[len(missing):], found[1:]) if is_spread)])


def namespace(override: Callable[[], Any], for_call: Callable[[str | None, Any], Any],
              faults: tuple[type[BaseException], ...]) -> dict[str, Any]:
    """The globals of a generated function. TABLE, MISS, SLOW and RECOVER are the dispatcher's to set."""
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    return {
        "TENSOR": Tensor, "PARAMETER": torch.nn.Parameter, "BUCKETS": BUCKETS, "BUCKET": bucket, "SPREAD": spread,
        "STRIDED": torch.strided, "STRIDE_LAST": _stride_last, "WHOLE": _whole, "ALIGNMENT": alignment,
        "OVERRIDE": override, "FOR_CALL": for_call, "FAULTS": faults, "DTYPE_NAME": dtype_name,
        "SPREAD_OVER": _spread_over,
        **{f"READ_{fact}": reader for fact, reader in TENSOR_READERS.items()},
        **{f"SDPA_{i}": is_on for i, is_on in enumerate(SDPA_SWITCHES)}, "SDPA_BACKENDS": sdpa_backends,
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
        f"def values_of({declared}):", f"    return ({names},)", "",
        f"values_of.__qualname__ = {op.name!r}"])    # Python names it when the arguments do not fit

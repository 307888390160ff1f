"""The hot path in pure Python: one generated function per op, which is what `lz.<op>` runs on a
hit.

`generate` writes it from the op's key program: it checks that the call is an ordinary one, builds
the key, looks it up in TABLE and runs the kernel of the entry. A key that is not in TABLE goes to
MISS, anything unusual to SLOW, a kernel that throws to RECOVER: all three are methods of
dispatcher.py. `native/fastpath.cpp` does the same in C++.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from ..selection.key import KeyProgram, NumberField
from ..spec.op import INT64, Op, Param
from ..spec.rules.expr import parse
from .facts import TENSOR_READERS
from .generated_globals import BUCKETS

# keywords of every public function, besides those of its op
EXTRAS = ("backend", "policy")
SDPA_ELEMENT = "None if SDPA_0() and SDPA_1() and SDPA_2() and SDPA_3() else SDPA_BACKENDS()"


def generate(program: KeyProgram, watch_capture: bool = False) -> str:
    """Return the Python text of `call` (look up and run), `key_of` (the key alone) and `facts_of`.

    Inside, `break` leaves the ordinary path: `call` goes to SLOW, `key_of` and `facts_of` return
    None.
    """
    op = program.op
    names = ", ".join(p.name for p in op.params)
    body = _key_lines(program, watch_capture)
    read_override = "_override = OVERRIDE()"
    readable = f"if not HAS_MEMORY(({names},)): break"
    call = [
        f"def call({_declaration(op)}):",
        "    while True:",
        f"        {read_override} if backend is None and policy is None else FOR_CALL(backend, "
        "policy)",
        *("        " + line for line in body),
        "        _entry = TABLE.get(KEY)",
        f"        if _entry is None: return MISS(KEY, ({names},), backend, policy)",
        *_memory_lines(op),
        "        _entry.tick()",
        "        try:",
        f"            return _entry.run({names})",
        "        except FAULTS as _fault:",
        f"            return RECOVER(_entry, ({names},), _fault)",
        f"    return SLOW(({names},), backend, policy)",
        "",
        f"def key_of({names}):",
        "    while True:",
        f"        {readable}", f"        {read_override}",
        *("        " + line for line in body),
        "        return KEY",
        "    return None",
        "",
        f"def facts_of({names}):",
        "    while True:", f"        {readable}",
        *("        " + line for line in _facts_lines(program, body)),
        "    return None",
    ]
    return "\n".join(call)


def _memory_lines(op: Op) -> list[str]:
    """Returns the lines that leave a call with freed memory to the slow path, which refuses it:
    torch's own functions read address 0 as well. A negated view is theirs to read."""
    tensors = [p for p in op.params if p.kind == "tensor"]
    if not tensors:
        return []

    addresses = [f"{p.name}.data_ptr()" if not p.optional
                 else f"({p.name} is None or {p.name}.data_ptr())" for p in tensors]
    negated = [f"{p.name}.is_neg()" if not p.optional
               else f"{p.name} is not None and {p.name}.is_neg()" for p in tensors]
    return ["        if _entry.has_addresses:", "            try:",
            f"                if not ({' and '.join(addresses)}): break",
            f"                if _entry.reads_memory and ({' or '.join(negated)}): break",
            "            except NOT_PLAIN: break"]


def generate_stub(op: Op) -> str:
    """Return the text of `call` until the op is first used, and of `values_of`."""
    names = ", ".join(p.name for p in op.params)
    declared = _declaration(op)
    return "\n".join([
        f"def call({declared}):", f"    return SLOW(({names},), backend, policy)", "",
        f"def values_of({declared}):", f"    return ({names},)", "",
        # Python names it when the arguments do not fit
        f"values_of.__qualname__ = {op.name!r}"])


def signature(op: Op) -> inspect.Signature:
    """Return the public signature: the op's own, and `backend=` and `policy=` by keyword."""
    declared = inspect.signature(op.reference)
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in EXTRAS]
    return declared.replace(parameters=[*declared.parameters.values(), *extra])


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


def _key_lines(program: KeyProgram, watch_capture: bool) -> list[str]:
    """Returns the lines that check a call and assign KEY."""
    op = program.op
    tensor_facts: dict[str, set[str]] = {}
    for tensor, fact in program.tensor_facts:
        tensor_facts.setdefault(tensor, set()).add(fact)
    required = [p for p in op.params if p.kind == "tensor" and not p.optional]
    optional = [p for p in op.params if p.kind == "tensor" and p.optional]
    names = [p.name for p in required]
    lines = ["if AUTOCAST() or LEVEL() is not None or FORWARD_AD._current_level >= 0: break",
             *_scalar_checks(op)]
    lines += [f"if type({n}) is not TENSOR and type({n}) is not PARAMETER: break" for n in names]
    lines.append("try:")
    key = [str(program.id), "_override", "DETERMINISTIC()"]
    first = op.main_tensor
    if first:
        lines.append(f"    _dtype, _device = {first}.dtype, {first}.device")
        key += ["_dtype", "_device"]
    for n in names:
        if n == first:
            continue
        # mixed dtypes are the caller's mistake: the slow path says so
        if n in op.same_dtype:
            lines.append(f"    if {n}.dtype is not _dtype or {n}.device != _device: break")
        else:
            lines.append(f"    if {n}.device != _device: break")
            key.append(f"{n}.dtype")
    lines.append("    _grad = GRAD()")
    keyword = "if"
    for variant, patterns in op.patterns.items():
        shapes = _shape_lines(patterns, required, optional)
        if not op.variant:
            lines += ["    " + line for line in shapes]
            continue
        lines += [f"    {keyword} {op.variant} == {variant!r}:",
                  *("        " + line for line in shapes)]
        keyword = "elif"
    if op.variant:
        lines.append("    else: break")
    lines += ["    " + line for line in _stride_lines(names, tensor_facts)]
    key += _tensor_elements(names, tensor_facts)
    for p in optional:
        elements = [f"{p.name}.dtype", f"_grad and {p.name}.requires_grad",
                    *_tensor_elements([p.name], tensor_facts)]
        if _broadcasts(p, op):
            elements.append(f"_s_{p.name}")
        lines += [f"    if {p.name} is None: _k_{p.name} = None", "    else:",
                  *("        " + line for line in _stride_lines([p.name], tensor_facts)),
                  f"        _k_{p.name} = ({', '.join(elements)},)"]
        key.append(f"_k_{p.name}")
    key.append(_grad_element(names, tensor_facts))
    lines += [f"    _d_{f.fact} = {_derived_expression(f.fact, op)}" for f in program.fields
              if f.fact in op.derived]
    # asking a lost device raises: the slow path reports it
    if watch_capture and first:
        lines.append(f"    _graph = {first}.is_cuda and CAPTURING()")
    lines.append("except NOT_PLAIN: break")
    key += [p.name for p in op.params if p.kind == "bool"]
    key += [element for f in program.fields if f.fact not in op.by_name
            for element in _number_elements(f, op)]
    key += _scalar_elements(program)
    if op.sdpa_switches:
        key.append(SDPA_ELEMENT)
    if watch_capture and first:
        key.append("_graph")
    lines.append("KEY = (" + ", ".join(key) + ",)")
    return lines


def _facts_lines(program: KeyProgram, body: list[str]) -> list[str]:
    """Returns the lines that return what facts.read would, from the same locals as the key."""
    op = program.op
    end = body.index("except NOT_PLAIN: break")
    in_key = {f.fact for f in program.fields if f.fact in op.derived}
    derived = [f"    _d_{name} = {_derived_expression(name, op)}" for name in op.derived
               if name not in in_key]
    facts = {p.name: p.name for p in op.params if p.kind in ("bool", "int", "float", "str")}
    facts.update({name: f"_d_{name}" for name in (*op.dims, *op.derived)})
    flags = [f"{p.name}.requires_grad" if not p.optional
             else f"({p.name} is not None and {p.name}.requires_grad)"
             for p in op.params if p.kind == "tensor"]
    facts.update(
        dtype="DTYPE_NAME(_dtype)", itemsize="_dtype.itemsize", device="_device.type",
        tensor_kind="'plain'", grad=f"_grad and ({' or '.join(flags)})",
        deterministic="DETERMINISTIC()", graph="_device.type == 'cuda' and CAPTURING()")
    if op.sdpa_switches:
        facts["sdpa_backends"] = SDPA_ELEMENT
    patterns = next(iter(op.patterns.values()))
    for p in op.params:
        if p.kind != "tensor":
            continue
        if patterns.get(p.name, ("",))[0].startswith("~"):
            axes = tuple(t[1:] for t in patterns[p.name])
            facts[
                f"{p.name}.broadcast"] = (f"None if {p.name} is None else "
                                          f"BROADCAST_AXES(_s_{p.name}, {axes!r})")
        for fact in (f for f in TENSOR_READERS if f"{p.name}.{f}" in program.needed):
            value = f"READ_{fact}({p.name})"
            facts[f"{p.name}.{fact}"] = (f"None if {p.name} is None else {value}" if p.optional
                                         else value)
    entries = ", ".join(f"{name!r}: {text}" for name, text in facts.items())
    choices = [f"if {p.name} not in {p.choices!r}: break" for p in op.params if p.choices]
    # The key lines check this for required tensors; an optional one's dtype is in the key.
    mixed = [f"    if {p.name} is not None and {p.name}.dtype is not _dtype: break"
             for p in op.params if p.optional and p.name in op.same_dtype]
    return [*choices, *body[:end], *mixed, *derived, "except NOT_PLAIN: break",
            f"return {{{entries}}}"]


def _scalar_checks(op: Op) -> list[str]:
    """Returns the lines that check types and ranges of plain values: True == 1 in a key."""
    lines = []
    for kind in ("bool", "int", "float", "str"):
        params = [p for p in op.params if p.kind == kind]
        required = [p.name for p in params if not p.optional]
        if required:
            same_type = " is ".join([f"type({n})" for n in required] + [kind])
            or_int = f" and not NUMBERS({', '.join(required)})" if kind == "float" else ""
            lines.append(f"if not ({same_type}){or_int}: break")
        for n in (p.name for p in params if p.optional):
            or_int = f" and type({n}) is not int" if kind == "float" else ""
            lines.append(f"if {n} is not None and type({n}) is not {kind}{or_int}: break")
    out_of_range = [_out_of_range(op.by_name[n], *limits) for n, limits in op.limits.items()]
    return [*lines, f"if {' or '.join(out_of_range)}: break"] if out_of_range else lines


def _out_of_range(p: Param, low: float, high: float) -> str:
    """Returns the test that a number is out of its range; NaN is in none. The default, which is in
    range, is tested first.

    An int given for a float is passed to kernels as it is, and they read 64 bits of it.
    """
    outside = f"not {low!r} <= {p.name} <= {high!r}"
    if p.kind == "float":
        outside = (f"({outside} or (type({p.name}) is int and not {INT64[0]} <= {p.name} <= "
                   f"{INT64[1]}))")
    if p.optional:
        return f"{p.name} is not None and {outside}"
    return outside if p.required else f"{p.name} != {p.default!r} and {outside}"


def _stride_lines(names: list[str], tensor_facts: dict[str, set[str]]) -> list[str]:
    """Returns the lines that assign _z_<first tensor>: True if all are contiguous, else strides."""
    strided = [n for n in names if tensor_facts.get(n, set()) & {"contiguous", "stride_last"}]
    # an mkldnn tensor calls itself contiguous
    lines = [f"if {n}.layout is not STRIDED: break" for n in names]
    if strided:                                 # STRIDE_LAST raises for a sparse tensor
        every = " and ".join(f"{n}.is_contiguous()" for n in strided)
        one_by_one = ", ".join(f"{n}.is_contiguous() or STRIDE_LAST({n})" for n in strided)
        lines.append(f"_z_{strided[0]} = True if {every} else ({one_by_one},)")
    return lines


def _tensor_elements(names: list[str], tensor_facts: dict[str, set[str]]) -> list[str]:
    strided = [n for n in names if tensor_facts.get(n, set()) & {"contiguous", "stride_last"}]
    off_cpu = [n for n in names if "alignment_off_cpu" in tensor_facts.get(n, ())
               and "alignment" not in tensor_facts[n]]
    together = ", ".join(f"ALIGNMENT({n})" for n in off_cpu)
    return [*(f"_z_{n}" for n in strided[:1]),
            *(f"ALIGNMENT({n})" for n in names if "alignment" in tensor_facts.get(n, ())),
            *([f"None if {off_cpu[0]}.is_cpu else ({together},)"] if off_cpu else []),
            *(f"{n}.ndim" for n in names if "ndim" in tensor_facts.get(n, ()))]


def _grad_element(names: list[str], tensor_facts: dict[str, set[str]]) -> str:
    flags = [f"{n}.requires_grad" for n in names]
    if not flags:
        return "False"
    if any("requires_grad" in tensor_facts.get(n, ()) for n in names):
        return f"({', '.join(flags)},) if _grad else False"
    return f"({' or '.join(flags)}) if _grad else False"


def _scalar_elements(program: KeyProgram) -> list[str]:
    """Returns the elements for strings and numbers that rules test: one, which is None if all are
    at their defaults.

    A number whose default no rule tells apart from other values stays an element of its own: in the
    shared one it would split keys for nothing.
    """
    op = program.op
    always: list[str] = []
    tests: list[str] = []
    parts: list[str] = []
    fields: list[tuple[Param, NumberField | None]] = [(p, None) for p in op.params
                                                      if p.kind == "str"]
    fields += [(op.by_name[f.fact], f) for f in program.fields if f.fact in op.by_name]
    for p, f in fields:
        elements = [p.name] if f is None else _number_elements(f, op)
        if p.required or not (f is None or f.exact or p.default is None or p.default in f.equals):
            always += elements
        else:
            tests.append(f"{p.name} is None" if p.default is None else f"{p.name} == {p.default!r}")
            parts += elements
    return ([*always, f"None if {' and '.join(tests)} else ({', '.join(parts)},)"] if tests
            else always)


def _broadcasts(p: Param, op: Op) -> bool:
    return next(iter(op.patterns.values())).get(p.name, ("",))[0].startswith("~")


def _shape_lines(patterns: Any, required: list[Param], optional: list[Param]) -> list[str]:
    """Returns the lines that unpack shapes into _d_<size> and check sizes named twice."""
    binder = _SizeBinder(patterns)
    lines = [line for p in required for line in binder.lines(p.name, certain=True)]
    unbound = dict.fromkeys(t.lstrip("*") for p in optional for t in patterns.get(p.name, ())
                            if t[0] not in "~0123456789" and t.lstrip("*") not in binder.certain)
    lines += [f"_d_{size} = None" for size in unbound]
    lines += [f"_l_{size} = None" for size in unbound
              if any(f"*{size}" in patterns.get(p.name, ()) for p in optional)]
    for p in optional:
        lines += [f"if {p.name} is not None:",
                  f"    if type({p.name}) is not TENSOR and type({p.name}) is not PARAMETER: break",
                  f"    if {p.name}.device != _device: break" if required else "    pass",
                  *("    " + line for line in binder.lines(p.name, certain=False))]
    return lines


class _SizeBinder:
    """Writes the lines that bind the sizes of one tensor after another. A size of a required tensor
    is certain to be bound; one that only optional tensors have may be None."""

    def __init__(self, patterns: Any) -> None:
        self.patterns = patterns
        self.certain: set[str] = set()
        # leading shape -> a required tensor, its other sizes
        self.lead: dict[str, tuple[str, tuple[str, ...]]] = {}
        self.count = 0

    def lines(self, name: str, certain: bool) -> list[str]:
        tokens: tuple[str, ...] = self.patterns.get(name, ())
        # no size is read, so nothing else would refuse a nested tensor
        if not tokens:
            return [f"if {name}.is_nested: break"]
        if tokens[0].startswith("~"):
            sizes = ", ".join(f"_d_{t[1:]}" for t in tokens)
            return [f"_s_{name} = BROADCAST({name}.shape, ({sizes},))",
                    f"if _s_{name} is None: break"]
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
        rows = (f"{name}.numel() // "
                f"({' * '.join(t if t.isdigit() else f'_d_{t}' for t in tail) or '1'})")
        if label in self.lead:
            first, first_tail = self.lead[label]
            return [*lines,
                    f"if {head} != _s_{first}{f'[:-{len(first_tail)}]' if first_tail else ''}: "
                    "break"]
        if certain:
            self.lead[label] = name, tail
            self.certain.add(label)
            return [*lines, f"_d_{label} = {rows}"]
        return [*lines, f"if _l_{label} is None: _l_{label}, _d_{label} = {head}, {rows}",
                f"elif {head} != _l_{label}: break"]

    def _unpack(self, tokens: tuple[str, ...], shape: str, certain: bool) -> list[str]:
        targets, checks, if_unbound = [], [], []
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
                if_unbound += [f"if _d_{token} is None: _d_{token} = _t{self.count}",
                               f"elif _d_{token} != _t{self.count}: break"]
        lines = [f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {shape}"]
        if checks:
            lines.append(f"if {' or '.join(checks)}: break")
        return lines + if_unbound


def _number_elements(field: NumberField, op: Op) -> list[str]:
    param = op.by_name.get(field.fact)
    x = field.fact if param else f"_d_{field.fact}"
    if field.exact:
        return [x]
    bits = field.bits(x)
    if not field.bucket:
        parts = bits
    elif not field.multiples and all(v >= len(BUCKETS) for v in (*field.equals, *field.above)):
        # below the table's end those bits are all false
        beyond = f"({', '.join([f'BUCKET({x})', *bits])},)"
        parts = [f"BUCKETS[{x}] if 0 <= {x} < {len(BUCKETS)} else {beyond}"]
    else:
        parts = [f"BUCKETS[{x}] if 0 <= {x} < {len(BUCKETS)} else BUCKET({x})", *bits]
    return ([f"None if {x} is None else ({', '.join(parts or ['0'])},)"]
            if _may_be_none(field.fact, op) else parts)


def _may_be_none(fact: str, op: Op) -> bool:
    if fact in op.by_name:
        return op.by_name[fact].optional
    if fact in op.derived:
        return any(_may_be_none(name, op) for name in parse(op.derived[fact]).names)
    return fact in op.dims and not any(
        fact in [t.lstrip("*") for t in patterns.get(p.name, ())]
        for patterns in op.patterns.values() for p in op.params if p.kind == "tensor"
        and not p.optional)


def _derived_expression(name: str, op: Op) -> str:
    """Returns the expression of a derived fact over local names; None where it reads a None."""
    may_be_none = [n for n in _base_facts(name, op) if _may_be_none(n, op)]
    value = _with_local_names(op.derived[name], op)
    if not may_be_none:
        return value
    absent = " or ".join(f"{n if n in op.by_name else '_d_' + n} is None" for n in may_be_none)
    return f"None if {absent} else {value}"


def _base_facts(name: str, op: Op) -> list[str]:
    """Returns the sizes and parameters that a derived fact is computed from."""
    return [base for n in parse(op.derived[name]).names
            for base in (_base_facts(n, op) if n in op.derived else [n])]


def _with_local_names(text: str, op: Op) -> str:
    """Write an expression over facts with the local names of the generated code."""
    def local(match: re.Match[str]) -> str:
        name = match.group(0)
        if name in op.derived:
            return f"({_with_local_names(op.derived[name], op)})"
        return name if name in op.by_name or name in ("max", "min") else f"_d_{name}"

    return re.sub(r"[A-Za-z_]\w*", local, parse(text).source)

"""Our own operations as definitions: one of an operation's cases becomes axes, inputs, outputs and
a reference.

The sizes that an operation keeps exactly are const axes, the others are variable. Tensors and
numbers are inputs; what the schema has no type for (a choice such as layout="bshd", an argument
that is None) is fixed in the reference.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...operate.inspection import dispatcher_of
from ...spec.errors import DataError
from ...spec.op import Op
from ..kernel.contract import case_values, results_of
from .definition import DTYPES, Axis, Definition, TensorSpec

_NUMBERS = {bool: "bool", int: "int32", float: "float32"}


def export(op: Op | str, case: Mapping[str, Any] | None = None,
           dtype: str = "float32") -> Definition:
    """Returns a definition of one case of the operation, the first if none is given. DataError
    names an argument or a dtype that the schema has no type for."""
    declared = dispatcher_of(op).op if isinstance(op, str) else op
    if declared.read is not None:
        raise DataError(
            f"lz.{declared.name} takes arguments that are no tensors; a definition has no type for "
            "them")
    case = dict(declared.cases[0] if case is None else case)
    values = case_values(declared, case, dtype)
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in values.items() if type(v) in _NUMBERS}
    fixed = {n: v for n, v in values.items() if n not in tensors and n not in numbers}
    for name, tensor in tensors.items():
        _schema_dtype(declared, name, tensor)
    results = results_of(declared.meta(**values))
    sizes: dict[str, int] = {}
    variant = values[declared.variant] if declared.variant else ""
    shapes = {n: _axis_names(declared.patterns[variant].get(n, ()), t, n, sizes)
              for n, t in tensors.items()}
    patterns = declared.result_patterns.get(variant, ())
    names = ["output"] if len(results) == 1 else [f"output_{i}" for i in range(len(results))]
    outs = {n: _axis_names(patterns[i] if i < len(patterns) else (), t, n, sizes)
            for i, (n, t) in enumerate(zip(names, results))}
    # of one tensor alone: the operation has no name for it
    own = {n for n in sizes if re.search(r"_dim\d+$", n)}
    fixed_axes = {n for n in sizes if n in declared.exact} | own
    inputs = {n: TensorSpec(shapes[n], _schema_dtype(declared, n, tensors[n])) if n in tensors
              else TensorSpec(None, _NUMBERS[type(numbers[n])]) for n in values if n in tensors
              or n in numbers}
    suffix = "_".join(f"{n}{sizes[n]}" for n in sizes if n in fixed_axes - own)
    return Definition(
        f"lz_{declared.name}_{dtype}" + (f"_{suffix}" if suffix else ""), declared.name,
        {n: Axis(size if n in fixed_axes else None) for n, size in sizes.items()}, inputs,
        {n: TensorSpec(outs[n], _schema_dtype(declared, n, t)) for n, t in zip(names, results)},
        _reference(declared, list(inputs), fixed),
        ("status:reference", f"lz_op:{declared.name}", f"lz_dtype:{dtype}",
         f"lz_case:{json.dumps(case)}"),
        " ".join((declared.reference.__doc__ or declared.name).split("\n\n")[0].split()))


def _schema_dtype(op: Op, name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise DataError(f"lz.{op.name}: {name} is {dtype}; the schema has {', '.join(DTYPES)}")
    return dtype


def _axis_names(tokens: Sequence[str], tensor: Tensor, owner: str,
                sizes: dict[str, int]) -> tuple[str, ...]:
    """Returns the names of a tensor's axes, and adds their sizes to `sizes`. An axis whose name has
    another size elsewhere, as a broadcast one, gets a name of its own."""
    names: list[str] = []
    spare = tensor.dim() - sum(not t.startswith("*") for t in tokens)
    for token in tokens:
        if token.startswith("*"):
            base = token[1:]
            names += [base] if spare == 1 else [f"{base}_{i}" for i in range(max(spare, 0))]
        else:
            names.append(token.lstrip("~"))
    if len(names) != tensor.dim():
        names = [""] * tensor.dim()
    axes = []
    for i, (name, size) in enumerate(zip(names, tensor.shape)):
        if not name.isidentifier() or sizes.get(name, size) != size:
            name = f"{owner}_dim{i}"
        sizes[name] = size
        axes.append(name)
    return tuple(axes)


def _reference(op: Op, inputs: Sequence[str], fixed: Mapping[str, Any]) -> str:
    arguments = "".join(f"{n}={n}, " for n in inputs)
    return (
        f"import torch\n\nfrom {op.reference.__module__} import reference\n\nFIXED = "
        f"{dict(fixed)!r}\n\n\n@torch.no_grad()\ndef run({', '.join(inputs)}):\n    return "
        f"reference({arguments}**FIXED)\n")


def fixed_arguments(definition: Definition) -> dict[str, Any]:
    """Returns the arguments that an exported reference fixes, read without running it."""
    for node in ast.parse(definition.reference).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FIXED":
            fixed: dict[str, Any] = ast.literal_eval(node.value)
            return fixed
    return {}


def case_inputs(definition: Definition, seed: int, device: str) -> dict[str, Any]:
    """Returns the inputs of the case that the definition was made of."""
    op = dispatcher_of(definition.tag("lz_op")).op
    case = {k: tuple(v) if isinstance(v, list) else v
            for k, v in json.loads(definition.tag("lz_case")).items()}
    values = case_values(op, case, definition.tag("lz_dtype"), device, seed)
    return {n: values[n].to(device) if isinstance(values[n], torch.Tensor) else values[n]
            for n in definition.inputs}

"""A solution becomes a kernel: it serves the calls of an operation that its definition describes,
and no others.

What the definition fixes (const axes, dtypes, an epsilon) becomes the kernel's rules. Its code runs
in this process, so its file must lie in a folder that the user trusts, and its results must agree
with the operation before it is added.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...machine.faults import FAULTS
from ...operate.inspection import dispatcher_of
from ...spec.errors import RegistrationError
from ...spec.kernel import Kernel
from ...spec.op import Op, Param
from ...spec.reason import Code
from ...spec.rules import Condition, absent, device, dtypes, equals
from ...world import snapshot as worlds
from ..comparison import compare, tolerance_of
from .answers.answer import Answer
from .answers.lookup import answers
from .definition import Definition, Solution
from .inputs.generation import generate

# alive as long as what was imported from them
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def register(solution: Solution, definition: Definition, trusted: Sequence[str | Path] = (), *,
             run_on: str = "cpu") -> Kernel:
    """Check the solution against its definition at a small size and add it as a kernel."""
    kernel = kernel_of(solution, definition, trusted)
    answer = _direct(solution, definition)
    inputs = generate(definition, device=run_on)
    want = answer(inputs)
    try:
        got = _call_traced(solution, definition, entry_of(solution), list(inputs.values()), want)
    except FAULTS as e:
        raise RegistrationError(
            f"solution {solution.name!r} raised {type(e).__name__} when it was tried: {e}") from e
    limits = tolerance_of(s.dtype
                          for s in (*definition.inputs.values(), *definition.outputs.values()))
    wrong = [v for name, value in zip(definition.outputs, got)
             if not (v := compare(name, value, want[name], limits)).passed]
    if wrong:
        raise RegistrationError(
            f"solution {solution.name!r} does not compute {definition.name}: {wrong[0]}")
    worlds.register(kernel, f"solution {solution.name}")
    return kernel


def kernel_of(solution: Solution, definition: Definition,
              trusted: Sequence[str | Path] = ()) -> Kernel:
    """The declaration; RegistrationError says why there can be none."""
    if solution.definition != definition.name:
        raise RegistrationError(
            f"solution {solution.name!r} is for {solution.definition}, not for {definition.name}")
    if solution.spec.language not in ("python", "triton"):
        raise RegistrationError(
            f"solution {solution.name!r} is written in {solution.spec.language}; "
            "python and triton can be registered")
    home = solution.origin.resolve() if solution.origin else None
    if home is None or not any(home.is_relative_to(Path(folder).resolve()) for folder in trusted):
        where = (f"{solution.origin} lies in no folder that you trust" if home
                 else "it was read from no file")
        raise RegistrationError(
            f"solution {solution.name!r} is not run: {where}; name its folder as trusted if you "
            "have read what it does")
    answer = _direct(solution, definition)
    op = dispatcher_of(answer.ops[0]).op
    params = [p for p in op.params if p.name in answer.params or p.name in answer.fixed]
    kinds = ([kind for kind in ("cpu", "cuda")
              if kind in " ".join(solution.spec.target_hardware).lower()] or ["cuda"])
    slug = re.sub(r"[^a-z0-9_]", "_", solution.name.lower())
    return Kernel(
        f"solution.{slug}", op, lambda: _adapt(solution, definition, answer, op, params),
        requires=(device(*kinds), *_rules(op, definition, answer)), differentiable=False,
        traceable=False, graph_safe=False,
        note=f"the solution {solution.name} by {solution.author}")


def _direct(solution: Solution, definition: Definition) -> Answer:
    answer = answers(definition)[0]
    if not answer.params or answer.random:
        raise RegistrationError(
            f"solution {solution.name!r}: the inputs of {definition.name} are not the parameters "
            f"of lz.{answer.ops[-1]} one for one ({answer}); a kernel must take the operation's "
            "own")
    return answer


def _rules(op: Op, definition: Definition, answer: Answer) -> list[Condition]:
    rules: list[Condition] = []
    patterns = next(iter(op.patterns.values()))
    for param, name in answer.params.items():
        spec = definition.inputs[name]
        if spec.shape is None:
            continue
        of = "dtype" if param == op.main_tensor else f"{param}.dtype"
        rules.append(dtypes(spec.dtype, of=of))
        for token, axis in zip(reversed(patterns.get(param, ())), reversed(spec.shape)):
            if token.startswith("*"):
                rules.append(equals(f"{param}.ndim", len(spec.shape), Code.WRONG_NDIM))
                break
            if axis in definition.const_axes and token.isidentifier():
                rules.append(equals(token, definition.const_axes[axis], Code.SHAPE_UNSUPPORTED))
    for p in op.params:
        if p.name in answer.params:
            continue
        if p.kind == "tensor":
            rules.append(absent(f"{p.name}.dtype"))
        elif p.kind in ("bool", "int", "float", "str"):
            rules.append(equals(p.name, answer.fixed.get(p.name, p.default)))
    return list(dict.fromkeys(rules))


def _adapt(solution: Solution, definition: Definition, answer: Answer, op: Op,
           params: Sequence[Param]
           ) -> Callable[..., Any]:
    """The dispatcher's call: the op's parameters by name, handed on in the solution's order."""
    entry, signature = entry_of(solution), inspect.signature(op.reference)
    of_input = {name: param for param, name in answer.params.items()}
    op_signature = signature.replace(parameters=[signature.parameters[p.name] for p in params],
                              return_annotation=inspect.Signature.empty)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = op_signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        everything = {p.name: values.get(p.name, p.default) for p in op.params}
        shaped = op.meta(**everything)
        like = dict(zip(definition.outputs, shaped if isinstance(shaped, (tuple, list))
                        else (shaped,)))
        results = _call_traced(solution, definition, entry,
                               [values[of_input[n]] for n in definition.inputs], like)
        return tuple(results) if isinstance(shaped, (tuple, list)) else results[0]

    run.__signature__ = op_signature  # type: ignore[attr-defined]
    return run


def _call_traced(solution: Solution, definition: Definition, entry: Callable[..., Any],
                 arguments: Sequence[Any], like: dict[str, torch.Tensor]) -> list[Any]:
    """Run it in its own style; `like` has the shapes of the outputs."""
    if solution.spec.destination_passing_style:
        outputs = [torch.empty_like(like[n]) for n in definition.outputs]
        entry(*arguments, *outputs)
        return outputs
    results = entry(*arguments)
    if isinstance(results, dict):
        return [results[n] for n in definition.outputs]
    return list(results) if isinstance(results, (tuple, list)) else [results]


def entry_of(solution: Solution) -> Callable[..., Any]:
    """Write its sources to a folder, import the entry file from there, and give the function."""
    folder = tempfile.TemporaryDirectory(prefix="lz-solution-")
    _FOLDERS.append(folder)
    for source in solution.sources:
        path = Path(folder.name) / source.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.content, encoding="utf-8")
    name = f"lz_solution_{solution.digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, Path(folder.name) / solution.entry_file)
    if spec is None or spec.loader is None:
        raise RegistrationError(
            f"solution {solution.name!r}: {solution.entry_file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder.name)            # so that its files find each other
    try:
        spec.loader.exec_module(module)
    except FAULTS as e:
        raise RegistrationError(
            f"solution {solution.name!r} cannot be imported: {type(e).__name__}: {e}") from e
    finally:
        sys.path.remove(folder.name)
    function = getattr(module, solution.entry_function, None)
    if not callable(function):
        raise RegistrationError(
            f"solution {solution.name!r}: {solution.entry_file} has no function "
            f"{solution.entry_function!r}")
    entry: Callable[..., Any] = function
    return entry

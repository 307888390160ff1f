"""One way to compute a definition with lz, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....operate.inspection import dispatcher_of, which
from ....spec.event import Fallback
from ....world.events import subscribe
from ..definition import Definition
from ..readings import Unmapped
from ..statements import Statement, contradictions, disagreements, words

Inputs = Mapping[str, Any]
Outputs = dict[str, Any]
QUERY = r"q|query|queries"


@dataclass(frozen=True)
class Answer:
    """One way to compute a definition with lz; `reading` is how open points were understood."""

    definition: Definition
    ops: tuple[str, ...]
    text: str
    compute: Callable[[Inputs], Outputs]
    reading: Mapping[str, Any] = field(default_factory=dict)
    # what sort of computation it is, for other libraries to do the same
    kind: str = ""
    roles: Mapping[str, Any] = field(default_factory=dict)      # which input plays which part in it
    # of the op -> inputs, where each is just passed on
    params: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)      # the op's other parameters
    # the outputs are draws: only their distribution can be compared
    random: bool = False
    statements: Mapping[str, Statement] = field(default_factory=dict)   # what its text says

    def __call__(self, inputs: Inputs) -> Outputs:
        """The outputs by name, in the dtypes that the definition asks for."""
        missing = [name for name in self.definition.inputs if name not in inputs]
        if missing:
            raise Unmapped(
                f"{self.definition.name} needs the inputs {', '.join(self.definition.inputs)}; "
                f"{', '.join(missing)} not given")
        with torch.no_grad():
            results = self.compute(inputs)
        specs = self.definition.outputs
        return {name: results[name].to(getattr(torch, spec.dtype)) for name, spec in specs.items()}

    @property
    def contradictions(self) -> tuple[str, ...]:
        """What the text says otherwise: a sentence each."""
        return contradictions(self.reading, self.statements)

    @property
    def disagreements(self) -> tuple[str, ...]:
        """On what name, tags and description differ: a sentence each."""
        return disagreements(self.reading, self.statements)

    @property
    def assumed(self) -> str:
        """The options of which the text says nothing, in words."""
        return ", ".join(words(k, v) for k, v in self.reading.items()
                         if k not in self.statements and k != "packed")

    def __str__(self) -> str:
        options = ", ".join(f"n_group={v[0]}, topk_group={v[1]}" if k == "groups" else f"{k}={v}"
                            for k, v in self.reading.items())
        return self.text + (f" [{options}]" if options else "")


_served: ContextVar[list[str] | None] = ContextVar("served", default=None)


def lz(op: str, /, **arguments: Any) -> Any:
    """The public function of an operation."""
    noted = _served.get()
    if noted is not None:
        noted.append(which(op, **arguments))
    return dispatcher_of(op).public(**arguments)


@contextmanager
def serving() -> Iterator[list[str]]:
    """The kernels that serve the lz calls of a block; a failed one with its replacement."""
    noted: list[str] = []
    token = _served.set(noted)
    stop = subscribe(lambda e: noted.append(f"{e.kernel} failed, {e.served_by} served")
                     if isinstance(e, Fallback) else None)
    try:
        yield noted
    finally:
        stop()
        _served.reset(token)


def number(x: Inputs, name: str, default: Any = None) -> Any:
    """A scalar input as a Python number; the default where the definition has none."""
    value = x[name] if name else default
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def call_text(op: str, *names: str, **options: Any) -> str:
    """The call as a line: the inputs that it passes on by position, and by parameter."""
    given = [f"{k}={v}" for k, v in options.items() if v not in ("", None)]
    return f"lz.{op}({', '.join([*filter(None, names), *given])})"


def with_reading(compute: Callable[[Inputs, Mapping[str, Any]], Outputs], reading: Mapping[str, Any]
                 ) -> Callable[[Inputs], Outputs]:
    return lambda x: compute(x, reading)

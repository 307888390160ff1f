"""The public functions of operations, by name."""

from __future__ import annotations

from typing import Any

from ...operate.inspection import dispatcher_of


def call_op(op: str, /, **arguments: Any) -> Any:
    """Call the public function of an operation."""
    return dispatcher_of(op).public(**arguments)


class PublicCalls:
    """The `do` of a Decoder: calls the public functions, without recording the kernels."""

    kernel = ""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    def __call__(self, op: str, /, **arguments: Any) -> Any:
        function = self._functions.get(op)
        if function is None:
            function = self._functions[op] = dispatcher_of(op).public
        return function(**arguments)

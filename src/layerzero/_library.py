"""What `import layerzero` brings beside the names: torch, the dispatcher, the ops of
torch.ops.layerzero.

The `lz` command leaves it out until a command runs: torch takes seconds to import, help needs none
of it.
"""

from __future__ import annotations

import copyreg
import importlib
import os
import sys
from typing import Any

from .dispatch import dispatcher, torch_library
from .operate.inspection import dispatcher_of
from .ops import CATALOG as OPS
from .spec.errors import RegistrationError
from .spec.kernel import Kernel
from .spec.op import Op
from .world import snapshot as worlds
from .world.registry import catalog


def op(name: str) -> Op:
    """Return the declaration of an operation."""
    if name in OPS:
        return catalog.builtin_op(name)
    return dispatcher_of(name).op


def register(item: Op | Kernel) -> Any:
    """Add an operation (returns its public function, also lz.<name>) or a kernel of one."""
    if isinstance(item, Op):
        torch_library.check(item)
    worlds.register(item)
    if isinstance(item, Op):
        fn = dispatcher.public_function(item)
        try:
            torch_library.define(item)
        except RegistrationError:
            worlds.unregister(item.name)
            raise
        return fn
    return item


def unregister(name: str) -> None:
    """Remove an operation, a kernel, all kernels of a backend, or all that a plugin brought, by
    name."""
    worlds.unregister(name)


def _reduce(item: Op) -> Any:
    """Let copy and pickle name a registered op: reading it gives the same object."""
    known = item.name in OPS or (worlds.exists() and item.name in worlds.current().catalog.ops)
    return (op, (item.name,)) if known and op(item.name) is item else item.__reduce_ex__(4)


copyreg.pickle(Op, _reduce)


def clear_cache() -> None:
    """Drop every remembered choice."""
    worlds.forget()


def builtin(name: str) -> Any:
    """Return the public function of one of our own operations, from then on an attribute of lz."""
    declared = catalog.builtin_op(name)
    function = dispatcher.public_function(declared)
    setattr(sys.modules["layerzero"], name, function)      # before torch asks for it
    torch_library.define(declared)
    return function


def public_function(declared: Op) -> Any:
    """Return the public function of an operation, which torch knows from then on."""
    function = dispatcher.public_function(declared)
    torch_library.define(declared)
    return function


torch_library.install(OPS, builtin)
if os.environ.get("LAYERZERO_RECORD", "").strip():
    importlib.import_module("layerzero.operate.recording").from_environment()
if os.environ.get("LAYERZERO_AUTO", "").strip():
    importlib.import_module("layerzero.integrations.auto").from_environment()

"""What `import layerzero` brings beside the names: torch, the dispatcher, the ops of
torch.ops.layerzero.

The `lz` command leaves it out until a command runs: torch takes seconds to import, help needs none
of it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .dispatch import dispatcher, torch_library
from .ops import CATALOG as OPS
from .spec.op import Op
from .world import catalog
from .world import snapshot as worlds


def builtin(name: str) -> Any:
    """Return the public function of one of our own operations, from then on an attribute of lz."""
    op = catalog.builtin_op(name)
    function = dispatcher.public_function(op)
    setattr(sys.modules["layerzero"], name, function)      # before torch asks for it
    torch_library.define(op)
    return function


def public_function(op: Op) -> Any:
    """Return the public function of an operation, which torch knows from then on."""
    function = dispatcher.public_function(op)
    torch_library.define(op)
    return function


torch_library.install(OPS, builtin)
if os.environ.get("LAYERZERO_RECORD", "").strip():
    importlib.import_module("layerzero.operate.recording").from_environment()

__all__ = ["OPS", "builtin", "catalog", "dispatcher", "public_function", "torch_library", "worlds"]

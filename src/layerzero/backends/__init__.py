"""Who computes it: one file (or folder) per library, each a tuple `KERNELS` of declarations.

Every module of this folder is a backend, but for those whose name begins with an underscore. Importing one
imports no library: that happens in a kernel's `load`, on first selection.
"""

from __future__ import annotations

import pkgutil

CATALOG = tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_")))

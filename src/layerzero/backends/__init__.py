"""The backends: one file (or folder) per library, each with a tuple `KERNELS` of declarations.

Every module of this folder is a backend, except those whose name begins with an underscore.
Importing one imports no library: that happens in a kernel's `load`, when it is first selected.
"""

from __future__ import annotations

import pkgutil

CATALOG = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)
                       if not module.name.startswith("_")))

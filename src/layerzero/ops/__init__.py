"""What is computed: one file per operation, and nothing else needs to know of it.

Every file of this folder declares one operation, `OP`, under the name of the file. What several operations
are computed with is in formulas/.
"""

import pkgutil

CATALOG = tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg))

"""The operations, one file each; nothing else needs to know of a new one.

Every file of this folder declares one operation, `OP`, named like the file. Formulas that several
operations share are in formulas/.
"""

import pkgutil

CATALOG = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)
                       if not module.ispkg))

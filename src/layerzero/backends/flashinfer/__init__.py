"""FlashInfer. Compiles each module with nvcc on first use, for a dtype, a head dimension, with or
without a window.

That takes 10 to 90 seconds once; later the module comes from FlashInfer's own cache. `compiled`
lists what is there.
"""

from __future__ import annotations

from .common import compiled as compiled
from .dense import KERNELS as _DENSE
from .paged import KERNELS as _PAGED

KERNELS = (*_DENSE, *_PAGED)

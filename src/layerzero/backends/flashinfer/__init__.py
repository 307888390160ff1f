"""FlashInfer. Compiles each module with nvcc on first use, for a dtype, a head dimension, a window or none.

That takes 10 to 90 seconds once; then it is found in FlashInfer's own cache, and `compiled` says which are there.
"""

from __future__ import annotations

from .common import compiled as compiled
from .dense import KERNELS as _DENSE
from .paged import KERNELS as _BATCHES

KERNELS = (*_DENSE, *_BATCHES)

"""Every error and warning that LayerZero raises; `help(lz.errors.LayerZeroError)` is the base."""

from .spec import errors as _tree
from .spec.errors import (
    AmbiguousLayoutWarning,
    BackendNotAvailableError,
    CacheCorruptionError,
    CacheFull,
    CausalAlignmentWarning,
    ConfigError,
    CudaGraphUnsafeError,
    DataError,
    DeviceLost,
    InputDamaged,
    InvalidArgumentType,
    InvalidCall,
    KernelExecutionError,
    LayerZeroError,
    NamedKernelRefused,
    NoKernelFoundError,
    PolicyValidationError,
    RanksError,
    RegistrationError,
    SelectionTimeoutError,
    SpecError,
)

__doc__ = _tree.__doc__                        # the drawing of the tree

__all__ = [
    "AmbiguousLayoutWarning",
    "BackendNotAvailableError",
    "CacheCorruptionError",
    "CacheFull",
    "CausalAlignmentWarning",
    "ConfigError",
    "CudaGraphUnsafeError",
    "DataError",
    "DeviceLost",
    "InputDamaged",
    "InvalidArgumentType",
    "InvalidCall",
    "KernelExecutionError",
    "LayerZeroError",
    "NamedKernelRefused",
    "NoKernelFoundError",
    "PolicyValidationError",
    "RanksError",
    "RegistrationError",
    "SelectionTimeoutError",
    "SpecError",
]

"""Bring your own kernels: declare arguments, wrap Triton functions, load from the Kernel Hub."""

from .integrations.hub import Hub, HubError
from .operate.triton_kernels import triton_cache, triton_kernel, triton_kernels
from .spec.device import GPUGeneration
from .spec.kernel import Const, direct
from .world.capabilities import use as use_capabilities

__all__ = ["Const", "GPUGeneration", "Hub", "HubError", "direct", "triton_cache", "triton_kernel",
           "triton_kernels", "use_capabilities"]

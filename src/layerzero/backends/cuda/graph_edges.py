"""Edges of a captured graph over which a kernel begins while the one before it ends.

The kernel must wait by itself for what was launched before it (griddepcontrol.wait) ahead of the
first thing that it reads or writes of others; `spec.replay.waiting` has those that do. What comes
before may be any kernel: it is over, and what it wrote is visible, when the wait is. Weights of
linear layers are read before the wait (linear/rows.cu): no kernel of the graph may write them.
"""

from __future__ import annotations

from collections.abc import Set
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint, c_void_p

from . import compiler

KERNEL_NODE = 0                                # CU_GRAPH_NODE_TYPE_KERNEL


class Edge(Structure):
    """CUgraphEdgeData."""

    _fields_ = [("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte),
                ("reserved", c_ubyte * 5)]


# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, the default, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
PROGRAMMATIC = 1, 0, 1


class KernelNode(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3),
                ("shared", c_uint), ("params", c_void_p), ("extra", c_void_p),
                ("kernel", c_void_p), ("context", c_void_p)]


def overlap(graph: int, waiting: Set[int]) -> int:
    """Make the edges from any kernel to one of `waiting` (handles of functions) programmatic;
    return how many there are. The graph is not instantiated yet."""
    driver = compiler.driver()
    if not hasattr(driver, "cuGraphAddDependencies_v2"):       # drivers before 12.3
        return 0
    for name in ("cuGraphGetEdges_v2", "cuGraphRemoveDependencies_v2", "cuGraphAddDependencies_v2"):
        getattr(driver, name).argtypes = (
            c_void_p, POINTER(c_void_p), POINTER(c_void_p), POINTER(Edge),
            POINTER(c_size_t) if "Get" in name else c_size_t)
    count = c_size_t()
    _check(driver.cuGraphGetEdges_v2(graph, None, None, None, byref(count)))
    if not count.value:                        # a single kernel; the driver takes no empty lists
        return 0
    before, after = (c_void_p * count.value)(), (c_void_p * count.value)()
    edges = (Edge * count.value)()
    _check(driver.cuGraphGetEdges_v2(graph, before, after, edges, byref(count)))
    changed = [(a, b) for a, b, edge in zip(before, after, edges)
               if not edge.type and _function(a) is not None and _function(b) in waiting]
    n = len(changed)
    if not n:
        return 0
    sources, targets = (c_void_p * n)(*(a for a, _ in changed)), (c_void_p * n)(
        *(b for _, b in changed))
    _check(driver.cuGraphRemoveDependencies_v2(graph, sources, targets, (Edge * n)(), n))
    _check(driver.cuGraphAddDependencies_v2(graph, sources, targets,
                                            (Edge * n)(*[Edge(*PROGRAMMATIC)] * n), n))
    return n


def _function(node: int) -> int | None:
    """Returns the function of a kernel node, 0 if the driver knows none; None of other nodes."""
    driver, kind, params = compiler.driver(), c_int(-1), KernelNode()
    _check(driver.cuGraphNodeGetType(c_void_p(node), byref(kind)))
    if kind.value != KERNEL_NODE:
        return None
    _check(driver.cuGraphKernelNodeGetParams_v2(c_void_p(node), byref(params)))
    return params.function or 0


def _check(code: int) -> None:
    if code:
        raise compiler.failure(code, "changing the edges of a captured graph")

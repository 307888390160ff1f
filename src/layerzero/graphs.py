"""CUDA graphs: warm up, capture, and prove that a kernel or a function can be captured."""

from .operate.graphs import graph, warmup_capture
from .verify.certification.capture import is_graph_safe, validate_graph_capture

__all__ = ["graph", "is_graph_safe", "validate_graph_capture", "warmup_capture"]

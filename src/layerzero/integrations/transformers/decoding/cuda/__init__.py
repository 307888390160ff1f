"""The decode step on a CUDA device: a captured graph, or one persistent kernel."""

"""Threads beside the calls: compiling, and learning which kernel is fastest."""

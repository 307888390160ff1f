"""Quantized linear layers for few rows, where the time is that of reading the weight."""

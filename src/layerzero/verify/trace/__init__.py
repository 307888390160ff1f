"""Definitions, workloads and solutions of others, in the FlashInfer-Trace schema."""

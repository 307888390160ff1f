"""What is computed: one file per operation. A file in this folder that defines `OP` is an operation."""

CATALOG = ("attention", "varlen_attention", "rms_norm", "add_rms_norm", "layer_norm")

"""What is computed: one file per operation. A file in this folder that defines `OP` is an operation."""

CATALOG = (
    "attention", "varlen_attention", "paged_attention", "mla_paged_attention",
    "rms_norm", "add_rms_norm", "layer_norm", "group_norm",
    "rope", "alibi", "embedding", "cross_entropy", "linear_cross_entropy",
    "sample", "speculative_verify", "speculative_verify_tree",
    "linear", "quantized_linear", "mlp", "grouped_gemm", "quantize", "dequantize", "moe_gate", "moe",
    "tokenize", "detokenize",
)

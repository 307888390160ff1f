"""What several operations are computed with. No file here is an operation."""

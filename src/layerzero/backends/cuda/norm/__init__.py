"""RMS norm of few rows, with and without a residual add."""

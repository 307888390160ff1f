"""One token through a whole decoder in one launch of a persistent kernel (step.cu)."""

"""Level 1: every call of a kernel against the contract of its operation."""

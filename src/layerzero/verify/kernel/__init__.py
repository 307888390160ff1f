"""Level 1: every kernel against the contract of its operation."""

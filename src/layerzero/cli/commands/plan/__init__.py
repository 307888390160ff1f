"""Choose ahead of time."""

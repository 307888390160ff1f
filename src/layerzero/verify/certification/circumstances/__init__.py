"""Ways in which a case may be run: memory, values, state and earlier calls."""

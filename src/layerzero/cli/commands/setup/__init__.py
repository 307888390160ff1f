"""Set up."""

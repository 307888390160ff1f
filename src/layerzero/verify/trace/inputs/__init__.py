"""Inputs for a definition: sizes that its constraints allow, numbers that show mistakes."""

"""Calls a kernel again with one thing changed: each file asks about one cause."""

"""Measure what is fastest here."""

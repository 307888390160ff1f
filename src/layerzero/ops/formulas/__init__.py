"""Formulas that several operations share. No file here declares an operation."""

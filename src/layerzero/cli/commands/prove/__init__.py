"""Prove the answers."""

"""Attention of few queries over many keys: decode steps over a dense, paged or shared cache."""

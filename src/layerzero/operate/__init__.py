"""Asking and preparing: explain, record, warm up, capture graphs, be ready."""

"""Benchmarks: a package per question, ``python -m benchmarks.NAME``."""

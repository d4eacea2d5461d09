"""Tests, by the package that they test; `support` is what they have in common with benchmarks and scripts."""

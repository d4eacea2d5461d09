"""Tests, by the package that they test; `support` is shared with benchmarks and scripts."""

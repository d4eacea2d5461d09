"""Savings of a shared cache, from a log of requests: ``sglang-ext estimate``."""

"""Agents: what of a turn the next one repeats."""

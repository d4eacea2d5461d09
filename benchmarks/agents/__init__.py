"""Agents: the part of a turn that the next one repeats."""

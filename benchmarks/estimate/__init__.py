"""Estimated hit shares beside those of real servers."""

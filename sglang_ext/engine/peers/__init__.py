"""Fetching KV from other instances, and exporting ours to them."""

"""Keeping a copy of an instance's tree: placement events, their stream, and the reader's replica."""

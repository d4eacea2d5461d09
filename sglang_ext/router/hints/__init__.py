"""Advisory requests: from what clients announce to a place and a prefetch."""

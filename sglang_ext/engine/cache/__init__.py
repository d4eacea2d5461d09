"""The cache of one rank as a whole: its lifecycle, its metrics."""

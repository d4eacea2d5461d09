"""The disk tier: append-only segments, found through LMDB, verified on every read."""

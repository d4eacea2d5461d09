"""Blocks between HBM, DRAM and disk: write-through, promotion, loading in front of the forward pass."""

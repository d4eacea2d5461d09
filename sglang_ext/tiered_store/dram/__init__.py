"""The DRAM arena: one mapping, cut into blocks."""

"""Memory below HBM for models with windows or recurrent states: components by name, in DRAM and on disk."""

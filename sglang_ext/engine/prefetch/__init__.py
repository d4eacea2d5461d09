"""Advisory requests at an instance: KV is brought to HBM before its request arrives."""

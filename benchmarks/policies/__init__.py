"""Time to first token and reuse of every routing policy, over a simulated fleet."""

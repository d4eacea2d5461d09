"""Loading layer by layer in front of the forward pass, and writing behind it."""

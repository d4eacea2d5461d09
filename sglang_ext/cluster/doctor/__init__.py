"""``sglang-ext doctor``: what is wrong with a machine, a disk tier's directory, or the way to a peer."""

"""``sglang-ext doctor``: problems of a machine, a disk tier's directory, or the way to a peer."""

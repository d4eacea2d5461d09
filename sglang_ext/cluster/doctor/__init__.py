"""``sglang-ext doctor``: problems of a machine, a disk tier's directory, the way to a peer, or a model."""

"""``sglang-ext gpu-check``: whether this machine's GPU serves with the shared cache, and how fast."""

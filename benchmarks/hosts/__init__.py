"""The cost of latency and loss between hosts, and the share of it that concurrent requests hide."""

"""What latency and loss between hosts cost, and what requests in flight hide of it."""

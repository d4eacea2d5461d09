"""One-sided reads, beside the limits and other transfer engines."""

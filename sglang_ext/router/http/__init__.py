"""HTTP/1.1: both sides of it, without a framework in between."""

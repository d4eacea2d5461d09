"""What the router costs a request, and how much of the caches it brings to use."""

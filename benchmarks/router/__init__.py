"""The router's cost per request, and the share of the caches that it puts to use."""

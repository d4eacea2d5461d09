"""Admission of requests: keys, tenants, limits, and the reserved fields of a request."""

"""Choosing an instance, waiting for a place, sending the request on, moving it to another."""

"""Servers and stand-ins that tests start, and what they must not leave behind."""

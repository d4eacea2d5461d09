"""Servers and stand-ins that tests start, and the resources that they must not leave behind."""

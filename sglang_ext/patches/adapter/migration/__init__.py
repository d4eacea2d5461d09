"""Requests that go on at another instance, and those that come from one."""

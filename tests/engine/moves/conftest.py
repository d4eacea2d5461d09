"""Servers that exchange KV, for the tests of this folder."""

from peer_rig import servers

__all__ = ["servers"]

"""What one holder has, counted, and what of it goes first."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.radix_global.eviction import EvictionQueue


@dataclass(slots=True)
class Usage:
    """Counters of one holder, kept in step with the tree's nodes."""

    queue: EvictionQueue
    nodes: int = 0
    blocks: int = 0
    locked: int = 0
    """Blocks it has that are locked for it."""

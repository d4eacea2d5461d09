"""Evict the least frequently used block first; among equals, the least recently used.

    sglang-ext serve --kv-eviction-policy eviction:least_frequently_used …

The number that comes first must never shrink while a block is cached, as uses and times of use do not.
"""

from __future__ import annotations

from sglang_ext.radix_global.eviction import Candidate


def least_frequently_used(node: Candidate) -> tuple[float, ...]:
    """Fewest uses first."""
    return (node.hits, node.last_access)

"""Eviction policies: which block a tier gives up first.

A policy maps a node to a sort key; the smallest goes first. The tree keeps candidates in a heap and
re-reads a key only when its node comes up, so a node's key may grow over time but never shrink.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Candidate(Protocol):
    """What a policy may look at."""

    last_access: float
    hits: int
    priority: int


EvictionPolicy = Callable[[Candidate], tuple[float, ...]]

PROTECTED_HITS = 2
"""Uses after which a node belongs to the protected segment of SLRU."""


def lru(node: Candidate) -> tuple[float, ...]:
    """Least recently used first."""
    return (node.last_access,)


def slru(node: Candidate) -> tuple[float, ...]:
    """Segmented LRU: what was used only once goes before what was used again.

    A scan of prompts that never come back then cannot push out what is shared.
    """
    return (float(node.hits >= PROTECTED_HITS), node.last_access)


def priority(node: Candidate) -> tuple[float, ...]:
    """Lowest request priority first, then least recently used."""
    return (float(node.priority), node.last_access)


POLICIES: dict[str, EvictionPolicy] = {"lru": lru, "slru": slru, "priority": priority}


def policy_by_name(name: str) -> EvictionPolicy:
    """The policy of that name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown eviction policy {name!r}; choose one of {', '.join(POLICIES)}") from None

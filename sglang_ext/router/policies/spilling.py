"""Which prefixes an instance whose DRAM is full has another one keep (KVDirect, section 7: idle memory).

An instance that is about to evict a prefix from its last tier *spills* it: another one, whose DRAM is free to
a good part, reads it and keeps it, where it is found and fetched back or used. `spills` chooses what, from
whom and where to:

- What: prefixes that were used again or that belong to a session, of which no other copy is safe (on a
  disk, or in the memory of an instance that is not full), and that are among the coldest of the full one.
- From whom: an instance is full when what it holds for itself takes up ``full`` of its DRAM. What it keeps
  for others does not count, as that goes first.
- Where to: an instance that is not full itself, up to its limit (``--kv-dram-for-others``) and up to ``idle``
  of its DRAM. Between ``idle`` and ``full`` an instance neither spills nor keeps more, so that no two of them
  pass blocks to and fro.
- For whom: what a tenant has kept for it is bounded, over all instances.

Pure, as all policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

LEAST_BLOCKS: Final = 4
"""Shorter prefixes are computed about as soon as they are moved."""
MUCH: Final = 7 / 8
"""Of what an instance holds of a prefix: a copy of so much of it elsewhere is as good."""
COLD: Final = 1 / 4
"""Of an instance's DRAM: only what is among the coldest of so much of it is spilled."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The DRAM of an instance as its heartbeat tells it, in blocks. spilled: of those used, what it keeps for
    others; limit: how much it may. in_flight: requests."""

    name: str
    used: int
    size: int
    spilled: int = 0
    limit: int = 0
    in_flight: int = 0

    @property
    def own(self) -> int:
        """What it holds for itself."""
        return self.used - self.spilled


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prompt of a conversation. held: how many of its leading blocks each instance has in memory.
    durable: how many some instance has on disk."""

    id: int
    tenant: str
    held: Mapping[str, int]
    durable: int = 0


@dataclass(frozen=True, slots=True)
class SpillTerms:
    """See the module's docstring. tenant_blocks: of one tenant; 0 for no spilling at all. most: spills that
    begin in one round."""

    IDLE: ClassVar = 5 / 6
    """Of ``full``: where ``idle`` is by default."""

    full: float = 0.9
    idle: float = 0.75
    tenant_blocks: int = 4096
    most: int = 4

    def is_full(self, memory: Memory) -> bool:
        """Whether an instance is about to evict what is its own."""
        return memory.size > 0 and memory.own >= self.full * memory.size

    def takes(self, memory: Memory) -> int:
        """Blocks that an instance keeps for others at most, as it is now."""
        if self.is_full(memory):
            return 0
        return max(0, min(memory.limit, int(self.idle * memory.size) - memory.own))


@dataclass(frozen=True, slots=True)
class Spill:
    """``target`` is to read from ``source`` the leading ``blocks`` blocks of a prefix, of which it lacks
    ``new``."""

    prefix: Prefix
    source: str
    target: str
    blocks: int
    new: int


@dataclass(frozen=True, slots=True)
class Round:
    """What is to be spilled now, and how many prefixes are not although they should be, by why."""

    spills: list[Spill] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)


NO_ROOM: Final = "no-room"
TENANT_BUDGET: Final = "tenant-budget"


def spills(
    memories: Sequence[Memory],
    prefixes: Iterable[Prefix],
    taken: Mapping[str, int],
    terms: SpillTerms,
    can_fetch: Callable[[str, str], bool],
) -> Round:
    """What is spilled.

    Args:
        memories: of all instances.
        prefixes: of conversations that may go on, the coldest first.
        taken: blocks that are kept for each tenant, those on their way included.
        can_fetch: (source, target).
    """
    found = Round()
    full = {memory.name: memory for memory in memories if terms.is_full(memory)}
    free = {memory.name: terms.takes(memory) for memory in memories}
    taken = Counter(taken)
    seen: Counter[str] = Counter()
    left = set(full)
    for prefix in prefixes:
        if len(found.spills) >= terms.most or not left:
            break
        source = max((name for name in prefix.held if name in full), key=prefix.held.__getitem__, default="")
        if source not in left:
            continue
        blocks = prefix.held[source]
        seen[source] += blocks
        if seen[source] > max(blocks, COLD * full[source].size):
            left.discard(source)  # what follows is warmer
            continue
        others = [each.name for each in memories if each.name not in full]
        if blocks < LEAST_BLOCKS or _is_safe(prefix, blocks, others):
            continue
        targets = [each for each in memories if each.name not in full and can_fetch(source, each.name)]
        target = _best(targets, prefix, blocks, free)
        if target is None:
            found.left[NO_ROOM] += 1
            continue
        new = blocks - prefix.held.get(target, 0)
        if taken[prefix.tenant] + new > terms.tenant_blocks:
            found.left[TENANT_BUDGET] += 1
            continue
        taken[prefix.tenant] += new
        free[target] -= new
        found.spills.append(Spill(prefix, source, target, blocks, new))
    return found


def _is_safe(prefix: Prefix, blocks: int, others: Sequence[str]) -> bool:
    """Whether it is not lost when the full instances evict it. others: instances that are not full; what one
    is believed to hold that tells nothing of its memory cannot be relied on."""
    elsewhere = max((prefix.held.get(name, 0) for name in others), default=0)
    return max(elsewhere, prefix.durable) >= MUCH * blocks


def _best(targets: Sequence[Memory], prefix: Prefix, blocks: int, free: Mapping[str, int]) -> str | None:
    """Who keeps it: for whom nothing that is kept longer has to go, then who is least busy, then emptiest."""
    fitting = [each for each in targets if blocks - prefix.held.get(each.name, 0) <= free[each.name]]

    def rank(memory: Memory) -> tuple[object, ...]:
        new = blocks - prefix.held.get(memory.name, 0)
        return (memory.spilled + new > memory.limit, memory.in_flight, memory.used / memory.size, memory.name)

    return min(fitting, key=rank).name if fitting else None

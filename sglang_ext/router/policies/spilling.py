"""Spilling: prefixes that a full instance moves to another one's DRAM (KVDirect, section 7: idle memory).

An instance that is about to evict a prefix from its last tier *spills* it: another instance with enough free
DRAM reads the prefix and keeps it. Requests use it there or fetch it back. `spills` chooses the prefix, the
source and the target:

- Prefix: it was used again or belongs to a session, has no other safe copy (on a disk, or in the memory of an
  instance that is not full), and is among the coldest of the source.
- Source: an instance is full when its own blocks take up ``full`` of its DRAM. Blocks that it keeps for
  others do not count, because they are evicted first.
- Target: an instance that is not full itself, up to its limit (``--kv-dram-size``, for-others) and up to
  ``idle`` of its DRAM. Between ``idle`` and ``full`` an instance neither spills nor keeps more, so that no
  two instances pass blocks to and fro.
- Tenant: the spilled blocks of a tenant are bounded, over all instances. Of the prefixes that may be spilled,
  the coldest of the tenant with the fewest spilled blocks goes first.

Pure, like all policies.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

LEAST_BLOCKS: Final = 4
"""Computing a shorter prefix takes about as long as moving it."""
MUCH: Final = 7 / 8
"""Share of an instance's part of a prefix: a copy of this share elsewhere counts as a safe copy."""
COLD: Final = 1 / 4
"""Share of an instance's DRAM: only its coldest blocks up to this share are spilled."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The DRAM of an instance from its heartbeat, in blocks. spilled: used blocks that it keeps for other
    instances; limit: the most of these. in_flight: requests."""

    name: str
    used: int
    size: int
    spilled: int = 0
    limit: int = 0
    in_flight: int = 0

    @property
    def own(self) -> int:
        """Used blocks that are the instance's own."""
        return self.used - self.spilled


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prompt of a conversation. held: leading blocks that each instance has in memory. durable: the
    most leading blocks that one instance has on disk."""

    id: int
    tenant: str
    held: Mapping[str, int]
    durable: int = 0


@dataclass(frozen=True, slots=True)
class SpillTerms:
    """See the module's docstring. tenant_blocks: the most spilled blocks of one tenant; 0 turns spilling off.
    most: spills that begin in one round."""

    IDLE: ClassVar = 5 / 6
    """Default of ``idle``, as a share of ``full``."""

    full: float = 0.9
    idle: float = 0.75
    tenant_blocks: int = 4096
    most: int = 4

    def is_full(self, memory: Memory) -> bool:
        """Whether an instance is about to evict its own blocks."""
        return memory.size > 0 and memory.own >= self.full * memory.size

    def takes(self, memory: Memory) -> int:
        """The most blocks that an instance keeps for others at its present use."""
        if self.is_full(memory):
            return 0
        return max(0, min(memory.limit, int(self.idle * memory.size) - memory.own))


@dataclass(frozen=True, slots=True)
class Spill:
    """``target`` is to read the leading ``blocks`` blocks of a prefix from ``source``; it lacks ``new`` of
    them."""

    prefix: Prefix
    source: str
    target: str
    blocks: int
    new: int


@dataclass(frozen=True, slots=True)
class Round:
    """The spills to begin now, and the number of prefixes that could not be spilled, by reason."""

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
    """Choose the spills of one round.

    Args:
        prefixes: of conversations that may continue, the coldest first.
        taken: spilled blocks of each tenant, including transfers under way.
        can_fetch: (source, target).
    """
    found = Round()
    full = {memory.name: memory for memory in memories if terms.is_full(memory)}
    free = {memory.name: terms.takes(memory) for memory in memories}
    taken = Counter(taken)
    for prefix, source in _in_turns(_candidates(prefixes, memories, full), taken):
        if len(found.spills) >= terms.most:
            break
        blocks = prefix.held[source]
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


Candidate = tuple[Prefix, str]
"""A prefix and its source."""


def _candidates(
    prefixes: Iterable[Prefix], memories: Sequence[Memory], full: Mapping[str, Memory]
) -> Iterator[Candidate]:
    """Prefixes that full instances are about to evict, and that have no other safe copy. Coldest first."""
    others = [each.name for each in memories if each.name not in full]
    seen: Counter[str] = Counter()
    left = set(full)
    for prefix in prefixes:
        if not left:
            return
        source = max((name for name in prefix.held if name in full), key=prefix.held.__getitem__, default="")
        if source not in left:
            continue
        blocks = prefix.held[source]
        seen[source] += blocks
        if seen[source] > max(blocks, COLD * full[source].size):
            left.discard(source)  # all later prefixes are warmer
        elif blocks >= LEAST_BLOCKS and not _is_safe(prefix, blocks, others):
            yield prefix, source


def _in_turns(candidates: Iterable[Candidate], taken: Mapping[str, int]) -> Iterator[Candidate]:
    """Each time the first candidate of the tenant that has the fewest blocks in ``taken``, which may grow
    meanwhile; of several tenants, the one whose candidate comes first."""
    lines: dict[str, deque[tuple[int, Candidate]]] = {}
    for place, candidate in enumerate(candidates):
        lines.setdefault(candidate[0].tenant, deque()).append((place, candidate))
    heap = [(taken.get(tenant, 0), line[0][0], tenant) for tenant, line in lines.items()]
    heapq.heapify(heap)
    while heap:
        tenant = heap[0][2]
        line = lines[tenant]
        yield line.popleft()[1]
        if line:
            heapq.heapreplace(heap, (taken.get(tenant, 0), line[0][0], tenant))
        else:
            heapq.heappop(heap)


def _is_safe(prefix: Prefix, blocks: int, others: Sequence[str]) -> bool:
    """Whether a copy survives when the full instances evict the prefix. others: instances that are not full;
    an instance without a memory report does not count, since its copies may vanish at any time."""
    elsewhere = max((prefix.held.get(name, 0) for name in others), default=0)
    return max(elsewhere, prefix.durable) >= MUCH * blocks


def _best(targets: Sequence[Memory], prefix: Prefix, blocks: int, free: Mapping[str, int]) -> str | None:
    """The target: first by whether it stays within its limit, then the least busy, then the emptiest."""
    fitting = [each for each in targets if blocks - prefix.held.get(each.name, 0) <= free[each.name]]

    def rank(memory: Memory) -> tuple[object, ...]:
        new = blocks - prefix.held.get(memory.name, 0)
        return (memory.spilled + new > memory.limit, memory.in_flight, memory.used / memory.size, memory.name)

    return min(fitting, key=rank).name if fitting else None

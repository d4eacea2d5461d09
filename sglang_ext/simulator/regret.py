"""Regret: the tokens that an oracle would have reused, beside those that were reused.

The oracle has one cache with the capacity of all instances' HBM and DRAM, knows all requests to come, and
gives up the block that is used again last (Belady), of blocks used in the same request the one farther behind
first, so that it keeps whole prefixes. An infinite cache lacks a block at its first use only.

Of many requests, a sample of the blocks is followed, by their names (SHARDS: Waldspurger, Park, Garthwaite
and Ahmad, 2015), in a cache that is smaller by the same factor.
"""

from __future__ import annotations

import array
import heapq
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global.edges import common_blocks
from sglang_ext.simulator.settings import BLOCK_TOKENS

MOST_ACCESSES: Final = 1_000_000
"""Uses of blocks that are followed; more are sampled."""
EXPECTED_BLOCKS: Final = 200
"""Blocks of a request, by which the sample is chosen before there is any."""
REMEMBERED: Final = 20_000
"""Sessions whose names are kept for their next turn."""
FIRST_BLOCKS: Final = 1024
"""Beginnings of sessions that are kept for the next session that begins so."""
_STEP: Final = BLOCK_TOKENS * TOKEN_BYTES
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 62) - 1


@dataclass(frozen=True)
class Regret:
    """Tokens that would have been reused: by the oracle, and by an infinite cache."""

    oracle_tokens: float
    infinite_tokens: float


class Uses:
    """The uses of blocks by requests, in the order in which the router has admitted them.

    Args:
        requests: how many will come, about.
    """

    def __init__(self, requests: int) -> None:
        self.one_in = max(1, -(-requests * EXPECTED_BLOCKS // MOST_ACCESSES))
        """One of so many blocks is followed."""
        self._names: array.array[int] = array.array("q")
        self._ends: array.array[int] = array.array("q")
        """Of each request, the uses up to its prompt's end, and up to its answer's end."""
        self._known: OrderedDict[str, tuple[bytes, int, list[int]]] = OrderedDict()
        """Session -> its last turn's tokens, hash of all of its blocks, and the names followed."""
        self._firsts: OrderedDict[tuple[int, bytes], tuple[bytes, array.array[int]]] = OrderedDict()
        """Tenant and first block -> the last first request that began so, and the hash up to each block."""

    def add(self, session: str, tenant: int, key: bytes, answer: bytes) -> None:
        """A request was admitted. The last token of a prompt is always computed."""
        known = self._known.pop(session, None)
        end = (len(key) - TOKEN_BYTES) // _STEP * _STEP
        if known is not None and key.startswith(known[0]):
            before, chain, names = known
            chain, names, at = _followed(key, len(before), end, chain, names, self.one_in)
        else:
            chain, names, at = self._first(tenant, key, end)
        self._names.extend(names)
        self._ends.append(len(self._names))
        whole = key + answer
        prompt = len(names)
        end = (len(whole) - TOKEN_BYTES) // _STEP * _STEP
        chain, names, at = _followed(whole, at, end, chain, names, self.one_in)
        self._names.extend(names[prompt:])
        self._ends.append(len(self._names))
        self._known[session] = whole[:at], chain, names
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def _first(self, tenant: int, key: bytes, end: int) -> tuple[int, list[int], int]:
        """As `_followed`, for the first request of a session, which often begins as another one does."""
        kind = (tenant, key[:_STEP])
        like, hashes = self._firsts.pop(kind, (b"", array.array("q")))
        shared = min(common_blocks(like, key, 0, _STEP), len(hashes), end // _STEP) if like else 0
        hashes, chain = hashes[:shared], hashes[shared - 1] if shared else tenant
        view = memoryview(key)
        for at in range(shared * _STEP, end, _STEP):
            chain = (chain * _MIX + zlib.crc32(view[at : at + _STEP]) + 1) & _MASK
            hashes.append(chain)
        self._firsts[kind] = key, hashes
        if len(self._firsts) > FIRST_BLOCKS:
            self._firsts.popitem(last=False)
        return chain, [each for each in hashes if (each >> 20) % self.one_in == 0], end

    def regret(self, blocks: int) -> Regret:
        """Tokens that caches of so many blocks in all would have reused, and an infinite one."""
        oracle, infinite = belady(self._names, self._ends, max(1, blocks // self.one_in))
        unit = self.one_in * BLOCK_TOKENS
        return Regret(oracle * unit, infinite * unit)


def _followed(
    key: bytes, start: int, end: int, chain: int, names: list[int], one_in: int
) -> tuple[int, list[int], int]:
    """The chain and the names of the followed blocks of ``key[:end]``, of which those before ``start`` are
    known."""
    found = list(names)
    view = memoryview(key)
    for at in range(start, end, _STEP):
        chain = (chain * _MIX + zlib.crc32(view[at : at + _STEP]) + 1) & _MASK
        # The upper bits depend on all before.
        if (chain >> 20) % one_in == 0:
            found.append(chain)
    return chain, found, max(start, end)


def belady(names: array.array[int], ends: array.array[int], capacity: int) -> tuple[int, int]:
    """Blocks of prompts that an oracle's cache and an infinite cache would have had.

    Args:
        names: of the blocks that requests use: of each its prompt's, then its answer's.
        ends: of each request, where its prompt's names end, and where its answer's do.
        capacity: blocks.
    """
    never = len(ends)
    following = array.array("q", bytes(8 * len(names)))
    """Of each use, the request whose prompt has the block next."""
    last: dict[int, int] = {}
    for request in range(never // 2 - 1, -1, -1):
        first = ends[2 * request - 1] if request else 0
        for place in range(ends[2 * request + 1] - 1, first - 1, -1):
            following[place] = last.get(names[place], never)
        for place in range(ends[2 * request], ends[2 * request + 1]):
            last.pop(names[place], None)  # an answer makes it anew: until then it is of no use
        for place in range(first, ends[2 * request]):
            last[names[place]] = request
    oracle = infinite = 0
    seen: set[int] = set()
    held: dict[int, tuple[int, int, int]] = {}
    """Name -> (next use, place in the prompt, name), the first two negative: the block that is used again
    last comes first."""
    heap: list[tuple[int, int, int]] | None = None
    """Of those in ``held``, and former ones; None until the cache has been full."""
    for request in range(never // 2):
        first, prompt_end, end = (
            ends[2 * request - 1] if request else 0,
            ends[2 * request],
            ends[2 * request + 1],
        )
        for place in range(first, end):
            name = names[place]
            if place < prompt_end:
                oracle += name in held
                infinite += name in seen
            seen.add(name)
            use = following[place]
            if use == never:
                held.pop(name, None)
                continue
            held[name] = entry = (-use, first - place, name)
            if heap is not None:
                heapq.heappush(heap, entry)
        if len(held) > capacity and heap is None:
            heap = list(held.values())
            heapq.heapify(heap)
        while heap is not None and len(held) > capacity:
            entry = heapq.heappop(heap)
            if held.get(entry[2]) is entry:
                del held[entry[2]]
    return oracle, infinite

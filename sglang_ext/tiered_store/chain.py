"""Several tiers below memory as one: blocks are written to each, and found in the nearest that has them.

The engine writes behind to a single `BlockTier` and promotes from it; the chain is that tier where there are
several. Nothing moves between its parts by itself: each evicts as it sees fit, and a larger one keeps longer
what all have got. A block that one part damages is dropped there, and found in the next part the next time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.tiered_store.tier import (
    BlockMemory,
    BlockTier,
    Get,
    Ids,
    LayerRead,
    Outcome,
    Put,
    TierStats,
    check_get_layer,
    check_put_layer,
)
from sglang_ext.tiers import Tier


@dataclass(slots=True, eq=False)
class ChainPut(Put):
    """had: positions that a part has already. writes: the puts under way, by number of the part."""

    had: set[int]
    writes: dict[int, Put]
    failures: list[Outcome] = field(default_factory=list)
    layers: set[int] = field(default_factory=set)
    open: bool = True


@dataclass(slots=True, eq=False)
class ChainGet(Get):
    """reads: consecutive blocks, by number of the part that has them, and how many each had at first."""

    reads: list[tuple[int, Get, int]]
    open: bool = True


class TierChain(BlockTier):
    """See the module's docstring.

    Args:
        parts: nearest first, of one layout. A put is done when a durable one has it; where none is durable,
            when any has it.
    """

    def __init__(self, parts: Sequence[BlockTier]) -> None:
        self._parts = tuple(parts)
        self.tier = parts[0].tier
        self.layout = parts[0].layout
        self.durable = any(part.durable for part in parts)
        if any(part.layout != self.layout for part in parts):
            raise ValueError(f"tiers of one chain have one layout, not {[p.layout.facts() for p in parts]}")
        self._lock = threading.Lock()
        self._put: Counter[Outcome] = Counter()
        self._got: Counter[Outcome] = Counter()

    @property
    def parts(self) -> tuple[BlockTier, ...]:
        return tuple(inner for part in self._parts for inner in part.parts)

    def _counts(self, number: int) -> bool:
        """Whether a block is put once this part has it."""
        return self._parts[number].durable or not self.durable

    # --- looking ---

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        at, found = 0, True
        while found:
            before = at
            for part in self._parts:
                at += part.match(namespace, keys[at:]) if at < len(keys) else 0
            found = at > before
        return at

    # --- writing ---

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> ChainPut | Outcome:
        writes: dict[int, Put] = {}
        failures: list[Outcome] = []
        had: set[int] = set()
        refused = set(range(len(keys)))
        for number, part in enumerate(self._parts):
            put = part.prepare_put(namespace, keys)
            if isinstance(put, Outcome):
                failures.append(put)
                continue
            writes[number] = put
            refused &= set(put.refused)
            if self._counts(number):
                had |= set(range(len(keys))).difference(put.missing, put.refused)
        if not writes:
            self._count(self._put, failures[0], len(keys))
            return failures[0]
        missing = tuple(sorted({position for put in writes.values() for position in put.missing}))
        self._count(self._put, Outcome.FULL, len(refused))
        return ChainPut(namespace, tuple(keys), missing, tuple(sorted(refused)), had, writes, failures)

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        check_put_layer(put, layer, memory, ids, self.layout)
        put = _own_put(put)
        places = {position: place for place, position in enumerate(put.missing)}
        for number, write in list(put.writes.items()):
            mine = ids[[places[position] for position in write.missing]]
            outcome = self._parts[number].put_layer(write, layer, memory, mine) if len(mine) else Outcome.DONE
            if outcome is not Outcome.DONE:
                # The others go on.
                self._parts[number].abort_put(put.writes.pop(number))
                put.failures.append(outcome)
        put.layers.add(layer)
        return self._judge(put, put.writes)

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        chained = [_own_put(put) for put in puts]
        for put in chained:
            if put.missing and len(put.layers) != self.layout.n_layers:
                raise ValueError(f"{len(put.layers)} of {self.layout.n_layers} layers were put")
        done: list[dict[int, Put]] = [{} for _ in chained]
        for number, part in enumerate(self._parts):
            mine = [place for place, put in enumerate(chained) if number in put.writes]
            for place, outcome in zip(
                mine, part.complete_puts([chained[place].writes[number] for place in mine]), strict=True
            ):
                if outcome is Outcome.DONE:
                    done[place][number] = chained[place].writes[number]
                else:
                    chained[place].failures.append(outcome)
        outcomes = [self._judge(put, writes) for put, writes in zip(chained, done, strict=True)]
        for put, outcome in zip(chained, outcomes, strict=True):
            put.open = False
            self._count(self._put, outcome, len(put.missing))
        return outcomes

    def _judge(self, put: ChainPut, writes: dict[int, Put]) -> Outcome:
        """Whether these writes give every block that is missing somewhere to a part that counts."""
        has = set(put.had)
        for number, write in writes.items():
            if self._counts(number):
                has.update(write.missing)
        return Outcome.DONE if has.issuperset(put.missing) else (put.failures or [Outcome.FULL])[-1]

    def abort_put(self, put: Put) -> None:
        put = _own_put(put)
        put.open = False
        for number, write in put.writes.items():
            self._parts[number].abort_put(write)

    # --- reading ---

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> ChainGet:
        reads: list[tuple[int, Get, int]] = []
        at, found = 0, True
        while found and at < len(keys):
            found = False
            for number, part in enumerate(self._parts):
                get = part.prepare_get(namespace, keys[at:])
                if get.blocks:
                    reads.append((number, get, get.blocks))
                    at += get.blocks
                    found = True
                else:
                    part.complete_get(get)
        self._count(self._got, Outcome.ABSENT, len(keys) - at)
        return ChainGet(namespace, tuple(keys), at, reads)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        check_get_layer(get, layer, memory, ids, self.layout)
        get = _own_get(get)
        start, outcome = 0, Outcome.DONE
        for number, read, blocks in get.reads:
            mine = ids[start : start + blocks]
            if not len(mine):
                break
            came = self._parts[number].get_layer(read, layer, memory, mine)
            start, outcome = start + came.blocks, came.outcome
            if came.blocks < len(mine):
                break
        if start < len(ids):
            with self._lock:
                get.blocks = min(get.blocks, start)
            outcome = Outcome.ABSENT if outcome is Outcome.DONE else outcome
        return LayerRead(min(start, get.blocks), outcome)

    def complete_get(self, get: Get) -> None:
        get = _own_get(get)
        get.open = False
        for number, read, _ in get.reads:
            self._parts[number].complete_get(read)
        self._count(self._got, Outcome.DONE, get.blocks)

    def sources(self, get: Get) -> list[tuple[Tier, int]]:
        return [(self._parts[number].tier, blocks) for number, _, blocks in _own_get(get).reads]

    # --- whole ---

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        return max(part.drop(namespace, keys) for part in self._parts)

    def clear(self, namespace: bytes | None = None) -> int:
        return max(part.clear(namespace) for part in self._parts)

    def stats(self) -> TierStats:
        """Of a block that several parts have, one counts; of the room, all."""
        each = [part.stats() for part in self._parts]
        with self._lock:
            return TierStats(
                blocks=max(stats.blocks for stats in each),
                used_bytes=sum(stats.used_bytes for stats in each),
                limit_bytes=sum(stats.limit_bytes for stats in each),
                pins=sum(stats.pins for stats in each),
                put=dict(self._put),
                got=dict(self._got),
                evicted=sum(stats.evicted for stats in each),
            )

    def _count(self, counts: Counter[Outcome], outcome: Outcome, blocks: int) -> None:
        with self._lock:
            counts[outcome] += blocks

    def check(self) -> None:
        for part in self._parts:
            part.check()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __repr__(self) -> str:
        return f"<TierChain {' -> '.join(map(repr, self._parts))}>"


def _own_put(put: Put) -> ChainPut:
    if not isinstance(put, ChainPut) or not put.open:
        raise ValueError("this put is not one of this tier, or has ended")
    return put


def _own_get(get: Get) -> ChainGet:
    if not isinstance(get, ChainGet) or not get.open:
        raise ValueError("this get is not one of this tier, or has ended")
    return get

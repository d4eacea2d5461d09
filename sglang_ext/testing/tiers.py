"""Tiers for tests: a reference tier that is obviously right, and wrappers that misbehave on purpose.

- `MemoryTier` is the contract in its shortest form: a dictionary.
- `FaultyTier` makes calls fail, drawn at random from a seed.
- `SlowTier` makes calls take time.
- `GatedTier` stops calls at a named method until the test lets them go, to place a race.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.geometry import BlockLayout
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
from sglang_ext.tiered_store.wrapped import WrappedTier
from sglang_ext.tiers import Tier

Layers = dict[int, npt.NDArray[np.uint8]]


@dataclass(slots=True, eq=False)
class MemoryPut(Put):
    """layers: the layers put so far, by number: shape (missing, layer bytes)."""

    layers: Layers = field(default_factory=dict)
    open: bool = True


@dataclass(slots=True, eq=False)
class MemoryGet(Get):
    """contents: the pinned blocks, which are simply kept alive."""

    contents: list[Layers] = field(default_factory=list)
    open: bool = True


class MemoryTier(BlockTier):
    """The reference: copies of the bytes in a dictionary, evicted by last use when `capacity` blocks are
    held.
    """

    durable = False

    def __init__(self, layout: BlockLayout, capacity: int, tier: Tier = Tier.DISK) -> None:
        self.tier = tier
        self.layout = layout
        self.capacity = capacity
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[bytes, bytes], Layers] = OrderedDict()
        self._put: Counter[Outcome] = Counter()
        self._got: Counter[Outcome] = Counter()
        self._pinned: Counter[tuple[bytes, bytes]] = Counter()
        self._evicted = 0
        self._closed = False

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        with self._lock:
            count = 0
            while count < len(keys) and (namespace, keys[count]) in self._blocks:
                count += 1
            return count

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> MemoryPut | Outcome:
        with self._lock:
            if self._closed:
                self._put[Outcome.CLOSED] += len(keys)
                return Outcome.CLOSED
            missing = [
                i
                for i, key in enumerate(keys)
                if (namespace, key) not in self._blocks and key not in keys[:i]
            ]
            fits = missing[: max(0, self.capacity - len({*keys}) + len(missing))]
            self._put[Outcome.FULL] += len(missing) - len(fits)
            if missing and not fits:
                return Outcome.FULL
            return MemoryPut(namespace, tuple(keys), tuple(fits), tuple(missing[len(fits) :]))

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        check_put_layer(put, layer, memory, ids, self.layout)
        mine = self._own_put(put)
        if self._closed:
            return Outcome.CLOSED
        memory.vectors(layer, ids)  # for its range check
        mine.layers[layer] = memory.layers[layer][ids]
        return Outcome.DONE

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        mine = [self._own_put(put) for put in puts]
        for put in mine:
            if put.missing and len(put.layers) < self.layout.n_layers:
                raise ValueError(f"put has {len(put.layers)} of {self.layout.n_layers} layers")
        with self._lock:
            return [self._complete(put) for put in mine]

    def _complete(self, put: MemoryPut) -> Outcome:
        put.open = False
        if self._closed:
            return Outcome.CLOSED
        new = [i for i, key in enumerate(put.wanted) if (put.namespace, key) not in self._blocks]
        self._evict(len(self._blocks) + len(new) - self.capacity, {(put.namespace, key) for key in put.keys})
        left = self.capacity - len(self._blocks)
        if len(new) > left:
            self._put[Outcome.FULL] += len(put.missing)
            return Outcome.FULL
        for i in new:
            layers = {layer: rows[i].copy() for layer, rows in put.layers.items()}
            self._blocks[put.namespace, put.wanted[i]] = layers
        self._put[Outcome.DONE] += len(put.missing)
        self._touch(put.namespace, put.keys)
        return Outcome.DONE

    def _evict(self, count: int, keep: set[tuple[bytes, bytes]]) -> None:
        for full in list(self._blocks):
            if count <= 0:
                return
            if not self._pinned[full] and full not in keep:
                del self._blocks[full]
                self._evicted += 1
                count -= 1

    def _touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if (namespace, key) in self._blocks:
                self._blocks.move_to_end((namespace, key))

    def abort_put(self, put: Put) -> None:
        self._own_put(put).open = False

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> MemoryGet:
        count = self.match(namespace, keys)
        with self._lock:
            pinned = [(namespace, key) for key in keys[:count] if (namespace, key) in self._blocks]
            self._pinned.update(pinned)
            self._got[Outcome.ABSENT] += len(keys) - len(pinned)
            contents = [self._blocks[full] for full in pinned]
            return MemoryGet(namespace, tuple(keys), len(contents), contents)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        check_get_layer(get, layer, memory, ids, self.layout)
        mine = self._own_get(get)
        if self._closed:
            return LayerRead(0, Outcome.CLOSED)
        memory.vectors(layer, ids)
        count = min(len(ids), mine.blocks)
        for content, target in zip(mine.contents[:count], ids, strict=False):
            memory.layers[layer][target] = content[layer]
        return LayerRead(count, Outcome.DONE if count == len(ids) else Outcome.ABSENT)

    def complete_get(self, get: Get) -> None:
        mine = self._own_get(get)
        with self._lock:
            mine.open = False
            count = len(mine.contents)
            self._pinned.subtract((mine.namespace, key) for key in mine.keys[:count])
            self._pinned = +self._pinned
            self._got[Outcome.DONE] += count
            self._touch(mine.namespace, mine.keys[:count])

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        with self._lock:
            return sum(self._blocks.pop((namespace, key), None) is not None for key in keys)

    def clear(self, namespace: bytes | None = None) -> int:
        with self._lock:
            gone = [full for full in self._blocks if namespace in (None, full[0])]
            for full in gone:
                del self._blocks[full]
            return len(gone)

    def stats(self) -> TierStats:
        with self._lock:
            size = self.layout.block_bytes
            return TierStats(
                blocks=len(self._blocks),
                used_bytes=len(self._blocks) * size,
                limit_bytes=self.capacity * size,
                pins=self._pinned.total(),
                put=dict(self._put),
                got=dict(self._got),
                evicted=self._evicted,
            )

    def check(self) -> None:
        with self._lock:
            if len(self._blocks) > self.capacity:
                raise AssertionError(f"{len(self._blocks)} blocks in a tier of {self.capacity}")
            for full, layers in self._blocks.items():
                if len(layers) != self.layout.n_layers:
                    raise AssertionError(f"{full} has {len(layers)} layers")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._blocks.clear()

    def _own_put(self, put: Put) -> MemoryPut:
        if not isinstance(put, MemoryPut) or not put.open:
            raise ValueError("this put is not one of this tier, or has ended")
        return put

    def _own_get(self, get: Get) -> MemoryGet:
        if not isinstance(get, MemoryGet) or not get.open:
            raise ValueError("this get is not one of this tier, or has ended")
        return get


class FaultyTier(WrappedTier):
    """Fails calls at random, in every way the contract allows, reproducibly from `seed`.

    rate: chance of each call to fail. May be changed at any time; 0 lets everything pass.
    first: methods whose first call fails, whatever the rate.
    faults: how many calls have been made to fail, by method.
    lost: (namespace, key) of blocks that the medium has lost, as far as they were there.
    """

    def __init__(
        self, inner: BlockTier, *, seed: int, rate: float = 0.1, first: Collection[str] = ()
    ) -> None:
        super().__init__(inner)
        self.rate = rate
        self.first = first
        self.faults: Counter[str] = Counter()
        self.lost: set[tuple[bytes, bytes]] = set()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _fails(self, method: str) -> bool:
        with self._lock:
            fails = self._random.random() < self.rate or (method in self.first and not self.faults[method])
            self.faults[method] += fails
            return fails

    def _pick(self, *outcomes: Outcome) -> Outcome:
        with self._lock:
            return self._random.choice(outcomes)

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
        if self._fails("prepare_put"):
            return self._pick(Outcome.FULL, Outcome.READ_ONLY, Outcome.BEHIND, Outcome.IO_ERROR)
        return super().prepare_put(namespace, keys)

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        if self._fails("put_layer"):
            return self._pick(Outcome.FULL, Outcome.IO_ERROR)
        return super().put_layer(put, layer, memory, ids)

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        if self._fails("complete_puts"):
            for put in puts:
                self.inner.abort_put(put)
            return [self._pick(Outcome.FULL, Outcome.IO_ERROR)] * len(puts)
        return super().complete_puts(puts)

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> Get:
        if keys and self._fails("prepare_get"):  # the medium has lost a block in the middle
            with self._lock:
                key = self._random.choice(keys)
                self.lost.add((namespace, key))
            self.inner.drop(namespace, [key])
        return super().prepare_get(namespace, keys)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        read = super().get_layer(get, layer, memory, ids)
        if read.blocks and self._fails("get_layer"):
            with self._lock:
                kept = self._random.randrange(read.blocks)
            get.blocks = min(get.blocks, kept)
            memory.layers[layer][ids[kept:]] ^= 0xFF  # damage the bytes that fail to verify
            return LayerRead(kept, self._pick(Outcome.IO_ERROR, Outcome.DAMAGED))
        return read


class SlowTier(WrappedTier):
    """Takes `seconds_per_block` for each layer call's blocks, and `latency` for each I/O call."""

    def __init__(
        self,
        inner: BlockTier,
        *,
        latency: float = 0.0,
        seconds_per_block: float = 0.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.latency = latency
        self.seconds_per_block = seconds_per_block
        self._pause = pause

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        self._pause(self.latency + self.seconds_per_block * len(ids))
        return super().put_layer(put, layer, memory, ids)

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        self._pause(self.latency)
        return super().complete_puts(puts)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        self._pause(self.latency + self.seconds_per_block * len(ids))
        return super().get_layer(get, layer, memory, ids)


class GatedTier(WrappedTier):
    """Stops I/O calls at closed gates, one per method, so that a test can place an event inside them.

        tier.close_gate("get_layer")
        ... start a thread that reads ...
        tier.wait_until_stopped("get_layer")
        ... place the event here ...
        tier.open_gate("get_layer")

    Gates: `put_layer`, `complete_puts`, `get_layer`.
    """

    DEADLINE = 30.0

    def __init__(self, inner: BlockTier) -> None:
        super().__init__(inner)
        self._state = threading.Condition()
        self._closed_gates: set[str] = set()
        self._stopped: Counter[str] = Counter()

    def close_gate(self, method: str) -> None:
        """Stop every call of `method` from now on."""
        with self._state:
            self._closed_gates.add(method)

    def open_gate(self, method: str) -> None:
        """Let calls of `method` go, and those that are stopped."""
        with self._state:
            self._closed_gates.discard(method)
            self._state.notify_all()

    def wait_until_stopped(self, method: str, calls: int = 1) -> None:
        """Return when that many calls stand at the gate. Raises TimeoutError after `DEADLINE` seconds."""
        with self._state:
            if not self._state.wait_for(lambda: self._stopped[method] >= calls, self.DEADLINE):
                raise TimeoutError(f"{self._stopped[method]} of {calls} calls reached the gate {method}")

    def _pass(self, method: str) -> None:
        with self._state:
            self._stopped[method] += 1
            self._state.notify_all()
            opened = self._state.wait_for(lambda: method not in self._closed_gates, self.DEADLINE)
            self._stopped[method] -= 1
            if not opened:
                raise TimeoutError(f"gate {method} was not opened")

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        self._pass("put_layer")
        return super().put_layer(put, layer, memory, ids)

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        self._pass("complete_puts")
        return super().complete_puts(puts)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        self._pass("get_layer")
        return super().get_layer(get, layer, memory, ids)

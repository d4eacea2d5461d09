"""A store of several components over pools in host memory, whose rows are hashes of prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_ext.engine.hybrid.components import FULL, Component, LastWindow
from sglang_ext.engine.hybrid.disk import ComponentDisk
from sglang_ext.engine.hybrid.memory import Dram
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import HybridStore, Rows, StoredComponent
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import ThreadMover
from sglang_ext.engine.ranks import Least, Ranks
from sglang_ext.patches.adapter.hybrid.pools import STATE, ComponentPool
from sglang_ext.tiered_store.copy import PoolCopier
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.loading.write_behind import WriteBehind
from sglang_ext.tiered_store.tier import BlockTier

PAGE = 4
WINDOW = Component("window", LastWindow(8))
COMPONENTS = (FULL, WINDOW, STATE)
NAMESPACE = b"n" * 16
Tokens = tuple[int, ...]


def names_of(tokens: Tokens) -> list[Name]:
    """The name of each page of a prompt."""
    ends = range(PAGE, len(tokens) + 1, PAGE)
    return [hashlib.blake2b(repr(tokens[:end]).encode(), digest_size=16).digest() for end in ends]


def row_bytes(component: Component, tokens: Tokens, plane: int, size: int) -> bytes:
    """The row that a model would compute after a prefix."""
    text = f"{component}:{plane}:{tokens}".encode()
    return hashlib.shake_128(text).digest(size)


@dataclass
class Pool:
    """One component's tensors, and its free rows."""

    pool: ComponentPool
    free: list[int]

    @staticmethod
    def of(component: Component, rows: int) -> Pool:
        layers = [
            [torch.zeros(rows, size, dtype=torch.uint8) for size in sizes] for sizes in ((24, 8), (40,))
        ]
        block_rows = 1 if component is STATE else PAGE
        return Pool(ComponentPool(component, layers, block_rows), list(range(rows)))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return taken

    def write(self, tokens: Tokens, row: int) -> None:
        """Compute the row after a prefix."""
        for plane, tensor in enumerate(self._planes):
            computed = row_bytes(self.pool.component, tokens, plane, tensor.shape[1])
            tensor[row] = torch.frombuffer(bytearray(computed), dtype=torch.uint8)

    def wrong(self, tokens: Tokens, row: int) -> bool:
        """Whether the row is another than a model would have computed after a prefix."""
        return any(
            tensor[row].numpy().tobytes() != row_bytes(self.pool.component, tokens, plane, tensor.shape[1])
            for plane, tensor in enumerate(self._planes)
        )

    @property
    def _planes(self) -> list[torch.Tensor]:
        return [plane for layer in self.pool.planes_by_layer for plane in layer]


class Rig:
    """A store, its pools, and a model in the form of a hash.

    Args:
        blocks: of each component, for which DRAM has room.
        tiers: makes the disk of a component, by its pool; None without disks.
    """

    def __init__(
        self,
        blocks: Mapping[Component, int],
        tiers: Callable[[ComponentPool], BlockTier] | None = None,
        *,
        rows: int = 512,
        least: Least | None = None,
    ) -> None:
        self.ranks = Ranks(least)
        self.loader = Loader(1 << 20, threads=1)
        self.pools = {component: Pool.of(component, rows) for component in COMPONENTS}
        layouts = {component: self.pools[component].pool.layout for component in COMPONENTS}
        size = sum(count * layouts[component].block_bytes for component, count in blocks.items())
        self.dram = Dram(layouts, size, PAGE, shared=False, pin=False)
        parts = []
        for component in COMPONENTS:
            pool, memory = self.pools[component].pool, self.dram.memories[component]
            mover = ThreadMover(PoolCopier(pool, memory.arena), pool.layout.n_layers)
            disk = None
            if tiers is not None:
                tier = tiers(pool)
                writer = WriteBehind(tier, backlog_bytes=1 << 30)
                disk = ComponentDisk(memory, tier, self.loader, lambda: NAMESPACE, writer)
            parts.append(StoredComponent(component, memory, Copies(mover, Ranks()), disk))
        self.store = HybridStore(self.dram, parts, PAGE, self.ranks)

    def compute(self, tokens: Tokens, *, window_from: int = 0) -> None:
        """Compute a prompt of whole pages and hand it to the store, as a node from the root on."""
        rows: dict[Component, Rows] = {}
        taken: list[tuple[Pool, list[int]]] = []
        for component, positions in (
            (FULL, range(len(tokens))),
            (WINDOW, range(window_from, len(tokens))),
            (STATE, range(len(tokens) - 1, len(tokens))),
        ):
            pool = self.pools[component]
            slots = pool.take(len(positions))
            for position, slot in zip(positions, slots, strict=True):
                pool.write(tokens[: position + 1], slot)
            first = positions.start // PAGE
            rows[component] = Rows(names_of(tokens)[first:], pool.pool.rows(torch.tensor(slots)))
            taken.append((pool, slots))
        self.store.save(rows)
        self.passes()
        for pool, slots in taken:
            for slot in slots:
                pool.write((-1, slot), slot)  # the next owner's
            pool.free += slots

    def passes(self) -> None:
        """Passes of the scheduler until every save has ended."""
        while self.store._saves:
            self.store.ranks.each_pass()
            for _ in range(self.store.ended_saves):
                self.store.forget_save()

    def load(self, tokens: Tokens, blocks: int) -> list[str]:
        """Load the first blocks of a prompt; returns the rows that are wrong."""
        prefix, names = tokens[: blocks * PAGE], names_of(tokens)[:blocks]
        window = min(len(prefix), WINDOW.coverage.blocks(PAGE) * PAGE)  # type: ignore[attr-defined]
        wanted = {
            FULL: (names, range(len(prefix))),
            WINDOW: (names[-(window // PAGE) :], range(len(prefix) - window, len(prefix))),
            STATE: (names[-1:], range(len(prefix) - 1, len(prefix))),
        }
        slots = {
            component: self.pools[component].take(len(places)) for component, (_, places) in wanted.items()
        }
        rows = {
            component: Rows(own, self.pools[component].pool.rows(torch.tensor(slots[component])))
            for component, (own, _) in wanted.items()
        }
        assert self.store.load("request", rows)
        self.store.wait(self.store.start_loads())
        self.store.ranks.each_pass()
        wrong = []
        for component, (_, places) in wanted.items():
            pool = self.pools[component]
            for position, slot in zip(places, slots[component], strict=True):
                if pool.wrong(tokens[: position + 1], slot):
                    wrong.append(f"{component} at {position}")
            pool.free += slots[component]
        return wrong

    def promote(self, tokens: Tokens) -> int:
        """Bring blocks that a prompt lacks from disk; the blocks that came."""
        self.store.promote("waiting", names_of(tokens))
        while not self.store.ready("waiting"):
            self.store.ranks.each_pass()
        promotion = self.store.promoted("waiting")
        assert promotion is not None
        self.store.release("waiting")
        return promotion.blocks

    def points(self, tokens: Tokens) -> list[int]:
        return self.store.lookup(names_of(tokens))

    def close(self) -> None:
        self.store.close()
        self.loader.close()


def pages(first: int, count: int) -> Tokens:
    """A prompt of so many pages, unlike those with another first token."""
    return tuple(range(first * 1000, first * 1000 + count * PAGE))


def flags(values: Sequence[int]) -> list[bool]:
    return np.asarray(values, bool).tolist()

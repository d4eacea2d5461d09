"""What DRAM has of a prompt is exported to a peer, which reads it one-sidedly.

An export holds one DRAM lock, so that nothing of it is evicted, and a lease (``fetch_link``). The lease ends
when its reader says that it is done, is dead, or is late; the lock goes once it has ended on every rank.

What is in HBM only is copied to DRAM first, and what is being copied is waited for: the reader asks until
something is published.

All methods run in the scheduler's thread, on every rank between the same two passes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.mover import BlockIds
from sglang_ext.radix_global import Node, RadixTree
from sglang_ext.tiers import Tier

MOST_EXPORTS: Final = 32
SHARE: Final = 4
"""Of DRAM, at most one part in so many is exported at a time."""


class ExportLink(Protocol):
    """What of ``fetch_link.FetchLink`` is used here."""

    def publish(self, export: str, ids: BlockIds, seconds: float) -> int | None: ...

    def withdraw(self, lease: int) -> None: ...

    def over(self, lease: int) -> bool: ...

    def forget(self, lease: int) -> None: ...


@dataclass
class ExportCounters:
    """Blocks, since the start."""

    exported: int = 0
    not_exported: int = 0
    """Asked for and there, but too much was exported already."""
    given_back: int = 0
    """Of what was exported, what is nobody's any more."""


@dataclass(frozen=True)
class _Asked:
    """An export that is to be made when copies have completed."""

    export: str
    namespace: Hashable
    key: bytes
    seconds: float


@dataclass(eq=False)
class _Export:
    node: Node
    blocks: int
    leases: tuple[int | None, ...]
    """``None`` for what this rank could not publish."""


class Exports:
    """See the module's docstring.

    Args:
        tree: the rank's tree.
        tier: DRAM.
        link: publishes.
        ranks: agree on which exports have ended.
    """

    def __init__(self, tree: RadixTree, tier: DramTier, link: ExportLink, ranks: Ranks) -> None:
        self._tree = tree
        self._tier = tier
        self._link = link
        self._exports: list[_Export] = []
        self._asked: list[_Asked] = []
        self.counters = ExportCounters()
        ranks.add(self)

    def export(self, export: str, namespace: Hashable, key: bytes, seconds: float) -> None:
        """Export what is in memory of a prompt's beginning, if only nothing: whoever asks shall know."""
        if len(self._exports) + len(self._asked) >= MOST_EXPORTS:
            return
        asked = _Asked(export, namespace, key, seconds)
        self._copy(asked)
        self._asked.append(asked)

    def _copy(self, asked: _Asked) -> None:
        """Begin to copy to DRAM what is in HBM only."""
        last, blocks = None, 0
        for node in self._tree.match(asked.namespace, asked.key).path:
            if self._tier.source in node.placements and self._tier.holder not in node.placements:
                last = node
            elif self._tier.holder not in node.placements:
                break
            blocks += node.blocks
        if last is not None and self.exported_blocks + blocks <= self._tier.n_blocks // SHARE:
            self._tier.store.swap_out(Tier.HBM, last, always=True)

    def _copying(self, asked: _Asked) -> bool:
        incomplete = self._tier.incomplete()
        path = self._tree.match(asked.namespace, asked.key).path if incomplete else ()
        return any(node in incomplete for node in path)

    def _publish(self, asked: _Asked) -> None:
        nodes = self._held(asked.namespace, asked.key)
        blocks = sum(node.blocks for node in nodes)
        if self.exported_blocks + blocks > self._tier.n_blocks // SHARE:
            self.counters.not_exported += blocks
            nodes, blocks = [], 0
        dram = self._tier.holder
        ids = [np.asarray(node.placements[dram], np.int64) for node in nodes]
        last = nodes[-1] if nodes else self._tree.root
        flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
        self.keep(last, blocks, (self._link.publish(asked.export, flat, asked.seconds),))

    def keep(self, node: Node, blocks: int, leases: tuple[int | None, ...]) -> None:
        """Keep the blocks up to a node, so many, in DRAM until leases on them have ended on every rank."""
        self._tree.lock(node, self._tier.holder)
        self._exports.append(_Export(node, blocks, leases))
        self.counters.exported += blocks

    def _held(self, namespace: Hashable, key: bytes) -> list[Node]:
        """The nodes from the prompt's start on whose copy in DRAM is complete."""
        incomplete = self._tier.incomplete()
        nodes: list[Node] = []
        for node in self._tree.match(namespace, key).path:
            if self._tier.holder not in node.placements or node in incomplete:
                break
            nodes.append(node)
        return nodes

    def propose(self) -> Sequence[int]:
        """Of each export, whether it has ended here."""
        return [
            int(all(lease is None or self._link.over(lease) for lease in export.leases))
            for export in self._exports
        ]

    def act(self, agreed: Sequence[int]) -> None:
        """Let go of exports that have ended on every rank, and make those whose copies have completed."""
        for export, over in zip(list(self._exports), agreed, strict=False):
            if over:
                self._end(export)
        for asked in list(self._asked):
            if not self._copying(asked):
                self._asked.remove(asked)
                self._publish(asked)

    def clear(self) -> None:
        """The cache is about to be emptied: end every export. Readers find that what they read is stale."""
        self._asked.clear()
        for export in list(self._exports):
            for lease in export.leases:
                if lease is not None:
                    self._link.withdraw(lease)
            self._end(export)

    def _end(self, export: _Export) -> None:
        self._exports.remove(export)
        self.counters.given_back += export.blocks
        for lease in export.leases:
            if lease is not None:
                self._link.forget(lease)
        self._tree.unlock(export.node, self._tier.holder)

    @property
    def exported_blocks(self) -> int:
        """Blocks of exports that have not ended."""
        return sum(export.blocks for export in self._exports)

    @property
    def busy(self) -> bool:
        return bool(self._exports or self._asked)

    def __repr__(self) -> str:
        return f"Exports({len(self._exports)}, blocks={self.exported_blocks}, {self.counters})"

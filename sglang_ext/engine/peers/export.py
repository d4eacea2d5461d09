"""Exports the leading blocks of a prompt that this instance has to a peer, which reads them from DRAM
one-sidedly.

An export holds one DRAM lock, so that none of its blocks is evicted, and a lease (``fetch_link``). The lease
ends when its reader reports completion, is dead, or is late; the lock is released once it has ended on every
rank.

Blocks in HBM only are copied to DRAM first, blocks on disk only are read into DRAM and verified, and copies
under way are waited for. The reader polls until the export is published, and receives the time that the disk
is expected to take. A block that the disk cannot read or verify is not published, nor is any block behind it.
Reading for peers gives way to reading for this instance's own requests, and no last copy is evicted for it.

A prompt that another instance is to keep, because it is about to be evicted, is exported as it is in DRAM.
The export does not count as a use of its blocks: nothing is copied or read for it, and its blocks are evicted
as early as without the export.

All methods run in the scheduler's thread, on every rank between the same two passes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from sglang_ext.clock import Clock
from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.promotion import DiskWait, Wanted
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Node
from sglang_ext.radix_global.edges import walk
from sglang_ext.tiered_store.loading.layers import AHEAD
from sglang_ext.tiers import Tier

MOST_EXPORTS: Final = 32
SHARE: Final = 4
"""At most ``1 / SHARE`` of DRAM is exported at a time."""


def layer_name(export: str, layer: int) -> str:
    """The name of one layer (of this rank's, from 0) of an export that comes layer by layer."""
    return f"{export}.{layer}"


class ExportLink(Protocol):
    """The methods of ``arena_leases.ArenaLeases`` that exporting uses."""

    def publish(self, export: str, ids: BlockIds, seconds: float) -> int | None: ...

    def expect(self, export: str, seconds: float) -> None: ...

    def give_up(self, export: str, seconds: float) -> None: ...

    def withdraw(self, lease: int) -> None: ...

    def over(self, lease: int) -> bool: ...

    def forget(self, lease: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class ExportCounters:
    """Blocks, since the start."""

    exported: int = 0
    not_exported: int = 0
    """Requested and present, but the share of DRAM for exports was used up."""
    given_back: int = 0
    """Exported blocks whose export has ended."""
    from_disk: int = 0
    """Brought from disk to be exported."""


@dataclass(eq=False)
class _Asked:
    """An export that is to be made when copies have completed.

    until: the reader has given up after this time, on this rank's clock. share: limit on the blocks that the
    disk brings. leaving: its blocks are about to be evicted, and a peer keeps them.
    """

    export: str
    namespace: Hashable
    key: bytes
    seconds: float
    until: float
    leaving: bool = False
    share: int = 0
    waits: list[DiskWait] = field(default_factory=list)
    """For its blocks on disk."""
    answered: bool = False
    """The reader has received the time that the disk takes."""


@dataclass(eq=False)
class _Export:
    node: Node
    blocks: int
    leases: tuple[int | None, ...]
    """One lease per published name; ``None`` where this rank could not publish."""


class Exports:
    """See the module's docstring.

    Args:
        store: of the rank.
        write_down: copies to DRAM.
        link: publishes.
        ranks: agree on which exports have ended.
        clock: seconds, monotonic.
        below: bring blocks to DRAM from the tiers below it.
    """

    def __init__(
        self,
        store: Store,
        write_down: WriteDown,
        link: ExportLink,
        ranks: Ranks,
        clock: Clock,
        below: Sequence[Promotions] = (),
    ) -> None:
        self._store = store
        self._tree = store.tree
        self._write_down = write_down
        self._tier = write_down.dram
        self._link = link
        self._below = tuple(below)
        self._clock = clock
        self._exports: list[_Export] = []
        self._asked: list[_Asked] = []
        self.counters = ExportCounters()
        ranks.add(self)

    def export(
        self, export: str, namespace: Hashable, key: bytes, seconds: float, *, leaving: bool = False
    ) -> None:
        """Export the leading blocks of a prompt that are here. With no block here, the export is empty, so
        that the reader gets an answer.
        """
        if len(self._exports) + len(self._asked) >= MOST_EXPORTS:
            return
        asked = _Asked(export, namespace, key, seconds, self._clock.monotonic() + seconds, leaving)
        if not leaving:
            self._copy(asked)
        self._asked.append(asked)
        if self._below and not leaving:
            # From the next pass on; blocks in memory come first in its share of the exports.
            left = self._tier.n_blocks // SHARE - self.exported_blocks
            left -= sum(other.share for other in self._asked)
            step = self._tree.block_size * TOKEN_BYTES
            asked.share = max(0, min(len(key) // step, left))
            wanted = Wanted(namespace, key[: asked.share * step], AHEAD, request=asked)
            asked.waits = [tier.begin(asked, wanted) for tier in self._below]

    def _on_disk(self, asked: _Asked) -> bool:
        """Whether something of it is still being read from disk."""
        reading = not all(wait.ready for wait in asked.waits)
        if reading and not asked.answered:
            seconds = max(tier.expected_s(asked) for tier in self._below)
            if seconds:
                self._link.expect(asked.export, seconds)
                asked.answered = True
        return reading

    def _copy(self, asked: _Asked) -> None:
        """Begin to copy to DRAM the blocks that are in HBM only."""
        last, blocks = None, 0
        for node in self._tree.match(asked.namespace, asked.key).path:
            if self._tier.source in node.placements and self._tier.holder not in node.placements:
                last = node
            elif self._tier.holder not in node.placements:
                break
            blocks += node.blocks
        if last is not None and self.exported_blocks + blocks <= self._tier.n_blocks // SHARE:
            self._store.swap_out(Tier.HBM, last, always=True)

    def _copying(self, asked: _Asked) -> bool:
        incomplete = self._write_down.incomplete()
        path = self._path(asked) if incomplete else ()
        return any(node in incomplete for node in path)

    def _publish(self, asked: _Asked) -> None:
        nodes = self._held(asked)
        blocks = sum(node.blocks for node in nodes)
        if self.exported_blocks + blocks > self._tier.n_blocks // SHARE:
            self.counters.not_exported += blocks
            nodes, blocks = [], 0
        dram = self._tier.holder
        ids = [np.asarray(node.placements[dram], np.int64) for node in nodes]
        last = nodes[-1] if nodes else self._tree.root
        flat = np.concatenate(ids) if ids else np.zeros(0, np.int64)
        self.keep(last, blocks, (self._link.publish(asked.export, flat, asked.seconds),))
        for guests in self._tier.guests:
            guests.on_export(nodes)
        self._release(asked)  # the export has a lock of its own

    def keep(self, node: Node, blocks: int, leases: tuple[int | None, ...]) -> None:
        """Keep the blocks up to a node, so many, in DRAM until leases on them have ended on every rank."""
        self._tree.lock(node, self._tier.holder)
        self._exports.append(_Export(node, blocks, leases))
        self.counters.exported += blocks

    def export_nothing(self, export: str, seconds: float, layers: int = 1) -> None:
        """Export zero blocks for each of the first ``layers`` layers of an export that comes layer by layer,
        so that a peer that asks for one gets an answer.
        """
        nothing: BlockIds = np.zeros(0, np.int64)
        leases = [self._link.publish(layer_name(export, layer), nothing, seconds) for layer in range(layers)]
        self.keep(self._tree.root, 0, tuple(leases))

    def _give_up(self, asked: _Asked) -> None:
        """Drop a request, and export nothing for it."""
        self._asked.remove(asked)
        self._link.give_up(asked.export, asked.seconds)
        self._release(asked)

    def _release(self, asked: _Asked) -> None:
        """Bring no more blocks from disk for it."""
        for wait in asked.waits:
            if wait.arrived is not None:
                self.counters.from_disk += wait.arrived.tokens // self._tree.block_size
        for tier in self._below:
            tier.release(asked)

    def _path(self, asked: _Asked) -> list[Node]:
        """The nodes of its prompt in the tree, split at the prompt's end."""
        if not asked.leaving:
            return self._tree.match(asked.namespace, asked.key).path
        root, step = self._tree.roots.get(asked.namespace), self._tree.block_bytes
        used = [node.last_access for _, node in walk(root, asked.key, step)]
        path = self._tree.match(asked.namespace, asked.key).path
        for node, at in zip(path, used, strict=True):
            node.last_access = at
        return path

    def _held(self, asked: _Asked) -> list[Node]:
        """The nodes from the prompt's start on whose copy in DRAM is complete."""
        incomplete = self._write_down.incomplete()
        nodes: list[Node] = []
        for node in self._path(asked):
            if self._tier.holder not in node.placements or node in incomplete:
                break
            nodes.append(node)
        return nodes

    def propose(self) -> Sequence[int]:
        """For each export, whether it has ended here; for each one yet to be made, whether it is too late."""
        if not (self._exports or self._asked):
            return ()
        now = self._clock.monotonic()
        ended = [
            int(all(lease is None or self._link.over(lease) for lease in export.leases))
            for export in self._exports
        ]
        return ended + [int(now > asked.until) for asked in self._asked]

    def act(self, agreed: Sequence[int]) -> None:
        """Release the exports that have ended on every rank, and publish those with their blocks in DRAM."""
        if not agreed:
            return
        late = agreed[len(self._exports) :]
        for export, over in zip(list(self._exports), agreed, strict=False):
            if over:
                self._end(export)
        for asked, too_late in zip(list(self._asked), late, strict=False):
            if too_late:
                self._give_up(asked)
            elif not self._copying(asked) and not self._on_disk(asked):
                self._asked.remove(asked)
                self._publish(asked)

    def clear(self) -> None:
        """The cache is about to be emptied: end every export. Readers find that the blocks they read are
        stale.
        """
        for asked in list(self._asked):
            self._give_up(asked)
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

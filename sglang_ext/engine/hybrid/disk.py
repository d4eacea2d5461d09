"""One component's blocks on disk: written behind, and read back into DRAM before a request is admitted."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ext.engine.hybrid.components import Flags
from sglang_ext.engine.hybrid.memory import Changed, ComponentMemory
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.tiered_store.dram.arena import BlockIds
from sglang_ext.tiered_store.loading.loader import Load, Loader
from sglang_ext.tiered_store.loading.write_behind import WriteBehind, Written
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Outcome

MOST_KNOWN = 1_000_000
"""Blocks that are known to be on disk without a look at it: those written or read last."""


@dataclass(eq=False)
class Read:
    """Blocks on their way from disk, whose memory is reserved and locked. path: as for
    `ComponentMemory.enter`."""

    names: Sequence[Name]
    ids: BlockIds
    load: Load
    path: Sequence[Name]


class ComponentDisk:
    """See the module's docstring. In the scheduler's thread.

    Args:
        tier: of blocks of this component.
        namespace: the digest of everything but the tokens that the bytes depend on; None while there is none.
    """

    def __init__(
        self,
        memory: ComponentMemory,
        tier: BlockTier,
        loader: Loader,
        namespace: Callable[[], bytes | None],
        writer: WriteBehind | None,
    ) -> None:
        self._memory = memory
        self.tier = tier
        self._loader = loader
        self.namespace = namespace
        self._writer = writer
        self._bytes = BlockMemory.of_arena(memory.arena)
        self._written: deque[tuple[BlockIds, Written]] = deque()
        """Blocks that the writer needs no more. Filled by its thread."""
        self._known: dict[Name, None] = {}
        """Blocks that are on disk as far as is known; the oldest first."""
        self._gone: deque[Sequence[Name]] = deque()
        """Blocks that the disk has given up. Filled by its threads."""
        self._changed: Changed | None = None
        """None: nothing is known."""

    def blocks(self) -> tuple[int, int]:
        """Blocks held, and blocks that fit; from any thread."""
        stats = self.tier.stats()
        return stats.blocks, stats.limit_bytes // self._bytes.layout.block_bytes

    def observe(self, changed: Changed) -> None:
        """Have names reported that are known to be on disk from now on, or that are not any more."""
        self._changed = changed

    def write(self, names: Sequence[Name], ids: BlockIds) -> None:
        """Write blocks of a prefix, in order. They stay locked until that has ended."""
        namespace = self.namespace()
        if self._writer is None or namespace is None or not len(names):
            return
        self._memory.lock(ids)
        outcome = self._writer.submit(
            namespace,
            list(names),
            self._bytes,
            ids,
            on_written=lambda written: self._written.append((ids, written)),
        )
        if outcome is not Outcome.DONE:
            self._memory.unlock(ids)

    def look(self) -> None:
        """Unlock the blocks that have been written, and note their names as on disk."""
        while self._written:
            ids, written = self._written.popleft()
            self._memory.unlock(ids)
            if written.namespace == self.namespace():
                ends = zip(written.keys, written.outcomes, strict=True)
                self._learn([name for name, end in ends if end is Outcome.DONE])
        while self._gone:
            self._unlearn(self._gone.popleft())

    def known(self, names: Sequence[Name]) -> Flags:
        """For each name, whether its block is known to be on disk; does not look there."""
        return np.fromiter((name in self._known for name in names), np.bool_, len(names))

    def given_up(self, names: Sequence[Name]) -> None:
        """The disk has blocks no more. From any thread."""
        self._gone.append(names)

    def _learn(self, names: Sequence[Name]) -> None:
        if self._changed is None or not names:
            return
        self._known.update(dict.fromkeys(names))
        self._changed(names, True)
        if len(self._known) > MOST_KNOWN:
            self._unlearn(list(itertools.islice(self._known, len(self._known) - MOST_KNOWN)))

    def _unlearn(self, names: Sequence[Name]) -> None:
        gone = [name for name in names if name in self._known]
        for name in gone:
            del self._known[name]
        if self._changed is not None and gone:
            self._changed(gone, False)

    def forget(self) -> None:
        """Names are those of other weights from now on."""
        self._unlearn(list(self._known))

    def held(self, names: Sequence[Name]) -> Flags:
        """For each name, whether its block is on disk."""
        namespace = self.namespace()
        if namespace is None:
            return np.zeros(len(names), np.bool_)
        return np.array(self.tier.held(namespace, names), np.bool_)

    def leading(self, names: Sequence[Name]) -> int:
        """How many of the first blocks are on disk."""
        namespace = self.namespace()
        return 0 if namespace is None else self.tier.match(namespace, names)

    def read(self, names: Sequence[Name], priority: int, path: Sequence[Name]) -> Read | None:
        """Begin to read blocks, all of which are on disk; None where DRAM has no room. path: as for
        `ComponentMemory.enter`."""
        namespace = self.namespace()
        ids = None if namespace is None else self._memory.reserve(len(names))
        if namespace is None or ids is None:
            return None
        get = self.tier.prepare_get(namespace, list(names))
        wanted = min(get.blocks, len(names))
        load = self._loader.load(self.tier, get, self._bytes, ids[:wanted], priority=priority)
        return Read(names, ids, load, path)

    def finish(self, read: Read) -> int:
        """Enter the blocks that a read has brought; returns how many. They stay locked until `release`."""
        count = read.load.result().blocks
        self._memory.enter(read.names[:count], read.ids[:count], read.path)
        self._learn(read.names[:count])
        return count

    def release(self, read: Read) -> None:
        """The request needs the blocks no more. A read under way is given up, once nothing writes to its
        memory."""
        if not read.load.over:
            self._loader.cancel(read.load)
            read.load.result()
        self._memory.unlock(read.ids)

    @property
    def pending_bytes(self) -> int:
        """Bytes in DRAM that wait to be written."""
        return 0 if self._writer is None else self._writer.pending_bytes

    def settle(self) -> None:
        """Wait until everything is written."""
        if self._writer is not None:
            self._writer.flush()
        self.look()

    def clear(self) -> None:
        """Forget everything on disk."""
        self.settle()
        self.forget()
        self.tier.clear()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self.look()
        self.tier.close()

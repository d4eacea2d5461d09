"""Writes blocks of DRAM to disk in the background.

A block keeps its DRAM lock until the disk has it or has refused it, so its last copy cannot be evicted while
another is being made. Once it is durable the tree has a placement of the disk for it, whose address is its
name on the disk. The placement is a record of the write, not a guarantee: the disk evicts old blocks for new
ones by itself. It stays only as long as the block is in memory too; after that only the disk's index lists
the block.

Tenants share the disk's writer fairly: their writes take turns (`FairQueue`), and a tenant's own are written,
and end, in the order of submission. So a prompt's beginning is always written before its continuation,
because both are of one tenant. The continuation of a refused write is refused, too.

All methods run in the scheduler's thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.engine.tiers.block_names import BlockNames, pack_names
from sglang_ext.engine.tiers.retention import owner_of
from sglang_ext.errors import DeadlineError
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.loading.write_behind import WriteBehind, Written
from sglang_ext.tiered_store.tier import BlockMemory, Ids, Outcome

_MOST_COMPLETED: Final = 64
"""Writes whose end is recorded in one pass."""

Refused = Callable[[Sequence[bytes], int, Outcome], None]
"""Called with the names of a write's blocks, the number of leading ones that are durable on all ranks, and
the outcome of the next one on this rank: `DONE` where only another rank lacks it."""


@dataclass
class DiskWriteCounters:
    """Blocks, since the start."""

    written: int = 0
    write_skipped: int = 0
    """Not written because the writer was behind."""
    write_failed: int = 0
    """Not written because the disk is full, read-only or faulty; the disk tier counts them by reason."""


@dataclass(eq=False)
class _Write:
    number: int
    """Counts submissions, from 0."""
    node: Node
    owner: Hashable
    """Its tenant."""
    blocks: int
    written: Written | None = None

    @property
    def durable(self) -> int:
        """How many leading blocks the disk has; `NOT_YET` while it is being written."""
        if self.written is None:
            return NOT_YET
        done = itertools.takewhile(lambda outcome: outcome is Outcome.DONE, self.written.outcomes)
        return sum(1 for _ in done)


class DiskWrites:
    """See the module's docstring.

    Args:
        writer: in front of the disk tier.
        memory: the DRAM arena.
        ranks: agree on the durable blocks.
        write: whether blocks are written at all.
        patience: seconds that a submission waits for a writer that is behind, if it waits at all.
        renewals: the number of times that this rank's disk has lost all blocks and started empty. The tree
            then drops the disk's placements, on every rank.
    """

    def __init__(
        self,
        tree: RadixTree,
        dram: Holder,
        disk: Holder,
        names: BlockNames,
        writer: WriteBehind,
        memory: BlockMemory,
        ranks: Ranks,
        *,
        write: bool = True,
        patience: float = 5.0,
        renewals: Callable[[], int] = lambda: 0,
    ) -> None:
        self._tree = tree
        self._dram = dram
        self._disk = disk
        self.names = names
        self._write_new = write
        self._writer = writer
        self._memory = memory
        ranks.add(self)
        self._renewals = ranks.measure("lost disks", lambda: (-renewals(),))
        self._forgotten = 0
        """Losses of a rank's disk after which the disk's placements were removed from the tree."""
        self._patience = patience
        self._pending: dict[Hashable, deque[_Write]] = {}
        """The writes of each tenant that has any, the oldest first."""
        self._proposed: list[_Write] = []
        """The writes on which the ranks agree."""
        self._submitted = 0
        self._refused: dict[bytes, Outcome] = {}
        """Names of blocks of pending writes that this rank's disk or its writer has refused."""
        # Has no placements. Its locks mark the nodes that are being written, also after nodes are split.
        self._mark = Holder.of(f"{disk.instance} disk writes", disk.epoch, disk.tier)
        self.counters = DiskWriteCounters()
        self.ended = 0
        """Writes that have ended, since the start."""
        self._on_refused: Refused | None = None

    def on_refused(self, to: Refused) -> None:
        """Call ``to`` from now on for each write that is incomplete on some rank."""
        self._on_refused = to

    def submit(self, node: Node, blocks: int) -> bool:
        """Write the last ``blocks`` blocks of the path that ends at ``node``, and the blocks before them that
        were left out because the writer was behind.

        Takes over one DRAM lock of ``node``, which protects the whole path. False where writing is disabled.
        """
        if not self._write_new:
            self._tree.unlock(node, self._dram)
            return False
        path: list[Node] = []
        count = 0
        current = node
        while current.parent is not None and (count < blocks or self.left_out(current)):
            path.append(current)
            count += current.blocks
            current = current.parent
        path.reverse()
        write = _Write(self._submitted, node, owner_of(node.namespace), count)
        self._submitted += 1
        self._tree.lock(node, self._mark)
        self._pending.setdefault(write.owner, deque()).append(write)
        self._hand_over(write, np.concatenate([part.placements[self._dram] for part in path]), current)
        return True

    def _hand_over(self, write: _Write, ids: Ids, parent: Node) -> None:
        """Submit a write, whose blocks continue ``parent``, to the writer."""
        node = write.node
        digest = self.names.digest(node.namespace)
        keys = tuple(self.names.of_path(node, write.blocks))

        def done(result: Written) -> None:
            """Runs in the writer's thread, or in the scheduler's."""
            refused = (outcome is not Outcome.DONE for outcome in result.outcomes)
            self._refused.update(itertools.compress(zip(keys, result.outcomes, strict=True), refused))
            write.written = result

        outcome = self._refusal(parent)
        if outcome is Outcome.DONE:
            try:
                outcome = self._writer.submit(
                    digest,
                    keys,
                    self._memory,
                    ids,
                    owner=write.owner,
                    on_written=done,
                    timeout=self._patience,
                )
            except DeadlineError:
                outcome = Outcome.BEHIND
        if outcome is not Outcome.DONE:
            done(Written(digest, keys, (outcome,) * write.blocks))

    def _refusal(self, node: Node) -> Outcome:
        """Why this rank's disk refuses the last block of a path that is being written; `DONE` where it has
        not refused it. The disk cannot use a block without the blocks before it."""
        if not self._refused or node.is_root or not node.locks.get(self._mark):
            return Outcome.DONE
        return self._refused.get(self.names.last(node), Outcome.DONE)

    def left_out(self, node: Node) -> bool:
        """Whether ``node`` is neither on disk nor being written there."""
        return self._disk not in node.placements and not node.locks.get(self._mark)

    def _in_turns(self) -> Iterator[_Write]:
        """Pending writes: the oldest of each tenant, then the second of each, and so on; the same on all
        ranks."""
        lines = sorted(self._pending.values(), key=lambda line: line[0].number)
        for turn in itertools.zip_longest(*lines):
            yield from (write for write in turn if write is not None)

    def propose(self) -> Sequence[int]:
        """For the oldest writes of each tenant, the number of leading blocks that are durable here."""
        self._proposed = list(itertools.islice(self._in_turns(), _MOST_COMPLETED))
        return [write.durable for write in self._proposed]

    def act(self, agreed: Sequence[int]) -> None:
        """Complete the writes that have ended on every rank, of each tenant in the order of submission."""
        self._forget_lost()
        proposed, self._proposed = self._proposed, []
        if agreed:
            self._end(proposed, agreed)

    def _end(self, writes: Sequence[_Write], durable_blocks: Sequence[int]) -> None:
        waiting: set[Hashable] = set()
        for write, durable in zip(writes, durable_blocks, strict=True):
            line = self._pending.get(write.owner)
            if durable == NOT_YET:
                waiting.add(write.owner)
            elif write.owner not in waiting and line is not None and line[0] is write:
                line.popleft()
                if not line:
                    del self._pending[write.owner]
                self._complete(write, durable)

    def _forget_lost(self) -> None:
        """Remove the disk's placements from the tree when any rank's disk has lost its blocks and started
        empty.
        """
        lost = 0 if self._renewals.numbers is None else -self._renewals.numbers[0]
        if lost > self._forgotten:
            self._forgotten = lost
            self.clear()

    def _complete(self, write: _Write, durable: int) -> None:
        assert write.written is not None
        self.ended += 1
        self.counters.written += durable
        if durable < write.blocks:
            outcome = write.written.outcomes[durable]
            if outcome is Outcome.BEHIND:
                self.counters.write_skipped += write.blocks - durable
            else:
                self.counters.write_failed += write.blocks - durable
            if self._on_refused is not None:
                self._on_refused(write.written.keys, durable, outcome)
            for name in write.written.keys:
                self._refused.pop(name, None)
        self._place(write, durable)
        self._tree.unlock(write.node, self._mark)
        self._tree.unlock(write.node, self._dram)

    def _place(self, write: _Write, durable: int) -> None:
        path: list[Node] = []
        count = 0
        current = write.node
        while count < write.blocks:
            path.append(current)
            count += current.blocks
            assert current.parent is not None
            current = current.parent
        start = 0
        assert write.written is not None
        names = pack_names(write.written.keys)
        for node in reversed(path):
            end = start + node.blocks
            if end > durable or not self.place(node, names[start:end]):
                return
            start = end

    def place(self, node: Node, names: object) -> bool:
        """Record that the disk has ``node``. False when the disk lacks the parent, which makes the block
        useless there.
        """
        parent = node.parent
        assert parent is not None
        if not parent.is_root and self._disk not in parent.placements:
            return False
        if self._disk not in node.placements:
            self._tree.place(node, self._disk, names)
        return True

    def durable(self, node: Node) -> bool:
        """Whether the tree has a placement of the disk for ``node``; the disk may have evicted it since."""
        return self._disk in node.placements

    @property
    def writing(self) -> bool:
        return bool(self._pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes in DRAM that wait for the disk."""
        return self._writer.pending_bytes

    def settle(self) -> None:
        """Wait until all submitted blocks have been written or refused. The ranks need not agree on which:
        `clear` follows.
        """
        self._writer.flush()
        writes = list(self._in_turns())
        self._end(writes, [write.durable for write in writes])

    def clear(self) -> None:
        """Remove the disk's placements from the tree."""
        self._tree.drop_holder(self._disk)

    def close(self) -> None:
        """Finish all submitted writes, and end."""
        self._writer.close()

    def __repr__(self) -> str:
        pending = sum(map(len, self._pending.values()))
        return f"DiskWrites(pending={pending}, {self.counters}, {self._writer!r})"

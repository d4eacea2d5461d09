"""The disk of a simulated instance with its times: the engine's own writes, reads and decisions over `disk`.

A server reads and writes in threads. Here the same queues are emptied by timers: a read or a write takes the
time that its bytes take at the disk's rate, and is carried out when that is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np

from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.block_names import BlockNames
from sglang_ext.engine.tiers.disk_reads import DiskReads
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.load_policy import DiskPolicy
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.weights import Weights
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import Namespace
from sglang_ext.mempool.store import Store
from sglang_ext.protocol.agent import Naming
from sglang_ext.radix_global import Holder
from sglang_ext.simulator.disk import NamedDisk
from sglang_ext.simulator.links import Flow, Network, SharedLink
from sglang_ext.simulator.settings import BLOCK_TOKENS, Settings
from sglang_ext.simulator.virtual_time import VirtualClock
from sglang_ext.tiered_store.loading.layers import LayerTask
from sglang_ext.tiered_store.loading.loader import Load, Loader, OnLayer
from sglang_ext.tiered_store.loading.write_behind import OnWritten, WriteBehind
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, Outcome
from sglang_ext.tiers import Tier

READ_BYTES: Final = 64 << 20
"""Being read at a time, as a server has it."""
BACKLOG_BYTES: Final = 1 << 30
"""Most that waits to be written, as a server has it; half of DRAM if that is less."""


class TimedLoader(Loader):
    """A loader whose reads take their time on a link.

    Args:
        read: called when a layer has been read.
    """

    def __init__(
        self, network: Network, link: SharedLink, now: Callable[[], float], read: Callable[[], None]
    ):
        super().__init__(READ_BYTES, threads=0, now=now)
        self._network, self._link, self._ended = network, link, read
        self._flows: dict[LayerTask, Flow] = {}

    def load(
        self,
        tier: BlockTier,
        get: Get,
        memory: BlockMemory | None,
        ids: Ids | Sequence[int],
        *,
        on_layer: OnLayer | None = None,
        priority: int = 0,
    ) -> Load:
        load = super().load(tier, get, memory, ids, on_layer=on_layer, priority=priority)
        self._begin()
        return load

    def cancel(self, load: Load) -> None:
        """As a loader; its reads under way end now, since a single thread cannot wait for them."""
        super().cancel(load)
        for task in [task for task in self._flows if task.request is load]:
            self._network.stop(self._flows.pop(task))
            self.read(task)
        self._begin()

    def _begin(self) -> None:
        while (task := self.start()) is not None:
            done = functools.partial(self._done, task)
            self._flows[task] = self._network.start(task.nbytes, (self._link,), done)

    def _done(self, task: LayerTask) -> None:
        del self._flows[task]
        self.read(task)
        self._begin()
        self._ended()

    def close(self) -> None:
        for flow in self._flows.values():
            self._network.stop(flow)
        self._flows.clear()


class TimedWriter(WriteBehind):
    """A writer whose submissions take their time on a link, one after the other.

    Args:
        written: called when one has been written.
    """

    def __init__(
        self, tier: BlockTier, network: Network, link: SharedLink, backlog: int, written: Callable[[], None]
    ) -> None:
        super().__init__(tier, backlog_bytes=backlog, group_bytes=1, threaded=False)
        self._network, self._link, self._ended = network, link, written
        self._flow: Flow | None = None

    def submit(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        memory: BlockMemory,
        ids: Ids | Sequence[int],
        *,
        owner: Hashable = None,
        on_written: OnWritten | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        outcome = super().submit(
            namespace, keys, memory, ids, owner=owner, on_written=on_written, timeout=timeout
        )
        self._begin()
        return outcome

    def _begin(self) -> None:
        if self._flow is None and self._queue:
            self._flow = self._network.start(self._queue.first.nbytes, (self._link,), self._done)

    def _done(self) -> None:
        self._flow = None
        self.step()
        self._begin()
        self._ended()

    def flush(self, timeout: float | None = None) -> None:
        """All that waits is written now."""
        self._stop()
        while self.step():
            pass

    def close(self) -> None:
        """Nothing more is written."""
        self._stop()

    def _stop(self) -> None:
        if self._flow is not None:
            self._network.stop(self._flow)
            self._flow = None


class Drive:
    """The disk of one instance, and what hangs on it.

    Args:
        name, epoch: of the instance.
        block_bytes: of a block.
        wake: called when something has been read or written.
        disk: that the process before has left; a new one without it.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        settings: Settings,
        store: Store,
        dram: Holder,
        block_bytes: int,
        ranks: Ranks,
        weights: Weights,
        clock: VirtualClock,
        network: Network,
        wake: Callable[[], None],
        disk: NamedDisk | None,
    ) -> None:
        self._settings, self._clock, self._block_bytes = settings, clock, block_bytes
        layout = BlockLayout.uniform(
            n_layers=1, planes_per_layer=1, row_bytes=block_bytes // BLOCK_TOKENS, block_tokens=BLOCK_TOKENS
        )
        self.tier = NamedDisk(settings.disk, layout, clock.wall) if disk is None else disk
        self.reading = SharedLink(f"{name} disk reads", settings.disk_read)
        self.writing = SharedLink(f"{name} disk writes", settings.disk_write)
        self._loader = TimedLoader(network, self.reading, clock.monotonic, wake)
        # Rows of no block: nothing is read from them, and nothing written to them.
        self._memory = BlockMemory.of_blocks(layout, np.empty((0, layout.block_bytes), np.uint8))
        identity = Namespace(
            model="simulated",
            weights_version=weights.version(0) or "",
            dtype="",
            geometry=layout.facts(),
            shard="",
        )
        holder = Holder.of(name, epoch, Tier.DISK)
        names = BlockNames(identity, BLOCK_TOKENS, holder, f"{epoch:x}", weights=weights)
        self.naming = Naming(
            identity.model, names.weights(0), identity.dtype, identity.geometry, identity.shard
        )
        backlog = min(BACKLOG_BYTES, settings.dram * block_bytes // 2)
        writer = TimedWriter(self.tier, network, self.writing, backlog, wake)
        self.writes = DiskWrites(store.tree, dram, holder, names, writer, self._memory, ranks)

    def promotions(self, store: Store, dram_tier: DramTier, moves: Moves, least_tokens: int) -> Promotions:
        """The planner of requests that wait for the disk. least_tokens: shorter runs are computed."""
        policy = DiskPolicy(BLOCK_TOKENS, self._block_bytes, least_tokens=least_tokens)
        reads = DiskReads(store, dram_tier, self.writes, self.tier, self._loader, self._memory, policy, moves)
        return Promotions(store.tree, self.tier, self._loader, reads)

    def close(self) -> None:
        """The process ends: nothing is read or written any more."""
        self._loader.close()
        self.writes.close()

    def check(self) -> None:
        """Verify the invariants. Raises AssertionError."""
        self.tier.check()
        self._loader.check()

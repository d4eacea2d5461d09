"""Loads in front of the forward pass: threads that read layers from tiers in the order of `LayerQueue`.

    load = loader.load(tier, tier.prepare_get(namespace, keys), memory, ids, on_layer=copy_to_hbm)
    load.wait(0)      # the forward pass of layer i waits for layer i only
    ...
    load.result()     # how many blocks came, and if not all, why

A layer counts as in once its bytes verify in memory and `on_layer` has returned. Where a block cannot be
read, the prefix ends before it: `wait` reports this to a forward pass that counted on it. The rest of the
load continues with the remaining blocks, which a load ahead of its request can still use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import DeadlineError, InternalError
from sglang_ext.tiered_store.loading.layers import LayerQueue, LayerTask
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome

OnLayer: TypeAlias = "Callable[[int, BlockMemory, int], None]"
"""Called with a layer, the memory, and how many leading blocks of it have their bytes there: to copy them on.
Called in the thread that read them."""


class Load:
    """One request's load. Made by `Loader.load`."""

    def __init__(
        self,
        tier: BlockTier,
        get: Get,
        memory: BlockMemory | None,
        ids: Ids,
        on_layer: OnLayer | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.get = get
        self.blocks = len(ids)
        self._memory = memory
        self._ids = ids
        self._on_layer = on_layer
        self._state = threading.Condition()
        self._arrived = [False] * tier.layout.n_layers
        self._read = LayerRead(len(ids), Outcome.DONE)
        self._error: BaseException | None = None
        self._ending = False
        self._over = False
        self._now = now
        self._begun = now()
        self.seconds = 0.0
        """From the request to the end, once it is over."""

    def wait(self, layer: int, timeout: float | None = None) -> LayerRead:
        """Return when a layer is in, or will not come: the blocks that can be had, and why not all that were
        asked.

        Raises:
            DeadlineError: neither has happened after `timeout` seconds.
            InternalError: `on_layer` or the tier has raised; the cause is attached.
        """
        with self._state:
            if not self._state.wait_for(lambda: self._arrived[layer] or self._stopped, timeout):
                raise DeadlineError(f"layer {layer} has not been loaded after {timeout} s")
            self._raise()
            return self._read

    def arrived(self, layer: int) -> bool:
        """Whether a layer is in. Does not wait."""
        return self._arrived[layer]

    def decided(self, layer: int) -> bool:
        """Whether a layer is in, or will not come any more: `wait` returns at once."""
        return self._arrived[layer] or self._stopped

    @property
    def over(self) -> bool:
        """Whether nothing more is read: `result` returns at once."""
        return self._over

    def result(self, timeout: float | None = None) -> LayerRead:
        """Return when nothing more will be read: the blocks of which all layers are in, and why not more.

        Raises as `wait`.
        """
        with self._state:
            if not self._state.wait_for(lambda: self._over, timeout):
                raise DeadlineError(f"the load has not ended after {timeout} s")
            self._raise()
            return self._read

    @property
    def _stopped(self) -> bool:
        """Whether nothing more is read for this load."""
        return self._over or self._error is not None or not self._read.blocks

    def _raise(self) -> None:
        if self._error is not None:
            raise InternalError("a load has failed in a way that no tier may") from self._error

    def _run(self, layer: int, staging: Callable[[int], BlockMemory]) -> bool:
        """Read one layer; whether the load goes on."""
        count = min(self.get.blocks, self.blocks)
        memory = self._memory or staging(count)
        read = self.tier.get_layer(self.get, layer, memory, self._ids[:count])
        if read.blocks and self._on_layer is not None:
            self._on_layer(layer, memory, read.blocks)
        with self._state:
            # Another layer may have shortened the get already, without having noted why yet.
            blocks = min(read.blocks, self._read.blocks)
            why = self._read.outcome if read.outcome is Outcome.DONE else read.outcome
            self._read = LayerRead(blocks, why)
            self._arrived[layer] = True
            self._state.notify_all()
            return not self._stopped

    def _fail(self, error: BaseException) -> None:
        with self._state:
            self._error = self._error or error
            self._state.notify_all()

    def _stop(self, outcome: Outcome) -> None:
        with self._state:
            if not self._over and not all(self._arrived):
                self._read = LayerRead(0, outcome)
            self._state.notify_all()

    def _end(self) -> None:
        with self._state:
            if self._ending:
                return
            self._ending = True
        self.tier.complete_get(self.get)
        with self._state:
            self._over = True
            self.seconds = self._now() - self._begun
            self._state.notify_all()

    def __repr__(self) -> str:
        layers = f"{sum(self._arrived)}/{len(self._arrived)} layers"
        return f"<Load {self._read.blocks}/{self.blocks} blocks, {layers}, {self._read.outcome.value}>"


class Loader:
    """Threads that load.

    Args:
        budget: most bytes being read at once.
        threads: most reads at once; enough of them to use the budget with small reads. 0: the caller reads,
            by `start` and `read`.
        patience, at_once: see `LayerQueue`.
        now: seconds, by which loads are timed.
    """

    def __init__(
        self,
        budget: int,
        *,
        threads: int = 4,
        patience: int = 64,
        at_once: int = 1,
        name: str = "kv-load",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._queue = LayerQueue(budget, patience=patience, at_once=at_once)
        self._work = threading.Condition()
        self._closing = False
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

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
        """Begin to load the first `len(ids)` blocks of a get; ends the get when it is over.

        Args:
            memory, ids: where the blocks go, as in `BlockTier.get_layer`. None: each layer goes to a staging
                buffer as blocks 0, 1, ..., which is `on_layer`'s to copy from and then used again.
            priority: larger goes first among equal layers.

        Raises:
            ValueError: more ids than the get has blocks, or staging without `on_layer`.
        """
        array = np.arange(len(ids)) if memory is None else np.ascontiguousarray(ids, dtype=np.int64)
        if len(array) > get.blocks:
            raise ValueError(f"{len(array)} blocks wanted of a get that has {get.blocks}")
        if memory is None and on_layer is None:
            raise ValueError("a load through staging needs on_layer, which copies the bytes on")
        load = Load(tier, get, memory, array, on_layer, self._now)
        layout = tier.layout
        sizes = [layout.layer_bytes(i) * len(array) for i in range(layout.n_layers)]
        with self._work:
            accepted = len(array) > 0 and not self._closing
            if accepted:
                self._queue.add(load, sizes, priority=priority)
                self._work.notify_all()
        if not accepted:
            if len(array):
                load._stop(Outcome.CLOSED)
            load._end()
        return load

    def cancel(self, load: Load) -> None:
        """Read nothing more for a load. Reads under way come to their end; `result` says when they have."""
        load._stop(Outcome.ABSENT)
        with self._work:
            gone = self._queue.cancel(load)
        if gone:
            load._end()

    def set_priority(self, load: Load, priority: int) -> None:
        """Change a load's priority: an advisory's load becomes a request's."""
        with self._work:
            self._queue.set_priority(load, priority)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self.read(task)

    def start(self) -> LayerTask | None:
        """The next layer to read, now in flight; None for none."""
        with self._work:
            return self._queue.start()

    def read(self, task: LayerTask) -> None:
        """Read a layer that is in flight."""
        load = task.request
        assert isinstance(load, Load)
        try:
            goes_on = self._read(load, task)
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            load._fail(error)
            goes_on = False
        with self._work:
            over = self._queue.finish(task)
            if not over and not goes_on:
                over = self._queue.cancel(load)
            self._work.notify_all()
        if over:
            load._end()

    def _read(self, load: Load, task: LayerTask) -> bool:
        taken: list[npt.NDArray[np.uint8]] = []

        def staging(blocks: int) -> BlockMemory:
            taken.append(self._take(task.nbytes))
            return BlockMemory.of_staging(load.tier.layout, taken[0], blocks)

        try:
            return load._run(task.layer, staging)
        finally:
            with self._work:
                self._spare += taken

    def _take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A page-aligned buffer of at least that size, reused if possible."""
        with self._work:
            self._spare.sort(key=lambda buffer: buffer.size)
            for i, buffer in enumerate(self._spare):
                if buffer.size >= nbytes:
                    return self._spare.pop(i)
            if self._spare:
                self._spare.pop()  # too small: give way to the larger one
        whole = np.zeros(nbytes + 4096, dtype=np.uint8)
        start = -whole.ctypes.data % 4096
        return whole[start : start + nbytes]

    def _next(self) -> LayerTask | None:
        with self._work:
            while True:
                task = self._queue.start()
                if task is not None:
                    return task
                if self._closing and not len(self._queue):
                    self._work.notify_all()
                    return None
                self._work.wait()

    def bytes_left(self, load: Load) -> int:
        """Bytes of a load that have not been started to be read."""
        with self._work:
            return self._queue.bytes_left(load)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of loads that have not been started to be read."""
        with self._work:
            return self._queue.waiting_bytes

    def check(self) -> None:
        """Verify the queue. Raises AssertionError naming the violated invariant."""
        with self._work:
            self._queue.check()

    def close(self) -> None:
        """Finish the reads under way and end the threads. May be called twice."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def __repr__(self) -> str:
        return f"<Loader {self._queue!r}, {len(self._threads)} threads{', closing' if self._closing else ''}>"

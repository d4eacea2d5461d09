"""Writing behind: blocks that lie in memory are put into a slower tier in the background, in groups.

One thread writes: a disk's order of writing is the order of its segments, and one sync serves a whole group.
Tenants share it by `FairQueue`: they take turns by bytes, and a tenant's submissions are written in order.
The queue is bounded in bytes. When the writer lags, a submission waits for room or is skipped and counted, as
configured. Before it is skipped, other tenants' submissions that would be written after it give way and are
skipped in its place. A tenant alone loses nothing that has been accepted.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from sglang_ext.errors import DeadlineError
from sglang_ext.tiered_store.loading.fair_queue import FairQueue
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Ids, Outcome, Put

logger = logging.getLogger(__name__)


class LagPolicy(enum.Enum):
    """The behaviour of a submission when the writer lags."""

    WAIT = "wait"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a submission.

    outcomes: for each key `DONE` when the tier has it now, else why not.
    """

    namespace: bytes
    keys: tuple[bytes, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def done(self) -> bool:
        """Whether the tier has every block."""
        return all(outcome is Outcome.DONE for outcome in self.outcomes)


OnWritten: TypeAlias = "Callable[[Written], None]"


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    namespace: bytes
    keys: tuple[bytes, ...]
    memory: BlockMemory
    ids: Ids
    nbytes: int
    on_written: OnWritten | None


class WriteBehind:
    """A queue in front of a tier, and the thread that empties it.

    Args:
        backlog_bytes: most bytes that wait; a single submission larger than that is accepted alone.
        lag: the behaviour when that is reached.
        group_bytes: bytes that are completed with one sync, if so many wait.
        threaded: without a thread, `step` writes a group when it is called; for tests.

    The caller keeps the memory of a submission unchanged until its `on_written` has been called, which is
    always called for an accepted one: from the writing thread, or, where it is skipped for another tenant's,
    from the thread that submits that one. It must not call `submit`.
    """

    def __init__(
        self,
        tier: BlockTier,
        *,
        backlog_bytes: int,
        lag: LagPolicy = LagPolicy.SKIP,
        group_bytes: int = 64 << 20,
        threaded: bool = True,
        name: str = "kv-write-behind",
    ) -> None:
        self.tier = tier
        self.backlog_bytes = backlog_bytes
        self.lag = lag
        self.group_bytes = group_bytes
        self.counters: Counter[Outcome] = Counter()
        self._state = threading.Condition()
        self._queue: FairQueue[_Item] = FairQueue()
        self._writing = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    # --- submitting ---

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
        """Hand blocks of a prefix over to be written.

        Args:
            memory, ids: where their bytes lie, one id for each key.
            owner: the tenant whose turn it takes. A prefix and what continues it have the same one, so that a
                parent is written before its children.
            timeout: seconds to wait for room, with `LagPolicy.WAIT`.

        Returns:
            `DONE` when accepted, `BEHIND` when skipped, `CLOSED` after `close`.

        Raises:
            DeadlineError: there was no room in time.
            ValueError: not as many ids as keys.
        """
        array = np.array(ids, dtype=np.int64)
        if array.shape != (len(keys),):
            raise ValueError(f"{array.shape} ids for {len(keys)} keys")
        nbytes = len(keys) * self.tier.layout.block_bytes
        item = _Item(namespace, tuple(keys), memory, array, nbytes, on_written)
        with self._state:
            if not self._fits(nbytes) and self.lag is LagPolicy.WAIT:
                self._state.wait_for(lambda: self._fits(nbytes) or self._over, timeout)
            if self._over:
                self.counters[Outcome.CLOSED] += len(keys)
                return Outcome.CLOSED
            most = self.backlog_bytes - self._writing
            skipped = [] if self._fits(nbytes) else self._queue.make_room(owner, nbytes, most)
            if skipped is None:
                return self._behind(item, timeout)
            self._queue.push(owner, nbytes, item)
            self._state.notify_all()
        for each in skipped:
            self._report(each, [Outcome.BEHIND] * len(each.keys))
        return Outcome.DONE

    def _behind(self, item: _Item, timeout: float | None) -> Outcome:
        """There is no room for a submission."""
        if self.lag is LagPolicy.WAIT:
            raise DeadlineError(
                f"the writer to {self.tier.tier.title} has been behind for {timeout} s with "
                f"{self._queue.nbytes} bytes waiting",
                field="--kv-disk-io lag",
                hint="Let writes be skipped, or use a faster disk",
            )
        self.counters[Outcome.BEHIND] += len(item.keys)
        return Outcome.BEHIND

    def _fits(self, nbytes: int) -> bool:
        pending = self.pending_bytes
        return pending == 0 or pending + nbytes <= self.backlog_bytes

    @property
    def _over(self) -> bool:
        return self._closing or self._failure is not None

    @property
    def pending_bytes(self) -> int:
        """Bytes accepted and not yet written."""
        return self._queue.nbytes + self._writing

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything accepted so far and since has been written or has failed.

        Raises:
            DeadlineError: that took longer than `timeout` seconds.
        """
        with self._state:
            idle = lambda: not self.pending_bytes or self._failure is not None  # noqa: E731
            if not self._state.wait_for(idle, timeout):
                raise DeadlineError(f"{self.pending_bytes} bytes have not been written after {timeout} s")

    # --- writing ---

    def _run(self) -> None:
        try:
            while True:
                with self._state:
                    self._state.wait_for(lambda: self._queue or self._closing)
                    if not self._queue:
                        return
                self.step()
        except BaseException as error:
            logger.exception("the writer to %s has failed; nothing more is written", self.tier.tier.title)
            with self._state:
                self._failure = error
                left = [self._queue.pop() for _ in range(len(self._queue))]
                self._state.notify_all()
            for item in left:
                self._report(item, [Outcome.IO_ERROR] * len(item.keys))

    def step(self) -> int:
        """Write one group; returns the number of submissions in it."""
        with self._state:
            group: list[_Item] = []
            size = 0
            while self._queue and (not group or size + self._queue.first.nbytes <= self.group_bytes):
                group.append(self._queue.pop())
                size += group[-1].nbytes
            self._writing += size
        outcomes = [[Outcome.IO_ERROR] * len(item.keys) for item in group]
        try:
            outcomes = self._write(group)
        finally:  # whatever has happened, the memory is the caller's again
            for item, outcome in zip(group, outcomes, strict=True):
                self._report(item, outcome)
            with self._state:
                self._writing -= size
                self._state.notify_all()
        return len(group)

    def _report(self, item: _Item, outcomes: Sequence[Outcome]) -> None:
        with self._state:
            self.counters.update(outcomes)
        if item.on_written is not None:
            item.on_written(Written(item.namespace, item.keys, tuple(outcomes)))

    def _write(self, group: Sequence[_Item]) -> list[list[Outcome]]:
        """Write a group and complete it with one sync; for each item the outcome of each key."""
        outcomes: list[list[Outcome]] = [[Outcome.DONE] * len(item.keys) for item in group]
        puts: list[tuple[int, Put]] = []
        for number, item in enumerate(group):
            put = self.tier.prepare_put(item.namespace, item.keys)
            if isinstance(put, Outcome):
                outcomes[number] = [put] * len(item.keys)
                continue
            for position in put.refused:
                outcomes[number][position] = Outcome.FULL
            failed = self._write_layers(put, item)
            if failed is None:
                puts.append((number, put))
            else:
                self.tier.abort_put(put)
                _set(outcomes[number], put, failed)
        completed = self.tier.complete_puts([put for _, put in puts])
        for (number, put), outcome in zip(puts, completed, strict=True):
            _set(outcomes[number], put, outcome)
        return outcomes

    def _write_layers(self, put: Put, item: _Item) -> Outcome | None:
        if not put.missing:
            return None
        ids = item.ids[list(put.missing)]
        for layer in range(self.tier.layout.n_layers):
            outcome = self.tier.put_layer(put, layer, item.memory, ids)
            if outcome is not Outcome.DONE:
                return outcome
        return None

    # --- whole ---

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        with self._state:
            self._queue.check()

    def close(self) -> None:
        """Write all accepted submissions, and end. May be called twice."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            while self.step():
                pass

    def __repr__(self) -> str:
        state = "failed" if self._failure else "closing" if self._closing else "open"
        return (
            f"<WriteBehind to {self.tier.tier.title} {state}, {len(self._queue)} waiting, "
            f"{self.pending_bytes} of {self.backlog_bytes} bytes>"
        )


def _set(outcomes: list[Outcome], put: Put, outcome: Outcome) -> None:
    for position in put.missing:
        outcomes[position] = outcome

"""A trace of device work in program order, and the order that the program enforces, as vector clocks.

Each operation belongs to a timeline (a stream, a thread of the host, a NIC) and follows the operations before
it there; waits, events and synchronizations add order between timelines. Two accesses to one cell of memory,
one of them a write, must be ordered. One run covers all interleavings of its trace, because an order that
only the moment enforces is in no clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.int64]
Clock = dict[int, int]
"""The number of operations of each timeline that come before; absent is none."""


def join(clock: Clock, other: Clock) -> None:
    """Let everything before ``other`` be before ``clock`` too."""
    for timeline, count in other.items():
        if clock.get(timeline, 0) < count:
            clock[timeline] = count


@dataclass(eq=False)
class Timeline:
    """Operations that follow each other."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)
    """The operations that its next one follows."""


@dataclass(eq=False)
class Memory:
    """Memory in cells, the unit in which accesses are compared: a slot of a plane, a layer of a block.

    cells: the cell of each byte; None where all bytes are one cell.
    """

    name: str
    address: int
    nbytes: int
    cells: npt.NDArray[np.int32] | None = None
    pinned: bool = False
    last_write: dict[int, Operation] = field(default_factory=dict)
    reads: dict[int, dict[int, Operation]] = field(default_factory=dict)

    def at(self, offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Cells:
        """The cells of a view of elements, offset and strides in bytes."""
        if 0 in shape:
            return np.zeros(0, np.int64)
        if self.cells is None:
            return np.zeros(1, np.int64)
        if (
            offset < 0
            or offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= self.nbytes
        ):
            raise ValueError(f"a view leaves {self.name}")
        starts = np.lib.stride_tricks.as_strided(self.cells[offset:], shape, [s * 4 for s in strides])
        ends = self.cells[offset + itemsize - 1 :]
        last = np.lib.stride_tricks.as_strided(ends, shape, [s * 4 for s in strides])
        return np.union1d(starts, last).astype(np.int64)


Access = tuple[Memory, Cells]


@dataclass(eq=False)
class Operation:
    """Work on a timeline. clock: of itself and everything before it."""

    name: str
    timeline: Timeline
    clock: Clock
    reads: Sequence[Access]
    writes: Sequence[Access]
    action: Callable[[], None] | None
    site: str = ""

    @property
    def index(self) -> int:
        return self.clock[self.timeline.number]

    def before(self, other: Operation) -> bool:
        """Whether it always ends before the other begins."""
        return other.clock.get(self.timeline.number, 0) >= self.index

    def __repr__(self) -> str:
        return f"{self.name} on {self.timeline.name}"


@dataclass(frozen=True)
class Race:
    """Two accesses without an order. The first came first in the program."""

    memory: str
    cells: tuple[int, ...]
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.memory} {list(self.cells)}: {self.first} | {self.second}"


class Trace:
    """Records operations, carries each out when it is recorded, and collects races."""

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self.operations: list[Operation] = []
        self.races: dict[tuple[str, str, str], Race] = {}
        self.host = self.timeline("host")
        self.synchronizations: list[str] = []
        """Where the host has waited for a device."""

    def timeline(self, name: str, after: Sequence[Timeline] = ()) -> Timeline:
        """A new timeline, which begins after the present operations of others."""
        made = Timeline(len(self.timelines), name)
        for other in after:
            join(made.clock, other.clock)
        self.timelines.append(made)
        return made

    def run(
        self,
        timeline: Timeline,
        name: str,
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        action: Callable[[], None] | None = None,
        site: str = "",
    ) -> Operation:
        """Record an operation that the host submits now."""
        join(timeline.clock, self.host.clock)
        timeline.clock[timeline.number] = timeline.clock.get(timeline.number, 0) + 1
        operation = Operation(name, timeline, dict(timeline.clock), reads, writes, action, site)
        for memory, cells in reads:
            self._read(operation, memory, cells)
        for memory, cells in writes:
            self._write(operation, memory, cells)
        if action is not None:
            action()
        self.operations.append(operation)
        return operation

    def wait(self, clock: Clock, site: str) -> None:
        """The host waits."""
        self.synchronizations.append(site)
        join(self.host.clock, clock)

    def _read(self, operation: Operation, memory: Memory, cells: Cells) -> None:
        for cell in cells.tolist():
            self._compare(memory.last_write.get(cell), operation, memory, cell)
            memory.reads.setdefault(cell, {})[operation.timeline.number] = operation

    def _write(self, operation: Operation, memory: Memory, cells: Cells) -> None:
        for cell in cells.tolist():
            self._compare(memory.last_write.get(cell), operation, memory, cell)
            for reader in memory.reads.pop(cell, {}).values():
                if reader is not operation:
                    self._compare(reader, operation, memory, cell)
            memory.last_write[cell] = operation

    def _compare(self, earlier: Operation | None, later: Operation, memory: Memory, cell: int) -> None:
        if earlier is None or earlier is later or earlier.before(later):
            return
        key = memory.name, repr(earlier), repr(later)
        known = self.races.get(key)
        self.races[key] = Race(*key[:1], (*(known.cells if known else ()), cell), *key[1:])

    def orders(self, seed: int) -> list[Operation]:
        """The operations in a random order that the clocks allow."""
        rng = random.Random(seed)
        waiting: dict[int, list[Operation]] = {}
        for operation in reversed(self.operations):
            waiting.setdefault(operation.timeline.number, []).append(operation)
        done: Clock = {}
        found = []
        while waiting:
            # Timelines are favoured by a draw that changes seldom, so that some run far ahead of others.
            ready = [number for number, queue in waiting.items() if self._ready(queue[-1], done)]
            number = max(ready, key=lambda n: (hash((seed, n, len(found) // 40)), rng.random()))
            operation = waiting[number].pop()
            if not waiting[number]:
                del waiting[number]
            done[number] = operation.index
            found.append(operation)
        return found

    @staticmethod
    def _ready(operation: Operation, done: Clock) -> bool:
        own = operation.timeline.number
        return all(
            done.get(number, 0) >= count - (number == own) for number, count in operation.clock.items()
        )

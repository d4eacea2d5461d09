"""Movers and copiers that tests move by hand."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_ext.engine.movers.mover import (
    BlockIds,
    LayerCopier,
    LayerSink,
    Near,
    Slots,
    Source,
    of_blocks,
    rest_of,
)

DEADLINE_S = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Return when ``condition`` holds; fail after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        threading.Event().wait(0.001)


class GatedCopier:
    """A copier that takes its steps when it is allowed to, and keeps a log of them.

    The slots given to ``plan`` name the operation in the log.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0.0
        self.started: list[tuple[str, str, int]] = []
        self.finished: list[tuple[str, str, int]] = []
        self.fail_at: tuple[str, str, int] | None = None

    def allow(self, steps: float = float("inf")) -> None:
        """Let so many further steps be taken."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    def wait_started(self, count: int) -> None:
        """Wait until ``count`` steps were begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= count, DEADLINE_S), self.started

    def plan(self, slots: Slots, blocks: BlockIds) -> Any:
        if slots == "bad":
            raise ValueError("a slot is out of range")
        return slots

    def gather(self, plan: Any, layer: int) -> int:
        return self._step(("write", plan, layer))

    def scatter(self, plan: Any, layer: int) -> int:
        return self._step(("load", plan, layer))

    def _step(self, step: tuple[str, str, int]) -> int:
        with self._changed:
            self.started.append(step)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed >= 1, DEADLINE_S), "no step was allowed"
            self._allowed -= 1
            if step == self.fail_at:
                raise OSError("no such memory")
            self.finished.append(step)
            self._changed.notify_all()
        return 1


class HandMover:
    """A mover without a thread: it copies when it must, or on a test's command.

    It does no more than its contract says: ``wait_layer`` brings in that layer of the loads up to the ticket
    and nothing else. Other copies under way move at random, each time that their progress is read.

    Args:
        copier: copies; ``None`` for a mover that only counts.
        n_layers: layers of an operation.
        pace: decides how many layers are copied at each read; ``None`` for none.
    """

    def __init__(self, copier: LayerCopier | None, n_layers: int, pace: random.Random | None = None) -> None:
        self._copier = copier
        self._n_layers = n_layers
        self._pace = pace
        self._loads: deque[list[Any]] = deque()
        self._writes: deque[list[Any]] = deque()
        self._loads_done = 0
        self._writes_done = 0
        self.closed = False

    streams = False

    def write(self, slots: Slots, blocks: BlockIds) -> int:
        self._writes.append([self._plan(slots, blocks), 0])
        return self._writes_done + len(self._writes) - 1

    def fill(self, slots: Slots, blocks: BlockIds, layer: int, place: int) -> int:
        step = [self._plan(slots, blocks), self._n_layers - 1, "layer", layer, place]
        self._writes.append(step)
        return self._writes_done + len(self._writes) - 1

    def load(
        self, slots: Slots, blocks: BlockIds, source: Source | None = None, near: Sequence[Near] = ()
    ) -> int:
        assert source is None, "not asked to stream"
        self._loads.append([self._plan(slots, blocks), 0, self._near(slots, blocks, near)])
        return self._loads_done + len(self._loads) - 1

    blocks_without_kernel = 0
    load_bytes_per_second: float | None = None
    """The speed that it reports."""

    def bring(self, slots: Slots, blocks: BlockIds) -> int:
        self._writes.append([self._plan(slots, blocks), 0, "inwards"])
        return self._writes_done + len(self._writes) - 1

    def _plan(self, slots: Slots, blocks: BlockIds) -> Any:
        return None if self._copier is None else self._copier.plan(np.array(slots), np.array(blocks))

    def _near(self, slots: Slots, blocks: BlockIds, near: Sequence[Near]) -> dict[int, Any]:
        """By layer: copies within HBM, and the plan for the rest."""
        if self._copier is None:
            return {}
        rows, blocks = np.array(slots), np.array(blocks)
        found: dict[int, Any] = {}
        for layer, parts, far in rest_of(near, len(blocks)):
            within = [
                (p.place, self._copier.plan_within(p.slots, of_blocks(rows, p.positions, len(blocks))))
                for p in parts
            ]
            rest = None if far is None else self._plan(of_blocks(rows, far, len(blocks)), blocks[far])
            found[layer] = (within, rest)
        return found

    def follow(self, source: Source) -> int:
        raise AssertionError("not asked to stream")

    def into(self, slots: Slots) -> LayerSink:
        raise AssertionError("not asked to stream")

    def writes_done(self) -> int:
        self._move_at_random()
        return self._writes_done

    def loads_done(self) -> int:
        self._move_at_random()
        return self._loads_done

    def wait_layer(self, ticket: int, layer: int) -> None:
        assert ticket < self._loads_done + len(self._loads), "waited for a load that was never submitted"
        for operation in list(self._loads)[: max(0, ticket - self._loads_done + 1)]:
            while operation[1] <= layer:
                self._copy_load(operation)
        self._retire()

    def wait_writes(self, count: int) -> None:
        self.copy_writes(count - self._writes_done)

    def settle(self) -> None:
        self.copy_loads(len(self._loads))
        self.copy_writes(len(self._writes))

    def close(self) -> None:
        self.settle()
        self.closed = True

    def copy_loads(self, count: int) -> None:
        """Complete the oldest ``count`` loads."""
        for operation in list(self._loads)[:count]:
            while operation[1] < self._n_layers:
                self._copy_load(operation)
        self._retire()

    def copy_writes(self, count: int) -> None:
        """Complete the oldest ``count`` writes."""
        for operation in list(self._writes)[:count]:
            while operation[1] < self._n_layers:
                self._copy_write(operation)
        self._retire()

    def _move_at_random(self) -> None:
        if self._pace is None:
            return
        for _ in range(self._pace.choice((0, 0, 1, 3, 20))):
            if self._loads and self._pace.random() < 0.5:
                operation = min(self._loads, key=lambda load: load[1])
                self._copy_load(operation)
            elif self._writes:
                self._copy_write(self._writes[0])
            self._retire()

    def _copy_load(self, operation: list[Any]) -> None:
        if self._copier is not None:
            plan, layer, near = operation
            if layer in near:
                within, plan = near[layer]
                for place, rows in within:
                    self._copier.move_within(rows, place, layer)
            if plan is not None:
                self._copier.scatter(plan, layer)
        operation[1] += 1

    def _copy_write(self, operation: list[Any]) -> None:
        if self._copier is not None and len(operation) == 5:
            self._copier.scatter_to(operation[0], operation[3], operation[4])
        elif self._copier is not None:
            copy = self._copier.scatter if len(operation) == 3 else self._copier.gather
            copy(operation[0], operation[1])
        operation[1] += 1

    def _retire(self) -> None:
        while self._loads and self._loads[0][1] == self._n_layers:
            self._loads.popleft()
            self._loads_done += 1
        while self._writes and self._writes[0][1] == self._n_layers:
            self._writes.popleft()
            self._writes_done += 1

    def __repr__(self) -> str:
        return f"HandMover(loads={len(self._loads)}, writes={len(self._writes)})"

"""``QueueEstimate`` in its plainest form: it plans the whole line anew after each change."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_ext.cost_model import Passes
from sglang_ext.router.placing.queue_estimate import Computed


class PlainEntry:
    """A prompt in the line."""

    def __init__(self, new: int, context: int, streams: bool) -> None:
        self.new, self.context, self.streams = new, context, streams


class PlainQueueEstimate:
    """See ``QueueEstimate``; the methods are the same."""

    def __init__(self, idle: Callable[[], Passes], factor: Callable[[], float]) -> None:
        self._idle, self._factor = idle, factor
        self.group: list[PlainEntry] = []
        self.line: list[PlainEntry] = []
        self._group_s = self._began = self._computed_s = self._took_s = 0.0

    def seconds(self, entries: Iterable[PlainEntry]) -> float:
        """Of the passes of some prompts."""
        passes = self._idle()
        for entry in entries:
            passes = passes.adding(entry.new, entry.context)
        return passes.seconds

    def enter(self, new: int, context: int, now: float, *, streams: bool) -> PlainEntry:
        self._advance(now)
        entry = PlainEntry(max(1, new), max(0, context), streams)
        self.line.append(entry)
        if not self.group:
            self._begin(now)
        return entry

    def first_byte(self, entry: PlainEntry, now: float) -> Computed | None:
        self._advance(now)
        if entry not in self.group:
            self._drop(entry)
            return None
        rest = [other for other in self.group if other is not entry]
        self._computed_s += max(0.0, self._group_s - self.seconds(rest))
        self._took_s += max(0.0, now - self._began)
        return self._left(rest, now)

    def leave(self, entry: PlainEntry, now: float) -> None:
        self._advance(now)
        if entry not in self.group:
            self._drop(entry)
            return
        rest = [other for other in self.group if other is not entry]
        if any(other.streams for other in rest):
            self.group, self._group_s = rest, self.seconds(rest)
        else:
            self._left(rest, now)

    def waits_s(self, now: float) -> float:
        self._advance(now)
        if not self.group:
            return 0.0
        factor = self._factor()
        return max(0.0, factor * self._group_s - (now - self._began)) + factor * self.seconds(self.line)

    def waiting(self, now: float) -> int:
        self._advance(now)
        return len(self.group) + len(self.line)

    def waiting_tokens(self, now: float) -> int:
        self._advance(now)
        return sum(entry.new + entry.context for entry in (*self.group, *self.line))

    def _begin(self, now: float) -> None:
        self.group = []
        passes = self._idle()
        for entry in self.line:
            more = passes.adding(entry.new, entry.context)
            if self.group and more.closed:
                break
            self.group.append(entry)
            passes = more
        del self.line[: len(self.group)]
        self._began, self._group_s = now, passes.seconds
        self._computed_s = self._took_s = 0.0

    def _left(self, rest: list[PlainEntry], now: float) -> Computed | None:
        self.group, self._group_s, self._began = rest, self.seconds(rest), now
        if any(entry.streams for entry in rest):
            return None
        computed = Computed(self._computed_s, self._took_s) if self._computed_s > 0 else None
        self._begin(now)
        return computed

    def _drop(self, entry: PlainEntry) -> None:
        if entry in self.line:
            self.line.remove(entry)

    def _advance(self, now: float) -> None:
        while self.group and not any(entry.streams for entry in self.group):
            took = self._factor() * self._group_s
            if now - self._began < took:
                return
            self._begin(self._began + took)

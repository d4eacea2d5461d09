"""How long an instance is busy with the prompts it was sent: the first term of MemServe's equation 1.

Pure bookkeeping: the caller brings the time. Prompts are taken to be computed one after the other, in the
order in which they were sent, one second of expected time per second. What corrects that:

- the first byte of an answer ends its prompt, however early or late;
- the first in line, once it is overdue, is expected at any moment, and nothing behind it moves up;
- an answer that does not stream has no first byte to see: its prompt counts as computed once its time is
  over, and as generating from then on.

Several prompts computed in one batch end together, with their first bytes close to each other: the sum over
all of them is still what the instance has to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.errors import InternalError


@dataclass(slots=True, eq=False)
class Entry:
    """One prompt on its way. Only ``QueueEstimate`` writes it."""

    expected_s: float
    streams: bool
    arrived: float


class QueueEstimate:
    """The line of prompts at one instance."""

    __slots__ = ("_busy_since", "_line")

    def __init__(self) -> None:
        self._line: list[Entry] = []
        self._busy_since = 0.0
        """When the first in line began to be computed."""

    def enter(self, expected_s: float, now: float, *, streams: bool) -> Entry:
        """A prompt is sent, whose computing is expected to take ``expected_s``."""
        self._advance(now)
        if not self._line:
            self._busy_since = now
        entry = Entry(max(0.0, expected_s), streams, now)
        self._line.append(entry)
        return entry

    def leave(self, entry: Entry, now: float) -> float:
        """Its first byte is there, or it was given up. Repeating it is harmless.

        Returns:
            The seconds that computing it took: since it became the first in line. One that overtakes the
            first took none: its time is part of the first's, so that over all of them the sum is right.
        """
        self._advance(now)
        for place, waiting in enumerate(self._line):
            if waiting is entry:
                del self._line[place]
                if place:
                    return 0.0
                took = max(0.0, now - self._busy_since)
                self._busy_since = now
                return took
        return 0.0

    def seconds(self, now: float) -> float:
        """Until the instance begins with a prompt that is sent to it now."""
        self._advance(now)
        if not self._line:
            return 0.0
        first = self._line[0]
        done = min(max(0.0, now - self._busy_since), first.expected_s)
        return sum(entry.expected_s for entry in self._line) - done

    def waiting(self, now: float) -> int:
        """Prompts that are not computed yet."""
        self._advance(now)
        return len(self._line)

    def _advance(self, now: float) -> None:
        """Take out what does not stream and is expected to be computed."""
        while self._line and not self._line[0].streams:
            first = self._line[0]
            if now - self._busy_since < first.expected_s:
                return
            self._busy_since += first.expected_s
            del self._line[0]
            if self._line:
                self._busy_since = max(self._busy_since, self._line[0].arrived)

    def __len__(self) -> int:
        return len(self._line)

    def __repr__(self) -> str:
        return f"QueueEstimate({len(self._line)} prompts, {sum(e.expected_s for e in self._line):.3f} s)"

    def check(self) -> None:
        """Verify what must hold at any time.

        Raises:
            InternalError: it does not.
        """
        if any(entry.expected_s < 0 for entry in self._line):
            raise InternalError(f"{self!r} has a prompt that takes less than nothing")
        if any(a.arrived > b.arrived for a, b in zip(self._line, self._line[1:], strict=False)):
            raise InternalError(f"{self!r} is out of order")

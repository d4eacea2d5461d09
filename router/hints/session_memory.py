"""Which prompt each session sent last, and what was answered: what a hint that names only a session means."""

from __future__ import annotations

from collections import OrderedDict

ENTRY_BYTES = 400
"""Memory of an entry besides its key."""

Known = tuple[tuple[str | None, ...], bytes]
"""(Namespace, key), as the prompt trees take them."""


class SessionMemory:
    """The last prompt of each session; those that were not used for longest are forgotten.

    Args:
        max_bytes: of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, Known] = OrderedDict()
        self.size_bytes = 0

    def learn(self, session: str, namespace: tuple[str | None, ...], key: bytes) -> None:
        """The session's conversation ends with this now."""
        self.forget(session)
        self._known[session] = (namespace, key)
        self.size_bytes += ENTRY_BYTES + len(key)
        while self.size_bytes > self._max_bytes and self._known:
            self.forget(next(iter(self._known)))

    def find(self, session: str) -> Known | None:
        """What the session's next request will continue, if it is known."""
        known = self._known.get(session)
        if known is not None:
            self._known.move_to_end(session)
        return known

    def forget(self, session: str) -> None:
        """Drop a session, if it is known."""
        known = self._known.pop(session, None)
        if known is not None:
            self.size_bytes -= ENTRY_BYTES + len(known[1])

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"SessionMemory({len(self._known)} sessions, {self.size_bytes} bytes)"

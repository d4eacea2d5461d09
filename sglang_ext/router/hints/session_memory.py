"""The last prompt and answer of each session, for hints that name only the session."""

from __future__ import annotations

from sglang_ext.router.tenancy.bounded import Bounded, size_of

Known = tuple[tuple[str | None, ...], bytes]
"""(Namespace, key), as the prompt trees take them."""


class SessionMemory:
    """The last prompt of each session; those that were not used for longest are forgotten.

    Args:
        max_bytes: of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: Bounded[str, Known] = Bounded(
            max_bytes, lambda session, known: size_of(session, *known[0], known[1])
        )

    def learn(self, session: str, namespace: tuple[str | None, ...], key: bytes) -> None:
        """The session's conversation ends with this now."""
        self._known.put(session, (namespace, key))

    def find(self, session: str) -> Known | None:
        """The conversation that the session's next request will continue; None for an unknown session."""
        return self._known.use(session)

    def forget(self, session: str) -> None:
        """Drop a session, if it is known."""
        self._known.pop(session)

    @property
    def size_bytes(self) -> int:
        """Memory of all entries."""
        return self._known.size_bytes

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"SessionMemory({len(self._known)} sessions, {self.size_bytes} bytes)"

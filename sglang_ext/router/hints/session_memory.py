"""The last prompt and answer of each session: for hints that name only the session, and to compare turns."""

from __future__ import annotations

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.clients.divergence import Turn, common_tokens
from sglang_ext.router.tenancy.bounded import Bounded, size_of

Namespace = tuple[str | None, ...]
Known = tuple[Namespace, bytes]
"""(Namespace, key), as the prompt trees take them."""
MOST_CONVERSATIONS = 3
FAR_LONGER = 4


class SessionMemory:
    """The last turns of each session; sessions that were not used for longest are forgotten.

    A session has several conversations at a time, of which ``MOST_CONVERSATIONS`` are kept: agents send small
    requests of another kind, such as for a title, beside their own.

    Args:
        max_bytes: of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._turns: Bounded[str, tuple[Namespace, tuple[Turn, ...]]] = Bounded(max_bytes, _size)

    def learn(self, session: str, namespace: Namespace, turn: Turn) -> None:
        """The session's conversation ends with this turn now."""
        known = self._turns.get(session)
        others = [] if known is None or known[0] != namespace else [*known[1]]
        kept = [other for other in others if not _continues(turn, other)][1 - MOST_CONVERSATIONS :]
        self._turns.put(session, (namespace, (*kept, turn)))

    def find(self, session: str) -> Known | None:
        """The conversation that the session's next request will continue; None for an unknown session."""
        known = self._turns.use(session)
        return None if known is None else (known[0], known[1][-1].key)

    def main(self, session: str) -> Known | None:
        """The session's conversation that a pause interrupts: its last one, unless another is over
        ``FAR_LONGER`` times as long. Does not count as a use."""
        known = self._turns.get(session)
        if known is None:
            return None
        last, longest = known[1][-1].key, max((turn.key for turn in known[1]), key=len)
        return known[0], longest if len(longest) > FAR_LONGER * len(last) else last

    def last_turn(self, session: str, namespace: Namespace, turn: Turn) -> Turn | None:
        """The turn of a session that has most in common with another; None without one in the namespace."""
        known = self._turns.get(session)
        if known is None or known[0] != namespace:
            return None
        return max(reversed(known[1]), key=lambda last: common_tokens(last.key, turn.key))

    def forget(self, session: str) -> None:
        """Drop a session, if it is known."""
        self._turns.pop(session)

    @property
    def size_bytes(self) -> int:
        """Memory of all entries."""
        return self._turns.size_bytes

    def __len__(self) -> int:
        return len(self._turns)

    def __repr__(self) -> str:
        return f"SessionMemory({len(self._turns)} sessions, {self.size_bytes} bytes)"


def _size(session: str, known: tuple[Namespace, tuple[Turn, ...]]) -> int:
    namespace, turns = known
    return size_of(session, *namespace) + sum(size_of(turn.key, *turn.tools) for turn in turns)


def _continues(turn: Turn, last: Turn) -> bool:
    return 2 * TOKEN_BYTES * common_tokens(last.key, turn.key) >= min(len(last.key), len(turn.key))

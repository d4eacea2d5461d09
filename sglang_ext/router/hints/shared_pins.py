"""Texts with which sessions began, kept by all routers (``Action.PIN``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglang_ext.router.cluster.broadcast import RouterChannel, RouterMessage, TextPinned
from sglang_ext.router.tenancy.bounded import Bounded, size_of

MAX_BYTES = 16 << 20
"""Of all pins: more than 20,000. A session whose pin was forgotten is pinned anew at its next turn."""

Place = tuple[str, str, int]
"""(Session, rule, how many matches of the rule came before)."""


class SharedPins:
    """Remembers the first text of each session at each place, and sends it to other routers. A ``Topic``."""

    def __init__(self, channel: RouterChannel, max_bytes: int = MAX_BYTES) -> None:
        self._channel = channel
        self._texts: Bounded[Place, str] = Bounded(
            max_bytes, lambda place, text: size_of(place[0], place[1], text)
        )
        channel.subscribe(self, TextPinned)

    def pin(self, session: str, rule: str, at: int, text: str) -> str:
        """The text that a session had first at a place, which is ``text`` if it had none."""
        place = session, rule, at
        known = self._texts.use(place)
        if known is not None:
            return known
        self._texts.put(place, text)
        if self._channel.is_open:
            self._channel.publish(TextPinned(self._channel.router, session, rule, at, text))
        return text

    @property
    def size_bytes(self) -> int:
        """Memory of all entries."""
        return self._texts.size_bytes

    def __len__(self) -> int:
        return len(self._texts)

    # -- other routers ----------------------------------------------------------------------------

    def on_message(self, message: TextPinned) -> None:
        """Another router has pinned a text. Of two pinned at once, both routers keep the lesser one."""
        place = message.session, message.rule, message.at
        known = self._texts.use(place)
        if known is None or message.text < known:
            self._texts.put(place, message.text)

    def snapshot(self) -> Iterable[RouterMessage]:
        """All pins, for a router that begins."""
        return [TextPinned(self._channel.router, *place, text) for place, text in self._texts.items()]

    def on_routers(self, names: Collection[str]) -> None:
        """Nothing to do: texts stay pinned when the router that has pinned them is gone."""

    def __repr__(self) -> str:
        return f"SharedPins({len(self)}, {self.size_bytes} bytes)"

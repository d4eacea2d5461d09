"""Names of the blocks that an instance has below memory: sets of hundreds of thousands, which no turn of the
reader's event loop has to grow or to free as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

PARTS = 64


class Names(Set[bytes]):
    """A set of names in 64 parts, by the last byte: digests are spread evenly, and one part grows in a
    fraction of a millisecond, where a set of 400,000 names takes tens of milliseconds. `take` empties it in
    steps."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[set[bytes]] = [set() for _ in range(PARTS)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, bytes) and name in self._parts[name[-1] % PARTS]

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return any(self._parts)

    def add(self, names: Iterable[bytes]) -> None:
        """Put names in."""
        parts = self._parts
        for name in names:
            parts[name[-1] % PARTS].add(name)

    def discard(self, names: Iterable[bytes]) -> None:
        """Take names out, as far as they are there."""
        parts = self._parts
        for name in names:
            parts[name[-1] % PARTS].discard(name)

    def take(self, count: int) -> int:
        """Take any names out. Returns how many were there to take, ``count`` at most."""
        taken = 0
        for part in self._parts:
            while part and taken < count:
                part.pop()
                taken += 1
        return taken

    def __repr__(self) -> str:
        return f"Names({len(self)})"

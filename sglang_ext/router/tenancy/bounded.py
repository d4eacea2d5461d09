"""Tables of what clients send, bounded in bytes and in entries: the oldest entries make room for new ones.

State that outlives a client's request is kept in a ``Bounded`` table, or in a table that charges bytes the
same way (``size_of``), so the sum of their limits bounds the memory that clients can use.
``/metrics`` shows each table by its name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, KeysView
from typing import Generic, TypeVar

from sglang_ext.errors import InternalError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 400
"""Memory of an entry besides its strings."""
MANY = 1 << 62


def size_of(*values: object) -> int:
    """Memory of strings and bytes, one by one; of other values that of the object alone."""
    return sum(map(sys.getsizeof, values))


class Bounded(Generic[K, V]):
    """A dictionary that forgets its oldest entries. See the module's docstring.

    Args:
        max_bytes: of all entries.
        cost: bytes of an entry; ``ENTRY_BYTES`` are added.
        max_entries: how many there may be.
        owner: of a key, where owners share the table; each one's oldest entries make room for its own.
        owner_bytes, owner_entries: of one owner.
    """

    def __init__(
        self,
        max_bytes: int,
        cost: Callable[[K, V], int],
        *,
        max_entries: int = MANY,
        owner: Callable[[K], Hashable] | None = None,
        owner_bytes: int = MANY,
        owner_entries: int = MANY,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._cost = cost
        self._owner = owner
        self._owner_bytes = owner_bytes
        self._owner_entries = owner_entries
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._owned: dict[Hashable, OrderedDict[K, None]] = {}
        self._owner_sizes: dict[Hashable, int] = {}
        self.size_bytes = 0
        """Of all entries, as charged."""
        self.dropped = 0
        """Entries that made room for others."""

    def put(self, key: K, value: V) -> None:
        """Enter a value, in place of that of the same key, as the newest."""
        self.pop(key)
        size = ENTRY_BYTES + self._cost(key, value)
        self._entries[key] = value, size
        self.size_bytes += size
        owner = None if self._owner is None else self._owner(key)
        if self._owner is not None:
            own = self._owned.setdefault(owner, OrderedDict())
            own[key] = None
            self._owner_sizes[owner] = self._owner_sizes.get(owner, 0) + size
            while self.size_of_owner(owner) > self._owner_bytes or len(own) > self._owner_entries:
                self._drop(next(iter(own)))
        while self.size_bytes > self._max_bytes or len(self._entries) > self._max_entries:
            self._drop(next(iter(self._entries)))

    def get(self, key: K) -> V | None:
        """The value of a key."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def use(self, key: K) -> V | None:
        """The value of a key, which is the newest from here on."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        if self._owner is not None:
            self._owned[self._owner(key)].move_to_end(key)
        return found[0]

    def pop(self, key: K) -> V | None:
        """Take an entry out, if it is there."""
        found = self._entries.pop(key, None)
        if found is None:
            return None
        value, size = found
        self.size_bytes -= size
        if self._owner is not None:
            owner = self._owner(key)
            del self._owned[owner][key]
            self._owner_sizes[owner] -= size
            if not self._owned[owner]:
                del self._owned[owner], self._owner_sizes[owner]
        return value

    def _drop(self, key: K) -> None:
        self.pop(key)
        self.dropped += 1

    def size_of_owner(self, owner: Hashable) -> int:
        """Bytes of one owner's entries."""
        return self._owner_sizes.get(owner, 0)

    def keys(self) -> KeysView[K]:
        """Every key, oldest first."""
        return self._entries.keys()

    def values(self) -> Iterator[V]:
        """Every value, oldest first."""
        return (value for value, _ in self._entries.values())

    def items(self) -> Iterator[tuple[K, V]]:
        """Every key with its value, oldest first."""
        return ((key, value) for key, (value, _) in self._entries.items())

    def clear(self) -> None:
        """Forget every entry."""
        self._entries.clear()
        self._owned.clear()
        self._owner_sizes.clear()
        self.size_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Bounded({len(self)} entries, {self.size_bytes} of {self._max_bytes} bytes)"

    def check(self) -> None:
        """Verify the counts.

        Raises:
            InternalError: one is wrong.
        """
        sizes = {key: ENTRY_BYTES + self._cost(key, value) for key, (value, _) in self._entries.items()}
        if sum(sizes.values()) != self.size_bytes or self.size_bytes > self._max_bytes:
            raise InternalError(f"{self!r}, counted {sum(sizes.values())}")
        if self._owner is None:
            return
        owned: dict[Hashable, int] = {}
        for key, size in sizes.items():
            owned[self._owner(key)] = owned.get(self._owner(key), 0) + size
        if owned != self._owner_sizes or sum(map(len, self._owned.values())) != len(self):
            raise InternalError(f"owners have {self._owner_sizes}, counted {owned}")

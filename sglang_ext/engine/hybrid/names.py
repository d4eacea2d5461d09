"""Names of the blocks on a disk tier that routers get of a model with windows or states.

After a restart, nothing is known of the blocks on disk but their names. A router computes the names of a
prompt's pages, and finds out which components have a part of each page: so it knows where the prompt can be
resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from sglang_ext.engine.hybrid.components import FULL
from sglang_ext.engine.hybrid.disk import ComponentDisk
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.keys import part_name
from sglang_ext.protocol.agent import Naming, Pages

LEAST_PAGE = 16
"""Names of smaller pages would take routers too much memory: 150 bytes a page and component."""

Watch = Callable[[Sequence[bytes], Sequence[bytes]], None]


@runtime_checkable
class ListsNamespace(Protocol):
    """The methods of a component's tier below memory that are used here."""

    def names_in(self, namespace: bytes, first: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Up to ``limit`` names of a namespace from ``first`` on, and the name to go on from; ``None`` at the
        end."""

    def watch(self, watch: Watch) -> None:
        """Call ``watch`` with the names that come, and those that go, from now on."""


class PartNames:
    """All components' names of one tier, for the agent (`events.agent.ListsNames`). From any thread.

    Args:
        disks: of the components, in the order of their numbers, `FULL` first, and each one's tier.
        in_use: whether the weights are those of the start. Names of the blocks of others are not listed.
    """

    def __init__(
        self, disks: Sequence[tuple[ComponentDisk, ListsNamespace]], in_use: Callable[[], bool]
    ) -> None:
        self._disks = list(disks)
        self._in_use = in_use
        self._namespaces = [disk.namespace() for disk, _ in disks]

    def names_after(self, place: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """See `ListsNames`. A place is a component's number, and the name in its tier to go on from."""
        number, first = (place[0], place[1:]) if place else (len(self._disks) - 1, b"")
        namespace = self._namespaces[number]
        if namespace is None or not self._in_use():
            return [], None
        names, following = self._disks[number][1].names_in(namespace, first, limit)
        found = [part_name(name, number) for name in names]
        if following is not None:
            return found, bytes((number,)) + following
        return found, bytes((number - 1,)) if number else None

    def watch(self, watch: Watch) -> None:
        """See `ListsNames`. The components' disks get to know as well which blocks are gone."""
        for number, (disk, tier) in enumerate(self._disks):
            tier.watch(partial(self._changed, watch, number, disk))

    def _changed(
        self,
        watch: Watch,
        number: int,
        disk: ComponentDisk,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> None:
        disk.given_up(removed)
        if self._in_use():
            watch([part_name(name, number) for name in stored], [part_name(name, number) for name in removed])


def naming_of_pages(store: HybridStore, weights: str, *, pairs: bool, adapters: bool = False) -> Naming:
    """How routers compute the names of pages, and where a prompt can be resumed.

    Args:
        weights: the name of the weights of the start, as `Cleared` has it.
        pairs: see `Pages`.
        adapters: see `Naming`.
    """
    parts = []
    for component in store.parts:
        if component != FULL:
            needed = component.coverage.blocks(store.block_tokens)
            assert needed is not None
            parts.append(needed)
    return Naming("", weights, "", "", "", adapters, Pages(store.block_tokens, tuple(parts), pairs))

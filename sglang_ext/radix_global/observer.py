"""Observer interfaces of a tree: callbacks for placements, evictions, splits and copies between tiers."""

from __future__ import annotations

from typing import Final, Protocol

from sglang_ext.radix_global.node import Node
from sglang_ext.radix_global.placement import Holder


class TreeObserver(Protocol):
    """Called in the middle of a change: must not change the tree."""

    def placed(self, node: Node, holder: Holder) -> None:
        """``holder`` has ``node`` now. It already had the prefix before it."""

    def displaced(self, node: Node, holder: Holder) -> None:
        """``holder`` no longer has ``node`` nor any continuation of it. The node still has its parent."""

    def split(self, upper: Node, lower: Node) -> None:
        """The node ``lower`` was split: its first blocks are now ``upper``, its new parent."""


class CopyObserver(Protocol):
    """Observer of copies between tiers: a copy's placement is in the tree before its bytes have arrived."""

    def copy_begins(self, node: Node, holder: Holder) -> None:
        """``node`` is about to be placed with ``holder``, whose copy is not there yet."""

    def copy_ended(self, node: Node, blocks: int, holder: Holder) -> None:
        """The last ``blocks`` blocks of the path that ends at ``node`` are with ``holder`` now."""


class _Unobserved:
    """Ignores all copies."""

    def copy_begins(self, node: Node, holder: Holder) -> None:
        pass

    def copy_ended(self, node: Node, blocks: int, holder: Holder) -> None:
        pass


UNOBSERVED: Final[CopyObserver] = _Unobserved()

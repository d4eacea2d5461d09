"""Who is told of every change of a tree: what is placed where, what is given up, what is cut in two."""

from __future__ import annotations

from typing import Protocol

from sglang_ext.radix_global.node import Node
from sglang_ext.radix_global.placement import Holder


class TreeObserver(Protocol):
    """Called in the middle of a change: must not change the tree."""

    def placed(self, node: Node, holder: Holder) -> None:
        """``holder`` has ``node`` now; it had what is before it already."""

    def displaced(self, node: Node, holder: Holder) -> None:
        """``holder`` no longer has ``node``, nor what continues it. The node still has its parent."""

    def split(self, upper: Node, lower: Node) -> None:
        """``lower``, a node that was known, begins with ``upper`` no longer: that is its parent now."""


class CopyObserver(Protocol):
    """Who is told of copies between tiers, whose placement is in the tree before their bytes are there."""

    def copy_begins(self, node: Node, holder: Holder) -> None:
        """``node`` is about to be placed with ``holder``, whose copy is not there yet."""

    def copy_ended(self, node: Node, blocks: int, holder: Holder) -> None:
        """The last ``blocks`` blocks of the path that ends at ``node`` are with ``holder`` now."""


class Unobserved:
    """Nobody is told of copies."""

    def copy_begins(self, node: Node, holder: Holder) -> None:
        pass

    def copy_ended(self, node: Node, blocks: int, holder: Holder) -> None:
        pass

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

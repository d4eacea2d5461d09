"""Size of the trees of reported placements: an observer that counts blocks and placements."""

from __future__ import annotations

from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.router.index.prompt_trees import NAMESPACE_BYTES, NODE_BYTES, PLACEMENT_BYTES


class TreeSize:
    """Counts the blocks and placements of a tree, as its observer from the start.

    Args:
        tree: empty.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.blocks = 0
        """Different blocks."""
        self.placements = 0
        """Nodes, counted once per holder."""
        tree.observer = self

    def placed(self, node: Node, holder: Holder) -> None:
        """See `TreeObserver`."""
        self.placements += 1
        if len(node.placements) == 1:
            self.blocks += node.blocks

    def displaced(self, node: Node, holder: Holder) -> None:
        """See `TreeObserver`."""
        self.placements -= 1
        if not node.placements:
            self.blocks -= node.blocks

    def split(self, upper: Node, lower: Node) -> None:
        """See `TreeObserver`."""
        self.placements += len(upper.placements)

    @property
    def size_bytes(self) -> int:
        """Estimated memory: keys, nodes, and further holders of nodes."""
        nodes = self._tree.node_count
        return (
            self.blocks * self._tree.block_bytes
            + NODE_BYTES * nodes
            + PLACEMENT_BYTES * max(0, self.placements - nodes)
            + NAMESPACE_BYTES * len(self._tree.roots)
        )

    def check(self) -> None:
        """Verify the counts.

        Raises:
            AssertionError: a count is wrong.
        """
        nodes = list(self._tree.nodes())
        truth = (sum(node.blocks for node in nodes), sum(len(node.placements) for node in nodes))
        if truth != (self.blocks, self.placements):
            raise AssertionError(f"the tree has {truth} blocks and placements, counted {self!r}")

    def __repr__(self) -> str:
        return f"TreeSize(blocks={self.blocks}, placements={self.placements}, bytes={self.size_bytes})"

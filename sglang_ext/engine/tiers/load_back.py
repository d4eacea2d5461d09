"""Loads from DRAM and disk to HBM when a request is admitted (SGLang's ``init_load_back``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_ext.engine.movers.mover import NOTHING_TO_WAIT_FOR
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.load_policy import DramPolicy
from sglang_ext.engine.tiers.load_report import LoadDecisions, LoadReport, begin_report
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Holder, Node
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    import torch

    from sglang_ext.engine.movers.slots import SlotOps


class LoadBack(Planner):
    """Starts loads, and tracks the loads that the batch being formed has to wait for.

    Args:
        moves: of the rank; those that are being filled may stream to a request.
        hbm_tier, slots: slots, and how the tree keeps them.
    """

    def __init__(
        self,
        store: Store,
        dram: DramTier,
        moves: Moves,
        hbm: Holder,
        hbm_tier: HbmTier,
        slots: SlotOps,
        policy: DramPolicy,
    ) -> None:
        self._store = store
        self._dram = dram
        self._moves = moves
        self._hbm = hbm
        self._hbm_tier = hbm_tier
        self._slots = slots
        self._policy = policy
        self._block_size = policy.block_tokens
        self._streaming: list[tuple[Any, int]] = []
        """Requests of the batch being formed to which blocks stream, each with the tokens that the tree has.
        """
        self.decisions = LoadDecisions()

    def streamed(self, req: Any, blocks: int) -> int:
        """Blocks after the ``blocks`` in memory that stream to the request in front of the forward pass."""
        if req is None:
            return 0
        return self._moves.blocks_to_stream(req.cache_request_handle, blocks)

    def start(self, best: Node, promised: int, req: Any) -> tuple[torch.Tensor | None, Node]:
        """Start loading the blocks that a match has found: all of them or none. Without a load, they are
        computed.

        Args:
            best: the last node in memory.
            promised: tokens that were found below HBM.
            req: SGLang's request; None for a load without one.

        Returns:
            The slots, None without a load, and the node at which HBM ends then.
        """
        nodes: list[Node] = []
        node = best
        while node.parent is not None and self._hbm not in node.placements:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        tokens = sum(loaded.blocks for loaded in nodes) * self._block_size
        before = blocks_up_to(node)
        streamed = self.streamed(req, before + tokens // self._block_size) * self._block_size
        if tokens + streamed != promised:
            return None, node
        report: LoadReport | None = None
        if nodes and not streamed:
            report = self._weighed(req, tokens, before)
            if not report.read:
                return None, node
        slots = self._hbm_tier.allocate(tokens + streamed)
        if slots is None:
            return None, node
        if nodes:
            near = self._dram.near_layers
            self._store.swap_in(Tier.DRAM, nodes, self._slots.keep(slots[:tokens]))
            if report is not None:
                report.layers_in_hbm = (self._dram.near_layers - near) / (tokens // self._block_size)
        if streamed:
            assert req is not None
            self._moves.stream(req.cache_request_handle, self._slots.keep(slots[tokens:]))
            self._streaming.append((req, before * self._block_size + tokens))
        return slots, best

    def _weighed(self, req: Any, tokens: int, before: int) -> LoadReport:
        """Weigh loading against computing. The request's report records the decision; its ``read`` is 0 if
        computing is faster.
        """
        blocks = tokens // self._block_size
        decision = self._policy.weigh(blocks, before, waiting_blocks=self._dram.copies.loading_blocks)
        report = begin_report(req, Tier.DRAM)
        report.decided(blocks, decision, self._block_size, self._policy.block_bytes)
        self.decisions.note(report)
        return report

    def ready(self) -> int:
        """The batch is formed. Returns the ticket of the load that it waits for, to be passed to
        ``LayerGate.set_consumer``.
        """
        for req, protected in self._streaming:
            # SGLang counts all loaded slots as the tree's. Streaming slots are the request's own for now.
            req.kv.cache_protected_len = protected
        self._streaming.clear()
        return self._dram.copies.loads_submitted - 1 if self._dram.copies.loading else NOTHING_TO_WAIT_FOR


def blocks_up_to(node: Node) -> int:
    """Blocks from the top to the end of a node."""
    blocks = 0
    while node.parent is not None:
        blocks += node.blocks
        node = node.parent
    return blocks

"""The results of promotions, for metrics, for the policy, and for later tries of the same requests."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from sglang_ext.engine.moves.move import State
from sglang_ext.engine.tiers.direct_loads import DirectLoad
from sglang_ext.engine.tiers.load_policy import DiskPolicy, first_blocks
from sglang_ext.engine.tiers.load_report import LoadDecisions, LoadReport
from sglang_ext.engine.tiers.promotion import Look, Promotion
from sglang_ext.tiered_store.tier import BlockTier

_REMEMBERED: Final = 256


@dataclass
class PromotionCounters:
    """Blocks, since the start."""

    promoted: int = 0
    recomputed: int = 0
    """Found on disk and left there, because computing is expected to be faster."""
    no_room: int = 0
    """Found on disk and left there, because DRAM is full of blocks in use."""
    read_failed: int = 0
    """Chosen and not read: damaged, unreadable, gone meanwhile; the disk tier counts them by reason."""
    late: int = 0
    """Given up, because reading took longer than computing would have."""
    streamed: int = 0
    """Promoted blocks that streamed during a forward pass instead of delaying it."""
    direct: int = 0
    """Not promoted but brought straight to HBM, because DRAM is full of blocks in use."""


class PromotionResults:
    """See the module's docstring.

    Args:
        tier: the disk.
        policy: learns how long reads take.
    """

    def __init__(self, tier: BlockTier, policy: DiskPolicy) -> None:
        self._block_bytes = tier.layout.block_bytes
        self._policy = policy
        self.counters = PromotionCounters()
        self.decisions = {part.tier: LoadDecisions() for part in tier.parts}
        """By the tier of the first block found."""
        self.no_streams: deque[Hashable] = deque(maxlen=_REMEMBERED)
        """Requests with a failed stream; they wait for all layers the next time."""

    def decided(self, report: LoadReport, look: Look, found: int, chosen: int, block: int) -> None:
        """Every rank has found so many blocks, and finds so many worth reading. block: in tokens."""
        self.counters.recomputed += found - chosen
        if look.decision is not None:
            decision = dataclasses.replace(look.decision, blocks=chosen)
            report.decided(found, decision, block, self._block_bytes, first_blocks(look.sources, found))
            self.decisions[look.sources[0][0]].note(report)

    def ended(self, promotion: Promotion, blocks: int) -> None:
        """Every rank has read so many blocks of it."""
        lost = promotion.blocks - blocks
        if promotion.state is State.LATE:
            self.counters.late += lost
        else:
            self.counters.read_failed += lost
            if not promotion.wanted.ahead:  # a prefetch queues behind other reads: its time is no measure
                self._policy.measured(first_blocks(promotion.sources, blocks), promotion.load.seconds)
        self.counters.promoted += blocks
        if promotion.streamed and not lost:
            self.counters.streamed += blocks
        elif promotion.streamed:
            self.no_streams.append(promotion.wanted.request)

    def direct_ended(self, load: DirectLoad, blocks: int) -> None:
        """Every rank has read so many blocks straight to HBM."""
        if blocks == load.blocks:
            self.counters.direct += blocks
        else:
            self.counters.read_failed += load.blocks
            self.no_streams.append(load.request)

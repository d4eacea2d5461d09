"""The planners that bring KV from DRAM and below to HBM: for requests that run, and ahead of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sglang_ext.clock import Clock
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.prefetch.due_times import MoveRate
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.load_back import LoadBack
from sglang_ext.engine.tiers.load_policy import AgreedSpeeds, DramPolicy, PrefillCost
from sglang_ext.engine.tiers.prefill_clock import PrefillClock
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.weights import Weights
from sglang_ext.mempool.store import Store


@dataclass(frozen=True)
class Loading:
    """The planners, and the speeds by which they decide."""

    speeds: AgreedSpeeds
    """Of computing and loading, as the ranks have agreed."""
    prefill_clock: PrefillClock
    load_back: LoadBack
    prefetcher: Prefetcher

    @classmethod
    def over(
        cls,
        store: Store,
        hbm_tier: HbmTier,
        write_down: WriteDown,
        promotions: Promotions | None,
        moves: Moves,
        weights: Weights,
        ranks: Ranks,
        *,
        always: bool = False,
        clock: Clock | None = None,
    ) -> Self:
        """Over DRAM, and over a disk where the instance has one.

        Args:
            always: load every DRAM hit, without weighing it against computing.
            clock: by which batches and prefetches are timed.
        """
        dram, hbm = write_down.dram, hbm_tier.holder
        cost = PrefillCost() if promotions is None else promotions.policy.cost
        prefill_clock = PrefillClock(cost, clock)
        speeds = AgreedSpeeds(cost, lambda: dram.copies.mover.load_bytes_per_second, ranks)
        policy = DramPolicy(store.tree.block_size, dram.block_bytes, always=always, speeds=speeds)
        return cls(
            speeds,
            prefill_clock,
            LoadBack(store, dram, moves, hbm, hbm_tier, hbm_tier.slots, policy),
            Prefetcher(
                store,
                dram,
                hbm_tier,
                [promotions] if promotions is not None else [],
                moves,
                weights.namespace,
                rate=MoveRate(ranks),
                clock=clock,
            ),
        )

"""The events that routers get of a server's tiers, under a whole server's traffic: after each pass, a reader
has the same blocks as the tree, except for copies under way."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_follower import Follower
from engine_simulation import SCENARIOS, Rank, Scenario, run

from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.protocol.agent import PlacementEvent
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.radix_global.sync.runs import path_key
from sglang_ext.tiers import Tier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


class RecordsLoads(DramTier):
    """Remembers the last node and the blocks of each load under way."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.under_way: deque[tuple[Node, int]] = deque()

    def load(self, what: list[Node], places: Any, landed: Callable[[], None] | None = None) -> None:
        super().load(what, places, landed)
        if landed is None:
            self.under_way.append((what[-1], sum(node.blocks for node in what)))

    def _loaded(self, *args: Any) -> None:
        self.under_way.popleft()
        super()._loaded(*args)


class FollowedRank(Rank):
    """A rank whose every pass is followed."""

    feed_class: type[PlacementFeed] = PlacementFeed
    limit = 1000

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        feed_class = functools.partial(self.feed_class, limit=self.limit)
        super().__init__(scenario, routed=True, feed_class=feed_class, tier_class=RecordsLoads, **options)
        assert self.feed is not None
        self.follower = Follower(self.feed, scenario.block)
        self.compared = 0

    def check(self) -> None:
        super().check()
        feed = self.cache.find(PlacementFeed)
        assert feed is not None
        feed.publish()
        self.follower.follow()
        if self.follower.replica.trusted:
            self.follower.replica.check()
            mine = self.follower.replica.contents()
            assert mine == self.truth()
            self.compared += bool(mine)

    def truth(self) -> dict[tuple[object, bytes], int]:
        """From the tree and the tiers' queues, not from the log."""
        pending = set(self._pending())
        found: dict[tuple[object, bytes], int] = {}
        step = self.tree.block_bytes
        for node in self.tree.nodes():
            if node.namespace[0] != self.cache.weights.generation:  # type: ignore[index]
                continue
            tiers = 0
            for holder, tier in ((self.hbm, Tier.HBM.bit), (self.dram_holder, Tier.DRAM.bit)):
                if holder in node.placements and (node, holder) not in pending:
                    tiers |= tier
            prefix = path_key(node)
            if tiers:
                for end in range(len(prefix) - len(node.key) + step, len(prefix) + step, step):
                    found[node.namespace[1:], prefix[:end]] = tiers  # type: ignore[index]
        return found

    def _pending(self) -> Iterator[tuple[Node, Holder]]:
        if self.tier is None:
            return
        assert isinstance(self.tier, RecordsLoads)
        assert self.write_down is not None
        for pending, holder in (
            (self.write_down._pending, self.dram_holder),
            (self.tier.under_way, self.hbm),
        ):
            for node, blocks in pending:
                while node is not None and blocks > 0:
                    yield node, holder
                    blocks -= node.blocks
                    node = node.parent


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_reader_has_what_the_tiers_have(scenario: Scenario) -> None:
    rank = FollowedRank(scenario, pace=random.Random(3))
    rank.look_inside = False
    try:
        run(rank, 3, 90)
        assert rank.compared > 20
        assert rank.follower.gaps == 0
        assert rank.follower.replica.contents() == rank.truth()
    finally:
        rank.close()


def test_a_feed_that_is_not_emptied_in_time_is_a_gap_and_then_right_again() -> None:
    class Slow(FollowedRank):
        limit = 3
        passes = 0

        def check(self) -> None:
            self.passes += 1
            if self.passes % 7 == 0 or self.scheduler.idle:
                super().check()
            else:
                Rank.check(self)

    rank = Slow(SCENARIOS[0], pace=random.Random(3))
    rank.look_inside = False
    try:
        run(rank, 3, 150)
        assert rank.follower.gaps > 0
        assert rank.compared > 3
    finally:
        rank.close()


class Forgetful(PlacementFeed):
    """Loses one event without reporting it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        changed = self.queue.changed

        def forgets(events: Any) -> None:
            kept: list[PlacementEvent] = [event for event in events if getattr(event, "run", 0) % 11 != 5]
            if kept:
                changed(kept)

        self.queue.changed = forgets  # type: ignore[method-assign]


def followed_without_a_gap(rank: FollowedRank) -> None:
    run(rank, 3, 150)
    assert rank.follower.gaps == 0


def test_an_event_lost_unnoticed_is_found() -> None:
    class Lossy(FollowedRank):
        feed_class = Forgetful

    rank = Lossy(SCENARIOS[0], pace=random.Random(3))
    rank.look_inside = False
    try:
        with pytest.raises(AssertionError):
            followed_without_a_gap(rank)
    finally:
        rank.close()


def test_the_disk_is_sent_from_any_thread_by_name() -> None:
    tree = RadixTree(4)
    feed = PlacementFeed(tree, [Holder.of("i", 1, tier) for tier in (Tier.HBM, Tier.DRAM)])
    try:
        follower = Follower(feed, 4)
        feed.publish()
        follower.follow()
        names = [bytes([i]) * 16 for i in range(3)]
        feed.queue.names_changed(Tier.DISK, names, [])
        feed.queue.names_changed(Tier.DISK, [], names[:1])
        follower.follow()
        assert follower.replica.named[Tier.DISK] == set(names[1:])
    finally:
        feed.close()

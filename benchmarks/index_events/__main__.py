"""The cost to the scheduler of sending every placement to routers, and the rate at which a router takes them
in.

A pass of the scheduler inserts one request's computed tokens (the next turn of a conversation) into a tree
that is full, and evicts as much: without subscribers, and with a feed that sends events. Both trees get the
same prompts, in turns that change. The agent's thread is not part of the pass; its time is a row of its own.

A router's index takes in the messages of the same passes, from one instance and from eight that hold the same
system prompts; then it is asked for prompts, beside the index that only assumes blocks from requests that
pass by.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.lib.common import SEED, Options, Report, percentile
from sglang_ext.clock import SystemClock
from sglang_ext.engine.events.events import Changed, PlacementFeed
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import FROM_AGENT, Events, Hello, PlacementEvent, SnapshotBegin, SnapshotEnd
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.radix_global.sync.replica import Outcome
from sglang_ext.radix_global.sync.stream import EventStream
from sglang_ext.router.index.index import Index
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.policies.base import Role
from sglang_ext.tiers import Tier

BLOCK = 16
SYSTEM_TOKENS = 512
TURN_TOKENS = 256
TURNS = 12
"""Turns of a conversation, after which a new one begins."""
SYSTEMS = 8
CONVERSATIONS = 64
"""Conversations that go on at the same time."""
HELD_BLOCKS = 20_000
"""Blocks that the instance can hold; then each pass evicts as many as it inserts."""
NAMESPACE = (0, None, None)
PLAIN = ("tokens", None, None, None)


class Passes:
    """Prompts as they end: conversations over shared system prompts, each a turn longer than before."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        beginnings = np.random.default_rng(SEED)
        self._systems = [beginnings.integers(0, 32_000, SYSTEM_TOKENS) for _ in range(SYSTEMS)]
        self._open: list[tuple[list[np.ndarray], int]] = []

    def next(self) -> bytes:
        """The tokens of the next request, prompt and answer."""
        if len(self._open) < CONVERSATIONS:
            self._open.append(([self._systems[int(self._random.integers(SYSTEMS))]], 0))
        place = int(self._random.integers(len(self._open)))
        parts, turns = self._open[place]
        parts.append(self._random.integers(0, 32_000, TURN_TOKENS))
        if turns + 1 >= TURNS:
            del self._open[place]
        else:
            self._open[place] = (parts, turns + 1)
        return encode_tokens(np.concatenate(parts))


class Instance:
    """A tree, and a feed if it has subscribers."""

    def __init__(self, name: str, *, tells: bool) -> None:
        self.tree = RadixTree(BLOCK)
        self.hbm, dram = Holder.of(name, 1, Tier.HBM), Holder.of(name, 1, Tier.DRAM)
        self.feed = PlacementFeed(self.tree, (self.hbm, dram)) if tells else None

    def step(self, key: bytes) -> None:
        """Apply one pass to the tree."""
        blocks = len(key) // (4 * BLOCK)
        self.tree.insert(NAMESPACE, key, self.hbm, np.arange(blocks * BLOCK, dtype=np.int64))
        over = self.tree.blocks_of(self.hbm) - HELD_BLOCKS
        if over > 0:
            self.tree.evict(self.hbm, over)
        if self.feed is not None:
            self.feed.publish()

    def taken(self) -> list[PlacementEvent]:
        """The events that the agent would take from the feed."""
        assert self.feed is not None
        return [
            event for entry in self.feed.queue.take() if isinstance(entry, Changed) for event in entry.events
        ]

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()


@dataclass
class Sent:
    """Messages of one instance."""

    name: str
    stream: EventStream
    messages: list[bytes]
    events: int = 0


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def scheduler_rows(report: Report, passes: int, warm: int) -> Sent:
    """Passes without subscribers and with a feed, in turns. Returns the messages that were sent."""
    silent, telling = Instance("silent", tells=False), Instance("telling", tells=True)
    source, order = Passes(SEED), random.Random(SEED)
    sent = Sent("telling", EventStream("telling", b"e" * 16, BLOCK), [])
    sent.stream.hello(b"r", Hello("r"))
    seconds: dict[str, list[float]] = {"silent": [], "telling": []}
    encoding: list[float] = []
    for number in range(warm + passes):
        key = source.next()
        both = [("silent", silent), ("telling", telling)]
        order.shuffle(both)
        for name, instance in both:
            elapsed = timed(partial(instance.step, key))
            if number >= warm:
                seconds[name].append(elapsed)
        events = telling.taken()
        start = time.perf_counter()
        sends = sent.stream.publish(events)
        if number >= warm:
            encoding.append(time.perf_counter() - start)
        sent.messages += [data for _, data in sends]
        sent.events += len(events)
    medians = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    for name, values in seconds.items():
        report.add("scheduler", what=f"pass, {name}", us=medians[name], p99_us=percentile(values, 99) * 1e6)
    added = statistics.median(
        (t - s) * 1e6 for t, s in zip(seconds["telling"], seconds["silent"], strict=True)
    )
    report.summary["added_us_per_pass"] = added
    report.summary["pass_vs_silent"] = medians["telling"] / medians["silent"]
    report.add(
        "agent",
        what="encoding of a pass",
        us=statistics.median(encoding) * 1e6,
        p99_us=percentile(encoding, 99) * 1e6,
    )
    feed = telling.feed
    assert feed is not None
    nothing = [timed(feed.publish) for _ in range(2000)]
    report.add(
        "scheduler",
        what="pass in which nothing changed",
        us=statistics.median(nothing) * 1e6,
        p99_us=percentile(nothing, 99) * 1e6,
    )
    feed.snapshot(1)
    parts: list[float] = []
    while not parts or feed.busy:
        parts.append(timed(feed.publish))
        feed.queue.take()
    report.add(
        "scheduler",
        what=f"pass with a part of a snapshot ({len(parts)} parts)",
        us=statistics.median(parts) * 1e6,
        p99_us=percentile(parts, 99) * 1e6,
    )
    silent.close()
    telling.close()
    return sent


def reported(name: str, seed: int, passes: int) -> Sent:
    """The messages that another instance would send."""
    instance, source = Instance(name, tells=True), Passes(seed)
    sent = Sent(name, EventStream(name, seed.to_bytes(16, "big"), BLOCK), [])
    sent.stream.hello(b"r", Hello("r"))
    for _ in range(passes):
        instance.step(source.next())
        events = instance.taken()
        sent.messages += [data for _, data in sent.stream.publish(events)]
        sent.events += len(events)
    instance.close()
    return sent


def taken_in(sources: Sequence[Sent]) -> tuple[Index, float]:
    """An index that has taken in everything, in turns, and the seconds that took."""
    index = Index(SystemClock(), block_size=BLOCK, max_bytes=1 << 30)
    for sent in sources:
        index.attach(sent.name, Role.COLOCATED)
        index.on_heartbeat(sent.name, alive=True)
        index.began(sent.name, sent.stream.epoch, None)
        for empty in (
            SnapshotBegin(sent.stream.epoch, 1, 0),
            SnapshotEnd(sent.stream.epoch, 1, 0, 0),
        ):
            index.apply(sent.name, empty)
    longest = max(len(sent.messages) for sent in sources)
    spent = 0.0
    for place in range(longest):
        for sent in sources:
            if place < len(sent.messages):
                start = time.perf_counter()
                message = FROM_AGENT.decode(sent.messages[place])
                assert isinstance(message, Events)
                outcome = index.apply(sent.name, message)
                spent += time.perf_counter() - start
                if outcome is not Outcome.APPLIED:
                    raise RuntimeError(f"{sent.name}: {outcome}")
    return index, spent


def router_rows(report: Report, sources: Sequence[Sent], calls: int) -> None:
    """The rate at which a router takes in the messages of one and of all instances, and the time of its
    look-ups."""
    for count in sorted({1, len(sources)}):
        some = sources[:count]
        index, spent = taken_in(some)
        events = sum(sent.events for sent in some)
        nbytes = sum(len(data) for sent in some for data in sent.messages)
        rate = events / spent
        report.add(
            "router",
            what=f"events of {count} instances",
            us=1e6 / rate,
            events_per_s=rate,
            bytes_per_event=nbytes / events,
            mib=index.size_bytes / 2**20,
        )
        report.summary[f"events_per_second_{count}"] = rate
        believed = PromptTrees(SystemClock(), block_size=BLOCK, max_bytes=1 << 30)
        prompts = []
        for number, sent in enumerate(some):
            source = Passes(SEED + number)
            for _ in range(calls):
                prompts.append(source.next())
                believed.confirm(PLAIN, prompts[-1], sent.name)
        order = random.Random(SEED)
        order.shuffle(prompts)
        for name, tree in (("told", index), ("believed", believed)):
            took = [timed(partial(tree.match, PLAIN, key)) for key in prompts[:calls]]
            report.add(
                "router",
                what=f"match among {count}, {name}",
                us=statistics.median(took) * 1e6,
                p99_us=percentile(took, 99) * 1e6,
            )


def main(argv: Sequence[str] | None = None) -> int:
    options = Options.of(argv, "index_events", __doc__)
    report = Report("index_events")
    passes = options.pick(6000, quick=2000, tiny=300)
    instances = options.rounds(8, quick=4)
    warm = options.pick(1200, quick=1200, tiny=100)
    gc.collect()
    gc.disable()
    try:
        first = scheduler_rows(report, passes, warm=warm)
        others = [
            reported(f"instance-{number}", SEED + number, passes + warm) for number in range(1, instances)
        ]
        router_rows(report, [first, *others], calls=options.pick(400, quick=400, tiny=50))
    finally:
        gc.enable()
    report.note(
        "us: microseconds, median; added_us_per_pass: median of the difference of each pair of passes"
    )
    report.note(f"a pass: {TURN_TOKENS} new tokens of a conversation, and as much evicted")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())

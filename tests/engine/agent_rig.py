"""An instance without a server: a tree that is changed by hand, and its agent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from sglang_ext.cluster_key import ClusterKey
from sglang_ext.engine.events.agent import Agent, AgentFacts
from sglang_ext.engine.events.agent_socket import AgentSocket
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Fill, Load, Naming
from sglang_ext.protocol.cluster import Registration
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier

BLOCK = 4
NAME = "http://127.0.0.1:1"
PLAIN = ("tokens", None, None, None)
NAMING = Naming("m", "w0", "f32", "layout", "tp0of1")
KEY = ClusterKey(b"k" * 20 + b"0123456789abcdef")


class Gauges:
    def load(self) -> Load:
        return Load(2, 1, 30)

    def fills(self) -> tuple[Fill, ...]:
        return (Fill(Tier.HBM.level, 3, 9),)


class Disk:
    """Lists names, as the disk tier does."""

    def __init__(self, names: list[bytes]) -> None:
        self.names = sorted(names)

    def names_after(self, place: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        there = [name for name in self.names if name >= place]
        return there[:limit], there[limit] if len(there) > limit else None

    def watch(self, watch: object) -> None:
        """Nothing changes."""


class Instance:
    """A tree that is changed by hand, and its agent."""

    epochs = itertools.count(1)

    def __init__(
        self, *, key: ClusterKey | None = None, disk: Disk | None = None, port: int = 0, url: str = NAME
    ) -> None:
        self.tree = RadixTree(BLOCK)
        epoch = next(self.epochs)
        self.hbm, self.dram = Holder.of("a", epoch, Tier.HBM), Holder.of("a", epoch, Tier.DRAM)
        self.feed = PlacementFeed(self.tree, (self.hbm, self.dram), lambda n: f"w{n}")
        facts = AgentFacts("a", epoch.to_bytes(16, "big"), BLOCK, NAMING if disk else None)
        self.said: list[object] = []
        self.agent = Agent(
            facts,
            self.feed,
            Gauges(),
            AgentSocket("127.0.0.1", (port,), key),
            named={Tier.DISK: disk} if disk else {},
            others=lambda reader, message: self.said.append(message),
        )
        self.registration = Registration(
            url=url,
            instance="a",
            epoch=facts.epoch.hex(),
            agent=f"tcp://127.0.0.1:{self.agent.socket.port}",
            agent_key=self.agent.socket.public_key,
            block_size=BLOCK,
        )
        self.agent.start()
        self.closed = False

    def insert(self, tokens: list[int], holder: Holder | None = None, salt: str | None = None) -> None:
        self.tree.insert((0, None, salt), encode_tokens(tokens), holder or self.hbm)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.agent.close()
            self.feed.close()


async def until(
    condition: Callable[[], object], instance: Instance | None = None, seconds: float = 30
) -> None:
    """Wait for a condition, while the instance's scheduler goes round."""
    async with asyncio.timeout(seconds):
        while not condition():
            if instance is not None and not instance.closed:
                instance.feed.publish()
            await asyncio.sleep(0.002)

"""An instance without a model, in a process of its own: a stand-in for HTTP, and a real agent that registers.

    python -m tests.support.servers.instance_process NAME ROUTER-URL,... TOKENIZER-FOLDER [ADDRESS KEY-FILE]

It writes a JSON object per line to standard output: its own address, and each instance that a router reports
as dead.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.engine.events.agent import Agent, AgentFacts
from sglang_ext.engine.events.agent_socket import AgentSocket
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.events.registration import Registrar
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Fill, Load, PeerDead
from sglang_ext.protocol.cluster import Registration
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier
from tests.support.servers.worker_dialects import Json
from tests.support.servers.workers import StandInWorker, running_worker

BLOCK = 16


class Gauges:
    """An instance whose fill is never read."""

    def load(self) -> Load:
        return Load()

    def fills(self) -> tuple[Fill, ...]:
        return ()


class ReportingWorker(StandInWorker):
    """Publishes its cached prefixes as a scheduler does: into the tree that its agent's feed watches."""

    def __init__(self, tree: RadixTree, holder: Holder, feed: PlacementFeed, tokenizer_path: str) -> None:
        super().__init__(tokenizer_path=tokenizer_path)
        self._tree, self._hbm, self._feed = tree, holder, feed

    def generate(self, prompt: list[int], count: int, body: Json) -> tuple[list[int], int]:
        output, cached = super().generate(prompt, count, body)
        space = (0, body.get("extra_key"), body.get("cache_salt"))
        self._tree.insert(space, encode_tokens(prompt + output[:-1]), self._hbm)
        self._feed.publish()
        return output, cached


def say(**what: Any) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def answer(reader: object, message: object) -> None:
    """Handle a router's messages to the agent."""
    if isinstance(message, PeerDead):
        say(dead=message.instance, epoch=message.epoch.hex())


async def main(
    name: str, router: str, tokenizer_path: str, address: str = "127.0.0.1", key_file: str = ""
) -> None:
    """Serve until killed."""
    epoch = os.urandom(16)
    number = int.from_bytes(epoch[:6], "big")
    holders = [Holder.of(name, number, tier) for tier in (Tier.HBM, Tier.DRAM)]
    tree = RadixTree(BLOCK)
    feed = PlacementFeed(tree, holders)
    key = read_cluster_key(key_file) if key_file else None
    socket = AgentSocket(address, (0,), key)
    agent = Agent(AgentFacts(name, epoch, BLOCK), feed, Gauges(), socket, others=answer)
    async with running_worker(
        ReportingWorker(tree, holders[0], feed, tokenizer_path), host=address
    ) as worker:
        registration = Registration(
            url=worker.url,
            instance=name,
            epoch=epoch.hex(),
            agent=f"tcp://{address}:{socket.port}",
            agent_key=socket.public_key,
            block_size=BLOCK,
        )
        agent.start()
        Registrar(router.split(","), registration, key, agent.silent_s).start()
        say(url=worker.url, epoch=epoch.hex())
        while True:  # as a scheduler goes round; the agent answers a router's snapshot request only then
            feed.publish()
            await asyncio.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

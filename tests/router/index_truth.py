"""Compares a router's copy of an instance with the snapshot that the instance sends to a newcomer."""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

from sglang_ext.protocol.agent import FROM_AGENT, TO_AGENT, Beat, Hello, Welcome
from sglang_ext.radix_global import RadixTree
from sglang_ext.radix_global.sync.replica import Replica
from sglang_ext.router import Router
from sglang_ext.testing.waiting import until

BLOCK = 16


class Server(Protocol):
    """The server in question: a real one, or a stand-in with a real agent."""

    url: str


async def known(router: Router, server: Server) -> Replica:
    """The router's copy of the server's reports, once it is trusted."""
    await until(lambda: router.trees.replica(server.url) is not None, 30, "registration")
    await until(lambda: router.trees.trusted(server.url), 60, "a snapshot")
    await until(lambda: router.fleet.usable(), 30, "a usable server")
    replica = router.trees.replica(server.url)
    assert replica is not None
    return replica


async def told_anew(router: Router, server: Server) -> Replica:
    """The snapshot that the server sends to a new reader."""
    link = router.agents._links[server.url]
    truth = Replica(RadixTree(BLOCK), "truth")
    socket = router.agents.socket(link.registration)
    try:
        await socket.send(TO_AGENT.encode(Hello("truth")))
        async with asyncio.timeout(10):
            while not truth.trusted:
                message = FROM_AGENT.decode(await socket.recv())
                if isinstance(message, Welcome):
                    truth.began(message.epoch, message.naming)
                elif not isinstance(message, Beat):
                    truth.apply(message)  # type: ignore[arg-type]
    finally:
        socket.close(linger=0)
    return truth


async def assert_right(router: Router, server: Server, seconds: float = 0.0) -> None:
    """The copy becomes equal to the snapshot for a newcomer: at once, when nothing changes meanwhile.
    seconds: for how long earlier messages may still be under way."""
    replica = await known(router, server)
    end = asyncio.get_running_loop().time() + seconds
    truth = await told_anew(router, server)
    for tries in itertools.count():
        is_over = tries >= 20 and asyncio.get_running_loop().time() > end
        if is_over or (truth.next, truth.named) == (replica.next, replica.named):
            break
        truth = await told_anew(router, server)
    assert replica.contents() == truth.contents()
    assert replica.named == truth.named
    assert replica.naming == truth.naming
    truth.check()

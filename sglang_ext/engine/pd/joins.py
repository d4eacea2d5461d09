"""Decode connects to prefill servers before their first request comes (KVDirect, section 4.2).

Each router sends its list of prefill servers again and again. Every server on any of the lists has a task
that connects to it, and connects anew when the connection is gone, with pauses that grow while it fails. The
task ends when the server is on no router's list any more; a connection that stands is kept. A server that was
started anew is another one, though its address is the same.

On the transfer thread: no request and no scheduler waits for any of this.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import RefusedError, TransferError, TransportUnavailableError
from sglang_ext.engine.pd.peers import PrefillPeers
from sglang_ext.protocol.agent import PREFILLS_AGAIN_S, PrefillServer, PrefillServers

log = logging.getLogger(__name__)

ATTEMPT_SECONDS: Final = 3.0
"""A request that comes meanwhile waits for the attempt before it makes its own."""
FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 5.0
BELIEVED_SECONDS: Final = 3 * PREFILLS_AGAIN_S
"""How long a router's list counts without a new one."""


class PrefillJoins:
    """See the module's docstring. Everything on one event loop.

    Args:
        clock: for pauses, and for how long routers' lists count.
    """

    def __init__(self, peers: PrefillPeers, clock: Clock) -> None:
        self._peers = peers
        self._clock = clock
        self._lists: dict[str, tuple[float, tuple[PrefillServer, ...]]] = {}
        """Router -> when its last list came, and the servers on it."""
        self._tasks: dict[PrefillServer, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<PrefillJoins {len(self._tasks)} servers, {len(self.awaited)} awaited>"

    @property
    def awaited(self) -> frozenset[str]:
        """Addresses of servers that are on a router's list and not connected."""
        listed = frozenset(server.address for server in list(self._tasks))
        return frozenset(address for address in listed if self._peers.known(address) is None)

    def on_server_list(self, message: PrefillServers) -> None:
        """Replace a router's list of prefill servers."""
        self._lists[message.router] = self._clock.monotonic(), message.servers
        self._follow()

    def tick(self) -> None:
        """Drop the lists of routers that have been silent for too long. Now and then."""
        oldest = self._clock.monotonic() - BELIEVED_SECONDS
        if silent := [router for router, (at, _) in self._lists.items() if at < oldest]:
            for router in silent:
                del self._lists[router]
            self._follow()

    async def close(self) -> None:
        """End all attempts."""
        self._lists.clear()
        tasks = list(self._tasks.values())
        self._follow()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self) -> None:
        wanted = {server for _, servers in self._lists.values() for server in servers}
        for server in self._tasks.keys() - wanted:
            self._tasks.pop(server).cancel()
        for server in wanted - self._tasks.keys():
            self._tasks[server] = asyncio.create_task(self._keep(server), name="kv-pd-join")

    async def _keep(self, server: PrefillServer) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                peer = await self._peers.get(server.address, ATTEMPT_SECONDS, "ahead")
                pause = FIRST_PAUSE_SECONDS
                await peer.ended()
            except (RefusedError, TransportUnavailableError) as error:
                log.warning("prefill server %s (%s) is not connected: %s", *_names(server), error)
                pause = LONGEST_PAUSE_SECONDS
            except TransferError as error:
                log.debug("prefill server %s (%s) is not reached yet: %s", *_names(server), error)
            except Exception:
                # Requests still connect by themselves.
                log.exception("cannot connect to prefill server %s (%s)", *_names(server))
                pause = LONGEST_PAUSE_SECONDS
            # Decode servers that got one list at the same time do not all come back at once.
            await self._clock.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _names(server: PrefillServer) -> tuple[str, str]:
    return server.instance, server.address

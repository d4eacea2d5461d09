"""The bootstrap port of a prefill server: its ranks register there, decode ranks look them up.

ZeroMQ with CURVE when there is a key, loopback only without one (SGLang's own is unauthenticated HTTP). Ranks
register again and again, so that a rank that is gone is dropped, and a restarted rank counts by its new
epoch.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from zmq.asyncio import Context

from sglang_ext.addresses import bracketed, listen_host
from sglang_ext.clock import Clock, SystemClock
from sglang_ext.disagg.errors import PeerProtocolError, RefusedError, TransferError
from sglang_ext.disagg.transfer.control import ControlClient, ControlServer, MemberKeys
from sglang_ext.engine.pd.messages import MESSAGES, Ask, Lookup, Ok, RankInfo, Register, Topology
from sglang_ext.engine.transfer_thread import LoopThread

log = logging.getLogger(__name__)

REGISTER_SECONDS = 1.0
FORGET_SECONDS = 3.0


class Registry:
    """The ranks that have registered lately. Pure: time comes from a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ranks: dict[tuple[int, int], tuple[RankInfo, float]] = {}
        """By replica and rank: when each has registered last."""

    def __repr__(self) -> str:
        return f"<Registry ranks={sorted(self._ranks)}>"

    def register(self, who: RankInfo) -> None:
        """Record that a rank lives."""
        self._ranks[who.replica, who.rank] = (who, self._clock.monotonic())

    def topology(self, replica: int = 0) -> tuple[RankInfo, ...]:
        """All ranks of a replica, in order.

        Raises:
            RefusedError: `incomplete`, while one is missing or they are of different epochs.
        """
        oldest = self._clock.monotonic() - FORGET_SECONDS
        ranks = [
            who for (of, _), (who, seen) in sorted(self._ranks.items()) if of == replica and seen >= oldest
        ]
        wanted = ranks[0].ranks if ranks else 1
        if [who.rank for who in ranks] != list(range(wanted)) or len({who.ranks for who in ranks}) != 1:
            raise RefusedError("incomplete", f"{len(ranks)} of {wanted} prefill ranks have registered")
        return tuple(ranks)


async def keep_registered(who: RankInfo, client: ControlClient, clock: Clock) -> None:
    """Register a rank again and again, until cancelled; the bootstrap port may start later, or anew. Closes
    the client."""
    try:
        while True:
            try:
                await client.ask(Register(who), REGISTER_SECONDS)
            except TransferError as error:
                log.debug("bootstrap at %s: %s", client.address, error)
            await clock.sleep(REGISTER_SECONDS)
    finally:
        await client.close()


class BootstrapService:
    """A bootstrap port, on a thread of its own."""

    def __init__(self, host: str, port: int, keys: MemberKeys | None, clock: Clock | None = None) -> None:
        """Listen.

        Raises:
            ZMQError: the port is in use. ConfigError: beyond loopback without a key.
        """
        self.registry = Registry(clock or SystemClock())
        self._thread = LoopThread("kv-bootstrap")
        try:
            self._server, self._context = self._thread.run(self._serve(host, port, keys))
        except BaseException:
            self._thread.close()
            raise
        self.address = self._server.address
        log.info("KV bootstrap of this prefill server listens on %s", self.address)

    def __repr__(self) -> str:
        return f"<BootstrapService {self.address} {self.registry!r}>"

    def close(self) -> None:
        """Stop."""

        async def stop() -> None:
            await self._server.close()
            self._context.destroy(linger=0)

        self._thread.run(stop())
        self._thread.close()

    async def _serve(self, host: str, port: int, keys: MemberKeys | None) -> tuple[ControlServer, Context]:
        context = Context()
        try:
            bind = f"{bracketed(listen_host(host, keyed=keys is not None))}:{port}"
            return ControlServer(context, bind, keys, self._answer, MESSAGES), context
        except BaseException:
            context.destroy(linger=0)
            raise

    async def _answer(self, _identity: bytes, message: Ask) -> Any:
        await asyncio.sleep(0)
        match message:
            case Register():
                self.registry.register(message.who)
                return Ok()
            case Lookup():
                return Topology(self.registry.topology(message.replica))
        raise PeerProtocolError(f"{type(message).__name__} is not for a bootstrap port")

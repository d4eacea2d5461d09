"""The answers of one rank to other ranks' messages about hand-overs and returns."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from sglang_ext.disagg.errors import PeerProtocolError, RefusedError
from sglang_ext.engine.pd.bootstrap import Registry
from sglang_ext.engine.pd.messages import (
    Abort,
    Ask,
    Done,
    Join,
    Lookup,
    Meet,
    Ok,
    Push,
    Register,
    Return,
    Returned,
    ReturnEnd,
    Topology,
)
from sglang_ext.engine.pd.prefill_sender import PrefillSender


class Returns(Protocol):
    """One side of returns (`returns`). outcomes: how many returns ended in which way. tokens: that have come
    back.
    """

    outcomes: Counter[ReturnEnd]
    tokens: int


class ReceivesReturns(Returns, Protocol):
    """Prefill's side."""

    @property
    def set_aside(self) -> dict[str, int]:
        """Tokens of memory that is to be filled, by tier. From any thread."""

    async def take(self, message: Return) -> Returned:
        """A decode rank offers its part."""


class Answers:
    """Every message that is asked here. On the event loop.

    Args:
        registry: this server's ranks, where decode servers find them here.
    """

    def __init__(self, sender: PrefillSender, registry: Registry) -> None:
        self._sender = sender
        self._registry = registry
        self.returns: ReceivesReturns | None = None

    def receive_returns(self, return_receiver: ReceivesReturns) -> None:
        """Prefill takes KV back from now on."""
        self.returns = return_receiver

    async def answer(self, _identity: bytes, message: Ask) -> Any:
        """Act on a message; returns its answer.

        Raises:
            RefusedError: the text gives the reason.
        """
        sender = self._sender
        match message:
            case Register():
                self._registry.register(message.who)
                return Ok()
            case Lookup():
                return Topology(self._registry.topology(message.replica))
            case Join():
                return await sender.join(message)
            case Meet():
                await sender.meet(message)
                return Ok()
            case Push():
                return await sender.push(message)
            case Done():
                sender.done(message.handover, message.reader)
                return Ok()
            case Abort():
                sender.peer_aborts(message.handover, message.reader, message.reason, message.rejoins)
                return Ok()
            case Return():
                if self.returns is None:
                    text = "this server takes no KV back; set --kv-pd-caching 3 alike"
                    raise RefusedError("return", text)
                return await self.returns.take(message)
        raise PeerProtocolError(f"{type(message).__name__} is not for this port")

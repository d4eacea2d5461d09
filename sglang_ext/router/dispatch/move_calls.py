"""Messages between the mover of requests and the agents of instances."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sglang_ext.ids import NewId, random_id
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.agent import (
    MAX_PROMPT_BYTES,
    MAX_TAG,
    Advise,
    Advised,
    Expecting,
    Export,
    Fetch,
    FetchSpan,
    FromAgent,
    Parked,
    Running,
    Source,
    ToAgent,
)
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.fleet.channels import AgentChannels

FETCH_S: Final = 5.0
HEARD_S: Final = 0.25
"""For the other instance's agent to say that it knows of a fetch."""
AHEAD_S: Final = 10.0
"""Time to copy a prompt's KV while its request still runs; the rest is copied during the pause."""
LEAST_AHEAD: Final = 64
"""Tokens: fewer are as soon fetched in the pause."""
LOOK_S: Final = 0.1
"""How often it is looked whether an agent that is asked is still there."""


class MoveCalls:
    """See the module's docstring. Names are URLs; ids are the mover's."""

    def __init__(self, channels: AgentChannels, new_id: NewId = random_id) -> None:
        self.new_id = new_id
        self._channels = channels
        self._futures: dict[tuple[str, str], asyncio.Future[Any]] = {}
        channels.messages.subscribe(self.on_message)

    def known(self, name: str) -> bool:
        """Whether an instance has an agent that is alive."""
        return self._channels.registration(name) is not None

    def send(self, name: str, message: ToAgent) -> bool:
        return self._channels.send(name, message)

    @contextmanager
    def expecting(self, name: str, id: str) -> Iterator[asyncio.Future[Any]]:
        """An agent's next message about an id, while the block runs."""
        future = self._futures[name, id] = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._futures[name, id]
            future.cancel()

    async def ask(self, name: str, id: str, message: ToAgent, seconds: float) -> Any:
        """An agent's answer; None if it does not arrive in time, or the agent has become silent."""
        with self.expecting(name, id) as answer:
            if not self.send(name, message):
                return None
            for _ in range(math.ceil(seconds / LOOK_S)):
                done, _ = await asyncio.wait({answer}, timeout=min(LOOK_S, seconds))
                if done:
                    return answer.result()
                if not self.known(name):
                    break
            return None

    def on_message(self, name: str, message: FromAgent) -> None:
        """An agent answers."""
        if isinstance(message, Parked | Running | Expecting | Advised):
            future = self._futures.get((name, message.id))
            if future is not None and not future.done():
                future.set_result(message)

    # -- KV -----------------------------------------------------------------------------------------

    def _endpoints(self, source: str, target: str) -> tuple[str, ...]:
        """Where an instance can read another one's DRAM; empty when it cannot."""
        there = self._channels.registration(source)
        return there.endpoints if there is not None and self._channels.can_fetch(source, target) else ()

    async def copy_ahead(self, flight: Flight, source: str, target: str) -> None:
        """Copy a running request's prompt to the instance that will continue the request, so that its pause
        does not grow with the prompt. Tokens generated meanwhile are copied during the pause."""
        if not (endpoints := self._endpoints(source, target)) or len(flight.prompts) != 1:
            return
        (prompt,) = flight.prompts
        kind, adapter, extra_key, salt = prompt.namespace
        if kind != "tokens" or adapter is not None or len(prompt.key) < LEAST_AHEAD * TOKEN_BYTES:
            return
        if len(prompt.key) > MAX_PROMPT_BYTES or max(len(extra_key or ""), len(salt or "")) > MAX_TAG:
            return  # no agent would read it or answer
        id = self.new_id()
        if not self.send(source, Export(id, prompt.key, extra_key, salt, AHEAD_S)):
            return
        hint = Advise(
            id,
            prompt.key,
            extra_key,
            salt,
            flight.record.priority,
            ttl_s=2 * AHEAD_S,
            spans=(FetchSpan(Source(endpoints, id), len(prompt.key) // TOKEN_BYTES),),
        )
        await self.ask(target, id, hint, AHEAD_S)

    async def have_it_fetched(self, source: str, target: str, parked: Parked) -> None:
        """Have an instance fetch a stopped request's KV. Returns when it knows of that, so that the request
        finds its KV on the way and waits for it."""
        if endpoints := self._endpoints(source, target):
            fetch = Fetch(
                parked.id,
                parked.tokens,
                (FetchSpan(Source(endpoints, parked.export), len(parked.tokens) // TOKEN_BYTES),),
                extra_key=parked.extra_key,
                cache_salt=parked.cache_salt,
                wait_s=FETCH_S,
            )
            await self.ask(target, parked.id, fetch, HEARD_S)

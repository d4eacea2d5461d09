"""The parts of a rank's cache that serve hand-overs and returns, while its server has a role."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_ext.clock import SystemClock
from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.forward_fence import Passed
from sglang_ext.engine.hybrid.exports import NamedExports, pool_name
from sglang_ext.engine.hybrid.fetches import NamedFetches
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.disk_loads import LocalAhead
from sglang_ext.engine.pd.returns.named_returns import (
    NamedReturnReceiver,
    NamedReturnSender,
    ReturnFetches,
)
from sglang_ext.engine.pd.returns.reservations import Blocks, Reservations
from sglang_ext.engine.pd.returns.return_receiver import ReturnReceiver
from sglang_ext.engine.pd.returns.return_sender import ReturnSender
from sglang_ext.engine.peers.arena_leases import DRAM_POOL
from sglang_ext.engine.peers.fetch_link import FetchLink
from sglang_ext.engine.ranks import Part
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.linker import names_of_prompt
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.protocol.agent import PrefillServers
from sglang_ext.wire import Message


class _ReturnsSent(Listener):
    """On decode: returns the blocks of an ended request that are in the tree."""

    def __init__(self, return_sender: ReturnSender | NamedReturnSender) -> None:
        self._sender = return_sender

    def request_ended(self, req: Any, tokens: Any) -> None:
        taken = req.finished() and not isinstance(req.finished_reason, FINISH_ABORT)
        if taken and req.bootstrap_host not in (None, FAKE_BOOTSTRAP_HOST):
            self._sender.ended(req, tokens)

    def before_clear(self) -> None:
        self._sender.clear()


class _PrefillServersListed(Listener):
    """On decode: connects to the prefill servers that routers list, before their requests come."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def takes_command(self, message: Message) -> bool:
        if not isinstance(message, PrefillServers):
            return False
        self._agent.prefill_servers(message)
        return True


class UntilTheEnd(Listener):
    """Hand-overs end before the cache does."""

    def __init__(self, teardown: Callable[[], None]) -> None:
        self._teardown = teardown

    def before_end(self) -> None:
        self._teardown()


class RoleParts:
    """The listeners and parts that a rank's cache has while its server has a role.

    Args:
        teardown: ends the role when the cache ends.
    """

    def __init__(
        self, cache: GlobalRadixCache | HybridRadixCache, agent: Agent, teardown: Callable[[], None]
    ) -> None:
        self._listeners_of_cache = cache.listeners
        self._agent = agent
        self._listeners: list[Listener] = [UntilTheEnd(teardown)]

    def prefill(self, scheduler: Any, fence: Callable[[], Passed], *, returns: bool) -> None:
        """Have the parts of prefill. returns: whether KV comes back from decode. fence: see
        `ReturnReceiver`."""
        raise NotImplementedError

    def decode(self, fence: Callable[[], Passed], least_tokens: int, *, returns: bool) -> None:
        """Have the parts of decode. fence: see `ReturnSender`. least_tokens: see `LocalAhead`. returns:
        whether KV goes back to prefill."""
        raise NotImplementedError

    def begin(self) -> None:
        """From now on the cache has them."""
        for listener in self._listeners:
            self._listeners_of_cache.add(listener)

    def bring_ahead(self, queue: Any) -> None:
        """Decode has polled these requests, which have no slots yet."""

    def end(self) -> None:
        """The role ends: the cache goes on without them."""
        for listener in self._listeners:
            listener.before_clear()
            self._listeners_of_cache.remove(listener)


class PlainRole(RoleParts):
    """`RoleParts` of the plain cache."""

    def __init__(self, cache: GlobalRadixCache, agent: Agent, teardown: Callable[[], None]) -> None:
        super().__init__(cache, agent, teardown)
        self._cache = cache
        self._parts: list[Part] = []
        self._local: LocalAhead | None = None
        """Loads blocks of decode's own tiers before their requests have slots."""

    def prefill(self, scheduler: Any, fence: Callable[[], Passed], *, returns: bool) -> None:
        if not returns:
            return
        cache, agent = self._cache, self._agent
        places = Reservations(Blocks(cache), into_dram=DRAM_POOL in agent.endpoint.pools)
        return_receiver = ReturnReceiver(
            places, agent, lambda: bool(scheduler.waiting_queue), cache.command_queue, fence
        )
        agent.receive_returns(return_receiver)
        self._listeners.append(return_receiver)

    def decode(self, fence: Callable[[], Passed], least_tokens: int, *, returns: bool) -> None:
        self._listeners.append(_PrefillServersListed(self._agent))
        if self._cache.dram is not None:
            self._local = LocalAhead(self._cache, least_tokens=least_tokens)
            self._listeners.append(self._local)
        if returns:
            return_sender = ReturnSender(Blocks(self._cache), self._agent, fence)
            self._agent.send_returns(return_sender)
            self._listeners.append(_ReturnsSent(return_sender))
            self._parts.append(return_sender)

    def begin(self) -> None:
        super().begin()
        for part in self._parts:
            self._cache.ranks.add(part)

    def bring_ahead(self, queue: Any) -> None:
        if self._local is not None:
            self._local.each_pass(queue)

    def end(self) -> None:
        super().end()
        for part in self._parts:
            self._cache.ranks.remove(part)


class HybridRole(RoleParts):
    """`RoleParts` of the cache of a model with windows or states, whose role does not change."""

    def __init__(self, cache: HybridRadixCache, agent: Agent, teardown: Callable[[], None]) -> None:
        super().__init__(cache, agent, teardown)
        self._cache = cache

    def prefill(self, scheduler: Any, fence: Callable[[], Passed], *, returns: bool) -> None:
        cache, agent, store = self._cache, self._agent, self._cache.store
        if not returns or cache.peers is None or store is None:
            return
        names = partial(names_of_prompt, page_size=cache.page_size, pairs=cache.tree_core.is_eagle)
        fetches = NamedFetches(
            store,
            FetchLink(agent.transfers, [pool_name(component) for component in store.parts]),
            Moves(store.ranks, clock=SystemClock()),
            store.ranks,
            names,
            least_blocks=1,
            kept_seconds=0,
        )
        cache.add(ReturnFetches(fetches))
        return_receiver = NamedReturnReceiver(
            fetches,
            cache.weights.namespace,
            lambda: cache.weights.as_started,
            cache.page_size,
            agent,
            cache.command_queue,
        )
        agent.receive_returns(return_receiver)
        self._listeners.append(return_receiver)

    def decode(self, fence: Callable[[], Passed], least_tokens: int, *, returns: bool) -> None:
        cache = self._cache
        self._listeners.append(_PrefillServersListed(self._agent))
        if not returns or cache.peers is None:
            return
        assert isinstance(cache.peers.exports, NamedExports)
        return_sender = NamedReturnSender(
            cache.peers.exports,
            cache.weights.namespace,
            lambda: cache.weights.as_started,
            cache.page_size,
            self._agent,
        )
        self._agent.send_returns(return_sender)
        self._listeners.append(_ReturnsSent(return_sender))


def role_parts(
    cache: GlobalRadixCache | HybridRadixCache, agent: Agent, teardown: Callable[[], None]
) -> RoleParts:
    """The parts for a cache of either kind."""
    if isinstance(cache, GlobalRadixCache):
        return PlainRole(cache, agent, teardown)
    return HybridRole(cache, agent, teardown)

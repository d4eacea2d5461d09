"""Fetching from peers and exporting to them, as one part of a rank's cache.

Routers' messages come with the requests (``commands``). ``waits`` is for SGLang's protocol of waiting
requests (``storage_prefetch``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any, Final, Protocol

from sglang_ext.clock import Clock
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.peers.export import ExportCounters, ExportLink, Exports
from sglang_ext.engine.peers.fetch_results import FetchEnd, FetchResult
from sglang_ext.engine.peers.fetches import Fetches, FetchPlanner, Reads, SpanWish, Wish
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.store import Store
from sglang_ext.protocol.agent import Advise, Export, Fetch, PeerDead
from sglang_ext.wire import Message

HINT_SECONDS: Final = 10.0
"""Limit for a fetch that no request waits for."""


class PeerLink(Protocol):
    """The methods of ``fetch_link.FetchLink`` that are used here."""

    @property
    def transport_bytes(self) -> dict[str, int]: ...

    def peer_dead(self, instance: str, epoch: bytes) -> None: ...


class Link(Reads, PeerLink, Protocol):
    """``fetch_link.FetchLink``."""


class Exporting(Protocol):
    """Exports of prompts, by their namespace and encoded whole blocks."""

    def export(
        self, export: str, namespace: Hashable, key: bytes, seconds: float, *, leaving: bool = False
    ) -> None: ...

    def export_nothing(self, export: str, seconds: float, layers: int = 1) -> None: ...

    def clear(self) -> None: ...

    @property
    def counters(self) -> ExportCounters: ...

    @property
    def busy(self) -> bool: ...


class Peers(Planner):
    """See the module's docstring; for models of any kind. All methods run in the scheduler's thread.

    Args:
        on_result: replies to routers with the results of fetches, in rank 0.
        rank: index into a peer's ``endpoints`` of the endpoint to read from; a peer has as many as this
            instance has ranks.
        namespace: where the KV of a tenant's prompts belongs now, from its ``extra_key`` and ``cache_salt``.
        fresh: whether the weights are those that the link's namespace names.
        behind: how many tokens after a block are part of its name.
    """

    def __init__(
        self,
        exports: Exporting,
        fetches: FetchPlanner,
        link: PeerLink,
        clock: Clock,
        block_tokens: int,
        *,
        namespace: Callable[[str | None, str | None], Hashable],
        fresh: Callable[[], bool] = lambda: True,
        on_result: Callable[[FetchResult], None] = lambda result: None,
        rank: int = 0,
        endpoints: int = 1,
        behind: int = 0,
    ) -> None:
        self.exports = exports
        self.fetches = fetches
        self.link = link
        self._clock = clock
        self._step = block_tokens * TOKEN_BYTES
        self._behind = behind * TOKEN_BYTES
        self._namespace = namespace
        self._fresh = fresh
        self._rank = rank
        self._endpoints = endpoints
        self._on_result = on_result

    def takes_command(self, message: Message, at: float) -> bool:
        match message:
            case Export() if message.compute:
                # No planner before this one computes for peers.
                self.exports.export_nothing(message.export, message.ttl_s)
            case Export():
                self.export(message)
            case Fetch():
                self.fetch(message)
            case PeerDead():
                # Release its exports at once, and count reads from it as misses.
                self.link.peer_dead(message.instance, message.epoch)
            case _:
                return False
        return True

    def export(self, message: Export) -> None:
        """Export the prefix for a peer that is about to request it."""
        namespace, key = self.wanted(message)
        self.exports.export(message.export, namespace, key, message.ttl_s, leaving=message.spills)

    def wanted(self, message: Export) -> tuple[Hashable, bytes]:
        """The namespace of an export, and the whole blocks of its prompt, with the tokens of their names."""
        # Peers know this instance by its first weights: with other weights, export no block.
        key = self._whole(message.tokens) if self._fresh() else b""
        return self._namespace(message.extra_key, message.cache_salt), key

    def fetch(self, message: Fetch) -> None:
        """A request is on its way, and waits; or another instance's KV is to be kept for it."""
        until = None if message.for_others else self._clock.monotonic() + message.wait_s
        wish = self._wish(message, message.wait_s, until)
        if wish is not None:
            self.fetches.begin(wish)

    def fetch_ahead(self, message: Advise, then: Callable[[], None]) -> None:
        """A request is expected: fetch, and then call ``then``, which acts on the hint."""
        seconds = min(HINT_SECONDS, message.ttl_s or HINT_SECONDS)
        wish = self._wish(message, seconds, None, then)
        if wish is None:
            then()
        else:
            self.fetches.begin(wish)

    def _wish(
        self,
        message: Fetch | Advise,
        seconds: float,
        until: float | None,
        then: Callable[[], None] = lambda: None,
    ) -> Wish | None:
        like_ours = all(len(span.source.endpoints) == self._endpoints for span in message.spans)
        if not message.spans or not like_ours or not self._fresh():
            # With another number of ranks, each would need parts of several: not done.
            self.fetches.results.add(message.id, isinstance(message, Advise), FetchEnd.REFUSED)
            return None
        key = self._whole(message.tokens)
        return Wish(
            self._namespace(message.extra_key, message.cache_salt),
            key,
            tuple(
                SpanWish(
                    span.source.endpoints[self._rank],
                    span.source.export,
                    min(len(key), span.tokens * TOKEN_BYTES) // self._step,
                    span.computed,
                )
                for span in message.spans
            ),
            seconds,
            until,
            then,
            message.id,
            isinstance(message, Advise),
            isinstance(message, Fetch) and message.for_others,
        )

    def _whole(self, tokens: bytes) -> bytes:
        blocks = max(0, len(tokens) - self._behind) // self._step
        return tokens[: blocks * self._step + self._behind] if blocks else b""

    def waits(self, namespace: Hashable, key: bytes) -> bool:
        """Whether a request with this prompt is to wait."""
        return self.fetches.waits(namespace, key)

    def admitted(self, namespace: Hashable, key: bytes) -> None:
        """A request with this prompt, which could wait for a fetch, is admitted or is gone."""
        self.fetches.admitted(namespace, key)

    def each_pass(self) -> None:
        """Report the results of fetches. Once per pass."""
        for result in self.fetches.results.take():
            self._on_result(result)

    @property
    def busy(self) -> bool:
        """Whether the next passes have something to do."""
        return self.fetches.busy or self.exports.busy

    @property
    def transport_bytes(self) -> dict[str, int]:
        """Bytes that were read from peers, by transport."""
        return self.link.transport_bytes

    def show(self, metrics: RankMetrics) -> None:
        metrics.count_events("peers", self.fetches.results.counts() | asdict(self.exports.counters))
        metrics.count_events("fetched_bytes", self.transport_bytes)

    def drop_in_flight(self) -> None:
        """Give up fetches and exports."""
        self.fetches.settle()
        self.exports.clear()

    def close(self) -> None:
        """End. DRAM is still there."""
        self.drop_in_flight()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fetches!r}, {self.exports!r})"


class PeerKv(Peers):
    """`Peers` of the plain cache.

    Args:
        below: bring exported blocks to DRAM from the tiers below it.
        shared: further arguments of `Peers`.
    """

    exports: Exports
    fetches: Fetches

    def __init__(
        self,
        store: Store,
        write_down: WriteDown,
        leases: ExportLink,
        link: Link,
        ranks: Ranks,
        moves: Moves,
        *,
        below: Sequence[Promotions] = (),
        **shared: Any,
    ) -> None:
        self.leases = leases
        super().__init__(
            Exports(store, write_down, leases, ranks, moves.clock, below),
            Fetches(store, write_down.dram, link, moves),
            link,
            moves.clock,
            store.tree.block_size,
            **shared,
        )

    def close(self) -> None:
        super().close()
        self.leases.close()

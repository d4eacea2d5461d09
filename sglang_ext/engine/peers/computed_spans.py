"""Spans of prompts that are computed here for a peer, which computes behind them at the same time (MemServe,
table 3: sequence parallelism over transfer).

To compute the rest of a prompt, the peer needs in each layer only that layer's KV of all earlier tokens. So
in the last pass over a span, each layer goes to DRAM as soon as it is computed, and is exported at once as
``NAME.LAYER``: the peer's pass runs one layer behind ours. Blocks of the span from earlier passes are in DRAM
by then, and are exported with each layer.

The last layer is exported only after the pass has ended and all KV that streamed into the pass has verified.
So a peer that has all layers has KV of a valid pass; until then it can still discard its copy.

All methods run in the scheduler's thread, on every rank alike, except the copy callbacks, which run in the
mover's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from sglang_ext.clock import Clock
from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.peers.export import ExportLink, Exports, layer_name
from sglang_ext.engine.planners import Planner, ReadsBatch
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.keys import TOKEN_BYTES, decode_tokens
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.protocol.agent import Export
from sglang_ext.tiers import Tier
from sglang_ext.wire import Message

logger = logging.getLogger(__name__)

MOST_SPANS: Final = 8
SHARE: Final = 4
"""At most ``1 / SHARE`` of DRAM is exported at a time, spans included."""
LEASE_SECONDS: Final = 30.0
"""The time that a peer has to read a layer."""
COPY_CHECK_S: Final = 1.0
"""How often to look whether copying has failed, while the last layer is waited for."""


class Running(Protocol):
    """A request of ours in the scheduler (SGLang's ``Req``)."""

    def finished(self) -> bool: ...


class SpanHost(Protocol):
    """The scheduler and its pool, as they are used here."""

    def start(
        self, name: str, tokens: list[int], extra_key: str | None, cache_salt: str | None
    ) -> Running | None:
        """Put a request for one token into the queue; None when the scheduler does not take it."""

    def watch(self, written: Callable[[int], None]) -> int:
        """Call ``written`` with each layer (of this rank's, from 0) whose KV a forward pass has written.

        Returns:
            the number of layers.
        """


@dataclass
class SpanCounters:
    """Blocks, since the start."""

    span_computed: int = 0
    """For peers that computed the tokens behind them."""
    span_failed: int = 0
    """Requested by peers, but not computed, late, or not inserted."""


@dataclass(eq=False)
class _Span:
    """A span that waits to be computed."""

    export: str
    namespace: Hashable
    key: bytes
    seconds: float
    until: float
    request: Running


@dataclass(eq=False)
class _Computing:
    """A span whose last pass is under way. A `Source` for the mover."""

    span: _Span
    reservation: Reservation
    ids: BlockIds
    """DRAM blocks of the whole span."""
    layers: int
    computed: int = 0
    leases: list[int | None] = field(default_factory=list)
    copied: threading.Event = field(default_factory=threading.Event)
    """All layers are in DRAM."""

    def decided(self, layer: int) -> bool:
        """For the mover: whether a layer is computed."""
        return layer < self.computed


class ComputedSpans(Planner):
    """See the module's docstring.

    Args:
        exports: keeps published blocks in DRAM until the peer has read them.
        wanted: the namespace of an export, and the encoded whole blocks of its prompt (`PeerKv.wanted`).
    """

    def __init__(
        self,
        store: Store,
        tier: DramTier,
        link: ExportLink,
        exports: Exports,
        clock: Clock,
        host: SpanHost,
        wanted: Callable[[Export], tuple[Hashable, bytes]],
    ) -> None:
        self._store = store
        self._tree = store.tree
        self._tier = tier
        self._link = link
        self._exports = exports
        self._clock = clock
        self._step = store.tree.block_size * TOKEN_BYTES
        self._host = host
        self._wanted = wanted
        self._layers = 0
        self._waiting: list[_Span] = []
        self._computing: list[_Computing] = []
        self.counters = SpanCounters()

    def takes_command(self, message: Message, at: float) -> bool:
        if isinstance(message, Export) and message.compute:
            self._begin(message)
            return True
        return False

    def _begin(self, message: Export) -> None:
        """Compute a prompt's beginning, and export it."""
        (namespace, key), seconds = self._wanted(message), message.ttl_s
        request = None
        if key and len(self._waiting) < MOST_SPANS:
            self._layers = self._layers or self._host.watch(self.layer_written)
            name, tokens = f"span_{message.export}", decode_tokens(key).tolist()
            request = self._host.start(name, tokens, message.extra_key, message.cache_salt)
        until = self._clock.monotonic() + seconds
        span = _Span(message.export, namespace, key, seconds, until, request or _NotTaken())
        self._waiting.append(span)
        if request is None:
            self._give_up(span)

    def each_pass(self) -> None:
        """Publish the failure of spans that will not be computed. Once per pass."""
        now = self._clock.monotonic()
        for span in list(self._waiting):
            if span.request.finished() or now > span.until:
                self._give_up(span)

    def _give_up(self, span: _Span) -> None:
        """Drop a span that will not be computed, and publish the failure."""
        self._waiting.remove(span)
        self._export_nothing(span, 1)

    def _export_nothing(self, span: _Span, layers: int) -> None:
        """Count the failure, and answer peers that ask for one of the first ``layers`` layers."""
        self.counters.span_failed += len(span.key) // self._step
        self._exports.export_nothing(span.export, min(span.seconds, LEASE_SECONDS), layers)

    # -- the pass that ends it --------------------------------------------------------------------

    def pass_begins(self, requests: Sequence[Any], reads: ReadsBatch) -> None:
        if not self._waiting:
            return
        ours = {id(span.request): span for span in self._waiting}
        for request in requests:
            span = ours.get(id(request))
            if span is not None and reads.computed_end(request) * TOKEN_BYTES == len(span.key):
                self._compute(span, request, reads)

    def _compute(self, span: _Span, request: Any, reads: ReadsBatch) -> None:
        reservation = self._store.reserve(
            Tier.DRAM, span.namespace, span.key, Use.SPAN, whole=True, share=SHARE
        )
        blocks, most = len(span.key) // self._step, self._tier.n_blocks // SHARE
        if not isinstance(reservation, Refusal) and self._exports.exported_blocks + blocks > most:
            reservation.abort()
            reservation = Refusal.BUDGET
        if isinstance(reservation, Refusal):
            logger.info("a span of %d blocks is not exported: %s", blocks, reservation.value)
            self._give_up(span)
            return
        self._waiting.remove(span)
        # The copies before this one have ended when the first layer of it is copied: they go in order.
        dram = self._tier.holder
        above = self._tree.match(span.namespace, span.key[: reservation.start * self._step]).path
        ids = np.concatenate([*(node.placements[dram] for node in above), reservation.places])
        computing = _Computing(span, reservation, ids.astype(np.int64), self._layers)
        self._computing.append(computing)
        block = self._tree.block_size
        places = reads.slots_of(request, reservation.start * block, len(span.key) // TOKEN_BYTES)

        def copied(layer: int) -> None:
            if layer == computing.layers - 1:
                computing.copied.set()
            else:
                self._publish(computing, layer)

        self._tier.copies.write_computed(places, reservation.places, computing, copied)

    def _publish(self, computing: _Computing, layer: int) -> None:
        """In the mover's thread, and for the last layer in the scheduler's."""
        span = computing.span
        seconds = min(span.seconds, LEASE_SECONDS)
        computing.leases.append(self._link.publish(layer_name(span.export, layer), computing.ids, seconds))

    def layer_written(self, layer: int) -> None:
        """The pass under way has written a layer's KV, and those before it; on a GPU, it was launched."""
        for computing in self._computing:
            computing.computed = max(computing.computed, layer + 1)
        if self._computing:
            self._tier.copies.mover.computed(layer)

    def pass_ended(self, *, held: bool) -> None:
        if self._computing:
            # A captured graph calls nothing for its layers.
            self.layer_written(self._layers - 1)
        for computing in self._computing:
            # The request may give up its slots next.
            while not computing.copied.wait(COPY_CHECK_S):
                self._tier.copies.mover.writes_done()  # raises MoverError
            self._land(computing, held=held)
        self._computing = []

    def _land(self, computing: _Computing, *, held: bool) -> None:
        reservation, done = computing.reservation, None
        if held:
            done = reservation.commit()
        else:
            reservation.abort()
        # Another request that inserted the same tokens meanwhile has its KV in other blocks.
        if done is None or done.held:
            for lease in computing.leases:
                if lease is not None:
                    self._link.withdraw(lease)
            self._export_nothing(computing.span, computing.layers)
            return
        self._publish(computing, computing.layers - 1)
        self.counters.span_computed += computing.ids.size
        self._exports.keep(done.node, int(computing.ids.size), tuple(computing.leases))

    # -- whole ------------------------------------------------------------------------------------

    def show(self, metrics: RankMetrics) -> None:
        metrics.count_events("peers", asdict(self.counters))

    def close(self) -> None:
        self.drop_in_flight()

    def drop_in_flight(self) -> None:
        """Give up all spans, so that nothing more is exported. No pass is under way."""
        for span in list(self._waiting):
            self._give_up(span)

    @property
    def busy(self) -> bool:
        """Whether the next passes have something to do."""
        return bool(self._waiting)

    def __repr__(self) -> str:
        return f"ComputedSpans({len(self._waiting)} waiting, {self.counters})"


class _NotTaken:
    """Stands for a request that the scheduler did not take."""

    def finished(self) -> bool:
        return True

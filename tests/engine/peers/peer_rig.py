"""Two ranks of two instances in one process, which exchange KV: everything is real but the model."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from engine_movers import until
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.peers.arena_leases import ArenaLeases, arena_pool
from sglang_ext.engine.peers.computed_spans import ComputedSpans, SpanHost
from sglang_ext.engine.peers.fetch_link import FetchLink, peer_name
from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.prefetch.advice import Advice
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.ranks import Least
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.hbm import pool_geometry
from sglang_ext.protocol.agent import Export, Fetch, FetchSpan, Source, ToAgent
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.tiers import GatedTier
from sglang_ext.tiered_store.tier import BlockTier

BLOCK = 4
BLOCKS = 20
"""Of a prompt that is on a disk alone (`on_disk`)."""
EPOCH = b"e" * 16
HEARTBEAT = 0.5
LONG = 30.0
"""Seconds of silence after which a server takes another for dead; no test is silent for so long."""
SCENARIO = Scenario(
    "two instances",
    hbm_tokens=240,
    dram_blocks=300,
    settings=Settings(chunk=None, new_token_ratio=0.05),
)
WITH_DISK = dataclasses.replace(SCENARIO, disk_blocks=400)


def spans(endpoints: tuple[str, ...], export: str, tokens: int = 10_000) -> tuple[FetchSpan, ...]:
    """One span, up to the leading ``tokens`` tokens."""
    return (FetchSpan(Source(endpoints, export), tokens),)


def prompt(number: int, blocks: int) -> list[int]:
    """Prompts that share nothing; one token more than whole blocks, so that all of them may match."""
    return [1000 * number + i for i in range(blocks * BLOCK + 1)]


@dataclass(eq=False)
class Server:
    """One rank with its link, as a server of one rank has it."""

    rank: Rank
    link: FetchLink
    peers: PeerKv
    advice: Advice
    results: list[FetchResult]

    @classmethod
    def of(cls, rank: Rank, results: list[FetchResult]) -> Server:
        peers, prefetcher = rank.cache.peers, rank.cache.find(Prefetcher)
        assert peers is not None
        assert prefetcher is not None
        link: Any = peers.link
        advice = Advice(prefetcher, fetch_ahead=peers.fetch_ahead)
        return cls(rank, link, peers, advice, results)

    def compute_spans(self, host: SpanHost) -> ComputedSpans:
        """Compute spans for others from now on."""
        tier = self.rank.tier
        assert tier is not None
        spans = ComputedSpans(
            self.rank.store,
            tier,
            self.peers.leases,
            self.peers.exports,
            self.rank.moves.clock,
            host,
            self.peers.wanted,
        )
        self.rank.cache.planners = (spans, *self.rank.cache.planners)
        return spans

    def receive(self, message: ToAgent) -> None:
        """A router's message, on the way that it takes; an export is made in the same pass."""
        self.rank.cache.expire(0.0)
        spans = self.rank.cache.find(ComputedSpans)
        for planner in (spans, self.peers, self.advice):
            if planner is not None and planner.takes_command(message, 0.0):
                break
        if isinstance(message, Export):
            self.rank.ranks.each_pass()

    def passes_until(self, condition: Callable[[], bool], what: str) -> None:
        """Passes of the scheduler's loop until something holds."""

        def once() -> bool:
            self.rank.scheduler.step()
            self.rank.check()
            return condition()

        until(once, what)

    def in_dram(self, tokens: list[int], salt: str | None = None) -> int:
        """Tokens, found without counting as a use."""
        held = self.rank.tree.holders((0, None, salt), encode_tokens(tokens))
        return held.get(self.rank.dram_holder, 0)

    def finish(self, req: Req) -> Req:
        """Passes until a request has ended."""
        self.passes_until(lambda: self.rank.scheduler.idle and req.finished(), "the request")
        return req

    def serve(self, tokens: list[int]) -> None:
        """A request, and its KV in DRAM."""
        self.rank.serve(tokens)
        self.settle()

    def settle(self) -> None:
        self.rank.settle()


MakeServer = Callable[..., Server]


@pytest.fixture(name="make_server")
def servers() -> Iterator[MakeServer]:
    made: list[Server] = []

    def make(
        scenario: Scenario = SCENARIO,
        *,
        namespace: str = "same",
        transports: tuple[TransportName, ...] = (),
        clock: FakeClock | None = None,
        tp: tuple[int, int] = (0, 1),
        least: Least | None = None,
        dead_after: float = LONG,
        disk_class: Callable[[BlockTier], BlockTier] = lambda disk: disk,
    ) -> Server:
        number, ranks = tp
        name = peer_name(f"server {len(made)}", EPOCH)
        config = EndpointConfig(
            name, "model", rank=number, transports=transports, heartbeat=HEARTBEAT, dead_after=dead_after
        )
        results: list[FetchResult] = []

        def transfers(rank: Rank) -> TransferThread:
            assert rank.arena is not None
            geometry = pool_geometry(
                rank.pools.tensors,
                block_tokens=scenario.block,
                page_tokens=rank.pools.kind.page,
                first_layer=rank.pools.kind.start_layer,
                model_layers=rank.pools.kind.start_layer + len(rank.pools.tensors),
                tp_rank=number,
                tp_size=ranks,
                model_kv_heads=2 * ranks,
            )
            return TransferThread(config, [arena_pool(rank.arena, geometry, namespace)])

        def peers(rank: Rank, transfers: TransferThread) -> PeerKv:
            assert rank.write_down is not None
            return PeerKv(
                rank.store,
                rank.write_down,
                ArenaLeases(transfers),
                FetchLink(transfers),
                rank.ranks,
                rank.moves,
                namespace=rank.weights.namespace,
                below=[] if rank.promotions is None else [rank.promotions],
                fresh=lambda: rank.weights.as_started,
                on_result=results.append,
                rank=number,
                endpoints=ranks,
            )

        rank = Rank(
            scenario,
            least=least,
            clock=clock,
            transfers=transfers,
            peers=peers,
            disk_class=disk_class,
        )
        made.append(Server.of(rank, results))
        return made[-1]

    yield make
    for server in reversed(made):  # readers first: they wait for a server that ends
        server.rank.close()


def lend_and_fetch(
    owner: Server, reader: Server, tokens: list[int], *, salt: str | None = None, wait_s: float = 30.0
) -> None:
    """Send both servers a router's messages for a request."""
    key = encode_tokens(tokens)
    owner.receive(Export("export", key, cache_salt=salt))
    reader.receive(Fetch("r1", key, spans((owner.link.address,), "export"), cache_salt=salt, wait_s=wait_s))


def served(make_server: MakeServer) -> tuple[Server, Server, list[int]]:
    """An owner that has the KV of a prompt of 20 blocks in DRAM, a reader, and the prompt."""
    owner, reader, tokens = make_server(), make_server(), prompt(1, 20)
    owner.serve(tokens)
    return owner, reader, tokens


def offered(reader: Server) -> Any:
    """The fetch under way, once the owner has sent the list of exported blocks."""
    (fetch,) = reader.peers.fetches._active
    until(lambda: fetch.job.offered is not None, "the offer")
    return fetch


def fetched(server: Server) -> None:
    server.passes_until(lambda: not server.peers.fetches.busy, "the fetch")


def exported(server: Server) -> int:
    return server.peers.exports.exported_blocks


@contextmanager
def silent(server: Server) -> Iterator[None]:
    """Its transfer thread sends nothing while the block runs, as if the process had died."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(30)

    assert server.rank.cache.transfers is not None
    server.rank.cache.transfers.loop.call_soon_threadsafe(hold)
    try:
        assert held.wait(10)
        yield
    finally:
        go_on.set()


def forget(owner: Server) -> None:
    """Everything leaves memory, and the disk has it."""
    assert owner.rank.tier is not None
    assert owner.rank.writes is not None
    owner.settle()
    owner.rank.writes.settle()
    owner.rank.ranks.each_pass()
    owner.rank.cache.evict(EvictParams(num_tokens=owner.rank.pools.tokens))
    owner.rank.tier.give_back(owner.rank.tier.take(owner.rank.tier.n_blocks))
    assert owner.rank.tree.node_count == 0


def on_disk(make_server: MakeServer, **more: Any) -> tuple[Server, list[int]]:
    """An owner whose disk alone has a prompt of 20 blocks."""
    owner, tokens = make_server(more.pop("scenario", WITH_DISK), **more), prompt(1, BLOCKS)
    owner.serve(tokens)
    forget(owner)
    return owner, tokens


class Gate:
    """Stops the reads of a server's disk."""

    def __init__(self) -> None:
        self.tier: GatedTier | None = None

    def __call__(self, disk: BlockTier) -> BlockTier:
        self.tier = GatedTier(disk)
        return self.tier

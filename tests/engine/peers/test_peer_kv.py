"""KV from a peer's DRAM: two ranks of two instances in one process, with everything real but the model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from engine_movers import until
from engine_pools import PoolKind, WrongKvError
from engine_simulation import Rank
from peer_rig import (
    BLOCK,
    EPOCH,
    HEARTBEAT,
    LONG,
    SCENARIO,
    WITH_DISK,
    MakeServer,
    Server,
    exported,
    fetched,
    lend_and_fetch,
    offered,
    prompt,
    served,
    silent,
    spans,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.config import KvConfig
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.cache.metrics import CacheMetrics
from sglang_ext.engine.peers.arena_leases import arena_pool
from sglang_ext.engine.peers.fetch_link import USE, peer_name
from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.ranks import NOT_YET
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.keys import Namespace, encode_tokens
from sglang_ext.mempool.ledger import Call
from sglang_ext.patches.adapter.build_transfers import (
    endpoint_config,
    make_peers,
    may_fetch,
    start_fetching,
)
from sglang_ext.protocol.agent import (
    Advise,
    Export,
    Fetch,
    FetchSpan,
    PeerDead,
    Withdraw,
)
from sglang_ext.testing.fakes import FakeClock

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

# -- received KV ------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
@pytest.mark.parametrize(
    ("kind", "plane"),
    [(PoolKind(draft_layers=2), 7), (PoolKind("dsa", 64, layers=3), 1)],
    ids=["draft", "index keys"],
)
def test_every_plane_of_a_block_comes(
    make_server: MakeServer, kind: PoolKind, plane: int, damaged: bool
) -> None:
    """The draft's layers with the model's, and index keys with the latents. The twin damages their plane."""
    block = max(kind.page, BLOCK)
    scenario = dataclasses.replace(SCENARIO, kind=kind, block=block, hbm_tokens=4 * 64 + 6 * block)
    owner, reader = (make_server(scenario, transports=(TransportName.TCP,)) for _ in range(2))
    tokens = prompt(1, 2 * block // BLOCK)
    owner.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    reader.passes_until(lambda: reader.in_dram(tokens) == 2 * block, "the fetched blocks")
    if damaged:
        reader.rank.arena.plane(plane)[:] ^= 1
    req = reader.rank.scheduler.submit(tokens, new_tokens=2)
    with pytest.raises(WrongKvError) if damaged else nullcontext():
        reader.finish(req)
        assert req.cached_tokens == 2 * block


@pytest.mark.parametrize("transport", [(), (TransportName.TCP,)], ids=["best", "tcp"])
def test_a_prompt_computed_there_is_a_hit_in_dram_here(
    make_server: MakeServer, transport: tuple[TransportName, ...]
) -> None:
    as_served = dataclasses.replace(SCENARIO, shared_dram=True)
    owner, reader = (make_server(as_served, transports=transport) for _ in range(2))
    tokens = prompt(1, 20)
    owner.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK
    assert reader.rank.scheduler.loaded_tokens == 20 * BLOCK
    assert reader.peers.fetches.counters.fetched_blocks == 20
    assert reader.peers.fetches.counters.ends[FetchEnd.DONE] == 1
    # Two servers on one host read each other's arenas by mapping them.
    name = transport[0] if transport else TransportName.SHM
    size = 20 * reader.rank.arena.block_bytes
    assert list(reader.peers.transport_bytes) == [name]
    assert reader.peers.transport_bytes[name] >= size
    # All layers of a block lie side by side in an arena: a block is one range, and none is packed
    # (MemServe, 5.2).
    stats = reader.link.endpoint.totals(USE)[name]
    assert stats.runs == 20 * reader.rank.arena.layout.n_planes
    assert stats.transactions <= 20
    metrics = CacheMetrics(0)
    metrics.update(reader.rank.cache)
    sample, rank = metrics.registry.get_sample_value, {"tp_rank": "0"}
    fetched_bytes = sample("sglang_ext_cache_fetched_bytes_total", rank | {"transport": name})
    assert fetched_bytes == reader.peers.transport_bytes[name]
    calls = {call: sample("sglang_ext_cache_mempool_calls_total", rank | {"call": call}) for call in Call}
    assert calls == {call: reader.rank.store.calls[call] for call in Call}
    assert (calls[Call.ALLOC_MEM], calls[Call.TRANSFER_WITH_INSERT], calls[Call.SWAP_IN]) == (1, 1, 1)
    owner.passes_until(lambda: not owner.peers.busy, "the lease to end")
    owner.link.endpoint.check()


def test_one_damaged_byte_at_the_owner_is_a_wrong_answer_here(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    assert owner.rank.arena is not None
    (node,) = (n for n in owner.rank.tree.nodes() if owner.rank.dram_holder in n.placements)
    owner.rank.arena.blocks[node.placements[owner.rank.dram_holder][7], 5] ^= 1
    lend_and_fetch(owner, reader, tokens)
    with pytest.raises(WrongKvError):
        reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))


def test_only_what_is_lacking_is_read(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    reader.serve(tokens[: 8 * BLOCK + 1])
    lend_and_fetch(owner, reader, tokens)
    fetched(reader)
    assert reader.peers.fetches.counters.fetched_blocks == 12
    assert reader.in_dram(tokens) == 20 * BLOCK
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK


@pytest.mark.parametrize("durability", ["dram", "off"], ids=["being copied", "never copied"])
def test_what_is_in_hbm_is_lent_when_dram_has_it(make_server: MakeServer, durability: str) -> None:
    owner, reader = make_server(dataclasses.replace(SCENARIO, durability=durability)), make_server()
    tokens = prompt(1, 20)
    owner.rank.serve(tokens)
    if durability == "dram":
        # As if the copy of the newest blocks had not completed.
        assert owner.rank.tier is not None
        path = owner.rank.tree.match((0, None, None), encode_tokens(tokens)).path
        with patch.object(owner.rank.write_down, "incomplete", lambda: set(path)):
            lend_and_fetch(owner, reader, tokens)
            for _ in range(3):
                owner.rank.ranks.each_pass()
            assert owner.peers.busy
            assert exported(owner) == 0
    else:
        assert not owner.in_dram(tokens)
        lend_and_fetch(owner, reader, tokens)
        assert exported(owner) == 0
    owner.settle()
    owner.passes_until(lambda: exported(owner) > 0, "the export")
    assert exported(owner) == 20
    fetched(reader)
    assert reader.in_dram(tokens) == 20 * BLOCK
    owner.passes_until(lambda: not owner.peers.busy, "the lease to end")


def test_a_flush_forgets_what_was_to_be_lent(make_server: MakeServer) -> None:
    owner = make_server(dataclasses.replace(SCENARIO, durability="off"))
    tokens = prompt(1, 20)
    owner.rank.serve(tokens)
    owner.receive(Export("export", encode_tokens(tokens)))
    assert owner.peers.busy
    assert owner.rank.scheduler.flush()
    assert not owner.peers.busy


def test_what_was_fetched_goes_on_to_disk(make_server: MakeServer) -> None:
    owner, reader = make_server(), make_server(WITH_DISK)
    tokens = prompt(1, 20)
    owner.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    fetched(reader)
    reader.settle()
    assert reader.rank.writes is not None
    assert reader.rank.writes.counters.written == 20
    # Everything leaves memory, and the disk has it.
    assert reader.rank.tier is not None
    assert reader.rank.arena is not None
    reader.rank.tier.give_back(reader.rank.tier.take(reader.rank.arena.n_blocks))
    assert reader.in_dram(tokens) == 0
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK
    assert reader.rank.scheduler.disk_tokens


def test_a_hint_fetches_and_then_brings_to_hbm(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    key = encode_tokens(tokens)
    owner.receive(Export("export", key))
    reader.receive(Advise("hint", key, ttl_s=30.0, spans=spans((owner.link.address,), "export")))
    fetched(reader)
    prefetcher = reader.rank.cache.find(Prefetcher)
    assert prefetcher is not None

    def brought() -> bool:
        reader.settle()
        return not prefetcher.busy

    reader.passes_until(brought, "the prefetch")
    (result,) = prefetcher.take_ended()
    assert (result.id, result.tokens, result.brought) == ("hint", 20 * BLOCK, 20 * BLOCK)


def test_a_hint_that_is_withdrawn_brings_nothing_to_hbm(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    key = encode_tokens(tokens)
    owner.receive(Export("export", key))
    reader.receive(Advise("hint", key, ttl_s=30.0, spans=spans((owner.link.address,), "export")))
    reader.receive(Withdraw("hint"))
    fetched(reader)
    prefetcher = reader.rank.cache.find(Prefetcher)
    assert prefetcher is not None
    assert not prefetcher.busy


# -- several ranks ----------------------------------------------------------------------------------


def test_a_rank_reads_from_the_same_rank_of_its_peer(make_server: MakeServer) -> None:
    owner, reader = make_server(tp=(1, 2)), make_server(tp=(1, 2))
    tokens = prompt(1, 20)
    owner.serve(tokens)
    key = encode_tokens(tokens)
    owner.receive(Export("export", key))
    reader.receive(Fetch("r1", key, spans(("127.0.0.1:1", owner.link.address), "export"), wait_s=30.0))
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK
    assert reader.peers.fetches.counters.ends[FetchEnd.DONE] == 1


def reading(reader: Server) -> int:
    """Blocks of DRAM that are reserved for fetches."""
    return sum(move.blocks for move in reader.rank.moves.of(reader.peers.fetches))


@pytest.mark.parametrize(("others", "blocks"), [(20, 20), (7, 7), (0, 0)])
def test_nothing_lands_before_all_ranks_have_it(make_server: MakeServer, others: int, blocks: int) -> None:
    said = [NOT_YET]

    def least(numbers: Sequence[int]) -> Sequence[int]:
        """The other rank knows this of the fetch, and has measured the same rates."""
        return [*numbers[:2], *(min(number, said[0]) for number in numbers[2:4]), *numbers[4:]]

    owner, reader = make_server(), make_server(least=least)
    tokens = prompt(1, 20)
    owner.serve(tokens)
    key = encode_tokens(tokens)
    owner.receive(Export("export", key))
    reader.receive(Advise("hint", key, ttl_s=30.0, spans=spans((owner.link.address,), "export")))
    fetch = offered(reader)
    for _ in range(3):
        reader.rank.ranks.each_pass()
    assert not reading(reader), "another rank does not know yet what it is offered"
    said[0] = others
    reader.rank.ranks.each_pass()
    if others:
        assert reading(reader) == blocks
        said[0] = NOT_YET
        until(lambda: fetch.job.read is not None, "the read")
        for _ in range(3):
            reader.rank.ranks.each_pass()
        assert reader.in_dram(tokens) == 0
        said[0] = 1 + others  # the read is over there, with so many blocks (`Moves.propose`)
        reader.rank.ranks.each_pass()
    assert reader.in_dram(tokens) == blocks * BLOCK
    assert not reader.peers.fetches.busy
    reader.rank.check()


# -- several peers ----------------------------------------------------------------------------------


def two_spans(
    first: Server, second: Server, tokens: list[int], exports: tuple[str, str] = ("export", "export")
) -> tuple[FetchSpan, ...]:
    """The first 8 blocks of a prompt from one, the rest from another."""
    return (
        *spans((first.link.address,), exports[0], 8 * BLOCK),
        *spans((second.link.address,), exports[1], len(tokens)),
    )


def test_each_span_comes_from_its_peer(make_server: MakeServer) -> None:
    first, second, reader = (make_server() for _ in range(3))
    tokens = prompt(1, 20)
    key = encode_tokens(tokens)
    for owner, known in ((first, tokens[: 8 * BLOCK + 1]), (second, tokens)):
        owner.serve(known)
        owner.receive(Export("export", key))
    reader.receive(Fetch("r1", key, two_spans(first, second, tokens), wait_s=30.0))
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK
    (result,) = reader.results
    assert [(span.how, span.tokens) for span in result.spans] == [
        (FetchEnd.DONE, 8 * BLOCK),
        (FetchEnd.DONE, 12 * BLOCK),
    ]
    assert (result.how, result.tokens) == (FetchEnd.DONE, 20 * BLOCK)
    assert reader.rank.store.calls[Call.TRANSFER_WITH_INSERT] == 2
    for owner in (first, second):
        owner.passes_until(lambda owner=owner: not owner.peers.busy, "the lease to end")


@pytest.mark.parametrize("missing", [0, 1])
def test_a_span_that_comes_late_is_computed(make_server: MakeServer, missing: int) -> None:
    """KV before the missing span is used. A late owner leaves no time to ask the next one."""
    first, second, reader = (make_server() for _ in range(3))
    tokens = prompt(1, 20)
    key = encode_tokens(tokens)
    for owner in (first, second):
        owner.serve(tokens)
        owner.receive(Export("export", key))
    exports = ("nothing", "export") if missing == 0 else ("export", "nothing")
    reader.receive(Fetch("r1", key, two_spans(first, second, tokens, exports), wait_s=1.0))
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == (0 if missing == 0 else 8 * BLOCK)
    reader.passes_until(lambda: bool(reader.results), "the end")
    (result,) = reader.results
    assert result.spans[missing].how is FetchEnd.LATE
    assert result.tokens == missing * 8 * BLOCK
    # The other owner gets back the blocks that it had exported in vain.
    for owner in (first, second):
        owner.passes_until(lambda owner=owner: not owner.peers.busy, "the lease to end")


# -- waiting ----------------------------------------------------------------------------------------


def test_others_go_first_and_a_wait_ends(make_server: MakeServer) -> None:
    clock = FakeClock()
    owner, reader = make_server(), make_server(clock=clock)
    tokens = prompt(1, 20)
    key = encode_tokens(tokens)
    # No export has this name: the request would wait for as long as it may.
    reader.receive(Fetch("r1", key, spans((owner.link.address,), "nothing"), wait_s=30.0))
    scheduler = reader.rank.scheduler
    waiting = scheduler.submit(tokens, new_tokens=2)
    others = [scheduler.submit(tokens, new_tokens=2) for tokens in (prompt(2, 5), prompt(3, 1)[:3])]
    reader.passes_until(lambda: all(other.finished() for other in others), "the other requests")
    assert waiting in scheduler.waiting
    clock.advance(30.1)
    reader.finish(waiting)
    assert reader.peers.fetches.counters.not_waited == 1
    assert waiting.cached_tokens == 0


def test_a_request_that_goes_away_leaves_nothing(make_server: MakeServer) -> None:
    owner, reader = make_server(), make_server()
    tokens = prompt(1, 20)
    reader.receive(Fetch("r1", encode_tokens(tokens), spans((owner.link.address,), "nothing"), wait_s=30.0))
    req = reader.rank.scheduler.submit(tokens, new_tokens=2)
    reader.rank.scheduler.step()
    reader.rank.scheduler.abort(req)
    assert not reader.rank.cache._behind_peers


# -- failures ---------------------------------------------------------------------------------------


def test_a_stale_read_is_computed_instead(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    lend_and_fetch(owner, reader, tokens)
    offered(reader)
    # The owner's cache is flushed, and another prompt's bytes take the place, after the offer was made.
    assert owner.rank.scheduler.flush()
    owner.serve(prompt(2, 20))
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 0
    assert reader.peers.fetches.counters.ends[FetchEnd.STALE] == 1
    assert reader.peers.fetches.counters.fetched_blocks == 0


def test_an_owner_that_dies_is_a_miss(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    lend_and_fetch(owner, reader, tokens)
    offered(reader)
    owner.rank.cache.release_host_resources()
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 0
    assert not reader.peers.fetches.busy


def lend_20_blocks(owner: Server, reader: Server) -> None:
    """A prompt of so many blocks is at the owner, and the reader has been offered them."""
    tokens = prompt(1, 20)
    owner.serve(tokens)
    key = encode_tokens(tokens)
    owner.receive(Export("export", key, ttl_s=60.0))
    reader.receive(Fetch("r1", key, spans((owner.link.address,), "export"), wait_s=30.0))
    offered(reader)


def test_a_reader_that_dies_frees_what_was_lent(make_server: MakeServer) -> None:
    owner, reader = make_server(), make_server()
    lend_20_blocks(owner, reader)
    assert owner.peers.exports.exported_blocks == 20
    reader.rank.cache.release_host_resources()
    owner.passes_until(lambda: not owner.peers.busy, "the lease to end")
    assert owner.rank.tree.locked_blocks_of(owner.rank.dram_holder) == 0


def heard_of(owner: Server) -> float:
    """When the owner's only reader last sent a message."""
    (session,) = owner.link.endpoint.owner.sessions
    return session.last_seen


@pytest.mark.parametrize("epoch", [EPOCH, b""], ids=["its epoch", "any epoch"])
def test_a_reader_that_a_router_calls_dead_keeps_what_it_was_lent_while_it_is_heard(
    make_server: MakeServer, epoch: bytes
) -> None:
    owner, reader = make_server(dead_after=LONG), make_server()
    lend_20_blocks(owner, reader)
    owner.receive(PeerDead("server 1", epoch))
    told = time.monotonic()
    owner.passes_until(lambda: heard_of(owner) > told + 3 * HEARTBEAT, "heartbeats of the reader")
    assert owner.peers.exports.exported_blocks == 20
    fetched(reader)
    assert reader.peers.fetches.counters.ends[FetchEnd.DONE] == 1


@pytest.mark.parametrize(
    ("dead", "ends"),
    [
        (PeerDead("server 1", EPOCH), True),
        (PeerDead("server 1", b""), True),
        (PeerDead("server 1", b"x" * 16), False),
        (PeerDead("server", b""), False),
        (PeerDead("server 10", EPOCH), False),
        (None, False),
    ],
    ids=["its epoch", "any epoch", "another epoch", "another name", "a longer name", "nobody says so"],
)
def test_a_silent_reader_loses_what_it_was_lent_sooner_when_a_router_calls_it_dead(
    make_server: MakeServer, dead: PeerDead | None, ends: bool
) -> None:
    owner, reader = make_server(dead_after=LONG), make_server()
    lend_20_blocks(owner, reader)
    with silent(reader):
        # Its last message may still be on its way.
        owner.passes_until(lambda: time.monotonic() > heard_of(owner) + HEARTBEAT, "the beginning of it")
        heard = heard_of(owner)
        if dead is not None:
            owner.receive(dead)
        if ends:
            owner.passes_until(lambda: not owner.peers.busy, "the lease to end")
            assert owner.peers.exports.counters.given_back == 20
            assert owner.rank.tree.locked_blocks_of(owner.rank.dram_holder) == 0
        else:
            owner.passes_until(lambda: time.monotonic() > heard + 4 * HEARTBEAT, "a silence")
            assert owner.peers.exports.exported_blocks == 20


@pytest.mark.parametrize("dies", [True, False])
def test_a_holder_that_a_router_calls_dead_is_waited_for_while_it_answers(
    make_server: MakeServer, dies: bool
) -> None:
    owner, reader = make_server(), make_server(dead_after=LONG)
    tokens = prompt(1, 20)
    owner.serve(tokens)
    key = encode_tokens(tokens)
    # It never exports: that would be waited for until the end of the wait.
    reader.receive(Fetch("r1", key, spans((owner.link.address,), "nothing"), wait_s=60.0))
    (fetch,) = reader.peers.fetches._active
    until(lambda: fetch.job.instance is not None, "the connection")
    with silent(owner) if dies else nullcontext():
        told = time.monotonic()
        client = fetch.job.instance.links[0].client
        until(lambda: not dies or time.monotonic() > client.last_received + HEARTBEAT, "messages under way")
        reader.receive(PeerDead("server 0", EPOCH))
        if dies:
            req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
            assert req.cached_tokens == 0
            assert reader.peers.fetches.counters.ends[FetchEnd.GONE] == 1
        else:
            reader.passes_until(lambda: time.monotonic() > told + 4 * HEARTBEAT, "a few heartbeats")
            assert reader.peers.fetches.busy
    if dies:
        # The reader connects again to a server that is alive.
        lend_and_fetch(owner, reader, prompt(1, 20))
        fetched(reader)
        ends = reader.peers.fetches.counters.ends
        assert ends[FetchEnd.DONE] + ends[FetchEnd.NEEDLESS] == 1


def test_a_silent_holder_is_waited_for_until_it_is_called_dead(make_server: MakeServer) -> None:
    owner, reader = make_server(), make_server(dead_after=LONG)
    tokens = prompt(1, 20)
    key = encode_tokens(tokens)
    reader.receive(Fetch("r1", key, spans((owner.link.address,), "nothing"), wait_s=60.0))
    (fetch,) = reader.peers.fetches._active
    until(lambda: fetch.job.instance is not None, "the connection")
    with silent(owner):
        since = time.monotonic()
        reader.passes_until(lambda: time.monotonic() > since + 4 * HEARTBEAT, "a silence")
        assert reader.peers.fetches.busy


def test_what_is_not_needed_is_given_back_at_once(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    reader.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    assert not reader.peers.fetches.busy
    assert reader.peers.fetches.counters.ends[FetchEnd.NEEDLESS] == 1
    assert owner.peers.exports.exported_blocks == 20
    owner.passes_until(lambda: not owner.peers.busy, "the lease to end")


def test_the_result_of_a_fetch_is_reported(make_server: MakeServer) -> None:
    owner, reader = make_server(), make_server()
    told = reader.results
    tokens = prompt(1, 20)
    owner.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    fetched(reader)
    reader.receive(Advise("hint", encode_tokens(tokens), spans=spans((owner.link.address,), "export")))
    reader.receive(Fetch("r2", encode_tokens(tokens), spans(("a:1", "b:2"), "export")))
    reader.peers.each_pass()
    assert [(each.id, each.ahead, each.how.value, each.tokens) for each in told] == [
        ("r1", False, "done", 20 * BLOCK),
        ("hint", True, "needless", 0),
        ("r2", False, "refused", 0),
    ]
    assert [span.seconds >= 0 for span in told[0].spans] == [True]
    assert not told[1].spans


def test_another_namespace_is_refused(make_server: MakeServer) -> None:
    owner, reader = make_server(namespace="other weights"), make_server()
    tokens = prompt(1, 20)
    owner.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 0
    assert reader.peers.fetches.counters.ends[FetchEnd.REFUSED] == 1


def test_tenants_do_not_share(make_server: MakeServer) -> None:
    owner, reader = make_server(), make_server()
    tokens = prompt(1, 20)
    owner.rank.serve(tokens, salt="theirs")
    owner.settle()
    lend_and_fetch(owner, reader, tokens, salt="ours")
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2, salt="ours"))
    assert req.cached_tokens == 0
    assert reader.peers.fetches.counters.ends[FetchEnd.NEEDLESS] == 1
    lend_and_fetch(owner, reader, tokens, salt="theirs")
    fetched(reader)
    assert reader.in_dram(tokens, salt="theirs") == 20 * BLOCK
    assert reader.in_dram(tokens) == 0


def test_new_weights_end_lending_and_fetching(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    for server in (owner, reader):
        server.rank.scheduler.change_weights()
    lend_and_fetch(owner, reader, tokens)
    assert owner.peers.exports.exported_blocks == 0
    assert not reader.peers.fetches.busy
    assert reader.peers.fetches.counters.ends[FetchEnd.REFUSED] == 1


def test_new_weights_drop_a_fetch_that_is_on_its_way(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    lend_and_fetch(owner, reader, tokens)
    req = reader.rank.scheduler.submit(tokens, new_tokens=2)
    offered(reader)
    reader.rank.ranks.each_pass()
    assert reading(reader)
    reader.rank.scheduler.change_weights()
    assert not reader.peers.busy
    reader.finish(req)
    assert reader.peers.fetches.counters.ends[FetchEnd.CANCELLED] == 1
    assert req.cached_tokens == 0


def test_new_weights_at_the_owner_end_a_loan(make_server: MakeServer) -> None:
    """The reader stops reading the exported blocks, and computes."""
    owner, reader, tokens = served(make_server)
    lend_and_fetch(owner, reader, tokens)
    req = reader.rank.scheduler.submit(tokens, new_tokens=2)
    offered(reader)
    owner.rank.scheduler.change_weights()
    assert owner.peers.exports.exported_blocks == 0
    reader.finish(req)
    assert reader.peers.fetches.counters.ends[FetchEnd.DONE] == 0
    assert req.cached_tokens == 0


def test_a_peer_with_another_number_of_ranks_is_refused(make_server: MakeServer) -> None:
    owner, reader = make_server(), make_server()
    key = encode_tokens(prompt(1, 20))
    reader.receive(Fetch("r1", key, spans((owner.link.address,) * 2, "export")))
    assert reader.peers.fetches.counters.ends[FetchEnd.REFUSED] == 1
    assert not reader.peers.fetches.busy


def test_what_is_lent_is_bounded(make_server: MakeServer) -> None:
    scenario = dataclasses.replace(SCENARIO, dram_blocks=60)
    owner, reader = make_server(scenario), make_server()
    tokens = prompt(1, 20)
    owner.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    assert owner.peers.exports.counters.not_exported == 20
    fetched(reader)
    assert reader.peers.fetches.counters.ends[FetchEnd.NEEDLESS] == 1


def test_what_is_lent_is_not_evicted(make_server: MakeServer) -> None:
    owner = make_server()
    tokens = prompt(1, 20)
    owner.serve(tokens)
    owner.receive(Export("export", encode_tokens(tokens)))
    owner.rank.cache.evict(EvictParams(num_tokens=owner.rank.pools.tokens))
    assert owner.rank.tier is not None
    ids = owner.rank.tier.take(300)
    assert len(ids) == 280
    owner.rank.tier.give_back(ids)
    assert owner.in_dram(tokens) == 20 * BLOCK


def test_a_flush_in_the_middle_of_a_fetch_leaves_nothing(make_server: MakeServer) -> None:
    owner, reader, tokens = served(make_server)
    lend_and_fetch(owner, reader, tokens)
    offered(reader)
    reader.rank.ranks.each_pass()
    assert reading(reader)
    assert reader.rank.scheduler.flush()
    reader.rank.check()
    assert reader.rank.tier is not None
    assert reader.rank.tier.used_blocks == 0


# -- when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "adapters", "expected"),
    [
        ({}, False, True),
        ({"router": None}, False, False),
        ({"dram_size": 0}, False, False),
        ({}, True, False),
    ],
)
def test_which_servers_exchange_kv(changes: dict[str, object], adapters: bool, expected: bool) -> None:
    config = dataclasses.replace(KvConfig(dram_size=1 << 20, router="http://127.0.0.1:1"), **changes)  # type: ignore[arg-type]
    assert may_fetch(config, adapters=adapters) is expected


@pytest.mark.parametrize(("flag", "coalesces"), [("on", True), ("off", False)])
def test_the_flag_decides_whether_ranges_are_coalesced(flag: str, coalesces: bool) -> None:
    config = KvConfig(transfer_coalescing=flag)
    server = SimpleNamespace(host="127.0.0.1", port=1, device="cpu")
    endpoint = endpoint_config(config, server, "model", epoch=EPOCH, rank=0)
    assert endpoint.coalescing is coalesces


def fetching(rank: Rank, config: KvConfig, host: str) -> TransferThread | None:
    """The transfer thread of a server that listens at a host."""
    assert rank.arena is not None
    endpoint = endpoint_config(
        config, SimpleNamespace(host=host, device="cpu"), "model float32", epoch=EPOCH, rank=0
    )
    namespace = Namespace("model", "weights", "float32", "layout").digest().hex()
    return start_fetching(endpoint, [arena_pool(rank.arena, rank.pools.geometry(), namespace)])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("secured", [False, True])
def test_what_a_server_puts_together_fetches(
    stack: ExitStack, key_file: Path, host: str, secured: bool
) -> None:
    config = KvConfig(
        dram_size=1 << 20,
        router="http://127.0.0.1:1",
        cluster_key_file=str(key_file) if secured else None,
        instance_id="one",
    )
    servers: list[Server] = []
    for _ in range(2):

        def transfers(rank: Rank) -> TransferThread:
            made = fetching(rank, config, host)
            assert made is not None
            return made

        def peers(rank: Rank, transfers: TransferThread) -> PeerKv:
            assert rank.tier is not None
            return make_peers(
                rank.store, rank.write_down, transfers, rank.weights, rank.ranks, rank.moves, endpoints=1
            )

        server = Server.of(Rank(SCENARIO, transfers=transfers, peers=peers), [])
        stack.callback(server.rank.close)
        assert server.link.endpoint.config.instance == peer_name("one", EPOCH)
        servers.append(server)
    owner, reader = servers
    tokens = prompt(1, 20)
    owner.serve(tokens)
    lend_and_fetch(owner, reader, tokens)
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 20 * BLOCK


@pytest.mark.parametrize("host", ["2001:db8::1", "192.0.2.1"])
def test_a_server_that_cannot_listen_does_without(make_server: MakeServer, key_file: Path, host: str) -> None:
    config = KvConfig(
        dram_size=1 << 20,
        router="http://127.0.0.1:1",
        cluster_key_file=str(key_file),
        instance_id="one",
    )
    assert fetching(make_server().rank, config, host) is None

"""KV that a peer has only on disk: it is brought to its DRAM, verified, and exported from there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_movers import until
from engine_pools import WrongKvError
from peer_rig import (
    BLOCK,
    BLOCKS,
    LONG,
    WITH_DISK,
    Gate,
    MakeServer,
    Server,
    exported,
    fetched,
    forget,
    lend_and_fetch,
    on_disk,
    prompt,
    spans,
)

from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Advise, Export, Fetch
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.tiers import GatedTier, MemoryTier
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome
from sglang_ext.tiered_store.wrapped import WrappedTier
from sglang_ext.tiers import Tier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


class Damaged(WrappedTier):
    """A disk whose blocks from the ninth of a read on do not verify."""

    SOUND = 8

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        super().get_layer(get, layer, memory, ids)
        get.blocks = min(get.blocks, self.SOUND)
        return LayerRead(self.SOUND, Outcome.DAMAGED)


def pass_both(owner: Server, reader: Server, *, check: bool = True) -> None:
    """Passes of both until the fetch has ended. check: the owner's tiers."""

    def ended() -> bool:
        owner.rank.scheduler.step()
        if check:
            owner.rank.check()
        return not reader.peers.fetches.busy

    reader.passes_until(ended, "the fetch")


def nothing_is_held(owner: Server) -> None:
    owner.passes_until(lambda: not owner.peers.busy, "the lease to end")
    assert owner.rank.tree.locked_blocks_of(owner.rank.dram_holder) == 0
    assert owner.rank.promotions is not None
    assert not owner.rank.promotions.reads.open
    owner.rank.cache.check()


def test_what_is_on_a_peers_disk_is_fetched(make_server: MakeServer) -> None:
    owner, tokens = on_disk(make_server)
    reader = make_server()
    lend_and_fetch(owner, reader, tokens)
    pass_both(owner, reader)
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == BLOCKS * BLOCK
    assert owner.peers.exports.counters.from_disk == BLOCKS
    assert reader.peers.fetches.counters.fetched_blocks == BLOCKS
    nothing_is_held(owner)


def test_what_is_partly_in_memory_is_continued_from_disk(make_server: MakeServer) -> None:
    owner, tokens = on_disk(make_server)
    reader = make_server()
    owner.serve(tokens[: 8 * BLOCK])
    lend_and_fetch(owner, reader, tokens)
    pass_both(owner, reader)
    assert reader.in_dram(tokens) == BLOCKS * BLOCK
    assert 0 < owner.peers.exports.counters.from_disk <= BLOCKS
    nothing_is_held(owner)


def test_one_damaged_byte_on_the_peers_disk_is_a_wrong_answer_here(make_server: MakeServer) -> None:
    """Where nothing is verified: the bytes come from there."""
    disks: list[MemoryTier] = []

    def unverified(disk: BlockTier) -> BlockTier:
        assert isinstance(disk, MemoryTier)
        disks.append(disk)
        return disk

    owner, tokens = on_disk(make_server, disk_class=unverified)
    reader = make_server()
    (disk,) = disks
    layers = list(disk._blocks.values())[7]
    layers[max(layers)][5] ^= 1
    lend_and_fetch(owner, reader, tokens)
    with pytest.raises(WrongKvError, match="DRAM"):
        pass_both(owner, reader, check=False)


def test_a_block_that_does_not_verify_shortens_what_is_exported(make_server: MakeServer) -> None:
    owner, tokens = on_disk(make_server, disk_class=Damaged)
    reader = make_server()
    lend_and_fetch(owner, reader, tokens)
    pass_both(owner, reader)
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == Damaged.SOUND * BLOCK
    nothing_is_held(owner)


def test_a_hint_brings_it_from_a_peers_disk_to_hbm(make_server: MakeServer) -> None:
    owner, tokens = on_disk(make_server)
    reader, key = make_server(), encode_tokens(tokens)
    owner.receive(Export("export", key))
    reader.receive(Advise("hint", key, ttl_s=30.0, spans=spans((owner.link.address,), "export")))
    pass_both(owner, reader)
    prefetcher = reader.rank.cache.find(Prefetcher)
    assert prefetcher is not None

    def brought() -> bool:
        reader.settle()
        return not prefetcher.busy

    reader.passes_until(brought, "the prefetch")
    (result,) = prefetcher.take_ended()
    assert (result.tokens, result.brought) == (BLOCKS * BLOCK, BLOCKS * BLOCK)


# -- while it comes ---------------------------------------------------------------------------------


def connected(reader: Server) -> None:
    (fetch,) = reader.peers.fetches._active
    until(lambda: fetch.job.instance is not None, "the connection")


def reading(
    make_server: MakeServer, *, ttl_s: float = 10.0, **more: Any
) -> tuple[Server, Server, list[int], GatedTier]:
    """An owner that is reading a prompt from its disk for a reader."""
    gate = Gate()
    owner, tokens = on_disk(make_server, disk_class=gate, **more)
    reader = make_server()
    assert gate.tier is not None
    gate.tier.close_gate("get_layer")
    key = encode_tokens(tokens)
    owner.receive(Export("export", key, ttl_s=ttl_s))
    reader.receive(Fetch("r1", key, spans((owner.link.address,), "export"), wait_s=30.0))
    gate.tier.wait_until_stopped("get_layer")
    connected(reader)
    return owner, reader, tokens, gate.tier


@pytest.mark.parametrize("event", ["flush", "weights", "end"])
def test_what_ends_the_owners_cache_ends_the_reading(make_server: MakeServer, event: str) -> None:
    owner, reader, tokens, gate = reading(make_server)
    gate.open_gate("get_layer")
    if event == "flush":
        assert owner.rank.scheduler.flush()
    elif event == "weights":
        owner.rank.scheduler.change_weights()
    else:
        owner.rank.cache.release_host_resources()
    assert not owner.peers.busy
    if event != "end":
        nothing_is_held(owner)
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 0
    ends = reader.peers.fetches.counters.ends
    assert ends[FetchEnd.REFUSED] + ends[FetchEnd.GONE] == 1, ends


def test_what_was_read_for_a_reader_that_died_is_kept_no_longer_than_it_was_asked_for(
    make_server: MakeServer,
) -> None:
    owner, reader, _, gate = reading(make_server, ttl_s=2.0)
    reader.rank.cache.release_host_resources()
    gate.open_gate("get_layer")
    nothing_is_held(owner)
    counters = owner.peers.exports.counters
    assert counters.given_back == counters.exported


def test_a_disk_that_takes_too_long_is_not_waited_for(make_server: MakeServer) -> None:
    """The owner reports how long it takes, and so the request goes on at once, not when its time is over."""
    gate = Gate()
    owner, tokens = on_disk(make_server, disk_class=gate)
    reader = make_server()
    assert gate.tier is not None
    assert owner.rank.promotions is not None
    owner.rank.promotions.policy.bandwidths[Tier.DISK].bytes_per_second = 1.0
    gate.tier.close_gate("get_layer")
    lend_and_fetch(owner, reader, tokens, wait_s=LONG)
    owner.passes_until(lambda: bool(owner.link.endpoint.pools["dram"].coming("export")), "the word")
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == 0
    assert reader.peers.fetches.counters.ends[FetchEnd.TOO_SLOW] == 1
    gate.tier.open_gate("get_layer")
    owner.passes_until(lambda: not owner.peers.exports._asked, "the reading")


def test_what_comes_too_late_is_given_up(make_server: MakeServer) -> None:
    clock = FakeClock()
    owner, _, _, gate = reading(make_server, clock=clock)
    clock.advance(31.0)
    owner.rank.ranks.each_pass()
    assert not owner.peers.busy
    gate.open_gate("get_layer")
    assert owner.rank.promotions is not None
    owner.passes_until(
        lambda: owner.rank.promotions is not None and not owner.rank.promotions.reads.open, "it"
    )
    nothing_is_held(owner)


# -- how much ---------------------------------------------------------------------------------------


def test_what_is_read_for_peers_is_bounded(make_server: MakeServer) -> None:
    """A quarter of DRAM, over all peers together."""
    owner, tokens = on_disk(make_server, scenario=dataclasses.replace(WITH_DISK, dram_blocks=60))
    other = prompt(2, BLOCKS)
    owner.serve(other)
    forget(owner)
    for name, each in (("one", tokens), ("two", other)):
        owner.receive(Export(name, encode_tokens(each)))
    owner.passes_until(lambda: not owner.peers.exports._asked, "the exports")
    assert exported(owner) == 60 // 4
    assert owner.peers.exports.counters.not_exported == 0


# -- the next owner -----------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["damaged", "gone", "refused"])
def test_what_one_does_not_bring_the_next_one_does(make_server: MakeServer, failure: str) -> None:
    """Both have all of it; the first is to bring 8 blocks, or nothing of it comes."""
    first, tokens = on_disk(
        make_server,
        disk_class=Damaged if failure == "damaged" else lambda disk: disk,
        namespace="other weights" if failure == "refused" else "same",
    )
    second, reader = make_server(), make_server()
    second.serve(tokens)
    key = encode_tokens(tokens)
    for owner in (first, second):
        owner.receive(Export("export", key))
    wish = (*spans((first.link.address,), "export"), *spans((second.link.address,), "export"))
    reader.receive(Fetch("r1", key, wish, wait_s=30.0))
    if failure == "gone":
        connected(reader)
        first.rank.cache.release_host_resources()
    if failure == "damaged":
        pass_both(first, reader)
    fetched(reader)
    req = reader.finish(reader.rank.scheduler.submit(tokens, new_tokens=2))
    assert req.cached_tokens == BLOCKS * BLOCK
    (result,) = reader.results
    came = Damaged.SOUND if failure == "damaged" else 0
    how = FetchEnd.DONE if came else FetchEnd(failure)
    if failure == "gone" and result.spans[0].how is FetchEnd.REFUSED:
        how = FetchEnd.REFUSED  # it had the time to announce its end
    assert [(span.how, span.tokens) for span in result.spans] == [
        (how, came * BLOCK),
        (FetchEnd.DONE, (BLOCKS - came) * BLOCK),
    ]
    assert result.how is FetchEnd.DONE


def test_who_is_not_needed_has_back_at_once_what_it_exports(make_server: MakeServer) -> None:
    first, second, reader = (make_server() for _ in range(3))
    tokens = prompt(1, BLOCKS)
    key = encode_tokens(tokens)
    for owner in (first, second):
        owner.serve(tokens)
        owner.receive(Export("export", key))
    wish = (*spans((first.link.address,), "export"), *spans((second.link.address,), "export"))
    reader.receive(Fetch("r1", key, wish, wait_s=30.0))
    fetched(reader)
    (result,) = reader.results
    assert [(span.how, span.tokens) for span in result.spans] == [
        (FetchEnd.DONE, BLOCKS * BLOCK),
        (FetchEnd.NEEDLESS, 0),
    ]
    assert result.how is FetchEnd.DONE
    for owner in (first, second):
        owner.passes_until(lambda owner=owner: not owner.peers.busy, "the lease to end")

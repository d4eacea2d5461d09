"""The promises of a source that `Moves` relies on, held by each of them: a read from disk, a read from a
peer, a return, a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from engine_movers import until
from engine_pools import PoolKind
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario
from pd_returns_rig import pair_of
from peer_rig import BLOCKS, Gate, MakeServer, lend_and_fetch, offered, on_disk, served, silent

from sglang_ext.engine.moves.move import Source
from sglang_ext.engine.moves.sources import OwnCopy
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.tiers import Tier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


@dataclass
class Begun:
    """A source that has begun, and does not end before ``go_on``."""

    source: Source
    go_on: Callable[[], None]


@contextmanager
def from_disk(make_server: MakeServer) -> Iterator[Begun]:
    gate = Gate()
    owner, tokens = on_disk(make_server, disk_class=gate)
    assert gate.tier is not None
    assert owner.rank.promotions is not None
    gate.tier.close_gate("get_layer")
    owner.rank.promotions.begin("request", Wanted((0, None, None), encode_tokens(tokens)))
    owner.rank.ranks.each_pass()
    (move,) = owner.rank.moves.of(owner.rank.promotions.reads)
    assert move.source is not None
    yield Begun(move.source, lambda: gate.tier.open_gate("get_layer"))
    owner.rank.promotions.drop_in_flight()


@contextmanager
def from_peer(make_server: MakeServer) -> Iterator[Begun]:
    owner, reader, tokens = served(make_server)
    lend_and_fetch(owner, reader, tokens)
    offered(reader)
    with ExitStack() as standstill:
        standstill.enter_context(silent(reader))
        reader.rank.ranks.each_pass()
        (move,) = reader.rank.moves.of(reader.peers.fetches)
        assert move.source is not None
        yield Begun(move.source, standstill.close)


@contextmanager
def returned(make_server: MakeServer) -> Iterator[Begun]:
    with pair_of(PoolKind(), hbm_tokens=400) as pair:
        gate = pair.hold_reads()
        tokens = list(range(BLOCKS * pair.decode.tree.block_size))
        pair.decode.serve([*tokens, 1])
        pair.return_sender.ended(pair.request(), tokens)
        pair.until_prefill(gate.reached.is_set, "the read")
        (move,) = pair.moves
        assert move.source is not None
        yield Begun(move.source, gate.go.set)
        pair.return_receiver.before_clear()
        pair.return_sender.clear()


@contextmanager
def own_copy(make_server: MakeServer) -> Iterator[Begun]:
    scenario = Scenario("copies", hbm_tokens=240, dram_blocks=100, settings=Settings(chunk=None))
    with Rank(scenario) as rank:
        assert rank.tier is not None
        tokens = list(range(BLOCKS * rank.tree.block_size))
        rank.serve([*tokens, 1])
        rank.settle()
        found = rank.store.match(rank.weights.namespace(None, None), encode_tokens(tokens))
        slots = rank.store.reserve_spare(Tier.HBM, "another", encode_tokens(tokens), Use.PREFETCH, 0, BLOCKS)
        assert isinstance(slots, Reservation)
        source = OwnCopy(slots, rank.tier.copies.settle)
        rank.store.swap_in(Tier.DRAM, found.path, slots.places, source.arrived)
        yield Begun(source, rank.tier.copies.settle)
        assert slots.gives_way, "the engine may take back memory to which nothing is copied"
        slots.abort()


BEGIN: list[Callable[[MakeServer], AbstractContextManager[Begun]]] = [
    from_disk,
    from_peer,
    returned,
    own_copy,
]
each_source = pytest.mark.parametrize("begin", BEGIN, ids=lambda begin: begin.__name__)


@each_source
def test_a_source_that_runs_has_no_blocks_yet(begin: Any, make_server: MakeServer) -> None:
    with begin(make_server) as begun:
        assert begun.source.blocks is None
        assert not begun.source.first_layer
        begun.go_on()


@each_source
def test_a_source_ends_with_all_its_blocks(begin: Any, make_server: MakeServer) -> None:
    with begin(make_server) as begun:
        begun.go_on()
        until(lambda: begun.source.blocks is not None, "the end of the source")
        assert begun.source.blocks == begun.source.wait() == BLOCKS


@each_source
def test_a_source_that_is_waited_for_has_ended(begin: Any, make_server: MakeServer) -> None:
    with begin(make_server) as begun:
        begun.go_on()
        assert begun.source.wait() == BLOCKS
        until(lambda: begun.source.blocks == BLOCKS, "the blocks")


@each_source
def test_a_cancelled_source_ends_and_says_so_again(begin: Any, make_server: MakeServer) -> None:
    with begin(make_server) as begun:
        begun.go_on()
        begun.source.cancel()
        blocks = begun.source.wait()
        assert 0 <= blocks <= BLOCKS
        until(lambda: begun.source.blocks == blocks, "the blocks")
        assert begun.source.wait() == blocks

"""Hand-overs between agents of one process: received bytes, pages pinned meanwhile, and the ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq
from pd_rig import LAYERS, METADATA, PAGES, Rig, held, rig

from sglang_ext.disagg.errors import PeerProtocolError, RefusedError
from sglang_ext.disagg.handover import ReceiverState, SenderState
from sglang_ext.disagg.messages import Complete, Offer
from sglang_ext.disagg.transfer.control import CurveKeys
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.pd import early_ranks, sending_handover
from sglang_ext.engine.pd.bootstrap import FORGET_SECONDS, Registry
from sglang_ext.engine.pd.landing import Wanted, after_skip
from sglang_ext.engine.pd.messages import PROTOCOL, Done, RankInfo
from sglang_ext.engine.pd.pushing import Computing
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.stages import StageTimes
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.wire import pack_ids

pytestmark = pytest.mark.slow

ROWS = bytes(range(METADATA))
NUMBERS = itertools.count(1)


@pytest.fixture
def one() -> Iterator[Rig]:
    """One rank each."""
    with rig() as servers:
        yield servers


def hand_over(
    servers: Rig, here: list[int], there: list[int], skip: int = 0
) -> tuple[list[SendingHandover], list[ReceivingHandover]]:
    """A request from prefill's pages `here` into decode's pages `there`, at every rank; up to its end."""
    number = next(NUMBERS)
    receiving = [side.agent.receiver.open(servers.address, number) for side in servers.decode]
    sending = [side.agent.sender.open(number) for side in servers.prefill]
    for side, handover in zip(servers.prefill, sending, strict=True):
        side.agent.sender.complete(handover, np.array(here), ROWS)
    servers.wait(lambda: all(handover.state is ReceiverState.READY for handover in receiving), "an offer")
    for side, handover in zip(servers.decode, receiving, strict=True):
        side.agent.receiver.read(handover, Wanted(np.array(there), skip, row=number % 7))
    servers.wait(lambda: all(handover.state is ReceiverState.HELD for handover in receiving), "the KV")
    servers.wait(lambda: all(handover.state is SenderState.RELEASED for handover in sending), "the release")
    return sending, receiving


def test_what_prefill_computed_is_what_decode_gets(one: Rig) -> None:
    here, there = [5, 3, 9, 10, 11], [40, 2, 7, 6, 21]
    sending, receiving = hand_over(one, here, there)
    assert np.array_equal(one.prefill[0].kv(here, one.page), one.decode[0].kv(there, one.page))
    assert one.decode[0].rows.written[receiving[0].number % 7] == ROWS
    one.prefill[0].agent.sender.forget(sending[0])
    one.check()


@pytest.mark.parametrize("latent", [False, True], ids=["complete", "done"])
def test_decode_goes_on_without_an_acknowledgement_of_what_it_has_read(
    latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a round trip. Prefill keeps the request until decode's message arrives, at ranks that were
    read from and at those that were not."""
    with rig(prefill=2 if latent else 1, transports=(TransportName.TCP,), latent=latent) as servers:
        agents = [side.agent for side in servers.prefill]
        gates = {agent: asyncio.Event() for agent in agents}
        for agent in agents:
            owner = agent.endpoint.owner
            monkeypatch.setattr(owner, "handle", held(owner.handle, Complete, gates[agent]))
            monkeypatch.setattr(agent.answers, "answer", held(agent.answers.answer, Done, gates[agent]))
        number = next(NUMBERS)
        taken = servers.decode[0].agent.receiver.open(servers.address, number)
        given = [agent.sender.open(number) for agent in agents]
        for agent, handover in zip(agents, given, strict=True):
            agent.sender.complete(handover, np.array([5, 3, 9]), ROWS)
        servers.wait(lambda: taken.state is ReceiverState.READY, "an offer")
        servers.decode[0].agent.receiver.read(taken, Wanted(np.array([40, 2, 7]), 0, 0))
        servers.wait(lambda: taken.state is ReceiverState.HELD, "the KV")
        assert all(handover.state is SenderState.OFFERED for handover in given)
        for agent in agents:
            agent.transfers.loop.call_soon_threadsafe(gates[agent].set)
        servers.wait(lambda: all(handover.state is SenderState.RELEASED for handover in given), "the release")
        servers.check()


def test_decode_receives_the_durations_of_prefill_and_knows_its_own_wait(one: Rig) -> None:
    number = next(NUMBERS)
    receiving = one.decode[0].agent.receiver.open(one.address, number)
    sending = one.prefill[0].agent.sender.open(number)
    one.prefill[0].agent.sender.complete(sending, np.array([1, 2]), ROWS, StageTimes(0.5, 0.25))
    one.wait(lambda: receiving.state is ReceiverState.READY, "an offer")
    asked = time.monotonic() + 0.3
    one.wait(lambda: time.monotonic() > asked, "slots")
    one.decode[0].agent.receiver.read(receiving, Wanted(np.array([30, 31]), 0, 0))
    one.wait(lambda: receiving.state is ReceiverState.HELD, "the KV")
    assert receiving.stages == StageTimes(0.5, 0.25)
    assert receiving.waited >= 0.3 > receiving.seconds > 0.0


def test_a_cached_prefix_is_not_sent(one: Rig) -> None:
    here, there = [1, 2, 3, 4], [50, 51]
    side = one.decode[0]
    before = side.agent.state().transport_bytes
    hand_over(one, here, there, skip=2)
    assert np.array_equal(one.prefill[0].kv(here[2:], one.page), side.kv(there, one.page))
    after = side.agent.state().transport_bytes
    page_bytes = side.kv([0], one.page).nbytes
    moved = sum(after.values()) - sum(before.values())
    assert 2 * page_bytes <= moved < 3 * page_bytes


def test_without_coalescing_the_same_comes_in_more_ranges() -> None:
    here, there = [4, 5, 6, 7], [40, 41, 42, 43]
    ranges = []
    for coalescing in (True, False):
        with rig(coalescing=coalescing) as servers:
            hand_over(servers, here, there)
            kv = servers.decode[0].kv(there, servers.page)
            assert np.array_equal(servers.prefill[0].kv(here, servers.page), kv)
            ranges.append(sum(servers.decode[0].agent.state().transactions.values()))
    together, apart = ranges
    assert apart == together * len(here) > 0


def test_everything_may_be_cached(one: Rig) -> None:
    sending, _ = hand_over(one, [1, 2], [], skip=2)
    assert sending[0].state is SenderState.RELEASED


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_ranks_may_cut_the_heads_differently(prefill: int, decode: int) -> None:
    here, there = [5, 3, 9], [40, 2, 7]
    with rig(prefill, decode) as servers:
        hand_over(servers, here, there)
        given = np.concatenate([side.kv(here, servers.page) for side in servers.prefill], axis=2)
        taken = np.concatenate([side.kv(there, servers.page) for side in servers.decode], axis=2)
        assert np.array_equal(given, taken)
        servers.check()


def test_pages_are_sealed_only_while_they_are_leased(one: Rig) -> None:
    side, decode = one.prefill[0], one.decode[0].agent
    pages = side.agent.endpoint.pools[HBM_POOL]
    numbers = [next(NUMBERS), next(NUMBERS)]
    handovers = [side.agent.sender.open(number) for number in numbers]
    receiving = [decode.receiver.open(one.address, number) for number in numbers]
    # Both share a prefix, as requests do whose prompts begin alike.
    for handover, own in zip(handovers, (4, 5), strict=True):
        side.agent.sender.complete(handover, np.array([1, 2, own]), ROWS)
    one.wait(lambda: all(handover.state is ReceiverState.READY for handover in receiving), "offers")
    assert pages.is_sealed(np.array([1, 2, 4, 5])).all()
    handovers[0].give_up("gone")
    assert pages.is_sealed(np.array([1, 2, 5])).all(), "the other request's"
    assert not pages.is_sealed(np.array([4])).any(), "no hand-over has it"
    one.wait(lambda: receiving[0].state is ReceiverState.FAILED, "the end of the first")
    assert receiving[0].reason
    decode.receiver.read(receiving[1], Wanted(np.array([30, 31, 32]), 0, 0))
    one.wait(lambda: handovers[1].state is SenderState.RELEASED, "the release of the second")
    assert not pages.is_sealed(np.arange(PAGES)).any()
    one.check()


def test_an_abort_on_decode_frees_prefill_at_once(one: Rig) -> None:
    number = next(NUMBERS)
    side, decode = one.prefill[0].agent, one.decode[0].agent
    handover = side.sender.open(number)
    receiving = decode.receiver.open(one.address, number)
    side.sender.complete(handover, np.array([1]), ROWS)
    one.wait(lambda: receiving.state is ReceiverState.READY, "an offer")
    decode.receiver.abort(receiving, "the client is gone")
    assert receiving.state is ReceiverState.FAILED
    one.wait(lambda: handover.state is SenderState.LOST, "prefill to hear of it")
    assert "the client is gone" in handover.reason
    one.wait(lambda: decode.receiver.live == 0, "the task's end")


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_abort_that_comes_before_prefill_has_heard_of_the_request_ends_it(mode: str) -> None:
    """The last of decode's ranks to abort ends it; the twin goes on with the rank that has not aborted."""
    with rig(1, 2, mode=mode) as servers:
        number, sender = next(NUMBERS), servers.prefill[0].agent.sender
        receivers = [side.agent.receiver for side in servers.decode]
        receiving = [receiver.open(servers.address, number) for receiver in receivers]
        servers.wait(lambda: sender.early.waiting(number) == 2, "both to wait for it")
        receivers[0].abort(receiving[0], "the client is gone")
        servers.wait(lambda: sender.early.waiting(number) == 1, "the first to wait no longer")
        assert not sender.early.given_up(number)
        receivers[1].abort(receiving[1], "the client is gone")
        servers.wait(lambda: sender.early.given_up(number), "the second to wait no longer")
        handover = sender.open(number)
        assert handover.state is SenderState.LOST
        assert "the client is gone" in handover.reason
        assert not handover.readers
        assert sender.live == 0

        number = next(NUMBERS)
        receiving = [receiver.open(servers.address, number) for receiver in receivers]
        servers.wait(lambda: sender.early.waiting(number) == 2, "both to wait for it")
        receivers[0].abort(receiving[0], "the client is gone")
        servers.wait(lambda: sender.early.waiting(number) == 1, "the first to wait no longer")
        handover = sender.open(number)
        assert handover.state is SenderState.COMPUTING
        servers.wait(lambda: len(handover.readers) == 1, "the other to take part")
        receivers[1].abort(receiving[1], "the client is gone")
        servers.wait(lambda: handover.state is SenderState.LOST, "the end with the second")
        servers.check()


def test_what_was_given_up_early_is_forgotten(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    number, sender = next(NUMBERS), one.prefill[0].agent.sender
    receiver = one.decode[0].agent.receiver
    receiving = receiver.open(one.address, number)
    one.wait(lambda: sender.early.waiting(number), "it to wait")
    receiver.abort(receiving, "the client is gone")
    one.wait(lambda: sender.early.given_up(number), "it to be given up")
    monkeypatch.setattr(early_ranks, "JOIN_SECONDS", 0.0)
    one.wait(lambda: not sender.early.given_up(number), "it to be forgotten")
    assert sender.open(number).state is SenderState.COMPUTING, "another request"


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_an_abort_before_anything_has_begun_leaves_nothing(one: Rig, turns: int) -> None:
    receiver = one.decode[0].agent.receiver
    handover = receiver.open(one.address, next(NUMBERS))
    for _ in range(turns):
        one.decode[0].agent.start(asyncio.sleep(0))
    receiver.abort(handover, "at once")
    assert handover.state is ReceiverState.FAILED
    receiver.settle(handover)
    one.wait(handover.stopped.is_set, "the end")
    one.wait(lambda: receiver.live == 0, "the task's end")


def test_an_abort_on_prefill_ends_decode_with_the_reason(one: Rig) -> None:
    number = next(NUMBERS)
    handover = one.prefill[0].agent.sender.open(number)
    receiving = one.decode[0].agent.receiver.open(one.address, number)
    one.wait(lambda: bool(handover.readers), "decode to join")
    handover.give_up("no more memory")
    one.wait(lambda: receiving.state is ReceiverState.FAILED, "decode to hear of it")
    assert "no more memory" in receiving.reason


def test_decode_that_leaves_frees_what_prefill_held() -> None:
    with rig() as servers:
        number = next(NUMBERS)
        sender = servers.prefill[0].agent.sender
        handover = sender.open(number)
        receiving = servers.decode[0].agent.receiver.open(servers.address, number)
        sender.complete(handover, np.array([1, 2]), ROWS)
        servers.wait(lambda: receiving.state is ReceiverState.READY, "an offer")
        servers.decode[0].agent.close()
        servers.wait(lambda: handover.state is SenderState.LOST, "prefill to notice", seconds=60)
        assert sender.live == 0
        sender.check()


def test_prefill_that_leaves_fails_what_decode_waits_for() -> None:
    with rig() as servers:
        number = next(NUMBERS)
        handover = servers.prefill[0].agent.sender.open(number)
        receiving = servers.decode[0].agent.receiver.open(servers.address, number)
        servers.wait(lambda: bool(handover.readers), "decode to join")
        servers.prefill[0].agent.close()
        servers.wait(lambda: receiving.state is ReceiverState.FAILED, "decode to notice", seconds=60)


@pytest.mark.parametrize("protocol", [PROTOCOL + 1, PROTOCOL], ids=["another", "twin"])
def test_a_prefill_server_of_another_release_is_refused_by_its_protocol(one: Rig, protocol: int) -> None:
    """Also where its fields are others; the twin, with our protocol, sends no message."""
    rank = msgspec.to_builtins(rank_info(0, 1), builtin_types=(bytes,)) | {"protocol": protocol, "hops": 3}
    topology = msgspec.msgpack.encode({"t": "topology", "ranks": [rank]})
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        receiving = one.decode[0].agent.receiver.open(f"127.0.0.1:{port}", next(NUMBERS))
        assert router.poll(20_000), "the look-up"
        identity, number, _ = router.recv_multipart()
        router.send_multipart([identity, number, topology])
        one.wait(lambda: receiving.state is ReceiverState.FAILED, "the refusal")
    finally:
        context.destroy(linger=0)
    name = f"protocol {protocol} there, {PROTOCOL} here; run one release"
    assert (name if protocol != PROTOCOL else "not a message") in receiving.reason


def test_an_unknown_handover_is_refused(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_ranks, "JOIN_SECONDS", 0.2)
    receiving = one.decode[0].agent.receiver.open(one.address, next(NUMBERS))
    one.wait(lambda: receiving.state is ReceiverState.FAILED, "the refusal")
    assert "unknown" in receiving.reason
    for call in ("done", "peer_aborts"):
        arguments = (next(NUMBERS), b"x" * 16, "why")[: 3 if call == "peer_aborts" else 2]
        with pytest.raises(RefusedError, match="unknown"):
            getattr(one.prefill[0].agent.sender, call)(*arguments)


@pytest.mark.parametrize("number", [0, 1 << 63, -1])
def test_a_number_that_is_no_room_is_refused(one: Rig, number: int) -> None:
    with pytest.raises(RefusedError, match="bootstrap_room"):
        one.prefill[0].agent.sender.open(number)


def test_a_handover_in_use_is_refused(one: Rig) -> None:
    number = next(NUMBERS)
    sender = one.prefill[0].agent.sender
    handover = sender.open(number)
    with pytest.raises(RefusedError, match="in use"):
        sender.open(number)
    handover.give_up("over")
    assert sender.open(number) is not handover
    sender.open(next(NUMBERS)).give_up("over")


def test_nothing_answers_at_the_address(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.engine.pd import peers as pd_peers

    monkeypatch.setattr(pd_peers, "CONNECT_SECONDS", 0.3)
    receiving = one.decode[0].agent.receiver.open("127.0.0.1:9", next(NUMBERS))
    one.wait(lambda: receiving.state is ReceiverState.FAILED, "the end")
    assert "no prefill server answers at 127.0.0.1:9" in receiving.reason


def test_prompts_that_differ_in_length_are_noticed() -> None:
    offer = Offer("p", 0, b"e" * 16, HBM_POOL, "r", 1, pack_ids([4, 5, 6]), pack_ids([2, 2, 2]), 1000)
    kept = after_skip(offer, 1, 2)
    assert kept.blocks == pack_ids([5, 6])
    with pytest.raises(PeerProtocolError, match="3 pages"):
        after_skip(offer, 2, 2)


def rank_info(rank: int, ranks: int = 2) -> RankInfo:
    return RankInfo("p", b"e" * 16, rank, ranks, 16, METADATA, f"127.0.0.1:{rank + 1}", "127.0.0.1:9")


def test_a_topology_is_complete_or_refused() -> None:
    clock = FakeClock()
    registry = Registry(clock)
    for rank in (1, 0):
        with pytest.raises(RefusedError, match="prefill ranks have registered"):
            registry.topology()
        registry.register(rank_info(rank))
    assert [who.rank for who in registry.topology()] == [0, 1]
    clock.advance(FORGET_SECONDS - 0.1)
    registry.register(rank_info(0))
    clock.advance(0.2)
    with pytest.raises(RefusedError, match="1 of 2"):
        registry.topology()


def test_a_topology_is_of_one_replica() -> None:
    registry = Registry(FakeClock())
    for replica, rank in ((1, 1), (0, 0), (1, 0)):
        registry.register(msgspec.structs.replace(rank_info(rank), replica=replica))
    assert [(who.replica, who.rank) for who in registry.topology(1)] == [(1, 0), (1, 1)]
    for replica, there in ((0, 1), (2, 0)):
        with pytest.raises(RefusedError, match=f"{there} of"):
            registry.topology(replica)


def push(
    servers: Rig, here: list[int], there: list[int], skip: int = 0
) -> tuple[list[SendingHandover], list[ReceivingHandover]]:
    """As `hand_over`, pushed: decode names its pages before prefill computes."""
    number = next(NUMBERS)
    sending = [side.agent.sender.open(number) for side in servers.prefill]
    receiving = [side.agent.receiver.open(servers.address, number) for side in servers.decode]
    servers.wait(
        lambda: all(handover.state is ReceiverState.WAITING for handover in receiving), "a connection"
    )
    for side, handover in zip(servers.decode, receiving, strict=True):
        side.agent.receiver.read(handover, Wanted(np.array(there), skip, row=number % 7))
    for side, handover in zip(servers.prefill, sending, strict=True):
        servers.wait(lambda s=side, r=handover: r.granted() is not None, "decode's pages")
        assert handover.granted() == skip
        side.agent.sender.complete(handover, np.array(here), ROWS)
    servers.wait(
        lambda: all(handover.state in (ReceiverState.HELD, ReceiverState.FAILED) for handover in receiving),
        "the KV",
    )
    return sending, receiving


@pytest.mark.parametrize("moved", [False, True])
def test_layers_are_pushed_while_the_next_are_computed(moved: bool) -> None:
    here, there = [5, 3, 9, 12], [40, 2, 7, 8]
    with rig(mode="push-by-layer") as servers:
        number = next(NUMBERS)
        sender, receiver = servers.prefill[0].agent.sender, servers.decode[0].agent.receiver
        given, taken = sender.open(number), receiver.open(servers.address, number)
        servers.wait(lambda: taken.state is ReceiverState.WAITING, "a connection")
        receiver.read(taken, Wanted(np.array(there), 0, row=0))
        servers.wait(lambda: given.granted() is not None, "decode's pages")
        (writing,) = given.writings()
        # The first page is a cached prefix; the forward pass computes the two after it.
        feed = servers.prefill[0].agent.layer_feed(0, LAYERS)
        feed.forward_begins([Computing(np.array([1, 2]), lambda: np.array(here[1:3]), given.writings)])
        for layer in range(LAYERS):
            feed.layer_begins(layer)
        servers.wait(lambda: writing.layers_ahead == 2 * (LAYERS - 1), "all layers but the last")
        feed.forward_ended()
        servers.wait(lambda: (writing.sent == [-1, *here[1:3], -1]).all(), "the last layer")
        # SGLang may have put the same tokens elsewhere meanwhile.
        last = [here[0], here[1], 30, here[3]] if moved else here
        sender.complete(given, np.array(last), ROWS)
        servers.wait(lambda: taken.state is ReceiverState.HELD, f"the KV ({taken.reason}, {given.reason})")
        assert np.array_equal(
            servers.prefill[0].kv(last, servers.page), servers.decode[0].kv(there, servers.page)
        )
        pushed = servers.prefill[0].agent.state().pushed
        assert pushed == {"ahead": 2 * LAYERS, "after": (3 if moved else 2) * LAYERS}
        servers.check()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 2), (2, 1), (4, 1), (4, 2), (2, 4)])
def test_pushed_pages_are_what_prefill_computed(prefill: int, decode: int) -> None:
    here, there = [5, 3, 9], [40, 2, 7]
    with rig(prefill, decode, mode="push") as servers:
        sending, receiving = push(servers, here, there, skip=4)
        assert [handover.reason for handover in (*sending, *receiving)] == [""] * (prefill + decode)
        given = np.concatenate([side.kv(here, servers.page) for side in servers.prefill], axis=2)
        taken = np.concatenate([side.kv(there, servers.page) for side in servers.decode], axis=2)
        assert np.array_equal(given, taken)
        servers.wait(
            lambda: all(handover.state is SenderState.RELEASED for handover in sending), "the release"
        )
        assert all(side.rows.written[receiving[0].number % 7] == ROWS for side in servers.decode)
        servers.check()


def test_an_abort_of_a_push_frees_decodes_pages_only_after_all_writes() -> None:
    with rig(mode="push") as servers:
        number = next(NUMBERS)
        sender, receiver = servers.prefill[0].agent.sender, servers.decode[0].agent.receiver
        given = sender.open(number)
        taken = receiver.open(servers.address, number)
        servers.wait(lambda: taken.state is ReceiverState.WAITING, "a connection")
        receiver.read(taken, Wanted(np.array([1, 2]), 0, 0))
        servers.wait(lambda: given.granted() is not None, "decode's pages")
        receiver.abort(taken, "the client is gone")
        servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end on decode")
        servers.wait(lambda: given.state is SenderState.LOST, "the end on prefill")
        receiver.settle(taken)
        servers.check()


def test_modes_that_differ_are_refused() -> None:
    with rig() as servers, rig(mode="push") as others:
        receiving = others.decode[0].agent.receiver.open(servers.address, next(NUMBERS))
        servers.wait(lambda: receiving.state is ReceiverState.FAILED, "the refusal")
        assert "--kv-transfer-mode" in receiving.reason


def key_pair() -> CurveKeys:
    return CurveKeys(*zmq.curve_keypair())


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("transport", [TransportName.CMA, TransportName.TCP])
def test_every_transport_brings_the_same_bytes(transport: TransportName, mode: str) -> None:
    with rig(1, 2, mode=mode, transports=(transport,)) as servers:
        here, there = [5, 3, 9], [40, 2, 7]
        (hand_over if mode == "pull" else push)(servers, here, there)
        given = servers.prefill[0].kv(here, servers.page)
        taken = np.concatenate([side.kv(there, servers.page) for side in servers.decode], axis=2)
        assert np.array_equal(given, taken)
        if mode == "pull":
            assert list(servers.decode[0].agent.state().transport_bytes) == [transport]


def test_members_of_a_cluster_share_a_key() -> None:
    with rig(keys=key_pair()) as servers:
        sending, _ = hand_over(servers, [1, 2], [3, 4])
        assert sending[0].state is SenderState.RELEASED


def test_who_has_another_key_gets_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.engine.pd import peers as pd_peers

    monkeypatch.setattr(pd_peers, "CONNECT_SECONDS", 1.0)
    with rig(keys=key_pair(), decode_keys=key_pair()) as servers:
        number = next(NUMBERS)
        handover = servers.prefill[0].agent.sender.open(number)
        receiving = servers.decode[0].agent.receiver.open(servers.address, number)
        servers.wait(lambda: receiving.state is ReceiverState.FAILED, "the end")
        assert "no prefill server answers" in receiving.reason
        assert not handover.readers


def test_pushing_a_request_waits_for_decode_and_not_without_a_decode_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig(mode="push") as servers:
        met, alone = next(NUMBERS), next(NUMBERS)
        handovers = [servers.prefill[0].agent.sender.open(met)]
        receiving = servers.decode[0].agent.receiver.open(servers.address, met)
        servers.wait(lambda: receiving.state is ReceiverState.WAITING, "the meeting")
        monkeypatch.setattr(sending_handover, "JOIN_SECONDS", 0.0)
        handovers.append(servers.prefill[0].agent.sender.open(alone))
        servers.wait(
            lambda: handovers[1].state is SenderState.LOST, "the end of the hand-over without a reader"
        )
        assert "no decode server takes part" in handovers[1].reason
        assert (handovers[0].state, receiving.state) == (SenderState.COMPUTING, ReceiverState.WAITING)
        assert handovers[0].granted() is None
        handovers[0].give_up("enough")
        servers.decode[0].agent.receiver.read(receiving, Wanted(np.array([1]), 0, 0))
        servers.wait(lambda: receiving.state is ReceiverState.FAILED, "the end on decode")
        assert receiving.reason.endswith("enough")


def test_pushed_into_are_one_decode_servers_pages() -> None:
    with rig(mode="push") as servers:
        number = next(NUMBERS)
        sending = servers.prefill[0].agent.sender.open(number)
        first = servers.decode[0].agent.receiver.open(servers.address, number)
        servers.wait(lambda: first.state is ReceiverState.WAITING, "the meeting")
        second = servers.decode[0].agent.receiver.open(servers.address, number)
        servers.wait(lambda: second.state is ReceiverState.FAILED, "the refusal")
        assert "another decode server takes part" in second.reason
        assert sending.state is SenderState.COMPUTING


# -- weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_unlike_weights_end_a_request_on_both_sides_until_they_are_alike(
    mode: str, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(mode=mode) as servers:
        (mine,), (other,) = servers.prefill, servers.decode
        (mine if side == "prefill" else other).agent.weights_changed("tuned")
        number = next(NUMBERS)
        sending = mine.agent.sender.open(number)
        receiving = other.agent.receiver.open(servers.address, number)
        servers.wait(lambda: receiving.state is ReceiverState.FAILED, "the end on decode")
        servers.wait(lambda: sending.state is SenderState.LOST, "the end on prefill")
        for text in (receiving.reason, sending.reason, caplog.text):
            assert "the weights differ" in text
            assert "update both to the same weights" in text
        (other if side == "prefill" else mine).agent.weights_changed("tuned")
        if mode == "pull":
            hand_over(servers, [1, 2], [3, 4])
        else:
            number = next(NUMBERS)
            mine.agent.sender.open(number)
            again = other.agent.receiver.open(servers.address, number)
            servers.wait(lambda: again.state is ReceiverState.WAITING, "the meeting")
        servers.check()


def test_weights_that_are_being_changed_are_like_no_others(one: Rig) -> None:
    for side in (one.prefill[0], one.decode[0]):
        side.agent.weights_changed("")
    number = next(NUMBERS)
    sending = one.prefill[0].agent.sender.open(number)
    receiving = one.decode[0].agent.receiver.open(one.address, number)
    one.wait(lambda: receiving.state is ReceiverState.FAILED, "the end")
    assert "being changed" in receiving.reason
    assert sending.state is SenderState.LOST


@pytest.mark.parametrize("moment", ["computing", "offered"])
def test_a_request_that_is_handed_over_when_prefill_changes_ends(one: Rig, moment: str) -> None:
    number = next(NUMBERS)
    agent = one.prefill[0].agent
    sending = agent.sender.open(number)
    receiving = one.decode[0].agent.receiver.open(one.address, number)
    agent.sender.computing(sending)
    if moment == "offered":
        agent.sender.complete(sending, np.array([1, 2]), ROWS)
        one.wait(lambda: receiving.state is ReceiverState.READY, "the offer")
    agent.weights_changed("tuned")
    assert sending.state is SenderState.LOST
    assert "changed during the hand-over" in sending.reason
    assert agent.state().leased_pages == 0
    one.decode[0].agent.receiver.read(receiving, Wanted(np.array([3, 4]), 0, row=1))
    one.wait(lambda: receiving.state is ReceiverState.FAILED, "the end on decode")
    one.check()


@pytest.mark.parametrize("moment", ["joined", "ready"])
def test_a_request_that_is_handed_over_when_decode_changes_ends(one: Rig, moment: str) -> None:
    number = next(NUMBERS)
    sending = one.prefill[0].agent.sender.open(number)
    agent = one.decode[0].agent
    receiving = agent.receiver.open(one.address, number)
    if moment == "ready":
        one.prefill[0].agent.sender.complete(sending, np.array([1, 2]), ROWS)
        one.wait(lambda: receiving.state is ReceiverState.READY, "the offer")
    else:
        one.wait(lambda: sending.readers, "the join")
    agent.weights_changed("tuned")
    one.wait(lambda: receiving.state is ReceiverState.FAILED, "the end on decode")
    assert "changed during the hand-over" in receiving.reason
    one.wait(lambda: sending.state is SenderState.LOST, "the end on prefill")
    one.check()


def test_a_request_that_waits_while_prefill_changes_is_computed_by_the_new_weights(one: Rig) -> None:
    """Nothing of it was computed before; decode has changed too, and asks afterwards."""
    number = next(NUMBERS)
    agent = one.prefill[0].agent
    sending = agent.sender.open(number)
    for weights in ("", "tuned"):
        agent.weights_changed(weights)
        one.decode[0].agent.weights_changed(weights)
    receiving = one.decode[0].agent.receiver.open(one.address, number)
    agent.sender.complete(sending, np.array([1, 2]), ROWS)
    one.wait(lambda: receiving.state is ReceiverState.READY, "an offer")
    assert sending.weights == "tuned"


def test_who_joined_before_prefill_changed_gets_nothing_of_the_new_weights(one: Rig) -> None:
    number = next(NUMBERS)
    agent = one.prefill[0].agent
    sending = agent.sender.open(number)
    receiving = one.decode[0].agent.receiver.open(one.address, number)
    one.wait(lambda: sending.readers, "the join")
    agent.weights_changed("tuned")
    assert sending.state is SenderState.COMPUTING
    agent.sender.computing(sending)
    assert sending.state is SenderState.LOST
    one.wait(lambda: receiving.state is ReceiverState.FAILED, "the end on decode")
    assert "the weights differ" in receiving.reason

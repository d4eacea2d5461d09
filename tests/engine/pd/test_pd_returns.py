"""Returns between two simulated ranks: prefill's blocks afterwards, byte by byte, and the skipped returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Computed
from engine_simulation import Rank, Scenario, finish
from pd_returns_rig import (
    ANSWERED,
    NAMESPACE,
    PROMPT,
    Pair,
    agent_of,
    compare_with_model,
    key_of,
    pair_of,
    request_from,
)
from pd_rig import held

from sglang_ext.disagg.messages import Complete
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.moves.move import Move
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.messages import RANK_COMMANDS
from sglang_ext.engine.pd.returns import gathering as gathering_returns
from sglang_ext.engine.pd.returns import return_receiver as receiving_returns
from sglang_ext.engine.pd.returns import return_sender as sending_returns
from sglang_ext.engine.pd.returns.reservations import Blocks, Reservations
from sglang_ext.engine.pd.returns.return_receiver import ReturnReceiver
from sglang_ext.engine.pd.returns.return_sender import ReturnSender
from sglang_ext.engine.ranks import Least
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiers import Tier

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests connect once; servers try again."""
    monkeypatch.setattr("sglang_ext.engine.pd.peers.CONNECT_SECONDS", 60.0)


@pytest.fixture(params=[PoolKind(), PoolKind(page=4), PoolKind("mla")], ids=str)
def pair(request: pytest.FixtureRequest, sglang_config: None) -> Iterator[Pair]:
    with pair_of(request.param) as found:
        yield found


def test_prefill_gets_what_it_lacks(pair: Pair) -> None:
    pair.prefill.serve(PROMPT)
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("returned")
    pair.compare(ANSWERED)
    assert pair.calls == 1
    block = pair.prefill.scenario.block
    assert (
        pair.return_receiver.tokens
        == pair.return_sender.tokens
        == (len(ANSWERED) // block - len(PROMPT) // block) * block
    )
    for rank in (pair.prefill, pair.decode):
        rank.check()


@pytest.mark.parametrize("cleared", [False, True], ids=["kept", "cleared"])
def test_a_return_is_offered_once_the_device_has_given_its_pages(
    pair: Pair, cleared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, stock = threading.Event(), Blocks.reading

    def late(self: Blocks, slots: Sequence[Any], fence: Any) -> Any:
        read = stock(self, slots, fence)
        return lambda: read() if given.is_set() else None

    monkeypatch.setattr(Blocks, "reading", late)
    sender, pool = pair.return_sender, pair.return_sender._agent.endpoint.pools[HBM_POOL]
    pair.decode.serve(ANSWERED)
    sender.ended(pair.request(), ANSWERED)
    for _ in range(3):
        sender.act(sender.propose())
    assert pool.pinned == 0
    assert any(node.locks for node in pair.decode.tree.nodes())
    if cleared:
        pair.decode.cache.settle()
        sender.clear()
        assert not any(node.locks for node in pair.decode.tree.nodes())
    rung: list[None] = []
    monkeypatch.setattr(sender._agent.alarm, "ring", lambda: rung.append(None))
    given.set()
    wait_until(lambda: rung, seconds=20, what="the alarm, on which the scheduler makes a pass")
    pair.until("failed" if cleared else "returned")
    assert pool.pinned == 0
    assert sender._pinned == 0
    if not cleared:
        pair.compare(ANSWERED)


DSA = PoolKind("dsa", 64, layers=3)
"""Pages of SGLang's kernels, larger than the prompts of the other tests."""


EAGLE = [PoolKind(each, 64, layers=3, draft_layers=1, algorithm="EAGLE") for each in ("mha", "dsa")]


@pytest.mark.parametrize("kind", [DSA, PoolKind("mla", 64), *EAGLE], ids=str)
def test_every_plane_of_a_block_returns(kind: PoolKind, sglang_config: None) -> None:
    """Latents, and the index keys of layers that have them, and the rows of an EAGLE draft; prefill has the
    first block. The twin: a byte of any plane that is another one is seen."""
    prompt = list(range(100, 170))
    answered = [*prompt, *range(300, 430)]
    with pair_of(kind, hbm_tokens=14 * kind.page, block=kind.page) as pair:
        pair.prefill.serve(prompt)
        pair.decode.serve(answered)
        pair.return_sender.ended(pair.request(), answered)
        pair.until("returned")
        pair.compare(answered)
        assert pair.return_receiver.tokens == 2 * kind.page
        places = pair.return_receiver._places.blocks
        _, slots, _ = places.held(NAMESPACE, key_of(answered))
        last = int(np.concatenate(slots)[-1])
        for plane in (plane for layer in pair.prefill.pools.tensors for plane in layer):
            row = plane.view(torch.uint8).view(len(plane), -1)[last]
            row[0] ^= 1
            with pytest.raises(WrongKvError):
                pair.compare(answered)
            row[0] ^= 1
        pair.compare(answered)
        for rank in (pair.prefill, pair.decode):
            rank.check()
        assert pair.prefill.serve([*answered, 1, 2], new_tokens=8).cached_tokens == 3 * kind.page


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong byte"])
@pytest.mark.parametrize("kind", EAGLE, ids=str)
def test_a_draft_goes_on_behind_a_returned_answer(
    kind: PoolKind, damaged: bool, sglang_config: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode has drafted the answer, whose rows of the draft return; the next turn reads them."""
    prompt = list(range(100, 170))
    with pair_of(kind, hbm_tokens=14 * kind.page, block=kind.page) as pair:
        pair.prefill.serve(prompt)
        req = pair.decode.serve(prompt, new_tokens=130)
        answered = [*prompt, *req.output_ids][:-1]
        assert pair.decode.scheduler.drafted > 30
        pair.return_sender.ended(pair.request(), answered)
        pair.until("returned")
        pair.compare(answered)
        places = pair.return_receiver._places.blocks
        _, slots, _ = places.held(NAMESPACE, key_of(answered))
        plane = pair.prefill.pools.tensors[kind.layers][0]
        row = plane.view(torch.uint8).view(len(plane), -1)[int(np.concatenate(slots)[-2])]
        row[0] ^= int(damaged)
        pair.prefill.look_inside = False
        compute, seen = pair.prefill.scheduler._compute, []

        def mending(work: Computed, layer: int) -> None:
            """Note a wrong row, and set it right, so that the request ends."""
            try:
                compute(work, layer)
            except WrongKvError as error:
                seen.append(str(error))
                row[0] ^= 1
                compute(work, layer)

        monkeypatch.setattr(pair.prefill.scheduler, "_compute", mending)
        turn = pair.prefill.serve([*answered, 1, 2], new_tokens=8)
        assert turn.cached_tokens == len(answered) // kind.page * kind.page
        assert [each.split(" of ")[0] for each in seen] == ["draft"] * damaged


def test_without_coalescing_a_return_is_read_in_more_ranges(sglang_config: None) -> None:
    ranges = []
    for coalescing in (True, False):
        with pair_of(PoolKind(), coalescing=coalescing) as pair:
            pair.decode.serve(ANSWERED)
            pair.return_sender.ended(pair.request(), ANSWERED)
            pair.until("returned")
            pair.compare(ANSWERED)
            ranges.append(sum(pair.return_receiver._agent.state().transactions.values()))
    together, apart = ranges
    assert 0 < together < apart, ranges


def test_prefill_inserts_without_an_acknowledgement_of_what_it_has_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a round trip. Decode receives the result all the same, and frees its pages."""
    monkeypatch.setattr(receiving_returns, "READ_SECONDS", 60.0)
    decode = pair.return_sender._agent
    gate, owner = asyncio.Event(), decode.endpoint.owner
    monkeypatch.setattr(owner, "handle", held(owner.handle, Complete, gate))
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("returned")
    pair.compare(ANSWERED)
    assert decode.endpoint.pools[HBM_POOL].pinned == 0
    decode.transfers.loop.call_soon_threadsafe(gate.set)


@pytest.mark.parametrize("renewed", [True, False], ids=["renewed", "twin"])
def test_a_return_may_be_read_for_longer_than_a_lease(
    pair: Pair, renewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a busy machine stands still, so that a lease that is renewed does not end.
    lease_s = 3.0
    for module in (sending_returns, receiving_returns):
        monkeypatch.setattr(module, "LEASE_SECONDS", lease_s)
    if not renewed:
        monkeypatch.setattr(Instance, "keeping", lambda *_: nullcontext())
    gate = pair.hold_reads()
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    leases = pair.return_sender._agent.endpoint.pools[HBM_POOL]._leases._leases
    (number,) = leases
    granted = leases[number].deadline
    try:
        pair.until_prefill(gate.reached.is_set, "the read to begin")
        if renewed:
            # Longer than a lease lives, and it still does.
            wait_until(lambda: leases[number].deadline > granted + lease_s, seconds=20, what="renewals")
        else:
            wait_until(lambda: not leases, seconds=20, what="the end of the lease")
    finally:
        gate.go.set()
    pair.until("returned" if renewed else "unread")
    assert pair.calls == renewed
    if renewed:
        pair.compare(ANSWERED)
    pair.prefill.check()


def test_what_prefill_has_is_not_sent(pair: Pair) -> None:
    for rank in (pair.prefill, pair.decode):
        rank.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("known")
    assert pair.return_receiver.tokens == 0
    assert pair.calls == 0


@pytest.mark.parametrize("side", ["return_sender", "return_receiver"])
def test_unlike_weights_return_nothing_until_they_are_alike(pair: Pair, side: str) -> None:
    pair.decode.serve(ANSWERED)
    others = {"return_sender": pair.return_receiver, "return_receiver": pair.return_sender}
    getattr(pair, side)._agent.weights_changed("tuned")
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("weights")
    assert pair.calls == 0
    assert pair.return_receiver.outcomes["weights"] == 1
    assert pair.return_receiver.tokens == 0
    others[side]._agent.weights_changed("tuned")
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("returned")
    pair.compare(ANSWERED)


def test_what_prefill_computes_meanwhile_is_not_there_twice(pair: Pair) -> None:
    gate = pair.hold_reads()
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until_prefill(gate.reached.is_set, "the read")
    assert pair.return_receiver.set_aside["hbm"]
    pair.prefill.scheduler.submit(ANSWERED, new_tokens=1)
    while not pair.prefill.scheduler.idle:
        pair.prefill.scheduler.step()
    gate.go.set()
    pair.until("returned")
    assert pair.return_receiver.tokens == 0
    pair.compare(ANSWERED)
    pair.prefill.check()


def test_a_return_has_a_budget_on_both_sides(pair: Pair) -> None:
    long = list(range(1000, 1100))
    pair.decode.serve(long)
    pair.return_sender.ended(pair.request(), long)
    assert pair.return_sender.outcomes["budget"] == 1
    pair.prefill.cache.token_to_kv_pool_allocator.size, size = 64, pair.prefill.pools.allocator.size
    try:
        pair.decode.serve(ANSWERED)
        pair.return_sender.ended(pair.request(), ANSWERED)
        pair.until("budget", times=2)
    finally:
        pair.prefill.cache.token_to_kv_pool_allocator.size = size
    assert pair.return_receiver.outcomes["budget"] == 1
    assert pair.return_sender._pinned == 0


def fill_hbm(pair: Pair) -> None:
    """Prefill's requests wait for memory, and HBM is full of blocks that other requests may still use."""
    pair.return_receiver._busy = lambda: True
    for number in range(4):
        pair.prefill.serve(list(range(2000 + 100 * number, 2060 + 100 * number)))
    pair.prefill.cache.settle()


def test_requests_of_prefill_come_before_returns(pair: Pair) -> None:
    fill_hbm(pair)
    pair.return_receiver._places._into_dram = False
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("memory")
    assert pair.return_receiver.tokens == 0


@pytest.mark.parametrize("known", [0, 8, 33], ids=lambda n: f"prefill knows {n}")
def test_what_finds_no_room_in_hbm_goes_to_dram(pair: Pair, known: int) -> None:
    prefill = pair.prefill
    if known:
        prefill.serve(PROMPT[:known])
    fill_hbm(pair)
    # All of DRAM may be used for it: its blocks are the least recently used.
    pair.return_receiver._places.dram_budget = 1
    pair.decode.serve(ANSWERED)
    free = prefill.pools.allocator.available_size()
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("returned")
    assert pair.return_receiver.outcomes["dram"] == 1
    assert pair.calls == 1
    assert prefill.pools.allocator.available_size() == free
    prefill.check()
    # A request finds it there, with the KV that the model computes: the simulation compares each pass.
    pair.return_receiver._busy = lambda: False
    match = prefill.tree.match(NAMESPACE, key_of(ANSWERED))
    assert match.blocks == len(ANSWERED) // prefill.scenario.block
    before = prefill.tier.copies.counters.loaded if prefill.tier is not None else 0
    prefill.serve(ANSWERED)
    assert prefill.tier is not None
    assert prefill.tier.copies.counters.loaded > before


def test_dram_has_a_budget_too(pair: Pair) -> None:
    fill_hbm(pair)
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("budget")
    assert pair.return_receiver.set_aside["dram"] == 0


@pytest.mark.parametrize("into_dram", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_emptied_cache_ends_returns(
    pair: Pair, side: str, into_dram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither may slots that prefill has set aside be filled later, nor pages of decode be read as these."""

    held = threading.Event()
    stock = Instance.finish

    async def waits(self: Instance, request: str, seconds: float) -> Any:
        held.set()
        while not gone.is_set():  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0.01)
        return await stock(self, request, seconds)

    gone = threading.Event()
    monkeypatch.setattr(Instance, "finish", waits)
    if into_dram:
        fill_hbm(pair)
        pair.return_receiver._places.dram_budget = 1
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until_prefill(held.is_set, "the read")
    rank = pair.prefill if side == "prefill" else pair.decode
    rank.cache.settle()
    if side == "prefill":
        pair.return_receiver.before_clear()
    else:
        pair.return_sender.clear()
        # Its pages are open: reads from now on are discarded.
        assert pair.return_sender._agent.endpoint.pools[HBM_POOL].pinned == 0
        gone.set()
    assert not any(node.locks for node in rank.tree.nodes())
    rank.check()
    gone.set()
    pair.until("unread")
    assert pair.return_receiver.tokens == 0
    for each in (pair.prefill, pair.decode):
        each.check()


def test_a_return_that_is_cancelled_again_while_it_ends_says_when_nothing_writes_there(pair: Pair) -> None:
    """Else a scheduler that empties its cache waits for that in vain, and ends."""
    gate = pair.hold_reads()
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until_prefill(gate.reached.is_set, "the read")
    (move,) = pair.moves
    assert move.source is not None

    async def cancel_twice() -> bool:
        (reading,) = (each for each in asyncio.all_tasks() if "ReturnReceiver._read" in repr(each.get_coro()))
        for _ in range(2):
            reading.cancel()
            await asyncio.sleep(0)  # it has begun to end
            await asyncio.sleep(0)
        assert move.source is not None
        return move.source.blocks is not None

    try:
        transfers = pair.return_receiver._agent.transfers
        assert not transfers.run(cancel_twice()), "it is still being written"
    finally:
        gate.go.set()
    assert move.source.wait() == 0
    pair.until("unread")
    pair.prefill.check()


def test_a_server_that_is_not_connected_gets_nothing(pair: Pair) -> None:
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request("127.0.0.1:9"), ANSWERED)
    pair.until("prefill_gone")
    pair.return_sender.ended(pair.request(), ANSWERED[:3])
    assert pair.return_sender.outcomes["short"] == 1


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
def test_a_return_waits_for_the_pass_that_stores_to_its_slots(pair: Pair, fenced: bool) -> None:
    """A pass over a request that has ended runs when its slots become a return's place."""
    ended, looks = threading.Event(), list[bool]()

    def passed() -> bool:
        looks.append(ended.is_set())
        return ended.is_set()

    if fenced:
        pair.return_receiver._fence = lambda: passed
    pair.decode.serve(ANSWERED)
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until_prefill(lambda: pair.moves, "a place")
    (move,) = pair.moves
    reservation, source = move.reservation, move.source
    assert reservation is not None
    assert source is not None
    assert reservation.tier is Tier.HBM
    if fenced:
        wait_until(lambda: len(looks) > 3, seconds=20, what="the read to wait")
        assert source.blocks is None
    else:
        assert source.wait() == reservation.blocks
    slots = np.asarray(reservation.places)
    planes = [plane for layer in pair.prefill.pools.tensors for plane in layer]
    arrived = [plane[slots].clone() for plane in planes]
    for plane in planes:
        plane[slots] = 0
    ended.set()
    pair.until("returned")
    if fenced:
        pair.compare(ANSWERED)
    else:
        with pytest.raises(AssertionError):
            pair.compare(ANSWERED)
        for plane, whole in zip(planes, arrived, strict=True):  # the simulation ends with whole KV
            plane[slots] = whole


def test_a_read_that_fails_frees_what_was_set_aside(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.disagg.errors import StaleReadError

    async def fails(*_: object) -> None:
        raise StaleReadError("return", 1, 1)

    monkeypatch.setattr(Instance, "finish", fails)
    pair.decode.serve(ANSWERED)
    free = pair.prefill.pools.allocator.available_size()
    pair.return_sender.ended(pair.request(), ANSWERED)
    pair.until("unread")
    assert pair.prefill.pools.allocator.available_size() == free
    pair.prefill.check()


class Instances:
    """Two ranks of prefill and two of decode, whose schedulers pass in step, each in a thread of its own."""

    def __init__(self, kind: PoolKind, stack: ExitStack) -> None:
        self._in_step = False
        """The ranks compare numbers, because all of them pass at once."""
        self._barrier = {name: threading.Barrier(2, timeout=20) for name in ("p", "d")}
        self._said: dict[str, list[Sequence[int]]] = {name: [[], []] for name in self._barrier}
        self.ranks = {
            name: [
                Rank(Scenario(f"{name}{i}", kind, hbm_tokens=256, dram_blocks=20), least=self._least(name, i))
                for i in range(2)
            ]
            for name in self._barrier
        }
        for rank in (*self.ranks["p"], *self.ranks["d"]):
            stack.callback(rank.close)
            stack.callback(finish, rank)
        self._bootstrap = BootstrapService("127.0.0.1", 0, None)
        stack.callback(self._bootstrap.close)
        address = self._bootstrap.address
        self.agents: dict[str, list[Agent]] = {"p": [], "d": []}
        for name, agents in self.agents.items():
            for number, rank in enumerate(self.ranks[name]):
                agents.append(agent_of(rank, name, address if name == "p" else "", number, 2))
                stack.callback(agents[-1].transfers.close)
                stack.callback(agents[-1].close)
        self._commands = RankCommandQueue()
        stack.callback(self._commands.close)
        blocks = {name: [Blocks(rank.cache) for rank in ranks] for name, ranks in self.ranks.items()}

        self.return_receivers = [
            ReturnReceiver(Reservations(blocks["p"][i]), agent, lambda: False, None if i else self._commands)
            for i, agent in enumerate(self.agents["p"])
        ]
        for agent, return_receiver in zip(self.agents["p"], self.return_receivers, strict=True):
            agent.receive_returns(return_receiver)
        self.return_senders = [
            ReturnSender(blocks["d"][i], agent) for i, agent in enumerate(self.agents["d"])
        ]
        for rank, return_sender in zip(self.ranks["d"], self.return_senders, strict=True):
            rank.ranks.add(return_sender)

    def connect(self, *numbers: int) -> None:
        """Let ranks of decode find prefill."""
        for number in numbers:
            agent = self.agents["d"][number]
            agent.transfers.run(agent._peers.get(self._bootstrap.address))

    def _least(self, name: str, number: int) -> Least:
        def least(numbers: Sequence[int]) -> Sequence[int]:
            if not self._in_step:
                return numbers
            self._said[name][number] = numbers
            self._barrier[name].wait()
            found = [min(each) for each in zip(*self._said[name], strict=True)]
            self._barrier[name].wait()
            return found

        return least

    def ended(self) -> None:
        """A request ends on decode, on both ranks between the same two passes."""
        host, _, port = str(self._bootstrap.address).rpartition(":")
        for return_sender in self.return_senders:
            return_sender.ended(request_from(host, port), ANSWERED)

    def each_pass(self) -> None:
        """All schedulers pass once."""
        for command in self._commands.take():
            for return_receiver in self.return_receivers:
                assert return_receiver.takes_command(RANK_COMMANDS.decode(command.payload))
        every = [*self.ranks["p"], *self.ranks["d"]]
        threads = [threading.Thread(target=rank.ranks.each_pass) for rank in every]
        self._in_step = True
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        self._in_step = False
        for ranks in self.ranks.values():
            assert ranks[0].picture() == ranks[1].picture(), "the ranks have different trees"

    def moves(self) -> list[Move]:
        """The returns under way, on prefill's ranks in turn."""
        pairs = zip(self.ranks["p"], self.return_receivers, strict=True)
        return [move for rank, return_receiver in pairs for move in rank.moves.of(return_receiver)]

    def until(self, outcome: str) -> None:
        """Let the schedulers pass until a return has ended so, as decode sees it."""

        def there() -> bool:
            self.each_pass()
            return all(return_sender.outcomes[outcome] for return_sender in self.return_senders)

        wait_until(there, seconds=30, what=outcome)


@pytest.fixture(params=[PoolKind(), PoolKind("mla", page=4)], ids=str)
def instances(request: pytest.FixtureRequest, sglang_config: None) -> Iterator[Instances]:
    with ExitStack() as stack:
        found = Instances(request.param, stack)
        stack.callback(vars(found).clear)
        for rank in found.ranks["p"]:
            rank.serve(PROMPT)
        for rank in found.ranks["d"]:
            rank.serve(ANSWERED)
        yield found


def test_ranks_take_a_return_in_the_same_pass(instances: Instances, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has read long before the other; its tree stays as that of the other."""

    go_on = threading.Event()
    stock = Instance.finish
    slow = instances.agents["p"][1]

    async def waits(self: Instance, request: str, seconds: float) -> Any:
        while self in slow.endpoint._reached.values() and not go_on.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        return await stock(self, request, seconds)

    monkeypatch.setattr(Instance, "finish", waits)
    instances.connect(0, 1)
    instances.ended()
    first, second = instances.return_receivers

    def have_read() -> list[bool]:
        moves = instances.moves()
        return [move.source is not None and move.source.blocks is not None for move in moves]

    wait_until(lambda: instances.each_pass() or any(have_read()), seconds=20, what="the read")
    for _ in range(3):
        instances.each_pass()
    assert have_read() == [True, False]
    go_on.set()
    instances.until("returned")
    for rank, return_receiver in zip(instances.ranks["p"], instances.return_receivers, strict=True):
        compare_with_model(rank, return_receiver._places.blocks, ANSWERED)
    assert first.tokens == second.tokens > 0
    for rank in (*instances.ranks["p"], *instances.ranks["d"]):
        rank.check()


def test_what_one_rank_cannot_read_no_rank_keeps(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext.disagg.errors import StaleReadError

    stock = Instance.finish
    failing = instances.agents["p"][1]

    async def fails(self: Instance, request: str, seconds: float) -> Any:
        if self in failing.endpoint._reached.values():
            raise StaleReadError("return", 1, 1)
        return await stock(self, request, seconds)

    monkeypatch.setattr(Instance, "finish", fails)
    instances.connect(0, 1)
    free = [rank.pools.allocator.available_size() for rank in instances.ranks["p"]]
    instances.ended()
    instances.until("unread")
    assert [return_receiver.tokens for return_receiver in instances.return_receivers] == [0, 0]
    assert [rank.pools.allocator.available_size() for rank in instances.ranks["p"]] == free


def test_a_part_that_does_not_come_ends_the_return(
    instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of decode has lost prefill; the other one's pages are free again, on both at once."""
    for module in (sending_returns, gathering_returns):
        monkeypatch.setattr(module, "RETURN_SECONDS", 0.5)
    instances.connect(0)
    instances.ended()
    wait_until(
        lambda: instances.each_pass() or not instances.return_senders[0]._going,
        seconds=20,
        what="the return's end",
    )
    assert [return_sender._going for return_sender in instances.return_senders] == [[], []]
    assert [return_sender.tokens for return_sender in instances.return_senders] == [0, 0]
    wait_until(
        lambda: instances.each_pass() or not instances.return_receivers[0]._gathering,
        seconds=20,
        what="the end of its gathering",
    )
    assert [return_sender._pinned for return_sender in instances.return_senders] == [0, 0]
    for rank in instances.ranks["d"]:
        rank.cache.settle()
        assert not any(node.locks for node in rank.tree.nodes())

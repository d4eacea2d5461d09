"""The stream checker over returns from decode to prefill: the real cache, its ended requests, and an adapter
that reads their pages beside the passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from engine_pools import PoolKind, WrongKvError, chain_of
from engine_simulation import Traffic
from fake_cuda import FakeCuda
from stream_engine import DECODE, FAST, LAYERS, PLAIN, SLOW, StreamRank, stream_rank
from stream_pd import ReturningAgent, Wire, wire

from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.forward_fence import ForwardFence
from sglang_ext.engine.pd.messages import Return
from sglang_ext.engine.pd.returns.reservations import Blocks
from sglang_ext.engine.pd.returns.return_sender import ReturnSender
from sglang_ext.keys import decode_tokens

pytestmark = pytest.mark.usefixtures("sglang_config")

KINDS = [PLAIN, PoolKind(page=4, layers=LAYERS), PoolKind("mla", 4, LAYERS)]


class Ended(Listener):
    """Requests that have ended go to the sender, as `role_parts` has it."""

    def __init__(self, sender: ReturnSender) -> None:
        self._sender = sender

    def request_ended(self, req: Any, tokens: Any) -> None:
        req.bootstrap_host, req.bootstrap_port, req.bootstrap_room = "prefill", 1, 7
        if req.finished():
            self._sender.ended(req, tokens)

    def before_clear(self) -> None:
        self._sender.clear()


@contextmanager
def returning(kind: PoolKind, pace: float, *, fenced: bool) -> Iterator[tuple[StreamRank, FakeCuda, Any]]:
    """A decode rank whose ended requests return; an adapter reads their pages and compares."""
    with stream_rank(DECODE, pace=pace, kind=kind) as (rank, cuda), wire(cuda) as transfers:

        def read(message: Return, pages: Any) -> None:
            slots = (pages[:, None] * kind.page + np.arange(kind.page)).ravel()
            namespace = rank.scheduler.weights, message.extra_key, message.cache_salt
            chain = np.array(chain_of(namespace, decode_tokens(message.tokens).tolist()), np.uint64)
            for layer in range(LAYERS):
                transfers.move(
                    "read by a peer",
                    reads=rank.pools.access(layer, slots),
                    action=lambda layer=layer: rank.pools.oracle.compare(slots, chain, layer, "a return"),
                )

        fence = ForwardFence(torch.cuda, (rank.scheduler.forward,)) if fenced else follow_scheduler
        sender = ReturnSender(Blocks(rank.cache), ReturningAgent(transfers, read), fence)  # type: ignore[arg-type]
        rank.cache.listeners.add(Ended(sender))
        yield rank, cuda, lambda: one_pass(rank, transfers, sender)


def one_pass(rank: StreamRank, transfers: Wire, sender: ReturnSender) -> None:
    rank.scheduler.step()
    transfers.turn()
    transfers.heard()
    sender.act(sender.propose())


def follow_scheduler() -> Any:
    """As the sender once was: an event on the scheduler's stream alone."""
    return ForwardFence(torch.cuda, ())()


def replayed(cuda: FakeCuda, orders: int) -> None:
    for seed in range(orders):
        cuda.replay(seed)


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
@pytest.mark.parametrize("pace", [SLOW, FAST])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_return_is_read_behind_the_pass_that_computes_its_last_token(
    kind: PoolKind, pace: float, fenced: bool
) -> None:
    with returning(kind, pace, fenced=fenced) as (rank, cuda, each_pass):
        traffic = Traffic(rank.scenario, 3, rank.scenario.stretch)
        for _ in range(50):
            traffic.act(rank.scheduler)
            each_pass()
        read = [each for each in cuda.trace.operations if each.name == "read by a peer"]
        assert read
        races = [str(race) for race in cuda.trace.races.values()]
        if fenced:
            assert not races, races
            replayed(cuda, 2)
        elif pace == FAST:
            assert any("read by a peer" in race for race in races)
            with pytest.raises(WrongKvError):
                replayed(cuda, 12)

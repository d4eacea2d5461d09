"""Moving a running request between two simulated decode ranks: every row that it has KV of comes along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_pools import PoolKind, WrongKvError, chain_of
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, finish
from pd_returns_rig import NAMESPACE, agent_of
from sglang.srt.disaggregation.utils import MetadataBuffers

from sglang_ext.disagg.handover import ReceiverState
from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.patches.adapter.pd.pd_setup import ScratchRow
from sglang_ext.protocol.agent import Park, Parked, Unpark
from sglang_ext.testing.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

PROMPT = list(range(100, 170))
ANSWER_TOKENS = 90


class KeptReplies(Replies):
    """The replies to a router."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def reply_to_move(self, message: Any) -> None:
        self.sent.append(message)


@dataclass
class Moving:
    """Two decode ranks; requests leave the first one."""

    source: Rank
    target: Rank
    agents: list[Agent]
    migration: Migration
    replies: KeptReplies


def scheduler_of(rank: Rank, metadata: MetadataBuffers) -> Any:
    """The members of SGLang's scheduler that a stopped request needs, of the simulated one."""
    simulated = rank.scheduler
    return SimpleNamespace(
        running_batch=simulated.running,
        waiting_queue=simulated.waiting,
        enable_overlap=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        req_to_token_pool=rank.pools.requests,
        disagg_metadata_buffers=metadata,
        output_streamer=SimpleNamespace(stream_output=lambda reqs, logprobs: None),
    )


@contextmanager
def moving(kind: PoolKind) -> Iterator[Moving]:
    metadata = MetadataBuffers(1, 8, torch.float32, 0)
    row_bytes = len(ScratchRow(metadata).read())
    with ExitStack() as stack:
        sizes: dict[str, Any] = {"block": kind.page, "hbm_tokens": 14 * kind.page, "dram_blocks": 20}
        settings = Settings(chunk=2 * kind.page)
        ranks = [Rank(Scenario(name, kind, **sizes, settings=settings)) for name in "ab"]
        agents = []
        for name, rank in zip("ab", ranks, strict=True):
            stack.callback(rank.close)
            stack.callback(finish, rank)
            agents.append(agent_of(rank, name, "", metadata_bytes=row_bytes))
            stack.callback(agents[-1].transfers.close)
            stack.callback(agents[-1].close)
        agents[0].meet_at(agents[0].address)
        replies = KeptReplies()
        ranks[0].cache.scheduler = scheduler_of(ranks[0], metadata)
        migration = Migration(ranks[0].cache, replies)
        manager: Any = SimpleNamespace(
            agent=agents[0], meeting=agents[0].address, beside_running=lambda req: ()
        )
        migration.transfer_by(manager)
        found = Moving(*ranks, agents, migration, replies)
        # pytest keeps the yielded value; the agents' memory has to go with it.
        stack.callback(vars(found).clear)
        yield found


@pytest.mark.parametrize("kind", [PoolKind("dsa", 64, layers=3), PoolKind("mla", 16)], ids=str)
def test_every_plane_of_a_moved_request_comes(kind: PoolKind) -> None:
    """Prompt and answer, up to the last token, which has no KV yet. The twin: a byte of any plane that is
    another one is seen."""
    with moving(kind) as pair:
        rank, scheduler = pair.source, pair.source.scheduler
        req = scheduler.submit(PROMPT, new_tokens=ANSWER_TOKENS + 10)
        while len(req.output_ids) < ANSWER_TOKENS:
            scheduler.step()
        rank.cache.scheduler.running_batch = scheduler.running
        assert pair.migration.takes_command(Park("move 1", req.rid), 0.0)
        (parked,) = pair.replies.sent
        assert isinstance(parked, Parked)
        assert not parked.why
        assert parked.meeting == pair.agents[0].address
        tokens = [*PROMPT, *req.output_ids][:-1]
        chain = np.array(chain_of(NAMESPACE, tokens), np.uint64)

        receiver, allocator = pair.agents[1].receiver, pair.target.pools.allocator
        taken = receiver.open(parked.meeting, parked.bootstrap_room, read=True)
        wait_until(lambda: taken.state is ReceiverState.READY, seconds=20, what="the offer")
        pages = -(-len(tokens) // kind.page)
        slots = allocator.alloc(pages * kind.page)
        receiver.read(taken, Wanted(slots.numpy()[:: kind.page] // kind.page, 0, 0))
        wait_until(lambda: taken.over, seconds=20, what="the KV")
        assert taken.state is ReceiverState.HELD, taken.reason

        pools, rows = pair.target.pools, slots.numpy()[: len(tokens)]

        def compare() -> None:
            for layer in range(pools.oracle.layers):
                pools.oracle.compare(rows, chain, layer, "moved")

        compare()
        for plane in (plane for layer in pools.tensors for plane in layer):
            row = plane.view(torch.uint8).view(len(plane), -1)[int(rows[-1])]
            row[0] ^= 1
            with pytest.raises(WrongKvError):
                compare()
            row[0] ^= 1
        compare()
        allocator.free(slots)
        receiver.settle(taken)
        assert pair.migration.takes_command(Unpark("move 1", stay=False), 0.0)
        assert pair.migration.counts == {"parked": 1, "left": 1}
        rank.check()

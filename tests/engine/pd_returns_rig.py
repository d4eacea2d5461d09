"""Returns between two simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from engine_pools import PoolKind, chain_of
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, finish
from engine_verifying import VerifyingScheduler
from pd_rig import METADATA, Rows, transfer_thread

from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.moves.move import Move
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.messages import RANK_COMMANDS
from sglang_ext.engine.pd.peers import Local
from sglang_ext.engine.pd.returns.reservations import Blocks, Reservations
from sglang_ext.engine.pd.returns.return_receiver import ReturnReceiver
from sglang_ext.engine.pd.returns.return_sender import ReturnSender
from sglang_ext.engine.peers.arena_leases import arena_pool
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.mempool.ledger import Call
from sglang_ext.testing.transfer.rig import Gate
from sglang_ext.testing.waiting import wait_until

NAMESPACE = (0, None, None)
PROMPT = list(range(100, 133))
ANSWERED = [*PROMPT, *range(300, 320)]


def agent_of(
    rank: Rank,
    name: str,
    bootstrap: str,
    number: int = 0,
    ranks: int = 1,
    *,
    coalescing: bool = True,
    metadata_bytes: int = METADATA,
) -> Agent:
    geometry = rank.pools.geometry()
    memory = [
        MemoryRange(plane.data_ptr(), plane.nbytes, keep=plane)
        for layer in rank.pools.tensors
        for plane in layer
    ]
    spec = PoolSpec.of_geometry(HBM_POOL, geometry, memory, lease_budget=geometry.slots)
    local = Local(number, ranks, rank.pools.kind.page, metadata_bytes)
    arena = rank.arena
    assert arena is not None
    transfers = transfer_thread(name, [spec, arena_pool(arena, geometry)], rank=number, coalescing=coalescing)
    return Agent(AgentConfig(local, "weights", bootstrap=bootstrap), transfers, Rows(metadata_bytes))


def request_from(host: str, port: str) -> Any:
    """A request that has ended on decode, as returns look at it."""
    return SimpleNamespace(
        bootstrap_host=host,
        bootstrap_port=port,
        bootstrap_room=7,
        disagg_prefill_dp_rank=None,
        extra_key=None,
        cache_salt=None,
    )


@dataclass
class Pair:
    """A prefill and a decode rank, and returns between them. commands: to prefill's scheduler."""

    prefill: Rank
    decode: Rank
    return_receiver: ReturnReceiver
    return_sender: ReturnSender
    address: str
    commands: RankCommandQueue

    def request(self, address: str | None = None) -> Any:
        host, _, port = (address or self.address).rpartition(":")
        return request_from(host, port)

    def prefill_passes(self) -> None:
        """One pass of prefill's scheduler."""
        for command in self.commands.take():
            assert self.return_receiver.takes_command(RANK_COMMANDS.decode(command.payload))
        self.prefill.ranks.each_pass()

    @property
    def moves(self) -> list[Move]:
        """The returns under way at prefill."""
        return self.prefill.moves.of(self.return_receiver)

    def hold_reads(self) -> Gate:
        """Hold prefill's next read of bytes."""
        prefill, decode = self.return_receiver._agent, self.return_sender._agent
        (link,) = prefill.transfers.run(prefill.endpoint.reach(decode.address)).links
        return Gate(link.peer, "read")

    def until_prefill(self, condition: Callable[[], object], what: str) -> None:
        """Let prefill's scheduler pass until something holds."""
        wait_until(lambda: self.prefill_passes() or condition(), seconds=20, what=what)

    def until(self, outcome: str, times: int = 1) -> None:
        """Let both schedulers pass until returns have ended so, as decode sees it."""

        def there() -> bool:
            self.prefill_passes()
            self.return_sender.act(self.return_sender.propose())
            return self.return_sender.outcomes[outcome] >= times

        try:
            wait_until(there, seconds=20, what=outcome)
        except TimeoutError as error:
            raise TimeoutError(
                f"{error}: {self.return_sender.outcomes}, {self.return_receiver.outcomes}"
            ) from None

    @property
    def calls(self) -> int:
        """Calls of `transfer_with_insert` at prefill, as decode counts them."""
        return self.return_sender._agent.calls[Call.TRANSFER_WITH_INSERT]

    def compare(self, tokens: list[int]) -> None:
        """Prefill has all whole blocks of a prompt, and their KV equals the model's."""
        compare_with_model(self.prefill, self.return_receiver._places.blocks, tokens)


def compare_with_model(rank: Rank, blocks: Blocks, tokens: list[int]) -> None:
    whole = len(tokens) // rank.scenario.block * rank.scenario.block
    _, slots, count = blocks.held(NAMESPACE, key_of(tokens))
    assert count * rank.scenario.block == whole
    chain = np.array(chain_of(NAMESPACE, tokens), np.uint64)[:whole]
    for layer in range(rank.pools.oracle.layers):
        hashes = rank.pools.row_hashes(chain, layer)
        rank.pools.oracle.compare(np.concatenate(slots), hashes, layer, "returned")


def key_of(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


@contextmanager
def pair_of(
    kind: PoolKind, *, hbm_tokens: int = 256, coalescing: bool = True, block: int = 4
) -> Iterator[Pair]:
    with ExitStack() as stack:
        sizes: dict[str, Any] = {"block": block, "hbm_tokens": hbm_tokens, "dram_blocks": 20}
        if kind.draft_layers:
            sizes["make_scheduler"] = VerifyingScheduler
        settings = Settings(chunk=max(Settings().chunk, 2 * block))
        ranks = [Rank(Scenario(name, kind, **sizes, settings=settings)) for name in ("p", "d")]
        for rank in ranks:
            stack.callback(rank.close)
            stack.callback(finish, rank)
        bootstrap = BootstrapService("127.0.0.1", 0, None)
        stack.callback(bootstrap.close)
        agents = [
            agent_of(ranks[0], "p", bootstrap.address, coalescing=coalescing),
            agent_of(ranks[1], "d", ""),
        ]
        for agent in agents:
            stack.callback(agent.transfers.close)
            stack.callback(agent.close)
        agents[1].transfers.run(agents[1]._peers.get(bootstrap.address))
        blocks = [Blocks(rank.cache) for rank in ranks]
        commands = RankCommandQueue()
        stack.callback(commands.close)
        places = Reservations(blocks[0], into_dram=True)
        return_receiver = ReturnReceiver(places, agents[0], lambda: False, commands)
        agents[0].receive_returns(return_receiver)
        return_sender = ReturnSender(blocks[1], agents[1])
        found = Pair(*ranks, return_receiver, return_sender, bootstrap.address, commands)
        # pytest keeps the yielded value; the agents' memory has to go with it.
        stack.callback(vars(found).clear)
        yield found

"""Agents over random pools in one process: the part of `adapter/pd` without SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.handover import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    VERDICT_SECONDS,
    ReceiverState,
    SenderState,
)
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.control import CurveKeys
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.disagg.transfer.staging import Staging
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.landing import PoolRows, Wanted
from sglang_ext.engine.pd.messages import MESSAGES
from sglang_ext.engine.pd.peers import Local
from sglang_ext.engine.transfer_thread import HBM_POOL, TransferThread
from sglang_ext.geometry import Geometry, mha_geometry, mla_geometry
from sglang_ext.testing.waiting import wait_until

LAYERS, HEADS, WIDTH, PAGES = 3, 4, 8, 64
METADATA = 48

Planes = dict[tuple[int, str], npt.NDArray[np.float32]]


Answer = Callable[[bytes, object], Awaitable[object]]


def held(answer: Answer, kind: type, gate: asyncio.Event) -> Answer:
    """Answers a kind of message once the gate is open."""

    async def answered(identity: bytes, message: object) -> object:
        if isinstance(message, kind):
            await gate.wait()
        return await answer(identity, message)

    return answered


class Rows:
    """Metadata rows in a dictionary."""

    def __init__(self, row_bytes: int = METADATA) -> None:
        self.written: dict[int, bytes] = {}
        self._row_bytes = row_bytes

    def write(self, row: int, metadata: bytes) -> None:
        if len(metadata) != self._row_bytes:
            raise ValueError("a row of another size")
        self.written[row] = metadata


@dataclass
class Side:
    """One rank: its agent, its pool and its metadata rows.

    planes: by (layer, kind), float32 of shape (slots, heads of this rank, WIDTH).
    """

    agent: Agent
    planes: Planes
    rows: Rows = field(default_factory=Rows)
    first_head: int = 0

    def kv(self, pages: Sequence[int], page: int) -> npt.NDArray[np.float32]:
        """The KV in pages: shape (planes, tokens, heads, WIDTH)."""
        slots = (np.asarray(pages)[:, None] * page + np.arange(page)).ravel()
        return np.stack([plane[slots] for plane in self.planes.values()])


def pool(rank: int, ranks: int, page: int, seed: int) -> tuple[PoolSpec, Planes]:
    """The pool of one rank of `ranks` that share the heads."""
    return pool_and_geometry(rank, ranks, page, seed)[:2]


def pool_and_geometry(
    rank: int, ranks: int, page: int, seed: int, layers: range = range(LAYERS)
) -> tuple[PoolSpec, Planes, Geometry]:
    """As `pool`, with the geometry of its pages. layers: of its stage."""
    rng = np.random.default_rng(seed)
    heads = HEADS // ranks
    planes = {
        (layer, kind): rng.standard_normal((PAGES * page, heads, WIDTH)).astype(np.float32)
        for layer in layers
        for kind in "kv"
    }
    geometry = mha_geometry(
        k_addresses=tuple(int(planes[layer, "k"].ctypes.data) for layer in layers),
        v_addresses=tuple(int(planes[layer, "v"].ctypes.data) for layer in layers),
        first_layer=layers.start,
        model_layers=LAYERS,
        slots=PAGES * page,
        heads=heads,
        head_dim=WIDTH,
        dtype="float32",
        first_head=rank * heads,
        model_heads=HEADS,
        block_tokens=page,
        page_tokens=page,
    )
    memory = [
        MemoryRange(int(plane.ctypes.data), plane.nbytes, MemoryKind.HOST, keep=plane)
        for plane in planes.values()
    ]
    return PoolSpec.of_geometry(HBM_POOL, geometry, memory, lease_budget=PAGES), planes, geometry


def latent_pool(page: int, seed: int) -> tuple[PoolSpec, Planes, Geometry]:
    """As `pool_and_geometry`, of a model with one latent a layer, which every rank holds whole."""
    rng = np.random.default_rng(seed)
    planes = {
        (layer, "latent"): rng.standard_normal((PAGES * page, 1, WIDTH)).astype(np.float32)
        for layer in range(LAYERS)
    }
    geometry = mla_geometry(
        addresses=tuple(int(plane.ctypes.data) for plane in planes.values()),
        slots=PAGES * page,
        latent_dim=WIDTH,
        dtype="float32",
        block_tokens=page,
        page_tokens=page,
    )
    memory = [
        MemoryRange(int(plane.ctypes.data), plane.nbytes, MemoryKind.HOST, keep=plane)
        for plane in planes.values()
    ]
    return PoolSpec.of_geometry(HBM_POOL, geometry, memory, lease_budget=PAGES), planes, geometry


def transfer_thread(
    name: str,
    pools: Sequence[PoolSpec],
    *,
    rank: int = 0,
    keys: CurveKeys | None = None,
    transports: tuple[TransportName, ...] = (),
    staging: Staging | None = None,
    coalescing: bool = True,
) -> TransferThread:
    """A rank's endpoint, as a server of this name has it."""
    config = EndpointConfig(
        name,
        "model",
        rank=rank,
        keys=keys,
        transports=transports,
        coalescing=coalescing,
        lease_ttl=LEASE_SECONDS,
        heartbeat=HEARTBEAT_SECONDS,
        dead_after=VERDICT_SECONDS,
    )
    return TransferThread(config, pools, staging=staging, messages=MESSAGES)


@dataclass
class Rig:
    """A prefill and a decode server of one or more ranks each."""

    prefill: list[Side]
    decode: list[Side]
    address: str
    page: int

    def wait(self, condition: object, what: str, seconds: float = 20) -> None:
        wait_until(condition, seconds=seconds, what=what)  # type: ignore[arg-type]

    def check(self) -> None:
        for side in (*self.prefill, *self.decode):
            side.agent.endpoint.check()
            side.agent.sender.check()
            staging = side.agent.transfers.staging
            assert staging is None or staging.used == 0, "staging that was not given back"


@contextmanager
def rig(
    prefill: int = 1,
    decode: int = 1,
    page: int = 4,
    mode: str = "pull",
    keys: CurveKeys | None = None,
    decode_keys: CurveKeys | None = None,
    transports: tuple[TransportName, ...] = (),
    staging: tuple[int, int] | None = None,
    coalescing: bool = True,
    latent: bool = False,
    stages: Sequence[range] = (),
    replicas: bool = False,
) -> Iterator[Rig]:
    """Servers with so many ranks, each over a pool of its own. decode_keys: where they are not `keys`.
    latent: every rank has the model's whole KV. stages: the layers of each rank of prefill, which has all
    heads of these then. replicas: prefill's ranks are replicas of one rank.
    staging: with the layout `aggregated`, the pages that prefill's and decode's ranks have for it.
    """
    with ExitStack() as stack:
        bootstrap = BootstrapService("127.0.0.1", 0, keys)
        stack.callback(bootstrap.close)

        def side(name: str, rank: int, ranks: int, address: str) -> Side:
            seed = 10 * len(name)
            replica = rank if replicas and name == "prefill" else 0
            if replicas and name == "prefill":
                rank, ranks = 0, 1
                spec, planes, geometry = pool_and_geometry(0, 1, page, seed + replica)
            elif stages and name == "prefill":
                spec, planes, geometry = pool_and_geometry(0, 1, page, seed + rank, stages[rank])
            elif latent:
                spec, planes, geometry = latent_pool(page, seed)
            else:
                spec, planes, geometry = pool_and_geometry(rank, ranks, page, seed + rank)
            rows = Rows()
            layout = "blocks" if staging is None else "aggregated"
            config = AgentConfig(
                Local(rank, ranks, page, METADATA, mode, layout),
                "weights",
                bootstrap=address,
                replica=replica,
            )
            handover: Staging | None = None
            if staging is not None:
                blocks = staging[0 if name == "prefill" else 1]
                handover = Staging(geometry, blocks * geometry.layout.block_bytes)
            transfers = transfer_thread(
                name,
                [spec],
                rank=rank,
                keys=keys if name == "prefill" else decode_keys or keys,
                transports=transports,
                staging=handover,
                coalescing=coalescing,
            )
            stack.callback(transfers.close)
            agent = Agent(config, transfers, rows)
            stack.callback(agent.close)
            return Side(agent, planes, rows, rank * HEADS // ranks)

        servers = Rig(
            [side("prefill", rank, prefill, bootstrap.address) for rank in range(prefill)],
            [side("decode", rank, decode, "") for rank in range(decode)],
            bootstrap.address,
            page,
        )
        # pytest keeps the yielded value; the agents' memory has to go with the rig.
        stack.callback(servers.prefill.clear)
        stack.callback(servers.decode.clear)
        yield servers


@contextmanager
def pair(
    prefill: Sequence[PoolSpec],
    decode: Sequence[PoolSpec],
    page: int,
    mode: str = "pull",
    components: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
) -> Iterator[tuple[Agent, Agent, str]]:
    """A prefill and a decode server of a rank each over pools of the caller's, and prefill's address.

    Args:
        components: of prefill and decode, see `Local`.
    """
    with ExitStack() as stack:
        bootstrap = BootstrapService("127.0.0.1", 0, None)
        stack.callback(bootstrap.close)
        agents = []
        sides = zip(
            ("prefill", "decode"), (prefill, decode), (bootstrap.address, ""), components, strict=True
        )
        for name, pools, address, described in sides:
            transfers = transfer_thread(name, pools)
            stack.callback(transfers.close)
            local = Local(0, 1, page, METADATA, mode, components=described)
            config = AgentConfig(local, "weights", bootstrap=address)
            agents.append(Agent(config, transfers, Rows()))
            stack.callback(agents[-1].close)
        yield agents[0], agents[1], bootstrap.address
        for agent in agents:
            agent.endpoint.check()
            agent.sender.check()
        agents.clear()


def hand_over(
    prefill: Agent,
    decode: Agent,
    address: str,
    pages: Sequence[int],
    wanted: Wanted,
    beside: tuple[PoolRows, ...] = (),
    number: int = 7,
) -> None:
    """A request from prefill's pages into the wanted ones, up to its end. Pushing, prefill leaves out what
    decode has."""
    taken = decode.receiver.open(address, number)
    given = prefill.sender.open(number)
    if not taken.read:
        wait_until(lambda: taken.state is ReceiverState.WAITING, seconds=20, what="a place")
        decode.receiver.read(taken, wanted)
        wait_until(lambda: given.granted() is not None, seconds=20, what="pages")
        pages = pages[wanted.skip :]
    prefill.sender.complete(given, np.array(pages), bytes(METADATA), beside=beside)
    if taken.read:
        wait_until(lambda: taken.state is ReceiverState.READY, seconds=20, what="an offer")
        decode.receiver.read(taken, wanted)
    wait_until(lambda: taken.over, seconds=20, what="the KV")
    assert taken.state is ReceiverState.HELD, taken.reason
    wait_until(lambda: given.state is SenderState.RELEASED, seconds=20, what="the release")
    prefill.sender.forget(given)

"""KV between simulated instances in virtual time: reads, as by `engine.peers`, hand-overs, and returns.

The holder publishes an export under its name; the reader asks for it, and the bytes cross the holder's
outgoing link and the reader's incoming one, which other reads share (`links`).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.moves.move import Move, MovePlanner
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import FromPeer
from sglang_ext.engine.pd.returns import reserving
from sglang_ext.mempool.ledger import Committed
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.simulator.links import Flow, Network, SharedLink

J = TypeVar("J")


@dataclass(eq=False)
class Read:
    """A read from one peer: the fields of ``fetch_link.Job`` that `Fetches` uses."""

    address: str
    export: str
    layers_in: int = 0
    offered: int | None = None
    read: int | None = None
    why: str = ""
    connecting_s: float = 0.0
    flow: Flow | None = None
    asked_at: float = 0.0

    def decided(self, layer: int) -> bool:
        return self.read is not None


@dataclass(eq=False)
class _Export:
    blocks: int
    lease: int
    asked: list[Callable[[int, str], None]]


class Wires:
    """The network between all instances.

    Args:
        network: carries the bytes.
        bytes_per_s: of an instance, in each direction.
        latency_s: of a message.
    """

    def __init__(self, network: Network, bytes_per_s: float, latency_s: float) -> None:
        self.network, self._bytes_per_s, self.latency_s = network, bytes_per_s, latency_s
        self.ends: dict[str, PeerWires] = {}
        self.homes: dict[str, Callable[[Return], None]] = {}
        """By prefill instance, a function that takes back KV."""
        self.took: dict[str, float] = {}
        """Observed seconds of reads, by export; infinite for a failed one."""
        self._links: dict[tuple[str, str], SharedLink] = {}

    def link(self, name: str, way: str) -> SharedLink:
        """An instance's outgoing (``out``) or incoming (``in``) link."""
        key = (name, way)
        if key not in self._links:
            self._links[key] = SharedLink(f"{name} {way}", self._bytes_per_s)
        return self._links[key]

    @property
    def links(self) -> list[SharedLink]:
        return list(self._links.values())


class PeerWires:
    """One instance's end of the wires: `fetch_link.FetchLink` and `arena_leases.ArenaLeases` in one.

    Args:
        name: of the instance, which is its address too.
        wake: called when something has come.
    """

    def __init__(self, wires: Wires, name: str, block_bytes: int, wake: Callable[[], None]) -> None:
        self._wires, self._name, self._block_bytes, self._wake = wires, name, block_bytes, wake
        self._exports: dict[str, _Export] = {}
        self._waiting: dict[str, list[Callable[[int, str], None]]] = {}
        """Readers of exports that are not published yet."""
        self._leases: dict[int, str] = {}
        self._next = 0
        self.transport_bytes: dict[str, int] = {"simulated": 0}
        wires.ends[name] = self

    # -- as the owner of exports --------------------------------------------------------------------

    def publish(self, export: str, ids: BlockIds, seconds: float) -> int:
        """See ``ExportLink``."""
        self._next += 1
        lease = self._next
        self._leases[lease] = export
        self._exports[export] = _Export(len(ids), lease, [])
        self._later(seconds, lambda: self._expired(lease))
        for answer in self._waiting.pop(export, ()):
            answer(len(ids), "")
        return lease

    def expect(self, export: str, seconds: float) -> None:
        """Readers go on waiting."""

    def give_up(self, export: str, seconds: float) -> None:
        for answer in self._waiting.pop(export, ()):
            answer(0, "refused")

    def withdraw(self, lease: int) -> None:
        export = self._leases.pop(lease, None)
        if export is not None:
            self._exports.pop(export, None)

    def _expired(self, lease: int) -> None:
        if lease in self._leases:
            self.withdraw(lease)
            self._wake()

    def over(self, lease: int) -> bool:
        return lease not in self._leases

    def forget(self, lease: int) -> None:
        self.withdraw(lease)

    def close(self) -> None:
        self._leases.clear()
        self._exports.clear()
        for export in list(self._waiting):
            self.give_up(export, 0.0)
        if self._wires.ends.get(self._name) is self:
            del self._wires.ends[self._name]

    def peer_dead(self, instance: str, epoch: bytes) -> None:
        """Reads from a dead peer fail when they are asked for."""

    def completed(self, export: str) -> None:
        """A reader has all that it wants."""
        found = self._exports.get(export)
        if found is not None:
            self.withdraw(found.lease)
            self._wake()

    # -- as a reader --------------------------------------------------------------------------------

    def has_time(self, export: str) -> bool:
        """Whether a recording has the time that reading this export took."""
        return export in self._wires.took

    def ask(self, address: str, export: str, seconds: float, *, layered: bool = False) -> Read:
        """See ``Reads``."""
        read = Read(address, export, asked_at=self._wires.network.now())

        def answered(blocks: int, why: str) -> None:
            if read.offered is None and read.read is None:
                read.offered, read.why = blocks, why
                self._wake()

        def arrived() -> None:
            there = self._wires.ends.get(address)
            if there is None:
                answered(0, "gone")
            elif (found := there._exports.get(export)) is not None:
                self._later(self._wires.latency_s, lambda: answered(found.blocks, ""))
            else:
                there._waiting.setdefault(export, []).append(answered)

        self._later(self._wires.latency_s, arrived)
        self._later(seconds, lambda: answered(0, "late"))
        return read

    def read(self, job: Read, start: int, ids: BlockIds) -> None:
        nbytes = len(ids) * self._block_bytes

        def done() -> None:
            job.flow = None
            there = self._wires.ends.get(job.address)
            if there is None:
                job.read, job.why = 0, "gone"
            else:
                there.completed(job.export)
                job.read = job.layers_in = len(ids)
                self.transport_bytes["simulated"] += nbytes
            self._wake()

        took = self._wires.took.pop(job.export, None)
        links = (self._wires.link(job.address, "out"), self._wires.link(self._name, "in"))
        if took is None:
            job.flow = self._wires.network.start(nbytes, links, done)
        elif took < math.inf:
            for link in links:
                link.moved += nbytes
            left_s = job.asked_at + took - self._wires.network.now()
            self._later(max(0.0, left_s), lambda: None if job.read is not None else done())

    def wait(self, job: Read) -> bool:
        return job.read is not None and not job.why

    def drop(self, job: Read) -> None:
        there = self._wires.ends.get(job.address)
        if there is not None:
            there.completed(job.export)

    def cancel(self, job: Read) -> None:
        if job.flow is not None:
            self._wires.network.stop(job.flow)
            job.flow = None
        if job.read is None:
            job.read, job.why = 0, job.why or "cancelled"

    def decline(self, address: str, export: str, *, layered: bool = False) -> None:
        there = self._wires.ends.get(address)
        if there is not None:
            there.completed(export)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._wires.network.later(seconds, what)


class Arrivals(Generic[J]):
    """Requests of a decode instance whose KV is at prefill instances. A request takes its slots first; then
    its KV comes, without what decode has itself.

    Args:
        name: of the decode instance.
        wires: between all instances.
        wake: called when a request has come.
    """

    def __init__(self, name: str, wires: Wires, wake: Callable[[], None]) -> None:
        self._name, self._wires, self._wake = name, wires, wake
        self.waiting: deque[tuple[J, str]] = deque()
        """Without slots, each with its prefill instance."""
        self.coming: dict[J, Flow] = {}

    def add(self, job: J, source: str) -> None:
        """A prompt was computed at an instance."""
        self.waiting.append((job, source))
        self._wake()

    def begin(self, admit: Callable[[J], float | None], done: Callable[[J], None]) -> None:
        """Let KV come for the requests that there is room for, in their order.

        Args:
            admit: gives a request its slots, and returns the bytes that it lacks; None without room.
            done: called when they are here.
        """
        while self.waiting:
            job, source = self.waiting[0]
            nbytes = admit(job)
            if nbytes is None:
                return
            self.waiting.popleft()
            links = (self._wires.link(source, "out"), self._wires.link(self._name, "in"))
            self.coming[job] = self._wires.network.start(
                nbytes, links, functools.partial(self._over, job, done)
            )

    def _over(self, job: J, done: Callable[[J], None]) -> None:
        del self.coming[job]
        done(job)

    def drop(self, job: J) -> bool:
        """A request is not waited for any more. Returns whether it has slots."""
        flow = self.coming.pop(job, None)
        if flow is not None:
            self._wires.network.stop(flow)
            return True
        self.waiting = deque(each for each in self.waiting if each[0] is not job)
        return False

    def jobs(self) -> Iterator[J]:
        """All that have not come."""
        yield from (job for job, _ in self.waiting)
        yield from self.coming

    def close(self) -> None:
        """The instance ends."""
        for flow in self.coming.values():
            self._wires.network.stop(flow)
        self.coming.clear()
        self.waiting.clear()


@dataclass(eq=False)
class Return:
    """KV of a request that has ended at decode, for the prefill instance that has computed its prompt.

    namespace, key: its tokens with KV, whole blocks. decode: the instance. lives: whether it does.
    over: called when decode need not keep the KV any more.
    """

    namespace: Hashable
    key: bytes
    decode: str
    lives: Callable[[], bool]
    over: Callable[[], None]


@dataclass(eq=False, kw_only=True)
class _ReturnMove(Move):
    back: Return


class Returns(MovePlanner):
    """The returns that a prefill instance takes (``return_receiver.ReturnReceiver``).

    Args:
        name: of the instance.
        store, moves: its own.
        block_bytes: of a block.
        wires: between all instances.
        wake: called when KV has come.
    """

    def __init__(
        self, name: str, store: Store, moves: Moves, block_bytes: int, wires: Wires, wake: Callable[[], None]
    ) -> None:
        self._name, self._store, self._moves, self._wires = name, store, moves, wires
        self._block_bytes, self._wake = block_bytes, wake
        self.blocks = 0
        """That were taken."""

    def take(self, back: Return, *, busy: bool) -> None:
        """Reserve memory for the KV, and read it. Between two passes.

        Args:
            busy: requests wait for memory.
        """
        found = reserving.reserve(self._store, back.namespace, back.key, busy=busy, into_dram=True)
        if isinstance(found, Refusal):
            self._wires.network.later(self._wires.latency_s, back.over)
            return
        read = Read(back.decode, "")

        def done() -> None:
            read.flow = None
            read.read = read.layers_in = found.blocks if back.lives() else 0
            read.why = "" if read.read else "gone"
            self._wake()

        def cancel() -> None:
            if read.flow is not None:
                self._wires.network.stop(read.flow)
                read.flow, read.read, read.why = None, 0, "cancelled"

        links = (self._wires.link(back.decode, "out"), self._wires.link(self._name, "in"))
        read.flow = self._wires.network.start(found.blocks * self._block_bytes, links, done)
        source = FromPeer(read, found.blocks, lambda: not read.why, cancel)
        self._moves.fill(_ReturnMove(planner=self, whole=True, back=back), found, source)

    def ended(self, move: _ReturnMove, blocks: int, done: Committed | None) -> None:
        self.blocks += 0 if done is None else done.fresh
        self._wires.network.later(self._wires.latency_s, move.back.over)

    def close(self) -> None:
        """The process ends: decode need not keep any KV for it."""
        for move in self._moves.of(self):
            assert isinstance(move, _ReturnMove)
            assert move.source is not None
            move.source.cancel()
            self._wires.network.later(self._wires.latency_s, move.back.over)

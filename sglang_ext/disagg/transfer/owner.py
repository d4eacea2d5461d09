"""The owner's side of the control plane: sessions of readers, their leases and grants.

A session lives from CONNECT until BYE, or until its reader has been silent for `dead_after`. Whatever it
held ends with it: leases at once; grants once the writer is fenced.

A grant that is over frees nothing before that. From that moment on no write under it begins
(`Served.revoke_slot`);
its writer is asked to say that none is under way, and if it does not in `dead_after`, its transport makes
sure without it (`Served.fence`: `tcp` cuts the connections, `verbs` destroys the queue pairs, `shm` and `cma`
look whether the writer's process stands still or has ended, `cuda_ipc` whether it has ended). Until one of
them has done it, the blocks stay set aside; a writer that keeps more than a part of a pool so gets no new
grants.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Mapping

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import PeerProtocolError, RefusedError, TransferError
from sglang_ext.disagg.messages import (
    VERSION,
    Bye,
    Complete,
    Completed,
    Connect,
    Connected,
    Identity,
    Offer,
    Ping,
    Pong,
    Refused,
    Renew,
    Reply,
    Request,
    Reserve,
    Reserved,
    Revoke,
    Revoked,
    Want,
    Written,
)
from sglang_ext.disagg.processes import has_ended, process_born
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.tensors import dtypes, pool_strided
from sglang_ext.disagg.transfer.leases import Ended, Grant, GrantTable
from sglang_ext.disagg.transfer.pools import OwnedPool
from sglang_ext.disagg.transfer.sessions import Receiver, Session
from sglang_ext.disagg.transports import MAX_GRANTS, Transport, TransportName
from sglang_ext.disagg.transports.select import NO_TRANSPORT, by_side, way_out
from sglang_ext.wire import unpack_ids

log = logging.getLogger(__name__)

SET_ASIDE = 4
"""A writer that keeps one part in so many of a pool from being freed is granted nothing more there."""


class Owner:
    """Answers the readers of one endpoint.

    notify: sends an unasked message to a peer. on_ended: called for every lease that ended, with the freed
        blocks.
    """

    def __init__(
        self,
        who: Callable[[], Identity],
        pools: Mapping[str, OwnedPool],
        transports: Mapping[TransportName, Transport],
        clock: Clock,
        *,
        dead_after: float,
        patience: Callable[[Identity], float],
        grant_ttl: float,
        notify: Callable[[bytes, Reply], None],
        on_ended: Callable[[str, Ended], None],
    ) -> None:
        self._who = who
        self._pools = pools
        self._transports = transports
        self._clock = clock
        self._stood_still = dead_after / 2
        self._patience = patience
        self._grant_ttl = grant_ttl
        self._notify = notify
        self._on_ended = on_ended
        self._sessions: dict[bytes, Session] = {}
        self._grants = GrantTable()
        self._writers: dict[int, Session] = {}
        self._over_since: dict[int, float] = {}
        """When grants were found to be over whose writers have yet to be fenced."""
        self._last_tick = clock.monotonic()
        self._receiver: Receiver | None = None

    def __repr__(self) -> str:
        return f"<Owner sessions={len(self._sessions)} {self._grants!r}>"

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Connected readers."""
        return tuple(self._sessions.values())

    def connected(self, session: bytes) -> bool:
        """Whether a reader's session lives."""
        return session in self._sessions

    @property
    def grants(self) -> int:
        """Grants that are live or quarantined."""
        return len(self._grants)

    @property
    def set_aside(self) -> int:
        """Blocks of grants that are over, and that may still be written for all we know."""
        return len({(grant.pool, int(b)) for grant in self._grants.quarantined() for b in grant.blocks})

    def let_write(self, receiver: Receiver | None) -> None:
        """From now on, grant the blocks that `receiver` has set aside; None refuses every writer."""
        self._receiver = receiver

    async def revoke(self, request: str) -> None:
        """End all grants of a request. The receiver's `discard` is called when nothing writes under them."""
        revoked = [known for known in self._grants.all() if known.request == request]
        for grant in revoked:
            self._grants.quarantine(grant.number)
        for grant in revoked:
            await self._fence(grant)

    async def handle(self, identity: bytes, message: Request) -> Reply:
        """Answer one request. Raises RefusedError, or another TransferError, for a refusal."""
        if isinstance(message, Connect):
            return await self._connect(identity, message)
        if isinstance(message, Revoked):
            return Completed(await self._revoked(message))
        if isinstance(message, Bye):
            return Completed(await self._left(message.session))
        session = self._sessions.get(message.session)
        if session is None:
            raise RefusedError("session", "this session is over; connect again")
        session.last_seen = self._clock.monotonic()
        session.identity = identity
        match message:
            case Ping():
                self._settle(session, message.transport)
                return Pong(self._who().epoch)
            case Want():
                return self._want(session, message)
            case Complete():
                return Completed(self._complete(session, message.lease))
            case Renew():
                epoch, ttl = session.reader.epoch, message.ttl_ms / 1000
                return Completed(any(p.renew(message.lease, epoch, ttl) for p in self._pools.values()))
            case Reserve():
                return await self._reserve(session, message)
            case Written():
                return await self._written(session, message)
        raise PeerProtocolError(f"{type(message).__name__} is not handled here")

    async def tick(self) -> None:
        """End overdue entries: silent readers, leases, grants. Called a few times a second."""
        now = self._clock.monotonic()
        if now - self._last_tick > self._stood_still:
            # It was this process that stood still: the readers' pings wait in our socket, they are not
            # silent.
            for session in self._sessions.values():
                session.last_seen = now
        self._last_tick = now
        silent = [s for s in self._sessions.values() if now - s.last_seen > self._patience(s.reader)]
        for session in silent:
            log.warning("reader %s is silent: its leases end", session.reader.instance)
            await self.end(session)
        for pool in self._pools.values():
            self._ended(pool, pool.expire())
        self._grants.overdue(now)
        for grant in self._grants.quarantined():
            await self._fence(grant)

    def doubt(self, instance: Callable[[str], bool], seconds: float) -> None:
        """Readers of instances that may be dead have so long to send a message."""
        now = self._clock.monotonic()
        for session in self._sessions.values():
            if instance(session.reader.instance):
                latest = now - self._patience(session.reader) + seconds
                session.last_seen = min(session.last_seen, latest)

    async def end(self, session: Session) -> None:
        """A reader is gone, or says that it goes: end all that it held."""
        self._sessions.pop(session.number, None)
        session.grants[:] = 0
        for served in session.served.values():
            await asyncio.to_thread(served.close)
        if any(s.reader.epoch == session.reader.epoch for s in self._sessions.values()):
            return
        for pool in self._pools.values():
            self._ended(pool, pool.expire([session.reader.epoch]))
        for grant in self._grants.overdue(self._clock.monotonic(), [session.reader.epoch]):
            await self._fence(grant)

    async def close(self) -> None:
        """Notify the readers, and end all sessions."""
        for session in list(self._sessions.values()):
            self._notify(session.identity, Refused("session", "the owner closes"))
            await self.end(session)

    def check(self) -> None:
        """Verify pools, grants, and that every granted block is held in its pool."""
        self._grants.check()
        for pool in self._pools.values():
            pool.check()

    async def _connect(self, identity: bytes, message: Connect) -> Connected:
        mine, reader = self._who(), message.who
        if reader.version != VERSION:
            raise RefusedError("version", f"protocol {reader.version}, here {VERSION}; run one release")
        if reader.namespace != mine.namespace:
            raise RefusedError(
                "namespace",
                f"{reader.namespace!r} there, {mine.namespace!r} here: other model, weights or tenant",
            )
        self._same_dtype(reader)
        number = secrets.token_bytes(16)
        session = Session(
            number,
            reader,
            identity,
            {},
            self._clock.monotonic(),
            process_born(reader.pid) if reader.host == mine.host else 0,
        )
        answers: dict[str, bytes] = {}
        reasons: dict[str, str] = {}
        for name, offer in message.transports.items():
            transport = self._transports.get(TransportName(name)) if name in set(TransportName) else None
            if transport is None:
                reasons[name] = "the owner does not use it"
                continue
            try:
                answers[name], session.served[name] = await asyncio.to_thread(
                    transport.accept, number, offer, session.grants
                )
            except TransferError as error:
                reasons[name] = str(error)
        if not answers:
            against = by_side(mine.instance, reasons) or "; none offered"
            advice = way_out([*mine.regions, *reader.regions])
            raise RefusedError(
                NO_TRANSPORT,
                f"no transport carries KV from {mine.instance} to {reader.instance}{against}"
                f"{'' if advice is None else f'. {advice}'}",
            )
        self._sessions[number] = session
        return Connected(mine, number, answers, reasons)

    def _same_dtype(self, reader: Identity) -> None:
        for theirs in reader.pools:
            pool = self._pools.get(theirs.name)
            if pool is None:
                continue
            try:
                a, b = dtypes(pool_strided(theirs)), dtypes(pool_strided(pool.meta))
            except ValueError as error:
                raise RefusedError("geometry", f"pool {theirs.name}: {error}") from None
            if a != b:
                raise RefusedError("dtype", f"KV there is {a}, here {b}; set --kv-cache-dtype alike")

    def _settle(self, session: Session, transport: str) -> None:
        if transport in session.served and not session.transport:
            session.transport = transport
            for name in [n for n in session.served if n != transport]:
                session.served.pop(name).close()

    def _want(self, session: Session, message: Want) -> Offer:
        pool = self._pool(message.pool)
        mine = self._who()
        offer = pool.offer(message.request, session.reader.epoch, mine.instance, mine.rank, mine.epoch)
        if offer is None:
            again_s = pool.coming(message.request)
            if again_s == math.inf:
                raise RefusedError("given_up", f"nothing will be published for {message.request!r}")
            raise RefusedError(
                "request", f"nothing is published for {message.request!r}; it may have expired", again_s
            )
        return offer

    def _complete(self, session: Session, lease: int) -> bool:
        for pool in self._pools.values():
            ended = pool.complete(lease, session.reader.epoch)
            if ended is not None:
                self._ended(pool, (ended,))
                return True
        return False

    def _pool(self, name: str) -> OwnedPool:
        pool = self._pools.get(name)
        if pool is None:
            raise RefusedError("pool", f"no pool {name!r} here; there are {', '.join(self._pools)}")
        return pool

    def _ended(self, pool: OwnedPool, ended: tuple[Ended, ...]) -> None:
        for end in ended:
            self._on_ended(pool.name, end)

    async def _reserve(self, session: Session, message: Reserve) -> Reserved:
        """MemServe's step 1: the receiver allocates, and grants the blocks that it has set aside for the
        request."""
        receiver = self._receiving()
        pool = self._pool(message.pool)
        blocks = unpack_ids(message.blocks, pool.blocks)
        if not blocks.size:
            raise RefusedError("blocks", "none are named")
        kept = sum(
            grant.blocks.size
            for grant in self._grants.quarantined()
            if grant.pool == pool.name and grant.writer == session.reader.epoch
        )
        if kept * SET_ASIDE > pool.blocks:
            raise RefusedError(
                "set_aside", f"{kept} blocks wait for this writer to say that it writes there no more"
            )
        found = await receiver.claim(pool.name, blocks, message.request)
        seconds = self._grant_ttl if found is None else found
        try:
            return self._grant(session, message, pool, blocks, seconds)
        except BaseException:
            # The blocks have no owner yet: the receiver that set them aside gets them back.
            await receiver.discard(pool.name, blocks, message.request)
            raise

    def _grant(
        self, session: Session, message: Reserve, pool: OwnedPool, blocks: Ids, seconds: float
    ) -> Reserved:
        if self._sessions.get(session.number) is not session:
            raise RefusedError("session", "this session has ended; connect again")
        used = set(session.slots.values())
        slot = next((i for i in range(1, MAX_GRANTS) if i not in used), 0)
        if slot == 0:
            raise RefusedError("grants", f"the session already holds {MAX_GRANTS - 1} grants")
        held = bool(self._grants.sharing(message.request, pool.name, blocks))
        if not held:
            pool.hold(blocks)
        deadline = self._clock.monotonic() + seconds
        try:
            grant = self._grants.grant(message.request, pool.name, blocks, deadline, session.reader.epoch)
        except BaseException:
            if not held:
                pool.release(blocks)
            raise
        session.slots[grant.number] = slot
        session.grants[slot] = grant.number
        self._writers[grant.number] = session
        for served in session.served.values():
            served.admit(slot)
        ttl_ms = 0 if math.isinf(seconds) else int(seconds * 1000)
        return Reserved(grant.number, slot, ttl_ms)

    async def _written(self, session: Session, message: Written) -> Completed:
        """MemServe's step 3: everything is here, and the receiver may insert it."""
        receiver = self._receiving()
        grant = self._grants.written(message.grant, session.reader.epoch)
        if grant is None:
            raise RefusedError("grant", "the grant is over; what was written is lost")
        for served in session.served.values():
            served.landed()
        self._forget(grant)
        await receiver.filled(grant.pool, grant.blocks, grant.request)
        return Completed(True)

    def _receiving(self) -> Receiver:
        if self._receiver is None:
            raise RefusedError("receiver", "this endpoint accepts no transfers")
        return self._receiver

    async def _revoked(self, message: Revoked) -> bool:
        """A writer says that it writes no more, be its session over or not."""
        writer = self._writers.get(message.grant)
        if writer is None or writer.number != message.session:
            return False
        self._grants.quarantine(message.grant)
        return await self._free(message.grant)

    async def _left(self, number: bytes) -> bool:
        """A peer says that it goes, and writes no more; be its session over or not, its grants are."""
        session = self._sessions.get(number)
        if session is not None:
            await self.end(session)
        for grant in [known for known, writer in self._writers.items() if writer.number == number]:
            self._grants.quarantine(grant)
            await self._free(grant)
        return session is not None

    async def _fence(self, grant: Grant) -> None:
        """Free a quarantined grant as soon as its writer cannot write any more."""
        writer = self._writers.get(grant.number)
        if writer is None:
            return  # it has ended while others were fenced
        slot = writer.slots[grant.number]
        serving = (
            [writer.served[writer.transport]]
            if writer.transport in writer.served
            else list(writer.served.values())
        )
        writer.grants[slot] = 0
        for served in serving:
            served.revoke_slot(slot)
        now = self._clock.monotonic()
        since = self._over_since.setdefault(grant.number, now)
        gone = self._sessions.get(writer.number) is not writer
        if not gone and now - since < self._patience(writer.reader):
            # Asked first: to fence it may cost other requests of the same writer their connection.
            self._notify(writer.identity, Revoke(grant.number))
            return
        fenced = [await asyncio.to_thread(served.fence) for served in serving]
        if all(fenced) or not self._may_live(writer):
            await self._free(grant.number)
        else:
            self._notify(writer.identity, Revoke(grant.number))

    async def _free(self, number: int) -> bool:
        grant = self._grants.fenced(number)
        if grant is None:
            return False
        self._forget(grant)
        if self._receiver is not None:
            await self._receiver.discard(grant.pool, grant.blocks, grant.request)
        return True

    def _forget(self, grant: Grant) -> None:
        """A grant has ended; no peer may write its blocks once the grants of all other writers have ended."""
        if not self._grants.sharing(grant.request, grant.pool, grant.blocks):
            self._pool(grant.pool).release(grant.blocks)
        writer = self._writers.pop(grant.number)
        self._over_since.pop(grant.number, None)
        slot = writer.slots.pop(grant.number)
        writer.grants[slot] = 0
        for served in writer.served.values():
            served.revoke_slot(slot)

    def _may_live(self, session: Session) -> bool:
        """Whether the reader's process may still touch our memory; only asked for transports on this host."""
        if session.reader.host != self._who().host:
            return True
        return not has_ended(session.reader.pid, session.born)

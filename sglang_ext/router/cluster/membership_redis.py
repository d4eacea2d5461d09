"""Membership shared by several routers through Redis 7. There is no leader; any router, and Redis itself, can
die.

A changed record is written to its key and announced in a stream, so that other routers see it at once. The
stream is a short cut: every ``SYNC_S`` records are looked at again, so that nothing that was lost on the way
stays lost. Documents may be large: only changed ones are read, one after the other. ``redis_records`` has the
format of records.

Placement events are not: every router is connected to every agent itself, gets its snapshot when it begins,
and then the events in their order. A second way for them would be slower and could only disagree; a starting
router lacks only the list of members, and Redis provides it.

When Redis is lost, the router goes on with its own copy; when it is back, even empty, every router writes its
records to it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.errors import ConfigError, InternalError, PeerError
from sglang_ext.protocol.cluster import StoreView
from sglang_ext.router.api.documents import Document, decode_document
from sglang_ext.router.cluster.broadcast import Begun, RouterMessage, decode_message, encode_message
from sglang_ext.router.cluster.membership import MAX_SESSION_CHARACTERS, Listener, RouterStatus, Sightings
from sglang_ext.router.cluster.redis_records import (
    MAX_RECORD_BYTES,
    SESSIONS_AT_ONCE,
    Fields,
    Places,
    RedisRecords,
)
from sglang_ext.router.cluster.roster import Intent, Member, decode_member
from sglang_ext.router.tenancy.bounded import Bounded, size_of
from sglang_ext.tasks import Rounds

logger = logging.getLogger("router.membership")
T = TypeVar("T")

SYNC_S = 10.0
"""Between two full readings. Each also renews the expiry of records whose instances this router finds
alive.
"""
BLOCK_S = 1.0
TIMEOUT_S = 2.5
"""For each answer of Redis, blocking reads included; after it, Redis is taken for lost."""
CONNECT_TIMEOUT_S = 2.0
RETRY_S = (0.25, 0.5, 1.0, 2.0)
"""Pauses before connecting again; the last one from then on."""
FIRST_SESSIONS = 5_000
MAX_PENDING_SESSIONS = 10_000
MAX_PENDING_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 1 << 16
"""A longer message is not sent: Redis keeps the last thousand of them."""
MAX_PENDING_BYTES = 16 << 20
"""Of messages that are to be written down; the oldest are dropped."""
MAX_LEFT_OUT_BYTES = 4 << 20


class RedisMembership:
    """Membership in one Redis.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as redis-py takes it.
        router: this router's name.
        name: of the cluster; several can be in one Redis.
        password: of that Redis, where it is not in the URL.
        key: of the cluster; seals each record; records without a valid seal are left out.
        clock: seconds.

    Raises:
        ConfigError: redis-py is missing.
    """

    shares = True

    def __init__(
        self,
        url: str,
        router: str,
        clock: Clock,
        *,
        name: str = "default",
        password: str | None = None,
        key: ClusterKey | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        self._library = _library()
        self._url = url
        self._password = password
        self._key = key
        self._router = router
        self._name = name
        self._clock = clock
        self._rounds = rounds or Rounds(clock)
        self._attempt = 0
        """To reach Redis, since it was lost."""
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._settled = asyncio.Event()
        self._wake = asyncio.Event()
        self._members: dict[str, Member] = {}
        self._documents: dict[tuple[str, str], Document] = {}
        self._status: RouterStatus | None = None
        self._sessions: deque[tuple[str, str]] = deque(maxlen=MAX_PENDING_SESSIONS)
        self._pending: Bounded[int, bytes] = Bounded(
            MAX_PENDING_BYTES, lambda _, body: len(body), max_entries=MAX_PENDING_MESSAGES
        )
        self._message_numbers = itertools.count()
        self._left_out: Bounded[bytes, bytes] = Bounded(MAX_LEFT_OUT_BYTES, size_of)
        """Names of documents in Redis that cannot be used, and by which mark: they are not read again."""
        self.tables: Mapping[str, Bounded[Any, Any]] = {
            "pending-words": self._pending,
            "refused-records": self._left_out,
        }
        self._connected = False
        self._redis_ahead_s = 0.0
        """Of our monotonic clock: documents expire by Redis's time, as no two routers' clocks agree."""
        self._since = clock.monotonic()
        self._error = "not reached yet"
        self.others: Mapping[str, RouterStatus] = {}
        self.losses = 0
        """How often Redis was lost since the start."""
        self.refused = 0
        """Records in Redis that were malformed or too large."""
        self.unsent = 0
        self._sightings = Sightings(self._clock)
        """By instance: the stamp of its record, and when that was first seen here; ``monotonic``."""

    def __repr__(self) -> str:
        state = "connected" if self._connected else f"lost: {self._error}"
        return f"RedisMembership({address_of(self._url)}, {state}, {len(self.others)} other routers)"

    # -- the contract ---------------------------------------------------------------------------------------

    async def start(self, listener: Listener) -> None:
        """Connect; without Redis, begin alone.

        Raises:
            ConfigError: Redis refuses us.
        """
        self._listener, self._ending = listener, False
        self._settled.clear()
        self._attempt = 0
        self._task = self._rounds.start(
            "membership", functools.partial(self._round, listener), on_end=lambda task: None
        )
        settled = asyncio.create_task(self._settled.wait())
        try:
            await asyncio.wait({self._task, settled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        if self._task.done():
            await self._task
        self._task.add_done_callback(self._died)

    def _died(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._ending:
            self._rounds.on_end(task.exception() or InternalError("sharing the membership ended by itself"))

    async def stop(self) -> None:
        """End, and delete this router's status from Redis if Redis is there."""
        if self._task is not None:
            self._ending = True
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._connected:
            self._connected, self.others = False, {}
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S), self._records() as records:
                    await records.say_goodbye(self._router)
            except (self._library.RedisError, OSError, TimeoutError) as error:
                logger.info("cannot say goodbye to Redis: %s", error)

    def publish(self, member: Member) -> None:
        """Write it down soon."""
        self._sightings.seen(member)
        if self._connected:
            self._members[member.instance] = member
            self._wake.set()

    def share_status(self, status: RouterStatus) -> None:
        """Write it down soon."""
        self._status = status
        self._wake.set()

    def remember(self, session: str, instance: str) -> None:
        """Write it down soon."""
        if self._connected and len(session) <= MAX_SESSION_CHARACTERS:
            self._sessions.append((session, instance))
            self._wake.set()

    def share(self, document: Document) -> None:
        """Write it down soon."""
        if self._connected:
            self._documents[document.ids] = document
            self._wake.set()

    def broadcast(self, message: RouterMessage) -> None:
        """Write it down soon."""
        if not self._connected:
            return
        body, dropped = encode_message(message), self._pending.dropped
        if len(body) > MAX_MESSAGE_BYTES:
            self.unsent += 1
            logger.warning(
                "a %s of %d bytes is not sent to other routers: at most %d go through Redis",
                *(type(message).__name__, len(body), MAX_MESSAGE_BYTES),
            )
            return
        self._pending.put(next(self._message_numbers), body)
        self.unsent += self._pending.dropped - dropped
        self._wake.set()

    def view(self) -> StoreView:
        """How it is."""
        return StoreView(
            kind="redis",
            connected=self._connected,
            since_s=round(self._clock.monotonic() - self._since, 3),
            error="" if self._connected else self._error,
            address=address_of(self._url),
        )

    # -- connecting -----------------------------------------------------------------------------------------

    async def _round(self, listener: Listener) -> float | None:
        """Share until Redis is lost; returns the pause until it is tried again."""
        if self._ending:
            return None
        try:
            await self._share(listener)
        except (self._library.RedisError, OSError, TimeoutError) as error:
            if not self._settled.is_set() and self._is_refusal(error):
                raise ConfigError(f"Redis refuses us: {error}", field="--cluster") from None
            self._attempt = 1 if self._connected else self._attempt + 1
            self._is_lost(error)
        except Exception as error:
            self._is_lost(error)  # all is read again
            raise
        return RETRY_S[min(self._attempt, len(RETRY_S)) - 1]

    async def _share(self, listener: Listener) -> None:
        """Share until Redis is lost, and raise how it was lost."""
        async with self._records() as reader, self._records() as writer:
            self._redis_ahead_s = await writer.time() - self._clock.monotonic()
            places = await self._sync(writer, listener, first=True)
            if self._ending:
                return
            self._is_connected()
            for message in (Begun(self._router), *listener.snapshot()):
                self.broadcast(message)
            tasks = [
                asyncio.create_task(self._read(reader, listener, places)),
                asyncio.create_task(self._write(writer, listener)),
                asyncio.create_task(self._keep(writer, listener)),
            ]
            try:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in ended:
                task.result()

    def _is_refusal(self, error: BaseException) -> bool:
        """Whether trying again will not help."""
        kinds = (self._library.AuthenticationError, self._library.ResponseError)
        return isinstance(error, kinds) or isinstance(error.__cause__, kinds)

    @asynccontextmanager
    async def _records(self) -> AsyncIterator[RedisRecords]:
        from redis.asyncio import from_url
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        client = from_url(
            self._url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # this class retries by itself, and logs it
            **({} if self._password is None else {"password": self._password}),
        )
        try:
            yield RedisRecords(client, self._name, self._key, self._is_forged)
        finally:
            await client.aclose()

    def _is_forged(self, kind: str) -> None:
        self.refused += 1
        logger.warning("a %s record in Redis is left out: no member of this cluster has signed it", kind)

    def _is_connected(self) -> None:
        logger.info("membership is shared through %s", address_of(self._url))
        self._connected, self._since = True, self._clock.monotonic()
        self._settled.set()
        self._wake.set()

    def _is_lost(self, error: Exception) -> None:
        """Go on alone."""
        self._error = str(error)[:500] or type(error).__name__
        if self._connected or not self._settled.is_set():
            where = address_of(self._url)
            logger.warning("%s is lost, this router goes on with its own records: %s", where, self._error)
            self._since = self._clock.monotonic()
            self.losses += 1
        self._connected = False
        self._settled.set()
        self._members.clear()
        self._documents.clear()
        self._sessions.clear()
        self._pending.clear()
        if self.others and self._listener is not None:
            self.others = {}
            self._listener.on_routers(self.others)

    # -- reading --------------------------------------------------------------------------------------------

    async def _sync(self, records: RedisRecords, listener: Listener, *, first: bool) -> Places:
        """Read everything, then write records that are newer here, or whose instances this router finds
        alive.

        Returns where the streams ended before.
        """
        places = await records.ends()
        there = {m.instance: m for v in await records.members() if (m := self._take(v, listener)) is not None}
        for member in list(listener.records()):
            known = there.get(member.instance)
            if known is None and member.intent is Intent.STAY and not self._sightings.alive(member, listener):
                continue
            if known != member or listener.is_alive(member.instance):
                await records.put(member)
        written = await self._read_documents(records, listener)
        for document in list(listener.documents()):
            if written.get(_name_of(document), -1) < document.stamp:
                await records.put_document(document, self._clock.monotonic(), self._redis_ahead_s)
        if first:
            for page in await records.sessions(FIRST_SESSIONS):
                for fields in page:
                    self._take_session(fields, listener)
                await asyncio.sleep(0)
        return places

    async def _read_documents(
        self, records: RedisRecords, listener: Listener, names: Sequence[bytes] | None = None
    ) -> dict[bytes, int]:
        """Read documents that are newer in Redis, of all or of those with these names.

        One after the other: nothing else runs while one is verified and decoded. Returns the stamps of all
        that are there.
        """
        heads = await records.document_heads(names)
        known = {_name_of(document): document.stamp for document in listener.documents()} if heads else {}
        for name, head in heads.items():
            if head.stamp <= known.get(name, -1) or self._left_out.get(name) == head.mark:
                continue
            taken = None
            if head.size > MAX_RECORD_BYTES:
                self.refused += 1
                logger.warning("a document in Redis is left out: it has %d bytes", head.size)
            elif (body := await records.document(name)) is not None:
                taken = self._take_document(body, listener)
            if taken is None:
                self._left_out.put(name, head.mark)
            await asyncio.sleep(0)
        return {name: head.stamp for name, head in heads.items() if name not in self._left_out}

    async def _read(self, records: RedisRecords, listener: Listener, places: Places) -> None:
        while _goes_on():
            members, sessions, documents, messages = await records.read(places, BLOCK_S)
            for value in members:
                self._take(value, listener)
            for fields in sessions:
                self._take_session(fields, listener)
            for value in messages:
                self._take_message(value, listener)
            if documents:
                await self._read_documents(records, listener, documents)

    def _take_message(self, value: bytes, listener: Listener) -> None:
        message = self._decoded(decode_message, value)
        if message is None or message.router == self._router:
            return
        if isinstance(message, Begun):
            for own in listener.snapshot():
                self.broadcast(own)
        else:
            listener.on_message(message)

    def _take_document(self, value: bytes, listener: Listener) -> Document | None:
        if (document := self._decoded(decode_document, value)) is not None:
            document = document.shifted(-self._redis_ahead_s)
            listener.on_document(document)
        return document

    def _take(self, value: bytes, listener: Listener) -> Member | None:
        if (member := self._decoded(decode_member, value)) is not None:
            self._sightings.seen(member)
            listener.on_member(member)
        return member

    def _decoded(self, decode: Callable[[bytes], T], value: bytes) -> T | None:
        try:
            return decode(value)
        except PeerError as error:
            self.refused += 1
            logger.warning("a record in Redis is left out: %s", error)
            return None

    def _take_session(self, fields: Fields, listener: Listener) -> None:
        session, instance = fields.get(b"s", b""), fields.get(b"i", b"")
        is_ours = fields.get(b"r") == self._router.encode()
        if session and not is_ours and len(session) <= 4 * MAX_SESSION_CHARACTERS:
            listener.on_session(session.decode("utf-8", "replace"), instance.decode("utf-8", "replace"))

    # -- writing --------------------------------------------------------------------------------------------

    async def _write(self, records: RedisRecords, listener: Listener) -> None:
        while _goes_on():
            await self._wake.wait()
            self._wake.clear()
            members, self._members = self._members, {}
            for member in members.values():
                await records.put(member)
            documents, self._documents = self._documents, {}
            for document in documents.values():
                await records.put_document(document, self._clock.monotonic(), self._redis_ahead_s)
            while self._sessions:
                count = min(len(self._sessions), SESSIONS_AT_ONCE)
                await records.put_sessions([self._sessions.popleft() for _ in range(count)], self._router)
            messages = list(self._pending.values())
            self._pending.clear()
            if messages:
                await records.put_messages(messages)
            if self._status is not None:
                status, self._status = self._status, None
                await records.write_status(status)
                self._see_others(await records.routers(), listener)

    def _see_others(self, values: list[bytes], listener: Listener) -> None:
        others: dict[str, RouterStatus] = {}
        for value in values:
            try:
                status = msgspec.json.decode(value, type=RouterStatus)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.refused += 1
                continue
            if status.router != self._router:
                others[status.router] = status
        if others or self.others:
            self.others = others
            listener.on_routers(others)

    async def _keep(self, records: RedisRecords, listener: Listener) -> None:
        while _goes_on():
            await self._clock.sleep(SYNC_S)
            await self._sync(records, listener, first=False)


def _name_of(document: Document) -> bytes:
    """A document's field name in Redis."""
    return f"{document.scope}/{document.id}".encode()


def _goes_on() -> bool:
    """Whether this task is not cancelled: redis-py swallows a cancellation that meets it connecting."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def _library() -> Any:
    try:
        from redis import exceptions
    except ImportError:
        raise ConfigError(
            "the Redis client is not installed",
            field="--cluster",
            hint="pip install 'redis>=5.2', or leave --cluster out: one router needs no Redis",
        ) from None
    return exceptions


def address_of(url: str) -> str:
    """The URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

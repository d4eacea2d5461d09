"""Records that routers share in Redis 7: keys, scripts, reading and writing. Decisions: ``membership_redis``.

Below ``sglang_ext:{NAME}:`` (one slot of a Redis cluster) are

- ``member:ID``: an instance's record, ``STAMP SEAL JSON``, as a key that expires unless some router goes on
  to find the instance alive. A script sets it only if the record is newer than the stored one, whatever the
  order in which routers write. ``members`` is the set of these ids.
- ``events``: a stream of changed records, so that other routers see a change at once.
- ``document:SCOPE/ID``: a document, in the same form and set the same way, as a key that expires with it.
  ``documents`` is their set; ``events`` has only the name of a changed one. A document whose stamp is known
  is not read again.
- ``router:ID``: a router's status of each second, as a key that expires. ``routers`` is their set.
- ``sessions``: a stream of (session, instance), bounded in length.
- ``words``: a stream of messages between routers; a router reads only those sent after it connected.

Where the cluster has a key, everything is sealed with it: a record without a valid seal is left out, even
though its writer could reach that Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from sglang_ext.cluster_key import NO_SEAL, ClusterKey
from sglang_ext.router.api.documents import MAX_DOCUMENT_BYTES, Document
from sglang_ext.router.cluster.membership import MEMBER_TTL_S, ROUTER_TTL_S, RouterStatus
from sglang_ext.router.cluster.roster import LEFT_KEPT_S, Intent, Member, encode_member

MAX_EVENTS = 4096
MAX_SESSIONS = 20_000
MAX_MESSAGES = 1024
HEADS_AT_ONCE = 200
SESSIONS_AT_ONCE = 200
MESSAGE_KIND = "word"
"""The kind of messages in their seals, as routers of earlier releases write and expect it."""
MARK_BYTES = 64
"""Of a record, by which it is seen whether it has changed: its stamp, and of its seal enough."""
MAX_RECORD_BYTES = MAX_DOCUMENT_BYTES + (64 << 10)
Fields: TypeAlias = Mapping[bytes, bytes]
Places: TypeAlias = dict[bytes, bytes]
"""How far each stream was read."""

PUT_MEMBER = """
local function newer(a, b)
  -- Whether text a is larger than b, byte by byte: Lua's own comparison follows the locale of the server.
  local n = math.min(#a, #b)
  for i = 1, n do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x > y end
  end
  return #a > #b
end
local stamp, body, kept, seal = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[6]
local there = redis.call('GET', KEYS[1])
local there_stamp, there_seal, there_body = string.match(there or '', '^(%d+) (%S+) (.*)$')
redis.call('SADD', KEYS[2], ARGV[4])
if there_stamp then
  there_stamp = tonumber(there_stamp)
  if there_stamp == stamp and ARGV[7] ~= 'm' then
    return 0
  end
  if there_stamp > stamp or (there_stamp == stamp and newer(there_body, body)) then
    return 0
  end
  if there_stamp == stamp and there_body == body and there_seal == seal then
    redis.call('PEXPIRE', KEYS[1], kept)
    return 0
  end
end
local value = ARGV[1] .. ' ' .. seal .. ' ' .. body
redis.call('SET', KEYS[1], value, 'PX', kept)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', ARGV[7], ARGV[7] == 'm' and value or ARGV[4])
return 1
"""
"""Set a record if it is newer than the stored one, and announce it to other routers; keep a member's from
expiring if it is the same. Contents of documents are not compared: that takes Redis a second.

KEYS: the record, the set of ids, the stream of events. ARGV: stamp, JSON, milliseconds to keep it, id, length
of the stream, seal, the field of the announcement: ``m`` for all of it, another one for its id.
"""


class Head(NamedTuple):
    """The beginning of a record. size: bytes of all of it."""

    stamp: int
    size: int
    mark: bytes


def _session_text(session: bytes, instance: bytes, router: bytes) -> bytes:
    """The sealed text of a session: with lengths, so that nothing can move from one field to the next."""
    return b"".join(b"%d:%s" % (len(each), each) for each in (session, instance, router))


class RedisRecords:
    """The records of one cluster.

    Args:
        client: of ``redis.asyncio``, without decoding of answers.
        name: of the cluster.
        key: of the cluster; without one nothing is sealed, and every record is accepted.
        on_forged: called with the kind of each record that no member has sealed, which is left out.
    """

    def __init__(
        self,
        client: Any,
        name: str,
        key: ClusterKey | None = None,
        on_forged: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._client = client
        self._name = name
        self._key = key
        self._on_forged = on_forged
        self._prefix = f"sglang_ext:{{{name}}}:"

    def key(self, kind: str, name: str = "") -> str:
        """The key of something."""
        return f"{self._prefix}{kind}:{name}" if name else f"{self._prefix}{kind}"

    async def time(self) -> float:
        """Redis's time: seconds since the epoch."""
        seconds, microseconds = await self._client.time()
        return float(seconds + microseconds / 1e6)

    # -- members --------------------------------------------------------------------------------------------

    async def members(self) -> list[bytes]:
        """The JSON of every record; ids whose records have expired are taken out."""
        return self._opened("member", (await self._all("member", "members")).values())

    async def put(self, member: Member) -> None:
        """Write a record, if it is newer than the stored one."""
        kept_s = MEMBER_TTL_S if member.intent is Intent.STAY else LEFT_KEPT_S
        body = encode_member(member)
        await self._client.eval(
            PUT_MEMBER,
            3,
            self.key("member", member.instance),
            self.key("members"),
            self.key("events"),
            member.stamp,
            body,
            int(kept_s * 1e3),
            member.instance,
            MAX_EVENTS,
            self._seal("member", b"%d " % member.stamp + body),
            "m",
        )

    # -- documents ------------------------------------------------------------------------------------------

    async def document_heads(self, names: Sequence[bytes] | None = None) -> dict[bytes, Head]:
        """The heads of documents, to detect changes: of every one, or of those of these names."""
        every = names is None
        there = sorted(await self._client.smembers(self.key("documents"))) if names is None else names
        found: dict[bytes, Head] = {}
        gone: list[bytes] = []
        for start in range(0, len(there), HEADS_AT_ONCE):
            some = there[start : start + HEADS_AT_ONCE]
            pipeline = self._client.pipeline(transaction=False)
            for name in some:
                pipeline.getrange(self._document_key(name), 0, MARK_BYTES - 1)
                pipeline.strlen(self._document_key(name))
            answers = await pipeline.execute()
            for name, mark, size in zip(some, answers[::2], answers[1::2], strict=True):
                if size:
                    stamp = mark.partition(b" ")[0]
                    found[name] = Head(int(stamp) if stamp.isdigit() else -1, size, mark)
                else:
                    gone.append(name)
        if every and gone:
            await self._client.srem(self.key("documents"), *gone)
        return found

    async def document(self, name: bytes) -> bytes | None:
        """The JSON of a document; None when no member has sealed it, or it has expired."""
        value = await self._client.getrange(self._document_key(name), 0, MAX_RECORD_BYTES - 1)
        return next(iter(self._opened("document", [value] if value else [])), None)

    def _document_key(self, name: bytes) -> bytes:
        return self.key("document").encode() + b":" + name

    async def put_document(self, document: Document, now: float, ahead_s: float) -> None:
        """Write a document until it expires, if it is newer than the stored one.

        Args:
            document: of this router.
            now: by its monotonic clock.
            ahead_s: how far Redis's time is ahead of it.
        """
        name = f"{document.scope}/{document.id}"
        body = msgspec.json.encode(document.shifted(ahead_s))
        await self._client.eval(
            PUT_MEMBER,
            3,
            self.key("document", name),
            self.key("documents"),
            self.key("events"),
            document.stamp,
            body,
            max(1, int((document.expires - now) * 1e3)),
            name,
            MAX_EVENTS,
            self._seal("document", b"%d " % document.stamp + body),
            "d",
        )

    # -- routers --------------------------------------------------------------------------------------------

    async def write_status(self, status: RouterStatus) -> None:
        """Write down how a router is."""
        pipeline = self._client.pipeline(transaction=False)
        key = self.key("router", status.router)
        body = msgspec.json.encode(status)
        value = f"0 {self._seal('router', b'0 ' + body)} ".encode() + body
        pipeline.set(key, value, px=int(ROUTER_TTL_S * 1e3))
        pipeline.sadd(self.key("routers"), status.router)
        await pipeline.execute()

    async def routers(self) -> list[bytes]:
        """The JSON of every router's last status."""
        return self._opened("router", (await self._all("router", "routers")).values())

    async def say_goodbye(self, router: str) -> None:
        """Delete a router's status."""
        await self._client.delete(self.key("router", router))
        await self._client.srem(self.key("routers"), router)

    # -- streams --------------------------------------------------------------------------------------------

    async def ends(self) -> Places:
        """Where the streams end now."""
        places: Places = {}
        for stream in ("events", "sessions", "words"):
            latest = await self._client.xrevrange(self.key(stream), count=1)
            places[self.key(stream).encode()] = latest[0][0] if latest else b"0-0"
        return places

    async def read(
        self, places: Places, seconds: float
    ) -> tuple[list[bytes], list[Fields], list[bytes], list[bytes]]:
        """Wait for something new: JSON of records, sessions, names of documents, JSON of messages. ``places``
        moves on."""
        answer = await self._client.xread(places, count=500, block=int(seconds * 1e3))
        # Either version of the protocol: lists of pairs, or a dictionary of lists of lists.
        streams = [(n, e[0]) for n, e in answer.items()] if isinstance(answer, dict) else list(answer or ())
        members: list[bytes] = []
        sessions: list[Fields] = []
        documents: dict[bytes, None] = {}
        messages: list[bytes] = []
        for stream, entries in streams:
            for place, fields in entries:
                places[stream] = place
                if stream.endswith(b"sessions"):
                    sessions.append(fields)
                elif b"w" in fields:
                    messages.append(fields[b"w"])
                elif b"m" in fields:
                    members.append(fields[b"m"])
                elif b"d" in fields:
                    documents[fields[b"d"]] = None
        return (
            self._opened("member", members),
            self._sealed_sessions(sessions),
            list(documents),
            self._opened(MESSAGE_KIND, messages),
        )

    async def sessions(self, count: int) -> list[list[Fields]]:
        """The last sessions, oldest first, in pages. Redis has a time-out for each answer, and an answer with
        all of them takes half a second to parse, on a busy machine several."""
        pages: list[list[Fields]] = []
        before = b"+"
        while count > 0:
            latest = await self._client.xrevrange(
                self.key("sessions"), max=before, count=min(count, SESSIONS_AT_ONCE)
            )
            if not latest:
                break
            pages.append(self._sealed_sessions([fields for _, fields in reversed(latest)]))
            count -= len(latest)
            before = b"(" + latest[-1][0]
        return pages[::-1]

    async def put_sessions(self, sessions: Sequence[tuple[str, str]], router: str) -> None:
        """Write down which sessions (first) a router has sent to which instances."""
        pipeline = self._client.pipeline(transaction=False)
        for session, instance in sessions:
            seal = self._seal("session", _session_text(session.encode(), instance.encode(), router.encode()))
            fields = {"s": session, "i": instance, "r": router, "k": seal}
            pipeline.xadd(self.key("sessions"), fields, maxlen=MAX_SESSIONS, approximate=True)
        await pipeline.execute()

    async def put_messages(self, messages: Iterable[bytes]) -> None:
        """Send messages to the other routers; each is JSON."""
        pipeline = self._client.pipeline(transaction=False)
        for message in messages:
            value = f"0 {self._seal(MESSAGE_KIND, b'0 ' + message)} ".encode() + message
            pipeline.xadd(self.key("words"), {"w": value}, maxlen=MAX_MESSAGES, approximate=True)
        await pipeline.execute()

    # -- seals ----------------------------------------------------------------------------------------------

    def _seal(self, kind: str, data: bytes) -> str:
        return NO_SEAL if self._key is None else self._key.seal(f"{self._name}:{kind}", data)

    def _is_ours(self, kind: str, data: bytes, seal: bytes) -> bool:
        if self._key is None or self._key.is_sealed(f"{self._name}:{kind}", data, seal.decode("latin-1")):
            return True
        self._on_forged(kind)
        return False

    def _opened(self, kind: str, values: Iterable[bytes]) -> list[bytes]:
        """The JSON of those values ``STAMP SEAL JSON`` that a member has sealed."""
        found = []
        for value in values:
            stamp, _, rest = value.partition(b" ")
            seal, _, body = rest.partition(b" ")
            if self._is_ours(kind, stamp + b" " + body, seal):
                found.append(body)
        return found

    def _sealed_sessions(self, found: list[Fields]) -> list[Fields]:
        return [
            fields
            for fields in found
            if self._is_ours(
                "session",
                _session_text(fields.get(b"s", b""), fields.get(b"i", b""), fields.get(b"r", b"")),
                fields.get(b"k", b""),
            )
        ]

    async def _all(self, kind: str, names: str) -> dict[bytes, bytes]:
        """Every value of a kind, by name; names without a value are taken out of the set."""
        there = sorted(await self._client.smembers(self.key(names)))
        if not there:
            return {}
        values = await self._client.mget([self.key(kind).encode() + b":" + name for name in there])
        found = dict(zip(there, values, strict=True))
        if gone := [name for name, value in found.items() if value is None]:
            await self._client.srem(self.key(names), *gone)
        return {name: value for name, value in found.items() if value is not None}

"""What several routers keep in Redis 7, and how it is read and written. No decisions: ``membership_redis``.

Below ``sglang_ext:{NAME}:`` (one slot of a Redis cluster) are

- ``member:ID``: an instance's record, ``STAMP JSON``, as a key that expires unless some router goes on to
  hear the instance. A script sets it only if the record is newer than what is there, whatever the order in
  which routers write. ``members`` is the set of these ids.
- ``events``: a stream of the records as they change, which makes the others hear of them at once.
- ``router:ID``: what a router says of itself each second, as a key that expires. ``routers`` is their set.
- ``sessions``: a stream of (session, instance), bounded in length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from router.membership import MEMBER_TTL_S, ROUTER_TTL_S, RouterStatus
from router.roster import LEFT_KEPT_S, Intent, Member, encode_member

MAX_EVENTS = 4096
MAX_SESSIONS = 20_000
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
local stamp, body, kept = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local there = redis.call('GET', KEYS[1])
local there_stamp, there_body = string.match(there or '', '^(%d+) (.*)$')
redis.call('SADD', KEYS[2], ARGV[4])
if there_stamp then
  there_stamp = tonumber(there_stamp)
  if there_stamp > stamp or (there_stamp == stamp and newer(there_body, body)) then
    return 0
  end
  if there_stamp == stamp and there_body == body then
    redis.call('PEXPIRE', KEYS[1], kept)
    return 0
  end
end
local value = ARGV[1] .. ' ' .. body
redis.call('SET', KEYS[1], value, 'PX', kept)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'm', value)
return 1
"""
"""Set a member's record if it is newer than what is there, and tell the others; keep it from expiring if it
is the same.

KEYS: the record, the set of ids, the stream of events. ARGV: stamp, JSON, milliseconds to keep it, id, length
of the stream.
"""


class RedisRecords:
    """The records of one cluster.

    Args:
        client: of ``redis.asyncio``, without decoding of answers.
        name: of the cluster.
    """

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._prefix = f"sglang_ext:{{{name}}}:"

    def key(self, kind: str, name: str = "") -> str:
        """The key of something."""
        return f"{self._prefix}{kind}:{name}" if name else f"{self._prefix}{kind}"

    # -- members --------------------------------------------------------------------------------------------

    async def members(self) -> list[bytes]:
        """The JSON of every record; ids whose records have expired are taken out."""
        return [value.partition(b" ")[2] for value in (await self._all("member", "members")).values()]

    async def put(self, member: Member) -> None:
        """Write a record down, if it is newer than what is there."""
        kept_s = MEMBER_TTL_S if member.intent is Intent.STAY else LEFT_KEPT_S
        await self._client.eval(
            PUT_MEMBER,
            3,
            self.key("member", member.instance),
            self.key("members"),
            self.key("events"),
            member.stamp,
            encode_member(member),
            int(kept_s * 1e3),
            member.instance,
            MAX_EVENTS,
        )

    # -- routers --------------------------------------------------------------------------------------------

    async def tell(self, status: RouterStatus) -> None:
        """Write down how a router is."""
        pipeline = self._client.pipeline(transaction=False)
        key = self.key("router", status.router)
        pipeline.set(key, msgspec.json.encode(status), px=int(ROUTER_TTL_S * 1e3))
        pipeline.sadd(self.key("routers"), status.router)
        await pipeline.execute()

    async def routers(self) -> list[bytes]:
        """The JSON of what every router has told last."""
        return list((await self._all("router", "routers")).values())

    async def say_goodbye(self, router: str) -> None:
        """Take a router's word out."""
        await self._client.delete(self.key("router", router))
        await self._client.srem(self.key("routers"), router)

    # -- streams --------------------------------------------------------------------------------------------

    async def ends(self) -> Places:
        """Where both streams end now."""
        places: Places = {}
        for stream in ("events", "sessions"):
            latest = await self._client.xrevrange(self.key(stream), count=1)
            places[self.key(stream).encode()] = latest[0][0] if latest else b"0-0"
        return places

    async def read(self, places: Places, seconds: float) -> tuple[list[bytes], list[Fields]]:
        """Wait for something new: the JSON of records, and sessions. ``places`` moves on."""
        answer = await self._client.xread(places, count=500, block=int(seconds * 1e3))
        # Either version of the protocol: lists of pairs, or a dictionary of lists of lists.
        streams = [(n, e[0]) for n, e in answer.items()] if isinstance(answer, dict) else list(answer or ())
        members: list[bytes] = []
        sessions: list[Fields] = []
        for stream, entries in streams:
            for place, fields in entries:
                places[stream] = place
                if stream.endswith(b"sessions"):
                    sessions.append(fields)
                elif b"m" in fields:
                    members.append(fields[b"m"].partition(b" ")[2])
        return members, sessions

    async def sessions(self, count: int) -> list[Fields]:
        """The last sessions, oldest first."""
        latest = await self._client.xrevrange(self.key("sessions"), count=count)
        return [fields for _, fields in reversed(latest)]

    async def put_sessions(self, sessions: Sequence[tuple[str, str]], router: str) -> None:
        """Write down which sessions (first) a router has sent to which instances."""
        pipeline = self._client.pipeline(transaction=False)
        for session, instance in sessions:
            fields = {"s": session, "i": instance, "r": router}
            pipeline.xadd(self.key("sessions"), fields, maxlen=MAX_SESSIONS, approximate=True)
        await pipeline.execute()

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

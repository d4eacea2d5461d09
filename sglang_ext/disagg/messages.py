"""The control messages of CONNECT, COMPLETE, and MemServe's transfer (4.3). See `sglang_ext.wire` for the
rules.

Each request has one reply, matched by a number that travels beside it. The reader asks, the owner answers,
save for REVOKE, which the owner sends by itself and the writer answers with REVOKED.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from sglang_ext.disagg.memory import RegionMeta
from sglang_ext.disagg.tensors import PoolMeta
from sglang_ext.wire import Blob, Codec, Epoch, Message, Name

VERSION: Final = 7

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 47)]
Session = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
MOST_MS: Final = 3_600_000
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=MOST_MS)]
Blobs = Annotated[dict[str, Blob], msgspec.Meta(max_length=8)]
Reasons = Annotated[dict[str, str], msgspec.Meta(max_length=8)]


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sender, and all that is needed to reach its memory (KVDirect, 4.1: sent once, at CONNECT)."""

    version: int
    instance: Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    epoch: Epoch
    namespace: Name
    host: Name
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    control: Name
    """Address of its control socket, for calls the other way; empty when it serves none."""
    regions: Annotated[tuple[RegionMeta, ...], msgspec.Meta(max_length=4096)]
    pools: Annotated[tuple[PoolMeta, ...], msgspec.Meta(max_length=16)]


class Connect(Message, frozen=True, tag="connect"):
    """A reader asks to connect. transports: the offer of each transport of the reader."""

    who: Identity
    transports: Blobs


class Connected(Message, frozen=True, tag="connected"):
    """The owner agrees. transports: the answers of those that both can use; reasons: why not the others."""

    who: Identity
    session: Session
    transports: Blobs
    reasons: Reasons


class Refused(Message, frozen=True, tag="refused"):
    """No. reason: one word; text: the difference and the remedy. again_ms: when to ask again for blocks that
    are about to be published; 0 where that is unknown."""

    reason: Name
    text: str
    again_ms: Milliseconds = 0


class Ping(Message, frozen=True, tag="ping"):
    """The reader is alive, and reads by `transport`."""

    session: Session
    transport: Name = ""


class Pong(Message, frozen=True, tag="pong"):
    """The owner is alive."""

    epoch: Epoch


class Want(Message, frozen=True, tag="want"):
    """Which blocks has the request? Answered by an Offer."""

    session: Session
    request: Name
    pool: Name


class Offer(Message, frozen=True, tag="offer"):
    """Published blocks: read them until the lease ends, and compare generations afterwards.

    blocks, generations: `wire.pack_ids`. ttl_ms: the rest of the lease when this was made. names: of the
    blocks, all of one length, in a pool that finds blocks by name; else empty.
    """

    instance: Name
    rank: int
    epoch: Epoch
    pool: Name
    request: Name
    lease: Number
    blocks: Blob
    generations: Blob
    ttl_ms: Milliseconds
    names: Blob = b""


class Complete(Message, frozen=True, tag="complete"):
    """The reader is done with a lease (KVDirect, 4.1). discarded: it could not use the bytes that it read."""

    session: Session
    request: Name
    lease: Number
    discarded: bool = False


class Completed(Message, frozen=True, tag="completed"):
    """The acknowledgement (KVDirect, 4.2). released: whether this ended the lease; False when it was over."""

    released: bool


class Renew(Message, frozen=True, tag="renew"):
    """Keep a lease for another ttl_ms. Answered by Completed: released is True when it was extended."""

    session: Session
    lease: Number
    ttl_ms: Milliseconds


class Reserve(Message, frozen=True, tag="reserve"):
    """Push, step 1: grant blocks of `pool` that the receiver has set aside for a request. blocks:
    `wire.pack_ids`."""

    session: Session
    request: Name
    pool: Name
    blocks: Blob


class Reserved(Message, frozen=True, tag="reserved"):
    """They may be written. slot and grant go with every write. ttl_ms: how long the grant lives; 0: until the
    receiver revokes it."""

    grant: Number
    slot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    ttl_ms: Milliseconds


class Written(Message, frozen=True, tag="written"):
    """Push, step 3: everything is written, and the grant is over. Answered by Completed."""

    session: Session
    request: Name
    grant: Number


class Revoke(Message, frozen=True, tag="revoke"):
    """The grant is over: write no more, and say so."""

    grant: Number


class Revoked(Message, frozen=True, tag="revoked"):
    """None of our transfers writes under the grant any more. Answered by Completed."""

    session: Session
    grant: Number


class Bye(Message, frozen=True, tag="bye"):
    """The peer disconnects; its leases end, and none of its transfers writes any more. Answered by
    Completed."""

    session: Session


Request = Connect | Ping | Want | Complete | Renew | Reserve | Written | Revoked | Bye
Reply = Connected | Refused | Pong | Offer | Completed | Reserved | Revoke

REQUESTS: Codec[Request] = Codec(Request)
REPLIES: Codec[Reply] = Codec(Reply)


class _Speaker(msgspec.Struct, frozen=True):
    version: int


class _AnyConnect(msgspec.Struct, frozen=True, tag_field="t", tag="connect"):
    """The fields that CONNECT has in every release."""

    who: _Speaker


_ANY_CONNECT: Final = msgspec.msgpack.Decoder(_AnyConnect)


def connecting_version(data: bytes) -> int | None:
    """By which version a CONNECT is made, whatever other fields that has; None for bytes that are none."""
    try:
        return _ANY_CONNECT.decode(data).who.version
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):
        return None

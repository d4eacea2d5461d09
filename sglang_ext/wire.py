"""Control messages: msgspec structs in msgpack, with a limit on everything that a peer can choose.

A message is a tagged struct; a codec knows the structs of one protocol. `Codec.decode` returns one of
them, with every field of its type and within its bounds, or raises a `WireError`, whatever the bytes are. No
pickle.

Lists of numbers (block ids, generations) travel as raw little-endian int64, which a peer cannot make larger
in memory than on the wire.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_ext.errors import InternalError, PeerError

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest control message. Bytes of KV never travel in one."""

Name = Annotated[str, msgspec.Meta(max_length=512)]
"""An id, an address or a reason: short text."""

Epoch = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""16 random bytes that an instance draws at its start."""

Blob = Annotated[bytes, msgspec.Meta(max_length=8 << 20)]
"""Opaque bytes of bounded size."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""A number of bytes, blocks or tokens."""

M = TypeVar("M")


class WireError(PeerError):
    """The peer sent bytes that are not a message of this protocol. Disconnect it."""


class Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Base of control messages. Subclasses give a short `tag`."""


class Codec(Generic[M]):
    """Encodes and decodes the messages of one protocol.

    messages: the union of its structs. limit: bytes of the largest message, in both directions.
    """

    def __init__(self, messages: Any, limit: int = MAX_MESSAGE_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self.limit = limit

    def encode(self, message: M) -> bytes:
        """The message's bytes.

        Raises:
            InternalError: it exceeds the limit; the peer would refuse it.
        """
        data = self._encoder.encode(message)
        if len(data) > self.limit:
            raise InternalError(
                f"{type(message).__name__} has {len(data)} bytes, the limit is {self.limit}",
                hint="Send it in parts",
            )
        return data

    def decode(self, data: bytes | bytearray | memoryview) -> M:
        """The message that `data` holds.

        Raises:
            WireError: it holds none, or too much.
        """
        if len(data) > self.limit:
            raise WireError(f"a message of {len(data)} bytes exceeds the limit of {self.limit}")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise WireError(f"not a message: {str(error)[:200]}") from None


def pack_ids(values: npt.ArrayLike) -> bytes:
    """Numbers as the raw little-endian int64 that messages carry."""
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def unpack_ids(data: bytes, limit: int | None = None) -> npt.NDArray[np.int64]:
    """The numbers of `pack_ids`, shape (n,), writable.

    Raises:
        WireError: the bytes are not whole numbers, one is negative, or one is not below `limit`.
    """
    if len(data) % 8:
        raise WireError(f"{len(data)} bytes are not a list of int64")
    values = np.frombuffer(data, "<i8").astype(np.int64)
    if values.size and (int(values.min()) < 0 or (limit is not None and int(values.max()) >= limit)):
        raise WireError("a number in the list is out of range")
    return values

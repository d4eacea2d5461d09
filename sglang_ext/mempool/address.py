"""Addresses: what the pool hands out instead of pointers (MemServe, table 1: each encodes its instance).

An address names the instance and its epoch, the tier, the place in it, and the *grant* it was given with: an
allocation or a match. It is good until that grant ends, so an address that outlived its block is refused and
never read as the block that came after it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from sglang_ext.errors import UserError
from sglang_ext.tiers import Tier, tier_at, tier_named
from sglang_ext.wire import Name

Word = Annotated[int, msgspec.Meta(ge=0)]
"""Up to 64 bits, which is what msgpack has."""

Place = tuple[int, ...]
"""Where a block lies in its tier: the number of an arena block; the token slots of a block of the engine's
pool; on disk, namespace and block key as four words."""

_LIMIT = 64 << 10
"""Bytes of an encoded address: an instance's name and 4096 slots fit."""


class MemType(enum.Enum):
    """What to allocate (table 1)."""

    HBM = "hbm"
    DRAM = "dram"
    MIXED = "mixed"
    """HBM as far as it costs nobody a copy, DRAM for the rest."""
    DISK = "disk"


class AddressError(UserError):
    """An address is of another instance or epoch, is no longer granted, or is no address at all."""


class Address(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One block's place. Equal addresses are the same grant of the same place; hashable, and plain data.

    grant: number of the allocation or match that it was given with.
    """

    instance: Name
    epoch: Word
    tier: Tier
    place: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1, max_length=4096)]
    grant: Word = 0

    def encode(self) -> bytes:
        """As bytes, for control messages."""
        return _encoder.encode(self)

    def __str__(self) -> str:
        """As text, for logs and JSON: `instance/epoch/tier/place/grant`, numbers in hexadecimal."""
        place = ".".join(f"{word:x}" for word in self.place)
        return f"{self.instance}/{self.epoch:x}/{self.tier.name}/{place}/{self.grant:x}"

    @staticmethod
    def decode(data: bytes | str) -> Address:
        """The address that `encode` or `str` wrote.

        Raises:
            AddressError: it is none.
        """
        try:
            if len(data) > _LIMIT:
                raise ValueError(f"{len(data)} bytes are too many")
            if isinstance(data, bytes):
                return _decoder.decode(data)
            instance, epoch, tier, place, grant = data.rsplit("/", 4)
            words = tuple(_hex(word) for word in place.split("."))
            fields = (instance, _hex(epoch), tier_named(tier).level, words, _hex(grant))
            return msgspec.convert(fields, Address, dec_hook=_from_level)
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            raise AddressError(f"not an address: {str(error)[:200]}") from None


def _to_level(tier: Any) -> int:
    assert isinstance(tier, Tier)
    return tier.level


def _from_level(wanted: type, level: Any) -> Tier:
    tier = tier_at(level) if type(level) is int else None
    if wanted is not Tier or tier is None:
        raise ValueError(f"there is no tier {level!r}")
    return tier


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_level)
_decoder = msgspec.msgpack.Decoder(Address, dec_hook=_from_level)


def _hex(text: str) -> int:
    if not 0 < len(text) <= 16 or not all(letter in "0123456789abcdef" for letter in text):
        raise ValueError(f"{text[:40]!r} is no hexadecimal number of 64 bits")
    return int(text, 16)


def disk_place(namespace: bytes, key: bytes) -> Place:
    """A block on disk: the digest of its namespace and its block key, 16 bytes each, as four words."""
    data = namespace + key
    return tuple(int.from_bytes(data[i : i + 8], "big") for i in range(0, 32, 8))


def disk_names(place: Sequence[int]) -> tuple[bytes, bytes]:
    """Namespace digest and block key of `disk_place`."""
    data = b"".join(word.to_bytes(8, "big") for word in place)
    return data[:16], data[16:]

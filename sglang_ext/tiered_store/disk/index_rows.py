"""Rows of a disk tier's index: the value stored under each key, and its checksum."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

from sglang_ext.keys import BLOCK_KEY_BYTES
from sglang_ext.tiered_store.disk.segment_format import NAMESPACE_BYTES, checksum

RUN_KEY = struct.Struct(">Q")
# segment, blocks, offset, length, header bytes, seal of the header, created, namespace
RUN_ROW = struct.Struct(f"<IIQQQQd{NAMESPACE_BYTES}s")
USE_ROW = struct.Struct("<dII")
ENTRY = struct.Struct("<QI")
NEXT = struct.Struct("<QI")


@dataclasses.dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the index knows it. seal: checksum of its header."""

    run: int
    segment: int
    blocks: int
    offset: int
    length: int
    header_bytes: int
    seal: int
    created: float
    namespace: bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclasses.dataclass(slots=True)
class RunUse:
    """The part of a run's row that changes with use. last: wall-clock seconds; alive: blocks that the index
    still leads to."""

    last: float
    hits: int
    alive: int


NOWHERE = (0, 0)
"""Where a damaged entry leads: runs are numbered from 1."""


def decode_entry(value: bytes) -> tuple[int, int]:
    """(run, position) of a block entry."""
    if len(value) != ENTRY.size:
        return NOWHERE
    run, position = ENTRY.unpack(value)
    return run, position


def decode_use(value: bytes | None) -> RunUse | None:
    """A run's use; None when there is none, or it is damaged."""
    return RunUse(*USE_ROW.unpack(value)) if value is not None and len(value) == USE_ROW.size else None


def encode_run(row: RunRow, keys: Sequence[bytes]) -> bytes:
    body = RUN_ROW.pack(
        row.segment,
        row.blocks,
        row.offset,
        row.length,
        row.header_bytes,
        row.seal,
        row.created,
        row.namespace,
    )
    body += b"".join(keys)
    return body + checksum(body).to_bytes(8, "little")


def verified(value: bytes) -> bool:
    return len(value) >= RUN_ROW.size + 8 and checksum(value[:-8]).to_bytes(8, "little") == value[-8:]


def decode_run(key: bytes, value: bytes) -> RunRow | None:
    if not verified(value) or len(key) != RUN_KEY.size:
        return None
    segment, blocks, offset, length, header, seal, created, namespace = RUN_ROW.unpack_from(value)
    run = RUN_KEY.unpack(key)[0]
    return RunRow(run, segment, blocks, offset, length, header, seal, created, namespace)


def keys_in(value: bytes) -> tuple[bytes, ...]:
    starts = range(RUN_ROW.size, len(value) - 8, BLOCK_KEY_BYTES)
    return tuple(value[i : i + BLOCK_KEY_BYTES] for i in starts)

"""The byte layout of a segment file. No I/O here.

A segment is a file of runs. A *run* is a number of blocks that were put together (usually consecutive blocks
of a prefix), laid out layer-major, so that one layer of a long prefix is one sequential read:

    segment = [segment header, 4 KiB] [run] [run] ...                 each run starts at a multiple of 4 KiB
    run     = [run header][layer 0 of block 0, 1, ... n-1][layer 1 of block 0, ...] ...
                                                                      each part padded to a multiple of 4 KiB

A run header names the store, the segment and its own offset, the namespace, and for each (block, layer) the
checksum of its bytes (XXH3, 64 bits). It ends with a checksum over itself. So a run identifies itself: the
index can be rebuilt from headers, and a stale or misplaced read cannot pass.

All integers are little-endian.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import BLOCK_KEY_BYTES

PAGE = 4096
FORMAT = 1
SEGMENT_MAGIC = b"SGXSEG1\n"
RUN_MAGIC = b"SGXRUN1\n"
STORE_ID_BYTES = 16
NAMESPACE_BYTES = 16
MAX_HEADER_BYTES = 1 << 28

_SEGMENT = struct.Struct(f"<8sII{STORE_ID_BYTES}sI")
# magic, format, header bytes, store, segment, reserved, offset, run, created, blocks, layers, namespace
_RUN = struct.Struct(f"<8sII{STORE_ID_BYTES}sIIQQdII{NAMESPACE_BYTES}s")
_SUM_BYTES = 8

Sums = npt.NDArray[np.uint64]


class FormatError(ValueError):
    """Bytes that do not follow this module's format; the text says in which respect."""


def checksum(data: bytes | memoryview) -> int:
    """XXH3, 64 bits, of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data)


def padded(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


# --- segment header ---


def encode_segment_header(store: bytes, segment: int) -> bytes:
    """The first page of a segment."""
    body = _SEGMENT.pack(SEGMENT_MAGIC, FORMAT, PAGE, store, segment)
    return _sealed(body, PAGE)


def decode_segment_header(data: bytes) -> tuple[bytes, int]:
    """(store, segment) of a first page. Raises FormatError."""
    body = _unsealed(data[:PAGE], SEGMENT_MAGIC)
    _, form, _, store, segment = _SEGMENT.unpack_from(body)
    if form != FORMAT:
        raise FormatError(f"segment has format {form}, this version reads {FORMAT}")
    return store, segment


# --- run header ---


@dataclasses.dataclass(frozen=True, slots=True)
class RunShape:
    """Where everything of a run lies, relative to its start. Depends on the layout and the block count only.

    parts: offset of each layer's part; one more entry than layers, the last is the length of the run.
    """

    blocks: int
    layer_bytes: tuple[int, ...]
    header_bytes: int
    parts: tuple[int, ...]

    @staticmethod
    def of(layer_bytes: tuple[int, ...], blocks: int) -> RunShape:
        layers = len(layer_bytes)
        header = padded(
            _RUN.size + 8 * layers + BLOCK_KEY_BYTES * blocks + _SUM_BYTES * layers * blocks + _SUM_BYTES
        )
        offset, parts = header, [header]
        for size in layer_bytes:
            offset += padded(size * blocks)
            parts.append(offset)
        return RunShape(blocks, layer_bytes, header, tuple(parts))

    @property
    def length(self) -> int:
        """Bytes of the whole run."""
        return self.parts[-1]

    def offset(self, layer: int, position: int) -> int:
        """Where one layer of the block at `position` starts."""
        return self.parts[layer] + position * self.layer_bytes[layer]


def layer_sizes(layout: BlockLayout) -> tuple[int, ...]:
    """Bytes of each layer of a block."""
    return tuple(layout.layer_bytes(i) for i in range(layout.n_layers))


def largest_run(layout: BlockLayout, limit: int) -> int:
    """How many blocks a run may have to be no longer than `limit` bytes; 0 when not even one fits."""
    sizes = layer_sizes(layout)
    low, high = 0, limit // max(1, layout.block_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if RunShape.of(sizes, middle).length <= limit:
            low = middle
        else:
            high = middle - 1
    return low


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RunHeader:
    """A run's own description. keys: one per block; sums: uint64, shape (layers, blocks)."""

    store: bytes
    segment: int
    offset: int
    run: int
    created: float
    namespace: bytes
    keys: tuple[bytes, ...]
    sums: Sums
    shape: RunShape


def encode_run_header(header: RunHeader) -> bytes:
    """The header's bytes, padded to `shape.header_bytes`."""
    shape = header.shape
    fixed = _RUN.pack(
        RUN_MAGIC,
        FORMAT,
        shape.header_bytes,
        header.store,
        header.segment,
        0,
        header.offset,
        header.run,
        header.created,
        shape.blocks,
        len(shape.layer_bytes),
        header.namespace,
    )
    body = b"".join(
        (
            fixed,
            np.array(shape.layer_bytes, dtype="<u8").tobytes(),
            b"".join(header.keys),
            np.ascontiguousarray(header.sums, dtype="<u8").tobytes(),
        )
    )
    return _sealed(body, shape.header_bytes)


def header_bytes_of(start: bytes) -> int:
    """Length of the run header that starts with these bytes (at least 16). Raises FormatError."""
    if start[:8] != RUN_MAGIC:
        raise FormatError("no run starts here")
    size = int.from_bytes(start[12:16], "little")
    if size % PAGE or not PAGE <= size <= MAX_HEADER_BYTES:
        raise FormatError(f"run header claims {size} bytes")
    return size


def decode_run_header(data: bytes) -> RunHeader:
    """Read back what `encode_run_header` wrote. Raises FormatError when anything does not fit."""
    if len(data) < _RUN.size:
        raise FormatError("run header is cut short")
    size = header_bytes_of(data)
    body = _unsealed(data[:size], RUN_MAGIC)
    if len(data) < size:
        raise FormatError("run header is cut short")
    (_, form, _, store, segment, _, offset, run, created, blocks, layers, namespace) = _RUN.unpack_from(body)
    if form != FORMAT:
        raise FormatError(f"run has format {form}, this version reads {FORMAT}")
    end = _RUN.size + 8 * layers + BLOCK_KEY_BYTES * blocks + _SUM_BYTES * layers * blocks
    if end + _SUM_BYTES > size or not layers or not blocks:
        raise FormatError("run header contradicts itself")
    at = _RUN.size
    layer_bytes = tuple(np.frombuffer(body, "<u8", layers, at).tolist())
    at += 8 * layers
    keys = tuple(
        body[i : i + BLOCK_KEY_BYTES] for i in range(at, at + BLOCK_KEY_BYTES * blocks, BLOCK_KEY_BYTES)
    )
    at += BLOCK_KEY_BYTES * blocks
    sums = np.frombuffer(body, "<u8", layers * blocks, at).reshape(layers, blocks)
    shape = RunShape.of(layer_bytes, blocks)
    if shape.header_bytes != size:
        raise FormatError("run header contradicts itself")
    return RunHeader(store, segment, offset, run, created, namespace, keys, sums, shape)


def run_offsets(starts: npt.NDArray[np.uint8]) -> Iterator[int]:
    """Offsets in a buffer, at page borders, where a run header may start; for rebuilding an index."""
    magic = np.frombuffer(RUN_MAGIC, dtype=np.uint8)
    pages = starts[: len(starts) // PAGE * PAGE].reshape(-1, PAGE)
    yield from (np.flatnonzero((pages[:, : len(magic)] == magic).all(axis=1)) * PAGE).tolist()


def _sealed(body: bytes, size: int) -> bytes:
    padded_body = body.ljust(size - _SUM_BYTES, b"\0")
    return padded_body + checksum(padded_body).to_bytes(_SUM_BYTES, "little")


def _unsealed(data: bytes, magic: bytes) -> bytes:
    if data[: len(magic)] != magic:
        raise FormatError("no header starts here")
    body, seal = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if checksum(body).to_bytes(_SUM_BYTES, "little") != seal:
        raise FormatError("header does not verify")
    return body

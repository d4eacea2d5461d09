"""Damages the disk tier of a running server from outside, with and without its checksums noticing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from huge_values import make_last_huge

from sglang_ext.tiered_store.disk.segment_format import (
    RunHeader,
    checksum,
    decode_run_header,
    encode_run_header,
    header_bytes_of,
    run_offsets,
)

Damage = Callable[[bytearray], None]
"""Changes the bytes of one layer of one block."""


Place = tuple[Path, int]
"""Segment file, and where a run starts in it."""


def runs(folder: Path) -> set[Place]:
    """Every run in the segments below ``folder``."""
    found = set()
    for segment in folder.rglob("*.seg"):
        data = np.fromfile(segment, dtype=np.uint8)
        found |= {(segment, offset) for offset in run_offsets(data)}
    return found


def damage_last_layer(places: set[Place], damage: Damage, *, forge: bool, layers: int = 1) -> None:
    """Damage the last layer, or layers, of every block in some runs.

    Args:
        forge: make the checksums fit, so that verification passes.
    """
    for segment, offset in places:
        with segment.open("r+b") as file:
            header = _header(file, offset)
            sums = header.sums.copy()
            count = len(header.shape.layer_bytes)
            for layer, block in itertools.product(range(count - layers, count), range(header.shape.blocks)):
                place = offset + header.shape.offset(layer, block)
                file.seek(place)
                part = bytearray(file.read(header.shape.layer_bytes[layer]))
                damage(part)
                file.seek(place)
                file.write(part)
                sums[layer, block] = checksum(bytes(part))
            if forge:
                file.seek(offset)
                file.write(encode_run_header(dataclasses.replace(header, sums=sums)))


def _header(file: BinaryIO, offset: int) -> RunHeader:
    file.seek(offset)
    size = header_bytes_of(file.read(16))
    file.seek(offset)
    return decode_run_header(file.read(size))


def spoil_values(layer: bytearray) -> None:
    """Make one value of the last token huge."""
    make_last_huge(np.frombuffer(layer, np.float32))

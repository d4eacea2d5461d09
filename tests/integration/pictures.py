"""Pictures in prompts of the tiny vision model."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from typing import Any

from sglang_ext.testing.tokenizer import VISION_TOKENS, VOCAB_SIZE, emitted_ids

MODEL = "tiny-vl"
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4
"""Bytes of a token's KV: four layers of keys and values, four heads of 32 float32 numbers."""
START, END, IMAGE, VIDEO = (
    VOCAB_SIZE + VISION_TOKENS.index(f"<|{name}|>")
    for name in ("vision_start", "vision_end", "image_pad", "video_pad")
)
SIDE = 112
PICTURE_TOKENS = (SIDE // 28) ** 2


def picture(number: int, side: int = SIDE) -> str:
    """A data URL of a PNG of noise, a different one for each number."""
    rng = random.Random(number)
    return _png(side, side, b"".join(b"\0" + rng.randbytes(3 * side) for _ in range(side)))


def plain_picture(width: int, height: int) -> str:
    """A data URL of a PNG of one color."""
    return _png(width, height, (b"\0" + bytes((200, 90, 30)) * width) * height)


def _png(width: int, height: int, rows: bytes) -> str:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def video(number: int, side: int = SIDE, *, frames: int = 8, per_second: int = 4) -> str:
    """A data URL of an AVI of noise, a different one for each number, as raw frames: no encoder is needed."""
    rng = random.Random(number)
    size = (3 * side + -3 * side % 4) * side
    images = [_riff(b"00db", rng.randbytes(size)) for _ in range(frames)]
    numbers = (1_000_000 // per_second, size * per_second, 0, 0x10, frames, 0, 1, size, side, side)
    main = struct.pack("<14I", *numbers, *[0] * 4)
    rate = (0, 0, 0, 0, 1, per_second, 0, frames, size, 0, 0, 0, 0, side, side)
    stream = struct.pack("<4s4sIHHIIIIIIIIhhhh", b"vids", b"DIB ", *rate)
    form = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, size, 0, 0, 0, 0)
    described = _riff(b"LIST", b"strl" + _riff(b"strh", stream) + _riff(b"strf", form))
    header = _riff(b"LIST", b"hdrl" + _riff(b"avih", main) + described)
    index = b"".join(
        struct.pack("<4sIII", b"00db", 0x10, 4 + at * len(image), size) for at, image in enumerate(images)
    )
    body = header + _riff(b"LIST", b"movi" + b"".join(images)) + _riff(b"idx1", index)
    return "data:video/avi;base64," + base64.b64encode(_riff(b"RIFF", b"AVI " + body)).decode()


def _riff(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def words(seed: int, count: int) -> list[int]:
    """Tokens that are whole words, as the server has them again after it has made a text of them."""
    rng = random.Random(seed)
    return rng.choices(emitted_ids(), k=count)


def prompt(seed: int, *, before: int, after: int) -> list[int]:
    """Words, a picture, and words; the server puts `PICTURE_TOKENS` ids in the place of one."""
    return [*words(seed, before), START, IMAGE, END, *words(seed + 1, after)]


def with_picture(number: int, side: int = SIDE, **fields: Any) -> dict[str, Any]:
    """Fields of a request to ``/generate``."""
    return {"image_data": [picture(number, side)], **fields}

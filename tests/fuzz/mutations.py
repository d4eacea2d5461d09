"""Inputs made of seeds: bytes that are damaged, and JSON whose values, names and shape are changed.

All from a `random.Random`, so that an input is found again by its seed and number.
"""
# ruff: noqa: E501 - tables of inputs

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import orjson

from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.tenancy.request_fields import FIELDS, MEDIA, SAMPLING

NAMES = (
    *FIELDS,
    *sorted(name for dialect in DIALECTS.values() for name in dialect.own_fields),
    *SAMPLING,
    *MEDIA,
    "sglang_ext_resume",
    "image_url",
    "content",
    "role",
    "actions",
    "",
    "\0",
    "__req__",
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 31_999, 32_000, 1 << 31, (1 << 31) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1,
    1 << 200, 0.5, -0.0, 1e308, 1e999, "", "x", "x" * 5000, "\u0000", "\ufffd", "\U0010ffff", "\ud800", "null",
    "user", "sha256:" + "0" * 64, "http://127.0.0.1:1", "../../etc/passwd", [], [[]], [[[]]], {}, [{}], [None],
    [1, "a"], ["a", 1], [[1], 2], {"a": {"b": {"c": 1}}}, {"": ""}, [0] * 300, {"type": "text"},
    {"role": "user", "content": "x"}, {"sglang_ext_resume": {"output_ids": [1 << 40]}},
    {"type": "image_url", "image_url": {"url": "data:,", "content_hash": "sha256:" + "0" * 64}},
)  # fmt: skip
NUMBERS = (b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\x00" * 7, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
           b"\xc6\xff\xff\xff\xff", b"\xc1", b"\xc0", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\r\n", b"\r\n\r\n", b"\x00")  # fmt: skip
MOST_BYTES = 1 << 16
"""Longer inputs are cut: the effects of length alone are tested elsewhere."""


def damaged(seed: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """A few changes of bytes."""
    data = bytearray(seed)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        at = random.randrange(len(data) + 1)
        size = random.choice((1, 1, 2, 4, 16))
        match random.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << random.randrange(8)
            case 1 if at < len(data):
                data[at] = random.randrange(256)
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = random.randbytes(size)
            case 4:
                data[at:at] = data[at : at + size] * random.choice((1, 2, 64))
            case 5:
                data[at:] = b""
            case 6:
                other = random.choice(others)
                data[at:] = other[random.randrange(len(other) + 1) :]
            case _:
                data[at : at + size] = random.choice(NUMBERS)
    return bytes(data[:MOST_BYTES])


def rewritten(seed: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """A few changes of a JSON value; of bytes where the seed is none, or now and then."""
    try:
        value = orjson.loads(seed)
    except ValueError:
        return damaged(seed, others, random)
    try:
        for _ in range(random.choice((1, 1, 2, 3, 5))):
            value = _changed(value, random)
        text = json.dumps(value).encode()
    except (ValueError, RecursionError):
        return damaged(seed, others, random)
    return damaged(text, others, random) if random.random() < 0.05 else text[:MOST_BYTES]


def _changed(value: Any, random: Random) -> Any:
    root = [value]
    holder: Any = root
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and random.random() < 0.7:
        holder = holder[key]
        key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    there = holder[key]
    match random.randrange(8):
        case 0 | 1:
            holder[key] = copy.deepcopy(random.choice(VALUES))
        case 2 if isinstance(there, dict):
            there[random.choice(NAMES)] = copy.deepcopy(random.choice(VALUES))
        case 2 if isinstance(holder, dict):
            holder[random.choice(NAMES)] = copy.deepcopy(random.choice(VALUES))
        case 3 if isinstance(holder, dict):
            holder[random.choice(NAMES)] = holder.pop(key)
        case 4:
            del holder[key]
        case 5:
            holder[key] = [there]
        case 6 if isinstance(there, list):
            there.extend(copy.deepcopy(there[:8]))
        case 6:
            holder[key] = {random.choice(NAMES): there}
        case _:
            for _ in range(random.choice((1, 3, 200))):
                holder[key] = [holder[key]]
    return root[0] if root else None


def inputs(seeds: Sequence[bytes], count: int, random: Random, *, text: bool) -> Iterator[bytes]:
    """The seeds as they are, then so many inputs made of them."""
    yield from seeds
    mutate = rewritten if text else damaged
    for _ in range(count):
        yield mutate(random.choice(seeds), seeds, random)

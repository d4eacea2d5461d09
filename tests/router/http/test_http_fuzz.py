"""Bytes of any kind, cut anywhere: the server answers or refuses, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from http_rig import CLOSE, GET, chunked, post, running
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.router.http.body import BodyBudget
from sglang_ext.router.http.reader import Parsed, Phase, RequestReader
from sglang_ext.router.http.state import HttpLimits

LIMITS = HttpLimits(max_head_bytes=2000, max_body_bytes=3000)

MESSAGES = (
    GET,
    CLOSE,
    post("/x", b"12345"),
    post("/x", b"", "Expect: 100-continue"),
    chunked("/y", b"abc", b"d" * 100, trailers=b"T: u\r\n"),
    b"HEAD /h HTTP/1.1\r\nHost: h\r\n\r\n",
    b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)

messages = st.sampled_from(MESSAGES)
damaged = st.builds(
    lambda message, at, bad: message[: at % len(message)] + bad + message[at % len(message) + len(bad) :],
    messages,
    st.integers(0, 500),
    st.binary(min_size=1, max_size=3),
)
headers = st.builds(
    lambda name, value: b"GET / HTTP/1.1\r\nHost: h\r\n" + name + b": " + value + b"\r\n\r\n",
    st.sampled_from([b"Transfer-Encoding", b"Content-Length", b"Connection", b"Expect", b"Host", b"X", b""]),
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b"chunked", b"5", b"-1", b"close", b"upgrade", b"100-continue", b"1" * 30]),
    ),
)
stream = st.lists(st.one_of(messages, damaged, headers, st.binary(max_size=50)), min_size=1, max_size=6).map(
    b"".join
)
cuts = st.lists(st.integers(1, 400), max_size=20)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """``data`` in pieces of these sizes; the rest in one."""
    pieces, position = [], 0
    for size in at:
        pieces.append(data[position : position + size])
        position += size
    return [piece for piece in [*pieces, data[position:]] if piece]


def read(pieces: list[bytes]) -> tuple[list[Parsed], RequestReader]:
    budget = BodyBudget(LIMITS.max_total_body_bytes)
    reader = RequestReader(LIMITS.max_head_bytes, LIMITS.max_body_bytes, budget)
    found = [parsed for piece in pieces for parsed in reader.feed(piece)]
    held = sum(len(parsed.request.body) for parsed in found)
    unread = reader.body_size if reader.phase is Phase.BODY else 0
    assert budget.used == held + unread
    return found, reader


@given(stream, cuts)
@settings(max_examples=400)
def test_how_bytes_are_cut_does_not_matter(data: bytes, at: list[int]) -> None:
    whole, first = read(cut(data, []))
    parts, second = read(cut(data, at))
    assert [p.request for p in whole if not p.refused] == [p.request for p in parts if not p.refused]
    assert [p.refused.status for p in whole if p.refused] == [p.refused.status for p in parts if p.refused]
    assert first.phase is second.phase
    for parsed in whole[:-1]:
        assert parsed.refused is None, "a refusal is the last word"
        assert parsed.keep
    if whole and (whole[-1].refused or not whole[-1].keep):
        assert first.phase is Phase.DEAF


@given(stream)
def test_nothing_is_taken_for_a_request_that_was_a_body(data: bytes) -> None:
    """With any bytes in a body, the next request is the one behind it."""
    for message in (post("/x", data), chunked("/x", data) if data else post("/x", b"")):
        parsed, _ = read([message + CLOSE])
        assert [(p.request.path, p.request.body) for p in parsed] == [("/x", data), ("/last", b"")]


@pytest.mark.parametrize("seed", range(3))
async def test_a_server_survives(seed: int) -> None:
    """Many connections with such bytes at once; each is answered or closed, and afterwards all is as new."""
    samples: list[tuple[bytes, list[int]]] = []

    @settings(max_examples=100, database=None)
    @given(stream, cuts)
    def collect(data: bytes, at: list[int]) -> None:
        samples.append((data, at))

    collect()
    async with running(LIMITS) as rig:

        async def one(data: bytes, at: list[int], leave: Callable[[int], bool]) -> None:
            wire = await rig.connect()
            for number, piece in enumerate(cut(data, at)):
                wire.send(piece)
                await asyncio.sleep(0)
                if leave(number):
                    wire.reset()
                    return
            wire.writer.write_eof()
            await wire.ended()
            await wire.close()

        leaving: tuple[Callable[[int], bool], ...] = (
            lambda number: False, lambda number: number == 1, lambda number: True
        )  # fmt: skip
        for start in range(0, len(samples), 25):
            part = samples[start : start + 25]
            await asyncio.gather(*(one(data, at, leaving[seed]) for data, at in part))
        await rig.until_empty()
        wire = await rig.connect()
        wire.send(GET)
        assert (await wire.answer())[0] == 200

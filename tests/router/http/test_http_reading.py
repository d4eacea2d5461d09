"""Input that the HTTP server reads or refuses: bodies, heads, and bytes of any kind, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from http_rig import CLOSE, GET, Rig, chunked, post, running

from sglang_ext.errors import InternalError
from sglang_ext.router.http import body as http_body
from sglang_ext.router.http.body import PACKED_BYTES, SLICE_BYTES, BodyBudget, unpack
from sglang_ext.router.http.messages import HTTP2_REFUSAL
from sglang_ext.router.http.state import HttpLimits


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as rig:
        yield rig


# -- bodies ------------------------------------------------------------------------------------------


async def test_a_large_body(rig: Rig) -> None:
    wire = await rig.connect()
    body = bytes(range(256)) * 40_000
    wire.send(post("/x", body))
    wire.send(chunked("/y", *(body[i : i + 100_000] for i in range(0, len(body), 100_000))))
    assert (await wire.answer())[2] == b"POST /x %d" % len(body)
    assert (await wire.answer())[2] == b"POST /y %d" % len(body)
    assert [request.body == body for request in rig.echo.requests] == [True, True]


@pytest.mark.parametrize("how", ["announced", "chunked", "compressed"])
async def test_too_large_a_body_is_refused(how: str) -> None:
    async with running(HttpLimits(max_body_bytes=1000)) as rig:
        wire = await rig.connect()
        if how == "announced":
            wire.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\n\r\n")
        elif how == "chunked":
            wire.send(chunked("/x", *[b"x" * 100] * 500))
        else:
            wire.send(post("/x", gzip.compress(bytes(1001)), "Content-Encoding: gzip"))
        status, headers, body = await wire.answer()
        assert status == 413
        assert b"--max-payload-bytes" in body
        assert headers["connection"] == "close"
        assert await wire.ended() == b""
        assert rig.echo.requests == []


async def test_a_client_that_asks_whether_to_send_the_body_gets_100_continue(rig: Rig) -> None:
    wire = await rig.connect()
    message = post("/x", b"12345", "Expect: 100-continue")
    wire.send(b"GET /gate HTTP/1.1\r\nHost: h\r\n\r\n" + message[:-5])
    await rig.echo.gate.reached()
    rig.echo.gate.open()
    assert (await wire.answer())[0] == 200, "the earlier answer comes first"
    assert (await wire.answer())[0] == 100
    wire.send(b"12345")
    assert (await wire.answer())[2] == b"POST /x 5"
    wire.send(post("/x", b"", "Expect: miracles"))
    assert (await wire.answer())[0] == 417


@pytest.mark.parametrize(
    "head",
    ["Content-Length: 1048577", "Transfer-Encoding: chunked", "Content-Length: 5\r\nExpect: 100-continue"],
)
async def test_a_large_body_of_who_is_not_wanted_is_not_read(head: str, rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(f"POST /unwanted HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n".encode())
    status, _, body = await wire.answer()
    assert (status, body) == (401, b"not you")
    assert await wire.ended() == b""
    assert rig.echo.requests == []


async def test_only_large_bodies_are_asked_about(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(post("/unwanted", b"small"))
    assert (await wire.answer())[0] == 200
    wire.send(post("/x", bytes((1 << 20) + 1)))
    assert (await wire.answer())[0] == 200
    assert [(asked.path, asked.body) for asked in rig.echo.asked] == [("/x", b"")]


async def test_too_large_a_body_is_refused_instead_of_asked_for() -> None:
    async with running(HttpLimits(max_body_bytes=1000)) as rig:
        wire = await rig.connect()
        wire.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n")
        assert (await wire.answer())[0] == 413


@pytest.mark.parametrize("coding", ["gzip", "deflate", "bare deflate"])
async def test_compressed_bodies_are_unpacked(coding: str, rig: Rig) -> None:
    body = b"some text " * 100_000
    packer = zlib.compressobj(wbits={"gzip": 31, "deflate": 15, "bare deflate": -15}[coding])
    packed = packer.compress(body) + packer.flush()
    wire = await rig.connect()
    wire.send(post("/x", packed, f"Content-Encoding: {coding.split()[-1]}"))
    assert (await wire.answer())[2] == b"POST /x %d" % len(body)
    assert rig.echo.requests[0].body == body


@pytest.mark.parametrize(
    ("coding", "damage", "status"), [("br", 0, 415), ("gzip", 3, 400), ("gzip", -3, 400)]
)
async def test_bodies_that_cannot_be_unpacked(coding: str, damage: int, status: int, rig: Rig) -> None:
    packed = gzip.compress(b"some text " * 100)
    packed = packed[damage:] if damage >= 0 else packed[:damage]
    wire = await rig.connect()
    wire.send(post("/x", packed, f"Content-Encoding: {coding}"))
    assert (await wire.answer())[0] == status
    assert rig.echo.requests == []


_DECOMPRESSOBJ = zlib.decompressobj


class CountingZlib:
    """zlib's decompressor, and how many bytes it was handed in all."""

    def __init__(self, wbits: int) -> None:
        self._inner = _DECOMPRESSOBJ(wbits=wbits)

    handed = 0

    def decompress(self, data: bytes, most: int) -> bytes:
        CountingZlib.handed += len(data)
        return self._inner.decompress(data, most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("kind", ["random", "zeros", "mixed"])
async def test_unpacking_takes_linear_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """zlib copies the input that it does not consume: for four times the body, four times as much."""
    monkeypatch.setattr(http_body.zlib, "decompressobj", CountingZlib)
    handed = []
    for size in (1 << 18, 1 << 20, 1 << 22):
        noise = random.Random(size).randbytes(size)
        body = {"random": noise, "zeros": bytes(16 * size), "mixed": noise[: size // 2] + bytes(8 * size)}[
            kind
        ]
        packed = gzip.compress(body, 1)
        CountingZlib.handed = 0
        budget = BodyBudget(1 << 30)
        assert await unpack(packed, "gzip", 1 << 30, budget) == body
        assert budget.used == len(body)
        # Each call hands over at most PACKED_BYTES, and gives SLICE_BYTES or takes all of them.
        calls = len(packed) / PACKED_BYTES + len(body) / SLICE_BYTES + 2
        assert CountingZlib.handed <= calls * PACKED_BYTES
        handed.append(CountingZlib.handed)
    assert handed[2] < 5 * handed[1]
    assert handed[1] < 5 * handed[0]


async def test_unpacking_that_hands_over_all_of_the_rest_is_seen_to_be_quadratic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_body.zlib, "decompressobj", CountingZlib)
    monkeypatch.setattr(http_body, "PACKED_BYTES", 1 << 30)
    handed = []
    for size in (1 << 20, 1 << 22):
        CountingZlib.handed = 0
        await unpack(gzip.compress(random.Random(size).randbytes(size)), "gzip", 1 << 30, BodyBudget(1 << 30))
        handed.append(CountingZlib.handed)
    assert handed[1] > 10 * handed[0]


async def test_other_requests_are_answered_while_a_large_body_is_unpacked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, begun = threading.Event(), threading.Event()

    def held(pieces: Iterator[bytes], least: int) -> list[bytes]:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert released.wait(20)
        return next_pieces(pieces, least)

    next_pieces = http_body._next_pieces
    monkeypatch.setattr(http_body, "_next_pieces", held)
    body = bytes(1 << 22)
    wire, other = await rig.connect(), await rig.connect()
    wire.send(post("/x", gzip.compress(body), "Content-Encoding: gzip"))
    await rig.until(begun.is_set)
    try:
        other.send(GET)
        assert (await other.answer())[0] == 200
    finally:
        released.set()
    assert (await wire.answer())[2] == b"POST /x %d" % len(body)


# -- all bodies together -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["announced", "chunked", "compressed"])
async def test_bodies_of_all_requests_have_one_budget(how: str) -> None:
    async with running(HttpLimits(max_body_bytes=1000, max_total_body_bytes=1000)) as rig:
        first, second = await rig.connect(), await rig.connect()
        first.send(post("/gate", bytes(600)))
        await rig.echo.gate.reached()
        another = {
            "announced": b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 401\r\n\r\n",
            "chunked": chunked("/x", *[bytes(100)] * 5),
            "compressed": post("/x", gzip.compress(bytes(401)), "Content-Encoding: gzip"),
        }[how]
        second.send(another)
        status, headers, body = await second.answer()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert b"--memory-limits bodies" in body
        third = await rig.connect()
        third.send(post("/small", bytes(300)))
        assert (await third.answer())[0] == 200, "there is room for it"
        rig.echo.gate.open()
        assert (await first.answer())[0] == 200
        await third.close()
        fourth = await rig.connect()
        fourth.send(post("/x", bytes(1000)))
        assert (await fourth.answer())[0] == 200, "as much as before"
        await rig.until(lambda: rig.server.state.bodies.used == 0)


_HALF = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 500\r\n\r\n" + bytes(300)


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        (_HALF, 300),
        (post("/gate", bytes(200)), 200),
        (post("/gate", bytes(200)) + post("/x", bytes(100)) + _HALF, 600),
        (post("/gate", gzip.compress(bytes(10_000)), "Content-Encoding: gzip"), None),
    ],
)
async def test_who_goes_away_leaves_the_budget_as_it_was(sent: bytes, held: int | None) -> None:
    async with running() as rig:
        wire = await rig.connect()
        wire.send(sent)
        bodies = rig.server.state.bodies
        await rig.until(lambda: bodies.used == held if held else bodies.used > 10_000)
        wire.reset()
        await rig.until_empty()
        assert bodies.used == 0


async def test_a_body_that_is_not_given_back_is_found() -> None:
    async with running() as rig:
        assert rig.server.state.bodies.take(300)
        with pytest.raises(InternalError, match="300 of"):
            rig.server.check()
        rig.server.state.bodies.give(300)


# -- heads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [10, 1000, None])
async def test_too_large_a_head_is_refused(cut: int | None) -> None:
    async with running(HttpLimits(max_head_bytes=5000)) as rig:
        wire = await rig.connect()
        head = b"GET / HTTP/1.1\r\nHost: h\r\n" + b"".join(
            b"x%d: %b\r\n" % (n, b"y" * 90) for n in range(100)
        )
        for start in range(0, len(head), cut or len(head)):
            wire.send(head[start : start + (cut or len(head))])
            await asyncio.sleep(0)
        wire.send(b"\r\n")
        assert (await wire.answer())[0] == 431
        assert await wire.ended() == b""


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length:4\r\ntransfer-encoding:chunked\r\n\r\n0\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\ntransfer-encoding:chunked\r\nContent-Length:4\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4,4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\nabcd\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0x4\r\nabcd\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: a\0b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"GET / HTTP/9.9\r\nHost: h\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)  # fmt: skip
async def test_what_two_readers_could_read_in_two_ways_is_refused(
    message: bytes, status: int, rig: Rig
) -> None:
    wire = await rig.connect()
    wire.send(message + GET)
    assert (await wire.answer())[0] == status
    assert await wire.ended() == b""
    assert rig.echo.requests == [], "the rest was not taken for a request"


async def test_headers_for_one_connection_stay_here(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, X-Mine, Host\r\nX-Mine: 1\r\n")
    wire.send(b"A: b\r\nA: c\r\n\r\n")
    assert (await wire.answer())[0] == 200
    headers = rig.echo.requests[0].headers
    assert "x-mine" not in headers
    assert headers["host"] == "h"
    assert headers["a"] == "b, c"


@pytest.mark.parametrize(
    ("target", "path", "sent_on"),
    [
        ("http://elsewhere/a%20b?c", "/a b", "/a%20b?c"),
        ("http://elsewhere", "/", "/"),
        ("/a/../b#c", "/a/../b", "/a/../b"),
        ("/%00", "/\0", "/%00"),
    ],
)
async def test_targets(target: str, path: str, sent_on: str, rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(f"GET {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    assert (await wire.answer())[0] == 200
    assert (rig.echo.requests[0].path, rig.echo.requests[0].target) == (path, sent_on)


@pytest.mark.parametrize("framing", ["length", "chunks", "nothing"])
async def test_an_offer_of_another_protocol_is_ignored(framing: str, rig: Rig) -> None:
    """As Java's client and ``curl --http2`` make it; the body must not be taken for a request."""
    offer = b"Host: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    body = b"GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n"
    if framing == "length":
        message = b"POST /x HTTP/1.1\r\n" + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif framing == "chunks":
        head = b"POST /x HTTP/1.1\r\n" + offer + b"Transfer-Encoding: chunked\r\n\r\n"
        message = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        message = b"GET /x HTTP/1.1\r\n" + offer + b"\r\n"
    for send in ("whole", "cut"):
        wire = await rig.connect()
        rig.echo.requests.clear()
        if send == "whole":
            wire.send(message * 3 + CLOSE)
        else:
            await wire.dribble(message * 3 + CLOSE)
        for _ in range(3):
            assert (await wire.answer())[0] == 200
        assert (await wire.answer())[2] == b"GET /last 0"
        assert [request.path for request in rig.echo.requests] == ["/x", "/x", "/x", "/last"]
        assert {request.body for request in rig.echo.requests[:3]} == {b"" if framing == "nothing" else body}


@pytest.mark.parametrize("cut", [1, 5, 24])
async def test_http_2_is_sent_back_to_http_1_1(cut: int, rig: Rig) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    wire = await rig.connect()
    wire.send(preface[:cut])
    await asyncio.sleep(0)
    wire.send(preface[cut:] + bytes(100))
    assert await wire.ended() == HTTP2_REFUSAL
    await wire.close()
    await rig.until_empty()

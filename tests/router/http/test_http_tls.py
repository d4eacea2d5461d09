"""TLS on both sides of the router, with certificates made on the spot."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_rig import GET, running

from sglang_ext.errors import ConfigError
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.http.tls import server_context, worker_context
from sglang_ext.router.http.types import ConnectFailed
from sglang_ext.router.http.upstream import HttpUpstream
from tests.support.servers.workers import Gate


@pytest.fixture
async def trusting(certificate: tuple[str, str]) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream(tls=lambda: worker_context(certificate[0]))
    yield upstream
    await upstream.close()


async def test_requests_over_tls_and_connections_kept(
    certificate: tuple[str, str], trusting: HttpUpstream
) -> None:
    async with running(tls=server_context(*certificate)) as rig:
        url = f"https://127.0.0.1:{rig.server.port}"
        body = bytes(1 << 20)
        for _ in range(3):
            response = await trusting.open("POST", url + "/x", body=body, timeout_s=10)
            assert await response.read() == b"POST /x %d" % len(body)
            response.close()
        assert trusting.open_connections == 1
        response = await trusting.open("GET", url + "/stream/500", timeout_s=10)
        assert len(await response.read()) == 500
        response.close()
        await trusting.close()
        await rig.until_empty()


async def test_a_client_that_goes_away_over_tls(certificate: tuple[str, str], trusting: HttpUpstream) -> None:
    async with running(tls=server_context(*certificate)) as rig:
        response = await trusting.open(
            "GET", f"https://127.0.0.1:{rig.server.port}/held-stream", timeout_s=10
        )
        assert await response.piece() == b"first"
        response.close()
        await rig.until_empty()
        assert rig.echo.cancelled == 1


async def test_the_last_answer_arrives_whole(certificate: tuple[str, str]) -> None:
    client = ssl.create_default_context(cafile=certificate[0])
    async with running(tls=server_context(*certificate)) as rig:
        wire = await rig.connect(ssl=client)
        wire.send(b"GET /big/5000000 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert len((await wire.answer())[2]) == 5_000_000
        assert await wire.ended() == b""


async def test_plain_http_to_a_tls_port_gets_nothing(certificate: tuple[str, str]) -> None:
    async with running(tls=server_context(*certificate)) as rig:
        wire = await rig.connect()
        wire.send(GET)
        assert not (await wire.ended()).startswith(b"HTTP/1.1 200")
        assert rig.echo.requests == []


async def test_certificates_are_read_beside_the_event_loop(certificate: tuple[str, str]) -> None:
    read_in: list[threading.Thread] = []

    def tls() -> ssl.SSLContext:
        read_in.append(threading.current_thread())
        return worker_context(certificate[0])

    upstream = HttpUpstream(tls=tls)
    async with running(tls=server_context(*certificate)) as rig:
        for _ in range(2):
            response = await upstream.open("POST", f"https://127.0.0.1:{rig.server.port}/x", timeout_s=10)
            await response.read()
            response.close()
        await upstream.close()
        await rig.until_empty()
    assert len(read_in) == 1
    assert read_in[0] is not threading.current_thread()


async def test_a_worker_with_an_untrusted_certificate_is_not_connected_to(
    certificate: tuple[str, str],
) -> None:
    upstream = HttpUpstream(tls=lambda: worker_context(None))
    async with running(tls=server_context(*certificate)) as rig:
        with pytest.raises(ConnectFailed, match="certificate"):
            await upstream.open("GET", f"https://127.0.0.1:{rig.server.port}/")
        await upstream.close()


async def test_a_router_that_serves_tls(
    certificate: tuple[str, str], start_worker, start_router, trusting: HttpUpstream
) -> None:
    cert, key = certificate
    worker = await start_worker()
    router = await start_router(worker, tls_cert_file=cert, tls_key_file=key)
    assert router.url.startswith("https://")
    worker.between_chunks = Gate()
    body = json.dumps(
        {"text": "Once upon", "sampling_params": {"max_new_tokens": 4}, "stream": True}
    ).encode()
    response = await trusting.open("POST", router.url + "/generate", body=body, timeout_s=10)
    assert (await response.piece()).startswith(b"data: {")
    response.close()
    await worker.until(lambda: worker.aborted == 1)


def test_flags_that_do_not_go_together(certificate: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tls-key-file"):
        RouterConfig(worker_urls=("http://a",), tls_cert_file=certificate[0])
    with pytest.raises(ConfigError, match="--tls-cert-file"):
        server_context(certificate[0], str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="--tls-worker-ca-file"):
        worker_context(str(tmp_path / "missing"))

"""Whatever strangers send, only declared errors are raised, and nothing that is not allowed gets through.

The corpus has a folder of seeds for each target. In the short form each seed and a few hundred inputs made of
them; with `--long` a million in all. An input that was a finding stays in the corpus.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import sys
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from http_bodies import bodies
from mutations import inputs
from targets import CORPUS, Target, targets

from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.transports.tcp import HANDSHAKE_SECONDS, NONCE_BYTES, SESSION_BYTES, TcpTransport
from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until
from tests.support.servers.workers import running_worker
from tests.support.sources import from_sources

pytestmark = pytest.mark.slow

TARGETS = {target.name: target for target in targets()}
LONG = 1_000_000
OVER_SOCKETS = 20_000
"""Of the long form's inputs: requests to a router. A tenth as many connections go to a transport."""
SHORT = 150
EACH = (LONG - OVER_SOCKETS - OVER_SOCKETS // 10) // len(TARGETS) + 1


class Finding(AssertionError):
    """An input that does harm."""


def run(target: Target, count: int, seed: int) -> int:
    """Feed the seeds and so many inputs. Returns how many.

    Raises:
        Finding: with the input; it belongs into the corpus.
    """
    fed = 0
    for data in inputs(target.seeds(), count, Random(seed), text=target.text):
        fed += 1
        try:
            target.feed(data)
        except target.declared:
            pass
        except BaseException as error:
            name = hashlib.sha256(data).hexdigest()[:12]
            if keep := os.environ.get("SGLANG_EXT_FUZZ_FINDINGS"):
                folder = Path(keep) / target.name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            raise Finding(f"{target.name} {name}: {data[:2000]!r}: {error!r}") from error
    return fed


@pytest.mark.parametrize("name", TARGETS)
def test_only_declared_errors_come_out(name: str, long_run: bool) -> None:
    seed = secrets.randbits(32) if long_run else 0
    print(f"{name}: seed {seed}", file=sys.stderr)
    fed = run(TARGETS[name], EACH if long_run else SHORT, seed)
    assert fed > (EACH if long_run else SHORT)


def test_every_target_has_seeds_and_every_folder_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {*TARGETS, "http"}
    assert all(target.seeds() for target in TARGETS.values())


def test_the_twin_that_forgets_an_error_is_found() -> None:
    """A decoder that lets one error of its parser out."""
    import msgspec

    def careless(data: bytes) -> None:
        msgspec.msgpack.decode(data)

    real = TARGETS["to-agent"]
    with pytest.raises(Finding, match="to-agent"):
        run(Target("to-agent", careless, real.declared, text=False), SHORT, 0)


def test_the_twin_that_lets_a_field_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = from_sources("sglang_ext.router.tenancy.admit")
    monkeypatch.setattr(admit, "check_reserved", lambda payload, caller, dialect: None)
    monkeypatch.setattr("targets.admit", admit.admit)
    with pytest.raises(Finding):
        run(TARGETS["body-generate"], 5000, 0)


async def test_a_router_answers_everything_itself(
    long_run: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No 5xx of ours, over sockets, with the tokenizer and everything behind the checks."""
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer
    from sglang_ext.testing.tokenizer import write_tokenizer
    from tests.support.servers.workers import StandInWorker

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 4096)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    count = OVER_SOCKETS if long_run else SHORT
    random = Random(secrets.randbits(32) if long_run else 0)
    worker = StandInWorker(tokenizer=tokenizer, tokenizer_path=str(folder))
    tally: dict[int, int] = {}
    async with (
        running_worker(worker),
        Router(RouterConfig(worker_urls=(worker.url,), port=0)) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):

        async def send(path: str, data: bytes) -> None:
            async with session.post(router.url + path, data=data) as answer:
                said = await answer.text()
                tally[answer.status] = tally.get(answer.status, 0) + 1
                own = "x-kv-instance" not in answer.headers or "of the router" in said
                assert answer.status < 500 or not own, (path, data[:2000], answer.status, said[:500])

        batch: list[Any] = []
        for path, data in bodies(count, random):
            batch.append(send(path, data))
            if len(batch) == 16:
                await asyncio.gather(*batch)
                batch.clear()
        await asyncio.gather(*batch)
        assert len(router.fleet.usable()) == 1
        assert len(router.flights) == 0
        # Responses in the background hold their places until they have ended.
        assert router.admission.admitted == len(worker.in_background)
        worker.kept.update(worker.in_background)
        await until(lambda: not router.admission.admitted)
        router.check()
    print(f"http: {tally}", file=sys.stderr)
    assert tally[200] > 0
    assert tally[400] > 0


def test_a_transport_survives_every_handshake(long_run: bool) -> None:
    """Bytes in place of a proof: each connection is closed, and nothing is kept of it."""
    random = Random(0)
    greeted, answers = 0, set[bytes]()
    transport = TcpTransport(RegionTable())
    try:
        for number in range(OVER_SOCKETS // 10 if long_run else 50):
            with socket.create_connection(
                ("127.0.0.1", transport.port), timeout=HANDSHAKE_SECONDS + 5
            ) as sock:
                size = random.choice((0, 1, SESSION_BYTES, SESSION_BYTES + 32, SESSION_BYTES + 33, 500))
                # Closed at any moment from our side or theirs.
                with contextlib.suppress(ConnectionError, OSError):
                    nonce = sock.recv(NONCE_BYTES)
                    greeted += len(nonce) == NONCE_BYTES
                    sock.sendall(random.choice((random.randbytes(size), nonce * (1 + size // NONCE_BYTES))))
                    if number % 3:
                        sock.shutdown(socket.SHUT_WR)
                        answers.add(sock.recv(1))
        assert greeted > 0
        assert answers <= {b""}, "it was taken for a peer"
        assert not transport._sessions
        assert transport._thread.is_alive()
    finally:
        transport.close()

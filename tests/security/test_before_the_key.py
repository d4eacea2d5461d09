"""Input without a key costs next to nothing: compressed and large bodies, connections, signatures."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_rig import running
from membership_contract import Ear

from sglang_ext.clock import SystemClock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.protocol.cluster import MAX_BODY_BYTES, PATH
from sglang_ext.router.cluster.broadcast import RouterChannel
from sglang_ext.router.cluster.membership_local import LocalMembership
from sglang_ext.router.cluster.shared_replays import SharedReplays
from sglang_ext.router.http.spare_files import SpareFiles
from sglang_ext.router.http.types import Request
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import until

KEY = "sk-the-router-1"
SECRET = b"k" * 16 + b"a key that nobody guesses, for tests"
MIB = 1 << 20
UNPACKED = 48 * MIB
CONNECTIONS = 12


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


async def send_packed(client: Any, url: str, key: str, body: bytes) -> int:
    headers = {"content-encoding": "gzip", "authorization": f"Bearer {key}"}
    async with client.post(url, data=body, headers=headers) as answer:
        await answer.read()
        return int(answer.status)


# -- bodies ---------------------------------------------------------------------------------------


async def test_nothing_is_unpacked_for_who_has_no_key(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), api_key=KEY)
    packed = gzip.compress(b'{"text": "' + bytes(UNPACKED), 9)
    assert len(packed) < 1 << 16, "small enough to be read"
    before = peak_bytes()
    url = router.url + "/generate"
    statuses = await asyncio.gather(
        *(send_packed(client, url, "none of ours", packed) for _ in range(CONNECTIONS))
    )
    assert set(statuses) == {401}
    assert peak_bytes() - before < UNPACKED, "of what would be a dozen times that"
    good = gzip.compress(json.dumps({"text": "hi", "sampling_params": {"max_new_tokens": 1}}).encode())
    assert await send_packed(client, url, KEY, good) == 200, "the twin: with the key it is"
    assert await send_packed(client, url, KEY, packed) == 400, "the twin: this one too"


@pytest.mark.parametrize("path", [PATH, PATH + "/a/drain", "/health", "/ui"])
@pytest.mark.parametrize("how", ["compressed", "large", "of any length"])
async def test_what_asks_for_no_key_takes_small_plain_bodies(
    start_worker, start_router, client, path: str, how: str
) -> None:
    router = await start_router(await start_worker(), api_key=KEY)
    body: Any = bytes(MAX_BODY_BYTES + 1)
    headers = {}
    if how == "compressed":
        body, headers = gzip.compress(body), {"content-encoding": "gzip"}
    elif how == "of any length":

        async def pieces():
            yield bytes(10)

        body = pieces()
    method = "POST" if path.startswith(PATH) else "GET"
    async with client.request(method, router.url + path, data=body, headers=headers) as answer:
        told = await answer.json()
    expected = {"compressed": 415, "large": 413, "of any length": 411}[how]
    assert answer.status == expected, told


def test_what_cannot_be_a_members_is_not_hashed() -> None:
    class Unhashable:
        """Fails if its bytes are asked for."""

    key, now = ClusterKey(SECRET), 1000.0
    body: Any = Unhashable()
    nonce = "0" * 32
    for header in ("", "Bearer x", f"KV-HMAC {int((now - 100) * 1000)}.{nonce}.x", f"KV-HMAC 1.{nonce}.x"):
        assert key.problem(header, "POST", PATH, body, now) is not None
    with pytest.raises(TypeError):  # the twin
        key.problem(f"KV-HMAC {int(now * 1000)}.{nonce}.x", "POST", PATH, body, now)


# -- signatures -----------------------------------------------------------------------------------


def signed(key: ClusterKey, wall: float) -> Request:
    header = key.sign("POST", PATH, b"{}", wall)
    return Request("POST", PATH, PATH, {"authorization": header}, b"{}")


def test_a_signature_is_good_at_one_router_once() -> None:
    key, clock = ClusterKey(SECRET), FakeClock()
    channels = [RouterChannel(name) for name in ("one", "other", "later")]
    one, other = (SharedReplays(channel, clock) for channel in channels[:2])
    channels[0].outgoing.subscribe(channels[1].receive)
    request = signed(key, clock.wall())
    assert one.problem(request, key) is None
    for router in (one, other):
        assert router.problem(request, key) == "its signature was used before"
    assert other.problem(signed(key, clock.wall()), key) is None, "the twin"
    clock.advance(1.0)
    later = SharedReplays(channels[2], clock)
    for message in one.snapshot():
        channels[2].receive(message)
    assert later.problem(request, key) == "its signature was used before"


def test_what_was_signed_before_a_router_began_is_refused() -> None:
    key, clock = ClusterKey(SECRET), FakeClock()
    request = signed(key, clock.wall())
    clock.advance(1.0)
    again = SharedReplays(RouterChannel("one"), clock)
    assert "before this router began" in (again.problem(request, key) or "")
    assert again.problem(signed(key, clock.wall()), key) is None, "the twin"


# -- connections ----------------------------------------------------------------------------------


async def test_a_connection_without_a_byte_ends_as_a_head_would() -> None:
    async with running() as rig:
        limits = rig.server.state.limits
        assert limits.head_timeout_s < limits.idle_timeout_s
        silent, used = await rig.connect(), await rig.connect()
        used.send(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await used.answer())[0] == 200
        await rig.until(lambda: len(rig.server.state.connections) == 2)
        rig.later(limits.head_timeout_s + 1)
        assert await silent.ended() == b""
        await rig.until(lambda: len(rig.server.state.connections) == 1)
        used.send(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await used.answer())[0] == 200, "the twin: this one has asked before"


@pytest.fixture
def few_files() -> Iterator[Any]:
    """Takes all open files that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take() -> None:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return

    yield take
    for each in taken:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("spare", [True, False])
async def test_a_router_whose_clients_take_all_files_goes_on(
    tmp_path: Path, few_files: Any, caplog: pytest.LogCaptureFixture, spare: bool
) -> None:
    """It looks for other routers each second; that raised, and ended it."""
    os.chmod(tmp_path, 0o700)
    one = LocalMembership(tmp_path, "one", SystemClock())
    other = LocalMembership(tmp_path, "other", SystemClock())
    await one.start(Ear())
    try:
        if not spare:
            one._spare.close()
        few_files()
        one._look()
        assert ("is tried again" in caplog.text) is not spare
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
        await other.start(Ear())
        await until(lambda: len(one._heard) == 1 and len(other._heard) == 1)
        await other.stop()
        await one.stop()


def test_spare_files_come_back() -> None:
    files = SpareFiles(2)
    files.fill()
    assert repr(files) == "SpareFiles(2 of 2)"
    tries = []

    def lacking() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(24, "Too many open files")
        return 5

    assert files.run(lacking) == 5
    assert repr(files) == "SpareFiles(1 of 2)"
    files.fill()
    assert repr(files) == "SpareFiles(2 of 2)"
    with pytest.raises(FileNotFoundError):
        files.run(lambda: os.open("/none/there", os.O_RDONLY))
    files.close()

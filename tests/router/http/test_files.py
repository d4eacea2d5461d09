"""No disk stalls the router: requests are answered while a file is not. A FIFO stands for the disk."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.errors import ConfigError
from sglang_ext.router.app import run
from sglang_ext.router.endpoints import pages
from sglang_ext.router.tenancy.tenants import KeyEntry

KEYS = '{"keys": [{"key": "sk-first-key", "tenant": "a"}]}'


async def order_of(
    fifo: Path, read: Awaitable[Any], router: Any, client: Any, patience_s: float
) -> list[str]:
    """The order of two events: a request is answered, and the disk responds. The disk responds after the
    answer, or after ``patience_s`` seconds without one.

    read: the reader of the file.
    """
    order: list[str] = []
    answered = threading.Event()

    def disk() -> None:
        answered.wait(patience_s)
        order.append("disk")
        with fifo.open("wb"):
            pass

    thread = threading.Thread(target=disk, name="slow disk")
    thread.start()
    try:
        reading = asyncio.ensure_future(read)
        await asyncio.sleep(0)  # it has begun
        async with client.get(router.url + "/health") as answer:
            assert answer.status == 200
        order.append("request")
        answered.set()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        answered.set()
        await asyncio.to_thread(thread.join)
    return order


async def with_keys(start_worker: Any, start_router: Any, folder: Path) -> tuple[Any, Path]:
    """A router whose file of API keys is on a slow disk from now on."""
    path = folder / "keys.json"
    path.write_text(KEYS)
    path.chmod(0o600)
    router = await start_router(await start_worker(), api_keys_file=str(path))
    path.unlink()
    os.mkfifo(path, 0o600)
    return router, path


async def test_keys_are_read_again_beside_requests(start_worker, start_router, client, tmp_path) -> None:
    router, path = await with_keys(start_worker, start_router, tmp_path)
    reading = asyncio.ensure_future(router.read_keys())
    assert await order_of(path, reading, router, client, 30.0) == ["request", "disk"]
    with pytest.raises(ConfigError, match="is not a file"):
        reading.result()


async def test_the_twin_that_reads_on_the_event_loop_is_found(
    start_worker, start_router, client, tmp_path, monkeypatch
) -> None:
    async def on_the_loop(path: str) -> tuple[KeyEntry, ...]:
        with open(path, "rb") as file:  # noqa: ASYNC230
            file.read()
        return ()

    router, path = await with_keys(start_worker, start_router, tmp_path)
    monkeypatch.setattr(run, "read_key_file", on_the_loop)
    assert await order_of(path, router.read_keys(), router, client, 0.5) == ["disk", "request"]


async def test_the_page_is_read_beside_requests(
    start_worker, start_router, client, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    os.mkfifo(tmp_path / "index.html")
    router = await start_router(await start_worker())

    async def page() -> int:
        async with aiohttp.ClientSession() as other, other.get(router.url + "/ui") as answer:
            return answer.status

    assert await order_of(tmp_path / "index.html", page(), router, client, 30.0) == ["request", "disk"]


async def test_the_key_of_the_cluster_is_looked_at_in_a_thread(
    start_worker, start_router, client, tmp_path, eventually
) -> None:
    path = tmp_path / "cluster.key"

    def write(text: str) -> None:
        path.write_text(text)
        path.chmod(0o600)

    write("first-key-of-the-cluster-0123456789\n")
    router = await start_router(await start_worker(), cluster_key_file=str(path))
    key = router.cluster_key
    looked: list[int] = []
    look: Callable[[], None] = key.look

    def noted() -> None:
        looked.append(threading.get_ident())
        look()

    key.look = noted
    write("second-key-of-the-cluster-0123456789\n")
    await eventually(lambda: key == read_cluster_key(path))
    assert looked
    assert threading.get_ident() not in looked

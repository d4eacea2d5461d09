"""The Python client's calls that wait for an answer, before a real router."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.client import Client, Confirmation, RouterError, confirmation
from tests.support.servers.ports import free_port

ROOT = Path(__file__).parents[3]
KEY = "the-key-of-this-test"
MANUAL = "You know this manual. " + "Open the valve by a quarter turn, and wait. " * 12


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}], **more}


async def chat(client, router, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """(answer, its headers)."""
    sent = {"authorization": f"Bearer {KEY}", **(headers or {})}
    async with client.post(router.url + "/v1/chat/completions", json=body, headers=sent) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers


@pytest.fixture
async def started(start_worker, start_router) -> Any:
    """(a router before a stand-in, the stand-in, a client)."""
    worker = await start_worker()
    router = await start_router(worker, api_key=KEY)
    return router, worker, Client(router.url + "/", KEY)


async def test_a_hint_from_its_announcement_to_its_end(started) -> None:
    router, _, client = started
    taken = await asyncio.to_thread(client.hint, text=MANUAL, session="reviewer", ttl_s=60, priority=1)
    assert (taken["verdict"], taken["session"]) == ("accepted", True)
    ready = await asyncio.to_thread(client.hint_state, taken["id"], wait_s=20)
    assert ready["state"] == "ready"
    assert sum(ready["tokens"].values()) > 50
    again = await asyncio.to_thread(client.session("reviewer").hint, text=MANUAL)
    assert again["id"] == taken["id"]
    assert (await asyncio.to_thread(client.withdraw, taken["id"]))["state"] == "cancelled"
    assert router.advisor.book.counts["cancelled"] == 1


async def test_documents_are_registered_named_listed_and_deleted(started, client) -> None:
    router, _, calls = started
    system = [{"role": "system", "content": MANUAL}]
    put = await asyncio.to_thread(calls.put_document, "manual", messages=system, ttl_s=600, instances=1)
    assert (put["id"], put["kind"]) == ("manual", "messages")
    await asyncio.to_thread(calls.put_document, "numbers", input_ids=[5, 6, 7], priority=0)
    answer, _ = await chat(client, router, ask(document_ids=["manual"]))
    assert answer["usage"]["prompt_tokens"] > put["tokens"] > 50
    assert (await asyncio.to_thread(calls.document, "manual"))["requests"] == 1
    assert {each["id"] for each in await asyncio.to_thread(calls.documents)} == {"manual", "numbers"}
    await asyncio.to_thread(calls.delete_document, "manual")
    with pytest.raises(RouterError) as refused:
        await asyncio.to_thread(calls.document, "manual")
    assert refused.value.status == 404


async def test_a_session_s_headers_name_it(started, client) -> None:
    router, _, calls = started
    session = calls.session("reviewer")
    await chat(client, router, ask(), session.headers)
    assert (await asyncio.to_thread(session.hint, earliest_s=1.0))["verdict"] == "accepted"
    with pytest.raises(RouterError) as refused:
        await asyncio.to_thread(calls.session("never seen").hint)
    assert (refused.value.status, refused.value.code) == (404, "unknown_session")
    with pytest.raises(ValueError, match="not empty"):
        calls.session("")


async def test_sessions_of_sglang_are_opened_and_closed(started) -> None:
    _, worker, calls = started
    worker.answers = {"/open_session": (200, "as told"), "/close_session": (200, None)}
    name = await asyncio.to_thread(calls.open_session, 1000, session_id="mine", timeout=30)
    assert name == "mine"
    await asyncio.to_thread(calls.close_session, name)
    assert [path for _, path, _ in worker.calls] == ["/open_session", "/close_session"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["durable", "late", None])
async def test_how_an_answer_s_end_was_confirmed(started, client, end: str | None, stream: bool) -> None:
    router, worker, calls = started
    worker.end_details = {} if end is None else {"durability_end": end}
    expected = None if end is None else Confirmation(end)
    sent = {"authorization": f"Bearer {KEY}", "x-request-id": "confirmed"}
    async with client.post(
        router.url + "/v1/chat/completions", json=ask(stream=stream), headers=sent
    ) as response:
        body = await response.read()
    assert await asyncio.to_thread(calls.confirmation, "confirmed") == expected
    if not stream:
        assert confirmation(json.loads(body)) == expected
    assert expected is None or expected.durable is (end == "durable")


async def test_a_request_is_explained_by_either_name(started, client) -> None:
    router, _, calls = started
    answer, headers = await chat(client, router, ask())
    by_header = await asyncio.to_thread(calls.explain, headers["x-request-id"])
    by_answer = await asyncio.to_thread(calls.explain, answer["id"])
    assert by_header == by_answer
    assert by_header["prompt"]["tokens"] == answer["usage"]["prompt_tokens"]
    with pytest.raises(RouterError):
        await asyncio.to_thread(calls.explain, "no/such request?")


async def test_refusals_have_the_router_s_words(started) -> None:
    router, _, _ = started
    with pytest.raises(RouterError, match=r"^401") as refused:
        await asyncio.to_thread(Client(router.url).documents)
    assert refused.value.retry_after_s is None
    with pytest.raises(OSError, match=r"\w"):
        await asyncio.to_thread(Client(f"http://127.0.0.1:{free_port()}").documents)


async def test_a_refusal_says_when_to_try_again(start_worker, start_router) -> None:
    router = await start_router(await start_worker(), hints_live=1)
    client = Client(router.url)
    await asyncio.to_thread(client.hint, text="One.")
    with pytest.raises(RouterError) as refused:
        await asyncio.to_thread(client.hint, text="Another.")
    assert (refused.value.status, refused.value.code) == (429, "hint_refused")
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1


def test_the_package_needs_nothing_but_python() -> None:
    """As `clients/python` has it; the twin imports a module of this project."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import {module}; "
        "print(sorted({{name.partition('.')[0] for name in sys.modules}} - sys.stdlib_module_names))"
    )

    def others(module: str, folder: Path) -> str:
        command = [sys.executable, "-I", "-S", "-c", code.format(module=module), str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert others("sglang_ext_client", ROOT / "clients" / "python") == "['__main__', 'sglang_ext_client']"
    assert "'sglang_ext'" in others("sglang_ext.errors", ROOT)


def test_both_names_are_of_one_folder() -> None:
    """`git clone` makes a link of it, or a file that names its target where links are not supported."""
    link = ROOT / "clients" / "python" / "sglang_ext_client"
    target = os.readlink(link) if link.is_symlink() else link.read_text().strip()
    assert (link.parent / target).resolve() == ROOT / "sglang_ext" / "client"

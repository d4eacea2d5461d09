"""Texts are bounded before they are tokenized, paid for, and taken in turn."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from sglang_ext.addresses import client_network
from sglang_ext.router.tenancy.budgets import MOST_BUDGETS, Budget, Budgets
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.router.tokens.segments import SLICE
from sglang_ext.testing.fakes import FakeClock

pytestmark = pytest.mark.slow

KEYS = """
[[keys]]
key = "key-of-tenant-a"
tenant = "a"

[[keys]]
key = "key-of-tenant-b"
tenant = "b"
"""
A = {"authorization": "Bearer key-of-tenant-a"}
B = {"authorization": "Bearer key-of-tenant-b"}
CONTEXT = 2048
WORDS = "the radix tree of a small town "


@pytest.fixture
def keyed(tmp_path: Path) -> str:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    return str(file)


@pytest.fixture(params=["keys", "no keys"])
def keys(request: pytest.FixtureRequest, keyed: str) -> dict[str, Any]:
    """Every reproduction is run without a key file, too."""
    return {"api_keys_file": keyed} if request.param == "keys" else {}


def bodies(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, body) of each way to have a text tokenized."""
    chat = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    return [
        ("POST", "/generate", {"text": text}),
        ("POST", "/v1/completions", {"model": "m", "prompt": text}),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/messages", chat),
        ("POST", "/v1/responses", {"model": "m", "input": text}),
        ("POST", "/api/generate", {"model": "m", "prompt": text, "options": {"num_predict": 2}}),
        ("POST", "/tokenize", {"model": "m", "prompt": text}),
        ("POST", "/v1/tokenize", {"model": "m", "prompt": [text]}),
        ("POST", "/tokenize", chat),
        ("POST", "/v1/messages/count_tokens", chat),
        ("POST", "/separate_reasoning", {"text": text, "reasoning_parser": "x"}),
        ("POST", "/parse_function_call", {"text": text, "tools": []}),
        ("POST", "/v1/advisory", {"text": text}),
        ("POST", "/v1/advisory", {"messages": chat["messages"]}),
        ("PUT", "/v1/documents/d", {"text": text}),
    ]


async def test_a_text_far_too_long_is_refused_before_it_is_tokenized(
    keys: dict[str, Any], start_worker, start_router, client, eventually, monkeypatch
) -> None:
    """Once, 15 MB took 9.3 s of CPU, and 10 s of a server, until a 400."""
    worker = await start_worker(context_length=CONTEXT)
    worker.answers |= {path: (200, {}) for path in ("/separate_reasoning", "/parse_function_call")}
    router = await start_router(worker, **keys)
    await eventually(lambda: router.tokenizers.trust.chat)
    seen: list[int] = []
    segmenter = router.tokenizers.tokenizer.segmenter
    encode = segmenter._encode

    def counted(texts: Any) -> Any:
        seen.append(sum(map(len, texts)))
        return encode(texts)

    monkeypatch.setattr(segmenter, "_encode", counted)
    longest = CONTEXT * segmenter.longest
    assert router.tokenizers.most_characters(router.fleet.model.limits) == longest
    asked = worker.tokenizing
    for text in ("x" * (longest + 1), WORDS * (longest // len(WORDS) - 1)):
        # The second one might fit by its length: no more than twice the context is tokenized of it.
        for number, (method, path, body) in enumerate(bodies(text)):
            seen.clear()
            sent = io.BytesIO(orjson.dumps(body))
            async with client.request(method, router.url + path, data=sent, headers=A) as answer:
                error = (await answer.json())["error"]
                assert answer.status == 400, (path, error)
                assert "context length" in str(error), path
            if text[0] == "x":
                assert seen == [], (number, path)
            else:
                assert sum(seen) <= 2 * CONTEXT * segmenter.longest // 4 + SLICE, (number, path)
    assert worker.requests == worker.calls == []
    assert worker.tokenizing == asked
    # The twin: a text that fits is answered.
    for method, path, body in bodies(WORDS):
        async with client.request(method, router.url + path, json=body, headers=A) as answer:
            assert answer.status == 200, (path, await answer.text())


async def test_a_body_that_no_prompt_needs_is_refused_before_it_is_parsed(
    keys: dict[str, Any], start_worker, start_router, client
) -> None:
    worker = await start_worker(context_length=CONTEXT)
    router = await start_router(worker, **keys)
    most = 6 * router.tokenizers.most_characters(router.fleet.model.limits) + (1 << 20)
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/separate_reasoning"):
        async with client.post(router.url + path, data=io.BytesIO(b"[" * (most + 1)), headers=A) as answer:
            assert answer.status == 413, path
            assert "the longest prompt of this model" in (await answer.json())["error"]["message"]
    for tokens in ([1] * (CONTEXT + 1), [[1] * CONTEXT, [1]]):
        async with client.post(router.url + "/detokenize", json={"tokens": tokens}, headers=A) as answer:
            assert answer.status == 400
            assert "context" in (await answer.json())["error"]["message"]
    async with client.post(router.url + "/detokenize", json={"tokens": [1] * CONTEXT}, headers=A) as answer:
        assert answer.status == 200


class Gated:
    """The tokenizer's threads, which stand still in texts of one client."""

    def __init__(self, router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = 0
        segmenter = router.tokenizers.tokenizer.segmenter
        encode = segmenter._encode

        def gated(texts: Any) -> Any:
            if any("zzz" in text for text in texts):
                self.begun += 1
                assert self.go.wait(60)
            return encode(texts)

        monkeypatch.setattr(segmenter, "_encode", gated)


async def test_texts_of_one_tenant_do_not_hold_up_another(
    keyed: str, start_worker, start_router, client, eventually, monkeypatch
) -> None:
    """Once, prompts of tenant b took 19 s behind texts of tenant a."""
    router = await start_router(
        await start_worker(context_length=1 << 20), api_keys_file=keyed, tokenizer_threads=2
    )
    await eventually(lambda: router.tokenizers.trust.text)
    gated = Gated(router, monkeypatch)
    pool = router.tokenizers.pool

    def heavy(number: int) -> asyncio.Task[Any]:
        text = f"zzz {number} " + WORDS * 10_000
        return asyncio.create_task(client.post(router.url + "/generate", json={"text": text}, headers=A))

    tasks = [heavy(number) for number in range(6)]
    await eventually(lambda: gated.begun == 1 and len(pool._long) == 5)
    # All of a's texts stand still, and b's are tokenized.
    for number in range(3):
        body = {"text": f"{number} " + WORDS * 100}
        async with client.post(router.url + "/generate", json=body, headers=B) as answer:
            assert answer.status == 200, await answer.text()
    assert gated.begun == 1
    gated.go.set()
    for task in tasks:
        async with await task as answer:
            assert answer.status == 200


async def test_time_of_tokenizing_is_paid_for(
    keys: dict[str, Any], start_worker, start_router, client, eventually, monkeypatch
) -> None:
    worker = await start_worker(context_length=1 << 20)
    router = await start_router(worker, **keys)
    await eventually(lambda: router.tokenizers.trust.text)
    paid: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(Budget, "tokenized", lambda self, seconds: paid.append(seconds))
        async with client.post(
            router.url + "/generate", json={"text": "old " + WORDS * 100}, headers=A
        ) as answer:
            assert answer.status == 200
        assert len(paid) == 1
        async with client.post(
            router.url + "/tokenize", json={"model": "m", "prompt": "x"}, headers=A
        ) as answer:
            assert answer.status == 200
        assert len(paid) == 2
    assert min(paid) > 0
    async with client.post(router.url + "/generate", json={"text": WORDS * 100}, headers=A) as answer:
        assert answer.status == 200
    (budget,) = router.budgets._budgets.values()
    assert budget.owner == ("tenant a" if keys else "127.0.0.1")
    budget.tokenized(budget._seconds.burst * 2)
    for method, path, body in bodies("new " + WORDS * 100):
        async with client.request(method, router.url + path, json=body, headers=A) as answer:
            assert (answer.status, int(answer.headers["retry-after"]) > 1) == (429, True), path
    # Requests that need no tokenizing are answered, and so is another tenant.
    async with client.post(router.url + "/generate", json={"input_ids": [1, 2, 3]}, headers=A) as answer:
        assert answer.status == 200
    if keys:
        async with client.post(
            router.url + "/generate", json={"text": "b " + WORDS * 100}, headers=B
        ) as answer:
            assert answer.status == 200


async def test_bytes_are_paid_for(keys: dict[str, Any], start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker, client_bytes_per_minute=200_000, **keys)
    body = {"input_ids": [1, 2, 3], "padding": "x" * 150_000}
    status = []
    for _ in range(3):
        async with client.post(router.url + "/generate", json=body, headers=A) as answer:
            status.append(answer.status)
    assert status == [200, 429, 429]
    assert len(worker.requests) == 1
    if keys:
        async with client.post(router.url + "/generate", json=body, headers=B) as answer:
            assert answer.status == 200


def test_who_has_a_budget() -> None:
    budgets = Budgets(FakeClock(), bytes_per_minute=1, tokenizing_s=0.0)
    one = budgets.of(Caller("t"), "10.0.0.1")
    assert budgets.of(Caller("t"), "10.0.0.2") is one
    assert budgets.of(Caller(), "10.0.0.1") is not one
    assert budgets.of(Caller(), "10.0.0.1") is budgets.of(Caller(), "10.0.0.1")
    for number in range(2 * MOST_BUDGETS):
        budgets.of(Caller(), str(number))
        budgets.of(Caller("t"), "")
    assert len(budgets) == MOST_BUDGETS
    assert budgets.of(Caller("t"), "") is one, "a budget in use stays"
    one.tokenized(1e9)
    one.check_tokenizing()  # without a limit


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.1.2.3", "10.1.2.3"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"), ("fe80::1%eth0", "fe80::/64"), ("a:b", "a:b"),
    ],
)  # fmt: skip
def test_one_customer_has_one_address(host: str, network: str) -> None:
    assert client_network(host) == network

"""Agents in front of a router: prompts are repaired, sessions are known, and losses are explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tenants import keys_file

BILLING = "x-anthropic-billing-header: cc_version=2.1.245.2ef; cc_entrypoint=cli; cch={};"
SYSTEM = "You are an agent. " + "It reads files and edits code with care. " * 20
SESSION = {"x-claude-code-session-id": "0e1f5b42"}


def claude_code(cch: str, *turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "model": "default",
        "max_tokens": 4,
        "system": [{"type": "text", "text": BILLING.format(cch)}, {"type": "text", "text": SYSTEM}],
        "messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)],
    }


@pytest.fixture
def ask(client) -> Callable[..., Any]:
    async def ask(router: Any, body: dict[str, Any], name: str, **headers: str) -> tuple[Any, dict[str, str]]:
        async with client.post(
            router.url + "/v1/messages", json=body, headers={**SESSION, "x-request-id": name, **headers}
        ) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json(), dict(answer.headers)

    return ask


async def explained(client: Any, router: Any, name: str, **headers: str) -> Any:
    async with client.get(f"{router.url}/explain/{name}", headers=headers) as answer:
        assert answer.status == 200
        return await answer.json()


async def conversation(router: Any, ask: Any) -> list[int]:
    """Tokens of three turns that the router finds at the worker, each turn with another checksum."""
    turns, cached = ["read a file"], []
    for at, cch in enumerate(("0f3a2", "91bc7", "c2d30")):
        answer, headers = await ask(router, claude_code(cch, *turns), f"turn-{at}")
        cached.append(int(headers["x-kv-matched-tokens"]))
        turns += [answer["content"][0]["text"], "go on with the next file"]
    return cached


async def test_turns_of_claude_code_are_found_again(start_worker, start_router, client, ask) -> None:
    router = await start_router(await start_worker())
    cached = await conversation(router, ask)
    assert cached[0] == 0
    assert cached[2] > cached[1] > 100
    _, headers = await ask(router, claude_code("77777", "read a file"), "more")
    assert headers["x-kv-repaired"] == "claude-code-billing"
    body = await explained(client, router, "more")
    assert body["repairs"] == [{"rule": "claude-code-billing", "changes": 1}]
    assert body["divergence"] is None
    async with client.get(router.url + "/metrics") as answer:
        assert 'sglang_ext_router_repaired_total{rule="claude-code-billing"} 4.0' in await answer.text()


async def test_tokens_are_counted_without_the_line(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    counts = []
    for body in (claude_code("0f3a2", "read"), {**claude_code("0f3a2", "read"), "system": SYSTEM}):
        async with client.post(router.url + "/v1/messages/count_tokens", json=body) as answer:
            assert answer.status == 200
            counts.append((await answer.json())["input_tokens"])
    assert counts[0] == counts[1]


async def test_without_the_rule_they_are_not_and_the_reason_is_said(
    start_worker, start_router, client, ask
) -> None:
    router = await start_router(await start_worker(), client_rules="off")
    assert max(await conversation(router, ask)) < 100
    assert (await explained(client, router, "turn-0"))["divergence"] is None
    found = (await explained(client, router, "turn-1"))["divergence"]
    assert found["cause"] == "changed-early"
    assert found["lost_tokens"] > 100
    assert (found["before"], found["after"]) == ("cch=0f3a2;", "cch=91bc7;")
    async with client.get(router.url + "/metrics") as answer:
        text = await answer.text()
    assert 'sglang_ext_router_diverged_tokens_total{cause="changed-early"}' in text


async def test_a_rule_that_is_off_is_named(start_worker, start_router, client, ask, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        "".join(f'[[rule]]\nname = "claude-code-{name}"\non = false\n' for name in ("billing", "version")),
        encoding="utf-8",
    )
    router = await start_router(await start_worker(), client_rules=str(rules))
    await conversation(router, ask)
    found = (await explained(client, router, "turn-1"))["divergence"]
    assert (found["cause"], found["rule"]) == ("rule", "claude-code-billing")
    saves = f"rule `claude-code-billing` saves {found['lost_tokens']:,} tokens"
    assert found["text"].endswith(f"`cch=0f3a2;` -> `cch=91bc7;`; {saves}")


async def test_a_hint_announces_the_repaired_prompt(start_worker, start_router, client, ask) -> None:
    router = await start_router(await start_worker())
    _, headers = await ask(router, {**claude_code("0f3a2", "read a file"), "max_tokens": 0}, "hint")
    await ask(router, claude_code("91bc7", "read a file"), "one")
    async with client.get(f"{router.url}/v1/advisory/{headers['x-kv-advisory-id']}") as answer:
        assert (await answer.json())["state"] == "used"

    def chat(cch: str) -> list[dict[str, str]]:
        system = {"role": "system", "content": f"{BILLING.format(cch)}\n{SYSTEM}"}
        return [system, {"role": "user", "content": "read another file"}]

    async with client.post(router.url + "/v1/advisory", json={"messages": chat("0f3a2")}) as answer:
        offered = await answer.json()
        assert answer.status == 200, offered
    body = {"model": "default", "max_tokens": 4, "messages": chat("91bc7")}
    async with client.post(router.url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
    async with client.get(f"{router.url}/v1/advisory/{offered['id']}") as answer:
        assert (await answer.json())["state"] == "used"


async def test_words_are_shown_to_their_own_key_only(
    start_worker, start_router, client, ask, tmp_path: Path
) -> None:
    keys = keys_file(
        tmp_path, {"key": "a" * 32, "tenant": "a"}, {"key": "b" * 32, "tenant": "b", "admin": True}
    )
    router = await start_router(await start_worker(), client_rules="off", api_keys_file=keys)
    for at, cch in enumerate(("0f3a2", "91bc7")):
        await ask(router, claude_code(cch, "read"), f"turn-{at}", authorization="Bearer " + "a" * 32)
    mine = await explained(client, router, "turn-1", authorization="Bearer " + "a" * 32)
    theirs = await explained(client, router, "turn-1", authorization="Bearer " + "b" * 32)
    assert mine["divergence"]["after"] == "cch=91bc7;"
    assert theirs["divergence"] == {
        name: mine["divergence"][name] for name in ("at", "lost_tokens", "cause", "rule")
    }


DATE_FOR_A = '[[rule]]\nname = "date-time"\non = true\ntenants = ["a"]\n'


def dated(minute: int) -> dict[str, Any]:
    text = f"It is 2026-11-29T10:{minute:02}:00Z. {SYSTEM}"
    return {**claude_code("0f3a2", "read"), "system": text}


async def test_a_rule_is_for_its_tenants_only(
    start_worker, start_router, client, ask, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path, {"key": "a" * 32, "tenant": "a"}, {"key": "b" * 32, "tenant": "b"})
    (rules := tmp_path / "rules.toml").write_text(DATE_FOR_A, encoding="utf-8")
    worker = await start_worker()
    router = await start_router(worker, client_rules=str(rules), api_keys_file=keys)
    for tenant, same in (("a", True), ("b", False)):
        worker.requests.clear()
        for minute in (1, 2):
            bearer = "Bearer " + tenant * 32
            _, headers = await ask(router, dated(minute), f"{tenant}-{minute}", authorization=bearer)
        one, two = [body["messages"][0]["content"] for _, body, _ in worker.requests]
        assert (one == two) is same
        assert "10:01" in one
        assert headers.get("x-kv-repaired") == ("date-time" if same else None)
        found = await explained(client, router, f"{tenant}-2", authorization=bearer)
        assert (found["divergence"] is None) is same
    assert (found["divergence"]["cause"], found["divergence"]["rule"]) == ("rule", "date-time")

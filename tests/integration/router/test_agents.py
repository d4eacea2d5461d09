"""Agents as they are, before real servers: their turns find each other, and answers are the server's own.

The requests are written after the public wire formats of the clients.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from router_rig import SPECS, routers_before, running, until

from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.clients.repairs import repair
from sglang_ext.router.clients.rules import shipped
from sglang_ext.testing.tokenizer import vocabulary
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

Json = dict[str, Any]
BLOCK = 16
SYSTEM = (
    "You are an agent that edits code. " + "It reads files before it changes them, and runs the tests. " * 24
)
ASKED = ("Read the file and say in a word why its test fails.", "Mend it.", "Run the tests again.")
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


class Client:
    """Requests in the form of one client. turn: its number in the conversation; said: former answers."""

    path = ""
    headers: dict[str, str] = {}

    def body(self, turn: int, said: list[str]) -> Json:
        raise NotImplementedError

    def text(self, answer: Json) -> str:
        raise NotImplementedError


class ClaudeCode(Client):
    path = "/v1/messages"
    headers = {"x-claude-code-session-id": "5b1f0a52", "anthropic-version": "2023-06-01"}

    def body(self, turn: int, said: list[str]) -> Json:
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.245.2ef; cc_entrypoint=cli; cch={turn * 7919:05x};"
        )
        messages: list[Json] = []
        for at in range(turn + 1):
            messages.append({"role": "user", "content": [{"type": "text", "text": ASKED[at]}]})
            if at < turn:
                messages.append({"role": "assistant", "content": [{"type": "text", "text": said[at]}]})
        return {
            "model": "default", "max_tokens": 8, "temperature": 0,
            "system": [{"type": "text", "text": text} for text in (billing, SYSTEM)],
            "tools": [{"name": "Read", "description": "Reads a file", "input_schema": TOOL}],
            "messages": messages,
        }  # fmt: skip

    def text(self, answer: Json) -> str:
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


class OpenCode(Client):
    path = "/v1/chat/completions"
    headers = {"x-opencode-session": "ses_5b1f", "x-session-affinity": "ses_5b1f"}

    def body(self, turn: int, said: list[str]) -> Json:
        messages: list[Json] = [{"role": "system", "content": SYSTEM}]
        for at in range(turn + 1):
            messages.append({"role": "user", "content": ASKED[at]})
            if at < turn:
                messages.append({"role": "assistant", "content": said[at]})
        function = {"name": "read", "description": "Reads a file", "parameters": TOOL}
        return {
            "model": "default", "max_tokens": 8, "temperature": 0, "messages": messages,
            "tools": [{"type": "function", "function": function}],
        }  # fmt: skip

    def text(self, answer: Json) -> str:
        return answer["choices"][0]["message"]["content"] or ""


class Codex(Client):
    path = "/v1/responses"
    headers = {"session-id": "5b1f", "thread-id": "7c20"}

    def body(self, turn: int, said: list[str]) -> Json:
        items: list[Json] = []
        for at in range(turn + 1):
            items.append({"role": "user", "content": [{"type": "input_text", "text": ASKED[at]}]})
            if at < turn:
                items.append({"role": "assistant", "content": [{"type": "output_text", "text": said[at]}]})
        return {
            "model": "default", "max_output_tokens": 8, "temperature": 0, "store": False,
            "instructions": SYSTEM, "input": items, "prompt_cache_key": "5b1f",
        }  # fmt: skip

    def text(self, answer: Json) -> str:
        parts = [item.get("content") or [] for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for content in parts for part in content)


CLIENTS = {client.__name__: client() for client in (ClaudeCode, OpenCode, Codex)}


@pytest.fixture(scope="module")
def server(get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    return get_server(SPECS[0])


@pytest.fixture
async def start(server: ServerProcess) -> AsyncIterator[Callable[..., Any]]:
    async with routers_before(server) as begin:
        yield begin


async def talk(url: str, client: Client, bodies: list[Json]) -> list[tuple[str, Json]]:
    """(answer, the router's explanation of it) of each turn; explanations are empty without a router.

    Args:
        bodies: gets the body of each turn, or has them already.
    """
    said: list[str] = []
    turns = []
    async with aiohttp.ClientSession() as session:
        for turn in range(len(ASKED)):
            if turn == len(bodies):
                bodies.append(client.body(turn, said))
            headers = {**client.headers, "x-request-id": f"turn-{turn}"}
            async with session.post(url + client.path, json=bodies[turn], headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                said.append(client.text(await answer.json()))
            async with session.get(f"{url}/explain/turn-{turn}") as explained:
                turns.append((said[-1], await explained.json() if explained.status == 200 else {}))
    return turns


@pytest.mark.parametrize("name", CLIENTS)
async def test_turns_find_each_other_and_answers_are_the_server_s(
    name: str, start: Callable[..., Any], server: ServerProcess
) -> None:
    client, bodies = CLIENTS[name], []
    router = await start()
    turns = await talk(router.url, client, bodies)
    for (_, last), (_, now) in itertools.pairwise(turns):
        shared = last["prompt"]["tokens"] // BLOCK * BLOCK
        assert now["cached"]["tokens"] >= 0.95 * shared > 200
    dialect = DIALECTS[client.path]
    for body in bodies:
        repair(dialect, body, [rule for rule in shipped().rules if rule.on], None)
        body["model"] = router.fleet.model.model.name
    await until(lambda: running([server]) == 0)
    server.flush()
    assert [text for text, _ in await talk(server.url, client, bodies)] == [text for text, _ in turns]


async def test_without_the_rules_claude_code_s_turns_find_nothing(start: Callable[..., Any]) -> None:
    router = await start(client_rules="off")
    turns = await talk(router.url, CLIENTS["ClaudeCode"], [])
    for _, explained in turns[1:]:
        assert explained["cached"]["tokens"] < 100
        assert explained["divergence"]["lost_tokens"] > 200
        assert explained["divergence"]["before"].startswith("cch=")


def sampled_apart() -> int:
    """A token that a tokenizer never puts twice in a row: it has one for both."""
    entries = vocabulary()[0]
    return next(
        at
        for at, entry in enumerate(entries)
        if len(entry) == 1 and entry.isascii() and entry + entry in entries
    )


@pytest.mark.long
@pytest.mark.parametrize("edits", [False, True], ids=["as it was", "edited"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_turn_has_the_tokens_that_the_server_generated(
    start: Callable[..., Any], server: ServerProcess, stream: bool, edits: bool
) -> None:
    server.flush()
    router, token = await start(session_answer_bytes=1 << 20), sampled_apart()
    client = CLIENTS["OpenCode"]
    forced = {"logit_bias": {str(token): 100}, "max_tokens": 24, "return_input_ids_in_sglext": True}
    async with aiohttp.ClientSession() as session:

        async def ask(url: str, name: str, body: Json) -> bytes:
            headers = {**client.headers, "x-request-id": name}
            async with session.post(url + client.path, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.read()

        first = client.body(0, [])
        prompt = orjson.loads(await ask(server.url, "prompt", {**first, **forced}))["sglext"]["input_ids"]
        server.flush()
        data = await ask(router.url, "first", {**first, **forced, "stream": stream})
        assert b"output_ids" not in data
        text = vocabulary()[0][token] * 24
        if not stream:
            assert client.text(orjson.loads(data)) == text
        second = client.body(1, [text[:-1] if edits else text])
        answer = orjson.loads(await ask(router.url, "second", {**second, **forced}))
        ids, generated = answer["sglext"]["input_ids"], [token] * 24
        assert (ids[: len(prompt) + 24] == prompt + generated) is not edits
        async with session.get(f"{router.url}/explain/second") as explained:
            found = await explained.json()
        assert found["splice"]["outcome"] == ("answer-changed" if edits else "spliced")
        assert found["prompt"]["tokens"] == len(ids)
        # The last token that was generated has no KV.
        reusable = (len(prompt) + 23) // BLOCK * BLOCK
        assert (found["cached"]["tokens"] >= reusable) is not edits
        # The answer is the server's own to these tokens.
        await until(lambda: running([server]) == 0)
        server.flush()
        again = await ask(server.url, "again", {**second, **forced, "input_ids": ids})
        assert client.text(orjson.loads(again)) == client.text(answer)


async def test_a_diagnosis_agrees_with_the_server_s_own_count(start: Callable[..., Any]) -> None:
    router = await start()
    client = CLIENTS["ClaudeCode"]
    first, *_ = bodies = [client.body(0, []), client.body(1, ["So."])]
    for body in bodies:
        body["diagnostics"] = {"previous_message_id": None}
    async with aiohttp.ClientSession() as session:

        async def ask(body: Json) -> Json:
            headers = {**client.headers, "x-request-id": f"asked-{id(body)}"}
            async with session.post(router.url + client.path, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                if not body.get("stream"):
                    return await answer.json()
                lines = (await answer.text()).splitlines()
            start = next(line for line in lines if line.startswith('data: {"type":"message_start"'))
            return orjson.loads(start[len("data: ") :])["message"]

        asked = await ask(first)
        assert asked["diagnostics"] is None
        for stream in (False, True):
            goes_on = {**bodies[1], "diagnostics": {"previous_message_id": asked["id"]}, "stream": stream}
            assert (await ask(goes_on))["diagnostics"] is None
        system = [*first["system"][:-1], {"type": "text", "text": f"Agent {stream}. " + SYSTEM}]
        changed = {**goes_on, "system": system}
        answer = await ask(changed)
        reason = answer["diagnostics"]["cache_miss_reason"]
        assert reason["type"] == "system_changed"
        prompt = asked["usage"]["input_tokens"] + asked["usage"].get("cache_read_input_tokens", 0)
        found = answer["usage"].get("cache_read_input_tokens", 0)
        assert abs(reason["cache_missed_input_tokens"] - (prompt - found)) <= 2 * BLOCK


RULES = """
[[rule]]
name = "date-time"
on = true
tenants = ["a"]
"""


class Dated(ClaudeCode):
    """With a time in the system prompt, another one in each request."""

    def body(self, turn: int, said: list[str]) -> Json:
        body = super().body(turn, said)
        body["system"][1] = {"type": "text", "text": f"It is 2026-11-29T10:{turn:02}:00Z. " + SYSTEM}
        return body


@contextlib.asynccontextmanager
async def routers_of_tenants(
    leak_guard: LeakGuard, folder: Path, **options: Any
) -> AsyncIterator[list[Router]]:
    """Two routers in one Redis, before a prefill and a decode server. Tenants a and b have the keys
    ``"a" * 32`` and ``"b" * 32``."""
    keys = folder / "keys.json"
    keys.write_bytes(orjson.dumps({"keys": [{"key": name * 32, "tenant": name} for name in "ab"]}))
    keys.chmod(0o600)
    spec = ServerSpec(flags=("--radix-cache-backend", "global", "--max-total-tokens", "8192"))
    with RedisServer() as redis, leak_guard.adopting(), pd_servers([spec], [spec]) as (pd, _):
        options |= {
            "worker_urls": tuple(each.url for each in (pd.prefill[0].server, pd.decode[0])),
            "port": 0,
            "cluster": redis.url,
            "api_keys_file": str(keys),
        }
        async with Router(RouterConfig(**options)) as one, Router(RouterConfig(**options)) as two:
            routers = [one, two]
            await until(lambda: all(len(router.members.store.others) == 1 for router in routers), 60)
            await until(lambda: all(router.tokenizers.trust.tools for router in routers), 60)
            yield routers


needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


@pytest.mark.long
@needs_redis
async def test_rules_and_sessions_with_a_pair_behind_two_routers_of_tenants(
    server: ServerProcess, leak_guard: LeakGuard, tmp_path: Path
) -> None:
    """Tenant a's turns find each other through either router; tenant b, for whom the rule is not, sees why
    its do not."""
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES, encoding="utf-8")
    async with routers_of_tenants(leak_guard, tmp_path, client_rules=str(rules)) as routers:
        turns = {name: await talk_in_turns(routers, Dated(), name) for name in "ab"}
        model = routers[0].fleet.model.model.name
    for (_, last), (_, now) in itertools.pairwise(turns["a"]):
        shared = last["prompt"]["tokens"] // BLOCK * BLOCK
        assert now["cached"]["tokens"] >= 0.95 * shared > 200
        assert [each["rule"] for each in now["repairs"]] == ["claude-code-billing", "date-time"]
        assert now["divergence"] is None
    for _, now in turns["b"][1:]:
        assert now["cached"]["tokens"] < 200
        assert [each["rule"] for each in now["repairs"]] == ["claude-code-billing"]
    divergence = turns["b"][2][1]["divergence"]
    assert (divergence["cause"], divergence["rule"]) == ("rule", "date-time")
    bodies, pins = turns_of(turns["a"]), {}
    on = [rule for rule in shipped().rules if rule.on or rule.name == "date-time"]
    for body in bodies:
        repair(DIALECTS[Dated.path], body, on, lambda rule, at, text: pins.setdefault((rule, at), text))
        body["model"] = model
    await until(lambda: running([server]) == 0)
    server.flush()
    assert [text for text, _ in await talk(server.url, Dated(), bodies)] == [text for text, _ in turns["a"]]


@pytest.mark.long
@needs_redis
async def test_generated_tokens_with_a_pair_behind_two_routers_of_tenants(
    leak_guard: LeakGuard, tmp_path: Path
) -> None:
    """They go into the next turn through the router that passed them on, of the same tenant only."""
    token = sampled_apart()
    forced = {"logit_bias": {str(token): 100}, "max_tokens": 24}
    client, said = CLIENTS["OpenCode"], [vocabulary()[0][token] * 24]
    async with (
        routers_of_tenants(leak_guard, tmp_path, session_answer_bytes=1 << 20) as (one, two),
        aiohttp.ClientSession() as session,
    ):

        async def explained(router: Router, tenant: str, turn: int) -> Json:
            name = f"{tenant}-{turn}-{router.url[-5:]}"
            bearer = {"authorization": "Bearer " + tenant * 32}
            body = {**client.body(turn, said), **forced}
            headers = {**client.headers, **bearer, "x-request-id": name}
            async with session.post(router.url + client.path, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                assert client.text(await answer.json()) == said[0]
            async with session.get(f"{router.url}/explain/{name}", headers=bearer) as explanation:
                return await explanation.json()

        first = await explained(one, "a", 0)
        assert first["splice"]["outcome"] == "answer-unknown"
        others = [await explained(two, "a", 1), await explained(one, "b", 1)]
        assert [each["splice"]["outcome"] for each in others] == ["answer-unknown"] * 2
        second = await explained(one, "a", 1)
    assert second["splice"]["outcome"] == "spliced"
    assert second["prompt"]["tokens"] > others[0]["prompt"]["tokens"]
    # Prefill has the answer's KV from decode; the last token that was generated has none.
    assert second["cached"]["tokens"] >= (first["prompt"]["tokens"] + 23) // BLOCK * BLOCK


def turns_of(turns: list[tuple[str, Json]]) -> list[Json]:
    """The bodies that led to these answers."""
    said = [text for text, _ in turns]
    return [Dated().body(turn, said) for turn in range(len(turns))]


async def talk_in_turns(routers: list[Router], client: Client, tenant: str) -> list[tuple[str, Json]]:
    """As ``talk``, with each turn through another router."""
    said: list[str] = []
    turns = []
    bearer = {"authorization": "Bearer " + tenant * 32}
    async with aiohttp.ClientSession() as session:
        for turn, router in zip(range(len(ASKED)), itertools.cycle(routers), strict=False):
            headers = {**client.headers, **bearer, "x-request-id": f"{tenant}-{turn}"}
            body = client.body(turn, said)
            async with session.post(router.url + client.path, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                said.append(client.text(await answer.json()))
            async with session.get(f"{router.url}/explain/{tenant}-{turn}", headers=bearer) as explained:
                assert explained.status == 200
                turns.append((said[-1], await explained.json()))
    return turns

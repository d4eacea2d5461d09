"""Keys, tenants and their limits; and that no tenant reaches another's KV or requests."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import ConfigError
from sglang_ext.keys import SALT_HEADER
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.admit import put_in_front, splice
from sglang_ext.router.tenancy.key_file import read_key_file
from sglang_ext.router.tenancy.request_fields import (
    FIELDS,
    HINTS,
    OPERATOR_HEADERS,
    PASSED_HEADERS,
    STEERING_HEADERS,
    Who,
)
from sglang_ext.router.tenancy.tenants import KeyRing, parse_keys
from sglang_ext.testing.fakes import FakeClock

pytestmark = pytest.mark.slow

STEERING = dict.fromkeys(sorted(STEERING_HEADERS | OPERATOR_HEADERS), "1")
"""Headers whose values the router decides."""
A, B, OPS = "sk-tenant-a-1", "sk-tenant-b-1", "sk-operator-1"


def keys_file(folder: Path, *entries: dict[str, Any], name: str = "keys.json") -> str:
    path = folder / name
    path.write_text(json.dumps({"keys": list(entries)}))
    path.chmod(0o600)
    return str(path)


TWO = (
    {"key": A, "tenant": "a", "priority": 1},
    {"key": B, "tenant": "b"},
    {"key": OPS, "tenant": "ops", "admin": True},
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# -- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "'keys'"),
        ({"keys": {}}, "'keys'"),
        ({"keys": [], "more": 1}, "'keys'"),
        ({"keys": [1]}, "keys[0]"),
        ({"keys": [{"key": A}]}, "no tenant"),
        ({"keys": [{"tenant": "a"}]}, "key_sha256"),
        ({"keys": [{"tenant": "a", "key": A, "key_sha256": "00" * 32}]}, "either"),
        ({"keys": [{"tenant": "a", "key": "short"}]}, "characters"),
        ({"keys": [{"tenant": "a", "key_sha256": "zz"}]}, "hex"),
        ({"keys": [{"tenant": "a", "key": A, "prio": 1}]}, "unknown field 'prio'"),
        ({"keys": [{"tenant": "a", "key": A, "priority": True}]}, "priority"),
        ({"keys": [{"tenant": "a", "key": A, "concurrent": 0}]}, "concurrent"),
        ({"keys": [{"tenant": "a", "key": A, "admin": 1}]}, "admin"),
        ({"keys": [{"tenant": "a", "key": A}, {"tenant": "b", "key": A}]}, "same key"),
        (
            {"keys": [{"tenant": "a", "key": A}, {"tenant": "a", "key": B, "isolated": False}]},
            "isolated",
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_named_and_no_key_is(document: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(document)
    assert words in str(caught.value)
    assert A not in str(caught.value)
    assert caught.value.field == "--api-keys-file"


async def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    first = await read_key_file(keys_file(tmp_path, *TWO))
    toml = tmp_path / "keys.toml"
    toml.write_text(
        f'[[keys]]\nkey = "{A}"\ntenant = "a"\npriority = 1\n'
        f'[[keys]]\nkey_sha256 = "{hashlib.sha256(B.encode()).hexdigest()}"\ntenant = "b"\n'
        f'[[keys]]\nkey = "{OPS}"\ntenant = "ops"\nadmin = true\n'
    )
    toml.chmod(0o600)
    assert await read_key_file(str(toml)) == first


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
async def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = keys_file(tmp_path, *TWO)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        await read_key_file(path)


@pytest.mark.parametrize(("name", "text"), [("k.json", '{"keys": [' + A), ("k.toml", 'key = "' + A)])
async def test_a_broken_file_tells_no_key(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not valid") as caught:
        await read_key_file(str(path))
    assert A not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        await read_key_file(str(tmp_path / "none"))


def test_keys_are_kept_as_keyed_digests_only() -> None:
    ring = KeyRing(FakeClock(), api_key=OPS)
    ring.replace(parse_keys({"keys": [{"key": A, "tenant": "a"}]}))
    caller = ring.caller(A)
    assert caller is not None
    assert (caller.tenant, caller.admin) == ("a", False)
    assert ring.caller(OPS) is not None
    assert [ring.caller(key) for key in (None, "", B, A + " ", A[:-1])] == [None] * 5
    # A dump of the ring has neither the key nor its plain digest.
    seen = repr(vars(ring)) + repr({k: vars(m) for k, (_, m) in ring._meters.items()})
    assert A not in seen
    assert A not in repr(caller)
    assert hashlib.sha256(A.encode()).digest() not in ring._callers


def test_limits_by_key() -> None:
    clock = FakeClock()
    ring = KeyRing(clock)
    limits = {"requests_per_second": 2, "burst": 3, "concurrent": 4, "tokens_per_minute": 600}
    ring.replace(parse_keys({"keys": [{"key": A, "tenant": "a", **limits}]}))
    meter = ring.caller(A).meter  # type: ignore[union-attr]
    for _ in range(3):
        with meter.request():
            pass
    with pytest.raises(RequestRefused, match="2 requests a second") as caught, meter.request():
        pass
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
    clock.advance(10)
    with meter.request(), meter.request(), meter.request():
        clock.advance(0.5)
        with meter.request():
            clock.advance(0.5)
            with pytest.raises(RequestRefused, match="4 requests"), meter.request():
                pass
    clock.advance(10)
    meter.charge(900)
    with pytest.raises(RequestRefused, match="600 tokens a minute") as caught, meter.request():
        pass
    # 300 too many at 10 a second, and one to go on.
    assert int(caught.value.headers["retry-after"]) == pytest.approx(31, abs=1)
    clock.advance(31)
    with meter.request():
        pass
    meter.check()


def test_what_other_routers_let_through_is_used() -> None:
    clock = FakeClock()
    limits = {"requests_per_second": 1, "burst": 4, "concurrent": 3, "tokens_per_minute": 600}
    document = parse_keys({"keys": [{"key": A, "tenant": "a", **limits}]})
    rings = [KeyRing(clock) for _ in range(3)]
    meters = {}
    for name, ring in zip("xyz", rings, strict=True):
        ring.replace(document)
        meters[name] = ring.caller(A).meter  # type: ignore[union-attr]

    def tell(name: str, *others: str) -> None:
        for other in others:
            meters[other].on_remote_use(name, meters[name].use())

    tell("x", "y")
    with meters["x"].request(), meters["x"].request():
        tell("x", "y")
        tell("x", "y")  # twice is once
        with meters["y"].request():
            with pytest.raises(RequestRefused, match="3 requests of this key are running"):
                meters["y"].request().__enter__()
            tell("y", "x")
    tell("x", "y")
    tell("y", "x")
    assert [meters[name].use().requests_left for name in "xy"] == [1, 1]
    meters["y"].charge(250)
    tell("y", "x")
    assert [meters[name].use().tokens_left for name in "xy"] == [350, 350]
    # A meter that begins starts with the remainder of the meter that has least left.
    tell("x", "z")
    assert (meters["z"].use().requests_left, meters["z"].use().tokens_left) == (1, 350)
    with meters["z"].request():
        tell("z", "x", "y")
        for name in "xy":
            with pytest.raises(RequestRefused, match="1 requests a second"):
                meters[name].request().__enter__()
        clock.advance(10)
        meters["x"].gone("z")
        assert (meters["x"].elsewhere, meters["y"].elsewhere) == (0, 1)
    # The limits of another are read again there: its counts begin anew, and nothing is given back.
    rings[0].replace(parse_keys({"keys": [{"key": A, "tenant": "a", **limits, "priority": 1}]}))
    meters["x"] = rings[0].caller(A).meter  # type: ignore[union-attr]
    left = meters["y"].use().tokens_left
    tell("x", "y")
    assert meters["y"].use().tokens_left == left


def test_what_was_used_outlives_reading_the_file_again() -> None:
    clock = FakeClock()
    ring = KeyRing(clock)
    document = {"keys": [{"key": A, "tenant": "a", "requests_per_second": 1}]}
    ring.replace(parse_keys(document))
    with ring.caller(A).meter.request():  # type: ignore[union-attr]
        pass
    ring.replace(parse_keys(document))
    with pytest.raises(RequestRefused), ring.caller(A).meter.request():  # type: ignore[union-attr]
        pass
    ring.replace(parse_keys({"keys": [{"key": B, "tenant": "a"}]}))
    assert ring.caller(A) is None


@given(
    st.dictionaries(st.text(max_size=8), st.integers(-(2**40), 2**40) | st.text(), min_size=1, max_size=5),
    st.dictionaries(st.text(max_size=8), st.integers(-(2**40), 2**40) | st.text(), min_size=1, max_size=3),
    st.sampled_from(["", " ", "\n\t "]),
)
def test_fields_are_put_into_bodies_without_parsing(
    body: dict[str, Any], fields: dict[str, Any], space: str
) -> None:
    raw = (space + json.dumps(body) + space).encode()
    assert json.loads(splice(raw, fields)) == {**body, **fields}
    assert json.loads(put_in_front(raw, fields)) == {**fields, **body}
    assert splice(raw, {}) is raw


# -- through the router ---------------------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 2}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello " * 40}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello " * 40, "max_tokens": 2},
    "/v1/responses": {"input": "Hello " * 40, "max_output_tokens": 2},
    "/v1/messages": {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello " * 40}],
        "max_tokens": 2,
    },
}


async def cached(client: Any, url: str, body: dict[str, Any], key: str) -> int:
    async with client.post(url, json=body, headers=bearer(key)) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return int(answer.headers.get("x-kv-cached-tokens", 0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_two_tenants_never_share_kv(
    path: str, stream: bool, start_worker, start_router, client, tmp_path
) -> None:
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=keys_file(tmp_path, *TWO))
    body = {**BODIES[path], "stream": stream}
    url = router.url + path
    assert await cached(client, url, body, A) == 0
    assert await cached(client, url, body, B) == 0
    salts = {request[1].get("cache_salt") for request in worker.requests}
    assert len(salts) == 2
    assert None not in salts
    if not stream:
        assert await cached(client, url, body, A) > 0
        assert await cached(client, url, body, B) > 0
    namespaces = {namespace[-1] for namespace in router.trees._tree._roots}
    assert namespaces == salts


@pytest.mark.parametrize("path", BODIES)
async def test_without_the_salt_they_would(path: str, start_worker, start_router, client, tmp_path) -> None:
    """The twin of the test above: with isolation off, the second tenant finds the first one's KV."""
    entries = [{**entry, "isolated": False} for entry in TWO]
    router = await start_router(await start_worker(), api_keys_file=keys_file(tmp_path, *entries))
    assert await cached(client, router.url + path, BODIES[path], A) == 0
    assert await cached(client, router.url + path, BODIES[path], B) > 0


@pytest.mark.parametrize(
    "field",
    [
        name for name, who in FIELDS.items()
        if who in (Who.ROUTER, Who.TRUSTED, Who.NOBODY) and name != HINTS
    ],
)  # fmt: skip
async def test_a_tenant_cannot_choose_what_the_router_sets(
    field: str, start_worker, start_router, client, tmp_path
) -> None:
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=keys_file(tmp_path, *TWO))
    for path, body in BODIES.items():
        async with client.post(router.url + path, json={**body, field: "kv"}, headers=bearer(A)) as answer:
            assert answer.status == 400, path
            assert field in (await answer.json())["error"]["message"]
    assert worker.requests == []


async def test_a_salt_cannot_be_smuggled_in(start_worker, start_router, client, tmp_path) -> None:
    """By a key that is there twice, or by SGLang's overriding headers."""
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=keys_file(tmp_path, *TWO))
    inner = json.dumps(BODIES["/generate"])[1:]
    for raw in (
        '{"cache_salt": "kv-tenant-x", "cache_salt": null, ' + inner,
        '{"cache_salt": "", "cache\\u005fsalt": null,' + inner,
    ):
        headers = {**bearer(A), **STEERING}
        async with client.post(router.url + "/generate", data=raw.encode(), headers=headers) as answer:
            assert answer.status == 200
    expected = parse_keys({"keys": [TWO[0]]})[0].salt
    assert {request[1]["cache_salt"] for request in worker.requests} == {expected}
    assert not any(set(STEERING) & set(request[2]) for request in worker.requests)


async def test_headers_that_steer_a_worker_are_dropped(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    headers = {**STEERING, "x-else": "stays", "cookie": "stays=1", "x-sglext-return-input-ids": "1"}
    async with client.post(router.url + "/generate", json=BODIES["/generate"], headers=headers) as answer:
        assert answer.status == 200
    received = worker.requests[-1][2]
    assert set(STEERING) & set(received) == OPERATOR_HEADERS
    assert not {"x-else", "cookie"} & set(received)
    assert received["x-sglext-return-input-ids"] == "1", "the twin"


def test_every_header_that_sglang_reads_has_been_judged() -> None:
    """A header of a new SGLang may choose a server, a rank or a name past the router."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    literal = re.compile(r"""["'](x-[a-z-]+)["']""", re.IGNORECASE)
    read = {
        name.lower()
        for path in Path(spec.origin).parent.joinpath("srt").rglob("*.py")
        for name in literal.findall(path.read_text())
    }
    sent_by_sglang = {"x-sglang-startup-warmup", "x-exa-integration"}
    of_the_answer_only = {"x-sglext-return-input-ids", "x-sglext-return-output-ids", "x-sglext-ids-framed"}
    key = {"x-api-key"}
    assert of_the_answer_only | key <= PASSED_HEADERS
    judged = STEERING_HEADERS - {SALT_HEADER} | OPERATOR_HEADERS | sent_by_sglang | of_the_answer_only | key
    gone_from_0_5_23 = {"x-sglang-startup-warmup"}
    assert read | gone_from_0_5_23 == judged


async def test_metrics_are_for_administrators(start_worker, start_router, client, tmp_path, caplog) -> None:
    keys = keys_file(tmp_path, *TWO)
    router = await start_router(await start_worker(), api_keys_file=keys)
    caplog.clear()
    for headers, status in (({}, 401), (bearer(A), 403), (bearer(OPS), 200)):
        async with client.get(router.url + "/metrics", headers=headers) as answer:
            assert answer.status == status
    assert "/metrics" not in caplog.text, "scrapes are not in the access log"
    router = await start_router(await start_worker(), api_keys_file=keys, metrics_open=True)
    async with client.get(router.url + "/metrics") as answer:
        assert answer.status == 200


async def test_names_that_clients_choose_are_the_tenants_own(
    start_worker, start_router, client, tmp_path
) -> None:
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=keys_file(tmp_path, *TWO))
    body = {**BODIES["/generate"], "rid": "mine", "session_id": "s"}
    for key in (A, B):
        async with client.post(router.url + "/generate", json=body, headers=bearer(key)) as answer:
            assert answer.status == 200
    rids = [request[1]["rid"] for request in worker.requests]
    sessions = [request[1]["session_id"] for request in worker.requests]
    assert len(set(rids)) == len(set(sessions)) == 2
    assert all(rid.endswith("-mine") for rid in rids)


async def test_priority_is_capped_by_the_key(start_worker, start_router, client, tmp_path) -> None:
    router = await start_router(await start_worker(), api_keys_file=keys_file(tmp_path, *TWO))
    for priority, status in ((1, 200), (-5, 200), (2, 400), ("high", 400)):
        body = {**BODIES["/generate"], "priority": priority}
        async with client.post(router.url + "/generate", json=body, headers=bearer(A)) as answer:
            assert answer.status == status


async def test_what_needs_an_administrator(start_worker, start_router, client, tmp_path) -> None:
    router = await start_router(await start_worker(), api_keys_file=keys_file(tmp_path, *TWO))
    for path in ("/flush_cache", "/start_profile"):
        async with client.post(router.url + path, headers=bearer(A)) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "not_an_admin")
        async with client.post(router.url + path, headers=bearer(OPS)) as answer:
            assert answer.status == 200
    async with client.get(router.url + "/server_info", headers=bearer(A)) as answer:
        assert "workers" not in (await answer.json())["router"]


async def test_a_tenant_sees_its_own_requests_only(start_worker, start_router, client, tmp_path) -> None:
    router = await start_router(await start_worker(), api_keys_file=keys_file(tmp_path, *TWO))
    for key, name in ((A, "of-a"), (B, "of-b")):
        headers = {**bearer(key), "x-request-id": name}
        async with client.post(router.url + "/generate", json=BODIES["/generate"], headers=headers):
            pass
    for key, name, status in ((A, "of-a", 200), (A, "of-b", 404), (OPS, "of-b", 200), (B, "none", 404)):
        async with client.get(f"{router.url}/explain/{name}", headers=bearer(key)) as answer:
            assert answer.status == status
            told = await answer.json()
            if key == OPS:
                assert told["same_prompt_under_another_salt"] == 64
                assert "other-salt" in told["causes"]
            elif status == 200:
                # That another tenant has asked the same is none of a tenant's business.
                assert told["same_prompt_under_another_salt"] is None
                assert "other-salt" not in told["causes"]


async def test_kept_responses_are_the_tenants_own(start_worker, start_router, client, tmp_path) -> None:
    router = await start_router(await start_worker(), api_keys_file=keys_file(tmp_path, *TWO))
    url = router.url + "/v1/responses"
    async with client.post(url, json=BODIES["/v1/responses"], headers=bearer(A)) as answer:
        name = (await answer.json())["id"]
    for key, status in ((A, 200), (B, 404)):
        async with client.get(f"{url}/{name}", headers=bearer(key)) as answer:
            assert answer.status == status
        body = {**BODIES["/v1/responses"], "previous_response_id": name}
        async with client.post(url, json=body, headers=bearer(key)) as answer:
            assert answer.status == status


async def test_a_request_beyond_a_limit_gets_429(start_worker, start_router, client, tmp_path) -> None:
    entry = {"key": A, "tenant": "a", "requests_per_second": 0.001, "burst": 1}
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=keys_file(tmp_path, entry))
    for status in (200, 429):
        headers = {"x-api-key": A}
        async with client.post(
            router.url + "/v1/messages", json=BODIES["/v1/messages"], headers=headers
        ) as answer:
            assert answer.status == status
            told = await answer.json()
    assert int(answer.headers["retry-after"]) > 100
    assert (told["type"], told["error"]["type"]) == ("error", "rate_limit_error")
    assert len(worker.requests) == 1
    assert not any("api-key" in name for name in worker.requests[0][2])


async def test_no_key_is_ever_logged(start_worker, start_router, client, tmp_path, caplog) -> None:
    router = await start_router(await start_worker(), api_keys_file=keys_file(tmp_path, *TWO))
    for key in (A, "sk-wrong-key"):
        async with client.post(router.url + "/generate", json=BODIES["/generate"], headers=bearer(key)):
            pass
        async with client.post(
            router.url + "/v1/messages", json=BODIES["/v1/messages"], headers={"x-api-key": key}
        ):
            pass
        async with client.get(router.url + f"/v1/models?key={key}"):
            pass
    async with client.get(router.url + "/metrics", headers=bearer(OPS)) as answer:
        metrics = await answer.text()
    logged = caplog.text + repr([getattr(record, "fields", {}) for record in caplog.records])
    for key in (A, B, "sk-wrong-key"):
        assert key not in logged
        assert key not in metrics
    assert 'tenant_requests_total{status="200",tenant="a"} 2.0' in metrics


async def test_the_file_is_read_again(start_worker, start_router, client, tmp_path, caplog) -> None:
    path = keys_file(tmp_path, *TWO)
    router = await start_router(await start_worker(), api_keys_file=path)

    async def status(key: str) -> int:
        async with client.get(router.url + "/v1/models", headers=bearer(key)) as answer:
            return answer.status

    assert [await status(A), await status("sk-new-key-1")] == [200, 401]
    keys_file(tmp_path, {"key": "sk-new-key-1", "tenant": "new"})
    await router.read_keys()
    assert [await status(A), await status("sk-new-key-1")] == [401, 200]
    Path(path).write_text("{", encoding="utf-8")  # noqa: ASYNC240
    with pytest.raises(ConfigError):
        await router.read_keys()
    assert await status("sk-new-key-1") == 200

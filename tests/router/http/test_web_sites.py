"""Web pages of other origins: how their requests are recognised, and that a keyless router refuses them."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from browser import browser_page, find_browser

from sglang_ext.errors import ConfigError
from sglang_ext.router import RouterConfig
from sglang_ext.router.http.types import Request, RequestRefused
from sglang_ext.router.http.web_sites import host_name, sites_of

pytestmark = pytest.mark.slow

EVIL = "http://evil.example"
BROWSER = find_browser()
BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 1}}


def verdict(headers: dict[str, str], *, keyed: bool = False, public: bool = False, **allowed: Any) -> str:
    """The code of the refusal, or nothing."""
    sites = sites_of(
        allowed.get("hosts", ()), allowed.get("origins", ()), allowed.get("bind", "127.0.0.1"), keyed=keyed
    )
    try:
        sites.check(Request("POST", "/generate", "/generate", headers), public=public)
    except RequestRefused as refusal:
        return f"{refusal.code}" if refusal.status == 403 else "not a 403"
    return ""


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("LOCALHOST:30000", True),
        ("router.localhost:1", True),
        ("127.0.0.1:30000", True),
        ("[::1]:30000", True),
        ("::1", False),
        ("10.1.2.3", True),
        ("0.0.0.0:30000", True),
        (socket.gethostname(), True),
        ("evil.example", False),
        ("evil.example:30000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.", True),
        ("evillocalhost", False),
        ("", False),
        ("[localhost", True),
    ],
)
def test_names_that_a_router_without_a_key_answers_to(host: str, known: bool) -> None:
    assert verdict({"host": host}) == ("" if known else "host_not_allowed")
    assert verdict({"host": host}, keyed=True) == "", "a key is not sent by a page that has none"


def test_more_names_can_be_allowed_and_are_then_asked_for_with_a_key_too() -> None:
    assert verdict({"host": "llm.example.com:443"}, hosts=["LLM.example.com"]) == ""
    assert verdict({"host": "evil.example"}, hosts=["llm.example.com"]) == "host_not_allowed"
    assert verdict({"host": "evil.example"}, hosts=["llm.example.com"], keyed=True) == "host_not_allowed"
    assert verdict({"host": "evil.example"}, hosts=["*"]) == ""
    assert verdict({"host": "box.lan"}, bind="box.lan") == "", "the name that it listens on"
    assert verdict({}) == "", "HTTP/1.0 needs no Host, and browsers always send one"


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:30000", "localhost:30000", True),
        ("https://localhost:30000", "localhost:30000", True),
        ("http://LOCALHOST:30000", "localhost:30000", True),
        ("http://localhost:8000", "localhost:30000", False),
        ("http://127.0.0.1:30000", "localhost:30000", False),
        ("http://localhost", "localhost:30000", False),
        ("null", "localhost:30000", False),
        ("", "localhost:30000", False),
        (EVIL, "localhost:30000", False),
        ("http://", "", False),
        ("https://chat.example.com", "localhost:30000", True),
    ],
)
def test_origins(origin: str, host: str, allowed: bool) -> None:
    headers = {"host": host, "origin": origin} if host else {"origin": origin}
    origins = ["https://chat.example.com"]
    assert verdict(headers, origins=origins) == ("" if allowed else "cross_site")
    assert verdict(headers, keyed=True) == ""
    assert verdict(headers, origins=["*"]) == ""


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", "none"])
def test_a_browser_that_names_no_origin_still_tells_whether_the_page_is_foreign(site: str) -> None:
    headers = {"host": "localhost", "sec-fetch-site": site}
    foreign = site in ("cross-site", "same-site")
    assert verdict(headers) == ("cross_site" if foreign else "")
    assert verdict(headers, public=True) == "", "a link to the chat page may be followed"


def test_host_names() -> None:
    assert [host_name(host) for host in ("A.b:1", "[::1]:1", "c.", "")] == ["a.b", "::1", "c", ""]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_hosts", "http://llm.example.com"),
        ("allowed_hosts", "llm.example.com:443"),
        ("allowed_hosts", ""),
        ("allowed_origins", "chat.example.com"),
        ("allowed_origins", "https://chat.example.com/path"),
        ("allowed_origins", "https://user@chat.example.com"),
    ],
)
def test_what_is_no_name_or_origin_is_refused_at_the_start(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        RouterConfig(**{field: (value,)})


def test_origins_are_compared_as_browsers_write_them() -> None:
    assert RouterConfig(allowed_origins=("HTTPS://Chat.example.com/",)).allowed_origins == (
        "https://chat.example.com",
    )


async def test_raw_requests_of_a_foreign_page_do_nothing(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    port = router.url.rpartition(":")[2]
    text = json.dumps(BODY)
    plain = {"content-type": "text/plain"}
    foreign = [{"origin": EVIL}, {"host": f"evil.example:{port}"}, {"origin": "null"}]
    for headers in [*foreign, {"origin": f"{EVIL}:{port}", "host": f"evil.example:{port}"}]:
        for path, body in (
            ("/flush_cache", ""),
            ("/abort_request", '{"abort_all": true}'),
            ("/generate", text),
            ("/v1/advisory", "{}"),
            ("/cluster/instances", "{}"),
            ("/start_profile", ""),
        ):
            async with client.post(router.url + path, data=body, headers={**plain, **headers}) as answer:
                assert answer.status == 403, (path, headers)
                assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    rebound = {"host": f"evil.example:{port}"}
    for path in ("/v1/models", "/server_info", "/metrics", "/cluster", "/explain/x", "/ui", "/health"):
        async with client.get(router.url + path, headers=rebound) as answer:
            assert answer.status == 403, path
            assert "--allowed-hosts" in (await answer.json())["error"]["message"]
    assert worker.flushed == 0
    assert worker.requests == []
    assert worker.rids_aborted == []
    async with client.post(router.url + "/generate", data=text, headers=plain) as answer:
        assert answer.status == 200, "the same request of no page"


async def test_a_large_body_of_a_foreign_page_is_not_read(start_worker, start_router) -> None:
    router = await start_router(await start_worker())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nOrigin: {EVIL}\r\nContent-Length: 99999999\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(10):
        assert b" 403 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize("path", ["/flush_cache", "/start_profile", "/stop_profile", "/abort_request"])
async def test_nothing_is_changed_by_get(path: str, start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    async with client.get(router.url + path) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert worker.flushed == 0


async def test_an_instance_is_not_registered_from_a_web_page_where_only_clients_have_keys(
    start_worker, start_router, client
) -> None:
    router = await start_router(await start_worker(), api_key="the-key-of-this-test")
    for headers in ({"origin": EVIL}, {"host": "evil.example"}):
        async with client.post(router.url + "/cluster/instances", data="{}", headers=headers) as answer:
            assert answer.status == 403
    async with client.post(router.url + "/cluster/instances", data="{}") as answer:
        assert answer.status == 400, "it is read, and is none"


async def test_a_page_of_an_allowed_origin_may_read_answers(start_worker, start_router, client) -> None:
    worker = await start_worker()
    chat = "https://chat.example.com"
    router = await start_router(worker, allowed_origins=(chat,), api_key="the-key-of-this-test")
    asks = {
        "origin": chat,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with client.options(router.url + "/generate", headers=asks) as answer:
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == chat
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    key = {"authorization": "Bearer the-key-of-this-test"}
    for body in (BODY, {**BODY, "stream": True}):
        async with client.post(
            router.url + "/generate", json=body, headers={**key, "origin": chat}
        ) as answer:
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, chat)
        assert "origin" not in worker.requests[-1][2], "SGLang would let every page read"
    async with client.post(router.url + "/generate", json=BODY, headers={"origin": chat}) as answer:
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, chat)
    async with client.options(router.url + "/generate", headers={**asks, "origin": EVIL}) as answer:
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


_ATTACK = """
(async () => {
  const at = %(url)s, told = [];
  const send = async (path, options) => {
    try {
      const answer = await fetch(at + path, options);
      told.push(path + " " + answer.type + " " + answer.status);
    } catch (error) { told.push(path + " failed"); }
  };
  const plain = { method: "POST", mode: "no-cors", headers: { "content-type": "text/plain" } };
  await send("/flush_cache", plain);
  await send("/abort_request", { ...plain, body: '{"abort_all": true}' });
  await send("/generate", { ...plain, body: %(body)s });
  await send("/flush_cache", { mode: "no-cors" });
  await send("/v1/models", {});
  await send("/health_generate", { mode: "no-cors" });
  await new Promise((done) => {
    const image = new Image();
    image.onload = image.onerror = done;
    image.src = at + "/flush_cache";
  });
  const frame = document.createElement("iframe");
  frame.name = "into";
  document.body.append(frame);
  const form = document.createElement("form");
  Object.assign(form, { method: "post", action: at + "/flush_cache", enctype: "text/plain", target: "into" });
  document.body.append(form);
  await new Promise((done) => { frame.onload = done; form.submit(); });
  return told;
})()
"""


def attack(url: str) -> str:
    """A page's attacks on the router at this URL, as a script; its value is the outcome of each."""
    return _ATTACK % {"url": json.dumps(url), "body": json.dumps(json.dumps(BODY))}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome here: install one, or name it with CHROME")
async def test_a_page_in_a_real_browser_reaches_nothing(start_worker, start_router, stack) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    port = router.url.rpartition(":")[2]
    assert BROWSER is not None

    async def blank(request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><body>a page</body>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", blank)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    other = runner.addresses[0][1]
    # The names stand for this machine, as after a DNS rebinding.
    rebound = "--host-resolver-rules=MAP *.example 127.0.0.1"
    async with browser_page(BROWSER, rebound, "--disable-features=LocalNetworkAccessChecks") as page:
        for where in (f"{EVIL}:{other}/", f"http://127.0.0.1:{other}/"):
            await page.open(where)
            told = await page.evaluate(attack(router.url))
            assert "/v1/models failed" in told, "a foreign page reads nothing"
        await page.open(f"{EVIL}:{port}/v1/models")
        assert "host_not_allowed" in await page.evaluate("document.body.textContent")
        sent = {(request["method"], request["url"].removeprefix(router.url)) for request in page.requests}
        assert {("POST", "/flush_cache"), ("POST", "/generate"), ("GET", "/flush_cache")} <= sent
        assert (worker.flushed, worker.requests, worker.rids_aborted) == (0, [], [])
        # The router's own page may flush.
        await page.open(router.url + "/ui")
        answer = "fetch('/flush_cache', {method: 'POST'}).then((answer) => answer.status)"
        assert await page.evaluate(answer) == 200
        assert worker.flushed == 1

        # A router with a flag that lets every page in shows the effect of the same page.
        lenient = await start_router(worker, allowed_hosts=("*",), allowed_origins=("*",))
        await page.open(f"{EVIL}:{other}/")
        told = await page.evaluate(attack(lenient.url))
        assert "/v1/models cors 200" in told
        assert worker.flushed == 3, "by fetch and by form, not by GET"
        assert len(worker.requests) == 1
        assert worker.rids_aborted == [{"rid": "", "abort_all": True}]

"""The chat page in a real browser: the hint goes out at the first key, and the page shows the answer."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from browser import Page, browser_page, find_browser
from index_views import in_dram

from sglang_ext.protocol.agent import Advise, Advised, Beat, Fill, Withdraw
from sglang_ext.tiers import Tier

EPOCH = bytes(16)
BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium or Chrome here: install one, or name it with CHROME"
    ),
]


@dataclass
class Listening:
    """An agent that takes hints, and reacts as the test orders."""

    hints: list[Advise] = field(default_factory=list)

    def computes(self, name: str) -> bool:
        return True

    def send(self, name: str, message: Advise | Withdraw) -> bool:
        if isinstance(message, Advise):
            self.hints.append(message)
        return True


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    assert BROWSER is not None
    async with browser_page(BROWSER) as page:
        yield page


def sent(page: Page, path: str) -> list[dict[str, Any]]:
    """Bodies that were posted to a path."""
    return [
        json.loads(request.get("postData", "null"))
        for request in page.requests
        if request["method"] == "POST" and request["url"].endswith(path)
    ]


async def say(page: Page, text: str, answers: int) -> None:
    await page.press(text + "\n")
    await page.until(
        f"document.querySelectorAll('.message.assistant footer:not(:empty)').length >= {answers}"
    )


async def test_the_hint_is_sent_at_the_first_key_of_each_turn(page, start_worker, start_router) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await page.open(router.url + "/ui")
    await page.until("document.getElementById('model').textContent !== ''")
    await say(page, "Hello there", 1)
    assert sent(page, "/v1/advisory") == [], "there is nothing to move for the first message"

    await page.press("W")
    await page.until("document.getElementById('hint').textContent.startsWith('Hint ')")
    (hint,) = sent(page, "/v1/advisory")
    assert [message["role"] for message in hint["messages"]] == ["user", "assistant"]
    assert hint["messages"][0]["content"] == "Hello there"
    assert "ready" in await page.evaluate("document.getElementById('hint').textContent")
    await page.press("hat else")
    assert len(sent(page, "/v1/advisory")) == 1, "one hint a turn"

    await say(page, "?", 2)
    _, second = sent(page, "/v1/chat/completions")
    assert [message["content"] for message in second["messages"]][-1] == "What else?"
    assert router.advisor.book.counts["used"] == 1, "the request has come where it was expected"
    await page.press("x")
    await page.until("true")
    assert len(sent(page, "/v1/advisory")) == 2, "the next turn's first key"
    bars = await page.evaluate("[...document.querySelectorAll('#turns span')].map((bar) => bar.className)")
    assert bars == ["without", "with"]
    assert page.faults == []


async def test_what_is_known_of_instances_and_of_the_conversation_is_shown(
    page, start_worker, start_router, monkeypatch
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    told = Beat(EPOCH, 0, fills=(Fill(Tier.HBM.level, 32, 128), Fill(Tier.DRAM.level, 300, 400)))
    monkeypatch.setattr(router.agents, "beat", {worker.url: told}.get)
    await page.open(router.url + "/ui")
    await page.until("document.querySelectorAll('.instance').length === 1")
    shown = await page.evaluate("document.querySelector('.instance').textContent")
    assert "ready" in shown
    assert ("HBM25 %" in shown, "DRAM75 %" in shown, "disk" in shown) == (True, True, False)
    meters = (
        "[...document.querySelectorAll('.instance meter')].map((each) => [each.value, each.max, each.title])"
    )
    assert await page.evaluate(meters) == [
        [32, 128, "32 of 128 blocks"],
        [300, 400, "300 of 400 blocks"],
    ]
    told = Beat(EPOCH, 0, fills=(Fill(Tier.HBM.level, 64, 128),))
    monkeypatch.setattr(router.agents, "beat", {worker.url: told}.get)
    await page.until("document.querySelector('.instance').textContent.includes('HBM50 %')")
    await page.until("document.getElementById('model').textContent !== ''")
    await say(page, "Hello", 1)
    await page.press("a")
    await page.until("document.querySelectorAll('#where span').length > 0")
    assert "HBM" in await page.evaluate("document.getElementById('legend').textContent")


async def test_each_state_of_a_hint_is_shown_from_the_key_on(
    page, start_worker, start_router, monkeypatch
) -> None:
    """This test acts as the instance's agent: the page shows each state once the agent has reported it."""
    worker = await start_worker()
    router = await start_router(worker)
    links = router.advisor.preparer._links = Listening()
    in_dram(router, monkeypatch)
    await page.open(router.url + "/ui")
    await page.until("document.getElementById('model').textContent !== ''")
    await say(page, "Tell me of the sea. " * 5, 1)
    await page.evaluate(
        "window.shown = [];"
        "new MutationObserver(() => shown.push(document.getElementById('hint').textContent))"
        ".observe(document.getElementById('hint'), {childList: true})"
    )
    await page.press("W")
    last = "(shown.at(-1) ?? '')"
    await page.until(last + ".startsWith('Hint moving')")
    (hint,) = links.hints
    router.advisor.preparer.on_advised(worker.url, Advised(EPOCH, hint.id, "computing", 0, 0))
    await page.until(last + ".startsWith('Hint computing')")
    router.advisor.preparer.on_advised(worker.url, Advised(EPOCH, hint.id, "computed", 16, 16))
    await page.until(last + ".startsWith('Hint ready')")
    shown = await page.evaluate("shown")
    order = ["moving", "computing", "ready"]
    assert list(dict.fromkeys(text.split()[1] for text in shown)) == order
    assert all(worker.url in text for text in shown)
    times = [int(found[1]) for text in shown if (found := re.search(r", (\d+) ms after the key$", text))]
    assert len(times) == len(shown)
    assert times == sorted(times)
    followed = [each["url"] for each in page.requests if "/v1/advisory/" in each["url"]]
    assert followed == [f"{router.url}/v1/advisory/{hint.id}"], "one stream, and no polling"
    assert page.faults == []


async def test_without_hints_none_is_sent_and_text_is_text(page, start_worker, start_router) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await page.open(router.url + "/ui")
    await page.until("document.getElementById('model').textContent !== ''")
    await page.evaluate("document.getElementById('hints').click()")
    await page.evaluate("document.getElementById('draft').focus()")
    await say(page, "<img src=x onerror=alert(1)>", 1)
    await say(page, "again", 2)
    assert sent(page, "/v1/advisory") == []
    assert await page.evaluate("document.querySelectorAll('#messages img').length") == 0
    await page.evaluate("document.getElementById('new').click()")
    assert await page.evaluate("document.querySelectorAll('.message').length") == 0
    assert page.faults == []


async def test_a_key_is_asked_for_and_errors_are_said(page, start_worker, start_router) -> None:
    worker = await start_worker()
    router = await start_router(worker, api_key="the-key-of-this-test")
    await page.open(router.url + "/ui")
    await page.until("document.getElementById('login').open")
    await page.press("the-key-of-this-test\n")
    await page.until("document.getElementById('model').textContent !== ''")
    await page.evaluate("document.getElementById('draft').focus()")
    await say(page, "Hello", 1)
    await page.evaluate("sessionStorage.setItem('router-key', 'another')")
    await page.press("Are you there?\n")
    await page.until("document.getElementById('notice').textContent !== ''")
    assert await page.evaluate("document.getElementById('draft').value") == "Are you there?"

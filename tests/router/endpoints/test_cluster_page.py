"""The cluster page in a real browser: the router's view of its instances, live."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from browser import Page, browser_page, find_browser

from sglang_ext.protocol.agent import Beat, Fill
from sglang_ext.tiers import Tier

EPOCH = bytes(16)
BROWSER = find_browser()
SHOWN = Path(__file__).parents[3] / "docs" / "images" / "cluster.png"
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium or Chrome here: install one, or name it with CHROME"
)


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    assert BROWSER is not None
    async with browser_page(BROWSER) as page:
        yield page


async def test_instances_tiers_queue_hints_and_transfers_are_shown_and_change(
    page, start_worker, start_router, client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = await start_worker(), await start_worker()
    router = await start_router(one, two)
    beats = {
        one.url: Beat(EPOCH, 0, fills=(Fill(Tier.HBM.level, 96, 128), Fill(Tier.DRAM.level, 300, 400))),
        two.url: Beat(EPOCH, 0, fills=(Fill(Tier.HBM.level, 40, 128), Fill(Tier.DISK.level, 700, 4000))),
    }
    monkeypatch.setattr(router.agents, "beat", beats.get)
    size = {"width": 1180, "height": 640, "deviceScaleFactor": 1, "mobile": False}
    await page.call("Emulation.setDeviceMetricsOverride", **size)
    await page.open(router.url + "/ui/cluster.html")
    text = "document.body.innerText"
    await page.until("document.querySelectorAll('.instance').length === 2")
    cards = await page.evaluate("[...document.querySelectorAll('.instance')].map((each) => each.textContent)")
    assert "colocated" in cards[0]
    assert any("HBM75 %" in card and "DRAM75 %" in card for card in cards)
    assert any("HBM31 %" in card and "disk18 %" in card for card in cards)
    assert "2 of 2" in await page.evaluate(text)
    assert await page.evaluate("document.getElementById('transfers').hidden")

    body = {"input_ids": list(range(100, 164)), "sampling_params": {"max_new_tokens": 4}}
    for _ in range(4):
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.status == 200
    metrics = router.metrics
    metrics.transfers.labels(one.url, two.url, "fetch").inc(4096)
    metrics.transfers.labels(two.url, one.url, "hand-over").inc(1024)
    router.advisor._hints_used.labels("ready").inc(9)
    router.advisor._hints_used.labels("never").inc(1)
    await page.until("document.querySelectorAll('#transfers tbody tr').length === 2")
    rows = await page.evaluate(
        "[...document.querySelectorAll('#transfers tbody tr')]"
        ".map((row) => row.cells[2].textContent + row.cells[3].textContent)"
    )
    assert rows == ["fetch4.1K", "hand-over1K"]
    assert "kept: all was there 9 (90 %)" in await page.evaluate(text)
    assert "missed: no request came 1 (10 %)" in await page.evaluate(text)
    cached, prompt = sum_of(metrics, "cached_tokens"), sum_of(metrics, "prompt_tokens")
    assert 0 < cached < prompt == 256
    share = f"{round(100 * cached / prompt)} %"
    await page.until(f"document.getElementById('tiles').textContent.includes('{share}')")

    beats[one.url] = Beat(EPOCH, 0, fills=(Fill(Tier.HBM.level, 128, 128),))
    await page.until("document.body.textContent.includes('HBM100 %')")
    await page.until("document.querySelectorAll('.tile polyline').length === 4")
    shot = await page.call("Page.captureScreenshot", format="png")
    picture = base64.b64decode(shot["data"])
    (tmp_path / "cluster.png").write_bytes(picture)
    assert SHOWN.read_bytes()[:8] == picture[:8]
    assert len(SHOWN.read_bytes()) < 150_000
    assert page.faults == []


async def test_the_curves_begin_with_the_routers_last_hour(
    page, start_worker, start_router, client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    monkeypatch.setattr(router.agents, "beat", {worker.url: Beat(EPOCH, 0, fills=(Fill(0, 1, 900),))}.get)
    body = {"input_ids": list(range(100, 420)), "sampling_params": {"max_new_tokens": 4}}
    for _ in range(4):
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.status == 200
    await router.history.round()
    now, samples = router.clock.monotonic(), router.history._samples
    at, last = samples[-1]
    samples.clear()
    for ago in range(40, 0, -1):
        samples.append((now - 30.0 * ago, {**last, "running": ago, "requests": last["requests"] - 60 * ago}))
    samples.append((at, last))
    await page.open(router.url + "/ui/cluster.html")
    tiles = "[...document.querySelectorAll('.tile')].map((each) => each.textContent)"
    await page.until(f"{tiles}.some((each) => each.includes('an oracle of that capacity'))")
    shown = await page.evaluate(tiles)
    assert "75 %an oracle of that capacity" in shown
    points = (
        "document.querySelectorAll('.tile polyline')[{}].getAttribute('points').split(' ')"
        ".map((each) => each.split(',').map(Number))"
    )
    running, rates = await page.evaluate(points.format(0)), await page.evaluate(points.format(2))
    assert len(running) > 40
    assert running[0][0] < 1
    assert running[0][1] == 1  # the most there was, 20 minutes ago
    assert len(rates) > 39
    # Each 30 s had 60 requests.
    assert max(y for _, y in rates[:39]) - min(y for _, y in rates[:39]) < 1
    assert page.faults == []


def sum_of(metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"sglang_ext_router_{name}_total")


async def test_what_has_gone_stays_as_text_and_a_key_is_asked_for(page, start_worker, start_router) -> None:
    router = await start_router(await start_worker(name="<img src=x>"), api_key="the-key-of-this-test")
    await page.open(router.url + "/ui/cluster.html")
    await page.until("document.getElementById('login').open")
    await page.press("the-key-of-this-test\n")
    await page.until("document.querySelectorAll('.instance').length === 1")
    assert await page.evaluate("document.querySelectorAll('main img').length") == 0

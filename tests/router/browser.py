"""A real browser, headless, driven through its own DevTools protocol, for tests of the chat page.

The usual libraries bring a runtime of their own, many times the size of all else that the tests need.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The browser to use: the variable ``CHROME``, else an installed one."""
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())
        self.requests: list[dict[str, Any]] = []
        """The page's network requests: DevTools' ``request``, in its order."""
        self.faults: list[str] = []
        """Exceptions and errors of the page."""

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
                continue
            match told["method"]:
                case "Network.requestWillBeSent":
                    self.requests.append(told["params"]["request"])
                case "Runtime.exceptionThrown":
                    self.faults.append(json.dumps(told["params"]["exceptionDetails"])[:500])
                case "Log.entryAdded" if told["params"]["entry"]["level"] == "error":
                    self.faults.append(json.dumps(told["params"]["entry"])[:500])

    async def call(self, method: str, **params: Any) -> Any:
        """Call the protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, 30)
        assert "error" not in told, told
        return told["result"]

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true; its value."""
        async with asyncio.timeout(seconds):
            while not (value := await self.evaluate(expression)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return value

    async def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def press(self, text: str) -> None:
        """Type on the keyboard, key by key."""
        for character in text:
            enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            key = enter if character == "\n" else {"key": character, "text": character}
            await self.call("Input.dispatchKeyEvent", type="keyDown", **key)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def close(self) -> None:
        """Let go of the page."""
        await self._socket.close()
        await self._reading


@asynccontextmanager
async def browser_page(browser: str, *flags: str) -> AsyncIterator[Page]:
    """Start a browser with a fresh profile, and give its page. Ended with the block.

    Args:
        flags: more of the browser's own.
    """
    # The browser's socket lies there, and the path of a socket must be short: not in a test's own folder.
    with tempfile.TemporaryDirectory(prefix="browser-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        async with _running(browser, Path(folder), flags) as page:
            yield page


@asynccontextmanager
async def _running(browser: str, folder: Path, flags: tuple[str, ...]) -> AsyncIterator[Page]:
    process = await asyncio.create_subprocess_exec(
        browser,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--remote-debugging-port=0", f"--user-data-dir={folder}", *flags, "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
    )
    try:
        told = folder / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not told.exists() or len(told.read_text().split()) < 2:
                assert process.returncode is None, f"{browser} ended with {process.returncode}"
                await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [each for each in await response.json() if each["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await page.call(f"{domain}.enable")
                try:
                    yield page
                finally:
                    await page.close()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()

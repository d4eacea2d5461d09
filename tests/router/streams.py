"""Streams without end through a router, and how they ended."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from sglang_ext.router import Router
from sglang_ext.testing.waiting import until

STREAMS = 16


class Streams:
    """Streams without end, and how they ended."""

    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.client = client
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []
        self._numbers = itertools.count()
        self._ending = False

    async def _stream(self) -> None:
        while not self._ending:
            first = 10 * next(self._numbers) % 3000
            body = {
                "input_ids": list(range(first, first + 64)),
                "sampling_params": {"max_new_tokens": 6},
                "stream": True,
            }
            async with self.client.post(self.router.url + "/generate", json=body) as answer:
                text = await answer.text()
            if answer.status == 200:
                self.ends["whole" if text.rstrip().endswith("[DONE]") else "broken off"] += 1
            else:
                self.failures.append(f"{answer.status} {text[:300]}")

    async def more(self, count: int = 60) -> None:
        """Wait until so many more have ended."""
        enough = self.ends.total() + count
        await until(lambda: self.ends.total() >= enough or self.failures, 120)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Send while the block runs, and look afterwards how it went."""
        tasks = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        try:
            await self.more()
            yield
            await self.more()
        finally:
            self._ending = True
            await asyncio.gather(*tasks)
        assert self.failures == []

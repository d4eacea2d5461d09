"""Sends one turn to a cluster and reads the answer: OpenAI's chat completions, streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from sglang_ext.errors import PeerError

TIMEOUT_S = 120.0

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One answer, with the metadata that the servers reported."""

    text: str
    instance: str
    """URL of the server that was chosen."""
    reason: str
    """Why the router chose it."""
    prompt_tokens: int
    hbm_tokens: int
    dram_tokens: int
    first_token_s: float
    """Seconds from sending the request to the first piece of text."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that no tier held."""
        return self.prompt_tokens - self.hbm_tokens - self.dram_tokens


async def say(
    session: aiohttp.ClientSession, url: str, messages: Sequence[Message], answer_tokens: int
) -> Answer:
    """Send a conversation so far and read the next answer.

    Args:
        session: to send with; its connections are reused.
        url: the router's.
        messages: the conversation, the user's message last.
        answer_tokens: exact length of the answer.

    Raises:
        PeerError: the cluster refused, or broke off.
    """
    body = {
        "model": "default",
        "messages": list(messages),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # SGLang's own field: how many tokens came from which tier.
        "return_cached_tokens_details": True,
    }
    reading = _Reading()
    sent = time.monotonic()
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        ) as response:
            if response.status != 200:
                raise PeerError(f"{url} answered {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                reading.take(line)
            headers = response.headers
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerError(f"no answer from {url}: {error or type(error).__name__}") from error
    return reading.finish(sent, headers.get("x-kv-instance", ""), headers.get("x-kv-route-reason", ""))


class _Reading:
    """The events of one stream."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._first: float | None = None
        self._usage: dict[str, Any] = {}
        self._tiers: dict[str, Any] = {}

    def take(self, line: bytes) -> None:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            return
        event = orjson.loads(line[len(b"data: ") :])
        if "error" in event:
            raise PeerError(f"the answer broke off: {event['error']}")
        for choice in event.get("choices") or ():
            if piece := choice.get("delta", {}).get("content"):
                self._first = time.monotonic() if self._first is None else self._first
                self._pieces.append(piece)
        self._usage = event.get("usage") or self._usage
        self._tiers = (event.get("sglext") or {}).get("cached_tokens_details") or self._tiers

    def finish(self, sent: float, instance: str, reason: str) -> Answer:
        if self._first is None or not self._usage:
            raise PeerError("the answer has no text or says nothing of its tokens")
        return Answer(
            text="".join(self._pieces),
            instance=instance,
            reason=reason,
            prompt_tokens=self._usage["prompt_tokens"],
            hbm_tokens=self._tiers.get("device") or 0,
            dram_tokens=self._tiers.get("host") or 0,
            first_token_s=self._first - sent,
        )

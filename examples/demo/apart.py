"""The demo's second part: prefill and decode apart, and the tokens of a conversation that each side keeps.

The same conversation is held twice with one prefill server: with a decode server that gives its KV back
(MemServe's PD-Caching-3), and with a decode server that keeps nothing (PD-Caching-1). An ``extra_key`` keeps
the two from finding each other's KV.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp

from sglang_ext.cluster.config import flag_value
from sglang_ext.cluster.plan import LOOPBACK, SERVER_API_KEY_FLAG, Part
from sglang_ext.cluster_key import read_secret
from sglang_ext.errors import PeerError

DESIGNS = {"1": "decode-1", "3": "decode-0"}
"""The decode server of each design (``--kv-pd-caching``)."""
TURNS = 5
FIRST_TOKENS, LATER_TOKENS, ANSWER_TOKENS = 360, 40, 40
VOCABULARY = range(100, 30_000)
TIMEOUT_S = 60.0
SETTLE_S = 3.0
"""Time limit for metrics to show a request's effect, and for KV to come back."""
SEED = 5


@dataclass(frozen=True)
class Turn:
    """One turn under one design."""

    number: int
    """From 1."""
    prompt_tokens: int
    prefill_tokens: int
    """Tokens of the prompt that prefill had cached."""
    sent_bytes: int
    """KV that went from prefill to decode."""
    answer: tuple[int, ...]


def instance_args() -> dict[int, tuple[str, ...]]:
    """Flags of the servers by number; the prefill server is the first."""
    return {1 + int(name.removeprefix("decode-")): ("--kv-pd-caching", d) for d, name in DESIGNS.items()}


class Conversation:
    """A conversation with one prefill and one decode server, which are asked directly.

    design: its name, of ``DESIGNS``.
    """

    def __init__(self, session: aiohttp.ClientSession, parts: Sequence[Part], design: str) -> None:
        by_name = {part.name: part for part in parts}
        self._session = session
        self._design = design
        self._prefill, self._decode = by_name["prefill-0"], by_name[DESIGNS[design]]
        command = self._prefill.command
        self._port = int(flag_value(command, "--disaggregation-bootstrap-port") or 0)
        key = read_secret(flag_value(command, SERVER_API_KEY_FLAG) or "", field=SERVER_API_KEY_FLAG)
        self._headers = {"authorization": f"Bearer {key.decode()}"}
        self._rng = random.Random(SEED)
        self._history: list[int] = []
        self._turns = 0

    async def say(self) -> Turn:
        """The next turn.

        Raises:
            PeerError: a server refused it, or did not answer.
        """
        added = FIRST_TOKENS if not self._history else LATER_TOKENS
        self._history += self._rng.choices(VOCABULARY, k=added)
        body = {
            "input_ids": self._history,
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
            "extra_key": f"design {self._design}",
            "bootstrap_host": LOOPBACK,
            "bootstrap_port": self._port,
            "bootstrap_room": 1 + secrets.randbelow(1 << 62),
        }
        before, returned = await self._sent(), await self._returned()
        first, answer = await asyncio.gather(self._ask(self._prefill, body), self._ask(self._decode, body))
        sent = await self._until_more(self._sent, before) - before
        if self._design == "3":
            # The next turn must find the KV that comes back; a person who reads the answer takes longer.
            await self._until_more(self._returned, returned)
        self._turns += 1
        turn = Turn(
            self._turns,
            len(self._history),
            first["meta_info"]["cached_tokens"],
            int(sent),
            tuple(answer["output_ids"]),
        )
        self._history += answer["output_ids"]
        return turn

    async def _ask(self, part: Part, body: dict[str, Any]) -> Any:
        return await self._request("POST", part, "/generate", json=body)

    async def _sent(self) -> float:
        """Bytes that this decode server has read so far."""
        return await self._metric(self._decode, "sglang_ext_pd_read_bytes_total")

    async def _returned(self) -> float:
        """Tokens that have come back to prefill so far."""
        return await self._metric(self._prefill, "sglang_ext_pd_returned_tokens_total")

    async def _metric(self, part: Part, name: str) -> float:
        text = await self._request("GET", part, "/metrics")
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)
        return sum(map(float, found))

    async def _until_more(self, read: Any, before: float) -> float:
        """A counter, once it has grown; as it is when it does not grow."""
        deadline = time.monotonic() + SETTLE_S
        # Metrics have to be asked for.
        while (value := await read()) <= before and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return float(value)

    async def _request(self, method: str, part: Part, path: str, **options: Any) -> Any:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.request(
                method, part.url + path, headers=self._headers, timeout=timeout, **options
            ) as response:
                if response.status != 200:
                    raise PeerError(f"{part.name}: {response.status}: {(await response.text())[:300]}")
                is_json = response.content_type == "application/json"
                return await (response.json() if is_json else response.text())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerError(f"no answer from {part.name}: {error or type(error).__name__}") from error


async def converse(parts: Sequence[Part]) -> dict[str, list[Turn]]:
    """Hold the conversation under each design, a turn of each at a time."""
    async with aiohttp.ClientSession() as session:
        held = {design: Conversation(session, parts, design) for design in DESIGNS}
        turns: dict[str, list[Turn]] = {design: [] for design in DESIGNS}
        for _ in range(TURNS):
            for design, conversation in held.items():
                turns[design].append(await conversation.say())
        return turns


def decode_had(turns: Sequence[Turn]) -> list[int]:
    """Tokens of each prompt that decode had. In the first turn everything is sent, which gives the unit."""
    unit = turns[0].sent_bytes / turns[0].prompt_tokens
    return [round(turn.prompt_tokens - turn.sent_bytes / unit) for turn in turns]


def lines(turns: dict[str, list[Turn]]) -> list[str]:
    """The report: the cached part of each prompt on each side, and the sums."""
    one, three = turns["1"], turns["3"]
    had = {design: decode_had(held) for design, held in turns.items()}
    titles = f"{'prefill had':>13}{'decode had':>12}{'sent KiB':>10}"
    found = [
        f"{'':>12}   {'1: decode keeps nothing':^35}   {'3: decode keeps, and gives back':^35}".rstrip(),
        f"turn  prompt   {titles}   {titles}",
    ]
    for at, (first, third) in enumerate(zip(one, three, strict=True)):
        cells = [
            f"{turn.prefill_tokens:>13}{had[design][at]:>12}{turn.sent_bytes / 1024:>10.0f}"
            for design, turn in (("1", first), ("3", third))
        ]
        found.append(f"{first.number:>4}  {first.prompt_tokens:>6}   {cells[0]}   {cells[1]}")
    same = sum(first.answer == third.answer for first, third in zip(one, three, strict=True))
    computed = {d: sum(t.prompt_tokens - t.prefill_tokens for t in held) for d, held in turns.items()}
    sent = {d: sum(t.sent_bytes for t in held) / 1024 for d, held in turns.items()}
    return [
        *found,
        "",
        f"Under 3, prefill computed {computed['3']:,} prompt tokens instead of {computed['1']:,}, and "
        f"{sent['3']:,.0f} KiB went to decode instead of {sent['1']:,.0f}. "
        f"Answers equal: {same} of {len(one)}.",
    ]


def grows(turns: dict[str, list[Turn]]) -> bool:
    """Whether decode had more with every turn under 3, and nothing under 1."""
    one, three = decode_had(turns["1"]), decode_had(turns["3"])
    return not any(one) and all(a < b for a, b in pairwise(three))

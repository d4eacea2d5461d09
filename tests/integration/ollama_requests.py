"""Requests of Ollama's APIs, asking, and comparing answers of two equal requests."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

Json = dict[str, Any]
TEXT = "The librarian of a small town reads a book about radix trees. " * 6
GREEDY = {"temperature": 0, "num_predict": 8}
CHAT: Json = {
    "model": "any",
    "messages": [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "And then?"},
    ],
    "options": GREEDY,
}
PROMPT: Json = {"model": "any", "prompt": TEXT, "system": "Be terse.", "options": GREEDY}
OF_THE_TIME = {"created_at", "total_duration", "modified_at"}


def settled(answer: Any, left_out: set[str] = OF_THE_TIME) -> Any:
    """An answer without the fields that differ between two equal requests."""
    if isinstance(answer, list):
        return [settled(each, left_out) for each in answer]
    if isinstance(answer, dict):
        return {name: settled(each, left_out) for name, each in answer.items() if name not in left_out}
    return answer


async def ask(client: aiohttp.ClientSession, url: str, body: Json | None = None) -> tuple[Any, str]:
    """(answer, type of content): for a stream, all its lines."""
    async with client.request("GET" if body is None else "POST", url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        kind = answer.headers["content-type"].partition(";")[0]
        raw = await answer.read()
    if kind == "application/json":
        return json.loads(raw), kind
    parts = raw.splitlines() if kind == "application/x-ndjson" else raw.split(b"\n\n")
    return [
        json.loads(part.removeprefix(b"data: ")) for part in parts if part and b"[DONE]" not in part
    ], kind

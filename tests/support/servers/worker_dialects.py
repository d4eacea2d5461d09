"""How a stand-in speaks Anthropic's messages and OpenAI's responses; the rest is in `workers.py`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import web

Json = dict[str, Any]
_serial = itertools.count(1)


class Worker(Protocol):
    """The members of a stand-in that its dialects use (`workers.StandInWorker`)."""

    requests: list[tuple[str, Json, dict[str, str]]]
    rids_aborted: list[Json]
    kept: dict[str, Json]
    in_background: dict[str, Json]

    def render(self, messages: Sequence[Json]) -> list[int]: ...

    def generate(self, prompt: list[int], count: int, body: Json) -> tuple[list[int], int]: ...

    def text(self, output: list[int]) -> str: ...

    def details(self, cached: int) -> Json | None: ...

    async def answer(self, request: web.BaseRequest, answer: Any, *, stream: bool) -> web.StreamResponse: ...

    async def notify(self) -> None: ...


def headers_of(request: web.BaseRequest) -> dict[str, str]:
    """Its headers, names in lower case."""
    return {name.lower(): value for name, value in request.headers.items()}


def plain(content: Any) -> str:
    """Content as text, parts joined by blanks."""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content or ())


def _conversation(body: Json) -> list[Json]:
    """The messages of a body of ``/v1/messages``, texts only."""
    system = [{"role": "system", "content": plain(body["system"])}] if body.get("system") else []
    return system + [{"role": m["role"], "content": plain(m["content"])} for m in body["messages"]]


def cached_details(body: Json, details: Json | None) -> Json:
    """The answer's field for ``return_cached_tokens_details``."""
    if not body.get("return_cached_tokens_details") or details is None:
        return {}
    return {"sglext": {"cached_tokens_details": details}}


def sglext(body: Json, details: Json | None, output: list[int]) -> Json:
    """The answer's field for all that may be asked for on the side."""
    found: Json = cached_details(body, details).get("sglext", {})
    if body.get("return_output_ids_in_sglext"):
        found = {**found, "output_ids": [output]}
    return {"sglext": found} if found else {}


def error(message: str) -> web.Response:
    """A request that is refused."""
    return web.json_response({"error": {"message": message}}, status=400)


async def messages(worker: Worker, request: web.BaseRequest) -> web.StreamResponse:
    """``/v1/messages``. Salts are not looked at: SGLang's does not take any."""
    body: Json = json.loads(await request.content.read())
    worker.requests.append((request.path, body, headers_of(request)))
    prompt = worker.render(_conversation(body))
    output, cached = worker.generate(prompt, body["max_tokens"], {})
    usage: Json = {"input_tokens": len(prompt) - cached, "output_tokens": len(output)}
    if cached:
        usage["cache_read_input_tokens"] = cached
    block = {"type": "text", "text": worker.text(output)}
    message: Json = {
        "id": f"msg_{next(_serial)}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [block],
        "stop_reason": "max_tokens",
        "usage": usage,
    }
    if not body.get("stream"):
        return await worker.answer(request, message, stream=False)
    deltas = [{"type": "text_delta", "text": worker.text([token])} for token in output]
    events: list[Json] = [
        {
            "type": "message_start",
            "message": {
                **{key: value for key, value in message.items() if key != "stop_reason"},
                "content": [],
                "usage": {**usage, "output_tokens": 0},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens"},
            "usage": {"output_tokens": len(output)},
        },
        {"type": "message_stop"},
    ]
    return await worker.answer(request, events, stream=True)


async def count_tokens(worker: Worker, request: web.BaseRequest) -> web.StreamResponse:
    """``/v1/messages/count_tokens``."""
    body: Json = json.loads(await request.content.read())
    return web.json_response({"input_tokens": len(worker.render(_conversation(body)))})


async def responses(worker: Worker, request: web.BaseRequest) -> web.StreamResponse:
    """``/v1/responses``; each response is kept under its ID."""
    body: Json = json.loads(await request.content.read())
    worker.requests.append((request.path, body, headers_of(request)))
    previous = body.get("previous_response_id")
    if previous is not None and previous not in worker.kept:
        return web.json_response({"error": {"message": f"no response {previous}"}}, status=404)
    given = body["input"]
    said = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    prompt = worker.render([*system, *({**m, "content": plain(m["content"])} for m in said)])
    output, cached = worker.generate(prompt, body.get("max_output_tokens") or 4, body)
    name, item_id = f"resp_{next(_serial)}", f"msg_{next(_serial)}"
    # The "model" never ends by itself: ``max_output_tokens`` or the stand-in's default ends it.
    status = "incomplete" if body.get("max_output_tokens") else "completed"
    part: Json = {"type": "output_text", "text": worker.text(output), "annotations": []}
    item: Json = {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    response: Json = {
        "id": name,
        "object": "response",
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": body.get("model"),
        "output": [item],
        "usage": {
            "input_tokens": len(prompt),
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": len(output),
        },
    }
    worker.kept[name] = response
    if body.get("background") and not body.get("stream"):
        worker.kept[name] = {**response, "status": "queued", "output": [], "usage": None}
        worker.in_background[name] = response
        return await worker.answer(request, worker.kept[name], stream=False)
    if not body.get("stream"):
        return await worker.answer(request, response, stream=False)
    begun = {
        **response,
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    at = {"item_id": item_id, "output_index": 0, "content_index": 0}
    deltas = [{"type": "response.output_text.delta", "delta": worker.text([token]), **at} for token in output]
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {
            "type": "response.output_item.added",
            "item": {**item, "status": "in_progress", "content": []},
            "output_index": 0,
        },
        {"type": "response.content_part.added", "part": {**part, "text": ""}, **at},
        *deltas,
        {"type": "response.output_text.done", "text": part["text"], **at},
        {"type": "response.content_part.done", "part": part, **at},
        {"type": "response.output_item.done", "item": item, "output_index": 0},
        {"type": f"response.{status}", "response": response},
    ]
    return await worker.answer(request, events, stream=True)


async def kept_response(worker: Worker, request: web.BaseRequest) -> web.StreamResponse:
    """``GET /v1/responses/{id}``."""
    response = worker.kept.get(request.path.split("/")[3])
    if response is None:
        return web.json_response({"error": {"message": "no such response"}}, status=404)
    return web.json_response(response)


async def detokenize(worker: Worker, request: web.BaseRequest) -> web.StreamResponse:
    """``/detokenize``."""
    body = json.loads(await request.content.read())
    return web.json_response({"text": worker.text(body["tokens"])})


async def abort_request(worker: Worker, request: web.BaseRequest) -> web.StreamResponse:
    """``/abort_request``: noted, nothing is aborted."""
    worker.rids_aborted.append(json.loads(await request.content.read()))
    await worker.notify()
    return web.Response()

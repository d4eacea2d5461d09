"""Record the requests of agents: a scripted server of OpenAI's and Anthropic's APIs.

    python -m benchmarks.agents.record --port 18900 --folder FOLDER --out requests.jsonl

Point a client at it whose project is FOLDER, with a file ``notes.txt``. It answers a task with a call of one
of its tools that reads this file, and the result with a text: sessions have the form of real ones. Each
request becomes a line of JSON: path, headers and body.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]
TEXTS = (
    "I will read the file first.",
    "The test fails because the sum starts at one.",
    "I have changed the first line; the sum starts at zero now.",
    "All tests pass.",
)
USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}


def reading_calls(folder: Path) -> dict[str, Json]:
    """Tools that read a file, by the names that clients give them, and arguments of a call."""
    notes = str(folder / "notes.txt")
    return {
        "Read": {"file_path": notes},
        "read": {"filePath": notes, "path": notes},
        "exec_command": {"cmd": "cat notes.txt"},
        "shell": {"command": ["cat", "notes.txt"]},
        "bash": {"command": "cat notes.txt"},
    }


class Script:
    """Answers and records requests.

    Args:
        folder: the client's project. out: a file to which requests are appended.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        self._calls = reading_calls(folder)
        self._out = out
        self._ids = itertools.count()
        self._texts = itertools.cycle(TEXTS)

    async def _take(self, request: web.Request) -> Json:
        body: Json = await request.json()
        line = {"path": request.path, "headers": dict(request.headers), "body": body}
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return body

    def _call(self, body: Json, after_tool: bool) -> tuple[str, Json] | None:
        """The call with which a request is answered; None after a tool's result."""
        names = [tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools", [])]
        found = next((name for name in self._calls if name in names), None)
        return None if found is None or after_tool else (found, self._calls[found])

    def _id(self, kind: str) -> str:
        return f"{kind}_{next(self._ids):04d}"

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``/v1/chat/completions``."""
        body = await self._take(request)
        call = self._call(body, body["messages"][-1]["role"] == "tool")
        message: Json = {"role": "assistant", "content": next(self._texts)}
        if call is not None:
            function = {"name": call[0], "arguments": json.dumps(call[1])}
            message["tool_calls"] = [
                {"index": 0, "id": self._id("call"), "type": "function", "function": function}
            ]
        end = "stop" if call is None else "tool_calls"
        base = {"id": self._id("chatcmpl"), "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": end}
            return web.json_response(
                {**base, "object": "chat.completion", "choices": [choice], "usage": USAGE}
            )
        base["object"] = "chat.completion.chunk"
        return await streamed(
            request,
            [
                (None, {**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]}),
                (
                    None,
                    {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": end}], "usage": USAGE},
                ),
            ],
            "data: [DONE]\n\n",
        )

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """``/v1/messages``."""
        body = await self._take(request)
        last = body["messages"][-1]["content"]
        call = self._call(
            body, isinstance(last, list) and any(part["type"] == "tool_result" for part in last)
        )
        content: list[Json] = [{"type": "text", "text": next(self._texts)}]
        if call is not None:
            content.append({"type": "tool_use", "id": self._id("toolu"), "name": call[0], "input": call[1]})
        message: Json = {
            "id": self._id("msg"), "type": "message", "role": "assistant", "model": body["model"],
            "content": content, "stop_reason": "end_turn" if call is None else "tool_use",
            "stop_sequence": None, "usage": {"input_tokens": 100, "output_tokens": 20},
        }  # fmt: skip
        if not body.get("stream"):
            return web.json_response(message)
        events: list[Json] = [
            {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
        ]
        for index, part in enumerate(content):
            if part["type"] == "text":
                start, delta = {**part, "text": ""}, {"type": "text_delta", "text": part["text"]}
            else:
                start = {**part, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(part["input"])}
            events += [
                {"type": "content_block_start", "index": index, "content_block": start},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ]
        ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        events += [
            {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 20}},
            {"type": "message_stop"},
        ]
        return await streamed(request, [(event["type"], event) for event in events])

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """``/v1/responses``, as streams only, as Codex asks for them."""
        body = await self._take(request)
        call = self._call(body, str(body["input"][-1].get("type")).endswith("call_output"))
        text = {"type": "output_text", "text": next(self._texts), "annotations": []}
        items: list[Json] = [
            {"type": "message", "id": self._id("msg"), "role": "assistant", "content": [text]}
        ]
        if call is not None:
            ids = {"id": self._id("fc"), "call_id": self._id("call")}
            items.append({"type": "function_call", **ids, "name": call[0], "arguments": json.dumps(call[1])})
        usage = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
        answer: Json = {"id": self._id("resp"), "object": "response", "created_at": 1, "model": body["model"]}
        events: list[Json] = [{"type": "response.created", "response": {**answer, "output": []}}]
        for index, item in enumerate(items):
            item["status"] = "completed"
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        done = {**answer, "status": "completed", "output": items, "usage": usage}
        events.append({"type": "response.completed", "response": done})
        return await streamed(request, [(event["type"], event) for event in events])

    async def models(self, request: web.Request) -> web.Response:
        """``/v1/models``."""
        model = {"id": "default", "object": "model", "created": 1, "owned_by": "sglang"}
        return web.json_response({"object": "list", "data": [model]})


async def streamed(
    request: web.Request, events: Sequence[tuple[str | None, Json]], end: str = ""
) -> web.StreamResponse:
    """Server-sent events: (name, data) of each."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for name, data in events:
        head = "" if name is None else f"event: {name}\n"
        await response.write(f"{head}data: {json.dumps(data)}\n\n".encode())
    await response.write(end.encode())
    return response


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Record the requests of agents.")
    parser.add_argument("--port", type=int, default=18900)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="the client's project")
    parser.add_argument("--out", type=Path, required=True, help="file of the requests")
    options = parser.parse_args(arguments)
    script = Script(options.folder.resolve(), options.out)
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", script.chat)
    app.router.add_post("/v1/messages", script.messages)
    app.router.add_post("/v1/responses", script.responses)
    app.router.add_get("/v1/models", script.models)
    web.run_app(app, host="127.0.0.1", port=options.port)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

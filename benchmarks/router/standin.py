"""A fast stand-in for an SGLang server, for measuring routers: `python -m benchmarks.router.standin JSON`.

It answers the requests that a router sends to a server at its start, and every generation request after a
service time that costs no CPU. Answers are made beforehand; each event of a stream is sent in a turn of the
event loop of its own, and so in a segment of its own. It prints its port and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable
from typing import Any, cast

import httptools
import orjson
import uvloop

EVENTS = 10
"""Of a stream, before the end mark."""
HOLD = "hold this stream"
"""A stream whose prompt has it ends after its first event with its connection only."""
FLOOD = "flood this stream"
"""A stream whose prompt has it goes on with `FLOOD_EVENTS` more, as fast as they are read."""
FLOOD_EVENTS = 512


class StandIn(asyncio.Protocol):
    """One connection."""

    def __init__(self, facts: dict[str, Any], service_s: float) -> None:
        self._facts = facts
        self._service_s = service_s
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._url = b""
        self._body = b""
        self._more = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()  # sglang-router tries HTTP/2 first

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        url = self._url
        if url in (b"/generate", b"/v1/chat/completions", b"/v1/completions"):
            if b"token_ids_logprob" in self._body:
                self._send(400, {"error": {"message": "out of range; valid range is [0, 32000)"}})
                return
            is_stream = b'"stream":true' in self._body.replace(b" ", b"")
            answer = self._begin_stream if is_stream else self._answer
            self._loop.call_later(self._service_s, answer, url == b"/generate")
            return
        fact = self._facts.get(url.decode())
        self._send(404 if fact is None else 200, fact or {})

    def _send(self, status: int, value: Any) -> None:
        body = orjson.dumps(value)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _answer(self, native: bool) -> None:
        if not self._transport.is_closing():
            self._transport.write(NATIVE_ANSWER if native else CHAT_ANSWER)

    def _begin_stream(self, native: bool) -> None:
        self._transport.write(STREAM_HEAD)
        if HOLD.encode() in self._body:
            self._transport.write(CHAT_EVENT)
        elif FLOOD.encode() in self._body:
            self._more = FLOOD_EVENTS
            self._flood()
        else:
            self._event(0, NATIVE_EVENT if native else CHAT_EVENT)

    def pause_writing(self) -> None:
        self._more = -self._more

    def resume_writing(self) -> None:
        self._more = -self._more
        self._flood()

    def _flood(self) -> None:
        while self._more > 0 and not self._transport.is_closing():
            self._more -= 1
            self._transport.write(LARGE_EVENT)

    def _event(self, number: int, event: bytes) -> None:
        if self._transport.is_closing():
            return
        if number == EVENTS:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self._transport.write(event)
        self._loop.call_soon(self._event, number + 1, event)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(value: Any) -> bytes:
    body = orjson.dumps(value)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_META = {
    "id": "x" * 32,
    "finish_reason": {"type": "length", "length": 16},
    "prompt_tokens": 300,
    "completion_tokens": 16,
    "cached_tokens": 0,
    "weight_version": "default",
    "e2e_latency": 0.1,
}
NATIVE_ANSWER = _whole({"text": " word" * 16, "output_ids": list(range(1000, 1016)), "meta_info": _META})
CHAT_ANSWER = _whole({
    "id": "x" * 32, "object": "chat.completion", "created": 1, "model": "default",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": " word" * 16}, "logprobs": None,
                 "finish_reason": "length", "matched_stop": None}],
    "usage": {"prompt_tokens": 300, "completion_tokens": 16, "total_tokens": 316},
})  # fmt: skip
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
NATIVE_EVENT = _chunk(
    b"data: "
    + orjson.dumps(
        {"text": " word" * 8, "output_ids": [7] * 8, "meta_info": {**_META, "finish_reason": None}}
    )
    + b"\n\n"
)
CHAT_EVENT = _chunk(
    b"data: "
    + orjson.dumps({
        "id": "x" * 32, "object": "chat.completion.chunk", "created": 1, "model": "default",
        "choices": [{"index": 0, "delta": {"role": None, "content": " word"}, "logprobs": None,
                     "finish_reason": None}],
        "usage": None,
    })
    + b"\n\n"
)  # fmt: skip


LARGE_EVENT = _chunk(b'data: {"text": "' + b"x" * (1 << 16) + b'"}\n\n')


def facts(tokenizer: str, serial: int) -> dict[str, Any]:
    """The server's descriptions of itself, by path."""
    model = {
        "model_path": "stand-in", "served_model_name": "stand-in", "tokenizer_path": tokenizer,
        "is_generation": True, "weight_version": "default", "disaggregation_mode": "null",
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "preferred_sampling_params": None,
    }  # fmt: skip
    server: dict[str, Any] = {
        "startup_time": float(serial), "random_seed": serial, "allow_auto_truncate": False,
        "chat_template": None, "completion_template": None, "version": "0.5.23", "internal_states": [{}],
        "model_path": "stand-in", "served_model_name": "stand-in", "tp_size": 1, "dp_size": 1,
        "max_running_requests": 1024,
    }  # fmt: skip
    card = {"id": "stand-in", "object": "model", "max_model_len": 131_072}
    return {
        "/model_info": model, "/get_model_info": model, "/server_info": server, "/get_server_info": server,
        "/v1/models": {"object": "list", "data": [card]}, "/health": {}, "/health_generate": {},
        "/tokenize": {"tokens": [7], "count": 1, "max_model_len": 131_072},
        "/get_load": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
    }  # fmt: skip


async def serve(tokenizer: str, service_s: float, count: int) -> None:
    """Run `count` stand-ins on ports of their own until the process is killed."""
    loop = asyncio.get_running_loop()
    ports = []
    servers: list[Any] = []
    for serial in range(count):
        factory: Callable[[], StandIn] = functools.partial(StandIn, facts(tokenizer, serial), service_s)
        server = await loop.create_server(factory, "127.0.0.1", 0, backlog=1024)
        servers.append(server)
        ports.append(server.sockets[0].getsockname()[1])
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    uvloop.run(serve(**arguments))

"""A stand-in for an SGLang server: its HTTP surface without a model, on the test's own event loop.

It behaves like SGLang in all that a router can see: the facts it reports, the shapes of answers and streams,
prompt and cached token counts, aborting when the client goes away. The "model" counts on from the last token
of the prompt, within the last 1000 entries of the vocabulary (whole words, in the tiny models' tokenizer, so
that its answers tokenize to the generated tokens). Tests hold it at a moment with a ``Gate``, and make it die
or refuse.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.signals import Signal
from sglang_ext.tiers import Tier
from tests.support.servers import worker_dialects as dialects
from tests.support.servers import worker_pooling as pooling
from tests.support.servers.worker_dialects import Json, error, headers_of, plain

_serial = itertools.count(1)


class Gate:
    """A place where a handler waits until the test lets it go on."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._open = asyncio.Event()

    async def wait(self) -> None:
        """Called by the handler."""
        self._reached.set()
        await self._open.wait()

    async def reached(self, timeout_s: float = 30.0) -> None:
        """Wait until a handler stands at the gate."""
        await asyncio.wait_for(self._reached.wait(), timeout_s)

    def open(self) -> None:
        """Let all requests through, from now on."""
        self._open.set()


class StandInWorker:
    """One stand-in. Use ``running_worker``; the knobs below may be turned at any time.

    Args:
        tokenizer: of transformers; without one a text is a token per byte.
        vocab_size, context_length, name: the values that it reports.
        generates: whether its model does; otherwise a request to generate ends it.
    """

    def __init__(
        self,
        *,
        tokenizer: Any = None,
        tokenizer_path: str = "/nowhere/stand-in",
        vocab_size: int = 32_000,
        context_length: int = 4096,
        name: str = "stand-in",
        generates: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_info: Json = {
            "model_path": name,
            "served_model_name": name,
            "tokenizer_path": tokenizer_path,
            "is_generation": generates,
            "weight_version": "default",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }
        self.server_info: Json = {
            "startup_time": {"scheduler_e2e": float(next(_serial))},
            "random_seed": 1,
            "served_model_name": name,
            "api_key": None,
            "allow_auto_truncate": False,
            "chat_template": None,
            "completion_template": None,
            "version": "stand-in",
            "internal_states": [{}],
            "enable_pd_role_switch": True,
        }
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.url = ""

        self.before_head: Gate | None = None
        """Requests wait here before anything is answered."""
        self.between_chunks: Gate | None = None
        """Streams wait here after ``chunks_before_gate`` chunks."""
        self.chunks_before_gate = 1
        self.deaths_before_head = 0
        """Number of first requests that are answered by closing the connection."""
        self.fails: str | None = None
        """Requests are answered 500 with it."""
        self.die_after_chunks: int | None = None
        """Streams are cut after so many chunks, in the middle of an event."""
        self.hang_probes: Gate | None = None
        """``/model_info`` waits here."""
        self.busy = False
        """``/flush_cache`` refuses, as SGLang does while it has requests."""
        self.answers: dict[str, tuple[int, Any]] = {}
        """(status, JSON) with which further paths are answered."""
        self.calls: list[tuple[str, str, Any]] = []
        """(method, path, JSON) of every request to one of ``answers``."""
        self.before_answers: Gate | None = None
        """Requests to one of ``answers`` wait here."""
        self.dies = False
        """They are answered by closing the connection."""
        self.has_tokenize = True
        self.before_tokens: Gate | None = None
        """``/tokenize`` waits here, and so does ``/model_info``: SGLang tokenizes in its event loop."""
        self.refuses_tools = False
        self.skew_tokens = False
        """``/v1/tokenize`` answers with other tokens than those that are served."""
        self.next_ids: list[list[int]] = []
        """The ids that the next requests generate, first come, first served; an end of turn is no text."""
        self.ids_told: list[int] | None = None
        """Told in the place of the ids that were generated."""
        self.end_details: dict[str, int | str] = {}
        """Fields that answers add about their requests at the end: stages, for example."""
        self.role_refusals: list[str] = []
        """Refusals with which ``/pd_role_switch`` answers before it changes the role."""
        self.before_switch: Gate | None = None
        """``/pd_role_switch`` waits here."""
        self.switched: Signal[[str]] = Signal()
        """It has another role."""

        self.requests: list[tuple[str, Json, dict[str, str]]] = []
        """(path, body, headers) of every generation request."""
        self.cached: list[int] = []
        """Cached tokens of every prompt that was embedded, classified, scored or ranked."""
        self.tokenizing = 0
        """Requests to ``/tokenize`` that have come."""
        self.rids_aborted: list[Json] = []
        """Bodies of ``/abort_request``."""
        self.kept: dict[str, Json] = {}
        """Responses of ``/v1/responses``, by id."""
        self.in_background: dict[str, Json] = {}
        """Later responses to requests with ``background``: a test puts them into ``kept``."""
        self.targets: list[str] = []
        """Path and query of every request, as sent."""
        self.aborted = 0
        """Requests whose client went away before the end."""
        self.finished = 0
        self.flushed = 0
        self._changed = asyncio.Condition()
        self._cache = RadixTree(block_size=1)
        self._holder = Holder.of("stand-in", next(_serial), Tier.HBM)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until a counter of this stand-in makes ``condition`` true."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def notify(self) -> None:
        """Let ``until`` look again."""
        async with self._changed:
            self._changed.notify_all()

    def details(self, cached: int) -> Json | None:
        """``cached_tokens_details`` of an answer: None if there are no details."""
        if not cached and not self.end_details:
            return None
        return {"device": cached, "host": 0, **self.end_details}

    # -- tokens -----------------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        if self.tokenizer is None:
            return list(text.encode())
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def render(self, messages: Sequence[Json]) -> list[int]:
        """The tokens of a conversation."""
        if self.tokenizer is None:
            return self.tokenize(json.dumps(messages))
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, return_dict=False
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def generate(self, prompt: list[int], count: int, body: Json) -> tuple[list[int], int]:
        """(generated ids, cached tokens of the prompt); caches the sequence as SGLang does.

        Args:
            body: has the ``extra_key`` and ``cache_salt`` that keep the prompt apart from others.
        """
        space = (body.get("extra_key"), body.get("cache_salt"))
        key = encode_tokens(array("q", prompt))
        cached = self._cache.holders(space, key).get(self._holder, 0)
        span = min(1000, self.vocab_size)
        output = [self.vocab_size - span + (prompt[-1] + i + 1) % span for i in range(count)]
        if self.next_ids:
            output = self.next_ids.pop(0)
        self._cache.insert(space, encode_tokens(array("q", prompt + output[:-1])), self._holder)
        return output, min(cached, len(prompt) - 1)

    # -- endpoints --------------------------------------------------------------------------------

    def handler(self) -> Callable[[web.BaseRequest], Any]:
        """The handler of all requests."""
        routes: dict[str, Callable[[web.BaseRequest], Any]] = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/models": self._models,
            "/v1/tokenize": self._tokenize,
            "/tokenize": self._tokenize,
            "/detokenize": partial(dialects.detokenize, self),
            "/health_generate": self._health,
            "/abort_request": partial(dialects.abort_request, self),
            "/start_profile": self._health,
            "/v1/messages": partial(dialects.messages, self),
            "/v1/messages/count_tokens": partial(dialects.count_tokens, self),
            "/v1/responses": partial(dialects.responses, self),
            "/flush_cache": self._flush,
            "/pd_role_switch": self._switch_role,
            "/generate": self._native,
            "/v1/chat/completions": self._openai,
            "/invocations": self._openai,
            "/v1/completions": self._openai,
            **dict.fromkeys(
                ("/v1/embeddings", "/encode", "/v1/classify", "/classify", "/v1/score", "/v1/rerank"),
                partial(pooling.answer, self),
            ),
        }

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            self.targets.append(request.raw_path)
            if request.path == "/v1/tokenize" and not self.has_tokenize:
                return web.Response(status=404)
            route = routes.get(request.path)
            if route is None and request.path.startswith("/v1/responses/"):
                route = partial(dialects.kept_response, self)
            if route is None and request.path in self.answers:
                route = self._further
            if route is None:
                return web.Response(status=404)
            answer: web.StreamResponse = await route(request)
            return answer

        return handle

    async def _further(self, request: web.BaseRequest) -> web.Response:
        body = await request.content.read()
        self.calls.append((request.method, request.path, json.loads(body) if body else None))
        if self.before_answers is not None:
            await self.before_answers.wait()
        if self.dies:
            _cut(request)
        status, answer = self.answers[request.path]
        return web.json_response(answer, status=status)

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.BaseRequest) -> web.Response:
        if self.hang_probes is not None:
            await self.hang_probes.wait()
        if self.before_tokens is not None and self.tokenizing:
            await self.before_tokens.wait()
        return web.json_response(self.model_info)

    async def _server_info(self, request: web.BaseRequest) -> web.Response:
        return web.json_response(self.server_info)

    async def _models(self, request: web.BaseRequest) -> web.Response:
        card = {
            "object": "model",
            "id": self.model_info["served_model_name"],
            "max_model_len": self.context_length,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        body = json.loads(await request.content.read())
        self.tokenizing += 1
        if self.before_tokens is not None:
            await self.before_tokens.wait()
        if "messages" in body:
            if body.get("tools") and self.refuses_tools:
                return error("tools are not supported")
            messages = [{**m, "content": plain(m["content"])} for m in body["messages"]]
            tokens = self.render(messages)
        else:
            tokens = self.tokenize(body["prompt"])
        if self.skew_tokens:
            tokens = [*tokens, 0]
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.context_length}
        )

    async def _flush(self, request: web.BaseRequest) -> web.Response:
        if self.busy:
            return web.Response(status=400, text="Flush cache failed.\n")
        self._cache.drop_holder(self._holder)
        self.flushed += 1
        return web.Response(text="Cache flushed.\n")

    async def _switch_role(self, request: web.BaseRequest) -> web.Response:
        role: str = json.loads(await request.content.read())["new_role"]
        if self.before_switch is not None:
            await self.before_switch.wait()
        why = self.role_refusals.pop(0) if self.role_refusals else ""
        if not why:
            self.model_info["disaggregation_mode"] = role
            self.switched(role)
        return web.json_response({"success": not why, "message": why}, status=400 if why else 200)

    async def _native(self, request: web.BaseRequest) -> web.StreamResponse:
        body: Json = json.loads(await request.content.read())
        if body.get("token_ids_logprob"):
            return error(
                "token_ids_logprob contains out-of-vocabulary token id "
                f"{body['token_ids_logprob'][0]}; valid range is [0, {self.vocab_size})."
            )
        self.requests.append((request.path, body, headers_of(request)))
        if not self.model_info["is_generation"]:
            _cut(request)
        batch: Any = body.get("text", body.get("input_ids"))
        is_batch = isinstance(batch, list) and bool(batch) and not isinstance(batch[0], int)
        prompts = [self._ids(item) for item in (batch if is_batch else [batch])]
        sampling = body.get("sampling_params") or {}
        count = (sampling[0] if isinstance(sampling, list) else sampling).get("max_new_tokens") or 4
        generated = [self.generate(prompt, count, body) for prompt in prompts]

        def event(index: int, upto: int) -> Json:
            output, cached = generated[index]
            finished = upto == len(output)
            answer: Json = {
                "text": self.text(output[:upto]),
                "output_ids": output[:upto],
                "meta_info": {
                    "id": request.headers.get("x-request-id", ""),
                    "finish_reason": {"type": "length", "length": upto} if finished else None,
                    "prompt_tokens": len(prompts[index]),
                    "completion_tokens": upto,
                    "cached_tokens": cached,
                    "cached_tokens_details": self.details(cached)
                    if finished or not self.end_details
                    else None,
                },
            }
            return {**answer, "index": index} if is_batch and body.get("stream") else answer

        if body.get("stream"):
            events = [event(index, upto + 1) for upto in range(count) for index in range(len(prompts))]
            return await self.answer(request, events, stream=True)
        answers = [event(index, count) for index in range(len(prompts))]
        return await self.answer(request, answers if is_batch else answers[0], stream=False)

    async def _openai(self, request: web.BaseRequest) -> web.StreamResponse:
        body: Json = json.loads(await request.content.read())
        self.requests.append((request.path, body, headers_of(request)))
        if not self.model_info["is_generation"]:
            _cut(request)
        is_chat = request.path in ("/v1/chat/completions", "/invocations")
        if is_chat:
            prompt = body.get("input_ids") or self.render(body["messages"])
            count = body.get("max_completion_tokens") or body.get("max_tokens") or 4
        else:
            prompt = self._ids(body["prompt"])
            count = body.get("max_tokens") or 4
        output, cached = self.generate(prompt, count, body)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        kind = "chat.completion" if is_chat else "text_completion"
        base: Json = {"id": "x", "object": kind, "created": 0, "model": body.get("model", "default")}
        side = dialects.sglext(body, self.details(cached), self.ids_told or output)

        def choice(content: Json, finish: str | None) -> Json:
            return {"index": 0, **content, "finish_reason": finish}

        if not body.get("stream"):
            text = self.text(output)
            whole: Json = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            answer = {
                **base,
                "choices": [choice(whole, "length")],
                "usage": usage,
                **side,
            }
            return await self.answer(request, answer, stream=False)
        texts = [self.text([token]) for token in output]
        if is_chat:
            # The role comes first, with no text, and the reason last, with nothing else.
            base["object"] = "chat.completion.chunk"
            choices = [
                choice({"delta": {"role": "assistant", "content": ""}}, None),
                *(choice({"delta": {"content": text}}, None) for text in texts),
                choice({"delta": {}}, "length"),
            ]
        else:
            choices = [choice({"text": text}, None) for text in texts]
            choices[-1]["finish_reason"] = "length"
        events: list[Json] = [{**base, "choices": [each]} for each in choices]
        if side:
            events.append({**base, "choices": [], **side})
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**base, "choices": [], "usage": usage})
        return await self.answer(request, events, stream=True)

    # -- answering --------------------------------------------------------------------------------

    async def answer(self, request: web.BaseRequest, answer: Any, *, stream: bool) -> web.StreamResponse:
        """Answer with JSON, or with a list of events, as the attributes above specify."""
        try:
            if self.before_head is not None:
                await self.before_head.wait()
            if self.deaths_before_head > 0:
                self.deaths_before_head -= 1
                _cut(request)
            if self.fails is not None:
                return web.json_response({"error": {"message": self.fails}}, status=500)
            response = await self._stream(request, answer) if stream else web.json_response(answer)
        except asyncio.CancelledError:
            self.aborted += 1
            await asyncio.shield(self.notify())
            raise
        self.finished += 1
        await self.notify()
        return response

    async def _stream(self, request: web.BaseRequest, events: list[Json]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for index, event in enumerate(events):
            if self.between_chunks is not None and index == self.chunks_before_gate:
                await self.between_chunks.wait()
            name = b"event: " + event["type"].encode() + b"\n" if "type" in event else b""
            data = name + b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
            if self.die_after_chunks is not None and index == self.die_after_chunks:
                await response.write(data[: len(data) // 2])
                _cut(request)
            await response.write(data)
        if not events or "type" not in events[-1]:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _ids(self, prompt: Any) -> list[int]:
        return self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)

    def text(self, ids: Sequence[int]) -> str:
        """The text of generated ids."""
        if self.tokenizer is None:
            return "".join(f" {token}" for token in ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def __repr__(self) -> str:
        return (
            f"StandInWorker({self.url}, requests={len(self.requests)}, finished={self.finished}, "
            f"aborted={self.aborted})"
        )


def _cut(request: web.BaseRequest) -> None:
    """Close the connection as a process that was killed does."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("this stand-in dies")


@asynccontextmanager
async def running_worker(
    worker: StandInWorker | None = None, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[StandInWorker]:
    """Serve a stand-in while the block runs; its address is ``worker.url``."""
    worker = worker or StandInWorker()
    server = web.Server(worker.handler(), access_log=None, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        worker.url = f"http://{host}:{runner.addresses[0][1]}"
        yield worker
    finally:
        await runner.cleanup()

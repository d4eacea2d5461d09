"""How a stand-in embeds, classifies, scores and ranks; the rest is in `workers.py`.

Its vectors are made of the tokens of their prompts, so that equal prompts alone have equal ones.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, Protocol

from aiohttp import web

from tests.support.servers.worker_dialects import Json, error, headers_of, plain

WIDTH = 4
"""Numbers of a vector."""
_serial = itertools.count(1)


class Worker(Protocol):
    """The members of a stand-in that are used here (`workers.StandInWorker`)."""

    requests: list[tuple[str, Json, dict[str, str]]]
    model_info: Json
    cached: list[int]

    def tokenize(self, text: str) -> list[int]: ...

    def generate(self, prompt: list[int], count: int, body: Json) -> tuple[list[int], int]: ...

    async def answer(self, request: web.BaseRequest, answer: Any, *, stream: bool) -> web.StreamResponse: ...


def vector(prompt: list[int]) -> list[float]:
    """The vector of a prompt."""
    numbers = random.Random(repr(prompt))
    return [numbers.uniform(-1, 1) for _ in range(WIDTH)]


async def answer(worker: Worker, request: web.BaseRequest) -> web.StreamResponse:
    """Any of these APIs, by the request's path."""
    body: Json = json.loads(await request.content.read())
    worker.requests.append((request.path, body, headers_of(request)))
    if worker.model_info["is_generation"] and request.path not in ("/v1/score", "/v1/rerank"):
        return error("This model does not appear to be an embedding model by default.")
    prompts, is_batch = _prompts(worker, request.path, body)
    for prompt in prompts:
        worker.cached.append(worker.generate(prompt, 0, {})[1])
    vectors = [vector(prompt) for prompt in prompts]
    tokens = sum(map(len, prompts))
    usage: Json = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    usage |= {"prompt_tokens_details": None}
    metas: list[Json] = [
        {"id": f"{next(_serial)}", "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(p)}
        for p in prompts
    ]
    name = worker.model_info["served_model_name"]
    answered: Any
    if request.path == "/v1/embeddings":
        data = [{"embedding": v, "index": i, "object": "embedding"} for i, v in enumerate(vectors)]
        answered = {"data": data, "model": name, "object": "list", "usage": usage}
    elif request.path == "/v1/classify":
        classes = [
            {"index": i, "label": "a", "probs": v, "num_classes": WIDTH} for i, v in enumerate(vectors)
        ]
        answered = {"id": "classify-1", "object": "list", "created": 0, "model": name, "data": classes}
        answered["usage"] = usage
    elif request.path == "/v1/score":
        answered = {"scores": vectors, "model": body.get("model", "default"), "usage": usage}
        answered |= {"pooled_hidden_states": None, "token_logprobs": None, "object": "scoring"}
    elif request.path == "/v1/rerank":
        ranked: list[Json] = [
            {"score": v[0], "document": plain(document), "index": i, "meta_info": meta}
            for i, (v, document, meta) in enumerate(zip(vectors, body["documents"], metas, strict=True))
        ]
        ranked.sort(key=lambda each: -each["score"])
        answered = ranked[: body.get("top_n")]
    else:
        answered = [{"embedding": v, "meta_info": m} for v, m in zip(vectors, metas, strict=True)]
        answered = answered if is_batch else answered[0]
    return await worker.answer(request, answered, stream=False)


def _prompts(worker: Worker, path: str, body: Json) -> tuple[list[list[int]], bool]:
    """(tokens of each prompt, whether they are a batch)."""
    if path == "/v1/rerank":
        asked = worker.tokenize(plain(body["query"]))
        return [asked + worker.tokenize(plain(document)) for document in body["documents"]], True
    if path == "/v1/score":
        query: Any = body.get("query") or ""
        items: Any = [body["items"]] if isinstance(body["items"], str) else body["items"]
        wholes = [item + query if body.get("item_first") else query + item for item in items]
        return [_tokens(worker, whole) for whole in wholes], True
    value: Any = body.get("input", body.get("text", body.get("input_ids")))
    is_batch = isinstance(value, list) and not isinstance(value[0], int)
    return [_tokens(worker, item) for item in (value if is_batch else [value])], is_batch


def _tokens(worker: Worker, prompt: Any) -> list[int]:
    if isinstance(prompt, dict):
        prompt = prompt.get("text") or ""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        return [token for text in prompt for token in worker.tokenize(text)]
    return worker.tokenize(prompt) if isinstance(prompt, str) else prompt

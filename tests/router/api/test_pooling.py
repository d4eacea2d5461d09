"""Embeddings, classification, scoring and reranking: bodies are checked, and requests routed by prefix."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.keys import SALT_HEADER, decode_tokens
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.job import Job, Pair, PromptInput
from sglang_ext.router.api.limits import Limits, ModelKind
from sglang_ext.router.api.pooling import CLASSIFY, EMBEDDINGS, ENCODE, NATIVE_CLASSIFY, RERANK, SCORE
from sglang_ext.router.api.usage import read_answer
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.tenants import SALT_PREFIX
from sglang_ext.router.tokens.chat_template import CannotRender, TemplateFailed, reranking
from sglang_ext.router.tokens.prompt_tokenizer import PromptTokenizer, load_tokenizer
from sglang_ext.router.tokens.segments import TokenCache
from tests.support.servers.worker_pooling import vector
from tests.support.servers.workers import Gate, StandInWorker

Json = dict[str, Any]
LIMITS = Limits(1000, 4096)
PREFIX = "What is a radix tree? " * 12
BODIES: dict[str, Json] = {
    "/v1/embeddings": {"input": PREFIX},
    "/encode": {"text": PREFIX},
    "/v1/classify": {"input": [PREFIX, PREFIX + "b"]},
    "/classify": {"text": [PREFIX, PREFIX + "b"]},
    "/v1/score": {"query": PREFIX, "items": [" yes", " no"], "label_token_ids": [5, 6]},
    "/v1/rerank": {"query": PREFIX, "documents": [" a tree", " a book"]},
}
NEXT: dict[str, Json] = {
    "/v1/embeddings": {"input": PREFIX + "And why?"},
    "/encode": {"text": PREFIX + "And why?"},
    "/v1/classify": {"input": PREFIX + "And why?"},
    "/classify": {"text": PREFIX + "And why?"},
    "/v1/score": {"query": PREFIX, "items": " perhaps"},
    "/v1/rerank": {"query": PREFIX, "documents": [" an apple"], "top_n": 1},
}
"""Requests that begin as those of `BODIES` do."""
BLOCK = 32
"""Tokens in which the router remembers prompts."""
POOLING = {path: DIALECTS[path] for path in BODIES}


# -- the form of a body -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]"),
        (EMBEDDINGS, {"input": [[1], []]}, "input[1]"),
        (EMBEDDINGS, {"input": [1, 1000]}, "input[1]"),
        (EMBEDDINGS, {"input": [[1], [-1]]}, "input[1][0]"),
        (EMBEDDINGS, {"input": 3}, "input"),
        (EMBEDDINGS, {"input": [{"text": 1}]}, "input[0].text"),
        (EMBEDDINGS, {"input": [{"text": "a"}, "b"]}, "input[1]"),
        (EMBEDDINGS, {"input": [{}]}, "input[0]"),
        (EMBEDDINGS, {"input": "a", "model": None}, "model"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": 1}, "encoding_format"),
        (EMBEDDINGS, {"input": ["a", "b"], "lora_path": ["x"]}, "lora_path"),
        *[(dialect, {**BODIES[dialect.path], "extra_key": "x"}, "extra_key") for dialect in POOLING.values()],
        *[
            (dialect, {**BODIES[dialect.path], "cache_salt": "x"}, "cache_salt")
            for dialect in POOLING.values()
        ],
        (CLASSIFY, {"input": [""]}, "input[0]"),
        (ENCODE, {}, "text"),
        (ENCODE, {"text": "a", "input_ids": [1]}, "input_ids"),
        (ENCODE, {"text": ""}, "text"),
        (ENCODE, {"input_ids": []}, "input_ids"),
        (ENCODE, {"input_ids": [], "session_params": {"id": "s"}}, "input_ids"),
        (ENCODE, {"input_ids": [[1], [1000]]}, "input_ids[1][0]"),
        (ENCODE, {"text": [["a", "b"]]}, "text[0]"),
        (ENCODE, {"text": ["a"], "is_cross_encoder_request": True}, "text[0]"),
        (ENCODE, {"text": [["a"]], "is_cross_encoder_request": True}, "text[0]"),
        (ENCODE, {"text": [["", ""]], "is_cross_encoder_request": True}, "text[0]"),
        (ENCODE, {"text": "a", "is_cross_encoder_request": True}, "text"),
        (ENCODE, {"text": "a", "background": True}, "background"),
        (NATIVE_CLASSIFY, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        (
            NATIVE_CLASSIFY,
            {"text": "a", "sampling_params": {"temperature": "x"}},
            "sampling_params.temperature",
        ),
        (NATIVE_CLASSIFY, {"text": "a", "dimensions": -1}, "dimensions"),
        (SCORE, {"query": "a"}, "items"),
        (SCORE, {"query": "a", "items": []}, "items"),
        (SCORE, {"items": [""]}, "items[0]"),
        (SCORE, {"query": "a", "items": ["b", 1]}, "items[1]"),
        (SCORE, {"query": "a", "items": [[1]]}, "query"),
        (SCORE, {"query": [1], "items": ["a"]}, "query"),
        (SCORE, {"query": [1000], "items": [[1]]}, "query[0]"),
        (SCORE, {"query": [], "items": [[]]}, "items[0]"),
        (SCORE, {"query": [1], "items": [[1000]]}, "items[0][0]"),
        (SCORE, {"query": "a", "items": "b", "label_token_ids": [1000]}, "label_token_ids[0]"),
        (SCORE, {"query": "a", "items": "b", "label_token_ids": [[1], [-1]]}, "label_token_ids[1][0]"),
        (SCORE, {"query": "a", "items": "b", "label_token_ids": "x"}, "label_token_ids"),
        (SCORE, {"query": "a", "items": "b", "apply_softmax": "maybe"}, "apply_softmax"),
        (SCORE, {"query": "a", "items": "b", "temperature": "hot"}, "temperature"),
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        (RERANK, {"query": "a", "documents": [3]}, "documents[0]"),
        (RERANK, {"query": "a", "documents": [[{"type": "x"}]]}, "documents[0][0].type"),
        (RERANK, {"query": [{"type": "text", "text": 1}], "documents": ["a"]}, "query[0].text"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        (RERANK, {"query": "a", "documents": ["b"], "instruct": 1}, "instruct"),
    ],
)
def test_bodies_that_are_refused(dialect: Dialect, body: Json, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        dialect.parse(dict(body), LIMITS)
    assert (caught.value.status, caught.value.param) == (400, param)


def prompts_of(dialect: Dialect, body: Json) -> tuple[PromptInput, ...]:
    return dialect.parse(dict(body), LIMITS).prompts


def test_prompts_are_those_that_sglang_makes() -> None:
    for query, items in (("a b", " c"), ("a b", [" c"])):
        (prompt,) = prompts_of(SCORE, {"query": query, "items": items})
        assert (prompt.text, prompt.max_new_tokens) == ("a b c", 0)
    (prompt,) = prompts_of(SCORE, {"query": " b", "items": ["a"], "item_first": True})
    assert prompt.text == "a b"
    assert [p.text for p in prompts_of(SCORE, {"items": ["a", "b"]})] == ["a", "b"]
    first, second = prompts_of(SCORE, {"query": [1, 2], "items": [[3], []]})
    assert (list(first.ids or ()), list(second.ids or ())) == ([1, 2, 3], [1, 2])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    first, second = prompts_of(RERANK, {"query": parts, "documents": ["c", parts], "instruct": "i"})
    assert (first.pair, second.pair) == (Pair("a b", "c", "i"), Pair("a b", "a b", "i"))
    (prompt,) = prompts_of(ENCODE, {"text": [["a", "b"]], "is_cross_encoder_request": True})
    assert prompt.pair == Pair("a", "b", by_template=False)
    (prompt,) = prompts_of(EMBEDDINGS, {"input": "a", "model": "m:lora"})
    assert prompt.namespace == ("lora", None, None)


def test_pictures_are_distinguished_by_their_content() -> None:
    def digests(dialect: Dialect, *bodies: Json) -> list[str]:
        found = [prompt for body in bodies for prompt in prompts_of(dialect, body)]
        assert all(prompt.opaque for prompt in found)
        return [prompt.media for prompt in found]

    one, other = ({"type": "image_url", "image_url": {"url": url}} for url in ("u", "v"))
    a, b, c = digests(RERANK, {"query": "q", "documents": [[one], [other], [one]]})
    assert a == c != b
    assert all((a, b))
    a, b = digests(EMBEDDINGS, {"input": [{"text": "t", "image": "u"}, {"text": "t", "image": "v"}]})
    assert a != b
    a, b = digests(ENCODE, {"image_data": "u"}, {"text": "t", "image_data": "u"})
    assert a == b != ""
    (prompt,) = prompts_of(EMBEDDINGS, {"input": "a", "embed_overrides": [[[0.1]]]})
    assert prompt.opaque


def test_usage_is_read_from_answers() -> None:
    told = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
    for dialect in (EMBEDDINGS, CLASSIFY, SCORE):
        usage = read_answer(json.dumps(told).encode(), dialect, 1)
        assert (usage.prompt_tokens, usage.cached_tokens, usage.partial) == (9, 4, False)
    elements = [{"meta_info": {"prompt_tokens": 3}}, {"meta_info": {"prompt_tokens": 4, "cached_tokens": 2}}]
    for dialect in (ENCODE, NATIVE_CLASSIFY, RERANK):
        usage = read_answer(json.dumps(elements).encode(), dialect, 1)
        assert (usage.prompt_tokens, usage.cached_tokens, usage.partial) == (7, 2, dialect is RERANK)
    assert read_answer(json.dumps(elements[0]).encode(), ENCODE, 1).prompt_tokens == 3
    assert read_answer(b'[{"score": 0.5, "meta_info": null}]', RERANK, 1).prompt_tokens is None


# -- the tokens of pairs ----------------------------------------------------------------------------

RERANKER = """<|im_start|>system
The answer can only be "yes" or "no".<|im_end|>
{% set instruct = instruct | default("Find it") %}<|im_start|>user
{{ instruct }}: {{ messages[0].content }}
{{ messages[1].content }}<|im_end|>
"""
FACTS = InstanceFacts(ModelFacts("tiny", "X", 32_000, 4096), "1", "x", "colocated", "")


def with_template(tokenizer_dir: Path, template: str | None) -> PromptTokenizer:
    tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=False)
    tokenizer.chat_template = template
    return PromptTokenizer(tokenizer, FACTS, TokenCache(1 << 20))


def text_of(tokenizer: Any, key: bytes) -> str:
    return str(tokenizer.decode([int(token) for token in decode_tokens(key)]))


def test_a_pair_is_what_the_template_of_a_reranker_makes_of_it(tokenizer_dir: Path, tokenizer: Any) -> None:
    ours = with_template(tokenizer_dir, RERANKER)
    for instruct, shown in ((None, "Find it"), ("Look", "Look"), ("", "Find it")):
        text = text_of(tokenizer, ours.encode_pair(Pair("a <query>", "a & b", instruct)))
        assert f"{shown}: a <query>\na & b<|im_end|>" in text
    assert text_of(tokenizer, ours.encode_pair(Pair("a", " b", by_template=False))) == "a b"
    failing = with_template(tokenizer_dir, RERANKER + "{{ messages[7].content.x }}")
    with pytest.raises(TemplateFailed):
        failing.encode_pair(Pair("a", "b"))
    pictures = with_template(tokenizer_dir, RERANKER + "<|vision_start|>")
    with pytest.raises(CannotRender):
        pictures.encode_pair(Pair("a", "b"))
    assert reranking("{{ messages[0].content }}") is None


def test_a_pair_is_what_the_tokenizer_makes_of_two_texts(tokenizer_dir: Path, tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    ours = with_template(tokenizer_dir, None)
    assert text_of(tokenizer, ours.encode_pair(Pair("one two", " three"))) == "one two three"
    fresh = load_tokenizer(str(tokenizer_dir), trust_remote_code=False)
    fresh.chat_template = None
    fresh.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> <|im_end|> $B <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    expected = fresh([["one two", " three"]])["input_ids"][0]
    wrapped = PromptTokenizer(fresh, FACTS, TokenCache(1 << 20))
    key = wrapped.encode_pair(Pair("one two", " three"))
    assert [int(token) for token in decode_tokens(key)] == list(expected)
    assert expected[0] == 1
    assert len(list(expected)) == len(tokenizer("one two three")["input_ids"]) + 4


# -- through the router -----------------------------------------------------------------------------


@pytest.fixture
def start_pooling(start_worker) -> Any:
    async def start(**options: Any) -> StandInWorker:
        worker: StandInWorker = await start_worker(generates=False, **options)
        return worker

    return start


@pytest.mark.parametrize("path", BODIES)
async def test_they_are_routed_by_prefix(path: str, start_pooling, start_router, client, tokenizer) -> None:
    workers = [await start_pooling() for _ in range(2)]
    router = await start_router(*workers, policy="prompt-tree")
    homes = []
    for body in (BODIES[path], NEXT[path]):
        async with client.post(router.url + path, json={**body, "of_another": 1}) as answer:
            assert answer.status == 200
            got = await answer.json()
            homes.append(answer.headers["x-kv-instance"])
    assert homes[0] == homes[1]
    assert answer.headers["x-kv-route-reason"] == "prefix"
    length = len(tokenizer(PREFIX)["input_ids"])
    assert int(answer.headers["x-kv-matched-tokens"]) > length - BLOCK
    (home,) = (worker for worker in workers if worker.url == homes[0])
    (other,) = (worker for worker in workers if worker.url != homes[0])
    assert [body for _, body, _ in home.requests] == [BODIES[path], NEXT[path]]
    assert other.requests == []
    assert home.cached[0] == 0
    assert home.cached[-1] >= length - 1
    # The vector in the answer is that of the prompt, under any name of its field.
    text = {"/v1/score": PREFIX + " perhaps", "/v1/rerank": PREFIX + " an apple"}.get(
        path, PREFIX + "And why?"
    )
    ids = tokenizer(text)["input_ids"]
    if path == "/v1/rerank":
        ids = tokenizer(PREFIX)["input_ids"] + tokenizer(" an apple")["input_ids"]
        assert got[0]["score"] == vector(ids)[0]
    else:
        assert json.dumps(vector(ids)) in json.dumps(got)
    # The request's explanation and record.
    async with client.get(f"{router.url}/explain/{answer.headers['x-request-id']}") as told:
        assert told.status == 200
        assert home.url in await told.text()
    record = router.request_log.find(answer.headers["x-request-id"], tenant=None, admin=True).record
    assert record.prompt_tokens == len(ids)
    async with client.get(router.url + "/metrics") as metrics:
        text = await metrics.text()
    assert f'endpoint="{path}",status="200"' in text


async def test_the_next_of_another_prefix_goes_elsewhere(start_pooling, start_router, client) -> None:
    """The twin: a damaged first word, and the same prompt is no prefix's."""
    workers = [await start_pooling() for _ in range(2)]
    router = await start_router(*workers, policy="prompt-tree")
    for body in ({"input": PREFIX}, {"input": "x" + PREFIX}):
        async with client.post(router.url + "/v1/embeddings", json=body) as answer:
            assert answer.status == 200
    assert answer.headers["x-kv-route-reason"] != "prefix"
    assert [cached for worker in workers for cached in worker.cached] == [0, 0]


# -- requests that a model cannot answer --------------------------------------------------------------


async def test_a_model_that_embeds_is_not_asked_to_generate(start_pooling, start_router, client) -> None:
    worker = await start_pooling()
    router = await start_router(worker)
    turns = [{"role": "user", "content": "hi"}]
    bodies = {
        "/generate": {"text": "hi"},
        "/v1/chat/completions": {"messages": turns},
        "/invocations": {"messages": turns},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"model": "m", "max_tokens": 4, "messages": turns},
        "/api/chat": {"model": "m", "messages": turns},
        "/api/generate": {"model": "m", "prompt": "hi"},
        "/vertex_generate": {"instances": [{"text": "hi"}]},
    }
    assert bodies.keys() == DIALECTS.keys() - POOLING.keys()
    for path, body in bodies.items():
        async with client.post(router.url + path, json=body) as answer:
            assert answer.status == 400
            text = await answer.text()
            assert "embeds, classifies or scores" in text
            assert "/v1/embeddings, /encode" in text
    assert worker.requests == []
    # The twin: the worker would have ended.
    async with client.post(router.url + "/encode", json={"text": "hi"}) as answer:
        assert answer.status == 200


async def test_a_model_that_generates_is_not_asked_to_embed(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    for path, dialect in POOLING.items():
        async with client.post(router.url + path, json=BODIES[path]) as answer:
            if ModelKind.GENERATES in dialect.answered_by:
                assert answer.status == 200
                continue
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (400, "model_cannot")
            assert "generates text" in error["message"]
    assert [path for path, *_ in worker.requests] == ["/v1/score", "/v1/rerank"]


async def test_a_fleet_has_one_kind_of_model(start_worker, start_pooling, start_router, client) -> None:
    generating, embedding = await start_worker(), await start_pooling()
    with pytest.raises(ConfigError, match="and this fleet's model generates text"):
        await start_router(generating, embedding)


@pytest.mark.parametrize(
    ("model", "server", "words"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, {}, "--disable-radix-cache"),
        ({"embedding": {"attention": "bidirectional"}}, {}, "--disable-radix-cache"),
        ({"architectures": ["BertModel"]}, {"disable_radix_cache": True}, ""),
        ({"embedding": {"attention": "causal"}}, {}, ""),
        ({"disaggregation_mode": "prefill"}, {}, "start it without a role"),
    ],
)
async def test_servers_that_requests_would_end_get_none(
    model: Json, server: Json, words: str, start_pooling, start_router
) -> None:
    worker = await start_pooling()
    worker.model_info |= model
    worker.server_info |= server
    router = await start_router(worker)
    (row,) = router.fleet.rows.values()
    assert words in row.why
    assert bool(router.fleet.usable()) is not bool(words)


# -- tenants, deaths, time, aborting --------------------------------------------------------------------

KEYS = """
[[keys]]
key = "an-isolated-key"
tenant = "isolated"

[[keys]]
key = "a-pooled-key"
tenant = "pooled"
isolated = false
tokens_per_minute = 40
"""


@pytest.mark.parametrize("path", BODIES)
async def test_tenants(path: str, start_pooling, start_router, client, tmp_path, tokenizer) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    worker = await start_pooling()
    router = await start_router(worker, api_keys_file=str(file))

    async def ask(key: str) -> tuple[int, str]:
        headers = {"authorization": f"Bearer {key}", "x-api-key": key}
        async with client.post(router.url + path, json=NEXT[path], headers=headers) as answer:
            value = await answer.json()
            return answer.status, value["error"]["code"] if "error" in value else ""

    assert await ask("another-key-of-nobody") == (401, "invalid_api_key")
    assert await ask("an-isolated-key") == (403, "not_kept_apart")
    assert worker.requests == []
    # Its prompt has more tokens than it may send in a minute.
    assert await ask("a-pooled-key") == (200, "")
    assert (await ask("a-pooled-key"))[0] == 429
    assert len(worker.requests) == 1
    assert "authorization" not in worker.requests[0][2]


@pytest.mark.parametrize("path", BODIES)
async def test_a_salt_goes_to_a_server_that_has_registered(
    path: str, start_pooling, start_router, client, tmp_path
) -> None:
    """As a header, and to no other server; a client's own header goes nowhere."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    listed, registered = await start_pooling(), await start_pooling()
    registered.server_info["launch_command"] = "launch_server --kv-router http://127.0.0.1:1"
    router = await start_router(listed, registered, policy="round-robin", api_keys_file=str(file))
    router.fleet.join(registered.url, Registration(url=registered.url, instance="r", epoch="1" * 32))

    async def ask(key: str) -> int:
        headers = {"authorization": f"Bearer {key}", "x-api-key": key, SALT_HEADER: "of-another"}
        async with client.post(router.url + path, json=BODIES[path], headers=headers) as answer:
            return answer.status

    assert [await ask("an-isolated-key") for _ in range(3)] == [200] * 3
    assert listed.requests == []
    salts = {headers.get(SALT_HEADER) for _, _, headers in registered.requests}
    assert salts == {SALT_PREFIX + hashlib.sha256(b"isolated").hexdigest()[:32]}
    assert all("cache_salt" not in body for _, body, _ in registered.requests)
    assert await ask("a-pooled-key") == 200
    ((*_, last),) = ([*listed.requests, *registered.requests[3:]],)
    assert SALT_HEADER not in last[2]


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_ends_workers_is_not_given_the_whole_fleet(
    path: str, start_pooling, start_router, client
) -> None:
    workers = [await start_pooling() for _ in range(3)]
    for worker in workers:
        worker.deaths_before_head = 1
    router = await start_router(*workers)
    for _ in range(2):
        async with client.post(router.url + path, json=BODIES[path]) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (500, "request_ends_servers")
    assert sum(len(worker.requests) for worker in workers) == 2


@pytest.mark.parametrize("path", BODIES)
async def test_it_is_answered_in_time_or_aborted(path: str, start_pooling, start_router, client) -> None:
    worker = await start_pooling()
    router = await start_router(worker, request_timeout_secs=1.0)
    worker.before_head = Gate()
    async with client.post(router.url + path, json=BODIES[path]) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (504, "timeout")
    await worker.until(lambda: worker.aborted == 1)
    assert router.fleet.rows[worker.url].in_flight == 0


async def test_it_is_aborted_by_its_name(start_pooling, start_router, client) -> None:
    worker = await start_pooling()
    router = await start_router(worker)
    worker.before_head = Gate()
    headers = {"x-request-id": "mine"}
    task = asyncio.create_task(
        client.post(router.url + "/v1/rerank", json=BODIES["/v1/rerank"], headers=headers)
    )
    await worker.before_head.reached()
    async with client.post(router.url + "/abort_request", json={"rid": "mine"}) as answer:
        assert (await answer.json())["aborted"] == 1
    assert (await task).status == 499
    await worker.until(lambda: worker.aborted == 1)


async def test_too_long_prompts_are_refused_with_their_field(start_pooling, start_router, client) -> None:
    router = await start_router(await start_pooling(context_length=64))
    fields = {"/encode": "text", "/v1/embeddings": "input", "/v1/score": "items", "/v1/rerank": "documents"}
    for path, field in fields.items():
        async with client.post(router.url + path, json=NEXT[path]) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", field)


async def test_without_a_tokenizer_pairs_are_matched_by_text(start_router, start_pooling, client) -> None:
    workers = [await start_pooling(tokenizer=None, tokenizer_path="/nowhere/at/all") for _ in range(2)]
    router = await start_router(*workers, policy="prompt-tree")
    for body in (BODIES["/v1/rerank"], NEXT["/v1/rerank"]):
        async with client.post(router.url + "/v1/rerank", json=body) as answer:
            assert answer.status == 200
    assert answer.headers["x-kv-route-reason"] == "prefix"
    encoded = await router.tokenizers.encode(Job(False, (PromptInput(pair=Pair("ab", "cd")),)))
    assert [(each.key, each.tokens) for each in encoded] == [(b"abcd", None)]


async def test_they_are_described(start_pooling, start_router, client) -> None:
    router = await start_router(await start_pooling())
    async with client.get(router.url + "/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    for path, dialect in POOLING.items():
        told = paths[path]["post"]
        assert told["requestBody"]["content"]["application/json"]["schema"] == dialect.schema
        assert "text/event-stream" not in told["responses"]["200"]["content"]
        assert told["x-sglang-route"] == "by prefix"

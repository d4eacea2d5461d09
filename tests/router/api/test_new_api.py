"""A new HTTP API is one module and one registration: here is one, served by a real router."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import DIALECTS, Dialect, fields, register
from sglang_ext.router.api.job import Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.prompts import namespaces
from sglang_ext.router.api.sse import event
from sglang_ext.router.api.usage import Usage, count
from sglang_ext.router.api.validation import Json, check_fields, kinds
from sglang_ext.router.endpoints.openapi import description
from sglang_ext.router.http.types import RequestRefused
from tests.support.servers.worker_dialects import headers_of
from tests.support.servers.workers import StandInWorker, running_worker

ROUTER = Path(__file__).parents[3] / "router"

# -- the module -----------------------------------------------------------------------------------------

BODY = kinds(string="question", boolean="stream", positive="words")


class Questions(Dialect):
    """``/v2/questions``: a question, and an answer of so many words."""

    path = "/v2/questions"
    summary = "Questions"
    prompt_field = "question"
    own_fields = fields("question words")
    hint_fields = ("question",)

    def parse(self, payload: Json, limits: Limits) -> Job:
        check_fields(payload, BODY, limits)
        if not payload.get("question"):
            raise RequestRefused("ask a question", param="question", code="missing")
        (space,) = namespaces(payload, 1)
        prompt = PromptInput(text=payload["question"], namespace=space, max_new_tokens=payload.get("words"))
        return Job(bool(payload.get("stream")), (prompt,))

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        if isinstance(answer, dict) and isinstance(told := answer.get("usage"), dict):
            usage.prompt_tokens, usage.cached_tokens = count(told.get("asked")), count(told.get("known"))
            usage.completion_tokens = count(told.get("said"))

    def texts(self, answers: Sequence[Any]) -> Mapping[int, str]:
        return {0: "".join(answer.get("says", "") for answer in answers)}

    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        return {"says": "", "usage": {"asked": prompt, "known": cached, "said": 0}}

    def error(self, refused: RequestRefused) -> Json:
        return {"cannot": refused.message}

    @property
    def schema(self) -> Json:
        return schemas.record(schemas.fields(BODY), "question")


# -- a server that speaks it ------------------------------------------------------------------------------


class Answering(StandInWorker):
    """A stand-in that answers questions besides the usual requests."""

    def handler(self) -> Callable[[web.BaseRequest], Any]:
        others = super().handler()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if request.path != Questions.path:
                answer: web.StreamResponse = await others(request)
                return answer
            body: Json = json.loads(await request.content.read())
            self.requests.append((request.path, body, headers_of(request)))
            prompt = self.tokenize(body["question"])
            output, cached = self.generate(prompt, body.get("words", 4), body)
            usage = {"asked": len(prompt), "known": cached, "said": len(output)}
            if not body.get("stream"):
                return await self.answer(request, {"says": self.text(output), "usage": usage}, stream=False)
            words: list[Json] = [{"says": self.text([token])} for token in output]
            return await self.answer(request, [*words, {"usage": usage}], stream=True)

        return handle


@pytest.fixture
def questions() -> Iterator[Dialect]:
    """Registered while a test runs, which suffices."""
    dialect = Questions()
    register(dialect)
    try:
        yield dialect
    finally:
        del DIALECTS[dialect.path]


@pytest.fixture
def start_answering(stack, tokenizer, tokenizer_dir) -> Any:
    async def start() -> Answering:
        worker = Answering(tokenizer=tokenizer, tokenizer_path=str(tokenizer_dir))
        await stack.enter_async_context(running_worker(worker))
        return worker

    return start


QUESTION = "What is a radix tree? " * 12


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_served(
    stream: bool, questions: Dialect, start_answering, start_router, client, tokenizer, eventually
) -> None:
    workers = [await start_answering() for _ in range(2)]
    router = await start_router(*workers, policy="prompt-tree")
    body = {"question": QUESTION, "stream": stream, "words": 6, "user": "u", "of_another": 1}
    async with client.post(router.url + questions.path, json=body) as answer:
        first, home = await answer.read(), answer.headers["x-kv-instance"]
        assert answer.status == 200
    (worker,) = [worker for worker in workers if worker.url == home]
    assert worker.requests[0][1] == {key: value for key, value in body.items() if key != "of_another"}
    said = first.split(b"\n\n") if stream else [first]
    texts = [
        json.loads(part.removeprefix(b"data: ")).get("says", "")
        for part in said
        if part and b"DONE" not in part
    ]
    assert "".join(texts)

    # It goes on where its prompt and its answer are, which the router has learnt from its text.
    body["question"] = QUESTION + "".join(texts) + " Why? " * 4
    async with client.post(router.url + questions.path, json=body) as answer:
        await answer.read()
        assert answer.headers["x-kv-instance"] == home
        assert answer.headers["x-kv-route-reason"] == "prefix"
        matched = int(answer.headers["x-kv-matched-tokens"])
    length = len(tokenizer(QUESTION)["input_ids"])
    record = router.request_log.find(answer.headers["x-request-id"], tenant=None, admin=True).record
    assert matched >= length
    assert record.prompt_tokens == len(tokenizer(body["question"])["input_ids"])
    assert record.completion_tokens == 6
    assert record.cached_tokens >= length


async def test_tenants_are_kept_apart(
    questions: Dialect, start_answering, start_router, client, tmp_path
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"key": f"sk-tenant-{t}-1", "tenant": t} for t in "ab"]}))
    file.chmod(0o600)
    worker = await start_answering()
    router = await start_router(worker, api_keys_file=str(file))
    cached = []
    for tenant in "aabb":
        headers = {"authorization": f"Bearer sk-tenant-{tenant}-1"}
        async with client.post(
            router.url + questions.path, json={"question": QUESTION}, headers=headers
        ) as answer:
            assert answer.status == 200
            cached.append(int(answer.headers["x-kv-cached-tokens"]) > 0)
    assert cached == [False, True, False, True]
    assert len({body["cache_salt"] for _, body, _ in worker.requests}) == 2
    headers = {"authorization": "Bearer sk-tenant-a-1"}
    body = {"question": QUESTION, "cache_salt": "x"}
    async with client.post(router.url + questions.path, json=body, headers=headers) as answer:
        assert (answer.status, "cache_salt" in (await answer.json())["cannot"]) == (400, True)


async def test_its_errors_and_its_broken_streams_have_its_form(
    questions: Dialect, start_answering, start_router, client
) -> None:
    worker = await start_answering()
    router = await start_router(worker)
    for body, says in (({}, "ask a question"), ({"question": "x " * 5000}, "context length")):
        async with client.post(router.url + questions.path, json=body) as answer:
            assert answer.status == 400
            assert says in (await answer.json())["cannot"]
    worker.die_after_chunks = 2
    async with client.post(router.url + questions.path, json={"question": "x", "stream": True}) as answer:
        raw = await answer.read()
    assert b"went away in mid-answer" in raw.split(b"\n\n")[-2]
    assert b'{"cannot":' in raw.split(b"\n\n")[-2]


@pytest.mark.parametrize("stream", [False, True])
async def test_it_may_only_warm_the_cache(
    stream: bool, questions: Dialect, start_answering, start_router, client
) -> None:
    worker = await start_answering()
    router = await start_router(worker)
    options = {"prompt_cache_options": {"prewarm": True}, "stream": stream}
    async with client.post(router.url + questions.path, json={"question": QUESTION, **options}) as answer:
        assert answer.status == 200
        empty = questions.empty_answer("", None, 0, 0)
        raw = (await answer.read()).removesuffix(event(None)).removeprefix(b"data: ")
        assert json.loads(raw).keys() == empty.keys()
    async with client.post(router.url + "/v1/advisory", json={"question": QUESTION}) as answer:
        assert (await answer.json())["verdict"] in ("accepted", "merged")
    assert worker.requests == []


async def test_it_is_described(questions: Dialect, start_answering, start_router, client) -> None:
    router = await start_router(await start_answering())
    async with client.get(router.url + "/openapi.json") as answer:
        told = (await answer.json())["paths"][questions.path]["post"]
    assert told == description()["paths"][questions.path]["post"]
    assert told["requestBody"]["content"]["application/json"]["schema"] == questions.schema


async def test_without_its_registration_there_is_none(start_answering, start_router, client) -> None:
    router = await start_router(await start_answering())
    async with client.post(router.url + Questions.path, json={"question": QUESTION}) as answer:
        assert answer.status == 404
    assert Questions.path not in description()["paths"]


def test_one_path_has_one_api(questions: Dialect) -> None:
    with pytest.raises(ValueError, match=questions.path):
        register(Questions())


# -- nothing else knows any API ------------------------------------------------------------------------------

API = "sglang_ext.router.api."
GENERAL = {
    "dialect", "documents", "hints", "json_schema", "limits", "prompts", "sse",
    "stream_splice", "tool_calls", "usage", "job", "validation",
}  # fmt: skip
"""Modules of `router/api` that every API uses; each other one belongs to an API."""
TABLES = {"endpoints/server_routes.py"}
"""Name every route of SGLang's server, whatever becomes of it."""
ASKED_OF_SERVERS = {("fleet/worker.py", "/generate"), ("dispatch/forwarding.py", "/generate")}
"""The router's own requests to a server, in the dialect that all servers speak, and the one path at which
SGLang takes the rank of a replica in the body alone."""


def named(source: str, where: str) -> Iterator[str]:
    """Where a module names an HTTP API: by importing a name that belongs to it, or by its path. Prose may."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}." for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name + "." for alias in node.names]
        for module in modules:
            if module.startswith(API) and module.removeprefix(API).partition(".")[0] not in GENERAL:
                yield f"{where}:{node.lineno}: imports {module[:-1]}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            for path in DIALECTS:
                names = node.value == path or node.value.startswith((path + "/", path + "?"))
                if names and (where, node.value) not in ASKED_OF_SERVERS:
                    yield f"{where}:{node.lineno}: names {path}"


def test_no_module_but_its_own_names_an_api() -> None:
    found = []
    for file in sorted(ROUTER.rglob("*.py")):
        where = file.relative_to(ROUTER).as_posix()
        if where not in TABLES and (not where.startswith("api/") or file.stem in GENERAL):
            found += named(file.read_text("utf-8"), where)
    assert found == []


def test_every_module_of_an_api_is_known() -> None:
    """So that a module that belongs to an API does not hide among the general ones."""
    for dialect in DIALECTS.values():
        assert type(dialect).__module__.removeprefix(API) not in GENERAL
    assert {file.stem for file in (ROUTER / "api").glob("*.py")} > GENERAL


@pytest.mark.parametrize(
    "source",
    [
        "from sglang_ext.router.api.chat import CHAT",
        "from sglang_ext.router.api import messages",
        "import sglang_ext.router.api.messages_as_chat as m",
        "def f():\n    from sglang_ext.router.api.openai import choices_of",
        "if path == '/v1/messages':\n    pass",
        "yield_to = f'/v1/responses/{name}'",
        "'''Prose.'''\nPATHS = {'/generate': 1}",
    ],
)
def test_the_twin_that_names_one_is_found(source: str) -> None:
    assert len(list(named(source, "dispatch/x.py"))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "'''As ``/v1/messages`` does.'''\nfrom sglang_ext.router.api.dialect import DIALECTS",
        "from sglang_ext.router.api import json_schema as schemas",
        "PATH = '/v1/models'",
    ],
)
def test_what_is_general_is_not_found(source: str) -> None:
    assert list(named(source, "dispatch/x.py")) == []

"""Embeddings, classification, scoring and reranking: real models of each kind, routed and asked directly.

Each kind has two servers, one with SGLang's own cache and one with the shared cache. Their answers, and those
through the router, have to be equal but for rounding.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from field_fuzz import cases, sample
from hooked_server import FOLDER
from router_rig import FLAGS, running, until

from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.api.limits import ModelKind
from tests.support.servers.dialect import differences, shape_of
from tests.support.servers.server import ServerProcess, ServerSpec, ServerStartError
from tests.support.servers.workers import StandInWorker, running_worker

pytestmark = pytest.mark.integration

Json = dict[str, Any]
ABSOLUTE = 2e-4
"""How far numbers of two servers may be apart: they add in another order where a prefix is cached."""
QUERY = "The librarian of a small town reads a book about radix trees. " * 12
DOCUMENTS = [" A tree.", " A book about towns and their librarians.", " Nothing."]
UNCHECKED = str(Path(__file__).parents[1] / "servers" / "unchecked_server.py")
MEASURED = ("--enable-metrics", "--max-total-tokens", "8192")
VARYING = {"id", "created", "model"}
"""Keys whose values differ between two answers of one server, or name the server's disk."""
RERANKER = """<|im_start|>system
Judge whether the document answers the query. The answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
{{ instruct | default("Find what answers the query") }}
{{ messages[0]["content"] }}
{{ messages[1]["content"] }}<|im_end|>
<|im_start|>assistant
"""


@dataclass(frozen=True)
class Kind:
    """A kind of model. Args:

    bodies: requests of which the answers are compared, by path.
    prefixed: path, and a request about a query and documents, to be routed by prefix.
    """

    model: str
    flags: tuple[str, ...]
    bodies: dict[str, list[Json]]
    prefixed: tuple[tuple[str, Callable[[str, list[str]], Json]], ...] = field(hash=False)


def ranking(query: str, documents: list[str]) -> Json:
    return {"query": query, "documents": documents}


def scoring(query: str, documents: list[str]) -> Json:
    return {"query": query, "items": documents, "label_token_ids": [500, 501], "apply_softmax": True}


def embedding(query: str, documents: list[str]) -> Json:
    return {"input": [query + document for document in documents]}


def classifying(query: str, documents: list[str]) -> Json:
    return {"text": [query + document for document in documents]}


def answers(*more: tuple[str, Json]) -> dict[str, list[Json]]:
    bodies: dict[str, list[Json]] = {}
    for path, body in more:
        bodies.setdefault(path, []).append(body)
    return bodies


TEXTS = answers(
    ("/v1/embeddings", {"input": QUERY}),
    ("/v1/embeddings", {"input": ["One day", QUERY], "encoding_format": "float"}),
    ("/v1/embeddings", {"input": [[5, 6, 7], [8, 9]]}),
    ("/encode", {"text": QUERY}),
    ("/encode", {"input_ids": [[5, 6, 7], [8, 9]]}),
    ("/encode", {"text": [["One day", " it rained"]], "is_cross_encoder_request": True}),
    ("/classify", {"text": ["One day", QUERY]}),
    ("/v1/score", {"query": QUERY, "items": DOCUMENTS}),
    ("/v1/score", {"query": [5, 6, 7], "items": [[8], [9, 10]], "item_first": True}),
    ("/v1/rerank", ranking(QUERY, DOCUMENTS)),
    ("/v1/rerank", {**ranking("a", ["b", [{"type": "text", "text": "c"}]]), "return_documents": False}),
)
EMBEDS = Kind(
    "tiny",
    ("--is-embedding",),
    TEXTS,
    (("/v1/embeddings", embedding), ("/v1/score", scoring), ("/v1/rerank", ranking)),
)
CLASSIFIES = Kind(
    "tiny-classifier",
    (),
    TEXTS | answers(("/v1/classify", {"input": ["One day", QUERY]}), ("/v1/classify", {"input": [5, 6, 7]})),
    (("/classify", classifying), ("/v1/score", scoring), ("/v1/rerank", ranking)),
)
GENERATES = Kind(
    "tiny",
    ("--chat-template", "{reranker}"),
    answers(
        ("/v1/score", scoring(QUERY, DOCUMENTS)),
        ("/v1/score", {"query": [5, 6], "items": [[7], [8]], "label_token_ids": [[5, 6], [7]]}),
        ("/v1/score", {**scoring("a", [" b"]), "temperature": 2.0, "return_token_logprobs": True}),
        ("/v1/rerank", ranking(QUERY, DOCUMENTS)),
        ("/v1/rerank", {**ranking(QUERY, DOCUMENTS), "top_n": 1, "instruct": "Find trees"}),
    ),
    (("/v1/score", scoring), ("/v1/rerank", ranking)),
)
KINDS = {"embeds": EMBEDS, "classifies": CLASSIFIES, "generates": GENERATES}


# -- comparing ----------------------------------------------------------------------------------------


def differs(one: Any, other: Any, where: str = "") -> str:
    """Where two answers differ by more than rounding; empty where they do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: {sorted(one.keys() ^ other.keys())} are in one only"
        keys = (key for key in one if key not in VARYING and key != "meta_info")
        return next(filter(None, (differs(one[key], other[key], f"{where}/{key}") for key in keys)), "")
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} elements"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (differs(a, b, f"{where}[{at}]") for at, (a, b) in pairs)), "")
    if isinstance(one, float) and isinstance(other, float):
        return "" if math.isclose(one, other, abs_tol=ABSOLUTE) else f"{where}: {one} and {other}"
    return "" if one == other else f"{where}: {one!r} and {other!r}"


def ranked(answer: Any) -> Any:
    """The answer, with a ranking in the order of the documents: near ones may change places."""
    if isinstance(answer, list) and answer and "score" in answer[0]:
        return sorted(answer, key=lambda each: int(each["index"]))
    return answer


def test_the_twin_with_a_damaged_number_is_seen() -> None:
    answer = {"scores": [[0.5, 0.25], [0.1, 0.2]], "usage": {"prompt_tokens": 4}, "id": "a"}
    equal = json.loads(json.dumps(answer)) | {"id": "b"}
    equal["scores"][1][0] += ABSOLUTE / 2
    assert differs(answer, equal) == ""
    equal["scores"][1][0] += ABSOLUTE
    assert "/scores[1][0]" in differs(answer, equal)
    assert differs(answer, {**answer, "usage": {"prompt_tokens": 5}})
    assert differs(answer, {**answer, "scores": [[0.5, 0.25]]})
    assert differs(answer, {"scores": answer["scores"]})


# -- the servers --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a chat template that SGLang takes for Qwen3-Reranker's."""
    file = tmp_path_factory.mktemp("reranker") / "reranker.jinja"
    file.write_text(RERANKER)
    return str(file)


def spec(kind: Kind, reranker: str, *more: str) -> ServerSpec:
    flags = tuple(reranker if flag == "{reranker}" else flag for flag in kind.flags)
    return ServerSpec(model=kind.model, flags=(*flags, *MEASURED, *more))


@dataclass(frozen=True)
class Rig:
    """A stock server, one with the shared cache, and a router in front of both."""

    kind: Kind
    stock: ServerProcess
    ours: ServerProcess
    router: Router
    client: aiohttp.ClientSession

    async def ask(self, url: str, path: str, body: Json) -> tuple[int, Any, Any]:
        """(status, JSON, headers)."""
        async with self.client.post(url + path, json=body) as answer:
            return answer.status, await answer.json(), answer.headers

    def tokens(self, server: ServerProcess) -> tuple[int, int]:
        """(prompt tokens, cached ones) that a server has counted."""
        found = server.metrics()
        return tuple(  # type: ignore[return-value]
            int(
                sum(
                    value for name, value in found.items() if name.startswith(f"sglang:{what}_tokens_total{{")
                )
            )
            for what in ("prompt", "cached")
        )


@pytest.fixture(
    scope="module",
    params=["embeds", *(pytest.param(name, marks=pytest.mark.long) for name in ("classifies", "generates"))],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Tests of one kind run one after the other, so that each has its servers once."""
    return KINDS[request.param]


@pytest.fixture
async def rig(
    kind: Kind,
    get_server: Callable[[ServerSpec], ServerProcess],
    reranker: str,
    client: aiohttp.ClientSession,
) -> AsyncIterator[Rig]:
    stock, ours = (get_server(spec(kind, reranker, *more)) for more in ((), FLAGS[:2]))
    await until(lambda: running([stock, ours]) == 0)
    for server in (stock, ours):
        await asyncio.to_thread(server.flush)
    config = RouterConfig(worker_urls=(stock.url, ours.url), port=0, policy="prompt-tree")
    async with Router(config) as router:
        yield Rig(kind, stock, ours, router, client)
        router.check()


# -- the same answers ---------------------------------------------------------------------------------


async def test_answers_are_those_of_a_stock_server(rig: Rig) -> None:
    for path, bodies in rig.kind.bodies.items():
        for body in bodies:
            status, expected, _ = await rig.ask(rig.stock.url, path, body)
            assert status == 200, (path, expected)
            for url in (rig.ours.url, rig.router.url):
                status, got, _ = await rig.ask(url, path, body)
                assert (status, differs(ranked(expected), ranked(got))) == (200, ""), (path, body)
    # The twin: the prompt of the last one, with one word of it damaged.
    path, body = rig.kind.prefixed[-1][0], rig.kind.prefixed[-1][1](QUERY, DOCUMENTS)
    _, expected, _ = await rig.ask(rig.stock.url, path, body)
    damaged = json.loads(json.dumps(body).replace("librarian of a small", "librarian of a big"))
    _, got, _ = await rig.ask(rig.router.url, path, damaged)
    assert differs(ranked(expected), ranked(got))


async def test_the_stand_in_answers_alike(rig: Rig) -> None:
    """In form, so that results of the router's other tests of these APIs hold for servers."""
    worker = StandInWorker(generates=rig.router.fleet.model.model.kind is ModelKind.GENERATES)  # type: ignore[union-attr]
    async with running_worker(worker):
        for path, bodies in rig.kind.bodies.items():
            status, real, _ = await rig.ask(rig.stock.url, path, bodies[0])
            _, told, _ = await rig.ask(worker.url, path, bodies[0])
            assert status == 200
            if rig.kind is GENERATES and path == "/v1/rerank":
                for each in told:
                    each["meta_info"] = None  # a reranker that generates has none
            assert differences(shape_of(real), shape_of(told)) == [], path


# -- reuse --------------------------------------------------------------------------------------------


async def test_a_prefix_that_requests_share_is_computed_once(rig: Rig) -> None:
    """The second request about a query goes where the first was; there alone, and its query is cached."""
    for path, about in rig.kind.prefixed:
        query = f"About {path}: {QUERY}"
        documents = [f" {path} {document}" for document in DOCUMENTS]
        status, _, headers = await rig.ask(rig.router.url, path, about(query, documents))
        assert status == 200
        home, other = rig.ours, rig.stock
        if headers["x-kv-instance"] == rig.stock.url:
            home, other = other, home
        before, idle = await asyncio.to_thread(rig.tokens, home), await asyncio.to_thread(rig.tokens, other)
        status, _, headers = await rig.ask(rig.router.url, path, about(query, [" Else.", " Or not."]))
        assert (headers["x-kv-instance"], headers["x-kv-route-reason"]) == (home.url, "prefix")
        after = await asyncio.to_thread(rig.tokens, home)
        assert await asyncio.to_thread(rig.tokens, other) == idle
        prompt, cached = after[0] - before[0], after[1] - before[1]
        assert cached >= 0.8 * prompt, (path, cached, prompt)
        # The router counts the tokens of its prompts as the server does.
        record = rig.router.request_log.find(headers["x-request-id"], tenant=None, admin=True).record  # type: ignore[union-attr]
        assert record.prompt_tokens == prompt
        assert int(headers["x-kv-matched-tokens"]) >= 0.8 * prompt / 2

        # The twin: the same with another first word finds nothing cached but its own prompts' prefix.
        status, _, headers = await rig.ask(rig.router.url, path, about("Not " + query, [" Else."]))
        assert status == 200
        asked = home if headers["x-kv-instance"] == home.url else other
        start = after if asked is home else idle
        end = await asyncio.to_thread(rig.tokens, asked)
        # A chat template's own words are cached.
        assert end[1] - start[1] <= 0.4 * (end[0] - start[0]), path


# -- requests that end servers ------------------------------------------------------------------------

PATHS = {"/v1/embeddings", "/encode", "/v1/classify", "/classify", "/v1/score", "/v1/rerank"}
JSON = {"content-type": "application/json"}
TOO_LONG = [7] * 8300
ENDS_STOCK: list[tuple[str, Json]] = [
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/encode", {"text": ""}),
    ("/encode", {"input_ids": []}),
    ("/encode", {"input_ids": [1, 32_000]}),
    ("/classify", {"input_ids": [[1], [-3]]}),
    ("/v1/embeddings", {"input": [1, 32_000]}),
    ("/v1/score", {"query": [1], "items": [[32_000]]}),
    (
        "/v1/embeddings",
        {"input": [[5, 6, 7]], "embed_override_token_id": 6, "embed_overrides": [[[0.1, 0.2]]]},
    ),
]
"""Requests to models that do not generate."""


async def test_no_request_ends_a_server(rig: Rig, long_run: bool) -> None:
    if rig.kind is GENERATES:
        pytest.skip("of models that generate, others test this")
    for path, body in ENDS_STOCK:
        status, told, _ = await rig.ask(rig.router.url, path, body)
        assert status == 400, (path, told)
        if path != "/v1/score":  # a stock server sees no difference between its prompts and another's
            status, told, _ = await rig.ask(rig.ours.url, path, body)
            assert status == 400, (path, told)
    for path, body in (("/encode", {"input_ids": TOO_LONG}), ("/v1/embeddings", {"input": TOO_LONG})):
        status, told, _ = await rig.ask(rig.ours.url, path, body)
        assert (status, "--max-total-tokens" in json.dumps(told)) == (400, True), told
    # Every field with odd values; the long form has more of them.
    found = [case for case in cases(rig.ours.get("/openapi.json")) if case.path in PATHS]
    assert len(found) > 5000
    for case in sample(found, 3000 if long_run else 150, 1):
        for url in (rig.ours.url, rig.router.url):
            async with rig.client.post(url + case.path, data=case.body, headers=JSON) as answer:
                assert answer.status < 500, case
    assert rig.stock.running
    assert rig.ours.running
    status, *_ = await rig.ask(rig.ours.url, "/encode", {"text": "a"})
    assert status == 200


@pytest.mark.long
def test_the_twin_without_the_check_ends(tmp_path: Path) -> None:
    """As stock servers do."""
    flags = ("--is-embedding", *MEASURED)
    unchecked = ServerSpec(flags=flags, run=(UNCHECKED,), environment={FOLDER: str(tmp_path)})
    with ServerProcess(unchecked) as server:
        assert not ends(server, "/encode", {"text": "a"})
        assert ends(server, "/encode", {"text": ""})


def ends(server: ServerProcess, path: str, body: Json) -> bool:
    """Whether a server ends by a request."""
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        try:
            client.post(path, json=body)
        except httpx.RemoteProtocolError:
            return True
    return False


# -- encoders -----------------------------------------------------------------------------------------

ENCODER = "tiny-cross-encoder"
RANKINGS = [ranking("One day", ["it rained", "it snowed"]), ranking("One day", ["it rained", "nothing"])]
"""Their pairs have the same beginning."""


def test_the_shared_cache_refuses_an_encoder_at_start() -> None:
    encoder = ServerSpec(model=ENCODER, flags=(*MEASURED, *FLAGS[:2]))
    with pytest.raises(ServerStartError, match=r"bidirectional attention(.|\n)*--disable-radix-cache"):
        ServerProcess(encoder).start()


@pytest.mark.long
async def test_an_encoder_without_a_cache_is_served(client: aiohttp.ClientSession) -> None:
    encoder = ServerSpec(model=ENCODER, flags=(*MEASURED, "--disable-radix-cache"))
    with ServerProcess(encoder) as server:
        async with Router(RouterConfig(worker_urls=(server.url,), port=0)) as router:
            scores = []
            for body in [*RANKINGS, *RANKINGS]:
                async with client.post(server.url + "/v1/rerank", json=body) as answer:
                    expected = ranked(await answer.json())
                async with client.post(router.url + "/v1/rerank", json=body) as answer:
                    assert answer.status == 200
                    got = ranked(await answer.json())
                    record = router.request_log.find(answer.headers["x-request-id"], tenant=None, admin=True)
                assert differs(expected, got) == ""
                scores += [each["score"] for each in got]
                # Pairs are tokenized as the server does.
                prompts = sum(each["meta_info"]["prompt_tokens"] for each in got)
                assert record is not None
                assert record.record.prompt_tokens == prompts
            assert len({round(score, 3) for score in scores}) == 3, "scores do not depend on documents"


@pytest.mark.long
def test_the_twin_encoder_with_a_cache_is_left_out_and_ends() -> None:
    with ServerProcess(ServerSpec(model=ENCODER, flags=MEASURED)) as server:

        async def routed() -> str:
            async with Router(RouterConfig(worker_urls=(server.url,), port=0)) as router:
                (row,) = router.fleet.rows.values()
                assert not router.fleet.usable()
                return row.why

        assert "--disable-radix-cache" in asyncio.run(routed())
        assert any(ends(server, "/v1/rerank", body) for body in RANKINGS)

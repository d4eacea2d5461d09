"""Embeddings, classification, scoring and reranking.

Models that embed or classify answer all of these APIs. Models that generate answer ``/v1/score`` and, with
a reranker's chat template, ``/v1/rerank``. Requests are routed by prefix: the items of a score share their
query, and so do documents that are ranked.

SGLang takes neither ``cache_salt`` nor ``extra_key`` in these requests. The salt of an isolated tenant
travels as a header, to servers that take it (``Flight.salt_by_header``); where there is none, the request is
refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import orjson

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import Dialect, fields
from sglang_ext.router.api.generate import (
    MEDIA_FIELDS,
    has_media,
    media_digest,
    take_native_prompts,
    take_sampling,
)
from sglang_ext.router.api.job import Job, Pair, PromptInput
from sglang_ext.router.api.limits import Limits, ModelKind
from sglang_ext.router.api.prompts import adapter_of, namespaces, take_prompts
from sglang_ext.router.api.usage import Usage, count
from sglang_ext.router.api.validation import (
    Json,
    check_fields,
    check_ids,
    empty,
    kinds,
    take_bool,
    take_parts,
    take_string,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

_INPUT: Final = "a string, or an array of strings, of token ids, or of arrays of them"
_TEXTS: Final[Json] = schemas.several(schemas.FULL_TEXT)
_IDS_OR_TEXTS: Final = [schemas.FULL_TEXT, _TEXTS, schemas.TOKENS, schemas.several(schemas.TOKENS)]
_NAMES: Final[Json] = {name: schemas.ROUTING[name] for name in ("rid", "priority")}


class Pooling(Dialect):
    """An API that generates no text. Its answers are not streamed."""

    answered_by: ClassVar[tuple[ModelKind, ...]] = (ModelKind.POOLS,)
    takes_salt = False
    stream_type = ""
    kinds: ClassVar[Mapping[str, str]] = {}
    """Of the fields of a body that are checked: see ``validation.kinds``."""

    def checked(self, payload: Json, limits: Limits) -> None:
        """Check a body's plain fields."""
        if "model" in payload and payload["model"] is None:
            raise wrong("model", "a string", None)
        for name in ("extra_key", "cache_salt"):
            if payload.get(name) is not None:
                raise RequestRefused(
                    f"SGLang takes no {name} at {self.path}: equal prompts share KV",
                    param=name,
                    code="unsupported_parameter",
                )
        check_fields(payload, self.kinds, limits)

    def only_warms(self, payload: Json) -> bool:
        return False

    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        raise NotImplementedError(f"{self.path} has no requests that only warm the cache")

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        if isinstance(answer, dict) and isinstance(reported := answer.get("usage"), dict):
            usage.prompt_tokens = count(reported.get("prompt_tokens"))
            if isinstance(details := reported.get("prompt_tokens_details"), dict):
                usage.cached_tokens = count(details.get("cached_tokens"))


# -- embeddings and classes -----------------------------------------------------------------------------


class Embeddings(Pooling):
    """``/v1/embeddings``: texts, token ids, or texts with pictures."""

    path = "/v1/embeddings"
    summary = "OpenAI embeddings"
    prompt_field = "input"
    own_fields = fields("encoding_format")
    kinds = kinds(string="model encoding_format user", positive="dimensions")

    def parse(self, payload: Json, limits: Limits) -> Job:
        self.checked(payload, limits)
        value = payload.get("input")
        if type(value) is list and value and type(value[0]) is dict:
            prompts, is_batch = [_with_media(item, f"input[{i}]") for i, item in enumerate(value)], True
        else:
            prompts, is_batch = take_prompts(value, "input", _INPUT, limits)
        opaque = payload.get("embed_overrides") is not None
        return _job(payload, prompts, is_batch, adapter_of(payload.get("model")), opaque=opaque)

    @property
    def schema(self) -> Json:
        item = schemas.record(dict.fromkeys(("text", "image", "video"), schemas.MAYBE_TEXT))
        value = {"anyOf": [*_IDS_OR_TEXTS, schemas.several(item)]}
        return schemas.record({**schemas.fields(self.kinds), **_NAMES, "input": value}, "input")


class Classify(Pooling):
    """``/v1/classify``: texts or token ids."""

    path = "/v1/classify"
    summary = "Classes of texts, with their probabilities"
    prompt_field = "input"
    kinds = kinds(string="model user")

    def parse(self, payload: Json, limits: Limits) -> Job:
        self.checked(payload, limits)
        return _job(payload, *take_prompts(payload.get("input"), "input", _INPUT, limits))

    @property
    def schema(self) -> Json:
        value: Json = {
            "anyOf": [schemas.FULL_TEXT, schemas.several(schemas.FULL_TEXT), schemas.TOKENS],
        }
        return schemas.record({**schemas.fields(self.kinds), **_NAMES, "input": value}, "input")


class Encode(Pooling):
    """``/encode``: prompts as ``/generate`` takes them, or pairs of texts."""

    path = "/encode"
    summary = "SGLang's own embeddings"
    methods = frozenset({"POST", "PUT"})
    prompt_field = "text"
    ids_field = "input_ids"
    own_fields = fields("is_cross_encoder_request")
    media_in = MEDIA_FIELDS
    kinds = kinds(boolean="is_cross_encoder_request return_pooled_hidden_states", positive="dimensions")

    def parse(self, payload: Json, limits: Limits) -> Job:
        self.checked(payload, limits)
        if take_bool(payload, "background"):
            raise RequestRefused(
                f"{self.path} answers nothing in the background",
                param="background",
                code="unsupported_parameter",
            )
        if payload.get("input_ids") == []:  # no session goes before it
            raise empty("input_ids")
        nothing = all(payload.get(name) is None for name in ("text", "input_ids", "input_embeds"))
        if take_bool(payload, "is_cross_encoder_request"):
            prompts, is_batch = _pairs(payload.get("text")), True
        elif nothing and has_media(payload):
            prompts, is_batch = [PromptInput(text="", opaque=True)], False
        else:
            prompts, is_batch = take_native_prompts(payload, limits)
        take_sampling(payload.get("sampling_params"), len(prompts), is_batch, limits)
        return _job(payload, prompts, is_batch, media=media_digest(payload))

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        _add(usage, answer)

    @property
    def schema(self) -> Json:
        pair = {"type": "array", "items": schemas.TEXT, "minItems": 2, "maxItems": 2}
        body = schemas.record(
            {
                "text": {
                    "anyOf": [schemas.FULL_TEXT, schemas.several(schemas.FULL_TEXT), schemas.several(pair)]
                },
                "input_ids": schemas.several({"anyOf": [schemas.TOKEN, schemas.TOKENS]}),
                **schemas.fields(self.kinds),
                **_NAMES,
            }
        )
        return body | {"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]}


class NativeClassify(Encode):
    """``/classify``: as ``/encode``, of models that classify or reward."""

    path = "/classify"
    summary = "SGLang's own classes and rewards"


# -- scores -----------------------------------------------------------------------------------------------


class Score(Pooling):
    """``/v1/score``: a query, and items of which each is scored behind it."""

    path = "/v1/score"
    summary = "Scores of items behind a query"
    answered_by = tuple(ModelKind)
    prompt_field = "items"
    own_fields = fields(
        """items label_token_ids apply_softmax item_first return_token_logprobs score_extraction_token"""
    )
    kinds = kinds(
        string="model score_extraction_token",
        boolean="apply_softmax item_first return_pooled_hidden_states return_token_logprobs",
        number="temperature",
    )

    def parse(self, payload: Json, limits: Limits) -> Job:
        self.checked(payload, limits)
        _check_labels(payload.get("label_token_ids"), limits)
        items = payload.get("items")
        if type(items) is str:
            items = [items]
        if type(items) is not list:
            raise wrong("items", "a string, an array of strings, or of arrays of token ids", items)
        if not items:
            raise empty("items")
        scored = _scored_texts if type(items[0]) is str else _scored_ids
        prompts = scored(payload.get("query"), items, bool(payload.get("item_first")), limits)
        overrides = ("query_embed_overrides", "item_embed_overrides")
        return _job(payload, prompts, True, opaque=any(payload.get(name) is not None for name in overrides))

    @property
    def schema(self) -> Json:
        properties = {
            **schemas.fields(self.kinds),
            "query": {"anyOf": [schemas.TEXT, schemas.TOKENS, {"type": "null"}]},
            "items": {"anyOf": [schemas.FULL_TEXT, _TEXTS, schemas.several(schemas.TOKENS)]},
            "label_token_ids": schemas.several({"anyOf": [schemas.TOKEN, schemas.TOKENS]}, null=True),
        }
        return schemas.record(properties, "items")


class Rerank(Pooling):
    """``/v1/rerank``: documents by how well they answer a query."""

    path = "/v1/rerank"
    methods = frozenset({"POST", "PUT"})
    summary = "Documents in the order of how well they answer a query"
    answered_by = tuple(ModelKind)
    prompt_field = "documents"
    parts_in = ("query", "documents")
    own_fields = fields("documents instruct top_n return_documents")
    kinds = kinds(string="instruct", positive="top_n", boolean="return_documents")

    def parse(self, payload: Json, limits: Limits) -> Job:
        self.checked(payload, limits)
        query, shown = _content(payload.get("query"), "query")
        documents = payload.get("documents")
        if type(documents) is not list:
            raise wrong("documents", "an array of strings, or of arrays of parts", documents)
        if not documents:
            raise empty("documents")
        instruct = take_string(payload, "instruct")
        prompts = []
        for index, document in enumerate(documents):
            text, seen = _content(document, f"documents[{index}]")
            media = _digest([shown, seen]) if shown or seen else ""
            prompts.append(PromptInput(pair=Pair(query, text, instruct), opaque=bool(media), media=media))
        return _job(payload, prompts, True)

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        _add(usage, answer)
        usage.partial = True  # top_n leaves documents out of the answer

    @property
    def schema(self) -> Json:
        part = schemas.record({"type": schemas.TEXT, "text": schemas.TEXT}, "type")
        content = {"anyOf": [schemas.FULL_TEXT, schemas.several(part)]}
        properties = {
            **schemas.fields(self.kinds),
            "query": content,
            "documents": schemas.several(content),
        }
        return schemas.record(properties, "query", "documents")


EMBEDDINGS = Embeddings()
ENCODE = Encode()
CLASSIFY = Classify()
NATIVE_CLASSIFY = NativeClassify()
SCORE = Score()
RERANK = Rerank()


# -- bodies ---------------------------------------------------------------------------------------------


def _job(
    payload: Json,
    prompts: list[PromptInput],
    is_batch: bool,
    adapter: str | None = None,
    *,
    media: str = "",
    opaque: bool = False,
) -> Job:
    """The request of these prompts. opaque: their KV depends on other fields, too."""
    spaces = namespaces(payload, len(prompts), adapter)
    return Job(
        False,
        tuple(
            PromptInput(
                ids=prompt.ids,
                text=prompt.text,
                pair=prompt.pair,
                opaque=opaque or prompt.opaque or bool(media),
                media=media or prompt.media,
                namespace=space,
                max_new_tokens=0,
            )
            for prompt, space in zip(prompts, spaces, strict=True)
        ),
        batch=is_batch,
    )


def _with_media(item: Any, where: str) -> PromptInput:
    """A text with a picture or a video. The server puts a template around it that is not known here."""
    if type(item) is not dict:
        raise wrong(where, "an object", item)
    text, *media = [take_string(item, name, where + ".") for name in ("text", "image", "video")]
    if text is None and not any(media):
        raise empty(where)
    return PromptInput(text=text or "", opaque=True, media=_digest(media) if any(media) else "")


def _digest(media: Any) -> str:
    return hashlib.blake2b(orjson.dumps(media), digest_size=16).hexdigest()


def _pairs(value: Any) -> list[PromptInput]:
    """Pairs of texts, for a cross-encoder."""
    if type(value) is not list:
        raise wrong("text", "an array of pairs of strings", value)
    if not value:
        raise empty("text")
    prompts = []
    for index, item in enumerate(value):
        if type(item) is not list or len(item) != 2 or any(type(text) is not str for text in item):
            raise wrong(f"text[{index}]", "a pair of strings", item)
        if not item[0] and not item[1]:
            raise empty(f"text[{index}]")
        prompts.append(PromptInput(pair=Pair(item[0], item[1], by_template=False)))
    return prompts


def _content(value: Any, field: str) -> tuple[str, list[Json]]:
    """(text, pictures and videos) of a query or a document."""
    if not value and value is not None:
        raise empty(field)
    if type(value) is str:
        return value, []
    texts, shown = [], []
    for where, part in take_parts(value, field):
        kind = part.get("type")
        if kind == "text":
            texts.append(take_string(part, "text", where + ".") or "")
        elif kind in ("image_url", "video_url"):
            shown.append(part)
        else:
            raise RequestRefused(
                f"{where}.type must be text, image_url or video_url, not {str(kind)[:80]}",
                param=where + ".type",
                code="invalid_value",
            )
    return " ".join(texts), shown


def _scored_texts(query: Any, items: list[Any], item_first: bool, limits: Limits) -> list[PromptInput]:
    """A query, and texts that are scored behind it, or in front of it."""
    if query is not None and type(query) is not str:
        raise wrong("query", "a string, as the items are", query)
    prompts = []
    for index, item in enumerate(items):
        if type(item) is not str:
            raise wrong(f"items[{index}]", "a string", item)
        text = item + (query or "") if item_first else (query or "") + item
        if not text:
            raise empty(f"items[{index}]")
        prompts.append(PromptInput(text=text))
    return prompts


def _scored_ids(query: Any, items: list[Any], item_first: bool, limits: Limits) -> list[PromptInput]:
    """As ``_scored_texts``, of token ids."""
    given = check_ids([] if query is None else query, "query", limits.vocab_size)
    prompts = []
    for index, item in enumerate(items):
        ids = check_ids(item, f"items[{index}]", limits.vocab_size)
        ids = ids + given if item_first else given + ids
        if not ids:
            raise empty(f"items[{index}]")
        prompts.append(PromptInput(ids=ids))
    return prompts


def _check_labels(value: Any, limits: Limits) -> None:
    """Tokens whose probabilities are the scores: one list for all items, or a list for each."""
    if value is None:
        return
    nested = type(value) is list and bool(value) and type(value[0]) is list
    for index, ids in enumerate(value if nested else [value]):
        check_ids(ids, f"label_token_ids[{index}]" if nested else "label_token_ids", limits.vocab_size)


def _add(usage: Usage, answer: Any) -> None:
    """Add the tokens that the elements of an answer state."""
    for element in answer if isinstance(answer, list) else [answer]:
        if isinstance(element, dict) and isinstance(meta := element.get("meta_info"), dict):
            for name in ("prompt_tokens", "cached_tokens"):
                if (tokens := count(meta.get(name))) is not None:
                    setattr(usage, name, (getattr(usage, name) or 0) + tokens)

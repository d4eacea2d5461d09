"""SGLang's own ``/generate``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from sglang_ext.keys import encode_tokens
from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import Dialect, fields
from sglang_ext.router.api.job import Job, PromptInput, session_key
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.prompts import namespaces, take_prompts
from sglang_ext.router.api.sse import parsed
from sglang_ext.router.api.stream_splice import StreamSplice, another_answer
from sglang_ext.router.api.usage import StreamReader, Usage, count
from sglang_ext.router.api.validation import (
    SAMPLING,
    Json,
    check_fields,
    check_object,
    coerced_bool,
    coerced_int,
    json_type,
    kinds,
    take_bool,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

MEDIA_FIELDS = ("image_data", "video_data", "audio_data")
_LOGPROB_FIELDS = frozenset({"top_logprobs_num", "return_logprob", "logprob_start_len"})
_PER_PROMPT = _LOGPROB_FIELDS | {
    "custom_logit_processor",
    "lora_path",
    "return_hidden_states",
    "return_sampling_mask",
    "sampling_logprobs_mode",
}
"""Fields that may be lists with an element for each prompt of a batch."""


_SAMPLING = SAMPLING | kinds(count="max_new_tokens")


class Splice(StreamSplice):
    """Of events that have the whole answer so far: the one after the client's last is the next."""

    def __init__(self, reader: StreamReader) -> None:
        super().__init__(reader)
        last = parsed(reader.last)
        self._last: Json | None = last if isinstance(last, dict) else None

    @staticmethod
    def obstacle(reader: StreamReader) -> str:
        if not isinstance(last := parsed(reader.last), dict):
            return ""
        ids, meta = last.get("output_ids"), last.get("meta_info")
        reported = meta.get("completion_tokens") if isinstance(meta, dict) else None
        if reader.seen > 1 and isinstance(ids, list) and len(ids) != reported:
            return "the server streams increments (--incremental-streaming-output)"
        return "" if reader.seen > 1 else "again"

    def kept(self, event: Json, data: bytes) -> bytes | None:
        last = self._last
        if last is None or "meta_info" not in event:
            return data
        ids, before = event.get("output_ids") or [], last.get("output_ids") or []
        if len(ids) < len(before):
            return None
        if ids[: len(before)] != before or not str(event.get("text", "")).startswith(last.get("text", "")):
            raise another_answer()
        if len(ids) == len(before) and event["meta_info"].get("finish_reason") is None:
            return None
        self._last = None
        return data

    @property
    def complete(self) -> bool:
        return self._last is None


class Generate(Dialect):
    """``/generate``: prompts as texts or token ids, one or many."""

    path = "/generate"
    methods = frozenset({"POST", "PUT"})
    summary = "SGLang's own generation"
    prompt_field = "text"
    known_by = (fields("text"), fields("input_ids"))
    ids_field = "input_ids"
    own_fields = fields(
        """image_max_dynamic_patch video_max_dynamic_patch require_reasoning max_thinking_tokens
        return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs
        return_flat_raw_top_logprobs return_entropy return_indexer_topk no_logs"""
    )
    media_in = MEDIA_FIELDS
    custom_params_in = "sampling_params"
    hint_fields = ("text", "input_ids")
    document_fields: ClassVar[Mapping[str, str]] = {"text": "text", "input_ids": "input_ids"}
    whole_events = True
    says_usage = re.compile(rb'"finish_reason"\s*:\s*\{')
    splice = Splice

    def parse(self, payload: Json, limits: Limits) -> Job:
        """A batch is checked element by element; the error names the first that is wrong."""
        stream = take_bool(payload, "stream")
        if take_bool(payload, "background"):
            raise RequestRefused(
                "/generate answers nothing in the background",
                param="background",
                code="unsupported_parameter",
            )
        prompts, is_batch = take_native_prompts(payload, limits)
        sampling, choices = take_sampling(payload.get("sampling_params"), len(prompts), is_batch, limits)
        if not _PER_PROMPT.isdisjoint(payload):
            _check_lists(payload, len(prompts), is_batch)
            _check_logprobs(payload, limits)
        session = _session(payload)
        media = media_digest(payload)
        spaces = namespaces(payload, len(prompts))
        return Job(
            stream,
            tuple(
                PromptInput(
                    ids=prompt.ids,
                    text=prompt.text,
                    opaque=bool(media) or prompt.opaque or session is not None,
                    media=media,
                    namespace=space,
                    max_new_tokens=max_new,
                )
                for prompt, space, max_new in zip(prompts, spaces, sampling, strict=True)
            ),
            choices,
            batch=is_batch,
            pinned_to=None if session is None else session_key(session),
        )

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        if isinstance(answer, list):
            for index, element in enumerate(answer):
                _add(usage, element, index, choices)
        elif isinstance(answer, dict):
            index = answer.get("index", 0)
            _add(usage, answer, index if type(index) is int else 0, choices)

    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        info = {"id": name, "prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": 0}
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {**info, "finish_reason": {"type": "length", "length": 0}},
        }

    @property
    def schema(self) -> Json:
        sampling = schemas.record(schemas.fields(_SAMPLING))
        body = schemas.record(
            {
                "text": {"type": ["string", "array"], "items": schemas.FULL_TEXT, "minLength": 1},
                "input_ids": schemas.several({"anyOf": [schemas.TOKEN, schemas.TOKENS]}),
                "sampling_params": {
                    "anyOf": [sampling, {"type": "array", "items": sampling}, {"type": "null"}]
                },
                "stream": schemas.BOOL,
                "return_logprob": {"type": ["boolean", "array", "null"], "items": {"type": "boolean"}},
                "logprob_start_len": {"type": ["integer", "array", "null"], "items": {"type": "integer"}},
                "top_logprobs_num": {
                    "type": ["integer", "array", "null"],
                    "items": schemas.TOKEN,
                    "minimum": 0,
                },
                **schemas.ROUTING,
                **schemas.DOCUMENTS,
            }
        )
        return body | {"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]}


GENERATE = Generate()


def _add(usage: Usage, answer: Any, index: int, choices: int) -> None:
    """Take in one element of an answer: choice ``index % choices`` of its prompt."""
    if not isinstance(answer, dict) or not isinstance(meta := answer.get("meta_info"), dict):
        return
    usage.completion_tokens = _sum(usage.completion_tokens, meta.get("completion_tokens"))
    if index % choices == 0:
        usage.prompt_tokens = _sum(usage.prompt_tokens, meta.get("prompt_tokens"))
        usage.cached_tokens = _sum(usage.cached_tokens, meta.get("cached_tokens"))
        if (details := meta.get("cached_tokens_details")) is not None:
            usage.add_tiers(details)
    ids = answer.get("output_ids")
    # With --incremental-streaming-output an event has the latest ids only, which are no prefix.
    if choices == 1 and isinstance(ids, list) and ids and len(ids) == meta.get("completion_tokens"):
        try:
            usage.output_keys[index] = encode_tokens(ids)
        except (TypeError, ValueError, OverflowError):
            return  # they are no tokens


def _sum(total: int | None, value: Any) -> int | None:
    tokens = count(value)
    return total if tokens is None else (total or 0) + tokens


# -- checks of bodies ----------------------------------------------------------------------------------


def has_media(payload: Json) -> bool:
    return not payload.keys().isdisjoint(MEDIA_FIELDS) and any(payload.get(name) for name in MEDIA_FIELDS)


def media_digest(payload: Json) -> str:
    """A digest of all that comes beside the prompts, in whatever form; empty where nothing comes."""
    if not has_media(payload):
        return ""
    return hashlib.blake2b(
        orjson.dumps([payload.get(name) for name in MEDIA_FIELDS]), digest_size=16
    ).hexdigest()


def take_native_prompts(payload: Json, limits: Limits) -> tuple[list[PromptInput], bool]:
    """The prompts, and whether they are a batch."""
    given = [name for name in ("text", "input_ids", "input_embeds") if payload.get(name) is not None]
    if len(given) != 1:
        raise RequestRefused(
            "give exactly one of text, input_ids and input_embeds; "
            + (f"there are {' and '.join(given)}" if given else "there is none"),
            param=given[1] if given else "text",
            code="invalid_prompt",
        )
    name = given[0]
    value = payload[name]
    if name == "input_embeds":  # a worker refuses them unless it was started without a radix cache
        return [PromptInput(text="", opaque=True)], False
    if name == "text":
        what = "a string or an array of strings"
        return take_prompts(value, name, what, limits, ids=False, allow_empty=has_media(payload))
    session = payload.get("session_params")
    if value == [] and isinstance(session, dict) and session.get("id"):
        return [PromptInput(text="", opaque=True)], False  # the session's history is the prompt
    return take_prompts(value, name, "an array of token ids", limits, texts=False)


_SESSION = kinds(name="id rid", integer="offset", boolean="replace drop_previous_output")


def _session(payload: Json) -> str | None:
    """The session whose history goes before the prompt."""
    check_object(payload, "session_params")
    params = payload.get("session_params")
    if params is None:
        return None
    if unknown := sorted(params.keys() - _SESSION.keys()):
        raise RequestRefused(
            f"session_params.{unknown[0][:80]} is no field of a session: there are {', '.join(_SESSION)}",
            param=f"session_params.{unknown[0][:80]}",
            code="invalid_value",
        )
    check_fields(params, _SESSION, Limits(0, 0), "session_params.", coerces=False)
    if params.get("id") and payload.get("session_id") is not None:
        raise RequestRefused(
            "give session_id or session_params, not both", param="session_params", code="invalid_value"
        )
    return params.get("id") or None


def take_sampling(value: Any, count: int, is_batch: bool, limits: Limits) -> tuple[list[int | None], int]:
    """(max_new_tokens per prompt, choices per prompt)."""
    if value is None:
        return [None] * count, 1
    if type(value) is dict:
        check_fields(value, _SAMPLING, limits, "sampling_params.", coerces=False)
        return [value.get("max_new_tokens")] * count, value.get("n") or 1
    if type(value) is not list:
        raise wrong("sampling_params", "an object or an array of objects", value)
    check_length_of("sampling_params", value, count, is_batch)
    for index, item in enumerate(value):
        field = f"sampling_params[{index}]"
        if type(item) is not dict:
            raise wrong(field, "an object", item)
        check_fields(item, _SAMPLING, limits, field + ".", coerces=False)
    choices = {item.get("n") or 1 for item in value}
    if len(choices) > 1:
        raise RequestRefused(
            f"sampling_params must have the same n for every prompt, not {sorted(choices)}",
            param="sampling_params",
            code="invalid_value",
        )
    return [item.get("max_new_tokens") for item in value], choices.pop()


def _check_lists(payload: Json, count: int, is_batch: bool) -> None:
    """A server takes a list that is too short, and breaks off its answer where it looks for the rest."""
    for name in _PER_PROMPT:
        value = payload.get(name)
        if type(value) is list:
            check_length_of(name, value, count, is_batch)


def check_length_of(name: str, value: list[Any], count: int, is_batch: bool) -> None:
    """A list with an element for each prompt."""
    if not is_batch:
        raise RequestRefused(
            f"{name} is an array, but there is only one prompt; give one value",
            param=name,
            code="invalid_type",
        )
    if len(value) != count:
        raise RequestRefused(
            f"{name} has {len(value)} elements for {count} prompts", param=name, code="invalid_length"
        )


def _check_logprobs(payload: Json, limits: Limits) -> None:
    """More top logprobs than the vocabulary has entries, or fewer than none, bring the scheduler down."""
    value = payload.get("top_logprobs_num")
    for index, item in enumerate(value if type(value) is list else [value]):
        field = f"top_logprobs_num[{index}]" if type(value) is list else "top_logprobs_num"
        if item is None:
            continue
        item = coerced_int(item)
        if type(item) is not int:
            raise wrong(field, "an integer", item)
        if not 0 <= item <= limits.vocab_size:
            raise RequestRefused(
                f"{field} must be between 0 and {limits.vocab_size}, the size of the vocabulary, not {item}",
                param=field,
                code="out_of_range",
            )
    for name in ("return_logprob", "logprob_start_len"):
        value = payload.get(name)
        kind, coerced = (bool, coerced_bool) if name == "return_logprob" else (int, coerced_int)
        for item in value if type(value) is list else [value]:
            if item is not None and type(coerced(item)) is not kind:
                what = "booleans" if kind is bool else "integers"
                raise RequestRefused(
                    f"{name} must consist of {what}, not {json_type(item)}", param=name, code="invalid_type"
                )

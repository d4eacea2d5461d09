"""Hints in what clients send: the advisory request itself, and what stands for one elsewhere. Pure functions.

- ``POST /v1/advisory``: ours; a session, or the conversation so far;
- OpenAI's ``prompt_cache_options`` with ``prewarm``: the request itself is only a hint, with its ``ttl``;
- Anthropic's ``max_tokens: 0``: the same;
- SGLang's ``kv_hints`` envelope: actions of type ``prefetch``, each with the body of an advisory request as
  its payload, beside a request that is served as usual.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ext.router.api.anthropic import parse_messages
from sglang_ext.router.api.native import parse_generate
from sglang_ext.router.api.openai import parse_chat, parse_completion
from sglang_ext.router.api.responses import parse_responses
from sglang_ext.router.api.validation import Endpoint, Job, Json, Limits, take_string, wrong
from sglang_ext.router.http.types import RequestRefused

PROMPT_FIELDS = ("messages", "text", "prompt", "input_ids")
PREFETCH = "prefetch"
_TTL = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Advisory:
    """What an advisory request says, checked.

    job: the conversation so far, as a request that ends with it would send it; None when only a session is
    named. session: as the client calls it.
    """

    job: Job | None
    session: str | None
    earliest_s: float = 0.0
    ttl_s: float | None = None


def parse_advisory(payload: Json, limits: Limits, prefix: str = "") -> Advisory:
    """Check the body of an advisory request.

    Raises:
        RequestRefused: names the field.
    """
    given = [name for name in PROMPT_FIELDS if payload.get(name) is not None]
    if len(given) > 1:
        raise RequestRefused(
            f"give one of {', '.join(PROMPT_FIELDS)}; there are {' and '.join(given)}",
            param=prefix + given[1],
            code="invalid_prompt",
        )
    session = take_string(payload, "session", prefix)
    if not given and not session:
        raise RequestRefused(
            f"say which request is expected: name a session, or give one of {', '.join(PROMPT_FIELDS)}",
            param=prefix + "session",
            code="missing_field",
        )
    return Advisory(
        _job(payload, given[0], limits) if given else None,
        session or None,
        take_seconds(payload, "earliest_s", prefix) or 0.0,
        take_seconds(payload, "ttl_s", prefix),
    )


def _job(payload: Json, name: str, limits: Limits) -> Job:
    """As the endpoint would take it to which such prompts are sent."""
    if name == "messages":
        return parse_chat(payload, limits)
    if name == "prompt":
        return _one(parse_completion({**payload, "max_tokens": 1}, limits), name)
    return _one(parse_generate({"sampling_params": {}, **payload}, limits), name)


def _one(job: Job, name: str) -> Job:
    if len(job.prompts) != 1:
        raise RequestRefused(f"{name} must be one prompt", param=name, code="invalid_prompt")
    return job


def take_seconds(payload: Json, name: str, prefix: str = "") -> float | None:
    """A length of time: a number of seconds, not negative."""
    value = payload.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise wrong(prefix + name, "a number of seconds", value)
    if not math.isfinite(value) or value < 0:
        raise RequestRefused(
            f"{prefix}{name} must be at least 0, not {value}", param=prefix + name, code="out_of_range"
        )
    return float(value)


# -- requests that are hints ------------------------------------------------------------------------


def only_a_hint(endpoint: Endpoint, payload: Json) -> bool:
    """Whether a generation request asks for nothing but the cache to be warmed."""
    if endpoint is Endpoint.MESSAGES:
        return type(payload.get("max_tokens")) is int and payload["max_tokens"] == 0
    options = payload.get("prompt_cache_options")
    return isinstance(options, dict) and options.get("prewarm") is True


def advisory_of(endpoint: Endpoint, payload: Json, limits: Limits) -> Advisory:
    """The hint that a request is (`only_a_hint`).

    Raises:
        RequestRefused: the request is not well-formed.
    """
    bare = {name: value for name, value in payload.items() if name != "prompt_cache_options"}
    match endpoint:
        case Endpoint.MESSAGES:
            job = parse_messages({**bare, "max_tokens": 1}, limits)
        case Endpoint.CHAT:
            job = parse_chat(bare, limits)
        case Endpoint.COMPLETIONS:
            job = _one(parse_completion(bare, limits), "prompt")
        case Endpoint.RESPONSES:
            job = parse_responses(bare, limits)
        case Endpoint.GENERATE:
            job = _one(parse_generate(bare, limits), "text")
    options = payload.get("prompt_cache_options")
    return Advisory(job, None, ttl_s=_ttl(options.get("ttl")) if isinstance(options, dict) else None)


def _ttl(value: object) -> float | None:
    """Seconds: a number of them, or a text such as ``30m``."""
    if value is None:
        return None
    found = _TTL.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        return float(found[1]) * _UNITS[found[2]]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise RequestRefused(
        "prompt_cache_options.ttl must be a number of seconds, or a time such as 30m or 24h",
        param="prompt_cache_options.ttl",
        code="invalid_value",
    )


def prefetch_actions(payload: Json) -> Iterator[Json]:
    """Bodies of advisory requests in a ``kv_hints`` envelope; what is none of ours is for others."""
    envelope = payload.get("kv_hints")
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    for action in actions if isinstance(actions, list) else ():
        if isinstance(action, dict) and action.get("action_type") == PREFETCH:
            body = action.get("payload")
            if isinstance(body, dict):
                yield body

"""Hints in the bodies of clients: advisory requests, and their equivalents in other APIs. Pure functions.

- ``POST /v1/advisory``: ours; a session, or the conversation so far;
- OpenAI's ``prompt_cache_options`` with ``prewarm``: the request itself is only a hint, with its ``ttl``;
- Anthropic's ``max_tokens: 0``: the same;
- the ``kv_hints`` envelope of SGLang, vLLM and Dynamo: actions of type ``prefetch``, each with the body of an
  advisory request as its payload, beside a request that is served as usual;
- Dynamo's ``nvext.agent_hints``: a request's priority.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.job import Job
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import Json, take_name, wrong
from sglang_ext.router.http.types import RequestRefused

PREFETCH = "prefetch"
FETCH, FETCH_VERSION = "kv.fetch", "1.0"
MAX_AGENT_PRIORITY = 1 << 31
_ACTION_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""Of an action that is answered in a header."""
_TTL = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Advisory:
    """The checked contents of an advisory request.

    job: the conversation so far, as a request that ends with it would send it; None when only a session is
    named. session: as the client calls it.
    """

    job: Job | None
    session: str | None
    earliest_s: float = 0.0
    ttl_s: float | None = None


def parse_advisory(payload: Json, limits: Limits, prefix: str = "") -> Advisory:
    """Check the body of an advisory request. A prompt is taken as by the API that takes it in this field.

    Raises:
        RequestRefused: names the field.
    """
    fields = {name: dialect for dialect in DIALECTS.values() for name in dialect.hint_fields}
    given = [name for name in fields if payload.get(name) is not None]
    if len(given) > 1:
        raise RequestRefused(
            f"give one of {', '.join(fields)}; there are {' and '.join(given)}",
            param=prefix + given[1],
            code="invalid_prompt",
        )
    session = take_name(payload, "session", prefix)
    if not given and not session:
        raise RequestRefused(
            f"say which request is expected: name a session, or give one of {', '.join(fields)}",
            param=prefix + "session",
            code="missing_field",
        )
    return Advisory(
        fields[given[0]].expected(payload, limits) if given else None,
        session or None,
        take_seconds(payload, "earliest_s", prefix) or 0.0,
        take_seconds(payload, "ttl_s", prefix),
    )


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


def advisory_of(dialect: Dialect, payload: Json, limits: Limits) -> Advisory:
    """The hint that a request is (``Dialect.only_warms``).

    Raises:
        RequestRefused: the request is not well-formed.
    """
    options = payload.get("prompt_cache_options")
    ttl_s = _ttl(options.get("ttl")) if isinstance(options, dict) else None
    return Advisory(dialect.expected(payload, limits), None, ttl_s=ttl_s)


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


class HintAction(msgspec.Struct, frozen=True):
    """An action of a ``kv_hints`` envelope, the form that SGLang, vLLM and Dynamo share."""

    id: str
    """By which it is answered: the client's ``action_id``, or its number in the envelope."""
    body: Json | None
    """Of an advisory request; None for an action that the router does not take, or that announces none."""
    fetches: bool = False
    """It asks for KV of the request's own prompt."""


def hint_actions(payload: Json) -> Iterator[HintAction]:
    """The actions of a ``kv_hints`` envelope. Those of the type ``prefetch`` have a body. ``kv.fetch`` is for
    KV of the request's own prompt, from a source that the router chooses by itself. No other is taken."""
    envelope = payload.get("kv_hints")
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    for number, action in enumerate(actions if isinstance(actions, list) else ()):
        if isinstance(action, dict):
            given, body = action.get("action_id"), action.get("payload")
            name = given if isinstance(given, str) and _ACTION_ID.fullmatch(given) else str(number)
            kind = action.get("action_type")
            taken = kind == PREFETCH and isinstance(body, dict)
            fetches = kind == FETCH and action.get("action_version") == FETCH_VERSION and _names_blocks(body)
            yield HintAction(name, body if taken else None, fetches)


def _names_blocks(body: object) -> bool:
    """Whether it is the payload of a ``kv.fetch@1.0``."""
    if not isinstance(body, dict) or not isinstance(body.get("source_control_endpoint"), str):
        return False
    blocks = body.get("block_hashes")
    return isinstance(blocks, list) and all(type(block) is int for block in blocks)


def agent_priority(payload: Json) -> int | None:
    """The priority in Dynamo's ``nvext.agent_hints``; higher is more urgent there too. None without one."""
    extension = payload.get("nvext")
    hints = extension.get("agent_hints") if isinstance(extension, dict) else None
    priority = hints.get("priority") if isinstance(hints, dict) else None
    return priority if type(priority) is int and abs(priority) <= MAX_AGENT_PRIORITY else None

"""Admitting a request: whether it may be served, for whom, and which parts reach a worker. Pure functions.

``admit`` makes all decisions that depend on the request's body, its caller, the model and the router's flags,
once, and returns them as one value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from sglang_ext.router.api.dialect import Dialect, ModelName
from sglang_ext.router.api.hints import advisory_of, agent_priority, hint_actions, parse_advisory
from sglang_ext.router.api.job import Job
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import Json, check_name, take_int
from sglang_ext.router.clients.sessions import session_of
from sglang_ext.router.http.types import Request, RequestRefused
from sglang_ext.router.tenancy.admitted import Admitted, AdmittedHint, Rules, Sent
from sglang_ext.router.tenancy.request_fields import FIELDS, HINTS, Who, forbidden, plain, unjudged
from sglang_ext.router.tenancy.tenants import Caller

RESUME = "sglang_ext_resume"
"""Of ``custom_params``: the ticket with which a request resumes at an instance (``engine/resume.py``). Worth
nothing without a state that was sent to the instance for it; refused here so that the client gets the reason.
"""
SCOPED = tuple(name for name, who in FIELDS.items() if who is Who.SCOPED)
"""Names that clients choose and servers look up; each tenant has its own."""
ROUTING = ("rid", "extra_key", "cache_salt", "priority")
"""Fields of the router's own, which clients may add to a body in any dialect."""
DEFAULT_MODEL = "default"


def admit(
    dialect: Dialect,
    payload: Json,
    request: Request,
    caller: Caller,
    limits: Limits,
    rules: Rules,
    new_rid: str,
    in_place: bool = False,
) -> Admitted:
    """Check a generation request, and build the one sent to a worker.

    Args:
        payload: its body, parsed.
        limits: of the model.
        new_rid: the request's name at the worker, unless the client gives one.
        in_place: whether the model sees system messages in the midst of a conversation.

    Raises:
        RequestRefused: 400, naming the field.
    """
    if dialect.admitted_as is not None:
        return _admit_rewritten(dialect, payload, request, caller, limits, rules, new_rid, in_place)
    check_reserved(payload, caller, dialect)
    priority = priority_of(payload, caller)
    job = with_salt(dialect.parse(payload, limits), caller)
    check_rid(payload, job)
    fields = additions(payload, caller)
    if not dialect.takes_salt:
        fields.pop("cache_salt", None)  # it travels as a header
    named = session_of(request.headers, payload, rules.sessions)
    body = judged(request.body, payload, caller, dialect)
    tells_cached = hides_usage = False
    if dialect.via is not None and caller.salt is not None:
        tells_cached = rules.cache_details and bool(dialect.via.asks_tiers)
        asked_too: Json = {dialect.via.asks_tiers: True} if tells_cached else {}
        sent = through(dialect, job, fields | asked_too, in_place)
    else:
        if dialect.asks_tiers:
            asked = payload.get(dialect.asks_tiers)
            if asked is None and rules.cache_details:
                body = put_in_front(body, {dialect.asks_tiers: True})
                asked = hides_usage = True
            tells_cached = asked is True
        renamed: ModelName | None = None
        if not dialect.takes_default_model and (model := _served(payload, limits)) is not None:
            fields["model"] = model
            renamed = ModelName(model, payload.get("model") or model)
        if dialect.via is None:
            body = splice(body, fields)
        sent = Sent(body, request.target, dialect, renamed)
    return Admitted(
        dialect,
        job,
        sent,
        priority,
        session=None if named is None else caller.scope + named,
        rid=_one_name(job, {**payload, **fields} if fields else payload, new_rid),
        rids=rids_of(payload, job),
        called=_given_rid(payload),
        tells_cached=tells_cached,
        hides_usage=hides_usage,
        hints=tuple(hint_actions(payload)) if HINTS in payload else (),
        in_place=in_place,
    )


def _admit_rewritten(
    dialect: Dialect,
    payload: Json,
    request: Request,
    caller: Caller,
    limits: Limits,
    rules: Rules,
    new_rid: str,
    in_place: bool,
) -> Admitted:
    """``admit`` for a request that goes to workers in another dialect (``Dialect.admitted_as``)."""
    other = dialect.admitted_as
    assert other is not None
    named = session_of(request.headers, payload, rules.sessions)
    body = {name: payload[name] for name in ROUTING if name in payload} | dialect.rewritten(payload, limits)
    sent = msgspec.structs.replace(request, body=orjson.dumps(body), target=other.path)
    admitted = admit(other, body, sent, caller, limits, rules, new_rid, in_place)
    return msgspec.structs.replace(
        admitted,
        dialect=dialect,
        sent=msgspec.structs.replace(admitted.sent, translation=dialect.answers(payload, limits)),
        session=None if named is None else caller.scope + named,
    )


def admit_hint(payload: Json, caller: Caller, limits: Limits, dialect: Dialect | None = None) -> AdmittedHint:
    """Check an advisory request.

    Args:
        dialect: of a generation request that is only a hint (``Dialect.only_warms``); None for the body of
            ``/v1/advisory``.

    Raises:
        RequestRefused: 400, naming the field.
    """
    check_reserved(payload, caller, dialect)
    priority = priority_of(payload, caller)
    if dialect is None:
        advisory = parse_advisory(payload, limits)
    else:
        advisory = advisory_of(dialect, payload, limits)
    if advisory.job is not None and caller.salt is not None:
        advisory = dataclasses.replace(advisory, job=with_salt(advisory.job, caller))
    return AdmittedHint(advisory, priority)


# -- refusals ----------------------------------------------------------------------------------------


def check_reserved(payload: Json, caller: Caller, dialect: Dialect | None) -> None:
    """Refuse fields that a tenant, or any client, must not choose.

    Args:
        dialect: None for the body of an advisory request.

    Raises:
        RequestRefused: 400, naming the field.
    """
    if dialect is not None and plain(payload, dialect):
        return
    for holder in (payload, *_each(payload.get("sampling_params"))):
        for custom in _each(holder.get("custom_params")):
            if RESUME in custom:
                raise RequestRefused(
                    f"custom_params.{RESUME} is set by the router and cannot be chosen",
                    param="custom_params",
                    code="reserved_field",
                )
    for name, why in forbidden(payload, dialect, tenant=caller.tenant is not None, trusted=caller.trusted):
        raise RequestRefused(f"{name} {why}", param=name, code="reserved_field")
    if caller.tenant is None:
        return
    for name in SCOPED:
        value = payload.get(name)
        items = value if isinstance(value, list) else [value]
        if any(item is not None and not isinstance(item, str) for item in items):
            raise RequestRefused(
                f"{name} must be a string or an array of strings", param=name, code="invalid_type"
            )


def cannot_be_kept_apart(path: str) -> RequestRefused:
    """The answer to a tenant whose prompts would be cached under no name of the tenant's own."""
    return RequestRefused(
        f"no server here keeps prompts of several tenants apart at {path}: SGLang takes no cache_salt there. "
        "Use a key of a tenant with isolated = false",
        status=403,
        kind="permission_error",
        code="not_kept_apart",
    )


def _each(value: Any) -> list[Json]:
    """The objects that a field holds: it may be one, or an array with one for each prompt."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]


def priority_of(payload: Json, caller: Caller) -> int:
    """The priority of a request: its own, no higher than its key's.

    Raises:
        RequestRefused: it is no integer, or higher than the key allows.
    """
    asked = take_int(payload, "priority")
    if asked is None and "nvext" in payload:
        asked = agent_priority(payload)
        if asked is not None and caller.priority is not None:
            asked = min(asked, caller.priority)
    if caller.priority is None:
        return asked or 0
    if asked is None:
        return caller.priority
    if asked > caller.priority:
        raise RequestRefused(
            f"priority must be at most {caller.priority}, not {asked}", param="priority", code="out_of_range"
        )
    return asked


# -- whose it is --------------------------------------------------------------------------------------


def with_salt(job: Job, caller: Caller) -> Job:
    """The job with the tenant's salt in the namespace of every prompt."""
    if caller.salt is None:
        return job
    prompts = tuple(
        msgspec.structs.replace(prompt, namespace=(*prompt.namespace[:2], caller.salt))
        for prompt in job.prompts
    )
    return msgspec.structs.replace(job, prompts=prompts)


def rids_of(payload: Json, job: Job) -> tuple[str, ...]:
    """The names by which the worker can abort the request, or one prompt of it. SGLang numbers the prompts
    of a batch that has one name, and gives each of several choices a name of its own."""
    value = payload.get("rid")
    if value is None or job.choices != 1:
        return ()
    if isinstance(value, str) and job.batch:
        return tuple(f"{value}_{index}" for index in range(len(job.prompts))) if value else ()
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, str) and item)


def check_rid(payload: Json, job: Job) -> None:
    """Refuse names that do not fit the prompts of a request.

    Raises:
        RequestRefused: 400, naming ``rid``.
    """
    value = payload.get("rid")
    if value is None or isinstance(value, str):
        check_name(value or "", "rid")
        return
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise RequestRefused("rid must be a string or an array of strings", param="rid", code="invalid_type")
    if not job.batch:
        raise RequestRefused(
            "rid is an array, but there is only one prompt; give one string", param="rid", code="invalid_type"
        )
    if len(value) != len(job.prompts):
        raise RequestRefused(
            f"rid has {len(value)} elements for {len(job.prompts)} prompts",
            param="rid",
            code="invalid_length",
        )
    for index, item in enumerate(value):
        check_name(item, f"rid[{index}]")


def _given_rid(payload: Json) -> str:
    value = payload.get("rid")
    return value if isinstance(value, str) else ""


def _one_name(job: Job, payload: Json, new_rid: str) -> str:
    """The worker's name for a single request; empty where the worker makes several of it."""
    given = payload.get("rid")
    if job.choices != 1 or job.batch or isinstance(given, list):
        return ""
    return given if isinstance(given, str) and given else new_rid


# -- what reaches a worker ------------------------------------------------------------------------------


def additions(payload: Json, caller: Caller) -> Json:
    """Fields to be put into a tenant's body, in place of those of the same name."""
    fields: Json = {}
    if caller.tenant is None:
        return fields
    if caller.salt is not None:
        fields["cache_salt"] = caller.salt
    for name in SCOPED:
        value = payload.get(name)
        if isinstance(value, str):
            fields[name] = caller.scope + value
        elif isinstance(value, list):
            fields[name] = [None if item is None else caller.scope + item for item in value]
    if isinstance(session := payload.get("session_params"), dict):
        fields["session_params"] = session | {
            name: _scoped(session[name], caller.scope)
            for name in ("id", "rid")
            if isinstance(session.get(name), str)
        }
    return fields


def _scoped(name: str, scope: str) -> str:
    """A name with the tenant's prefix. Answers have it already: a client may send a name from an answer."""
    return name if name.startswith(scope) else scope + name


def judged(body: bytes, payload: Json, caller: Caller, dialect: Dialect) -> bytes:
    """The body without the fields that must not reach a server. As it came where there are none.

    Args:
        payload: the body, parsed.
    """
    left_out = unjudged(payload, dialect, tenant=caller.tenant is not None, trusted=caller.trusted)
    if not left_out:
        return body
    return orjson.dumps({name: value for name, value in payload.items() if name not in left_out})


def _served(payload: Json, limits: Limits) -> str | None:
    """The name under which the model is served, for a request whose model is ``default``."""
    base, colon, adapter = (payload.get("model") or "").partition(":")
    return limits.served_name + colon + adapter if base == DEFAULT_MODEL else None


def through(dialect: Dialect, job: Job, fields: Json, in_place: bool) -> Sent:
    """A request in the dialect in which servers take the router's fields (``Dialect.via``).

    Args:
        fields: put into the body.
        in_place: see ``Chat.seen``.
    """
    assert dialect.via is not None
    body, translation = dialect.translate(job, fields, in_place)
    return Sent(body, dialect.via.path, dialect.via, translation)


def splice(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Put fields into a JSON object without parsing it; they win over fields of the same name.

    Of equal keys every JSON parser at hand takes the last (orjson in the router, ``json`` and pydantic in
    SGLang), so the value at the end counts; the router has checked the parsed body besides.

    Args:
        body: a JSON object that is not empty.
    """
    if not fields:
        return body
    end = body.rstrip()
    if not end.endswith(b"}"):
        raise ValueError("not a JSON object")
    # Joined in one go: each step of a sum would copy the whole body, which may be long.
    return b"".join((memoryview(end)[:-1], b",", memoryview(orjson.dumps(fields))[1:]))


def put_in_front(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Put defaults into a JSON object: fields of the same name in it win."""
    return b"".join((orjson.dumps(fields)[:-1], b",", memoryview(body.lstrip())[1:]))

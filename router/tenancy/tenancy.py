"""What a tenant's request may say, and what the router puts into it. Pure functions on bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from sglang_ext.router.api.validation import Job, Json, take_int
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.request_fields import FIELDS, Who, forbidden, unjudged
from sglang_ext.router.tenancy.tenants import Caller

RESUME = "sglang_ext_resume"
"""Of ``custom_params``: the ticket with which a request resumes at an instance (``engine/resume.py``). Worth
nothing without a state that the instance was sent for it; refused here so that the client is told why."""
SCOPED = tuple(name for name, who in FIELDS.items() if who is Who.SCOPED)
"""Names that clients choose and servers look up; each tenant has its own."""
STEERING_HEADERS = frozenset({
    "x-override-rid", "x-override-bootstrap-host", "x-override-bootstrap-port", "x-override-bootstrap-room",
    "x-override-conversation-id", "x-override-routed-dp-rank", "x-override-disagg-prefill-dp-rank",
    "x-override-priority", "x-data-parallel-rank", "x-body-compressed",
})  # fmt: skip
"""Headers that SGLang lets go before the fields of the same names, or that change how it reads the body: what
the router has checked and put in would not be what counts. Nobody's are passed on."""
TENANT_HEADERS = frozenset({"x-smg-routing-key"})
"""Names that SGLang schedules by, shared by all who use a server: not passed on for tenants."""


def check_reserved(payload: Json, caller: Caller) -> None:
    """Refuse what a tenant must not choose, and what nobody may.

    Raises:
        RequestRefused: 400, naming the field.
    """
    for holder in (payload, *_each(payload.get("sampling_params"))):
        for custom in _each(holder.get("custom_params")):
            if RESUME in custom:
                raise RequestRefused(
                    f"custom_params.{RESUME} is set by the router and cannot be chosen",
                    param="custom_params",
                    code="reserved_field",
                )
    for name, why in forbidden(payload, tenant=caller.tenant is not None, trusted=caller.trusted):
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


def _each(value: Any) -> list[Json]:
    """The objects that a field holds: it may be one, or an array with one for each prompt."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]


def priority_of(payload: Json, caller: Caller) -> int:
    """The priority of a request: its own, no higher than its key's.

    Raises:
        RequestRefused: it is no integer, or higher than the key allows.
    """
    asked = take_int(payload, "priority")
    if caller.priority is None:
        return asked or 0
    if asked is None:
        return caller.priority
    if asked > caller.priority:
        raise RequestRefused(
            f"priority must be at most {caller.priority}, not {asked}", param="priority", code="out_of_range"
        )
    return asked


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
    return fields


def with_salt(job: Job, caller: Caller) -> Job:
    """The job with the tenant's salt in the namespace of every prompt."""
    if caller.salt is None:
        return job
    prompts = tuple(
        msgspec.structs.replace(prompt, namespace=(*prompt.namespace[:2], caller.salt))
        for prompt in job.prompts
    )
    return msgspec.structs.replace(job, prompts=prompts)


def judged(body: bytes, payload: Json, caller: Caller) -> bytes:
    """The body without the fields that must not reach a server. As it came where there are none.

    Args:
        payload: the body, parsed.
    """
    left_out = unjudged(payload, tenant=caller.tenant is not None, trusted=caller.trusted)
    if not left_out:
        return body
    return orjson.dumps({name: value for name, value in payload.items() if name not in left_out})


def rids_of(payload: Json) -> tuple[str, ...]:
    """What the client calls the request at the worker."""
    value = payload.get("rid")
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, str) and item)


def splice(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Put fields into a JSON object without parsing it; they win over fields of the same name.

    Of equal keys every JSON parser at hand takes the last (orjson in the router, ``json`` and pydantic in
    SGLang), so what stands at the end is what counts; the router has checked the parsed body besides.

    Args:
        body: a JSON object that is not empty.
    """
    if not fields:
        return body
    end = body.rstrip()
    if not end.endswith(b"}"):
        raise ValueError("not a JSON object")
    return end[:-1] + b"," + orjson.dumps(fields)[1:]


def put_in_front(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Put defaults into a JSON object: fields of the same name in it win."""
    return orjson.dumps(fields)[:-1] + b"," + body.lstrip()[1:]

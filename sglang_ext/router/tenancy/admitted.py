"""What comes of admitting a request: what was decided of it, and what a worker is sent."""

from __future__ import annotations

import msgspec

from sglang_ext.router.api.dialect import Dialect, Translation
from sglang_ext.router.api.hints import Advisory
from sglang_ext.router.api.job import Job
from sglang_ext.router.api.validation import Json


class Rules(msgspec.Struct, frozen=True):
    """What the router was told about requests: fields of ``RouterConfig``."""

    cache_details: bool = True
    session_header: str = ""
    session_field: str = ""
    session_cookie: str = ""
    """Where a request names its session: the first of these that does. An empty name is not looked for."""


class Sent(msgspec.Struct, frozen=True):
    """What a worker is sent for a request."""

    body: bytes
    """As it came, unless something had to be put in or left out."""
    target: str
    """Path and query at the worker."""
    dialect: Dialect
    """Of the body, and of the worker's answer."""
    translation: Translation | None = None
    """Turns the worker's answer into the client's dialect, where that is another one."""


class Admitted(msgspec.Struct, frozen=True):
    """A generation request that may be served, with all that was decided of it before its prompt is known."""

    dialect: Dialect
    """In which the client asks, and is answered."""
    job: Job
    """With the tenant's salt in the namespace of every prompt."""
    sent: Sent
    priority: int = 0
    session: str | None = None
    """Its session, under a name that no other tenant's has."""
    rid: str = ""
    """What a worker is to call the request, so that it can be spoken of; empty for a batch."""
    called: str = ""
    """The client's ``rid`` of the whole request, where it has one."""
    rids: tuple[str, ...] = ()
    """What the client calls it at the worker."""
    tells_cached: bool = False
    """The worker was asked what it found cached; an answer that says nothing of it found nothing."""
    hides_usage: bool = False
    """It was the router that asked; the client's stream must not show it."""
    hints: tuple[Json, ...] = ()
    """Bodies of advisory requests that it carries beside itself, not checked yet."""
    in_place: bool = False
    """The model sees system messages in the midst of a conversation."""


class AdmittedHint(msgspec.Struct, frozen=True):
    """An advisory request that may be taken."""

    advisory: Advisory
    """With the tenant's salt in the namespace of its prompt."""
    priority: int

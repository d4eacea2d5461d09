"""The results of admitting a request: the decisions, and the request to send to a worker."""

from __future__ import annotations

import msgspec

from sglang_ext.router.api.dialect import Dialect, Translation
from sglang_ext.router.api.hints import Advisory, HintAction
from sglang_ext.router.api.job import Job
from sglang_ext.router.clients.rules import SessionRow


class Rules(msgspec.Struct, frozen=True):
    """The rules for requests: fields of ``RouterConfig``."""

    cache_details: bool = True
    sessions: tuple[SessionRow, ...] = ()
    """Where a request names its session: the first of these that does."""


class Sent(msgspec.Struct, frozen=True):
    """The request as sent to a worker."""

    body: bytes
    """As it came, unless something had to be put in or left out."""
    target: str
    """Path and query at the worker."""
    dialect: Dialect
    """Of the body, and of the worker's answer."""
    translation: Translation | None = None
    """Turns the worker's answer into the client's dialect, where that is another one."""


class Admitted(msgspec.Struct, frozen=True):
    """A generation request that may be served, with the decisions made before its prompt is encoded."""

    dialect: Dialect
    """In which the client asks, and is answered."""
    job: Job
    """With the tenant's salt in the namespace of every prompt."""
    sent: Sent
    priority: int = 0
    session: str | None = None
    """Its session, under a name that no other tenant's has."""
    rid: str = ""
    """The worker's name for the request, for aborts and logs; empty for a batch."""
    called: str = ""
    """The client's ``rid`` of the whole request, where it has one."""
    rids: tuple[str, ...] = ()
    """The client's names for it at the worker."""
    tells_cached: bool = False
    """The worker was asked for its cached tokens; an answer without them found none."""
    hides_usage: bool = False
    """It was the router that asked; the client's stream must not show it."""
    hints: tuple[HintAction, ...] = ()
    """Hints that it carries beside itself, not checked yet."""
    in_place: bool = False
    """The model sees system messages in the midst of a conversation."""


class AdmittedHint(msgspec.Struct, frozen=True):
    """An advisory request that may be taken."""

    advisory: Advisory
    """With the tenant's salt in the namespace of its prompt."""
    priority: int

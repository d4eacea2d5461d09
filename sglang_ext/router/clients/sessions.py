"""The names of clients' sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any

from sglang_ext.router.api.validation import MAX_NAME_CHARACTERS, Json
from sglang_ext.router.clients.rules import SessionRow

MAX_SESSION_CHARS = MAX_NAME_CHARACTERS
"""Of a session's name; a longer one is cut: it is a key, and its length is the client's choice."""


def session_of(headers: Mapping[str, str], payload: Json, rows: Sequence[SessionRow]) -> str | None:
    """The session's name by the first row that finds one, or None.

    Args:
        headers: names in lower case.
        payload: the request's JSON object.
    """
    for row in rows:
        if row.header:
            named = headers.get(row.header)
        elif row.field:
            named = _in_body(payload, row.field)
        else:
            named = _in_cookie(headers.get("cookie"), row.cookie)
        if named and row.match is not None:
            found = row.match.search(named[: 4 * MAX_SESSION_CHARS])
            named = found.group(1) if found is not None else None
        if named:
            agent = headers.get(row.agent) if row.agent else None
            return named[:MAX_SESSION_CHARS] if not agent else f"{named}/{agent}"[:MAX_SESSION_CHARS]
    return None


def _in_body(payload: Json, path: tuple[str, ...]) -> str | None:
    value: Any = payload
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    # SGLang's own session_params is an object with an id.
    if isinstance(value, Mapping):
        value = value.get("id")
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    return None


def _in_cookie(text: str | None, name: str) -> str | None:
    if not text:
        return None
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(text)
    except CookieError:
        return None
    return jar[name].value if name in jar else None

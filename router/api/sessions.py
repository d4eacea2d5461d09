"""Which session a request belongs to: by header, body field or cookie, whichever names one first."""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

MAX_CHARS = 512
"""Of a session's name; a longer one is cut: it is a key, and its length is the client's choice."""


def session_of(
    headers: Mapping[str, str],
    payload: Mapping[str, object],
    *,
    header: str = "",
    field: str = "",
    cookie: str = "",
) -> str | None:
    """The session's name, or None.

    Args:
        headers: names in lower case.
        payload: the request's JSON object.
        header, field, cookie: where to look; an empty name is not looked for.
    """
    if header and (named := headers.get(header.lower())):
        return named[:MAX_CHARS]
    if field:
        value = payload.get(field)
        # SGLang's own session_params is an object with an id.
        if isinstance(value, Mapping):
            value = value.get("id")
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)[:MAX_CHARS]
    if cookie and (text := headers.get("cookie")):
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(text)
        except CookieError:
            return None
        if cookie in jar and jar[cookie].value:
            return jar[cookie].value[:MAX_CHARS]
    return None

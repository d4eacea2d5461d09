"""A router's address, and the body of a hint: of both ways to call a router, with and without waiting."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit


class Address:
    """Where a router is, and the headers of all calls.

    Args:
        url: ``http://host:port``, or with ``https`` and a path in front of the router's own.
        api_key: where the router asks for one.

    Raises:
        ValueError: ``url`` is none.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not of the form http://host:port")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self.path = parts.path.rstrip("/")
        self.headers = {"content-type": "application/json"}
        if api_key:
            self.headers["authorization"] = f"Bearer {api_key}"

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection, which the first request opens."""
        return self._kind(self._host, self._port, timeout=timeout_s)


def hint_fields(
    session: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    text: str | None,
    input_ids: Sequence[int] | None,
    earliest_s: float,
    ttl_s: float | None,
    priority: int | None,
) -> dict[str, Any]:
    """The JSON body of a hint."""
    fields = {
        "session": session,
        "messages": None if messages is None else list(messages),
        "text": text,
        "input_ids": None if input_ids is None else list(input_ids),
        "earliest_s": earliest_s or None,
        "ttl_s": ttl_s,
        "priority": priority,
    }
    return {name: value for name, value in fields.items() if value is not None}
